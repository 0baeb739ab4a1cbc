"""What a driver does, whatever the device.

Words: *memory* is physical memory, cut into equal *pieces* (the pool's regions); a *window* is a range of addresses
reserved once; a piece is *mapped* at an address inside a window. Everything lent is an owner object that is closed
exactly once (``zico.driver.owned``). Compiled code maps through ``zico.driver.mapping`` and needs no Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.driver.owned import Memory, Owned, Registered


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

        What compiled code mapped (``zico.driver.mapping``) is unmapped by naming exactly its piece.
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
