"""Ranks of one job: independent they reach a deadlock, as a group they never do; and what a pool does with a group."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.members import (
    HOUR_NS,
    acquire,
    check_counters,
    give_profile,
    grab,
    issued,
    job_of,
    joined,
    make_pool,
    release,
    tenants,
)
from cpu.support.threads import in_thread
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.harness import until

from zico.broker.admission import admit_all
from zico.broker.views import ProfileCache, pool_view
from zico.heap.layout import GRANULE_BYTES
from zico.pool import boundaries, rules, waits
from zico.pool.layout import JOB, NOBODY, JobState
from zico.pool.results import GRANTED, MUST_WAIT
from zico.pool.rules import is_safe, merge_groups
from zico.scheduler.policies import policy_named
from zico.trace.repeats import REPEATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.pool.table import PoolTable
    from zico.scheduler.state import PoolView

DEADLINE_S = 20.0

# -- the model: every order in which ranks can take regions, meet in collectives and give back ------


@dataclasses.dataclass(frozen=True)
class Program:
    """What each rank of a job does in an iteration: it comes to hold each level, and meets the others there."""

    levels: tuple[int, ...]
    kept: int = 0
    """Regions that a rank holds before its iteration and after it."""
    ranks: int = 2


@dataclasses.dataclass(frozen=True, order=True)
class Rank:
    """Where a rank is: before level ``at``, which it may hold already; -1: at its boundary."""

    at: int
    held: int
    spilled: int = 0
    """What it has in the next tier, of what it is to hold there."""

    @property
    def has(self) -> int:
        """What it has of memory, wherever."""
        return self.held + self.spilled


State = tuple[Rank, ...]


class Model:
    """Jobs of ranks under a budget, as one group each, or as independent jobs."""

    def __init__(self, programs: Sequence[Program], budget: int, *, grouped: bool) -> None:
        """Know the jobs."""
        self.programs = [program for program in programs for _ in range(program.ranks)]
        self.group = [1 + job for job, program in enumerate(programs) for _ in range(program.ranks)]
        self.budget, self.grouped = budget, grouped
        self._safe: dict[tuple[State, int], bool] = {}

    def start(self) -> State:
        """Return the state in which all ranks stand at their boundaries."""
        return tuple(Rank(-1, program.kept) for program in self.programs)

    def is_safe(self, state: State) -> bool:
        """Ask the project's rule."""
        inside = [0 <= rank.at < len(program.levels) for rank, program in zip(state, self.programs, strict=True)]
        held = np.array([rank.held for rank in state], np.int64)
        claim = np.array(
            [
                max(program.levels[rank.at :]) if into else rank.held
                for rank, program, into in zip(state, self.programs, inside, strict=True)
            ],
            np.int64,
        )
        residual = np.array([program.kept for program in self.programs], np.int64)
        must_finish, done = np.array(inside, np.uint8), np.zeros(len(state), np.uint8)
        free, n = self.budget - int(held.sum()), len(state)
        if self.grouped:
            merge_groups(np.array(self.group, np.int64), held, claim, residual, must_finish, self.budget, n)
        return free >= 0 and bool(is_safe(free, held, claim, residual, must_finish, done, n))

    def waiting(self, state: State) -> list[int]:
        """Return the ranks that wait for memory unless they get some now."""
        return [
            i
            for i, (rank, program) in enumerate(zip(state, self.programs, strict=True))
            if 0 <= rank.at < len(program.levels) and rank.has < program.levels[rank.at]
        ]

    def moves(self, state: State) -> Iterator[State]:
        """Return the states that follow: a start, a region more, the end of a collective or of an iteration."""
        for i, (rank, program) in enumerate(zip(state, self.programs, strict=True)):
            if rank.at == len(program.levels):
                continue
            if rank.at == -1:
                started = {i}
                if self.grouped:
                    started = {j for j in range(len(state)) if self.group[j] == self.group[i]}
                after = tuple(Rank(0, one.held) if j in started else one for j, one in enumerate(state))
                nobody_runs = all(not 0 <= r.at < len(p.levels) for r, p in zip(state, self.programs, strict=True))
                if all(state[j].at == -1 for j in started) and (nobody_runs or self.is_safe(after)):
                    yield after
            elif rank.has < program.levels[rank.at]:
                after = _with(state, i, Rank(rank.at, rank.held + 1, rank.spilled))
                if self.is_safe(after):
                    yield after
            elif all(self._has_come(state[j], i, rank.at) for j in range(len(state)) if self.group[j] == self.group[i]):
                after_at = rank.at + 1
                last = after_at == len(program.levels)
                held = program.kept if last else min(rank.held, program.levels[after_at])
                spilled = 0 if last else min(rank.spilled, program.levels[after_at] - held)
                yield _with(state, i, Rank(after_at, held, spilled))

    def _has_come(self, other: Rank, i: int, at: int) -> bool:
        return other.at > at or (other.at == at and other.has >= self.programs[i].levels[at])

    def standstills(self, goes_on: Callable[[State], int | None] = lambda _: None) -> Iterator[State]:
        """Look through all states that can be reached; return those that some rank does not leave.

        Args:
            goes_on: Says of such a state which rank takes a region of the next tier, if any.
        """
        todo, seen = [self.start()], {self.start()}
        while todo:
            state = todo.pop()
            after = list(self.moves(state))
            if not after and any(r.at < len(p.levels) for r, p in zip(state, self.programs, strict=True)):
                yield state
                i = goes_on(state)
                if i is not None:
                    rank = state[i]
                    after.append(_with(state, i, Rank(rank.at, rank.held, rank.spilled + 1)))
            todo += {one for one in after if one not in seen}
            seen |= set(after)

    def deadlock(self) -> State | None:
        """Return a state that can be reached and that some rank never leaves."""
        return next(self.standstills(), None)


def _with(state: State, i: int, rank: Rank) -> State:
    return (*state[:i], rank, *state[i + 1 :])


TWO_BY_TWO = [Program((2,)), Program((2,))]


@pytest.mark.parametrize("budget", [4, 5])
def test_independent_ranks_deadlock_and_a_group_does_not(budget: int) -> None:
    """Two jobs of two ranks, each of which needs two regions: one rank of each has its two, and waits for the other.

    Every state on the way was safe to the banker's rule, which knew nothing of the collective.
    """
    stuck = Model(TWO_BY_TWO, budget, grouped=False).deadlock()
    assert stuck is not None
    assert sum(rank.held for rank in stuck) >= 4
    assert Model(TWO_BY_TWO, budget, grouped=True).deadlock() is None


PROGRAMS = st.builds(
    Program,
    levels=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    kept=st.integers(0, 1),
    ranks=st.integers(1, 2),
)


@given(st.lists(PROGRAMS, min_size=2, max_size=2), st.integers(0, 3))
@settings(max_examples=30, derandomize=True, deadline=None)
def test_groups_never_deadlock(programs: list[Program], spare: int) -> None:
    """Of any two jobs of up to two ranks, each of which fits beside what the other keeps, all end in any order."""
    kept = [program.kept * program.ranks for program in programs]
    peaks = [max(*program.levels, program.kept) * program.ranks for program in programs]
    budget = max(peaks[0] + kept[1], peaks[1] + kept[0]) + spare
    assume(all(program.levels[-1] >= program.kept for program in programs))
    assert Model(programs, budget, grouped=True).deadlock() is None


class Standstills:
    """Asks the pool about states of a model in which nothing moves."""

    def __init__(self, model: Model, members: Sequence[PoolTable]) -> None:
        """Let each rank of the model be a member."""
        self._model, self._members = model, members

    def goes_on(self, state: State) -> int:
        """Return which rank goes on by the next tier: one that waits, soon, and no other one."""
        model, waiting_ranks = self._model, self._model.waiting(state)
        for i, (rank, member) in enumerate(zip(state, self._members, strict=True)):
            record = member.jobs[job_of(member)]
            inside = 0 <= rank.at < len(model.programs[i].levels)
            record["state"] = JobState.RUNNING if inside else JobState.BOUNDARY
            record["group"], record["held"] = model.group[i], rank.held
            record["waiting_threads"] = record["need"] = int(i in waiting_ranks)
        for i in waiting_ranks:
            assert waits.patience_ns(self._members[i].member[0], 0) == waits.STUCK_NS
        (first,) = (i for i in waiting_ranks if waits.is_first_to_yield(self._members[i].member[0]))
        for member in self._members:
            for field in ("held", "waiting_threads", "need"):
                member.jobs[job_of(member)][field] = 0
        return first


@given(st.lists(PROGRAMS, min_size=1, max_size=2), st.integers(1, 6))
@settings(max_examples=30, derandomize=True, deadline=None)
def test_groups_that_do_not_fit_go_on_by_the_next_tier(programs: list[Program], budget: int) -> None:
    """Invariants 7 and 8: whatever the budget, every job ends; where nothing moves, one that waits goes on soon.

    The others wait for memory, for it in a collective, or at their boundaries.
    """
    assume(sum(program.kept * program.ranks for program in programs) <= budget)
    model = Model(programs, budget, grouped=True)
    with make_pool(budget) as pool, joined(pool, len(model.programs)) as members:
        found = list(model.standstills(Standstills(model, members).goes_on))
    assert all(model.waiting(state) for state in found)


# -- the pool --------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[PoolTable]:
    """Make a pool of four regions in which nobody starts unasked."""
    with make_pool(4, unasked=False) as pool:
        yield pool


def make_groups(members: Sequence[PoolTable], *groups: int, peak: int = 2) -> None:
    """Let members that have ended an iteration each expect the same peak, and be ranks of groups."""
    for member, group in zip(members, groups, strict=True):
        member.join_group(group)
        record = member.jobs[job_of(member)]
        record["started_ns"] = time.monotonic_ns()
        give_profile(record, [peak] * 4)


def end(member: PoolTable) -> bool:
    """End a member's iteration with its profile as it is; tells whether the next one has begun."""
    record = member.jobs[job_of(member)]
    n_events, curve = int(record["profile"]["n_events"]), record["profile"].tobytes()
    record["progress"] = n_events
    claims, peak = record["claims"].copy(), int(record["claim_peak"])
    admitted = boundaries.finish_iteration(member.member[0], 0)
    record["profile"] = np.frombuffer(curve, record["profile"].dtype)[0]
    record["claims"], record["claim_peak"] = claims, peak
    return bool(admitted)


def begin(*members: PoolTable) -> None:
    """Let members that were admitted wake."""
    for member in members:
        boundaries.begin_iteration(member.member[0])


def states(pool: PoolTable, members: Sequence[PoolTable]) -> str:
    """Return a letter for each member's state."""
    return "".join(JobState(int(pool.jobs[job_of(member)]["state"])).name[0] for member in members)


def test_ranks_start_together_when_the_last_has_come(pool: PoolTable) -> None:
    """A rank at its boundary waits for the others inside, and says so; one admission starts all, by any rank."""
    with joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        assert not end(a)
        assert int(pool.jobs[job_of(a)]["waits_for"]) == 1 << job_of(b)
        assert not pool.admit(job_of(a))
        assert states(pool, (a, b)) == "BR"
        assert not end(b)
        assert pool.admit(job_of(b))
        assert states(pool, (a, b)) == "RR"
        assert pool.header["boundary_waiters"] == 0


def until_asleep(member: PoolTable, thread: threading.Thread) -> None:
    """Wait until a thread sleeps at its member's boundary: the kernel says on which word."""
    offset = int(JOB.fields["broker_admits"][1])
    word = int(member.member[0]["jobs_address"]) + job_of(member) * JOB.itemsize + offset
    told = Path(f"/proc/self/task/{thread.native_id}/syscall")
    until(lambda: told.read_text().split()[1:2] == [hex(word)], DEADLINE_S, "the thread sleeps at its boundary")


def test_a_group_is_woken_by_one_admission(pool: PoolTable) -> None:
    """Invariant 7: every rank that sleeps at its boundary goes on."""
    with joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        threads = []
        for member in (a, b):
            member.member[0]["slice"] = (1000, 0)
            assert not end(member)
            thread = threading.Thread(target=boundaries.await_admission, args=(member.member[0],), daemon=True)
            thread.start()
            threads.append(thread)
        for member, thread in zip((a, b), threads, strict=True):
            until_asleep(member, thread)
        assert pool.admit(job_of(a))
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)


def test_all_ranks_are_let_in_or_none(pool: PoolTable) -> None:
    """Invariant 3: a group whose ranks do not fit together beside a job inside stays at its boundary as a whole."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 7, 7, 0)
        given = grab(other, 1)
        pool.jobs[job_of(other)]["persistent"] = 1
        assert not end(a)
        assert not end(b)
        assert not pool.admit(job_of(a))
        assert states(pool, (a, b)) == "BB"
        pool.jobs[job_of(other)]["persistent"] = 0
        release(other, given)
        assert pool.admit(job_of(a))
        assert states(pool, (a, b)) == "RR"


def test_two_groups_do_not_share_out_what_one_needs(pool: PoolTable) -> None:
    """Invariant 3: the first rank of the second group gets nothing that the first group needs to end its iteration."""
    with joined(pool, 4) as (a, b, c, d):
        make_groups((a, b, c, d), 7, 7, 8, 8)
        grab(a, 2)
        assert acquire(c, [NOBODY])[0] == MUST_WAIT
        grab(b, 2)
    with make_pool(4, unasked=False) as independent, joined(independent, 4) as (a, b, c, d):
        make_groups((a, b, c, d), 0, 0, 0, 0)
        grab(a, 2)
        assert acquire(c, [NOBODY])[0] == GRANTED  # and nothing but that keeps b and d from their regions


def test_a_group_starts_unasked_as_a_whole() -> None:
    """Where all peaks fit the last rank to come starts all of them; the first one does not go ahead."""
    with make_pool(10) as pool, joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        assert not end(a)
        assert states(pool, (a, b)) == "BR"
        assert end(b)
        assert states(pool, (a, b)) == "RR"
        assert pool.jobs["round"][[job_of(a), job_of(b)]].tolist() == [1, 1]


def stop(pool: PoolTable, member: PoolTable) -> None:
    """Let a member have stood in its iteration for as long as makes it stand still."""
    record = pool.jobs[job_of(member)]
    record["profile"]["duration_ns"] = 0
    record["started_ns"] = -10 * rules.STILL_NS


def test_nobody_waits_for_a_rank_that_stands_still(pool: PoolTable) -> None:
    """Rank 0 takes a step more, while rank 1 waits for it in a collective. Then rank 1 comes after it at once."""
    with joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        assert not end(a)
        assert not pool.admit(job_of(a))
        stop(pool, b)
        assert pool.admit(job_of(a))
        begin(a)
        assert pool.jobs[job_of(a)]["uneven"] == 1
        give_profile(pool.jobs[job_of(b)], [2] * 4)
        assert end(b)  # although this pool lets nobody start unasked
        assert pool.jobs["round"][[job_of(a), job_of(b)]].tolist() == [1, 1]


def test_a_rank_that_was_kept_in_vain_again_and_again_waits_for_nobody(pool: PoolTable) -> None:
    """A program whose ranks step unevenly in every iteration is not slowed down for ever."""
    with joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        pool.jobs[job_of(a)]["uneven"] = REPEATS
        assert not end(a)
        assert pool.admit(job_of(a))


def test_an_awaited_rank_counts_with_its_whole_peak(pool: PoolTable) -> None:
    """Invariant 3: what a rank needs that others of its group are waiting for is nobody else's."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 7, 7, 0, peak=1)
        give_profile(pool.jobs[job_of(other)], [3] * 4)
        grab(other, 2)
        pool.jobs[job_of(other)]["persistent"] = 3
        pool.jobs[job_of(a)]["round"] = 1
        pool.jobs[job_of(b)]["state"] = JobState.BOUNDARY
        grab(a, 1)
        assert acquire(other, [NOBODY])[0] == MUST_WAIT
        pool.jobs[job_of(b)]["round"] = 1  # it waits for the others now, and they do not wait for it
        assert acquire(other, [NOBODY])[0] == GRANTED


@pytest.mark.parametrize("how", ["leaves", "dies", "ends its group"])
def test_a_group_goes_on_without_a_rank_that_has_gone(pool: PoolTable, how: str) -> None:
    """Invariant 5: the pool keeps nobody for a rank that is dead, has left, or is in the group no more."""
    with joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        assert not end(a)
        assert not pool.admit(job_of(a))
        if how == "leaves":
            pool.mark_leaving(job_of(b))
        elif how == "dies":
            pool.reap(job_of(b))
        else:
            b.join_group(0)
        assert pool.admit(job_of(a))


def test_first_iterations_of_a_group_grow_together(pool: PoolTable) -> None:
    """A rank without a profile does not keep the others of its group from memory, but other jobs."""
    with joined(pool, 3) as (a, b, other):
        a.join_group(7)
        b.join_group(7)
        grab(a, 1)
        assert acquire(other, [NOBODY])[0] == MUST_WAIT
        grab(b, 1)


def test_first_iterations_of_a_group_end_together(pool: PoolTable) -> None:
    """Other jobs do not grow between the ends of the ranks' first iterations."""
    with joined(pool, 3) as (a, b, other):
        a.join_group(7)
        b.join_group(7)
        grab(a, 1)
        boundaries.finish_iteration(a.member[0], 0)
        assert acquire(other, [NOBODY])[0] == MUST_WAIT
        boundaries.finish_iteration(b.member[0], 0)
        grab(other, 1)


def test_a_pool_is_crowded_where_a_group_finds_no_room(pool: PoolTable) -> None:
    """What the others keep leaves room for either rank, and not for both: so they yield it."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 0, 0, 0)
        pool.jobs[job_of(other)]["persistent"] = 2
        end(a)
        assert not pool.header["crowded"]
        make_groups((a, b), 7, 7)
        end(b)
        assert pool.header["crowded"]


def test_a_group_with_an_unprofiled_rank_promises_nothing(pool: PoolTable) -> None:
    """Nobody is granted what only comes back if a rank ends whose claim is unknown."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 7, 7, 0)
        give_profile(pool.jobs[job_of(other)], [4] * 4)
        give_profile(pool.jobs[job_of(b)], [0] * 4)
        grab(a, 2)
        grab(other, 1)
        pool.jobs[job_of(b)]["profiled"] = 0
        pool.jobs[job_of(b)]["started_ns"] = HOUR_NS * 10**4
        assert acquire(other, [NOBODY])[0] == MUST_WAIT
        pool.jobs[job_of(b)]["profiled"] = 1
        assert acquire(other, [NOBODY])[0] == GRANTED


def test_a_group_that_does_not_fit_has_what_is_free(pool: PoolTable) -> None:
    """Invariant 3: its ranks have not all held the most at once; it may come to hold the budget, and no more."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 7, 7, 0, peak=4)
        pool.jobs["persistent"][[job_of(a), job_of(b)]] = 4
        pool.jobs[job_of(other)]["state"] = JobState.BOUNDARY
        grab(a, 2)
        grab(b, 2)
        assert acquire(a, [NOBODY])[0] == MUST_WAIT


def test_a_rank_that_others_wait_for_begins_though_its_group_does_not_fit(pool: PoolTable) -> None:
    """Invariant 7: those inside wait for it in a collective, and give nothing back until it has come."""
    with joined(pool, 3) as (a, b, other):
        grab(other, 1)
        make_groups((a, b, other), 7, 7, 0, peak=4)
        pool.jobs[job_of(other)]["persistent"] = 1
        pool.jobs[job_of(a)]["round"] = 1
        pool.jobs[job_of(b)]["state"] = JobState.BOUNDARY
        pool.header["boundary_waiters"] = 1
        assert not pool.admit(job_of(b))
        pool.jobs[job_of(other)]["state"] = JobState.BOUNDARY
        assert pool.admit(job_of(b))


def test_a_rank_may_wait_for_one_that_waits(pool: PoolTable) -> None:
    """Invariant 7: a standstill counts ranks of a waiting one's group as waiting, and nobody else."""
    with joined(pool, 4) as (a, b, c, other):
        make_groups((a, b, c, other), 7, 7, 7, 0)
        waits.start_waiting(a.member[0], 3)
        assert waits.patience_ns(a.member[0], 0) == rules.IDLE_NS, "another job runs"
        waits.start_waiting(other.member[0], 2)
        for member in (a, other):
            assert waits.patience_ns(member.member[0], 0) == waits.STUCK_NS
        assert not waits.is_first_to_yield(a.member[0])
        assert waits.is_first_to_yield(other.member[0])
        waits.stop_waiting(a.member[0])
        assert waits.patience_ns(other.member[0], 0) == rules.IDLE_NS, "no rank waits"
        pool.jobs[job_of(b)]["state"] = JobState.BOUNDARY
        assert waits.patience_ns(other.member[0], 0) == rules.IDLE_NS, "b waits for the others"
        pool.jobs["round"][[job_of(a), job_of(c)]] = 1
        assert waits.patience_ns(other.member[0], 0) == waits.STUCK_NS, "they may wait for b"


def test_ranks_whose_devices_work_are_waited_for_longer(pool: PoolTable) -> None:
    """Invariant 7: a device may stand in a collective, or work; without a rank that waits it is waited for."""
    with joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        waits.start_waiting(a.member[0], 3)
        issued(pool)[job_of(b), 0] = 1
        assert waits.patience_ns(a.member[0], 0) == rules.STILL_NS
        issued(pool)[job_of(a), 0] = 1
        assert waits.patience_ns(a.member[0], 0) == rules.IDLE_NS
        waits.start_waiting(b.member[0], 3)
        assert waits.patience_ns(a.member[0], 0) == rules.STILL_NS


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_goes_on_by_the_next_tier_while_others_stand_in_a_collective(ranks: int) -> None:
    """Invariants 4, 7, 8: it needs none of them to do anything; one that only computed finds its memory as it was."""
    with tenants(8, ranks, claims=False, wait_limit_s=10 * DEADLINE_S) as group:
        for tenant in group:
            tenant.member.join_group(7)
        first, *others = group
        kept = [tenant.allocate((6 // len(others)) * GRANULE_BYTES) for tenant in others]
        first.allocate(GRANULE_BYTES)
        thread = in_thread(lambda: [first.allocate(2 * GRANULE_BYTES) for _ in range(3)])
        thread.join(DEADLINE_S)
        in_time = not thread.is_alive()
        for tenant, address in zip(others, kept, strict=True):
            tenant.free(address)
        thread.join(DEADLINE_S)
        assert in_time
        assert first.member.header["stalls"] > 0
        assert sum(first.is_spilled(address) for address in first.live) == 3
        again = others[0].allocate(6 * GRANULE_BYTES)
        assert not others[0].is_spilled(again)
        for tenant in group:
            tenant.free_all()
        check_counters(first.member)


def test_a_thread_that_allocates_for_later_keeps_no_rank_waiting() -> None:
    """Invariant 7: it lacks less, and takes nothing from the next tier; its rank stands in a collective."""
    with tenants(8, 2, claims=False, wait_limit_s=10 * DEADLINE_S) as group:
        a, b = group
        for tenant in group:
            tenant.member.join_group(7)
        a.allocate(4 * GRANULE_BYTES)
        block = b.allocate(4 * GRANULE_BYTES)

        def allocate_for_later() -> None:
            b.record[0]["swap"]["patient_thread"] = threading.get_ident()
            b.allocate(GRANULE_BYTES)

        later = in_thread(allocate_for_later)
        until(lambda: b.job["waiting_threads"] == 1, DEADLINE_S, "a thread allocates for later")
        needed = in_thread(lambda: a.allocate(2 * GRANULE_BYTES))
        needed.join(DEADLINE_S)
        found = needed.is_alive(), later.is_alive()
        b.free(block)
        for thread in (needed, later):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert found == (False, True)
        assert not any(b.is_spilled(address) for address in b.live)
        assert b.job["patient"] == 0
        for tenant in group:
            tenant.free_all()


def test_a_group_stands_still_only_as_a_whole(pool: PoolTable) -> None:
    """A rank that waits in a collective for one that waits for memory is waited for."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 7, 7, 0)
        give_profile(pool.jobs[job_of(b)], [1] * 4)
        grab(a, 2)
        grab(other, 1)
        pool.jobs[job_of(other)]["persistent"] = 2
        pool.jobs[job_of(b)]["started_ns"] = HOUR_NS * 10**4
        stop(pool, a)
        assert acquire(other, [NOBODY])[0] == MUST_WAIT
        stop(pool, b)
        assert acquire(other, [NOBODY])[0] == GRANTED


# -- what a policy sees ----------------------------------------------------------------------------


def view_of(pool: PoolTable) -> PoolView:
    """Return what a policy sees of a pool now."""
    header, jobs = pool.snapshot()
    return pool_view(header, jobs, time.monotonic_ns(), ProfileCache())


def test_a_policy_sees_a_group_as_one_job(pool: PoolTable) -> None:
    """Its figures are the ranks' sums; it stands at its boundary when all its ranks do."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 7, 7, 0)
        give_profile(pool.jobs[job_of(b)], [1, 2])
        grab(a, 1)
        grab(b, 1)
        pool.jobs[job_of(a)]["progress"] = 3
        group, alone = view_of(pool).jobs
        assert (group.job, group.ranks, alone.job, alone.ranks) == (0, (0, 1), 2, ())
        assert (group.held, group.phase, group.progress) == (2, JobState.RUNNING, 0)
        assert group.profile is not None
        assert group.profile.held == (3, 3, 4, 4)
        pool.header["budget_regions"] = 3
        pool.jobs["persistent"][[job_of(a), job_of(b)]] = 2
        group = view_of(pool).jobs[0]
        assert group.profile is not None
        assert (group.profile.held, group.persistent) == ((3, 3, 3, 3), 3)
        pool.jobs["persistent"][[job_of(a), job_of(b)]] = 0
        pool.header["budget_regions"] = 4
        assert not end(a)
        assert view_of(pool).jobs[0].phase == JobState.RUNNING
        assert not end(b)
        group = view_of(pool).jobs[0]
        assert (group.phase, group.persistent) == (JobState.BOUNDARY, 2)
        assert group.waiting_since_ns == pool.jobs[job_of(b)]["boundary_since_ns"]
        pool.jobs[job_of(a)]["profiled"] = 0
        assert view_of(pool).jobs[0].profile is None


def test_a_group_waits_for_a_rank_until_that_stands_still(pool: PoolTable) -> None:
    """The policy is asked for the rest of the group then; a rank that has left is in no group."""
    with joined(pool, 3) as (a, b, c):
        make_groups((a, b, c), 7, 7, 7)
        assert not end(a)
        assert view_of(pool).jobs[0].phase == JobState.RUNNING
        stop(pool, b)
        assert view_of(pool).jobs[0].phase == JobState.RUNNING
        pool.mark_leaving(job_of(c))
        group, left = view_of(pool).jobs
        assert (group.phase, left.phase) == (JobState.BOUNDARY, JobState.LEAVING)


@pytest.mark.parametrize("name", ["zico", "serial"])
def test_policies_start_whole_groups(pool: PoolTable, name: str) -> None:
    """The broker's decision lets all ranks in; and a rank whose group goes on already, whatever the policy says."""
    with joined(pool, 3) as (a, b, other):
        make_groups((a, b, other), 7, 7, 0)
        assert [end(member) for member in (a, b, other)] == [False] * 3
        decide(pool, name)
        assert states(pool, (a, b, other)) == "RRB"
        pool.jobs[job_of(b)]["state"] = JobState.BOUNDARY
        pool.jobs[job_of(b)]["round"] -= 1
        pool.header["boundary_waiters"] += 1
        decide(pool, name)
        assert states(pool, (a, b, other)) == "RRB"


@pytest.mark.parametrize("name", ["zico", "serial", "claims", "shift", "salus"])
def test_policies_wait_for_a_job_that_has_left_while_it_holds_something(pool: PoolTable, name: str) -> None:
    """Invariant 7: then a job starts though it does not fit. A launcher's process lives as long as its ranks."""
    with joined(pool, 2) as (left, a):
        given = grab(left, 1)
        make_groups((left, a), 0, 0, peak=4)
        pool.jobs[job_of(a)]["persistent"] = 5
        pool.mark_leaving(job_of(left))
        assert not end(a)
        pool.jobs[job_of(a)]["persistent"] = 5
        decide(pool, name)
        assert states(pool, (a,)) == "B"
        release(left, given)
        decide(pool, name)
        assert states(pool, (a,)) == "R"


def decide(pool: PoolTable, name: str) -> None:
    """Let a policy decide, as the broker does."""
    admit_all(pool, policy_named(name), view_of(pool), pool.snapshot()[1])


@pytest.mark.parametrize("claims", [True, False])
@pytest.mark.parametrize("how", ["is opened", "has a deadline"])
def test_a_rank_stays_at_its_boundary_until_its_gate_opens(how: str, claims: bool) -> None:  # noqa: FBT001
    """Invariant 7: even where all peaks fit or nobody claims, and no longer than until the time that it has said."""
    with make_pool(10, claims=claims) as pool, joined(pool, 1) as (a,):
        make_groups((a,), 7)
        a.set_gate(time.monotonic_ns() + HOUR_NS)
        assert not end(a)
        assert not pool.admit(job_of(a))
        assert int(pool.jobs[job_of(a)]["waits_for"]) == 1 << job_of(a)
        if how == "is opened":
            before = int(pool.header["sequence"])
            a.set_gate(0)
            assert int(pool.header["sequence"]) != before  # whoever waits for a change looks again
        else:
            a.set_gate(time.monotonic_ns())
        assert pool.admit(job_of(a))
        a.set_gate(0)
        assert end(a)


def test_ranks_of_one_pool_begin_together_when_all_their_gates_are_open(pool: PoolTable) -> None:
    """Neither an open gate nor a rank that is ahead lets one begin whose gate is closed."""
    with joined(pool, 2) as (a, b):
        make_groups((a, b), 7, 7)
        for one in (a, b):
            one.set_gate(time.monotonic_ns() + HOUR_NS)
            assert not end(one)
        a.set_gate(0)
        assert not pool.admit(job_of(a))
        b.set_gate(0)
        assert pool.admit(job_of(a))
        assert states(pool, (a, b)) == "RR"
        b.set_gate(time.monotonic_ns() + HOUR_NS)
        pool.jobs[job_of(a)]["round"] += 1
        assert not end(b)
        assert not pool.admit(job_of(b))


@pytest.mark.parametrize("policy", ["none", "serial", "claims", "shift", "zico"])
def test_no_policy_waits_for_a_rank_behind_a_gate(pool: PoolTable, policy: str) -> None:
    """Another job starts although the rank has stood at its boundary for longer; its broker looks at the deadline."""
    with joined(pool, 2) as (a, other):
        make_groups((a, other), 7, 0)
        until_ns = time.monotonic_ns() + HOUR_NS
        a.set_gate(until_ns)
        assert not end(a)
        assert not end(other)
        looks_ns = admit_now(pool, policy)
        assert states(pool, (a, other)) == "BR"
        assert looks_ns == until_ns
        a.set_gate(0)
        assert not end(other)
        admit_now(pool, policy)
        assert states(pool, (a, other))[0] == "R"


def admit_now(pool: PoolTable, policy: str) -> int | None:
    """Let start whom a policy lets; return when the broker looks again."""
    header, jobs = pool.snapshot()
    return admit_all(pool, policy_named(policy), pool_view(header, jobs, time.monotonic_ns(), ProfileCache()), jobs)
