"""Our planner of swaps: the cheapest flow of parts, scheduled, replayed, and the best of some tries.

Theory of operation
    ``network.py`` chooses how many parts of each gap leave so that the waits are least, ``parts.py`` gives each part
    its time, and the compiled replay says what that costs. Small parts hold little memory while they move, but pay a
    latency each; how many latencies joining saves is not known beforehand. So parts of several sizes and several
    expectations are tried, and the plan with the least overhead stays.

    A part is so many whole regions, so that what leaves gives regions back. Without parts, whole tensors leave: those
    of which the flow takes most, and then single ones more or less, as long as the replay says that it helps.

Known limitations
    * A plan is not proved best: ``bound.py`` says how far it may be from it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.plan import NoPlan, Reason
from zico.planners.swap.autoswap import AutoSwap
from zico.planners.swap.fast import Replayer
from zico.planners.swap.fluid import Rounding, fluid_of
from zico.planners.swap.network import cut_open, shares_within
from zico.planners.swap.parts import Chosen, scheduled
from zico.planners.swap.plan import SwapPlan, no_swaps
from zico.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from zico.planners.swap.fluid import Fluid
    from zico.planners.swap.problem import Int64s, SwapProblem

_MOST_SLOTS = 4000  # parts that a link can move in an iteration; smaller parts cost time and gain nothing
_PIECE = 0.5  # of the time that a part takes: how finely operations above the limit are looked at
_SIZES = (1, 0, 2, 3)  # powers of two by which the smallest part is multiplied; the best most often first
_ROUNDS = 2  # the second one knows what latencies joining saved in the first
_PART_MARGINS = (0.0, 0.25, 0.5, 1.0)  # of a part: what the schedule may hold more than the flow
_MARGINS = (0.0, 0.5, 1.0, 2.0)  # of the largest tensor: memory that whole tensors hold while they move
_LEAST_SHARES = (0.5, 0.05, 0.25, 0.75, 0.95)  # of a tensor that the flow takes: then all of it leaves
_TOGGLES = 60
_SMALLER = 8  # times smaller than the mean tensor are the parts in which whole tensors' shares are counted
_SCORES = ("doa", "aoa", "wdoa")  # the published ones that take no search


@dataclasses.dataclass(frozen=True)
class FlowOptions:
    """How the planner searches."""

    region_bytes: int | None = 2 * MIB
    """Parts are multiples of it; ``None``: whole tensors move. Default: what CUDA maps at once."""
    least_bytes: int = 64 * KIB
    """Smaller tensors stay."""
    most_segments: int = 1200
    """In how many pieces an iteration is looked at."""
    enough: float = 0.0
    """An overhead that ends the search."""


class Flow:
    """Flow, schedule, replay."""

    def __init__(self, name: str = "flow", options: FlowOptions | None = None) -> None:
        """Search with these options; by default ``flow-whole`` moves whole tensors, and ``flow`` parts of them."""
        self.name = name
        self._options = options or FlowOptions(region_bytes=None if name == "flow-whole" else 2 * MIB)

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
            detail = f"an operation needs {problem.least_bytes} bytes at once: give that limit or a higher one"
            return NoPlan(Reason.INFEASIBLE, self.name, time.monotonic() - began_s, detail)
        best = _Best(Replayer(problem))
        tries = _in_parts if self._options.region_bytes else _in_whole
        for plan in itertools.chain(_published(problem, deadline_s), tries(problem, limit, self._options, best)):
            best.see(plan)
            if best.cost[0] <= self._options.enough or time.monotonic() - began_s > deadline_s:
                break
        elapsed_s = time.monotonic() - began_s
        if best.plan is None:
            reason = Reason.OUT_OF_TIME if elapsed_s > deadline_s else Reason.NOT_FOUND
            return NoPlan(reason, self.name, elapsed_s, f"nothing that was tried stays within {limit} bytes")
        return dataclasses.replace(best.plan, planner=self.name, elapsed_s=elapsed_s, optimal=best.cost[0] <= 0)


class _Best:
    """The best plan seen so far."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self.plan: SwapPlan | None = None
        self.cost: tuple[float, int] = (math.inf, 0)
        self.is_last = False
        """The plan seen last is the best."""

    def see(self, plan: SwapPlan) -> None:
        """Replay a plan and keep it if it is better."""
        replayed = self._replayer.replay(plan)
        cost = (replayed.overhead, plan.moved_bytes)
        self.is_last = replayed.is_good and cost < self.cost
        if self.is_last:
            self.plan, self.cost = plan, cost


def _published(problem: SwapProblem, deadline_s: float) -> Iterator[SwapPlan]:
    """Yield what AutoSwap's quick scores make of it, so that we are never worse."""
    for by in _SCORES:
        plan = AutoSwap(by).plan(problem, deadline_s)
        if isinstance(plan, SwapPlan):
            yield plan


def _smallest(problem: SwapProblem, unit_bytes: int) -> int:
    """Return the least multiple of a unit of which a link does not move too many in an iteration."""
    fastest = max(problem.out.bandwidth, problem.back.bandwidth)
    return max(1, math.ceil(fastest * problem.period_ns / 1e9 / _MOST_SLOTS / unit_bytes)) * unit_bytes


def _in_parts(problem: SwapProblem, limit: int, options: FlowOptions, best: _Best) -> Iterator[SwapPlan]:
    """Yield plans that move tensors in parts of several sizes, then with gaps over the cut, then whole tensors."""
    fluid = fluid_of(problem, limit, options.most_segments, Rounding.INWARD, options.least_bytes)
    region_bytes = options.region_bytes or 1
    smallest = best_bytes = _smallest(problem, region_bytes)
    if not len(fluid.access):
        return
    for part_bytes in [smallest << size for size in _SIZES]:
        for plan in _of_parts(problem, limit, fluid, (part_bytes, region_bytes)):
            yield plan
            best_bytes = part_bytes if best.is_last else best_bytes
    for part_bytes in sorted({best_bytes, max(best_bytes >> 1, smallest)}, reverse=True):
        for level in [limit - int(margin * part_bytes) for margin in _PART_MARGINS]:
            yield from _of_parts(problem, level, fluid, (part_bytes, region_bytes), over=True)
    yield from _in_whole(problem, limit, options, best)


def _of_parts(
    problem: SwapProblem, level: int, fluid: Fluid, sizes: tuple[int, int], *, over: bool = False
) -> Iterator[SwapPlan]:
    """Yield plans that move tensors in parts of one size.

    Args:
        problem: The problem.
        level: What the flow is to keep, in bytes.
        fluid: The problem's.
        sizes: Of a part, and of a region, of which parts of the tensors that leave are multiples.
        over: Use gaps on both sides of the cut; without such gaps there is no plan.
    """
    part_bytes, region_bytes = sizes
    line = cut_open(fluid, max(int(problem.out.transfer_ns(part_bytes) * _PIECE), 1), over=over)
    latency = (np.ones(len(line.load_bytes)),) * 2
    for _ in range(_ROUNDS if line.over.any() or not over else 0):
        shares = shares_within(line, part_bytes, level, (problem.out, problem.back), latency)
        if shares is None:
            break
        leaves = np.minimum(-(-shares.size_bytes // region_bytes) * region_bytes, fluid.size_bytes)
        plan, latency = scheduled(problem, line, Chosen(leaves, part_bytes, shares.wait_ns, latency), "")
        yield plan


def _in_whole(problem: SwapProblem, limit: int, options: FlowOptions, best: _Best) -> Iterator[SwapPlan]:
    """Yield plans that move whole tensors: those of which enough leaves, then with single ones more or less."""
    fluid = fluid_of(problem, limit, options.most_segments, Rounding.INWARD, options.least_bytes)
    if not len(fluid.access):
        return
    part_bytes = _smallest(problem, max(options.least_bytes, int(fluid.size_bytes.mean()) // _SMALLER))
    line = cut_open(fluid, max(int(problem.out.transfer_ns(part_bytes) * _PIECE), 1))
    latency = (np.zeros(len(line.load_bytes)),) * 2
    whole = latency[0] + 1, latency[1] + 1
    largest = int(fluid.size_bytes.max())
    found: tuple[Int64s, Int64s, NDArray[np.float64]] | None = None
    for margin in _MARGINS:
        level = limit - int(margin * largest)
        shares = shares_within(line, part_bytes, level, (problem.out, problem.back), latency)
        if shares is None:
            continue
        share = shares.size_bytes / fluid.size_bytes
        for least in _LEAST_SHARES:
            leaves = fluid.size_bytes * (share >= least)
            yield scheduled(problem, line, Chosen(leaves, largest, shares.wait_ns, whole), "")[0]
            if best.is_last or found is None:
                found = leaves, shares.wait_ns, share
    if found is None:
        return
    leaves, wait_ns, share = found
    for gap in np.argsort(np.abs(share - np.mean(_LEAST_SHARES)), kind="stable")[:_TOGGLES].tolist():
        leaves[gap] = fluid.size_bytes[gap] - leaves[gap]
        yield scheduled(problem, line, Chosen(leaves, largest, wait_ns, whole), "")[0]
        if not best.is_last:
            leaves[gap] = fluid.size_bytes[gap] - leaves[gap]


def curve(
    problem: SwapProblem, planner: Flow | None = None, points: int = 16, deadline_s: float = 5.0
) -> list[tuple[int, int]]:
    """Return what memory costs: pairs of limit and overhead in ns, from the peak down to the least limit that was met.

    The overhead never falls as the limit does: a plan for a lower limit serves a higher one, too.

    Args:
        problem: Its own limit is not looked at.
        planner: By default ours with its defaults.
        points: How many limits, evenly between the peak and what operations need at once.
        deadline_s: For each limit.
    """
    planner = planner or Flow()
    found: list[tuple[int, int]] = []
    for limit in np.linspace(problem.least_bytes, problem.peak_bytes, points).astype(int).tolist():
        tried = dataclasses.replace(problem, limit_bytes=limit)
        plan = planner.plan(tried, deadline_s)
        if isinstance(plan, SwapPlan):
            overhead_ns = int(np.ceil(Replayer(tried).replay(plan).duration_ns)) - problem.period_ns
            found.append((limit, min([overhead_ns, *(cost for _, cost in found)])))
    return found[::-1]
