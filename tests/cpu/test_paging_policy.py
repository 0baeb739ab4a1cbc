"""What learned paging chooses: which block comes, which goes, and how far ahead."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zico.paging import layout as paging_layout
from zico.paging.layout import (
    ABSENT,
    ALL,
    APPEND,
    BLOCK,
    CLEAN,
    DEEPUM,
    FURTHEST,
    IDLE_DIRTY,
    IDLE_INACTIVE,
    INVALIDATE,
    LIST,
    LISTS,
    NONE,
    PREEVICT,
    PREFETCH,
    Sizes,
    lay_out,
)
from zico.paging.needed_next import (
    choose_empty,
    choose_to_clean,
    choose_victim,
    choose_victim_ahead,
    next_prefetch,
    note_execution,
    note_fault,
)
from zico.paging.residency import (
    hold,
    is_expected,
    keep,
    note_active,
    note_arrival,
    note_cleaned,
    note_departure,
    note_inactive,
    note_written,
    release,
    was_written,
)
from zico.paging.tuning import LEAST_DEGREE, note_iteration, note_lost

Record = Any
BLOCKS = 24


def records_of(address: int, n: int, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401 - an array of the dtype
    """Return the array that lies at an address."""
    return np.frombuffer((ctypes.c_char * (n * dtype.itemsize)).from_address(address), dtype)


class Policy(RuleBasedStateMachine):
    """Everything that may happen to a few blocks, in any order, against sets of which are there, held and inactive."""

    @initialize(flags=st.sampled_from([0, PREFETCH, PREFETCH | PREEVICT, DEEPUM, DEEPUM | APPEND, ALL]))
    def begin(self, flags: int) -> None:
        """Begin with nothing there."""
        sizes = Sizes(BLOCKS, rows=4, executions=6, contexts=64)
        self.memory = np.zeros(sizes.total_bytes, np.uint8)
        self.paging = lay_out(self.memory, sizes, flags, degree=3)
        self.blocks = records_of(int(self.paging["blocks_address"]), BLOCKS, BLOCK)
        self.lists = records_of(int(self.paging["lists_address"]), LISTS, LIST)
        self.flags = flags
        self.there: set[int] = set()
        self.held: set[int] = set()
        self.inactive: set[int] = set()
        self.kept = range(0)

    def expected(self, blocks: set[int]) -> set[int]:
        """Return those of some blocks that are expected."""
        return {block for block in blocks if is_expected(self.paging, block)}

    @rule(name=st.integers(0, 6))
    def execute(self, name: int) -> None:
        """Start an execution; of seven names one is too many for the table."""
        note_execution(self.paging, name)

    @rule(block=st.integers(0, BLOCKS - 1))
    def fault(self, block: int) -> None:
        """Touch a block; it is waited for if it is not there."""
        if block not in self.there:
            note_fault(self.paging, block)
            self.held.add(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def arrive(self, block: int) -> None:
        """Let a block come."""
        note_arrival(self.paging, block)
        self.there.add(block)
        self.held.discard(block)
        if block in self.kept:
            self.held.add(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def depart(self, block: int) -> None:
        """Let a block go, if it is there."""
        note_departure(self.paging, block)
        if block in self.kept and block in self.there:
            self.held.discard(block)
        self.there.discard(block)

    @rule(first=st.integers(0, BLOCKS), n=st.integers(0, 5))
    def keep(self, first: int, n: int) -> None:
        """Keep some blocks from now on, and no others."""
        before, self.kept = self.kept, range(first, min(first + n, BLOCKS))
        keep(self.paging, self.kept.start, self.kept.stop)
        self.held -= {*before, *self.kept}
        self.held |= {*self.kept} & self.there

    @rule()
    def iterate(self) -> None:
        """Run four executions that touch two blocks each, so that something is learned and expected."""
        for name in range(4):
            self.execute(name)
            for block in (3 * name, 3 * name + 1):
                self.fault(block)
                self.arrive(block)

    @rule()
    def empty(self) -> None:
        """Let all blocks go."""
        for block in sorted(self.there):
            self.depart(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def hold(self, block: int) -> None:
        """Use a block."""
        hold(self.paging, block)
        self.held.add(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def release(self, block: int) -> None:
        """End that, unless the block is there and kept."""
        release(self.paging, block)
        if block not in self.kept or block not in self.there:
            self.held.discard(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def write(self, block: int) -> None:
        """Write to a block if it is there."""
        if block in self.there:
            note_written(self.paging, block)

    @rule(block=st.integers(0, BLOCKS - 1), becomes=st.sampled_from([note_active, note_inactive]))
    def change(self, block: int, becomes: Any) -> None:  # noqa: ANN401 - a compiled function
        """Let something live in a block, or nothing."""
        becomes(self.paging, block)
        if becomes is note_active or not self.flags & INVALIDATE:
            self.inactive.discard(block)
        else:
            self.inactive.add(block)

    @rule()
    def prefetch(self) -> None:
        """What is prefetched is not there, not held, expected, and due first."""
        block = next_prefetch(self.paging)
        if block == NONE:
            return
        assert self.flags & PREFETCH
        assert block not in self.there | self.held
        assert is_expected(self.paging, block)
        others = self.expected(set(range(BLOCKS)) - self.there - self.held - {block})
        assert all(self.blocks["due"][block] <= self.blocks["due"][other] for other in others)
        self.held.add(block)

    @rule()
    def evict(self) -> None:
        """A fault finds a victim if one is there that is not held: inactive or not expected if there is such a one."""
        free = self.there - self.held
        block = choose_victim(self.paging)
        assert (block == NONE) == (not free)
        if block == NONE or not self.flags & PREEVICT:
            return
        assert block in free
        idle = free - self.expected(free)
        assert block in ((idle & self.inactive) or idle or free)

    @rule()
    def evict_ahead(self) -> None:
        """Ahead of need goes what is not expected; else, with FURTHEST, what is due after the last prefetch."""
        free = self.there - self.held
        block = choose_victim_ahead(self.paging)
        idle = free - self.expected(free) if self.flags & PREEVICT else set()
        if block == NONE:
            assert not idle
        elif idle:
            assert block in idle
        else:
            assert self.flags & FURTHEST
            assert self.blocks["due"][block] > self.paging["next_due"] > 0
            assert block in free

    @precondition(lambda self: self.flags & CLEAN)
    @rule()
    def clean(self) -> None:
        """What is cleaned is there, dirty and neither held nor expected; then it is clean."""
        block = choose_to_clean(self.paging)
        if block != NONE:
            assert block in self.there - self.held
            assert self.blocks["state"][block] & paging_layout.DIRTY
            assert not is_expected(self.paging, block)
            note_cleaned(self.paging, block)
            assert not self.blocks["state"][block] & paging_layout.DIRTY

    @invariant()
    def lists_are_whole(self) -> None:
        """Each resident block is in exactly one list of resident ones, of its kind, and no other block is."""
        if not hasattr(self, "lists"):
            return
        found: list[int] = []
        for number in range(LISTS):
            chain = self.follow(number)
            assert len(chain) == self.lists["n"][number]
            if number < ABSENT or number >= IDLE_INACTIVE:
                found += chain
            else:
                assert not set(chain) & (self.there | self.held)
        assert sorted(found) == sorted(self.there)
        assert set(self.follow(IDLE_INACTIVE)) <= self.inactive
        assert all(self.blocks["state"][block] & paging_layout.DIRTY for block in self.follow(IDLE_DIRTY))

    def follow(self, number: int) -> list[int]:
        """Return the blocks of a list, by both directions."""
        forward, backward = [], []
        at = int(self.lists["first"][number])
        while at and len(forward) <= BLOCKS:
            forward.append(at - 1)
            at = int(self.blocks["next"][at - 1])
        at = int(self.lists["last"][number])
        while at and len(backward) <= BLOCKS:
            backward.append(at - 1)
            at = int(self.blocks["previous"][at - 1])
        assert forward == backward[::-1]
        return forward


TestPolicy = Policy.TestCase
TestPolicy.settings = settings(max_examples=15, stateful_step_count=80, deadline=None)


# -- the chain -------------------------------------------------------------------------------------

EXECUTIONS = 12
TOUCHES = 3


class Job:
    """A job whose iterations are alike, execution i touching blocks 3 i to 3 i + 2, and a pager as simple as can be."""

    def __init__(self, flags: int, degree: int, room: int) -> None:
        """Begin with nothing there."""
        sizes = Sizes(EXECUTIONS * TOUCHES, rows=64, executions=20, contexts=1 << 8)
        self._memory = np.zeros(sizes.total_bytes, np.uint8)
        self.paging = lay_out(self._memory, sizes, flags, degree)
        self._room = room
        self._there: list[int] = []
        self.faults = 0

    def touch(self, execution: int) -> None:
        """Run an execution."""
        for block in range(execution * TOUCHES, (execution + 1) * TOUCHES):
            if block not in self._there:
                self.faults += 1
                note_fault(self.paging, block)
                self._bring(block, choose_victim)
            note_written(self.paging, block)

    def background(self) -> None:
        """Prefetch all that can be."""
        while (block := next_prefetch(self.paging)) != NONE:
            if not self._bring(block, choose_victim_ahead):
                release(self.paging, block)
                return

    def _bring(self, block: int, choose: Any) -> bool:  # noqa: ANN401 - a compiled function
        if len(self._there) == self._room:
            victim = choose(self.paging)
            if victim == NONE:
                return False
            self._there.remove(victim)
            note_departure(self.paging, victim)
        self._there.append(block)
        note_arrival(self.paging, block)
        return True

    def iterate(self) -> int:
        """Run an iteration; return its faults."""
        before = self.faults
        for execution in range(EXECUTIONS):
            note_execution(self.paging, 1000 + execution)
            self.touch(execution)
            self.background()
        return self.faults - before


@pytest.mark.parametrize("flags", [DEEPUM, ALL])
@pytest.mark.parametrize("degree", [1, 4])
def test_what_repeats_is_there_when_it_is_touched(flags: int, degree: int) -> None:
    """After two iterations a job that holds half of its blocks faults no more; on demand, it faults on all."""
    job = Job(flags, degree, room=18)
    faults = [job.iterate() for _ in range(5)]
    assert faults[0] == EXECUTIONS * TOUCHES
    assert faults[3:] == [0, 0]
    job = Job(0, degree, room=18)
    assert [job.iterate() for _ in range(4)][-1] == EXECUTIONS * TOUCHES


def test_of_what_is_empty_goes_first_what_nobody_expects_and_then_what_is_due_last() -> None:
    """Also what is held, and what is due now; nothing goes in which something lives."""
    job = Job(ALL, 4, room=EXECUTIONS * TOUCHES)
    for _ in range(3):
        job.iterate()
    due_now, due_next, due_later, idle = (execution * TOUCHES for execution in (EXECUTIONS - 1, 0, 2, 5))
    assert [is_expected(job.paging, block) for block in (due_now, due_next, due_later, idle)] == [True] * 3 + [False]
    for block in (due_now, due_next, due_later, idle):
        note_inactive(job.paging, block)
        hold(job.paging, block)
    for block in (idle, due_later, due_next, due_now):
        assert choose_empty(job.paging) == block
        note_active(job.paging, block)
    assert choose_empty(job.paging) == NONE


def test_a_chain_longer_than_memory_is_no_loss_if_the_furthest_goes() -> None:
    """With all blocks expected, faults stay below those on demand only where the furthest of them goes."""
    job = Job(ALL, EXECUTIONS, room=18)
    assert [job.iterate() for _ in range(6)][-1] == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6))
def test_nothing_is_expected_beyond_the_degree(degree: int) -> None:
    """Of a job that fits, exactly what the execution and the next ``degree`` touch is expected."""
    job = Job(DEEPUM, degree, room=EXECUTIONS * TOUCHES)
    job.iterate()
    for execution in range(EXECUTIONS):  # what follows an iteration's end is learned now, not before
        note_execution(job.paging, 1000 + execution)
        job.background()
    ahead = {(EXECUTIONS - 1 + i) % EXECUTIONS for i in range(degree + 1)}
    expected = {block // TOUCHES for block in range(EXECUTIONS * TOUCHES) if is_expected(job.paging, block)}
    assert expected == ahead


def test_a_wrong_prediction_is_counted_and_the_chain_begins_anew() -> None:
    """Where another execution comes than predicted, what that one touches is expected at once."""
    job = Job(DEEPUM, 2, room=18)
    for _ in range(3):
        job.iterate()
    before = int(job.paging["mispredicted"])
    note_execution(job.paging, 1005)
    job.background()
    assert job.paging["mispredicted"] == before + 1
    assert is_expected(job.paging, 5 * TOUCHES)


def test_a_fault_behind_what_was_prefetched_extends_the_execution() -> None:
    """With APPEND a new block of an execution is known beside the old ones; without it, it takes their place."""
    for flags, known in ((DEEPUM | APPEND, {0, 1, 2, 30}), (DEEPUM, {30})):
        job = Job(flags, 2, room=36)
        for _ in range(2):
            job.iterate()
        note_execution(job.paging, 1000)
        note_fault(job.paging, 30)
        note_arrival(job.paging, 30)
        for execution in (3, 4, 5, 6, 7, 8, 9, 11, 0):
            note_execution(job.paging, 1000 + execution)
            job.background()
        expected = {block for block in (0, 1, 2, 30) if is_expected(job.paging, block)}
        assert expected == known


def test_what_was_written_during_its_last_stay_is_known() -> None:
    """A block that was written, even if it was cleaned since, is known as such when it has gone; a read one is not."""
    job = Job(ALL, 2, room=4)
    for block in (0, 1):
        note_arrival(job.paging, block)
    note_written(job.paging, 0)
    note_cleaned(job.paging, 0)
    for block in (0, 1):
        note_departure(job.paging, block)
    assert (was_written(job.paging, 0), was_written(job.paging, 1)) == (True, False)


# -- the degree ------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=6, max_size=6), st.sampled_from([8, 32, 256]))
def test_the_tuned_degree_is_no_worse_than_the_first(cost: list[int], first: int) -> None:
    """Whatever degrees cost, once tuned it costs no more than the first one did, and is one that may be."""
    job = Job(ALL, first, room=4)
    degrees = [8 << i for i in range(6)]
    for _ in range(64):
        degree = int(job.paging["degree"])
        assert LEAST_DEGREE <= degree <= paging_layout.MOST_DEGREE
        note_lost(job.paging, cost[degrees.index(degree)] * 1000)
        note_iteration(job.paging, 0)
    assert job.paging["direction"] == 0
    assert cost[degrees.index(int(job.paging["degree"]))] <= cost[degrees.index(first)]


def test_any_gain_counts() -> None:
    """A degree that loses less is kept, however little less."""
    job = Job(ALL, 32, room=4)
    for _ in range(64):
        note_lost(job.paging, 999 if job.paging["degree"] == 64 else 1000)
        note_iteration(job.paging, 0)
    assert job.paging["degree"] == 64


def test_without_tuning_the_degree_stays() -> None:
    """Without TUNE no loss changes the degree."""
    job = Job(DEEPUM, 32, room=4)
    for i in range(20):
        note_lost(job.paging, i)
        note_iteration(job.paging, 0)
    assert job.paging["degree"] == 32


@pytest.mark.parametrize(("lost_ns", "is_tried"), [(15, False), (16, True)])
def test_what_costs_next_to_nothing_is_not_tuned(lost_ns: int, is_tried: bool) -> None:  # noqa: FBT001 - pytest's
    """Trials begin where a 64th of the time is lost, and end when a degree is found that loses less."""
    job = Job(ALL, 32, room=4)
    degrees = set()
    for _ in range(40):
        note_lost(job.paging, lost_ns if job.paging["degree"] == 32 else 1)
        note_iteration(job.paging, 1000)
        degrees.add(int(job.paging["degree"]))
    assert degrees == ({32, 64} if is_tried else {32})
