"""What a framework is told of a GPU's memory when it asks: the budget instead of the device.

Where this process's heap serves nobody, the driver is asked.
"""

from __future__ import annotations

import numpy as np
from numba import types

from zico.compiled import array_at, call, callback, record_at, symbol_address
from zico.heap import process
from zico.heap.layout import HEAP, Attached
from zico.heap.records import job_of, pool_of
from zico.heap.stream_hooks import OTHERS, others_address
from zico.pool.layout import header_of

_heap_address = symbol_address(process.SYMBOL)

_ATTACHED = int(Attached.YES)
_I64 = np.dtype("i8")
_SUCCESS = 0
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


@callback(types.int32(types.int64, types.int64))
def mem_get_info(free_address: int, total_address: int) -> int:
    """Stand in for ``cuMemGetInfo``: the budget, and what this job may still come to hold of it.

    What other jobs hold counts as free: it can be had by waiting, and frameworks size themselves by it at their start.
    """
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED:
        budget_regions = header_of(pool_of(heap)).budget_regions
        free_regions = max(budget_regions - job_of(heap).held, 0)
        array_at(free_address, 1, _I64)[0] = free_regions << heap.pool_shift
        array_at(total_address, 1, _I64)[0] = budget_regions << heap.pool_shift
        return _SUCCESS
    others = record_at(others_address(), OTHERS)
    if others.mem_get_info == 0:
        return _NOT_INITIALIZED
    status: int = np.int32(call(others.mem_get_info, (free_address, total_address)))  # type: ignore[assignment]
    return status


@callback(types.int32(types.int64, types.int64))
def device_total_mem(total_address: int, device: int) -> int:
    """Stand in for ``cuDeviceTotalMem``: the budget, whichever device; the process uses the pool's alone."""
    heap = record_at(_heap_address(), HEAP)
    if heap.attached == _ATTACHED:
        array_at(total_address, 1, _I64)[0] = header_of(pool_of(heap)).budget_regions << heap.pool_shift
        return _SUCCESS
    others = record_at(others_address(), OTHERS)
    if others.device_total_mem == 0:
        return _NOT_INITIALIZED
    status: int = np.int32(call(others.device_total_mem, (total_address, device)))  # type: ignore[assignment]
    return status


@callback(types.void(types.int64, types.int8, types.int64))
def cache_info(_allocator: int, _device: int, largest_address: int) -> None:
    """Stand in for PyTorch's ``CUDAAllocator::cacheInfo``: what this job can have without waiting.

    PyTorch asks how large a workspace cuDNN may try. Its own allocator answers with the largest free
    block. Here it is what nobody holds, within the job's limit, and what the job holds unused.
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
