"""Place tensors one by one in a fixed order: the classic heuristics, and SmartPool's.

Each tensor goes into a gap between the tensors that are placed already and live at a common tick.
It is the smallest gap that is large enough (best fit) or the lowest one (first fit). Where no gap
is, it goes on top::

    address
       |        +-----+         c goes between a and b (best fit and first fit),
       |        |  b  |         d on top of b
       |        +-----+
       |     c?
       +--------+
       |   a    |
       +--------+-----------> tick

In order of start, best fit is what an allocator without knowledge of the future does. Only tensors
that live at the new tensor's first tick can be in its way.

Known limitations:
    * Quadratic in the number of tensors: 20,000 take about half a second, 100,000 some ten.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import compiled
from zico.base.libc import monotonic_ns
from zico.planning.packing.problem import NoPlan, Plan, Reason, limits_of, refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planning.packing.problem import Int64s, Problem

_CLOCK_EVERY = 64  # tensors; at 20,000 tensors they take some milliseconds
_OUT_OF_TIME = -1


class Order(enum.Enum):
    """Which tensor is placed first; the tensor's number decides among equals."""

    SIZE = "size"
    """Largest first."""
    DURATION = "duration"
    """Longest-lived first, then largest."""
    AREA = "area"
    """Largest product of size and duration first."""
    START = "start"
    """Earliest first."""


class Fit(enum.Enum):
    """Which gap is taken."""

    BEST = "best"
    FIRST = "first"


class Classic:
    """One of the eight classic heuristics, or SmartPool's."""

    def __init__(self, order: Order, fit: Fit, *, resident_first: bool = False) -> None:
        """Place in this order.

        Args:
            order: Who is first.
            fit: Which gap is taken.
            resident_first: Tensors that live until the last tick form a block at the bottom.
        """
        self.name = "smartpool" if resident_first else f"{order.value}-{fit.value}"
        self._order, self._fit, self._resident_first = order, fit, resident_first

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Place all tensors once.

        Returns:
            A plan, ``optimal`` if its peak is the live peak. ``INFEASIBLE`` if the live peak
            exceeds the capacity, ``NOT_FOUND`` if the plan's peak does, ``OUT_OF_TIME`` if the
            deadline passed first.
        """
        began_ns = time.monotonic_ns()
        refusal = too_large(problem, self.name)
        if refusal is not None:
            return refusal
        offsets = np.empty(len(problem), np.int64)
        order = order_of(problem, self._order)
        if self._resident_first:
            order = order[np.argsort(problem.upper[order] < problem.n_ticks, kind="stable")]
        sizes = aligned(problem.size_bytes, problem.alignment_bytes)
        deadline_ns, _ = limits_of(began_ns, deadline_s, 0)  # the orders end by themselves
        best_fit = self._fit is Fit.BEST
        peak = place_in_order(order, problem.lower, problem.upper, sizes, best_fit, deadline_ns, offsets)
        elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
        if peak == _OUT_OF_TIME:
            return NoPlan(Reason.OUT_OF_TIME, self.name, elapsed_s)
        return finished(problem, offsets, self.name, elapsed_s)


def smartpool() -> Classic:
    """Return SmartPool's heuristic: what never dies at the bottom, then by size, best fit.

    Source: J. Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems"
    (2019), section IV; the block at the bottom is in its released code.
    """
    return Classic(Order.SIZE, Fit.BEST, resident_first=True)


# -- what planners share ---------------------------------------------------------------------------


def aligned(size_bytes: Int64s, alignment_bytes: int) -> Int64s:
    """Round sizes up: tensors that touch then all lie at multiples of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def part_of(problem: Problem, tensors: Int64s) -> Problem:
    """Return some of the tensors as a problem of their own, without a capacity."""
    lower, upper, sizes = (array[tensors] for array in (problem.lower, problem.upper, problem.size_bytes))
    return dataclasses.replace(problem, lower=lower, upper=upper, size_bytes=sizes, names=None, capacity_bytes=None)


def peak_of(problem: Problem, offset_bytes: Int64s) -> int:
    """Return the highest byte used."""
    return int((offset_bytes + problem.size_bytes).max(initial=0))


def too_large(problem: Problem, planner: str) -> NoPlan | None:
    """Return the refusal of a problem whose tensors do not even fit without gaps."""
    if problem.capacity_bytes is None or problem.peak_live_bytes <= problem.capacity_bytes:
        return None
    return refusal(problem, Reason.INFEASIBLE, planner, 0.0)


def finished(problem: Problem, offset_bytes: Int64s, planner: str, elapsed_s: float) -> Plan | NoPlan:
    """Return offsets as a plan, or ``NOT_FOUND`` if they exceed the capacity."""
    peak = peak_of(problem, offset_bytes)
    if problem.capacity_bytes is not None and peak > problem.capacity_bytes:
        detail = f"the best plan needs {peak} bytes, the capacity is {problem.capacity_bytes}"
        return NoPlan(Reason.NOT_FOUND, planner, elapsed_s, detail)
    return Plan(offset_bytes, planner, elapsed_s, optimal=peak == problem.peak_live_bytes)


def order_of(problem: Problem, order: Order) -> Int64s:
    """Return the tensors' numbers in the order in which they are placed."""
    duration = problem.upper - problem.lower
    sizes = problem.size_bytes
    keys = {
        Order.SIZE: (-duration, -sizes),
        Order.DURATION: (-sizes, -duration),
        Order.AREA: (-sizes.astype(np.float64) * duration,),
        Order.START: (problem.lower,),
    }
    return np.lexsort(keys[order])


# -- compiled --------------------------------------------------------------------------------------


@compiled
def first_above(by: Int64s, count: int, key: Int64s, value: int) -> int:
    """Return where among the first ``count`` numbers in ``by``, sorted by ``key``, the first key above ``value`` is."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if key[by[middle]] > value:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def insert_sorted(by: Int64s, count: int, key: Int64s, number: int) -> None:
    """Insert ``number`` into the first ``count`` numbers in ``by``, which are sorted by ``key``."""
    at = first_above(by, count, key, key[number])
    for k in range(count, at, -1):
        by[k] = by[k - 1]
    by[at] = number


@compiled
def place_in_order(
    order: Int64s,
    lower: Int64s,
    upper: Int64s,
    sizes: Int64s,
    best_fit: bool,  # noqa: FBT001 - an option that Numba understands
    deadline_ns: int,
    offsets: Int64s,
) -> int:
    """Set ``offsets`` of the tensors in ``order``, and return the highest top; -1 when the deadline passed first."""
    by_offset = np.empty(len(order), np.int64)
    peak = 0
    for count in range(len(order)):
        if count % _CLOCK_EVERY == 0 and monotonic_ns() > deadline_ns:
            return _OUT_OF_TIME
        i = order[count]
        low, up, size = lower[i], upper[i], sizes[i]
        top = 0
        best, best_gap = -1, 0
        for k in range(count):
            j = by_offset[k]
            if lower[j] >= up or low >= upper[j]:
                continue
            gap = offsets[j] - top
            if gap >= size and (best < 0 or gap < best_gap):
                best, best_gap = top, gap
                if not best_fit:
                    break
            top = max(top, offsets[j] + sizes[j])
        offsets[i] = top if best < 0 else best
        peak = max(peak, offsets[i] + size)
        insert_sorted(by_offset, count, offsets, i)
    return peak


# -- without knowledge of the future: what a plan is compared with ---------------------------------


DYNAMIC = Classic(Order.START, Fit.BEST)
"""Dynamic best fit: the smallest gap that is large enough, else on top."""


class ByClass:
    """Dynamic best fit with a stretch of addresses for each class: persistent, feature maps, temporaries.

    Each stretch is as long as its own peak and begins at a multiple of the region size, so that no
    region is shared.
    """

    name = "by-class"

    def __init__(self, labels: NDArray[np.integer], region_bytes: int = 1) -> None:
        """Take for each tensor the stretch that it belongs to; the lowest label's lies lowest."""
        self._labels = np.asarray(labels)
        self._region_bytes = region_bytes

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Place each class by itself; answers as the classic heuristics do."""
        began_s = time.monotonic()
        refusal = too_large(problem, self.name)
        if refusal is not None:
            return refusal
        unit = math.lcm(self._region_bytes, problem.alignment_bytes)
        offsets = np.empty(len(problem), np.int64)
        base = 0
        for label in np.unique(self._labels):
            inside = np.flatnonzero(self._labels == label)
            part = part_of(problem, inside)
            answer = DYNAMIC.plan(part, deadline_s - (time.monotonic() - began_s))
            if isinstance(answer, NoPlan):
                return dataclasses.replace(answer, planner=self.name)
            offsets[inside] = base + answer.offset_bytes
            base += -(-peak_of(part, answer.offset_bytes) // unit) * unit
        return finished(problem, offsets, self.name, time.monotonic() - began_s)
