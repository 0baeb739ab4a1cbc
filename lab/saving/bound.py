"""What no swap plan can beat: the problem as fluids, solved as a linear program.

Theory of operation
    Any share of a gap's bytes may leave, in pieces as small as one likes, and the pieces of all
    gaps are alike. So a plan is how many bytes of each gap leave, and for each point of time how
    many bytes have left and returned. It is so for each class of tensors, since a latency makes
    small ones slower::

        x[g]         bytes of gap g that leave                     0 <= x[g] <= size[g]
        A[p], D[p]   bytes of gaps that have opened, that had to be back, at point p
        V[p]         bytes elsewhere whose tensors have ended      sums over x
        O[p], I[p]   bytes that have left, have returned           O[p + 1] <= A[p], I >= D, O - I - V >= 0, both grow
        w[s]         how long is waited in segment s               O, I grow by what a link takes duration + w for
        load[s] - (O - I - V) at both ends of operation s          at most the peak

    On the circle a gap that passes the boundary counts in ``A`` at once and again where it opens,
    and O and I grow by all of x in a round. A plan of the judge's that repeats obeys all of this at
    the ends of its operations: its transfers hold memory until they end and from when they begin,
    where fluid holds half of that. So the least peak of the program, for no wait or for so much, is
    a lower bound, and so is its least wait for a limit.

Guarantees
    * Merging points (``lab/saving/bound.py``), which keeps the program small, only lowers the
      bound. Gaps become longer, and a merged segment is needed only between what leaves by its end
      and returns by its beginning.

Known limitations
    * A latency only makes bandwidths lower, to what the largest tensor of a class of about one size
      gets.
    * With ``least_bytes`` the bound is one only for plans that leave smaller tensors where they
      are.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planning.saving.problem import Int64s, Link, SwapProblem


# -- A swap problem as fluids in pipes: what bounds and the better planner are computed from -------
#
# Time is cut at *points*: the end of each operation and the beginning of the next one; a *segment*
# lies between two of them. A gap opens at a point and closes at a later one, on the circle. Only
# gaps that pass an operation above a level are kept. Points at which nothing happens are merged, so
# that what is left is small::
#
#     point          0   1       2   3       4   5       6 = 0        operation k runs from point 2 k + 1 to 2 k + 2
#     segment          .   op 0    .   op 1    .   op 2               between them the device idles, or waits
#     gap 1 to 1                 [-----------------)                  behind an access in op 0, before one in op 2
#
# Merging further makes the figures coarser. A gap then opens and closes at other points:
# ``OUTWARD`` makes it longer, which suits a bound; ``INWARD`` shorter, which suits a plan.


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
        most_segments: About so many segments are kept, of equal duration where there are more. The operations
            with most bytes alive are never merged.
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


_HIGHEST = 16  # by which the most segments are divided: so many operations with the highest loads are not merged


def _kept_points(duration_ns: Int64s, load: Int64s, events: Int64s, most: int) -> NDArray[np.bool_]:
    """Return the points that stay: where something begins, ends or is needed, but not more often than on a raster.

    The highest loads decide the peak, so both ends of their operations stay besides: a link moves nothing
    for them while they run.
    """
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
        highest = needs[np.argsort(-load[needs], kind="stable")[: most // _HIGHEST]]
        kept[highest] = True
        kept[(highest + 1) % len(kept)] = True
    return kept


# --------------------------------------------------------------------------------------------------

_COARSE = 300  # segments; with so few the level above which operations matter is found in no time
_FINE = 2000
_CLASSES = 3  # the last one has all smaller tensors
_ALIKE = 1.15  # how much more of a link's time for a byte one tensor of a class may take than another
_ROUNDING = 1e-6  # of the peak or the period: what the solver leaves open, given away


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """The optimum of the program."""

    value: float
    """The least peak in bytes, or the least overhead in nanoseconds; ``inf`` if no plan can be."""
    share: NDArray[np.float64]
    """Of each access of the problem: the share of the gap behind it that leaves."""


def least_peak(problem: SwapProblem, overhead: float = 0.0, least_bytes: int = 1, most_segments: int = _FINE) -> Bound:
    """Return a peak that no plan is below that makes an iteration at most ``overhead`` (a share) longer.

    Raises:
        ConfigError: SciPy is missing.
    """
    found = Bound(float(problem.least_bytes), np.zeros(0))
    for segments in (_COARSE, most_segments):  # above a higher level are fewer gaps, whose classes are narrower
        fluid = fluid_of(problem, int(found.value), segments, Rounding.OUTWARD, least_bytes)
        better = _solved(problem, fluid, None, overhead * problem.period_ns)
        found = dataclasses.replace(better, value=max(found.value, better.value))
    return found


def least_overhead(problem: SwapProblem, limit_bytes: int, least_bytes: int = 1, most_segments: int = _FINE) -> Bound:
    """Return how many nanoseconds longer than ``period_ns`` an iteration is at least within a limit.

    Raises:
        ConfigError: SciPy is missing.
    """
    fluid = fluid_of(problem, limit_bytes, most_segments, Rounding.OUTWARD, least_bytes)
    return _solved(problem, fluid, limit_bytes, None)


# -- the program -----------------------------------------------------------------------------------


class _Program:
    """Rows of a sparse linear program, variable by variable."""

    def __init__(self) -> None:
        self.n = 0
        self._rows: list[Int64s] = []
        self._columns: list[Int64s] = []
        self._values: list[NDArray[np.float64]] = []
        self._most: list[NDArray[np.float64]] = []
        self._n_rows = 0

    def variables(self, n: int) -> Int64s:
        """Return the columns of new variables."""
        self.n += n
        return np.arange(self.n - n, self.n)

    def rows(self, most: Any, *terms: tuple[Any, Any]) -> Int64s:  # noqa: ANN401 - anything NumPy can spread
        """Add rows ``sum of coefficient x column <= most``, one for each element of the columns."""
        n = next((len(column) for column, _ in terms if np.ndim(column)), 1)
        rows = np.arange(self._n_rows, self._n_rows + n)
        for column, coefficient in terms:
            self.add(rows, column, coefficient)
        self._most.append(np.broadcast_to(np.asarray(most, np.float64), n))
        self._n_rows += n
        return rows

    def add(self, rows: Int64s, column: Any, coefficient: Any) -> None:  # noqa: ANN401 - anything NumPy can spread
        """Add a term to rows."""
        self._rows.append(rows)
        self._columns.append(np.broadcast_to(column, len(rows)))
        self._values.append(np.broadcast_to(np.asarray(coefficient, np.float64), len(rows)))

    def least(self, cost: NDArray[np.float64], most: NDArray[np.float64]) -> Any:  # noqa: ANN401 - SciPy has no types
        """Return SciPy's answer with all variables from 0 to ``most``."""
        try:
            from scipy.optimize import linprog
            from scipy.sparse import csr_matrix
        except ImportError as error:
            raise ConfigError("the bound of swap plans needs SciPy: pip install 'zico-memory[swap]'") from error
        joined = [np.concatenate(part) for part in (self._values, self._rows, self._columns)]
        matrix = csr_matrix((joined[0], (joined[1], joined[2])), (self._n_rows, self.n))
        limits = np.stack([np.zeros(self.n), most]).T
        return linprog(cost, matrix, np.concatenate(self._most), bounds=limits, method="highs")


@dataclasses.dataclass(frozen=True, eq=False)
class _Class:
    """Gaps of tensors of about one size, and the columns of what moves of them, for each point."""

    gaps: Int64s
    opened: Int64s
    left: Int64s
    due: Int64s
    back: Int64s
    ended: Int64s


def _solved(problem: SwapProblem, fluid: Fluid, limit: int | None, wait_ns: float | None) -> Bound:
    """Solve for the least peak if ``limit`` is ``None``, else for the least wait."""
    scale, period = float(max(problem.peak_bytes, 1)), float(max(problem.period_ns, 1))
    n, n_gaps = fluid.n_segments, len(fluid.access)
    program = _Program()
    share, wait, peak = program.variables(n_gaps), program.variables(n), program.variables(1)
    classes = [_Class(gaps, *(program.variables(n + 1) for _ in range(5))) for gaps in _by_size(problem, fluid)]
    for one in classes:
        _moves(program, fluid, one, share, fluid.size_bytes / scale)
    for direction, link in (("left", problem.out), ("back", problem.back)):
        rows = program.rows(fluid.duration_ns / period, (wait, -1))
        for one in classes:
            took = scale / _rate(link, fluid.size_bytes[one.gaps]) / period
            columns = getattr(one, direction)
            program.add(rows, columns[1:], took)
            program.add(rows, columns[:-1], -took)
    _short_gaps(program, problem, fluid, (share, wait))
    needed = np.flatnonzero(fluid.load_bytes)
    whole = fluid.whole[needed]
    for leave, come in ((needed + ~whole, needed), (needed + 1, needed + whole)):
        rows = program.rows(-fluid.load_bytes[needed] / scale, (np.broadcast_to(peak, len(needed)), -1))
        for one in classes:
            for columns, sign in ((one.left[leave], -1), (one.back[come], 1), (one.ended[needed], 1)):
                program.add(rows, columns, sign)
    most, cost = np.full(program.n, np.inf), np.zeros(program.n)
    most[share] = 1
    most[wait[fluid.whole]] = 0
    if limit is None:
        cost[peak] = 1
        program.add(np.repeat(program.rows((wait_ns or 0.0) / period, (wait[0], 0)), n), wait, 1)
    else:
        most[peak] = limit / scale
        cost[wait] = 1
    answer = program.least(cost, most)
    shares = np.zeros(len(problem.access_op))
    if answer.status != 0:
        return Bound(np.inf, shares)
    shares[fluid.access] = answer.x[share]
    value = max(answer.fun - _ROUNDING, 0.0) * (scale if limit is None else period)
    return Bound(value, shares)


def _by_size(problem: SwapProblem, fluid: Fluid) -> list[Int64s]:
    """Return the gaps in classes in which no tensor takes much more of a link for a byte than the largest does."""
    order = np.argsort(-fluid.size_bytes, kind="stable")
    size = fluid.size_bytes[order].astype(np.float64)
    latency_ns = problem.out.latency_ns + problem.back.latency_ns
    byte_ns = latency_ns / size + 1e9 / problem.out.bandwidth + 1e9 / problem.back.bandwidth
    level = np.floor(np.log(byte_ns / byte_ns[:1]) / np.log(_ALIKE)) if len(size) else size
    return np.split(order, (np.flatnonzero(np.diff(level)) + 1)[: _CLASSES - 1]) if len(size) else []


def _moves(program: _Program, fluid: Fluid, one: _Class, share: Int64s, size: NDArray[np.float64]) -> None:
    """Let the gaps of a class leave once they are open and return before they close, and everything once a round."""
    n, gaps = fluid.n_segments, one.gaps
    wraps = gaps[fluid.closes[gaps] >= n]
    which = np.concatenate([gaps, wraps])
    opens = np.concatenate([fluid.opens[gaps], np.zeros(len(wraps), np.int64)])
    _sums(program, one.opened, opens, (share[which], size[which]), 1)
    for columns, some in ((one.due, gaps[fluid.returns[gaps]]), (one.ended, gaps[~fluid.returns[gaps]])):
        _sums(program, columns, fluid.closes[some] - n * (fluid.closes[some] >= n), (share[some], size[some]), -1)
    program.rows(0, (one.left[1:], 1), (one.opened[:-1], -1))
    first = program.rows(0, (one.left[0], 1))
    program.add(np.repeat(first, len(wraps)), share[wraps], -size[wraps])
    program.rows(0, (one.due, 1), (one.back, -1))
    program.rows(0, (one.back, 1), (one.ended, 1), (one.left, -1))
    for columns, some in ((one.left, gaps), (one.back, gaps[fluid.returns[gaps]])):
        program.rows(0, (columns[:-1], 1), (columns[1:], -1))
        row = program.rows(0, (columns[-1], -1), (columns[0], 1))
        program.add(np.repeat(row, len(some)), share[some], size[some])


def _sums(
    program: _Program, columns: Int64s, point: Int64s, shares: tuple[Int64s, NDArray[np.float64]], sign: int
) -> None:
    """Make ``columns[p]`` at most (sign 1) or least (-1) the sum of the shares' bytes whose point is at most ``p``."""
    share, size = shares
    rows = program.rows(0, (columns, sign))
    program.add(rows[1:], columns[:-1], -sign)
    program.add(rows[point], share, -sign * size)


def _short_gaps(program: _Program, problem: SwapProblem, fluid: Fluid, columns: tuple[Int64s, Int64s]) -> None:
    """Let no more leave in a gap than can leave, and return, in its time: small pieces do both at once."""
    share, wait = columns
    begin_ns = fluid.begin_ns
    period_ns = begin_ns[-1]
    n = fluid.n_segments
    closes_ns = begin_ns[fluid.closes % n] + fluid.closes // n * period_ns
    slowest = np.full(len(share), _rate(problem.out, fluid.size_bytes))
    slowest[fluid.returns] = np.minimum(slowest[fluid.returns], _rate(problem.back, fluid.size_bytes))
    room = slowest * (closes_ns - begin_ns[fluid.opens])
    for gap in np.flatnonzero(room < fluid.size_bytes):
        size = fluid.size_bytes[gap]
        row = program.rows(room[gap] / size, (share[gap], 1))
        inside = np.arange(fluid.opens[gap], fluid.closes[gap]) % n
        program.add(np.repeat(row, len(inside)), wait[inside], -slowest[gap] * max(problem.period_ns, 1) / size)


def _rate(link: Link, size_bytes: Int64s) -> float:
    """Return the most bytes per nanosecond that any transfer of such tensors gets."""
    largest = int(size_bytes.max(initial=1))
    return largest / (link.latency_ns + largest * 1e9 / link.bandwidth)
