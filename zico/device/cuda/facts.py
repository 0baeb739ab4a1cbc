"""What a CUDA device is and can do: asked, never assumed."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from typing import TYPE_CHECKING, Any

from zico.base.errors import ConfigError, DriverError
from zico.device.cuda.bindings import NO_DRIVER, NOT_SUPPORTED, Calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# --------------------------------------------------------------------------------------------------
# The primary context of a device: retained once, current in every thread that calls, given back
# once.
#
# It is the context that frameworks use, so their memory and ours are in one address space. A thread
# is left as it was
# found: with another's context, or with none.


class PrimaryContext:
    """A device's primary context; nothing is retained until somebody needs it."""

    def __init__(self, call: Calls, device: Any) -> None:  # noqa: ANN401 - a CUdevice
        self._call = call
        self._device = device
        self._lock = threading.Lock()
        self._handle = 0

    @property
    def retained(self) -> bool:
        """Tell whether the context is held."""
        return self._handle != 0

    def retain(self) -> int:
        """Return the context's handle; it stays alive until ``close``."""
        with self._lock:
            if self._handle == 0:
                self._handle = int(self._call("cuDevicePrimaryCtxRetain", self._device))
            return self._handle

    @contextlib.contextmanager
    def current(self) -> Iterator[int]:
        """Make the context current in this thread for as long as the caller needs it."""
        own = self.retain()
        before = int(self._call("cuCtxGetCurrent"))
        self._call("cuCtxSetCurrent", own)
        try:
            yield own
        finally:
            self._call("cuCtxSetCurrent", before)

    def close(self) -> None:
        """Give the context back; a second call does nothing. Once it has ended it is not current here any more."""
        with self._lock:
            handle, self._handle = self._handle, 0
        if handle == 0:
            return
        self._call("cuDevicePrimaryCtxRelease", self._device)
        _, is_active = self._call("cuDevicePrimaryCtxGetState", self._device)
        if not is_active and int(self._call("cuCtxGetCurrent")) == handle:
            self._call("cuCtxSetCurrent", 0)


# --------------------------------------------------------------------------------------------------

OLDEST_DRIVER = 12000
"""``cuDriverGetVersion`` of the oldest driver that works: the 12.0 functions of the stream memory operations."""

_NAME_BYTES = 256
_PART = " MIG "  # in the driver's name of a part of a GPU, such as "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
_ATTRIBUTE = "CU_DEVICE_ATTRIBUTE_"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device, as its driver describes it."""

    ordinal: int
    count: int
    """How many devices this process may use."""
    name: str
    uuid: str
    driver_version: int
    """The newest CUDA that the driver knows: 1000 * major + 10 * minor."""
    compute_capability: tuple[int, int]
    total_bytes: int
    granularity_bytes: int
    """What memory, mappings and addresses must be multiples of; 0 without virtual memory management."""
    has_virtual_memory: bool
    exports_descriptors: bool
    """Whether memory can be handed to another process as a file descriptor."""
    waits_on_stream: bool
    """Whether a stream can wait for and write a 64-bit value without a kernel."""
    registers_host: bool
    """Whether ordinary host memory can be mapped into the device."""

    @property
    def driver_text(self) -> str:
        """Return the driver's CUDA version as people write it."""
        return f"{self.driver_version // 1000}.{self.driver_version % 1000 // 10}"


def device_count(api: object | None = None) -> int:
    """Return how many CUDA devices this process may use.

    Raises:
        DriverError: No driver, or no device.
    """
    return int(Calls(api)("cuDeviceGetCount"))


def device_uuids(api: object | None = None) -> list[str]:
    """Return the UUID of every device that this process may use, in its order; needs no context.

    Raises:
        DriverError: No driver, or no device.
    """
    call = Calls(api)
    return [_uuid(call, call("cuDeviceGet", ordinal)) for ordinal in range(int(call("cuDeviceGetCount")))]


def _uuid(call: Calls, device: Any) -> str:  # noqa: ANN401 - a CUdevice
    """Return what names a device, or a part of one (MIG), in every process.

    In bindings for CUDA 12 ``cuDeviceGetUuid`` says of a part which GPU it is of, and ``_v2`` its own
    UUID. Those for 13 have the latter under the former's name.
    """
    function = "cuDeviceGetUuid_v2" if hasattr(call.api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    kind = "MIG" if _PART in f"{_name(call, device)} " else "GPU"
    return f"{kind}-{uuid.UUID(bytes=bytes(call(function, device).bytes))}"


def _name(call: Calls, device: Any) -> str:  # noqa: ANN401 - a CUdevice
    return str(call("cuDeviceGetName", _NAME_BYTES, device).split(b"\0")[0].decode(errors="replace"))


def probe(ordinal: int, api: object | None = None) -> DeviceFacts:
    """Ask for everything about a device that can be told without a context.

    Raises:
        DriverError: No driver, no device, or a driver that fails.
        ConfigError: There is no device of that number.
    """
    call = Calls(api)
    count = int(call("cuDeviceGetCount"))
    if count == 0:
        raise DriverError("cuDeviceGetCount", 100, "there is no CUDA device: use --device host")
    if not 0 <= ordinal < count:
        last = f" to cuda:{count - 1}" if count > 1 else ""
        message = f"there is no device cuda:{ordinal}: this process may use {count}, cuda:0{last}"
        raise ConfigError(message)
    device = call("cuDeviceGet", ordinal)
    ask = _asker(call, device)
    has_virtual_memory = bool(ask("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"))
    return DeviceFacts(
        ordinal=ordinal,
        count=count,
        name=_name(call, device),
        uuid=_uuid(call, device),
        driver_version=int(call("cuDriverGetVersion")),
        compute_capability=(ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
        total_bytes=int(call("cuDeviceTotalMem", device)),
        granularity_bytes=granularity(call, ordinal) if has_virtual_memory else 0,
        has_virtual_memory=has_virtual_memory,
        exports_descriptors=bool(ask("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        waits_on_stream=bool(ask("CAN_USE_64_BIT_STREAM_MEM_OPS")),
        registers_host=bool(ask("HOST_REGISTER_SUPPORTED")),
    )


def _asker(call: Calls, device: Any) -> Callable[[str], int]:  # noqa: ANN401 - a CUdevice
    def ask(name: str) -> int:
        """Return an attribute; a driver or bindings too old to know it do not support it."""
        attribute = getattr(call.api.CUdevice_attribute, _ATTRIBUTE + name, None)
        return 0 if attribute is None else int(call("cuDeviceGetAttribute", attribute, device))

    return ask


def require(ordinal: int, api: object | None = None) -> DeviceFacts:
    """Return a device's facts if Zico can share it.

    Raises:
        DriverError: No driver, no device, or one that lacks what is needed; the sentence says what
            to do.
        ConfigError: There is no device of that number.
    """
    facts = probe(ordinal, api)
    device = f"cuda:{ordinal} ({facts.name})"
    if facts.driver_version < OLDEST_DRIVER:
        detail = f"the driver knows CUDA {facts.driver_text}, Zico needs 12.0: update the NVIDIA driver"
        raise DriverError("check of the driver", NO_DRIVER, detail)
    if not facts.has_virtual_memory:
        detail = f"{device} has no virtual memory management: use a GPU of 2016 (Pascal) or later outside WSL 1"
        raise DriverError("check of the device", NOT_SUPPORTED, detail)
    if not facts.exports_descriptors:
        detail = f"{device} cannot hand memory to other processes as file descriptors: run on Linux, without vGPU"
        raise DriverError("check of the device", NOT_SUPPORTED, detail)
    return facts


def properties(call: Calls, ordinal: int) -> Any:  # noqa: ANN401 - a CUmemAllocationProp
    """Describe memory of a device that can be exported as a file descriptor, and registered for RDMA where it can.

    Libraries register tensors with network cards (NCCL, UCX). Memory that was created without the
    flag is refused there.
    """
    api = call.api
    wanted = api.CUmemAllocationProp()
    wanted.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    if _asker(call, call("cuDeviceGet", ordinal))("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
        wanted.allocFlags.gpuDirectRDMACapable = 1
    return wanted


def granularity(call: Calls, ordinal: int) -> int:
    """Return what the driver recommends sizes and addresses to be multiples of."""
    option = call.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(call("cuMemGetAllocationGranularity", properties(call, ordinal), option))


def free_bytes(ordinal: int, api: object | None = None) -> int:
    """Return a device's free bytes; makes a context for a moment where this process has none, and counts it as taken.

    Raises:
        DriverError: No driver, no device, or no room for a context.
    """
    call = Calls(api)
    return memory_info(call, call("cuDeviceGet", ordinal))[0]


def memory_info(call: Calls, device: Any, context: PrimaryContext | None = None) -> tuple[int, int]:  # noqa: ANN401
    """Return free and total bytes; without a context of the caller's one is held for a moment."""
    with contextlib.ExitStack() as undo:
        if context is None:
            context = PrimaryContext(call, device)
            undo.callback(context.close)
        with context.current():
            free, total = call("cuMemGetInfo")
    return int(free), int(total)
