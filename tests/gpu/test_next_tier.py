"""Overflow into pinned memory of the host on a real GPU: a whole heap, and a neighbour that holds the budget."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from zico.device.cuda.driver import CudaDriver
from zico.heap.build import Heap
from zico.heap.cuda import on_stream
from zico.heap.layout import HEAP
from zico.job.device_timeline import DeviceTimeline
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
REGIONS = 4
OLDEST = 12020
"""``cuDriverGetVersion`` of the oldest driver that maps memory of the host."""


class Job:
    """A member of the pool with a heap and a stream."""

    def __init__(self, pool: PoolTable, undo: contextlib.ExitStack) -> None:
        """Join."""
        self.driver = CudaDriver(0)
        undo.callback(self.driver.close)
        place = pool.join(os.getpid(), "job")
        undo.callback(pool.reap, place)
        copies = (pool.driver.export_pieces(pool.memory), os.dup(pool.table_fd), os.dup(pool.notify_fd))
        self.member = undo.enter_context(PoolTable.join_pool(*copies, place, self.driver))
        timeline = DeviceTimeline(self.member)
        undo.callback(timeline.close)
        self.record = np.zeros(1, HEAP)
        self.heap = Heap(self.member, self.record, wait_limit_s=0.05, timeline=timeline.functions)
        undo.callback(self.heap.close)
        self.stream = undo.enter_context(self.driver.create_stream()).handle

    def allocate(self, size_bytes: int) -> int:
        """Allocate for the stream."""
        return int(on_stream.allocate_on(self.record[0], size_bytes, self.stream))

    def free(self, address: int) -> None:
        """Free behind the stream's work."""
        on_stream.free_on(self.record[0], address, self.stream)

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        """Let the stream write one byte everywhere."""
        with self.driver.context.current():
            self.driver.call("cuMemsetD8Async", address, byte, size_bytes, self.stream)

    def read(self, address: int, size_bytes: int) -> Any:  # noqa: ANN401 - an array of bytes
        """Read behind the stream's work."""
        found = np.empty(size_bytes, np.uint8)
        self.driver.synchronize(self.stream)
        with self.driver.context.current():
            self.driver.call("cuMemcpyDtoH", found.ctypes.data, address, size_bytes)
        return found


@pytest.fixture
def jobs() -> Iterator[tuple[Job, Job]]:
    """Return a job and a neighbour that holds all of the budget."""
    with contextlib.ExitStack() as undo:
        driver = CudaDriver(0)
        undo.callback(driver.close)
        region_bytes = max(driver.granularity_bytes, 2 * MIB)
        sizes = {"budget_bytes": REGIONS * region_bytes, "region_bytes": region_bytes}
        pool = undo.enter_context(PoolTable.create(**sizes, use_claims=False, self_admit=True, driver=driver))
        job, neighbour = Job(pool, undo), Job(pool, undo)
        taken = neighbour.allocate(REGIONS * region_bytes)
        assert taken > 0
        yield job, neighbour
        neighbour.free(taken)
        for one in (job, neighbour):
            one.driver.synchronize(one.stream)
            on_stream.settle(one.record[0])


def test_a_job_that_nobody_can_help_goes_on(jobs: tuple[Job, Job]) -> None:
    """Its tensors are written and read by the device in the next tier, which takes nothing of the budget."""
    job, _ = jobs
    if job.driver.facts.driver_version < OLDEST:
        pytest.xfail("the driver is older than CUDA 12.2")
    assert job.heap.no_next_tier == ""
    sizes = (3 * job.member.region_bytes, 70_000, 100)
    addresses = [job.allocate(size_bytes) for size_bytes in sizes]
    assert min(addresses) - job.heap.base >= job.record[0]["spill_offset"]
    for byte, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True), 1):
        job.fill(address, byte, size_bytes)
    for byte, (address, size_bytes) in enumerate(zip(addresses, sizes, strict=True), 1):
        assert (job.read(address, size_bytes) == byte).all()
    for address in addresses:
        job.free(address)
    record = job.record[0]
    assert (record["spill"]["live_bytes"], record["streams"]["failures"], record["bad_frees"]) == (0, 0, 0)
    header = job.member.header
    assert header["peak_granted"] == header["budget_regions"] == REGIONS
