"""The best cycle of a graph, against all its cycles one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.scheduler.cycles import NO_ARC, best_arcs, prune

if TYPE_CHECKING:
    from numpy.typing import NDArray

GAIN = np.array([2.0, 1.0, 0.5])
LENGTH = np.array([1.5, 1.0, 2.0])
ROUNDS = 100


@st.composite
def graphs(draw: st.DrawFn) -> NDArray[np.int64]:
    """Draw a graph of a few nodes with three actions each, some of them missing."""
    n = draw(st.integers(1, 6))
    to = st.integers(-1, n - 1)
    return np.array([[draw(to) for _ in GAIN] for _ in range(n)], np.int64)


def cycles_from(arcs: NDArray[np.int64], path: list[tuple[int, int]], node: int) -> list[float]:
    """Return the ratio of every simple cycle that a walk can come to."""
    nodes = [at for at, _action in path]
    if node in nodes:
        actions = [action for _at, action in path[nodes.index(node) :]]
        return [float(GAIN[actions].sum() / LENGTH[actions].sum())]
    return [
        ratio
        for action, onward in enumerate(arcs[node])
        if onward != NO_ARC
        for ratio in cycles_from(arcs, [*path, (node, action)], int(onward))
    ]


@given(arcs=graphs())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_no_cycle_is_better(arcs: NDArray[np.int64]) -> None:
    """From every node the ratio is that of the best cycle that can be reached, and the chosen arcs lead there."""
    reachable = [cycles_from(arcs, [], node) for node in range(len(arcs))]
    prune(arcs)
    chosen, ratio = best_arcs(arcs, GAIN, LENGTH, ROUNDS)
    for first, ratios in enumerate(reachable):
        assert (chosen[first] == NO_ARC) == (not ratios)
        if not ratios:
            continue
        assert ratio[first] == pytest.approx(max(ratios))
        walk = [first]
        for _ in range(2 * len(arcs)):
            walk.append(int(arcs[walk[-1], chosen[walk[-1]]]))
        cycle = walk[len(arcs) : len(arcs) + walk[len(arcs) + 1 :].index(walk[len(arcs)]) + 1]
        actions = chosen[cycle]
        assert GAIN[actions].sum() / LENGTH[actions].sum() == pytest.approx(max(ratios))


@given(arcs=graphs())
@settings(max_examples=150, derandomize=True, deadline=None)
def test_prune_leaves_only_what_leads_on_for_ever(arcs: NDArray[np.int64]) -> None:
    """An arc is left exactly if a cycle can be reached through it."""
    endless = [bool(cycles_from(arcs, [], node)) for node in range(len(arcs))]
    want = [[to if to != NO_ARC and endless[to] else NO_ARC for to in row] for row in arcs.tolist()]
    prune(arcs)
    assert arcs.tolist() == want
