"""Pinned memory of the host that is mapped at a window's addresses: the next tier of a CUDA device.

It is created by ``cuMemCreate`` with the location ``HOST_NUMA`` (the manual, from CUDA 12.2: a node must be named, 0
where there are none; ``HOST_NUMA_CURRENT`` is refused). Kernels use it as they use the device's own memory, and slower.
It never leaves the process: no handle type is asked for.

Known limitations
    Not seen on a real GPU yet. Whether a driver can is found out by doing it once, with one granule: device attributes
    tell only drivers of CUDA 12.9 and later.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from typing import Any

import numpy as np

from zico.driver.cuda.bindings import NOT_SUPPORTED, Calls
from zico.errors import DriverError

PROPERTIES_BYTES = 32
"""``sizeof(CUmemAllocationProp)``."""
ACCESS_BYTES = 12
"""``sizeof(CUmemAccessDesc)``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """What the driver is asked with."""

    properties: Any
    """A ``CUmemAllocationProp``."""
    accesses: list[Any]
    """``CUmemAccessDesc``: the device's, and the processor's, without which copies by the processor would fault."""

    def fill(self, record: Any) -> None:  # noqa: ANN401 - one DEVICE record
        """Write both where compiled code passes them on from, and how it asks for the machine's free memory."""
        record["pinned_properties"] = np.frombuffer(_bytes_of(self.properties, PROPERTIES_BYTES), "u8")
        packed = b"".join(_bytes_of(access, ACCESS_BYTES) for access in self.accesses)
        record["pinned_access"] = np.frombuffer(packed, "i4").reshape(len(self.accesses), -1)
        record["sysconf"] = ctypes.cast(ctypes.CDLL(None).sysconf, ctypes.c_void_p).value


def _bytes_of(structure: Any, size_bytes: int) -> bytes:  # noqa: ANN401 - of cuda.bindings
    return ctypes.string_at(structure.getPtr(), size_bytes)


def _describe(call: Calls, device: Any, device_access: Any) -> Pinned:  # noqa: ANN401 - CUdevice, CUmemAccessDesc
    api = call.api
    place = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    node = max(int(call("cuDeviceGetAttribute", api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device)), 0)
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    access = api.CUmemAccessDesc()
    access.flags = device_access.flags
    for location in (properties.location, access.location):
        location.type = place
        location.id = node
    return Pinned(properties, [device_access, access])


def find(
    call: Calls,
    device: Any,  # noqa: ANN401 - a CUdevice
    device_access: Any,  # noqa: ANN401 - its CUmemAccessDesc
    piece_bytes: int,
) -> Pinned:
    """Return how pinned memory is asked for, after one granule of it has been mapped and given back.

    Args:
        call: The driver; the device's context is current.
        device: The device.
        device_access: Its own access to memory.
        piece_bytes: What such memory is to come in.

    Raises:
        DriverError: The driver cannot map memory of the host, or only in larger pieces.
    """
    try:
        found = _describe(call, device, device_access)
        granularity = call.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit_bytes = int(call("cuMemGetAllocationGranularity", found.properties, granularity))
        if piece_bytes % unit_bytes == 0:
            _try(call, found, unit_bytes)
    except AttributeError as error:  # bindings before 12.2
        raise DriverError("mapping of host memory", NOT_SUPPORTED, f"cuda.bindings is too old: {error}") from error
    if piece_bytes % unit_bytes:
        detail = f"memory of the host comes in multiples of {unit_bytes} bytes, regions have {piece_bytes}"
        raise DriverError("mapping of host memory", NOT_SUPPORTED, detail)
    return found


def _try(call: Calls, found: Pinned, unit_bytes: int) -> None:
    """Create, map and open one granule, and give everything back."""
    with contextlib.ExitStack() as undo:
        address = int(call("cuMemAddressReserve", unit_bytes, unit_bytes, 0, 0))
        undo.callback(call, "cuMemAddressFree", address, unit_bytes)
        handle = call("cuMemCreate", unit_bytes, found.properties, 0)
        undo.callback(call, "cuMemRelease", handle)
        call("cuMemMap", address, unit_bytes, 0, handle, 0)
        undo.callback(call, "cuMemUnmap", address, unit_bytes)
        call("cuMemSetAccess", address, unit_bytes, found.accesses, len(found.accesses))
