"""Swap problems: what is refused, what an operation needs at once, and what a trace says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.swap_cases import example, problem, problems
from cpu.support.trace_cases import Loop, train
from hypothesis import given, settings

from zico.base.errors import ProblemError, TraceError
from zico.lab.saving.autoswap import gaps_between_accesses, over
from zico.lab.saving.files import swap_iteration
from zico.lab.saving.replay import replay
from zico.planning.saving.problem import PERSISTENT, READ, WRITE, Link, no_swaps
from zico.trace.events import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.planning.saving.problem import SwapProblem
    from zico.trace.events import Trace


@pytest.mark.parametrize(
    ("durations", "tensors", "message"),
    [
        ([], [(1, 0, 0, [])], "0 starts and 0 durations of operations: give one of each or more"),
        ([-1], [(1, 0, 0, [])], "operation 0 takes -1 ns: give 0 to 2**60"),
        ([1], [(1, 0, 0, []), (0, 0, 0, [])], "tensor 1 has 0 bytes: give 1 to 2**60 in all"),
        ([1], [(1, PERSISTENT, 0, [])], "tensor 0 ends at 0: give PERSISTENT for both or none"),
        ([1], [(1, 1, 1, [])], "tensor 0 begins at 1: give an operation"),
        ([1, 1], [(1, 1, 3, [])], "tensor 0 ends at 3: give an operation from its first to one round later"),
        ([1, 1], [(1, 1, 1, [0])], "tensor 0 is used by operation 0, at which it does not live"),
        ([1, 1], [(1, 0, 1, [1, 0])], "tensor 0 is used by operation 0 after a later one: give each once, in order"),
    ],
)
def test_a_problem_that_cannot_be_is_refused(
    durations: Sequence[int], tensors: Sequence[tuple[int, int, int, Sequence[int]]], message: str
) -> None:
    """The error names the first tensor or operation, its value and what to give."""
    with pytest.raises(ProblemError) as caught:
        problem([*durations], tensors) if durations else problem_without_operations()
    assert str(caught.value) == message


def problem_without_operations() -> SwapProblem:
    """Make a problem that has no operations."""
    from zico.planning.saving.problem import SwapProblem

    none = np.zeros(0, np.int64)
    return SwapProblem(none, none, 0, none, none, none, np.zeros(1, np.int64), none, none)


@pytest.mark.parametrize(("bandwidth", "latency_ns"), [(0.0, 0), (float("inf"), 0), (1.0, -1)])
def test_a_link_on_which_no_transfer_ends_is_refused(bandwidth: float, latency_ns: int) -> None:
    """Bandwidths are positive and finite, latencies not negative."""
    with pytest.raises(ProblemError):
        Link(bandwidth, latency_ns)


def test_the_example_needs_what_its_busiest_operation_uses() -> None:
    """Figure 7: at t5 all but the three idle tensors are in use, 60 bytes; no limit below that can be kept."""
    assert (example().peak_bytes, example().least_bytes) == (120, 60)


def test_gaps_reach_around_the_circle() -> None:
    """A weight's last gap ends with its first access; a gap over the peak is moved to the iteration of the peak."""
    circle = problem([1] * 6, [(5, PERSISTENT, PERSISTENT, [2, 3]), (7, 4, 7, [4, 7]), (1, 0, 0, [0])])
    gaps = gaps_between_accesses(circle, least_bytes=1)
    rows = list(zip(gaps.tensor.tolist(), gaps.gap.tolist(), gaps.first.tolist(), gaps.last.tolist(), strict=True))
    assert rows == [(0, 1, 4, 7), (1, 0, 5, 6)]
    moved = over(gaps, 0, circle.n_ops)
    assert (moved.tensor.tolist(), moved.first.tolist(), moved.last.tolist()) == ([0, 1], [-2, -1], [1, 0])


@given(problems())
@settings(max_examples=100, deadline=None)
def test_without_a_limit_nothing_waits(made: SwapProblem) -> None:
    """A replay without swaps takes the problem's period, and holds its peak."""
    result = replay(dataclasses.replace(made, limit_bytes=None), no_swaps("none"))
    assert (result.rule, result.duration_ns, result.peak_bytes) == (None, made.period_ns, made.peak_bytes)


# -- traces ----------------------------------------------------------------------------------------


def operation(loop: Loop, name: str, reads: Sequence[int], writes: Sequence[int]) -> None:
    """Write an operation that takes half a microsecond."""
    for tensor in reads:
        loop.event(Kind.READ, tensor, name=name)
    for tensor in writes:
        loop.event(Kind.WRITE, tensor, name=name)
    loop.event(Kind.OP, size_bytes=500, name=name)


def steps(iterations: int = 4) -> Trace:
    """Return a loop: forward keeps an activation, an empty buffer comes and goes, backward leaves a gradient."""
    loop = Loop()
    weight = loop.allocate(100, "init")
    gradient: int | None = None
    for number in range(iterations):
        loop.event(Kind.BEGIN, number)
        if gradient is not None:
            loop.free(gradient)
        kept = loop.allocate(40, "forward")
        operation(loop, "forward", [weight], [kept])
        loop.free(loop.allocate(1000, "empty"))
        scratch = loop.allocate(8, "loss")
        operation(loop, "loss", [kept], [scratch])
        gradient = loop.allocate(100, "backward")
        operation(loop, "backward", [kept, scratch], [gradient])
        loop.free(kept, scratch)
        operation(loop, "step", [gradient, weight], [weight])
    loop.event(Kind.END, iterations - 1)
    return loop.trace()


def test_a_trace_says_who_uses_what() -> None:
    """Operations, lives and accesses of one iteration; what only comes and goes gets an operation of its own."""
    found = swap_iteration(steps())
    made = found.problem
    assert made.op_names == ("forward", "empty", "loss", "backward", "step")
    assert made.op_duration_ns.tolist() == [500, 0, 500, 500, 500]
    rows = {
        int(made.size_bytes[i]): (int(made.alloc_op[i]), int(made.free_op[i]), made.accesses(i).tolist())
        for i in range(len(made))
        if made.size_bytes[i] != 100
    }
    assert rows == {40: (0, 3, [0, 2, 3]), 1000: (1, 1, []), 8: (2, 3, [2, 3])}
    weight, gradient = np.flatnonzero(made.size_bytes == 100)
    assert (made.alloc_op[weight], made.accesses(weight).tolist()) == (PERSISTENT, [0, 4])
    assert (made.alloc_op[gradient], made.free_op[gradient], made.accesses(gradient).tolist()) == (3, 4, [3, 4])
    assert made.access_kind[made.access_begin[weight] :][:2].tolist() == [READ, READ + WRITE]
    assert made.load_bytes.tolist() == [140, 1140, 148, 248, 200]
    assert made.peak_bytes == peak_of(steps(), found.number)


def peak_of(trace: Trace, number: int) -> int:
    """Return the most bytes alive in an iteration, event by event."""
    sizes: dict[int, int] = {}
    live = peak = 0
    inside = False
    for event in trace.events:
        if event["kind"] == Kind.ALLOC:
            sizes[int(event["tensor"])] = int(event["size_bytes"])
            live += int(event["size_bytes"])
        elif event["kind"] == Kind.FREE:
            live -= sizes[int(event["tensor"])]
        elif event["kind"] in (Kind.BEGIN, Kind.END):
            inside = event["kind"] == Kind.BEGIN and event["tensor"] == number
        peak = max(peak, live) if inside else peak
    return peak


def test_a_tensor_that_two_iterations_share_for_a_while_is_there_twice() -> None:
    """An output that is freed once the next one is there counts twice as long as both live, and is never idle then."""
    loop = Loop()
    before: int | None = None
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        output = loop.allocate(10, "forward")
        operation(loop, "forward", [], [output])
        if before is not None:
            loop.free(before)
        operation(loop, "rest", [output], [])
        before = output
    loop.event(Kind.END, 3)
    made = swap_iteration(loop.trace()).problem
    assert made.load_bytes.tolist() == [20, 10]
    assert sorted(made.size_bytes.tolist()) == [10, 10]
    assert made.least_bytes == 20


def test_a_trace_that_does_not_say_who_uses_what_is_refused() -> None:
    """The error names the way to a trace that does."""
    with pytest.raises(
        TraceError, match="does not say which operation uses which tensor: trace with --fake, or record"
    ):
        swap_iteration(train(4))


def test_a_recording_writes_operations_when_they_have_ended() -> None:
    """What is allocated and freed while an operation runs lives in that operation; none is put in for it."""
    loop = Loop()
    data = loop.allocate(64, "init")
    begun: list[tuple[int, int]] = []
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        begun.append((len(loop.rows), 0))
        output = loop.allocate(16, "conv")
        loop.free(loop.allocate(32, "conv"))
        operation(loop, "conv", [data], [output])
        begun[-1] = (begun[-1][0], len(loop.rows) - 1)
        operation(loop, "loss", [output], [])
        loop.free(output)
    loop.event(Kind.END, 3)
    trace = loop.trace()
    for first, op in begun:
        trace.events["t_ns"][op] = trace.events["t_ns"][first] - 500
        trace.events["size_bytes"][op] = trace.events["t_ns"][op - 1] + 500 - trace.events["t_ns"][op]
    made = swap_iteration(trace).problem
    assert made.op_names == ("conv", "loss")
    assert made.load_bytes.tolist() == [64 + 16 + 32, 64 + 16]
    assert made.op_duration_ns.tolist() == [5000, 500]
