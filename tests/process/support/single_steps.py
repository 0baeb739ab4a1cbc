"""Children that are killed at chosen machine instructions: forked, run by single steps of ptrace(2), killed there.

For ``pool_victims.py``, a process of its own with one thread: ``SCRIPT TRIALS [OPERATION ...]``.
The instructions are spread over the whole operation, which stands between two ``stop_here``. Prints
a line of JSON for each operation.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from zico.base.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Record = Any
NO_PTRACE = "no ptrace"
_PTRACE_TRACEME = 0
_PTRACE_SINGLESTEP = 9
_STOPPED_BY_STEP = signal.SIGTRAP << 8 | 0x7F
_MOST_INSTRUCTIONS = 1 << 22

_libc = ctypes.CDLL(None, use_errno=True)
stop_here = types.ExternalFunction("raise", types.int32(types.int32))
"""For compiled operations: raise a signal, or none if it is 0."""
_ptrace = types.ExternalFunction("ptrace", types.int64(types.int64, types.int64, types.int64, types.int64))
_waitpid = types.ExternalFunction("waitpid", types.int32(types.int32, types.int64, types.int32))


class Trial(abc.ABC):
    """Something shared, and a victim that does one operation on it."""

    def __init__(self) -> None:
        """Have nothing to undo yet."""
        self.stack = contextlib.ExitStack()
        self.left: dict[str, int] = {}
        """What ``check`` counted of what the victim left."""

    @abc.abstractmethod
    def run(self, stop: int) -> None:
        """Do the operation between two ``stop_here(stop)``."""

    @abc.abstractmethod
    def check(self) -> None:
        """Assert that what the victim left is as it must be."""

    def start(self) -> int:
        """Fork a victim that stops right before the operation."""
        pid = os.fork()
        if pid == 0:
            if _libc.ptrace(_PTRACE_TRACEME, 0, None, None) == 0:
                self.run(int(signal.SIGSTOP))
            os._exit(3)
        return pid


@compiled
def _step(pid: int, most: int, status: Record) -> int:
    """Step a stopped child at most so often; returns how many steps it took until something else stopped it."""
    for i in range(most):
        if _ptrace(_PTRACE_SINGLESTEP, pid, 0, 0) != 0:
            return -1
        _waitpid(pid, status.ctypes.data, 0)
        if status[0] != _STOPPED_BY_STEP:
            return i
    return most


def _killed_after(trial: Trial, most: int) -> int:
    """Let a victim do so many instructions and kill it; returns how many it did before it came to the end.

    Raises:
        SystemExit: This system does not let a process trace its children.
    """
    status = np.zeros(1, "i4")
    pid = trial.start()
    _, stopped = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(stopped):
        raise SystemExit(NO_PTRACE)
    done = int(_step(pid, most, status))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if done < 0:
        raise SystemExit(NO_PTRACE)
    return done


def _kill_all_along(make: Callable[[], Trial], trials: int) -> dict[str, Any]:
    """Kill as many victims; returns what was done, or the fault that was found."""
    warm = make()
    with warm.stack:
        warm.run(0)
    whole = make()
    with whole.stack:
        length = _killed_after(whole, _MOST_INSTRUCTIONS)
        whole.check()
    left: collections.Counter[str] = collections.Counter()
    for at in np.unique(np.linspace(0, length - 1, trials).astype(int)).tolist():
        trial = make()
        with trial.stack:
            _killed_after(trial, at)
            try:
                trial.check()
            except (AssertionError, OSError):
                where = f"killed after {at} of {length} instructions, {trial.left}"
                return {"fault": f"{where}: {traceback.format_exc()}"}
            left.update(trial.left)
    return {"fault": None, "instructions": length, "left": left}


def main(make: Callable[[str], Trial], operations: Iterable[str], deadline_s: int) -> None:
    """Do the operations that the command line names, or all.

    Args:
        make: Makes a trial of an operation.
        operations: All of them.
        deadline_s: When this process is killed, whatever it does.
    """
    trials, names = int(sys.argv[1]), sys.argv[2:]
    signal.alarm(deadline_s)
    _step(0, 0, np.zeros(1, "i4"))  # compiled before anybody is stopped
    for name in names or operations:
        found = _kill_all_along(lambda name=name: make(name), trials)  # type: ignore[misc]
        print(json.dumps({"operation": name, **found}), flush=True)  # noqa: T201 - the test reads it
