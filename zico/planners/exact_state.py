"""The exact planner's picture of a problem and of a half-made plan: a skyline over sections of time.

Only ticks after a beginning and before an end matter: whatever lives at another tick lives at one of those, too. These
are the *sections*; a tensor lives in the sections ``[left, right)``. Tensors are placed upwards, so that everything
below a section's *floor* is settled. A *valley* is a stretch of sections with one floor and higher ones on both
sides; a tensor that lives only in a valley can lie nowhere lower than on its floor::

    offset 3 |     c c
           2 | a a c c . . b b      valley: sections 4 and 5, floor 0
           1 | a a . . . . b b      c is held up by a; under c is waste
           0 | a a . . . . b b
    section    0 1 2 3 4 5 6 7

All sizes and offsets are counted in units of the alignment times the sizes' greatest common divisor: in a plan in which
every tensor is held up by another one or by the ground, offsets are sums of sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from zico.planners.problem import Problem

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
