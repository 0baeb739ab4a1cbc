"""Cut a complete trace into iterations, for jobs in which nothing marks where one ends and the next begins.

Theory of operation
    ``zico.trace.repeats`` finds the loop and the mark with which it begins; every sighting of that begins an
    iteration. Where one was missed (noise, validation in between), a cut is made an iteration's length after the last
    or before the next one, where memory is at the same level as there, if that looks like an iteration: it has most
    of the marks of one in the middle. What comes before and after is searched again, since another batch size is
    another loop::

        set-up  T T T T  v v v v v  T T T  U U U U
        ^       ^ ^ ^ ^  ^          ^ ^ ^  ^ ^ ^ ^      starts
        -       t t t t  -          t t t  - - - -      typical
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled, inlined
from zico.trace.marks import GROUP, LOOSE, NO_LOOP, SHORTEST, SINGLE, STRICT, slack
from zico.trace.repeats import LOOP, MOST_LOOPS, find_loop

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.records import Records
    from zico.trace.marks import Group
    from zico.trace.repeats import Loop

NO_PERIOD = 0
REPEATS = 3
"""Times in a row that an iteration is seen before it counts as one."""

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
    if n < REPEATS * SHORTEST:
        return None
    sizes, live_bytes = np.ascontiguousarray(sizes, np.int64), np.ascontiguousarray(live_bytes, np.int64)
    ids, table = np.empty(n, np.int32), np.empty(4 * n, np.int32)
    groups, loops = np.empty(n, GROUP), np.empty(MOST_LOOPS, LOOP)
    weights: dict[int, int] = {}
    for width in (STRICT, SINGLE, LOOSE):
        k = find_loop(sizes, live_bytes, width, ids, table, groups, loops)
        weights[width] = int(loops[k]["weight"]) if k != NO_LOOP else 0
        if 2 * weights[width] >= n:
            break
    else:
        k = find_loop(sizes, live_bytes, max(weights, key=weights.__getitem__), ids, table, groups, loops)
    if k == NO_LOOP:
        return None
    cuts = np.empty((n, 2), np.int64)
    count, end = _cut(live_bytes, ids, groups, loops[k], cuts)
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
