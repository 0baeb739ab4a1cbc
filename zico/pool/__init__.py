"""The pool: regions of one device's memory, their owners and fences, in shared memory."""
