"""What a few jobs can do best: cells against the profile, arcs and figures against a search through everything."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.scheduler_cases import Debt, some_order_works
from cpu.support.scheduler_model import MS, Work, plateau, triangle
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.records import dtype_of
from zico.scheduler.best_schedule import Cells, ScheduleRecord, best_run, bit_of, cells_of, graph, solve
from zico.scheduler.cycles import NO_ARC

if TYPE_CHECKING:
    from collections.abc import Sequence

Node = tuple[int, ...]
Onward = dict[frozenset[int], Node]
"""Where each set of jobs that go on leads."""

LEVELS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
SCHEDULE = dtype_of(ScheduleRecord)


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

    def debt(self, cell: int, *, goes: bool) -> Debt:
        """Return it as the banker sees it."""
        held = self.levels[cell] if goes else self.before(cell)
        return Debt(held, max(self.levels[cell:]), self.keeps, must_finish=cell > 0 or goes)


SMALLS = st.builds(Small, LEVELS.map(tuple), st.integers(0, 1))


def cells_for(jobs: Sequence[Small]) -> Cells:
    """Return the jobs as the solver's arrays."""
    n = np.array([len(job.levels) for job in jobs])
    rows = np.zeros((4, len(jobs), n.max()), np.int64)
    for i, job in enumerate(jobs):
        for c in range(n[i]):
            rows[:, i, c] = job.levels[c], job.before(c), max(job.levels[c:]), job.rises
    return Cells(1, n, rows, np.array([job.keeps for job in jobs]))


def onward_from(jobs: Sequence[Small], at: Node, budget: int) -> Onward:
    """Return where one can go from a node, worked out from the words of the theory with every order tried."""
    allowed: Onward = {}
    for goes in itertools.product((False, True), repeat=len(jobs)):
        debts = [job.debt(cell, goes=go) for job, cell, go in zip(jobs, at, goes, strict=True)]
        free = budget - sum(debt.held for debt in debts)
        if any(goes) and free >= 0 and some_order_works(free, debts):
            to = tuple((cell + go) % len(job.levels) for job, cell, go in zip(jobs, at, goes, strict=True))
            allowed[frozenset(np.flatnonzero(goes).tolist())] = to
    inside = {i for i, cell in enumerate(at) if cell > 0}
    needy = {i for i in inside if jobs[i].levels[at[i]] > jobs[i].before(at[i])}
    for_memory = {
        those: to
        for those, to in allowed.items()
        if all(i in needy and those | {i} not in allowed for i in inside - those)
    }
    return {
        those: to
        for those, to in for_memory.items()
        if not any(
            (jobs[i].rises, i) < (jobs[j].rises, j) and those - {j} | {i} in for_memory
            for i in inside - those
            for j in inside & those
        )
    }


def best_mean(jobs: Sequence[Small], budget: int) -> float:
    """Return the largest mean number of jobs that go on, in a cycle from all boundaries. Source: Karp, 1978."""
    nodes = list(itertools.product(*(range(len(job.levels)) for job in jobs)))
    arcs = {at: onward_from(jobs, at, budget) for at in nodes}
    walks: list[dict[Node, int]] = [{nodes[0]: 0}]
    for _ in nodes:
        longer: dict[Node, int] = {}
        for at, gained in walks[-1].items():
            for those, to in arcs[at].items():
                longer[to] = max(longer.get(to, -1), gained + len(those))
        walks.append(longer)
    n = len(nodes)
    means = [
        min(Fraction(gained - walks[k][at], n - k) for k in range(n) if at in walks[k])
        for at, gained in walks[n].items()
    ]
    return float(max(means, default=Fraction(0)))


@given(jobs=st.lists(SMALLS, min_size=2, max_size=3), budget=st.integers(2, 16))
@settings(max_examples=80, derandomize=True, deadline=None)
def test_the_best_of_all_schedules_is_found(jobs: list[Small], budget: int) -> None:
    """The figure is that of the best cycle among all that the rules allow, each order of ending tried."""
    arcs = graph(cells_for(jobs), budget, any_wait=False)
    chosen, ratio = best_run(arcs, np.ones(len(jobs)), (1.0,))
    found = ratio[0] if chosen[0] != NO_ARC else 0.0
    assert found == pytest.approx(best_mean(jobs, budget))


@pytest.mark.parametrize("rises", [(0, 1), (1, 0), (1, 2, 0), (2, 0, 1), (0, 0, 1)])
def test_who_asks_first_gets_it(rises: tuple[int, ...]) -> None:
    """Of those inside their iterations that rise in the same cell where one fits, the one goes on that rises first."""
    jobs = [Small((1, 3, 1), rise) for rise in rises]
    arcs = graph(cells_for(jobs), len(jobs) + 2, any_wait=False)
    at_all_rises = arcs[int(np.ravel_multi_index([1] * len(jobs), [3] * len(jobs)))]
    actions = (1 << len(jobs)) - 1 - np.flatnonzero(at_all_rises != NO_ARC)
    assert actions.tolist() == [bit_of(rises.index(min(rises)), len(jobs))]


@given(works=st.lists(st.integers(0, 5), min_size=1, max_size=8), step_ns=st.integers(1, 5), cell_ns=st.integers(2, 7))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_cells_are_what_the_profile_says_nanosecond_by_nanosecond(works: list[int], step_ns: int, cell_ns: int) -> None:
    """A cell has the most held in it, what is held before it, the claim from it on, and when it first rises."""
    profile = Work(tuple(works), step_ns).load("a").profile
    levels = np.repeat(works, step_ns)
    keeps = works[-1]
    level, before, claim, rises_ns = (x.tolist() for x in cells_of(profile.record[0], cell_ns, keeps))
    n = max(1, (len(levels) + cell_ns // 2) // cell_ns)
    parts = [levels[c * cell_ns : (c + 1) * cell_ns if c + 1 < n else None] for c in range(n)]
    assert level == [int(part.max()) for part in parts]
    assert before == [keeps, *(int(part[-1]) for part in parts[:-1])]
    assert claim == [max(level[c:]) for c in range(n)]
    above = [np.flatnonzero(part > low) for part, low in zip(parts, before, strict=True)]
    assert rises_ns == [int(found[0]) if len(found) else cell_ns for found in above]


@pytest.mark.parametrize(
    "durations_ns",
    [(640_000 * MS, 64 * MS), (64_000 * MS, 64 * MS, 64 * MS), (64 * MS,) * 5],
    ids=["pair", "three", "five"],
)
def test_jobs_too_unequal_or_too_many_have_no_schedule(durations_ns: tuple[int, ...]) -> None:
    """Where cells of the shortest iteration would be too few, there is no answer, and it says so."""
    loads = [triangle(9, duration_ns=duration_ns).load("") for duration_ns in durations_ns]
    assert not solve(loads, 12, np.ones(len(loads)), (1.0,), np.zeros(1, SCHEDULE)[0])


def test_the_one_that_is_favoured_goes_first() -> None:
    """The schedule that favours a job of a pair keeps it waiting at fewer nodes than the one that favours the other."""
    n = 2
    loads = [plateau(60, rise=0.1, fall=0.1).load("") for _ in range(n)]
    record = np.zeros(1, SCHEDULE)
    assert solve(loads, 33 * n, np.full(n, 1 / n), (1.0,), record[0])
    cells = record[0]["n_cells"][:n].tolist()
    actions = record[0]["actions"][1 : 1 + n, : int(np.prod(cells))].reshape(n, *cells)
    goes = actions[..., None] >> np.arange(n)[::-1] & 1
    waits = np.array([[int((goes[f].take(0, axis=k)[..., k] == 0).sum()) for k in range(n)] for f in range(n)])
    for k in range(n):
        assert waits[k, k] < np.delete(waits[:, k], k).min()
