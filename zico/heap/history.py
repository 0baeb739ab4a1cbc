"""What earlier iterations tell about a tensor: its class, and its place in the plan.

Theory of operation
    The n-th tensor of a size within an iteration is taken to be the same tensor in every iteration.
    Size and occurrence identify it, since threads reorder allocations of different sizes. Nothing
    is known from a graph or a name.

    *Classes* are learned from lifetimes. What the tensor lived like last time decides its arena.
    Two keys that collide cost a worse place, never correctness.

    *Plans* say where a tensor goes, by one look into a table. Every iteration's lifetimes are
    logged. The plan in force, if any, may not describe what iterations do. Then the planner gets a
    finished log, and what persists in the arena LONG. The planner is a thread that the hot path
    never waits for (``zico.heap.plan_thread``). Its answer takes over at a boundary. A plan is made
    for that arena, round what persists in it; from then on nothing else goes there::

        arena LONG   | w  mmmmmmmmm m|mmm  w   tttt|mmmmmm         w: persists    m, t: planned

Guarantees
    * A tensor goes to its place only if that is free. So a plan that does not fit what happens costs
      a worse place for the tensors concerned, and nothing else.
    * Threads that reorder tensors of different sizes change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import array_at, compiled, entry, inlined, keep_out_of_line, record_at, spread
from zico.base.libc import private_lock, private_unlock, write_bytes
from zico.heap.free_list import gaps_of
from zico.heap.layout import (
    ARENA,
    BLOCK,
    COUNT,
    COUNTS,
    FIRST_PLAN_INTERVAL,
    GRANULE_SHIFT,
    HEAP,
    KEYS,
    LIFETIME,
    LOG,
    LOGS,
    MAX_LIFETIMES,
    PINNED,
    PLACE,
    PLAN_ENTRIES,
    Arena,
)
from zico.pool.layout import MEMBER, NOBODY
from zico.pool.results import NOTHING
from zico.trace import profile

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.heap.layout import HeapRecord, Lifetime, Log
    from zico.pool.layout import Job


# -- classes of tensors ----------------------------------------------------------------------------


_U8 = np.dtype("u1")
_COUNT_SHIFT = 64 - COUNTS.bit_length() + 1
_KEY_SHIFT = 64 - KEYS.bit_length() + 1

SHORT_EVENTS = 8
"""A tensor freed within so many allocations and frees, or a 64th of the iteration, is a temporary."""
_SHORT_SHIFT = 6

SIZE_BITS = 40
"""A key is size + (occurrence << SIZE_BITS): exact for tensors below 1 TiB."""
_PROBES = 8  # more sizes than that with neighbouring hashes share a count: worse places, never wrong ones

UNKNOWN = 0  # stored classes count from one
_SMALL_SHIFT = 2  # smaller than a quarter of a region

LONG = int(Arena.LONG)
EXTRA = int(Arena.EXTRA)
SHORT = int(Arena.SHORT)


@inlined
def key_of(heap: HeapRecord, iteration: int, size_bytes: int) -> int:
    """Count the next tensor of this size in this iteration and return its key: size and occurrence."""
    counts = array_at(heap.counts_address, COUNTS, COUNT)
    i = spread(size_bytes, _COUNT_SHIFT)
    for _ in range(_PROBES):
        count = counts[i]
        if count.iteration != iteration or count.size_bytes == 0:
            count.iteration = iteration
            count.size_bytes = size_bytes
            count.n = 0
        if count.size_bytes == size_bytes:
            break
        i = (i + 1) & (COUNTS - 1)
    counts[i].n += 1
    return size_bytes + (counts[i].n << SIZE_BITS)


def size_of(keys: Any) -> Any:  # noqa: ANN401 - an int, or an array of them
    """Return the size in bytes that is part of a key."""
    return keys & ((1 << SIZE_BITS) - 1)


@inlined
def class_of(key: int) -> int:
    """Return the entry of the class table for a key."""
    return spread(key, _KEY_SHIFT)


@inlined
def arena_for(heap: HeapRecord, entry: int, size_bytes: int) -> int:
    """Return the arena of the class that the tensor had last time.

    Of one that has not been seen to die only the size is known. Many weights are smaller than most
    feature maps, and would each keep a region from being given back. So small ones go to EXTRA,
    large ones to LONG.
    """
    known = array_at(heap.classes_address, KEYS, _U8)[entry]
    if known == UNKNOWN and size_bytes < 1 << (heap.region_shift - _SMALL_SHIFT):
        return EXTRA
    return LONG if known == UNKNOWN else known - 1


@compiled
def learn(heap: HeapRecord, job: Job, entry: int, lived_events: int, same_iteration: bool) -> None:  # noqa: FBT001
    """Note the class that a tensor turns out to have had when it dies."""
    limit = SHORT_EVENTS
    if not profile.is_flat(job.profile):
        limit = max(limit, job.profile.n_events >> _SHORT_SHIFT)
    if not same_iteration:
        arena = EXTRA
    elif lived_events <= limit:
        arena = SHORT
    else:
        arena = LONG
    array_at(heap.classes_address, KEYS, _U8)[entry] = arena + 1


# -- plans -----------------------------------------------------------------------------------------

_PATIENCE = 3
"""So many iterations in a row differ from the plan before a new one is asked for. It is made for
the second of them, since the first may hold the change, or the program's set-up."""
_LONGEST_INTERVAL = 1 << 10
_ARENA_BYTES = ARENA.itemsize
_LOG_BYTES = LOG.itemsize
_SHIFT = 64 - PLAN_ENTRIES.bit_length() + 1

Array = Any


@inlined
def _log_at(heap: HeapRecord, index: int) -> Log:
    return record_at(heap.logs_address + index * _LOG_BYTES, LOG)


@inlined
def _lifetimes(log: Log) -> Records[Lifetime]:
    return array_at(log.lifetimes_address, MAX_LIFETIMES, LIFETIME)


# -- the log ---------------------------------------------------------------------------------------


@inlined
def log_birth(heap: HeapRecord, key: int, size_bytes: int, planned: bool) -> int:  # noqa: FBT001 - a fact to log
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
def log_death(heap: HeapRecord, index: int, iterations_ago: int) -> None:
    """Note that a tensor of this iteration or the one before has died; older ones persist."""
    if index != NOBODY and iterations_ago < LOGS - 1:
        log = heap.log - iterations_ago
        if log < 0:
            log += LOGS
        _lifetimes(_log_at(heap, log))[index].upper = heap.events


# -- the table -------------------------------------------------------------------------------------


@inlined
def _entry_of(key: int) -> int:
    return spread(key, _SHIFT)


@inlined
def planned_place(heap: HeapRecord, key: int) -> int:
    """Return where in the window the plan has the tensor, or ``NOTHING``."""
    if heap.plan_address == 0:
        return NOTHING
    table = array_at(heap.plan_address, PLAN_ENTRIES, PLACE)
    i = _entry_of(key)
    while table[i].key != key:
        if table[i].key == 0:
            return NOTHING
        i = (i + 1) & (PLAN_ENTRIES - 1)
    return heap.planned_offset + table[i].offset


@entry(int, [np.int64], [np.int64], int)
def fill_plan(table_address: int, keys: Array, offsets: Array, n: int) -> None:
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


# -- boundaries ------------------------------------------------------------------------------------


@compiled
def end_iteration(heap: HeapRecord, iteration: int, counts: bool) -> None:  # noqa: FBT001 - compiled
    """Close the log of the iteration that has ended, and see whether a plan is there or wanted. Inside the mutex.

    Args:
        heap: The HEAP record.
        iteration: The number of the iteration that begins.
        counts: The one that has ended is of the kind that plans are made for.
    """
    keep_out_of_line()
    ended = _log_at(heap, heap.log)
    final = _log_at(heap, (heap.log + LOGS - 1) % LOGS)
    ended.end = heap.events
    if not counts:
        pass
    elif ended.planned_bytes >= ended.bytes - (ended.bytes >> profile.SLACK_SHIFT):
        heap.planning.shortfall = 0
        heap.planning.interval = FIRST_PLAN_INTERVAL
    else:
        heap.planning.shortfall += 1
    if heap.planning.next_address != 0:
        heap.plan_address = heap.planning.next_address
        heap.planning.next_address = 0
        heap.planning.asked = 0
        heap.planning.followed += 1
        heap.planning.shortfall = 0
        heap.planning.next_iteration = iteration + heap.planning.interval
        heap.planning.interval = min(2 * heap.planning.interval, _LONGEST_INTERVAL)
    elif counts and heap.planning.shortfall >= _PATIENCE and iteration >= heap.planning.next_iteration:
        _ask(heap, final, iteration)
    heap.log = (heap.log + 1) % LOGS
    fresh = _log_at(heap, heap.log)
    fresh.n = 0
    fresh.bytes = 0
    fresh.planned_bytes = 0
    fresh.begin = heap.events


@inlined
def _ask(heap: HeapRecord, final: Log, iteration: int) -> None:
    """Hand a finished log to the planner, unless it has one."""
    if heap.planning.fd < 0 or heap.planning.asked != 0 or not 0 < final.n < MAX_LIFETIMES:
        return
    source = _lifetimes(final)
    copy = _lifetimes(heap.planning.handed)
    for i in range(final.n):
        copy[i].key = source[i].key
        copy[i].lower = source[i].lower
        copy[i].upper = source[i].upper
    heap.planning.handed.n = final.n
    heap.planning.handed.begin = final.begin
    heap.planning.handed.end = final.end
    heap.planning.n_pinned = _list_pinned(heap, iteration)
    heap.planning.asked = 1
    write_bytes(heap.planning.fd, record_at(heap.member_address, MEMBER).one_address, 8)


@compiled
def _list_pinned(heap: HeapRecord, iteration: int) -> int:
    """List what persists in the arena that is planned: what lies between its gaps and is older than an iteration."""
    keep_out_of_line()
    arena = record_at(heap.arenas_address + LONG * _ARENA_BYTES, ARENA)
    gaps = gaps_of(arena)
    blocks = array_at(heap.blocks_address, heap.window_bytes >> GRANULE_SHIFT, BLOCK)
    pinned = array_at(heap.planning.pinned_address, MAX_LIFETIMES, PINNED)
    n = 0
    offset = arena.start
    for g in range(arena.n_gaps):
        while offset < gaps[g].start and n < MAX_LIFETIMES:
            block = blocks[offset >> GRANULE_SHIFT]
            if block.size_bytes == 0 or block.start != offset:
                break  # addresses that were lost when there were too many gaps
            if iteration - block.iteration >= LOGS - 1:
                pinned[n].offset = offset - arena.start
                pinned[n].size_bytes = block.size_bytes
                n += 1
            offset += block.size_bytes
        offset = gaps[g].start + gaps[g].size_bytes
    return n


@entry(HEAP, int)
def install_plan(heap: HeapRecord, table_address: int) -> None:
    """Let a filled table take over at the next boundary; 0: the planner found nothing worth following."""
    private_lock(heap.mutex_address)
    if table_address != 0:
        heap.planning.next_address = table_address
    else:
        heap.planning.asked = 0
        heap.planning.next_iteration += heap.planning.interval
        heap.planning.interval = min(2 * heap.planning.interval, _LONGEST_INTERVAL)
    private_unlock(heap.mutex_address)
