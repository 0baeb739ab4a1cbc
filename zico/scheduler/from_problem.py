"""A profile from a plan's or a trace's curve of regions, as the job's own recording would have made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.errors import ProblemError
from zico.scheduler.state import Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planners.problem import Problem

MOST_BINS = 256
_PLAN_S = 2.0


def held_in_regions(problem: Problem, region_bytes: int) -> NDArray[np.int64]:
    """Return the regions held at each tick, as a plan for regions lays the tensors out.

    Raises:
        ProblemError: There is no such plan; the message says why.
    """
    from zico.planners.compare import warm
    from zico.planners.judge import held_regions
    from zico.planners.plan import Plan
    from zico.planners.regions import Regions

    planner = Regions(region_bytes)
    warm(planner)
    plan = planner.plan(problem, _PLAN_S)
    if not isinstance(plan, Plan):
        raise ProblemError(f"{plan.reason.value}: {plan.detail}")
    return held_regions(problem, plan, region_bytes)


def profile_of(held: NDArray[np.int64], tick_ns: NDArray[np.int64]) -> Profile:
    """Return the profile of one iteration: bins of equally many ticks, each with the most regions held in it.

    Args:
        held: Regions at each tick, of which each is an allocation or a free.
        tick_ns: When each tick begins, rising, and when the last one ends.

    Raises:
        ProblemError: There are no ticks, their times do not fit them or fall, or a level is negative.
    """
    held, tick_ns = np.asarray(held, np.int64), np.asarray(tick_ns, np.int64)
    n = len(held)
    if n == 0 or len(tick_ns) != n + 1:
        raise ProblemError(f"{n} ticks with {len(tick_ns)} times: give one time for each tick, and the end of the last")
    if (np.diff(tick_ns) < 0).any() or (held < 0).any():
        raise ProblemError("a tick ends before it begins, or holds less than nothing: give rising times and counts")
    shift = max(0, int(n - 1).bit_length() - MOST_BINS.bit_length() + 1)
    first = np.arange(0, n, 1 << shift)
    times = tick_ns - tick_ns[0]
    return Profile(
        held=tuple(np.maximum.reduceat(held, first).tolist()),
        t_ns=tuple(times[first].tolist()),
        duration_ns=int(times[-1]),
        shift=shift,
        n_events=n,
    )
