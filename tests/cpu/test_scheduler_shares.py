"""Weights, priorities and guarantees: what they come to, what contradicts itself, and that plans heed them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from cpu.support.scheduler_model import MS, plateau, triangle
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ProblemError
from zico.scheduler.policies import policy_named
from zico.scheduler.shares import GUARD, budget_shares, check, floor_of, floors, worths
from zico.scheduler.simulate import Load, Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

LOAD = triangle(60).load("a job")


def loads(*fields: dict[str, float]) -> list[Load]:
    """Return jobs of which this was asked."""
    return [dataclasses.replace(LOAD, name=f"job{i}", **each) for i, each in enumerate(fields)]  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0.1, 9), st.integers(-2, 2)), min_size=1, max_size=6))
def test_worths_are_shares_of_one(asked: list[tuple[float, int]]) -> None:
    """They sum to one, go by weight among equals, and a higher priority is worth more at equal weight."""
    jobs = loads(*[{"weight": weight, "priority": priority} for weight, priority in asked])
    worth = worths(jobs)
    assert sum(worth) == pytest.approx(1)
    for a, x in zip(jobs, worth, strict=True):
        for b, y in zip(jobs, worth, strict=True):
            if a.priority == b.priority:
                assert x * b.weight == pytest.approx(y * a.weight)
            elif a.priority > b.priority:
                assert x * b.weight >= 8 * y * a.weight * (1 - 1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.floats(0.1, 9)), max_size=8),
    st.integers(0, 4000),
)
def test_shares_of_a_budget_are_fair_by_weight(asked: list[tuple[int, float]], budget: int) -> None:
    """Nobody gets more than it wants, and who gets less has as much for its weight as any other, but for rounding."""
    wants, weights = [want for want, _ in asked], [weight for _, weight in asked]
    shares = budget_shares(wants, weights, budget)
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    assert budget >= sum(shares) >= min(budget, sum(wants)) - len(asked)
    if sum(wants) <= budget:
        assert shares == tuple(wants)
    for share, want, weight in zip(shares, wants, weights, strict=True):
        if share < want:
            most = max((other - len(asked)) / its for other, its in zip(shares, weights, strict=True))
            assert (share + 1) / weight > most


def test_a_floor_is_what_was_guaranteed_else_a_guard() -> None:
    """Where nothing was promised it is half of the share by weight."""
    assert floors(loads({"floor": 0.8}, {}, {"weight": 2.0})) == pytest.approx((0.8, GUARD / 4, GUARD / 2))
    assert floor_of(0.25) == pytest.approx(0.8)
    assert floor_of(0) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param([{"weight": 0.0}], "weight 0: give one above 0", id="no weight"),
        pytest.param([{"weight": float("nan")}], "weight nan", id="not a number"),
        pytest.param([{"floor": 1.5}], "owed 1.5", id="more than alone"),
        pytest.param([{"floor": 0.9}, {"priority": 1}], "job0 is guaranteed its speed, but job1 of higher", id="first"),
    ],
)
def test_what_cannot_be_is_said(fields: Sequence[dict[str, float]], words: str) -> None:
    """One sentence with the job and the value."""
    with pytest.raises(ProblemError, match=words):
        check(loads(*fields))


@pytest.mark.parametrize("slowdown", [-0.1, float("inf")])
def test_a_guarantee_is_a_share(slowdown: float) -> None:
    """A job cannot be promised to be faster than alone, nor nothing at all."""
    with pytest.raises(ProblemError, match="slower than alone"):
        floor_of(slowdown)


def test_what_can_be_is_not_refused() -> None:
    """Weights, priorities and guarantees that do not contradict each other pass."""
    check(loads({"weight": 2.0, "floor": 0.9, "priority": 1}, {"priority": 1, "floor": 0.5}, {}))


def got(*fields: dict[str, float]) -> tuple[float, ...]:
    """Return what two jobs get that can hardly run beside each other."""
    loads = [
        dataclasses.replace(plateau(60, rise=0.05, fall=0.05).load(f"job{i}"), **each)  # type: ignore[arg-type]
        for i, each in enumerate(fields)
    ]
    return Simulation(policy_named("zico"), loads, 66).run(300 * 100 * MS, 40 * 100 * MS).normalised


@pytest.mark.parametrize("more", [{"weight": 3.0}, {"priority": 1}, {"floor": 0.85}], ids=["weight", "priority", "slo"])
def test_a_plan_heeds_what_was_asked(more: dict[str, float]) -> None:
    """The job that is to get more gets more, whichever of the two it is, and the other one does not starve."""
    equal = got({}, {})
    assert equal[0] == pytest.approx(equal[1], abs=0.05)
    for first in (True, False):
        shares = got(more, {}) if first else got({}, more)[::-1]
        assert shares[0] > shares[1] + 0.2
        assert shares[1] > 0.1
