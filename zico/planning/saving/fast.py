"""The replay for planners: what ``replay.py`` does, compiled, with counts kept instead of made anew.

It trusts the plan to keep the rules of ``zico.lab.saving.replay``. A hypothesis test compares
its figures with the judge's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import compiled
from zico.planning.saving.problem import PERSISTENT

if TYPE_CHECKING:
    from zico.planning.saving.problem import Int64s, Link, SwapPlan, SwapProblem


# --------------------------------------------------------------------------------------------------
# The compiled part of ``fast.py``: ``replay.py``'s rules on arrays, with what is in memory counted
# on.

MOST_ITERATIONS = 64
"""As in ``replay.py``."""
NONE = -1
NEVER = 1 << 62
HERE, ASKED, LEAVING, AWAY, RETURNING = range(5)
GOOD, START, DEADLOCK, NEVER_REPEATS = range(4)

# Columns of the operations.
PAUSE, DURATION, ALLOC, FREE, USES, ENDS, OUTS, BACKS = range(8)
# Columns of the swaps.
BYTES, OUT_NS, BACK_NS, AFTER, UNTIL, LEAVES, RETURNS = range(7)
# Columns of the transfers.
SWAP, ASK_OP, DELAY = range(3)
# The state.
T, OP, OP_END, FREED_AT, USED, PEAK, WAIT_TENSOR, WAIT_MEMORY, GHOST = range(9)
OUT_HEAD, OUT_ASKED, OUT_END, BACK_HEAD, BACK_ASKED, BACK_END, LIMIT, N_STATE = range(9, 17)
KEPT = 5  # what a boundary is compared by, besides the swaps' states


class Work(NamedTuple):
    """What a replay works on: arrays of int64."""

    ops: Int64s
    """A row of columns for each operation, and one for the ends of ranges."""
    swaps: Int64s
    uses: Int64s
    """Swaps of the tensors that operations use, one operation after another."""
    ends: Int64s
    """Swaps of the tensors that end with operations."""
    outs: Int64s
    backs: Int64s
    state: Int64s
    where: Int64s
    """Where each swap's bytes are."""
    at: Int64s
    """Time, and what was waited for tensors and for memory, at each boundary of iterations."""
    begins: Int64s
    """When each operation began, counted on."""
    moved: Int64s
    """When each swap's last transfers began, out and back."""
    kept: Int64s
    """What boundaries are compared by."""


@compiled
def run(w: Work) -> tuple[int, int, int]:
    """Replay; return the rule broken, the first iteration of those that count and the one after the last."""
    state, n = w.state, len(w.ops) - 1
    boundaries = 0
    while True:
        if state[OP] == boundaries * n and state[OP_END] == NONE:
            w.at[boundaries, 0] = state[T]
            w.at[boundaries, 1] = state[WAIT_TENSOR]
            w.at[boundaries, 2] = state[WAIT_MEMORY]
            first = _seen(w, boundaries)
            if first != NONE:
                return GOOD, first, boundaries
            if state[USED] > state[LIMIT]:
                return START, boundaries // 2, boundaries
            if boundaries >= MOST_ITERATIONS:
                return NEVER_REPEATS, boundaries // 2, boundaries
            boundaries += 1
        if not (_out_begins(w) or _op_begins(w) or _back_begins(w) or _time_passes(w)):
            return DEADLOCK, (boundaries - 1) // 2, boundaries - 1


@compiled
def _seen(w: Work, boundaries: int) -> int:
    """Keep what decides how things go on; return the boundary that was the same, or ``NONE``."""
    state, n = w.state, len(w.ops) - 1
    mine, t = w.kept[boundaries], state[T]
    mine[0] = state[OUT_ASKED] - state[OUT_HEAD]
    mine[1] = state[BACK_ASKED] - state[BACK_HEAD]
    mine[2] = state[OUT_END] - t if state[OUT_END] != NONE else NONE
    mine[3] = state[BACK_END] - t if state[BACK_END] != NONE else NONE
    mine[4] = state[GHOST]
    for swap in range(len(w.where)):
        mine[KEPT + swap] = w.where[swap]
    for other in range(boundaries):
        ago, same = (boundaries - other) * n, True
        for i in range(len(mine)):
            same &= w.kept[other, i] == mine[i]
        if not same:
            continue
        for stream in range(2):
            transfers = w.outs if stream == 0 else w.backs
            asked = state[OUT_ASKED] if stream == 0 else state[BACK_ASKED]
            for request in range(asked - mine[stream], asked):
                iteration, i = request // len(transfers), request % len(transfers)
                op, delay = iteration * n + transfers[i, ASK_OP], transfers[i, DELAY]
                same &= op >= ago and max(w.begins[op] + delay - t, 0) == max(
                    w.begins[op - ago] + delay - w.at[other, 0], 0
                )
                if not same:
                    break
        if same:
            return other
    return NONE


@compiled
def _missing(w: Work) -> bool:
    """Tell whether a tensor of the next operation is not there."""
    state, n = w.state, len(w.ops) - 1
    op = state[OP] % n
    for i in range(w.ops[op, USES], w.ops[op + 1, USES]):  # noqa: SIM110 - Numba has no any of a generator
        if w.where[w.uses[i]] != HERE:
            return True
    return False


@compiled
def _op_begins(w: Work) -> bool:
    state, n = w.state, len(w.ops) - 1
    op = state[OP] % n
    if state[OP_END] != NONE or state[T] < state[FREED_AT] + w.ops[op, PAUSE]:
        return False
    needs = w.ops[op, ALLOC]
    if _missing(w) or (needs > 0 and state[USED] + needs > state[LIMIT]):
        return False
    state[USED] += needs
    state[PEAK] = max(state[PEAK], state[USED])
    state[OP_END] = state[T] + w.ops[op, DURATION]
    w.begins[state[OP]] = state[T]
    for i in range(w.ops[op, OUTS], w.ops[op + 1, OUTS]):
        w.where[w.outs[i, SWAP]] = ASKED
    state[OUT_ASKED] += w.ops[op + 1, OUTS] - w.ops[op, OUTS]
    state[BACK_ASKED] += w.ops[op + 1, BACKS] - w.ops[op, BACKS]
    return True


@compiled
def _request(w: Work, transfers: Int64s, head: int) -> tuple[int, int, int]:
    """Return a request's swap, the operation at which it was asked for, and when it may begin."""
    n = len(w.ops) - 1
    iteration, i = head // len(transfers), head % len(transfers)
    op = iteration * n + transfers[i, ASK_OP]
    return transfers[i, SWAP], op, w.begins[op] + transfers[i, DELAY]


@compiled
def _out_begins(w: Work) -> bool:
    state = w.state
    if state[OUT_HEAD] == state[OUT_ASKED] or state[OUT_END] != NONE:
        return False
    swap, asked_op, from_ns = _request(w, w.outs, state[OUT_HEAD])
    ahead = w.swaps[swap, LEAVES] - asked_op
    if w.swaps[swap, UNTIL] != NEVER and state[OP] > w.swaps[swap, UNTIL] - ahead:
        state[OUT_HEAD] += 1
        return True
    if state[T] < from_ns or state[OP] <= w.swaps[swap, AFTER] - ahead:
        return False
    w.where[swap] = LEAVING
    state[OUT_END] = state[T] + w.swaps[swap, OUT_NS]
    w.moved[0, swap] = state[T]
    return True


@compiled
def _back_begins(w: Work) -> bool:
    state = w.state
    if state[BACK_HEAD] == state[BACK_ASKED] or state[BACK_END] != NONE:
        return False
    swap, _, from_ns = _request(w, w.backs, state[BACK_HEAD])
    if state[T] < from_ns or w.where[swap] != AWAY or state[USED] + w.swaps[swap, BYTES] > state[LIMIT]:
        return False
    w.where[swap] = RETURNING
    state[USED] += w.swaps[swap, BYTES]
    state[PEAK] = max(state[PEAK], state[USED])
    state[BACK_END] = state[T] + w.swaps[swap, BACK_NS]
    w.moved[1, swap] = state[T]
    return True


@compiled
def _time_passes(w: Work) -> bool:
    """Go to the next instant at which something ends or may begin, and end it; tell whether there is one."""
    state, n = w.state, len(w.ops) - 1
    now, until = state[T], NEVER
    for i in (OP_END, OUT_END, BACK_END):
        if state[i] != NONE:
            until = min(until, state[i])
    for stream in range(2):
        head = state[OUT_HEAD] if stream == 0 else state[BACK_HEAD]
        if head != (state[OUT_ASKED] if stream == 0 else state[BACK_ASKED]):
            _, _, from_ns = _request(w, w.outs if stream == 0 else w.backs, head)
            if from_ns > now:
                until = min(until, from_ns)
    earliest = state[FREED_AT] + w.ops[state[OP] % n, PAUSE]
    if state[OP_END] == NONE and earliest > now:
        until = min(until, earliest)
    if until == NEVER:
        return False
    if state[OP_END] == NONE and earliest <= now:
        cause = WAIT_TENSOR if _missing(w) else WAIT_MEMORY
        state[cause] += until - now
    state[T] = until
    _end_what_ends(w)
    return True


@compiled
def _end_what_ends(w: Work) -> None:
    state, n = w.state, len(w.ops) - 1
    now = state[T]
    if state[OUT_END] == now:
        swap = w.outs[state[OUT_HEAD] % len(w.outs), SWAP]
        if not state[GHOST]:
            w.where[swap] = AWAY
        state[USED] -= w.swaps[swap, BYTES]
        state[OUT_HEAD] += 1
        state[OUT_END], state[GHOST] = NONE, 0
    if state[BACK_END] == now:
        w.where[w.backs[state[BACK_HEAD] % len(w.backs), SWAP]] = HERE
        state[BACK_HEAD] += 1
        state[BACK_END] = NONE
    if state[OP_END] == now:
        op = state[OP] % n
        state[USED] -= w.ops[op, FREE]
        for i in range(w.ops[op, ENDS], w.ops[op + 1, ENDS]):
            swap = w.ends[i]
            if w.where[swap] == LEAVING:
                state[GHOST] = 1
            if w.where[swap] == AWAY or w.where[swap] == LEAVING:  # what was counted as freed, and is not
                state[USED] += w.swaps[swap, BYTES]
            w.where[swap] = HERE
        state[OP] += 1
        state[OP_END], state[FREED_AT] = NONE, now


# --------------------------------------------------------------------------------------------------

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
        """Lay out what does not depend on the plan."""
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


def transfer_ns(link: Link, size_bytes: Int64s) -> Int64s:
    """Return what ``link.transfer_ns`` does, for many."""
    return np.asarray(link.latency_ns + np.ceil(size_bytes * 1e9 / link.bandwidth), np.int64)


def _grouped(group: Int64s, member: Int64s, n: int) -> tuple[Int64s, Int64s]:
    return np.bincount(group, minlength=n), member[np.argsort(group, kind="stable")]
