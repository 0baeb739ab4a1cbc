"""Find a trace's iterations, choose the one that stands for all, and lay it on a circle.

Theory of operation
    Training is periodic, so the lifetimes of one iteration lie on a circle of its steps, cut open where the fewest
    bytes cross (``zico/trace/circle.py``). Where an iteration does not repeat, its own beginning and end are the cut,
    and what passes them is two tensors.

Guarantees
    * At no tick are fewer bytes alive than there were in an iteration that repeats exactly.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from zico.errors import TraceError
from zico.trace.circle import cut_open
from zico.trace.events import Kind
from zico.trace.lifetimes import live_after_steps
from zico.trace.period import NO_PERIOD, segment

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.trace.events import Trace
    from zico.trace.lifetimes import Lifetimes

    Int64s = NDArray[np.int64]

_SIMILAR = 16  # iterations none of which repeats exactly count as one kind within a 16th of the median


class How(enum.Enum):
    """How iterations were found."""

    MARKS = "marked"
    PERIOD = "found by their period"


@dataclasses.dataclass(frozen=True, eq=False)
class Iterations:
    """The iterations of a trace, in order."""

    how: How
    number: Int64s
    """What the trace calls them; counted from 0 where nothing does."""
    begin: Int64s
    """The first event of each."""
    end: Int64s
    """The event after the last one of each."""
    typical: NDArray[np.bool_]
    """Which are of the kind that repeats."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.begin)


@dataclasses.dataclass(frozen=True, eq=False)
class Iteration:
    """One iteration's tensors on a line of ticks, ready for a planner. Tick i follows the i-th step after the cut."""

    number: int
    repeats: bool
    """It was laid on a circle and cut; otherwise it is as it was in the trace."""
    row: Int64s
    """Which of the trace's lifetimes each tensor is."""
    lower: Int64s
    upper: Int64s
    size_bytes: Int64s
    tick_ns: Int64s
    """When each tick begins, from the cut, and when the last one ends."""

    @property
    def n_ticks(self) -> int:
        """Return how many ticks there are."""
        return len(self.tick_ns) - 1

    @property
    def live_bytes(self) -> Int64s:
        """Return the bytes alive at each tick."""
        return live_bytes(self.lower, self.upper, self.size_bytes, self.n_ticks)


def live_bytes(lower: Int64s, upper: Int64s, size_bytes: Int64s, n_ticks: int) -> Int64s:
    """Return the bytes of tensors alive at each tick; ``upper`` may reach into a second round of a circle."""
    change = np.zeros(2 * n_ticks + 1, np.int64)
    np.add.at(change, lower, size_bytes)
    np.add.at(change, upper, -size_bytes)
    live: Int64s = np.cumsum(change)[:-1].reshape(2, n_ticks).sum(axis=0)
    return live


def find_iterations(trace: Trace, life: Lifetimes) -> Iterations:
    """Return the iterations that the trace marks, else those that its period shows.

    Raises:
        TraceError: Nothing marks them and nothing repeats.
    """
    kind = trace.events["kind"]
    marks = np.flatnonzero((kind == Kind.BEGIN) | (kind == Kind.END))
    if np.any(kind[marks] == Kind.BEGIN):
        is_begin = kind[marks] == Kind.BEGIN
        begin, end = marks[is_begin], np.append(marks[1:], len(kind))[is_begin]
        return Iterations(How.MARKS, trace.events["tensor"][begin], begin, end, _typical(life, begin, end, trace))
    before = live_after_steps(life)[life.begin] - life.size_bytes
    found = segment(life.size_bytes, before)
    if found.period == NO_PERIOD or not found.typical.any():
        raise TraceError(
            trace.path or "trace",
            0,
            "never repeats: trace at least four iterations, or mark them by zico.step()",
        )
    begin = life.step_event[life.begin[found.starts]]
    end = np.append(begin[1:], len(kind))
    return Iterations(How.PERIOD, np.arange(len(begin)), begin, end, found.typical)


def with_operations(trace: Trace, iterations: Iterations) -> NDArray[np.bool_]:
    """Return which iterations have operations; a recording has those of some only (``zico trace --ops``)."""
    return _with_operations(trace, iterations.begin, iterations.end)


def _with_operations(trace: Trace, begin: Int64s, end: Int64s) -> NDArray[np.bool_]:
    operations = np.flatnonzero(trace.events["kind"] == Kind.OP)
    found: NDArray[np.bool_] = np.greater(np.searchsorted(operations, end), np.searchsorted(operations, begin))
    return found


def choose(trace: Trace, iterations: Iterations, number: int | None = None) -> int:
    """Return the index of the iteration called ``number``, else of the one that stands for all.

    That is a typical one, not the first, with typical ones on both sides if there are, of median duration. In a trace
    with operations it has them, and so has the one after it if there is such a pair.

    Raises:
        TraceError: There is no iteration of that number.
    """
    if number is not None:
        found = np.flatnonzero(iterations.number == number)
        if not len(found):
            known = f"{iterations.number[0]} to {iterations.number[-1]}"
            raise TraceError(trace.path or "trace", 0, f"has no iteration {number}: give one of {known}")
        return int(found[0])
    typical = iterations.typical
    inner = typical.copy()
    inner[1:] &= typical[:-1]
    inner[:-1] &= typical[1:]
    inner[[0, -1]] = False
    later = typical & (np.arange(len(typical)) > 0)
    one = with_operations(trace, iterations)
    two = one & np.append(one[1:], False)
    wanted = [mask & seen for seen in (two, one, True) for mask in (inner, later, typical)]
    candidates = next((np.flatnonzero(mask) for mask in wanted if mask.any()), np.arange(len(typical)))
    t_ns = trace.events["t_ns"]
    durations = t_ns[iterations.end[candidates] - 1] - t_ns[iterations.begin[candidates]]
    return int(candidates[np.argsort(durations, kind="stable")[len(candidates) // 2]])


def lay_out(trace: Trace, life: Lifetimes, iterations: Iterations, index: int) -> Iteration:
    """Return an iteration's tensors on a line of ticks, as the module's text says.

    Raises:
        TraceError: Nothing is allocated or freed in it.
    """
    first = life.step_of_event(int(iterations.begin[index]))
    n_ticks = life.step_of_event(int(iterations.end[index])) - first
    number = int(iterations.number[index])
    if n_ticks <= 0:
        what = f"nothing is allocated or freed in iteration {number}: choose another one by --iteration"
        raise TraceError(trace.path or "trace", 0, what)
    row = np.flatnonzero((life.begin < first + n_ticks) & (life.end > first))
    lower, upper = life.begin[row] - first, life.end[row] - first
    repeats = bool(iterations.typical[index]) and index + 1 < len(iterations)
    cut = 0
    if repeats:
        own = (lower >= 0) | (upper - lower >= n_ticks)  # the others come again at the iteration's end
        row = row[own]
        line = cut_open(lower[own], upper[own], life.size_bytes[row], n_ticks)
        cut, lower, upper = line.cut, line.lower, line.upper
    lower, upper = np.maximum(lower, 0), np.minimum(upper, n_ticks)
    return Iteration(number, repeats, row, lower, upper, life.size_bytes[row], _times(trace, life, first, n_ticks, cut))


def _times(trace: Trace, life: Lifetimes, first: int, n_ticks: int, cut: int) -> Int64s:
    """Return when the ticks of an iteration begin, from the cut on, and when the last one ends."""
    t_ns = trace.events["t_ns"]
    last = life.step_event[first + n_ticks] if first + n_ticks < len(life.step_event) else len(t_ns) - 1
    at = np.maximum.accumulate(t_ns[np.append(life.step_event[first : first + n_ticks], last)])
    took = np.diff(at)
    return np.concatenate([[0], np.cumsum(np.concatenate([took[cut:], took[:cut]]))])


def _typical(life: Lifetimes, begin: Int64s, end: Int64s, trace: Trace) -> NDArray[np.bool_]:
    """Return which iterations allocate the same sizes as most do; the order may differ, as threads make it.

    Those with operations are compared with one another, as are those without: while PyTorch's dispatcher calls Python,
    autograd adds gradients into new tensors (``isTensorSubclassLike`` in its ``input_buffer.cpp``).
    """
    found = np.zeros(len(begin), bool)
    seen = _with_operations(trace, begin, end)
    for group in (seen, ~seen):
        if group.any():
            found[group] = _alike(life, begin[group], end[group], trace)
    return found


def _alike(life: Lifetimes, begin: Int64s, end: Int64s, trace: Trace) -> NDArray[np.bool_]:
    dropped = np.flatnonzero(trace.events["kind"] == Kind.DROPPED)
    whole = np.searchsorted(dropped, begin) == np.searchsorted(dropped, end)
    at = life.step_event[life.begin]
    first, last = np.searchsorted(at, begin), np.searchsorted(at, end)
    keys = [np.sort(life.size_bytes[a:b]).tobytes() for a, b in zip(first, last, strict=True)]
    counts = Counter(key for key, is_whole in zip(keys, whole, strict=True) if is_whole and key)
    most = counts.most_common(1)
    if most and most[0][1] > 1:
        same: NDArray[np.bool_] = np.array([key == most[0][0] for key in keys]) & whole
        return same
    n_allocations = last - first
    totals = np.add.reduceat(np.append(life.size_bytes, 0), np.stack([first, last]).T.ravel())[::2] * (
        n_allocations > 0
    )
    similar = whole & (n_allocations > 0)
    for values in (n_allocations, totals):
        middle = np.median(values)
        similar &= np.abs(values - middle) * _SIMILAR <= middle
    return similar
