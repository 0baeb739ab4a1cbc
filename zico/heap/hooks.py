"""What the frameworks call instead of the C library: one range check, then ours or the real one.

They hold no GIL, contain no Python and may run on any thread, before, during and after Zico's own
life in the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, call, callback, inlined, record_at, symbol_address
from zico.heap import allocator, layout
from zico.heap.layout import HEAP, Attached
from zico.pool.results import NEVER_FITS, NOT_SERVED

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord

_heap_address = symbol_address(layout.SYMBOL)
_ATTACHED = int(Attached.YES)
_I64 = np.dtype("i8")
ENOMEM = 12
ELSEWHERE, REFUSED = 0, -1


@inlined
def _heap() -> HeapRecord:
    return record_at(_heap_address(), HEAP)


@inlined
def from_pool(heap: HeapRecord, size_bytes: int, alignment: int) -> int:
    """Return an address in the pool, ``ELSEWHERE`` where the pool does not serve, or ``REFUSED``."""
    if size_bytes < heap.threshold_bytes or heap.attached != _ATTACHED:
        return ELSEWHERE
    address = allocator.allocate(heap, size_bytes, alignment)
    if address == NEVER_FITS:
        return REFUSED
    return ELSEWHERE if address == NOT_SERVED else address


@callback(types.int32(types.int64, types.int64, types.int64))
def posix_memalign(out_address: int, alignment: int, size_bytes: int) -> int:
    """Stand in for ``posix_memalign(3)``."""
    heap = _heap()
    address = from_pool(heap, size_bytes, alignment)
    if address == REFUSED:
        return ENOMEM
    if address != ELSEWHERE:
        array_at(out_address, 1, _I64)[0] = address
        return 0
    status: int = np.int32(call(heap.real_posix_memalign, (out_address, alignment, size_bytes)))  # type: ignore[assignment]
    return status


@callback(types.int64(types.int64, types.int64))
def aligned_alloc(alignment: int, size_bytes: int) -> int:
    """Stand in for ``aligned_alloc(3)``."""
    heap = _heap()
    address = from_pool(heap, size_bytes, alignment)
    if address == REFUSED:
        return 0
    return address if address != ELSEWHERE else call(heap.real_aligned_alloc, (alignment, size_bytes))


@callback(types.void(types.int64))
def free(address: int) -> None:
    """Stand in for ``free(3)``."""
    heap = _heap()
    offset = address - heap.base
    if 0 <= offset < heap.window_bytes:
        if heap.attached == _ATTACHED:
            allocator.free(heap, address)
    else:
        call(heap.real_free, (address,))
