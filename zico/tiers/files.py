"""Files that have no name: whatever becomes of the processes that use one, nothing of it stays behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

from zico.errors import ConfigError
from zico.tiers.layout import ALIGNMENT_BYTES

_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""What file systems and kernels say that have no ``O_TMPFILE`` (open(2))."""


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
