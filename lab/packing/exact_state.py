"""The exact planner's picture of a problem and of a half-made plan: a skyline over sections of time.

Only ticks after a beginning and before an end matter: whatever lives at another tick lives at one
of those, too. These are the *sections*; a tensor lives in the sections ``[left, right)``. Tensors
are placed upwards, so that everything below a section's *floor* is settled. A *valley* is a stretch
of sections with one floor and higher ones on both sides. A tensor that lives only in a valley can
lie nowhere lower than on its floor::

    offset 3 |     c c
           2 | a a c c . . b b      valley: sections 4 and 5, floor 0
           1 | a a . . . . b b      c is held up by a; under c is waste
           0 | a a . . . . b b
    section    0 1 2 3 4 5 6 7

All sizes and offsets are counted in units of the alignment times the sizes' greatest common
divisor. In a plan in which every tensor is held up by another one or by the ground, offsets are
sums of sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zico.base.compiled import compiled

if TYPE_CHECKING:
    from zico.planning.packing.problem import Problem

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]
Floats = NDArray[np.float64]

UNPLACED = -1
LARGEST_TABLE = 20
"""Logarithm of the most failed states remembered: 8 MiB. Small groups, of which there can be many, get less."""


class State(NamedTuple):
    """A half-made plan, and the working memory of the functions that look at it."""

    left: Int64s
    """Per tensor: its first section."""
    right: Int64s
    """Per tensor: the section after its last."""
    size: Int64s
    latest: Int64s
    """Per tensor: the highest offset within the capacity."""
    twin: Int64s
    """Per tensor: the last tensor before it that is exactly alike, or -1."""
    code: UInt64s
    """Per tensor: a random number, for hashes of sets."""
    offset: Int64s
    """Per tensor: where it lies, or ``UNPLACED``."""
    earliest: Int64s
    """Per tensor: the lowest offset that the floors leave; of unplaced ones in the range last looked at."""
    value: Floats
    """Per tensor: which one is tried first, highest first."""
    floor: Int64s
    """Per section: nothing more will be placed below."""
    top: Int64s
    """Per section: the end of the highest tensor placed from below; at most the floor."""
    ceiling: Int64s
    """Per section: where what has been placed from above begins."""
    unplaced: Int64s
    """Per section: sum of sizes."""
    failures: Floats
    """Per section: how often it could not hold what must come, lately."""
    level: Int64s
    """Per section: its floor, raised to the lowest offset of anything that can still come."""
    slack: Int64s
    """Per section: the most that can still be wasted."""
    above: Int64s
    """Per section, scratch: the sizes of what must lie above some offset."""
    valley: Int64s
    """Per section: the first section of the valley it lies in, or -1."""
    tally: Int64s
    """Per section, scratch: tensors that come (+) or go (-); their sum."""
    active: Int64s
    """The unplaced tensors in the range last looked at, latest ``earliest`` first; then the others."""
    failed: UInt64s
    """Hashes of states from which no plan was found although all was tried."""


def sections(problem: Problem) -> tuple[Int64s, Int64s, int]:
    """Return each tensor's first section and the one after its last, and the number of sections."""
    marks = np.unique(np.concatenate([problem.lower, problem.upper]))
    begins, ends = np.isin(marks, problem.lower), np.isin(marks, problem.upper)
    kept = np.flatnonzero(begins[:-1] & ends[1:])
    left = np.searchsorted(kept, np.searchsorted(marks, problem.lower))
    right = np.searchsorted(kept, np.searchsorted(marks, problem.upper))
    return left, right, len(kept)


def unit_bytes(problem: Problem) -> int:
    """Return what all offsets are multiples of, without loss of plans."""
    return problem.alignment_bytes * int(np.gcd.reduce(-(-problem.size_bytes // problem.alignment_bytes)))


def make_state(problem: Problem) -> State:
    """Return the state in which nothing is placed, for a problem of at least one tensor; see ``reset``."""
    left, right, n_sections = sections(problem)
    n = len(problem)
    size = -(-problem.size_bytes // unit_bytes(problem))
    twin, last = np.full(n, -1), dict[tuple[int, int, int], int]()
    for i, key in enumerate(zip(left.tolist(), right.tolist(), problem.size_bytes.tolist(), strict=True)):
        twin[i] = last.get(key, -1)
        last[key] = i
    return State(
        *(left, right, size),
        latest=np.zeros(n, np.int64),
        twin=twin,
        code=np.random.default_rng(0).integers(1, 1 << 63, n).astype(np.uint64),
        offset=np.full(n, UNPLACED),
        earliest=np.zeros(n, np.int64),
        value=np.zeros(n),
        failures=np.zeros(n_sections),
        **{
            name: np.zeros(n_sections + 1, np.int64)
            for name in ("floor", "top", "ceiling", "unplaced", "level", "slack", "above", "valley", "tally")
        },
        active=np.arange(n),
        failed=np.zeros(1 << min(6 + 2 * n.bit_length(), LARGEST_TABLE), np.uint64),
    )


def reset(state: State, problem: Problem, capacity_bytes: int) -> None:
    """Take everything out of the plan, and set the capacity. What was learned about sections stays."""
    unit = unit_bytes(problem)
    state.offset[:] = UNPLACED
    state.latest[:] = (capacity_bytes - problem.size_bytes) // unit
    state.floor[:] = 0
    state.top[:] = 0
    state.ceiling[:] = -(-capacity_bytes // problem.alignment_bytes) * problem.alignment_bytes // unit
    change = np.zeros_like(state.unplaced)
    np.add.at(change, state.left, state.size)
    np.subtract.at(change, state.right, state.size)
    state.unplaced[:] = np.cumsum(change)


# --------------------------------------------------------------------------------------------------
# What follows from a half-made plan: bounds, forced moves, and where to branch. The pictures are in
# ``exact_state``.
#
# The sections are the machines of a shop, tensors the jobs, an offset is a starting time. Each
# section works on one tensor at a time, and a tensor occupies all its sections together.

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

    What cannot begin below an offset lies above it: for every such set, offset and sizes must stay
    within the capacity. Source: the one-machine bound with heads, J. Carlier, "The one-machine
    sequencing problem", EJOR 11 (1982), section 2, with tails of zero.
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

    The section with the fewest answers; of those the one that failed most lately, the lowest, or
    the tightest. Or the lowest section, of those the one with the fewest answers. Source for
    failures as a guide: F. Boussemart et al., "Boosting systematic search by weighting
    constraints", ECAI 2004; for their decay: M. Moskewicz et al., "Chaff", DAC 2001.
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
