"""Peeling, ejections, and the improving search made of them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from cpu.support.planner_cases import crowd, lowest_peak, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.lab.packing.classic import Classic, Fit, Order
from zico.lab.packing.improve import Ejection, Improve, ImproveOptions, peeled
from zico.planning.packing.judge import judge
from zico.planning.packing.problem import NoPlan, Plan, Problem, Reason

NEVER_NS = 1 << 62
ALL_OPTIONS = [
    ImproveOptions(peel=peel, all_orders=orders, eject=eject, exact=exact, most_steps=200)
    for peel, orders, eject, exact in itertools.product((False, True), repeat=4)
]


def peak(problem: Problem, planner: Improve | Classic) -> int:
    """Return the peak of a judged plan."""
    plan = planner.plan(problem, 60)
    assert isinstance(plan, Plan)
    verdict = judge(problem, plan)
    assert verdict.is_good, verdict
    assert plan.optimal == (verdict.peak_bytes == problem.peak_live_bytes)
    return verdict.peak_bytes


def test_the_drawing_of_peeling() -> None:
    """The module's drawing: a and b are peeled; c, d and e form a core above a."""
    lower, upper = np.array([0, 0, 5, 5, 8]), np.array([17, 3, 7, 14, 14])
    lower[3], upper[3] = 6, 14
    lower[4], upper[4] = 9, 15
    offsets = np.full(5, -1)
    (core,) = peeled(Problem(lower, upper, np.array([4, 2, 1, 1, 1])), offsets)
    assert offsets.tolist() == [0, 4, -1, -1, -1]
    assert core.base_bytes == 4
    assert sorted(core.tensors.tolist()) == [2, 3, 4]


def test_a_stack_is_solved_by_peeling_alone() -> None:
    """Where the last to come is the first to go, no core is left and the plan is optimal."""
    depth = np.arange(100)
    problem = Problem(depth, 200 - depth, 1 + depth**2 % 17)
    assert peeled(problem, np.zeros(100, np.int64)) == []
    assert peak(problem, Improve()) == problem.peak_live_bytes


@settings(max_examples=50)
@given(problems(most=5, alignments=(1,)))
def test_peeling_loses_nothing(problem: Problem) -> None:
    """The lowest peak of the cores above their bases, and of what is peeled, is the lowest peak of the whole."""
    offsets = np.full(len(problem), -1)
    cores = peeled(problem, offsets)
    tops = [core.base_bytes + lowest_peak(core.problem) for core in cores]
    done = offsets >= 0
    assert max([*tops, *(offsets + problem.size_bytes)[done]], default=0) == lowest_peak(problem)


@settings(deadline=None, max_examples=40)
@given(problems())
def test_every_combination_of_options_gives_good_plans(problem: Problem) -> None:
    """Whatever is switched off, the judge finds nothing."""
    for options in ALL_OPTIONS:
        peak(problem, Improve(options))


def test_ejections_reach_the_live_peak_where_no_order_does() -> None:
    """The search finds an optimal plan of a crowd that all eight orders miss by a third."""
    problem = crowd(6, 200)
    orders = min(peak(problem, Classic(order, fit)) for order in Order for fit in Fit)
    assert peak(problem, Improve(ImproveOptions(eject=False))) > problem.peak_live_bytes
    assert orders > 1.3 * problem.peak_live_bytes
    assert peak(problem, Improve()) == problem.peak_live_bytes


def test_ejections_know_what_lies_below_a_core() -> None:
    """With a tensor beneath it that never dies, the crowd is placed as low as without."""
    crowded = crowd(6, 200)
    lower, upper = np.append(crowded.lower, 0), np.append(crowded.upper, crowded.n_ticks)
    problem = Problem(lower, upper, np.append(crowded.size_bytes, crowded.peak_live_bytes))
    assert peak(problem, Improve()) == 2 * crowded.peak_live_bytes


@settings(deadline=None)
@given(problems(), st.integers(0, 40), st.integers(1, 1000))
def test_what_ejections_find_is_good_and_within_the_limit(problem: Problem, slack: int, seed: int) -> None:
    """From tensors laid end to end, a search ends with a good plan up to the limit or with none."""
    problem = dataclasses.replace(problem, size_bytes=4 * problem.size_bytes)
    end_to_end = np.cumsum(problem.size_bytes) - problem.size_bytes
    if not len(problem):
        return
    limit = problem.peak_live_bytes + 4 * slack
    found = Ejection(problem, seed).lower_to(limit, end_to_end, 100, NEVER_NS)
    if found is not None:
        verdict = judge(problem, Plan(found, "ejection", 0.0))
        assert verdict.is_good, verdict
        assert verdict.peak_bytes <= limit


def test_the_same_problem_gives_the_same_plan() -> None:
    """Two searches that end before the deadline agree in every offset."""
    plans = [Improve().plan(crowd(6, 200), 60) for _ in range(2)]
    assert isinstance(plans[0], Plan)
    assert isinstance(plans[1], Plan)
    assert plans[0].offset_bytes.tolist() == plans[1].offset_bytes.tolist()


def test_a_search_that_fails_leaves_the_plan_alone() -> None:
    """Without steps there is no plan up to the limit, and the offsets given are what they were."""
    problem = crowd(6, 200)
    start = Classic(Order.SIZE, Fit.BEST).plan(problem, 60)
    assert isinstance(start, Plan)
    before = start.offset_bytes.tolist()
    assert Ejection(problem, 1).lower_to(problem.peak_live_bytes, start.offset_bytes, 0, NEVER_NS) is None
    assert Ejection(problem, 1).lower_to(problem.peak_live_bytes, start.offset_bytes, 10, NEVER_NS) is None
    assert Ejection(problem, 1).lower_to(problem.peak_live_bytes, start.offset_bytes, 100_000, 0) is None
    assert start.offset_bytes.tolist() == before


def test_a_capacity_is_a_goal() -> None:
    """Nothing is improved that fits already, and what does not can be made to fit."""
    problem = crowd(6, 200)
    live = problem.peak_live_bytes
    enough = dataclasses.replace(problem, capacity_bytes=live + live // 100)
    assert live <= peak(enough, Improve()) <= live + live // 100
    first = Classic(Order.SIZE, Fit.BEST)
    enough = dataclasses.replace(problem, capacity_bytes=peak(problem, first))
    plans = [planner.plan(enough, 60) for planner in (first, Improve(ImproveOptions(peel=False)))]
    assert isinstance(plans[0], Plan)
    assert isinstance(plans[1], Plan)
    assert plans[0].offset_bytes.tolist() == plans[1].offset_bytes.tolist()


def test_no_plan_has_a_reason() -> None:
    """Less than what lives at once; out of time before and after the first plan; options that end the search."""
    problem = crowd(16, 300)
    live = problem.peak_live_bytes
    tight = dataclasses.replace(problem, capacity_bytes=live)
    answers = (
        Improve().plan(dataclasses.replace(problem, capacity_bytes=live - 1), 60),
        Improve().plan(tight, 0),
        Improve(ImproveOptions(exact=False)).plan(tight, 0.05),
        Improve(ImproveOptions(exact=False, most_steps=1000)).plan(tight, 60),
        Improve(ImproveOptions(eject=False)).plan(tight, 60),
    )
    reasons = [answer.reason if isinstance(answer, NoPlan) else None for answer in answers]
    late, ended = Reason.OUT_OF_TIME, Reason.NOT_FOUND
    assert reasons == [Reason.INFEASIBLE, late, late, ended, ended]


def test_offsets_are_aligned_while_the_search_goes_on() -> None:
    """Sizes that are no multiples of the alignment, which the orders alone do not pack, get aligned offsets."""
    problem = dataclasses.replace(crowd(6, 200), alignment_bytes=4096)
    aligned = Improve(ImproveOptions(most_steps=10_000))
    assert peak(problem, aligned) < peak(problem, Improve(ImproveOptions(eject=False)))
