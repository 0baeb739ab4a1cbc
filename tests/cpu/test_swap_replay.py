"""The judge of swap plans: the published example, and every rule broken on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from swap_cases import EXAMPLE_LIMIT, EXAMPLE_LOAD, cases, example, example_plan, loads

from zico.planners.swap.fast import Replayer
from zico.planners.swap.replay import replay, replay_with_history

if TYPE_CHECKING:
    from zico.planners.swap.plan import SwapPlan
    from zico.planners.swap.problem import SwapProblem


def test_the_example_has_the_published_load() -> None:
    """Figure 7's LOAD, by operation."""
    assert example().load_bytes.tolist() == EXAMPLE_LOAD


def test_the_example_keeps_the_limit_by_one_delayed_operation() -> None:
    """Figure 7's LOAD'': operation t4 waits until w2 is out, w3 leaves from then on, and nothing else waits."""
    result, history = replay_with_history(example(), example_plan())
    assert loads(history) == [30, 50, 60, 60, 50, 60, 50, 40, 50, 40, 60, 50, 30, 0]
    planned = example().op_start_ns
    assert [begin - planned[op] for op, begin in enumerate(history.op_begin_ns[:14])] == [0] * 4 + [10] * 10
    assert (result.is_good, result.peak_bytes, result.duration_ns) == (True, EXAMPLE_LIMIT, 170)
    assert (result.memory_wait_ns, result.tensor_wait_ns, result.moved_bytes) == (10, 0, 120)
    moved = {(one.direction, one.swap): one for one in history.transfers if one.iteration == 0}
    assert moved["out", 2].begin_ns == history.op_begin_ns[4] == moved["out", 1].end_ns


def test_the_example_without_a_limit_moves_as_planned() -> None:
    """Figure 7's LOAD': the three swaps at the planned operations, and nothing waits."""
    result, history = replay_with_history(example(None), example_plan())
    assert loads(history) == [30, 50, 60, 60, 70, 70, 50, 40, 50, 40, 60, 50, 30, 0]
    assert (result.overhead, result.peak_bytes) == (0, 70)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_the_compiled_replay_is_the_judge_s(case: tuple[SwapProblem, SwapPlan]) -> None:
    """Both break the same rule, or agree in every figure."""
    problem, plan = case
    judged, fast = replay(problem, plan), Replayer(problem).replay(plan)
    assert judged.rule == fast.rule
    figures = ("duration_ns", "peak_bytes", "tensor_wait_ns", "memory_wait_ns", "repeats", "overhead")
    assert [getattr(judged, name) for name in figures] == [getattr(fast, name) for name in figures]
