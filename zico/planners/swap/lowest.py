"""The lowest limit that a planner keeps at no more than some overhead."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from zico.planners.plan import NoPlan
from zico.planners.swap.fast import Replayer
from zico.planners.swap.plan import no_swaps

if TYPE_CHECKING:
    from zico.planners.swap.plan import SwapPlan, SwapPlanner
    from zico.planners.swap.problem import SwapProblem

_FIRST = 64  # the search begins so near to a bound, by share of what lies above it
STEPS = 512
"""By default the search ends when it knows the limit to a 512th of the peak, 0.2 %."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lowest:
    """A limit, and the plan that keeps it."""

    limit_bytes: int
    plan: SwapPlan


def lowest_limit(
    problem: SwapProblem,
    planner: SwapPlanner,
    overhead: float,
    deadline_s: float,
    steps: int = STEPS,
    bound_bytes: int = 0,
) -> Lowest:
    """Return the lowest limit found by bisection at which the planner's plan costs no more than ``overhead``.

    Bisection takes for granted that a limit that is too low stays so below; what it finds is kept, but with a planner
    that is not monotone a lower one may exist.

    Args:
        problem: Its own limit does not count.
        planner: Whom to ask, about nine times.
        overhead: The share by which an iteration may be longer.
        deadline_s: Seconds for all; the planner is told what is left.
        steps: The limit is found to this fraction of the peak.
        bound_bytes: No limit below it is looked at; from ``bound.least_peak``, say.
    """
    began_s = time.monotonic()
    replayer = Replayer(problem)
    low, found = max(problem.least_bytes, bound_bytes), Lowest(problem.peak_bytes, no_swaps(planner.name))
    step = max(problem.peak_bytes // steps, 1)
    reach = max((problem.peak_bytes - low) // _FIRST, step) if bound_bytes else problem.peak_bytes
    while found.limit_bytes - low > step:
        left_s = deadline_s - (time.monotonic() - began_s)
        if left_s <= 0:
            break
        middle = min((low + found.limit_bytes) // 2, low + reach)
        reach *= 2
        plan = planner.plan(dataclasses.replace(problem, limit_bytes=middle), left_s)
        if not isinstance(plan, NoPlan):
            replayed = replayer.replay(plan, middle)
            if replayed.is_good and replayed.overhead <= overhead:
                found = Lowest(min(middle, replayed.peak_bytes), plan)
                continue
        low = middle
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, elapsed_s=time.monotonic() - began_s))
