"""A job on the software twin: a driver, a place in the pool, a timeline, a heap and streams of its own."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from cpu.support.members import SLICE_NS
from cpu.support.twin_world import CHECK, IMAGE, WRITE, Tensor, World

from zico.device.cuda.driver import CudaDriver
from zico.device.cuda.managed import allocate
from zico.heap import allocator
from zico.heap.build import Heap
from zico.heap.cuda import on_stream, slab
from zico.heap.cuda.layout import UNIT_SIZES
from zico.heap.layout import GRANULE_BYTES, HEAP
from zico.job.device_timeline import DeviceTimeline
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from types import TracebackType

Record = Any
_ONE_THREAD = (1, 1, 1, 1, 1, 1, 0)


class TwinTenant:
    """A job; what it asks of the driver itself raises ``DriverError``, as it would in a framework."""

    def __init__(
        self,
        world: World,
        *,
        streams: int = 2,
        wait_limit_s: float = 0.002,
        name: str = "job",
        managed_bytes: int = 0,
        **spacing: int,
    ) -> None:
        """Join and build everything, or nothing.

        Args:
            world: Where the job is.
            streams: How many it has.
            wait_limit_s: How long it waits for memory.
            name: Of the job.
            managed_bytes: Of a window of managed memory.
            spacing: ``spacing_bytes``, ``alone_bytes`` and ``beside_bytes`` of its timeline, else 0.
        """
        self.world = world
        self.live: list[Tensor] = []
        self.record = np.zeros(1, HEAP)
        with contextlib.ExitStack() as undo:
            self.driver = CudaDriver(0, world.twin)
            undo.callback(self.driver.close)
            with world.broker:
                self.place = world.pool.join(os.getpid(), name)
                undo.callback(self._be_reaped)
                self.member = undo.enter_context(self._map_pool())
            self.member.member[0]["slice"] = (0, SLICE_NS)
            self._timeline = DeviceTimeline(self.member)
            undo.callback(self._timeline.close)
            spacing = {"alone_bytes": 0, "beside_bytes": 0} | spacing
            functions = dataclasses.replace(self._timeline.functions, **spacing)
            self.managed = undo.enter_context(allocate(self.driver, managed_bytes)) if managed_bytes else None
            options: dict[str, Any] = {"wait_limit_s": wait_limit_s, "managed": self.managed}
            self.heap = Heap(self.member, self.record, timeline=functions, **options)
            undo.callback(self.heap.close)
            self._kernels = {one: self.driver.load_kernel(IMAGE, one) for one in (WRITE, CHECK)}
            self._streams = [undo.enter_context(self.driver.create_stream()) for _ in range(streams)]
            self.handles = [stream.handle for stream in self._streams]
            self._undo = undo.pop_all()

    def _be_reaped(self) -> None:
        with self.world.broker:
            self.world.pool.reap(self.place)

    def _map_pool(self) -> PoolTable:
        pool = self.world.pool
        copies = (pool.driver.export_pieces(pool.memory), os.dup(pool.table_fd), os.dup(pool.notify_fd))
        return PoolTable.join_pool(*copies, self.place, self.driver)

    @property
    def job(self) -> Record:
        """Return the record of the job."""
        return self.member.jobs[self.place]

    # -- what a framework does ---------------------------------------------------------------------

    def allocate(self, size_bytes: int, stream: int = 0) -> Tensor | None:
        """Allocate for a stream and let a kernel write; ``None`` if it is refused."""
        address = int(on_stream.allocate_on(self.record[0], size_bytes, self.handles[stream]))
        if address <= 0:
            return None
        assert address % 512 == 0
        tensor = self.world.enter(self, address, size_bytes, stream)
        self.live.append(tensor)
        self._launch(WRITE, tensor, stream)
        return tensor

    def use_on(self, tensor: Tensor, stream: int) -> None:
        """Let a kernel on another stream check it, behind what its own has done so far."""
        self._follow(tensor, stream)
        self._launch(CHECK, tensor, stream)
        on_stream.record_stream(self.record[0], tensor.address, self.handles[stream])

    def free(self, tensor: Tensor, stream: int | None = None) -> None:
        """Let a last kernel check it, and free it behind that on the same stream, its own if none is given."""
        stream = tensor.stream if stream is None else stream
        self.live.remove(tensor)
        self._follow(tensor, stream)
        self._launch(CHECK, tensor, stream)
        tensor.freed = True
        on_stream.free_on(self.record[0], tensor.address, self.handles[stream])

    def end_iteration(self) -> None:
        """Free everything and take a boundary."""
        for tensor in list(self.live):
            self.free(tensor)
        self.mark()

    def mark(self) -> None:
        """Take a boundary."""
        allocator.mark(self.record[0])

    def settle(self) -> None:
        """Let the heap put its marks, and notice what the device has done."""
        on_stream.settle(self.record[0])

    def _follow(self, tensor: Tensor, stream: int) -> None:
        if stream == tensor.stream:
            return
        event = self.driver.call("cuEventCreate", 0)
        try:
            self.driver.call("cuEventRecord", event, self.handles[tensor.stream])
            self.driver.call("cuStreamWaitEvent", self.handles[stream], event, 0)
        finally:
            self.driver.call("cuEventDestroy", event)

    def _launch(self, kernel: str, tensor: Tensor, stream: int) -> None:
        arguments = ((tensor.number,), (ctypes.c_int64,))
        with self.world.twin.lock:
            tensor.pending += 1
        self.driver.call("cuLaunchKernel", self._kernels[kernel], *_ONE_THREAD, self.handles[stream], arguments, 0)

    def is_spilled(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the next tier."""
        return tensor.address - int(self.record[0]["base"]) >= int(self.record[0]["spill_offset"])

    # -- what must be true -------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing was freed twice or refused by the device, no wait is left over, and the bytes of tensors add up."""
        record = self.record[0]
        assert self.member.member[0]["n_waits"] == 0
        assert (record["bad_frees"], record["streams"]["failures"]) == (0, 0)
        pooled = [tensor for tensor in self.live if not self.is_spilled(tensor)]
        assert self.job["live_bytes"] == sum(_range_bytes(tensor.size_bytes) for tensor in pooled)

    def check_empty(self) -> None:
        """Nothing is lent or waiting, every arena is one gap, and nothing is held but what stays without pressure."""
        assert self.job["held"] == 0 or self.managed is not None
        assert (self.job["live_bytes"], self.record[0]["streams"]["n_deferred"]) == (0, 0)
        assert (self.heap.slots["live"] == 0).all()
        assert (self.heap.arenas["n_gaps"] == (self.heap.arenas["end"] > self.heap.arenas["start"])).all()

    # -- ends --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """End in order: free everything, let the device finish (its streams run freely), give everything back."""
        self.end_iteration()
        self.settle()
        for handle in self.handles:
            self.driver.synchronize(handle)
        self.settle()
        self.check_empty()
        self.close()

    def die(self) -> None:
        """Die: what the streams were given is never done, the addresses go, the broker reaps."""
        with self.world.twin.lock:
            killed = [self.world.twin._streams.pop(handle) for handle in self.handles]
        for one in killed:
            one.hold(0)
        self._timeline._array[0] = 1  # a kernel that spins ends with its process, too
        for one, stream in zip(killed, self._streams, strict=True):
            one.close()
            stream._undo = lambda _handle, _size_bytes: None
        self.world.forget(self)
        self.close()

    def close(self) -> None:
        """Give everything back, last of all the place in the pool."""
        self._undo.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()


def _range_bytes(size_bytes: int) -> int:
    """Return what a tensor of a size takes."""
    if size_bytes <= slab.MOST_BYTES:
        return min(size for size in UNIT_SIZES if size >= size_bytes)
    return -(-max(size_bytes, GRANULE_BYTES) // UNIT_SIZES[0]) * UNIT_SIZES[0]
