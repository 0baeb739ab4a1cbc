"""The banker's rule against a reference that tries every order, and the theorem it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from cpu.support.scheduler_cases import WORKS, Debt, Eager, smallest_budget, some_order_works
from cpu.support.scheduler_model import Model, Work
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zico.pool.rules import is_safe

if TYPE_CHECKING:
    from collections.abc import Sequence


def judged(free: int, debts: Sequence[Debt]) -> bool:
    """Return what the compiled rule says."""
    return judged_with_done(free, debts)[0]


def judged_with_done(free: int, debts: Sequence[Debt]) -> tuple[bool, list[int]]:
    """Return what the compiled rule says, and who can finish."""
    held = np.array([debt.held for debt in debts], np.int64)
    claims = np.array([debt.claim for debt in debts], np.int64)
    residual = np.array([debt.residual for debt in debts], np.int64)
    must_finish = np.array([debt.must_finish for debt in debts], np.uint8)
    done = np.full(len(debts), 7, np.uint8)
    safe = is_safe(free, held, claims, residual, must_finish, done, len(debts))
    return bool(safe), done.tolist()


DEBTS = st.builds(Debt, st.integers(0, 6), st.integers(0, 8), st.integers(0, 6), st.booleans() | st.just(value=True))


@given(st.integers(-2, 10), st.lists(DEBTS, max_size=6))
@settings(max_examples=200, derandomize=True, deadline=None)
@example(free=2, debts=[Debt(3, 5, 5), Debt(3, 5, 5)])
@example(free=3, debts=[Debt(0, 3, 1), Debt(0, 3, 2)])
def test_the_rule_agrees_with_trying_every_order(free: int, debts: list[Debt]) -> None:
    """A state is called safe exactly if some order lets every job that must finish do so."""
    assert judged(free, debts) == some_order_works(free, debts)


@given(st.integers(-2, 10), st.lists(DEBTS, max_size=6))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_an_unsafe_state_says_who_can_finish(free: int, debts: list[Debt]) -> None:
    """Those marked as done can all finish with the others left out, and nobody who gives back was left out wrongly."""
    safe, done = judged_with_done(free, debts)
    if not safe:
        able = [debt for debt, mark in zip(debts, done, strict=True) if mark and debt.must_finish]
        stuck = [debt for debt, mark in zip(debts, done, strict=True) if not mark]
        givers = [debt for debt in able if debt.held >= debt.residual]
        assert set(done) <= {0, 1}
        assert stuck
        assert some_order_works(free, able)
        assert not any(some_order_works(free, [*givers, d]) for d in stuck if d.held >= d.residual)


def test_the_drawn_example_is_safe_and_one_region_more_is_not() -> None:
    """The example in the module's text holds: B first, then A; with one region more for A nobody can finish."""
    assert judged(2, [Debt(3, 9, 1), Debt(5, 7, 1)])
    assert not judged(1, [Debt(4, 9, 1), Debt(5, 7, 1)])


def test_jobs_that_end_with_more_than_they_hold_are_not_taken_for_free() -> None:
    """Two jobs that each keep two regions more at their end are unsafe if only two are free."""
    assert not judged(2, [Debt(3, 5, 5), Debt(3, 5, 5)])


def test_an_unknown_claim_neither_blocks_nor_helps() -> None:
    """A job that need not finish gives nothing back, whatever its other values are."""
    assert judged(0, [Debt(5, 9, 0, must_finish=False)])
    assert not judged(0, [Debt(5, 9, 0, must_finish=False), Debt(0, 1, 0)])


def test_a_lowered_budget_lets_those_finish_who_need_nothing() -> None:
    """With less than nothing free, jobs past their peaks still count as able to finish."""
    assert judged(-3, [Debt(5, 5, 1), Debt(1, 2, 1)])
    assert not judged(-4, [Debt(5, 5, 1), Debt(1, 2, 1)])


@given(st.lists(WORKS, min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=80, derandomize=True, deadline=None)
def test_jobs_with_right_claims_never_block_each_other(works: list[Work], spare: int, seed: int) -> None:
    """Granting only to safe states, arbitrary jobs started at arbitrary moments all go on for ever."""
    outcome = Model(Eager(), works, smallest_budget(works) + spare, seed).run(until_ns=300)
    assert outcome.stalls == 0
    assert sum(outcome.iterations) > 0


RISING_TOGETHER = [Work(levels=(1, 2, 3, 4, 1), step_ns=5)] * 2


def test_jobs_that_rise_together_finish_with_claims() -> None:
    """Two jobs that would get stuck half-way up each reach their peaks, one after the other."""
    assert Model(Eager(), RISING_TOGETHER, budget=6).run(until_ns=400).stalls == 0


def test_the_same_jobs_block_each_other_without_claims() -> None:
    """The model does show deadlocks."""
    assert Model(Eager(use_claims=False), RISING_TOGETHER, budget=6).run(until_ns=400).stalls > 0
