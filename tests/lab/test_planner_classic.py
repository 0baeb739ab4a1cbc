"""The classic heuristics, SmartPool, and the allocators that decide as they go."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cpu.support.planner_cases import crowd, problems
from hypothesis import given
from hypothesis import strategies as st

from zico.lab.packing.classic import DYNAMIC, ByClass, Classic, Fit, Order, order_of, place_in_order, smartpool
from zico.lab.packing.compare import PLANNERS
from zico.planning.packing.judge import judge
from zico.planning.packing.problem import NoPlan, Plan, Problem, Reason

NEVER_NS = 1 << 62
PLANNERS_HERE = [*(Classic(order, fit) for order in Order for fit in Fit), smartpool()]


def offsets_in_order(problem: Problem, fit: Fit) -> list[int]:
    """Place the tensors in the order of their numbers."""
    offsets = np.empty(len(problem), np.int64)
    order = np.arange(len(problem))
    place_in_order(order, problem.lower, problem.upper, problem.size_bytes, fit is Fit.BEST, NEVER_NS, offsets)
    return offsets.tolist()


@pytest.mark.parametrize("fit", Fit)
def test_the_drawing_of_the_classic_heuristics(fit: Fit) -> None:
    """The module's drawing: c goes below b and above a, d on top of b."""
    lower, upper = np.array([0, 3, 1, 4]), np.array([5, 6, 4, 6])
    c_is_in_the_way = Problem(np.array([0, 0, 3, 1, 4]), np.array([5, 4, 6, 4, 6]), np.array([2, 2, 2, 2, 3]))
    assert offsets_in_order(c_is_in_the_way, fit) == [0, 2, 4, 6, 6]
    assert offsets_in_order(Problem(lower, upper, np.array([2, 2, 1, 3])), fit) == [0, 2, 4, 4]


def test_best_fit_takes_the_smallest_gap_and_first_fit_the_lowest() -> None:
    """Between walls at 0, 5 and 8 lie gaps of 4 and 2 bytes; a tensor of 2 goes to 6 and to 1."""
    walls = [(0, 9, 1), (0, 1, 4), (0, 9, 1), (0, 1, 2), (0, 9, 1)]
    lower, upper, size = np.array([*walls, (2, 3, 2)]).T
    problem = Problem(lower, upper, size)
    assert offsets_in_order(problem, Fit.BEST) == [0, 1, 5, 6, 8, 6]
    assert offsets_in_order(problem, Fit.FIRST) == [0, 1, 5, 6, 8, 1]


def test_orders() -> None:
    """Each order begins with what its name says."""
    problem = Problem(np.array([5, 2, 0]), np.array([6, 4, 3]), np.array([8, 5, 3]))
    first = {order: order_of(problem, order).tolist() for order in Order}
    assert first == {
        Order.SIZE: [0, 1, 2],
        Order.DURATION: [2, 1, 0],
        Order.AREA: [1, 2, 0],
        Order.START: [2, 1, 0],
    }


@given(problems())
def test_every_classic_plan_is_good(problem: Problem) -> None:
    """The judge finds nothing, and a plan says that it is optimal just where it has the live peak."""
    for planner in PLANNERS_HERE:
        plan = planner.plan(problem, 10)
        assert isinstance(plan, Plan)
        verdict = judge(problem, plan)
        assert verdict.is_good, verdict
        assert plan.optimal == (verdict.peak_bytes == problem.peak_live_bytes)


@given(problems(alignments=(1,)))
def test_dynamic_best_fit_knows_no_future(problem: Problem) -> None:
    """It places as an allocator does that hears of one allocation or free after the other."""
    plan = DYNAMIC.plan(problem, 10)
    assert isinstance(plan, Plan)
    live: dict[int, tuple[int, int]] = {}
    for i in np.argsort(problem.lower, kind="stable").tolist():
        live = {j: place for j, place in live.items() if problem.upper[j] > problem.lower[i]}
        size = int(problem.size_bytes[i])
        edges = [(0, 0), *sorted(live.values())]
        gaps = [(start - top, top) for (_, top), (start, _) in itertools.pairwise(edges) if start - top >= size]
        at = min(gaps)[1] if gaps else edges[-1][1]
        live[i] = (at, at + size)
        assert plan.offset_bytes[i] == at


def test_smartpool_piles_what_never_dies_at_the_bottom() -> None:
    """Tensors that live until the last tick come first, even the smaller ones."""
    problem = Problem(np.array([0, 1, 2]), np.array([5, 3, 5]), np.array([1, 9, 2]))
    plan = smartpool().plan(problem, 10)
    assert isinstance(plan, Plan)
    assert plan.offset_bytes.tolist() == [2, 3, 0]


def test_a_plan_above_the_capacity_is_none() -> None:
    """The live peak above the capacity is infeasible; a peak above it where a lower one exists is not found."""
    apart = {"lower": np.array([0, 0, 1]), "upper": np.array([1, 2, 2]), "size_bytes": np.array([4, 3, 5])}
    first = Classic(Order.SIZE, Fit.BEST)
    reasons = []
    for capacity in (7, 8, 12):
        answer = first.plan(Problem(**apart, capacity_bytes=capacity), 10)
        reasons.append(answer.reason if isinstance(answer, NoPlan) else None)
    assert reasons == [Reason.INFEASIBLE, None, None]
    stairs = Problem(np.array([0, 1, 2]), np.array([2, 3, 4]), np.array([1, 2, 1]), capacity_bytes=3)
    assert isinstance(first.plan(stairs, 10), Plan)
    tight = crowd(0, 50)
    tight = Problem(tight.lower, tight.upper, tight.size_bytes, capacity_bytes=tight.peak_live_bytes)
    answer = Classic(Order.AREA, Fit.BEST).plan(tight, 10)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.NOT_FOUND


def test_a_deadline_that_has_passed_is_out_of_time() -> None:
    """No time, no plan."""
    answer = smartpool().plan(crowd(0, 20), -1)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.OUT_OF_TIME


@given(problems(), st.data())
def test_classes_share_no_region(problem: Problem, data: st.DataObject) -> None:
    """Tensors of two classes never touch the same region, and the plan is good."""
    labels = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(problem), max_size=len(problem))), np.int64)
    plan = ByClass(labels, region_bytes=6).plan(problem, 10)
    assert isinstance(plan, Plan)
    assert judge(problem, plan).is_good
    spans = zip(plan.offset_bytes // 6, (plan.offset_bytes + problem.size_bytes - 1) // 6, strict=True)
    owners = {(int(region), int(labels[i])) for i, (a, b) in enumerate(spans) for region in range(a, b + 1)}
    assert len(owners) == len({region for region, _ in owners})


@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_has_the_name_that_users_type(name: str) -> None:
    """What a name makes says that name."""
    assert PLANNERS[name]().name == name
