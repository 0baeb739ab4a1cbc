"""The compiled replay of the runtime, for planners in Python: figures of a plan, and when things happened.

It trusts the plan to keep the rules of ``zico.lab.saving.replay``. A hypothesis test compares
its figures with the judge's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.planning.saving.fast import (
    AFTER,
    ALLOC,
    AWAY,
    BACK_END,
    BACK_NS,
    BACKS,
    BYTES,
    DURATION,
    ENDS,
    FREE,
    GOOD,
    HERE,
    KEPT,
    LEAVES,
    LIMIT,
    MOST_ITERATIONS,
    N_STATE,
    NEVER,
    NONE,
    OP_END,
    OUT_END,
    OUT_NS,
    OUTS,
    PAUSE,
    PEAK,
    RETURNS,
    UNTIL,
    USED,
    USES,
    Work,
    run,
    transfer_ns,
)
from zico.planning.saving.problem import PERSISTENT

if TYPE_CHECKING:
    from zico.planning.saving.problem import Int64s, SwapPlan, SwapProblem

RULES = (None, "start", "deadlock", None)


@dataclasses.dataclass(frozen=True, eq=False)
class FastReplay:
    """Figures as ``replay.Replay`` has them, and when things happened in the last iteration that was run.

    Times count from the beginning of that iteration; a transfer that was asked for in the one
    before has its time of then.
    """

    rule: str | None
    duration_ns: float
    overhead: float
    peak_bytes: int
    tensor_wait_ns: float
    memory_wait_ns: float
    repeats: bool
    rounds: int
    """How many iterations it takes until one begins as an earlier one did."""
    op_begin_ns: Int64s
    out_begin_ns: Int64s
    """Of each swap; far below zero if it never left."""
    back_begin_ns: Int64s

    @property
    def is_good(self) -> bool:
        """Tell whether the plan keeps the limit and ends."""
        return self.rule is None


class Replayer:
    """Replays plans of one problem."""

    def __init__(self, problem: SwapProblem) -> None:
        self.problem, n = problem, problem.n_ops
        ops = np.zeros((n + 1, 8), np.int64)
        ends = problem.op_start_ns + problem.op_duration_ns
        ops[:n, PAUSE] = problem.op_start_ns - np.append(ends[-1] - problem.period_ns, ends[:-1])
        ops[:n, DURATION] = problem.op_duration_ns
        ends_itself = ~problem.persistent
        np.add.at(ops[:, ALLOC], problem.alloc_op[ends_itself], problem.size_bytes[ends_itself])
        np.add.at(ops[:, FREE], problem.free_op[ends_itself] % n, problem.size_bytes[ends_itself])
        self._ops = ops
        alive = problem.persistent | (problem.free_op >= n)
        self._alive_bytes = int(problem.size_bytes[alive].sum())

    def replay(self, plan: SwapPlan, limit_bytes: int | None = None) -> FastReplay:
        """Return what an iteration costs under a plan that keeps the rules of ``zico.lab.saving.replay``.

        Args:
            plan: The plan.
            limit_bytes: Instead of the problem's.
        """
        problem, n = self.problem, self.problem.n_ops
        swaps = self._swaps(plan)
        ops, uses, ends = self._ops.copy(), *self._by_op(plan)
        ops[1:, USES], ops[1:, ENDS] = np.cumsum(uses[0]), np.cumsum(ends[0])
        moves = []
        for column, transfers in ((OUTS, plan.out), (BACKS, plan.back)):
            ops[:, column] = np.searchsorted(transfers.op, np.arange(n + 1))
            moves.append(np.stack([transfers.swap, transfers.op, transfers.delay_ns], axis=1))
        state = np.zeros(N_STATE, np.int64)
        state[[OP_END, OUT_END, BACK_END]] = NONE
        goes_over = np.where(swaps[:, RETURNS] == NONE, swaps[:, UNTIL], swaps[:, RETURNS]) >= n
        where = np.where((swaps[:, LEAVES] < n) & goes_over, AWAY, HERE)
        state[USED] = state[PEAK] = self._alive_bytes - int(swaps[where == AWAY, BYTES].sum())
        limit = problem.limit_bytes if limit_bytes is None else limit_bytes
        at = np.zeros((MOST_ITERATIONS + 2, 3), np.int64)
        begins = np.zeros((MOST_ITERATIONS + 1) * n, np.int64)
        moved = np.full((2, len(plan)), NONE, np.int64)
        kept = np.zeros((MOST_ITERATIONS + 2, KEPT + len(plan)), np.int64)
        state[LIMIT] = NEVER if limit is None else limit
        rule, first, last = run(
            Work(ops, swaps, uses[1], ends[1], moves[0], moves[1], state, where, at, begins, moved, kept)
        )
        rounds = max(last - first, 1)
        duration_ns, tensor_ns, memory_ns = ((at[last] - at[first]) / rounds).tolist()
        began_ns = int(at[max(last - 1, 0), 0])
        return FastReplay(
            rule=RULES[rule],
            duration_ns=duration_ns,
            overhead=duration_ns / problem.period_ns - 1 if problem.period_ns else 0.0,
            peak_bytes=int(state[PEAK]),
            tensor_wait_ns=tensor_ns,
            memory_wait_ns=memory_ns,
            repeats=rule == GOOD,
            rounds=rounds,
            op_begin_ns=begins[max(last - 1, 0) * n : max(last, 1) * n] - began_ns,
            out_begin_ns=np.where(moved[0] == NONE, -NEVER, moved[0] - began_ns),
            back_begin_ns=np.where(moved[1] == NONE, -NEVER, moved[1] - began_ns),
        )

    def _swaps(self, plan: SwapPlan) -> Int64s:
        problem, n = self.problem, self.problem.n_ops
        swaps = np.zeros((len(plan), 7), np.int64)
        access = problem.access_op[problem.access_begin[plan.tensor] + plan.gap]
        ask = np.full((2, len(plan)), NONE, np.int64)
        ask[0, plan.out.swap], ask[1, plan.back.swap] = plan.out.op, plan.back.op
        leaves = access + (ask[0] - access) % n
        swaps[:, BYTES] = plan.size_bytes
        swaps[:, OUT_NS] = transfer_ns(problem.out, plan.size_bytes)
        swaps[:, BACK_NS] = transfer_ns(problem.back, plan.size_bytes)
        swaps[:, AFTER] = access
        swaps[:, UNTIL] = np.where(problem.persistent[plan.tensor], NEVER, problem.free_op[plan.tensor])
        swaps[:, LEAVES] = leaves
        swaps[:, RETURNS] = np.where(ask[1] == NONE, NONE, leaves + (ask[1] - leaves) % n)
        return swaps

    def _by_op(self, plan: SwapPlan) -> tuple[tuple[Int64s, Int64s], tuple[Int64s, Int64s]]:
        """Return, for each operation, the swaps of the tensors that it uses, and of those that end with it."""
        problem, n = self.problem, self.problem.n_ops
        counts = np.diff(problem.access_begin)[plan.tensor]
        swap = np.repeat(np.arange(len(plan)), counts)
        within = np.arange(len(swap)) - np.repeat(np.cumsum(counts) - counts, counts)
        op = problem.access_op[problem.access_begin[plan.tensor[swap]] + within] % n
        ended = np.flatnonzero(problem.free_op[plan.tensor] != PERSISTENT)
        return _grouped(op, swap, n), _grouped(problem.free_op[plan.tensor[ended]] % n, ended, n)


def _grouped(group: Int64s, member: Int64s, n: int) -> tuple[Int64s, Int64s]:
    return np.bincount(group, minlength=n), member[np.argsort(group, kind="stable")]
