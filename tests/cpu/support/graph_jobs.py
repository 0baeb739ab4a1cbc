"""Two jobs on the driver's software twin, one of which captures CUDA graphs as PyTorch does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.twin_device import MIB, TwinDevice
from twin.meanings import register

from zico.heap.build import Heap
from zico.heap.cuda import captures, hooks, on_stream
from zico.heap.cuda.layout import PIECE
from zico.heap.layout import HEAP, HEAP_RECORD
from zico.job.device_timeline import DeviceTimeline
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

REGION_BYTES = 2 * MIB
N_REGIONS = 8
KIB = 1 << 10
POOL, OTHER_POOL = (3, 0), (0, 4)
GLOBAL = 0
I32, I64 = ctypes.c_int32, ctypes.c_int64
_allocate = ctypes.CFUNCTYPE(I64, I64, I32, I64)(hooks.allocate.address)
_free = ctypes.CFUNCTYPE(None, I64, I64, I32, I64)(hooks.free.address)
begin = ctypes.CFUNCTYPE(None, I32, I64, I64, I64)(hooks.begin_allocate_to_pool.address)
end = ctypes.CFUNCTYPE(None, I32, I64, I64)(hooks.end_allocate_to_pool.address)
_release = ctypes.CFUNCTYPE(None, I32, I64, I64)(hooks.release_pool.address)


class Job:
    """A job with a heap on the twin, and two streams."""

    def __init__(self, device: TwinDevice, pool: PoolTable, undo: contextlib.ExitStack, record: Any) -> None:  # noqa: ANN401
        """Join; ``undo`` gives everything back."""
        driver = device.driver
        copies = (driver.export_pieces(pool.memory), os.dup(pool.table_fd), os.dup(pool.notify_fd))
        self.member = undo.enter_context(PoolTable.join_pool(*copies, pool.join(os.getpid(), "twin"), driver))
        self.timeline = DeviceTimeline(self.member)
        undo.callback(self.timeline.close)
        self.made = Heap(self.member, record, wait_limit_s=0.01, timeline=self.timeline.functions)
        self.made.enable()
        undo.callback(self.made.close)
        self.heap: Any = record[0]
        self.device = device
        self.stream, self.side = (undo.enter_context(driver.create_stream()).handle for _ in range(2))

    @property
    def record(self) -> Any:  # noqa: ANN401 - a JOB record
        """Return the job's record in the shared table."""
        return self.member.jobs[int(self.member.member["job"][0])]

    def take_all(self) -> list[int]:
        """Allocate regions for the first stream until there are none; returns their addresses."""
        taken = []
        while (address := int(on_stream.allocate_on(self.heap, REGION_BYTES, self.stream))) > 0:
            taken.append(address)
        return taken


class Grapher(Job):
    """The job that captures, by the process's own hooks."""

    def allocate(self, size_bytes: int, stream: int | None = None) -> int:
        """Allocate as PyTorch does."""
        return int(_allocate(size_bytes, 0, self.stream if stream is None else stream))

    def free(self, address: int, stream: int | None = None) -> None:
        """Free as PyTorch does: on the stream that the tensor was allocated for."""
        _free(address, 0, 0, self.stream if stream is None else stream)

    @contextlib.contextmanager
    def capture(self, pool: tuple[int, int] = POOL) -> Iterator[list[Any]]:
        """Capture the first stream as PyTorch does; gives a list that holds the graph in the end."""
        made: list[Any] = []
        begin(0, *pool, 0)
        twin = self.device.twin
        assert int(twin.cuStreamBeginCapture(self.stream, GLOBAL)[0]) == 0
        yield made
        status, graph = twin.cuStreamEndCapture(self.stream)
        assert int(status) == 0, "something has spoilt the capture"
        end(0, *pool)
        made.append(graph)

    @contextlib.contextmanager
    def served(self, pool: tuple[int, int] = POOL) -> Iterator[None]:
        """Let a pool serve this thread, as CUDA graph trees do."""
        begin(0, *pool, 0)
        captures.serve_thread(self.heap, *pool, threading.get_ident())
        yield
        end(0, *pool)
        self.release(pool)

    def saved(self, pool: tuple[int, int] = POOL) -> Any:  # noqa: ANN401 - an array of PIECE
        """Return what is in use of a pool."""
        pieces = np.zeros(64, PIECE)
        return pieces[: captures.save(self.heap, *pool, pieces)]

    def release(self, pool: tuple[int, int] = POOL) -> None:
        """Let a graph of the pool die."""
        _release(0, *pool)

    def fill(self, address: int, byte: int, size_bytes: int, stream: int | None = None) -> None:
        """Put a fill on a stream."""
        to = self.stream if stream is None else stream
        self.device.driver.call("cuMemsetD8Async", address, byte, size_bytes, to)

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        """Put a copy on the first stream."""
        self.device.driver.call("cuMemcpyDtoDAsync", to, source, size_bytes, self.stream)

    def launch(self, graph: Any) -> None:  # noqa: ANN401 - a CUgraph
        """Launch a graph and wait for it."""
        self.device.driver.call("cuGraphLaunch", graph, self.side)
        self.device.driver.synchronize(self.side)

    def held(self) -> int:
        """Return the regions that the job holds once it has put its marks."""
        on_stream.settle(self.heap)
        return int(self.record["held"])


@contextlib.contextmanager
def two_jobs() -> Iterator[tuple[Grapher, Job]]:
    """Give a job that captures and another one; the device and the pool must have everything back in the end."""
    before = HEAP_RECORD.copy()
    sizes = {"budget_bytes": N_REGIONS * REGION_BYTES, "region_bytes": REGION_BYTES}
    with TwinDevice() as device:
        register(device.twin)
        with contextlib.ExitStack() as undo:
            pool = undo.enter_context(
                PoolTable.create(**sizes, use_claims=False, self_admit=True, driver=device.driver)  # type: ignore[arg-type]
            )
            undo.enter_context(device.driver.context.current())
            undo.callback(HEAP_RECORD.__setitem__, slice(None), before)
            one = Grapher(device, pool, undo, HEAP_RECORD)
            yield one, Job(device, pool, undo, np.zeros(1, HEAP))
            assert one.heap["bad_frees"] == 0
    hooks.OTHERS_RECORD[0] = 0
