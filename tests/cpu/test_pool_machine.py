"""Regions changing hands: several members of one pool in one process, against a model in plain Python."""

from __future__ import annotations

import time

import numpy as np
from cpu.support.members import (
    HOUR_NS,
    acquire,
    bare_list,
    check_counters,
    counters,
    fence,
    free_list,
    give_profile,
    job_of,
    join,
    owners,
    release,
)
from cpu.support.pool_model import INSIDE, ModelJob, ModelledPool, need, when_possible
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from zico.pool import boundaries, mutex, waits
from zico.pool.layout import NOBODY, JobState
from zico.pool.results import GRANTED, MUST_WAIT
from zico.trace import profile as curve


# -- members
class PoolMachine(ModelledPool):
    """Do anything that members, the broker and the device may do; the table must agree with the model."""

    @precondition(lambda self: len(self.jobs) < 4)
    @rule(limit=st.integers(0, 10), is_all=st.booleans())
    @when_possible
    def join(self, limit: int, is_all: bool) -> None:  # noqa: FBT001 - drawn
        """A job gets the first empty place, with a clean record, and maybe a limit; that may be all it is promised."""
        member = self.stack.enter_context(join(self.pool))
        number = job_of(member)
        assert number == next(i for i in range(4) if i not in self.jobs)
        record = self.pool.jobs[number]
        for field in ("held", "peak_held", "iteration", "first_boundary_ns", "claim_floor", "persistent", "profiled"):
            assert record[field] == 0
        self.pool.set_limit(number, limit)
        job = self.jobs[number] = ModelJob(member, limit=limit, promised=self.budget)
        if is_all:
            self.pool.promise_no_more(number)
            job.promised = job.cap(self.budget)

    @rule(data=st.data(), levels=st.lists(st.integers(0, 9), min_size=1, max_size=6), at=st.integers(0, 20))
    @when_possible
    def profile(self, data: st.DataObject, levels: list[int], at: int) -> None:
        """A job is known, rightly or wrongly, and has come to some progress."""
        _, job = self._pick(data, JobState.RUNNING)
        job.profiled, job.levels, job.progress = True, levels, at
        give_profile(job.record, levels)
        job.record["progress"] = at

    @rule(data=st.data(), more=st.integers(1, 20))
    @when_possible
    def progress(self, data: st.DataObject, more: int) -> None:
        """A job goes on."""
        _, job = self._pick(data, JobState.RUNNING)
        job.progress += more
        job.record["progress"] += more

    @rule(data=st.data(), n=st.integers(1, 4))
    @when_possible
    def acquire(self, data: st.DataObject, n: int) -> None:
        """Invariants 1, 2, 3: a grant is made exactly if budget, fences and claims allow it; preferences are met."""
        number, job = self._pick(data, *INSIDE)
        wanted = data.draw(st.lists(st.integers(NOBODY, self.n - 1), min_size=n, max_size=n))
        expected = self._expected_status(number, n)
        takable = {r for r in [*self.free, *self.bare] if self._takable(r, number)}
        status, granted = acquire(job.member, wanted)
        assert status in ((expected,) if expected is not None else (GRANTED, MUST_WAIT))
        assert job.record["claim_floor"] == job.floor
        if self.pool.header["alone_job"] != NOBODY and not job.profiled and self.claims:
            self._note_alone(number, status)
        if status != GRANTED:
            if status == MUST_WAIT and free_list(self.pool) != [*self.free, *self.bare]:
                self._take(number, wanted)  # half a grant was taken back: these are at the end now
            return
        assert set(granted) <= takable
        assert len(set(granted)) == n
        assert granted == self._take(number, wanted)
        job.held |= set(granted)
        self.spare = min(self.spare, len(self.free))

    def _note_alone(self, number: int, status: int) -> None:
        """Freeze the clock of whoever grows alone, so that only ``time_passes`` ends it."""
        header = self.pool.header
        if header["alone_job"] == number and (status == GRANTED or self.alone != number or not self.alone_is_fresh):
            self.alone, self.alone_is_fresh = number, True
            header["alone_since_ns"] = time.monotonic_ns() + HOUR_NS
            self.jobs[number].record["alone_spent_ns"] = 0

    @rule()
    @when_possible
    def time_passes(self) -> None:
        """Whoever grew alone has not grown for long, and has waited for as long if it waits."""
        self.alone_is_fresh = False
        long_ago_ns = time.monotonic_ns() - HOUR_NS
        self.pool.header["alone_since_ns"] = long_ago_ns
        for job in self.jobs.values():
            if job.threads:
                job.waited, job.record["need_since_ns"] = True, long_ago_ns

    @rule(data=st.data())
    @when_possible
    def release(self, data: st.DataObject) -> None:
        """A job gives some regions back, in any order."""
        number, job = self._pick(data, *INSIDE)
        need(job.held)
        given = data.draw(st.lists(st.sampled_from(sorted(job.held)), min_size=1, unique=True))
        self.pool.regions["fence"][given] = 0  # as on the host device, whose fences are all 0
        release(job.member, given)
        job.held -= set(given)
        self.free += given
        self.fence |= dict.fromkeys(given, (number, job.passed))

    @rule(data=st.data(), ahead=st.integers(1, 3))
    @when_possible
    def run_ahead(self, data: st.DataObject, ahead: int) -> None:
        """The device has yet to finish with a region that is free."""
        guarded = [r for r in self.free if self.fence.get(r, (NOBODY, 0))[0] != NOBODY]
        need(guarded)
        r = data.draw(st.sampled_from(guarded))
        owner, _ = self.fence[r]
        self.fence[r] = (owner, self.jobs[owner].passed + ahead)
        self.pool.regions[r]["fence"] = fence(owner, 0, self.fence[r][1])

    @rule(data=st.data(), by=st.integers(1, 3))
    @when_possible
    def device_goes_on(self, data: st.DataObject, by: int) -> None:
        """The device's counter of a job grows."""
        number, job = self._pick(data, *INSIDE)
        job.passed += by
        counters(self.pool)[number, 0] = job.passed

    @rule(data=st.data(), need=st.integers(1, 9))
    @when_possible
    def start_waiting(self, data: st.DataObject, need: int) -> None:
        """One more thread waits; it waits for those who hold something."""
        number, job = self._pick(data, JobState.RUNNING)
        waits.start_waiting(job.member.member[0], need)
        if job.threads == 0:
            job.waited, job.record["need_since_ns"] = False, time.monotonic_ns() + HOUR_NS
        job.threads += 1
        holders = sum(1 << other for other, j in self.jobs.items() if other != number and j.held)
        assert job.record["waits_for"] == holders
        assert job.record["need"] == need

    @rule(data=st.data())
    @when_possible
    def stop_waiting(self, data: st.DataObject) -> None:
        """A thread waits no more; with the last one the notes are wiped."""
        _, job = self._pick(data, *INSIDE)
        need(job.threads)
        waits.stop_waiting(job.member.member[0])
        job.threads -= 1
        if job.threads == 0:
            assert [int(job.record[f]) for f in ("need", "need_since_ns", "waits_for")] == [0, 0, 0]

    # -- iterations

    @rule(data=st.data(), more=st.integers(0, 6))
    @when_possible
    def finish_iteration(self, data: st.DataObject, more: int) -> None:
        """A job goes on unasked exactly if that is allowed and all peaks fit together; else it stands still."""
        number, job = self._pick(data, JobState.RUNNING)
        need(job.begun)
        peak = len(job.held) + more
        curve.begin(job.record["current"], 0, peak)
        job.record["profiled"] = 0  # learning is the curve's business: start from the flat profile of this one
        admitted = bool(boundaries.finish_iteration(job.member.member[0], 0))
        if self.alone == number:
            self.alone = None
        job.profiled, job.levels, job.persistent = True, [peak], len(job.held)
        give_profile(job.record, [peak])
        total = sum(j.within_limit(max(j.floor, max(j.levels, default=0))) for j in self.jobs.values())
        if not self.claims:
            assert admitted == self.unasked
        elif not self._someone_else_is_alone(number):
            assert admitted == (self.unasked and total <= self.budget)
        job.begun = False
        job.state = JobState.RUNNING if admitted else JobState.BOUNDARY
        job.floor = int(job.record["claim_floor"])
        job.progress = int(job.record["progress"])

    @rule(data=st.data())
    @when_possible
    def admit(self, data: st.DataObject) -> None:
        """Invariant 3: a job starts only if everybody can then finish with its whole peak."""
        number, job = self._pick(data, JobState.BOUNDARY)
        claim = job.within_limit(max(int(job.record["claim_peak"]), job.persistent))
        safe = self._is_safe_with(number, 0, claim, must=job.profiled) if self.claims else True
        if all(other.state != JobState.RUNNING for other in self.jobs.values()):
            safe = True  # one must start, even if it will overflow into the next tier
        admitted = self.pool.admit(number)
        if safe is not None:
            assert admitted == safe
        if admitted:
            job.state = JobState.RUNNING
            job.floor = int(job.record["claim_floor"])
            assert job.claim() >= job.within_limit(max(job.levels, default=0)), (
                "whoever is admitted claims its whole peak at once"
            )

    @rule(data=st.data())
    @when_possible
    def begin_iteration(self, data: st.DataObject) -> None:
        """An admitted job begins: nothing of the last iteration is left in its claim."""
        _, job = self._pick(data, JobState.RUNNING)
        need(not job.begun)
        boundaries.begin_iteration(job.member.member[0])
        job.begun, job.progress, job.floor = True, 0, 0
        assert job.record["claim_floor"] == job.record["progress"] == 0

    # -- the broker

    @rule(data=st.data())
    @when_possible
    def mark_leaving(self, data: st.DataObject) -> None:
        """A job whose connection is closed keeps its regions."""
        number, job = self._pick(data, JobState.RUNNING, JobState.BOUNDARY)
        self.pool.mark_leaving(number)
        job.state = JobState.LEAVING

    @rule(data=st.data())
    @when_possible
    def reap(self, data: st.DataObject) -> None:
        """Invariant 5: all that a dead job held is free, and nobody waits for its fences."""
        number, job = self._pick(data, *INSIDE)
        assert self.pool.reap(number) == len(job.held)
        assert self.pool.reap(number) == 0
        self.free += sorted(job.held)
        for r in [*self.free, *self.bare]:
            if r in job.held or self.fence.get(r, (NOBODY, 0))[0] == number:
                self.fence[r] = (NOBODY, 0)
        del self.jobs[number]
        if self.alone == number:
            self.alone = None

    @rule(data=st.data())
    @when_possible
    def lower_or_raise_the_budget(self, data: st.DataObject) -> None:
        """Invariant 1: the budget changes while jobs run."""
        self.budget = data.draw(st.integers(1, self.n))
        self.pool.set_budget(self.budget)
        for job in self.jobs.values():
            job.promised = max(job.promised, job.cap(self.budget))
        self._settle()

    @rule()
    def settle(self) -> None:
        """Invariant 1: what comes back beyond a budget that was lowered gives its pages back."""
        self.pool.settle()
        self._settle()

    def _settle(self) -> None:
        while self.free and len(self.free) + self._granted() > max(self.budget, self._granted()):
            self.bare.append(self.free.pop(0))

    @rule(n=st.integers(1, 4))
    def empty(self, n: int) -> None:
        """The least recently released of the free regions give their pages back."""
        self.pool.empty(n)
        self.bare += self.free[:n]
        del self.free[:n]

    @rule()
    def ask_what_is_spare(self) -> None:
        """What was free all the time since the last question, and had pages, nobody needed."""
        assert self.pool.take_spare() == min(self.spare, len(self.free))
        self.spare = len(self.free)

    @rule(data=st.data())
    @when_possible
    def limit(self, data: st.DataObject) -> None:
        """Invariant 1: a job may be given a limit of its own, and lose it."""
        number, job = self._pick(data, *INSIDE)
        job.limit = data.draw(st.integers(0, self.n))
        self.pool.set_limit(number, job.limit)
        job.promised = max(job.promised, job.cap(self.budget))

    @rule(seed=st.integers(0, 1 << 30))
    @when_possible
    def die_inside(self, seed: int) -> None:
        """Invariant 5: whatever a death inside left of counters and lists, they are rebuilt from the owners."""
        rng = np.random.default_rng(seed)
        header, records = self.pool.header, self.pool.jobs
        for field in ("granted", "free_head", "free_tail", "waiters", "boundary_waiters", "bare", "bare_head"):
            header[field] = rng.integers(-5, 50)
        for field in ("previous", "next"):
            self.pool.regions[field] = rng.integers(-1, self.n, self.n)
        for number in range(int(header["places"])):
            records[number]["held"] = rng.integers(0, 50)
        mutex.recover(self.pool.member[0])
        self.recoveries += 1
        self.free.sort()
        self.bare.sort()
        self.spare = min(self.spare, len(self.free))
        assert header["recoveries"] == self.recoveries

    # -- what is always true

    @invariant()
    def agrees(self) -> None:
        """Invariants 1 and 2, and every counter."""
        if not hasattr(self, "stack"):
            return
        check_counters(self.pool)
        header = self.pool.header
        assert free_list(self.pool) == [*self.free, *self.bare]
        assert bare_list(self.pool) == self.bare
        expected = [NOBODY] * self.n
        for number, job in self.jobs.items():
            for r in job.held:
                assert expected[r] == NOBODY
                expected[r] = number
            assert job.record["state"] == job.state
            assert job.record["waiting_threads"] == job.threads
        assert owners(self.pool) == expected
        assert header["waiters"] == sum(job.threads for job in self.jobs.values())
        assert header["boundary_waiters"] == sum(job.state == JobState.BOUNDARY for job in self.jobs.values())
        assert self._granted() <= self.ceiling, "invariant 1: while the budget is lowered the sum only falls"
        self.ceiling = max(self.budget, self._granted())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestPool = PoolMachine.TestCase
