"""Compiled loops that allocate as a framework's C++ would, and the pool that they allocate from.

pytest-benchmark times the loops of many operations. Loops that fill ``times`` read the clock for
single operations: a reading costs as much as what is measured, so ``clock_ns`` measures it, and
callers subtract it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zico.base.compiled import array_at, call, compiled
from zico.base.libc import monotonic_ns
from zico.base.units import MIB
from zico.heap.build import Heap
from zico.heap.layout import HEAP_RECORD
from zico.pool.regions import HOST_SLOT, acquire, release
from zico.pool.table import PoolTable
from zico.trace import ring
from zico.trace.events import NO_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

Times = npt.NDArray[np.int64]

ALIGNMENT_BYTES = 64
REGION_BYTES = 4 * MIB
BUDGET_BYTES = 256 * MIB
_I64 = np.dtype("i8")


@compiled
def read_clock(times: Times) -> None:
    """Fill ``times`` with the nanoseconds between two readings that follow each other."""
    for i in range(len(times)):
        began_ns = monotonic_ns()
        times[i] = monotonic_ns() - began_ns


@compiled
def heap_pairs(memalign: int, free: int, out_address: int, size_bytes: int, n: int) -> None:
    """Allocate and free ``n`` times by a ``posix_memalign``, which may write at ``out_address``, and its ``free``."""
    out = array_at(out_address, 1, _I64)
    for _ in range(n):
        call(memalign, (out_address, ALIGNMENT_BYTES, size_bytes))
        call(free, (out[0],))


@compiled
def replay(memalign: int, free: int, out_address: int, calls: Times, addresses: Times, times: Times) -> None:
    """Make calls one by one and fill ``times`` with the nanoseconds of each.

    Args:
        memalign: Address of a ``posix_memalign``.
        free: Address of its ``free``.
        out_address: Where the first may write a pointer.
        calls: Rows (number of a tensor, its bytes); 0 bytes frees it.
        addresses: Where each tensor lies; changed.
        times: Filled.
    """
    out = array_at(out_address, 1, _I64)
    for i in range(len(calls)):
        tensor, size_bytes = calls[i]
        began_ns = monotonic_ns()
        if size_bytes > 0:
            call(memalign, (out_address, ALIGNMENT_BYTES, size_bytes))
            addresses[tensor] = out[0]
        else:
            call(free, (addresses[tensor],))
        times[i] = monotonic_ns() - began_ns


@compiled
def events(ring_address: int, batch: int, times: Times) -> None:
    """Record ``batch`` events for each entry of ``times``, the nanoseconds of the whole batch."""
    for i in range(len(times)):
        began_ns = monotonic_ns()
        for k in range(batch):
            ring.put(ring_address, ring.ALLOC, k, k, NO_NAME)
        times[i] = monotonic_ns() - began_ns


@compiled
def region_pairs(pool: Any, wanted: npt.NDArray[np.int32], n: int) -> None:  # noqa: ANN401 - a record
    """Acquire one region and release it, ``n`` times."""
    for _ in range(n):
        acquire(pool, wanted, 1, HOST_SLOT)
        release(pool, wanted, 1)


def clock_ns(readings: int = 10_000) -> float:
    """Return what one reading of the clock costs, in nanoseconds (median)."""
    times = np.zeros(readings, np.int64)
    read_clock(times)
    return float(np.median(times))


@compiled
def call_often(address: int, argument: int, n: int) -> None:
    """Call a function with one argument ``n`` times."""
    for _ in range(n):
        call(address, (argument,))


@contextlib.contextmanager
def joined_pool() -> Iterator[Heap]:
    """Make a pool in this process, join it, and let the hooks serve from its heap."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(
            PoolTable.create(budget_bytes=BUDGET_BYTES, region_bytes=REGION_BYTES, use_claims=True, self_admit=True)
        )
        job = pool.join(os.getpid(), "benchmark")
        memory_fd, table_fd, notify_fd = map(os.dup, (pool.memory_fd, pool.table_fd, pool.notify_fd))
        member = stack.enter_context(PoolTable.join_pool(memory_fd, table_fd, notify_fd, job))
        heap = Heap(member, HEAP_RECORD)
        stack.callback(heap.close)
        heap.enable()
        yield heap
