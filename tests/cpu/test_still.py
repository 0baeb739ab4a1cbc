"""Nobody waits for a job that stands still: stopped by the kernel, at a prompt, or busy with something else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from cpu.support.members import (
    HOUR_NS,
    Tenant,
    acquire,
    give_profile,
    grab,
    job_of,
    joined,
    make_pool,
    release,
    tenants,
)

from zico.broker.views import ProfileCache, pool_view
from zico.pool import boundaries, living, results, rules, waits
from zico.pool.layout import NOBODY
from zico.pool.results import GRANTED, MUST_WAIT
from zico.scheduler.policies import REAL, policy_named
from zico.scheduler.state import PoolView, Start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.pool.table import PoolTable

REGIONS = 10
START_EARLY = ("claims", "none")
"""Policies that start a job inside whose iteration another may have to wait."""


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool in which nobody starts unasked."""
    with make_pool(REGIONS, unasked=False) as pool:
        yield pool


@contextlib.contextmanager
def stopped_process() -> Iterator[int]:
    """Give the number of a process that job control has stopped."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])
            yield child.pid
        finally:
            child.kill()


def look_around(pool: PoolTable, member: PoolTable) -> None:
    """Look, whenever somebody has looked last."""
    pool.header["looked_ns"] = 0
    living.look_around(member.member[0])


def inside_since(pool: PoolTable, member: PoolTable, since_ns: int) -> None:
    """Let a job be in an iteration for so long that usually takes a nanosecond."""
    record = pool.jobs[job_of(member)]
    record["profile"]["duration_ns"] = 1
    record["started_ns"] = time.monotonic_ns() - since_ns


def views(pool: PoolTable) -> PoolView:
    """Return what a policy sees now."""
    header, jobs = pool.snapshot()
    return pool_view(header, jobs, time.monotonic_ns(), ProfileCache())


# -- stopped ---------------------------------------------------------------------------------------


def test_a_stopped_job_that_waits_for_memory_need_not_finish(pool: PoolTable) -> None:
    """Invariant 3: a grant that leaves only a stopped job unable to finish is given, and refused once that goes on."""
    with joined(pool, 2) as (a, b), stopped_process() as pid:
        give_profile(pool.jobs[job_of(a)], [5])
        give_profile(pool.jobs[job_of(b)], [7])
        pool.jobs["persistent"][:2] = (5, 4)
        grab(a, 3)
        grab(b, 4)
        waits.start_waiting(b.member[0], 3)
        assert acquire(a, [NOBODY])[0] == MUST_WAIT, "b could not end then"
        pool.jobs[job_of(b)]["pid"] = pid
        look_around(pool, a)
        (r,) = grab(a, 1)
        release(a, [r])
        pool.jobs[job_of(b)]["pid"] = os.getpid()
        look_around(pool, a)
        assert acquire(a, [NOBODY])[0] == MUST_WAIT


def test_who_sees_no_numbers_leaves_what_others_have_seen(pool: PoolTable) -> None:
    """A look from another pid namespace neither takes a stopped job for one that runs nor stands in for a look."""
    with joined(pool, 3) as (a, b, foreign), stopped_process() as pid:
        pool.jobs[job_of(b)]["pid"] = pid
        look_around(pool, a)
        seen_ns, looked_ns = int(pool.jobs[job_of(b)]["stopped_until_ns"]), int(pool.header["looked_ns"])
        foreign.member["pid_namespace"] = -1
        pool.header["looked_ns"] = 0
        living.look_around(foreign.member[0])
        assert 0 < looked_ns < seen_ns == pool.jobs[job_of(b)]["stopped_until_ns"]
        assert pool.header["looked_ns"] == 0


def test_a_stopped_job_is_not_the_one_that_goes_on_and_is_asked_for_nothing(pool: PoolTable) -> None:
    """Invariant 7: where all wait, it is another that yields first; what it was asked for nobody awaits."""
    with joined(pool, 3) as (a, b, c), stopped_process() as pid:
        for member, n in ((a, 2), (b, 5), (c, 3)):
            give_profile(pool.jobs[job_of(member)], [9])
            pool.jobs[job_of(member)]["profiled"] = 0
            grab(member, n)
            pool.header["alone_job"] = NOBODY
        for member, need in ((a, 4), (b, 1), (c, 4)):
            waits.start_waiting(member.member[0], need)
        assert waits.is_first_to_yield(b.member[0])
        pool.jobs[job_of(b)]["evict"] = 1
        sequence = int(pool.header["sequence"])
        assert waits.ask_to_evict(a.member[0], sequence) == results.COMING
        pool.jobs[job_of(b)]["pid"] = pid
        look_around(pool, a)
        assert waits.is_first_to_yield(a.member[0])
        assert not waits.is_first_to_yield(b.member[0])
        assert waits.ask_to_evict(a.member[0], sequence) == results.ASKED
        assert pool.jobs[job_of(c)]["evict"] > 0
        assert pool.jobs[job_of(b)]["evict"] == 1


def test_what_a_look_has_seen_counts_for_a_while_only(pool: PoolTable) -> None:
    """A job that goes on is taken for one that runs, also where nobody looks any more."""
    with joined(pool, 2) as (a, b), stopped_process() as pid:
        pool.jobs[job_of(b)]["pid"] = pid
        before_ns = time.monotonic_ns()
        look_around(pool, a)
        until_ns = int(pool.jobs[job_of(b)]["stopped_until_ns"])
        assert before_ns < until_ns <= time.monotonic_ns() + living.SEEN_NS
        living.look_around(a.member[0])
        assert pool.jobs[job_of(b)]["stopped_until_ns"] == until_ns, "somebody has just looked"
        assert pool.jobs[job_of(a)]["stopped_until_ns"] == 0


@pytest.mark.parametrize("name", REAL)
def test_a_policy_waits_for_no_stopped_job(pool: PoolTable, name: str) -> None:
    """However it is inside its iteration, and in the way: another's next iteration begins all the same."""
    with joined(pool, 2) as (a, b), stopped_process() as pid:
        for member in (a, b):
            give_profile(pool.jobs[job_of(member)], [8])
            pool.jobs[job_of(member)]["iteration"] = 3
        assert not boundaries.finish_iteration(a.member[0], 0)
        grab(b, 4)
        waits.start_waiting(b.member[0], 4)
        assert (policy_named(name).decide(views(pool))[job_of(a)] == Start()) == (name in START_EARLY)
        pool.jobs[job_of(b)]["pid"] = pid
        look_around(pool, a)
        assert policy_named(name).decide(views(pool))[job_of(a)] == Start()
        assert pool.admit(job_of(a))


def test_who_fits_beside_nobody_has_its_turn_beside_a_stopped_job() -> None:
    """Another that fits beside what the stopped job holds does not begin again and again before it."""
    with make_pool(16, unasked=False) as pool, joined(pool, 3) as (large, small, stopped), stopped_process() as pid:
        for member, peak in ((large, 9), (small, 8), (stopped, 9)):
            record = pool.jobs[job_of(member)]
            give_profile(record, [peak, 0])
            record["iteration"] = 3
            record["profile"]["duration_ns"] = 10**6
        grab(stopped, 8)
        waits.start_waiting(stopped.member[0], 1)
        pool.jobs[job_of(stopped)]["pid"] = pid
        for member in (large, small):
            assert not boundaries.finish_iteration(member.member[0], 0)
        pool.jobs[job_of(large)]["boundary_since_ns"] = time.monotonic_ns() - 10**9
        look_around(pool, large)
        decisions = policy_named("zico").decide(views(pool))
        assert [decisions[job_of(member)] == Start() for member in (large, small)] == [True, False]
        assert pool.admit(job_of(large))


# -- at a prompt, or busy with something else ------------------------------------------------------


def test_beside_a_job_that_stands_still_a_standstill_is_found_out_soon(pool: PoolTable) -> None:
    """Invariant 7: it takes a second where the job has been inside for too long, and half a minute where it has not."""
    with joined(pool, 2) as (a, b):
        give_profile(pool.jobs[job_of(b)], [4])
        waits.start_waiting(a.member[0], 3)
        assert waits.patience_ns(a.member[0], 0) == rules.IDLE_NS
        assert waits.idlers(a.member[0]) == 0
        inside_since(pool, b, 2 * 10**9)
        assert waits.patience_ns(a.member[0], 0) == rules.STILL_NS
        assert waits.idlers(a.member[0]) != 0
        assert waits.idlers(b.member[0]) == 0


def test_what_a_job_does_beyond_its_iteration_is_no_progress_to_wait_for(pool: PoolTable) -> None:
    """An evaluation allocates and frees for as long as it likes; the end of its iteration is seen."""
    with joined(pool, 2) as (a, b):
        record = pool.jobs[job_of(b)]
        give_profile(record, [4])
        at_first = waits.standstill(a.member[0])
        record["progress"] += 1
        assert waits.standstill(a.member[0]) != at_first
        inside_since(pool, b, 2 * 10**9)
        later = waits.standstill(a.member[0])
        record["progress"] += 1
        grab(b, 2)
        assert waits.standstill(a.member[0]) == later
        record["iteration"] += 1
        assert waits.standstill(a.member[0]) != later


def test_a_job_without_a_profile_is_given_up_once_it_has_done_nothing_for_long(pool: PoolTable) -> None:
    """It may be at a prompt; one that waits, or has moved since the last look, is not."""
    with joined(pool, 2) as (a, b):
        record = pool.jobs[job_of(b)]
        waits.start_waiting(a.member[0], 3)
        long_ago_ns = time.monotonic_ns() - 2 * rules.IDLE_NS
        record["started_ns"] = record["moved_ns"] = long_ago_ns
        look_around(pool, a)
        assert waits.patience_ns(a.member[0], 0) == rules.STILL_NS
        assert views(pool).job(job_of(b)).given_up
        record["progress"] += 1
        look_around(pool, a)
        assert record["moved_ns"] > long_ago_ns
        assert waits.patience_ns(a.member[0], 0) == rules.IDLE_NS
        record["moved_ns"] = long_ago_ns
        waits.start_waiting(b.member[0], 3)
        look_around(pool, a)
        assert record["moved_ns"] > long_ago_ns


def test_a_job_that_has_outgrown_its_profile_for_long_keeps_nobody_at_a_boundary(pool: PoolTable) -> None:
    """It loses the right to grow alone with the fourth of its iterations and a second, as the view says, too."""
    with joined(pool, 2) as (a, b):
        record = pool.jobs[job_of(b)]
        give_profile(record, [2, 2, 2, 2])
        record["progress"] = 1000
        record["started_ns"] = time.monotonic_ns()
        grab(b, 4)
        pool.header["alone_since_ns"] = time.monotonic_ns() + HOUR_NS
        assert record["outgrown"] == 1
        assert views(pool).alone_job == job_of(b)
        inside_since(pool, b, 2 * 10**9)
        assert views(pool).alone_job is None
        assert views(pool).job(job_of(b)).given_up
        assert acquire(a, [NOBODY])[0] == GRANTED


@pytest.mark.parametrize("name", REAL)
def test_who_does_not_fit_beside_a_job_that_stands_still_begins_all_the_same(pool: PoolTable, name: str) -> None:
    """It overflows into the next tier, which is slow, but moves; beside a job that iterates it waits."""
    with joined(pool, 2) as (a, b):
        for member in (a, b):
            give_profile(pool.jobs[job_of(member)], [8])
            pool.jobs[job_of(member)]["iteration"] = 3
        assert not boundaries.finish_iteration(a.member[0], 0)
        grab(b, 8)
        assert (policy_named(name).decide(views(pool))[job_of(a)] == Start()) == (name in START_EARLY)
        inside_since(pool, b, 2 * 10**9)
        assert policy_named(name).decide(views(pool))[job_of(a)] == Start()
        assert pool.admit(job_of(a))


def test_a_standstill_is_remembered_while_the_neighbour_stands_still() -> None:
    """Invariant 7: the first tensor that does not fit waits a second, those of later iterations wait no more."""
    with tenants(8, 2, wait_limit_s=20) as (neighbour, job):
        region_bytes = neighbour.member.region_bytes
        neighbour.mark()
        neighbour.allocate(6 * region_bytes)
        inside_since(neighbour.member, neighbour.member, 10 * 10**9)
        waits_s = [_iteration_s(job, 3 * [region_bytes]) for _ in range(3)]
        assert waits_s[0] < 10, "the wait limit is no way to find out"
        assert max(waits_s[1:]) < waits_s[0] / 2
        neighbour.job["iteration"] += 1
        assert job.record[0]["wait"]["stuck_beside"] != waits.idlers(job.member.member[0]), "it has ended its own"
        neighbour.free_all()


def _iteration_s(job: Tenant, sizes_bytes: list[int]) -> float:
    """Allocate blocks, the last of which has no room in the pool, and end the iteration; returns how long that took."""
    began_s = time.monotonic()
    addresses = [job.allocate(size_bytes) for size_bytes in sizes_bytes]
    took_s = time.monotonic() - began_s
    assert job.is_spilled(addresses[-1])
    job.free_all()
    job.mark()
    return took_s


def test_who_allocates_for_later_keeps_the_others_only_while_it_grows(pool: PoolTable) -> None:
    """In a first iteration it goes on meanwhile; one that waits in need keeps them for longer."""
    with joined(pool, 1) as (a,):
        now_ns = time.monotonic_ns()
        pool.header["alone_job"], pool.header["alone_since_ns"] = job_of(a), now_ns - 2 * 10**9
        record = pool.jobs[job_of(a)]
        record["waiting_threads"], record["need_since_ns"] = 1, now_ns - 2 * 10**9
        assert views(pool).alone_job == job_of(a)
        record["patient"] = 1
        assert views(pool).alone_job is None
