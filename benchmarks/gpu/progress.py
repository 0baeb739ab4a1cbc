"""What does a mark on a GPU's timeline cost, by kernel, by stream operation and by event?

Three ways to tell that a stream has come this far: Zico's progress kernel, ``cuStreamWriteValue64``
into the same counter, and ``cuEventRecord`` (which only its own process can ask). For each the time
that the caller spends, one mark at a time from compiled code, and the time that the device spends,
with no other work and between pieces of work.

Needs a CUDA device; ``--smoke`` runs on the driver's software twin, to see that the script works.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import numpy as np
from loops import Times, clock_ns
from zico.kernels import launch, prepare, progress, scrub, spin

from zico.base.compiled import call, compiled
from zico.base.errors import ConfigError, DriverError
from zico.base.libc import monotonic_ns
from zico.base.units import MIB
from zico.device.cuda import CudaDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "What does a mark on a GPU's timeline cost, by kernel, by stream operation and by event?"
WAYS = ("kernel", "stream operation", "event")
GATE = 3
"""Which of the words that the device sees keeps it from beginning; 0 to 2 are counter, stop and given up."""
MARKS = 256
"""Of one round: fewer than a stream holds, so that no call waits for room."""
WORK_BYTES = 64 * MIB
WORK_PIECES = 64
"""Pieces of work of a round, a region's scrubbing each, with a mark behind each or with none."""


@compiled
def timed_marks(launcher: launch.Record, stream: int, counter: int, value: int, times: Times) -> int:
    """Make marks from ``value`` on and fill ``times`` with the nanoseconds of each call; returns the worst status."""
    worst = 0
    for i in range(len(times)):
        began_ns = monotonic_ns()
        worst = max(worst, progress.mark(launcher, stream, counter, value + i))
        times[i] = monotonic_ns() - began_ns
    return worst


@compiled
def timed_events(record: int, event: int, stream: int, times: Times) -> int:
    """Record an event again and again and fill ``times`` with the nanoseconds of each call."""
    worst = 0
    for i in range(len(times)):
        began_ns = monotonic_ns()
        worst = max(worst, call(record, (event, stream)) & 0xFFFFFFFF)
        times[i] = monotonic_ns() - began_ns
    return worst


class Timeline:
    """A stream, the counter that it writes, a region to work on, and events around what is timed."""

    def __init__(self, driver: CudaDriver, record: int, stack: contextlib.ExitStack) -> None:
        """Make what is needed; ``record`` is the address of ``cuEventRecord``, and ``stack`` undoes all."""
        self._driver = driver
        self._page = page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)  # kept: the device writes to it
        registered = stack.enter_context(contextlib.closing(driver.register_host(page.ctypes.data, mmap.PAGESIZE)))
        memory = stack.enter_context(contextlib.closing(driver.create_memory(WORK_BYTES, "benchmark")))
        window = stack.enter_context(contextlib.closing(driver.reserve(WORK_BYTES)))
        driver.map(window, 0, memory, 0, WORK_BYTES)
        self._region = window.handle
        self._counter = registered.device_address
        self._value = 1
        self._stream = stack.enter_context(contextlib.closing(driver.create_stream())).handle
        self._events = [driver.call("cuEventCreate", 0) for _ in range(3)]
        for event in self._events:
            stack.callback(driver.call, "cuEventDestroy", event)
        stop, given_up, self._gate = (registered.device_address + launch.WORD_BYTES * i for i in (1, 2, GATE))
        by_operation = prepare.prepare(driver, stop, given_up, prepare.KERNELS)
        by_kernel = by_operation.copy()
        by_kernel["write_value"] = 0
        self._launchers = {"kernel": by_kernel, "stream operation": by_operation}
        self._record = record

    def marks(self, way: str, count: int) -> Times:
        """Make marks; returns the nanoseconds of each call."""
        times = np.zeros(count, np.int64)
        if way == "event":
            status = timed_events(self._record, int(self._events[2]), self._stream, times)
        else:
            status = timed_marks(self._launchers[way][0], self._stream, self._counter, self._value, times)
            self._value += count
        _check(f"mark by {way}", status)
        return times

    def work(self, way: str | None) -> None:
        """Put pieces of work on the stream, with a mark behind each if there is a way to make it."""
        launcher = self._launchers["kernel"][0]
        for _ in range(WORK_PIECES):
            _check("scrubbing", scrub.zero(launcher, self._stream, self._region, WORK_BYTES))
            if way is not None:
                self.marks(way, 1)

    @contextlib.contextmanager
    def device_us(self, results: list[float]) -> Iterator[None]:
        """Append the microseconds that the device needed for what is put on the stream inside.

        The device begins only when all of it is there, so that it never waits for this program.
        """
        first, last = self._events[:2]
        opened = int(self._page[GATE]) + 1
        _check("wait", spin.wait(self._launchers["kernel"][0], self._stream, self._gate, opened))
        self._driver.call("cuEventRecord", first, self._stream)
        try:
            yield
            self._driver.call("cuEventRecord", last, self._stream)
        finally:
            self._page[GATE] = opened
        self._driver.call("cuEventSynchronize", last)
        results.append(1e3 * float(self._driver.call("cuEventElapsedTime", first, last)))


def _check(operation: str, status: int) -> None:
    if status != launch.SUCCESS:
        raise DriverError(operation, int(status))


def measure(timeline: Timeline, rounds: int) -> dict[str, Any]:
    """Return the figures of each way; rounds take turns."""
    host: dict[str, list[int]] = {way: [] for way in WAYS}
    alone: dict[str, list[float]] = {way: [] for way in WAYS}
    between: dict[str | None, list[float]] = {way: [] for way in (None, *WAYS)}
    for way in WAYS:
        timeline.marks(way, MARKS)  # compiled and warm from here on
    timeline.work(None)
    for _ in range(rounds):
        for way in WAYS:
            with timeline.device_us(alone[way]):
                host[way] += timeline.marks(way, MARKS).tolist()
        for kind, elapsed in between.items():
            with timeline.device_us(elapsed):
                timeline.work(kind)
    clock = clock_ns()
    return {
        way: {
            "host_ns": _quantiles([ns - clock for ns in host[way]]),
            "device_alone_us": _quantiles([us / MARKS for us in alone[way]]),
            "device_between_work_us": _quantiles(
                [(us - base) / WORK_PIECES for us, base in zip(between[way], between[None], strict=True)]
            ),
            "work_us": _quantiles([us / WORK_PIECES for us in between[None]]),
        }
        for way in WAYS
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    return {"p50": common.percentile(values, 50), "p99": common.percentile(values, 99), "n": len(values)}


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    parts = ("host_ns", "device_alone_us", "device_between_work_us")
    header = ("mark by", *(f"{part} {quantile}" for part in parts for quantile in ("p50", "p99")))
    rows = [
        (way, *(f"{result['ways'][way][part][quantile]:.2f}" for part in parts for quantile in ("p50", "p99")))
        for way in WAYS
    ]
    work_us = result["ways"][WAYS[0]]["work_us"]["p50"]
    note = f"A piece of work is the scrubbing of {WORK_BYTES // MIB} MiB, {work_us:.1f} us.\n"
    return f"{common.table(header, rows)}\n{result['device']}.\n\n{note}"


@contextlib.contextmanager
def devices(*, smoke: bool) -> Iterator[tuple[object | None, int]]:
    """Give the driver's functions, ``None`` for the real ones, and the address of ``cuEventRecord``."""
    if smoke:
        sys.path.insert(0, str(common.ROOT / "tests"))
        from twin.meanings import register
        from twin.twin import Twin

        with Twin(total_bytes=1024 * MIB) as twin:
            register(twin)
            record: Any = twin.cuEventRecord
            kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
            kept = kind(lambda event, stream: int(record(event, stream)[0]))
            yield twin, ctypes.cast(kept, ctypes.c_void_p).value or 0
    else:
        yield None, ctypes.cast(ctypes.CDLL("libcuda.so.1").cuEventRecord, ctypes.c_void_p).value or 0


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=50, help=f"of {MARKS} marks each")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    with contextlib.ExitStack() as stack:
        try:
            api, record = stack.enter_context(devices(smoke=options.smoke))
            driver = CudaDriver(0, api)
        except (DriverError, ConfigError, OSError) as error:
            sys.exit(f"progress.py measures on a CUDA device, and there is none that Zico can use: {error}")
        result = common.document("progress", QUESTION, {"rounds": rounds, "marks": MARKS, "work_bytes": WORK_BYTES})
        facts = driver.facts
        result["device"] = f"{facts.name}, driver for CUDA {facts.driver_text}"
        stack.callback(driver.close)
        stack.enter_context(driver.context.current())
        result["ways"] = measure(Timeline(driver, record, stack), rounds)
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
