"""How a traced job could go on with less: what the planner of swaps makes of it, limit by limit.

Jobs that move memory at the same time share the link. So each way is planned twice: with the whole
link, for a job that is the only one to move, and with its part of it where all jobs of the
simulation may (``OperatingPoint.among``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.errors import TraceError
from zico.scheduler.state import OperatingPoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.trace.events import Trace

LATENCY_NS = 10_000
"""Of a transfer: AutoSwap's fit to its machine is 8 us out and 12 us back (arXiv 1903.06631)."""
_LIMITS = 8
_DEADLINE_S = 2.0  # for each limit


def sharing(jobs: int) -> tuple[int, ...]:
    """Return among how many jobs ways are planned to share the link, where so many are simulated."""
    return (1, jobs) if jobs > 1 else (1,)


def by_swapping(trace: Trace, copy_bytes_per_s: float, jobs: int) -> tuple[OperatingPoint, ...]:
    """Return how a traced job goes on with less by swapping, in bytes; nothing if the trace has no accesses.

    Takes seconds: a plan of swaps for each limit.

    Args:
        trace: The trace.
        copy_bytes_per_s: Of the link, each way.
        jobs: So many share the device.
    """
    return tuple(_planned(trace, copy_bytes_per_s, jobs))


def _planned(trace: Trace, copy_bytes_per_s: float, jobs: int) -> Iterator[OperatingPoint]:
    from zico.planning.saving.files import swap_iteration
    from zico.planning.saving.flow import curve
    from zico.planning.saving.problem import Link

    for among in sharing(jobs):
        link = Link(copy_bytes_per_s / among, LATENCY_NS)
        try:
            problem = swap_iteration(trace, out=link, back=link).problem
        except TraceError:
            return
        for limit_bytes, overhead_ns in curve(problem, points=_LIMITS, deadline_s=_DEADLINE_S):
            yield OperatingPoint("swap", limit_bytes, problem.period_ns + overhead_ns, among)
