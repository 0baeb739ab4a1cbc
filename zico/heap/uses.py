"""Record an operation and which of the heap's tensors it reads and writes, in one call."""

from __future__ import annotations

import numpy as np

from zico.compiled import array_at, entry, keep_out_of_line, private_lock, private_unlock, record_at
from zico.heap import blocks
from zico.heap.layout import HEAP, NO_TENSOR
from zico.heap.records import block_at
from zico.trace import ring
from zico.trace.events import Kind

MOST = 1 << 12
"""Tensors of one operation that are told apart: of more, foreach operations on large models, the rest is left out."""

_READ, _WRITE = int(Kind.READ), int(Kind.WRITE)
_I64 = np.dtype("i8")


@entry(int, int, int, int, int, int, int)
def record_op(
    heap_address: int, tensors_address: int, n_read: int, n_written: int, n_made: int, name: int, begin_ticks: int
) -> None:
    """Record an operation that began at ``begin_ticks`` and ends now, behind what it read and wrote.

    Args:
        heap_address: A HEAP record that records.
        tensors_address: Where tensors' storages begin, as i8: those read, those written, those returned; overwritten.
        n_read: How many of them are read.
        n_written: How many are written.
        n_made: How many are returned: written, too, unless they share memory with what is read (a view).
        name: Of the operation.
        begin_ticks: By ``ring.now_ticks``.
    """
    keep_out_of_line()
    heap = record_at(heap_address, HEAP)
    n = min(n_read + n_written + n_made, MOST)
    tensors = array_at(tensors_address, n, _I64)
    private_lock(heap.mutex_address)
    if heap.ring_address != 0:
        for i in range(n):
            offset = tensors[i] - heap.base
            inside = 0 <= offset < heap.window_bytes and blocks.is_block(heap, offset)
            tensors[i] = block_at(heap, offset).number if inside else NO_TENSOR
        for i in range(n):
            first = 0 if i < n_read or i >= n_read + n_written else n_read
            seen = tensors[i] == NO_TENSOR
            for j in range(first, i):
                seen = seen or tensors[j] == tensors[i]
            if not seen:
                ring.put(heap.ring_address, _READ if i < n_read else _WRITE, tensors[i], 0, name)
        ring.put_op(heap.ring_address, name, begin_ticks)
    private_unlock(heap.mutex_address)
