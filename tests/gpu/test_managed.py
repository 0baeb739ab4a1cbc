"""Managed memory on a real GPU: the contract, and a heap whose job holds less than it needs.

Nothing here asks for more managed memory than the GPU has free: that could hang it.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.driver_contract import ManagedContract
from gpu.support.pool_job import Job

from zico.device.cuda.driver import CudaDriver
from zico.heap import allocator
from zico.heap.cuda import on_stream
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.device.cuda.managed import Managed

MIB = 1 << 20
REGION_BYTES = 2 * MIB
WINDOW_BYTES = 192 * MIB
BUDGET = 16
PROCESSOR = -1  # CU_DEVICE_CPU


class TestManaged(ManagedContract):
    """The contract on a GPU."""


class Paged(Job):
    """A job whose window is managed memory, with a stream."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        """Make a pool, join it, build the heap."""
        driver = CudaDriver(0)
        undo.callback(driver.close)
        sizes = {"budget_bytes": BUDGET * REGION_BYTES, "region_bytes": REGION_BYTES}
        pool = undo.enter_context(PoolTable.create(**sizes, use_claims=False, self_admit=True, driver=driver))
        super().__init__(pool, undo, WINDOW_BYTES)

    @property
    def steering(self) -> Any:  # noqa: ANN401 - a MANAGED record
        """Return what the heap knows of its window."""
        return self.heap.steering[0]

    def allocate(self, size_bytes: int) -> int:
        """Allocate for the stream, which must work."""
        address = super().allocate(size_bytes)
        assert address > 0
        return address


@pytest.fixture
def job() -> Iterator[Paged]:
    """Return a job that may hold 32 MiB."""
    with contextlib.ExitStack() as undo:
        made = Paged(undo)
        yield made
        made.driver.synchronize(made.stream)
        on_stream.settle(made.record[0])


def test_a_job_that_needs_more_than_it_may_hold_finds_what_it_wrote(job: Paged) -> None:
    """Twice the budget lives at once; every tensor holds its bytes, nothing was refused, and some came ahead of use."""
    size_bytes = 4 * MIB
    weights = job.allocate(size_bytes)
    job.fill(weights, 99, size_bytes)
    for iteration in range(6):
        addresses = [job.allocate(size_bytes) for _ in range(16)]
        for i, address in enumerate(addresses):
            job.fill(address, 16 * iteration + i & 0xFF, size_bytes)
        assert job.member.jobs[job.member.member[0]["job"]]["held"] == BUDGET
        for i, address in reversed(list(enumerate(addresses))):
            assert (job.read(address, size_bytes) == (16 * iteration + i & 0xFF)).all()
            job.free(address)
        allocator.mark(job.record[0])
    assert (job.read(weights, size_bytes) == 99).all()
    job.free(weights)
    assert job.record[0]["streams"]["failures"] == 0
    assert job.steering["prefetched"] > 0


def last_told(driver: CudaDriver, memory: Managed, offset: int, size_bytes: int) -> int:
    """Return where a range was last told to go; ``cuda.bindings`` 13 does not take the attribute for its kind."""
    attribute = driver.call.api.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
    with driver.context.current():
        return int(driver.call("cuMemRangeGetAttribute", 4, attribute, memory.handle + offset, size_bytes))


def test_all_but_what_is_held_was_told_to_leave(job: Paged) -> None:
    """Of what lives, the driver was last told to keep on the GPU about as much as the job may hold.

    The GPU's free bytes say nothing of that: the driver keeps memory for what has left, and gives
    it to whoever asks (``benchmarks/results/gpu/README.md``).
    """
    size_bytes = 4 * MIB
    addresses = [job.allocate(size_bytes) for _ in range(20)]
    for address in addresses:
        job.fill(address, 1, size_bytes)
    job.driver.synchronize(job.stream)
    job.driver.synchronize(job.managed.stream)
    offsets = [address - job.managed.handle + at for address in addresses for at in range(0, size_bytes, REGION_BYTES)]
    told = [last_told(job.driver, job.managed, offset, REGION_BYTES) for offset in offsets]
    for address in addresses:
        job.free(address)
    assert job.steering["peak"] * REGION_BYTES <= (BUDGET + 2) * REGION_BYTES
    assert len(told) - told.count(PROCESSOR) <= BUDGET + 4, told


def test_orders_reach_the_driver(job: Paged) -> None:
    """The driver knows for a range where it was told to go last."""
    job.managed.move(0, 2 * MIB, to_device=False)
    job.driver.synchronize(job.managed.stream)
    assert last_told(job.driver, job.managed, 0, 2 * MIB) == PROCESSOR


def test_moving_waits_for_no_kernel(job: Paged) -> None:
    """The processor that orders a move does not wait for the job's streams (the manual does not say so)."""
    memory = job.managed
    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
    gate = job.driver.register_host(page.ctypes.data, page.nbytes)
    job.driver.wait_value(job.stream, gate.device_address, 1)
    job.fill(memory.handle, 7, 2 * MIB)
    memory.move(4 * MIB, 2 * MIB, to_device=True)
    memory.move(4 * MIB, 2 * MIB, to_device=False)
    job.driver.synchronize(memory.stream)
    page[0] = 1
    job.driver.synchronize(job.stream)
    gate.close()
