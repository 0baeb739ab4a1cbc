"""A job's heap: tensors placed in slots of a window, by compiled code behind the framework's own allocator."""


def warm() -> None:
    """Compile the jobs' functions if this machine's cache does not have them; tens of seconds the first time."""
    from zico.heap import warming

    warming.warm()
