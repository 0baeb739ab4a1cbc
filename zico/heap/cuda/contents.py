"""What lies in the window now, for frameworks that ask: slots in use and the tensors in them, by address.

The rows of a window with one slot in use, in which a tensor lives and another has been freed::

    HELD     slot 3, its size, its stream      | tensor | waits | free ... |
    LIVES    the tensor
    WAITS    the other, until other streams have finished with it

A segment of CUDA graphs' memory is one tensor that lives. The next tier is left out: it is no memory
of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line
from zico.base.libc import private_lock, private_unlock
from zico.base.records import I8, Record, dtype_of
from zico.heap.cuda import graph_pools, on_stream, slab, streams
from zico.heap.cuda.layout import CHUNK_BYTES, FREED, UNIT_LIVES
from zico.heap.layout import GRANULE_BYTES, GRANULE_SHIFT, HEAP, block_at, slot_at, slots_of
from zico.pool.layout import NOBODY

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.heap.build import Heap
    from zico.heap.layout import HeapRecord

HELD, LIVES, WAITS = range(3)


class Row(Record):
    """A slot in use, or a tensor."""

    offset: I8
    size_bytes: I8
    stream: I8  # the handle of the one that it is for
    kind: I8


ROW = dtype_of(Row)
_FEW = 1 << 12


def contents(heap: Heap) -> Any:  # noqa: ANN401 - an array of ROW
    """Return the rows of a heap, as they are at one instant; no allocation or free runs meanwhile."""
    n = _FEW
    rows = np.zeros(0, ROW)
    while n > len(rows):
        rows = np.zeros(2 * n, ROW)
        n = write(heap.record[0], rows)
    return rows[:n]


@entry(HEAP, [ROW])
def write(heap: HeapRecord, rows: Records[Row]) -> int:
    """Write the rows of a heap, as many as there is room for; returns how many there are."""
    private_lock(heap.mutex_address)
    slots = slots_of(heap)
    n = 0
    for slot in range(heap.spill_offset >> heap.region_shift):
        if slots[slot].live > 0:
            offset = slot << heap.region_shift
            n = _put(heap, rows, n, offset, 1 << heap.region_shift, HELD)
            n = _write_blocks(heap, rows, n, offset, offset + (1 << heap.region_shift))
    private_unlock(heap.mutex_address)
    return n


@compiled
def _write_blocks(heap: HeapRecord, rows: Records[Row], n: int, offset: int, end: int) -> int:
    """Write the tensors that begin in a slot; returns the number of rows so far."""
    keep_out_of_line()
    while offset < end:
        block = block_at(heap, offset)
        start, size_bytes = block.start, block.size_bytes
        if size_bytes == 0 or start >> GRANULE_SHIFT != offset >> GRANULE_SHIFT:
            offset += GRANULE_BYTES
            continue
        number = slab.chunk_at(heap, start)
        if number != NOBODY:
            n = _write_units(heap, rows, n, number, start)
        else:
            waits = on_stream.block_uses(heap)[start >> GRANULE_SHIFT] & FREED and not graph_pools.has(heap, start)
            n = _put(heap, rows, n, start, size_bytes, WAITS if waits else LIVES)
        offset = ((start + size_bytes - 1) >> GRANULE_SHIFT) + 1 << GRANULE_SHIFT
    return n


@compiled
def _write_units(heap: HeapRecord, rows: Records[Row], n: int, number: int, start: int) -> int:
    """Write the tensors in a chunk; returns the number of rows so far."""
    keep_out_of_line()
    size_bytes = slab.bytes_at(heap, number)
    for index in range(CHUNK_BYTES // size_bytes):
        offset = start + index * size_bytes
        uses = slab.uses_at(heap, number, offset)[0]
        if uses & UNIT_LIVES:
            n = _put(heap, rows, n, offset, size_bytes, WAITS if uses & FREED else LIVES)
    return n


@inlined
def _put(heap: HeapRecord, rows: Records[Row], n: int, offset: int, size_bytes: int, kind: int) -> int:
    if n < len(rows):
        row = rows[n]
        row.offset = offset
        row.size_bytes = size_bytes
        row.stream = streams.stream_at(heap, slot_at(heap, offset)).handle
        row.kind = kind
    return n + 1
