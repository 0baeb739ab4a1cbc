"""A process of its own that kills its children at chosen instructions inside the pool's operations.

Run as a script: ``pool_victims.py TRIALS [OPERATION ...]``; with 5000 trials every instruction is tried, in about a
minute and a half. Each trial forks a victim (this process has one thread), lets it
run one operation of the pool to a chosen machine instruction by single steps of ptrace(2), kills it there, and then
checks what it left. The chosen instructions are spread over the whole operation. Prints a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

sys.path.append(str(Path(__file__).parents[1] / "cpu"))  # run as a script, outside pytest

from members import (
    check_counters,
    counters,
    fence,
    free_list,
    grab,
    issued,
    job_of,
    join,
    make_pool,
    owners,
    release,
)

from zico.compiled import compiled
from zico.pool import regions, reserve, waiting
from zico.pool.fences import fence_of, pair_of
from zico.pool.layout import NOBODY, JobState
from zico.pool.shared import header_of

if TYPE_CHECKING:
    from zico.pool.table import PoolTable

Record = Any
DEADLINE_S = 600
N_REGIONS = 8
PTRACE_TRACEME = 0
PTRACE_SINGLESTEP = 9
NO_PTRACE = "no ptrace"
_STATUS_BYTES = 4
_STOPPED_BY_STEP = signal.SIGTRAP << 8 | 0x7F

_libc = ctypes.CDLL(None, use_errno=True)
_raise = types.ExternalFunction("raise", types.int32(types.int32))
_ptrace = types.ExternalFunction("ptrace", types.int64(types.int64, types.int64, types.int64, types.int64))
_waitpid = types.ExternalFunction("waitpid", types.int32(types.int32, types.int64, types.int32))


@compiled
def step(pid: int, most: int, status: Record) -> int:
    """Step a stopped child at most so often; returns how many steps it took until something else stopped it."""
    for i in range(most):
        if _ptrace(PTRACE_SINGLESTEP, pid, 0, 0) != 0:
            return -1
        _waitpid(pid, status.ctypes.data, 0)
        if status[0] != _STOPPED_BY_STEP:
            return i
    return most


# Each operation between two signals that stop the process, or none if ``stop`` is 0. ``array`` has room for regions.


@compiled
def take(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Acquire three regions."""
    _raise(stop)
    regions.try_acquire(pool, array, 3)
    _raise(stop)


@compiled
def give(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Release two regions."""
    _raise(stop)
    regions.release(pool, array, 2)
    _raise(stop)


@compiled
def guard(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Release two regions with a fence."""
    _raise(stop)
    regions.give_back(pool, array, 2, fence_of(pair_of(pool.job, 0), 1))
    _raise(stop)


@compiled
def come_back(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Acquire three regions for what was evicted."""
    _raise(stop)
    regions.take_back(pool, array, 3)
    _raise(stop)


@compiled
def beg(pool: Record, _array: Record, _other: int, stop: int) -> None:
    """Ask blocked jobs to evict."""
    _raise(stop)
    reserve.ask(pool, header_of(pool).sequence)
    _raise(stop)


@compiled
def finish(pool: Record, _array: Record, _other: int, stop: int) -> None:
    """End an iteration."""
    _raise(stop)
    waiting.finish_iteration(pool)
    _raise(stop)


@compiled
def wait(pool: Record, _array: Record, _other: int, stop: int) -> None:
    """Begin to wait and stop."""
    _raise(stop)
    waiting.start_waiting(pool, 2)
    waiting.stop_waiting(pool)
    _raise(stop)


@compiled
def admit(pool: Record, _array: Record, other: int, stop: int) -> None:
    """Do the broker's work: admit a job."""
    _raise(stop)
    waiting.admit(pool, other)
    _raise(stop)


@compiled
def leave(pool: Record, _array: Record, other: int, stop: int) -> None:
    """Do the broker's work: let a job leave."""
    _raise(stop)
    waiting.leave(pool, other)
    _raise(stop)


@compiled
def bury(pool: Record, _array: Record, other: int, stop: int) -> None:
    """Do the broker's work: reap a job."""
    _raise(stop)
    waiting.reap(pool, other)
    _raise(stop)


OPERATIONS = {f.__name__: f for f in (take, give, guard, come_back, beg, finish, wait, admit, leave, bury)}
OF_THE_BROKER = ("admit", "leave", "bury")


class Trial:
    """A pool with a victim that holds three regions, another job that holds two, and one at its boundary."""

    def __init__(self, operation: str) -> None:
        """Make it."""
        self.operation = operation
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(make_pool(N_REGIONS, unasked=False))
        self.victim, self.other, self.third = (self._join() for _ in range(3))
        for member, n in ((self.victim, 3), (self.other, 2), (self.third, 1)):
            grab(member, n)
            self.pool.header["alone_job"] = NOBODY
        given = [r for r, owner in enumerate(owners(self.pool)) if owner == job_of(self.victim)]
        release(self.victim, given[:1])  # so that a region in the list has had an owner
        grab(self.victim, 1)
        waiting.finish_iteration(self.third.member[0])
        mine = [r for r, owner in enumerate(owners(self.pool)) if owner == job_of(self.victim)]
        self.array = np.array(mine if operation in ("give", "guard") else [NOBODY, NOBODY, 0], "i4")
        if operation == "guard":  # got behind a fence that has not passed
            self.word = fence(job_of(self.other), 0, 5)
            issued(self.pool)[job_of(self.other), 0] = 5
            self.pool.regions["fence"][mine] = self.word
        issued(self.pool)[job_of(self.third), 0] = 3
        self.pool.header["alone_job"] = NOBODY

    def _join(self) -> PoolTable:
        return self.stack.enter_context(join(self.pool))

    def run(self, stop: int) -> None:
        """Do the operation, as the victim or as the broker."""
        actor = self.pool if self.operation in OF_THE_BROKER else self.victim
        OPERATIONS[self.operation](actor.member[0], self.array, job_of(self.third), stop)

    def start(self) -> int:
        """Fork a victim that stops right before the operation."""
        pid = os.fork()
        if pid == 0:
            if _libc.ptrace(PTRACE_TRACEME, 0, None, None) == 0:
                self.run(signal.SIGSTOP)
            os._exit(3)
        return pid

    def check(self) -> None:
        """Invariant 5: what the others hold is as it was, everything else is free again, and they go on."""
        kept = {r: owner for r, owner in enumerate(owners(self.pool)) if owner == job_of(self.other)}
        assert len(kept) == 2
        self.pool.snapshot()  # enters the mutex
        check_counters(self.pool) if self.operation != "bury" else free_list(self.pool)
        header, jobs = self.pool.header, self.pool.jobs
        assert header["boundary_waiters"] == (jobs["state"] == JobState.BOUNDARY).sum()
        assert header["waiters"] == jobs["waiting_threads"].sum()
        if self.operation in OF_THE_BROKER:
            self.pool.reap(job_of(self.third))
        self.pool.reap(job_of(self.victim))
        check_counters(self.pool)
        if self.operation == "guard":
            assert (self.pool.regions["fence"][self.array] == self.word).all()
            assert (self.pool.regions["before"] == 0).all()
        if jobs["state"][job_of(self.third)] == JobState.EMPTY:
            assert counters(self.pool)[job_of(self.third), 0] == 3, "a stream waits for the dead"
        for r, owner in kept.items():
            assert self.pool.regions[r]["owner"] == owner
        left = [job for job in (self.other, self.third) if self.pool.jobs[job_of(job)]["state"] != JobState.EMPTY]
        assert header["granted"] == sum(int(self.pool.jobs[job_of(job)]["held"]) for job in left)
        assert header["waiters"] == 0
        with contextlib.suppress(BlockingIOError):  # as the broker does, which looks only when it is told to
            os.eventfd_read(self.pool.notify_fd)
            self.pool.clear_notified()
        release(self.other, list(kept))
        if header["boundary_waiters"]:
            assert os.eventfd_read(self.pool.notify_fd) == 1
        grab(self.other, N_REGIONS - int(header["granted"]))
        assert free_list(self.pool) == []


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def length_of(operation: str, status: Record) -> int:
    """Return how many instructions the operation takes."""
    trial = Trial(operation)
    with trial.stack:
        pid = trial.start()
        _, stopped = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(stopped):
            raise SystemExit(NO_PTRACE)
        n = int(step(pid, 1 << 20, status))
        _kill(pid)
        if n < 0:
            raise SystemExit(NO_PTRACE)
        trial.check()
        return n


def kill_all_along(operation: str, trials: int) -> dict[str, Any]:
    """Kill as many victims; returns what was done, or the fault that was found."""
    warm = Trial(operation)
    with warm.stack:
        warm.run(0)
    status = np.zeros(1, "i4")
    step(0, 0, status)
    length = length_of(operation, status)
    recoveries = 0
    for at in np.unique(np.linspace(0, length - 1, trials).astype(int)).tolist():
        trial = Trial(operation)
        with trial.stack:
            pid = trial.start()
            os.waitpid(pid, 0)
            step(pid, at, status)
            _kill(pid)
            try:
                trial.check()
            except (AssertionError, OSError):
                return {"fault": f"killed after {at} of {length} instructions: {traceback.format_exc()}"}
            recoveries += int(trial.pool.header["recoveries"])
    return {"fault": None, "instructions": length, "recoveries": recoveries}


def main(trials: int, names: list[str]) -> None:
    """Do the named operations, or all."""
    signal.alarm(DEADLINE_S)
    for name in names or OPERATIONS:
        print(json.dumps({"operation": name, **kill_all_along(name, trials)}), flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
