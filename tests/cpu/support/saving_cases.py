"""Graphs of operations that may run again, and iterations of a training that saves memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from cpu.support.swap_cases import problem
from hypothesis import strategies as st

from zico.base.units import MIB
from zico.planning.saving.problem import READ, WRITE, Link, SwapProblem
from zico.planning.saving.recomputation import Graph


@st.composite
def graphs(draw: Any, *, most_more: int = 0) -> Graph:  # noqa: ANN401 - hypothesis' draw
    """Make a small graph: a result for each operation, or some more or fewer."""
    n = draw(st.integers(1, 7))
    maker = list(range(n))
    if most_more:
        maker = sorted(draw(st.lists(st.integers(0, n - 1), max_size=n + most_more)))
    inputs = []
    for op in range(n):
        before = [result for result, by in enumerate(maker) if by < op]
        inputs.append(tuple(sorted(draw(st.sets(st.sampled_from(before), max_size=2)))) if before else ())
    costs = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    sizes = draw(st.lists(st.integers(0, 5), min_size=len(maker), max_size=len(maker)))
    until = draw(st.one_of(st.just(()), st.tuples(*(st.integers(i, n) for i in range(n)))))
    rest = draw(st.one_of(st.just(()), st.tuples(*(st.integers(0, 5) for _ in range(n)))))
    forward = draw(st.integers(0, n))
    return Graph(tuple(costs), tuple(sizes), tuple(inputs), forward, until, rest, tuple(maker))


def training(layers: int = 8, size: int = 4 * MIB, *, ns: int = 10_000_000, link: Link | None = None) -> SwapProblem:
    """Return a chain of layers, each of a dear operation and a cheap one, and its backward pass.

    The cheap one of layer ``i`` is operation ``2 i + 1``. The backward pass of a layer reads what
    both have made.
    """
    n = 4 * layers
    durations, tensors = [], []
    for i in range(layers):
        durations += [ns, ns // 50]
        tensors.append((size, 2 * i, n - 1 - 2 * i, {2 * i: WRITE, 2 * i + 1: READ, n - 1 - 2 * i: READ}))
        reads = [2 * i + 2] if i < layers - 1 else []
        reads += [n - 2 - 2 * i]
        tensors.append((size, 2 * i + 1, n - 2 - 2 * i, {2 * i + 1: WRITE, **dict.fromkeys(reads, READ)}))
    durations += [ns, ns // 50] * layers
    names = ["conv", "relu"] * layers + ["conv backward", "relu backward"] * layers
    links = (link or Link(),) * 2
    return dataclasses.replace(problem(durations, tensors, links=links), op_names=tuple(names))
