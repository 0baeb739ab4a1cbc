"""A forked child sees its parent's tensors as they were, and shares nothing with the pool (invariant 10).

Theory of operation
    The window is a shared mapping, so copy-on-write does not come by itself. Three compiled
    functions run inside ``fork(2)`` (``pthread_atfork``)::

        parent   lock the heap ........ wait for the child ...... unlock
        child                  copy live slots, leave the pool, unlock, close the pipe

    The forking thread keeps Python's global lock all that time. Python code in between would let
    other threads run: one that allocates with the global lock held would wait for the heap, and the
    heap for the global lock.

Guarantees
    The copies are complete before ``fork`` returns in either process; they are the child's own
    memory, outside the budget. The parent's tensors stand still meanwhile. The child has private
    copies of the pool's table and of the recording, too: nothing that it writes reaches others. The
    child takes no lock that another thread of the parent may hold: not Numba's, not Python's, not
    the heap's.

Known limitations
    A fork that Python does not announce (``os.register_at_fork``) is left alone, since C code that
    forks usually calls ``exec`` next. Without ``exec`` such a child shares its parent's tensors.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import TYPE_CHECKING

import llvmlite.binding
import numpy as np
from numba import types

from zico.base.compiled import array_at, call, callback, compiled, inlined, keep_out_of_line, record_at, symbol_address
from zico.base.libc import monotonic_ns, private_lock, private_unlock
from zico.base.records import I2, I4, I8, Record, dtype_of
from zico.device import host
from zico.device.mapping import address_of
from zico.heap.layout import HEAP, Attached, slot_address, slots_of
from zico.heap.reclaim import this_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.heap.build import Heap
    from zico.heap.layout import HeapRecord

DEADLINE_S = 60.0
"""A parent waits so long for the child's next copied piece, or for its pager; a child that dies ends the wait."""
PIECE_BYTES = 256 << 20
"""So much is copied at a time, in a second or less: the parent is told after each."""

NO_PIPE, NO_PAGER = -1, -2
"""``FORK.failed`` says so where the parent could not get these before it forked; else it is an errno."""


class ForkRecord(Record):
    """What the compiled functions know of this process; one, as there is one heap that hooks serve from."""

    heap_address: I8  # HEAP record, 0: no heap is guarded
    announced: I8  # forks that Python has begun
    thread: I8  # pthread_self of one that forks, 0: none does
    failed: I8  # why the child's copies are not complete: errno, NO_PIPE, NO_PAGER
    reading: I4  # the pipe whose end tells that the child is done, -1: there is none
    writing: I4
    polled: I4  # struct pollfd
    events: I2
    found: I2
    byte: I8  # room for what comes out of the pipe
    table_address: I8  # the pool's table in this process
    table_bytes: I8
    recording_address: I8  # the recording's ring, 0: there is none
    recording_bytes: I8
    # What follows means something only in a paged job (zico.heap.paged): functions, and the pages'
    # whereabouts.
    hold_address: I8
    go_on_address: I8
    copy_address: I8
    states_address: I8
    tickets_address: I8
    memory_fd: I8
    stack_address: I8


FORK = dtype_of(ForkRecord)


_SYMBOL = "zico_process_fork"
_RECORD = np.zeros(1, FORK)  # never freed: handlers cannot be unregistered
llvmlite.binding.add_symbol(_SYMBOL, _RECORD.ctypes.data)
_fork_address = symbol_address(_SYMBOL)

_ATTACHED, _FORKED = int(Attached.YES), int(Attached.FORKED)
_I4, _I64, _VOID = types.int32, types.int64, types.void
_PIPE_AT, _POLLED_AT, _BYTE_AT = (int(FORK.fields[name][1]) for name in ("reading", "polled", "byte"))
_POLLIN = 1
_POLL_MS = 1000
_DEADLINE_NS = int(DEADLINE_S * 1e9)
_FAILED = -1
_CLOEXEC = os.O_CLOEXEC
_EINTR = errno.EINTR
_READ_WRITE, _RESERVED, _FIXED = host.PROT_READ_WRITE, host.RESERVED, host.RESERVED | host.MAP_FIXED
_MOVE_TO = 1 | 2  # MREMAP_MAYMOVE, MREMAP_FIXED
_HUGE_PAGES = 14  # MADV_HUGEPAGE

_pipe2 = types.ExternalFunction("pipe2", _I4(_I64, _I4))
_poll = types.ExternalFunction("poll", _I4(_I64, _I64, _I4))
_read = types.ExternalFunction("read", _I64(_I4, _I64, _I64))
_write = types.ExternalFunction("write", _I64(_I4, _I64, _I64))
_close = types.ExternalFunction("close", _I4(_I4))
_mmap = types.ExternalFunction("mmap", _I64(_I64, _I64, _I4, _I4, _I4, _I64))
_mremap = types.ExternalFunction("mremap", _I64(_I64, _I64, _I64, _I4, _I64))
_madvise = types.ExternalFunction("madvise", _I4(_I64, _I64, _I4))
_memcpy = types.ExternalFunction("memcpy", _I64(_I64, _I64, _I64))
_errno_location = types.ExternalFunction("__errno_location", _I64())


@inlined
def _fork() -> ForkRecord:
    return record_at(_fork_address(), FORK)


@inlined
def _errno() -> int:
    return array_at(_errno_location(), 1, np.int32)[0]


# -- in the parent ---------------------------------------------------------------------------------


@callback(_VOID(_I64))
def _announce(amount: int) -> None:
    """Count a fork that Python begins (1) or has ended (-1)."""
    _fork().announced += amount


@callback(_VOID())
def _prepare() -> None:
    """Let the heap stand still; waits for whoever is inside it, and for the pager of a paged job."""
    fork = _fork()
    if fork.heap_address == 0 or fork.announced <= 0:
        return
    heap = record_at(fork.heap_address, HEAP)
    if heap.attached != _ATTACHED:
        return
    private_lock(heap.mutex_address)
    fork.thread = this_thread()
    fork.failed = 0
    if _pipe2(address_of(fork) + _PIPE_AT, _CLOEXEC) != 0:
        fork.reading = -1
        fork.failed = NO_PIPE
    if fork.hold_address != 0 and call(fork.hold_address, (fork.heap_address, _DEADLINE_NS)) == 0:
        fork.failed = NO_PAGER


@compiled
def _await_end(fork: ForkRecord) -> None:
    """Wait until nobody has the pipe's other end, as long as pieces keep coming."""
    keep_out_of_line()
    fork.polled = fork.reading
    fork.events = _POLLIN
    until_ns = monotonic_ns() + _DEADLINE_NS
    while monotonic_ns() < until_ns:
        fork.found = 0
        _poll(address_of(fork) + _POLLED_AT, 1, _POLL_MS)
        if fork.found != 0:  # else time has passed, or a signal has come
            got = _read(fork.reading, address_of(fork) + _BYTE_AT, 1)
            if got == 0 or (got < 0 and _errno() != _EINTR):
                return
            until_ns = monotonic_ns() + _DEADLINE_NS


@callback(_VOID())
def _in_parent() -> None:
    """Wait until the child has copied, or is dead, then let other threads allocate again."""
    fork = _fork()
    if fork.thread != this_thread():
        return
    if fork.reading >= 0:
        _close(fork.writing)
        _await_end(fork)
        _close(fork.reading)
    if fork.go_on_address != 0:
        call(fork.go_on_address, (fork.heap_address,))
    fork.thread = 0
    private_unlock(record_at(fork.heap_address, HEAP).mutex_address)


# -- in the child ----------------------------------------------------------------------------------


@compiled
def _copy(fork: ForkRecord, address: int, size_bytes: int) -> int:
    """Put a private copy of mapped memory at its address; returns 0 or errno."""
    keep_out_of_line()
    done = 0
    while done < size_bytes:
        length = min(size_bytes - done, PIECE_BYTES)
        copy = _mmap(0, length, _READ_WRITE, _RESERVED, -1, 0)
        if copy == _FAILED:
            return _errno()
        _madvise(copy, length, _HUGE_PAGES)  # a hint: fewer faults while copying
        _memcpy(copy, address + done, length)
        if _mremap(copy, length, length, _MOVE_TO, address + done) == _FAILED:
            return _errno()
        done += length
        _write(fork.writing, address_of(fork), 1)  # any byte: the parent goes on waiting
    return 0


@compiled
def _copy_slots(fork: ForkRecord, heap: HeapRecord) -> int:
    """Copy each run of slots with live tensors; of a paged job only those of the next tier."""
    keep_out_of_line()
    slots = slots_of(heap)
    n_slots = heap.window_bytes >> heap.region_shift
    slot = heap.spill_offset >> heap.region_shift if fork.copy_address != 0 else 0
    while slot < n_slots:
        first = slot
        while slot < n_slots and slots[slot].live > 0:
            slot += 1
        if slot > first:
            status = _copy(fork, slot_address(heap, first), (slot - first) << heap.region_shift)
            if status != 0:
                return status
        slot += 1
    return 0


@compiled
def _leave_pool(fork: ForkRecord, heap: HeapRecord) -> int:
    """Replace everything that is shared with others by private memory; returns 0 or errno."""
    keep_out_of_line()
    status = _copy_slots(fork, heap)
    if status == 0 and fork.copy_address != 0:
        status = call(
            fork.copy_address,
            (
                fork.heap_address,
                fork.states_address,
                fork.tickets_address,
                fork.memory_fd,
                fork.stack_address,
                np.int64(fork.writing),
            ),
        )
    if status == 0:
        status = _copy(fork, fork.table_address, fork.table_bytes)
    if status == 0 and fork.recording_address != 0:
        empty = _mmap(fork.recording_address, fork.recording_bytes, _READ_WRITE, _FIXED, -1, 0)
        status = _errno() if empty == _FAILED else 0
    return status


@callback(_VOID())
def _in_child() -> None:
    """Copy what the parent has, leave the pool, and let the parent go on."""
    fork = _fork()
    fork.announced = 0
    if fork.thread != this_thread():
        return
    heap = record_at(fork.heap_address, HEAP)
    if fork.failed == 0:
        fork.failed = _leave_pool(fork, heap)
    heap.attached = _FORKED
    heap.ring_address = 0
    heap.planning.fd = -1
    heap.swap.fd = -1
    fork.thread = 0
    private_unlock(heap.mutex_address)
    if fork.reading >= 0:
        _close(fork.reading)
        _close(fork.writing)


# -- from Python -----------------------------------------------------------------------------------


@functools.cache
def _announcer() -> Callable[[int], None]:
    """Return what counts a fork, called with Python's global lock held, as ``fork`` is."""
    return ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_announce.address)


def _register() -> None:
    """Let the C library call the three functions; they cannot be unregistered."""
    libc = ctypes.CDLL(None)
    handlers = (ctypes.c_void_p(function.address) for function in (_prepare, _in_parent, _in_child))
    if hasattr(libc, "__register_atfork"):  # glibc links pthread_atfork into each program
        libc["__register_atfork"](*handlers, None)
    else:
        libc.pthread_atfork(*handlers)


class ForkGuard:
    """Makes Python's forks safe for one heap, the last one that was guarded; for the life of the process."""

    def __init__(self, heap: Heap, on_child: Callable[[], None]) -> None:
        """Guard forks from now on; ``on_child`` runs in a child when its copies are made."""
        self._heap = heap
        self._on_child = on_child
        self._has_left = False
        self._announce = _announcer()
        is_first = not _RECORD[0]["heap_address"]
        self._fill()
        if is_first:
            _register()
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._in_child)

    def _fill(self) -> None:
        fork, heap = _RECORD[0], self._heap
        fork["table_address"], fork["table_bytes"] = heap.pool.window.handle, heap.pool.window.size_bytes
        if heap.ring is not None:
            fork["recording_address"], fork["recording_bytes"] = heap.ring.address, heap.ring.size_bytes
        if heap.paged is not None:
            from zico.heap import paged

            for name in ("hold", "go_on", "copy"):
                fork[f"{name}_address"] = getattr(paged, name).address
            for name in ("states_address", "tickets_address"):
                fork[name] = heap.paged.arrays[name]
            fork["memory_fd"] = heap.paged.memory_fd
            fork["stack_address"] = heap.paged.tiers.record.ctypes.data
        fork["heap_address"] = heap.record.ctypes.data

    def _before(self) -> None:
        self._announce(1)

    def _after(self) -> None:
        self._announce(-1)

    def _in_child(self) -> None:
        if self._has_left or self._heap.record[0]["attached"] != Attached.FORKED:
            return
        self._has_left = True
        failed = int(_RECORD[0]["failed"])
        if failed:
            _die(failed)
        if self._heap.paged is not None:
            self._heap.paged.close_in_child()
        self._on_child()


def _die(failed: int) -> None:
    """End a child that would otherwise write into its parent's tensors."""
    reasons = {
        NO_PIPE: "the parent could not make a pipe: raise its limit on open files (ulimit -n)",
        NO_PAGER: f"the pager did not stand still within {DEADLINE_S:g} s",
    }
    reason = reasons.get(failed) or f"no private copy of the parent's tensors: {os.strerror(failed)}"
    os.write(2, f"zico: forked process {os.getpid()} ends: {reason}\n".encode())
    os._exit(1)
