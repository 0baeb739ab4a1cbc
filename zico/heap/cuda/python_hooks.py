"""What frameworks call for a GPU's memory while they hold Python's lock (the GIL): CuPy, Numba.

Each function gives the lock up while it runs, since it may wait for memory or for the device. What
ends that wait may need Python: another thread's free, or a host function that a stream has come to.

The arguments are in CuPy's order (``cupy.cuda.CFunctionAllocator``), whose ``param`` is a stream
here.
"""

from __future__ import annotations

from numba import types

from zico.base.compiled import callback, record_at, symbol_address
from zico.base.libc import private_lock, private_unlock
from zico.heap import layout
from zico.heap.cuda import on_stream, streams
from zico.heap.cuda.layout import OTHER_STREAM
from zico.heap.layout import HEAP, Attached

LEGACY_STREAM = 0
"""A context's default stream has this handle."""

_heap_address = symbol_address(layout.SYMBOL)
_give_up_lock = types.ExternalFunction("PyEval_SaveThread", types.int64())
_take_lock = types.ExternalFunction("PyEval_RestoreThread", types.void(types.int64))

_ATTACHED = int(Attached.YES)


@callback(types.int64(types.int64, types.int64, types.int32))
def allocate(stream: int, size_bytes: int, _device: int) -> int:
    """Return ``size_bytes`` for a stream's work from now on, 0 if there are none; waits for regions."""
    thread = _give_up_lock()
    heap = record_at(_heap_address(), HEAP)
    address = 0
    if size_bytes > 0 and heap.attached == _ATTACHED:
        address = max(on_stream.allocate_on(heap, size_bytes, stream), 0)
    _take_lock(thread)
    return address


@callback(types.int64(types.int64, types.int64, types.int32))
def allocate_for_all(_stream: int, size_bytes: int, _device: int) -> int:
    """Return ``size_bytes`` for any stream's work, 0 if there are none; its free, too, waits for the whole device.

    For callers that cannot say which streams are going to use the memory.
    """
    thread = _give_up_lock()
    heap = record_at(_heap_address(), HEAP)
    address = 0
    if size_bytes > 0 and heap.attached == _ATTACHED:
        address = max(on_stream.allocate_on(heap, size_bytes, LEGACY_STREAM), 0)
    if address != 0:
        private_lock(heap.mutex_address)
        on_stream.uses_at(heap, address - heap.base)[0] |= OTHER_STREAM
        streams.synchronize(heap)  # the stream above may have to wait for what others still do there
        private_unlock(heap.mutex_address)
    _take_lock(thread)
    return address


@callback(types.void(types.int64, types.int64, types.int32))
def free(stream: int, address: int, _device: int) -> None:
    """Free a tensor of which its stream has been given the last use; what is not the pool's is ignored."""
    thread = _give_up_lock()
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED and 0 <= address - heap.base < heap.window_bytes:
        on_stream.free_on(heap, address, stream)
    _take_lock(thread)
