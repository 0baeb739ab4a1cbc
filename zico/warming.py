"""Compile what jobs call before they call it: minutes the first time, nothing when the machine's cache has it."""

from __future__ import annotations


def warm(*kinds: str, isolate: bool = False) -> None:
    """Put the machine code that jobs call into the cache on disk.

    Args:
        kinds: Of devices: ``host``, ``cuda``. What both share is compiled in any case.
        isolate: Also what jobs call in a pool that isolates them.
    """
    from zico.heap import warming

    warming.warm()
    if isolate:
        import zico.heap.isolation  # compiled by being imported, as all that follows
    if "cuda" in kinds:
        import zico.device_timeline
        import zico.heap.device
        import zico.heap.memory_queries
        import zico.heap.python_hooks
        import zico.heap.stream_hooks
        import zico.lookup  # noqa: F401


if __name__ == "__main__":
    warm("host", "cuda", isolate=True)
