"""One owner per thing that a driver lends: one undo each, done exactly once.

Several driver calls are one rollback scope: ``contextlib.ExitStack``, with each undo registered right after its call
succeeded and ``pop_all`` at the end (style after cuda.core's transactions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from zico.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

EBADF = 9


class Owned:
    """A thing lent by a driver: memory (``handle`` is its descriptor) or a window (``handle`` is its address)."""

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
