"""Jobs of a pool that isolates them, on the driver's software twin."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.twin_device import MIB, TwinDevice

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


@contextlib.contextmanager
def jobs(device: TwinDevice, *, isolate: bool = True) -> Iterator[tuple[TwinJob, TwinJob]]:
    """Make a pool on the twin and two jobs in it."""
    sizes = {"budget_bytes": POOL_BYTES, "region_bytes": REGION_BYTES}
    options = {"use_claims": False, "self_admit": True, "isolate": isolate}
    with contextlib.ExitStack() as undo:
        pool = undo.enter_context(PoolTable.create(**sizes, **options, driver=device.driver))
        undo.enter_context(device.driver.context.current())
        yield TwinJob(device, pool, undo), TwinJob(device, pool, undo)
