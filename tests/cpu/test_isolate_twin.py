"""Jobs of a pool that isolates them on the driver's software twin: kernels that scrub, mappings that go."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from twin.meanings import register
from twin_device import MIB, TwinDevice

from zico.base.errors import ConfigError
from zico.heap.build import Heap
from zico.heap.cuda import on_stream
from zico.heap.layout import HEAP
from zico.job.device_timeline import DeviceTimeline
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

REGION_BYTES = 2 * MIB
N_REGIONS = 4
POOL_BYTES = N_REGIONS * REGION_BYTES
TOO_OLD = {"COMPUTE_CAPABILITY_MAJOR": 6}


class TwinJob:
    """A job with a heap and a stream on the twin."""

    def __init__(self, device: TwinDevice, pool: PoolTable, undo: contextlib.ExitStack) -> None:
        """Join; ``undo`` gives everything back."""
        driver = device.driver
        copies = (driver.export_pieces(pool.memory), os.dup(pool.table_fd), os.dup(pool.notify_fd))
        member = undo.enter_context(PoolTable.join_pool(*copies, pool.join(os.getpid(), "twin"), driver))
        timeline = DeviceTimeline(member)
        undo.callback(timeline.close)
        record = np.zeros(1, HEAP)
        undo.callback(Heap(member, record, wait_limit_s=0.01, timeline=timeline.functions).close)
        self.device = device
        self.heap: Any = record[0]
        self.stream = undo.enter_context(driver.create_stream()).handle

    def take(self) -> int:
        """Allocate the whole pool."""
        address = int(on_stream.allocate_on(self.heap, POOL_BYTES, self.stream))
        assert address > 0
        return address

    def fill(self, address: int, byte: int) -> None:
        """Let the stream fill what was taken."""
        self.device.driver.call("cuMemsetD8Async", address, byte, POOL_BYTES, self.stream)

    def free(self, address: int) -> None:
        """Free it on the stream."""
        on_stream.free_on(self.heap, address, self.stream)

    def bytes_at(self, address: int) -> set[int]:
        """Return what the device finds there when the stream has done everything."""
        self.device.driver.synchronize(self.stream)
        return set(self.device.read(address, POOL_BYTES))


@pytest.fixture
def device() -> Iterator[TwinDevice]:
    """Make a twin that runs Zico's kernels; in the end it must have everything back."""
    with TwinDevice() as device:
        register(device.twin)
        yield device


@contextlib.contextmanager
def jobs(device: TwinDevice, *, isolate: bool = True) -> Iterator[tuple[TwinJob, TwinJob]]:
    """Make a pool on the twin and two jobs in it."""
    sizes = {"budget_bytes": POOL_BYTES, "region_bytes": REGION_BYTES}
    options = {"use_claims": False, "self_admit": True, "isolate": isolate}
    with contextlib.ExitStack() as undo:
        pool = undo.enter_context(PoolTable.create(**sizes, **options, driver=device.driver))
        undo.enter_context(device.driver.context.current())
        yield TwinJob(device, pool, undo), TwinJob(device, pool, undo)


@pytest.mark.parametrize("isolate", [True, False])
def test_the_next_owners_stream_scrubs_behind_its_wait(device: TwinDevice, *, isolate: bool) -> None:
    """Invariant 11: B gets what A's stream still writes; B finds zeros, and A's bytes if the pool does not isolate."""
    with jobs(device, isolate=isolate) as (a, b):
        first = a.take()
        device.twin.stream(a.stream).hold(0)
        a.fill(first, 0xAA)
        a.free(first)
        second = b.take()
        device.twin.stream(a.stream).release()
        assert b.bytes_at(second) == ({0} if isolate else {0xAA})
        b.free(second)
        for job in (a, b):
            device.driver.synchronize(job.stream)
            on_stream.settle(job.heap)


def test_what_a_job_has_freed_is_unmapped_when_the_device_has_finished(device: TwinDevice) -> None:
    """Invariant 11: A's stream can use what A has freed until its work is done; then the device cannot reach it."""
    with jobs(device) as (a, b):
        first = a.take()
        device.twin.stream(a.stream).hold(0)
        a.fill(first, 0xAA)
        a.free(first)
        on_stream.settle(a.heap)
        assert device.is_open(first)
        device.twin.stream(a.stream).release()
        device.driver.synchronize(a.stream)
        on_stream.settle(a.heap)
        assert not any(device.is_open(first + n * REGION_BYTES) for n in range(N_REGIONS))
        second = b.take()
        b.fill(second, 0xBB)
        assert b.bytes_at(second) == {0xBB}
        b.free(second)
        again = a.take()
        assert a.bytes_at(again) == {0}
        a.free(again)


def test_a_device_without_kernels_cannot_isolate() -> None:
    """A job on a device that is too old for Zico's kernels is told so, and nothing of it stays."""
    with TwinDevice(attributes=TOO_OLD) as device, pytest.raises(ConfigError, match="cannot scrub"), jobs(device):
        pass
