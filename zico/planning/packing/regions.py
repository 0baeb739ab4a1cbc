"""Plan for regions held over time: the planner of Zico's own objective.

Memory is owned in regions, addresses are free. A slot, a region-sized aligned stretch of addresses,
is held while a live tensor touches it. So minimise the most slots held at once, then their mean
over time, then how many distinct ones there are::

    address   0           6
    at first  a a b b c c|d d d e e e|         a region has 6 bytes; a, b and c die together,
    later     . . . . . .|d d d e e e|         and their slot is given back at once

The lower bound at each tick is the live bytes, rounded up to regions. ``regions_search`` says how
it is approached.

Known limitations:
    * The proof that a plan is optimal is the lower bound; a plan that is best without reaching it
      is not known as such.
    * A tensor lives in one piece of time: one that crosses an iteration's boundary has to be placed
      elsewhere.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import ProblemError
from zico.planning.packing import regions_packing as packing
from zico.planning.packing import regions_search as searching
from zico.planning.packing.problem import LARGEST, NoPlan, Plan, Reason, limits_of, refusal

if TYPE_CHECKING:
    from zico.planning.packing.problem import Int64s, Problem

MOST_SLOTS = 1 << 24
"""Problems whose tensors, laid end to end, take more are refused: bookkeeping takes 32 bytes a slot."""
WORK = 10_000_000
"""Where no deadline is given, so many moves are tried, each times the tensors: about ten seconds."""
_TICK_SHARE = 1e-3
"""Ticks weigh so much beside their time: those that take none count a little, too."""
_STEEP = 300.0
"""One slot above the target, all the time, weighs like this many slots held."""
_HEAT = 1e-4
"""A move may make it so much worse at first, in slots held all the time. Found on synthetic iterations."""
_BLINK = 32
"""When tensors are put back, one gap in so many is overlooked."""
_STARTS = 3
"""So many packings are improved, one after the other."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Parts of the planner that can be switched off, and what makes a run repeatable."""

    pile: bool = True
    """Pile up what is alive at the peak before anything else."""
    portfolio: bool = True
    """Build several packings rather than one, and go on with the best."""
    price_peak: bool = True
    """Let slots held above the lowest possible peak cost more than others."""
    improve: bool = True
    """Take tensors out and put them back until the deadline."""
    restart: bool = True
    """Improve several packings rather than one."""
    blink: bool = True
    """Overlook a place now and then when tensors are put back."""
    anneal: bool = True
    """Let a packing get a little worse for a while."""
    most_moves: int = 1 << 40
    """Of the improvement. The answer is the same every time if these are used up before the deadline."""
    seed: int = 1


DEFAULT = Options()


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """What was found, by this planner's own count; the judge counts for itself."""

    reason: Reason | None
    """Why there is nothing; ``None``: there is."""
    offset_bytes: Int64s
    peak: int
    """Most slots held at once."""
    mean: float
    """Slots held over time, a thousandth of the weight spread evenly over ticks."""
    distinct: int
    """Slots ever held."""
    optimal: bool
    moves: int
    """That the improvement made."""


class Regions:
    """The planner for one region size. Satisfies ``Planner``."""

    name = "regions"

    def __init__(self, region_bytes: int, options: Options = DEFAULT) -> None:
        self.region_bytes = region_bytes
        self.options = options

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Return the best plan found before the deadline, sooner if it is proved optimal; raises as ``place`` does."""
        begun_s = time.monotonic()
        placed = place(problem, self.region_bytes, deadline_s, self.options)
        elapsed_s = time.monotonic() - begun_s
        if placed.reason is None:
            return Plan(placed.offset_bytes, self.name, elapsed_s, placed.optimal)
        return refusal(problem, placed.reason, self.name, elapsed_s)


def place(
    problem: Problem,
    region_bytes: int,
    deadline_s: float,
    options: Options = DEFAULT,
    lying_bytes: Int64s | None = None,
) -> Placed:
    """Place the tensors of a problem so that few regions are held.

    Holds the GIL for some milliseconds only: a job's background thread may call it.

    Args:
        problem: The tensors.
        region_bytes: A multiple of the problem's alignment.
        deadline_s: Seconds. ``math.inf``: ``WORK`` ends the improvement.
        options: Parts of the planner to leave out.
        lying_bytes: The offset at which a tensor lies already and stays, -1 for those to be placed;
            ``None``: all are.

    Raises:
        ProblemError: The region is no multiple of the alignment, or there are too many slots to
            keep books on.
    """
    n = len(problem)
    deadline_ns, work = limits_of(time.monotonic_ns(), deadline_s, WORK)
    offsets = np.zeros(n, np.int64)
    if n == 0:
        return Placed(None, offsets, 0, 0.0, 0, optimal=True, moves=0)
    if problem.capacity_bytes is not None and problem.peak_live_bytes > problem.capacity_bytes:
        return Placed(Reason.INFEASIBLE, offsets, 0, 0.0, 0, optimal=False, moves=0)
    by_start = np.lexsort((-problem.upper, problem.lower))
    lying = np.full(n, packing.NOWHERE, np.int64) if lying_bytes is None else lying_bytes
    p = _packing(problem.compact(), by_start, region_bytes, options, lying)
    orders, piled = _orders(p, options)
    found = _found(n, len(orders))
    effort = searching.Effort(
        blink=_BLINK if options.blink else 0,
        heat=_HEAT if options.anneal else 0.0,
        most_moves=min(options.most_moves, work // max(n, 1)),
        starts=0 if not options.improve else _STARTS if options.restart else 1,
    )
    status = searching.search(p, found, orders, piled, effort, deadline_ns)
    reason = {searching.BUILT: None, searching.OUT_OF_TIME: Reason.OUT_OF_TIME}.get(status, Reason.NOT_FOUND)
    offsets[by_start] = found.offset * problem.alignment_bytes
    figures = found.figures if reason is None else np.zeros_like(found.figures)
    return Placed(
        reason,
        offsets,
        int(figures[searching.PEAK]),
        float(figures[searching.MEAN]),
        int(figures[searching.USED]),
        optimal=bool(figures[searching.OPTIMAL]),
        moves=int(figures[searching.MOVES]),
    )


def _packing(
    problem: Problem, by_start: Int64s, region_bytes: int, options: Options, lying_bytes: Int64s
) -> packing.Packing:
    """Return an empty packing of a compact problem, its tensors in the order ``by_start``."""
    unit = problem.alignment_bytes
    if region_bytes < 1 or region_bytes % unit:
        raise ProblemError(f"a region of {region_bytes} bytes: give a multiple of the alignment, {unit}")
    region = region_bytes // unit
    lower, upper = problem.lower[by_start], problem.upper[by_start]
    size = -(-problem.size_bytes[by_start] // unit)
    n, n_ticks = len(size), problem.n_ticks
    lying = np.where(lying_bytes >= 0, lying_bytes // unit, packing.NOWHERE)[by_start]
    if (lying_bytes[lying_bytes >= 0] % unit).any():
        raise ProblemError(f"a tensor lies at no multiple of the alignment, {unit}: give a smaller alignment")
    highest = int(np.where(lying >= 0, lying + size, 0).max())
    n_slots = int((-(-size // region)).sum()) + -(-highest // region)
    if n_slots > MOST_SLOTS or n_slots * region_bytes > LARGEST:
        raise ProblemError(
            f"the tensors take {n_slots} regions of {region_bytes} bytes: give a region size for which that is "
            f"at most {MOST_SLOTS} regions and 2**60 bytes"
        )
    limit = n_slots * region
    if problem.capacity_bytes is not None:
        limit = min(limit, problem.capacity_bytes // unit)  # sizes are rounded up, so this is on the safe side
    assert problem.tick_ns is not None  # noqa: S101 - compact() says when its ticks were
    weight = _weights(problem.tick_ns)
    bound = -(-_live(lower, upper, size, n_ticks) // region)
    return packing.Packing(
        lower=lower,
        upper=upper,
        size=size,
        block_upper=np.maximum.reduceat(upper, np.arange(0, n, packing.BLOCK)),
        region=region,
        limit=limit,
        weight=weight,
        weight_before=np.concatenate([[0.0], np.cumsum(weight)]),
        steep=_STEEP * options.price_peak * (weight + 1 / n_ticks) / 2,
        price_before=np.zeros(n_ticks + 1),
        lying=lying,
        hole_begin=np.zeros(int((lying >= 0).sum()) + 1, np.int64),
        hole_end=np.zeros(int((lying >= 0).sum()) + 1, np.int64),
        offset=np.full(n, packing.NOWHERE, np.int64),
        by_offset=np.zeros(n, np.int64),
        held=np.zeros(n_ticks, np.int64),
        users=np.zeros(n_slots, np.int64),
        bound=bound,
        lowest=int(bound.max()),
        lowest_ticks=int(bound.sum()),
        near=np.zeros(n, np.int64),
        near_stamp=np.zeros(n, np.int64),
        slot_stamp=np.zeros(n_slots, np.int64),
        slot_reach=np.zeros(n_slots, np.int64),
        slot_shared=np.zeros(n_slots),
        state=_state(options.seed),
        figures=np.zeros(packing.FIGURES),
    )


def _weights(tick_ns: Int64s) -> packing.Floats:
    duration = np.maximum(np.diff(tick_ns), 0).astype(np.float64)
    weight = duration / max(duration.sum(), 1.0) + _TICK_SHARE / len(duration)
    shares: packing.Floats = weight / weight.sum()
    return shares


def _live(lower: Int64s, upper: Int64s, size: Int64s, n_ticks: int) -> Int64s:
    change = np.zeros(n_ticks + 1, np.int64)
    np.add.at(change, lower, size)
    np.subtract.at(change, upper, size)
    return np.cumsum(change)[:n_ticks]


def _orders(p: packing.Packing, options: Options) -> tuple[Int64s, Int64s]:
    """Return orders in which to build packings, likely best first, and how many of each are piled up."""
    lower, upper, size = p.lower, p.upper, p.size
    alive = p.weight_before[upper] - p.weight_before[lower]
    peak = int(_live(lower, upper, size, len(p.weight)).argmax())
    is_rest = (lower > peak) | (upper <= peak)
    rules = [(lower, -alive), (-upper, -alive), (lower, lower), (-alive, lower)]
    orders = [np.lexsort((-size, -upper, np.where(is_rest, rest, piled), is_rest)) for piled, rest in rules]
    piled = [int((~is_rest).sum())] * len(orders)
    if not options.pile:
        orders, piled = [], []
    orders.append(np.lexsort((-size, lower, -upper)))
    piled.append(0)
    n = len(orders) if options.portfolio else 1
    return np.array(orders[:n], np.int64), np.array(piled[:n], np.int64)


def _found(n: int, n_orders: int) -> searching.Found:
    """Return room for a best packing of ``n`` tensors, built in so many orders."""
    room = searching.MOST_VICTIMS
    return searching.Found(
        offset=np.zeros(n, np.int64),
        figures=np.zeros(searching.FOUND),
        victims=np.zeros(room, np.int64),
        old=np.zeros(room, np.int64),
        keys=np.zeros(room),
        scores=np.zeros(n_orders),
    )


def _state(seed: int) -> Int64s:
    state = np.zeros(packing.STATES, np.int64)
    state[packing.SEED] = seed
    return state
