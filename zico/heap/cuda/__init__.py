"""A job's heap on a GPU: streams, fences on the device, slabs of small tensors, managed memory."""
