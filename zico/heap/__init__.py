"""A job's heap: tensors placed in slots of a window, by compiled code behind the framework's own allocator."""
