"""Compiled loops that time allocations from inside, as a framework's C++ would see them.

How the clock is kept out: a reading costs tens of nanoseconds, as much as what is measured. Batches take two readings
around many operations and subtract one reading's cost, measured by ``clock_ns`` in the same way, before dividing;
single operations subtract it as well, and their quantiles still carry the clock's own jitter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from zico.compiled import array_at, call, compiled, monotonic_ns
from zico.pool.regions import release, try_acquire
from zico.trace import ring
from zico.trace.events import NO_NAME

Times = npt.NDArray[np.int64]

ALIGNMENT_BYTES = 64
_I64 = np.dtype("i8")


@compiled
def read_clock(times: Times) -> None:
    """Fill ``times`` with the nanoseconds between two readings that follow each other."""
    for i in range(len(times)):
        began_ns = monotonic_ns()
        times[i] = monotonic_ns() - began_ns


@compiled
def heap_pairs(memalign: int, free: int, out_address: int, size_bytes: int, batch: int, times: Times) -> None:
    """Allocate and free ``batch`` times for each entry of ``times``, the nanoseconds of the whole batch.

    Args:
        memalign: Address of a ``posix_memalign``.
        free: Address of its ``free``.
        out_address: Where the first may write a pointer.
        size_bytes: Of each tensor.
        batch: Pairs per reading.
        times: Filled.
    """
    out = array_at(out_address, 1, _I64)
    for i in range(len(times)):
        began_ns = monotonic_ns()
        for _ in range(batch):
            call(memalign, (out_address, ALIGNMENT_BYTES, size_bytes))
            call(free, (out[0],))
        times[i] = monotonic_ns() - began_ns


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
def region_pairs(pool: Any, wanted: npt.NDArray[np.int32], batch: int, times: Times) -> None:  # noqa: ANN401 - a record
    """Acquire one region and release it, ``batch`` times for each entry of ``times``."""
    for i in range(len(times)):
        began_ns = monotonic_ns()
        for _ in range(batch):
            try_acquire(pool, wanted, 1)
            release(pool, wanted, 1)
        times[i] = monotonic_ns() - began_ns


def clock_ns(readings: int = 10_000) -> float:
    """Return what one reading of the clock costs, in nanoseconds (median)."""
    times = np.zeros(readings, np.int64)
    read_clock(times)
    return float(np.median(times))


@compiled
def call_often(address: int, argument: int, n: int) -> float:
    """Return the nanoseconds of a call of a function with one argument, over so many calls."""
    began_ns = monotonic_ns()
    for _ in range(n):
        call(address, (argument,))
    return (monotonic_ns() - began_ns) / n
