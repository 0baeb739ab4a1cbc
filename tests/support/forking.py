"""Forks at two chosen moments: while a thread is inside the heap, and while one wants to come in.

Handlers of ours run between those of the heap's guard, since they are registered before them: after
the guard has prepared the fork, and in the child before anything is copied. They are compiled:
Python code in a child gives up the global lock if a thread of the parent asked for it just before
the fork, and nobody is there who would ever hand it back.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import llvmlite.binding
import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, compiled, symbol_address
from zico.base.libc import private_lock, private_unlock
from zico.heap import fork
from zico.heap.fork import ForkGuard

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.heap.build import Heap

Record = Any
N_WORDS = 9
READY, INSIDE, FORKS, CAME_IN, WRONG, MUTEX_AT, POLLED_AT, MEMORY_FD, FOUND = range(N_WORDS)
WAITED_FOR = 2  # of a mutex: it is held, and somebody waits
LOOK_US = 100
LOOKS = 100_000
DEADLINE_S = LOOKS * LOOK_US * 1e-6
FINE, SOMEBODY_INSIDE, NOBODY_CAME = range(3)

_SYMBOL = "zico_test_forking"
_words = np.zeros(N_WORDS, np.int64)
llvmlite.binding.add_symbol(_SYMBOL, _words.ctypes.data)
_words_address = symbol_address(_SYMBOL)
_usleep = types.ExternalFunction("usleep", types.int32(types.int32))
_pread = types.ExternalFunction("pread", types.int64(types.int64, types.int64, types.int64, types.int64))


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


@callback(types.void())
def _when_prepared() -> None:
    """Tell whether somebody is inside now that the fork is prepared."""
    words = array_at(_words_address(), N_WORDS, np.int64)
    words[WRONG] = SOMEBODY_INSIDE if words[INSIDE] != 0 else FINE
    words[FORKS] = 1


@compiled
def _of_parent(words: Record, address: int) -> int:
    words[FOUND] = 0
    _pread(words[MEMORY_FD], _words_address() + 8 * FOUND, 4, address)
    return words[FOUND]


@callback(types.void())
def _before_copying() -> None:
    """Wait until the parent waits for this child, and the thread that wants to come in has tried to."""
    words = array_at(_words_address(), N_WORDS, np.int64)
    if words[WRONG] != 0 or words[READY] == 0:  # it is known, or the fork is somebody else's, as one to compile
        return
    for _ in range(LOOKS):
        tried = _of_parent(words, words[MUTEX_AT]) == WAITED_FOR and _of_parent(words, words[POLLED_AT]) != 0
        if _of_parent(words, _words_address() + 8 * CAME_IN) != 0:
            words[WRONG] = SOMEBODY_INSIDE
            return
        if tried:
            return
        _usleep(LOOK_US)
    words[WRONG] = NOBODY_CAME


def load(heap: Heap) -> None:
    """Load or compile what threads do here."""
    words = np.zeros_like(_words)
    words[FORKS] = 1
    be_inside(heap.record[0], words)
    come_in(heap.record[0], words)
    assert _when_prepared.address
    assert _before_copying.address


def fork_beside_threads(heap: Heap, on_child: Callable[[], None]) -> list[int]:
    """Guard a heap and fork at both moments, once in a process; returns ``FINE`` or what was wrong, for each."""
    _watch(heap)
    ForkGuard(heap, on_child)
    heap.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.setswitchinterval(1e-5)  # a thread that has come out asks for Python's lock while the process forks
    return [_fork_beside(work, heap) for work in (be_inside, come_in)]


def _watch(heap: Heap) -> None:
    """Register the handlers."""
    _words[MUTEX_AT] = heap.record[0]["mutex_address"]
    _words[POLLED_AT] = fork._RECORD.ctypes.data + fork.FORK.fields["polled"][1]  # type: ignore[index]
    _words[MEMORY_FD] = os.open("/proc/self/mem", os.O_RDONLY)  # the parent's, in a child too
    handlers = (ctypes.c_void_p(_when_prepared.address), None, ctypes.c_void_p(_before_copying.address), None)
    assert ctypes.CDLL(None)["__register_atfork"](*handlers) == 0


def _fork_beside(work: Callable[[Record, Record], None], heap: Heap) -> int:
    """Fork while a thread does its work; returns what the child has found."""
    _words[:MUTEX_AT] = 0
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
