"""What a driver does, whatever the device.

Words: *memory* is physical memory, cut into equal *pieces* (the pool's regions). A *window* is a
range of addresses reserved once. A piece is *mapped* at an address inside a window. Everything lent
is an owner object that is closed exactly once (``zico.device.api``). Compiled code maps through
``zico.device.mapping`` and needs no Python.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Protocol, Self

from zico.base.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Driver(Protocol):
    """The operations. Each raises ``DriverError`` with the status and leaves nothing half done."""

    name: str
    granularity_bytes: int

    def create_memory(self, size_bytes: int, label: str, piece_bytes: int | None = None) -> Memory:
        """Create physical memory that can be exported, made of pieces (``None``: one piece). All or nothing.

        On the host device it becomes resident when it is touched, on a CUDA device at once.
        """
        ...

    def export_pieces(self, memory: Owned) -> list[int]:
        """Return new file descriptors for the memory, in order; the caller owns them. Host: one; CUDA: one a piece."""
        ...

    def import_pieces(self, descriptors: Sequence[int], size_bytes: int, piece_bytes: int | None = None) -> Memory:
        """Take over the descriptors that ``export_pieces`` gave in another process, also when this fails."""
        ...

    def import_memory(self, descriptor: int) -> Memory:
        """Take over the one descriptor of memory on the host device, as large as it is."""
        ...

    def reserve(self, size_bytes: int) -> Owned:
        """Reserve addresses without memory. Closing it unmaps what ``map`` mapped there."""
        ...

    def map(self, window: Owned, window_offset: int, memory: Owned, memory_offset: int, size_bytes: int) -> None:
        """Map memory into the window, replacing what was mapped there; on a CUDA device whole pieces."""
        ...

    def unmap(self, window: Owned, window_offset: int, size_bytes: int) -> None:
        """Turn a part of the window into mere reserved addresses again.

        What compiled code mapped (``zico.device.mapping``) is unmapped by naming exactly its piece.
        """
        ...

    def discard(self, memory: Owned, offset: int, size_bytes: int) -> None:
        """Give the physical bytes of a part back to the device; its contents become zero. Not on a CUDA device."""
        ...

    def physical_bytes(self, memory: Owned) -> int:
        """Return the bytes of the memory that are resident, by the device's own account."""
        ...

    def free_bytes(self) -> int | None:
        """Return what could still be created on the device, whoever holds the rest; ``None`` where nobody can say."""
        ...

    def total_bytes(self) -> int:
        """Return the size of the device's memory."""
        ...

    def register_host(self, address: int, size_bytes: int) -> Registered:
        """Let the device read and write this process's memory; the result has its address on the device."""
        ...

    def fill_device(self, record: Any, memory: Owned) -> None:  # noqa: ANN401 - one DEVICE record
        """Fill a ``DEVICE`` record, from which compiled code maps the memory's pieces; neither may move after."""
        ...

    def fill_pinned(self, record: Any, piece_bytes: int) -> None:  # noqa: ANN401 - one DEVICE record
        """Fill what compiled code needs to map pinned memory of the host; not on the host device, which is the host."""
        ...

    def close(self) -> None:
        """Return what the driver itself holds (contexts, modules); everything lent must be closed before."""
        ...


# -- one owner per thing that a driver gives out: one undo each, done exactly once -----------------
#
# Several driver calls are one rollback scope, a ``contextlib.ExitStack``. Each undo is registered
# right after its call succeeded, with ``pop_all`` at the end (style after cuda.core's
# transactions).

EBADF = 9


class Owned:
    """A thing lent by a driver, with its handle: a window has its address, a stream what the device calls it."""

    __slots__ = ("_handle", "_undo", "size_bytes", "what")

    def __init__(self, what: str, handle: int, size_bytes: int, undo: Callable[[int, int], None]) -> None:
        """Own ``handle``; ``undo(handle, size_bytes)`` returns it."""
        self.what = what
        self.size_bytes = size_bytes
        self._handle: int | None = handle
        self._undo = undo

    @property
    def handle(self) -> int:
        """Return the handle.

        Raises:
            DriverError: It has been closed.
        """
        if self._handle is None:
            raise DriverError(f"use of {self.what}", EBADF, "it has been closed")
        return self._handle

    @property
    def closed(self) -> bool:
        """Tell whether it has been returned."""
        return self._handle is None

    def close(self) -> None:
        """Return it to the device; a second call does nothing."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._undo(handle, self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Memory(Owned):
    """Physical memory made of equal pieces.

    ``handle`` is the memfd on the host device, the address of an array of the pieces' handles (u8)
    on a CUDA device.
    """

    __slots__ = ("piece_bytes",)

    def __init__(self, handle: int, size_bytes: int, piece_bytes: int | None, undo: Callable[[int, int], None]) -> None:
        """Own ``size_bytes`` in pieces of ``piece_bytes`` (``None``: one piece)."""
        super().__init__("memory", handle, size_bytes, undo)
        self.piece_bytes = piece_bytes or size_bytes


class Registered(Owned):
    """Host memory that the device may read and write; ``handle`` is its address here."""

    __slots__ = ("device_address",)

    def __init__(self, address: int, size_bytes: int, device_address: int, undo: Callable[[int, int], None]) -> None:
        """Own the registration of ``size_bytes`` at ``address``, which is ``device_address`` on the device."""
        super().__init__("registered host memory", address, size_bytes, undo)
        self.device_address = device_address


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Close descriptors that were handed over, also when one of them is none."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
