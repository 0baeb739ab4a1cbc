"""Which of the driver's operations reach memory of the host that a GPU uses as its own?

Memory of the host becomes a GPU's in four ways; each is one piece and two adjacent ones. On each the
driver fills, copies and runs a kernel, and what the processor or a copy reads must be what was
written. Needs a CUDA device.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import numpy as np
from zico.kernels import prepare, scrub

from zico.base.errors import DriverError
from zico.base.units import MIB
from zico.device.cuda import CudaDriver

if TYPE_CHECKING:
    from collections.abc import Callable

QUESTION = "Which of the driver's operations reach memory of the host that a GPU uses as its own?"
PIECE_BYTES = 2 * MIB
PIECES = 2
BYTE = 0x5A
PLACE_S = 30.0


class Places:
    """Makes memory of the host for the device; ``undo`` gives it back."""

    def __init__(self, driver: CudaDriver, undo: contextlib.ExitStack) -> None:
        """Take where it is for."""
        self._call, self._undo, self._device = driver.call, undo, driver.device

    def _mapped(self, kind: str, *, by_processor: bool) -> int:
        api, call = self._call.api, self._call
        node = max(
            int(call("cuDeviceGetAttribute", api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, self._device)), 0
        )
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = getattr(api.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{kind}")
        properties.location.id = node
        accesses = []
        for where, number in (("DEVICE", int(self._device)), (kind, node))[: 1 + by_processor]:
            access = api.CUmemAccessDesc()
            access.location.type = getattr(api.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{where}")
            access.location.id = number
            access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            accesses.append(access)
        size_bytes = PIECES * PIECE_BYTES
        address = int(call("cuMemAddressReserve", size_bytes, PIECE_BYTES, 0, 0))
        self._undo.callback(call, "cuMemAddressFree", address, size_bytes)
        for at in range(address, address + size_bytes, PIECE_BYTES):
            handle = call("cuMemCreate", PIECE_BYTES, properties, 0)
            self._undo.callback(call, "cuMemRelease", handle)
            call("cuMemMap", at, PIECE_BYTES, 0, handle, 0)
            self._undo.callback(call, "cuMemUnmap", at, PIECE_BYTES)
            call("cuMemSetAccess", at, PIECE_BYTES, accesses, len(accesses))
        return address

    def numa_node(self) -> int:
        """Map two handles of a node, for the device and the processor."""
        return self._mapped("HOST_NUMA", by_processor=True)

    def numa_node_device_only(self) -> int:
        """Map two handles of a node, for the device alone."""
        return self._mapped("HOST_NUMA", by_processor=False)

    def host(self) -> int:
        """Map two handles of no certain node."""
        return self._mapped("HOST", by_processor=True)

    def registered(self) -> int:
        """Register two adjacent pieces of this process's memory, each by itself."""
        page = mmap.mmap(-1, (PIECES + 1) * PIECE_BYTES)
        start = np.frombuffer(page, np.uint8)
        begin = -(-start.ctypes.data // PIECE_BYTES) * PIECE_BYTES
        self._undo.callback(start.fill, 0)  # keeps it
        for at in range(begin, begin + PIECES * PIECE_BYTES, PIECE_BYTES):
            self._call("cuMemHostRegister", at, PIECE_BYTES, 3)  # portable, mapped
            self._undo.callback(self._call, "cuMemHostUnregister", at)
        return int(self._call("cuMemHostGetDevicePointer", begin, 0))

    def allocated(self) -> int:
        """Let the driver allocate both pieces at once."""
        address = int(self._call("cuMemHostAlloc", PIECES * PIECE_BYTES, 3))
        self._undo.callback(self._call, "cuMemFreeHost", address)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))


class Operations:
    """What the driver does with memory."""

    def __init__(self, driver: CudaDriver, undo: contextlib.ExitStack) -> None:
        """Make a stream, and memory of the device to copy from."""
        self._driver = driver
        self._stream = undo.enter_context(driver.create_stream()).handle
        page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
        words = undo.enter_context(contextlib.closing(driver.register_host(page.ctypes.data, mmap.PAGESIZE)))
        self._launcher = prepare.prepare(driver, words.device_address, words.device_address + 8, prepare.KERNELS)
        memory = undo.enter_context(driver.create_memory(PIECES * PIECE_BYTES, "benchmark"))
        window = undo.enter_context(driver.reserve(PIECES * PIECE_BYTES))
        driver.map(window, 0, memory, 0, PIECES * PIECE_BYTES)
        self._source = window.handle
        driver.call("cuMemsetD8", self._source, BYTE, PIECES * PIECE_BYTES)

    def fill(self, address: int, size_bytes: int) -> int:
        """Fill on a stream."""
        self._driver.call("cuMemsetD8Async", address, BYTE, size_bytes, self._stream)
        return BYTE

    def fill_words(self, address: int, size_bytes: int) -> int:
        """Fill on a stream, in words of 32 bits."""
        self._driver.call("cuMemsetD32Async", address, BYTE * 0x01010101, size_bytes // 4, self._stream)
        return BYTE

    def fill_at_once(self, address: int, size_bytes: int) -> int:
        """Fill, without a stream."""
        self._driver.call("cuMemsetD8", address, BYTE, size_bytes)
        return BYTE

    def copy(self, address: int, size_bytes: int) -> int:
        """Copy from the device's memory on a stream."""
        self._driver.call("cuMemcpyDtoDAsync", address, self._source, size_bytes, self._stream)
        return BYTE

    def copy_by_kind(self, address: int, size_bytes: int) -> int:
        """Copy with addresses that tell the driver what is copied, as frameworks do."""
        self._driver.call("cuMemcpyAsync", address, self._source, size_bytes, self._stream)
        return BYTE

    def kernel(self, address: int, size_bytes: int) -> int:
        """Let a kernel write zeros."""
        status = scrub.zero(self._launcher[0], self._stream, address, size_bytes)
        if status:
            raise DriverError("scrubbing", int(status))
        return 0

    def read(self, address: int, size_bytes: int) -> Any:  # noqa: ANN401 - an array of bytes
        """Copy back what is there, behind the stream's work."""
        found = np.zeros(size_bytes, np.uint8)
        self._driver.synchronize(self._stream)
        self._driver.call("cuMemcpyDtoH", found.ctypes.data, address, size_bytes)
        return found


WAYS = ("fill", "fill_words", "fill_at_once", "copy", "copy_by_kind", "kernel")
PLACES = ("numa_node", "numa_node_device_only", "host", "registered", "allocated")


def tried(function: Callable[[], str]) -> str:
    """Return what a function says, or what the driver refused."""
    try:
        return function()
    except (DriverError, AttributeError) as error:
        return str(error)[:120]


def ask(place: str) -> dict[str, str]:
    """Try every operation on one kind of memory."""
    with contextlib.ExitStack() as undo:
        driver = undo.enter_context(contextlib.closing(CudaDriver(0)))
        undo.enter_context(driver.context.current())
        operations = Operations(driver, undo)
        made = undo.enter_context(contextlib.ExitStack())
        try:
            address = getattr(Places(driver, made), place)()
        except (DriverError, AttributeError) as error:
            return {"making": str(error)[:200]}
        found = {}
        for way in WAYS:
            for pieces in range(1, PIECES + 1):

                def once(way: str = way, size_bytes: int = pieces * PIECE_BYTES) -> str:
                    meant = getattr(operations, way)(address, size_bytes)
                    return "right" if (operations.read(address, size_bytes) == meant).all() else "WRONG BYTES"

                found[f"{way}, {pieces}"] = tried(once)
                _say(found)
        return found


def _say(found: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Try everything, each kind of memory in a process that may lose its context; print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--place", choices=PLACES, help="only this, as JSON")
    options = parser.parse_args()
    if options.place:
        _say(ask(options.place))
        return
    result = common.document("host_memory", QUESTION, {"piece_bytes": PIECE_BYTES, "pieces": PIECES})
    result["found"] = found = {}
    for place in PLACES:
        argv = [sys.executable, __file__, "--place", place]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PLACE_S, check=False)
        lines = done.stdout.splitlines()
        found[place] = json.loads(lines[-1]) if lines else {"failed": done.stderr.strip()[-200:]}
    rows = [(place, way, said) for place, ways in found.items() for way, said in ways.items()]
    common.write(result, common.table(("memory", "operation, pieces", "found"), rows), common.output_directory(options))


if __name__ == "__main__":
    main()
