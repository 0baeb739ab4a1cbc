"""Follow a plan: the n-th tensor of a size goes where the plan has it, by one look into a table.

Theory of operation
    Every iteration's lifetimes are logged. When the plan in force, if any, does not describe what iterations do, a
    finished log is handed to the planner (``zico.heap.planning``, a thread that the hot path never waits for), and its
    answer takes over at a boundary. Places are relative to an arena of their own. A bitmap says which units of a slot
    are taken, a flag whether one tensor fills it::

        slot 0            slot 1            slot 2
        |aaaa..bbbbbbbbb|cccccccccccccccc|ccc....dddd|
         bits             full             bits

Guarantees
    * A tensor goes to its place only if no live tensor is there, so a plan that does not fit what happens (another
      order, a longer life, a plan of yesterday) costs a worse place for the tensors concerned, and nothing else.
    * Tensors are known by size and occurrence, so threads that reorder tensors of different sizes change nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.compiled import (
    array_at,
    compiled,
    inlined,
    keep_out_of_line,
    keep_small,
    private_lock,
    private_unlock,
    record_at,
    write_bytes,
)
from zico.heap.layout import (
    FIRST_PLAN_INTERVAL,
    LIFETIME,
    LOG,
    LOGS,
    MAX_LIFETIMES,
    PLACE,
    PLAN_ENTRIES,
    SLOT,
)
from zico.pool.layout import MEMBER, NOBODY

NO_PLACE = -1

_FEW = 8
"""Fewer tensors over the threshold are not worth a plan."""
_PATIENCE = 2
"""Iterations in a row that differ from the plan before a new one is asked for."""
_NEARLY_ALL_SHIFT = 4  # a plan that places all but a sixteenth of the bytes describes the iteration
_LONGEST_INTERVAL = 1 << 10
_LOG_BYTES = LOG.itemsize
_I64 = np.dtype("i8")
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # Fibonacci hashing, Knuth TAOCP 3, 6.4
_SHIFT = 64 - PLAN_ENTRIES.bit_length() + 1

Record = Any
Array = Any


@inlined
def _log_at(heap: Record, index: int) -> Record:
    return record_at(heap.logs_address + index * _LOG_BYTES, LOG)


@inlined
def _lifetimes(log: Record) -> Array:
    return array_at(log.lifetimes_address, MAX_LIFETIMES, LIFETIME)


# -- the log --------------------------------------------------------------------------------------------------------


@inlined
def log_birth(heap: Record, key: int, size_bytes: int, planned: bool) -> int:  # noqa: FBT001 - a fact to log
    """Enter a tensor in the log of the iteration in flight; returns its index there, NOBODY if the log is full."""
    log = _log_at(heap, heap.log)
    log.bytes += size_bytes
    if planned:
        log.planned_bytes += size_bytes
    n = log.n
    if n == MAX_LIFETIMES:
        return NOBODY
    lifetime = _lifetimes(log)[n]
    lifetime.key = key
    lifetime.lower = heap.events
    lifetime.upper = 0
    log.n = n + 1
    return n


@inlined
def log_death(heap: Record, index: int, iterations_ago: int) -> None:
    """Note that a tensor of this iteration or the one before has died; older ones persist."""
    if index != NOBODY and iterations_ago < LOGS - 1:
        log = heap.log - iterations_ago
        if log < 0:
            log += LOGS
        _lifetimes(_log_at(heap, log))[index].upper = heap.events


# -- the table ------------------------------------------------------------------------------------------------------


@inlined
def _entry_of(key: int) -> int:
    return int(np.int64(np.uint64(key * _MIX) >> np.uint64(_SHIFT)))


@inlined
def place_of(heap: Record, key: int) -> int:
    """Return where in the window the plan has the tensor, or ``NO_PLACE``."""
    if heap.plan_address == 0:
        return NO_PLACE
    table = array_at(heap.plan_address, PLAN_ENTRIES, PLACE)
    i = _entry_of(key)
    while table[i].key != key:
        if table[i].key == 0:
            return NO_PLACE
        i = (i + 1) & (PLAN_ENTRIES - 1)
    return heap.planned_offset + table[i].offset


@compiled
def fill(table_address: int, keys: Array, offsets: Array, n: int) -> None:
    """Write a plan into a table; of equal keys the first counts."""
    table = array_at(table_address, PLAN_ENTRIES, PLACE)
    for i in range(PLAN_ENTRIES):
        table[i].key = 0
    for k in range(n):
        i = _entry_of(keys[k])
        while table[i].key not in (0, keys[k]):
            i = (i + 1) & (PLAN_ENTRIES - 1)
        if table[i].key == 0:
            table[i].key = keys[k]
            table[i].offset = offsets[k]


# -- places ---------------------------------------------------------------------------------------------------------


@inlined
def _units_per_slot(heap: Record) -> int:
    return 1 << (heap.region_shift - heap.unit_shift)


@inlined
def _units_in(heap: Record, slot: int, offset: int, size_bytes: int) -> tuple[int, int]:
    """Return first and last-plus-one unit of a slot that a range covers."""
    start = slot << heap.region_shift
    first = max(offset - start, 0) >> heap.unit_shift
    unit_bytes = 1 << heap.unit_shift
    end = (min(offset + size_bytes - start, 1 << heap.region_shift) + unit_bytes - 1) >> heap.unit_shift
    return first, end


@inlined
def _word_mask(word: int, first: int, end: int) -> int:
    """Return the bits of a word of the bitmap that lie in ``[first, end)``."""
    low = max(first - word * 64, 0)
    high = min(end - word * 64, 64)
    ones = -1 if high - low == 64 else (1 << (high - low)) - 1  # noqa: PLR2004 - bits of a word
    return ones << low


@inlined
def _bits(heap: Record, slot: int) -> Array:
    planned = slot - (heap.planned_offset >> heap.region_shift)
    words = _units_per_slot(heap) >> 6
    return array_at(heap.bits_address + planned * words * 8, words, _I64)


@compiled
def is_vacant(heap: Record, offset: int, size_bytes: int) -> bool:
    """Tell whether no live tensor has a byte of the range."""
    keep_small()
    slots = array_at(heap.slots_address, heap.window_bytes >> heap.region_shift, SLOT)
    for slot in range(offset >> heap.region_shift, ((offset + size_bytes - 1) >> heap.region_shift) + 1):
        if slots[slot].live == 0:
            continue
        first, end = _units_in(heap, slot, offset, size_bytes)
        if slots[slot].full or end - first == _units_per_slot(heap):
            return False
        bits = _bits(heap, slot)
        for word in range(first >> 6, ((end - 1) >> 6) + 1):
            if bits[word] & _word_mask(word, first, end):
                return False
    return True


@compiled
def occupy(heap: Record, offset: int, size_bytes: int, taken: bool) -> None:  # noqa: FBT001 - two directions
    """Mark a range as taken, or as vacant again."""
    keep_small()
    slots = array_at(heap.slots_address, heap.window_bytes >> heap.region_shift, SLOT)
    for slot in range(offset >> heap.region_shift, ((offset + size_bytes - 1) >> heap.region_shift) + 1):
        first, end = _units_in(heap, slot, offset, size_bytes)
        if end - first == _units_per_slot(heap):
            slots[slot].full = 1 if taken else 0
            continue
        bits = _bits(heap, slot)
        for word in range(first >> 6, ((end - 1) >> 6) + 1):
            mask = _word_mask(word, first, end)
            bits[word] = bits[word] | mask if taken else bits[word] & ~mask


# -- boundaries -----------------------------------------------------------------------------------------------------


@compiled
def turn(heap: Record, iteration: int) -> None:
    """Close the log of the iteration that has ended, and see whether a plan is there or wanted. Inside the mutex.

    Args:
        heap: The HEAP record.
        iteration: The number of the iteration that begins.
    """
    keep_out_of_line()
    ended = _log_at(heap, heap.log)
    final = _log_at(heap, (heap.log + LOGS - 1) % LOGS)
    ended.end = heap.events
    if ended.planned_bytes >= ended.bytes - (ended.bytes >> _NEARLY_ALL_SHIFT):
        heap.shortfall = 0
        heap.plan_interval = FIRST_PLAN_INTERVAL
    else:
        heap.shortfall += 1
    if heap.next_plan_address != 0:
        heap.plan_address = heap.next_plan_address
        heap.next_plan_address = 0
        heap.plan_asked = 0
        heap.plans += 1
        heap.shortfall = 0
        heap.next_plan_iteration = iteration + heap.plan_interval
        heap.plan_interval = min(2 * heap.plan_interval, _LONGEST_INTERVAL)
    elif heap.shortfall >= _PATIENCE and iteration >= heap.next_plan_iteration:
        _ask(heap, final)
    heap.log = (heap.log + 1) % LOGS
    fresh = _log_at(heap, heap.log)
    fresh.n = 0
    fresh.bytes = 0
    fresh.planned_bytes = 0
    fresh.begin = heap.events


@inlined
def _ask(heap: Record, final: Record) -> None:
    """Hand a finished log to the planner, unless it has one."""
    if heap.plan_fd < 0 or heap.plan_asked != 0 or not _FEW <= final.n < MAX_LIFETIMES:
        return
    source = _lifetimes(final)
    copy = _lifetimes(heap.handed)
    for i in range(final.n):
        copy[i].key = source[i].key
        copy[i].lower = source[i].lower
        copy[i].upper = source[i].upper
    heap.handed.n = final.n
    heap.handed.begin = final.begin
    heap.handed.end = final.end
    heap.plan_asked = 1
    write_bytes(heap.plan_fd, record_at(heap.member_address, MEMBER).one_address, 8)


@compiled
def install(heap: Record, table_address: int) -> None:
    """Let a filled table take over at the next boundary; 0: the planner found nothing worth following."""
    private_lock(heap.mutex_address)
    if table_address != 0:
        heap.next_plan_address = table_address
    else:
        heap.plan_asked = 0
        heap.next_plan_iteration += heap.plan_interval
        heap.plan_interval = min(2 * heap.plan_interval, _LONGEST_INTERVAL)
    private_unlock(heap.mutex_address)
