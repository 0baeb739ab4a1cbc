"""Page faults in our own hands: ``userfaultfd(2)``, from compiled code.

Theory of operation
    A descriptor belongs to the address space of the process that made it. A thread that touches a
    missing or a write-protected page of a range that it watches sleeps in the kernel. Another
    thread fills the page, or takes the protection away, and wakes it.

Guarantees
    Nothing here wakes anybody but ``wake``: who changes a range in several steps wakes when all are
    done. What is there already is left as it is when a range is filled.

Known limitations
    Linux 5.19 or later (write protection of shared memory). One call at a time per ``USERFAULT``
    record. Without the right to the kernel's own faults a system call that is given a missing page
    fails with EFAULT.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import mmap
import os
import platform
from typing import Annotated, Any

import numpy as np

from zico.base.compiled import array_at, call, compiled, inlined, keep_out_of_line
from zico.base.errors import DriverError
from zico.base.records import I2, I4, I8, U1, U8, Numbers, Record, dtype_of
from zico.device import host
from zico.device.mapping import address_of

SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}.get(platform.machine(), -1)
DEVICE_PATH = "/dev/userfaultfd"
_USER_MODE_ONLY = 1  # UFFD_USER_MODE_ONLY, Linux 5.11

# linux/userfaultfd.h. Sizes are those of the structures below.
_READ_WRITE, _READ = 3, 2


def _request(direction: int, number: int, size_bytes: int) -> int:
    return direction << 30 | size_bytes << 16 | 0xAA << 8 | number


_NEW = 0xAA << 8
_API = _request(_READ_WRITE, 0x3F, 24)
_REGISTER = _request(_READ_WRITE, 0x00, 32)
_WAKE = _request(_READ, 0x02, 16)
_COPY = _request(_READ_WRITE, 0x03, 40)
_ZEROPAGE = _request(_READ_WRITE, 0x04, 32)
_WRITEPROTECT = _request(_READ_WRITE, 0x06, 24)
REQUEST_POISON = _request(_READ_WRITE, 0x08, 32)

_UFFD_API = 0xAA
_FEATURES = 1 << 0 | 1 << 5 | 1 << 12  # PAGEFAULT_FLAG_WP, MISSING_SHMEM, WP_HUGETLBFS_SHMEM
_REGISTER_MODES = 1 << 0 | 1 << 1  # MISSING, WP
_DONTWAKE = 1 << 0  # of COPY and ZEROPAGE
_DONTWAKE_PROTECT = 1 << 1  # of WRITEPROTECT
COPY_PROTECTED = 1 << 1
"""``fill`` write-protects what it copies in, by this flag."""
_PROTECT = 1

FAULT = 0x12
"""``event`` of a message: a page fault, the only one that is asked for."""
WRITES = 1 << 0
PROTECTED = 1 << 1
"""``flags`` of a message have this bit where the page is there, but write-protected."""

_DONTFORK = 10  # MADV_DONTFORK
_POLLIN = 1
PAGE_BYTES = mmap.PAGESIZE
MESSAGES = 16
"""Most messages that one ``read`` brings."""
GAVE_UP = 1 << 20  # tries
POLLED = 2


class Range(Record, align=False):
    """``struct uffdio_range`` of linux/userfaultfd.h."""

    start: U8
    length: U8


class Copy(Record, align=False):
    """``struct uffdio_copy``."""

    to: U8
    source: U8
    length: U8
    mode: U8
    done: I8


class Zero(Record, align=False):
    """``struct uffdio_zeropage``, whose range is the first two fields."""

    start: U8
    length: U8
    mode: U8
    done: I8


class Protection(Record, align=False):
    """``struct uffdio_writeprotect``, whose range is the first two fields."""

    start: U8
    length: U8
    mode: U8


class Message(Record, align=False):
    """``struct uffd_msg`` of a page fault."""

    event: U1
    unused: Annotated[Numbers, "u1", (7,)]
    flags: U8
    address: U8
    thread: U8


MESSAGE = dtype_of(Message)


class Poll(Record, align=False):
    """``struct pollfd``."""

    descriptor: I4
    events: I2
    found: I2


POLL = dtype_of(Poll)


class UserfaultRecord(Record, align=False):
    """The way to one descriptor, with room for the structures that the kernel reads."""

    descriptor: I8
    ioctl: I8  # addresses of functions of the C library
    read: I8
    poll: I8
    errno_address: I8  # of __errno_location
    copy: Copy
    zero: Zero
    protection: Protection
    range: Range
    messages: Annotated[Numbers, "u8", (MESSAGES * 4,)]
    polled: Annotated[Numbers, "i8", (POLLED,)]


USERFAULT = dtype_of(UserfaultRecord)


_COPY_AT, _ZERO_AT, _PROTECTION_AT, _RANGE_AT, _MESSAGES_AT, _POLLED_AT = (
    int(USERFAULT.fields[name][1]) for name in ("copy", "zero", "protection", "range", "messages", "polled")
)
_MESSAGES_BYTES = MESSAGES * MESSAGE.itemsize
_STATUS_MASK = 0xFFFFFFFF
_EAGAIN = errno.EAGAIN
_EEXIST = errno.EEXIST
_I4 = np.dtype("i4")


class Reach(enum.IntEnum):
    """Whose faults a descriptor shows."""

    ALL = 0
    USER_MODE = 1
    """Not those of the kernel: a system call that touches a missing page fails with EFAULT."""


# -- opening ---------------------------------------------------------------------------------------


def open_userfault() -> tuple[int, Reach]:
    """Return a descriptor for this process's faults, closed on ``exec``, and whose faults it shows.

    Raises:
        DriverError: The kernel or the privileges of this process refuse; the message says what to
            set.
    """
    descriptor, reach = _by_device(), Reach.ALL
    for flags, reach_so in ((0, Reach.ALL), (_USER_MODE_ONLY, Reach.USER_MODE)):
        if descriptor < 0:
            descriptor, reach = _by_call(flags), reach_so
    if descriptor < 0:
        status = ctypes.get_errno()
        raise DriverError("userfaultfd", status, f"{os.strerror(status)}: {REMEDY}")
    api = np.array([_UFFD_API, _FEATURES, 0], np.uint64)
    try:
        fcntl.ioctl(descriptor, _API, api)  # type: ignore[call-overload]  # NumPy arrays are buffers
    except OSError as error:
        os.close(descriptor)
        detail = f"{error.strerror}: write protection of shared memory needs Linux 5.19 or later"
        raise DriverError("userfaultfd", error.errno or 0, detail) from error
    return descriptor, reach


REMEDY = (
    "set vm.unprivileged_userfaultfd=1 (sysctl), give the process CAP_SYS_PTRACE, or let its user read and write "
    f"{DEVICE_PATH}"
)


def _by_device() -> int:
    try:
        device = os.open(DEVICE_PATH, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return fcntl.ioctl(device, _NEW, os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    finally:
        os.close(device)


def _by_call(flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK | flags))


def watch(descriptor: int, address: int, size_bytes: int) -> None:
    """Let a range of this process be the descriptor's: faults on missing pages, and on writes to protected ones.

    The range is not inherited by a fork: a child that touched it would fill what is missing with
    zeros for both.

    Raises:
        DriverError: The kernel refuses, as it does for what is no memory that can be watched.
    """
    register = np.array([address, size_bytes, _REGISTER_MODES, 0], np.uint64)
    try:
        fcntl.ioctl(descriptor, _REGISTER, register)  # type: ignore[call-overload]
    except OSError as error:
        raise DriverError("userfaultfd", error.errno or 0, f"{error.strerror}, {size_bytes} bytes") from error
    keep_from_children(address, size_bytes)


def keep_from_children(address: int, size_bytes: int) -> None:
    """Let no child that is forked from now on inherit a mapping.

    Raises:
        DriverError: The kernel refuses.
    """
    if host.advise(address, size_bytes, _DONTFORK) != 0:
        raise DriverError("madvise", ctypes.get_errno(), "the window cannot be kept from forked children")


def fill_userfault(record: Any, descriptor: int) -> None:  # noqa: ANN401 - one USERFAULT record
    """Fill a ``USERFAULT`` record."""
    libc = ctypes.CDLL(None)
    record["descriptor"] = descriptor
    for name in ("ioctl", "read", "poll"):
        record[name] = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
    record["errno_address"] = ctypes.cast(getattr(libc, "__errno_location"), ctypes.c_void_p).value


# -- from compiled code ----------------------------------------------------------------------------


@inlined
def _failed(result: int) -> bool:
    return result & _STATUS_MASK != 0


@inlined
def error_of(user: UserfaultRecord) -> int:
    """Return this thread's ``errno``."""
    return array_at(call(user.errno_address, (0,)), 1, _I4)[0]


@compiled
def fill(user: UserfaultRecord, to: int, source: int, length: int, mode: int) -> int:
    """Copy pages in where they are missing; wakes nobody.

    Args:
        user: The USERFAULT record.
        to: Where, in a range that is watched.
        source: From where, in a range that is not.
        length: Bytes, whole pages.
        mode: 0 or ``COPY_PROTECTED``.

    Returns:
        0; else an errno.
    """
    keep_out_of_line()
    done = 0
    for _ in range(GAVE_UP):
        if done >= length:
            return 0
        user.copy.to = to + done
        user.copy.source = source + done
        user.copy.length = length - done
        user.copy.mode = _DONTWAKE | mode
        user.copy.done = 0
        if not _failed(call(user.ioctl, (user.descriptor, _COPY, address_of(user) + _COPY_AT))):
            return 0
        done, status = _advanced(done, user.copy.done)
        if status != 0:
            return status
    return _EAGAIN


@compiled
def zero(user: UserfaultRecord, to: int, length: int) -> int:
    """Fill pages with zeros where they are missing; wakes nobody. Returns as ``fill``."""
    keep_out_of_line()
    done = 0
    for _ in range(GAVE_UP):
        if done >= length:
            return 0
        user.zero.start = to + done
        user.zero.length = length - done
        user.zero.mode = _DONTWAKE
        user.zero.done = 0
        if not _failed(call(user.ioctl, (user.descriptor, _ZEROPAGE, address_of(user) + _ZERO_AT))):
            return 0
        done, status = _advanced(done, user.zero.done)
        if status != 0:
            return status
    return _EAGAIN


@inlined
def _advanced(done: int, told: int) -> tuple[int, int]:
    """Return how far it is now, and 0 or why it cannot go on, from what the kernel has told."""
    if told > 0:
        return done + told, 0
    if told == -_EEXIST:
        return done + PAGE_BYTES, 0
    if told == -_EAGAIN:
        return done, 0
    return done, -told


@compiled
def protect(user: UserfaultRecord, start: int, length: int, protects: int) -> int:
    """Protect a range against writes (1) or not any more (0); wakes nobody. 0, or an errno.

    When it returns, every write that was not stopped is in the pages.
    """
    keep_out_of_line()
    user.protection.start = start
    user.protection.length = length
    user.protection.mode = _PROTECT if protects else _DONTWAKE_PROTECT
    for _ in range(GAVE_UP):
        if not _failed(call(user.ioctl, (user.descriptor, _WRITEPROTECT, address_of(user) + _PROTECTION_AT))):
            return 0
        status = error_of(user)
        if status != _EAGAIN:
            return status
    return _EAGAIN


@compiled
def wake(user: UserfaultRecord, start: int, length: int) -> None:
    """Let every thread that sleeps on a range try again."""
    keep_out_of_line()
    user.range.start = start
    user.range.length = length
    call(user.ioctl, (user.descriptor, _WAKE, address_of(user) + _RANGE_AT))


@compiled
def poison(user: UserfaultRecord, start: int, length: int) -> int:
    """Let every touch of what is missing in a range end in SIGBUS (Linux 6.6); 0, or an errno."""
    keep_out_of_line()
    user.zero.start = start
    user.zero.length = length
    user.zero.mode = 0
    user.zero.done = 0
    failed = _failed(call(user.ioctl, (user.descriptor, REQUEST_POISON, address_of(user) + _ZERO_AT)))
    return error_of(user) if failed else 0


@compiled
def read_messages(user: UserfaultRecord) -> int:
    """Read what faults there are into the record, without waiting; returns how many, at most ``MESSAGES``."""
    keep_out_of_line()
    got = call(user.read, (user.descriptor, address_of(user) + _MESSAGES_AT, _MESSAGES_BYTES))
    return max(got, 0) // (_MESSAGES_BYTES // MESSAGES)


@inlined
def message_at(user: UserfaultRecord, i: int) -> Message:
    """Return a message that was read."""
    return array_at(address_of(user) + _MESSAGES_AT, MESSAGES, MESSAGE)[i]


@compiled
def await_any(user: UserfaultRecord, descriptors: tuple[int, int], timeout_ms: int) -> int:
    """Sleep until one of two descriptors is readable (-1: none), or time is up; returns which, a bit each.

    Args:
        user: The USERFAULT record.
        descriptors: Which; the record's own is among them only if it is named.
        timeout_ms: Not negative.
    """
    keep_out_of_line()
    polled = array_at(address_of(user) + _POLLED_AT, POLLED, POLL)
    for i in range(POLLED):
        polled[i].descriptor = descriptors[i]
        polled[i].events = _POLLIN
        polled[i].found = 0
    call(user.poll, (address_of(user) + _POLLED_AT, POLLED, timeout_ms))
    found = 0
    for i in range(POLLED):
        if polled[i].found != 0:
            found |= 1 << i
    return found
