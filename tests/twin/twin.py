"""The twin itself: devices, contexts, and what tests ask of it.

Known limitations
    The default stream does not wait for the others. Of memory used in other processes only what was
    imported counts.
"""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import os
import threading
import types
from typing import TYPE_CHECKING, Self

from twin.entry import Value, entry, number, real, refuse_unless
from twin.functions import Addresses
from twin.managed import ManagedFunctions

if TYPE_CHECKING:
    from twin.timeline import Stream

_FIRST_CONTEXT = 0xC0000000
_ATTRIBUTE = "CU_DEVICE_ATTRIBUTE_"
_ATTRIBUTES = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "HOST_REGISTER_SUPPORTED": 1,
    "MANAGED_MEMORY": 1,
    "CONCURRENT_MANAGED_ACCESS": 1,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
}
MIB = 1 << 20


class Twin(ManagedFunctions):
    """What ``cuda.bindings.driver`` is to Zico, in one process and without a GPU; close it at the end."""

    def __init__(  # noqa: PLR0913 - each one a trait of a device or its driver
        self,
        devices: int = 1,
        total_bytes: int = 1024 * MIB,
        granularity_bytes: int = 2 * MIB,
        *,
        needs_context: bool | tuple[str, ...] = False,
        driver_version: int = 13000,
        wait_deadline_s: float = 10.0,
        attributes: dict[str, int] | None = None,
        host_bytes: int = 0,
        host_granularity_bytes: int | None = None,
        context_bytes: int = 0,
        first: int = 0,
    ) -> None:
        """Build the devices.

        Args:
            devices: How many.
            total_bytes: Memory of each.
            granularity_bytes: What sizes and addresses must be multiples of.
            needs_context: Whether virtual memory functions want a current context, or which of them
                do.
            driver_version: What ``cuDriverGetVersion`` returns.
            wait_deadline_s: After this a wait on the device is given up.
            attributes: Device attributes that differ, without ``CU_DEVICE_ATTRIBUTE_``.
            host_bytes: Memory of the host that can be pinned and mapped; 0: the driver is too old
                for that.
            host_granularity_bytes: What that must come in multiples of; ``None``: as the device's.
            context_bytes: What a context takes of its device.
            first: The machine's number of the first device that this process sees.
        """
        self._attributes = _ATTRIBUTES | (attributes or {})
        has_memory_ops = bool(self._attributes["CAN_USE_64_BIT_STREAM_MEM_OPS"])
        super().__init__(devices, total_bytes, granularity_bytes, wait_deadline_s, has_memory_ops=has_memory_ops)
        self.needs_context = needs_context
        self.host_bytes = host_bytes
        self.host_granularity_bytes = host_granularity_bytes or granularity_bytes
        self.serves_rdma = bool(self.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"))
        self.context_bytes = context_bytes
        self._first = first
        self.contexts_made = 0
        """How many contexts there have been."""
        self.host_node = max(self._attributes.get("HOST_NUMA_ID", 0), 0)
        self._driver_version = driver_version
        self._primary: dict[int, tuple[int, int]] = {}  # device -> context, how often retained
        self._next_context = _FIRST_CONTEXT
        self._addresses = Addresses(self)

    def __getattr__(self, name: str) -> Value:
        """Return the real module's types; its functions are only those defined here."""
        if name.startswith("CU"):
            return getattr(real, name)
        message = f"the twin has no {name}: add it to tests/twin"
        raise AttributeError(message)

    # -- devices -----------------------------------------------------------------------------------

    @entry()
    def cuInit(self, flags: int) -> None:
        """Initialise this process."""
        refuse_unless(flags == 0)
        refuse_unless(self.devices > 0, "NO_DEVICE")

    @entry()
    def cuDriverGetVersion(self) -> int:
        """Return the newest CUDA that the driver knows."""
        return self._driver_version

    @entry()
    def cuDeviceGetCount(self) -> int:
        """Return the number of devices."""
        return self.devices

    @entry()
    def cuDeviceGet(self, ordinal: int) -> Value:
        """Return a device."""
        refuse_unless(0 <= ordinal < self.devices, "INVALID_DEVICE")
        return real.CUdevice(ordinal)

    @entry()
    def cuDeviceGetName(self, length: int, dev: Value) -> bytes:
        """Return a device's name, padded as the driver pads it."""
        return f"Zico's software twin {self._device(dev)}".encode().ljust(length, b"\0")

    @entry()
    def cuDeviceGetUuid(self, dev: Value) -> Value:
        """Return 16 bytes."""
        place = self._first + self._device(dev)
        return types.SimpleNamespace(bytes=b"zico twin device" if place == 0 else bytes([place] * 16))

    @entry()
    def cuDeviceTotalMem(self, dev: Value) -> int:
        """Return a device's memory."""
        self._device(dev)
        return self.device_bytes

    @entry()
    def cuDeviceGetAttribute(self, attrib: Value, dev: Value) -> int:
        """Return an attribute."""
        self._device(dev)
        # By number: one number has several names, and which of them ``attrib`` says depends on the
        # bindings' version.
        kinds = real.CUdevice_attribute.__members__
        names = {name.removeprefix(_ATTRIBUTE) for name, kind in kinds.items() if number(kind) == number(attrib)}
        refuse_unless("HOST_NUMA_ID" not in names or self.host_bytes > 0)  # older drivers do not know it
        return next((value for name in sorted(names) if (value := self.attribute(name))), 0)

    def attribute(self, name: str) -> int:
        """Return an attribute of the devices, without ``CU_DEVICE_ATTRIBUTE_``."""
        return self._attributes.get(name, 0)

    @entry(context=True)
    def cuMemGetInfo(self) -> tuple[int, int]:
        """Return free and total bytes."""
        with self.lock:
            return self.device_bytes - self.used_bytes, self.device_bytes

    def _device(self, dev: Value) -> int:
        refuse_unless(0 <= number(dev) < self.devices, "INVALID_DEVICE")
        return number(dev)

    # -- contexts ----------------------------------------------------------------------------------

    @entry()
    def cuDevicePrimaryCtxRetain(self, dev: Value) -> Value:
        """Return the device's primary context, made now if nobody holds it."""
        with self.lock:
            device = self._device(dev)
            context, holders = self._primary.get(device, (0, 0))
            context = context or self.make_context(device)
            self._primary[device] = (context, holders + 1)
            return real.CUcontext(context)

    @entry(undo=True)
    def cuDevicePrimaryCtxRelease(self, dev: Value) -> None:
        """Let go of it; with its last holder it ends, and its streams with it. It stays current where it was."""
        with self.lock:
            device = self._device(dev)
            refuse_unless(device in self._primary, "INVALID_CONTEXT")
            context, holders = self._primary.pop(device)
            if holders > 1:
                self._primary[device] = (context, holders - 1)
                return
            ended = self._end_context(context)
        for stream in ended:
            stream.close()

    @entry()
    def cuDevicePrimaryCtxGetState(self, dev: Value) -> tuple[int, int]:
        """Return flags, and whether the primary context exists."""
        return 0, int(self._device(dev) in self._primary)

    @entry()
    def cuCtxGetCurrent(self) -> Value:
        """Return the context of this thread."""
        return real.CUcontext(self.current_context())

    @entry(undo=True)
    def cuCtxSetCurrent(self, ctx: Value) -> None:
        """Set the context of this thread; 0: none."""
        with self.lock:
            refuse_unless(number(ctx) == 0 or number(ctx) in self._contexts, "INVALID_CONTEXT")
            self._current[threading.get_native_id()] = number(ctx)

    @entry(context=True)
    def cuCtxGetDevice(self) -> Value:
        """Return the device of this thread's context."""
        return real.CUdevice(self._contexts[self.current_context()])

    def make_context(self, device: int = 0) -> int:
        """Make a context, as a framework may that does not use the primary one."""
        with self.lock:
            refuse_unless(self.fixed_bytes + self.context_bytes <= self.device_bytes, "OUT_OF_MEMORY")
            self._next_context += 0x100
            self._contexts[self._next_context] = device
            self.contexts_made += 1
            return self._next_context

    @entry(context=True)
    def workspace(self, size_bytes: int) -> None:
        """Take memory in this thread's context until it ends, as libraries do for their workspaces."""
        with self.lock:
            refuse_unless(self.fixed_bytes + size_bytes <= self.device_bytes, "OUT_OF_MEMORY")
            context = self.current_context()
            self._workspaces[context] = self._workspaces.get(context, 0) + size_bytes

    def _end_context(self, context: int) -> list[Stream]:
        del self._contexts[context]
        self._workspaces.pop(context, None)
        self._poison.pop(context, None)
        mine = [handle for handle, stream in self._streams.items() if stream.context == context]
        ended = [self._streams.pop(handle) for handle in mine]
        return [*ended, self._default.pop(context)] if context in self._default else ended

    # -- contexts that are put aside ---------------------------------------------------------------

    @entry()
    def cuCheckpointProcessLock(self, pid: int, args: Value) -> None:
        """Let every other call of this process wait."""
        self._refuse_unless_aside(pid, locked=False, aside=False)
        refuse_unless(args.timeoutMs > 0 and not any(args.rest))
        self.is_unlocked.clear()

    @entry()
    def cuCheckpointProcessCheckpoint(self, pid: int, args: Value) -> None:  # noqa: ARG002 - as the driver's
        """Put contexts aside, with what they hold."""
        self._refuse_unless_aside(pid, locked=True, aside=False)
        self.is_aside = True

    @entry()
    def cuCheckpointProcessRestore(self, pid: int, args: Value) -> None:  # noqa: ARG002 - as the driver's
        """Take them up where there is room."""
        self._refuse_unless_aside(pid, locked=True, aside=True)
        with self.lock:
            self.is_aside = False
            if self.fixed_bytes > self.device_bytes:
                self.is_aside = True
                refuse_unless(holds=False, name="OUT_OF_MEMORY")

    @entry()
    def cuCheckpointProcessUnlock(self, pid: int, args: Value) -> None:  # noqa: ARG002 - as the driver's
        """Let other calls go on."""
        self._refuse_unless_aside(pid, locked=True, aside=False)
        self.is_unlocked.set()

    def _refuse_unless_aside(self, pid: int, *, locked: bool, aside: bool) -> None:
        refuse_unless(pid == os.getpid())
        refuse_unless((not self.is_unlocked.is_set(), self.is_aside) == (locked, aside), "ILLEGAL_STATE")

    # -- what tests ask ----------------------------------------------------------------------------

    def addresses(self) -> dict[str, int]:
        """Return the addresses of C functions that do the same as the functions here."""
        return self._addresses.by_name

    def leaks(self) -> dict[str, int]:
        """Return what is held, by kind; nothing when all was given back."""
        with self.lock:
            held = {
                "handles": sum(not handle.released for handle in self._handles.values()),
                "mappings": len(self._mappings),
                "reservations": len(self._windows),
                "registrations": len(self._registered),
                "managed": len(self._managed),
                "streams": len(self._streams),
                "events": len(self._events),
                "modules": len(self._modules),
                "contexts": len(self._primary),
            }
        return {kind: count for kind, count in held.items() if count}

    def close(self) -> None:
        """End all threads and give all memory back, whoever still holds it."""
        with self.lock:
            streams = self._all_streams()
            self._streams, self._default = {}, {}
        for stream in streams:
            stream.close()
        with self.lock:
            for _, window in self._windows.values():
                window.close()
            for handle in self._handles.values():
                handle.memory.close()
            for address in list(self._managed):
                self._forget(address)
            self._windows, self._handles, self._mappings, self._registered = {}, {}, {}, {}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
