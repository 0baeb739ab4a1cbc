"""Waiting, or going on with a share of the budget: which is better, simulated."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import settings as how_often
from hypothesis import strategies as st

from zico.base.errors import ProblemError
from zico.lab.simulator.saving import OperatingPoint, SavingLoad, choose, limited, settings
from zico.scheduler.simulate import peak_of
from zico.scheduler.state import Profile

MS = 1_000_000
STEPS = 8


def plateau(name: str, *points: OperatingPoint, peak: int = 100, kept: int = 0, weight: float = 1.0) -> SavingLoad:
    """Return a job that holds its peak for nearly all of its iteration: two of them can only take turns."""
    held = (peak,) * (STEPS - 1) + (kept,)
    t_ns = tuple(step * 80 * MS // STEPS for step in range(STEPS))
    return SavingLoad(name, Profile(held, t_ns, 80 * MS, 6, STEPS << 6), kept, weight=weight, points=points)


def point(limit: int, slower: float, among: int = 9) -> OperatingPoint:
    """Return a point with so many regions, slower by that factor."""
    return OperatingPoint("swap", limit, round(80 * MS * slower), among)


def test_two_plateaus_that_could_only_take_turns_hold_their_shares() -> None:
    """With half of the sum of their peaks each gets half alone; a tenth slower and together they get nine tenths."""
    assert choose([plateau("a"), plateau("b")], 100) == (None, None)
    assert choose([plateau("a", point(50, 1.1)), plateau("b", point(50, 1.1))], 100) == (point(50, 1.1),) * 2


def test_nobody_saves_where_waiting_is_cheaper() -> None:
    """A point that makes iterations three times as long is worse than half of the time."""
    assert choose([plateau(name, point(50, 3.0)) for name in "ab"], 100) == (None, None)


def test_nobody_saves_where_everything_fits() -> None:
    """Not even where it would cost nothing."""
    assert choose([plateau(name, point(50, 1.0)) for name in "ab"], 200) == (None, None)


def test_a_job_larger_than_the_budget_must_save() -> None:
    """However slow it is; it takes the fastest point that fits."""
    large = plateau("large", point(120, 3.0), point(95, 4.0), point(80, 4.5), peak=150)
    assert settings([large, plateau("small", peak=20)], 100)[0] == (point(95, 4.0), None)
    assert choose([large], 100) == (point(95, 4.0),)


def test_who_does_not_want_its_share_leaves_it_to_the_others() -> None:
    """So does weight say who holds how much; who cannot save holds what it wants."""
    points = [point(limit, 2 - limit / 100) for limit in (90, 80, 70, 60, 50, 40, 30)]
    small, large = plateau("small", peak=20), plateau("large", *points)
    assert settings([small, large], 95) == [(None, point(90, 1.1)), (None, point(70, 1.3))]
    heavy = plateau("heavy", *points, weight=2.0)
    assert settings([heavy, large], 120)[1] == (point(80, 1.2), point(40, 1.6))
    assert settings([plateau("fixed"), large], 120)[1] == (None, point(60, 1.4))


def test_no_more_jobs_move_memory_than_a_point_counts_with() -> None:
    """With the whole link a job loses little; where both have to move, each takes the point that shares it."""
    alone, shared = point(50, 1.05, among=1), point(50, 1.2, among=2)
    assert choose([plateau(name, alone, shared) for name in "ab"], 100) == (shared, shared)
    assert settings([plateau("a", alone, shared), plateau("b")], 100)[1] == (alone, None)
    assert settings([plateau(name, alone) for name in "ab"], 100) == [(None, None)]


def test_a_job_that_no_point_fits_is_named() -> None:
    """With the budget."""
    for points in ((), (point(120, 1.1),)):
        with pytest.raises(ProblemError, match="large is larger than the budget of 100 regions, and no way to save"):
            choose([plateau("large", *points, peak=150)], 100)


@given(limit=st.integers(1, 120), slower=st.floats(0.5, 4.0), peak=st.integers(1, 200), kept=st.integers(0, 50))
def test_a_limited_job_never_holds_more_than_its_limit(limit: int, slower: float, peak: int, kept: int) -> None:
    """It takes as long as its point says, but never less than with everything, and its steps keep their order."""
    job = limited(plateau("a", peak=max(peak, kept), kept=kept), point(limit, slower))
    assert job.profile.peak <= limit
    assert job.persistent <= limit
    assert job.profile.duration_ns == max(80 * MS, round(80 * MS * slower))
    assert all(before < after for before, after in itertools.pairwise(job.profile.t_ns))
    assert job.profile.t_ns[-1] < job.profile.duration_ns


points_of_a_job = st.lists(st.builds(point, st.integers(20, 99), st.floats(1.0, 3.0)), max_size=3)


@how_often(max_examples=20, deadline=None)
@given(points=st.lists(points_of_a_job, min_size=1, max_size=3), budget=st.integers(100, 300))
def test_all_shares_fit_the_budget_together(points: list[list[OperatingPoint]], budget: int) -> None:
    """But for jobs that cannot save; and what is chosen is one of the settings."""
    loads = [plateau(f"job-{number}", *some) for number, some in enumerate(points)]
    possible = settings(loads, budget)
    assert possible[0] == (None,) * len(loads)
    for chosen in possible[1:]:
        held = [peak_of(limited(load, one)) for load, one in zip(loads, chosen, strict=True)]
        assert all(points) <= (sum(held) <= budget)
    assert choose([dataclasses.replace(load, jitter=0.0) for load in loads], budget) in possible
