"""What does a tensor's memory cost from the pool, against the C library?

Three parts: compiled loops over the hooks that frameworks call (``loops.py`` says how the clock is kept out), PyTorch's
own calls in two processes that take turns, one in a pool and one not, and ``fork`` in the same two. Every loop marks
iterations as training does, outside of what is timed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import loops
import numpy as np
import torch_worker

from zico.compiled import libc_address
from zico.heap import allocator, hooks
from zico.heap.build import Heap
from zico.heap.layout import HEAP_RECORD
from zico.pool.table import PoolTable
from zico.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUESTION = "What does a tensor's memory cost from the pool, against the C library?"
TENSOR_BYTES = MIB
REGION_BYTES = 4 * MIB
BUDGET_BYTES = 256 * MIB
PAIRS_PER_ITERATION = 1024
"""About as many allocations as an iteration of the PyTorch example has."""
BATCH = 16
GOAL_PAIR_NS = 150
END_S = 20.0
START_S = 300.0
"""For a worker's start, which compiles the first time."""
ANSWER_S = 120.0
"""For one answer of a worker: some seconds at most, where it does not hang."""


# -- compiled -------------------------------------------------------------------------------------------------------


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


class Pairs:
    """Times pairs of ``posix_memalign`` and ``free`` at two addresses."""

    def __init__(self, memalign: int, free: int, *, marks: bool) -> None:
        """Use these functions; ``marks`` ends an iteration of the heap before every ``PAIRS_PER_ITERATION``."""
        self._functions = (memalign, free)
        self._marks = marks

    def times(self, iterations: int, batch: int) -> loops.Times:
        """Return nanoseconds per batch."""
        out = np.zeros(1, np.int64)
        times = np.zeros((iterations, PAIRS_PER_ITERATION // batch), np.int64)
        for row in times:
            if self._marks:
                allocator.mark(HEAP_RECORD[0])
            loops.heap_pairs(*self._functions, out.ctypes.data, TENSOR_BYTES, batch, row)
        return times.ravel()

    def summary(self, iterations: int) -> dict[str, float]:
        """Return nanoseconds per pair: median and p99 of batches, median and p99 of single pairs."""
        clock_ns = loops.clock_ns()
        self.times(2, BATCH)  # the classes of all tensors are known from here on
        batches = (self.times(iterations, BATCH) - clock_ns) / BATCH
        singles = self.times(iterations, 1) - clock_ns
        return {"clock_ns": clock_ns, **_quantiles("", batches), **_quantiles("single_", singles)}


def _quantiles(prefix: str, values: Any) -> dict[str, float]:  # noqa: ANN401 - an array
    return {f"{prefix}{name}": float(np.percentile(values, q)) for name, q in (("median_ns", 50), ("p99_ns", 99))}


def hook_pairs() -> Pairs:
    """Return pairs through the hooks."""
    return Pairs(int(hooks.posix_memalign.address), int(hooks.free.address), marks=True)


@contextlib.contextmanager
def kept_region() -> Iterator[None]:
    """Keep a short-lived tensor alive in the region where the others come and go."""
    hook_pairs().times(2, BATCH)  # now the iteration's first tensor of this size is known to be short-lived
    allocator.mark(HEAP_RECORD[0])
    address = int(allocator.allocate(HEAP_RECORD[0], TENSOR_BYTES, loops.ALIGNMENT_BYTES))
    try:
        yield
    finally:
        allocator.free(HEAP_RECORD[0], address)


def turnovers(pool: PoolTable, run: Callable[[], Any]) -> float:
    """Return how often per pair a region went back to the pool while ``run`` ran one iteration."""
    before = int(pool.header["sequence"])
    run()
    return (int(pool.header["sequence"]) - before - 1) / PAIRS_PER_ITERATION


def measure_compiled(iterations: int) -> dict[str, Any]:
    """Return the figures of the compiled part."""
    libc = Pairs(libc_address("posix_memalign"), libc_address("free"), marks=False)
    pairs = hook_pairs()
    with joined_pool() as heap:
        pool = heap.pool
        figures: dict[str, Any] = {"libc": libc.summary(iterations)}
        figures["region_turns_over"] = pairs.summary(iterations)
        figures["region_turns_over"]["releases_per_pair"] = turnovers(pool, lambda: pairs.times(1, BATCH))
        with kept_region():
            figures["region_stays"] = pairs.summary(iterations)
            figures["region_stays"]["releases_per_pair"] = turnovers(pool, lambda: pairs.times(1, BATCH))
        figures["region"] = region_summary(pool, iterations)
        figures["threads"] = [threaded(pairs, count, iterations) for count in (1, 2, 4)]
        figures["threads_libc"] = [threaded(libc, count, iterations) for count in (1, 2, 4)]
    return figures


def region_summary(pool: PoolTable, iterations: int) -> dict[str, float]:
    """Return nanoseconds to acquire and release one region that is mapped where it is wanted."""
    wanted = np.zeros(1, np.int32)
    times = np.zeros(iterations * PAIRS_PER_ITERATION // BATCH, np.int64)
    loops.region_pairs(pool.member[0], wanted, BATCH, times)
    return _quantiles("", (times - loops.clock_ns()) / BATCH)


def threaded(pairs: Pairs, count: int, iterations: int) -> dict[str, float]:
    """Return pairs per second of all threads together, each in its own loop over one heap, and a pair's time."""
    start = threading.Barrier(count + 1)
    times: list[loops.Times] = []

    def work() -> None:
        start.wait(timeout=END_S)
        times.append(pairs.times(iterations, BATCH))

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    start.wait(timeout=END_S)
    began_s = time.perf_counter()
    for thread in threads:
        thread.join(timeout=END_S * iterations)
    wall_s = time.perf_counter() - began_s
    done = count * iterations * PAIRS_PER_ITERATION
    return {"threads": count, "pairs_per_s": done / wall_s, **_quantiles("", np.concatenate(times) / BATCH)}


# -- PyTorch --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(device: str, *, pooled: bool) -> Iterator[Connection]:
    """Start a worker, under ``zico run`` if ``pooled``; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="zico-heap-") as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/socket")
        listener.listen()
        run = (*common.ZICO, "run", "--quiet", "--device", device, "--budget", "1GiB", "--") if pooled else ()
        kind = "cpu" if device == "host" else "cuda"
        argv = (*run, sys.executable, str(Path(torch_worker.__file__)), f"{directory}/socket", kind)
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        try:
            with accepted(listener, process) as connection:
                if answer(connection) is not pooled:
                    message = f"the worker is {'not ' if pooled else ''}in a pool"
                    raise RuntimeError(message)
                yield connection
        finally:
            _end(process)


def accepted(listener: socket.socket, process: subprocess.Popen[bytes]) -> Connection:
    """Return the worker's connection.

    Raises:
        TimeoutError: The worker has not connected in time.
        RuntimeError: It ended before.
    """
    end = os.pidfd_open(process.pid)
    try:
        ready = wait([listener, end], START_S)
    finally:
        os.close(end)
    if listener in ready:
        return Connection(listener.accept()[0].detach())
    if ready:
        message = "the worker ended before it connected"
        raise RuntimeError(message)
    message = f"the worker did not connect within {START_S:.0f} s"
    raise TimeoutError(message)


def answer(connection: Connection) -> Any:  # noqa: ANN401 - whatever was asked for
    """Return what a worker answers.

    Raises:
        TimeoutError: It has not answered in time.
        EOFError: It ended.
    """
    if not connection.poll(ANSWER_S):
        message = f"the worker did not answer within {ANSWER_S:.0f} s"
        raise TimeoutError(message)
    return connection.recv()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a worker that nobody asks any more, kill it if it does not end, and pass its errors on if it failed."""
    for stop in (process.terminate, process.kill):
        try:
            _, errors = process.communicate(timeout=END_S)
            break
        except subprocess.TimeoutExpired:
            stop()
    else:
        _, errors = process.communicate(timeout=END_S)
    if process.returncode:
        sys.stderr.buffer.write(errors)


def measure_torch(rounds: int, batches: int, live_mib: int = 0, device: str = "host") -> dict[str, Any]:
    """Return what PyTorch's calls cost in both workers, round by round, in nanoseconds; on a GPU nobody forks."""
    asks: dict[str, tuple[str, tuple[Any, ...]]] = {
        name: ("statement", (name, batches, 100)) for name in torch_worker.STATEMENTS
    }
    if device == "host":
        asks |= {f"fork, {mib} MiB live": ("fork", (mib, 5)) for mib in (0, live_mib)}
    raw: dict[str, dict[str, list[dict[str, float]]]] = {name: {"plain": [], "zico": []} for name in asks}
    with worker(device, pooled=False) as plain, worker(device, pooled=True) as pooled:
        for index in range(rounds):
            ends = [("plain", plain), ("zico", pooled)]
            for name, ask in asks.items():
                for kind, connection in ends if index % 2 == 0 else reversed(ends):
                    connection.send(ask)
                    raw[name][kind].append(_quantiles("", answer(connection)))
    return {name: {**kinds, "ratio": ratio(kinds)} for name, kinds in raw.items()}


def ratio(kinds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the spread over rounds of the time in the pool over the time outside it."""
    pairs = zip(kinds["zico"], kinds["plain"], strict=True)
    return common.spread(zico["median_ns"] / plain["median_ns"] for zico, plain in pairs)


# -- what is shown --------------------------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    compiled = result["compiled"]
    names = {"libc": "C library", "region_turns_over": "pool, region turns over", "region_stays": "pool, region stays"}
    pair_rows = [
        (title, *(f"{compiled[key][field]:.0f}" for field in PAIR_FIELDS), _releases(compiled[key]))
        for key, title in names.items()
    ]
    header = ("1 MiB, ns per pair", "median", "p99 of batches", "single: median", "single: p99", "releases per pair")
    region = compiled["region"]
    thread_rows = [
        (str(pool["threads"]), f"{pool['pairs_per_s'] / 1e6:.2f}", f"{libc['pairs_per_s'] / 1e6:.2f}")
        for pool, libc in zip(compiled["threads"], compiled["threads_libc"], strict=True)
    ]
    clock_ns = compiled["libc"]["clock_ns"]
    clock = f"Batches are of {BATCH} pairs; one reading of the clock ({clock_ns:.0f} ns) is taken off each.\n"
    goal = f"Goal: median at most {GOAL_PAIR_NS} ns from the pool; `torch.empty` not slower."
    return "\n".join(
        (
            common.table(header, pair_rows),
            clock,
            f"A region acquired and released alone: {region['median_ns']:.0f} ns, p99 {region['p99_ns']:.0f}. {goal}\n",
            common.table(("threads", "pool, million pairs/s", "C library, million pairs/s"), thread_rows),
            torch_table(result["torch"]),
        )
    )


PAIR_FIELDS = ("median_ns", "p99_ns", "single_median_ns", "single_p99_ns")


def _releases(figures: dict[str, float]) -> str:
    return f"{figures['releases_per_pair']:.2f}" if "releases_per_pair" in figures else "-"


def torch_table(figures: dict[str, Any]) -> str:
    """Return what ``measure_torch`` found as Markdown."""
    return common.table(("PyTorch, us", "plain", "in the pool", "ratio", "min-max"), _torch_rows(figures))


def _torch_rows(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, kinds in figures.items():
        medians = (np.median([one["median_ns"] for one in kinds[kind]]) / 1e3 for kind in ("plain", "zico"))
        ratios = kinds["ratio"]
        span = f"{ratios['min']:.2f}-{ratios['max']:.2f}"
        yield (name, *(f"{median:.2f}" for median in medians), f"{ratios['median']:.2f}", span)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=200, help="of 1024 pairs, per figure of the compiled part")
    parser.add_argument("--rounds", type=int, default=15, help="turns of the two PyTorch processes")
    options = parser.parse_args()
    iterations, rounds, batches = (3, 2, 5) if options.smoke else (options.iterations, options.rounds, 50)
    settings = {"iterations": iterations, "rounds": rounds, "batches": batches, "tensor_bytes": TENSOR_BYTES}
    result = common.document("heap", QUESTION, settings | {"region_bytes": REGION_BYTES, "batch": BATCH})
    result["compiled"] = measure_compiled(iterations)
    result["torch"] = measure_torch(rounds, batches, live_mib=8 if options.smoke else 256)
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
