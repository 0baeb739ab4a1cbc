"""The heap's records from compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, compiled, inlined, keep_out_of_line, monotonic_ns, record_at
from zico.heap.layout import ARENA, BLOCK, GRANULE_SHIFT, SLOT, Arena
from zico.pool.layout import MEMBER, header_of, job_at
from zico.pool.regions import announce
from zico.trace import curve

if TYPE_CHECKING:
    from zico.heap.layout import ArenaRecord, Block, HeapRecord, Slot
    from zico.pool.layout import Job, Member
    from zico.records import Records

PERSISTENT = int(Arena.PERSISTENT)
LONG = int(Arena.LONG)
SHORT = int(Arena.SHORT)
EXTRA = int(Arena.EXTRA)
RESTING = int(Arena.RESTING)
SPILL = int(Arena.SPILL)
MAIN = 0
"""The slot of the stream that was seen first, or the host: where tensors have classes, and plans."""

_ARENA_BYTES = ARENA.itemsize
_I32 = np.dtype("i4")

Array = Any


@inlined
def pool_of(heap: HeapRecord) -> Member:
    """Return this process's member record of the pool."""
    return record_at(heap.member_address, MEMBER)


@inlined
def job_of(heap: HeapRecord) -> Job:
    """Return this process's job record in the shared table."""
    pool = pool_of(heap)
    return job_at(pool, pool.job)


@inlined
def arena_of(heap: HeapRecord, index: int) -> ArenaRecord:
    """Return an arena."""
    return record_at(heap.arenas_address + index * _ARENA_BYTES, ARENA)


@inlined
def arena_at(heap: HeapRecord, offset: int) -> int:
    """Return the number of the arena in which an offset lies."""
    index = SPILL
    while offset < arena_of(heap, index).start:
        index -= 1
    if index == RESTING and offset >= heap.side_offset:
        return SPILL + slot_at(heap, offset)
    return index


@inlined
def slot_at(heap: HeapRecord, offset: int) -> int:
    """Return the stream slot whose arena an offset lies in; the main stream's arenas and the next tier are slot 0's."""
    if offset < heap.side_offset or offset >= heap.spill_offset:
        return 0
    return 1 + (offset - heap.side_offset) // heap.side_bytes


@inlined
def slots_of(heap: HeapRecord) -> Records[Slot]:
    """Return the slots of the window."""
    return array_at(heap.slots_address, heap.window_bytes >> heap.region_shift, SLOT)


@inlined
def block_at(heap: HeapRecord, offset: int) -> Block:
    """Return the record of the block that begins in the granule of an offset, if one does."""
    return array_at(heap.blocks_address, heap.window_bytes >> GRANULE_SHIFT, BLOCK)[offset >> GRANULE_SHIFT]


@inlined
def wanted_of(heap: HeapRecord) -> Array:
    """Return the scratch array of regions."""
    return array_at(heap.wanted_address, heap.window_bytes >> heap.region_shift, _I32)


@inlined
def tick(heap: HeapRecord, me: Job) -> None:
    """Advance the job's progress by one event; opens a new bin of the curve when one is due."""
    heap.events += 1
    progress = me.progress + 1
    me.progress = progress
    if progress >> me.current.shift >= me.current.n_bins:
        _open_bin(heap, me)


@compiled
def _open_bin(heap: HeapRecord, me: Job) -> None:
    """Open a bin of the curve, and wake whoever waits for memory where the job's claim falls with it.

    A claim that falls may make a grant safe although nothing is given back.
    """
    keep_out_of_line()
    progress = me.progress
    t_ns = monotonic_ns() - me.started_ns - me.iteration_waited_ns
    curve.extend(me.current, progress, me.held + me.evicted, t_ns)
    pool = pool_of(heap)
    if me.profiled == 1 and header_of(pool).waiters > me.waiting_threads:
        before = max(0, progress - (1 << me.current.shift))
        if curve.claim_at(me.profile, me.claims, progress) < curve.claim_at(me.profile, me.claims, before):
            announce(pool)
