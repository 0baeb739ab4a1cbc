"""Addresses reserved on a CUDA device, and which pieces are mapped there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from zico.driver.cuda.bindings import INVALID_VALUE
from zico.driver.owned import Owned
from zico.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Window(Owned):
    """A range of reserved addresses; it knows what ``map`` put there, not what compiled code did."""

    __slots__ = ("_call", "_mapped", "_unit_bytes")

    def __init__(self, address: int, size_bytes: int, unit_bytes: int, call: Callable[..., Any]) -> None:
        """Own the addresses; ``call`` makes a driver call by name, ``unit_bytes`` is the device's granularity."""
        super().__init__("window", address, size_bytes, self._free)
        self._call = call
        self._unit_bytes = unit_bytes
        self._mapped: dict[int, int] = {}  # offset -> bytes

    def map(self, offset: int, handles: Sequence[int], piece_bytes: int, access: object) -> None:
        """Map one piece a handle, side by side; what was there is unmapped first.

        Raises:
            DriverError: The range is not whole pieces inside the window, or the driver refused; in the latter case
                nothing is mapped in the range any more.
        """
        size_bytes = len(handles) * piece_bytes
        check_range(self, offset, size_bytes, self._unit_bytes)
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
        check_range(self, offset, size_bytes, self._unit_bytes)
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
