"""A swap problem as fluids in pipes: what bounds and the better planner are computed from.

Time is cut at *points*: the end of each operation and the beginning of the next one; a *segment* lies between two of
them. A gap opens at a point and closes at a later one, on the circle. Only gaps that pass an operation above a level
are kept, and points at which nothing happens are merged, so that what is left is small::

    point          0   1       2   3       4   5       6 = 0        operation k runs from point 2 k + 1 to 2 k + 2
    segment          .   op 0    .   op 1    .   op 2               between them the device idles, or waits
    gap 1 to 1                 [-----------------)                  behind an access in op 0, before one in op 2

Merging further makes the figures coarser. A gap then opens and closes at other points: ``OUTWARD`` makes it longer,
which suits a bound; ``INWARD`` shorter, which suits a plan.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planners.swap.problem import Int64s, SwapProblem


class Rounding(enum.Enum):
    """Where gaps begin and end once points are merged."""

    INWARD = "inward"
    OUTWARD = "outward"


@dataclasses.dataclass(frozen=True, eq=False)
class Fluid:
    """Gaps and segments as parallel arrays."""

    access: Int64s
    """Each gap's entry in the problem's accesses: the access that it follows."""
    size_bytes: Int64s
    opens: Int64s
    """The point at which each gap begins, from 0 to less than the number of segments."""
    closes: Int64s
    """The point at which it ends; beyond the number of segments if in the next iteration."""
    returns: NDArray[np.bool_]
    """Whether the bytes must be back when it ends; else the tensor ends there."""
    duration_ns: Int64s
    """Of each segment."""
    load_bytes: Int64s
    """The most bytes alive in each segment; 0 where that is no more than the level."""
    whole: NDArray[np.bool_]
    """The segment is one operation, with its memory needed throughout; others may be waited in."""
    point: Int64s
    """Each segment's first point as the problem counts them: ``2 k`` before what precedes operation k, ``2 k + 1``."""

    @property
    def n_segments(self) -> int:
        """Return the number of segments, which is that of points."""
        return len(self.duration_ns)

    @property
    def begin_ns(self) -> Int64s:
        """Return when each segment begins, without waits, and when the last one ends."""
        return np.concatenate([[0], np.cumsum(self.duration_ns)])


def fluid_of(
    problem: SwapProblem, level_bytes: int, most_segments: int, rounding: Rounding, least_bytes: int = 1
) -> Fluid:
    """Return what of a problem lies above a level.

    Args:
        problem: Its limit is not looked at.
        level_bytes: Operations with no more bytes alive never need a swap.
        most_segments: About so many segments are kept, of equal duration where there are more.
        rounding: Where gaps begin and end if there are more.
        least_bytes: Smaller tensors stay.
    """
    n = problem.n_ops
    above = problem.load_bytes > level_bytes
    passed = np.concatenate([[0], np.cumsum(np.tile(above, 3))])
    gaps = _gaps(problem, least_bytes)
    gaps = gaps.where(passed[gaps.closes // 2] > passed[gaps.opens // 2]).from_first_round(2 * n)
    end_ns = problem.op_start_ns + problem.op_duration_ns
    idle_ns = problem.op_start_ns - np.concatenate([[end_ns[-1] - problem.period_ns], end_ns[:-1]])
    duration_ns = np.stack([idle_ns, problem.op_duration_ns]).T.ravel()
    load = np.stack([np.zeros(n, np.int64), np.where(above, problem.load_bytes, 0)]).T.ravel()
    kept = _kept_points(duration_ns, load, np.concatenate([gaps.opens, gaps.closes % (2 * n)]), most_segments)
    starts = np.flatnonzero(kept)
    place = np.cumsum(kept) - 1  # the last kept point at or before each
    low, high = (place + ~kept, place) if rounding is Rounding.INWARD else (place, place + ~kept)
    closes = high[gaps.closes % (2 * n)] + gaps.closes // (2 * n) * len(starts)
    gaps = dataclasses.replace(gaps, opens=low[gaps.opens], closes=closes)
    gaps = gaps.where(gaps.opens < gaps.closes).from_first_round(len(starts))
    owner = np.searchsorted(problem.access_begin, gaps.access, side="right") - 1
    return Fluid(
        access=gaps.access,
        size_bytes=problem.size_bytes[owner],
        opens=gaps.opens,
        closes=gaps.closes,
        returns=gaps.returns,
        duration_ns=np.add.reduceat(duration_ns, starts),
        load_bytes=np.maximum.reduceat(load, starts),
        whole=(np.diff(np.append(starts, 2 * n)) == 1) & (starts % 2 == 1),
        point=starts,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Gaps:
    """Gaps as parallel arrays; points count on through the rounds."""

    access: Int64s
    opens: Int64s
    closes: Int64s
    returns: NDArray[np.bool_]

    def where(self, which: NDArray[np.bool_]) -> _Gaps:
        """Return some of them."""
        return _Gaps(self.access[which], self.opens[which], self.closes[which], self.returns[which])

    def from_first_round(self, n_points: int) -> _Gaps:
        """Return the same gaps, opening in the first round."""
        shift = self.opens // n_points * n_points
        return dataclasses.replace(self, opens=self.opens - shift, closes=self.closes - shift)


def _gaps(problem: SwapProblem, least_bytes: int) -> _Gaps:
    """Return all gaps that are not empty."""
    first, last, size = problem.gap_ops
    ends = np.zeros(len(first), bool)
    has_any = np.diff(problem.access_begin) > 0
    ends[problem.access_begin[1:][has_any] - 1] = ~problem.persistent[has_any]
    access = np.flatnonzero((first <= last) & (size >= least_bytes))
    first, last, ends = first[access], last[access], ends[access]
    return _Gaps(access, 2 * first, 2 * last + np.where(ends, 2, 3), ~ends)


def _kept_points(duration_ns: Int64s, load: Int64s, events: Int64s, most: int) -> NDArray[np.bool_]:
    """Return the points that stay: where something begins, ends or is needed, but not more often than on a raster."""
    kept = np.zeros(len(duration_ns), bool)
    kept[0] = True
    kept[events] = True
    needs = np.flatnonzero(load)
    kept[needs] = True
    kept[(needs + 1) % len(kept)] = True
    if kept.sum() > most:
        begin_ns = np.cumsum(duration_ns) - duration_ns
        raster = begin_ns * most // max(int(begin_ns[-1]), 1)
        kept &= np.diff(np.concatenate([[-1], np.maximum.accumulate(np.where(kept, raster, -1))])) > 0
        kept[0] = True
    return kept
