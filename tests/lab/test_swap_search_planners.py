"""AutoTM and SwapAdvisor: the program against brute force, and plans of both before the judge."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from cpu.support.saving_cases import training
from cpu.support.swap_cases import problem, problems
from hypothesis import given, settings

from zico.lab.saving import autotm
from zico.lab.saving.autotm import AutoTM, Choices, Copy
from zico.lab.saving.bound import least_overhead
from zico.lab.saving.flow import Flow
from zico.lab.saving.replay import replay
from zico.lab.saving.replayer import FastReplay, Replayer
from zico.lab.saving.swapadvisor import SwapAdvisor
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.problem import Link, SwapPlan, SwapPlanner, SwapProblem

SECONDS = 60.0
MOST_WAYS = 4000
BOTH = [AutoTM(least_bytes=1), SwapAdvisor(least_bytes=1)]
"""As for tensors of any size."""

each = pytest.mark.parametrize("planner", BOTH, ids=lambda planner: planner.name)


def tightened(of: SwapProblem) -> SwapProblem:
    """Return the problem with a limit nearer to the least one."""
    least = max(of.least_bytes, 1)
    return dataclasses.replace(of, limit_bytes=least + ((of.limit_bytes or least) - least) // 3)


def ways(choices: Choices, gap: int) -> list[tuple[Copy, Copy] | None]:
    """Return all that a gap can do: nothing, or a copy out and one back that begins after it."""
    out = [copy for copy in choices.out if copy.gap == gap]
    back = [copy for copy in choices.back if copy.gap == gap]
    return [None, *((o, b) for o in out for b in back if b.begin > o.end)]


def total_ns(choices: Choices, chosen: list[tuple[Copy, Copy]]) -> float:
    """Return what the program's model says an iteration takes beyond its operations, operation by operation."""
    cost = sum(
        copy.alone_ns + autotm.MOVE_COST * (copy.alone_ns + sum(ns for _, ns in copy.overlaps))
        for pair in chosen
        for copy in pair
    )
    for op, took_ns in enumerate(choices.took_ns.tolist()):
        out_ns, back_ns = (sum(ns for pair in chosen for at, ns in pair[way].overlaps if at == op) for way in (0, 1))
        cost += max(took_ns, out_ns, back_ns) - took_ns
    return cost


def fits(of: SwapProblem, choices: Choices, chosen: list[tuple[Copy, Copy]]) -> bool:
    """Tell whether what is in memory lies below the limit at each operation."""
    load = of.load_bytes.copy()
    for out, back in chosen:
        for op in range(out.end + 1, back.begin):
            load[op % of.n_ops] -= choices.gaps.size_bytes[out.gap]
    return bool(load.max() <= (of.limit_bytes or 0))


@given(problems(most_ops=6, most_tensors=4).map(tightened))
@settings(max_examples=150, deadline=None)
def test_the_program_is_as_good_as_trying_all_its_choices(of: SwapProblem) -> None:
    """By the program's own model of times, within the gap at which its solver stops."""
    limit = of.limit_bytes or 0
    choices = Choices(of, limit, 1)
    every = [ways(choices, gap) for gap in range(len(choices.gaps))]
    if not every or np.prod([float(len(some)) for some in every]) > MOST_WAYS:
        return
    tried = [[pair for pair in some if pair] for some in itertools.product(*every)]
    costs = [total_ns(choices, chosen) for chosen in tried if fits(of, choices, chosen)]
    found, is_proved = autotm._Program(of, choices).solve(np.full(of.n_ops, limit), SECONDS)
    assert is_proved
    assert (found is None) == (not costs)  # bytes whose gap ends with their tensor may be too many
    if found is None:
        return
    pairs = list(zip(*found, strict=True))
    assert fits(of, choices, pairs)
    assert total_ns(choices, pairs) <= min(costs) + 2 * autotm.GAP * (of.period_ns + min(costs)) + 1e-3
    assert total_ns(choices, pairs) >= min(costs) - 1e-6


def test_a_copy_is_hidden_behind_the_operation_that_is_long_enough() -> None:
    """The program moves during long operations, and alone where all of them are short."""
    tensors = [(100, 0, 5, (0, 5)), (100, 3, 3, (3,))]
    long = problem([10, 200, 10, 10, 200, 10], tensors, limit=100)
    answer = AutoTM(1).plan(long, SECONDS)
    assert not isinstance(answer, NoPlan)
    assert (answer.out.op.tolist(), answer.back.op.tolist()) == ([0], [4])
    assert replay(long, answer).overhead == 0
    short = problem([10] * 6, tensors, limit=100)
    answer = AutoTM(1).plan(short, SECONDS)
    assert not isinstance(answer, NoPlan)
    assert replay(short, answer).duration_ns == 60 + 80 + 90


@each
@given(problems().map(tightened))
@settings(max_examples=150, deadline=None)
def test_every_plan_is_believed_and_keeps_the_limit(planner: SwapPlanner, of: SwapProblem) -> None:
    """Whatever the problem, from the least limit on, there is one, and it is no better than the bound."""
    answer = planner.plan(of, SECONDS)
    if isinstance(answer, NoPlan):
        assert answer.reason is Reason.NOT_FOUND  # bytes whose gap ends with their tensor stay
        assert "candidates away" in answer.detail
        return
    result = replay(of, answer)
    assert result.is_good, (result.rule, result.detail)
    assert result.peak_bytes <= (of.limit_bytes or 0)
    bound_ns = least_overhead(of, of.limit_bytes or 0).value
    assert result.duration_ns - of.period_ns >= bound_ns * (1 - 1e-6) - 1e-3


@each
@pytest.mark.parametrize("speed", [1e8, 3e8, 1e9])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_neither_is_far_behind_flow(planner: SwapPlanner, share: float, speed: float) -> None:
    """On a chain of layers, by a tenth of an iteration at most, and two tenths where links take several."""
    iteration = training(link=Link(speed))
    limited = dataclasses.replace(iteration, limit_bytes=int(share * iteration.peak_bytes))
    answer, best = planner.plan(limited, SECONDS), Flow().plan(limited, SECONDS)
    assert not isinstance(answer, NoPlan)
    assert not isinstance(best, NoPlan)
    assert replay(limited, answer).overhead <= replay(limited, best).overhead + (0.2 if speed < 1e9 else 0.1)


@given(problems().map(tightened))
@settings(max_examples=50, deadline=None)
def test_the_genetic_search_says_the_same_again(of: SwapProblem) -> None:
    """Its random numbers are seeded."""
    one, other = (SwapAdvisor(1, population=6).plan(of, SECONDS) for _ in range(2))
    if isinstance(one, NoPlan) or isinstance(other, NoPlan):
        assert type(one) is type(other)
        return
    for name in ("tensor", "gap"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    for mine, yours in ((one.out, other.out), (one.back, other.back)):
        assert (mine.op.tolist(), mine.delay_ns.tolist()) == (yours.op.tolist(), yours.delay_ns.tolist())


def test_more_generations_are_never_worse() -> None:
    """The best plan of all generations is the answer, so a deadline of nothing gives no better one."""
    iteration = training(link=Link(2e8))
    limited = dataclasses.replace(iteration, limit_bytes=int(0.7 * iteration.peak_bytes))
    first, last = (SwapAdvisor().plan(limited, seconds) for seconds in (0.0, SECONDS))
    assert not isinstance(first, NoPlan)
    assert not isinstance(last, NoPlan)
    assert replay(limited, last).overhead <= replay(limited, first).overhead


@each
def test_below_what_an_operation_needs_there_is_no_plan(planner: SwapPlanner) -> None:
    """It is proved, and the message says how much is needed."""
    iteration = training()
    limited = dataclasses.replace(iteration, limit_bytes=iteration.least_bytes - 1)
    answer = planner.plan(limited, SECONDS)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.INFEASIBLE
    assert f"{iteration.least_bytes} bytes" in answer.detail


def test_a_program_that_is_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names a planner for such problems."""
    monkeypatch.setattr(autotm, "MOST_ENTRIES", 10)
    iteration = training()
    limited = dataclasses.replace(iteration, limit_bytes=int(0.7 * iteration.peak_bytes))
    answer = AutoTM().plan(limited, SECONDS)
    assert isinstance(answer, NoPlan)
    assert (answer.reason, answer.detail.split(": ")[-1]) == (Reason.NOT_FOUND, "ask flow")


def test_where_a_plan_does_not_hold_the_limit_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenth of the memory lost, as holes may take it, a plan is found that holds all the same."""

    class Holes(Replayer):
        def replay(self, plan: SwapPlan, limit_bytes: int | None = None) -> FastReplay:
            replayed = super().replay(plan, limit_bytes)
            fits = replayed.peak_bytes <= 0.9 * (self.problem.limit_bytes or 0)
            return replayed if fits else dataclasses.replace(replayed, rule="deadlock")

    iteration = training(12)
    limited = dataclasses.replace(iteration, limit_bytes=int(0.7 * iteration.peak_bytes))
    monkeypatch.setattr(autotm, "Replayer", Holes)
    answer = AutoTM().plan(limited, SECONDS)
    assert not isinstance(answer, NoPlan), answer.detail
    assert replay(limited, answer).peak_bytes <= 0.9 * (limited.limit_bytes or 0)
