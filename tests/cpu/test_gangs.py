"""Gangs in several pools: without an order they wait in a circle, with it they never do."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.integrations.gangs import GangOrder, Rank

if TYPE_CHECKING:
    from random import Random

BOUNDARY, ENDED = -1, -2


@dataclasses.dataclass(frozen=True)
class Program:
    """A job: in each pool where it has a rank it comes to hold so many regions, one by one, and meets the others.

    A job with one pool is a local one. It never asks for a turn.
    """

    claims: tuple[tuple[int, int], ...]
    """Of each rank: its pool, and the regions."""
    iterations: int = 2


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank is: regions held, or at its boundary; and how many iterations it has ended."""

    held: int = BOUNDARY
    ended: int = 0


State = tuple[tuple[Place, ...], ...]


def is_safe(free: int, jobs: list[tuple[int, int]]) -> bool:
    """Tell whether jobs, each with what it holds and claims, can end one after the other: the banker's rule."""
    left = sorted(jobs, key=lambda job: job[1] - job[0])
    for held, claim in left:
        if claim - held > free:
            return False
        free += held
    return True


class Model:
    """Pools with the banker's rule each, and jobs whose ranks take regions in any order, one at a time."""

    def __init__(self, budgets: list[int], programs: list[Program], order: GangOrder | None) -> None:
        """Begin with all ranks before their first iteration."""
        self.budgets, self.programs, self.order = budgets, programs, order
        self.state: State = tuple(tuple(Place() for _ in program.claims) for program in programs)
        self.asked: set[tuple[int, int]] = set()

    def _rank(self, job: int, number: int) -> Rank:
        claims = self.programs[job].claims
        return Rank(gang=job + 1, number=number, world=len(claims), pool=str(claims[number][0]), pid=job + 1)

    def _inside(self, pool: int) -> list[tuple[int, int]]:
        """Return what each rank inside a pool holds and claims."""
        return [
            (place.held, claim)
            for places, program in zip(self.state, self.programs, strict=True)
            for place, (its, claim) in zip(places, program.claims, strict=True)
            if its == pool and place.held >= 0
        ]

    def moves(self) -> list[tuple[int, int]]:
        """Return the ranks that can do something now."""
        found = itertools.product(range(len(self.programs)), range(max(len(one.claims) for one in self.programs)))
        return [(j, r) for j, r in found if r < len(self.programs[j].claims) and self._after(j, r) is not None]

    def _after(self, job: int, number: int) -> Place | None:
        """Return where a rank is after its next move, ``None`` if it has to wait."""
        place, program = self.state[job][number], self.programs[job]
        pool, claim = program.claims[number]
        inside = self._inside(pool)
        free = self.budgets[pool] - sum(held for held, _ in inside)
        if place.ended == program.iterations:
            return None
        if place.held == BOUNDARY:
            if self._must_ask(job):
                if (job, number) not in self.asked:
                    return place
                assert self.order is not None
                if self.order.is_waiting(self._rank(job, number)):
                    return None
            return Place(0, place.ended) if is_safe(free, [*inside, (0, claim)]) else None
        if place.held < claim:
            inside.remove((place.held, claim))
            grown = [*inside, (place.held + 1, claim)]
            return Place(place.held + 1, place.ended) if free >= 1 and is_safe(free - 1, grown) else None
        # All that it needs: it meets the others, who give nothing back before all have met.
        met = all(
            other.ended > place.ended or (other.ended == place.ended and other.held == its[1])
            for other, its in zip(self.state[job], program.claims, strict=True)
        )
        return Place(BOUNDARY, place.ended + 1) if met else None

    def _must_ask(self, job: int) -> bool:
        return self.order is not None and len(self.programs[job].claims) > 1

    def move(self, job: int, number: int) -> None:
        """Let a rank do what it can do next."""
        place, after = self.state[job][number], self._after(job, number)
        assert after is not None
        if after == place:  # at its boundary, before it has asked
            assert self.order is not None
            self.order.ask(self._rank(job, number), place.ended, 0.0)
            self.asked.add((job, number))
            return
        if place.held == BOUNDARY:
            self.asked.discard((job, number))
        places = list(self.state[job])
        places[number] = after
        self.state = (*self.state[:job], tuple(places), *self.state[job + 1 :])
        if self.order is not None and after.ended == self.programs[job].iterations:
            self.order.leave(self._rank(job, number), 0.0)

    @property
    def is_done(self) -> bool:
        """Whether all jobs have ended."""
        return all(
            place.ended == program.iterations
            for places, program in zip(self.state, self.programs, strict=True)
            for place in places
        )


def stuck_state(model: Model) -> State | None:
    """Try every order of moves; return a state in which nobody can move though jobs have not ended."""
    seen: set[tuple[State, str]] = set()
    to_try = [model]
    while to_try:
        one = to_try.pop()
        key = (one.state, f"{sorted(one.asked)}{vars(one.order) if one.order else ''}")
        if key in seen:
            continue
        seen.add(key)
        moves = one.moves()
        if not moves and not one.is_done:
            return one.state
        order = pickle.dumps(one.order)  # a copy of it takes a fifth of what ``deepcopy`` takes
        for job, number in moves:
            after = copy.copy(one)
            after.order, after.asked = pickle.loads(order), set(one.asked)  # noqa: S301 - its own
            after.move(job, number)
            to_try.append(after)
    return None


BOTH = Program(((0, 2), (1, 2)), iterations=1)
LOCALS = [Program(((0, 2),), iterations=1), Program(((1, 2),), iterations=1)]


def test_gangs_without_an_order_wait_in_a_circle() -> None:
    """Two gangs in two pools, each pool safe by itself: in some order each holds what the other one needs."""
    stuck = stuck_state(Model([3, 3], [BOTH, BOTH], None))
    assert stuck is not None
    for pool in (0, 1):
        assert sorted(places[pool].held for places in stuck) == [1, 2]
    assert [places[0].held for places in stuck] != [places[1].held for places in stuck]


@pytest.mark.parametrize("local_jobs", [[], LOCALS], ids=["alone", "beside local jobs"])
def test_gangs_whose_peaks_fit_together_need_an_order_beside_local_jobs(local_jobs: list[Program]) -> None:
    """Local jobs take the room between them, in another order in each pool. So no two gangs are let in together."""
    assert (stuck_state(Model([4, 4], [BOTH, BOTH, *local_jobs], None)) is not None) == bool(local_jobs)
    assert stuck_state(Model([4, 4], [BOTH, BOTH, *local_jobs], GangOrder())) is None


@pytest.mark.parametrize("programs", [[BOTH, BOTH], [BOTH, BOTH, LOCALS[0]]], ids=["alone", "beside a local job"])
def test_gangs_with_an_order_never_do(programs: list[Program]) -> None:
    """The same jobs, whatever the order of their moves."""
    assert stuck_state(Model([3, 3], programs, GangOrder())) is None


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[int], list[Program]]:
    """Return budgets of pools, and jobs of which each fits."""
    budgets = draw(st.lists(st.integers(2, 5), min_size=2, max_size=4))
    programs = []
    for _ in range(draw(st.integers(2, 5))):
        pools = draw(st.lists(st.integers(0, len(budgets) - 1), min_size=1, max_size=len(budgets), unique=True))
        claims = tuple((pool, draw(st.integers(1, budgets[pool]))) for pool in pools)
        programs.append(Program(claims, draw(st.integers(1, 3))))
    return budgets, programs


@settings(max_examples=100, deadline=None)
@given(clusters(), st.randoms(use_true_random=False))
def test_gangs_end_in_any_cluster(cluster: tuple[list[int], list[Program]], random: Random) -> None:
    """Any number of pools, gangs and local jobs, in a random order of moves; each pool has one gang inside at most."""
    budgets, programs = cluster
    assume(any(len(program.claims) > 1 for program in programs))
    order = GangOrder()
    model = Model(budgets, programs, order)
    while not model.is_done:
        moves = model.moves()
        assert moves, (model.state, vars(order))
        model.move(*random.choice(moves))
        for pool in range(len(budgets)):
            assert sum(inside(places, one, pool) for places, one in zip(model.state, programs, strict=True)) <= 1


def inside(places: tuple[Place, ...], program: Program, pool: int) -> bool:
    """Tell whether a job is a gang with a rank in an iteration in a pool."""
    those = zip(places, program.claims, strict=True)
    return len(places) > 1 and any(its == pool and place.held >= 0 for place, (its, _) in those)


def gang_of(number: int, *pools: str) -> list[Rank]:
    """Return the ranks of a gang, one in each pool."""
    return [Rank(number, at, len(pools), pool, 10 * number + at) for at, pool in enumerate(pools)]


def test_no_gang_overtakes_another_one_that_shares_a_pool() -> None:
    """The second waits for the first, and the third for the second although its own pools are free."""
    first, second, third = gang_of(1, "a", "b"), gang_of(2, "b", "c"), gang_of(3, "c", "d")
    order = GangOrder()
    for rank in (*first, *second, *third):
        order.ask(rank, 0, 0)
    assert not any(map(order.is_waiting, first))
    assert all(map(order.is_waiting, (*second, *third)))
    for rank in first:
        order.ask(rank, 0, 1)  # once more for what it has begun: nothing changes
    assert all(map(order.is_waiting, second))
    for rank in first:
        order.ask(rank, 1, 1)
    assert not any(map(order.is_waiting, second))
    assert all(map(order.is_waiting, (*first, *third)))
    assert order.inside() == {"b": 2, "c": 2}


def test_a_gang_begins_when_all_its_ranks_have_ended() -> None:
    """One that is ahead waits for the others, but in an uneven program no longer than its patience."""
    one, other = gang_of(1, "a", "b")
    order = GangOrder(patience_s=5)
    order.ask(one, 0, 0)
    assert order.is_waiting(one)
    assert order.due_s() is None  # nobody waits for it in a collective yet
    order.ask(other, 0, 1)
    assert not order.is_waiting(one)
    order.ask(one, 1, 2)
    assert order.due_s() == 7
    order.settle(6.9)
    assert order.is_waiting(one)
    order.settle(7)
    assert not order.is_waiting(one)


def test_an_order_that_is_new_keeps_no_rank_from_its_gang() -> None:
    """One rank has begun by the last order, and waits for the other one in a collective: that one begins soon."""
    one, other = gang_of(1, "a", "b")
    order = GangOrder(patience_s=5)
    order.ask(other, 3, 0)
    assert order.is_waiting(other)
    order.settle(5)
    assert not order.is_waiting(other)
    order.ask(one, 4, 6)
    assert order.is_waiting(one)
    order.ask(other, 4, 7)
    assert not order.is_waiting(one)
    assert order.inside() == {"a": 1, "b": 1}


@pytest.mark.parametrize("how", ["ends", "dies", "loses a pool"])
def test_a_gang_that_is_gone_has_no_turn(how: str) -> None:
    """The next one begins; a rank that comes back as another process belongs to a new gang."""
    first, second = gang_of(1, "a", "b"), gang_of(2, "a", "b")
    order = GangOrder()
    for rank in (*first, *second):
        order.ask(rank, 0, 0)
    living = {rank.pid for rank in (*first, *second)}
    order.lives("a", living, 1)
    assert all(map(order.is_waiting, second))
    assert order.has_begun(first[0], 0)
    if how == "ends":
        order.leave(first[0], 1)
        assert all(map(order.is_waiting, second))
        order.leave(first[1], 1)
        order.leave(first[1], 1)
    else:
        order.lives("b", living - {first[1].pid} if how == "dies" else {second[1].pid}, 1)
    assert not any(map(order.is_waiting, second))
    assert order.inside() == {"a": 2, "b": 2}
    assert not order.has_begun(first[0], 0)


def test_a_rank_that_was_forgotten_asks_again() -> None:
    """A look at the pool from before it has joined takes it for dead: it has not begun, and its gang still can."""
    one, other = gang_of(1, "a", "b")
    order = GangOrder()
    order.ask(one, 0, 0)
    order.lives("a", set(), 0)
    assert not order.is_waiting(one)
    assert not order.has_begun(one, 0)
    order.ask(one, 0, 1)
    order.ask(other, 0, 1)
    assert order.has_begun(one, 0)
    assert not order.has_begun(one, 1)


@pytest.mark.parametrize(("number", "world"), [(2, 2), (-1, 2), (0, 3)])
def test_a_rank_of_another_gang_is_refused(number: int, world: int) -> None:
    """One sentence, and the gang is as before."""
    order = GangOrder()
    order.ask(Rank(1, 0, 2, "a", 1), 0, 0)
    with pytest.raises(ConfigError, match=f"rank {number} of {world} is no rank of gang 1, which has 2: give each"):
        order.ask(Rank(1, number, world, "a", 1), 0, 0)
    order.ask(Rank(1, 1, 2, "b", 1), 0, 0)
    assert order.inside() == {"a": 1, "b": 1}
