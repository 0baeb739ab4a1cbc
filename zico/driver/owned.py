"""One owner per thing that a driver lends: one undo each, done exactly once.

Several driver calls are one rollback scope: ``contextlib.ExitStack``, with each undo registered right after its call
succeeded and ``pop_all`` at the end (style after cuda.core's transactions).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Self

from zico.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

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
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()


class Memory(Owned):
    """Physical memory made of equal pieces.

    ``handle`` is the memfd on the host device, the address of an array of the pieces' handles (u8) on a CUDA device.
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
