"""Where bytes go that leave the budget: which tiers somebody wants, in which directory, and their files.

``memory:2GiB,file:20GiB`` is memory first and a file for what does not fit there. The files have no
name: whatever becomes of the processes that use one, nothing of it stays behind.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from pathlib import Path

from zico.base.errors import ConfigError
from zico.base.units import parse_size
from zico.device import host
from zico.device.host import HostDriver
from zico.tiers.layout import ALIGNMENT_BYTES, FILE, KIND_NAMES, MAX_TIERS

ACCEPTED = f"up to {MAX_TIERS} of {', '.join(KIND_NAMES)}, the fastest first, each with a size or without"
_MEMORY_SHARE = 2
"""Without a size memory is at most half of what is free: running out of it kills somebody."""


@dataclasses.dataclass(frozen=True, slots=True)
class TierWish:
    """One tier: its kind, one of ``KIND_NAMES``, and what it may hold."""

    kind: str
    size_bytes: int


def spill_directory(wanted: str | None = None) -> str:
    """Return where files of tiers are: as wanted, else ``ZICO_SPILL_DIR``, else the place for large temporary files."""
    large = "/var/tmp"  # noqa: S108 - the file system hierarchy standard, 5.15
    return wanted or os.environ.get("ZICO_SPILL_DIR") or (large if Path(large).is_dir() else tempfile.gettempdir())


def parse_tiers(text: str, directory: str | None = None) -> tuple[TierWish, ...]:
    """Return the tiers that ``text`` names, in order.

    Args:
        text: Kinds, separated by commas, each with ``:SIZE`` or without. Without a size memory is
            half of what is free on the machine now, a file what is free on its disk. A percentage
            is one of the machine's memory or of the disk.
        directory: Where files are to be; ``None``: see ``spill_directory``.

    Raises:
        ConfigError: There is no such kind or size, a kind comes twice, or the directory cannot be
            looked at.
    """
    wishes = tuple(_parse_one(part.strip(), spill_directory(directory)) for part in text.split(","))
    kinds = [wish.kind for wish in wishes]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"{text!r} names a tier twice: give {ACCEPTED}")
    return wishes


def _parse_one(text: str, directory: str) -> TierWish:
    kind, colon, size = text.partition(":")
    kind = kind.strip().lower()
    if kind not in KIND_NAMES:
        raise ConfigError(f"{text!r} is not a tier: give {ACCEPTED}, such as memory:2GiB,file:20GiB")
    whole_bytes, free_bytes = _room(kind, directory)
    if not colon:
        return TierWish(kind, free_bytes)
    try:
        return TierWish(kind, parse_size(size, whole_bytes=whole_bytes))
    except ConfigError as error:
        raise ConfigError(f"tier {text!r}: {error}") from error


def _room(kind: str, directory: str) -> tuple[int, int]:
    """Return what there is for tiers of a kind, and what one gets without a size, in bytes."""
    if kind == KIND_NAMES[FILE]:
        try:
            disk = shutil.disk_usage(directory)
        except OSError as error:
            raise ConfigError(f"no file can be in {directory!r}: {error.strerror}. Set ZICO_SPILL_DIR") from error
        return disk.total, disk.free
    machine = HostDriver()
    total = machine.total_bytes()
    free = machine.free_bytes()
    return total, (total if free is None else free) // _MEMORY_SHARE


# -- files without a name --------------------------------------------------------------------------


_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""File systems and kernels say this that have no ``O_TMPFILE`` (open(2))."""


def open_nameless(directory: str) -> int:
    """Return a descriptor of a new, empty file without a name, past the page cache where the file system lets us.

    Raises:
        ConfigError: There can be no such file.
    """
    try:
        descriptor = _open(directory)
    except OSError as error:
        message = f"a tier's file cannot be made in {directory!r}: {error.strerror}. Set ZICO_SPILL_DIR"
        raise ConfigError(message) from error
    _try_direct(descriptor)
    return descriptor


def _open(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    descriptor, path = tempfile.mkstemp(prefix="zico-tier-", dir=directory)
    Path(path).unlink()
    return descriptor


def is_direct(descriptor: int) -> bool:
    """Tell whether a file is read and written past the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _try_direct(descriptor: int) -> None:
    """Leave the page cache out if the file system takes aligned blocks as ours are."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page:  # aligned
        try:
            os.preadv(descriptor, [page], 0)
        except OSError:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


# -- the heap's next tier --------------------------------------------------------------------------


def open_spill_file(directory: str | None, size_bytes: int) -> int:
    """Return a sparse file without a name, or -1 where none can be had: then there is no next tier.

    Args:
        directory: Where it is to be; ``None``: see ``spill_directory``.
        size_bytes: Of addresses: it takes no space on the disk yet.
    """
    try:
        descriptor = _open(spill_directory(directory))
    except OSError:
        return -1
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def sets_space_aside(descriptor: int) -> bool:
    """Tell whether the file system of an empty file can set space aside, be it full or not (fallocate(2))."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, 0, mmap.PAGESIZE) == 0:
        fallocate(descriptor, host.PUNCH_HOLE, 0, mmap.PAGESIZE)
        return True
    return ctypes.get_errno() != errno.EOPNOTSUPP
