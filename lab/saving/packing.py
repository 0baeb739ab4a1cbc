"""Where tensors lie once some of them leave and return: the packing problem of the iteration that a swap plan makes.

As published, swapping comes first and packing second, on the trace that results. A tensor that was
away is a new one when it returns, and may lie elsewhere. A tensor of which parts leave is as many
tensors as it has parts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from zico.lab.saving.replayer import Replayer
from zico.planning.packing.problem import NoPlan, Problem
from zico.planning.saving.clock import now_s
from zico.planning.saving.fast import transfer_ns
from zico.planning.saving.problem import no_swaps
from zico.trace.lifetimes import cut_open

if TYPE_CHECKING:
    from zico.lab.saving.replayer import FastReplay
    from zico.planning.saving.problem import SwapPlan, SwapPlanner, SwapProblem

_Instant = tuple[int, int]
"""Nanoseconds into the iteration; and at one instant: ends of transfers, operations, beginnings of transfers."""


def packing_problem(problem: SwapProblem, plan: SwapPlan) -> Problem | None:
    """Return the tensors of an iteration under a plan, with their times, for a planner of places.

    Returns:
        ``None`` if the replay breaks a rule, or if it takes several iterations until one repeats.
    """
    replayed = Replayer(problem).replay(plan)
    if not replayed.is_good or not replayed.repeats or replayed.rounds != 1:
        return None
    stays = _Stays(problem, plan, replayed)
    instants = sorted({instant for pair in stays.pairs if pair for instant in pair})
    tick = {instant: i for i, instant in enumerate(instants)}
    n = max(len(instants), 1)
    lower = np.array([tick[pair[0]] if pair else 0 for pair in stays.pairs], np.int64)
    length = np.array([(tick[pair[1]] - tick[pair[0]]) % n if pair else n + 1 for pair in stays.pairs], np.int64)
    size_bytes = np.array(stays.size_bytes, np.int64)
    line = cut_open(lower, lower + length, size_bytes, n)
    at_ns = np.array([instant[0] for instant in instants] or [0], np.int64)
    later_ns = at_ns[: line.cut + 1] + stays.period_ns
    tick_ns = np.concatenate([at_ns[line.cut :], later_ns]) - at_ns[line.cut]
    return Problem(line.lower, line.upper, size_bytes, tick_ns=tick_ns)


class _Stays:
    """From when to when bytes are in memory, on the circle of the iteration that repeats."""

    def __init__(self, problem: SwapProblem, plan: SwapPlan, replayed: FastReplay) -> None:
        self._problem, self._plan, self._replayed = problem, plan, replayed
        self.period_ns = round(replayed.duration_ns)
        self._returns = set(plan.back.swap.tolist())
        self._out_end_ns = replayed.out_begin_ns + transfer_ns(problem.out, plan.size_bytes)
        self.pairs: list[tuple[_Instant, _Instant] | None] = []
        """``None``: always."""
        self.size_bytes: list[int] = []
        swaps_of = collections.defaultdict(list)
        for swap, tensor in enumerate(plan.tensor.tolist()):
            swaps_of[tensor].append(swap)
        for tensor, size in enumerate(problem.size_bytes.tolist()):
            swaps = swaps_of[tensor]
            ends = [int(end) for s in swaps for end in (plan.first_byte[s], plan.first_byte[s] + plan.size_bytes[s])]
            for first, last in itertools.pairwise(sorted({0, size, *ends})):
                covers = [s for s in swaps if plan.first_byte[s] <= first < plan.first_byte[s] + plan.size_bytes[s]]
                self._add(tensor, last - first, covers)

    def _add(self, tensor: int, size_bytes: int, swaps: list[int]) -> None:
        """Add the stays of some bytes of a tensor, which these swaps move."""
        n, problem, begins = self._problem.n_ops, self._problem, self._replayed.op_begin_ns
        period_ns = self.period_ns
        came = [(int(self._replayed.back_begin_ns[s]) % period_ns, 2 * n + 1) for s in swaps if s in self._returns]
        moved = [s for s in swaps if self._replayed.out_begin_ns[s] >= -period_ns]
        went = [(int(self._out_end_ns[s]) % period_ns, 0) for s in moved]
        if not problem.persistent[tensor]:
            first, last = int(problem.alloc_op[tensor]), int(problem.free_op[tensor]) % n
            came.append((int(begins[first]), 2 * first + 1))
            if all(s in self._returns for s in moved):
                went.append((int(begins[last] + problem.op_duration_ns[last]), 2 * last + 2))
        for begin in came:
            end = min((instant for instant in went if instant > begin), default=min(went))
            self.pairs.append((begin, end))
            self.size_bytes.append(size_bytes)
        if not came:
            self.pairs.append(None)
            self.size_bytes.append(size_bytes)


# -- the lowest limit that a planner keeps at no more than some overhead ---------------------------

_FIRST = 64  # the search begins so near to a bound, by share of what lies above it
STEPS = 512
"""By default the search ends when it knows the limit to a 512th of the peak, 0.2 %."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lowest:
    """A limit, and the plan that keeps it."""

    limit_bytes: int
    plan: SwapPlan


def lowest_limit(
    problem: SwapProblem,
    planner: SwapPlanner,
    overhead: float,
    deadline_s: float,
    steps: int = STEPS,
    bound_bytes: int = 0,
) -> Lowest:
    """Return the lowest limit found by bisection at which the planner's plan costs no more than ``overhead``.

    Bisection takes for granted that a limit that is too low stays so below. What it finds is kept,
    but with a planner that is not monotone a lower one may exist.

    Args:
        problem: Its own limit does not count.
        planner: Whom to ask, about nine times.
        overhead: The share by which an iteration may be longer.
        deadline_s: Seconds for all; the planner is told what is left.
        steps: The limit is found to this fraction of the peak.
        bound_bytes: No limit below it is looked at; from ``bound.least_peak``, say.
    """
    began_s = now_s()
    replayer = Replayer(problem)
    low, found = max(problem.least_bytes, bound_bytes), Lowest(problem.peak_bytes, no_swaps(planner.name))
    step = max(problem.peak_bytes // steps, 1)
    reach = max((problem.peak_bytes - low) // _FIRST, step) if bound_bytes else problem.peak_bytes
    while found.limit_bytes - low > step:
        left_s = deadline_s - (now_s() - began_s)
        if left_s <= 0:
            break
        middle = min((low + found.limit_bytes) // 2, low + reach)
        reach *= 2
        plan = planner.plan(dataclasses.replace(problem, limit_bytes=middle), left_s)
        if not isinstance(plan, NoPlan):
            replayed = replayer.replay(plan, middle)
            if replayed.is_good and replayed.overhead <= overhead:
                found = Lowest(min(middle, replayed.peak_bytes), plan)
                continue
        low = middle
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, elapsed_s=now_s() - began_s))
