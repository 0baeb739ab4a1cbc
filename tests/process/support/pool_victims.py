"""Jobs and brokers killed at chosen instructions inside the pool's operations (``single_steps.py``).

With 5000 trials every instruction is tried, in about a minute and a half.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.members import (
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
from process.support import single_steps
from process.support.single_steps import stop_here

from zico.base.compiled import entry
from zico.pool import boundaries, deaths, regions, waits
from zico.pool.fences import fence_of
from zico.pool.layout import MEMBER, NOBODY, JobState, header_of, pair_of

if TYPE_CHECKING:
    from zico.pool.table import PoolTable

Record = Any
DEADLINE_S = 600
N_REGIONS = 8

# Each operation between two signals that stop the process, or none if ``stop`` is 0. ``array`` has
# room for regions.


@entry(MEMBER, [np.int32], int, int)
def take(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Acquire three regions."""
    stop_here(stop)
    regions.acquire(pool, array, 3, regions.HOST_SLOT)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def give(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Release two regions."""
    stop_here(stop)
    regions.release(pool, array, 2)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def give_unused(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Give two regions back that had no pages, as a pager does."""
    stop_here(stop)
    regions.give_back_unused(pool, array, 2)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def guard(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Release two regions with a fence."""
    stop_here(stop)
    regions.give_back(pool, array, 2, fence_of(pair_of(pool.job, 0), 1))
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def come_back(pool: Record, array: Record, _other: int, stop: int) -> None:
    """Acquire three regions for what was evicted."""
    stop_here(stop)
    regions.take_back(pool, array, 3)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def beg(pool: Record, _array: Record, _other: int, stop: int) -> None:
    """Ask blocked jobs to evict."""
    stop_here(stop)
    waits.ask_to_evict(pool, header_of(pool).sequence)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def finish(pool: Record, _array: Record, _other: int, stop: int) -> None:
    """End an iteration."""
    stop_here(stop)
    boundaries.finish_iteration(pool, 0)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def wait(pool: Record, _array: Record, _other: int, stop: int) -> None:
    """Begin to wait and stop."""
    stop_here(stop)
    waits.start_waiting(pool, 2)
    waits.stop_waiting(pool)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def admit(pool: Record, _array: Record, other: int, stop: int) -> None:
    """Do the broker's work: admit a job."""
    stop_here(stop)
    boundaries.admit(pool, other)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def leave(pool: Record, _array: Record, other: int, stop: int) -> None:
    """Do the broker's work: let a job leave."""
    stop_here(stop)
    deaths.leave(pool, other)
    stop_here(stop)


@entry(MEMBER, [np.int32], int, int)
def bury(pool: Record, _array: Record, other: int, stop: int) -> None:
    """Do the broker's work: reap a job."""
    stop_here(stop)
    deaths.reap(pool, other, 0)
    stop_here(stop)


OPERATIONS = {f.__name__: f for f in (take, give, give_unused, guard, come_back, beg, finish, wait, admit, leave, bury)}
OF_THE_BROKER = ("admit", "leave", "bury")


class Trial(single_steps.Trial):
    """A pool with a victim that holds three regions, another job that holds two, and one at its boundary."""

    def __init__(self, operation: str) -> None:
        """Make it."""
        super().__init__()
        self.operation = operation
        self.pool = self.stack.enter_context(make_pool(N_REGIONS, unasked=False))
        self.victim, self.other, self.third = (self._join() for _ in range(3))
        for member, n in ((self.victim, 3), (self.other, 2), (self.third, 1)):
            grab(member, n)
            self.pool.header["alone_job"] = NOBODY
        given = [r for r, owner in enumerate(owners(self.pool)) if owner == job_of(self.victim)]
        release(self.victim, given[:1])  # so that a region in the list has had an owner
        grab(self.victim, 1)
        boundaries.finish_iteration(self.third.member[0], 0)
        mine = [r for r, owner in enumerate(owners(self.pool)) if owner == job_of(self.victim)]
        self.array = np.array(mine if operation in ("give", "give_unused", "guard") else [NOBODY, NOBODY, 0], "i4")
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
        if select.select([self.pool.notify_fd], [], [], 0)[0]:  # as the broker does: it looks only when it is told to
            self.pool.take_notice()
        release(self.other, list(kept))
        if header["boundary_waiters"]:
            assert len(os.read(self.pool.notify_fd, 64)) == 8
        grab(self.other, N_REGIONS - int(header["granted"]))
        assert free_list(self.pool) == []
        self.left = {"recoveries": int(header["recoveries"])}


if __name__ == "__main__":
    single_steps.main(Trial, OPERATIONS, DEADLINE_S)
