"""The fast improving search: peel, place the cores in the classic orders, then eject until nothing is left to gain.

The goal is the live peak, or the capacity where there is one. Once a core's top is there, nothing
is done to it any more. The limit of the ejections is set between goal and best top by success and
failure. They are at their best where many tensors are small; a few large ones are a puzzle, for
which the exact planner is asked once.

Known limitations:
    * Code that was never used on this machine is compiled first: some seconds, whatever the
      deadline is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled
from zico.base.libc import monotonic_ns
from zico.lab.packing.classic import (
    Fit,
    Order,
    aligned,
    finished,
    first_above,
    insert_sorted,
    order_of,
    part_of,
    peak_of,
    place_in_order,
    too_large,
)
from zico.planning.packing.problem import FOREVER_NS, NoPlan, Plan, Reason, limits_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planning.packing.problem import Int64s, Problem

    Arrays = tuple[NDArray[Any], ...]


# --------------------------------------------------------------------------------------------------
# Guided ejections: bring a plan below a limit by throwing out what is in the way, and remember whom
# that hurt.
#
# Tensors above the limit are pending. One of them takes the place that costs least: the sum of the
# weights of those that it ejects, which are pending then. Whoever had to eject gains weight, so
# that what is hard to place comes to stay. When nobody is pending, the plan lies below the limit.
#
# It suffices to look where a tensor touches another one or the limit: between such places the cost
# does not change.
#
# A search succeeds early or hardly ever, so that each one begins with fresh weights. How much a
# failure counts beside size and duration differs from one to the next.
#
# Source: Y. Nagata and O. Braysy, "A Powerful Route Minimization Heuristic for the Vehicle Routing
# Problem with Time Windows", Operations Research Letters 37 (2009), applied to offsets.

_CLOCK_EVERY = 32  # steps; at 20,000 tensors a step takes some 100 us
_CHOICES = 8  # the heaviest of so many pending tensors is next: the small ones fill what the large ones leave
_WEIGHT = 1000  # what one failure adds
_MEAN_WEIGHTS = (1 * _WEIGHT, 3 * _WEIGHT, 10 * _WEIGHT)  # at the beginning of a search, in turns


class Ejection:
    """A series of searches on one problem, each unlike those before it."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self._tensors = (problem.lower, problem.upper, problem.size_bytes)
        root = np.sqrt(problem.size_bytes.astype(np.float64) * (problem.upper - problem.lower))
        self._relative = root / root.mean()
        self._random = np.array([seed], np.uint64)
        self._means = itertools.cycle(_MEAN_WEIGHTS)

    def lower_to(self, limit: int, offset_bytes: Int64s, steps: int, deadline_ns: int) -> Int64s | None:
        """Return a plan up to the limit made from one above it; ``None`` when steps or time were over first.

        The limit must not lie below the live peak; if both are multiples of an alignment, so are
        the offsets.
        """
        offsets = offset_bytes.copy()
        tops = offsets + self._tensors[2]
        by_offset, by_top = np.argsort(offsets), np.argsort(tops)
        by_offset = by_offset[np.argsort(tops[by_offset] > limit, kind="stable")]
        n_placed = int((tops <= limit).sum())
        weights = (self._relative * next(self._means)).astype(np.int64) + 1
        places = (by_offset, offsets, by_top, tops)
        done = eject(self._tensors, limit, (weights, self._random), places, n_placed, steps, deadline_ns)
        return offsets if done else None


# -- compiled --------------------------------------------------------------------------------------


@compiled
def remove_sorted(by: Int64s, count: int, key: Int64s, number: int) -> None:
    """Move ``number`` behind the other ``count - 1`` of the first numbers in ``by``, which are sorted by ``key``."""
    at = first_above(by, count, key, key[number] - 1)
    while by[at] != number:
        at += 1
    for k in range(at, count - 1):
        by[k] = by[k + 1]
    by[count - 1] = number


@compiled
def random_below(random: NDArray[np.uint64], bound: int) -> int:
    """Return a number below ``bound``. Source: xorshift64, G. Marsaglia, "Xorshift RNGs" (2003)."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return int(x % np.uint64(bound))


@compiled
def alive_with(i: int, by: Int64s, count: int, lower: Int64s, upper: Int64s, found: Int64s) -> int:
    """Set ``found`` to those of the first ``count`` numbers in ``by`` that overlap ``i``, in order; return how many."""
    low, up = lower[i], upper[i]
    m = 0
    for k in range(count):
        j = by[k]
        found[m] = j
        m += (lower[j] < up) & (low < upper[j])
    return m


@compiled
def cheapest_place(  # noqa: C901 - one sweep
    size: int, room: int, m: int, near: Arrays, places: Arrays, learned: Arrays
) -> int:
    """Return the offset up to ``room`` at which a tensor of this size ejects the least weight.

    ``near`` are the ``m`` tensors that overlap it in time, by offset and by top.
    """
    near_offset, near_top = near
    _, offsets, _, tops = places
    weights, random = learned
    entered = left = ahead = 0
    at, cost = 0, 0
    best, best_cost, ties = 0, 1 << 62, 0
    while True:
        while entered < m and offsets[near_offset[entered]] < at + size:
            cost += weights[near_offset[entered]]
            entered += 1
        while left < m and tops[near_top[left]] <= at:
            cost -= weights[near_top[left]]
            left += 1
        if cost < best_cost:
            best, best_cost, ties = at, cost, 1
        elif cost == best_cost:
            ties += 1
            if random_below(random, ties) == 0:
                best = at
        if cost == 0 or at >= room:
            return best
        while ahead < m and offsets[near_offset[ahead]] - size <= at:
            ahead += 1
        at = room
        if ahead < m:
            at = min(at, offsets[near_offset[ahead]] - size)
        if left < m:
            at = min(at, tops[near_top[left]])


@compiled
def heaviest_of_some(by: Int64s, begin: int, learned: Arrays) -> int:
    """Return where in ``by``, from ``begin`` on, the heaviest of some numbers drawn at random is."""
    weights, random = learned
    best = begin + random_below(random, len(by) - begin)
    for _ in range(_CHOICES - 1):
        at = begin + random_below(random, len(by) - begin)
        if weights[by[at]] > weights[by[best]]:
            best = at
    return best


@compiled
def eject(
    tensors: Arrays, limit: int, learned: Arrays, places: Arrays, n_placed: int, steps: int, deadline_ns: int
) -> bool:
    """Bring all tensors up to ``limit``; tells whether that was done within ``steps`` and before the deadline.

    ``tensors`` are first ticks, ends and sizes. ``learned`` are weights and the state of the random
    numbers, which change. ``places`` are numbers by offset, offsets, numbers by top, tops. The
    first ``n_placed`` numbers are placed and do not overlap, the others are pending.
    """
    lower, upper, sizes = tensors
    by_offset, offsets, by_top, tops = places
    near, near_top = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    for step in range(steps):
        if n_placed == len(sizes):
            return True
        if step % _CLOCK_EVERY == 0 and monotonic_ns() > deadline_ns:
            return False
        chosen = heaviest_of_some(by_offset, n_placed, learned)
        i = by_offset[chosen]
        by_offset[chosen] = by_offset[n_placed]
        m = alive_with(i, by_offset, n_placed, lower, upper, near)
        alive_with(i, by_top, n_placed, lower, upper, near_top)
        at = cheapest_place(sizes[i], limit - sizes[i], m, (near, near_top), places, learned)
        free = n_placed  # where i was in by_offset
        for k in range(m):
            j = near[k]
            if offsets[j] < at + sizes[i] and tops[j] > at:
                remove_sorted(by_offset, n_placed, offsets, j)
                remove_sorted(by_top, n_placed, tops, j)
                n_placed -= 1
        if n_placed < free:
            by_offset[free] = by_offset[n_placed]
            learned[0][i] += _WEIGHT
        offsets[i] = at
        tops[i] = at + sizes[i]
        insert_sorted(by_offset, n_placed, offsets, i)
        insert_sorted(by_top, n_placed, tops, i)
        n_placed += 1
    return n_placed == len(sizes)


# -- take off what may lie at the bottom without loss, until only cores are left -------------------
#
# A tensor that lives as long as all those it is connected with in time may lie below them. Whatever
# plan there is, slide it down and what was below it up. The rest falls into parts that have no tick
# in common, and so on. A stack is solved by this alone. What remains are cores, each above a base::
#
#     address |    +--+ +----+         a is peeled, and then b, which is all that lives in its part;
#             |    |c | | e  |         c, d and e form a core, whose base is the top of a
#             |--+ | ++-+--+-+
#             |b | |  d    |
#             +--+-+-------+---+
#             |       a        |
#             +----------------+--> tick


@dataclasses.dataclass(frozen=True, eq=False)
class Core:
    """Tensors connected in time, none of which lives as long as all of them: to be placed above a base."""

    problem: Problem
    tensors: Int64s
    """Their numbers in the whole problem."""
    base_bytes: int


def peeled(problem: Problem, offset_bytes: Int64s) -> list[Core]:
    """Set the offsets of what can be peeled, and return the cores."""
    order = np.lexsort((-problem.upper, problem.lower))
    cores = np.empty((len(problem), 3), np.int64)
    count = peel(order, problem.lower, problem.upper, problem.size_bytes, offset_bytes, cores)
    return [Core(part_of(problem, order[k:end]), order[k:end], base) for k, end, base in cores[:count].tolist()]


@compiled
def peel(order: Int64s, lower: Int64s, upper: Int64s, sizes: Int64s, offsets: Int64s, cores: Int64s) -> int:
    """Place what lives as long as its part at the part's bottom, again and again; return the number of cores.

    ``order`` are the tensors' numbers by start, the longer-lived first. ``cores`` is set to begin
    and end in ``order``, and base, of each part that remains.
    """
    n_cores = 0
    stack = np.empty((len(order) + 1, 3), np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2] = 0, len(order), 0
    depth = 1
    while depth:
        depth -= 1
        k, end, base = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        while k < end:
            begin = k
            until = upper[order[k]]
            while k < end and lower[order[k]] < until:
                until = max(until, upper[order[k]])
                k += 1
            inner, height = begin, base
            while inner < k and lower[order[inner]] == lower[order[begin]] and upper[order[inner]] == until:
                offsets[order[inner]] = height
                height += sizes[order[inner]]
                inner += 1
            if inner == begin:
                cores[n_cores, 0], cores[n_cores, 1], cores[n_cores, 2] = begin, k, base
                n_cores += 1
            elif inner < k:
                stack[depth, 0], stack[depth, 1], stack[depth, 2] = inner, k, height
                depth += 1
    return n_cores


# --------------------------------------------------------------------------------------------------

_ORDERS = tuple((order, fit) for order in (Order.SIZE, Order.START, Order.DURATION, Order.AREA) for fit in Fit)
_MOST_EXACT = 1000  # tensors; for more, the exact planner is too slow
_EXACT_TIME = 1 / 3  # of what is left
WORK = 2_000_000_000
"""Steps, each times the tensors of its core, where no deadline was given: about ten seconds."""
_LEAST_SHARE = 0.1  # of the gap to the goal; where less fails, more patience for more is better


@dataclasses.dataclass(frozen=True)
class ImproveOptions:
    """What the search does; each part can be left out."""

    peel: bool = True
    all_orders: bool = True
    """Try eight orders; else only the first, by size."""
    eject: bool = True
    exact: bool = True
    """Ask the exact planner where ejections were not enough."""
    most_steps: int = 1 << 40
    """Of the ejections in each core. The plan is the same every time if these are used up before the deadline."""
    seed: int = 1


class Improve:
    """The fast improving search, for up to some ten thousand tensors."""

    name = "improve"

    def __init__(self, options: ImproveOptions | None = None) -> None:
        self._options = options or ImproveOptions()

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Search until the peak is the live peak, or within the capacity, or until the deadline.

        Returns:
            The best plan found, ``optimal`` if its peak is the live peak. ``INFEASIBLE`` if the
            live peak exceeds the capacity; ``OUT_OF_TIME`` or, where the options ended the search,
            ``NOT_FOUND`` if nothing fitted.
        """
        began_ns = time.monotonic_ns()
        deadline_ns, work = limits_of(began_ns, deadline_s, WORK)
        refusal = too_large(problem, self.name)
        if refusal is not None:
            return refusal
        whole = dataclasses.replace(problem, size_bytes=aligned(problem.size_bytes, problem.alignment_bytes))
        capacity = problem.capacity_bytes or 0
        goal = max(whole.peak_live_bytes, capacity - capacity % problem.alignment_bytes)
        offsets = np.zeros(len(problem), np.int64)
        cores = peeled(whole, offsets) if self._options.peel else [Core(whole, np.arange(len(whole)), 0)]
        if not all(self._place(core, goal, deadline_ns, offsets) for core in cores):
            return NoPlan(Reason.OUT_OF_TIME, self.name, (time.monotonic_ns() - began_ns) / 1e9)
        if self._options.eject:
            self._eject(cores, goal, (deadline_ns, work), offsets)
        now_ns = time.monotonic_ns()
        found = finished(problem, offsets, self.name, (now_ns - began_ns) / 1e9)
        if isinstance(found, NoPlan) and now_ns >= deadline_ns:
            return dataclasses.replace(found, reason=Reason.OUT_OF_TIME)
        return found

    def _place(self, core: Core, goal: int, deadline_ns: int, offsets: Int64s) -> bool:
        """Set the core's offsets by the best of the orders; tell whether there was time for one."""
        p = core.problem
        best = None
        for order, fit in _ORDERS if self._options.all_orders else _ORDERS[:1]:
            attempt = np.empty(len(p), np.int64)
            numbers = order_of(p, order)
            top = place_in_order(numbers, p.lower, p.upper, p.size_bytes, fit is Fit.BEST, deadline_ns, attempt)
            if top < 0:
                break
            if best is None or top < best:
                best = top
                offsets[core.tensors] = core.base_bytes + attempt
            if core.base_bytes + best <= goal:
                break
        return best is not None

    def _eject(self, cores: list[Core], goal: int, limits: tuple[int, int], offsets: Int64s) -> None:
        """Lower the tops of all cores to the goal, the highest first; each gets an equal share of time and work."""
        deadline_ns, work = limits
        tops = [core.base_bytes + peak_of(core.problem, offsets[core.tensors] - core.base_bytes) for core in cores]
        above = sorted((k for k, top in enumerate(tops) if top > goal), key=lambda k: tops[k])
        share = work // max(len(above), 1)
        while above:
            now_ns = time.monotonic_ns()
            end_ns = deadline_ns if deadline_ns == FOREVER_NS else now_ns + (deadline_ns - now_ns) // len(above)
            core = cores[above.pop()]
            relative = offsets[core.tensors] - core.base_bytes
            found = self._lowered(core, goal - core.base_bytes, relative, (end_ns, share))
            offsets[core.tensors] = core.base_bytes + found

    def _lowered(self, core: Core, goal: int, best: Int64s, limits: tuple[int, int]) -> Int64s:
        """Return offsets whose top is as near to the goal as time and work let it be."""
        deadline_ns, work = limits
        search = Ejection(core.problem, self._options.seed)
        alignment_bytes = core.problem.alignment_bytes
        top = peak_of(core.problem, best)
        share, steps, asked = 0.5, 2 * len(best), False
        left = min(self._options.most_steps, work // len(best))
        while top > goal and left > 0 and time.monotonic_ns() < deadline_ns:
            limit = top - max(1, int((top - goal) * share))
            steps = min(steps, left)
            left -= steps
            found = search.lower_to(limit - limit % alignment_bytes, best, steps, deadline_ns)
            if found is not None:
                best, top, share = found, peak_of(core.problem, found), min(1.0, 2 * share)
                continue
            share /= 2
            if share < _LEAST_SHARE:
                exact = None if asked else self._asked(core.problem, goal, deadline_ns)
                if exact is not None:
                    return exact
                share, steps, asked = 1.0, 2 * steps, True
        return best

    def _asked(self, problem: Problem, goal: int, deadline_ns: int) -> Int64s | None:
        """Return the exact planner's offsets within the goal, if it has some after a part of the time left."""
        if not self._options.exact or len(problem) > _MOST_EXACT:
            return None
        from zico.lab.packing.exact import Exact

        left_s = math.inf if deadline_ns == FOREVER_NS else (deadline_ns - time.monotonic_ns()) / 1e9
        answer = Exact().plan(dataclasses.replace(problem, capacity_bytes=goal), left_s * _EXACT_TIME)
        return answer.offset_bytes if isinstance(answer, Plan) else None
