"""Say whether a plan is one, and what it costs. Quadratic and obvious; shares no code with any planner.

Rules, each with a name that a verdict quotes:

* ``count``: one offset per tensor.
* ``place``: offsets are not negative, and multiples of the alignment.
* ``overlap``: no two tensors that live at a common tick share a byte.
* ``capacity``: the highest byte lies within the capacity, where the problem names one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from zico.planning.packing.problem import Int64s, Plan, Problem


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the judge found."""

    rule: str | None
    """The rule that is broken; ``None``: the plan is good."""
    detail: str
    peak_bytes: int
    """The highest byte used; 0 if there are no offsets to look at."""

    @property
    def is_good(self) -> bool:
        """Tell whether no rule is broken."""
        return self.rule is None


def judge(problem: Problem, plan: Plan) -> Verdict:
    """Return the first rule that the plan breaks, with the tensors concerned, and its peak."""
    offsets = np.asarray(plan.offset_bytes)
    if offsets.shape != (len(problem),):
        return Verdict("count", f"{offsets.size} offsets for {len(problem)} tensors", 0)
    tops = offsets + problem.size_bytes
    peak_bytes = int(tops.max(initial=0))
    for i in range(len(problem)):
        if offsets[i] < 0 or offsets[i] % problem.alignment_bytes:
            where = f"tensor {problem.name_of(i)} lies at {offsets[i]}, alignment {problem.alignment_bytes}"
            return Verdict("place", where, peak_bytes)
    for i in range(len(problem) - 1):
        later = slice(i + 1, None)
        in_time = (problem.lower[later] < problem.upper[i]) & (problem.lower[i] < problem.upper[later])
        in_space = (offsets[later] < tops[i]) & (offsets[i] < tops[later])
        both = in_time & in_space
        if both.any():
            j = i + 1 + int(np.argmax(both))
            names = f"tensors {problem.name_of(i)} and {problem.name_of(j)}"
            return Verdict("overlap", f"{names} share byte {max(offsets[i], offsets[j])}", peak_bytes)
    if problem.capacity_bytes is not None and peak_bytes > problem.capacity_bytes:
        detail = f"the plan needs {peak_bytes} bytes, the capacity is {problem.capacity_bytes}"
        return Verdict("capacity", detail, peak_bytes)
    return Verdict(None, "", peak_bytes)


def held_regions(problem: Problem, plan: Plan, region_bytes: int) -> Int64s:
    """Return how many regions hold at least one live tensor, for each tick.

    A region is an aligned stretch of ``region_bytes`` of the plan's addresses; it is held while a
    tensor in it lives.
    """
    n_ticks = problem.n_ticks
    held = np.zeros(n_ticks, np.int64)
    first = np.asarray(plan.offset_bytes) // region_bytes
    last = (np.asarray(plan.offset_bytes) + problem.size_bytes - 1) // region_bytes
    for region in range(int(last.max(initial=-1)) + 1):
        inside = np.flatnonzero((first <= region) & (region <= last))
        change = np.zeros(n_ticks + 1, np.int64)
        np.add.at(change, problem.lower[inside], 1)
        np.add.at(change, problem.upper[inside], -1)
        held += np.cumsum(change)[:n_ticks] > 0
    return held


def live_bytes(problem: Problem) -> Int64s:
    """Return the bytes alive at each tick."""
    change = np.zeros(problem.n_ticks + 1, np.int64)
    np.add.at(change, problem.lower, problem.size_bytes)
    np.add.at(change, problem.upper, -problem.size_bytes)
    return np.cumsum(change)[: problem.n_ticks]


def mean_over_time(problem: Problem, values: Int64s) -> float:
    """Return the mean of a quantity given per tick, weighted by how long each tick takes."""
    if not len(values):
        return 0.0
    if problem.tick_ns is None:
        return float(values.mean())
    weights = np.diff(problem.tick_ns[: len(values) + 1]).astype(np.float64)  # bytes times nanoseconds pass 2**63
    return float(np.average(values, weights=weights)) if weights.any() else float(values.mean())
