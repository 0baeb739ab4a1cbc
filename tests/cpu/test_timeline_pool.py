"""Regions behind fences: several jobs with several streams, against a device that does one thing at a time."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.members import check_counters, counters, free_list, issued, join, make_pool
from cpu.support.software_device import SoftwareDevice
from cpu.support.timeline_jobs import Job, Use, joined, make_timeline_pool
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zico.pool import deaths, fences, mutex, regions, rules, waits
from zico.pool.layout import NOBODY, JobState
from zico.pool.results import BEHIND, GRANTED, MUST_WAIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.pool.table import PoolTable

N_REGIONS = 6
ABSENT_PID = 1 << 30
"""More than any process number (proc(5), pid_max)."""


# -- any order of things ---------------------------------------------------------------------------


class TimelineMachine(RuleBasedStateMachine):
    """Jobs take, use and release regions, die and are replaced, while the device lags behind at will."""

    @initialize(n=st.integers(2, N_REGIONS))
    def begin(self, n: int) -> None:
        """Make the pool and the device."""
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(make_timeline_pool(n))
        self.device = SoftwareDevice()
        self.n = n
        self.jobs: list[Job] = []
        self.dead: list[Job] = []
        self.buried: list[Job] = []
        self.lingering: list[Job] = []
        self.uses: dict[int, list[Use]] = {r: [] for r in range(n)}
        self.before = counters(self.pool).copy()

    def teardown(self) -> None:
        """All that streams wait for comes, whoever has died; then every region is to be had."""
        if not hasattr(self, "stack"):
            return
        with self.stack:
            while self.buried:
                self._reap(self.buried[0])
            for job in self.lingering:
                self.pool.settle_place(job.number, has_ended=False)
                self._run_out(job)
                self.pool.settle_place(job.number, has_ended=False)
            for job in self.jobs:
                for slot in range(2):
                    if job.issued(slot) < self._last_fence(job, slot):
                        job.mark(slot)
            self.device.drain()
            if self.jobs:
                status, _ = self.jobs[0].acquire(0, [NOBODY] * len(free_list(self.pool)))
                assert status == GRANTED

    def _last_fence(self, job: Job, slot: int) -> int:
        values = [use.value or 0 for uses in self.uses.values() for use in uses if use.pair == job.pair(slot)]
        return max([0, *values])

    def _pick(self, data: st.DataObject) -> Job:
        return self.jobs[data.draw(st.integers(0, 2)) % len(self.jobs)]

    @rule()
    def join(self) -> None:
        """A job gets a place, maybe one in which another has died; its counters go on from there."""
        if len(self.jobs) < 3:
            job = Job(self.stack.enter_context(join(self.pool)), self.device)
            self.jobs.append(job)
            assert job.number not in [one.number for one in self.lingering], "its counters are not yet its own"
            for slot in range(2):
                assert issued(self.pool)[job.number, slot] == counters(self.pool)[job.number, slot]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), slot=st.integers(0, 1), n=st.integers(1, 3))
    def acquire(self, data: st.DataObject, slot: int, n: int) -> None:
        """Invariant 2: when the new owner's stream comes to use a region, the device has done with all earlier uses."""
        job = self._pick(data)
        wanted = data.draw(st.lists(st.integers(NOBODY, self.n - 1), min_size=n, max_size=n))
        _, granted = job.acquire(slot, wanted)
        for r in granted:
            use = Use(job.pair(slot), job)
            self.uses[r].append(use)
            self.device.launch(job.streams[slot], lambda r=r, use=use: self._run(r, use))

    def _run(self, r: int, use: Use) -> None:
        """Be a kernel that uses a region."""
        use.started = True
        for other in self.uses[r][: self.uses[r].index(use)]:
            done = other.value is not None and counters(self.pool).flat[other.pair] >= other.value
            assert other.pair == use.pair or other.job in self.dead or done, "two streams use a region at once"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), issue=st.booleans(), n=st.integers(1, 3))
    def release(self, data: st.DataObject, issue: bool, n: int) -> None:  # noqa: FBT001 - drawn
        """A job releases regions that its stream may not have begun to use; nobody gets them before there is a mark."""
        job = self._pick(data)
        slot = data.draw(st.integers(0, 1))
        given = [r for r, s in job.held.items() if s == slot][:n]
        if given:
            value = job.release(given, issue=issue)
            for r in given:
                self.uses[r][-1].value = value

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), slot=st.integers(0, 1))
    def mark(self, data: st.DataObject, slot: int) -> None:
        """A job puts a mark on a stream."""
        self._pick(data).mark(slot)

    @rule(choices=st.lists(st.integers(0, 9), min_size=1, max_size=8))
    def device_goes_on(self, choices: list[int]) -> None:
        """The device does something on some stream."""
        if self.device.queues:
            for choice in choices:
                self.device.step_any(choice)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Invariant 5: a job dies with its device work; what it held and had released is free once A's fences pass."""
        job = self._pick(data)
        self.jobs.remove(job)
        self._reap(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def die_before_its_work(self, data: st.DataObject) -> None:
        """Invariant 5: a job's process dies and its device work goes on: nobody gets what it held."""
        job = self._pick(data)
        self.jobs.remove(job)
        self.buried.append(job)
        self.pool.bury(job.number)

    @precondition(lambda self: self.buried)
    @rule()
    def context_ends(self) -> None:
        """The rest of a dead job's device work is dropped, and its regions come back."""
        self._reap(self.buried[0])

    @precondition(lambda self: self.buried and len(self.lingering) < 3)
    @rule()
    def deadline_passes(self) -> None:
        """Invariants 5 and 7: regions come back and streams go on, though a dead job's context still sets counters."""
        job = self.buried.pop(0)
        self.lingering.append(job)
        self.dead.append(job)
        self.device.outlives(job.streams)
        assert self.pool.reap(job.number, lingers=True) == len(job.held)

    @precondition(lambda self: self.lingering)
    @rule(has_ended=st.booleans())
    def look_at_lingering(self, has_ended: bool) -> None:  # noqa: FBT001 - drawn
        """The counters are set again at each look; the place is free when the context has ended."""
        job = self.lingering[0]
        if has_ended:
            self.device.kill(job.streams)
            self.lingering.remove(job)
        self.pool.settle_place(job.number, has_ended=has_ended)
        for slot in range(2):
            assert issued(self.pool)[job.number, slot] == counters(self.pool)[job.number, slot]

    def _run_out(self, job: Job) -> None:
        """Let a dead job's device do the rest."""
        for stream in job.streams:
            while self.device.step(stream):
                pass

    def _reap(self, job: Job) -> None:
        if job in self.buried:
            self.buried.remove(job)
        self.dead.append(job)
        self.device.kill(job.streams)
        held = len(job.held)
        assert self.pool.reap(job.number) == held
        assert (issued(self.pool) >= counters(self.pool)).all()
        for slot in range(2):
            assert issued(self.pool)[job.number, slot] == counters(self.pool)[job.number, slot]

    @rule(seed=st.integers(0, 1 << 30))
    def die_inside(self, seed: int) -> None:
        """Invariant 5: fences survive a death inside; counters and lists are rebuilt."""
        rng = np.random.default_rng(seed)
        for field in ("granted", "free_head", "free_tail"):
            self.pool.header[field] = rng.integers(-5, 50)
        for field in ("previous", "next"):
            self.pool.regions[field] = rng.integers(-1, self.n, self.n)
        before = self.pool.regions[["fence", "before"]].copy()
        mutex.recover(self.pool.member[0])
        assert (self.pool.regions[["fence", "before"]] == before).all()

    @invariant()
    def agrees(self) -> None:
        """Invariants 1, 2 and 5: every region has one owner or none, and no counter falls of a place that has a job."""
        if not hasattr(self, "stack"):
            return
        check_counters(self.pool)
        now = counters(self.pool)
        for job in self.lingering:
            self.before[job.number] = now[job.number]
        assert (now >= self.before).all()
        self.before = now.copy()
        for job in self.jobs + self.buried:
            mine = np.flatnonzero(self.pool.regions["owner"] == job.number).tolist()
            assert sorted(job.held) == mine


TimelineMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)

TestTimeline = TimelineMachine.TestCase


# -- by hand ---------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of four regions on a timeline."""
    with make_timeline_pool(4) as pool:
        yield pool


def test_an_unmarked_region_is_nobodys_but_its_streams(pool: PoolTable) -> None:
    """Invariant 2: without a mark nobody but the stream that released a region gets it; with one others wait for it."""
    with joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 4)
        a.release([0, 1, 2, 3], issue=False)
        assert b.acquire(0, [NOBODY])[0] == MUST_WAIT
        assert a.acquire(1, [NOBODY])[0] == MUST_WAIT
        assert a.acquire(0, [2]) == (GRANTED, [2])
        a.mark(0)
        assert b.acquire(0, [1]) == (BEHIND, [1])


def test_passed_regions_go_before_mapped_ones_behind_a_fence(pool: PoolTable) -> None:
    """The order: mapped and passed, any passed, mapped and issued, any issued."""
    with joined(pool, 2) as (device, (a, b)):
        a.acquire(0, [NOBODY] * 4)
        a.release([2])
        a.release([3])
        device.drain()
        a.release([0])
        a.release([1])
        assert b.acquire(0, [3]) == (GRANTED, [3])
        assert b.acquire(0, [1]) == (GRANTED, [2])
        assert b.acquire(0, [1]) == (BEHIND, [1])
        assert b.acquire(0, [1]) == (BEHIND, [0])


def test_a_grant_demands_one_wait_for_each_stream(pool: PoolTable) -> None:
    """However many regions come from a stream, the new owner waits once for it: for the latest mark."""
    with joined(pool, 2) as (_, (a, b)):
        for slot in (0, 0, 1, 1):
            a.acquire(slot, [NOBODY])
        for r in (0, 2, 1, 3):
            a.release([r])
        array = np.full(4, NOBODY, "i4")
        assert regions.acquire(b.member.member[0], array, 4, 0) == BEHIND
        record = b.member.member[0]
        assert record["n_waits"] == 2
        assert [int(record["wait_values"][a.pair(slot)]) for slot in (0, 1)] == [2, 2]


def test_a_third_in_the_row_has_to_wait(pool: PoolTable) -> None:
    """Invariant 2: A, then B behind A's fence: C gets the region when A's has passed, or behind it when B is dead."""
    with joined(pool, 3) as (device, (a, b, c)):
        a.acquire(0, [NOBODY] * 4)
        a.release([0])
        assert b.acquire(0, [0]) == (BEHIND, [0])
        b.release([0])
        assert c.acquire(0, [0])[0] == MUST_WAIT
        assert a.acquire(0, [0]) == (BEHIND, [0]), "A's own stream keeps the order of A's work"
        a.release([0])
        b.acquire(0, [0])
        b.release([0])
        while device.step(a.streams[0]) or (c.issued(0) == 0 and device.step(b.streams[0])):
            pass
        assert c.acquire(0, [0])[0] == GRANTED
        c.release([0])


def test_a_third_in_the_row_gets_behind_the_first_when_the_second_is_dead(pool: PoolTable) -> None:
    """Invariants 2 and 5: B dies with its wait for A undone; C's stream then waits for A."""
    with joined(pool, 3) as (device, (a, b, c)):
        a.acquire(0, [NOBODY] * 4)
        a.release([0])
        b.acquire(0, [0])
        b.release([0])
        device.kill(b.streams)
        pool.reap(b.number)
        assert c.acquire(0, [0]) == (BEHIND, [0])
        reached = []
        device.launch(c.streams[0], lambda: reached.append(True))
        while device.step(c.streams[0]):
            pass
        assert not reached, "A's device is still at it"
        device.drain()
        assert reached


def test_what_the_dead_had_behind_a_fence_stays_behind_it(pool: PoolTable) -> None:
    """Invariants 2 and 5: a region that B had got behind A's fence is behind A's fence again when B is dead."""
    with joined(pool, 3) as (device, (a, b, c)):
        a.acquire(0, [NOBODY] * 4)
        a.release([0, 1, 2, 3])
        b.acquire(0, [0, 1])
        b.release([1])
        device.kill(b.streams)
        assert pool.reap(b.number) == 1
        assert c.acquire(0, [0])[0] == BEHIND
        assert c.acquire(0, [1])[0] == BEHIND
        device.drain()
        c.release([0, 1])
        device.drain()
        assert c.acquire(0, [0, 1])[0] == GRANTED


def test_a_stream_that_has_waited_keeps_what_is_before(pool: PoolTable) -> None:
    """Invariant 2: B takes a region behind A's fence, frees it and takes it again; its second release forgets no A."""
    with joined(pool, 3) as (device, (a, b, c)):
        a.acquire(0, [NOBODY] * 4)
        a.release([0])
        b.acquire(0, [0])
        b.release([0])
        assert b.acquire(0, [0]) == (GRANTED, [0])
        b.release([0])
        device.kill(b.streams)
        pool.reap(b.number)
        assert c.acquire(0, [0])[0] == BEHIND


def test_a_dead_jobs_queued_waiters_go_on_although_its_place_is_taken(pool: PoolTable) -> None:
    """Invariant 5: a stream that waits for a dead job's mark goes on; the next job in the place does not undo that."""
    with joined(pool, 2) as (device, (a, b)):
        a.acquire(0, [NOBODY] * 2)
        a.release([0])
        a.release([1])
        assert b.acquire(0, [0, 1])[0] == BEHIND or b.acquire(0, [0, 1])[0] == BEHIND
        device.kill(a.streams)
        assert device.queues[b.streams[0]]
        pool.reap(a.number)
        with join(pool) as member:
            heir = Job(member, device)
            assert heir.number == a.number
            assert heir.issued(0) == 2
            device.drain()
            assert heir.mark(0) == 3
            device.drain()


def test_a_death_while_a_job_is_reaped_strands_no_stream(pool: PoolTable) -> None:
    """Invariant 5: a place that a reaper who died left empty guards nothing any more after the repair."""
    with joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 3)
        a.release([0, 1])
        a.mark(1)
        pool.jobs[a.number]["state"] = 0  # as left by a reaper that died right after its first steps
        mutex.recover(pool.member[0])
        assert pool.regions["fence"].tolist() == [0] * 4
        assert b.acquire(0, [NOBODY] * 4)[0] == GRANTED


def test_on_the_host_device_nobody_gets_ahead() -> None:
    """Without a timeline a region whose fence has not passed is not granted, issued or not."""
    with make_pool(2, claims=False) as pool, joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 2)
        a.release([0, 1])
        assert b.acquire(0, [NOBODY])[0] == MUST_WAIT


# -- running ahead ---------------------------------------------------------------------------------


_COARSE_BYTES = 64 << 20
_IN_START = fences.START_BYTES // _COARSE_BYTES
"""Regions of the default size that the first bound allows."""


def test_the_bound_tunes_itself() -> None:
    """It begins at the start value, doubles for a starved device, shrinks for others, and stays within its limits."""
    most = 25 * fences.START_BYTES
    assert fences.tuned(0, most, False, False) == fences.START_BYTES  # noqa: FBT003 - compiled
    cap = fences.START_BYTES
    seen = []
    for _ in range(8):
        cap = fences.tuned(cap, most, True, True)  # noqa: FBT003 - compiled
        seen.append(cap // fences.START_BYTES)
    assert seen == [2, 4, 8, 16, 25, 25, 25, 25]
    for _ in range(40):
        smaller = fences.tuned(cap, most, False, True)  # noqa: FBT003 - compiled
        assert smaller < cap or cap == fences.LEAST_BYTES
        cap = smaller
    assert cap == fences.LEAST_BYTES
    assert fences.tuned(3, most, False, False) == 3  # noqa: FBT003 - compiled


class _Follower:
    """Two jobs of a pool with regions of one size: one has freed all of it, the other takes it behind fences."""

    def __init__(self, stack: contextlib.ExitStack, region_bytes: int) -> None:
        """Fill the pool and give it back, with a mark for each piece of the coarsest regions' size."""
        self.per_step = _COARSE_BYTES // region_bytes
        n = 8 * _IN_START * self.per_step
        self.pool = stack.enter_context(make_timeline_pool(n, region_bytes))
        _, (self.first, self.second) = stack.enter_context(joined(self.pool, 2))
        self.first.acquire(0, [NOBODY] * n)
        for start in range(0, n, self.per_step):
            self.first.release(list(range(start, start + self.per_step)))
        self.second.mark(0)

    def do(self, step: str) -> int:
        """Take one step; returns the pool's answer where it has one."""
        if step == "take":
            return self.second.acquire(0, [NOBODY] * self.per_step)[0]
        if step == "the first job's device goes on":
            counters(self.pool)[self.first.number, 0] = min(self._passed + 1, self.first.issued(0))
        elif step == "the second job's device is idle":
            counters(self.pool)[self.second.number, 0] = self.second.issued(0)
        else:
            self.pool.header["waiters"] = int(step == "others wait")
        return GRANTED

    @property
    def _passed(self) -> int:
        return int(counters(self.pool)[self.first.number, 0])

    @property
    def bound_bytes(self) -> int:
        """How far ahead the second job may run."""
        return int(self.pool.jobs[self.second.number]["ahead_cap"])


_STEPS = (
    "take",
    "the first job's device goes on",
    "the second job's device is idle",
    "others wait",
    "nobody waits",
)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.sampled_from((*_STEPS, *["take"] * 3)), max_size=30))
@example(steps=["take"] * (_IN_START + 1))
@example(steps=["take", "others wait", *["take"] * 5])
def test_the_size_of_regions_does_not_change_how_far_ahead_a_job_may_run(steps: list[str]) -> None:
    """Whatever happens, jobs with small regions are granted, refused and bounded as those with large ones, in bytes."""
    with contextlib.ExitStack() as stack:
        followers = [_Follower(stack, _COARSE_BYTES // by) for by in (1, 4, 16)]
        for step in steps:
            assert len({follower.do(step) for follower in followers}) == 1
            assert len({follower.bound_bytes for follower in followers}) == 1
        for follower in followers:
            follower.do("nobody waits")


def test_what_is_ahead_is_counted_from_the_table() -> None:
    """Regions taken behind others' fences, and own ones released, count until the device has come by."""
    with make_timeline_pool(8) as pool, joined(pool, 2) as (device, (a, b)):
        a.acquire(0, [NOBODY] * 8)
        a.release([0, 1, 2])
        b.acquire(0, [0])
        b.acquire(0, [1])
        b.release([0])
        assert [fences.count_ahead(job.member.member[0]) for job in (a, b)] == [2, 2]
        device.drain()
        assert [fences.count_ahead(job.member.member[0]) for job in (a, b)] == [0, 0]


def test_a_job_does_not_run_further_ahead_than_its_bound() -> None:
    """At its bound a job waits for its device, unless that has nothing left to do: then the bound grows."""
    with make_timeline_pool(16, _COARSE_BYTES) as pool, joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 16)
        a.release(list(range(16)))
        b.mark(0)
        for _ in range(_IN_START):
            assert b.acquire(0, [NOBODY])[0] == BEHIND
        assert b.acquire(0, [NOBODY])[0] == MUST_WAIT
        assert pool.jobs[b.number]["ahead_cap"] == fences.START_BYTES
        counters(pool)[b.number, 0] = b.issued(0)  # its device has done all it was given
        assert b.acquire(0, [NOBODY])[0] == BEHIND
        assert pool.jobs[b.number]["ahead_cap"] == 2 * fences.START_BYTES


def test_a_device_is_not_idle_while_a_release_has_no_mark() -> None:
    """What was put on a stream before the release may not be done: the bound grows only when a mark says that it is."""
    with make_timeline_pool(16, _COARSE_BYTES) as pool, joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 16)
        a.release(list(range(16)))
        assert b.acquire(0, [0])[0] == BEHIND
        b.release([0], issue=False)
        assert b.acquire(0, [0])[0] == GRANTED
        for _ in range(_IN_START):
            assert b.acquire(0, [NOBODY])[0] == BEHIND
        assert b.acquire(0, [NOBODY])[0] == MUST_WAIT
        assert pool.jobs[b.number]["ahead_cap"] == fences.START_BYTES
        b.mark(0)
        counters(pool)[b.number, 0] = b.issued(0)
        assert b.acquire(0, [NOBODY])[0] == BEHIND


def test_a_request_larger_than_the_bound_is_served_when_nothing_is_ahead() -> None:
    """No request is too large for the bound: with nothing ahead it is granted at once."""
    with make_timeline_pool(16, _COARSE_BYTES) as pool, joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 16)
        a.release(list(range(16)))
        assert b.acquire(0, [NOBODY] * (2 * _IN_START))[0] == BEHIND


def test_a_waiting_neighbour_makes_the_bound_shrink() -> None:
    """A job that takes regions behind fences while others wait for memory does so less and less far ahead."""
    with make_timeline_pool(16, _COARSE_BYTES) as pool, joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 16)
        a.release(list(range(16)))
        b.acquire(0, [NOBODY])
        pool.header["waiters"] = 1
        b.acquire(0, [NOBODY])
        assert pool.jobs[b.number]["ahead_cap"] == fences.START_BYTES * 3 // 4
        pool.jobs[b.number]["waiting_threads"] = 1
        b.acquire(0, [NOBODY])
        assert pool.jobs[b.number]["ahead_cap"] == fences.START_BYTES * 3 // 4
        pool.header["waiters"] = pool.jobs[b.number]["waiting_threads"] = 0


def test_without_a_broker_a_dead_jobs_regions_come_back_after_a_while(pool: PoolTable) -> None:
    """Invariants 2 and 5: nobody can tell whether the device still works for it, so whoever waits lets time pass."""
    with joined(pool, 2) as (_, (a, b)):
        a.acquire(0, [NOBODY] * 4)
        pool.jobs[a.number]["pid"] = ABSENT_PID
        pool.jobs[a.number]["waiting_threads"] = pool.header["waiters"] = 1
        deaths.reap_dead(b.member.member[0])
        assert (pool.jobs[a.number]["state"], pool.header["waiters"]) == (JobState.LEAVING, 0)
        sequence = int(pool.header["sequence"])
        deaths.reap_dead(b.member.member[0])
        assert pool.header["sequence"] == sequence, "a look changes nothing, so a standstill stays one"
        assert b.acquire(0, [NOBODY])[0] == MUST_WAIT
        pool.jobs[b.number]["waiting_threads"] = 1
        assert waits.patience_ns(b.member.member[0], 1) == rules.IDLE_NS > deaths.LINGER_NS
        pool.jobs[a.number]["died_ns"] -= deaths.LINGER_NS
        deaths.reap_dead(b.member.member[0])
        assert waits.patience_ns(b.member.member[0], 1) == waits.STUCK_NS
        assert b.acquire(0, [NOBODY] * 4)[0] == GRANTED


def test_late_marks_of_a_dead_job_strand_no_stream(pool: PoolTable) -> None:
    """Invariants 5 and 7: a context that outlives the deadline sets counters back; each look sets them again.

    Nobody gets the place meanwhile.
    """
    with joined(pool, 2) as (device, (a, b)):
        a.acquire(0, [NOBODY] * 4)
        a.mark(0)
        a.release([0, 1, 2, 3])
        assert b.acquire(0, [NOBODY] * 4)[0] == BEHIND
        pool.jobs[a.number]["pid"] = ABSENT_PID
        deaths.reap_dead(b.member.member[0])
        pool.jobs[a.number]["died_ns"] -= deaths.LINGER_NS
        deaths.reap_dead(b.member.member[0])
        assert pool.jobs[a.number]["state"] == JobState.EMPTY
        device.outlives(a.streams)
        assert device.step(a.streams[0])
        assert not device.step(b.streams[0]), "the first of two marks has set the counter back"
        assert pool.join(os.getpid(), "c") != a.number
        deaths.reap_dead(b.member.member[0])
        assert device.step(b.streams[0])
        pool.settle_place(a.number, has_ended=True)
        assert pool.join(os.getpid(), "d") == a.number
