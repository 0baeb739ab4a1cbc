"""What two jobs can do best: cells against the profile, arcs and figures against a search through everything."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import Debt, some_order_works
from scheduler_model import MS, Work, plateau, triangle

from zico.scheduler import pair_schedule
from zico.scheduler.packed import packed
from zico.scheduler.pair_schedule import BOTH, FIRST, NO_ARC, PAIR, SECOND, best_arcs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Cells = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

LEVELS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
ONES = np.ones(3)
EQUAL = np.array([0.5, 0.5])
SUM = np.array([2.0, 1.0, 1.0])


@dataclasses.dataclass(frozen=True)
class Small:
    """A job of a few cells, each of one level, that keeps what it holds in the last one."""

    levels: tuple[int, ...]
    rises: int = 0

    @property
    def keeps(self) -> int:
        """Return what it holds between iterations."""
        return self.levels[-1]

    def before(self, cell: int) -> int:
        """Return what it holds while it waits to begin a cell."""
        return self.levels[cell - 1]

    def cells(self) -> Cells:
        """Return them as the pair's arrays."""
        n = len(self.levels)
        before = [self.before(c) for c in range(n)]
        claims = [max(self.levels[c:]) for c in range(n)]
        return np.array(self.levels), np.array(before), np.array(claims), np.full(n, self.rises)


SMALLS = st.builds(Small, LEVELS.map(tuple), st.integers(0, 1))


def arcs_one_by_one(a: Small, b: Small, budget: int) -> dict[int, dict[int, int]]:
    """Return where each action leads, worked out from the words of the theory with every order tried."""
    found: dict[int, dict[int, int]] = {}
    for p, q in itertools.product(range(len(a.levels)), range(len(b.levels))):
        onward = {}
        for action in (BOTH, FIRST, SECOND):
            goes = action != SECOND, action != FIRST
            held = [job.levels[at] if go else job.before(at) for job, at, go in zip((a, b), (p, q), goes, strict=True)]
            debts = [
                Debt(regions, max(job.levels[at:]), job.keeps, must_finish=at > 0 or go)
                for regions, job, at, go in zip(held, (a, b), (p, q), goes, strict=True)
            ]
            free = budget - sum(held)
            if free >= 0 and some_order_works(free, debts):
                onward[action] = (p + goes[0]) % len(a.levels) * len(b.levels) + (q + goes[1]) % len(b.levels)
        rises = a.levels[p] > a.before(p), b.levels[q] > b.before(q)
        _only_for_memory(onward, (p, q), rises, SECOND if a.rises <= b.rises else FIRST)
        found[p * len(b.levels) + q] = onward
    return found


def _only_for_memory(onward: dict[int, int], at: tuple[int, int], rises: tuple[bool, bool], later: int) -> None:
    """Take out the waits inside an iteration that are not for memory."""
    both = BOTH in onward
    for k, waits in ((0, SECOND), (1, FIRST)):
        if at[k] > 0 and (both or not rises[k]):
            onward.pop(waits, None)
    if min(at) > 0 and FIRST in onward and SECOND in onward:
        del onward[later]


def best_mean(arcs: dict[int, dict[int, int]]) -> float:
    """Return the largest mean gain of a cycle that node 0 reaches, 0 if there is none. Source: Karp, 1978."""
    n = len(arcs)
    walks: list[dict[int, int]] = [{0: 0}]
    for _ in range(n):
        longer: dict[int, int] = {}
        for node, gained in walks[-1].items():
            for action, to in arcs[node].items():
                longer[to] = max(longer.get(to, -1), gained + int(SUM[action]))
        walks.append(longer)
    means = [
        min(Fraction(gained - walks[k][node], n - k) for k in range(n) if node in walks[k])
        for node, gained in walks[n].items()
    ]
    return float(max(means, default=Fraction(0)))


@given(a=SMALLS, b=SMALLS, budget=st.integers(2, 12))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_the_best_of_all_schedules_is_found(a: Small, b: Small, budget: int) -> None:
    """The figure is that of the best cycle among all that the rules allow, each order of ending tried."""
    keeps = np.array([a.keeps, b.keeps])
    arcs = pair_schedule.arcs_of(a.cells(), b.cells(), keeps, budget)
    chosen, ratio = best_arcs(arcs, SUM, ONES, 300)
    found = ratio[0] if chosen[0] != NO_ARC else 0.0
    assert found == pytest.approx(best_mean(arcs_one_by_one(a, b, budget)))


@pytest.mark.parametrize(("first", "second", "waits"), [(0, 1, SECOND), (1, 0, FIRST)])
def test_who_asks_first_gets_it(first: int, second: int, waits: int) -> None:
    """Of two inside their iterations that rise in the same cell, the one that rises later waits."""
    a, b = Small((1, 3, 1), first), Small((1, 3, 1), second)
    arcs = pair_schedule.arcs_of(a.cells(), b.cells(), np.array([1, 1]), 4)
    at_both_rises = arcs[1 * 3 + 1]
    assert at_both_rises[BOTH] == NO_ARC
    assert at_both_rises[waits] == NO_ARC
    assert at_both_rises[FIRST + SECOND - waits] != NO_ARC


@given(works=st.lists(st.integers(0, 5), min_size=1, max_size=8), step_ns=st.integers(1, 5), cell_ns=st.integers(2, 7))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_cells_are_what_the_profile_says_nanosecond_by_nanosecond(works: list[int], step_ns: int, cell_ns: int) -> None:
    """A cell has the most held in it, what is held before it, the claim from it on, and when it first rises."""
    profile = Work(tuple(works), step_ns).load("a").profile
    levels = np.repeat(works, step_ns)
    keeps = works[-1]
    level, before, claim, rises_ns = (x.tolist() for x in pair_schedule.cells_of(packed(profile)[0], cell_ns, keeps))
    n = max(1, (len(levels) + cell_ns // 2) // cell_ns)
    parts = [levels[c * cell_ns : (c + 1) * cell_ns if c + 1 < n else None] for c in range(n)]
    assert level == [int(part.max()) for part in parts]
    assert before == [keeps, *(int(part[-1]) for part in parts[:-1])]
    assert claim == [max(level[c:]) for c in range(n)]
    above = [np.flatnonzero(part > low) for part, low in zip(parts, before, strict=True)]
    assert rises_ns == [int(found[0]) if len(found) else cell_ns for found in above]


def test_a_pair_too_unequal_has_no_plan() -> None:
    """Where the cells of the longer iteration would be too many, there is no answer, and it says so."""
    works = [triangle(9, duration_ns=6_400 * MS), triangle(9, duration_ns=64 * MS)]
    profiles = [packed(work.load("").profile) for work in works]  # kept: the cache of those may drop them meanwhile
    addresses = [profile.ctypes.data for profile in profiles]
    keeps = np.zeros(2, np.int64)
    assert not pair_schedule.solve(*addresses, keeps, 12, 1.0, EQUAL, np.zeros(1, PAIR)[0])


def test_the_one_that_is_favoured_goes_first() -> None:
    """The schedule that favours a job never keeps that one waiting where the other one's favours it less."""
    works = [plateau(60, rise=0.1, fall=0.1), plateau(60, rise=0.1, fall=0.1)]
    profiles = [packed(work.load("").profile) for work in works]  # kept: the cache of those may drop them meanwhile
    addresses = [profile.ctypes.data for profile in profiles]
    record = np.zeros(1, PAIR)
    assert pair_schedule.solve(*addresses, np.zeros(2, np.int64), 66, 1.0, EQUAL, record[0])
    actions, (n_a, n_b) = record[0]["actions"], record[0]["n_cells"].tolist()
    waits = [[int(np.sum(actions[f, 0, :n_b] == SECOND)), int(np.sum(actions[f, 1, :n_a] == FIRST))] for f in range(3)]
    assert waits[FIRST][0] < waits[SECOND][0]
    assert waits[SECOND][1] < waits[FIRST][1]
