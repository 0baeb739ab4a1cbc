"""Marks: what an allocation and those before it look like, and at what distance they are seen again.

Theory of operation
    A mark is the sizes of a few allocations in a row and the bytes live before each, hashed; so equal layers differ.
    All distances from one sighting to the next vote for a length, and those that agree with the one elected are
    counted. Where an iteration has extra temporaries now and then, distances differ by a little: by a 16th they may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled, inlined
from zico.records import I4, I8, Record, dtype_of

if TYPE_CHECKING:
    from zico.records import Records

SHORTEST = 4
"""Allocations that an iteration has at least."""
NO_LOOP = -1
"""The mark belongs to none."""

STRICT = 3
"""A mark is three allocations in a row, each with the bytes live before it."""
SINGLE = 1
"""A mark is one allocation with the bytes live before it: for threads that reorder much."""
LOOSE = 0
"""A mark is a size alone: for memory that drifts, and threads between which frees are never twice at the same place."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SLACK_SHIFT = 4


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

Array = Any


@inlined
def slack(gap: int) -> int:
    """Return by how much two lengths may differ and still be the same."""
    return gap >> _SLACK_SHIFT


@inlined
def _mixed(value: Any, new: int) -> Any:  # noqa: ANN401 - unsigned: signed overflow is undefined in compiled code
    value = (value ^ np.uint64(new)) * _FACTOR
    return value ^ (value >> np.uint64(29))


@inlined
def mark_at(sizes: Array, live_bytes: Array, i: int, width: int) -> int:
    """Return the mark of ``width`` allocations that ends with allocation ``i``, which is at least ``STRICT``."""
    mark = _mixed(np.uint64(1), sizes[i])
    if width > LOOSE:
        mark = _mixed(mark, live_bytes[i])
        for j in range(i - width + 1, i):
            mark = _mixed(_mixed(mark, sizes[j]), live_bytes[j])
    return int(np.int64(mark))


@inlined
def is_regular(group: Group) -> bool:
    """Tell whether most distances between a mark's sightings agree."""
    return group.gap >= SHORTEST and 5 * group.agreeing >= 3 * (group.count - group.order) > 0


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

    Of order 2 are the distances over two sightings, for marks that are seen twice in an iteration; so as not to take
    two micro-batches of four for one, these have to agree better.
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
