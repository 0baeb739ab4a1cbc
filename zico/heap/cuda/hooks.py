"""What frameworks call for a GPU's memory: PyTorch's allocator functions, and the driver's stream-ordered ones.

They hold no GIL, contain no Python and may run on any thread. Tensors that are not the pool's (from
before Zico came) go to the driver's own functions. A framework that asks for the device's memory is
told the budget instead; where this process's heap serves nobody, the driver is asked.
"""

from __future__ import annotations

import enum

import llvmlite.binding
import numpy as np
from numba import types

from zico.base.compiled import array_at, call, callback, compiled, inlined, record_at, symbol_address
from zico.base.records import I8, Record, dtype_of
from zico.heap import layout
from zico.heap.cuda import captures, on_stream
from zico.heap.layout import HEAP, Attached, job_of, pool_of
from zico.pool.layout import cap_of, header_of


class Others(Record, align=False):
    """Functions of others that these hooks call."""

    out_of_memory: I8  # called with requested, held and most that may be held, in bytes; may raise; 0: nobody listens
    lost: I8  # called instead with the driver's status where the context is lost; may raise; 0: nobody listens
    device: I8  # the pool's, as this process numbers devices
    refuse: I8  # called with a Refusal; may raise; 0: nobody looks at devices, nobody captures
    free_async: I8  # the driver's own functions, 0 if not known
    mem_get_info: I8
    device_total_mem: I8


OTHERS = dtype_of(Others)


class Refusal(enum.IntEnum):
    """What PyTorch is refused, and what it raises."""

    OTHER_DEVICE = 0
    """A request on a device that is not the pool's."""
    SECOND_CAPTURE = captures.SECOND
    TOO_MANY_GRAPHS = captures.TOO_MANY


_SYMBOL = "zico_stream_hooks"
OTHERS_RECORD = np.zeros(1, OTHERS)
llvmlite.binding.add_symbol(_SYMBOL, OTHERS_RECORD.ctypes.data)  # before what refers to it is compiled
others_address = symbol_address(_SYMBOL)
_heap_address = symbol_address(layout.SYMBOL)

_ATTACHED = int(Attached.YES)
_OTHER_DEVICE = int(Refusal.OTHER_DEVICE)
_I64 = np.dtype("i8")
_SUCCESS = 0
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@compiled
def _allocated(size_bytes: int, stream: int) -> int:
    """Return an address, 0 if there is none; waits for regions."""
    heap = record_at(_heap_address(), HEAP)
    if size_bytes <= 0 or heap.attached != _ATTACHED:
        return 0
    if heap.streams.capturing != 0:
        return max(captures.allocate(heap, size_bytes, stream), 0)
    return max(on_stream.allocate_on(heap, size_bytes, stream), 0)


@compiled
def _freed(address: int, stream: int) -> bool:
    """Free a tensor of the pool; tells whether it is one."""
    heap = record_at(_heap_address(), HEAP)
    if not 0 <= address - heap.base < heap.window_bytes:
        return False
    if heap.attached == _ATTACHED:
        if heap.streams.capturing != 0:
            captures.free(heap, address, stream)
        else:
            on_stream.free_on(heap, address, stream)
    return True


NEEDED_TO_THE_END = (layout.HEAP_RECORD, OTHERS_RECORD)
"""What every hook below uses. Destructors may free tensors when the interpreter is gone.

An adapter therefore keeps these, its session and the hooks that it hands out
(``zico.job.lookup.keep``). A hook keeps all machine code: there is one engine for it.
"""


# -- PyTorch: torch._C._cuda_customAllocator -------------------------------------------------------


@callback(types.int64(types.int64, types.int32, types.int64))
def allocate(size_bytes: int, device: int, stream: int) -> int:
    """Return ``size_bytes`` for a stream's work from now on; 0 for none, where nothing has raised.

    The pool's memory is mapped for the pool's device alone: another one's kernels would fault on
    it.
    """
    others = record_at(others_address(), OTHERS)
    if others.refuse != 0 and device != others.device:
        call(others.refuse, (_OTHER_DEVICE,))
        return 0
    address = _allocated(size_bytes, stream)
    heap = record_at(_heap_address(), HEAP)
    if address == 0 and heap.streams.lost != 0 and others.lost != 0:
        call(others.lost, (heap.streams.lost,))
    if address == 0 and size_bytes > 0 and others.out_of_memory != 0:
        held_bytes = job_of(heap).held << heap.pool_shift
        most_bytes = cap_of(pool_of(heap), job_of(heap)) << heap.pool_shift
        call(others.out_of_memory, (size_bytes, held_bytes, most_bytes))
    return address


@callback(types.void(types.int64, types.int64, types.int32, types.int64))
def free(address: int, _size_bytes: int, _device: int, stream: int) -> None:
    """Free a tensor of which its stream has been given the last use."""
    _freed(address, stream)


@callback(types.void(types.int64, types.int64))
def record_stream(address: int, stream: int) -> None:
    """Note that another stream uses a tensor: its free waits for what that stream was given until then."""
    heap = record_at(_heap_address(), HEAP)
    if 0 <= address - heap.base < heap.window_bytes and heap.attached == _ATTACHED:
        on_stream.record_stream(heap, address, stream)


@callback(types.void(types.int32, types.int64, types.int64, types.int64))
def begin_allocate_to_pool(_device: int, first: int, second: int, _filter: int) -> None:
    """Serve what streams that capture ask for from a graph's pool; raises where that cannot be.

    PyTorch's function takes the identifier as ``std::pair`` of two numbers, which are two registers
    (System V AMD64 ABI 3.2.3). It takes its filter of streams by reference.
    """
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED:
        refusal = captures.begin(heap, first, second)
        others = record_at(others_address(), OTHERS)
        if refusal != captures.BEGUN and others.refuse != 0:
            call(others.refuse, (refusal,))


@callback(types.void(types.int32, types.int64, types.int64))
def end_allocate_to_pool(_device: int, first: int, second: int) -> None:
    """End what ``begin_allocate_to_pool`` began."""
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED:
        captures.end(heap, first, second)


@callback(types.void(types.int32, types.int64, types.int64))
def release_pool(_device: int, first: int, second: int) -> None:
    """Note that one of the graphs of a pool is gone."""
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED:
        captures.release(heap, first, second)


# -- the driver's own names ------------------------------------------------------------------------


@inlined
def _allocate_into(out_address: int, size_bytes: int, stream: int) -> int:
    if size_bytes <= 0:
        return _INVALID_VALUE
    address = _allocated(size_bytes, stream)
    array_at(out_address, 1, _I64)[0] = address
    if address != 0:
        return _SUCCESS
    lost: int = np.int32(record_at(_heap_address(), HEAP).streams.lost)  # type: ignore[assignment]
    return lost if lost != 0 else _OUT_OF_MEMORY


@callback(types.int32(types.int64, types.int64, types.int64))
def mem_alloc_async(out_address: int, size_bytes: int, stream: int) -> int:
    """Stand in for ``cuMemAllocAsync``."""
    return _allocate_into(out_address, size_bytes, stream)


@callback(types.int32(types.int64, types.int64, types.int64, types.int64))
def mem_alloc_from_pool_async(out_address: int, size_bytes: int, _pool: int, stream: int) -> int:
    """Stand in for ``cuMemAllocFromPoolAsync``; there is one pool, and it is Zico's."""
    return _allocate_into(out_address, size_bytes, stream)


@callback(types.int32(types.int64, types.int64))
def mem_free_async(address: int, stream: int) -> int:
    """Stand in for ``cuMemFreeAsync``; what the driver allocated goes back to the driver."""
    if _freed(address, stream):
        return _SUCCESS
    others = record_at(others_address(), OTHERS)
    if others.free_async == 0:
        return _INVALID_VALUE
    status: int = np.int32(call(others.free_async, (address, stream)))  # type: ignore[assignment]
    return status


# -- what a framework is told of memory ------------------------------------------------------------


_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


@callback(types.int32(types.int64, types.int64))
def mem_get_info(free_address: int, total_address: int) -> int:
    """Stand in for ``cuMemGetInfo``, with the figures of ``PoolTable.free_and_total_bytes``."""
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED:
        most = cap_of(pool_of(heap), job_of(heap))
        array_at(free_address, 1, _I64)[0] = max(most - job_of(heap).held, 0) << heap.pool_shift
        array_at(total_address, 1, _I64)[0] = most << heap.pool_shift
        return _SUCCESS
    others = record_at(others_address(), OTHERS)
    if others.mem_get_info == 0:
        return _NOT_INITIALIZED
    status: int = np.int32(call(others.mem_get_info, (free_address, total_address)))  # type: ignore[assignment]
    return status


@callback(types.int32(types.int64, types.int64))
def device_total_mem(total_address: int, device: int) -> int:
    """Stand in for ``cuDeviceTotalMem``, as ``mem_get_info``; any device, since the process uses the pool's alone."""
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED:
        array_at(total_address, 1, _I64)[0] = cap_of(pool_of(heap), job_of(heap)) << heap.pool_shift
        return _SUCCESS
    others = record_at(others_address(), OTHERS)
    if others.device_total_mem == 0:
        return _NOT_INITIALIZED
    status: int = np.int32(call(others.device_total_mem, (total_address, device)))  # type: ignore[assignment]
    return status


@callback(types.void(types.int64, types.int8, types.int64))
def cache_info(_allocator: int, _device: int, largest_address: int) -> None:
    """Stand in for PyTorch's ``CUDAAllocator::cacheInfo``: what this job can have without waiting.

    PyTorch asks how large a workspace cuDNN may try. Its own allocator answers with the largest
    free block. Here it is what nobody holds, within the job's limit, and what the job holds unused.
    """
    heap = record_at(_heap_address(), HEAP)
    free_bytes = 0
    if heap.attached == _ATTACHED:
        header = header_of(pool_of(heap))
        me = job_of(heap)
        free_regions = max(header.budget_regions - header.granted, 0)
        if me.limit > 0:
            free_regions = min(free_regions, max(me.limit - me.held, 0))
        unused_bytes = max((me.held << heap.pool_shift) - me.live_bytes, 0)
        free_bytes = (free_regions << heap.pool_shift) + unused_bytes
    array_at(largest_address, 1, _I64)[0] = free_bytes
