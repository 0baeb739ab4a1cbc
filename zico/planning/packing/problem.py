"""What a planner is given: tensors with lifetimes, in a vocabulary of its own.

A tensor lives in the half-open interval of ticks ``[lower, upper)``. A tick is any step of a clock
that only orders
events: an index of allocations and frees, or a time. Two tensors overlap if they live at a common
tick::

    tick      0 1 2 3 4 5
    a [0, 4)  # # # #
    b [3, 6)        # # #      overlaps a
    c [4, 6)          # #      does not: a's last tick is 3
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zico.base.errors import ProblemError

Int64s = NDArray[np.int64]

_LONGEST_S = 1e9
LARGEST = 1 << 60
"""Sums of a problem's numbers, bytes or ticks, must stay below 2**63."""


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Tensors to place, as parallel arrays; checked when made.

    Raises:
        ProblemError: A lifetime is empty or negative, a size is not positive, arrays differ in
            length; the message names the first tensor concerned.
    """

    lower: Int64s
    """First tick at which each tensor lives."""
    upper: Int64s
    """First tick at which it no longer lives."""
    size_bytes: Int64s
    names: tuple[str, ...] | None = None
    """What the tensors are called in the file they come from; their indexes if ``None``."""
    capacity_bytes: int | None = None
    """The plan's peak may not exceed this; ``None``: as low as can be."""
    alignment_bytes: int = 1
    """Every offset is a multiple of it."""
    tick_ns: Int64s | None = None
    """When each tick begins, one more entry than ticks; ``None``: all ticks take equally long."""

    def __post_init__(self) -> None:
        for name in ("lower", "upper", "size_bytes"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))
        self._check()

    def __len__(self) -> int:
        return len(self.size_bytes)

    def name_of(self, index: int) -> str:
        """Return what a tensor is called in messages and files."""
        return self.names[index] if self.names is not None else str(index)

    @functools.cached_property
    def n_ticks(self) -> int:
        """Return the first tick at which nothing lives any more."""
        return int(self.upper.max(initial=0))

    @functools.cached_property
    def peak_live_bytes(self) -> int:
        """Return the most bytes alive at once: the lower bound of every plan's peak."""
        if not len(self):
            return 0
        at = np.concatenate([self.upper, self.lower])
        change = np.concatenate([-self.size_bytes, self.size_bytes])
        order = np.argsort(at, kind="stable")  # frees come first at equal ticks: intervals are half-open
        return int(np.cumsum(change[order]).max(initial=0))

    def compact(self) -> Problem:
        """Return the same problem with ticks renumbered 0, 1, 2...: only those at which something begins or ends.

        ``tick_ns`` of the result says when its ticks were, so that means over time stay what they
        are.
        """
        marks = np.unique(np.concatenate([self.lower, self.upper]))
        at = marks if self.tick_ns is None else np.asarray(self.tick_ns, np.int64)[marks]
        lower, upper = np.searchsorted(marks, self.lower), np.searchsorted(marks, self.upper)
        return dataclasses.replace(self, lower=lower, upper=upper, tick_ns=at)

    def _check(self) -> None:
        n = len(self.size_bytes)
        if len(self.lower) != n or len(self.upper) != n or (self.names is not None and len(self.names) != n):
            raise ProblemError(f"{len(self.lower)} starts, {len(self.upper)} ends and {n} sizes: give one of each")
        rules = (
            (self.lower < 0, "begins at {lower}: give a tick of 0 or more"),
            (self.upper <= self.lower, "lives from {lower} to {upper}: give an end after the start"),
            (self.upper > LARGEST, "ends at {upper}: give ticks up to 2**60"),
            (self.size_bytes <= 0, "has {size} bytes: give one or more"),
            (self.size_bytes > LARGEST // max(n, 1), "has {size} bytes: the sizes must add up to less than 2**60"),
        )
        for broken, text in rules:
            if broken.any():
                i = int(np.argmax(broken))
                what = text.format(lower=self.lower[i], upper=self.upper[i], size=self.size_bytes[i])
                raise ProblemError(f"tensor {self.name_of(i)} {what}")
        if self.alignment_bytes < 1:
            raise ProblemError(f"an alignment of {self.alignment_bytes} bytes: give 1 or more")


# -- what a planner answers: places for all tensors, or why there are none -------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """An offset for every tensor of the problem, in the problem's order. Believe it once the judge has."""

    offset_bytes: Int64s
    planner: str
    elapsed_s: float
    optimal: bool = False
    """The planner has proved that its objective cannot be lower."""


class Reason(enum.Enum):
    """Why there is no plan."""

    INFEASIBLE = "does not fit"
    """Proved: no placement exists within the capacity."""
    NOT_FOUND = "not found"
    """The planner has no way to search on; another one may succeed."""
    OUT_OF_TIME = "out of time"


@dataclasses.dataclass(frozen=True)
class NoPlan:
    """No plan, and why; a value, never ``None``."""

    reason: Reason
    planner: str
    elapsed_s: float
    detail: str = ""
    """What a person would want to know: the tick and the bytes that do not fit, say."""


def refusal(problem: Problem, reason: Reason, planner: str, elapsed_s: float) -> NoPlan:
    """Return why there is no plan, with the figures that a person would want to know."""
    live, capacity = problem.peak_live_bytes, problem.capacity_bytes
    detail = f"{len(problem)} tensors, {live} bytes alive at once"
    if capacity is not None:
        detail += f", which is {'more than' if live > capacity else 'within'} the capacity of {capacity}"
    if reason is Reason.OUT_OF_TIME:
        detail += f"; nothing found in {elapsed_s:.3g} s"
    return NoPlan(reason, planner, elapsed_s, detail)


FOREVER_NS = 1 << 62
"""``time.monotonic_ns`` never reaches this."""


def limits_of(began_ns: int, deadline_s: float, work: int) -> tuple[int, int]:
    """Return when a search ends, by ``time.monotonic_ns``, and how much it works at most.

    One of them is no limit. That is work where no deadline was given, so that the same problem has
    the same answer on every machine; else the deadline.
    """
    if math.isinf(deadline_s):
        return FOREVER_NS, work
    return min(began_ns + int(min(deadline_s, _LONGEST_S) * 1e9), FOREVER_NS), FOREVER_NS


class Planner(Protocol):
    """Something that places tensors. Pure: the same problem gives the same plan unless the deadline cuts it short."""

    name: str

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Return a plan; looks at the clock often enough to answer within a tenth more than the deadline.

        ``math.inf`` is no deadline: the planner's own count of its work ends the search.
        """
        ...
