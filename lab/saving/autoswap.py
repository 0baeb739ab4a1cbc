"""AutoSwap as published: which tensors leave around the peak, by one score or a mix of them.

Candidates are tensors of a megabyte or more that are idle at the peak. They are taken in the order
of their score, each off the load, until the load keeps the limit; ``schedule`` says when they
move. Source: arXiv 1903.06631.

Ours is what happens where the replay of that plan comes to a deadlock: further candidates are
taken, in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zico.base.compiled import compiled
from zico.base.units import MIB, format_bytes
from zico.lab.saving.replayer import Replayer
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.clock import now_s
from zico.planning.saving.fast import transfer_ns
from zico.planning.saving.problem import SwapPlan, Transfers, no_swaps

if TYPE_CHECKING:
    from zico.planning.saving.problem import Bools, Int64s, SwapProblem


# -- the gaps that a planner may use, and when operations run with all tensors at hand -------------

LEAST_BYTES = MIB
"""The published threshold: smaller tensors are not worth a transfer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Gaps:
    """Gaps as parallel arrays; operations are counted on from the iteration of the gap's access."""

    tensor: Int64s
    gap: Int64s
    size_bytes: Int64s
    first: Int64s
    """The first operation of the gap: the access before it is one less."""
    last: Int64s
    """The last one: the access that ends it is one more."""
    out_ns: Int64s
    """What the whole tensor takes to leave."""
    back_ns: Int64s

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, which: Int64s | Bools) -> Gaps:
        """Return some of them, in that order."""
        return Gaps(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))

    def moved(self, out: Transfers, back: Transfers, planner: str, elapsed_s: float = 0.0) -> SwapPlan:
        """Return the plan of a planner that moves whole tensors in all of them."""
        first_byte = np.zeros(len(self), np.int64)
        return SwapPlan(self.tensor, self.gap, first_byte, self.size_bytes, out, back, planner, elapsed_s)


def gaps_between_accesses(problem: SwapProblem, least_bytes: int = LEAST_BYTES) -> Gaps:
    """Return the gaps that are not empty and end with an access, of tensors of so many bytes or more."""
    first, last, size = problem.gap_ops
    owner = np.repeat(np.arange(len(problem)), np.diff(problem.access_begin))
    index = np.arange(len(owner)) - problem.access_begin[owner]
    ends_tensor = (index == np.diff(problem.access_begin)[owner] - 1) & ~problem.persistent[owner]
    use = (first <= last) & ~ends_tensor & (size >= least_bytes)
    out_ns, back_ns = transfer_ns(problem.out, size), transfer_ns(problem.back, size)
    return Gaps(owner, index, size, first, last, out_ns, back_ns).take(use)


def over(gaps: Gaps, op: int, n_ops: int) -> Gaps:
    """Return those gaps in which an operation of the iteration lies, moved by rounds so that it is this very one."""
    rounds = (op - gaps.first) // n_ops * n_ops
    moved = dataclasses.replace(gaps, first=gaps.first + rounds, last=gaps.last + rounds)
    return moved.take(op <= moved.last)


def begin_ns(problem: SwapProblem, op: Int64s) -> Int64s:
    """Return when operations begin, counted on from iteration 0, negative ones before it."""
    return np.asarray(op // problem.n_ops * problem.period_ns + problem.op_start_ns[op % problem.n_ops])


def end_ns(problem: SwapProblem, op: Int64s) -> Int64s:
    """Return when operations end, counted likewise."""
    return begin_ns(problem, op) + problem.op_duration_ns[op % problem.n_ops]


# -- autoSwap's priorities: how good it is to swap a tensor in one of its gaps ---------------------
#
# ``t`` is the length of the gap in nanoseconds, from the end of one access to the beginning of the
# next. ``s`` is the tensor's bytes, and ``out``, ``back`` are its transfers' nanoseconds.
#
# * ``doa``, duration of absence: ``t - out - back``.
# * ``aoa``, area of absence: ``s * doa`` if that is not negative, else ``doa / s``.
# * ``wdoa``, weighted duration: the area below the load's curve over the gap.
# * ``swdoa``, submodular: ``wdoa`` with what was chosen before taken off the load, the largest one
#   chosen each time.
#
# Source: arXiv 1903.06631. The authors' published code takes ``out`` off twice and never ``back``;
# here it is as in the paper.

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


# -- when chosen gaps' transfers are asked for, as AutoSwap does -----------------------------------
#
# Transfers out are asked for at the access before the gap, in that order. Each starts when the
# access and the transfer out ahead of it have ended. Transfers back are planned from the last one
# to the first. Each ends when its access begins or the next transfer back starts, whichever is
# earlier. None starts before the operation behind the peak. Source: arXiv 1903.06631, section on
# AutoSwap's scheduling.


def schedule(problem: SwapProblem, chosen: Gaps, peak_op: int, planner: str, elapsed_s: float = 0.0) -> SwapPlan:
    """Return the plan that moves whole tensors in the chosen gaps.

    Args:
        problem: The problem.
        chosen: Gaps that ``over`` has moved to the peak.
        peak_op: The operation with the highest load.
        planner: What the plan says it is from.
        elapsed_s: Likewise.
    """
    n = problem.n_ops
    asked, delay_ns = _asked_back(problem, chosen, peak_op)
    out = in_order(chosen.first - 1, np.zeros(len(chosen), np.int64), chosen.first, n)
    return chosen.moved(out, in_order(asked, delay_ns, chosen.last, n), planner, elapsed_s)


def _asked_back(problem: SwapProblem, chosen: Gaps, peak_op: int) -> tuple[Int64s, Int64s]:
    """Return at which operation each transfer back is asked for, and how long after its beginning it starts."""
    needed_ns = begin_ns(problem, chosen.last + 1)
    least_ns = int(begin_ns(problem, np.array([peak_op + 1]))[0])
    start_ns = np.zeros(len(chosen), np.int64)
    following_ns: int | None = None
    for i in np.argsort(chosen.last, kind="stable")[::-1].tolist():
        ends_ns = int(needed_ns[i]) if following_ns is None else min(int(needed_ns[i]), following_ns)
        following_ns = start_ns[i] = max(ends_ns - int(chosen.back_ns[i]), least_ns)
    n = problem.n_ops
    ops = np.arange(peak_op, peak_op + n + 2)
    begins = begin_ns(problem, ops)
    last_begun = ops[np.searchsorted(begins, start_ns, side="right") - 1]
    asked = np.clip(last_begun, chosen.first - 1, chosen.last)
    return asked, np.maximum(start_ns - begin_ns(problem, asked), 0)


def in_order(op: Int64s, delay_ns: Int64s, order: Int64s, n_ops: int) -> Transfers:
    """Return the transfers of an iteration, those of one operation in the given order."""
    at = op % n_ops
    swap = np.lexsort((order, at))
    return Transfers(swap, at[swap], delay_ns[swap])


# --------------------------------------------------------------------------------------------------


class Limited:
    """What planners of swaps share: they are asked where a limit lies below the peak, and their time is taken."""

    name: str

    def plan(self, problem: SwapProblem, deadline_s: float) -> SwapPlan | NoPlan:
        """Return the plan that is found, or why there is none; one without swaps where there is nothing to keep."""
        began_s, limit_bytes = now_s(), problem.limit_bytes
        if limit_bytes is None or problem.peak_bytes <= limit_bytes:
            return no_swaps(self.name, now_s() - began_s)
        if limit_bytes < problem.least_bytes:
            detail = f"an operation needs {problem.least_bytes} bytes at once: give that limit or a higher one"
            return NoPlan(Reason.INFEASIBLE, self.name, now_s() - began_s, detail)
        found = self.found(problem, limit_bytes, began_s + deadline_s)
        took_s = now_s() - began_s
        if isinstance(found, SwapPlan):
            return dataclasses.replace(found, planner=self.name, elapsed_s=took_s)
        return NoPlan(Reason.OUT_OF_TIME if took_s > deadline_s else Reason.NOT_FOUND, self.name, took_s, found)

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:
        """Return a plan whose replay keeps the limit, or what is in the way, by ``end_s`` of ``clock.now_s``."""
        raise NotImplementedError


Scheduling = Callable[["SwapProblem", Gaps, int, str], SwapPlan]


class Candidates:
    """A problem's candidates, and plans that take them in some order."""

    def __init__(self, problem: SwapProblem, least_bytes: int = LEAST_BYTES) -> None:
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

    def plan(self, priority: Floats, limit_bytes: int, planner: str, schedule: Scheduling = schedule) -> SwapPlan | str:
        """Return the plan that takes candidates by priority until the limit is kept, or what is in the way.

        Args:
            priority: Of each candidate; the highest goes first.
            limit_bytes: In place of the problem's.
            planner: What the plan says it is from.
            schedule: Says when chosen gaps' transfers are asked for.
        """
        order = np.argsort(-priority, kind="stable")
        peaks = self.load_after(order)
        enough = np.flatnonzero(peaks <= limit_bytes)
        if not len(enough):
            return f"with all {len(order)} candidates away {format_bytes(peaks[-1])} are left, {peaks[-1]} bytes"
        count, more = int(enough[0]), 1
        while True:
            made = schedule(self.problem, self.gaps.take(order[:count]), self.peak_op, planner)
            if self.replayer.replay(made, limit_bytes).is_good:
                return made
            if count == len(order):
                return f"the plan with all {count} candidates comes to a deadlock"
            count, more = min(count + more, len(order)), 2 * more


class AutoSwap(Limited):
    """AutoSwap with one of the published scores."""

    def __init__(self, by: str, least_bytes: int = LEAST_BYTES) -> None:
        """Score by ``by``, one of ``SCORES``; leave tensors below ``least_bytes`` where they are."""
        self.name = by
        self._least_bytes = least_bytes

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:  # noqa: ARG002
        """Return a plan, or what is in the way; it never takes long."""
        candidates = Candidates(problem, self._least_bytes)
        return candidates.plan(score(self.name, problem, candidates.gaps), limit_bytes, self.name)


def _pieces(begin: int, end: int, n: int) -> list[tuple[int, int]]:
    """Return a stretch of operations, at most a round long, as stretches of the iteration."""
    first, length = begin % n, end - begin
    return [(first, min(first + length, n)), (0, max(first + length - n, 0))]
