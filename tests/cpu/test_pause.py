"""A paused job ends its iteration and begins no other, and nobody waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

import pytest
from cpu.support.members import Tenant, check_counters, give_profile, grab, job_of, joined, make_pool, tenants
from cpu.support.threads import DEADLINE_S, in_thread, until

from zico.broker.admission import admit_all
from zico.broker.views import ProfileCache, pool_view
from zico.heap import allocator
from zico.pool import boundaries, mutex, results
from zico.pool.layout import JobState
from zico.pool.table import PoolTable
from zico.scheduler.policies import REAL, policy_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.scheduler.state import PoolView

WAITED = ("boundary_waited_ns", "boundary_since_ns", "waits_for")


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of ten regions in which jobs start unasked where everything fits."""
    with make_pool(10) as pool:
        yield pool


def end(member: PoolTable) -> bool:
    """End an iteration; tells whether the next one has begun."""
    return bool(boundaries.finish_iteration(member.member[0], 0))


def view_of(pool: PoolTable) -> PoolView:
    """Return what a policy sees of a pool now."""
    header, jobs = pool.snapshot()
    return pool_view(header, jobs, time.monotonic_ns(), ProfileCache())


# -- the pool --------------------------------------------------------------------------------------


def test_a_paused_job_ends_its_iteration_and_begins_no_other(pool: PoolTable) -> None:
    """Neither by itself nor when somebody admits it, until it is resumed; it does not count as waiting."""
    with joined(pool, 2) as (a, b):
        record = pool.jobs[job_of(a)]
        assert end(a)
        pool.pause(job_of(a), move=False)
        assert record["state"] == JobState.RUNNING
        assert not end(a)
        assert not pool.admit(job_of(a))
        assert (record["state"], pool.header["boundary_waiters"]) == (JobState.BOUNDARY, 0)
        assert end(b)
        pool.resume(job_of(a))
        assert pool.header["boundary_waiters"] == 1
        assert pool.admit(job_of(a))
        assert (record["state"], pool.header["boundary_waiters"]) == (JobState.RUNNING, 0)


def test_a_pause_is_no_wait(pool: PoolTable) -> None:
    """A job that waits at its boundary waits no longer when it is paused, and begins to wait when it is resumed."""
    with joined(pool, 1) as (a,):
        pool.header["self_admit"] = 0
        record = pool.jobs[job_of(a)]
        assert not end(a)
        record["boundary_since_ns"] -= 10**12
        record["waits_for"] = 2
        pool.pause(job_of(a), move=False)
        waited_ns, *rest = (int(record[name]) for name in WAITED)
        assert waited_ns > 10**12
        assert rest == [0, 0]
        pool.pause(job_of(a), move=True)
        before_ns = time.monotonic_ns()
        pool.resume(job_of(a))
        assert (record["boundary_waited_ns"], record["boundary_since_ns"] >= before_ns) == (waited_ns, True)
        assert pool.admit(job_of(a))
        assert record["boundary_waited_ns"] < waited_ns + DEADLINE_S * 10**9


@pytest.mark.parametrize("end_of", [PoolTable.mark_leaving, PoolTable.reap, PoolTable.bury])
def test_a_paused_job_that_goes_leaves_no_count_behind(
    pool: PoolTable, end_of: Callable[[PoolTable, int], object]
) -> None:
    """Nobody counts it as waiting at its boundary, whether it leaves or dies there, nor once the table was repaired."""
    with joined(pool, 2) as (a, b):
        pool.pause(job_of(a), move=False)
        pool.pause(job_of(b), move=False)
        assert not end(a)
        mutex.recover(pool.member[0])
        assert pool.header["boundary_waiters"] == 0
        end_of(pool, job_of(a))
        assert pool.header["boundary_waiters"] == 0


def test_a_paused_job_goes_on_without_a_broker(pool: PoolTable) -> None:
    """Nobody could resume it any more."""
    with joined(pool, 1) as (a,):
        pool.pause(job_of(a), move=False)
        assert not end(a)
        assert boundaries.await_admission(a.member[0]) == results.STAYS
        pool.resign()
        assert boundaries.await_admission(a.member[0]) == results.ADMITTED
        assert pool.jobs[job_of(a)]["state"] == JobState.RUNNING


def test_a_group_comes_to_its_boundary_as_a_whole(pool: PoolTable) -> None:
    """A rank that others may wait for in a collective starts although it is paused; at the same round all stay."""
    with joined(pool, 2) as (a, b):
        for rank in (a, b):
            rank.join_group(7)
        pool.pause(job_of(b), move=False)
        assert not end(b)
        assert not pool.admit(job_of(b))
        pool.jobs[job_of(a)]["round"] = 1
        assert pool.admit(job_of(b)), "a is in a later round"
        assert not end(a)
        assert not end(b)
        assert not pool.admit(job_of(a)), "a rank is paused, and so is its group"
        assert view_of(pool).jobs == ()
        pool.resume(job_of(b))
        assert pool.admit(job_of(a))
        assert [pool.jobs[job_of(rank)]["state"] for rank in (a, b)] == [JobState.RUNNING] * 2


# -- the others ------------------------------------------------------------------------------------


def test_policies_see_no_paused_job_and_a_smaller_budget(pool: PoolTable) -> None:
    """It is seen until its iteration ends; what it keeps at its boundary is nobody's, unless it gives that way."""
    with joined(pool, 2) as (a, b):
        grab(a, 3)
        pool.pause(job_of(a), move=False)
        assert [job.job for job in view_of(pool).jobs] == [job_of(a), job_of(b)]
        assert not end(a)
        view = view_of(pool)
        assert ([job.job for job in view.jobs], view.budget) == ([job_of(b)], 7)
        pool.header["crowded"] = 1
        assert view_of(pool).budget == 10


@pytest.mark.parametrize("policy", REAL)
def test_nobody_waits_for_a_paused_job(pool: PoolTable, policy: str) -> None:
    """A job starts under every policy although one is paused that is more urgent, and whose memory it would need."""
    with joined(pool, 2) as (a, b):
        pool.header["self_admit"] = 0
        grab(a, 6)
        for member, levels in ((a, [6, 8]), (b, [1, 7])):
            give_profile(pool.jobs[job_of(member)], levels)
        pool.pause(job_of(a), move=False)
        assert not end(a)
        assert not end(b)
        pool.header["crowded"] = 0  # as on a GPU, where nobody gives way
        view = view_of(pool)
        urgent = tuple(dataclasses.replace(job, priority=int(job.job == job_of(a))) for job in view.jobs)
        admit_all(pool, policy_named(policy), dataclasses.replace(view, jobs=urgent), pool.snapshot()[1])
        assert pool.jobs[job_of(b)]["state"] == JobState.RUNNING
        assert pool.jobs[job_of(a)]["state"] == JobState.BOUNDARY
        check_counters(pool)


def test_who_waits_for_a_paused_jobs_memory_says_so(pool: PoolTable) -> None:
    """The paused job is among those whom it waits for, though no policy sees it."""
    with joined(pool, 3) as (a, b, c):
        pool.header["self_admit"] = 0
        grab(a, 6)
        for member in (a, b, c):
            give_profile(pool.jobs[job_of(member)], [1, 7])
        pool.pause(job_of(a), move=False)
        assert not end(a)
        assert not end(b)
        grab(c, 1)
        pool.header["crowded"] = 0
        admit_all(pool, policy_named("serial"), view_of(pool), pool.snapshot()[1])
        assert pool.jobs[job_of(b)]["waits_for"] == 1 << job_of(a)


# -- the job ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_boundary(tenant: Tenant) -> Iterator[None]:
    """Let a tenant stand at its boundary in a thread; it is resumed and begins its next iteration in the end."""
    thread = in_thread(tenant.mark)
    until(lambda: tenant.job["state"] == JobState.BOUNDARY)
    place = job_of(tenant.member)
    try:
        yield
    finally:
        tenant.member.resume(place)
        until(lambda: tenant.member.admit(place))
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_what_a_paused_job_keeps_moves_and_comes_back() -> None:
    """All that it holds at its boundary leaves the budget, whenever that was asked for; its tensors are as before."""
    with tenants(4, 2) as (a, b):
        pool = a.member
        a.mark()
        address = a.allocate(3 << 16)
        pool.pause(job_of(a.member), move=False)
        with at_boundary(a):
            assert a.job["held"] == 3
            pool.pause(job_of(a.member), move=True)
            until(lambda: a.job["held"] == 0)
            assert a.job["evicted"] == 3
            assert b.allocate(4 << 16) > 0, "the others have all of it"
            b.free_all()
            a.check(address)
        assert (a.job["held"], a.job["evicted"]) == (3, 0)
        a.free(address)
        a.check_structure()


def test_a_paused_job_stays_where_it_is_for_whoever_asks_nothing() -> None:
    """Without being asked to move it keeps its memory, and gives it to a job that could not go on otherwise."""
    with tenants(4, 2, wait_limit_s=DEADLINE_S) as (a, b):
        a.mark()
        address = a.allocate(3 << 16)
        a.member.pause(job_of(a.member), move=False)
        with at_boundary(a):
            assert b.allocate(3 << 16) > 0, "the last that could move asks for it"
            assert a.job["evictions"] > 0
            b.free_all()
        a.free(address)


def test_python_sees_to_signals_while_a_job_is_paused() -> None:
    """A mark comes back after a slice, as often as it is asked to go on, and ends one iteration only."""
    with tenants(4) as (a,):
        a.mark()
        before = int(a.job["iteration"])
        a.member.pause(job_of(a.member), move=False)
        record = a.record[0]
        assert not allocator.end_by_mark(record)
        assert not allocator.begin_by_mark(record)
        a.member.resume(job_of(a.member))
        until(lambda: a.member.admit(job_of(a.member)))
        assert allocator.begin_by_mark(record)
        assert a.job["iteration"] == before + 1
        assert allocator.end_by_mark(record)
