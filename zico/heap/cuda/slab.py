"""Slabs: chunks that the arenas see as blocks, cut into units for tensors below a granule.

A chunk's units are of one size and for one stream. Chunks of a stream and size that have a free
unit are in a list; the first one serves. A chunk whose last tensor is freed goes back to its arena.
All is O(1); no memory of the device is touched::

    chunk of 512-byte units   | live | live | free: stack | live | fresh ... |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import array_at, compiled, inlined, keep_out_of_line, record_at
from zico.heap import placing
from zico.heap.cuda.layout import CHUNK, CHUNK_BYTES, CHUNK_SHIFT, MAX_CHUNKS, UNIT_LIVES, UNIT_SIZES, UNIT_STEP_BYTES
from zico.heap.cuda.streams import stream_at
from zico.pool.layout import NOBODY
from zico.pool.results import NOTHING

if TYPE_CHECKING:
    from zico.heap.cuda.layout import Chunk, Stream
    from zico.heap.layout import HeapRecord

MOST_BYTES = UNIT_SIZES[-1]
"""Tensors up to this size get a unit."""

_CHUNK_RECORD_BYTES = CHUNK.itemsize
_I32 = np.dtype("i4")
_SIZES = np.array(UNIT_SIZES, np.int64)
# Class of a size of so many steps, rounded up; entry 0 is never asked for.
_CLASSES = np.searchsorted(_SIZES, np.arange(MOST_BYTES // UNIT_STEP_BYTES + 1) * UNIT_STEP_BYTES).astype(np.uint8)


@inlined
def class_of(size_bytes: int) -> int:
    """Return the size class of a tensor of at most ``MOST_BYTES``."""
    return int(_CLASSES[(size_bytes + UNIT_STEP_BYTES - 1) // UNIT_STEP_BYTES])


@inlined
def bytes_of(size_class: int) -> int:
    """Return the size of a class's units."""
    return int(_SIZES[size_class])


@inlined
def _chunk(heap: HeapRecord, number: int) -> Chunk:
    return record_at(heap.slab.chunks_address + number * _CHUNK_RECORD_BYTES, CHUNK)


@inlined
def chunk_at(heap: HeapRecord, offset: int) -> int:
    """Return the number of the chunk that an offset lies in, ``NOBODY`` if none is there."""
    return array_at(heap.slab.chunk_of_address, heap.window_bytes >> CHUNK_SHIFT, _I32)[offset >> CHUNK_SHIFT] - 1


@inlined
def slot_at(heap: HeapRecord, number: int) -> int:
    """Return the stream slot that a chunk's units are for."""
    return _chunk(heap, number).slot


@inlined
def bytes_at(heap: HeapRecord, number: int) -> int:
    """Return the size of a chunk's units."""
    return _chunk(heap, number).unit_bytes


@inlined
def uses_at(heap: HeapRecord, number: int, offset: int) -> Any:  # noqa: ANN401 - an array of one int32
    """Return the uses of the unit that begins at an offset; an array of none if none does."""
    chunk = _chunk(heap, number)
    index = (offset - chunk.offset) // chunk.unit_bytes
    begins = chunk.offset + index * chunk.unit_bytes == offset and index < chunk.n_units
    return chunk.uses[index : index + 1] if begins else chunk.uses[:0]


@compiled
def take(heap: HeapRecord, slot: int, size_class: int) -> int:
    """Return the offset of a free unit, or ``NOTHING`` if a chunk is needed first (``claim``)."""
    stream = stream_at(heap, slot)
    number = stream.chunks[size_class]
    if number == NOBODY:
        return NOTHING
    chunk = _chunk(heap, number)
    if chunk.n_stacked > 0:
        chunk.n_stacked -= 1
        index = np.int64(chunk.stack[chunk.n_stacked])
    else:
        index = np.int64(chunk.n_fresh)
        chunk.n_fresh += 1
    chunk.uses[index] = UNIT_LIVES
    chunk.n_live += 1
    if chunk.n_live == chunk.n_units:
        _unlink(heap, stream, number)
    return int(chunk.offset + index * chunk.unit_bytes)


@compiled
def claim(heap: HeapRecord) -> int:
    """Take a chunk record for ``adopt``, or ``disclaim``; returns its number, ``NOBODY`` if there is none left."""
    keep_out_of_line()
    number = heap.slab.idle_chunk
    if number != NOBODY:
        heap.slab.idle_chunk = _chunk(heap, number).next
    elif heap.slab.n_chunks < MAX_CHUNKS:
        number = heap.slab.n_chunks
        heap.slab.n_chunks += 1
    return number


@compiled
def disclaim(heap: HeapRecord, number: int) -> None:
    """Give a chunk record back."""
    keep_out_of_line()
    _chunk(heap, number).next = heap.slab.idle_chunk
    heap.slab.idle_chunk = number


@compiled
def adopt(heap: HeapRecord, number: int, offset: int, slot: int, size_class: int) -> None:
    """Cut the block of a chunk's size that begins at an offset into units."""
    keep_out_of_line()
    chunk = _chunk(heap, number)
    chunk.offset = offset
    chunk.size_class = size_class
    chunk.unit_bytes = bytes_of(size_class)
    chunk.slot = slot
    chunk.n_units = CHUNK_BYTES // chunk.unit_bytes
    chunk.n_live = 0
    chunk.n_fresh = 0
    chunk.n_stacked = 0
    _note_chunk(heap, offset, number + 1)
    _link(heap, stream_at(heap, slot), number)


@inlined
def _note_chunk(heap: HeapRecord, offset: int, entry: int) -> None:
    array_at(heap.slab.chunk_of_address, heap.window_bytes >> CHUNK_SHIFT, _I32)[offset >> CHUNK_SHIFT] = entry


@compiled
def give(heap: HeapRecord, number: int, offset: int) -> None:
    """Free a unit; the chunk goes back to its arena when it was the last one."""
    chunk = _chunk(heap, number)
    stream = stream_at(heap, chunk.slot)
    index = (offset - chunk.offset) // chunk.unit_bytes
    chunk.uses[index] = 0
    chunk.stack[chunk.n_stacked] = index
    chunk.n_stacked += 1
    if chunk.n_live == chunk.n_units:
        _link(heap, stream, number)
    chunk.n_live -= 1
    if chunk.n_live == 0:
        _unlink(heap, stream, number)
        _note_chunk(heap, chunk.offset, 0)
        disclaim(heap, number)
        placing.give(heap, chunk.offset)


@inlined
def _link(heap: HeapRecord, stream: Stream, number: int) -> None:
    chunk = _chunk(heap, number)
    first = stream.chunks[chunk.size_class]
    chunk.previous = NOBODY
    chunk.next = first
    if first != NOBODY:
        _chunk(heap, first).previous = number
    stream.chunks[chunk.size_class] = number


@inlined
def _unlink(heap: HeapRecord, stream: Stream, number: int) -> None:
    chunk = _chunk(heap, number)
    if chunk.previous == NOBODY:
        stream.chunks[chunk.size_class] = chunk.next
    else:
        _chunk(heap, chunk.previous).next = chunk.next
    if chunk.next != NOBODY:
        _chunk(heap, chunk.next).previous = chunk.previous
