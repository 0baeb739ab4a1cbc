"""What does a GPU's driver do that the manual leaves open, and what does each call cost?

Each fact is found in a process of its own, so that a call that hangs, or that loses the context,
costs one fact. The figures are written after each fact. ``--twin`` asks the driver's software twin,
to see that the script works: its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

from zico.base.errors import ConfigError, DriverError
from zico.base.units import GIB, MIB
from zico.broker.outside import use_of
from zico.device.api import close_descriptors
from zico.device.cuda import CudaDriver, bindings
from zico.device.cuda.facts import device_uuids, probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUESTION = "What does a GPU's driver do that the manual leaves open, and what does each call cost?"
REGION_BYTES = 64 * MIB
POOLED_BYTES = 8 * REGION_BYTES
"""Of memory that two processes share: as much as a context."""
REPEATS = 64
WINDOWS = 27
"""Reservations in one process, each as large as the device's memory."""
ROUND_TRIPS = 100
"""Fewer operations than a stream holds, so that no call waits for room."""
FACT_S = 20.0
PATIENCE_S = 20.0
"""For what another process or the device has to do."""
COUNTER, ANSWER = 0, 1
WORD_BYTES = 8
TWIN_BYTES = 4 * GIB


class Clock:
    """Times of calls, by name."""

    def __init__(self) -> None:
        """Start empty."""
        self._times_us: dict[str, list[float]] = {}

    def __call__(self, name: str, operation: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - its result
        """Call ``operation``, note the microseconds it took, and return its result."""
        begun_ns = time.perf_counter_ns()
        result = operation(*arguments)
        self.note(name, begun_ns)
        return result

    def note(self, name: str, begun_ns: int) -> None:
        """Note the microseconds since ``begun_ns``."""
        self._times_us.setdefault(name, []).append((time.perf_counter_ns() - begun_ns) / 1e3)

    def spreads(self) -> dict[str, dict[str, float]]:
        """Return microseconds of each name."""
        return {name: common.spread(values) for name, values in self._times_us.items()}


def until(is_met: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Ask again and again until something holds; returns whether it did before the deadline."""
    end_s = time.monotonic() + patience_s
    while not is_met():
        if time.monotonic() > end_s:
            return False
    return True


# -- memory ----------------------------------------------------------------------------------------


def device() -> dict[str, Any]:
    """Return what the device says of itself."""
    facts = probe(0)
    names = ("name", "total_bytes", "granularity_bytes", "has_virtual_memory", "exports_descriptors")
    found = {name: getattr(facts, name) for name in (*names, "waits_on_stream", "registers_host")}
    return {**found, "driver": facts.driver_text, "compute_capability": list(facts.compute_capability)}


def _memory_calls(driver: CudaDriver) -> dict[str, Any]:
    """Time each call on one region's life, as the driver answers it in this thread as it is."""
    timed = Clock()
    for _ in range(REPEATS):
        with contextlib.ExitStack() as stack:
            window = stack.enter_context(timed("reserve", driver.reserve, REGION_BYTES))
            made = stack.enter_context(timed("create", driver.create_memory, REGION_BYTES, "facts"))
            descriptors = timed("export", driver.export_pieces, made)
            memory = stack.enter_context(timed("import", driver.import_pieces, descriptors, REGION_BYTES))
            timed("map and access", driver.map, window, 0, memory, 0, REGION_BYTES)
            timed("unmap", driver.unmap, window, 0, REGION_BYTES)
            timed("release", memory.close)
            timed("free addresses", window.close)
    return {"microseconds": timed.spreads()}


def calls_without_context() -> dict[str, Any]:
    """Time the virtual memory calls in a thread that has no context, and say whether the driver wanted one."""
    with contextlib.closing(CudaDriver(0)) as driver:
        figures = _memory_calls(driver)
        return figures | {"needs_context": driver.needs_context, "context_retained": driver.context.retained}


def calls_with_context() -> dict[str, Any]:
    """Time the same calls in a thread whose context is current."""
    with contextlib.closing(CudaDriver(0)) as driver, driver.context.current():
        return _memory_calls(driver)


def import_in_exporter() -> dict[str, Any]:
    """Say whether memory imported by the process that exported it is the same memory."""
    with contextlib.closing(CudaDriver(0)) as driver, driver.context.current(), contextlib.ExitStack() as stack:
        made = stack.enter_context(driver.create_memory(REGION_BYTES, "facts"))
        memory = stack.enter_context(driver.import_pieces(driver.export_pieces(made), REGION_BYTES))
        window = stack.enter_context(driver.reserve(2 * REGION_BYTES))
        driver.map(window, 0, made, 0, REGION_BYTES)
        driver.map(window, REGION_BYTES, memory, 0, REGION_BYTES)
        sent = ctypes.create_string_buffer(b"the same")
        seen = ctypes.create_string_buffer(len(sent))
        driver.call("cuMemcpyHtoD", window.handle, ctypes.addressof(sent), len(sent))
        driver.call("cuMemcpyDtoH", ctypes.addressof(seen), window.handle + REGION_BYTES, len(sent))
        return {"same_memory": sent.raw == seen.raw}


def reservations() -> dict[str, Any]:
    """Reserve many windows at once, each as large as the device's memory."""
    timed = Clock()
    reserved = 0
    with contextlib.closing(CudaDriver(0)) as driver, contextlib.ExitStack() as stack:
        size_bytes = driver.total_bytes() // REGION_BYTES * REGION_BYTES
        with contextlib.suppress(DriverError):  # how many there were is the answer
            for _ in range(WINDOWS):
                stack.enter_context(timed("reserve", driver.reserve, size_bytes))
                reserved += 1
    return {"reserved": reserved, "bytes_each": size_bytes, "microseconds": timed.spreads()}


def descriptors() -> dict[str, Any]:
    """Export as many descriptors as a pool of the whole device needs, under the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    exported: list[int] = []
    refused = ""
    with contextlib.closing(CudaDriver(0)) as driver:
        wanted = driver.total_bytes() // REGION_BYTES
        with driver.create_memory(driver.granularity_bytes, "facts") as memory:
            try:
                for _ in range(wanted):
                    exported += driver.export_pieces(memory)
            except DriverError as error:
                refused = str(error)
            finally:
                for descriptor in exported:
                    os.close(descriptor)
    return {"exported": len(exported), "wanted": wanted, "refused": refused, "soft": soft, "hard": hard}


# -- the timeline ----------------------------------------------------------------------------------


@contextlib.contextmanager
def shared_words(driver: CudaDriver, descriptor: int) -> Iterator[tuple[Any, int]]:
    """Map a page that processes share, for this process and for the device; give its words and device address."""
    page = mmap.mmap(descriptor, mmap.PAGESIZE)
    words = (ctypes.c_int64 * (mmap.PAGESIZE // WORD_BYTES)).from_buffer(page)
    with contextlib.closing(driver.register_host(ctypes.addressof(words), mmap.PAGESIZE)) as registered:
        yield words, registered.device_address


def stream_write() -> dict[str, Any]:
    """Time a stream's write of a word: the call, and until the processor sees it."""
    timed = Clock()
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(contextlib.closing(CudaDriver(0)))
        words, address = stack.enter_context(shared_words(driver, -1))
        stream = stack.enter_context(driver.create_stream()).handle
        stack.enter_context(driver.context.current())
        arrived = True
        for value in range(1, REPEATS + 1):
            begun_ns = time.perf_counter_ns()
            timed("call", driver.call, "cuStreamWriteValue64", stream, address, value, 0)
            arrived &= until(lambda: words[COUNTER] == value)  # noqa: B023 - called before the next value
            timed.note("seen by the processor", begun_ns)
    return {"arrived": arrived, "microseconds": timed.spreads()}


def _peer(descriptor: int) -> None:
    """Answer each value of the counter from a stream of this process, and say when all answers are queued."""
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(contextlib.closing(CudaDriver(0)))
        _, address = stack.enter_context(shared_words(driver, descriptor))
        stream = stack.enter_context(driver.create_stream()).handle
        for value in range(1, ROUND_TRIPS + 1):
            driver.wait_value(stream, address + COUNTER * WORD_BYTES, value)
            driver.write_value(stream, address + ANSWER * WORD_BYTES, value)
        _say("queued")
        driver.synchronize(stream)


def wait_across_processes() -> dict[str, Any]:
    """Time round trips between the streams of two processes that share the device by time slices."""
    page = os.memfd_create("facts")
    os.ftruncate(page, mmap.PAGESIZE)
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(contextlib.closing(CudaDriver(0)))
        words, address = stack.enter_context(shared_words(driver, page))
        stream = stack.enter_context(driver.create_stream()).handle
        stack.enter_context(Helper("peer", page))
        times_us: list[float] = []
        for value in range(1, ROUND_TRIPS + 1):
            begun_ns = time.perf_counter_ns()
            driver.write_value(stream, address + COUNTER * WORD_BYTES, value)
            if not until(lambda: words[ANSWER] >= value):  # noqa: B023 - called before the next value
                break
            times_us.append((time.perf_counter_ns() - begun_ns) / 1e3)
        words[COUNTER] = ROUND_TRIPS  # whatever waits goes on
        spread = common.spread(times_us) if times_us else None
    return {"round_trips": len(times_us), "microseconds": {"round trip": spread} if spread else {}}


# -- processes -------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, flush=True)


class Helper:
    """A second process with the same driver, up to the first line that it prints; dead when the block ends."""

    def __init__(self, name: str, descriptor: int) -> None:
        """Start it and wait for its line.

        Raises:
            RuntimeError: It ended without a line.
        """
        argv = [sys.executable, __file__, "--helper", name, "--descriptor", str(descriptor)]
        argv += ["--twin"] * is_twin()
        self._process = subprocess.Popen(argv, pass_fds=(descriptor,), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None  # noqa: S101 - mypy asks
        self.line = self._process.stdout.readline().strip()  # the fact's deadline ends this wait
        if not self.line:
            self.kill()
            raise RuntimeError(f"the helper process {name!r} ended with status {self._process.returncode}")

    def kill(self) -> None:
        """End it at once."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def __enter__(self) -> Helper:  # noqa: PYI034 - final in effect
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.kill()
        assert self._process.stdout is not None  # noqa: S101 - mypy asks
        self._process.stdout.close()


def _context(descriptor: int) -> None:
    """Make a context, say how long it took, and keep it until the other side closes."""
    driver = CudaDriver(0)
    begun_ns = time.perf_counter_ns()
    driver.context.retain()
    _say(str((time.perf_counter_ns() - begun_ns) / 1e6))
    os.read(descriptor, 1)


def context() -> dict[str, Any]:
    """Return what another process's context takes of the device's memory, and how long it takes to make."""
    reading, writing = os.pipe()
    with contextlib.closing(CudaDriver(0)) as driver, driver.context.current():
        before = driver.free_bytes() or 0
        with Helper("context", reading) as helper:
            during = driver.free_bytes() or 0
            milliseconds = float(helper.line)
    os.close(writing)
    return {"mib": (before - during) / MIB, "milliseconds": milliseconds}


def _importing(descriptor: int) -> None:
    """Map memory of the other process in a context, say so, and keep it until killed."""
    driver = CudaDriver(0)
    with driver.context.current():
        memory = driver.import_pieces([descriptor], POOLED_BYTES)
        driver.map(driver.reserve(POOLED_BYTES), 0, memory, 0, POOLED_BYTES)
        _say(str(os.getpid()))
        signal.pause()


def _aside(descriptor: int, *, imports: bool) -> None:
    """Put a context aside and take it up again, and say how long each took, or what the driver said."""
    driver = CudaDriver(0)
    driver.context.retain()
    if imports:
        driver.import_pieces([descriptor], POOLED_BYTES)
    found: dict[str, Any] = {"refused": ""}
    try:
        lock = driver.call.api.CUcheckpointLockArgs()
        lock.timeoutMs = int(1000 * PATIENCE_S)
        for step, arguments in (("Lock", lock), ("Checkpoint", None), ("Restore", None), ("Unlock", None)):
            begun_ns = time.perf_counter_ns()
            driver.call(f"cuCheckpointProcess{step}", os.getpid(), arguments)
            found[f"{step.lower()}_ms"] = (time.perf_counter_ns() - begun_ns) / 1e6
    except (DriverError, AttributeError) as error:  # an AttributeError: bindings before 12.8
        found["refused"] = str(error)
    _say(json.dumps(found))


def context_put_aside() -> dict[str, Any]:
    """Return whether a process can put its context aside, also one that has imported memory as a pool's jobs do."""
    found = {}
    for helper_name in ("aside", "aside_importing"):
        with contextlib.ExitStack() as stack:
            driver = stack.enter_context(contextlib.closing(CudaDriver(0)))
            made = stack.enter_context(driver.create_memory(POOLED_BYTES, "facts"))
            (descriptor,) = driver.export_pieces(made)
            helper = stack.enter_context(Helper(helper_name, descriptor))
            found[helper_name] = json.loads(helper.line)
            os.close(descriptor)
    return found


def listing() -> dict[str, Any]:
    """Return for whom the management library lists memory that a process without a context shares with another one."""
    uuid = device_uuids()[0]
    before = use_of(uuid)
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(contextlib.closing(CudaDriver(0)))
        made = stack.enter_context(driver.create_memory(POOLED_BYTES, "facts"))
        (descriptor,) = driver.export_pieces(made)
        helper = stack.enter_context(Helper("importing", descriptor))
        use = use_of(uuid)
        os.close(descriptor)
    if before is None or use is None or use.by_process is None:
        return {"is_known": False}
    mib_of = {pid: held / MIB for pid, held in use.by_process.items()}
    return {
        "is_known": True,
        "shared_mib": POOLED_BYTES / MIB,
        "used_more_mib": (use.used_bytes - before.used_bytes) / MIB,
        "exporter_mib": mib_of.get(os.getpid()),
        "importer_mib": mib_of.get(int(helper.line)),
        "listed_for_nobody_mib": use.used_bytes / MIB - sum(mib_of.values()),
        "reserved_mib": use.reserved_bytes / MIB,
    }


def _forking(descriptor: int, *, lets_go: bool = False) -> None:
    """Hold a region; a forked child keeps the driver's files and the region's descriptors, or lets go of them."""
    driver = CudaDriver(0)
    memory = driver.create_memory(REGION_BYTES, "facts")
    held = driver.export_pieces(memory)
    if os.fork() == 0:
        if lets_go:
            close_descriptors(held)
            bindings.let_go_of_device_files()
        os.read(descriptor, 1)  # until the fact's process closes its end
        os._exit(0)
    _say(str(len(held)))
    os.read(descriptor, 1)


def killed_with_forked_child() -> dict[str, Any]:
    """Say when a killed process's memory comes back: while its forked child lives, or only afterwards.

    A child that lets go of the driver's files, as a job's do, still has mappings of them.
    """
    kept, let_go = (_killed(helper) for helper in ("forking", "letting_go"))
    return kept | {"back_while_child_that_let_go_lives": let_go["back_while_child_lives"]}


def _killed(helper: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    with contextlib.closing(CudaDriver(0)) as driver, driver.context.current():

        def is_back() -> bool:
            return (driver.free_bytes() or 0) >= before

        before = driver.free_bytes() or 0
        with Helper(helper, reading) as process:
            taken = before - (driver.free_bytes() or 0)
            process.kill()
            while_child_lives = until(is_back, PATIENCE_S / 4)
            os.close(writing)
            afterwards = until(is_back, PATIENCE_S / 4)
    return {"taken_mib": taken / MIB, "back_while_child_lives": while_child_lives, "back_afterwards": afterwards}


# -- the facts in order ----------------------------------------------------------------------------

FACTS: dict[str, Callable[[], dict[str, Any]]] = {
    fact.__name__: fact
    for fact in (
        *(device, calls_without_context, calls_with_context, import_in_exporter, reservations, descriptors),
        *(stream_write, wait_across_processes, context, context_put_aside, listing, killed_with_forked_child),
    )
}
HELPERS: dict[str, Callable[[int], None]] = {
    "peer": _peer,
    "context": _context,
    "importing": _importing,
    "aside": functools.partial(_aside, imports=False),
    "aside_importing": functools.partial(_aside, imports=True),
    "forking": _forking,
    "letting_go": functools.partial(_forking, lets_go=True),
}

EXPECTED: tuple[tuple[str, str, object], ...] = (
    ("device", "has_virtual_memory", True),
    ("device", "exports_descriptors", True),
    ("device", "waits_on_stream", True),
    ("device", "registers_host", True),
    ("calls_without_context", "needs_context", False),
    ("import_in_exporter", "same_memory", True),
    ("reservations", "reserved", WINDOWS),
    ("descriptors", "refused", ""),
    ("stream_write", "arrived", True),
    ("wait_across_processes", "round_trips", ROUND_TRIPS),
    ("killed_with_forked_child", "back_afterwards", True),
    ("killed_with_forked_child", "back_while_child_that_let_go_lives", True),
)
"""Fact, figure, and what the design takes it to be (docs/design/cuda.md). Times are asked for, not expected."""


def judge(facts: dict[str, Any], *, judged: bool) -> list[dict[str, Any]]:
    """Return for each expected figure what was found and whether it is met; ``None``: not judged."""
    said = []
    for fact, figure, expected in EXPECTED:
        if fact in facts:
            found = facts[fact].get("figures", {}).get(figure)
            met = found == expected if judged else None
            said.append({"figure": f"{fact}: {figure}", "expected": expected, "found": found, "met": met})
    return said


def is_twin() -> bool:
    """Tell whether this process asks the twin."""
    return "--twin" in sys.argv


def use_twin() -> None:
    """Put the driver's software twin in the driver's place, in this process."""
    sys.path.insert(0, str(common.ROOT / "tests"))
    from twin.twin import Twin

    bindings.use(Twin(total_bytes=TWIN_BYTES))


def find(fact: str) -> dict[str, Any]:
    """Find one fact in a process of its own; returns its figures, or why there are none."""
    argv = [sys.executable, __file__, "--fact", fact, *["--twin"] * is_twin()]
    begun_s = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, errors = process.communicate(timeout=FACT_S)
    except subprocess.TimeoutExpired:
        said, errors = "", f"it took longer than {FACT_S:.0f} s and was killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
        process.wait(PATIENCE_S)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begun_s, 2)}
    try:
        return found | {"figures": json.loads(said.splitlines()[-1])}
    except (IndexError, ValueError):
        return found | {"failed": (errors.strip().splitlines() or ["it ended without a figure"])[-1]}


def options_of() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--twin", action="store_true", help="ask the driver's software twin; its times mean nothing")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the figures here, after each fact")
    parser.add_argument("--fact", choices=FACTS, help="find this fact here, and print it as JSON")
    parser.add_argument("--helper", choices=HELPERS, help=argparse.SUPPRESS)
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def write(result: dict[str, Any], file: Path | None) -> None:
    """Write the result; the file is whole whenever it is there."""
    if file is not None:
        part = file.with_name(f"{file.name}.part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(file)


def main() -> int:
    """Find every fact; returns the exit code, 1 if one could not be found."""
    options = options_of()
    if options.twin:
        use_twin()
    try:
        if options.helper:
            HELPERS[options.helper](options.descriptor)
            return 0
        if options.fact:
            _say(json.dumps(FACTS[options.fact]()))
            return 0
    except (ConfigError, DriverError) as error:
        sys.exit(f"the driver says: {error}")
    result: dict[str, Any] = {"question": QUESTION, "twin": options.twin, "facts": {}, "expected": []}
    for name in FACTS:
        result["facts"][name] = found = find(name)
        result["expected"] = judge(result["facts"], judged=not options.twin)
        write(result, options.output)
        print(f"{name}: {json.dumps(found.get('figures', found.get('failed')))}", flush=True)
    return int(any("failed" in found for found in result["facts"].values()))


if __name__ == "__main__":
    sys.exit(main())
