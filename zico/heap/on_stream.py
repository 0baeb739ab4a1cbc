"""The allocator of a device that works behind the processor's back: every tensor comes here, with its stream.

Small tensors are cells (``zico.heap.cells``); those of streams but the first lie in an arena of the stream's own
(``zico.heap.streams``). What is said in ``zico.heap.allocator`` holds here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import (
    call,
    compiled,
    entry,
    inlined,
    keep_out_of_line,
    keep_small,
    private_lock,
    private_unlock,
)
from zico.heap import backing, blocks, cells, following, gaps, placing, reclaim, streams, tensors
from zico.heap.allocator import LARGEST, address_of, count, record_held, serve
from zico.heap.layout import CELL_STEP_BYTES, CHUNK_BYTES, GRANULE_BYTES, HEAP, NO_TENSOR
from zico.heap.placing import MUST_WAIT, NEVER_FITS
from zico.heap.records import EXTRA, MAIN, SPILL, block_at, job_of, tick
from zico.heap.streams import NO_SLOT
from zico.pool.layout import NOBODY
from zico.trace import ring
from zico.trace.events import NO_NAME

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job


@entry(HEAP, int, int)
def allocate_on(heap: HeapRecord, size_bytes: int, stream: int) -> int:
    """Return the address of ``size_bytes`` for a stream's work from now on; else as ``allocate``.

    Args:
        heap: The HEAP record.
        size_bytes: At least 1.
        stream: The stream's handle.
    """
    keep_small()
    me = job_of(heap)
    private_lock(heap.mutex_address)
    slot = streams.slot_of(heap, stream)
    if heap.streams.n_deferred > 0:
        tensors.tend(heap, tensors.FEW)
    if heap.streams.unmarked_bytes > 0:
        streams.keep_up(heap)
    if slot == NO_SLOT:
        offset = NEVER_FITS
    elif size_bytes <= cells.MOST_BYTES:
        offset = _serve_cell(heap, me, slot, size_bytes)
    else:
        offset = _serve_block(heap, me, slot, size_bytes)
    if offset >= 0 and streams.stream_at(heap, slot).handle != stream:
        offset = _follow(heap, me, offset, slot, stream)
    if heap.managed_address != 0 and offset >= 0:
        call(heap.backing.born, (heap.address, offset, slot))
    private_unlock(heap.mutex_address)
    return address_of(heap, offset)


@compiled
def _follow(heap: HeapRecord, me: Job, offset: int, slot: int, stream: int) -> int:
    """Give a tensor to a stream that lost its slot while it waited; returns as ``serve``."""
    keep_out_of_line()
    if streams.follow(heap, slot, stream):
        return offset
    tensors.bury(heap, me, offset, NO_SLOT)
    return NEVER_FITS


@compiled
def _serve_block(heap: HeapRecord, me: Job, slot: int, size_bytes: int) -> int:
    """Find room for a tensor of at least a granule on a stream."""
    rounded = gaps.align_up(max(min(size_bytes, LARGEST), GRANULE_BYTES), CELL_STEP_BYTES)
    return serve(heap, me, slot, size_bytes, rounded, CELL_STEP_BYTES)


@compiled
def _serve_cell(heap: HeapRecord, me: Job, slot: int, size_bytes: int) -> int:
    """Find room for a small tensor on a stream; returns as ``serve``."""
    size_class = cells.class_of(size_bytes)
    offset = cells.take(heap, slot, size_class)
    number = cells.claim(heap) if offset == cells.NOTHING else NOBODY
    if offset == cells.NOTHING and number == NOBODY:
        return _serve_block(heap, me, slot, size_bytes)
    tick(heap, me)
    me.requested_bytes += size_bytes
    if offset == cells.NOTHING:
        offset = _cut(heap, me, number, slot, size_class)
    if offset >= 0:
        count(heap, me, offset, size_bytes, cells.bytes_of(size_class))
    return offset


@compiled
def _cut(heap: HeapRecord, me: Job, number: int, slot: int, size_class: int) -> int:
    """Find room for a chunk and take its first cell, or one that is freed meanwhile; returns as ``serve``."""
    keep_out_of_line()
    arena = EXTRA if slot == MAIN else SPILL + slot
    chunk = placing.place(heap, arena, following.NO_PLACE, CHUNK_BYTES, CHUNK_BYTES)
    if chunk in (MUST_WAIT, NEVER_FITS):
        tensors.hand_over(heap)  # a cell behind other streams' work is better than one that this thread waits for
        offset = cells.take(heap, slot, size_class)
        if offset != cells.NOTHING:
            cells.disclaim(heap, number)
            return offset
        chunk = reclaim.find_place(heap, me, arena, following.NO_PLACE, CHUNK_BYTES, CHUNK_BYTES)
    if chunk < 0:
        cells.disclaim(heap, number)
        offset = cells.take(heap, slot, size_class)
        return offset if offset != cells.NOTHING else chunk
    blocks.enter(heap, chunk, CHUNK_BYTES, me.iteration, NOBODY, NOBODY)
    block_at(heap, chunk).number = NO_TENSOR
    cells.adopt(heap, number, chunk, slot, size_class)
    return cells.take(heap, slot, size_class)


@entry(HEAP, int, int)
def free_on(heap: HeapRecord, address: int, stream: int) -> None:
    """Free a tensor of which a stream has been given its last use; what it lay in is the stream's to use again.

    Where the tensor is another stream's, or was used on others (``record_stream``), it is freed when they have all
    done what they were given until now.
    """
    keep_small()
    offset = address - heap.base
    me = job_of(heap)
    private_lock(heap.mutex_address)
    slot = streams.slot_of(heap, stream)
    if 0 <= offset < heap.window_bytes and len(tensors.uses_at(heap, offset)) == 1:
        tick(heap, me)
        if heap.ring_address != 0:
            _record_death(heap, offset)
        if heap.managed_address != 0:
            call(heap.backing.used, (heap.address, offset, slot))
        tensors.bury(heap, me, offset, slot)
        if heap.ring_address != 0:
            record_held(heap, me)
    else:
        heap.bad_frees += 1
    if heap.streams.n_deferred > 0:
        tensors.tend(heap, tensors.FEW)
    private_unlock(heap.mutex_address)


@inlined
def _record_death(heap: HeapRecord, offset: int) -> None:
    if cells.chunk_at(heap, offset) == NOBODY:
        block = block_at(heap, offset)
        ring.put(heap.ring_address, ring.FREE, block.number, block.size_bytes, NO_NAME)


@entry(HEAP, int, int)
def record_stream(heap: HeapRecord, address: int, stream: int) -> None:
    """Note that a stream uses a tensor that is another's: its free waits for what that stream was given until then."""
    offset = address - heap.base
    private_lock(heap.mutex_address)
    slot = streams.slot_of(heap, stream)
    if 0 <= offset < heap.window_bytes and len(tensors.uses_at(heap, offset)) == 1:
        tensors.note_use(heap, offset, slot)
    private_unlock(heap.mutex_address)


@entry(HEAP)
def settle(heap: HeapRecord) -> None:
    """Put the marks that are due on the streams, and free what the device has finished with: before the job leaves."""
    private_lock(heap.mutex_address)
    backing.bring_up(heap)
    private_unlock(heap.mutex_address)
