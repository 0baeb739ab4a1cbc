"""Compile what jobs and brokers call before they do: minutes the first time, nothing where the cache has it."""

from __future__ import annotations

import contextlib


def warm(*kinds: str, isolate: bool = False, paging: bool = False) -> None:
    """Put the machine code that jobs and brokers call into the cache on disk, and load the brokers'.

    Args:
        kinds: Of devices: ``host``, ``cuda``. What both share is compiled in any case.
        isolate: Also what jobs call in a pool that isolates them.
        paging: Also what serves the faults of jobs on the host device, where this process may have its own served.
    """
    from zico.heap import warming
    from zico.scheduler.planner import rehearse
    from zico.tiers import warming as tiers

    warming.warm()
    tiers.warm()
    rehearse()
    if isolate:
        import zico.heap.isolation  # compiled by being imported, as all that follows
    if paging:
        from zico.errors import DriverError

        with contextlib.suppress(DriverError):
            warming.warm_paging()
    if "cuda" in kinds:
        import zico.device_timeline
        import zico.heap.device
        import zico.heap.managed
        import zico.heap.memory_queries
        import zico.heap.pinned
        import zico.heap.python_hooks
        import zico.heap.stream_hooks
        import zico.lookup  # noqa: F401


if __name__ == "__main__":
    from zico.scheduler.policies import REAL, policy_named

    for name in REAL:
        policy_named(name)
    warm("host", "cuda", isolate=True, paging=True)
