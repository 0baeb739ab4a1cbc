"""The iteration that an order of operations makes, in compiled code: its operations, tensors and gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import compiled
from zico.planning.saving import fast
from zico.planning.saving.problem import PERSISTENT, Int64s

if TYPE_CHECKING:
    from collections.abc import Sequence


class Given(NamedTuple):
    """A problem and its graph as arrays of int64; lists have the entries from ``begin[i]`` to ``begin[i + 1]``."""

    pause: Int64s
    """The ns ahead of each operation; ahead of the first one, those behind the last one, too."""
    duration: Int64s
    size: Int64s
    alloc: Int64s
    free: Int64s
    access_begin: Int64s
    access_op: Int64s
    out_ns: Int64s
    """What each tensor takes to leave."""
    back_ns: Int64s
    result: Int64s
    """The graph's result that each tensor is, or -1."""
    part_begin: Int64s
    part: Int64s
    """The problem's operations that each of the graph's is."""
    cost: Int64s
    until: Int64s
    rest: Int64s
    bytes: Int64s
    """The bytes of each result."""
    maker: Int64s
    inputs_begin: Int64s
    inputs: Int64s
    results_begin: Int64s
    results: Int64s
    readers_begin: Int64s
    readers: Int64s
    leaves_begin: Int64s
    leaves: Int64s
    """The results that can be dropped behind each operation, for their longest pause."""
    numbers: Int64s
    """The period, the limit, the bytes of the smallest tensor that moves, and operations of the forward pass."""


PERIOD, LIMIT, LEAST, FORWARD = range(4)


def rows(lists: Sequence[Sequence[int]]) -> tuple[Int64s, Int64s]:
    """Return lists as one array: where each begins in it, and their numbers."""
    begin = np.cumsum([0, *map(len, lists)])
    return begin, np.array([each for one in lists for each in one], np.int64)


# -- an order as an iteration ----------------------------------------------------------------------


class Made(NamedTuple):
    """The iteration that an order makes, and the gaps in it."""

    op: Int64s
    step: Int64s
    """The order's entry that each operation is part of."""
    ops: Int64s
    """The columns of operations as in ``fast``, without those of swaps."""
    load: Int64s
    tensor: Int64s
    alloc: Int64s
    free: Int64s
    access_begin: Int64s
    access: Int64s
    gap_tensor: Int64s
    gap: Int64s
    gap_first: Int64s
    gap_last: Int64s
    gap_returns: Int64s
    """1: an access ends it; 0: it ends with its tensor."""
    period: int
    alive: int
    """The bytes alive when the iteration begins."""


@compiled
def _sorted_slice(values: Int64s, begin: int, end: int) -> int:
    """Sort some values and leave out what is there twice; returns the end of what is left."""
    for i in range(begin + 1, end):
        value, j = values[i], i - 1
        while j >= begin and values[j] > value:
            values[j + 1] = values[j]
            j -= 1
        values[j + 1] = value
    last = begin
    for i in range(begin, end):
        if i == begin or values[i] != values[last - 1]:
            values[last] = values[i]
            last += 1
    return last


class _Placed(NamedTuple):
    """Where the problem's operations run in an order."""

    op: Int64s
    step: Int64s
    begin: Int64s
    place: Int64s
    """Operation ``i`` runs at the places from ``begin[i]`` to ``begin[i + 1]``."""


class _Lives(NamedTuple):
    """The tensors of an order; a result that is made again is several of them."""

    tensor: Int64s
    alloc: Int64s
    free: Int64s
    access_begin: Int64s
    access: Int64s


@compiled
def iteration_of(of: Given, order: Int64s) -> Made:
    """Return the iteration of an order of the graph's operations."""
    placed = _placed(of, order)
    ops, period = _times(of, placed)
    lives = _lives(of, placed)
    load, alive = _load(of, lives, ops)
    gap_tensor, gap, first, last, returns = _gaps(of, lives, len(placed.op))
    tensor, alloc, free, access_begin, access = lives
    access = access[: access_begin[len(tensor)]]
    return Made(
        placed.op,
        placed.step,
        ops,
        load,
        tensor,
        alloc,
        free,
        access_begin,
        access,
        gap_tensor,
        gap,
        first,
        last,
        returns,
        period,
        alive,
    )


@compiled
def _placed(of: Given, order: Int64s) -> _Placed:
    n, n_old = 0, len(of.duration)
    for node in order:
        n += of.part_begin[node + 1] - of.part_begin[node]
    op, step, begin = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n_old + 1, np.int64)
    at = 0
    for i in range(len(order)):
        for j in range(of.part_begin[order[i]], of.part_begin[order[i] + 1]):
            op[at], step[at] = of.part[j], i
            begin[of.part[j] + 1] += 1
            at += 1
    for i in range(n_old):
        begin[i + 1] += begin[i]
    place, filled = np.empty(n, np.int64), begin[:n_old].copy()
    for i in range(n):
        place[filled[op[i]]] = i
        filled[op[i]] += 1
    return _Placed(op, step, begin, place)


@compiled
def _times(of: Given, placed: _Placed) -> tuple[Int64s, int]:
    """Return the columns of operations, of which pauses stay ahead of first runs, and the period."""
    n, period = len(placed.op), of.numbers[PERIOD]
    ops = np.zeros((n + 1, 8), np.int64)
    for i in range(n):
        op = placed.op[i]
        ops[i, fast.DURATION] = of.duration[op]
        if placed.place[placed.begin[op]] == i:
            ops[i, fast.PAUSE] = of.pause[op]
        else:
            period += of.duration[op]
    return ops, period


@compiled
def _runs(of: Given, placed: _Placed, access: int) -> tuple[int, int]:
    op = of.access_op[access] % len(of.duration)
    return placed.begin[op], placed.begin[op + 1]


@compiled
def _lives(of: Given, placed: _Placed) -> _Lives:
    n_lives = n_accesses = 0
    for tensor in range(len(of.size)):
        n_lives += _n_lives(of, placed, tensor)
        for i in range(of.access_begin[tensor], of.access_begin[tensor + 1]):
            begin, end = _runs(of, placed, i)
            n_accesses += end - begin
    none = np.empty(n_lives, np.int64)
    lives = _Lives(none, none.copy(), none.copy(), np.zeros(n_lives + 1, np.int64), np.empty(n_accesses, np.int64))
    life = 0
    for tensor in range(len(of.size)):
        count = _n_lives(of, placed, tensor)
        if count == 1:
            _keep(of, placed, lives, tensor, life)
        else:
            _split(of, placed, lives, tensor, life, count)
        life += count
    return lives


@compiled
def _n_lives(of: Given, placed: _Placed, tensor: int) -> int:
    if of.result[tensor] < 0:
        return 1
    begin, end = _runs(of, placed, of.access_begin[tensor])
    return end - begin


@compiled
def _keep(of: Given, placed: _Placed, lives: _Lives, tensor: int, life: int) -> None:
    """Let a tensor live as it did, or, a result, to the last use, those of operations that run again included."""
    n_old, n = len(of.duration), len(placed.op)
    persists = of.alloc[tensor] == PERSISTENT
    low = high = PERSISTENT
    if not persists:
        low = placed.place[placed.begin[of.alloc[tensor]]]
        high = placed.place[placed.begin[of.free[tensor] % n_old]] + of.free[tensor] // n_old * n
    used = start = lives.access_begin[life]
    for i in range(of.access_begin[tensor], of.access_begin[tensor + 1]):
        begin, end = _runs(of, placed, i)
        if of.result[tensor] >= 0:
            high = max(high, placed.place[end - 1])
    for i in range(of.access_begin[tensor], of.access_begin[tensor + 1]):
        begin, end = _runs(of, placed, i)
        rounds = of.access_op[i] // n_old
        lives.access[used] = placed.place[begin] + rounds * n
        used += 1
        for j in range(begin + 1, end):
            if rounds == 0 and (persists or low <= placed.place[j] <= high):
                lives.access[used] = placed.place[j]
                used += 1
    lives.tensor[life], lives.alloc[life], lives.free[life] = tensor, low, high
    lives.access_begin[life + 1] = _sorted_slice(lives.access, start, used)


@compiled
def _split(of: Given, placed: _Placed, lives: _Lives, tensor: int, life: int, count: int) -> None:
    """Let a result live from each run of its maker to its last reader before the next one."""
    used = at = lives.access_begin[life]
    for i in range(of.access_begin[tensor], of.access_begin[tensor + 1]):
        begin, end = _runs(of, placed, i)
        for j in range(begin, end):
            lives.access[used] = placed.place[j]
            used += 1
    used = _sorted_slice(lives.access, at, used)
    begin, end = _runs(of, placed, of.access_begin[tensor])
    for k in range(count):
        low = placed.place[begin + k]
        if k == 0:
            low = min(low, placed.place[placed.begin[of.alloc[tensor]]])
        until = placed.place[begin + k + 1] if k + 1 < count else len(placed.op)
        while at < used and lives.access[at] < until:
            at += 1
        lives.tensor[life + k], lives.alloc[life + k], lives.free[life + k] = tensor, low, lives.access[at - 1]
        lives.access_begin[life + k + 1] = at


@compiled
def _load(of: Given, lives: _Lives, ops: Int64s) -> tuple[Int64s, int]:
    """Return the bytes alive during each operation, and at the beginning; write what each allocates and frees."""
    n, alive = len(ops) - 1, 0
    load = np.zeros(n + 1, np.int64)
    for i in range(len(lives.tensor)):
        size, alloc, free = of.size[lives.tensor[i]], lives.alloc[i], lives.free[i]
        if alloc == PERSISTENT or free >= n:
            load[0] += size
            alive += size
        if alloc != PERSISTENT:
            ops[alloc, fast.ALLOC] += size
            ops[free % n, fast.FREE] += size
            load[alloc] += size
            load[free % n + 1] -= size
    for i in range(n):
        load[i + 1] += load[i]
    return load[:n], alive


@compiled
def _gaps(of: Given, lives: _Lives, n: int) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Return the gaps that are not empty: tensor, number, first and last operation, and whether an access ends it."""
    rows = np.empty((5, len(lives.access)), np.int64)
    count = 0
    for i in range(len(lives.tensor)):
        if of.size[lives.tensor[i]] < of.numbers[LEAST]:
            continue
        begin, end = lives.access_begin[i], lives.access_begin[i + 1]
        for j in range(begin, end):
            following, returns = lives.free[i] + 1, 0
            if j + 1 < end:
                following, returns = lives.access[j + 1], 1
            elif lives.alloc[i] == PERSISTENT:
                following, returns = lives.access[begin] + n, 1
            if following > lives.access[j] + 1:
                rows[0, count], rows[1, count], rows[4, count] = i, j - begin, returns
                rows[2, count], rows[3, count] = lives.access[j] + 1, following - 1
                count += 1
    found = rows[:, :count].copy()
    return found[0], found[1], found[2], found[3], found[4]
