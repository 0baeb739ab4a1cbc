"""Calls of the driver's software twin: what they are given, and the names of what they answer."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from cpu.support.twin_device import MIB
from cuda.bindings import driver as real
from twin.twin import Twin

UNIT = 2 * MIB
FD = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def status(result: tuple[Any, ...]) -> str:
    """Return the short name of a result's status."""
    return str(result[0].name).removeprefix("CUDA_ERROR_").removeprefix("CUDA_")


def prop(**changes: Any) -> Any:  # noqa: ANN401 - a CUmemAllocationProp
    """Describe exportable memory of device 0, with changes."""
    made = real.CUmemAllocationProp()
    made.type = changes.get("type", real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
    made.location.type = changes.get("place", real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
    made.location.id = changes.get("device", 0)
    made.requestedHandleTypes = changes.get("handles", FD)
    return made


def access(flags: Any = real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, device: int = 0) -> Any:  # noqa: ANN401
    """Describe access by a device."""
    made = real.CUmemAccessDesc()
    made.location.type = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    made.flags = flags
    return made


def create(twin: Twin, size_bytes: int = UNIT) -> int:
    """Create a handle."""
    result = twin.cuMemCreate(size_bytes, prop(), 0)
    assert status(result) == "SUCCESS"
    return int(result[1])


def reserve(twin: Twin, size_bytes: int = 4 * UNIT) -> int:
    """Reserve addresses."""
    result = twin.cuMemAddressReserve(size_bytes, 0, 0, 0)
    assert status(result) == "SUCCESS"
    return int(result[1])


def mapped(twin: Twin) -> tuple[int, int]:
    """Return a handle and the address where it is mapped and open."""
    handle, address = create(twin), reserve(twin)
    assert status(twin.cuMemMap(address, UNIT, 0, handle, 0)) == "SUCCESS"
    assert status(twin.cuMemSetAccess(address, UNIT, [access()], 1)) == "SUCCESS"
    return handle, address


class Timeline:
    """A twin with a context and some counters that the device sees."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - the twin's
        """Register a page of counters."""
        self.twin = Twin(**settings)
        self.twin.cuInit(0)
        self.twin.cuCtxSetCurrent(self.twin.cuDevicePrimaryCtxRetain(0)[1])
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.words = np.frombuffer(self._page, np.int64)
        self.twin.cuMemHostRegister(self.words.ctypes.data, mmap.PAGESIZE, 3)
        self.base = int(self.twin.cuMemHostGetDevicePointer(self.words.ctypes.data, 0)[1])

    def stream(self) -> Any:  # noqa: ANN401 - a CUstream
        """Create a stream."""
        return self.twin.cuStreamCreate(1)[1]

    def write(self, stream: Any, word: int, value: int) -> str:  # noqa: ANN401
        """Enqueue a write."""
        return status(self.twin.cuStreamWriteValue64(stream, self.base + 8 * word, value, 0))

    def wait(self, stream: Any, word: int, value: int, flags: int = 0) -> str:  # noqa: ANN401
        """Enqueue a wait."""
        return status(self.twin.cuStreamWaitValue64(stream, self.base + 8 * word, value, flags))

    def synchronize(self, stream: Any) -> str:  # noqa: ANN401
        """Wait for a stream."""
        return status(self.twin.cuStreamSynchronize(stream))
