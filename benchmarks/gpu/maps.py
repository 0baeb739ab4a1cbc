"""What does a map of a region cost: by the region's size, on an idle GPU, under kernels, beside a second process?

For each size: a map and its access one region at a time, access for all regions in one call, and
the way back; memory is also exported and imported. Each is timed on an idle device, while this
process's stream has work, while a second process's has, and while both have. ``--twin`` asks the
driver's software twin, to see that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import driver_facts
import record
from driver_facts import Clock

from zico.base.errors import ConfigError, DriverError
from zico.base.units import GIB, MIB
from zico.device.cuda import CudaDriver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

PART = "maps"
SIZES = (2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
STATES = ("idle", "kernels", "second process", "both")
SECOND_S = 20.0
"""For the second process to begin."""
NOT_READY = 600


class Load:
    """A stream that fills memory, for as long as there are fills on it."""

    def __init__(self, driver: CudaDriver, stack: contextlib.ExitStack, *, twin: bool) -> None:
        """Take memory to fill."""
        self._driver = driver
        self._bytes = 2 * MIB if twin else GIB
        self._fills = 8 if twin else 500  # some 200 ms; a stream holds about a thousand
        memory = stack.enter_context(driver.create_memory(self._bytes, "load"))
        window = stack.enter_context(driver.reserve(self._bytes))
        driver.map(window, 0, memory, 0, self._bytes)
        self._address = window.handle
        self._stream = stack.enter_context(driver.create_stream()).handle

    def put(self) -> None:
        """Put fills on the stream; returns at once."""
        for value in range(self._fills):
            self._driver.call("cuMemsetD8Async", self._address, value & 0xFF, self._bytes, self._stream)

    @property
    def is_busy(self) -> bool:
        """Tell whether there are fills left."""
        try:
            self._driver.call("cuStreamQuery", self._stream)
        except DriverError as error:
            if error.status != NOT_READY:
                raise
            return True
        return False

    def wait(self) -> None:
        """Wait for their end."""
        self._driver.synchronize(self._stream)


def life(driver: CudaDriver, region_bytes: int, count: int) -> dict[str, float]:
    """Return the microseconds that each step of a region's life takes, in the median or as a part of one call."""
    timed = Clock()
    with contextlib.ExitStack() as stack:
        window = stack.enter_context(driver.reserve(count * region_bytes))
        made = stack.enter_context(timed("create", driver.create_memory, count * region_bytes, "maps", region_bytes))
        descriptors = timed("export", driver.export_pieces, made)
        memory = stack.enter_context(
            timed("import", driver.import_pieces, descriptors, count * region_bytes, region_bytes)
        )
        for number in range(count):
            offset = number * region_bytes
            timed("map and access, one", driver.map, window, offset, memory, offset, region_bytes)
        for number in range(count):
            timed("unmap, one", driver.unmap, window, number * region_bytes, region_bytes)
        timed("map each, access all", driver.map, window, 0, memory, 0, count * region_bytes)
        timed("unmap, all", driver.unmap, window, 0, count * region_bytes)
    singles = ("map and access, one", "unmap, one")
    return {
        name: round(spread["median"] / (1 if name in singles else count), 2) for name, spread in timed.spreads().items()
    }


@contextlib.contextmanager
def second_process(*, twin: bool) -> Iterator[None]:
    """Keep the device busy from a second process.

    Raises:
        RuntimeError: It did not begin.
    """
    argv = [sys.executable, __file__, "--second", *["--twin"] * twin]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if not cast("IO[str]", process.stdout).readline():  # it ends by itself where the driver refuses
            message = f"the second process ended with status {process.wait(SECOND_S)}"
            raise RuntimeError(message)
        yield
    finally:
        process.kill()
        process.wait(SECOND_S)
        for pipe in (process.stdin, process.stdout):
            cast("IO[str]", pipe).close()


def keep_busy(*, twin: bool) -> None:
    """Keep the device busy until somebody kills this process, ``SECOND_S`` at most."""
    end_s = time.monotonic() + SECOND_S
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(contextlib.closing(CudaDriver(0)))
        stack.enter_context(driver.context.current())
        load = Load(driver, stack, twin=twin)
        load.put()
        sys.stdout.write("busy\n")
        sys.stdout.flush()
        while time.monotonic() < end_s:
            load.put()
            load.wait()


def measure(*, twin: bool) -> dict[str, Any]:
    """Return microseconds by state, size of a region and step."""
    found: dict[str, Any] = {state: {} for state in STATES}
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(contextlib.closing(CudaDriver(0)))
        stack.enter_context(driver.context.current())
        load = Load(driver, stack, twin=twin)
        life(driver, SIZES[0], 2)  # whatever is loaded at the first call
        for state in STATES:
            beside = second_process(twin=twin) if state in ("second process", "both") else contextlib.nullcontext()
            with beside:
                for size in SIZES:
                    count = 4 if twin else 64
                    if state in ("kernels", "both"):
                        load.put()
                    steps: dict[str, Any] = life(driver, size, count)
                    if state in ("kernels", "both"):
                        steps["busy_until_the_end"] = load.is_busy
                        load.wait()
                    found[state][f"{size // MIB} MiB"] = steps
    return found


def main() -> int:
    """Measure, and append the line; returns 1 where that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    if "--second" not in sys.argv:
        record.add_options(parser)
    parser.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--twin", action="store_true", help="ask the driver's software twin; its times mean nothing")
    options = parser.parse_args()
    if options.twin:
        driver_facts.use_twin()
    if options.second:
        keep_busy(twin=options.twin)
        return 0
    begun_s = time.monotonic()
    status = record.DONE
    try:
        figures: dict[str, Any] = {"microseconds": measure(twin=options.twin)}
    except (ConfigError, DriverError, OSError, RuntimeError) as error:
        status, figures = record.FAILED, {"why": f"{type(error).__name__}: {error}"}
    told = {"seconds": time.monotonic() - begun_s, "turn": options.round, "status": status}
    record.append(options.result, PART, "sizes", figures, **told)
    return int(status != record.DONE)


if __name__ == "__main__":
    sys.exit(main())
