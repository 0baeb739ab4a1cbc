"""The CUDA device's virtual memory, streams and kernels, in the words of ``zico.device.api``.

Theory of operation
    A handle can only be mapped as a whole (``cuMemMap`` takes offset 0), so memory is made of equal
    pieces, one handle
    each: the pool's regions. Handles are created once and recycled by mapping them elsewhere.

Guarantees
    Several driver calls are one rollback scope. If one fails, what the operation had done is
    undone, in the only order that the driver allows: unmap before release, unmap before freeing
    addresses.

Known limitations
    A device's memory is resident from its creation on, and is given back a whole memory at a time.
    Imports of one memory's pieces must not overlap: a heap's mutex guards those of compiled code,
    and Python maps no pool's memory beside it.
    Whether the virtual memory functions need a context is found out at the first call in a thread
    that has none (``needs_context``). The manual lists no context error for any of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.errors import DriverError
from zico.base.units import format_bytes
from zico.device.api import Memory, Owned, Registered, close_descriptors
from zico.device.cuda import facts as cuda_facts
from zico.device.cuda.bindings import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    Calls,
)
from zico.device.cuda.facts import PrimaryContext
from zico.device.record import CUDA

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# -- addresses reserved on a CUDA device, and which pieces are mapped there ------------------------


class Window(Owned):
    """A range of reserved addresses; it knows what ``map`` put there, not what compiled code did."""

    __slots__ = ("_call", "_mapped", "unit_bytes")

    def __init__(self, address: int, size_bytes: int, unit_bytes: int, call: Callable[..., Any]) -> None:
        """Own the addresses; ``call`` makes a driver call by name, ``unit_bytes`` is the device's granularity."""
        super().__init__("window", address, size_bytes, self._free)
        self._call = call
        self.unit_bytes = unit_bytes
        self._mapped: dict[int, int] = {}  # offset -> bytes

    def map(self, offset: int, handles: Sequence[int], piece_bytes: int, access: object) -> None:
        """Map one piece a handle, side by side; what was there is unmapped first.

        Raises:
            DriverError: The range is not whole pieces inside the window, or the driver refused. In
                the latter case nothing is mapped in the range any more.
        """
        size_bytes = len(handles) * piece_bytes
        check_range(self, offset, size_bytes, self.unit_bytes)
        self._clear(offset, size_bytes)
        first = self.handle + offset
        addresses = range(first, first + size_bytes, piece_bytes)
        with contextlib.ExitStack() as undo:
            for address, handle in zip(addresses, handles, strict=True):
                self._call("cuMemMap", address, piece_bytes, 0, handle, 0)
                undo.callback(self._call, "cuMemUnmap", address, piece_bytes)
            self._call("cuMemSetAccess", first, size_bytes, [access], 1)
            undo.pop_all()
        self._mapped.update((address - self.handle, piece_bytes) for address in addresses)

    def unmap(self, offset: int, size_bytes: int) -> None:
        """Unmap the pieces in the range; where ``map`` put none, the one piece that compiled code mapped there."""
        check_range(self, offset, size_bytes, self.unit_bytes)
        if not self._clear(offset, size_bytes):
            self._call("cuMemUnmap", self.handle + offset, size_bytes)

    def _clear(self, offset: int, size_bytes: int) -> int:
        """Unmap the known pieces in a range; returns how many there were."""
        end = offset + size_bytes
        inside = [place for place, length in self._mapped.items() if place < end and place + length > offset]
        for place in inside:
            length = self._mapped[place]
            if not offset <= place < place + length <= end:
                detail = f"offset {offset}, size {size_bytes} would cut the piece of {length} bytes at offset {place}"
                raise DriverError("mapping", INVALID_VALUE, detail)
        for place in inside:
            self._call("cuMemUnmap", self.handle + place, self._mapped[place])
            del self._mapped[place]
        return len(inside)

    def _free(self, address: int, size_bytes: int) -> None:
        with contextlib.ExitStack() as undo:  # last in, first out: unmapped first, freed last
            undo.callback(self._call, "cuMemAddressFree", address, size_bytes)
            for place, length in self._mapped.items():
                undo.callback(self._call, "cuMemUnmap", address + place, length)
            self._mapped = {}


def check_range(owned: Owned, offset: int, size_bytes: int, unit_bytes: int) -> None:
    """Refuse a range that is empty, unaligned or outside before the device sees it."""
    aligned = offset % unit_bytes == 0 and size_bytes % unit_bytes == 0
    _ = owned.handle
    if not (aligned and 0 <= offset < offset + size_bytes <= owned.size_bytes):
        detail = (
            f"offset {offset}, size {size_bytes}: must be multiples of {unit_bytes} bytes inside the "
            f"{owned.size_bytes} bytes of the {owned.what}"
        )
        raise DriverError("mapping", INVALID_VALUE, detail)


# --------------------------------------------------------------------------------------------------
# Pinned memory of the host that is mapped at a window's addresses: the next tier of a CUDA device.
#
# It is created by ``cuMemCreate`` with the location ``HOST_NUMA`` (the manual, from CUDA 12.2). A
# node must be named, 0 where there are none. ``HOST_NUMA_CURRENT`` is refused. Kernels use it as
# they use the device's own memory, and slower. It never leaves the process: no handle type is asked
# for. The device alone has access. Where the processor has it too, ``cuMemsetD8Async`` refuses a
# range of more than one handle (seen on an H200, benchmarks/results/gpu/host_memory.md). Then a
# framework that clears a tensor gets an error. Copies by the driver need no access of the
# processor.
#
# Known limitations
#     Whether a driver can is found out by doing it once, with one granule: device attributes tell
#     only drivers of CUDA 12.9 and later.

PROPERTIES_BYTES = 32
"""``sizeof(CUmemAllocationProp)``."""


def _host_properties(call: Calls, device: Any) -> Any:  # noqa: ANN401 - CUdevice, CUmemAllocationProp
    api = call.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    node = call("cuDeviceGetAttribute", api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device)
    properties.location.id = max(int(node), 0)
    return properties


def find_pinned(
    call: Calls,
    device: Any,  # noqa: ANN401 - a CUdevice
    access: Any,  # noqa: ANN401 - its CUmemAccessDesc
    piece_bytes: int,
) -> Any:  # noqa: ANN401 - a CUmemAllocationProp
    """Return how pinned memory is asked for, after one granule of it has been mapped and given back.

    Args:
        call: The driver; the device's context is current.
        device: The device.
        access: Its own access to memory.
        piece_bytes: What such memory is to come in.

    Raises:
        DriverError: The driver cannot map memory of the host, or only in larger pieces.
    """
    try:
        properties = _host_properties(call, device)
        granularity = call.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit_bytes = int(call("cuMemGetAllocationGranularity", properties, granularity))
        if piece_bytes % unit_bytes == 0:
            _try(call, properties, access, unit_bytes)
    except AttributeError as error:  # bindings before 12.2
        raise DriverError("mapping of host memory", NOT_SUPPORTED, f"cuda.bindings is too old: {error}") from error
    if piece_bytes % unit_bytes:
        detail = f"memory of the host comes in multiples of {unit_bytes} bytes, regions have {piece_bytes}"
        raise DriverError("mapping of host memory", NOT_SUPPORTED, detail)
    return properties


def _try(call: Calls, properties: Any, access: Any, unit_bytes: int) -> None:  # noqa: ANN401 - as above
    """Create, map and open one granule, and give everything back."""
    with contextlib.ExitStack() as undo:
        address = int(call("cuMemAddressReserve", unit_bytes, unit_bytes, 0, 0))
        undo.callback(call, "cuMemAddressFree", address, unit_bytes)
        handle = call("cuMemCreate", unit_bytes, properties, 0)
        undo.callback(call, "cuMemRelease", handle)
        call("cuMemMap", address, unit_bytes, 0, handle, 0)
        undo.callback(call, "cuMemUnmap", address, unit_bytes)
        call("cuMemSetAccess", address, unit_bytes, [access], 1)


# --------------------------------------------------------------------------------------------------

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: every context of the process may use it
_DEVICEMAP = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_WRITE_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream become visible before it
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class CudaDriver:
    """The driver of one CUDA device."""

    def __init__(self, ordinal: int = 0, api: object | None = None) -> None:
        """Look the device over; holds no context yet.

        Raises:
            DriverError: No driver, no device, or one that lacks what is needed.
            ConfigError: There is no device of that number.
        """
        self.facts = cuda_facts.require(ordinal, api)
        self.name = f"cuda:{ordinal}"
        self.granularity_bytes = self.facts.granularity_bytes
        self.needs_context: bool | None = None
        """Whether virtual memory needs a context; ``None`` until a call in a thread without one was made."""
        self.call = Calls(api)
        self.ordinal = ordinal
        self.device = self.call("cuDeviceGet", ordinal)
        self._properties = cuda_facts.properties(self.call, ordinal)
        self._descriptor = self._properties.requestedHandleTypes
        self.context = PrimaryContext(self.call, self.device)
        self._held = contextlib.ExitStack()
        self._held.callback(self.context.close)

    # -- memory ------------------------------------------------------------------------------------

    def create_memory(self, size_bytes: int, label: str, piece_bytes: int | None = None) -> Memory:  # noqa: ARG002
        """Create one handle a piece, all or none; the device has no use for the label."""
        with contextlib.ExitStack() as undo:
            memory = undo.enter_context(self._memory(size_bytes, piece_bytes or size_bytes))
            for piece in range(len(memory.handles)):
                memory.handles[piece] = self._create(memory, piece)
            undo.pop_all()
        return memory

    def _create(self, memory: _Pieces, piece: int) -> int:
        try:
            return int(self._virtual("cuMemCreate", memory.piece_bytes, self._properties, 0))
        except DriverError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            got, wanted = format_bytes(piece * memory.piece_bytes), format_bytes(memory.size_bytes)
            detail = f"{error.detail}; {got} of {wanted} could be had on {self.name}"
            raise DriverError(error.operation, error.status, detail) from error

    def export_pieces(self, memory: Owned) -> list[int]:
        """Export every piece's handle; programs started later do not inherit the descriptors."""
        descriptors: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(close_descriptors, descriptors)
            for handle in self._handles(memory, 0, len(_pieces(memory).handles)):
                descriptor = int(self._virtual("cuMemExportToShareableHandle", handle, self._descriptor, 0))
                descriptors.append(descriptor)
                os.set_inheritable(descriptor, False)  # noqa: FBT003 - the function's own way
            undo.pop_all()
        return descriptors

    def import_pieces(self, descriptors: Sequence[int], size_bytes: int, piece_bytes: int | None = None) -> Memory:
        """Keep the descriptors, by which each piece is imported when it is mapped for the first time.

        A descriptor is closed then, and the handle keeps the memory. The first piece is imported
        now, to see whether the driver can.
        """
        piece_bytes = piece_bytes or size_bytes
        kept = [*descriptors]
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: close_descriptors(kept))
            if len(descriptors) * piece_bytes != size_bytes:
                detail = f"{len(descriptors)} descriptors came for {size_bytes} bytes in pieces of {piece_bytes}"
                raise DriverError("import of memory", INVALID_VALUE, detail)
            memory = undo.enter_context(self._memory(size_bytes, piece_bytes))
            memory.descriptors[:] = _move_up(kept)
            kept.clear()
            self._handles(memory, 0, 1)
            undo.pop_all()
        return memory

    def _handles(self, memory: Owned, first: int, last: int) -> list[int]:
        """Return the handles of the pieces from ``first`` to before ``last``; imports those that have none."""
        pieces = _pieces(memory)
        for piece in range(first, last):
            if pieces.handles[piece] == 0:
                descriptor = int(pieces.descriptors[piece])
                handle = self._virtual("cuMemImportFromShareableHandle", descriptor, self._descriptor)
                pieces.handles[piece], pieces.descriptors[piece] = int(handle), _NO_DESCRIPTOR
                close_descriptors([descriptor])
        return [int(handle) for handle in pieces.handles[first:last]]

    def import_memory(self, descriptor: int) -> Memory:
        """Refuse: the device does not tell how large an imported handle is."""
        close_descriptors([descriptor])
        raise DriverError("import of memory", NOT_SUPPORTED, "its size is not known here: use import_pieces")

    def _memory(self, size_bytes: int, piece_bytes: int) -> _Pieces:
        """Own memory whose pieces have no handles yet."""
        unit = self.granularity_bytes
        if not 0 < piece_bytes <= size_bytes or piece_bytes % unit or size_bytes % piece_bytes:
            detail = f"{size_bytes} bytes in pieces of {piece_bytes}: must be whole pieces, multiples of {unit} bytes"
            raise DriverError("creation of memory", INVALID_VALUE, detail)
        return _Pieces(size_bytes, piece_bytes, self._virtual)

    def discard(self, memory: Owned, offset: int, size_bytes: int) -> None:
        """Refuse: memory is given back when all of it is closed; clearing contents is a kernel's work."""
        check_range(memory, offset, size_bytes, self.granularity_bytes)
        detail = "CUDA memory is given back as a whole, by closing it; a kernel clears contents"
        raise DriverError("release of physical memory", NOT_SUPPORTED, detail)

    def physical_bytes(self, memory: Owned) -> int:
        """Return the memory's size: all of it is resident from its creation on."""
        _pieces(memory)
        return memory.size_bytes

    def free_bytes(self) -> int | None:
        """Return the device's free bytes; where no context is held, one is for a moment, and counts as taken."""
        held = self.context if self.context.retained else None
        return cuda_facts.memory_info(self.call, self.device, held)[0]

    def total_bytes(self) -> int:
        """Return the size of the device's memory."""
        return self.facts.total_bytes

    # -- addresses ---------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> Owned:
        """Reserve addresses; on closing, what ``map`` mapped there is unmapped first."""
        address = int(self._virtual("cuMemAddressReserve", size_bytes, 0, 0, 0))
        return Window(address, size_bytes, self.granularity_bytes, self._virtual)

    def map(self, window: Owned, window_offset: int, memory: Owned, memory_offset: int, size_bytes: int) -> None:
        """Map whole pieces, readable and writable by this device; if the driver refuses, nothing is mapped there."""
        piece_bytes = _pieces(memory).piece_bytes
        check_range(memory, memory_offset, size_bytes, piece_bytes)
        there = _window(window)
        check_range(there, window_offset, size_bytes, there.unit_bytes)  # before anything is imported for it
        first, last = memory_offset // piece_bytes, (memory_offset + size_bytes) // piece_bytes
        there.map(window_offset, self._handles(memory, first, last), piece_bytes, self._access())

    def unmap(self, window: Owned, window_offset: int, size_bytes: int) -> None:
        """Unmap every piece in the range; where ``map`` mapped none, the one piece that compiled code mapped."""
        _window(window).unmap(window_offset, size_bytes)

    def make_read_only(self, window: Owned, window_offset: int, size_bytes: int) -> None:
        """Let the device read what is mapped in a part of a window, and no longer write it: who does loses the context.

        Raises:
            DriverError: The part is not whole mappings, or the driver refuses.
        """
        there = _window(window)
        check_range(there, window_offset, size_bytes, there.unit_bytes)
        reads = self.call.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._virtual("cuMemSetAccess", there.handle + window_offset, size_bytes, [self._access(reads)], 1)

    def _access(self, flags: Any = None) -> Any:  # noqa: ANN401 - a CUmemAccess_flags, a CUmemAccessDesc
        access = self.call.api.CUmemAccessDesc()
        access.location.type = self._properties.location.type
        access.location.id = self.ordinal
        access.flags = flags or self.call.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _virtual(self, function: str, *args: Any) -> Any:  # noqa: ANN401 - as the function
        """Call a virtual memory function without a context if the driver lets us, else inside the primary one."""
        if not self.needs_context:
            has_context = int(self.call("cuCtxGetCurrent")) != 0  # asked first: a result must not be lost to it
            try:
                result = self.call(function, *args)
            except DriverError as error:
                if error.status not in (INVALID_CONTEXT, NOT_INITIALIZED):
                    raise
                self.needs_context = True
            else:
                if not has_context:
                    self.needs_context = False
                return result
        with self.context.current():
            return self.call(function, *args)

    # -- the device's timeline ---------------------------------------------------------------------

    def register_host(self, address: int, size_bytes: int) -> Registered:
        """Map host memory into the device, for every context of this process."""
        with contextlib.ExitStack() as undo:
            with self.context.current():
                self.call("cuMemHostRegister", address, size_bytes, _PORTABLE | _DEVICEMAP)
                undo.callback(self._unregister_host, address, size_bytes)
                device_address = int(self.call("cuMemHostGetDevicePointer", address, 0))
            undo.pop_all()
        return Registered(address, size_bytes, device_address, self._unregister_host)

    def _unregister_host(self, address: int, _size_bytes: int) -> None:
        with self.context.current():
            self.call("cuMemHostUnregister", address)

    def create_stream(self) -> Owned:
        """Create a stream that does not wait for the default one."""
        with self.context.current():
            return Owned("stream", int(self.call("cuStreamCreate", _NON_BLOCKING)), 0, self._destroy_stream)

    def _destroy_stream(self, stream: int, _size_bytes: int) -> None:
        with self.context.current():
            self.call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Wait until the device has done everything that is in a stream; the driver knows no deadline for it."""
        with self.context.current():
            self.call("cuStreamSynchronize", stream)

    def write_value(self, stream: int, device_address: int, value: int) -> None:
        """Let the device write a 64-bit value when the stream gets there, behind all its earlier writes."""
        with self.context.current():
            self.call("cuStreamWriteValue64", stream, device_address, value, _WRITE_DEFAULT)

    def wait_value(self, stream: int, device_address: int, value: int) -> None:
        """Hold the stream up on the device until the 64-bit word there has reached ``value``."""
        with self.context.current():
            self.call("cuStreamWaitValue64", stream, device_address, value, _WAIT_GEQ)

    def copy_out(self, stream: int, host_address: int, address: int, size_bytes: int) -> None:
        """Let a stream copy from the device to registered memory of the host, when it gets there."""
        with self.context.current():
            self.call("cuMemcpyDtoHAsync", host_address, address, size_bytes, stream)

    def copy_in(self, stream: int, address: int, host_address: int, size_bytes: int) -> None:
        """Let a stream copy from registered memory of the host to the device, when it gets there."""
        with self.context.current():
            self.call("cuMemcpyHtoDAsync", address, host_address, size_bytes, stream)

    def finish(self) -> None:
        """Wait until the device has done everything that this process has asked for."""
        with self.context.current():
            self.call("cuCtxSynchronize")

    def fetch(self, host_address: int, address: int, size_bytes: int) -> None:
        """Copy from the device to any memory of this process, and wait for it."""
        with self.context.current():
            self.call("cuMemcpyDtoH", host_address, address, size_bytes)

    def put(self, address: int, host_address: int, size_bytes: int) -> None:
        """Copy from any memory of this process to the device, and wait for it."""
        with self.context.current():
            self.call("cuMemcpyHtoD", address, host_address, size_bytes)
            self.call("cuCtxSynchronize")  # a copy from pageable memory may return before it has arrived

    # -- for compiled code -------------------------------------------------------------------------

    def load_kernel(self, image: bytes, name: str) -> int:
        """Load PTX or a cubin and return the function's handle, valid until the driver is closed."""
        with self.context.current(), contextlib.ExitStack() as undo:
            module = self.call("cuModuleLoadData", image + b"\0")  # PTX is a C string; a cubin knows its own length
            undo.callback(self._unload, module)
            function = int(self.call("cuModuleGetFunction", module, name.encode()))
            self._held.push(undo.pop_all())
        return function

    def _unload(self, module: Any) -> None:  # noqa: ANN401 - a CUmodule
        with self.context.current():
            self.call("cuModuleUnload", module)

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the C functions that compiled code calls (``zico.device.record.FUNCTIONS``)."""
        return self.call.addresses()

    def fill_device(self, record: Any, memory: Owned) -> None:  # noqa: ANN401 - one DEVICE record
        """Fill a ``DEVICE`` record; from now on this process holds the primary context."""
        pieces = _pieces(memory)
        record["kind"] = CUDA
        record["piece_bytes"] = pieces.piece_bytes
        record["handles_address"] = pieces.handle
        record["descriptors_address"] = pieces.descriptors.ctypes.data
        record["close"] = _libc_address("close")
        record["context"] = self.context.retain()
        access = self._access()
        record["access"] = (int(access.location.type), self.ordinal, int(access.flags), 0)
        for name, address in self.addresses().items():
            record[name] = address

    def fill_pinned(self, record: Any, piece_bytes: int) -> None:  # noqa: ANN401 - one DEVICE record
        """Fill what ``zico.device.mapping`` needs to map pinned memory of the host in pieces.

        Properties, and how compiled code asks for the machine's free memory. The access is that of ``fill_device``.
        """
        with self.context.current():
            properties = find_pinned(self.call, self.device, self._access(), piece_bytes)
        packed = ctypes.string_at(properties.getPtr(), PROPERTIES_BYTES)
        record["pinned_properties"] = np.frombuffer(packed, "u8")
        record["sysconf"] = _libc_address("sysconf")

    def close(self) -> None:
        """Unload kernels and give the context back; everything lent must be closed before."""
        self._held.close()


_NO_DESCRIPTOR = -1
_LOW_DESCRIPTORS = 1024
"""``FD_SETSIZE`` of glibc: ``select(2)`` takes only descriptors below it, so these are left to the program."""


class _Pieces(Memory):
    """Memory of one handle a piece; ``handle`` is the address of the array of them.

    A piece that has not been imported yet has a descriptor, and 0 for a handle.
    """

    __slots__ = ("_call", "descriptors", "handles")

    def __init__(self, size_bytes: int, piece_bytes: int, call: Callable[..., Any]) -> None:
        """Own what the arrays will have; ``call`` makes a driver call by name."""
        self.handles = np.zeros(size_bytes // piece_bytes, np.uint64)
        self.descriptors = np.full(len(self.handles), _NO_DESCRIPTOR, np.int32)
        self._call = call
        super().__init__(self.handles.ctypes.data, size_bytes, piece_bytes, self._give_back)

    def _give_back(self, _handle: int, _size_bytes: int) -> None:
        with contextlib.ExitStack() as undo:
            for handle in self.handles[self.handles != 0].tolist():
                undo.callback(self._call, "cuMemRelease", handle)
            close_descriptors(self.descriptors[self.descriptors != _NO_DESCRIPTOR].tolist())


def _libc_address(name: str) -> int:
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def _move_up(descriptors: Sequence[int]) -> list[int]:
    """Give descriptors numbers that the program needs least, where it may open so many; takes them over."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    lowest = _LOW_DESCRIPTORS if unlimited else min(_LOW_DESCRIPTORS, max(soft - len(descriptors), 0))
    moved = []
    for descriptor in descriptors:
        try:
            moved.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest))
        except OSError:  # none of them is free
            moved.append(descriptor)
        else:
            os.close(descriptor)
    return moved


def _pieces(memory: Owned) -> _Pieces:
    """Return memory that is not closed, as what this device has made of it."""
    if memory.handle and isinstance(memory, _Pieces):
        return memory
    raise DriverError(f"use of {memory.what}", INVALID_VALUE, "it is not memory of a CUDA device")


def _window(window: Owned) -> Window:
    if isinstance(window, Window):
        return window
    raise DriverError(f"use of {window.what}", INVALID_VALUE, "it is not a window of a CUDA device")
