"""Guided ejections: bring a plan below a limit by throwing out what is in the way, and remember whom that hurt.

Tensors above the limit are pending. One of them takes the place that costs least: the sum of the weights of those that
it ejects, which are pending then. Whoever had to eject gains weight, so that what is hard to place comes to stay. When
nobody is pending, the plan lies below the limit.

It suffices to look where a tensor touches another one or the limit: between such places the cost does not change.

A search succeeds early or hardly ever, so that each one begins with fresh weights; how much a failure counts beside
size and duration differs from one to the next.

Source: Y. Nagata and O. Braysy, "A Powerful Route Minimization Heuristic for the Vehicle Routing Problem with Time
Windows", Operations Research Letters 37 (2009), applied to offsets.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled
from zico.libc import monotonic_ns
from zico.planners.classic import first_above, insert_sorted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planners.problem import Int64s, Problem

    Arrays = tuple[NDArray[Any], ...]

_CLOCK_EVERY = 32  # steps; at 20,000 tensors a step takes some 100 us
_CHOICES = 8  # the heaviest of so many pending tensors is next: the small ones fill what the large ones leave
_WEIGHT = 1000  # what one failure adds
_MEAN_WEIGHTS = (1 * _WEIGHT, 3 * _WEIGHT, 10 * _WEIGHT)  # at the beginning of a search, in turns


class Ejection:
    """A series of searches on one problem, each unlike those before it."""

    def __init__(self, problem: Problem, seed: int) -> None:
        """Prepare weights that grow with size and duration."""
        self._tensors = (problem.lower, problem.upper, problem.size_bytes)
        root = np.sqrt(problem.size_bytes.astype(np.float64) * (problem.upper - problem.lower))
        self._relative = root / root.mean()
        self._random = np.array([seed], np.uint64)
        self._means = itertools.cycle(_MEAN_WEIGHTS)

    def lower_to(self, limit: int, offset_bytes: Int64s, steps: int, deadline_ns: int) -> Int64s | None:
        """Return a plan up to the limit made from one above it; ``None`` when steps or time were over first.

        The limit must not lie below the live peak; if both are multiples of an alignment, so are the offsets.
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


# -- compiled ---------------------------------------------------------------------------------------------------------


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

    ``tensors`` are first ticks, ends and sizes; ``learned`` weights and the state of the random numbers, which change;
    ``places`` numbers by offset, offsets, numbers by top, tops. The first ``n_placed`` numbers are placed and do not
    overlap, the others are pending.
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
