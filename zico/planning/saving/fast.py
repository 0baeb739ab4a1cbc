"""The replay for planners: the rules of ``zico.lab.saving.replay`` on arrays, compiled, with counts kept.

It trusts the plan to keep these rules. A hypothesis test compares its figures with the judge's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import compiled

if TYPE_CHECKING:
    from zico.planning.saving.problem import Int64s, Link


MOST_ITERATIONS = 64
"""As the judge's."""
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


def transfer_ns(link: Link, size_bytes: Int64s) -> Int64s:
    """Return what ``link.transfer_ns`` does, for many."""
    return np.asarray(link.latency_ns + np.ceil(size_bytes * 1e9 / link.bandwidth), np.int64)
