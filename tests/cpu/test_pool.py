"""Regions changing hands, case by case: several members of one pool in one process."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.members import (
    acquire,
    bare_list,
    check_counters,
    counters,
    fence,
    give_profile,
    grab,
    job_of,
    joined,
    make_pool,
    owners,
    release,
)

from zico.base.errors import BrokerError
from zico.pool import boundaries, mutex, regions, waits
from zico.pool.layout import JOB, MAX_JOBS, NOBODY, JobState, jobs_offset
from zico.pool.results import GRANTED, MUST_WAIT, NEVER_FITS, NOT_SERVED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.pool.table import PoolTable


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of ten regions in which nobody starts unasked."""
    with make_pool(10, unasked=False) as pool:
        yield pool


def test_a_released_region_comes_back_to_where_it_is_mapped(pool: PoolTable) -> None:
    """A job gets the region it names, although others were released earlier."""
    with joined(pool, 1) as (member,):
        first = grab(member, 4)
        release(member, first)
        for r in first[::-1]:
            assert acquire(member, [r]) == (GRANTED, [r])


def test_a_recent_peak_begins_anew(pool: PoolTable) -> None:
    """It is the most held since then, from what is held then; the peak of all time stays."""
    with joined(pool, 1) as (member,):
        record = member.jobs[job_of(member)]
        first = grab(member, 5)
        release(member, first[1:])
        member.restart_peak()
        assert (record["recent_peak"], record["peak_held"]) == (1, 5)
        release(member, grab(member, 2))
        assert (record["recent_peak"], record["peak_held"]) == (3, 5)


def test_a_region_named_twice_is_granted_once(pool: PoolTable) -> None:
    """Invariant 2: two slots that want the same region get two."""
    with joined(pool, 1) as (member,):
        release(member, grab(member, 4))
        status, granted = acquire(member, [3, 3, 3])
        assert (status, len(set(granted))) == (GRANTED, 3)
        assert granted[0] == 3
        check_counters(pool)


def test_the_least_recently_released_region_goes_first(pool: PoolTable) -> None:
    """Without a preference the head of the list is granted: its last owner is most likely in its trough."""
    with joined(pool, 1) as (member,):
        everything = grab(member, 10)
        order = [everything[i] for i in (7, 2, 5)]
        for r in order:
            release(member, [r])
        assert grab(member, 3) == order


def test_a_region_with_pages_goes_before_a_bare_one(pool: PoolTable) -> None:
    """Invariant 1: a job that follows another takes no new memory, and a bare region goes last, named or not."""
    pool.header["use_claims"] = 0
    with joined(pool, 2) as (first, second):
        mine = grab(first, 4)
        release(first, mine)
        assert acquire(second, [9, NOBODY, mine[3]]) == (GRANTED, [mine[0], mine[1], mine[3]])
        pool.reap(job_of(second))
        assert len(bare_list(pool)) == 6
        assert grab(first, 5) == [mine[2], mine[0], mine[1], mine[3], 4]


def test_pages_of_the_dead_are_known(pool: PoolTable) -> None:
    """Invariants 5 and 11: what was bare when it was granted is not when its owner dies, however that is found."""
    with joined(pool, 3) as members:
        for count, member in enumerate(members, 1):
            pool.header["use_claims"] = 0
            grab(member, 2)
            pool.jobs[job_of(member)]["state"] = JobState.EMPTY if member is members[1] else JobState.RUNNING
            mutex.recover(pool.member[0]) if member is members[1] else pool.reap(job_of(member))
            check_counters(pool)
            assert len(bare_list(pool)) == 8, count


def test_more_than_the_budget_is_never_granted(pool: PoolTable) -> None:
    """Invariant 1: a request above the budget with what is held is NEVER_FITS, below it MUST_WAIT or GRANTED."""
    with joined(pool, 2) as (first, second):
        assert acquire(first, [NOBODY] * 11)[0] == NEVER_FITS
        grab(first, 6)
        assert acquire(first, [NOBODY] * 5)[0] == NEVER_FITS
        pool.jobs[job_of(first)]["profiled"] = 1  # no longer growing alone
        pool.header["alone_job"] = NOBODY
        assert acquire(second, [NOBODY] * 5)[0] == MUST_WAIT
        assert acquire(second, [NOBODY] * 11)[0] == NEVER_FITS
        check_counters(pool)


def test_a_limit_from_the_start_can_be_all_that_a_job_is_promised(pool: PoolTable) -> None:
    """What exceeds it is refused; what a limit allowed once waits when the limit is lowered."""
    pool.header["use_claims"] = 0
    with joined(pool, 1) as (member,):
        place = job_of(member)
        pool.set_limit(place, 2)
        pool.promise_no_more(place)
        mine = grab(member, 2)
        assert acquire(member, [NOBODY])[0] == NEVER_FITS
        pool.set_limit(place, 4)
        mine += grab(member, 2)
        assert acquire(member, [NOBODY])[0] == NEVER_FITS
        pool.set_limit(place, 1)
        release(member, mine[1:])
        assert [acquire(member, [NOBODY] * n)[0] for n in (3, 4)] == [MUST_WAIT, NEVER_FITS]
        pool.set_limit(place, 0)
        assert acquire(member, [NOBODY] * 9)[0] == GRANTED


def test_while_the_budget_is_lowered_the_sum_only_falls(pool: PoolTable) -> None:
    """Invariant 1: with more granted than the new budget nothing is granted until enough has come back."""
    with joined(pool, 2) as (first, second):
        pool.header["use_claims"] = 0
        held = grab(first, 5)
        grab(second, 4)
        pool.set_budget(6)
        while int(pool.header["granted"]) >= 6:
            assert acquire(second, [NOBODY])[0] == MUST_WAIT
            release(first, [held.pop()])
        grab(second, 1)
        assert pool.header["granted"] == 6


def test_a_region_waits_for_its_fence(pool: PoolTable) -> None:
    """Invariant 2: a region whose device work is not done is not granted, nor is half a request."""
    with joined(pool, 2) as (first, second):
        pool.header["use_claims"] = 0
        given = grab(first, 9)
        release(first, given)
        pool.regions["fence"][given] = fence(job_of(first), 0, 3)
        before = owners(pool)
        assert acquire(second, [given[0], NOBODY])[0] == MUST_WAIT
        assert owners(pool) == before
        check_counters(pool)
        assert acquire(second, [given[0]]) == (GRANTED, [9])
        counters(pool)[job_of(first), 0] = 2
        assert acquire(second, [given[0]])[0] == MUST_WAIT
        counters(pool)[job_of(first), 0] = 3
        assert acquire(second, [given[0]]) == (GRANTED, [given[0]])


def test_nobody_waits_for_the_fence_of_the_dead(pool: PoolTable) -> None:
    """Invariant 5: what a job had released with work outstanding is free when it is dead, whoever comes next."""
    with joined(pool, 1) as (dead,):
        given = grab(dead, 10)
        release(dead, given)
        pool.regions["fence"] = fence(job_of(dead), 0, 1 << 40)
        pool.reap(job_of(dead))
    with joined(pool, 1) as (heir,):
        grab(heir, 10)


def test_a_place_is_clean_when_it_is_used_again(pool: PoolTable) -> None:
    """A new job in an old place starts with no iterations, waits, claims or profile of the last one."""
    with joined(pool, 1) as (member,):
        grab(member, 4)
        waits.start_waiting(member.member[0], 2)
        boundaries.finish_iteration(member.member[0], 0)
        pool.reap(job_of(member))
    with joined(pool, 1) as (member,):
        record = pool.jobs[job_of(member)]
        assert record["state"] == JobState.RUNNING
        nonzero = {name for name in record.dtype.names if np.any(record[name] != np.zeros_like(record[name]))}
        assert nonzero <= {"name", "state", "pid", "started", "started_ns", "current", "promised"}
        assert (int(pool.header["waiters"]), int(pool.header["boundary_waiters"])) == (0, 0)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.BOUNDARY])
def test_a_job_that_leaves_at_any_time_leaves_no_count_behind(pool: PoolTable, state: JobState) -> None:
    """A job that is marked as leaving at its boundary is no longer counted as waiting there, nor after its death."""
    with joined(pool, 1) as (member,):
        if state == JobState.BOUNDARY:
            assert not boundaries.finish_iteration(member.member[0], 0)
        pool.mark_leaving(job_of(member))
        assert pool.header["boundary_waiters"] == 0
        pool.reap(job_of(member))
        assert pool.header["boundary_waiters"] == 0


def test_a_leaving_job_does_not_come_back_by_ending_an_iteration(pool: PoolTable) -> None:
    """A job marked as leaving stays so at its next boundary, is not kept there, and is granted nothing."""
    with joined(pool, 1) as (member,):
        pool.mark_leaving(job_of(member))
        assert boundaries.finish_iteration(member.member[0], 0)
        boundaries.begin_iteration(member.member[0])
        assert pool.jobs[job_of(member)]["state"] == JobState.LEAVING
        assert pool.header["boundary_waiters"] == 0
        assert not pool.admit(job_of(member))
        assert acquire(member, [NOBODY])[0] == NOT_SERVED


def test_a_grant_that_could_lock_both_jobs_is_refused(pool: PoolTable) -> None:
    """Invariant 3: the example of the banker's rule: with one region more for A neither could finish."""
    with joined(pool, 2) as (a, b):
        grab(a, 3)
        pool.header["alone_job"] = NOBODY
        grab(b, 5)
        for member, claim, residual in ((a, 9, 1), (b, 7, 1)):
            give_profile(pool.jobs[job_of(member)], [claim])
            pool.jobs[job_of(member)]["persistent"] = residual
        assert acquire(a, [NOBODY])[0] == MUST_WAIT
        grab(b, 2)
        assert acquire(a, [NOBODY])[0] == MUST_WAIT
        release(b, [r for r, owner in enumerate(owners(pool)) if owner == job_of(b)][:6])
        pool.jobs[job_of(b)]["claims"] = 1
        grab(a, 6)


def test_a_job_beyond_its_usual_end_is_not_in_its_own_way(pool: PoolTable) -> None:
    """Invariant 7: by what an iteration has exceeded its profile says nothing of what comes after the usual end."""
    with joined(pool, 1) as (a,):
        record = pool.jobs[job_of(a)]
        give_profile(record, [8, 2, 2, 2])
        record["progress"] = 3
        held = grab(a, 8)
        assert record["claim_extra"] == 6
        record["progress"] = 1000
        release(a, held[:5])
        grab(a, 1)  # would be refused for ever if 8 + 6 regions of 10 were to come


def test_an_iteration_that_outgrows_its_profile_is_like_a_first_one(pool: PoolTable) -> None:
    """Invariant 3: nobody relies on what it will give back, and nobody starts beside it while it grows."""
    with joined(pool, 2) as (a, b):
        record = pool.jobs[job_of(a)]
        give_profile(record, [2, 2, 2, 2])
        give_profile(pool.jobs[job_of(b)], [6])
        grab(b, 1)
        grab(a, 3)
        assert not regions.someone_else_grows_alone(b.member[0], job_of(b), time.monotonic_ns())  # not longer
        record["progress"] = 1000
        grab(a, 1)
        assert regions.someone_else_grows_alone(b.member[0], job_of(b), time.monotonic_ns())
        assert acquire(a, [NOBODY])[0] == MUST_WAIT  # 5 are free, and b may need them all
        grab(b, 5)
        boundaries.begin_iteration(a.member[0])
        assert not regions.someone_else_grows_alone(b.member[0], job_of(b), time.monotonic_ns())


def test_an_admitted_job_claims_its_peak_before_it_has_woken(pool: PoolTable) -> None:
    """Invariant 3: between admission and the job's own waking nobody is granted what its peak needs."""
    with joined(pool, 2) as (a, b):
        grab(a, 3)
        pool.header["alone_job"] = NOBODY
        record = pool.jobs[job_of(a)]
        levels = [3, 8, 3, 3, 3, 3]
        give_profile(record, levels)
        record["progress"] = 5
        record["current"]["n_bins"] = 6
        record["current"]["held"][:6] = levels
        assert not boundaries.finish_iteration(a.member[0], 0)
        assert pool.admit(job_of(a))
        assert acquire(b, [NOBODY] * 3)[0] == MUST_WAIT
        grab(b, 2)
        boundaries.begin_iteration(a.member[0])
        grab(a, 5)


def test_a_dead_jobs_unsent_notice_does_not_silence_the_others(pool: PoolTable) -> None:
    """Invariant 5: whoever died between noting that it would write the pipe and writing it keeps nobody waiting."""
    with joined(pool, 3) as (stands, dead, other):
        (r,) = grab(other, 1)
        assert not boundaries.finish_iteration(stands.member[0], 0)
        os.read(pool.notify_fd, 64)
        assert pool.header["notified"] == 1, "as the dead job left it, with nothing written"
        pool.reap(job_of(dead))
        release(other, [r])
        assert os.read(pool.notify_fd, 64)


def test_two_jobs_never_write_to_the_same_cache_line() -> None:
    """A job's record takes whole lines of 64 bytes, and the first one begins with a line."""
    assert JOB.itemsize % 64 == jobs_offset(7) % 64 == 0


def test_job_63_can_be_waited_for() -> None:
    """Each of the 64 places has a bit in ``waits_for``, the last one too."""
    with make_pool(4) as pool:
        for i in range(MAX_JOBS):
            assert pool.join(os.getpid(), f"job{i}") == i
        with pytest.raises(BrokerError, match="all 64 places"):
            pool.join(os.getpid(), "one too many")
        for other in (1, 62, 63):
            pool.set_waits_for(0, 1 << other)
            assert int(pool.jobs[0]["waits_for"]) >> other & 1
        pool.set_waits_for(0, (1 << 64) - 2)
        assert all(int(pool.jobs[0]["waits_for"]) >> other & 1 for other in range(1, MAX_JOBS))


def test_a_death_while_a_job_is_reaped_loses_no_region(pool: PoolTable) -> None:
    """Invariant 5: if whoever reaped died half-way, the rest of the dead job's regions is free after the repair."""
    with joined(pool, 2) as (dead, other):
        pool.header["use_claims"] = 0
        mine = grab(dead, 5)
        grab(other, 2)
        pool.jobs[job_of(dead)]["state"] = JobState.EMPTY
        pool.regions[mine[0]]["owner"] = NOBODY
        mutex.recover(pool.member[0])
        check_counters(pool)
        assert pool.header["granted"] == 2
        assert pool.jobs[job_of(dead)]["held"] == 0
        grab(other, 8)


def test_a_death_between_words_of_a_release_keeps_the_fence(pool: PoolTable) -> None:
    """Invariant 2: a region is never seen free before its new fence is written.

    The three words are written in an order in which every prefix is right; read here as the table
    after each step.
    """
    with joined(pool, 1) as (member,):
        (r,) = grab(member, 1)
        word = fence(job_of(member), 3, 7)
        regions.give_back(member.member[0], np.array([r], "i4"), 1, word)
        assert (int(pool.regions[r]["last_owner"]), int(pool.regions[r]["fence"])) == (job_of(member), word)
