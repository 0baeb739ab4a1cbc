"""What follows from a half-made plan: bounds, forced moves, and where to branch. The pictures are in ``exact_state``.

The sections are the machines of a shop, tensors the jobs, an offset is a starting time: each section works on one
tensor at a time, and a tensor occupies all its sections together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zico.compiled import compiled
from zico.planners.exact_state import UNPLACED, State

FAR = 1 << 62
FEWEST_FAILED, FEWEST_LOWEST, FEWEST_TIGHTEST, LOWEST_FEWEST = range(4)
"""Which section to branch on: see ``choose``."""
RECALL = 0.99
"""What is left of a section's failures after another one."""


class Rules(NamedTuple):
    """Which inferences to use; each only saves work."""

    heads: bool
    """Bound each section by what cannot begin low, not by its sum alone."""
    held_up: bool
    """Place only what rests on another tensor or on the ground."""
    twins: bool
    """Place tensors that are exactly alike in the order of their indexes."""
    ceiling: bool
    """Put under the ceiling what lives in all sections of a part of the problem."""
    parts: bool
    """Solve parts that no unplaced tensor connects one by one, and go back past what a failed part does not touch."""
    memory: bool
    """Remember failed states."""


@compiled
def gather(state: State, left: int, right: int) -> int:
    """Bring the unplaced tensors within a range of sections to the front of ``active``; returns how many."""
    found = 0
    active = state.active
    for i in range(len(active)):
        b = active[i]
        if state.offset[b] == UNPLACED and state.left[b] >= left and state.right[b] <= right:
            lowest = 0
            for s in range(state.left[b], state.right[b]):
                lowest = max(lowest, state.floor[s])
            state.earliest[b] = lowest
            active[i] = active[found]
            j = found
            while j > 0 and state.earliest[active[j - 1]] < lowest:  # nearly sorted from the last time
                active[j] = active[j - 1]
                j -= 1
            active[j] = b
            found += 1
    return found


@compiled
def bound(state: State, heads: bool, found: int, left: int, right: int) -> bool:  # noqa: FBT001 - a rule
    """Find level and slack of the sections in a range; tells whether all of them can still hold what must come.

    What cannot begin below an offset lies above it: for every such set, offset and sizes must stay within the
    capacity. Source: the one-machine bound with heads, J. Carlier, "The one-machine sequencing problem", EJOR 11
    (1982), section 2, with tails of zero.
    """
    level, slack, above, ceiling = state.level, state.slack, state.above, state.ceiling
    for s in range(left, right):
        above[s] = 0
        level[s] = FAR
        slack[s] = ceiling[s] - state.floor[s] - state.unplaced[s]
    for i in range(found):
        b = state.active[i]
        lowest, size = state.earliest[b], state.size[b]
        if lowest > state.latest[b]:
            return False
        for s in range(state.left[b], state.right[b]):
            level[s] = lowest
            if heads:
                above[s] += size
                slack[s] = min(slack[s], ceiling[s] - lowest - above[s])
    fits = True
    for s in range(left, right):
        fits &= level[s] == FAR or slack[s] >= 0
    if not fits:
        for s in range(left, right):
            state.failures[s] *= RECALL
            if level[s] != FAR and slack[s] < 0:
                state.failures[s] += 1
    return fits


@compiled
def connect(state: State, found: int, left: int, right: int) -> None:
    """Count, for each section of a range, the active tensors that live in it and in the one before."""
    tally = state.tally
    for s in range(left, right + 1):
        tally[s] = 0
    for i in range(found):
        b = state.active[i]
        tally[state.left[b] + 1] += 1
        tally[state.right[b]] -= 1
    for s in range(left + 1, right + 1):
        tally[s] += tally[s - 1]


@compiled
def part_of(state: State, left: int, right: int) -> tuple[int, int]:
    """Return the first part of a range that tensors connect; after ``connect``."""
    while left < right and state.unplaced[left] == 0:
        left += 1
    end = left + 1
    while end < right and state.tally[end] > 0:
        end += 1
    return left, end


@compiled
def hash_of(state: State, found: int, left: int, right: int) -> np.uint64:
    """Return a number for a part of the problem: its skyline, its ceiling, its unplaced tensors."""
    prime = np.uint64(0x9E3779B97F4A7C15)
    number = np.uint64((left << 32) ^ right)
    for s in range(left, right):
        number = (number ^ np.uint64(state.level[s])) * prime
        number ^= number >> np.uint64(29)
        number = (number ^ np.uint64(state.top[s])) * prime
        number ^= number >> np.uint64(32)
    number = (number ^ np.uint64(state.ceiling[left])) * prime
    for i in range(found):
        b = state.active[i]
        if state.left[b] >= left and state.right[b] <= right:
            number ^= state.code[b]
    number *= prime
    return (number ^ (number >> np.uint64(31))) | np.uint64(1)


@compiled
def _count_answers(state: State, found: int, left: int, right: int) -> None:
    """Find the valleys of a part; running sums of ``tally`` are how many tensors can lie on a section's floor."""
    level, valley, tally = state.level, state.valley, state.tally
    start = left
    while start < right:
        end = start + 1
        while end < right and level[end] == level[start]:
            end += 1
        is_valley = (start == left or level[start - 1] > level[start]) and (end == right or level[end] > level[start])
        for s in range(start, end):
            valley[s] = start if is_valley else -1
            tally[s] = 0
        start = end
    tally[right] = 0
    for i in range(found):
        b = state.active[i]
        first = state.left[b]
        if first >= left and state.right[b] <= right and valley[first] >= 0 and state.earliest[b] == level[first]:
            tally[first] += 1
            tally[state.right[b]] -= 1


@compiled
def choose(state: State, how: int, found: int, left: int, right: int) -> int:
    """Return the section of a part on which to branch: what is placed next on a valley's floor there?

    The section with the fewest answers; of those the one that failed most lately, the lowest, or the tightest. Or the
    lowest section, of those the one with the fewest answers. Source for failures as a guide: F. Boussemart et al.,
    "Boosting systematic search by weighting constraints", ECAI 2004; for their decay: M. Moskewicz et al., "Chaff",
    DAC 2001.
    """
    _count_answers(state, found, left, right)
    level, answers = state.level, 0
    best, best_first, best_second = -1, 0.0, 0.0
    for s in range(left, right):
        answers += state.tally[s]
        if state.valley[s] < 0:
            continue
        first_rank, second_rank = float(answers + (state.slack[s] > 0)), -state.failures[s]
        if how == FEWEST_LOWEST:
            second_rank = float(level[s])
        elif how == FEWEST_TIGHTEST:
            second_rank = float(state.slack[s])
        elif how == LOWEST_FEWEST:
            first_rank, second_rank = float(level[s]), first_rank
        if best < 0 or first_rank < best_first or (first_rank == best_first and second_rank < best_second):
            best, best_first, best_second = s, first_rank, second_rank
    return best


@compiled
def next_level(state: State, found: int, section: int) -> int:
    """Return the lowest offset above its floor at which anything can lie in a valley's section, if nothing does on it.

    Either where something begins that sticks out of the valley, or on another tensor in the valley.
    """
    floor, lowest = state.level[section], FAR
    for i in range(found):
        b = state.active[i]
        if not state.left[b] <= section < state.right[b]:
            continue
        if state.earliest[b] > floor:
            lowest = min(lowest, state.earliest[b])
            continue
        for j in range(found):
            c = state.active[j]
            beside = state.left[c] > section or state.right[c] <= section
            if (
                beside
                and state.earliest[c] == floor
                and state.left[c] < state.right[b]
                and state.left[b] < state.right[c]
            ):
                lowest = min(lowest, floor + state.size[c])
    return lowest
