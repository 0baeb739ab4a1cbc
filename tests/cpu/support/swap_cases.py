"""Swap problems for tests: the published worked example, and random ones."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from zico.planning.saving.problem import PERSISTENT, READ, WRITE, Link, SwapPlan, SwapProblem, Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.lab.saving.replay import History


def problem(
    durations: Sequence[int],
    tensors: Sequence[tuple[int, int, int, Sequence[int]]],
    *,
    limit: int | None = None,
    tail: int = 0,
    links: tuple[Link, Link] = (Link(1e9), Link(1e9)),
) -> SwapProblem:
    """Return a problem of operations without pauses, and tensors as (size, alloc, free, accesses).

    One byte takes a nanosecond, unless ``links`` say otherwise.
    """
    ends = list(itertools.accumulate(durations))
    return SwapProblem(
        op_start_ns=np.array([0, *ends[:-1]]),
        op_duration_ns=np.array(durations),
        period_ns=ends[-1] + tail,
        size_bytes=np.array([t[0] for t in tensors]),
        alloc_op=np.array([t[1] for t in tensors]),
        free_op=np.array([t[2] for t in tensors]),
        access_begin=np.array([0, *itertools.accumulate(len(t[3]) for t in tensors)]),
        access_op=np.array([op for t in tensors for op in t[3]], np.int64),
        access_kind=np.array(
            [WRITE if i == 0 and t[1] != PERSISTENT else READ for t in tensors for i in range(len(t[3]))]
        ),
        out=links[0],
        back=links[1],
        limit_bytes=limit,
    )


def plan(
    swaps: Sequence[tuple[int, ...]], out: Sequence[tuple[int, int, int]], back: Sequence[tuple[int, int, int]]
) -> SwapPlan:
    """Return a plan of swaps (tensor, gap, bytes, first byte if not 0) and transfers (swap, op, delay)."""
    return SwapPlan(
        tensor=np.array([s[0] for s in swaps]),
        gap=np.array([s[1] for s in swaps]),
        first_byte=np.array([s[3] if len(s) > 3 else 0 for s in swaps]),
        size_bytes=np.array([s[2] for s in swaps]),
        out=_transfers(out),
        back=_transfers(back),
        planner="by hand",
        elapsed_s=0.0,
    )


def _transfers(rows: Sequence[tuple[int, int, int]]) -> Transfers:
    return Transfers(*(np.array([row[i] for row in rows]) for i in range(3)))


EXAMPLE_LOAD = [30, 50, 60, 90, 100, 120, 110, 90, 80, 70, 60, 50, 30, 0]
EXAMPLE_LIMIT = 60


def example(limit: int | None = EXAMPLE_LIMIT) -> SwapProblem:
    """Return figure 7 of the AutoSwap paper, a byte for each of its megabytes; a byte takes a nanosecond.

    It gives loads by operation, and between which operations w1, w2 and w3 move; operations begin
    when that says. The rest of the load is tensors that every operation uses.
    """
    begins = [0, 10, 25, 40, 50, 60, 70, 80, 90, 100, 110, 125, 140, 150, 160]
    idle = [(30, 0, 12, (0, 12)), (20, 1, 11, (1, 10)), (10, 2, 8, (2, 8))]
    busy = [(10, 3, 5), (20, 3, 6), (10, 4, 7), (10, 5, 9), (10, 5, 10)]
    tensors = [*idle, *((size, first, last, range(first, last + 1)) for size, first, last in busy)]
    return problem(np.diff(begins).tolist(), tensors, limit=limit)


def example_plan() -> SwapPlan:
    """Return the figure's three swaps."""
    swaps = [(0, 0, 30), (1, 0, 20), (2, 0, 10)]
    return plan(swaps, out=[(0, 0, 0), (1, 1, 0), (2, 2, 0)], back=[(2, 7, 0), (1, 8, 0), (0, 10, 0)])


def loads(history: History, iteration: int = 0) -> list[int]:
    """Return the bytes in memory once each operation of an iteration has begun."""
    begin, end = history.iteration_ns[iteration : iteration + 2]
    return [
        [load for at, load in history.load_bytes if at <= t_ns][-1]
        for t_ns in history.op_begin_ns
        if begin <= t_ns < end
    ]


# -- random ones -----------------------------------------------------------------------------------


@st.composite
def problems(draw: Any, most_ops: int = 8, most_tensors: int = 7) -> SwapProblem:  # noqa: ANN401 - hypothesis' draw
    """Make a small problem, its limit anywhere from the least to the peak."""
    n = draw(st.integers(1, most_ops))
    durations = [draw(st.integers(0, 9)) for _ in range(n)]
    tensors = []
    for _ in range(draw(st.integers(1, most_tensors))):
        alloc = draw(st.integers(PERSISTENT, n - 1))
        free = PERSISTENT if alloc == PERSISTENT else alloc + draw(st.integers(0, n - 1))
        lives = range(n) if alloc == PERSISTENT else range(alloc, free + 1)
        uses = sorted(op for op in lives if draw(st.integers(0, 2)) == 0)
        tensors.append((draw(st.integers(1, 20)), alloc, free, uses))
    links = tuple(Link(draw(st.sampled_from((0.5e9, 1e9, 4e9))), draw(st.integers(0, 3))) for _ in range(2))
    made = problem(durations, tensors, tail=draw(st.integers(0, 5)), links=(links[0], links[1]))
    least, peak = max(made.least_bytes, 1), max(made.peak_bytes, 1)
    return dataclasses.replace(made, limit_bytes=draw(st.integers(least, max(least, peak))))


@st.composite
def plans(draw: Any, of: SwapProblem) -> SwapPlan:  # noqa: ANN401 - hypothesis' draw
    """Make a plan that keeps all rules but those of the replay."""
    n, swaps, out, back = of.n_ops, [], [], []
    for tensor in range(len(of)):
        for gap, access in enumerate(of.accesses(tensor).tolist()):
            needed = of.next_access(tensor, gap)
            until = int(of.free_op[tensor]) + 1 if needed is None else needed
            if until <= access + 1 or draw(st.integers(0, 2)) == 0:
                continue
            size = int(of.size_bytes[tensor])
            cut = draw(st.integers(1, size))
            for first, more in ((0, cut), (cut, size - cut)):
                if more and draw(st.booleans()):
                    leaves = draw(st.integers(access, until - 1))
                    out.append((len(swaps), leaves % n, draw(st.integers(0, 5))))
                    if needed is not None:
                        back.append((len(swaps), draw(st.integers(leaves, until - 1)) % n, draw(st.integers(0, 5))))
                    swaps.append((tensor, gap, more, first))
    by_op = operator.itemgetter(1)
    return plan(swaps, sorted(draw(st.permutations(out)), key=by_op), sorted(draw(st.permutations(back)), key=by_op))


@st.composite
def cases(draw: Any) -> tuple[SwapProblem, SwapPlan]:  # noqa: ANN401 - hypothesis' draw
    """Make a problem and a plan for it."""
    made = draw(problems())
    return made, draw(plans(made))
