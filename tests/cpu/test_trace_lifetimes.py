"""Lifetimes and iterations: what each tensor lives through, which iteration stands for all, and where it is cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu.support.trace_cases import MIB, STEP_NS, Loop, train
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import TraceError
from zico.planning.packing.from_trace import iteration_problem
from zico.trace.events import EVENT, Kind, Trace
from zico.trace.iterations import How, choose, find_iterations
from zico.trace.lifetimes import NEVER, lifetimes, live_after_steps


def test_lifetimes_are_the_steps_between_allocation_and_free() -> None:
    """Steps count allocations and frees only; a tensor that is not freed never ends."""
    loop = Loop()
    a = loop.allocate(10, "x")
    loop.event(Kind.READ, a)
    b = loop.allocate(20)
    loop.event(Kind.OP, size_bytes=5)
    loop.free(a)
    life = lifetimes(loop.trace())
    assert (life.begin.tolist(), life.end.tolist()) == ([0, 1], [2, NEVER])
    assert life.tensor.tolist() == [a, b]
    assert life.step_event.tolist() == [0, 2, 4]
    assert live_after_steps(life).tolist() == [10, 30, 20]


def test_marks_come_before_the_period() -> None:
    """Marked iterations are those that are marked; without marks the period finds as many, whole."""
    marked, bare = train(8), train(8, marked=False)
    found = find_iterations(marked, lifetimes(marked))
    assert (found.how, found.number.tolist(), found.typical.all()) == (How.MARKS, list(range(8)), True)
    assert (marked.events["kind"][found.begin] == Kind.BEGIN).all()
    found = find_iterations(bare, lifetimes(bare))
    assert found.how == How.PERIOD
    assert found.typical.sum() >= 6


def test_an_end_mark_ends_an_iteration() -> None:
    """What follows an END belongs to no iteration."""
    loop = Loop()
    for number in range(3):
        loop.event(Kind.BEGIN, number)
        loop.free(loop.allocate(7))
        loop.event(Kind.END, number)
        loop.free(loop.allocate(1000))
    trace = loop.trace()
    found = find_iterations(trace, lifetimes(trace))
    assert (found.end - found.begin).tolist() == [3, 3, 3]
    assert iteration_problem(trace).problem.peak_live_bytes == 7


def test_the_iteration_that_stands_for_all_is_typical_and_inside() -> None:
    """Not the first, not one that allocates other sizes, not one beside it if others are left."""
    loop = Loop()
    for number in range(9):
        loop.event(Kind.BEGIN, number)
        for size in (1, 2, 3):
            loop.free(loop.allocate(size + (100 if number == 4 else 0)))
    trace = loop.trace()
    found = find_iterations(trace, lifetimes(trace))
    assert found.typical.tolist() == [number != 4 for number in range(9)]
    assert choose(trace, found) in (1, 2, 6, 7)
    assert choose(trace, found, 4) == 4
    with pytest.raises(TraceError, match="has no iteration 9: give one of 0 to 8"):
        choose(trace, found, 9)


def test_of_iterations_that_differ_a_middling_one_is_chosen() -> None:
    """Where no two marked iterations are equal, one near the median stands for all."""
    loop = Loop()
    for number in range(7):
        loop.event(Kind.BEGIN, number)
        for i in range(20 if number != 5 else 200):
            loop.free(loop.allocate(1000 + number + i))
    trace = loop.trace()
    found = find_iterations(trace, lifetimes(trace))
    assert found.typical.tolist() == [number != 5 for number in range(7)]


def test_an_iteration_in_which_events_are_missing_does_not_stand_for_all() -> None:
    """An iteration with dropped events is not typical, though its allocations look as the others'."""
    trace = train(5)
    second = np.flatnonzero(trace.events["kind"] == Kind.BEGIN)[2]
    dropped = np.array([(int(trace.events["t_ns"][second]), 0, 3, -1, 0, Kind.DROPPED, 0)], EVENT)
    trace = dataclasses.replace(trace, events=np.insert(trace.events, second + 1, dropped))
    assert find_iterations(trace, lifetimes(trace)).typical.tolist() == [True, True, False, True, True]


def test_gradients_that_pass_the_mark_do_not_pass_the_cut() -> None:
    """As ``zico.trace.lifetimes`` draws it: weights live all ticks, gradients in one piece, nothing passes the cut."""
    found = iteration_problem(train(6))
    problem = found.problem
    stays = (problem.lower == 0) & (problem.upper == problem.n_ticks)
    assert problem.size_bytes[stays].tolist() == [(i + 1) * MIB for i in range(12)]
    gradients = problem.size_bytes % MIB == 128
    assert gradients.sum() == 6
    assert (problem.upper[gradients] - problem.lower[gradients]).min() > 5
    assert problem.upper[gradients].max() == problem.n_ticks
    assert problem.upper[~stays].max() == problem.n_ticks  # the last gradient: the cut is where it dies
    assert found.iteration.live_bytes[0] == problem.size_bytes[stays].sum()
    assert problem.tick_ns is not None
    assert (len(problem.tick_ns), problem.tick_ns[0]) == (problem.n_ticks + 1, 0)
    assert problem.tick_ns[-1] == (found.iterations.end - found.iterations.begin)[2] * STEP_NS


def test_what_lives_longer_than_an_iteration_is_persistent() -> None:
    """A batch that is loaded one and a half iterations ahead lives all ticks, as often as it is there at once."""
    loop = Loop()
    ahead: list[int] = []
    for number in range(6):
        loop.event(Kind.BEGIN, number)
        loop.free(loop.allocate(10))
        ahead.append(loop.allocate(500))
        loop.free(loop.allocate(20))
        if len(ahead) > 1:
            loop.free(ahead.pop(0))
        loop.free(loop.allocate(30))
    problem = iteration_problem(loop.trace(), 3).problem
    long = problem.size_bytes == 500
    assert long.sum() == 2
    assert (problem.upper - problem.lower)[long].tolist() == [problem.n_ticks] * 2


def test_a_single_iteration_is_taken_as_it_is() -> None:
    """Where nothing repeats, what was there before and what stays are tensors of their own, at the mark's times."""
    loop = Loop()
    old = loop.allocate(100)
    loop.event(Kind.BEGIN, 0)
    a = loop.allocate(10)
    loop.free(old)
    loop.allocate(20)
    loop.free(a)
    found = iteration_problem(loop.trace())
    assert not found.iteration.repeats
    lives = zip(
        found.problem.size_bytes.tolist(), found.problem.lower.tolist(), found.problem.upper.tolist(), strict=True
    )
    assert list(lives) == [(100, 0, 1), (10, 0, 3), (20, 2, 4)]


def test_an_iteration_without_memory_is_refused() -> None:
    """An iteration in which nothing is allocated is a one-line error that says what to choose instead."""
    loop = Loop()
    loop.allocate(1)
    loop.event(Kind.BEGIN, 0)
    with pytest.raises(TraceError, match="iteration 0: choose another one by --iteration"):
        iteration_problem(loop.trace())


@st.composite
def circles(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Return tensors of a periodic job: slots of allocation and free within the iteration, all different, and sizes."""
    n = draw(st.integers(2, 12))
    slots = draw(st.permutations(range(2 * n)))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n))
    return list(zip(slots[::2], slots[1::2], sizes, strict=True))


def unrolled(circle: list[tuple[int, int, int]], iterations: int) -> Trace:
    """Return the trace of a periodic job; what is freed before it is allocated is freed one iteration later."""
    loop = Loop()
    loop.allocate(5000)
    live: dict[int, int] = {}
    for number in range(iterations):
        loop.event(Kind.BEGIN, number)
        for slot in range(2 * len(circle)):
            for key, (begin, end, size) in enumerate(circle):
                if slot == begin:
                    live[key] = loop.allocate(size)
                elif slot == end and key in live:
                    loop.free(live.pop(key))
    return loop.trace()


@settings(deadline=None)
@given(circle=circles())
def test_the_line_has_what_lived_on_the_circle(circle: list[tuple[int, int, int]]) -> None:
    """At each tick the line holds what lived there, and more only by what passes the cut, as little as can be."""
    trace = unrolled(circle, 6)
    found = iteration_problem(trace)
    problem, life = found.problem, found.life
    first = life.step_of_event(int(found.iterations.begin[found.iteration.number]))
    n_ticks = 2 * len(circle)
    assert found.iteration.repeats
    assert problem.n_ticks == n_ticks
    actual = live_after_steps(life)[first : first + n_ticks]
    live = found.iteration.live_bytes
    before = np.roll(actual, 1)
    passing = int(np.minimum(before, actual).min()) - 5000
    shifts = [cut for cut in range(n_ticks) if (live >= np.roll(actual, -cut)).all()]
    assert shifts
    assert any((live - np.roll(actual, -cut)).sum() >= 0 for cut in shifts)
    assert actual.max() <= live.max() <= actual.max() + passing
    if passing == 0:
        assert any((live == np.roll(actual, -cut)).all() for cut in shifts)
    stays = problem.upper - problem.lower == n_ticks
    assert problem.size_bytes[stays].sum() == 5000 + passing
