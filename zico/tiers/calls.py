"""System calls on a tier's descriptor, from compiled code: all of it or an errno."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import array_at, call, compiled

if TYPE_CHECKING:
    from zico.tiers.layout import StoreRecord

_EINTR = errno.EINTR
_EIO = errno.EIO
_EOPNOTSUPP = errno.EOPNOTSUPP
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_*, linux/falloc.h
_I32 = np.dtype("i4")


@compiled
def _errno(store: StoreRecord) -> int:
    status: int = np.int64(array_at(call(store.errno_location, ()), 1, _I32)[0])  # type: ignore[assignment]
    return status


@compiled
def write_at(store: StoreRecord, address: int, size_bytes: int, offset: int) -> int:
    """Write memory to the tier at an offset; returns 0 or an errno. ``ENOSPC``: the disk is full."""
    return _move(store, store.pwrite, address, size_bytes, offset)


@compiled
def read_at(store: StoreRecord, address: int, size_bytes: int, offset: int) -> int:
    """Read memory from the tier at an offset; returns 0 or an errno. ``EIO`` also where the file ends too early."""
    return _move(store, store.pread, address, size_bytes, offset)


@compiled
def _move(store: StoreRecord, function: int, address: int, size_bytes: int, offset: int) -> int:
    done = 0
    while done < size_bytes:
        n = call(function, (store.descriptor, address + done, size_bytes - done, offset + done))
        if n > 0:
            done += n
        elif n == 0:
            return _EIO
        else:
            status = _errno(store)
            if status != _EINTR:
                return status
    return 0


@compiled
def prepare(store: StoreRecord, offset: int, size_bytes: int) -> int:
    """Let the disk set space aside; returns 0 or an errno. Where it cannot, 0: a full disk shows when it is written."""
    while True:
        if call(store.fallocate, (store.descriptor, 0, offset, size_bytes)) == 0:
            return 0
        status = _errno(store)
        if status == _EOPNOTSUPP:
            return 0
        if status != _EINTR:
            return status


@compiled
def punch(store: StoreRecord, offset: int, size_bytes: int) -> bool:
    """Give the physical memory behind a range back; false if the kernel refused."""
    return call(store.fallocate, (store.descriptor, _KEEP_SIZE_PUNCH_HOLE, offset, size_bytes)) == 0
