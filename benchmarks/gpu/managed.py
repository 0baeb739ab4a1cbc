"""What does paging cost a job on a GPU that may hold less than it needs, and what does learned prefetch bring?

Needs a CUDA device; ``--smoke`` runs on the driver's software twin, to see that the script works. A
job allocates and frees through Zico's heap as a network's training does: layers with weights, a
feature map each on the way forth, a gradient map each on the way back. Its kernels are copies,
repeated, of which the device does 1 to 3 TB/s: nothing to hide much behind, unlike a convolution's.
Its window is managed memory, at most half of what the GPU has free. The result is written after each way.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import numpy as np

from zico.base.errors import ConfigError, DriverError
from zico.base.units import MIB, format_bytes
from zico.device.cuda import CudaDriver
from zico.device.cuda.managed import Managed, allocate
from zico.heap import allocator
from zico.heap.build import Heap
from zico.heap.cuda import on_stream
from zico.heap.cuda.managed_window import FLAGS
from zico.heap.layout import HEAP
from zico.job.device_timeline import DeviceTimeline
from zico.paging.layout import PAGING
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "What does paging cost a job on a GPU, and what does learned prefetch bring?"
REGION_BYTES = 64 * MIB
SHARES = (100, 80, 70, 60, 50)
"""Of the job's own peak: what it may hold."""
WARM_UP = 8
"""Iterations in which the tables fill, and no time is taken."""
WINDOW_SHARE = 2
"""Window over peak: arenas have borders, and the first iteration knows no classes."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to page."""

    name: str
    flags: int
    """Parts of ``zico.paging.layout`` that are on."""
    over_bus: bool
    """What is out is used over the bus; else a touch faults and brings it in."""


WAYS = (
    Way("faults, no prefetch", 0, over_bus=False),
    Way("faults, learned prefetch", FLAGS, over_bus=False),
    Way("over the bus, no prefetch", 0, over_bus=True),
    Way("over the bus, learned prefetch", FLAGS, over_bus=True),
)


@dataclasses.dataclass(frozen=True)
class Network:
    """What an iteration does."""

    layers: int
    map_bytes: int
    weight_bytes: int
    repeats: int
    """Of each copy: what the device has to do for a layer."""

    @property
    def peak_bytes(self) -> int:
        """Return what lives at the end of the way forth, with the first gradient maps."""
        return self.layers * (self.map_bytes + self.weight_bytes) + 2 * self.map_bytes


class Job:
    """A member of a pool whose window is managed memory."""

    def __init__(self, api: object | None, network: Network, way: Way, undo: contextlib.ExitStack) -> None:
        """Make the pool, join it, build the heap.

        Raises:
            DriverError: The device cannot, or has too little memory free.
        """
        self.network = network
        broker = CudaDriver(0, api)
        undo.callback(broker.close)
        region_bytes = REGION_BYTES if api is None else 2 * MIB
        budget_bytes = -(-network.peak_bytes // region_bytes) * region_bytes
        sizes: dict[str, Any] = {"budget_bytes": budget_bytes, "region_bytes": region_bytes}
        self.pool = undo.enter_context(PoolTable.create(**sizes, use_claims=False, self_admit=True, driver=broker))
        self.driver = CudaDriver(0, api)
        undo.callback(self.driver.close)
        self.place = self.pool.join(os.getpid(), "job")
        undo.callback(self.pool.reap, self.place)
        pool = self.pool
        copies = (broker.export_pieces(pool.memory), os.dup(pool.table_fd), os.dup(pool.notify_fd))
        self.member = undo.enter_context(PoolTable.join_pool(*copies, self.place, self.driver))
        timeline = DeviceTimeline(self.member)
        undo.callback(timeline.close)
        window_bytes = WINDOW_SHARE * network.peak_bytes
        free_bytes = self.driver.free_bytes() or 0
        if api is None and 2 * window_bytes > free_bytes:
            raise ConfigError(
                f"a window of {format_bytes(window_bytes)} is over half of {format_bytes(free_bytes)} free"
            )
        self.managed = undo.enter_context(allocate(self.driver, window_bytes))
        self.record = np.zeros(1, HEAP)
        self.heap = Heap(self.member, self.record, timeline=timeline.functions, managed=self.managed)
        undo.callback(self.heap.close)
        _choose(self.managed, self.heap, way)
        self.stream = undo.enter_context(self.driver.create_stream()).handle
        undo.enter_context(self.driver.context.current())
        self.weights = [self.take(network.weight_bytes) for _ in range(network.layers)]

    def take(self, size_bytes: int) -> int:
        """Allocate."""
        address = int(on_stream.allocate_on(self.record[0], size_bytes, self.stream))
        if address <= 0:
            raise ConfigError(f"the window has no room for {format_bytes(size_bytes)}")
        return address

    def give(self, address: int) -> None:
        """Free."""
        on_stream.free_on(self.record[0], address, self.stream)

    def work(self, to: int, source: int, size_bytes: int) -> None:
        """Let the stream read one tensor and write another."""
        for _ in range(self.network.repeats):
            self.driver.call("cuMemcpyDtoDAsync", to, source, size_bytes, self.stream)

    def iterate(self) -> float:
        """Do one iteration; returns its seconds, with all that the device had to do."""
        network = self.network
        begun = time.perf_counter()
        maps: list[int] = []
        for layer in range(network.layers):
            made = self.take(network.map_bytes)
            self.work(made, self.weights[layer], network.weight_bytes)
            if maps:
                self.work(made, maps[-1], network.map_bytes)
            maps.append(made)
        gradient = self.take(network.map_bytes)
        for layer in reversed(range(network.layers)):
            made = self.take(network.map_bytes)
            self.work(made, maps[layer], network.map_bytes)
            self.work(self.weights[layer], made, network.weight_bytes)
            self.give(maps.pop())
            self.give(gradient)
            gradient = made
        self.give(gradient)
        allocator.mark(self.record[0])
        self.driver.synchronize(self.stream)
        return time.perf_counter() - begun

    def figures(self) -> dict[str, int]:
        """Return what was counted, ever."""
        steering, record = self.heap.steering[0], self.pool.jobs[self.place]
        counted = {name: int(steering[name]) for name in ("touches", "missed", "prefetched", "peak")}
        return counted | {name: int(record[name]) for name in ("in_bytes", "out_bytes", "late")}


def _choose(memory: Managed, heap: Heap, way: Way) -> None:
    """Leave the parts on that a way has, and take advice back that it does without."""
    tables: Any = (ctypes.c_char * PAGING.itemsize).from_address(int(heap.steering[0]["paging_address"]))
    np.frombuffer(tables, PAGING)[0]["flags"] = way.flags
    if not way.over_bus:
        memory.map_for_device(wanted=False)


def measure(api: object | None, network: Network, way: Way, share: int, iterations: int) -> dict[str, Any]:
    """Return seconds an iteration and what moved, of one way at a share of the peak."""
    with contextlib.ExitStack() as undo:
        job = Job(api, network, way, undo)
        regions = -(-network.peak_bytes * share // 100 // job.member.region_bytes)
        job.pool.set_limit(job.place, regions)
        for _ in range(WARM_UP if api is None else 3):
            job.iterate()
        before = job.figures()
        times = [job.iterate() for _ in range(iterations)]
        after = job.figures()
        for address in job.weights:
            job.give(address)
        job.driver.synchronize(job.managed.stream)
        on_stream.settle(job.record[0])
    each = {name: (after[name] - before[name]) / iterations for name in after if name != "peak"}
    return {"way": way.name, "share": share, "seconds": times, "peak_blocks": after["peak"], "each": each}


def text_of(result: dict[str, Any]) -> str:
    """Return the table."""
    base = min(result["runs"][0]["seconds"])
    rows = []
    for run in result["runs"]:
        median = sorted(run["seconds"])[len(run["seconds"]) // 2]
        moved = (run["each"]["in_bytes"] + run["each"]["out_bytes"]) / 1e9
        missed = 100 * run["each"]["missed"] / max(run["each"]["touches"], 1)
        cells = (f"{median * 1e3:.1f}", f"{median / base:.2f}", f"{moved:.2f}", f"{missed:.1f}")
        rows.append((f"{run['share']} %, {run['way']}", *cells))
    header = ("may hold, of its peak", "ms an iteration", "over all resident", "GB told to move", "% of touches missed")
    device = f"On {result['device']}; {result['settings']['layers']} layers, peak {result['peak']}.\n\n"
    return device + common.table(header, rows)


@contextlib.contextmanager
def devices(*, smoke: bool) -> Iterator[tuple[object | None, str]]:
    """Give the driver to use, ``None`` for the real one, and what the device is called."""
    if smoke:
        sys.path.insert(0, str(common.ROOT / "tests"))
        from twin.twin import Twin

        with Twin(total_bytes=1024 * MIB, attributes={"COMPUTE_CAPABILITY_MAJOR": 6}) as twin:  # marks by stream
            yield twin, "the driver's software twin"
        return
    facts = CudaDriver(0).facts
    yield None, f"{facts.name}, driver for CUDA {facts.driver_text}"


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--map", type=int, default=128, help="MiB of a feature map")
    parser.add_argument("--weight", type=int, default=16, help="MiB of a layer's weights")
    parser.add_argument("--repeats", type=int, default=16, help="of each copy")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--share", type=int, action="append", help="of the peak, in percent (default: all)")
    options = parser.parse_args()
    if options.smoke:
        options.layers, options.map, options.weight, options.repeats, options.iterations = 12, 4, 2, 1, 2
    network = Network(options.layers, options.map * MIB, options.weight * MIB, options.repeats)
    shares = (100, 60) if options.smoke else (100, *(options.share or SHARES[1:]))
    settings = {name: getattr(options, name) for name in ("layers", "map", "weight", "repeats", "iterations")}
    result = common.document("gpu_paging", QUESTION, settings)
    result["peak"], result["runs"] = format_bytes(network.peak_bytes), []
    directory = common.output_directory(options)
    try:
        with devices(smoke=options.smoke) as (api, name):
            result["device"] = name
            for share in shares:
                for way in WAYS if share < shares[0] else WAYS[-1:]:
                    common.note(f"{share} %, {way.name}")
                    result["runs"].append(measure(api, network, way, share, options.iterations))
                    if directory is not None:
                        common.save(result, text_of(result), directory)
    except (DriverError, ConfigError) as error:
        sys.exit(f"managed.py: {error}")
    common.write(result, text_of(result), directory)


if __name__ == "__main__":
    main()
