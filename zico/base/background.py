"""Threads of ours come to rest before the interpreter ends.

A thread that wants the GIL while the interpreter ends is ended by unwinding its stack. Where that
passes a destructor of C++, such as NumPy's that takes the GIL back, the process aborts. It says
"terminate called without an active exception" (PyTorch, issue 38228). So a thread that plans works
under a lock, which the end of the interpreter takes and keeps.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

PATIENCE_S = 5.0
"""Most time that the interpreter's end waits for all such threads."""

_locks: list[threading.Lock] = []
_ending = threading.Event()


def work_lock() -> threading.Lock:
    """Return a lock under which a background thread works; the end of the interpreter waits for it, and keeps it.

    Who asks for one has it for as long as the process lives.
    """
    lock = threading.Lock()
    _locks.append(lock)
    return lock


def is_ending() -> bool:
    """Tell whether the interpreter's end has begun: who works under such a lock should come to an end."""
    return _ending.is_set()


def _come_to_rest() -> None:
    _ending.set()
    end_s = time.monotonic() + PATIENCE_S
    for lock in _locks:
        lock.acquire(timeout=max(0.0, end_s - time.monotonic()))


atexit.register(_come_to_rest)
os.register_at_fork(after_in_child=_locks.clear)  # a child has none of the threads
