"""Tell at each allocation whether an iteration begins with it, for jobs in which nothing marks its boundary.

Theory of operation
    A history of allocations is searched for the iteration (``zico.trace.repeats``) each time it has
    doubled, also when one is known. What first looks like an iteration may be a micro-batch.
    Between searches only the mark with which the iteration begins is looked for, so an inserted
    tensor shifts nothing. When it has not been seen for three iterations, the loop is lost
    (validation, another batch size). Then what has come since is searched by itself. The old mark
    is remembered, and counts at once when it comes again.

Guarantees
    * Bounded memory; amortised O(1) for an allocation; allocates nothing and raises nothing.
    * Two boundaries are at least 15/16 of an iteration apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import array_at, compiled, inlined, keep_out_of_line
from zico.base.records import I8, Record, dtype_of
from zico.trace.repeats import (
    GROUP,
    LOOP,
    MOST_LOOPS,
    NO_LOOP,
    RISING,
    STRICT,
    WIDTHS,
    Ground,
    find_loop,
    level_above,
    mark_at,
    slack,
)

if TYPE_CHECKING:
    from zico.trace.repeats import Array, Loop

HISTORY = 1 << 16
"""Allocations looked back at: three times an iteration of 20 thousand."""
FIRST_SEARCH = 16
_LOST_AFTER = 3  # iterations without their mark: another loop cannot be found sooner anyway
_PATIENCE = 16  # iterations that validation may take without being one


class Tracker(Record, align=False):
    """What is known of one job's iterations; begins as zeros and an address."""

    memory_address: I8  # MEMORY_BYTES, any content
    n: I8  # allocations in the history
    events: I8  # allocations ever
    restarted_at: I8  # allocations there had been when the history last began anew
    next_search: I8  # of all of the history: when as many allocations again have come
    lost_at: I8  # where in the history the part since the last loss begins
    next_lost_search: I8  # of that part alone
    since: I8  # allocations since the iteration began
    gap: I8  # an iteration's length, 0 while none is known
    rise: I8  # by how many bytes memory rises in it
    mark: I8
    width: I8
    former_gap: I8  # the loop that was lost, 0 if none was
    former_mark: I8
    former_width: I8
    former_rise: I8
    ground: Ground


TRACKER = dtype_of(Tracker)

_I64 = np.dtype("i8")
_I32 = np.dtype("i4")
_LIVE_AT = HISTORY * 8
_LEVELS_AT = 2 * _LIVE_AT
_GROUPS_AT = 3 * _LIVE_AT
_LOOPS_AT = _GROUPS_AT + HISTORY * GROUP.itemsize
_IDS_AT = _LOOPS_AT + MOST_LOOPS * LOOP.itemsize
_TABLE_AT = _IDS_AT + HISTORY * 4
MEMORY_BYTES = _TABLE_AT + 4 * HISTORY * 4
"""Address space of one tracker; little of it is touched as long as iterations are short."""


@inlined
def bytes_in(tracker: Tracker, width: int, begin: int = 0) -> Array:
    """Return the bytes that marks of a width are made of, for each allocation of the history from ``begin`` on."""
    place = _LEVELS_AT if width == RISING else _LIVE_AT
    return array_at(tracker.memory_address + place + begin * 8, HISTORY - begin, _I64)


@inlined
def note(tracker: Tracker, size_bytes: int, live_bytes: int) -> None:
    """Note an allocation and the bytes live before it."""
    if tracker.n == HISTORY:
        _keep_last(tracker, HISTORY // 2)
    array_at(tracker.memory_address, HISTORY, _I64)[tracker.n] = size_bytes
    array_at(tracker.memory_address + _LIVE_AT, HISTORY, _I64)[tracker.n] = live_bytes
    bytes_in(tracker, RISING)[tracker.n] = level_above(tracker.ground, live_bytes)
    tracker.n += 1
    tracker.events += 1
    tracker.since += 1


@compiled
def restart(tracker: Tracker) -> None:
    """Forget the history and the loop."""
    tracker.n = tracker.since = tracker.gap = tracker.former_gap = tracker.lost_at = 0
    tracker.ground.is_known = tracker.ground.is_up = tracker.ground.rise = 0
    tracker.restarted_at = tracker.events
    tracker.next_search = tracker.next_lost_search = tracker.events + FIRST_SEARCH


@compiled
def begins(tracker: Tracker, size_bytes: int, live_bytes: int) -> bool:
    """Note an allocation and the bytes live before it; tells whether an iteration begins with it."""
    note(tracker, size_bytes, live_bytes)
    sizes = array_at(tracker.memory_address, HISTORY, _I64)
    n = tracker.n - 1
    if n + 1 < STRICT:
        return False
    if tracker.events >= tracker.next_search:
        tracker.next_search = tracker.events + max(tracker.events - tracker.restarted_at, FIRST_SEARCH)
        _search(tracker, 0)
    elif tracker.gap == 0 and tracker.events >= tracker.next_lost_search:
        tracker.next_lost_search = tracker.events + max(tracker.n - tracker.lost_at, FIRST_SEARCH)
        _search(tracker, tracker.lost_at)
    if tracker.gap > 0 and mark_at(sizes, bytes_in(tracker, tracker.width), n, tracker.width) == tracker.mark:
        if tracker.since >= tracker.gap - slack(tracker.gap):
            tracker.since = 0
            return True
        return False
    if (
        tracker.former_gap > 0
        and mark_at(sizes, bytes_in(tracker, tracker.former_width), n, tracker.former_width) == tracker.former_mark
    ):
        tracker.gap = tracker.former_gap
        tracker.mark = tracker.former_mark
        tracker.width = tracker.former_width
        tracker.rise = tracker.former_rise
        tracker.former_gap = 0
        tracker.since = 0
        return True
    if tracker.gap > 0 and tracker.since > _LOST_AFTER * tracker.gap + FIRST_SEARCH:
        _lose(tracker)
    return False


@compiled
def _search(tracker: Tracker, begin: int) -> None:
    """Look for the iteration in the history from ``begin`` on, with marks as strict as its noise allows."""
    keep_out_of_line()
    n = tracker.n - begin
    sizes = array_at(tracker.memory_address + begin * 8, n, _I64)
    groups = array_at(tracker.memory_address + _GROUPS_AT, HISTORY, GROUP)
    loops = array_at(tracker.memory_address + _LOOPS_AT, MOST_LOOPS, LOOP)
    ids = array_at(tracker.memory_address + _IDS_AT, n, _I32)
    table = array_at(tracker.memory_address + _TABLE_AT, 4 * HISTORY, _I32)
    for width in WIDTHS:
        k = find_loop(sizes, bytes_in(tracker, width, begin)[:n], width, ids, table, groups, loops)
        if k != NO_LOOP and 2 * loops[k].weight >= n:
            since = n - 1 - groups[loops[k].anchor].last
            if since < 2 * loops[k].gap and _is_news(tracker, loops[k], width, groups[loops[k].anchor].order):
                tracker.gap = loops[k].gap
                tracker.rise = loops[k].rise
                tracker.mark = groups[loops[k].anchor].mark
                tracker.width = width
                tracker.since = since if since > 0 else tracker.gap
            return


@inlined
def _is_news(tracker: Tracker, loop: Loop, width: int, order: int) -> bool:
    """Tell whether this is another loop than the one known, and no validation after which the lost one comes back."""
    if tracker.gap > 0 and abs(tracker.gap - loop.gap) <= slack(loop.gap):
        return order == 1 and width >= tracker.width
    former = tracker.former_gap
    alike = former == 0 or abs(former - loop.gap) <= slack(former) or 4 * loop.rise >= 3 * tracker.former_rise
    return alike or tracker.since > _PATIENCE * former


@compiled
def _lose(tracker: Tracker) -> None:
    """Forget the loop but for its mark, and look at what has come since the last sighting of it."""
    keep_out_of_line()
    tracker.former_gap = tracker.gap
    tracker.former_mark = tracker.mark
    tracker.former_width = tracker.width
    tracker.former_rise = tracker.rise
    tracker.lost_at = max(0, tracker.n - tracker.since)
    tracker.next_lost_search = tracker.events
    tracker.gap = 0


@inlined
def _keep_last(tracker: Tracker, kept: int) -> None:
    sizes = array_at(tracker.memory_address, HISTORY, _I64)
    live = array_at(tracker.memory_address + _LIVE_AT, HISTORY, _I64)
    levels = bytes_in(tracker, RISING)
    dropped = tracker.n - kept
    for i in range(kept):
        sizes[i] = sizes[dropped + i]
        live[i] = live[dropped + i]
        levels[i] = levels[dropped + i]
    tracker.n = kept
    tracker.lost_at = max(0, tracker.lost_at - dropped)
