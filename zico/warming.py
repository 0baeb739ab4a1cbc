"""Compile what jobs and brokers call before they do: minutes the first time, nothing where the cache has it."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

_DEVICE_MODULES = (
    ("zico.heap.python_hooks",),
    (
        *("zico.device_timeline", "zico.heap.device", "zico.heap.managed", "zico.heap.memory_queries"),
        *("zico.heap.pinned", "zico.heap.stream_hooks", "zico.lookup"),
    ),
)
"""What only jobs on a GPU call, compiled by being imported: what takes longest, and the rest."""


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
        _warm_isolation()
    if paging:
        _warm_paging()
    if "cuda" in kinds:
        for names in _DEVICE_MODULES:
            _import(names)


def warm_side_by_side() -> None:
    """Put into the cache what any job and any broker calls: first what they share, then the rest on all processors.

    Raises:
        Exception: The first one that a part raised.
    """
    from zico.heap import warming
    from zico.tiers import warming as tiers

    warming.warm()
    # Forked, the parts have what is compiled so far.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
        parts = [processes.submit(_import, names) for names in _DEVICE_MODULES]
        parts += [processes.submit(part) for part in (_warm_policies, _warm_paging, _warm_isolation, tiers.warm)]
        for part in parts:
            part.result()


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)


def _warm_isolation() -> None:
    _import(("zico.heap.isolation",))


def _warm_paging() -> None:
    from zico.errors import DriverError
    from zico.heap import warming

    with contextlib.suppress(DriverError):
        warming.warm_paging()


def _warm_policies() -> None:
    from zico.scheduler.planner import rehearse
    from zico.scheduler.policies import REAL, policy_named

    for name in REAL:
        policy_named(name)
    rehearse()


if __name__ == "__main__":
    warm_side_by_side()
