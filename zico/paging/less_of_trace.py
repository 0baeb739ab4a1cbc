"""How a traced job could go on with less by paging, as the simulator has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.errors import TraceError
from zico.paging.layout import ALL, BLOCK_BYTES, TUNE
from zico.paging.simulate import Device, Paging
from zico.paging.workload import Naming, workload
from zico.planners.caching import reserved_by_caching
from zico.planners.from_trace import iteration_problem
from zico.scheduler.less_of_trace import sharing
from zico.scheduler.state import LESS_SHARES, Less

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.trace.events import Trace

_ITERATIONS = 10
"""Of which the last one counts, when the tables have been learned."""
_FEWEST_BLOCKS = 16


def by_paging(trace: Trace, copy_bytes_per_s: float, jobs: int) -> tuple[Less, ...]:
    """Return how a traced job goes on with less by paging, in bytes; nothing if the trace has no accesses.

    Args:
        trace: The trace.
        copy_bytes_per_s: Of the link, each way.
        jobs: So many share the device.
    """
    return tuple(_simulated(trace, copy_bytes_per_s, jobs))


def _simulated(trace: Trace, copy_bytes_per_s: float, jobs: int) -> Iterator[Less]:
    found = iteration_problem(trace)
    problem = found.problem
    offsets = reserved_by_caching(problem).offset_bytes
    try:
        work = workload(trace, found.life, found.iterations, found.iteration, offsets, Naming.ARGUMENTS)
    except TraceError:
        return
    if problem.tick_ns is None:
        return
    idle_ns = max(0, int(np.ptp(problem.tick_ns)) - work.compute_ns)
    for among in sharing(jobs):
        for share in LESS_SHARES:
            limit_bytes = int(share * problem.peak_live_bytes)
            if limit_bytes < _FEWEST_BLOCKS * BLOCK_BYTES:
                break
            device = Device(limit_bytes, copy_bytes_per_s / among)
            paging = Paging(work, device, ALL & ~TUNE)
            runs = [paging.iterate() for _ in range(_ITERATIONS)]
            yield Less("page", limit_bytes, runs[-1].time_ns + idle_ns, among)
