"""Find a trace's iterations, choose the one that stands for all, and lay it on a circle.

Theory of operation
    Training is periodic, so the lifetimes of one iteration lie on a circle of its steps, cut open
    where the fewest bytes cross (``zico/trace/lifetimes.py``). Where an iteration does not repeat,
    its own beginning and end are the cut, and what passes them is two tensors.

Guarantees
    * At no tick are fewer bytes alive than there were in an iteration that repeats exactly.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled, inlined
from zico.base.errors import TraceError
from zico.trace.events import NO_NAME, Kind
from zico.trace.lifetimes import cut_open, live_after_steps
from zico.trace.profile import SLACK_SHIFT
from zico.trace.repeats import (
    GROUND,
    GROUP,
    LOOP,
    MOST_LOOPS,
    NO_LOOP,
    REPEATS,
    RISING,
    STRICT,
    WIDTHS,
    find_levels,
    find_loop,
    slack,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.base.records import Records
    from zico.trace.events import Trace
    from zico.trace.lifetimes import Lifetimes
    from zico.trace.repeats import Group, Loop

    Int64s = NDArray[np.int64]


# --------------------------------------------------------------------------------------------------
# Cut a complete trace into iterations, for jobs in which nothing marks where one ends and the next
# begins.
#
# Theory of operation
#     ``zico.trace.repeats`` finds the loop and the mark with which it begins; every sighting of
#     that begins an iteration. Where one was missed (noise, validation in between), a cut is made
#     an iteration's length after the last or before the next one. Memory is at the same level
#     there, and what is cut off looks like an iteration. It has most of the marks of one in the
#     middle. What comes before and after is searched again, since another batch size is another
#     loop::
#
#         set-up  T T T T  v v v v v  T T T  U U U U
#         ^       ^ ^ ^ ^  ^          ^ ^ ^  ^ ^ ^ ^      starts
#         -       t t t t  -          t t t  - - - -      typical

NO_PERIOD = 0

Array = Any

_MOST_SEARCHES = 32
_ORDINARY = 1 << 20  # marks the marks of one pass in the middle


@dataclasses.dataclass(frozen=True, eq=False)
class Segmentation:
    """A trace's allocations, cut into iterations and what lies between them."""

    starts: NDArray[np.int64]
    """Index of the allocation with which each begins; the first is 0 unless there are no allocations."""
    typical: NDArray[np.bool_]
    """Which of them are iterations of the kind that makes up most of the trace, weighed with how memory rises in it."""
    period: int
    """Allocations in a typical iteration, ``NO_PERIOD`` if there is none."""


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """What one search found: starts, which are whole iterations, and where the last one ends."""

    starts: NDArray[np.int64]
    whole: NDArray[np.bool_]
    end: int
    period: int
    rise: int
    """Bytes by which memory rises in an iteration."""


def segment(sizes: NDArray[np.int64], live_bytes: NDArray[np.int64]) -> Segmentation:
    """Cut a trace into iterations; takes O(n).

    Args:
        sizes: Allocation sizes, in order.
        live_bytes: Live bytes before each of these allocations.
    """
    stretches: list[_Stretch] = []
    pending = [(0, len(sizes))] if len(sizes) else []
    begins: list[int] = []  # of what is no iteration
    for _ in range(_MOST_SEARCHES):
        if not pending:
            break
        begin, end = pending.pop()
        found = _search(sizes[begin:end], live_bytes[begin:end], begin)
        if found is None:
            begins.append(begin)
            continue
        stretches.append(found)
        pending += [(a, b) for a, b in ((begin, int(found.starts[0])), (found.end, end)) if a < b]
    begins += [begin for begin, _ in pending]
    main = max(stretches, key=lambda s: int(s.whole.sum()) * s.period * s.rise, default=None)
    starts = np.concatenate([np.array(begins, np.int64), *(stretch.starts for stretch in stretches)])
    labels = [stretch.whole & (stretch is main) for stretch in stretches]
    order = np.argsort(starts, kind="stable")
    typical = np.concatenate([np.zeros(len(begins), np.bool_), *labels])[order]
    return Segmentation(starts[order], typical, NO_PERIOD if main is None else main.period)


def _search(sizes: NDArray[np.int64], live_bytes: NDArray[np.int64], offset: int) -> _Stretch | None:
    """Look for iterations in a part of the trace, with marks as strict as its noise allows."""
    n = len(sizes)
    if n < REPEATS * STRICT:
        return None
    sizes, live_bytes = np.ascontiguousarray(sizes, np.int64), np.ascontiguousarray(live_bytes, np.int64)
    levels = np.empty(n, np.int64)
    find_levels(np.zeros(1, GROUND)[0], live_bytes, levels)
    ids, table = np.empty(n, np.int32), np.empty(4 * n, np.int32)
    groups, loops = np.empty(n, GROUP), np.empty(MOST_LOOPS, LOOP)
    weights: dict[int, int] = {}
    for width in WIDTHS:
        k = find_loop(sizes, levels if width == RISING else live_bytes, width, ids, table, groups, loops)
        weights[width] = int(loops[k]["weight"]) if k != NO_LOOP else 0
        if 2 * weights[width] >= n:
            break
    else:
        width = max(weights, key=weights.__getitem__)
        k = find_loop(sizes, levels if width == RISING else live_bytes, width, ids, table, groups, loops)
    if k == NO_LOOP:
        return None
    cuts = np.empty((n, 2), np.int64)
    count, end = _cut(levels if width == RISING else live_bytes, ids, groups, loops[k], cuts)
    starts, whole = cuts[np.argsort(cuts[:count, 0])].T
    whole = whole.astype(np.bool_)
    if not whole.any():
        return None
    period = int(np.median(np.diff(starts, append=end)[whole]))
    return _Stretch(starts + offset, whole, end + offset, period, int(loops[k]["rise"]))


@inlined
def _is_whole(before: Array, begin: int, end: int, loop: Loop) -> bool:
    """Tell whether this has an iteration's length, and at least half of the marks of an ordinary one."""
    return abs(end - begin - loop.gap) <= slack(loop.gap) and 2 * (before[end] - before[begin]) >= loop.marks


@inlined
def _near(live_bytes: Array, around: int, gap: int, level: int) -> int:
    """Return where memory is closest to a level near the place expected; of several such places the nearest."""
    n = len(live_bytes)
    best = min(max(around, 0), n)
    for d in range(slack(gap) + 1):
        for i in (around - d, around + d):
            if 0 <= i < n and (best == n or abs(live_bytes[i] - level) < abs(live_bytes[best] - level)):
                best = i
    return best


@compiled
def _cut(live_bytes: Array, ids: Array, groups: Records[Group], loop: Loop, cuts: Array) -> tuple[int, int]:
    """Write where what begins, unordered, and whether it is an iteration; returns how many, and the end of the last."""
    n = len(ids)
    gap = loop.gap
    before = np.empty(n + 1, np.int32)
    first = _count_marks(ids, groups, loop, before)
    at = groups[loop.anchor].at
    loop.marks = before[min(n, at + gap)] - before[at]
    while first >= gap:
        begin = _near(live_bytes, first - gap, gap, live_bytes[first])
        if begin >= first or not _is_whole(before, begin, first, loop):
            break
        first = begin
    previous = first
    count = 0
    for i in range(previous + 1, n + 1):
        if i < n and ids[i] != loop.anchor:
            continue
        if i < n and i - previous < gap - slack(gap) and not _is_whole(before, i, min(n, i + gap), loop):
            continue
        count, previous, end = _fill(live_bytes, before, previous, i, loop, cuts, count)
        is_whole = _is_whole(before, previous, end, loop)
        if i < n or is_whole:
            cuts[count] = (previous, 1 if is_whole else 0)
            count += 1
            previous = i
    return count, previous


@inlined
def _count_marks(ids: Array, groups: Records[Group], loop: Loop, before: Array) -> int:
    """Write how many marks of an ordinary pass come before each place; returns where the loop first begins."""
    anchor = groups[loop.anchor]
    for i in range(anchor.at, min(len(ids), anchor.at + loop.gap)):
        if 4 * groups[ids[i]].count >= anchor.count:
            groups[ids[i]].loop = _ORDINARY
    before[0] = 0
    for i in range(len(ids)):
        before[i + 1] = before[i] + (1 if ids[i] >= 0 and groups[ids[i]].loop == _ORDINARY else 0)
    return anchor.first


@compiled
def _fill(
    live_bytes: Array,
    before: Array,
    begin: int,
    end: int,
    loop: Loop,
    cuts: Array,
    count: int,
) -> tuple[int, int, int]:
    """Cut whole iterations off both ends of what is too long for one; returns their number and what is left."""
    gap = loop.gap
    level = live_bytes[begin]
    is_last = end == len(live_bytes)
    while end - begin > gap + slack(gap):
        front = _near(live_bytes, begin + gap, gap, level)
        back = _near(live_bytes, end - gap, gap, level)
        better = not is_last and begin < back < end and before[end] - before[back] >= before[front] - before[begin]
        if better and _is_whole(before, back, end, loop):
            cuts[count] = (back, 1)
            end = back
        elif not better and _is_whole(before, begin, front, loop):
            cuts[count] = (begin, 1)
            begin = front
        else:
            break
        count += 1
    return count, begin, end


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
        return len(self.begin)

    def events_of(self, number: int) -> tuple[int, int]:
        """Return the first event of the iteration of that number, and the one after its last."""
        index = int(np.flatnonzero(self.number == number)[0])
        return int(self.begin[index]), int(self.end[index])


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
    live = live_after_steps(life)[life.begin]
    found = segment(life.size_bytes, live - life.size_bytes)
    why = "shows no iteration three times"
    if found.period != NO_PERIOD and found.typical.sum() >= REPEATS:
        is_part = is_part_of_a_step(found, live, live - life.size_bytes)
        why = "holds too few steps: what repeats in it are parts of a step, such as layers" if is_part else ""
    if why:
        what = f"{why}: take all of it as one iteration by --whole, or record four steps or more"
        raise TraceError(trace.path or "trace", 0, what)
    begin = life.step_event[life.begin[found.starts]]
    end = np.append(begin[1:], len(kind))
    return Iterations(How.PERIOD, np.arange(len(begin)), begin, end, found.typical)


_MOST = 0.9
_STILL = 128  # parts of a pass's rise: where one begins by less above or below the one before, it begins at its level
_SHORT_OF_PEAK = 0.75


def is_part_of_a_step(found: Segmentation, live_after: Int64s, live_before: Int64s) -> bool:
    """Tell whether what repeats are layers rather than steps, as in a snapshot of one or two steps.

    A step begins where the one before began. Layers begin each a little higher, with one feature
    map more, and memory comes back after the last one. Or each begins a little lower, as maps are
    freed. A leak rises, too, but memory never comes back. Nor are passes steps if they make up less
    than half of the file and most of its peak lies elsewhere.

    Args:
        found: Passes.
        live_after: Live bytes after each allocation.
        live_before: Before it.
    """
    ends = np.append(found.starts[1:], len(live_before))
    of_pass = found.typical.nonzero()[0]
    level = live_before[found.starts]
    top = np.maximum.reduceat(live_after, found.starts)
    base = int(level[of_pass].min())
    covered = int((ends - found.starts)[of_pass].sum())
    if 2 * covered < len(live_before) and top[of_pass].max() - base < _SHORT_OF_PEAK * (live_after.max() - base):
        return True
    step = np.diff(level[of_pass])[np.diff(of_pass) == 1]
    rise = np.median((top - np.minimum.reduceat(live_before, found.starts))[of_pass])
    moves = np.abs(step) * _STILL >= rise
    if not len(step) or moves.mean() <= _MOST:
        return False
    comes_back = live_before[ends[of_pass[-1]] :].min(initial=level[of_pass].max()) <= level[of_pass[0]]
    return bool((step < 0).any() or comes_back)


def as_one_iteration(trace: Trace) -> Trace:
    """Return a trace with all of it as one iteration, but for what was there when it begins."""
    kind = trace.events["kind"]
    events = trace.events[(kind != Kind.BEGIN) & (kind != Kind.END)]
    if not len(events):
        return trace
    is_there = (events["kind"] == Kind.ALLOC) & (events["t_ns"] == events["t_ns"][0])
    begin = 0 if is_there.all() else max(int(np.argmin(is_there)) - 1, 0)  # the last one may be the first event itself
    marks = np.zeros(2, events.dtype)
    marks["kind"] = Kind.BEGIN, Kind.END
    marks["name"] = NO_NAME
    marks["t_ns"] = events["t_ns"][begin], events["t_ns"][-1]
    joined = np.concatenate([events[:begin], marks[:1], events[begin:], marks[1:]])
    return dataclasses.replace(trace, events=joined)


def with_operations(trace: Trace, iterations: Iterations) -> NDArray[np.bool_]:
    """Return which iterations have operations; a recording has those of some only (``zico trace --ops``)."""
    return _with_operations(trace, iterations.begin, iterations.end)


def _with_operations(trace: Trace, begin: Int64s, end: Int64s) -> NDArray[np.bool_]:
    operations = np.flatnonzero(trace.events["kind"] == Kind.OP)
    found: NDArray[np.bool_] = np.greater(np.searchsorted(operations, end), np.searchsorted(operations, begin))
    return found


def choose(trace: Trace, iterations: Iterations, number: int | None = None) -> int:
    """Return the index of the iteration called ``number``, else of the one that stands for all.

    That is a typical one, not the first, with typical ones on both sides if there are, of median
    duration. In a trace with operations it has them, and so has the one after it if there is such a
    pair.

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

    Those with operations are compared with one another, as are those without. While PyTorch's
    dispatcher calls Python, autograd adds gradients into new tensors (``isTensorSubclassLike`` in
    its ``input_buffer.cpp``).
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
        similar &= np.abs(values - middle) * (1 << SLACK_SHIFT) <= middle
    return similar
