"""What a driver does, whatever the device.

Words: *memory* is physical memory in one piece, cut into regions by offset; a *window* is a range of addresses
reserved once; a region is *mapped* at an address inside a window. Everything lent is an owner object that is closed
exactly once (``zico.driver.owned``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zico.driver.owned import Owned


class Driver(Protocol):
    """The operations. Each raises ``DriverError`` with the status and leaves nothing half done."""

    name: str
    granularity_bytes: int

    def create_memory(self, size_bytes: int, label: str) -> Owned:
        """Create physical memory that can be exported; it becomes resident when it is touched."""
        ...

    def export(self, memory: Owned) -> int:
        """Return a new file descriptor for the memory; the caller owns it."""
        ...

    def import_memory(self, descriptor: int) -> Owned:
        """Take over a descriptor made by ``export`` in another process."""
        ...

    def reserve(self, size_bytes: int) -> Owned:
        """Reserve addresses without memory."""
        ...

    def map(self, window: Owned, window_offset: int, memory: Owned, memory_offset: int, size_bytes: int) -> None:
        """Map memory into the window, replacing what was mapped there."""
        ...

    def unmap(self, window: Owned, window_offset: int, size_bytes: int) -> None:
        """Turn a part of the window into mere reserved addresses again."""
        ...

    def discard(self, memory: Owned, offset: int, size_bytes: int) -> None:
        """Give the physical bytes of a part back to the device; its contents become zero."""
        ...

    def physical_bytes(self, memory: Owned) -> int:
        """Return the bytes that the device says are resident."""
        ...
