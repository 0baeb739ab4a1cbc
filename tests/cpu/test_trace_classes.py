"""Tensor classes: the drawing of zico/trace/classes.py, by lifetimes and by who reads."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.support.trace_cases import MIB, Loop, train

from zico.planning.packing.from_trace import iteration_problem
from zico.trace.classes import NOT_READ, TensorClass, classify, classify_trace, last_reads
from zico.trace.events import Kind, Trace
from zico.trace.lifetimes import lifetimes

P, F, G, T = TensorClass


def test_the_peak_divides_forward_from_backward() -> None:
    """Weights, maps that cross the peak, maps born after it, and what dies soon, at the lengths that decide."""
    lives = [(0, 100), (10, 80), (20, 54), (55, 95), (60, 66), (49, 57), (48, 57), (30, 45), (91, 100)]
    lower, upper = np.array(lives).T
    size = np.array([100, 50, 50, 5, 1, 1, 1, 1, 1])
    assert classify(lower, upper, size, 100).tolist() == [P, F, F, G, T, T, F, T, G]


def test_what_goes_on_at_the_beginning_of_a_circle_keeps_its_class() -> None:
    """On a circle, a gradient that lives into the next iteration is a gradient."""
    lower, upper = np.array([0, 5, 60]), np.array([100, 50, 103])
    assert classify(lower, upper, np.array([9, 9, 2]), 100).tolist() == [P, F, G]


def test_long_iterations_have_longer_temporaries() -> None:
    """A temporary lives up to 8 ticks, or a 64th of the iteration."""
    lower, upper, size = np.array([0, 6400 - 100, 0]), np.array([12800, 6400 + 100, 201]), np.array([5, 5, 1])
    assert classify(lower, upper, size, 12800).tolist() == [P, T, T]
    assert classify(lower, np.add(upper, [0, 1, 0]), size, 12800).tolist() == [P, F, T]


def test_readers_decide_where_they_are_known() -> None:
    """Conditions (i) to (iii): forward and read in backward, backward and read, the rest; the source does not count."""
    lower, upper = np.array([0, 2, 10, 60, 61]), np.array([100, 90, 30, 99, 99])
    reads = np.array([99, 70, 10, 80, NOT_READ])
    assert classify(lower, upper, np.array([9, 9, 9, 1, 1]), 100, reads).tolist() == [P, F, T, G, T]


def read_trace_of(iterations: int) -> Trace:
    """Return a loop of three operations whose reads and writes are known: two forward, one backward."""
    loop = Loop()
    weight = loop.allocate(MIB)
    for number in range(iterations):
        loop.event(Kind.BEGIN, number)
        kept = loop.allocate(4 * MIB)
        loop.event(Kind.READ, weight)
        loop.event(Kind.WRITE, kept)
        loop.event(Kind.OP, size_bytes=10, name="forward")
        output = loop.allocate(2 * MIB)
        loop.event(Kind.READ, kept)
        loop.event(Kind.WRITE, output)
        loop.event(Kind.READ, output)  # the source itself, and nobody else
        loop.event(Kind.OP, size_bytes=10, name="loss")
        gradient = loop.allocate(MIB)
        loop.event(Kind.READ, kept)
        loop.event(Kind.WRITE, gradient)
        loop.event(Kind.OP, size_bytes=10, name="backward")
        loop.free(output, kept)
        loop.event(Kind.READ, gradient)
        loop.event(Kind.WRITE, weight)
        loop.event(Kind.OP, size_bytes=10, name="step")
        loop.free(gradient)
    return loop.trace()


def test_last_reads_are_those_of_other_operations() -> None:
    """A tensor's last reader counts, its source does not, and a trace without reads says nothing."""
    trace = read_trace_of(4)
    found = iteration_problem(trace)
    reads = last_reads(trace, found.life, found.iteration)
    assert reads is not None
    by_size = dict(zip(found.problem.size_bytes.tolist()[1:], reads.tolist()[1:], strict=True))
    assert by_size == {4 * MIB: 2, 2 * MIB: NOT_READ, MIB: 4}
    silent = train(4)
    other = iteration_problem(silent)
    assert last_reads(silent, other.life, other.iteration) is None


@pytest.mark.parametrize("marked", [True, False])
def test_a_whole_trace_has_the_classes_of_its_iterations(marked: bool) -> None:  # noqa: FBT001
    """Every iteration's tensors have the classes that the chosen one's have, and weights are persistent."""
    trace = train(7, marked=marked)
    found = iteration_problem(trace)
    labels = classify_trace(lifetimes(trace), found.iterations)
    assert labels[found.iteration.row].tolist() == found.classes.tolist()
    assert (labels[:12] == P).all()
    assert np.bincount(labels[12:], minlength=4)[1:3].min() >= 6
