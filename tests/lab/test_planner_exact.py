"""The exact planner: its answers against all plans there are, with every inference on and off."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.lab.packing.exact import Exact, ExactOptions, split
from zico.lab.packing.exact_state import Rules, sections
from zico.planning.packing.judge import judge
from zico.planning.packing.problem import NoPlan, Plan, Problem, Reason

MINUTE_S = 60.0
OPTIONS = [
    ExactOptions(**dict(zip(Rules._fields, rules, strict=True)), restarts=restarts)
    for *rules, restarts in itertools.product((False, True), repeat=len(Rules._fields) + 1)
]


def problem_of(rows: list[tuple[int, int, int]], alignment: int = 1, capacity: int | None = None) -> Problem:
    """Return a problem of tensors ``(lower, upper, size_bytes)``."""
    lower, upper, size_bytes = np.array(rows, np.int64).reshape(-1, 3).T
    return Problem(lower, upper, size_bytes, alignment_bytes=alignment, capacity_bytes=capacity)


def peak_of(problem: Problem, options: ExactOptions | None = None) -> int:
    """Return the peak of a plan that must exist and be good."""
    plan = Exact(options).plan(problem, MINUTE_S)
    assert isinstance(plan, Plan)
    verdict = judge(problem, plan)
    assert verdict.is_good, verdict
    return verdict.peak_bytes


def lowest_peak(problem: Problem) -> int:
    """Return the lowest peak of all plans: some order that puts each tensor above all before it reaches that."""
    best = 1 << 60
    lower, upper, sizes = problem.lower.tolist(), problem.upper.tolist(), problem.size_bytes.tolist()

    def place(tops: dict[int, int], peak: int) -> None:
        nonlocal best
        if peak >= best:
            return
        if len(tops) == len(problem):
            best = peak
        for i in set(range(len(problem))) - tops.keys():
            below = [top for j, top in tops.items() if lower[j] < upper[i] and lower[i] < upper[j]]
            top = -(-max(below, default=0) // problem.alignment_bytes) * problem.alignment_bytes + sizes[i]
            place({**tops, i: top}, max(peak, top))

    place({}, 0)
    return best


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a problem that is small enough for all plans to be tried."""
    tensor = st.tuples(st.integers(0, 6), st.integers(1, 7), st.integers(1, 6)).map(lambda t: (t[0], t[0] + t[1], t[2]))
    return problem_of(draw(st.lists(tensor, min_size=1, max_size=6)), draw(st.sampled_from([1, 1, 2, 4])))


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from(OPTIONS))
def test_the_lowest_peak_is_found_and_proved(problem: Problem, options: ExactOptions) -> None:
    """Without a capacity, every combination of inferences finds a plan of the lowest peak of all plans, and says so."""
    plan = Exact(options).plan(problem, MINUTE_S)
    assert isinstance(plan, Plan)
    verdict = judge(problem, plan)
    assert verdict.is_good, verdict
    assert (verdict.peak_bytes, plan.optimal) == (lowest_peak(problem), True)


@settings(max_examples=300, deadline=None)
@given(problems(), st.integers(-2, 2), st.sampled_from(OPTIONS))
def test_a_capacity_is_met_or_refuted(problem: Problem, room_bytes: int, options: ExactOptions) -> None:
    """Every combination of inferences finds a plan exactly if the capacity is at least the lowest peak of all plans."""
    lowest = lowest_peak(problem)
    tight = dataclasses.replace(problem, capacity_bytes=max(lowest + room_bytes, 0))
    answer = Exact(options).plan(tight, MINUTE_S)
    if room_bytes >= 0:
        assert isinstance(answer, Plan)
        assert judge(tight, answer).is_good
    else:
        assert isinstance(answer, NoPlan)
        assert answer.reason is Reason.INFEASIBLE


def test_waste_is_tried_where_nothing_else_will_do() -> None:
    """A short tensor that only fits on top, over ticks where little lives, is put there by every combination."""
    rows = [(5, 7, 3), (5, 7, 2), (0, 5, 2), (6, 7, 2), (0, 4, 3), (3, 7, 1)]
    problem = problem_of(rows, alignment=4, capacity=13)
    assert lowest_peak(problem) == 13
    for options in OPTIONS:
        assert peak_of(problem, options) == 13


def guillotine(n: int, seed: int, grid: int = 64) -> Problem:
    """Return ``n`` rectangles into which random cuts divide a square of time and space: they fit without any waste."""
    random = np.random.default_rng(seed)
    rectangles = [(0, grid, 0, grid)]
    while len(rectangles) < n:
        left, right, low, high = rectangles.pop(int(random.integers(len(rectangles))))
        if random.random() < 0.5 and right - left > 1:
            cut = int(random.integers(left + 1, right))
            rectangles += [(left, cut, low, high), (cut, right, low, high)]
        elif high - low > 1:
            cut = int(random.integers(low + 1, high))
            rectangles += [(left, right, low, cut), (left, right, cut, high)]
        else:
            rectangles.append((left, right, low, high))
    return problem_of([(left, right, high - low) for left, right, low, high in rectangles], capacity=grid)


@pytest.mark.parametrize("seed", range(10))
def test_cut_squares_are_put_together_again(seed: int) -> None:
    """A hundred tensors that fill time and space without a gap are placed within the capacity."""
    problem = guillotine(100, seed)
    plan = Exact().plan(problem, MINUTE_S)
    assert isinstance(plan, Plan)
    assert judge(problem, plan).is_good
    assert plan.optimal


@pytest.mark.parametrize("switch", [field.name for field in dataclasses.fields(ExactOptions) if field.name != "seed"])
def test_one_switch_off_gives_the_same_answer(switch: str) -> None:
    """On problems too large to try all plans, no single inference changes whether a plan exists."""
    some = ExactOptions(**{switch: False})
    for seed in range(30):
        problem = dataclasses.replace(guillotine(14, seed, grid=12), capacity_bytes=None)
        smaller = dataclasses.replace(problem, size_bytes=problem.size_bytes + seed % 2)
        assert peak_of(smaller) == peak_of(smaller, some)


def test_a_skyline_has_only_sections_that_matter() -> None:
    """Sections lie between a beginning and the next end; a tensor lives in those within its life."""
    left, right, n_sections = sections(problem_of([(0, 10, 1), (0, 4, 1), (2, 7, 1), (8, 9, 1)]))
    assert (left.tolist(), right.tolist(), n_sections) == ([0, 0, 0, 1], [2, 1, 1, 2], 2)


def test_what_never_lives_together_is_split() -> None:
    """Groups are separated where one ends as the next begins, and keep the indexes of their tensors."""
    groups = split(problem_of([(4, 6, 1), (0, 2, 1), (1, 4, 1), (5, 9, 1)]))
    assert [group.tolist() for group in groups] == [[1, 2], [0, 3]]


def test_more_live_than_fits_is_refused_at_once() -> None:
    """A capacity below the live bytes is infeasible, and the answer says by how much."""
    answer = Exact().plan(problem_of([(0, 2, 5), (1, 3, 6)], capacity=10), MINUTE_S)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.INFEASIBLE
    assert "11 bytes alive at once, which is more than the capacity of 10" in answer.detail


def test_no_time_is_an_answer() -> None:
    """With a deadline that is over, a problem is neither solved nor refuted."""
    answer = Exact().plan(guillotine(100, 0), 0.0)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.OUT_OF_TIME


def test_nothing_is_planned_at_once() -> None:
    """A problem without tensors has a plan without offsets, with and without a capacity."""
    for capacity_bytes in (None, 0):
        plan = Exact().plan(problem_of([], capacity=capacity_bytes), MINUTE_S)
        assert isinstance(plan, Plan)
        assert (len(plan.offset_bytes), plan.optimal) == (0, True)


def test_the_same_seed_gives_the_same_plan() -> None:
    """A planner keeps nothing from one problem to the next, and draws no other numbers than its seed's."""
    planner, problem = Exact(ExactOptions(seed=3)), guillotine(60, 5)
    first, second = planner.plan(problem, MINUTE_S), planner.plan(problem, MINUTE_S)
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.offset_bytes.tolist() == second.offset_bytes.tolist()


def test_sizes_of_half_the_address_space_do_not_overflow() -> None:
    """Sizes that add up to nearly 2**60 bytes are placed as small ones are."""
    big = (1 << 58) - 1
    problem = problem_of([(0, 2, big), (1, 3, big - 2), (2, 4, big)], capacity=2 * big - 2)
    assert peak_of(problem) == 2 * big - 2


def test_without_a_deadline_work_ends_the_search() -> None:
    """A problem too hard to be proved has the same plan every time: steps are counted, not seconds."""
    random = np.random.default_rng(7)
    lower = random.integers(0, 60, 60)
    hard = Problem(lower, lower + random.integers(1, 30, 60), random.integers(1, 1 << 20, 60))
    answers = [Exact(ExactOptions(work=300_000)).plan(hard, math.inf) for _ in range(2)]
    assert all(isinstance(answer, Plan) for answer in answers)
    first, second = (answer.offset_bytes.tolist() for answer in answers if isinstance(answer, Plan))
    assert first == second


def test_what_no_deadline_could_end_is_refused() -> None:
    """A step takes each section in which a tensor lives: ten thousands of long lives are refused before the first."""
    n = 20_000
    answer = Exact().plan(Problem(np.arange(n), np.arange(n) + n, np.ones(n, np.int64)), 0.1)
    assert isinstance(answer, NoPlan)
    assert "20000 tensors whose lives overlap are too many for an exact search: ask improve" in answer.detail
