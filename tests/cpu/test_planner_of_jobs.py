"""The planner of jobs: its plans before the judge, what it takes them to cost, and what it needs of the interpreter."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.compiled import interpreted
from zico.base.units import MIB
from zico.lab.saving.graphs import graph_of
from zico.lab.saving.judge import judge
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving import clock, moving
from zico.planning.saving.planner import WORK, Planner, searched
from zico.planning.saving.problem import PERSISTENT, READ, WRITE, Link, SwapProblem
from zico.planning.saving.recomputation import Graph
from zico.swap.swapper import MOST_EVENTS

SOME_WORK = WORK // 100
DEADLINE_S = 60.0


def made(
    durations: list[int], tensors: list[tuple[int, int, int, dict[int, int]]], links: tuple[Link, Link], tail: int = 0
) -> SwapProblem:
    """Return an iteration of operations without pauses, and of tensors as size, first and last operation, and uses."""
    ends, took = np.cumsum(durations), np.array(durations, np.int64)
    return SwapProblem(
        op_start_ns=ends - took,
        op_duration_ns=took,
        period_ns=int(ends[-1]) + tail,
        size_bytes=np.array([each[0] for each in tensors]),
        alloc_op=np.array([each[1] for each in tensors]),
        free_op=np.array([each[2] for each in tensors]),
        access_begin=np.cumsum([0, *(len(each[3]) for each in tensors)]),
        access_op=np.array([op for each in tensors for op in each[3]], np.int64),
        access_kind=np.array([kind for each in tensors for kind in each[3].values()], np.int64),
        out=links[0],
        back=links[1],
    )


def training(layers: int = 8, size: int = 4 * MIB, *, ns: int = 10_000_000, speed: float = 1e9) -> SwapProblem:
    """Return a chain of layers, each of a dear operation and a cheap one, and its backward pass, which reads both."""
    n = 4 * layers
    tensors = []
    for i in range(layers):
        tensors.append((size, 2 * i, n - 1 - 2 * i, {2 * i: WRITE, 2 * i + 1: READ, n - 1 - 2 * i: READ}))
        reads = [2 * i + 2] if i < layers - 1 else []
        tensors.append(
            (size, 2 * i + 1, n - 2 - 2 * i, {2 * i + 1: WRITE, **dict.fromkeys([*reads, n - 2 - 2 * i], READ)})
        )
    return made([ns, ns // 50] * (2 * layers), tensors, (Link(speed), Link(speed)))


@st.composite
def iterations(draw: Any) -> SwapProblem:  # noqa: ANN401 - hypothesis' draw
    """Make a small iteration: tensors that operations make and read later, held longer, across the end, or always."""
    n = draw(st.integers(3, 9))
    tensors = []
    for op in range(n):
        reads = sorted(draw(st.sets(st.integers(op + 1, n - 1), max_size=3))) if op < n - 1 else []
        last = draw(st.integers(max([op, *reads]), n - 1))
        tensors.append((draw(st.integers(1, 9)) * 1000, op, last, {op: WRITE, **dict.fromkeys(reads, READ)}))
    for _ in range(draw(st.integers(0, 2))):
        uses = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=3)))
        tensors.append((draw(st.integers(1, 9)) * 1000, PERSISTENT, PERSISTENT, dict.fromkeys(uses, READ)))
    if draw(st.booleans()):
        tensors.append((3000, n - 2, n, {n - 2: WRITE, n: READ}))
    links = tuple(Link(draw(st.sampled_from((1e8, 1e9, 1e11))), draw(st.sampled_from((0, 500)))) for _ in range(2))
    durations = draw(st.lists(st.integers(0, 20_000), min_size=n, max_size=n))
    return made(durations, tensors, (links[0], links[1]), draw(st.integers(1, 3000)))


@given(iterations(), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_the_limit_and_takes_what_the_planner_says(iteration: SwapProblem, share: float) -> None:
    """The judge, which shares no code with it, says the same."""
    least, peak = iteration.least_bytes, iteration.peak_bytes
    limited = dataclasses.replace(iteration, limit_bytes=least + int(share * (peak - least)))
    graph = graph_of(limited)
    answer = Planner(SOME_WORK).plan(limited, graph)
    if isinstance(answer, NoPlan):
        assert answer.reason is Reason.NOT_FOUND
        return
    result, _ = judge(limited, graph, answer)
    assert result.is_good, (result.rule, result.detail)
    assert result.peak_bytes <= (limited.limit_bytes or 0)
    if limited.limit_bytes is not None and limited.limit_bytes < peak:
        assert searched(limited, graph, SOME_WORK).ns[0] == np.ceil(result.duration_ns)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("speed", [1e8, 4e9, 1e14])
def test_there_is_a_plan_for_links_of_any_speed(share: float, speed: float) -> None:
    """It is the same each time, and one for less memory takes no less."""
    iteration = training(speed=speed)
    graph, took_ns = graph_of(iteration), []
    for each in (share, share, share - 0.1):
        limited = dataclasses.replace(iteration, limit_bytes=int(each * iteration.peak_bytes))
        answer = Planner(SOME_WORK).plan(limited, graph)
        assert not isinstance(answer, NoPlan)
        result, _ = judge(limited, graph, answer)
        assert result.is_good, (result.rule, result.detail)
        took_ns.append(result.duration_ns)
    assert took_ns[0] == took_ns[1] <= took_ns[2]


def test_slow_links_let_it_drop_and_fast_ones_let_it_move() -> None:
    """It does what takes less."""
    answers = []
    for speed in (1e7, 1e14):
        iteration = training(speed=speed)
        limited = dataclasses.replace(iteration, limit_bytes=int(0.75 * iteration.peak_bytes))
        answer = Planner().plan(limited, graph_of(limited))
        assert not isinstance(answer, NoPlan)
        answers.append(answer)
    assert len(answers[0].swaps) == 0 < len(answers[0].order)
    assert len(answers[1].swaps) > 0 == len(answers[1].order)


@pytest.mark.parametrize("speed", [1e9, 1e10])
def test_work_that_is_used_up_leaves_the_first_plan_as_it_is(speed: float) -> None:
    """Links that carry all in time cost nothing, also where an iteration is so long that nothing is searched for."""
    problem = training(20, speed=speed)
    limited = dataclasses.replace(problem, limit_bytes=problem.peak_bytes // 2)
    graph = graph_of(limited)
    plan = Planner(1).plan(limited, graph, DEADLINE_S)
    assert not isinstance(plan, NoPlan)
    assert judge(limited, graph, plan)[0].duration_ns <= 1.01 * problem.period_ns


def test_it_says_why_there_is_no_plan() -> None:
    """Less than an operation needs at once is refused with what that is; without a limit nothing happens."""
    iteration = training()
    graph = graph_of(iteration)
    free = Planner().plan(iteration, graph)
    assert not isinstance(free, NoPlan)
    assert (free.order, len(free.swaps)) == ((), 0)
    answer = Planner().plan(dataclasses.replace(iteration, limit_bytes=iteration.least_bytes - 1), graph)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.INFEASIBLE
    assert f"an operation needs {iteration.least_bytes} bytes at once" in answer.detail


def test_an_iteration_longer_than_a_job_observes_is_refused() -> None:
    """Links carry what is asked first even in the longest order, and a longer iteration gets no plan."""
    ops, none = np.array([6 * MOST_EVENTS - 1, 3, MOST_EVENTS + 1]), np.zeros(3, np.int64)
    rows = interpreted(moving._transfers)(np.arange(3), ops, none, none, 6 * MOST_EVENTS)
    assert rows[:, 1].tolist() == sorted(ops.tolist())
    iteration = made([1] * (MOST_EVENTS + 1), [(1000, 0, 9, {0: WRITE, 9: READ})] * 2, (Link(), Link()))
    limited = dataclasses.replace(iteration, limit_bytes=1000)
    answer = Planner().plan(limited, Graph((1,), (1000,), ((),), 0))
    assert isinstance(answer, NoPlan)
    assert f"an iteration of {MOST_EVENTS + 1} operations is too long" in answer.detail


def test_who_plans_finds_no_time_left_once_that_is_over() -> None:
    """The interpreter's end waits for a thread that plans, and every planner looks at this clock."""
    over = threading.Event()
    with clock.ended_by(over.is_set):
        assert clock.now_s() < math.inf
        over.set()
        assert clock.now_s() == math.inf
    assert clock.now_s() < math.inf


def test_other_threads_run_while_it_searches() -> None:
    """A search holds no lock of the interpreter's: another thread's Python goes on, which launches a job's kernels."""
    iteration = training(40, speed=1e8)
    limited = dataclasses.replace(iteration, limit_bytes=iteration.peak_bytes // 2)
    graph = graph_of(limited)
    Planner(SOME_WORK).plan(limited, graph)  # loads the program
    thread = threading.Thread(target=lambda: Planner().plan(limited, graph), daemon=True)
    thread.start()
    turns = 0
    while thread.is_alive() and turns < 100_000:
        turns += 1
    assert turns == 100_000
    thread.join(DEADLINE_S)
