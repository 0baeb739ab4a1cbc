"""AutoSwap's priorities: how good it is to swap a tensor in one of its gaps.

With ``t`` the length of the gap in nanoseconds, from the end of one access to the beginning of the next, ``s`` the
tensor's bytes and ``out``, ``back`` its transfers' nanoseconds:

* ``doa``, duration of absence: ``t - out - back``.
* ``aoa``, area of absence: ``s * doa`` if that is not negative, else ``doa / s``.
* ``wdoa``, weighted duration: the area below the load's curve over the gap.
* ``swdoa``, submodular: ``wdoa`` with what was chosen before taken off the load, the largest one chosen each time.

Source: arXiv 1903.06631. The authors' published code takes ``out`` off twice and never ``back``; here it is as in the
paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zico.compiled import compiled
from zico.planners.swap.gaps import begin_ns, end_ns

if TYPE_CHECKING:
    from zico.planners.swap.gaps import Gaps
    from zico.planners.swap.problem import Int64s, SwapProblem

Floats = NDArray[np.float64]
SCORES = ("doa", "aoa", "wdoa", "swdoa")


def score(name: str, problem: SwapProblem, gaps: Gaps) -> Floats:
    """Return one of ``SCORES`` for each gap; higher is better."""
    if name == "doa":
        return doa(problem, gaps)
    if name == "aoa":
        duration, size = doa(problem, gaps), gaps.size_bytes.astype(np.float64)
        return np.where(duration >= 0, duration * size, duration / size)
    if name == "wdoa":
        return wdoa(problem, gaps)
    return swdoa(problem, gaps)


def doa(problem: SwapProblem, gaps: Gaps) -> Floats:
    """Return the durations of absence, in nanoseconds."""
    idle_ns = begin_ns(problem, gaps.last + 1) - end_ns(problem, gaps.first - 1)
    return (idle_ns - gaps.out_ns - gaps.back_ns).astype(np.float64)


def wdoa(problem: SwapProblem, gaps: Gaps) -> Floats:
    """Return the load's areas, in byte nanoseconds."""
    area = np.concatenate([[0.0], np.cumsum(problem.load_bytes * _until_next_ns(problem))])
    n, whole = problem.n_ops, area[-1]

    def until(op: Int64s) -> Floats:
        return np.asarray(op // n * whole + area[op % n])

    return until(gaps.last + 1) - until(gaps.first)


def swdoa(problem: SwapProblem, gaps: Gaps) -> Floats:
    """Return the area that each gap had when it was chosen."""
    result = np.zeros(len(gaps))
    load = problem.load_bytes.astype(np.float64)
    _choose(load, _until_next_ns(problem), gaps.first, gaps.last, gaps.size_bytes, result)
    return result


def _until_next_ns(problem: SwapProblem) -> Floats:
    """Return the time from each operation's beginning to the next one's."""
    ops = np.arange(problem.n_ops + 1)
    return np.diff(begin_ns(problem, ops)).astype(np.float64)


@compiled
def _choose(load: Floats, took: Floats, first: Int64s, last: Int64s, size: Int64s, result: Floats) -> None:
    """Choose gap after gap and give each its area."""
    n, m = len(load), len(first)
    taken = np.zeros(m, np.bool_)
    area = np.zeros(n + 1)
    for _ in range(m):
        for op in range(n):
            area[op + 1] = area[op] + load[op] * took[op]
        best, most = -1, 0.0
        for i in range(m):
            if not taken[i]:
                end = last[i] + 1
                value = (end // n - first[i] // n) * area[n] + area[end % n] - area[first[i] % n]
                if best < 0 or value > most:
                    best, most = i, value
        taken[best], result[best] = True, most
        for op in range(first[best], last[best] + 1):
            load[op % n] -= size[best]
