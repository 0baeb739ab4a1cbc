"""Memory of a blocked job goes to those that can go on, and comes back, while its other threads write to it."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.evicting_parts import PAGE_BYTES, Writers, evict, take_back
from cpu.support.isolated import isolated
from cpu.support.members import Tenant, check_counters, grab, job_of, join, make_pool, tenants
from cpu.support.threads import DEADLINE_S, in_thread, until
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.libc import libc_address
from zico.heap import allocator
from zico.heap.layout import GRANULE_BYTES, PRIVATE
from zico.pool import regions, results, waits
from zico.pool.layout import NO_MORE, JobState, SaveMode
from zico.trace import profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# -- the attack: threads that write while memory goes and comes ------------------------------------


@pytest.mark.parametrize("jobs", [tenants, isolated])
def test_no_write_is_lost_while_memory_goes_and_comes(jobs: Callable[..., Any]) -> None:
    """Invariants 4 and 6: two threads and the kernel write all the while; each word is always what was last written.

    The regions are scribbled on by another job as soon as they are given back, and what it writes
    never shows.
    """
    n_regions, rounds = 8, 40
    size_bytes = n_regions * GRANULE_BYTES
    with jobs(2 * n_regions, 2, claims=False) as (a, b):
        for _ in range(rounds):
            address = int(allocator.allocate(a.record[0], size_bytes, PAGE_BYTES))
            ctypes.memset(address, 0, size_bytes)
            writers = Writers(address, size_bytes // PAGE_BYTES)
            for n in range(1, n_regions + 1):
                assert evict(a, 1) == 0
                free_bytes = (n_regions + n) * GRANULE_BYTES
                theirs = int(allocator.allocate(b.record[0], free_bytes, 64))
                ctypes.memset(theirs, 0xEE, free_bytes)
                assert ctypes.string_at(theirs, free_bytes) == b"\xee" * free_bytes
                allocator.free(b.record[0], theirs)
            assert a.job["held"] == 0
            assert take_back(a)
            for _ in range(3):  # they have pages of their own by now
                assert evict(a, n_regions) == 0
                assert take_back(a)
            writers.stop()
            allocator.free(a.record[0], address)
        assert a.job["evictions"] == rounds * n_regions * 4
        assert a.job["held"] == a.job["evicted"] == 0


# -- by hand ---------------------------------------------------------------------------------------


def test_what_is_evicted_is_out_of_the_budget_and_back_in_it() -> None:
    """Invariants 1 and 9: evicted regions are others', those that come back have no memory of their own meanwhile."""
    with tenants(8, 2, claims=False) as (a, b):
        kept = a.allocate(6 * GRANULE_BYTES)
        assert evict(a, 4) == 0
        assert (a.job["held"], a.job["evicted"], a.job["evictions"]) == (2, 4, 4)
        theirs = b.allocate(6 * GRANULE_BYTES)
        assert not b.is_spilled(theirs)
        a.check(kept)
        assert not take_back(a), "they are not free"
        b.free(theirs)
        resident = a.member.physical_bytes()
        assert take_back(a)
        assert a.member.physical_bytes() <= resident - 4 * PAGE_BYTES, "they have memory twice"
        assert (a.job["held"], a.job["evicted"], a.job["live_bytes"]) == (6, 0, 6 * GRANULE_BYTES)
        a.check_structure()
        a.free(kept)
        check_counters(a.member)
        assert (a.heap.slots["mapped"] != PRIVATE).all()


def test_memory_that_is_freed_while_it_is_evicted_needs_no_region() -> None:
    """An evicted tensor's death leaves nothing to come back, and its slots are used again as ever."""
    with tenants(8, 1, claims=False) as (a,):
        first, second = a.allocate(3 * GRANULE_BYTES), a.allocate(3 * GRANULE_BYTES)
        assert evict(a, 6) == 0
        a.free(first)
        assert (a.job["held"], a.job["evicted"]) == (0, 3)
        again = a.allocate(3 * GRANULE_BYTES)
        assert (a.job["held"], a.job["evicted"]) == (3, 3)
        a.check_structure()
        a.free(second)
        a.free(again)
        check_counters(a.member)


@pytest.mark.parametrize("refuses", ["memory", "limit", "pages", "mapping"])
def test_a_job_that_cannot_evict_keeps_what_it_has(refuses: str) -> None:
    """Where memory is short, the limit reached or the kernel unwilling, nothing goes back and nothing is lost."""
    with tenants(8, 1, claims=False) as (a,):
        kept = a.allocate(6 * GRANULE_BYTES)
        if refuses == "limit":
            a.record[0]["spill"]["limit_bytes"] = 0
        else:
            field = {"memory": "sysconf", "pages": "madvise", "mapping": "mmap"}[refuses]
            good = int(a.heap.device[0][field])
            # Its answer is 0 for an interval of so few microseconds, and no pages are free; or a
            # number, a refusal.
            a.heap.device[0][field] = libc_address("usleep" if refuses == "memory" else "getpid")
        assert evict(a, 4) == NO_MORE
        assert (a.job["held"], a.job["evicted"]) == (6, 0)
        a.check(kept)
        if refuses != "limit":
            a.heap.device[0][field] = good
        a.check_structure()
        a.free(kept)
        assert a.job["held"] == 0
        assert (a.heap.slots["mapped"] != PRIVATE).all()


def test_a_job_whose_memory_cannot_come_back_goes_on_without_it() -> None:
    """Invariant 7: when nobody moves, a job goes on, in the pool, rather than wait for what it has evicted."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S / 4) as (a, b):
        a.allocate(6 * GRANULE_BYTES)
        assert evict(a, 4) == 0
        a.record[0]["wait"]["return_until_ns"] = 1 << 62  # so that only this ends its patience
        b.allocate(5 * GRANULE_BYTES)
        thread = in_thread(lambda: b.allocate(3 * GRANULE_BYTES))
        until(lambda: b.job["waiting_threads"] == 1)
        address = a.allocate(2 * GRANULE_BYTES)
        assert not a.is_spilled(address)
        assert (a.job["held"], a.job["evicted"]) == (4, 4)
        a.free_all()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        b.free_all()


def test_a_job_at_its_boundary_evicts_what_persists() -> None:
    """A neighbour's growth moves a job's weights while it waits to be admitted; they are back before it goes on."""
    with (
        make_pool(8, region_bytes=GRANULE_BYTES, unasked=False) as pool,
        Tenant(pool, wait_limit_s=DEADLINE_S) as a,
        Tenant(pool, wait_limit_s=DEADLINE_S) as b,
    ):
        weights = a.allocate(4 * GRANULE_BYTES)
        thread = in_thread(a.mark)
        until(lambda: a.job["state"] == JobState.BOUNDARY)
        first = b.allocate(4 * GRANULE_BYTES)
        second = b.allocate(3 * GRANULE_BYTES)  # alone there is nobody else to free anything
        assert not b.is_spilled(second)
        assert (a.job["held"], a.job["evicted"], a.job["persistent"]) == (1, 3, 4)
        a.check(weights)
        b.free(first)
        until(lambda: pool.admit(job_of(a.member)) or not thread.is_alive())
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert (a.job["held"], a.job["evicted"]) == (4, 0)
        a.check(weights)
        a.free(weights)
        b.free(second)
        assert b.job["spilled_bytes"] == 0


@pytest.mark.parametrize("swaps", [True, False])
def test_a_job_gives_at_its_boundary_what_others_wait_for(swaps: bool) -> None:  # noqa: FBT001 - pytest's
    """Nobody has to be stuck: what it keeps is away while others wait for memory, and back before it goes on.

    A job that swaps does so, and any other beside whose memory the one that waits would have no
    room for an iteration. Whoever begins to wait calls it. A third job runs and does not allocate,
    so that nobody is stuck for a long time.
    """
    with (
        make_pool(8, region_bytes=GRANULE_BYTES, unasked=False, claims=False) as pool,
        Tenant(pool, wait_limit_s=DEADLINE_S) as a,
        Tenant(pool, wait_limit_s=DEADLINE_S) as b,
        Tenant(pool, wait_limit_s=DEADLINE_S),
    ):
        if swaps:
            a.job["save"] = SaveMode.SWAP
        else:
            b.free(b.allocate(6 * GRANULE_BYTES))
            thread = in_thread(b.mark)
            until(lambda: pool.admit(job_of(b.member)) or not thread.is_alive())
            thread.join(DEADLINE_S)
        a.member.member[0]["slice"] = (1000, 0)  # longer than b waits: only a call wakes it
        weights = a.allocate(4 * GRANULE_BYTES)
        thread = in_thread(a.mark)
        until(lambda: a.job["state"] == JobState.BOUNDARY)
        assert pool.header["crowded"] == (0 if swaps else 1)
        theirs = b.allocate(6 * GRANULE_BYTES)
        assert not b.is_spilled(theirs)
        assert (a.job["held"], a.job["evicted"], pool.header["stalls"]) == (2, 2, 0)
        a.check(weights)
        b.free(theirs)
        until(lambda: pool.admit(job_of(a.member)) or not thread.is_alive())
        thread.join(DEADLINE_S)
        assert (a.job["held"], a.job["evicted"]) == (4, 0)
        a.check(weights)
        a.free(weights)


@pytest.mark.parametrize("state", [JobState.BOUNDARY, JobState.RUNNING])
def test_claims_count_as_free_what_is_lent(state: JobState) -> None:
    """Invariant 3: who needs what another yields at its boundary may begin, until that one has evicted all it can.

    It may, too, while the other one is inside: that one ends its iteration without more, and yields then.
    """
    with make_pool(8, region_bytes=GRANULE_BYTES, unasked=False) as pool, Tenant(pool) as a, Tenant(pool) as b:
        weights = a.allocate(4 * GRANULE_BYTES)
        thread = in_thread(a.mark)
        until(lambda: a.job["state"] == JobState.BOUNDARY)
        b.job["profiled"] = a.job["profiled"] = 1
        a.job["state"] = state
        found = []
        for save, left in ((SaveMode.NONE, 0), (SaveMode.SWAP, 0), (SaveMode.SWAP, NO_MORE)):
            a.job["save"], a.job["evict"] = save, left
            found.append(bool(regions.stays_safe(b.member.member[0], job_of(b.member), 0, 6)))
        assert found == [False, True, False]
        a.job["state"] = JobState.BOUNDARY
        b.job["profiled"] = a.job["profiled"] = a.job["evict"] = 0
        until(lambda: pool.admit(job_of(a.member)) or not thread.is_alive())
        thread.join(DEADLINE_S)
        a.free(weights)


def test_a_job_whose_memory_does_not_come_back_goes_on_without() -> None:
    """Invariant 7: when regions stay with others for longer than the job may wait, it goes on from the next tier."""
    with tenants(8, 2, claims=False) as (a, b):
        kept = a.allocate(4 * GRANULE_BYTES)
        assert evict(a, 4) == 0
        theirs = b.allocate(6 * GRANULE_BYTES)
        a.mark()
        assert (a.job["iteration"], a.job["evicted"]) == (1, 4)
        more = a.allocate(2 * GRANULE_BYTES)
        assert not a.is_spilled(more)
        for address in (kept, more):
            a.check(address)
        b.free(theirs)
        a.mark()
        assert (a.job["evicted"], a.job["held"]) == (0, 6)


def test_the_profile_counts_what_is_evicted() -> None:
    """Invariant 8: an iteration during which memory was evicted is learned as if it had been held."""
    with tenants(32, 1) as (a,):
        weights = a.allocate(2 * GRANULE_BYTES)
        a.mark()
        block = a.allocate(3 * GRANULE_BYTES)
        assert evict(a, 4) == 0
        more = a.allocate(GRANULE_BYTES)
        a.free(more)
        a.free(block)
        a.mark()
        assert (a.job["claim_peak"], a.job["persistent"]) == (6, 2)
        a.check(weights)


def test_a_stopped_victim_is_asked_once() -> None:
    """Invariant 7: who waits for a job that does not answer spills after a while."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        a.allocate(4 * GRANULE_BYTES)
        waits.start_waiting(a.member.member[0], 9)  # and never looks
        b.allocate(4 * GRANULE_BYTES)
        address = b.allocate(2 * GRANULE_BYTES)
        assert b.is_spilled(address)
        assert a.job["evict"] == 2
        waits.stop_waiting(a.member.member[0])
        assert a.job["evict"] == 0


# -- whom to ask -----------------------------------------------------------------------------------


class _Job:
    """What a model of the choice knows of a job."""

    def __init__(self, state: JobState, held: int, need: int, evict: int) -> None:
        self.state, self.held, self.need, self.evict = state, held, need, evict

    @property
    def is_blocked(self) -> bool:
        return self.state == JobState.BOUNDARY or (self.state == JobState.RUNNING and self.need > 0)


JOBS = st.builds(
    _Job,
    st.sampled_from([JobState.RUNNING, JobState.RUNNING, JobState.BOUNDARY, JobState.LEAVING]),
    st.integers(0, 6),
    st.integers(0, 4),
    st.sampled_from([0, 0, 0, 0, 0, NO_MORE, 2]),
)


@contextlib.contextmanager
def _as_in(jobs: list[_Job], budget: int) -> Iterator[tuple[Any, list[Any]]]:
    """Make a pool whose jobs are as in the model."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(make_pool(budget, claims=False))
        members = [stack.enter_context(join(pool)) for _ in jobs]
        for member, job in zip(members, jobs, strict=True):
            if job.held:
                grab(member, job.held)
            if job.need and job.state == JobState.RUNNING:
                waits.start_waiting(member.member[0], job.need)
            record = pool.jobs[job_of(member)]
            record["state"], record["evict"] = job.state, job.evict
        yield pool, members


@given(jobs=st.lists(JOBS, max_size=6), mine=st.integers(0, 40), need=st.integers(1, 9), free=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_the_choice_is_that_of_the_model(jobs: list[_Job], mine: int, need: int, free: int) -> None:
    """Only blocked others are asked, for what lacks and no more, by as few as can be, those at a boundary first."""
    me = _Job(JobState.RUNNING, mine, need, 0)
    everyone = [me, *jobs]
    with _as_in(everyone, sum(job.held for job in everyone) + free or 1) as (pool, members):
        answer = waits.ask_to_evict(members[0].member[0], int(pool.header["sequence"]))
        asked = [int(pool.jobs[job_of(member)]["evict"]) for member in members]
        pending = any(job.is_blocked and job.evict > 0 for job in jobs)
        able = [job for job in jobs if job.is_blocked and job.evict == 0 and job.held > 0]
        if pending or not able:
            assert answer == (results.COMING if pending else results.NOTHING)
            assert asked == [job.evict for job in everyone]
            return
        assert answer == results.ASKED
        wanted = max(need, mine // 8)  # nothing is known of it
        lack = wanted - free if wanted > free else need
        wishes = {i: asked[i] for i, job in enumerate(everyone) if asked[i] != job.evict}
        assert all(everyone[i] in able and 0 < wish <= everyone[i].held for i, wish in wishes.items())
        assert sum(wishes.values()) == min(lack, sum(job.held for job in able))
        order = sorted(able, key=lambda job: (job.state != JobState.BOUNDARY, -job.held))
        assert sorted(everyone[i].held for i in wishes) == sorted(job.held for job in order[: len(wishes)])
        assert sum(job.held for job in order[: len(wishes) - 1]) < lack


@pytest.mark.parametrize(("held", "asked"), [(10, 14), (23, 1), (24, 3)])
def test_a_job_asks_for_what_its_profile_says_it_lacks_and_beyond_it_for_an_eighth(held: int, asked: int) -> None:
    """A standstill is to end with one question, not with one for each tensor that follows."""
    with _as_in([_Job(JobState.RUNNING, held, 1, 0), _Job(JobState.BOUNDARY, 20, 0, 0)], held + 20) as (pool, members):
        me = pool.jobs[job_of(members[0])]
        profile.begin(me["profile"], profile.UNPROFILED_SHIFT, 24)
        me["claim_peak"], me["profiled"] = profile.suffix_maximum(me["profile"], me["claims"]), 1
        assert waits.ask_to_evict(members[0].member[0], int(pool.header["sequence"])) == results.ASKED
        assert int(pool.jobs[job_of(members[1])]["evict"]) == asked


def test_nobody_asks_where_a_device_works_behind_the_processor() -> None:
    """On a device's timeline nobody is asked: pages there are not the processor's to copy."""
    with _as_in([_Job(JobState.RUNNING, 2, 2, 0), _Job(JobState.BOUNDARY, 4, 0, 0)], 6) as (pool, members):
        pool.header["on_timeline"] = 1
        sequence = int(pool.header["sequence"])
        assert waits.ask_to_evict(members[0].member[0], sequence) == results.NOTHING
        pool.header["on_timeline"] = 0
        assert waits.ask_to_evict(members[0].member[0], sequence - 1) == results.COMING, "it has not looked since"
        assert waits.ask_to_evict(members[0].member[0], sequence) == results.ASKED


def test_the_one_that_lacks_the_least_goes_on() -> None:
    """With profiles what remains of the iteration counts, not the tensor asked for now; unknown jobs come last."""
    with _as_in([_Job(JobState.RUNNING, 2, 1, 0), _Job(JobState.RUNNING, 2, 3, 0)], 8) as (pool, members):
        assert waits.is_first_to_yield(members[0].member[0])
        assert not waits.is_first_to_yield(members[1].member[0]), "both are unknown: the smaller tensor"
        for job, claim, first in ((1, 7, 1), (0, 8, 1), (1, 9, 0)):
            record = pool.jobs[job]
            record["profiled"] = record["profile"]["n_bins"] = 1
            record["claims"][0] = claim
            assert waits.is_first_to_yield(members[first].member[0])
            assert not waits.is_first_to_yield(members[1 - first].member[0])
