"""Forks at two chosen moments: while a thread is inside the heap, and while one wants to come in.

Handlers of ours run between those of the heap's guard, since they are registered before them: after
the guard has prepared the fork, and in the child before anything is copied. In the child they call
the C library with Python's global lock held: nobody else is there who would ever release it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from zico.base.compiled import array_at, compiled
from zico.base.libc import private_lock, private_unlock
from zico.heap import fork
from zico.heap.fork import ForkGuard

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.heap.build import Heap

Record = Any
READY, INSIDE, FORKS, CAME_IN, WRONG = range(5)
WAITED_FOR = 2  # of a mutex: it is held, and somebody waits
LOOK_US = 100
LOOKS = 100_000
DEADLINE_S = LOOKS * LOOK_US * 1e-6
FINE, SOMEBODY_INSIDE, NOBODY_CAME = range(3)

_words = np.zeros(5, np.int64)
_usleep = types.ExternalFunction("usleep", types.int32(types.int32))
_kept: list[object] = []
"""Handlers cannot be unregistered."""


@compiled
def be_inside(heap: Record, words: Record) -> None:
    """Be in the heap's critical section until somebody waits for it, or a fork has been prepared nevertheless."""
    private_lock(heap.mutex_address)
    words[INSIDE] = words[READY] = 1
    for _ in range(LOOKS):
        if array_at(heap.mutex_address, 1, np.int32)[0] == WAITED_FOR or words[FORKS] != 0:
            break
        _usleep(LOOK_US)
    words[INSIDE] = 0
    private_unlock(heap.mutex_address)


@compiled
def come_in(heap: Record, words: Record) -> None:
    """Enter the heap's critical section when a fork has been prepared."""
    words[READY] = 1
    for _ in range(LOOKS):
        if words[FORKS] != 0:
            break
        _usleep(LOOK_US)
    private_lock(heap.mutex_address)
    words[CAME_IN] = 1
    private_unlock(heap.mutex_address)


def load(heap: Heap) -> None:
    """Load or compile what threads do here."""
    words = np.zeros_like(_words)
    words[FORKS] = 1
    be_inside(heap.record[0], words)
    come_in(heap.record[0], words)


def fork_beside_threads(heap: Heap, on_child: Callable[[], None]) -> list[int]:
    """Guard a heap and fork at both moments, once in a process; returns ``FINE`` or what was wrong, for each."""
    _watch(heap)
    ForkGuard(heap, on_child)
    heap.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return [_fork_beside(work, heap) for work in (be_inside, come_in)]


def _watch(heap: Heap) -> None:
    """Register the handlers."""
    python = ctypes.PyDLL(None)  # which keeps the global lock
    memory = os.open("/proc/self/mem", os.O_RDONLY)  # the parent's, in a child too

    def of_parent(address: int, kind: type[ctypes.c_int32 | ctypes.c_int64]) -> int:
        found = kind()
        python.pread(memory, ctypes.byref(found), ctypes.sizeof(found), ctypes.c_int64(address))
        return int(found.value)

    came_in = int(_words[CAME_IN:].ctypes.data)
    mutex = int(heap.record[0]["mutex_address"])
    polled = fork._RECORD.ctypes.data + fork.FORK.fields["polled"][1]  # type: ignore[index]

    def when_prepared() -> None:
        _words[WRONG] = SOMEBODY_INSIDE if _words[INSIDE] else FINE
        _words[FORKS] = 1

    def before_copying() -> None:
        """Wait until the parent waits for this child, and the thread that wants to come in has tried to."""
        if _words[WRONG] or not _words[READY]:  # it is known, or the fork is somebody else's, as one to compile
            return
        for _ in range(LOOKS):
            tried = of_parent(mutex, ctypes.c_int32) == WAITED_FOR and of_parent(polled, ctypes.c_int32)
            if of_parent(came_in, ctypes.c_int64):
                _words[WRONG] = SOMEBODY_INSIDE
                return
            if tried:
                return
            python.usleep(LOOK_US)
        _words[WRONG] = NOBODY_CAME

    handler = ctypes.CFUNCTYPE(None)
    prepare, child = handler(when_prepared), handler(before_copying)
    _kept.extend((prepare, child))
    assert python["__register_atfork"](prepare, None, child, None) == 0


def _fork_beside(work: Callable[[Record, Record], None], heap: Heap) -> int:
    """Fork while a thread does its work; returns what the child has found."""
    _words[:] = 0
    fork._RECORD[0]["polled"] = 0
    thread = threading.Thread(target=work, args=(heap.record[0], _words), daemon=True)
    thread.start()
    end_s = time.monotonic() + DEADLINE_S
    while not _words[READY]:
        assert time.monotonic() < end_s, "the thread does not begin"
        thread.join(0.001)
    pid = os.fork()
    if pid == 0:
        os._exit(int(_words[WRONG]))
    found = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "nobody lets the thread in"
    return found
