"""Find the loops in a sequence of allocations, those of threads that jitter included: what online and offline share.

Theory of operation
    If most distances between the places where a mark (``zico.trace.repeats``) is seen agree, they
    show a *loop* of that length. Most of an iteration's marks are seen once in it and agree on its
    length; noise destroys only a few of them. Shorter loops than the iteration are told apart by
    memory: they rise by a part of what the whole iteration rises. Longer ones by what is left over.
    Of two loops, one within the other::

        M M M M O | M M M M O     micro-batches and an optimizer's step: the outer one is the iteration
        T T T T T v v v T T T     steps and a validation, which is longer than a step, or begins as one: the inner one

    The iteration begins at the mark that is seen at the lowest point of memory, the one before the
    longest rise above it.

Guarantees
    * Takes O(n) and allocates nothing; the arrays that it works in come from outside.

Known limitations
    * Validation that is shorter than a step, of another batch size, and every 64 steps or more
      often looks like an optimizer's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled, inlined, keep_out_of_line
from zico.base.records import I4, I8, Record, dtype_of
from zico.trace.profile import SLACK_SHIFT

if TYPE_CHECKING:
    from zico.base.records import Records


# --------------------------------------------------------------------------------------------------
# Marks: what an allocation and those before it look like, and at what distance they are seen again.
#
# Theory of operation
#     A mark is the sizes of a few allocations in a row and the bytes live before each, hashed; so
#     equal layers differ. All distances from one sighting to the next vote for a length, and those
#     that agree with the one elected are counted. Where an iteration has extra temporaries now and
#     then, distances differ by a little: by a 16th they may.

REPEATS = 3
"""What is seen so many times in a row is no accident: a mark, an iteration, a pass of a loop inside one. So are marks
that agree, and marks that do not."""
NO_LOOP = -1
"""The mark belongs to none."""

STRICT = 3
"""A mark is three allocations in a row, each with the bytes live before it. No iteration has fewer."""
SINGLE = 1
"""A mark is one allocation with the bytes live before it: for threads that reorder much."""
LOOSE = 0
"""A mark is a size alone: for memory that drifts, and threads between which frees are never twice at the same place."""

RISING = -1
"""A mark is as ``STRICT``, with bytes as ``level_above`` counts them, for memory that each iteration leaves higher."""
WIDTHS = (STRICT, SINGLE, LOOSE, RISING)
"""Widths in the order in which they are tried."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Group(Record, align=False):
    """All sightings of one mark."""

    mark: I8
    first: I8
    last: I8
    last_but_one: I8
    gap: I8  # the distance that most sightings agree on
    covered: I8  # allocations in gaps of that length
    at: I8  # where one of these gaps begins, about the middle one
    count: I4
    votes: I4
    agreeing: I4
    order: I4
    loop: I4


GROUP = dtype_of(Group)

_LOW_SHIFT = 5  # lowest points, and both ends of an iteration, may differ by a 32nd of the rise

Array = Any


class Ground(Record, align=False):
    """Where memory came down to last; begins as zeros."""

    low: I8
    rise: I8  # the most that memory has been above it
    is_known: I4
    is_up: I4  # 1: memory is above half of that, or has not come down since


GROUND = dtype_of(Ground)


@inlined
def level_above(ground: Ground, live_bytes: int) -> int:
    """Return how far memory is above where it came down to last, and see whether it comes down now."""
    if ground.is_known == 0 or live_bytes < ground.low:
        ground.low = live_bytes
        ground.is_known = 1
    level = live_bytes - ground.low
    ground.rise = max(ground.rise, level)
    if ground.is_up == 0:
        ground.is_up = 1 if 2 * level > ground.rise else 0
    elif level <= ground.rise >> _LOW_SHIFT:
        ground.is_up = 0
        ground.low = live_bytes
        level = 0
    return level


@compiled
def find_levels(ground: Ground, live_bytes: Array, levels: Array) -> None:
    """Write into ``levels`` how far memory was above where it had come down to last, for each allocation."""
    for i in range(len(live_bytes)):
        levels[i] = level_above(ground, live_bytes[i])


@inlined
def slack(gap: int) -> int:
    """Return by how much two lengths may differ and still be the same."""
    return gap >> SLACK_SHIFT


@inlined
def mixed(value: Any, new: int) -> Any:  # noqa: ANN401 - unsigned: signed overflow is undefined in compiled code
    """Return a mark that has taken a number in."""
    value = (value ^ np.uint64(new)) * _FACTOR
    return value ^ (value >> np.uint64(29))


@inlined
def mark_at(sizes: Array, live_bytes: Array, i: int, width: int) -> int:
    """Return the mark of ``width`` allocations that ends with allocation ``i``, which is at least ``STRICT``."""
    mark = mixed(np.uint64(1), sizes[i])
    if width != LOOSE:
        mark = mixed(mark, live_bytes[i])
        for j in range(i - (STRICT if width == RISING else width) + 1, i):
            mark = mixed(mixed(mark, sizes[j]), live_bytes[j])
    return int(np.int64(mark))


@inlined
def is_regular(group: Group) -> bool:
    """Tell whether most distances between a mark's sightings agree."""
    return group.gap >= STRICT and 5 * group.agreeing >= 3 * (group.count - group.order) > 0


@compiled
def number(sizes: Array, live_bytes: Array, width: int, ids: Array, table: Array, groups: Records[Group]) -> int:
    """Number the marks in the order of their first sighting; returns how many there are."""
    n = len(sizes)
    n_groups = 0
    cells = 1
    while cells < 2 * n:
        cells *= 2
    for cell in range(cells):
        table[cell] = -1
    for i in range(min(STRICT - 1, n)):
        ids[i] = -1
    for i in range(STRICT - 1, n):
        mark = mark_at(sizes, live_bytes, i, width)
        cell = mark & (cells - 1)
        while table[cell] >= 0 and groups[table[cell]].mark != mark:
            cell = (cell + 1) & (cells - 1)
        if table[cell] < 0:
            table[cell] = n_groups
            group = groups[n_groups]
            group.mark = mark
            group.first = i
            group.count = group.agreeing = group.order = group.gap = 0
            group.loop = NO_LOOP
            n_groups += 1
        ids[i] = table[cell]
        groups[ids[i]].count += 1
    return n_groups


@compiled
def elect(n: int, ids: Array, groups: Records[Group], n_groups: int, order: int) -> None:
    """Let the distances between sightings vote (Boyer and Moore), and count for each mark those that agree.

    Of order 2 are the distances over two sightings, for marks that are seen twice in an iteration.
    So as not to take two micro-batches of four for one, these have to agree better.
    """
    for counts in range(2):
        for g in range(n_groups):
            groups[g].last = groups[g].last_but_one = -1
            if counts == 0 and not is_regular(groups[g]):
                groups[g].order = order
                groups[g].votes = groups[g].agreeing = 0
                groups[g].gap = groups[g].covered = groups[g].at = 0
        for i in range(STRICT - 1, n):
            group = groups[ids[i]]
            begin = group.last if order == 1 else group.last_but_one
            group.last_but_one = group.last
            group.last = i
            if begin < 0 or group.order != order:
                continue
            agrees = abs(i - begin - group.gap) <= slack(group.gap) >> 2 * (order - 1)
            if counts == 0:
                if group.votes == 0:
                    group.gap = i - begin
                group.votes += 1 if agrees or group.votes == 0 else -1
            elif agrees:
                group.agreeing += 1
                group.covered += (i - begin) // order
                if 2 * group.agreeing <= group.count:
                    group.at = begin


# --------------------------------------------------------------------------------------------------

MOST_LOOPS = 16

_MOST_INNER = 64  # micro-batches to an optimizer's step
_FEW = 8  # an eighth of the marks is no accident either
_SAME_BEGINNING = 4  # allocations that a validation has in common with a step, at its beginning


class Loop(Record, align=False):
    """Marks that agree on a length: how many, the one seen most regularly, and the one with which the loop begins."""

    gap: I8
    leader: I8
    anchor: I8
    rise: I8
    weight: I8
    marks: I8


LOOP = dtype_of(Loop)


@compiled
def _collect(groups: Records[Group], n_groups: int, loops: Records[Loop]) -> int:
    """Put regular marks of about the same length together; of too many loops, keep those that cover most."""
    n_loops = 0
    for order in range(1, 3):
        for g in range(n_groups):
            group = groups[g]
            if group.order != order or group.count < REPEATS or not is_regular(group):
                continue
            k = _loop_for(group, groups, loops, n_loops)
            if k == n_loops:
                n_loops += 1
                loops[k].weight = 0
                loops[k].leader = g
            elif order == 1 and group.covered > groups[loops[k].leader].covered:
                loops[k].leader = g
            loops[k].gap = groups[loops[k].leader].gap
    return n_loops


@compiled
def _assign(groups: Records[Group], n_groups: int, loops: Records[Loop], n_loops: int) -> None:
    """Give each regular mark to the loop nearest in length."""
    for g in range(n_groups):
        group = groups[g]
        nearest = NO_LOOP
        for k in range(n_loops):
            candidate = is_regular(group) and _belongs(group, groups[loops[k].leader])
            off = abs(group.gap - loops[k].gap)
            if candidate and (nearest == NO_LOOP or off < abs(group.gap - loops[nearest].gap)):
                nearest = k
        if nearest != NO_LOOP:
            loops[nearest].weight += group.agreeing
            if group.order == 1 and _FEW * group.agreeing >= groups[loops[nearest].leader].agreeing:
                group.loop = nearest


@inlined
def _belongs(group: Group, leader: Group) -> bool:
    """Tell whether two marks agree on the length, and were seen during the same time."""
    same_time = group.first <= leader.last and group.last >= leader.first
    return same_time and abs(leader.gap - group.gap) <= slack(leader.gap)


@inlined
def _loop_for(group: Group, groups: Records[Group], loops: Records[Loop], n_loops: int) -> int:
    """Return the loop of the mark's length; else a new one, or the one to give up for it."""
    least = 0
    for k in range(n_loops):
        if _belongs(group, groups[loops[k].leader]):
            return k
        if groups[loops[k].leader].covered < groups[loops[least].leader].covered:
            least = k
    return n_loops if n_loops < MOST_LOOPS else least


@inlined
def _range_of(live_bytes: Array, begin: int, end: int) -> tuple[int, int]:
    low = high = live_bytes[begin]
    for i in range(begin, end):
        low = min(low, live_bytes[i])
        high = max(high, live_bytes[i])
    return low, high


@inlined
def _rise_of(live_bytes: Array, ids: Array, groups: Records[Group], loop: Loop) -> int:
    """Return the most by which memory rises in a pass after which it is where it was, 0 if it never is."""
    leader = groups[loop.leader]
    most = 0
    last = last_but_one = -1
    for i in range(STRICT - 1, len(ids)):
        if ids[i] == loop.leader:
            begin = last if leader.order == 1 else last_but_one
            if begin >= 0 and abs(i - begin - leader.gap) <= slack(leader.gap):
                low, high = _range_of(live_bytes, begin, i)
                if abs(live_bytes[i] - live_bytes[begin]) <= (high - low) >> _LOW_SHIFT:
                    most = max(most, high - low)
            last_but_one = last
            last = i
    return most


@compiled
def _measure(live_bytes: Array, ids: Array, groups: Records[Group], loops: Records[Loop], n_loops: int) -> int:
    """Set each loop's rise, 0 if memory does not return or hardly moves; returns the loop of most marks."""
    low, high = _range_of(live_bytes, len(ids) // 2, len(ids))
    least = (high - low + 1) // 2
    heaviest = 0
    for k in range(n_loops):
        rise = _rise_of(live_bytes, ids, groups, loops[k])
        loops[k].rise = rise if rise >= least else 0
        if loops[k].rise > 0:
            heaviest = max(heaviest, loops[k].weight)
    most = 0
    for k in range(n_loops):
        if _FEW * loops[k].weight >= heaviest:
            most = max(most, loops[k].rise)
    best = NO_LOOP
    for k in range(n_loops):
        if 4 * loops[k].rise < 3 * most:
            loops[k].rise = 0
        elif loops[k].rise > 0 and (best == NO_LOOP or loops[k].weight > loops[best].weight):
            best = k
    return best


@compiled
def _is_outer(
    sizes: Array, live_bytes: Array, ids: Array, groups: Records[Group], inner: Loop, outer: Loop, heaviest: int
) -> bool:
    """Tell whether what comes between the inner loop's runs belongs to an iteration that contains the runs."""
    leader = groups[outer.leader]
    missed = leader.count - 1 - leader.agreeing
    seen = leader.agreeing >= REPEATS * (1 if missed == 0 else 2) and 4 * missed <= leader.agreeing
    seen = seen and 4 * leader.covered >= 3 * groups[inner.leader].covered
    single = leader.order == 1 and groups[inner.leader].order == 1
    if not single or outer.gap > _MOST_INNER * inner.gap or not (seen or _FEW * outer.weight >= heaviest):
        return False
    against = 0
    previous = -1
    for i in range(STRICT - 1, len(ids)):
        if ids[i] != inner.leader:
            continue
        rest = i - previous - inner.gap
        if previous >= inner.gap and rest > slack(inner.gap):
            against += 1 if _is_another(sizes, live_bytes, previous, i, inner) else -1
        previous = i
    return against <= 0


@inlined
def _is_another(sizes: Array, live_bytes: Array, previous: int, i: int, inner: Loop) -> bool:
    """Tell whether what follows the pass that begins before ``previous`` is neither a pass nor a short end of one."""
    begin = previous - inner.gap
    for j in range(begin, previous):
        if live_bytes[j] < live_bytes[begin]:
            begin = j
    begin += inner.gap
    low, high = _range_of(live_bytes, min(begin, i - 1), i)
    rest = i - previous - inner.gap
    if 4 * (high - low) >= 3 * inner.rise and rest > slack(2 * inner.gap):
        return rest > 2 * inner.gap
    j = previous
    while j < i and sizes[j] == sizes[j - inner.gap]:
        j += 1
    return rest > inner.gap or j >= begin + _SAME_BEGINNING


@compiled
def _anchor(live_bytes: Array, groups: Records[Group], n_groups: int, k: int, loop: Loop) -> None:
    """Choose with which mark the loop begins: at the lowest point, before the longest rise, after quiet."""
    low = live_bytes[groups[loop.leader].at]
    for g in range(n_groups):
        if groups[g].loop == k:
            low = min(low, live_bytes[groups[g].at])
    longest = most = quietest = 0
    for g in range(n_groups):
        longest = max(longest, _rise_after(live_bytes, groups[g], k, low, loop.gap))
    for g in range(n_groups):
        if 4 * _rise_after(live_bytes, groups[g], k, low, loop.gap) >= 3 * longest:
            most = max(most, groups[g].agreeing)
    for g in range(n_groups):
        rise = _rise_after(live_bytes, groups[g], k, low, loop.gap)
        if 4 * rise >= 3 * longest and 2 * groups[g].agreeing >= most:
            quiet = rise + _quiet_before(live_bytes, groups[g].at, low, rise)
            if quiet > quietest:
                quietest = quiet
                loop.anchor = g


@inlined
def _rise_after(live_bytes: Array, group: Group, k: int, low: int, gap: int) -> int:
    """Return for how many allocations memory stays above where it is; 0 unless a low mark of that loop."""
    end = group.at + 1
    if group.loop != k or live_bytes[group.at] != low:
        return 0
    while end < min(len(live_bytes), group.at + gap) and live_bytes[end] > low:
        end += 1
    return end - group.at


@inlined
def _quiet_before(live_bytes: Array, at: int, low: int, stretch: int) -> int:
    """Return for how many allocations memory has gone up for less than half that stretch at a time."""
    up = 0
    i = at - 1
    while i >= 0 and at - i < 2 * stretch and 2 * up <= stretch:
        up = up + 1 if live_bytes[i] > low else 0
        i -= 1
    return at - i - up


@compiled
def find_loop(
    sizes: Array, live_bytes: Array, width: int, ids: Array, table: Array, groups: Records[Group], loops: Records[Loop]
) -> int:
    """Return the index in ``loops`` of the iteration, or ``NO_LOOP``.

    Its weight is the number of allocations whose marks come back regularly, in this loop or
    another.

    Args:
        sizes: Allocation sizes, oldest first.
        live_bytes: Live bytes before each of these allocations; for ``RISING`` their levels.
        width: One of ``WIDTHS``.
        ids: As many entries: which group each allocation's mark belongs to, -1 for the first ones.
        table: Scratch of at least four times as many entries.
        groups: Room for as many ``GROUP``.
        loops: Room for ``MOST_LOOPS`` ``LOOP``.
    """
    keep_out_of_line()
    n = len(sizes)
    n_groups = number(sizes, live_bytes, width, ids, table, groups)
    elect(n, ids, groups, n_groups, 1)
    elect(n, ids, groups, n_groups, 2)
    n_loops = _collect(groups, n_groups, loops)
    _assign(groups, n_groups, loops, n_loops)
    best = following = _measure(live_bytes, ids, groups, loops, n_loops)
    heaviest = loops[best].weight if best != NO_LOOP else 0
    while following != NO_LOOP:
        following = NO_LOOP
        for k in range(n_loops):
            longer = loops[k].rise > 0 and loops[k].gap > loops[best].gap + slack(loops[best].gap)
            shortest = following == NO_LOOP or loops[k].gap < loops[following].gap
            if longer and shortest and _is_outer(sizes, live_bytes, ids, groups, loops[best], loops[k], heaviest):
                following = k
        if following != NO_LOOP:
            best = following
    if best != NO_LOOP:
        loops[best].anchor = loops[best].leader
        _anchor(live_bytes, groups, n_groups, best, loops[best])
        loops[best].weight = 0
        for g in range(n_groups):
            if is_regular(groups[g]):
                loops[best].weight += groups[g].count
    return best
