"""Our planner of swaps: the cheapest flow of parts, scheduled, replayed, and the best of some tries.

Theory of operation
    ``network.py`` chooses how many parts of each gap leave so that the waits are least, ``parts.py`` gives each part
    its time, and the compiled replay says what that costs. Small parts hold little memory while they move, but pay a
    latency each; how many latencies joining saves is not known beforehand. So parts of several sizes and several
    expectations are tried, and the plan with the least overhead stays.

    A part is so many whole regions, so that what leaves gives regions back. Without parts, whole tensors leave: those of
    which the flow takes most, and then single ones come, go or change places as long as the replay says that it helps.

Known limitations
    * A plan is not proved best: ``bound.py`` says how far it may be from it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.plan import NoPlan, Reason
from zico.planners.swap.fast import Replayer
from zico.planners.swap.fluid import Rounding, fluid_of
from zico.planners.swap.network import cut_open, shares_within
from zico.planners.swap.plan import SwapPlan, no_swaps
from zico.planners.swap.parts import Chosen, schedule
from zico.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.planners.swap.problem import SwapProblem

_MOST_SLOTS = 4000  # parts that a link can move in an iteration; smaller parts cost time and gain nothing
_PIECE = 0.5  # of the time that a part takes: how finely operations above the limit are looked at
_SIZES = 4  # each part is twice the one before it
_SAVED = (0.0, 0.5, 0.9)
_STEPS = 4000  # of the peak: how finely limits are looked for


@dataclasses.dataclass(frozen=True)
class BetterOptions:
    """How the planner searches."""

    region_bytes: int = 2 * MIB
    """Parts are multiples of it. Default: what CUDA maps at once."""
    least_bytes: int = MIB
    """Smaller tensors stay."""
    most_segments: int = 2000
    """In how many pieces an iteration is looked at."""


class Better:
    """Flow, schedule, replay."""

    name = "better"

    def __init__(self, options: BetterOptions | None = None) -> None:
        """Search with these options."""
        self._options = options or BetterOptions()

    def plan(self, problem: SwapProblem, deadline_s: float) -> SwapPlan | NoPlan:
        """Return the plan of least overhead that was found.

        Returns:
            A plan within the limit; one without swaps if there is no limit or the peak is below it. ``INFEASIBLE`` if
            an operation needs more at once; ``NOT_FOUND`` or ``OUT_OF_TIME`` if no plan that was tried keeps the limit.
        """
        began_s = time.monotonic()
        limit = problem.limit_bytes
        if limit is None or problem.peak_bytes <= limit:
            return no_swaps(self.name, time.monotonic() - began_s)
        if limit < problem.least_bytes:
            what = f"an operation needs {problem.least_bytes} bytes at once, the limit is {limit}"
            return NoPlan(Reason.INFEASIBLE, self.name, time.monotonic() - began_s, what)
        best: tuple[float, int, SwapPlan] | None = None
        replayer, late = Replayer(problem), False
        for plan in self._tries(problem, limit):
            replayed = replayer.replay(plan)
            cost = (replayed.overhead, plan.moved_bytes)
            if replayed.is_good and (best is None or cost < best[:2]):
                best = (*cost, plan)
            late = time.monotonic() - began_s > deadline_s
            if late or (best is not None and best[0] <= 0):
                break
        elapsed_s = time.monotonic() - began_s
        if best is None:
            reason = Reason.OUT_OF_TIME if late else Reason.NOT_FOUND
            return NoPlan(reason, self.name, elapsed_s, f"nothing tried stays within {limit} bytes")
        return dataclasses.replace(best[2], elapsed_s=elapsed_s, optimal=best[0] <= 0)

    def _tries(self, problem: SwapProblem, limit: int) -> Iterator[SwapPlan]:
        """Yield plans, those first that are best most often."""
        options = self._options
        fluid = fluid_of(problem, limit, options.most_segments, Rounding.INWARD, options.least_bytes)
        if not len(fluid.access):
            return
        links = problem.out, problem.back
        slot_bytes = int(max(link.bandwidth for link in links) * problem.period_ns / 1e9 / _MOST_SLOTS)
        smallest = max(1, -(-slot_bytes // options.region_bytes))
        for saved in _SAVED:
            for size in range(_SIZES):
                part_bytes = (smallest << size) * options.region_bytes
                line = cut_open(fluid, max(int(problem.out.transfer_ns(part_bytes) * _PIECE), 1))
                shares = shares_within(line, part_bytes, limit, links, saved)
                if shares is not None:
                    sizes = np.full(len(shares.parts), part_bytes)
                    yield schedule(problem, line, Chosen(shares.parts, sizes, shares.wait_ns, saved), self.name)


def least_limit(
    problem: SwapProblem, planner: Better, overhead: float = 0.0, deadline_s: float = 60.0
) -> tuple[int, SwapPlan]:
    """Return the lowest limit found at which the planner's overhead is at most so much, and its plan.

    Looks at limits by bisection; the problem's own is not looked at. Waits for nothing but the planner.
    """
    until_s = time.monotonic() + deadline_s
    low, high, best = problem.least_bytes - 1, problem.peak_bytes, no_swaps(planner.name)
    while high - low > max(problem.peak_bytes // _STEPS, 1) and time.monotonic() < until_s:
        limit = (low + high) // 2
        tried = dataclasses.replace(problem, limit_bytes=limit)
        plan = planner.plan(tried, until_s - time.monotonic())
        if isinstance(plan, SwapPlan) and Replayer(tried).replay(plan).overhead <= overhead:
            high, best = limit, plan
        else:
            low = limit
    return high, best


def curve(
    problem: SwapProblem, planner: Better | None = None, points: int = 16, deadline_s: float = 5.0
) -> list[tuple[int, int]]:
    """Return what memory costs: pairs of limit and overhead in ns, from the peak down to the least limit that was met.

    The overhead never falls as the limit does: a plan for a lower limit serves a higher one, too.

    Args:
        problem: Its own limit is not looked at.
        planner: By default ours with its defaults.
        points: How many limits, evenly between the peak and what operations need at once.
        deadline_s: For each limit.
    """
    planner = planner or Better()
    found: list[tuple[int, int]] = []
    for limit in np.linspace(problem.least_bytes, problem.peak_bytes, points).astype(int).tolist():
        tried = dataclasses.replace(problem, limit_bytes=limit)
        plan = planner.plan(tried, deadline_s)
        if isinstance(plan, SwapPlan):
            overhead_ns = int(np.ceil(Replayer(tried).replay(plan).duration_ns)) - problem.period_ns
            found.append((limit, min([overhead_ns, *(cost for _, cost in found)])))
    return found[::-1]
