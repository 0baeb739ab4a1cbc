"""Lifetimes on the circle of an iteration."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zico.trace.lifetimes import NEVER, cut_open


def test_the_drawing_of_the_circle() -> None:
    """The module's drawing: gradient, feature map, what crosses the cheapest cut, and a weight."""
    lower, upper = np.array([7, 2, 1, 0]), np.array([10, 8, 4, NEVER])
    line = cut_open(lower, upper, np.array([10, 10, 1, 50]), 8)
    assert line.cut == 2
    assert line.lower.tolist() == [5, 0, 0, 0]
    assert line.upper.tolist() == [8, 6, 8, 8]
    assert line.persists.tolist() == [False, False, False, True]


@given(
    n_ticks=st.integers(1, 12),
    tensors=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 14), st.integers(1, 9)), max_size=8),
)
def test_every_tick_of_the_circle_is_covered_and_the_cut_is_cheapest(
    n_ticks: int, tensors: list[tuple[int, int, int]]
) -> None:
    """A tensor lives on the line wherever it does on the circle, nowhere else unless it crosses; no cut is cheaper."""
    births = np.array([birth % n_ticks for birth, _, _ in tensors], np.int64)
    lengths = np.array([length for _, length, _ in tensors], np.int64)
    sizes = np.array([size for _, _, size in tensors], np.int64)
    line = cut_open(births, np.where(lengths > 0, births + lengths, NEVER), sizes, n_ticks)

    def crosses(cut: int, i: int) -> bool:
        lived = {(births[i] + k) % n_ticks for k in range(lengths[i])}
        first = (births[i] - cut) % n_ticks
        return bool(first + lengths[i] > n_ticks) if lived else False

    short = [i for i in range(len(tensors)) if 0 < lengths[i] <= n_ticks]
    costs = [sum(int(sizes[i]) for i in short if crosses(cut, i)) for cut in range(n_ticks)]
    assert costs[line.cut] == min(costs)
    for i in range(len(tensors)):
        assert line.persists[i] == (i not in short)
        ticks = {(t + line.cut) % n_ticks for t in range(line.lower[i], line.upper[i])}
        circle = {(births[i] + k) % n_ticks for k in range(lengths[i])}
        assert ticks == set(range(n_ticks)) if line.persists[i] or crosses(line.cut, i) else ticks == circle
