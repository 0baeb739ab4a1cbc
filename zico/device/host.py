"""The host device: real virtual memory of the kernel, driven as a GPU's is.

``memfd_create`` is physical memory, ``mmap`` at a fixed address is mapping, and a descriptor is
export. ``fallocate`` with a punched hole is release. The kernel's block count of the memfd is what
is resident.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zico.base.errors import DriverError
from zico.device.api import Memory, Owned, Registered, close_descriptors
from zico.device.record import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)

PROT_NONE = 0
PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h
POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
FREE_PAGES = 86  # _SC_AVPHYS_PAGES
_MAP_FAILED = ctypes.c_void_p(-1).value
_STAT_BLOCK_BYTES = 512  # st_blocks counts these whatever the file system's block size (stat(2))


def _mmap(operation: str, address: int, size_bytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address or None, size_bytes, protection, flags, fd, offset)
    if result in (None, _MAP_FAILED):
        raise _failure(operation, f"{size_bytes} bytes at {address:#x}")
    return int(result)


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Call ``madvise(2)``; returns 0, or -1 with the reason in ``ctypes.get_errno``."""
    return int(_libc.madvise(address, size_bytes, advice))


def physical_bytes_of(status: os.stat_result) -> int:
    """Return the kernel's count of the bytes that a file takes."""
    return status.st_blocks * _STAT_BLOCK_BYTES


def _failure(operation: str, detail: str) -> DriverError:
    status = ctypes.get_errno()
    return DriverError(operation, status, f"{os.strerror(status)}, {detail}")


def _close_window(address: int, size_bytes: int) -> None:
    if _libc.munmap(address, size_bytes) != 0:
        raise _failure("release of a window", f"{size_bytes} bytes at {address:#x}")


def _close_memory(descriptor: int, _size_bytes: int) -> None:
    os.close(descriptor)


def _keep_registered(_address: int, _size_bytes: int) -> None:
    """Undo nothing: the host device sees all memory anyway."""


def map_privately(descriptor: int, size_bytes: int) -> Owned:
    """Map all of a file's memory, which stays the caller's; what is written here is this process's alone.

    Its pages are there when this returns, as far as the kernel has them.

    Raises:
        DriverError: The kernel refuses.
    """
    address = _mmap("mapping", 0, size_bytes, PROT_READ_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    advise(address, size_bytes, POPULATE_READ)
    return Owned("window", address, size_bytes, _close_window)


class HostDriver:
    """The driver of the host device; keeps no state of its own."""

    name = "host"
    granularity_bytes = mmap.PAGESIZE

    def create_memory(self, size_bytes: int, label: str, piece_bytes: int | None = None) -> Memory:
        """Create one sealed-size memfd, whatever the pieces; its pages become resident when they are touched."""
        try:
            descriptor = os.memfd_create(f"zico-{label}", os.MFD_CLOEXEC)
        except OSError as error:
            raise DriverError("creation of memory", error.errno or 0, str(error)) from error
        memory = Memory(descriptor, size_bytes, piece_bytes, _close_memory)
        try:
            os.ftruncate(descriptor, size_bytes)
        except OSError as error:
            memory.close()
            raise DriverError("creation of memory", error.errno or 0, f"{error}, {size_bytes} bytes") from error
        return memory

    def export_pieces(self, memory: Owned) -> list[int]:
        """Duplicate the descriptor; the caller owns the copy."""
        try:
            return [os.dup(memory.handle)]
        except OSError as error:
            raise DriverError("export of memory", error.errno or 0, str(error)) from error

    def import_pieces(self, descriptors: Sequence[int], size_bytes: int, piece_bytes: int | None = None) -> Memory:
        """Take over the one descriptor; all are closed if it is not one, or not memory of that size."""
        if len(descriptors) != 1:
            close_descriptors(descriptors)
            detail = f"{len(descriptors)} descriptors came where one makes all of the memory"
            raise DriverError("import of memory", errno.EINVAL, detail)
        memory = self.import_memory(descriptors[0])
        if memory.size_bytes != size_bytes:
            detail = f"{memory.size_bytes} bytes came where {size_bytes} were announced"
            memory.close()
            raise DriverError("import of memory", errno.EINVAL, detail)
        memory.piece_bytes = piece_bytes or size_bytes
        return memory

    def import_memory(self, descriptor: int) -> Memory:
        """Take over a descriptor; it is closed if it is not memory."""
        memory = Memory(descriptor, 0, None, _close_memory)
        try:
            memory.size_bytes = memory.piece_bytes = os.fstat(descriptor).st_size
        except OSError as error:
            raise DriverError("import of memory", error.errno or 0, str(error)) from error
        return memory

    def reserve(self, size_bytes: int) -> Owned:
        """Reserve addresses that fault until something is mapped there."""
        address = _mmap("reservation of a window", 0, size_bytes, PROT_NONE, RESERVED, -1, 0)
        return Owned("window", address, size_bytes, _close_window)

    def map(self, window: Owned, window_offset: int, memory: Owned, memory_offset: int, size_bytes: int) -> None:
        """Map memory, readable, writable and shared, at a fixed place in the window."""
        _check_inside(window, window_offset, size_bytes)
        _check_inside(memory, memory_offset, size_bytes)
        flags = mmap.MAP_SHARED | MAP_FIXED
        address = window.handle + window_offset
        _mmap("mapping", address, size_bytes, PROT_READ_WRITE, flags, memory.handle, memory_offset)

    def unmap(self, window: Owned, window_offset: int, size_bytes: int) -> None:
        """Replace a mapping by reserved addresses in one step, so that nobody else can get them in between."""
        _check_inside(window, window_offset, size_bytes)
        _mmap("unmapping", window.handle + window_offset, size_bytes, PROT_NONE, RESERVED | MAP_FIXED, -1, 0)

    def discard(self, memory: Owned, offset: int, size_bytes: int) -> None:
        """Punch a hole."""
        _check_inside(memory, offset, size_bytes)
        if _libc.fallocate(memory.handle, PUNCH_HOLE, offset, size_bytes) != 0:
            raise _failure("release of physical memory", f"{size_bytes} bytes at offset {offset}")

    def physical_bytes(self, memory: Owned) -> int:
        """Return the kernel's count of resident bytes."""
        return physical_bytes_of(os.fstat(memory.handle))

    def free_bytes(self) -> int | None:
        """Return what the kernel estimates to be available without swapping."""
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None

    def total_bytes(self) -> int:
        """Return the machine's memory."""
        return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE

    def register_host(self, address: int, size_bytes: int) -> Registered:
        """Return the memory under its own address: this device has no other."""
        return Registered(address, size_bytes, address, _keep_registered)

    def fill_device(self, record: Any, memory: Owned) -> None:  # noqa: ANN401 - one DEVICE record
        """Fill a ``DEVICE`` record: functions of the kernel and the memory's descriptor."""
        record["kind"] = HOST
        record["piece_bytes"] = memory.piece_bytes if isinstance(memory, Memory) else memory.size_bytes
        record["descriptor"] = memory.handle
        for name in ("mmap", "fallocate", "madvise", "sysconf"):
            record[name] = ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value

    def fill_pinned(self, record: Any, piece_bytes: int) -> None:  # noqa: ANN401, ARG002 - one DEVICE record
        """Refuse: the host's memory is this device's own."""
        raise DriverError("mapping of host memory", errno.ENOTSUP, "the host device's next tier is a file")

    def close(self) -> None:
        """Return nothing: the driver holds nothing."""


def _check_inside(owned: Owned, offset: int, size_bytes: int) -> None:
    """Refuse a range that is empty, unaligned or outside before the kernel sees it."""
    aligned = offset % mmap.PAGESIZE == 0 and size_bytes % mmap.PAGESIZE == 0
    if not (aligned and 0 <= offset < offset + size_bytes <= owned.size_bytes):
        detail = (
            f"offset {offset}, size {size_bytes}: must be pages inside the {owned.size_bytes} bytes of the {owned.what}"
        )
        raise DriverError("mapping", 22, detail)
