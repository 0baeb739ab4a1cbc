"""Calls of the C library and the kernel from compiled code: clocks, mutexes, futexes, signals, locks, ``/proc``.

Known limitations:
    * Linux on x86-64 and aarch64 only (system call numbers, size of ``pthread_mutex_t``).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import time
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from zico.base.compiled import (
    array_at,
    call,
    compare_exchange,
    compiled,
    exchange,
    inlined,
    keep_out_of_line,
    symbol_address,
)

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
SYS_NANOSLEEP = {"x86_64": 35, "aarch64": 101}.get(platform.machine(), -1)
_SYS_FCNTL = {"x86_64": 72, "aarch64": 25}.get(platform.machine(), -1)
_FLOCK_BYTES = 32
_SYS_GETPID = {"x86_64": 39, "aarch64": 172}.get(platform.machine(), -1)
_SYS_GETTID = {"x86_64": 186, "aarch64": 178}.get(platform.machine(), -1)
FUTEX_WAIT = 0
FUTEX_WAKE = 1
FUTEX_PRIVATE = 128
WAKE_ALL = 0x7FFFFFFF
_FUTEX_TID_MASK = 0x3FFFFFFF
_STAT_BYTES = 512
"""Holds what comes before the start: a name of 64 bytes and 20 numbers of at most 20 digits."""
_PROC, _STAT = tuple(b"/proc/"), tuple(b"/stat")
_THREADS_FIELD, _STARTED_FIELD = 17, 19  # num_threads and starttime, counted from the state: 0 (proc_pid_stat(5))
ESRCH = 3
EINTR = 4
EBUSY = 16
ETIMEDOUT = 110
EOWNERDEAD = 130

_I64 = ir.IntType(64)


def _clock(number: int, name: str) -> Any:  # noqa: ANN401 - a Numba intrinsic
    """Make a compiled function that reads one of the kernel's clocks in nanoseconds."""

    @intrinsic
    def clock_ns(_typing: Any) -> Any:  # noqa: ANN401 - Numba types
        def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:  # noqa: ANN401 - LLVM builders
            with builder.goto_entry_block():
                timespec = builder.alloca(ir.ArrayType(_I64, 2))
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), timespec.type])
            builder.call(_function(builder, "clock_gettime", kind), [ir.Constant(ir.IntType(32), number), timespec])
            pair = builder.load(timespec)
            seconds = builder.mul(builder.extract_value(pair, 0), ir.Constant(_I64, 1_000_000_000))
            return builder.add(seconds, builder.extract_value(pair, 1))

        return types.int64(), codegen

    clock_ns.__doc__ = f"Read {name} in nanoseconds."
    return clock_ns


def _function(builder: Any, name: str, kind: Any) -> Any:  # noqa: ANN401 - LLVM builders
    """Return a function of the C library, declared once in a module."""
    known = name in builder.module.globals
    return builder.module.globals[name] if known else ir.Function(builder.module, kind, name)


monotonic_ns = _clock(time.CLOCK_MONOTONIC, "CLOCK_MONOTONIC, the clock of ``time.monotonic_ns``,")


# Reading the counter of an x86-64 processor takes 10 ns where clock_gettime takes 24. It is a clock
# only if its rate never changes and it never stops, which the kernel tells by two flags.
_HAS_STEADY_COUNTER = platform.machine() == "x86_64" and {"constant_tsc", "nonstop_tsc"} <= set(
    Path("/proc/cpuinfo").read_text().partition("\n\n")[0].split()
)


@intrinsic
def _cycle_counter(_typing: Any) -> Any:  # noqa: ANN401 - Numba types

    def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:  # noqa: ANN401 - LLVM builders
        kind = ir.FunctionType(_I64, [])
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", (), kind), [])

    return types.int64(), codegen


@inlined
def ticks() -> int:
    """Read the cheapest steady clock; its unit is found by comparing it with ``monotonic_ns``."""
    return _cycle_counter() if _HAS_STEADY_COUNTER else monotonic_ns()


def _stack(length: int) -> Any:  # noqa: ANN401 - a Numba intrinsic
    """Make a compiled function that returns the address of so many bytes that last until its caller returns."""

    @intrinsic
    def address(_typing: Any) -> Any:  # noqa: ANN401 - Numba types
        def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:  # noqa: ANN401 - LLVM builders
            with builder.goto_entry_block():
                begin = builder.alloca(ir.ArrayType(_I64, -(-length // 8)))
            return builder.ptrtoint(begin, _I64)

        return types.int64(), codegen

    return address


_timespec_room = _stack(16)
_stat_room = _stack(_STAT_BYTES)
_flock_room = _stack(_FLOCK_BYTES)
_try_lock = types.ExternalFunction("pthread_mutex_trylock", types.int32(types.int64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_consistent = types.ExternalFunction("pthread_mutex_consistent", types.int32(types.int64))
_syscall = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64),
)
_errno_location = types.ExternalFunction("__errno_location", types.int64())
_kill = types.ExternalFunction("kill", types.int32(types.int32, types.int32))
_open = types.ExternalFunction("open", types.int32(types.int64, types.int32))
_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
_close = types.ExternalFunction("close", types.int32(types.int32))


@inlined
def mutex_try_lock(address: int) -> int:
    """Lock if nobody is inside.

    Returns:
        0; ``EOWNERDEAD`` when locked and the last owner died inside (then call
        ``mutex_consistent``); ``EBUSY``.
    """
    return _try_lock(address)


# POSIX gives pthread_mutex_timedlock the wall clock. A clock that is set back by an hour in the midst
# of a wait makes it an hour longer. Then a process that is stopped inside holds everybody up.
_CLOCKLOCK = np.zeros(1, np.int64)
_CLOCKLOCK[0] = ctypes.cast(getattr(ctypes.CDLL(None), "pthread_mutex_clocklock", 0), ctypes.c_void_p).value or 0
"""Address of what waits by the monotonic clock; 0 on glibc before 2.30."""
_CLOCKLOCK_SYMBOL = "zico_clocklock"
llvmlite.binding.add_symbol(_CLOCKLOCK_SYMBOL, _CLOCKLOCK.ctypes.data)  # before what refers to it is compiled
_clocklock_address = symbol_address(_CLOCKLOCK_SYMBOL)
_LOOK_AGAIN_NS = 50_000
"""Nanoseconds between two tries where the C library cannot wait, many times what anybody does inside."""


@inlined
def mutex_lock_within(address: int, wait_ns: int) -> int:
    """Lock; waits for so long, by the monotonic clock, while another thread is inside.

    Returns:
        As ``mutex_try_lock``, but ``ETIMEDOUT`` for ``EBUSY``.
    """
    timespec = _timespec_room()
    clocklock = array_at(_clocklock_address(), 1, np.int64)[0]
    until_ns = monotonic_ns() + wait_ns
    if clocklock != 0:
        _set_timespec(timespec, until_ns)
        return int(np.int32(call(clocklock, (address, np.int64(time.CLOCK_MONOTONIC), timespec))))
    _set_timespec(timespec, _LOOK_AGAIN_NS)
    while True:
        code = int(_try_lock(address))
        if code != EBUSY:
            return code
        if monotonic_ns() >= until_ns:
            return ETIMEDOUT
        _syscall(SYS_NANOSLEEP, timespec, 0, 0, 0, 0, 0)


@inlined
def _set_timespec(address: int, duration_ns: int) -> None:
    fields = array_at(address, 2, np.int64)
    fields[0], fields[1] = duration_ns // 1_000_000_000, duration_ns % 1_000_000_000


@inlined
def sleep_for(duration_ns: int) -> None:
    """Sleep for a time, or until a signal comes."""
    timespec = _timespec_room()
    _set_timespec(timespec, duration_ns)
    _syscall(SYS_NANOSLEEP, timespec, 0, 0, 0, 0, 0)


@inlined
def mutex_owner(address: int) -> int:
    """Return the kernel's number of the thread inside a robust mutex, or 0; a glance, without a lock.

    Source: robust mutexes keep it in their futex word, as the kernel's protocol for robust futexes
    demands (Documentation/locking/robust-futex-ABI.rst); glibc's ``pthread_mutex_t`` begins with
    that word.
    """
    return array_at(address, 1, np.int32)[0] & _FUTEX_TID_MASK


@inlined
def mutex_unlock(address: int) -> None:
    """Unlock."""
    _unlock(address)


@inlined
def mutex_consistent(address: int) -> None:
    """Declare the guarded data repaired after ``EOWNERDEAD``."""
    _consistent(address)


@inlined
def futex_wait(word_address: int, expected: int, timespec_address: int) -> bool:
    """Sleep while the shared 32-bit word equals ``expected``, at most for the timespec; may wake for no reason.

    Returns:
        Whether a signal has ended the sleep that this thread has handled.
    """
    failed = _syscall(SYS_FUTEX, word_address, FUTEX_WAIT, expected, timespec_address, 0, 0) == -1
    return failed and array_at(_errno_location(), 1, np.int32)[0] == EINTR


@inlined
def futex_wake_all(word_address: int) -> None:
    """Wake every process that sleeps on the shared 32-bit word."""
    _syscall(SYS_FUTEX, word_address, FUTEX_WAKE, WAKE_ALL, 0, 0, 0)


# A mutex between the threads of one process: 0 free, 1 held, 2 held and waited for. Two inlined
# atomic operations where nobody contends, a third of what a call of pthread_mutex_lock and _unlock
# costs. Source: mutex2 of U. Drepper, "Futexes Are Tricky" (2011), section 6.


@inlined
def private_lock(word_address: int) -> None:
    """Lock a mutex of this process; waits while another thread holds it."""
    if compare_exchange(word_address, 0, 1) != 0:
        _private_lock_contended(word_address)


@compiled
def _private_lock_contended(word_address: int) -> None:
    while exchange(word_address, 2) != 0:
        _syscall(SYS_FUTEX, word_address, FUTEX_WAIT | FUTEX_PRIVATE, 2, 0, 0, 0)


@inlined
def private_unlock(word_address: int) -> None:
    """Unlock a mutex of this process, and wake one thread that waits for it."""
    if exchange(word_address, 0) == 2:  # noqa: PLR2004 - the state explained above
        _syscall(SYS_FUTEX, word_address, FUTEX_WAKE | FUTEX_PRIVATE, 1, 0, 0, 0)


@inlined
def in_main_thread() -> bool:
    """Tell whether the calling thread is its process's first one."""
    return _syscall(_SYS_GETTID, 0, 0, 0, 0, 0, 0) == _syscall(_SYS_GETPID, 0, 0, 0, 0, 0, 0)


@inlined
def send_signal(pid: int, number: int) -> bool:
    """Call ``kill(2)``; tells whether that was possible."""
    return _kill(pid, number) == 0


NO_PROCESS = 0
CANNOT_TELL = -1
STOPPED = ord("T")
"""State of a thread that job control has stopped (SIGSTOP, SIGTSTP)."""
TRACED = ord("t")
"""State of a thread that a debugger has stopped."""
_ZOMBIE, _DEAD, _OLD_DEAD = ord("Z"), ord("X"), ord("x")


@compiled
def state_of(number: int) -> tuple[int, int, int]:
    """Read the state of a process or a thread by its number, in this process's pid namespace.

    Returns:
        The letter of its state, ``NO_PROCESS``, or ``CANNOT_TELL``; how many threads its process
        has; when it started, in clock ticks after the machine's start.

    Source: proc_pid_stat(5).
    """
    keep_out_of_line()
    address = _stat_room()
    text = array_at(address, _STAT_BYTES, np.uint8)
    length = _write_stat_path(text, number)
    text[length] = 0
    descriptor = _open(address, os.O_RDONLY | os.O_CLOEXEC)
    length = -1
    if descriptor >= 0:
        length = _read(descriptor, address, _STAT_BYTES)
        _close(descriptor)
    if length <= 0:  # it has just ended, or no descriptor is left, or there is no /proc
        gone = _kill(number, 0) != 0 and array_at(_errno_location(), 1, np.int32)[0] == ESRCH
        return NO_PROCESS if gone else CANNOT_TELL, 0, 0
    end = length - 1
    while end > 0 and text[end] != ord(")"):  # the name, which is in brackets, may contain brackets
        end -= 1
    return _numbers_behind(text, end + 2, length)


@inlined
def _numbers_behind(text: Any, begin: int, length: int) -> tuple[int, int, int]:  # noqa: ANN401 - an array of bytes
    """Return the state's letter, which is at ``begin``, and the fields behind it that ``state_of`` tells."""
    field = number = threads = 0
    for i in range(begin, length):
        if text[i] == ord(" "):
            if field == _THREADS_FIELD:
                threads = number
            if field == _STARTED_FIELD:
                return int(text[begin]), threads, number
            field += 1
            number = 0
        else:
            number = number * 10 + int(text[i]) - ord("0")
    return CANNOT_TELL, 0, 0


@compiled
def process_is_gone(pid: int, started: int) -> bool:
    """Tell whether a process has ended, by its number and its start as ``state_of`` tells it.

    A process that nobody has reaped has ended, and one that has its number but another start is
    not it. A process lives whose first thread has ended while others run.
    """
    keep_out_of_line()
    letter, threads, since = state_of(pid)
    if letter == CANNOT_TELL:
        return False
    has_ended = letter in (_ZOMBIE, _DEAD, _OLD_DEAD) and threads <= 1
    return letter == NO_PROCESS or has_ended or since != started


@inlined
def thread_is_stopped(thread: int) -> bool:
    """Tell whether job control has stopped a process or a thread; not whether a debugger has."""
    return state_of(thread)[0] == STOPPED


@inlined
def _write_stat_path(text: Any, thread: int) -> int:  # noqa: ANN401 - an array of bytes
    """Write ``/proc/THREAD/stat`` into an array; returns its length."""
    length = 0
    for byte in _PROC:
        text[length] = byte
        length += 1
    scale = 1
    while scale * 10 <= thread:
        scale *= 10
    while scale > 0:
        text[length] = ord("0") + thread // scale % 10
        length += 1
        scale //= 10
    for byte in _STAT:
        text[length] = byte
        length += 1
    return length


@compiled
def file_is_locked(descriptor: int) -> bool:
    """Tell whether another open file of the same file has a lock on its first byte; true where nobody can tell.

    Source: F_OFD_GETLK and struct flock, fcntl(2).
    """
    keep_out_of_line()
    address = _flock_room()
    fields = array_at(address, _FLOCK_BYTES // 8, np.int64)
    fields[:] = 0
    kind = array_at(address, 1, np.int16)
    kind[0] = fcntl.F_WRLCK
    fields[2] = 1  # bytes, from the first one on
    failed = _syscall(_SYS_FCNTL, descriptor, fcntl.F_OFD_GETLK, address, 0, 0, 0) != 0
    return bool(failed or kind[0] != fcntl.F_UNLCK)


@inlined
def write_bytes(descriptor: int, address: int, length: int) -> int:
    """Call ``write(2)``."""
    return _write(descriptor, address, length)


def libc_address(name: str) -> int:
    """Return the address of a function of the C library."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    if address is None:  # pragma: no cover - libc has every name we ask for
        message = f"the C library has no {name}"
        raise LookupError(message)
    return address
