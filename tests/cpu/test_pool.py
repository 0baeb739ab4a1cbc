"""Regions changing hands: several members of one pool in one process, against a model in plain Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from members import (
    HOUR_NS,
    acquire,
    check_counters,
    counters,
    fence,
    free_list,
    give_profile,
    grab,
    job_of,
    join,
    make_pool,
    owners,
    release,
)
from scheduler_cases import Debt, some_order_works

from zico.errors import BrokerError
from zico.pool import mutex, regions, safety, waiting
from zico.pool.layout import CURVE_BINS, MAX_JOBS, NOBODY, PARKED, JobState
from zico.pool.regions import GONE, GRANTED, NEVER, WAIT
from zico.trace import curve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.pool.table import PoolTable

Record = Any
DEADLINE_S = 20.0
INSIDE = (JobState.RUNNING, JobState.BOUNDARY, JobState.LEAVING)


# -- the model ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ModelJob:
    """What the model knows of one job."""

    member: PoolTable
    state: JobState = JobState.RUNNING
    held: set[int] = dataclasses.field(default_factory=set)
    levels: list[int] = dataclasses.field(default_factory=list)
    profiled: bool = False
    begun: bool = True
    progress: int = 0
    floor: int = 0
    extra: int = 0
    persistent: int = 0
    passed: int = 0
    limit: int = 0
    promised: int = 0
    threads: int = 0

    @property
    def record(self) -> Record:
        """Return the job's shared record."""
        return self.member.jobs[job_of(self.member)]

    def claim(self) -> int:
        """Return the most regions it may come to hold before its iteration ends."""
        if self.state != JobState.RUNNING or not self.profiled:
            return len(self.held)
        return self.within_limit(max(self.floor, self.expected() + self.extra))

    def within_limit(self, regions: int) -> int:
        """Return so many regions, or its limit, but no fewer than it holds."""
        return max(len(self.held), min(regions, self.limit) if self.limit else regions)

    def expected(self) -> int:
        """Return what the profile says of the rest of the iteration, four bins earlier for safety's sake."""
        if self.progress > len(self.levels) - 1 + 8:
            return max(self.levels)
        return max(self.levels[min(max(self.progress - 4, 0), len(self.levels) - 1) :])

    def debt(self, more: int = 0, claim: int | None = None, *, must: bool | None = None) -> Debt:
        """Return the job as the banker sees it, with ``more`` regions."""
        inside = self.state == JobState.RUNNING and self.profiled
        claims = self.claim() if claim is None else claim
        return Debt(len(self.held) + more, claims, self.persistent, inside if must is None else must)


class NotNow(Exception):  # noqa: N818 - no error
    """The state has nothing for a step."""


def need(condition: object) -> None:
    """Leave the step out if there is nothing for it; ``assume`` would throw the whole example away."""
    if not condition:
        raise NotNow


def when_possible(step: Callable[..., None]) -> Callable[..., None]:
    """Make a rule that does nothing where ``need`` says so."""

    @functools.wraps(step)
    def tried(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the rule's own
        with contextlib.suppress(NotNow):
            step(*args, **kwargs)

    return tried


class PoolMachine(RuleBasedStateMachine):
    """Do anything that members, the broker and the device may do; the table must agree with the model."""

    @initialize(n=st.integers(2, 10), claims=st.booleans(), unasked=st.booleans())
    def begin(self, n: int, claims: bool, unasked: bool) -> None:  # noqa: FBT001 - drawn
        """Make a pool."""
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(make_pool(n, claims=claims, unasked=unasked))
        self.n, self.claims, self.unasked, self.budget = n, claims, unasked, n
        self.jobs: dict[int, ModelJob] = {}
        self.ceiling = n
        self.free = list(range(n))
        self.parked: set[int] = set()
        self.fence: dict[int, tuple[int, int]] = {}
        self.recoveries = 0
        self.alone: int | None = None
        self.alone_is_fresh = False

    def teardown(self) -> None:
        """Close all mappings."""
        if hasattr(self, "stack"):
            self.stack.close()

    # -- helpers

    def _pick(self, data: st.DataObject, *states: JobState) -> tuple[int, ModelJob]:
        fit = [(number, job) for number, job in self.jobs.items() if job.state in states]
        need(fit)
        return data.draw(st.sampled_from(fit))

    def _granted(self) -> int:
        return sum(len(job.held) for job in self.jobs.values())

    def _takable(self, r: int, number: int) -> bool:
        if r not in self.free:
            return False
        owner, value = self.fence.get(r, (NOBODY, 0))
        return owner in (NOBODY, number) or value <= self.jobs[owner].passed

    def _others(self, number: int) -> list[Debt]:
        return [job.debt() for other, job in self.jobs.items() if other != number]

    def _is_safe_with(self, number: int, more: int, claim: int, *, must: bool) -> bool | None:
        """Tell whether the state is safe after a grant; ``None`` if it was unsafe without the requester already."""
        free = self.budget - self._granted()
        others = self._others(number)
        mine = self.jobs[number].debt(more, claim, must=must)
        if some_order_works(free - more, [*others, mine]):
            return True
        return False if some_order_works(free, others) else None

    def _someone_else_is_alone(self, number: int) -> bool:
        if self.alone in (None, number) or not self.alone_is_fresh:
            return False
        job = self.jobs.get(self.alone)
        return job is not None and job.state == JobState.RUNNING and not job.profiled

    def _expected_status(self, number: int, n: int) -> int | None:
        """Predict the answer; ``None`` where the state is unsafe already and either is right."""
        job = self.jobs[number]
        if job.state == JobState.LEAVING:
            return GONE
        if len(job.held) + n > job.promised:
            return NEVER
        if job.limit and len(job.held) + n > job.limit:
            return WAIT
        if self._granted() + n > self.budget:
            return WAIT
        may = self._claims_allow(number, n) if self.claims else True
        if may is None:
            return None
        return GRANTED if may and sum(self._takable(r, number) for r in self.free) >= n else WAIT

    def _claims_allow(self, number: int, n: int) -> bool | None:
        """Tell whether claims allow a grant; a request above the claim raises it, granted or not."""
        job = self.jobs[number]
        if not job.profiled:
            return not self._someone_else_is_alone(number) and self._is_safe_with(number, n, 0, must=False)
        if len(job.held) + n > job.claim():
            job.extra = len(job.held) + n - job.expected()
            return self._is_safe_with(number, n, len(job.held) + n, must=True)
        return self._is_safe_with(number, n, job.claim(), must=True)

    def _take(self, number: int, wanted: list[int]) -> list[int] | None:
        """Do what the grant should do to the free list; returns the regions, ``None`` if too few can be had."""
        result: list[int] = []
        for r in wanted:
            result.append(r if self._takable(r, number) else NOBODY)
            if result[-1] != NOBODY:
                self.free.remove(r)
        for i, r in enumerate(result):
            if r == NOBODY:
                first = next((f for f in self.free if self._takable(f, number)), None)
                if first is None:
                    self.free += [r for r in result if r != NOBODY]
                    return None
                self.free.remove(first)
                result[i] = first
        return result

    # -- members

    @precondition(lambda self: len(self.jobs) < 4)
    @rule()
    @when_possible
    def join(self) -> None:
        """A job gets the first empty place, with a clean record."""
        member = self.stack.enter_context(join(self.pool))
        number = job_of(member)
        assert number == next(i for i in range(4) if i not in self.jobs)
        record = self.pool.jobs[number]
        for field in ("held", "peak_held", "iteration", "first_boundary_ns", "claim_floor", "persistent", "profiled"):
            assert record[field] == 0
        self.jobs[number] = ModelJob(member, promised=self.budget)

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
        takable = {r for r in self.free if self._takable(r, number)}
        status, granted = acquire(job.member, wanted)
        assert status in ((expected,) if expected is not None else (GRANTED, WAIT))
        assert job.record["claim_floor"] == job.floor
        if self.pool.header["alone_job"] != NOBODY and not job.profiled and self.claims:
            self._note_alone(number, status)
        if status != GRANTED:
            if status == WAIT and free_list(self.pool) != self.free:
                self._take(number, wanted)  # half a grant was taken back: these are at the end now
            return
        assert set(granted) <= takable
        assert len(set(granted)) == n
        assert granted == self._take(number, wanted)
        job.held |= set(granted)

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
        """Whoever grew alone has not grown for long."""
        self.alone_is_fresh = False
        self.pool.header["alone_since_ns"] = time.monotonic_ns() - HOUR_NS

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
        waiting.start_waiting(job.member.member[0], need)
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
        waiting.stop_waiting(job.member.member[0])
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
        admitted = bool(waiting.finish_iteration(job.member.member[0]))
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
        waiting.begin_iteration(job.member.member[0])
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
        for r in self.free:
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
            job.promised = max(job.promised, self.budget)
        self._settle()

    @rule()
    def settle(self) -> None:
        """Invariant 1: what comes back beyond a budget that was lowered is parked."""
        self.pool.settle()
        self._settle()

    def _settle(self) -> None:
        left_out = self.n - max(self.budget, self._granted())
        while len(self.parked) < left_out and self.free:
            self.parked.add(self.free.pop(0))
        while len(self.parked) > left_out:
            self.free.append(min(self.parked))
            self.parked.remove(min(self.parked))

    @rule(data=st.data())
    @when_possible
    def limit(self, data: st.DataObject) -> None:
        """Invariant 1: a job may be given a limit of its own, and lose it."""
        number, job = self._pick(data, *INSIDE)
        job.limit = data.draw(st.integers(0, self.n))
        self.pool.set_limit(number, job.limit)

    @rule(seed=st.integers(0, 1 << 30))
    @when_possible
    def die_inside(self, seed: int) -> None:
        """Invariant 5: whatever a death inside left of counters and lists, they are rebuilt from the owners."""
        rng = np.random.default_rng(seed)
        header, records = self.pool.header, self.pool.jobs
        for field in ("granted", "free_head", "free_tail", "waiters", "boundary_waiters", "parked"):
            header[field] = rng.integers(-5, 50)
        for field in ("previous", "next"):
            self.pool.regions[field] = rng.integers(-1, self.n, self.n)
        for number in range(int(header["places"])):
            records[number]["held"] = rng.integers(0, 50)
        mutex.recover(self.pool.member[0])
        self.recoveries += 1
        self.free.sort()
        assert header["recoveries"] == self.recoveries

    # -- what is always true

    @invariant()
    def agrees(self) -> None:
        """Invariants 1 and 2, and every counter."""
        if not hasattr(self, "stack"):
            return
        check_counters(self.pool)
        header = self.pool.header
        assert free_list(self.pool) == self.free
        expected = [PARKED if r in self.parked else NOBODY for r in range(self.n)]
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


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


# -- by hand --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of ten regions in which nobody starts unasked."""
    with make_pool(10, unasked=False) as pool:
        yield pool


@contextlib.contextmanager
def joined(pool: PoolTable, n: int) -> Iterator[list[PoolTable]]:
    """Join ``n`` times."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(join(pool, f"job{i}")) for i in range(n)]


def test_a_released_region_comes_back_to_where_it_is_mapped(pool: PoolTable) -> None:
    """A job gets the region it names, although others were released earlier."""
    with joined(pool, 1) as (member,):
        first = grab(member, 4)
        release(member, first)
        for r in first[::-1]:
            assert acquire(member, [r]) == (GRANTED, [r])


def test_a_region_named_twice_is_granted_once(pool: PoolTable) -> None:
    """Invariant 2: two slots that want the same region get two."""
    with joined(pool, 1) as (member,):
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


def test_more_than_the_budget_is_never_granted(pool: PoolTable) -> None:
    """Invariant 1: a request above the budget with what is held is answered NEVER, below it WAIT or GRANTED."""
    with joined(pool, 2) as (first, second):
        assert acquire(first, [NOBODY] * 11)[0] == NEVER
        grab(first, 6)
        assert acquire(first, [NOBODY] * 5)[0] == NEVER
        pool.jobs[job_of(first)]["profiled"] = 1  # no longer growing alone
        pool.header["alone_job"] = NOBODY
        assert acquire(second, [NOBODY] * 5)[0] == WAIT
        assert acquire(second, [NOBODY] * 11)[0] == NEVER
        check_counters(pool)


def test_while_the_budget_is_lowered_the_sum_only_falls(pool: PoolTable) -> None:
    """Invariant 1: with more granted than the new budget nothing is granted until enough has come back."""
    with joined(pool, 2) as (first, second):
        pool.header["use_claims"] = 0
        held = grab(first, 5)
        grab(second, 4)
        pool.set_budget(6)
        while int(pool.header["granted"]) >= 6:
            assert acquire(second, [NOBODY])[0] == WAIT
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
        assert acquire(second, [given[0], NOBODY])[0] == WAIT
        assert owners(pool) == before
        check_counters(pool)
        assert acquire(second, [given[0]]) == (GRANTED, [9])
        counters(pool)[job_of(first), 0] = 2
        assert acquire(second, [given[0]])[0] == WAIT
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
        waiting.start_waiting(member.member[0], 2)
        waiting.finish_iteration(member.member[0])
        pool.reap(job_of(member))
    with joined(pool, 1) as (member,):
        record = pool.jobs[job_of(member)]
        assert record["state"] == JobState.RUNNING
        nonzero = {name for name in record.dtype.names if np.any(record[name] != np.zeros_like(record[name]))}
        assert nonzero <= {"name", "state", "pid", "started_ns", "current", "promised"}
        assert (int(pool.header["waiters"]), int(pool.header["boundary_waiters"])) == (0, 0)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.BOUNDARY])
def test_a_job_that_leaves_at_any_time_leaves_no_count_behind(pool: PoolTable, state: JobState) -> None:
    """A job that is marked as leaving at its boundary is no longer counted as waiting there, nor after its death."""
    with joined(pool, 1) as (member,):
        if state == JobState.BOUNDARY:
            assert not waiting.finish_iteration(member.member[0])
        pool.mark_leaving(job_of(member))
        assert pool.header["boundary_waiters"] == 0
        pool.reap(job_of(member))
        assert pool.header["boundary_waiters"] == 0


def test_a_leaving_job_does_not_come_back_by_ending_an_iteration(pool: PoolTable) -> None:
    """A job marked as leaving stays so at its next boundary, is not kept there, and is granted nothing."""
    with joined(pool, 1) as (member,):
        pool.mark_leaving(job_of(member))
        assert waiting.finish_iteration(member.member[0])
        waiting.begin_iteration(member.member[0])
        assert pool.jobs[job_of(member)]["state"] == JobState.LEAVING
        assert pool.header["boundary_waiters"] == 0
        assert not pool.admit(job_of(member))
        assert acquire(member, [NOBODY])[0] == GONE


def test_a_grant_that_could_lock_both_jobs_is_refused(pool: PoolTable) -> None:
    """Invariant 3: the example of the banker's rule: with one region more for A neither could finish."""
    with joined(pool, 2) as (a, b):
        grab(a, 3)
        pool.header["alone_job"] = NOBODY
        grab(b, 5)
        for member, claim, residual in ((a, 9, 1), (b, 7, 1)):
            give_profile(pool.jobs[job_of(member)], [claim])
            pool.jobs[job_of(member)]["persistent"] = residual
        assert acquire(a, [NOBODY])[0] == WAIT
        grab(b, 2)
        assert acquire(a, [NOBODY])[0] == WAIT
        release(b, [r for r, owner in enumerate(owners(pool)) if owner == job_of(b)][:6])
        pool.jobs[job_of(b)]["claims"] = 1
        grab(a, 6)


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
        assert not waiting.finish_iteration(a.member[0])
        assert pool.admit(job_of(a))
        assert acquire(b, [NOBODY] * 3)[0] == WAIT
        grab(b, 2)
        waiting.begin_iteration(a.member[0])
        grab(a, 5)


def test_a_dead_jobs_unsent_notice_does_not_silence_the_others(pool: PoolTable) -> None:
    """Invariant 5: whoever died between noting that it would write the eventfd and writing it keeps nobody waiting."""
    with joined(pool, 3) as (stands, dead, other):
        (r,) = grab(other, 1)
        assert not waiting.finish_iteration(stands.member[0])
        os.eventfd_read(pool.notify_fd)
        assert pool.header["notified"] == 1, "as the dead job left it, with nothing written"
        pool.reap(job_of(dead))
        release(other, [r])
        assert os.eventfd_read(pool.notify_fd) >= 1


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

    The three words are written in an order in which every prefix is right; read here as the table after each step.
    """
    with joined(pool, 1) as (member,):
        (r,) = grab(member, 1)
        word = fence(job_of(member), 3, 7)
        regions.give_back(member.member[0], np.array([r], "i4"), 1, word)
        assert (int(pool.regions[r]["last_owner"]), int(pool.regions[r]["fence"])) == (job_of(member), word)


# -- waits ----------------------------------------------------------------------------------------------------------


def test_a_release_wakes_whoever_waits_for_memory(pool: PoolTable) -> None:
    """Invariant 7: a thread that sleeps until the pool changes is woken by a release, long before its slice ends."""
    with joined(pool, 2) as (first, second):
        second.member[0]["slice"] = (1000, 0)
        (r,) = grab(first, 1)
        waiting.start_waiting(second.member[0], 1)
        sequence = int(pool.header["sequence"])
        thread = threading.Thread(target=waiting.sleep_until_change, args=(second.member[0], sequence), daemon=True)
        thread.start()
        release(first, [r])
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_an_admission_wakes_the_job_without_its_python(pool: PoolTable) -> None:
    """Invariant 7: a job that sleeps at its boundary goes on when it is admitted."""
    with joined(pool, 1) as (member,):
        member.member[0]["slice"] = (1000, 0)
        assert not waiting.finish_iteration(member.member[0])
        thread = threading.Thread(target=waiting.await_admission, args=(member.member[0],), daemon=True)
        thread.start()
        assert pool.admit(job_of(member))
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert pool.jobs[job_of(member)]["boundary_since_ns"] == 0


def test_without_a_broker_jobs_admit_themselves_and_bury_the_dead(pool: PoolTable) -> None:
    """Invariant 7: when the broker's process is gone a job starts as soon as that is safe, and reaps dead jobs."""
    gone = _dead_pid()
    with joined(pool, 2) as (member, dead):
        grab(dead, 7)
        pool.jobs[job_of(dead)]["pid"] = gone
        pool.header["broker_pid"] = gone
        assert not waiting.finish_iteration(member.member[0])
        waiting.await_admission(member.member[0])
        assert pool.jobs[job_of(member)]["state"] == JobState.RUNNING
        assert pool.jobs[job_of(dead)]["state"] == JobState.EMPTY
        check_counters(pool)
        grab(member, 10)


def _dead_pid() -> int:
    """Return the number of a process that has been and is no more."""
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(DEADLINE_S)
    return child.pid


def test_a_state_in_which_nobody_runs_is_given_up_sooner(pool: PoolTable) -> None:
    """A job inside its iteration with no waiting thread makes the others more patient, but not for ever."""
    with joined(pool, 2) as (a, b):
        waiting.start_waiting(a.member[0], 3)
        assert waiting.patience_ns(a.member[0], 0) == waiting.STUCK_BESIDE_RUNNING_NS
        waiting.start_waiting(b.member[0], 2)
        assert waiting.patience_ns(a.member[0], 0) == waiting.STUCK_NS
        first = waiting.standstill(a.member[0])
        assert first == waiting.standstill(b.member[0])
        pool.jobs[job_of(b)]["progress"] += 1
        assert waiting.standstill(a.member[0]) != first
        assert not waiting.is_first_to_yield(a.member[0])
        assert waiting.is_first_to_yield(b.member[0])
        pool.jobs[job_of(b)]["need"] = 3
        assert waiting.is_first_to_yield(a.member[0])
        assert not waiting.is_first_to_yield(b.member[0])


@pytest.mark.parametrize("state", INSIDE)
def test_some_waiting_job_always_yields_first(pool: PoolTable, state: JobState) -> None:
    """Invariant 7: when all jobs wait, exactly one of those in an iteration is the first to use the next tier."""
    with joined(pool, 2) as (a, b):
        for member in (a, b):
            waiting.start_waiting(member.member[0], 2)
        pool.jobs[job_of(b)]["state"] = state
        assert sum(bool(waiting.is_first_to_yield(member.member[0])) for member in (a, b)) == 1
        pool.jobs[job_of(b)]["state"] = JobState.RUNNING


def test_the_broker_is_notified_once_until_it_looks(pool: PoolTable) -> None:
    """With a job at its boundary the first release writes the eventfd, later ones do not until the broker looks."""
    with joined(pool, 2) as (a, b):
        held = grab(b, 4)
        assert not waiting.finish_iteration(a.member[0])
        assert os.eventfd_read(pool.notify_fd) == 1
        release(b, held[:1])
        with pytest.raises(BlockingIOError):
            os.eventfd_read(pool.notify_fd)
        pool.clear_notified()
        release(b, held[1:2])
        release(b, held[2:3])
        assert os.eventfd_read(pool.notify_fd) == 1


def test_an_unprofiled_job_grows_alone_and_not_for_ever(pool: PoolTable) -> None:
    """While a first iteration grows no other first iteration may; it loses the right by time, or by its end."""
    with joined(pool, 2) as (a, b):
        grab(a, 1)
        pool.header["alone_since_ns"] = time.monotonic_ns() + HOUR_NS
        assert acquire(b, [NOBODY])[0] == WAIT
        for change in (
            ("header", "alone_since_ns", time.monotonic_ns() - 2 * safety.ALONE_FRESH_NS),
            ("job", "alone_spent_ns", safety.ALONE_LIMIT_NS + 1),
            ("job", "profiled", 1),
        ):
            record = pool.header if change[0] == "header" else pool.jobs[job_of(a)]
            before = record[change[1]].copy()
            record[change[1]] = change[2]
            (r,) = grab(b, 1)
            release(b, [r])
            record[change[1]] = before
            pool.header["alone_job"] = job_of(a)
            pool.header["alone_since_ns"] = time.monotonic_ns() + HOUR_NS
        assert acquire(b, [NOBODY])[0] == WAIT


# -- threads --------------------------------------------------------------------------------------------------------


def test_threads_of_several_members_keep_the_table_right() -> None:
    """Invariants 1 and 2: four members take and give at once; nothing is lost and nobody gets another's region."""
    with make_pool(24, claims=False) as pool, joined(pool, 4) as members:
        claimed = np.full(24, NOBODY)
        faults: list[str] = []

        def hammer(member: PoolTable) -> None:
            rng = np.random.default_rng(job_of(member))
            held: list[int] = []
            for _ in range(1500):
                wanted = rng.integers(-1, 24, rng.integers(1, 5)).tolist()
                status, granted = acquire(member, wanted)
                if status == GRANTED:
                    if (claimed[granted] != NOBODY).any():
                        faults.append("granted twice")
                    claimed[granted] = job_of(member)
                    held += granted
                give = held[: rng.integers(0, len(held) + 1)]
                if give:
                    claimed[give] = NOBODY
                    release(member, give)
                    held = held[len(give) :]
                if pool.header["peak_granted"] > 24:
                    faults.append("above the budget")
            claimed[held] = NOBODY
            release(member, held)

        threads = [threading.Thread(target=hammer, args=(member,), daemon=True) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert faults == []
        check_counters(pool)
        assert pool.header["granted"] == 0
        assert pool.header["recoveries"] == 0


def test_claims_arrays_have_room_for_every_bin() -> None:
    """A profile may use all of its bins; the last one is read and written inside the arrays."""
    with make_pool(10) as pool, joined(pool, 1) as (member,):
        record = pool.jobs[job_of(member)]
        give_profile(record, [1] * (CURVE_BINS - 1) + [5])
        record["progress"] = CURVE_BINS - 1
        grab(member, 5)
        record["progress"] = CURVE_BINS + 1000
        assert acquire(member, [NOBODY])[0] == GRANTED
        assert record["claim_extra"] == 1
