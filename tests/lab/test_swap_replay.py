"""The judge of swap plans: the published example, and every rule broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import pytest
from cpu.support.swap_cases import EXAMPLE_LIMIT, EXAMPLE_LOAD, cases, example, example_plan, loads, plan, problem
from cpu.support.swap_ticks import Ticks
from hypothesis import given, settings

from zico.lab.saving.replay import replay, replay_with_history
from zico.lab.saving.replayer import Replayer
from zico.planning.saving.problem import PERSISTENT, Link, no_swaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.lab.saving.replay import Moved
    from zico.planning.saving.problem import SwapPlan, SwapProblem

    Rows = Sequence[tuple[int, int, int]]


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


@given(cases())
@settings(max_examples=100, deadline=None)
def test_the_judge_s_replay_is_that_of_ticks(case: tuple[SwapProblem, SwapPlan]) -> None:
    """A model that goes on by nanoseconds and counts bytes has operations begin at the same times, or none."""
    problem, plan = case
    result, history = replay_with_history(problem, plan)
    ticks = Ticks(problem, plan)
    if result.rule == "start":
        assert len(ticks.memory) > problem.limit_bytes or len(history.iteration_ns) > 1
        return
    goes_on = ticks.run(len(history.op_begin_ns) + (result.rule == "deadlock"), 4000)
    assert goes_on == result.is_good
    assert ticks.op_begin_ns == history.op_begin_ns
    assert ticks.peak_bytes <= result.peak_bytes <= max(problem.limit_bytes or 0, ticks.peak_bytes)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_what_a_replay_says_keeps_the_rules(case: tuple[SwapProblem, SwapPlan]) -> None:
    """Never above the limit; one transfer at a time each way; no operation runs while bytes that it uses are away."""
    problem, plan = case
    result, history = replay_with_history(problem, plan)
    if result.rule == "start":
        return
    assert all(load <= problem.limit_bytes for _, load in history.load_bytes)
    for direction in ("out", "back"):
        moved = [one for one in history.transfers if one.direction == direction]
        assert all(one.end_ns <= other.begin_ns for one, other in itertools.pairwise(moved))
    for one in history.transfers:
        for index in used_by(problem, plan, one, len(history.op_begin_ns)):
            begin_ns = history.op_begin_ns[index]
            assert begin_ns + problem.op_duration_ns[index % problem.n_ops] <= one.begin_ns or one.end_ns <= begin_ns


def used_by(problem: SwapProblem, plan: SwapPlan, one: Moved, n: int) -> list[int]:
    """Return which of ``n`` operations, counted on through the iterations, use the tensor that a transfer moves.

    What does not persist is a new tensor in each iteration, and may still be leaving when the next
    one begins.
    """
    tensor, gap = int(plan.tensor[one.swap]), int(plan.gap[one.swap])
    accesses = problem.accesses(tensor)
    if problem.persistent[tensor]:
        return [index for index in range(n) if index % problem.n_ops in accesses % problem.n_ops]
    transfers = plan.out if one.direction == "out" else plan.back
    asked = one.iteration * problem.n_ops + int(transfers.op[transfers.swap == one.swap][0])
    first = (asked - int(accesses[gap])) // problem.n_ops * problem.n_ops
    return [index for index in (first + accesses).tolist() if 0 <= index < n]


# -- rules -----------------------------------------------------------------------------------------

GOOD = ([(0, 0, 30), (1, 0, 20), (2, 0, 10)], [(0, 0, 0), (1, 1, 0), (2, 2, 0)], [(2, 7, 0), (1, 8, 0), (0, 10, 0)])


@pytest.mark.parametrize(
    ("rule", "swaps", "out", "back", "detail"),
    [
        ("swap", [(9, 0, 30), *GOOD[0][1:]], *GOOD[1:], "swap 0 is of gap 0 of tensor 9, which does not exist"),
        ("swap", [(0, 2, 30), *GOOD[0][1:]], *GOOD[1:], "swap 0 is of gap 2 of tensor 0, which does not exist"),
        ("swap", [(0, 0, 31), *GOOD[0][1:]], *GOOD[1:], "swap 0 moves bytes 0 to 31; tensor 0 has 30"),
        ("overlap", [GOOD[0][0], (0, 0, 1), GOOD[0][2]], *GOOD[1:], "swaps 0 and 1 move the same bytes"),
        ("once", GOOD[0], GOOD[1][1:], GOOD[2], "transfers out do not move each of 3 swaps once: look at [0]"),
        ("once", GOOD[0], [GOOD[1][0], *GOOD[1]], GOOD[2], "transfers out do not move each of 3 swaps once"),
        ("once", GOOD[0], GOOD[1], GOOD[2][1:], "transfers back do not move each of 3 swaps once: look at [2]"),
        ("once", GOOD[0], GOOD[1], [*GOOD[2], (3, 11, 0)], "transfer back 3 is of swap 3, which does not exist"),
        ("order", GOOD[0], GOOD[1][::-1], GOOD[2], "swap 1 is asked out at operation 1, behind one of 2"),
        ("order", GOOD[0], [(0, 0, -1), *GOOD[1][1:]], GOOD[2], "swap 0 is asked out at operation 0, -1 ns behind it"),
        ("order", GOOD[0], GOOD[1], [*GOOD[2][:2], (0, 14, 0)], "swap 0 is asked back at operation 14, 0 ns behind it"),
        ("late", GOOD[0], GOOD[1], [*GOOD[2][:2], (0, 12, 0)], "tensor 0, used by operation 12, is out"),
        ("late", GOOD[0], [*GOOD[1][:2], (2, 8, 0)], GOOD[2], "tensor 2 is asked out at operation 8, when it is used"),
    ],
)  # fmt: skip
def test_a_plan_broken_in_each_way(rule: str, swaps: Rows, out: Rows, back: Rows, detail: str) -> None:
    """The verdict names the rule, the swap or tensor, and the operation."""
    result = replay(example(), plan(swaps, out, back))
    assert result.rule == rule
    assert detail in result.detail


def test_a_limit_that_nothing_keeps_is_a_deadlock() -> None:
    """Without swaps the example stops where its load first passes the limit."""
    result = replay(example(), no_swaps("none"))
    assert (result.rule, result.detail) == ("deadlock", "operation 3 is short of 30 bytes, 60 of 60 are in use")


def test_a_transfer_back_without_room_is_a_deadlock_with_names() -> None:
    """Two tensors that are used in turn; the first one has no room to return, and nobody makes any."""
    turns = problem([9, 9, 9], [(6, PERSISTENT, PERSISTENT, [1]), (6, 2, 4, [2, 4])], limit=10)
    result = replay(turns, plan([(0, 0, 6)], [(0, 1, 0)], [(0, 0, 0)]))
    assert result.rule == "deadlock"
    assert result.detail == "tensor 0 used by operation 1 is out: 6 bytes are to come back first, 6 of 10 are in use"


def test_what_persists_must_leave_room_at_the_boundary() -> None:
    """The rule ``start``: two tensors of six bytes that are both there when an iteration begins, in ten bytes."""
    both = problem([9, 9], [(6, PERSISTENT, PERSISTENT, [0]), (6, PERSISTENT, PERSISTENT, [1])], limit=10)
    result = replay(both, no_swaps("none"))
    assert (result.rule, result.detail) == ("start", "12 bytes are in memory when an iteration begins, the limit is 10")


def test_a_tensor_that_ends_in_its_gap_does_not_return() -> None:
    """Bytes leave after the last access; while they leave they hold memory, even if the tensor ends."""
    ends = problem([9, 9, 9], [(6, 0, 1, [0]), (6, 2, 2, [2])], limit=10)
    assert replay(ends, plan([(0, 0, 6)], [(0, 0, 0)], [])).is_good
    result, history = replay_with_history(
        dataclasses.replace(ends, out=Link(0.5e9)), plan([(0, 0, 6)], [(0, 0, 0)], [])
    )
    assert history.op_begin_ns[:3] == [0, 9, 21]
    assert (result.memory_wait_ns, result.duration_ns) == (3, 30)
