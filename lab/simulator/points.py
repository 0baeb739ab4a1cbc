"""The operating points of a traced job: what a planner makes of it, limit by limit.

Jobs that move memory at the same time share the link. So each point is planned twice. Once it has
the whole link, for a job that is the only one to move. Once it has its part of it, where all jobs
of the simulation may move (``OperatingPoint.among``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from zico.base.errors import TraceError
from zico.lab.simulator.device_models import device_model_named
from zico.lab.simulator.saving import OperatingPoint
from zico.planning.saving.registry import MODES, save_planner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.lab.simulator.jobs_file import PointsOf
    from zico.planning.saving.mixed import SavePlanner
    from zico.planning.saving.problem import SwapProblem
    from zico.planning.saving.recomputation import Graph
    from zico.trace.events import Trace

NONE, SWAP, PAGE, AUTO = MODES
PLANNER_OF = {SWAP: "flow", AUTO: "zico"}
"""What plans for a job of that mode."""
LATENCY_NS = 10_000
"""Of a transfer: AutoSwap's fit to its machine is 8 us out and 12 us back (arXiv 1903.06631)."""
_LIMITS = 8
_WORK_S = 2.0  # processor time for each limit


def points_on(device: str, save: str) -> PointsOf | None:
    """Return ``points_of`` with the link of a device model of that name.

    Raises:
        ConfigError: There is no such device model.
    """
    return points_of(save, device_model_named(device).copy_bytes_per_s)


def points_of(save: str, copy_bytes_per_s: float) -> PointsOf | None:
    """Return what makes points of a trace; ``None`` where jobs hold all that they want.

    Args:
        save: One of ``SAVES`` of ``zico.planning.saving.registry``.
        copy_bytes_per_s: Of the link, each way.
    """
    if save == NONE:
        return None

    def points(trace: Trace, jobs: int) -> tuple[OperatingPoint, ...]:
        from zico.lab.simulator.paging_simulation import by_paging

        planned = () if save == PAGE else by_planner(PLANNER_OF.get(save, save), trace, copy_bytes_per_s, jobs)
        paged = by_paging(trace, copy_bytes_per_s, jobs) if save in {PAGE, AUTO} else ()
        return planned + paged

    return points


def sharing(jobs: int) -> tuple[int, ...]:
    """Return among how many jobs points are planned to share the link, where so many are simulated."""
    return (1, jobs) if jobs > 1 else (1,)


def by_planner(name: str, trace: Trace, copy_bytes_per_s: float, jobs: int) -> tuple[OperatingPoint, ...]:
    """Return a traced job's points by a planner, in bytes; nothing if the trace has no accesses.

    Takes seconds: a plan for each limit.

    Args:
        name: The planner's.
        trace: The trace.
        copy_bytes_per_s: Of the link, each way.
        jobs: So many share the device.
    """
    return tuple(itertools.chain.from_iterable(_planned(name, trace, copy_bytes_per_s, jobs)))


def _planned(name: str, trace: Trace, copy_bytes_per_s: float, jobs: int) -> Iterator[list[OperatingPoint]]:
    from zico.lab.saving.files import swap_iteration
    from zico.lab.saving.graphs import graph_of
    from zico.planning.saving.problem import Link

    for among in sharing(jobs):
        link = Link(copy_bytes_per_s / among, LATENCY_NS)
        try:
            problem = swap_iteration(trace, out=link, back=link).problem
        except TraceError:
            return
        costs = curve(problem, graph_of(problem), save_planner(name), _LIMITS, _WORK_S)
        how = SWAP if name == PLANNER_OF[SWAP] else name
        yield [OperatingPoint(how, limit, problem.period_ns + overhead_ns, among) for limit, overhead_ns in costs]


def curve(
    problem: SwapProblem, graph: Graph, planner: SavePlanner, points: int, work_s: float
) -> list[tuple[int, int]]:
    """Return what memory costs: pairs of limit and overhead in ns, from the peak down to the least limit that was met.

    The overhead never falls as the limit does: a plan for a lower limit serves a higher one, too.

    Args:
        problem: Its own limit is not looked at.
        graph: Its operations, as far as they can run again.
        planner: The planner.
        points: How many limits, evenly between the peak and what operations need at once.
        work_s: Processor time for each limit, in seconds.
    """
    from zico.lab.saving.combined import replayed
    from zico.planning.packing.problem import NoPlan
    from zico.planning.saving.clock import by_processor_time

    found: list[tuple[int, int]] = []
    step_bytes = (problem.peak_bytes - problem.least_bytes) / max(points - 1, 1)
    for number in range(points):
        limit = int(problem.least_bytes + number * step_bytes)
        tried = dataclasses.replace(problem, limit_bytes=limit)
        with by_processor_time():
            plan = planner.plan(tried, graph, work_s)
        if isinstance(plan, NoPlan):
            continue
        result = replayed(tried, graph, plan)
        if result.is_good:
            overhead_ns = math.ceil(result.duration_ns) - problem.period_ns
            found.append((limit, min([overhead_ns, *(cost for _, cost in found)])))
    return found[::-1]
