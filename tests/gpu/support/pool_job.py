"""Jobs of a pool on a real GPU: a member, its heap and a stream."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.device.cuda.driver import CudaDriver
from zico.device.cuda.managed import allocate
from zico.heap.build import Heap
from zico.heap.cuda import on_stream
from zico.heap.layout import HEAP
from zico.job.device_timeline import DeviceTimeline
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    import contextlib


class Job:
    """A member of a pool with a heap and a stream."""

    def __init__(self, pool: PoolTable, undo: contextlib.ExitStack, managed_bytes: int = 0, **of_heap: Any) -> None:  # noqa: ANN401
        """Join; with a window of managed memory of so many bytes, if any, and further arguments for the heap."""
        self.driver = CudaDriver(0)
        undo.callback(self.driver.close)
        place = pool.join(os.getpid(), "job")
        undo.callback(pool.reap, place)
        copies = (pool.driver.export_pieces(pool.memory), os.dup(pool.table_fd), os.dup(pool.notify_fd))
        self.member = undo.enter_context(PoolTable.join_pool(*copies, place, self.driver))
        timeline = DeviceTimeline(self.member)
        undo.callback(timeline.close)
        self.managed = undo.enter_context(allocate(self.driver, managed_bytes)) if managed_bytes else None
        self.record = np.zeros(1, HEAP)
        of_heap = {"timeline": timeline.functions, "managed": self.managed, **of_heap}
        self.heap = Heap(self.member, self.record, **of_heap)
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
