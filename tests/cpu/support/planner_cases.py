"""Problems that the tests of several planners share."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st

from zico.planning.packing.problem import Problem


@st.composite
def problems(draw: st.DrawFn, *, most: int = 12, alignments: tuple[int, ...] = (1, 4)) -> Problem:
    """Draw a small problem, crowded in time."""
    lives = st.tuples(st.integers(0, 9), st.integers(1, 10), st.integers(1, 12))
    tensors = draw(st.lists(lives, max_size=most))
    lower, duration, size = np.array(tensors, np.int64).reshape(-1, 3).T
    return Problem(lower, lower + duration, size, alignment_bytes=draw(st.sampled_from(alignments)))


def lowest_peak(problem: Problem) -> int:
    """Return the least peak of any plan, from all orders in which each tensor takes the lowest place.

    An optimal plan whose tensors are put again, lowest first, each as low as can be, does not get
    higher.
    """
    n = len(problem)
    return min(_peak_in_order(problem, order) for order in itertools.permutations(range(n)))


def _peak_in_order(problem: Problem, order: tuple[int, ...]) -> int:
    placed: list[tuple[int, int, int, int]] = []
    for i in order:
        lower, upper, size = (int(a[i]) for a in (problem.lower, problem.upper, problem.size_bytes))
        others = sorted((o, top) for low, up, o, top in placed if low < upper and lower < up)
        at = 0
        for offset, top in others:
            if offset >= at + size:
                break
            at = max(at, top)
        placed.append((lower, upper, at, at + size))
    return max((top for *_, top in placed), default=0)


def crowd(seed: int, n_tensors: int) -> Problem:
    """Return a problem whose tensors differ in size and duration by orders of magnitude."""
    random = np.random.default_rng(seed)
    lower = random.integers(0, 2 * n_tensors - 1, n_tensors)
    duration = np.minimum(3 * random.pareto(0.8, n_tensors) + 1, 2 * n_tensors).astype(np.int64)
    return Problem(lower, lower + duration, (2 ** random.uniform(9, 27, n_tensors)).astype(np.int64))
