"""The CUDA device's virtual memory, streams and kernels, in the words of ``zico.driver.api``.

Theory of operation
    A handle can only be mapped as a whole (``cuMemMap`` takes offset 0), so memory is made of equal pieces, one handle
    each: the pool's regions. Handles are created once and recycled by mapping them elsewhere.

Guarantees
    Several driver calls are one rollback scope: if one fails, what the operation had done is undone, in the only order
    that the driver allows: unmap before release, unmap before freeing addresses.

Known limitations
    A device's memory is resident from its creation on, and is given back a whole memory at a time.
    Whether the virtual memory functions need a context is found out at the first call in a thread that has none
    (``needs_context``); the manual lists no context error for any of them. Not seen on a real GPU yet.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.driver.cuda import facts as cuda_facts
from zico.driver.cuda.bindings import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    Calls,
)
from zico.driver.cuda.context import PrimaryContext
from zico.driver.cuda.pinned import find
from zico.driver.cuda.window import Window, check_range
from zico.driver.owned import Memory, Owned, Registered, close_descriptors
from zico.driver.record import CUDA
from zico.errors import DriverError
from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    # -- memory -----------------------------------------------------------------------------------------------------

    def create_memory(self, size_bytes: int, label: str, piece_bytes: int | None = None) -> Memory:  # noqa: ARG002
        """Create one handle a piece, all or none; the device has no use for the label."""
        piece_bytes = piece_bytes or size_bytes

        def create(piece: int) -> int:
            try:
                return int(self._virtual("cuMemCreate", piece_bytes, self._properties, 0))
            except DriverError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                got, wanted = format_bytes(piece * piece_bytes), format_bytes(size_bytes)
                detail = f"{error.detail}; {got} of {wanted} could be had on {self.name}"
                raise DriverError(error.operation, error.status, detail) from error

        return self._collect(size_bytes, piece_bytes, create)

    def export_pieces(self, memory: Owned) -> list[int]:
        """Export every piece's handle; programs started later do not inherit the descriptors."""
        descriptors: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(close_descriptors, descriptors)
            for handle in _pieces(memory).tolist():
                descriptor = int(self._virtual("cuMemExportToShareableHandle", handle, self._descriptor, 0))
                descriptors.append(descriptor)
                os.set_inheritable(descriptor, False)  # noqa: FBT003 - the function's own way
            undo.pop_all()
        return descriptors

    def import_pieces(self, descriptors: Sequence[int], size_bytes: int, piece_bytes: int | None = None) -> Memory:
        """Import one handle a descriptor; the descriptors are closed then, the handles keep the memory."""
        piece_bytes = piece_bytes or size_bytes
        try:
            if len(descriptors) * piece_bytes != size_bytes:
                detail = f"{len(descriptors)} descriptors came for {size_bytes} bytes in pieces of {piece_bytes}"
                raise DriverError("import of memory", INVALID_VALUE, detail)
            function = "cuMemImportFromShareableHandle"
            take = (int(self._virtual(function, descriptor, self._descriptor)) for descriptor in descriptors)
            return self._collect(size_bytes, piece_bytes, lambda _piece: next(take))
        finally:
            close_descriptors(descriptors)

    def import_memory(self, descriptor: int) -> Memory:
        """Refuse: the device does not tell how large an imported handle is."""
        close_descriptors([descriptor])
        raise DriverError("import of memory", NOT_SUPPORTED, "its size is not known here: use import_pieces")

    def _collect(self, size_bytes: int, piece_bytes: int, take: Callable[[int], int]) -> Memory:
        """Own one handle a piece, each from ``take``; if one fails the others are released."""
        unit = self.granularity_bytes
        if not 0 < piece_bytes <= size_bytes or piece_bytes % unit or size_bytes % piece_bytes:
            detail = f"{size_bytes} bytes in pieces of {piece_bytes}: must be whole pieces, multiples of {unit} bytes"
            raise DriverError("creation of memory", INVALID_VALUE, detail)
        handles = np.zeros(size_bytes // piece_bytes, np.uint64)
        with contextlib.ExitStack() as undo:
            for piece in range(len(handles)):
                handle = take(piece)
                undo.callback(self._virtual, "cuMemRelease", handle)
                handles[piece] = handle
            return _Pieces(handles, size_bytes, piece_bytes, undo.pop_all())

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

    # -- addresses --------------------------------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> Owned:
        """Reserve addresses; on closing, what ``map`` mapped there is unmapped first."""
        address = int(self._virtual("cuMemAddressReserve", size_bytes, 0, 0, 0))
        return Window(address, size_bytes, self.granularity_bytes, self._virtual)

    def map(self, window: Owned, window_offset: int, memory: Owned, memory_offset: int, size_bytes: int) -> None:
        """Map whole pieces, readable and writable by this device; if the driver refuses, nothing is mapped there."""
        handles = _pieces(memory)
        piece_bytes = memory.size_bytes // len(handles)
        check_range(memory, memory_offset, size_bytes, piece_bytes)
        first, last = memory_offset // piece_bytes, (memory_offset + size_bytes) // piece_bytes
        _window(window).map(window_offset, handles[first:last].tolist(), piece_bytes, self._access())

    def unmap(self, window: Owned, window_offset: int, size_bytes: int) -> None:
        """Unmap every piece in the range; where ``map`` mapped none, the one piece that compiled code mapped."""
        _window(window).unmap(window_offset, size_bytes)

    def _access(self) -> Any:  # noqa: ANN401 - a CUmemAccessDesc
        access = self.call.api.CUmemAccessDesc()
        access.location.type = self._properties.location.type
        access.location.id = self.ordinal
        access.flags = self.call.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
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

    # -- the device's timeline --------------------------------------------------------------------------------------

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

    # -- for compiled code ------------------------------------------------------------------------------------------

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
        """Return the addresses of the C functions that compiled code calls (``zico.driver.record.FUNCTIONS``)."""
        return self.call.addresses()

    def fill_device(self, record: Any, memory: Owned) -> None:  # noqa: ANN401 - one DEVICE record
        """Fill a ``DEVICE`` record; from now on this process holds the primary context."""
        handles = _pieces(memory)
        record["kind"] = CUDA
        record["piece_bytes"] = memory.size_bytes // len(handles)
        record["handles_address"] = memory.handle
        record["context"] = self.context.retain()
        access = self._access()
        record["access"] = (int(access.location.type), self.ordinal, int(access.flags), 0)
        for name, address in self.addresses().items():
            record[name] = address

    def fill_pinned(self, record: Any, piece_bytes: int) -> None:  # noqa: ANN401 - one DEVICE record
        """Fill what ``zico.driver.next_tier`` needs to map pinned memory of the host in pieces."""
        with self.context.current():
            find(self.call, self.device, self._access(), piece_bytes).fill(record)

    def close(self) -> None:
        """Unload kernels and give the context back; everything lent must be closed before."""
        self._held.close()


class _Pieces(Memory):
    """Memory of one handle a piece; ``handle`` is the address of the array of them."""

    __slots__ = ("handles",)

    def __init__(
        self, handles: np.ndarray[Any, Any], size_bytes: int, piece_bytes: int, held: contextlib.ExitStack
    ) -> None:
        """Own the handles; ``held`` releases them."""
        super().__init__(handles.ctypes.data, size_bytes, piece_bytes, lambda _handle, _size_bytes: held.close())
        self.handles = handles


def _pieces(memory: Owned) -> np.ndarray[Any, Any]:
    """Return the handles of memory that is not closed."""
    if memory.handle and isinstance(memory, _Pieces):
        return memory.handles
    raise DriverError(f"use of {memory.what}", INVALID_VALUE, "it is not memory of a CUDA device")


def _window(window: Owned) -> Window:
    if isinstance(window, Window):
        return window
    raise DriverError(f"use of {window.what}", INVALID_VALUE, "it is not a window of a CUDA device")
