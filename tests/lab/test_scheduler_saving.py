"""Waiting, or going on with less: which is better for whom."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zico.base.errors import ProblemError
from zico.scheduler.operating_points import choose, limited, useful
from zico.scheduler.simulate import Load
from zico.scheduler.state import OperatingPoint, Profile

MS = 1_000_000
STEPS = 8


def plateau(name: str, *ways: OperatingPoint, peak: int = 100, kept: int = 0, duration_ns: int = 80 * MS) -> Load:
    """Return a job that holds its peak for nearly all of its iteration: two of them can only take turns."""
    held = (peak,) * (STEPS - 1) + (kept,)
    t_ns = tuple(step * duration_ns // STEPS for step in range(STEPS))
    return Load(name, Profile(held, t_ns, duration_ns, 6, STEPS << 6), kept, less=ways)


def less(limit: int, slower: float, duration_ns: int = 80 * MS) -> OperatingPoint:
    """Return a way to go on with so many regions, slower by that factor."""
    return OperatingPoint("swap", limit, round(duration_ns * slower))


def test_two_plateaus_that_could_only_take_turns_go_on_with_less() -> None:
    """With half of the sum of their peaks each gets half alone; a tenth slower and together they get nine tenths."""
    turns = choose([plateau("a"), plateau("b")], 100)
    assert turns.less == (None, None)
    assert sum(turns.normalised) == pytest.approx(1.0, abs=0.15)
    both = choose([plateau("a", less(50, 1.1)), plateau("b", less(50, 1.1))], 100)
    assert both.less == (less(50, 1.1), less(50, 1.1))
    assert both.normalised == pytest.approx((1 / 1.1, 1 / 1.1), abs=0.03)


def test_nobody_saves_where_waiting_is_cheaper() -> None:
    """A way that makes iterations three times as long is worse than half of the time."""
    loads = [plateau(name, less(50, 3.0)) for name in "ab"]
    assert choose(loads, 100).less == (None, None)


def test_nobody_saves_where_everything_fits() -> None:
    """Not even where it would cost nothing: the ways come after all that a job wants."""
    loads = [plateau(name, less(50, 1.0)) for name in "ab"]
    assert choose(loads, 200).less == (None, None)


def test_a_job_larger_than_the_budget_must_save() -> None:
    """However slow it is; who fits waits for nobody."""
    found = choose([plateau("large", less(80, 4.0), peak=150), plateau("small", peak=20)], 100)
    assert found.less == (less(80, 4.0), None)
    assert found.normalised == pytest.approx((0.25, 1.0), abs=0.03)


def test_only_the_cheaper_one_saves() -> None:
    """Of two jobs of which one has to, the one that loses less by it does."""
    loads = [plateau("a", less(50, 1.3)), plateau("b", less(50, 1.02))]
    assert choose(loads, 150).less == (None, less(50, 1.02))


def test_no_more_jobs_move_memory_than_a_way_counts_with() -> None:
    """With the whole link one job loses little; where both have to move, each takes the way that shares it."""

    def ways(limit: int) -> tuple[OperatingPoint, ...]:
        return dataclasses.replace(less(limit, 1.05), among=1), dataclasses.replace(less(limit, 1.2), among=2)

    both = choose([plateau(name, *ways(50)) for name in "ab"], 100)
    assert [way and way.among for way in both.less] == [2, 2]
    one = choose([plateau(name, *ways(50)) for name in "ab"], 150)
    assert sorted(way.among if way else 0 for way in one.less) == [0, 1]
    many = choose(
        [plateau(f"job-{number}", *(one for limit in (75, 50) for one in ways(limit))) for number in range(7)], 350
    )
    moving = [way for way in many.less if way]
    assert all(way.among >= len(moving) for way in moving)
    with pytest.raises(ProblemError, match="raise the budget"):
        choose([plateau(name, ways(50)[0], peak=150) for name in "ab"], 100)


def test_a_job_that_no_way_fits_is_named() -> None:
    """With what it needs and what there is."""
    with pytest.raises(ProblemError, match="large needs 150 regions, and no way to do with the budget of 100"):
        choose([plateau("large", less(120, 1.1), peak=150)], 100)


def test_ways_that_are_worse_in_both_figures_are_left_out() -> None:
    """So are those that hold no less than the peak; a way is never faster than the job itself."""
    ways = [less(90, 1.2), less(80, 1.1), less(100, 1.0), less(60, 0.9)]
    assert useful(plateau("a", *ways)) == (less(60, 1.0),)
    ways = [less(90, 1.05), less(60, 1.3)]
    assert useful(plateau("a", *ways)) == tuple(ways)


@given(
    limit=st.integers(1, 120),
    slower=st.floats(1.0, 4.0),
    peak=st.integers(1, 200),
    kept=st.integers(0, 50),
)
def test_a_limited_job_never_holds_more_than_its_limit(limit: int, slower: float, peak: int, kept: int) -> None:
    """It takes as long as its way says, and its steps keep their order."""
    job = limited(plateau("a", peak=max(peak, kept), kept=kept), less(limit, slower))
    assert job.profile.peak <= limit
    assert job.persistent <= limit
    assert job.profile.duration_ns == round(80 * MS * slower)
    assert all(before < after for before, after in itertools.pairwise(job.profile.t_ns))
    assert job.profile.t_ns[-1] < job.profile.duration_ns


ways_of_a_job = st.lists(st.builds(less, st.integers(20, 99), st.floats(1.0, 3.0)), max_size=2)


@settings(max_examples=10, deadline=None)
@example(ways=[[less(20, 2.9375)], [less(20, 2.921875)]], budget=120)
@given(ways=st.lists(ways_of_a_job, min_size=2, max_size=2), budget=st.integers(100, 200))
def test_the_choice_is_the_best_of_all_combinations(ways: list[list[OperatingPoint]], budget: int) -> None:
    """Bounds save simulations and no answer: choosing with any one combination alone comes to no more."""
    loads = [plateau(name, *some) for name, some in zip("ab", ways, strict=True)]
    found = choose(loads, budget)
    for alone in itertools.product(*([None, *useful(load)] for load in loads)):
        forced = [limited(load, way) if way else plateau(load.name) for load, way in zip(loads, alone, strict=True)]
        got = choose(forced, budget).normalised
        rates = [80 * MS / load.profile.duration_ns for load in forced]
        assert sum(one * rate for one, rate in zip(got, rates, strict=True)) / 2 <= found.score + 1e-6


def test_what_is_left_of_the_budget_goes_to_whoever_saves_most() -> None:
    """Where predictions say that it costs nothing to save more, a job saves no more than others need."""
    ways = [less(limit, 1.02) for limit in (90, 80, 70, 60, 50, 40)]
    for names, budget, limits in (("ab", 110, [50, 60]), ("abcd", 210, [50, 50, 50, 60])):
        found = choose([plateau(name, *ways) for name in names], budget).less
        assert sorted(way.limit for way in found if way) == limits
    for no_more in (less(50, 1.3), dataclasses.replace(less(50, 1.02), among=1)):
        assert choose([plateau(name, no_more, less(40, 1.02)) for name in "ab"], 110).less == (less(40, 1.02),) * 2


def test_many_jobs_are_changed_one_at_a_time() -> None:
    """Six plateaus in half of the sum of their peaks all go on, where half of the memory costs a tenth of the speed."""
    loads = [plateau(f"job-{number}", less(75, 1.04), less(50, 1.1)) for number in range(6)]
    assert choose(loads, 300).score > 0.8
