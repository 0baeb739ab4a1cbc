"""AutoSwap as published: which tensors leave around the peak, by one score or a mix of them.

Candidates are tensors of a megabyte or more that are idle at the peak. They are taken in the order of their score,
each off the load, until the load keeps the limit; ``schedule.py`` says when they move. Source: arXiv 1903.06631.

Ours is what happens where the replay of that plan comes to a deadlock: further candidates are taken, in order.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.plan import NoPlan, Reason
from zico.planners.swap.fast import Replayer
from zico.planners.swap.gaps import LEAST_BYTES, gaps_between_accesses, over
from zico.planners.swap.plan import SwapPlan, no_swaps
from zico.planners.swap.schedule import schedule
from zico.planners.swap.scores import score
from zico.units import format_bytes

if TYPE_CHECKING:
    from zico.planners.swap.problem import Int64s, SwapProblem
    from zico.planners.swap.scores import Floats


class Candidates:
    """A problem's candidates, and plans that take them in some order."""

    def __init__(self, problem: SwapProblem, least_bytes: int = LEAST_BYTES) -> None:
        """Find the peak and what is idle then."""
        self.problem = problem
        self.peak_op = int(np.argmax(problem.load_bytes))
        self.gaps = over(gaps_between_accesses(problem, least_bytes), self.peak_op, problem.n_ops)
        self.replayer = Replayer(problem)

    def load_after(self, order: Int64s) -> Int64s:
        """Return the most bytes alive at once with 0, 1, 2... of the candidates away in their gaps."""
        load, n = self.problem.load_bytes.copy(), self.problem.n_ops
        peaks = [int(load.max(initial=0))]
        for i in order.tolist():
            first, last = int(self.gaps.first[i]), int(self.gaps.last[i])
            for begin, end in _pieces(first, last + 1, n):
                load[begin:end] -= self.gaps.size_bytes[i]
            peaks.append(int(load.max()))
        return np.array(peaks)

    def plan(self, priority: Floats, limit_bytes: int, planner: str, began_s: float) -> SwapPlan | NoPlan:
        """Return the plan that takes candidates by priority until the limit is kept.

        Args:
            priority: Of each candidate; the highest goes first.
            limit_bytes: In place of the problem's.
            planner: What the plan says it is from.
            began_s: When planning began, by ``time.monotonic``.
        """
        if limit_bytes < self.problem.least_bytes:
            detail = f"an operation needs {self.problem.least_bytes} bytes at once: give that limit or a higher one"
            return NoPlan(Reason.INFEASIBLE, planner, time.monotonic() - began_s, detail)
        order = np.argsort(-priority, kind="stable")
        peaks = self.load_after(order)
        enough = np.flatnonzero(peaks <= limit_bytes)
        if not len(enough):
            detail = f"with all {len(order)} candidates away {format_bytes(peaks[-1])} are left, {peaks[-1]} bytes"
            return NoPlan(Reason.NOT_FOUND, planner, time.monotonic() - began_s, detail)
        count, more = int(enough[0]), 1
        while True:
            made = schedule(self.problem, self.gaps.take(order[:count]), self.peak_op, planner)
            if self.replayer.replay(made, limit_bytes).is_good:
                return dataclasses.replace(made, elapsed_s=time.monotonic() - began_s)
            if count == len(order):
                detail = f"the plan with all {count} candidates comes to a deadlock"
                return NoPlan(Reason.NOT_FOUND, planner, time.monotonic() - began_s, detail)
            count, more = min(count + more, len(order)), 2 * more


class AutoSwap:
    """AutoSwap with one of the published scores."""

    def __init__(self, by: str, least_bytes: int = LEAST_BYTES) -> None:
        """Score by ``by``, one of ``scores.SCORES``; leave tensors below ``least_bytes`` where they are."""
        self.name = by
        self._least_bytes = least_bytes

    def plan(self, problem: SwapProblem, deadline_s: float) -> SwapPlan | NoPlan:  # noqa: ARG002 - it never takes long
        """Return a plan, or why there is none."""
        began_s = time.monotonic()
        if problem.limit_bytes is None or problem.peak_bytes <= problem.limit_bytes:
            return no_swaps(self.name, time.monotonic() - began_s)
        candidates = Candidates(problem, self._least_bytes)
        priority = score(self.name, problem, candidates.gaps)
        return candidates.plan(priority, problem.limit_bytes, self.name, began_s)


def _pieces(begin: int, end: int, n: int) -> list[tuple[int, int]]:
    """Return a stretch of operations, at most a round long, as stretches of the iteration."""
    first, length = begin % n, end - begin
    return [(first, min(first + length, n)), (0, max(first + length - n, 0))]
