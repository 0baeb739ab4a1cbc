"""Tensors of a device, each a block or a cell: what streams use them, and the end of their lives.

A tensor that other streams than its own were used on (``record_stream``) is freed for good only when each of them has
come to a mark made at its free. Until then it is in a list that is looked at on later calls: nobody waits for it.
Before the job may stand still (it waits, ends an iteration, leaves) the list is emptied: the tensor's own stream then
goes on behind those marks, and what was freed is handed on like everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.compiled import array_at, compiled, inlined, keep_out_of_line, record_at
from zico.heap import blocks, cells, streams
from zico.heap.layout import (
    CELL_LIVES,
    DEFERRED,
    FREED,
    GRANULE_SHIFT,
    MAX_DEFERRED,
    OTHER_STREAM,
    USES,
)
from zico.heap.records import block_at, pool_of, slot_at
from zico.pool.fences import at, counters_of, pair_of, value_in
from zico.pool.layout import NOBODY, STREAMS

if TYPE_CHECKING:
    from zico.heap.layout import Deferred, HeapRecord
    from zico.pool.layout import Job

FEW = 4
"""How many waiting tensors a call for memory looks at: more than it can add."""

_DEFERRED_BYTES = DEFERRED.itemsize

Array = Any


@inlined
def uses_at(heap: HeapRecord, offset: int) -> Array:
    """Return the uses of the tensor that begins at an offset as an array of one, or of none if there is no tensor."""
    number = cells.chunk_at(heap, offset)
    if number != NOBODY:
        uses = cells.uses_at(heap, number, offset)
        return uses[:1] if len(uses) == 1 and uses[0] & (CELL_LIVES | FREED) == CELL_LIVES else uses[:0]
    granule = offset >> GRANULE_SHIFT
    uses = array_at(heap.streams.uses_address, heap.window_bytes >> GRANULE_SHIFT, USES)[granule : granule + 1]
    return uses[:1] if blocks.is_block(heap, offset) and uses[0] & FREED == 0 else uses[:0]


@inlined
def bytes_at(heap: HeapRecord, offset: int) -> int:
    """Return the size of the range of the tensor at an offset."""
    number = cells.chunk_at(heap, offset)
    return cells.bytes_at(heap, number) if number != NOBODY else block_at(heap, offset).size_bytes


@inlined
def owner_at(heap: HeapRecord, offset: int) -> int:
    """Return the slot of the stream that the tensor at an offset belongs to."""
    number = cells.chunk_at(heap, offset)
    return cells.slot_at(heap, number) if number != NOBODY else slot_at(heap, offset)


@compiled
def note_use(heap: HeapRecord, offset: int, slot: int) -> None:
    """Note that the tensor at an offset is used in a slot (or ``streams.NO_SLOT``)."""
    uses = uses_at(heap, offset)
    if slot != streams.NO_SLOT and uses[0] >> slot & 1 == 0:
        streams.stream_at(heap, slot).users += 1
    uses[0] |= 1 << slot


@inlined
def _forget_uses(heap: HeapRecord, uses: int) -> None:
    """Note that a tensor with such uses lives no more."""
    for slot in range(STREAMS):
        if uses >> slot & 1:
            stream = streams.stream_at(heap, slot)
            stream.users -= 1
            if stream.users == 0:
                heap.streams.mixed &= ~(1 << slot)


@compiled
def bury(heap: HeapRecord, me: Job, offset: int, slot: int) -> None:
    """End the life of a tensor that there is, freed on the stream in a slot (or ``streams.NO_SLOT``).

    The next tier is no stream's own, so what lay there is freed when the device has done everything. Where the device
    must be waited for and refuses, what the tensor lay in stays this job's and is not used again.
    """
    uses = uses_at(heap, offset)
    if cells.chunk_at(heap, offset) == NOBODY:
        blocks.end(heap, me, offset)
    used = uses[0] | 1 << slot
    if uses[0] & (OTHER_STREAM - 1) != 0:
        if uses[0] & heap.streams.mixed != 0:
            used |= OTHER_STREAM
        _forget_uses(heap, uses[0])
    if offset < heap.spill_offset:
        me.live_bytes -= bytes_at(heap, offset)
    else:
        used |= OTHER_STREAM
    elsewhere = used & (2 * OTHER_STREAM - 1) & ~(1 << owner_at(heap, offset))
    if elsewhere == 0 or (elsewhere & OTHER_STREAM and streams.synchronize(heap)):
        _give(heap, offset)
        return
    uses[0] |= FREED
    if elsewhere & OTHER_STREAM == 0:
        _defer(heap, offset, elsewhere)


@compiled
def _give(heap: HeapRecord, offset: int) -> None:
    """Let a tensor's range be used again by its stream, with no other's work on it left."""
    uses = array_at(heap.streams.uses_address, heap.window_bytes >> GRANULE_SHIFT, USES)
    number = cells.chunk_at(heap, offset)
    if number != NOBODY:
        cells.give(heap, number, offset)
    else:
        uses[offset >> GRANULE_SHIFT] = 0
        blocks.give(heap, offset)


@inlined
def _deferred(heap: HeapRecord, index: int) -> Deferred:
    return record_at(heap.streams.deferred_address + index * _DEFERRED_BYTES, DEFERRED)


@compiled
def _defer(heap: HeapRecord, offset: int, elsewhere: int) -> None:
    """Put a mark on each stream that a tensor was used on, and free it when all have come there."""
    keep_out_of_line()
    if heap.streams.n_deferred == MAX_DEFERRED:
        hand_over(heap)
    if heap.streams.n_deferred == MAX_DEFERRED:
        if streams.synchronize(heap):
            _give(heap, offset)
        return
    entry = _deferred(heap, heap.streams.n_deferred)
    heap.streams.n_deferred += 1
    entry.offset = offset
    entry.uses = elsewhere
    for slot in range(STREAMS):
        if elsewhere >> slot & 1:
            entry.values[slot] = value_in(streams.fence_for(heap, slot, bytes_at(heap, offset)))


@compiled
def tend(heap: HeapRecord, most: int) -> None:
    """Look at waiting tensors, at most so many, and free those whose streams have come to their marks."""
    keep_out_of_line()
    counters = counters_of(pool_of(heap))
    job = pool_of(heap).job
    for _ in range(min(most, heap.streams.n_deferred)):
        if heap.streams.deferred_next >= heap.streams.n_deferred:
            heap.streams.deferred_next = 0
        entry = _deferred(heap, heap.streams.deferred_next)
        passed = True
        for slot in range(STREAMS):
            if entry.uses >> slot & 1 and counters[at(pair_of(job, slot))] < entry.values[slot]:
                passed = False
        if passed:
            _end_waiting(heap, entry)
        else:
            heap.streams.deferred_next += 1


@compiled
def hand_over(heap: HeapRecord) -> None:
    """Free every waiting tensor; its own stream waits for the others. What the device refuses to wait for stays."""
    keep_out_of_line()
    tend(heap, heap.streams.n_deferred)
    for i in range(
        heap.streams.n_deferred - 1, -1, -1
    ):  # the latest first: waiting for its marks covers the earlier ones
        entry = _deferred(heap, i)
        own = owner_at(heap, entry.offset)
        behind = True
        for slot in range(STREAMS):
            if entry.uses >> slot & 1:
                behind = behind and streams.mark_up_to(heap, slot, entry.values[slot])
                behind = behind and streams.wait_for_own(heap, own, slot, entry.values[slot])
        if behind:
            _end_waiting(heap, entry)


@compiled
def _end_waiting(heap: HeapRecord, entry: Deferred) -> None:
    """Take a tensor off the list, whose last entry takes its place, and free it."""
    keep_out_of_line()
    offset = entry.offset
    heap.streams.n_deferred -= 1
    last = _deferred(heap, heap.streams.n_deferred)
    entry.offset = last.offset
    entry.uses = last.uses
    for slot in range(STREAMS):
        entry.values[slot] = last.values[slot]
    _give(heap, offset)
