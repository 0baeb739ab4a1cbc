"""Tensors that leave and come back by operation, above the heap: what, when, and who moves them."""
