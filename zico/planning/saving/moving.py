"""Which tensors move in an iteration, when their copies go, and what that takes by the replay; compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import compiled
from zico.planning.saving import fast
from zico.planning.saving.iteration import LIMIT, Given, Made
from zico.planning.saving.problem import PERSISTENT
from zico.planning.saving.pruning import DONE

if TYPE_CHECKING:
    from zico.planning.saving.problem import Bools, Int64s

_NEVER = 1 << 62
LATE, EARLY, BOTH = range(3)
"""When what is away is asked back: see ``scheduled``."""

# -- what moves ------------------------------------------------------------------------------------


class Times(NamedTuple):
    """When operations begin, from the beginning of their iteration on."""

    begin: Int64s
    period: Int64s
    """One entry."""


class Moves(NamedTuple):
    """Gaps in which tensors leave, and when they return."""

    which: Int64s
    asked: Int64s
    """The operation at which each is asked back, from its access on; ``fast.NONE``: it ends with its gap."""
    delay: Int64s
    way: int
    """``LATE`` or ``EARLY``, as for ``scheduled``."""


@compiled
def ideal(made: Made) -> Times:
    """Return when operations begin with all tensors at hand."""
    n = len(made.op)
    begin = np.empty(n, np.int64)
    t = 0
    for i in range(n):
        if i > 0:
            t += made.ops[i, fast.PAUSE]
        begin[i] = t
        t += made.ops[i, fast.DURATION]
    period = np.empty(1, np.int64)
    period[0] = max(made.period, 1)
    return Times(begin, period)


@compiled
def _begins(times: Times, op: int) -> int:
    n = len(times.begin)
    return times.begin[op % n] + op // n * times.period[0]


@compiled
def _last_begun(times: Times, low: int, high: int, t: int) -> int:
    """Return the last operation of a row that begins by a time; the first one if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        if _begins(times, middle) <= t:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _add(load: Int64s, first: int, last: int, size_bytes: int) -> None:
    """Add bytes to the load of a row of operations on the circle."""
    n = len(load)
    begin = first % n
    end = begin + last - first + 1
    for i in range(begin, min(end, n)):
        load[i] += size_bytes
    for i in range(end - n):
        load[i] += size_bytes


@compiled
def scheduled(of: Given, made: Made, which: Int64s, times: Times, way: int) -> Moves:
    """Return when tensors return, for operations that begin at these times.

    By ``EARLY`` those for which the link is behind are asked back as soon as the peak is over. By
    ``LATE``, none before there is room for it until it is used.
    """
    n, count = len(made.op), len(which)
    opens, closes = np.empty(count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        opens[i] = (made.gap_first[which[i]] - 1) % n
        closes[i] = opens[i] + made.gap_last[which[i]] - made.gap_first[which[i]] + 2
    freed = _freed(of, made, which, times, opens, closes)
    start_ns = _start_ns(of, made, which, times, closes)
    resident, peak, key = made.load.copy(), np.argmax(made.load), np.empty(count, np.int64)
    for i in range(count):
        key[i] = (closes[i] - peak - 1) % n
        if freed[i] < closes[i]:
            _add(resident, freed[i], closes[i] - 1, -_bytes(of, made, which[i]))
    asked, delay = np.full(count, fast.NONE), np.zeros(count, np.int64)
    for i in np.argsort(key):  # who is used first has room first
        if not made.gap_returns[which[i]]:
            continue
        last, start = closes[i] - 1, _begins(times, closes[i]) + start_ns[i]
        wanted = _last_begun(times, opens[i], last, start)
        at = min(max(wanted, freed[i]), last)
        if way == EARLY:
            over = opens[i] + (peak - opens[i]) % n
            at = wanted = min(max(wanted, over + 1), last) if over < last else wanted
        elif freed[i] < closes[i]:
            size = _bytes(of, made, which[i])
            while last > at and resident[last % n] + size <= of.numbers[LIMIT]:
                last -= 1
            at = min(last + (resident[last % n] + size > of.numbers[LIMIT]), closes[i] - 1)
            _add(resident, max(at, freed[i]), closes[i] - 1, size)
        asked[i] = at
        if at == wanted:
            delay[i] = max(0, start - _begins(times, at))
    return Moves(which, asked, delay, way)


@compiled
def _bytes(of: Given, made: Made, gap: int) -> int:
    return of.size[made.tensor[made.gap_tensor[gap]]]


@compiled
def _freed(of: Given, made: Made, which: Int64s, times: Times, opens: Int64s, closes: Int64s) -> Int64s:
    """Return the operation by whose beginning each has left: one after another, as their gaps open."""
    key, freed, free_ns = np.empty(len(which), np.int64), np.empty(len(which), np.int64), -_NEVER
    for i in range(len(which)):
        key[i] = opens[i] * (2 * len(made.op) + 2) + closes[i] - opens[i]
    order = np.argsort(key)
    for turn in range(2):  # what is late at the end of an iteration is so in the next one
        for i in order:
            ends_ns = times.begin[opens[i]] + made.ops[opens[i], fast.DURATION] + turn * times.period[0]
            free_ns = max(free_ns, ends_ns) + of.out_ns[made.tensor[made.gap_tensor[which[i]]]]
            left_ns = free_ns - turn * times.period[0]
            at = _last_begun(times, opens[i], closes[i], left_ns)
            freed[i] = at if _begins(times, at) >= left_ns else at + 1
    return freed


@compiled
def _start_ns(of: Given, made: Made, which: Int64s, times: Times, closes: Int64s) -> Int64s:
    """Return how long before its use each has to begin to return, at the latest: below 0."""
    n, start_ns, busy_ns = len(made.op), np.zeros(len(which), np.int64), _NEVER
    order = np.argsort(closes % n)[::-1]
    for turn in range(1, -1, -1):
        for i in order:
            if made.gap_returns[which[i]]:
                needed_ns = times.begin[closes[i] % n] + turn * times.period[0]
                busy_ns = min(busy_ns, needed_ns) - of.back_ns[made.tensor[made.gap_tensor[which[i]]]]
                start_ns[i] = busy_ns - needed_ns
    return start_ns


@compiled
def _transfers(swap: Int64s, op: Int64s, delay: Int64s, tie: Int64s, n: int) -> Int64s:
    """Return rows of swap, operation and delay of some swaps, in the order in which a stream has them."""
    count = len(swap)
    key = np.empty(count, np.int64)
    for k in range(count):
        i = swap[k]
        key[k] = (op[i] % n << 43) + (min(delay[i] >> 13, (1 << 29) - 1) << 14) + min(tie[i], (1 << 14) - 1)
    order = np.argsort(key)
    rows = np.empty((count, 3), np.int64)
    for k in range(count):
        i = swap[order[k]]
        rows[k, fast.SWAP], rows[k, fast.ASK_OP], rows[k, fast.DELAY] = i, op[i] % n, delay[i]
    return rows


@compiled
def streams(made: Made, moves: Moves) -> tuple[Int64s, Int64s]:
    """Return what is asked of the two links."""
    n, count = len(made.op), len(moves.which)
    opens, tie, none = np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count, np.int64)
    for i in range(count):
        gap = moves.which[i]
        opens[i] = made.gap_first[gap] - 1
        tie[i] = made.gap_last[gap] - made.gap_first[gap]
    outs = _transfers(np.arange(count), opens, none, tie, n)
    for i in range(count):
        tie[i] = (opens[i] % n + tie[i] - moves.asked[i] + 2 * n) % (2 * n)
    return outs, _transfers(np.flatnonzero(moves.asked != fast.NONE), moves.asked, moves.delay, tie, n)


@compiled
def _swaps(of: Given, made: Made, moves: Moves) -> Int64s:
    """Return the columns of swaps."""
    swaps = np.zeros((len(moves.which), 7), np.int64)
    for i in range(len(moves.which)):
        tensor = made.gap_tensor[moves.which[i]]
        old, access = made.tensor[tensor], made.gap_first[moves.which[i]] - 1
        swaps[i, fast.BYTES] = of.size[old]
        swaps[i, fast.OUT_NS], swaps[i, fast.BACK_NS] = of.out_ns[old], of.back_ns[old]
        swaps[i, fast.AFTER] = swaps[i, fast.LEAVES] = access
        swaps[i, fast.UNTIL] = fast.NEVER if made.alloc[tensor] == PERSISTENT else made.free[tensor]
        swaps[i, fast.RETURNS] = fast.NONE
        if moves.asked[i] != fast.NONE:
            swaps[i, fast.RETURNS] = access + (moves.asked[i] - access) % len(made.op)
    return swaps


@compiled
def _by_op(made: Made, moves: Moves, ops: Int64s) -> tuple[Int64s, Int64s]:
    """Return the swaps of the tensors that operations use, and of those that end with them; write where each begin."""
    n = len(made.op)
    for gap in moves.which:
        tensor = made.gap_tensor[gap]
        for j in range(made.access_begin[tensor], made.access_begin[tensor + 1]):
            ops[made.access[j] % n + 1, fast.USES] += 1
        if made.alloc[tensor] != PERSISTENT:
            ops[made.free[tensor] % n + 1, fast.ENDS] += 1
    for i in range(n):
        for column in (fast.USES, fast.ENDS, fast.OUTS, fast.BACKS):
            ops[i + 1, column] += ops[i, column]
    uses, ends = np.empty(ops[n, fast.USES], np.int64), np.empty(ops[n, fast.ENDS], np.int64)
    use_at, end_at = ops[:, fast.USES].copy(), ops[:, fast.ENDS].copy()
    for i in range(len(moves.which)):
        tensor = made.gap_tensor[moves.which[i]]
        for j in range(made.access_begin[tensor], made.access_begin[tensor + 1]):
            uses[use_at[made.access[j] % n]] = i
            use_at[made.access[j] % n] += 1
        if made.alloc[tensor] != PERSISTENT:
            ends[end_at[made.free[tensor] % n]] = i
            end_at[made.free[tensor] % n] += 1
    return uses, ends


@compiled
def _played(of: Given, made: Made, moves: Moves, times: Times, work: Int64s) -> float:
    """Replay; returns what an iteration takes, and writes when operations then begin. Infinite: it breaks a rule."""
    n, count = len(made.op), len(moves.which)
    ops, swaps, where = made.ops.copy(), _swaps(of, made, moves), np.zeros(count, np.int64)
    outs, backs = streams(made, moves)
    for op in outs[:, fast.ASK_OP]:
        ops[op + 1, fast.OUTS] += 1
    for op in backs[:, fast.ASK_OP]:
        ops[op + 1, fast.BACKS] += 1
    uses, ends = _by_op(made, moves, ops)
    state = np.zeros(fast.N_STATE, np.int64)
    state[fast.OP_END] = state[fast.OUT_END] = state[fast.BACK_END] = fast.NONE
    state[fast.USED], state[fast.LIMIT] = made.alive, of.numbers[LIMIT]
    for i in range(count):
        until = swaps[i, fast.RETURNS] if moves.asked[i] != fast.NONE else swaps[i, fast.UNTIL]
        where[i] = fast.HERE
        if swaps[i, fast.LEAVES] < n <= until:
            where[i] = fast.AWAY
            state[fast.USED] -= swaps[i, fast.BYTES]
    at = np.zeros((fast.MOST_ITERATIONS + 2, 3), np.int64)
    begins = np.empty((fast.MOST_ITERATIONS + 1) * n, np.int64)
    moved = np.empty((2, count), np.int64)
    kept = np.empty((fast.MOST_ITERATIONS + 2, fast.KEPT + count), np.int64)
    rule, first, last = fast.run(fast.Work(ops, swaps, uses, ends, outs, backs, state, where, at, begins, moved, kept))
    work[DONE] += (last + 1) * (60 * n + 150 * count) + 200 * n + 1000 * count
    if rule in (fast.START, fast.DEADLOCK):
        return np.inf
    for i in range(n):
        times.begin[i] = begins[(last - 1) * n + i] - at[last - 1, 0]
    times.period[0] = max(at[last, 0] - at[last - 1, 0], 1)
    return (at[last, 0] - at[first, 0]) / max(last - first, 1)


@compiled
def tried(
    of: Given, made: Made, which: Int64s, times: Times, ways: int, passes: int, work: Int64s
) -> tuple[float, Moves]:
    """Return what an iteration takes in which these gaps are used, and how; ``times`` are then those of the best.

    Args:
        of: The problem.
        made: The iteration.
        which: The gaps.
        times: When operations are taken to begin.
        ways: Asked back late, ``LATE``; early, ``EARLY``; or as is better, ``BOTH``.
        passes: How often the times of a replay are taken for the next one.
        work: What has been done is added.
    """
    begin_ns = Times(times.begin.copy(), times.period.copy())
    best_ns, best = np.inf, scheduled(of, made, which, times, EARLY if ways == EARLY else LATE)
    for way in (LATE, EARLY):
        if ways not in (way, BOTH):
            continue
        now = Times(begin_ns.begin.copy(), begin_ns.period.copy())
        for _ in range(passes):
            moves = scheduled(of, made, which, now, way)
            took_ns = _played(of, made, moves, now, work)
            if took_ns < best_ns:
                best_ns, best = took_ns, moves
                times.begin[:] = now.begin
                times.period[:] = now.period
            if took_ns == np.inf or took_ns <= made.period:
                break
        if best_ns <= made.period:
            break
    return best_ns, best


@compiled
def _score(of: Given, made: Made, times: Times, gap: int, by: int) -> float:
    """Return how good it is to move something: how long it is away for nothing, or that with its bytes."""
    tensor = made.tensor[made.gap_tensor[gap]]
    before = made.gap_first[gap] - 1
    idle = (
        _begins(times, made.gap_last[gap] + 1) - _begins(times, before) - made.ops[before % len(made.op), fast.DURATION]
    )
    spare = float(idle - of.out_ns[tensor] - of.back_ns[tensor] * made.gap_returns[gap])
    if by == 0:
        return spare
    if by == 1:
        return spare * of.size[tensor] if spare > 0 else spare / of.size[tensor]
    return float(idle) * of.size[tensor]


@compiled
def chosen(of: Given, made: Made, times: Times, by: int, limit: int, uses: Bools, work: Int64s) -> bool:
    """Use more gaps, the best over the highest peak first, until the limit is kept; false: it never is."""
    n, n_gaps = len(made.op), len(made.gap)
    score = np.empty(n_gaps, np.float64)
    load = made.load.copy()
    for i in range(n_gaps):
        score[i] = _score(of, made, times, i, by)
        if uses[i]:
            _add(load, made.gap_first[i], made.gap_last[i], -of.size[made.tensor[made.gap_tensor[i]]])
    ranked = np.argsort(-score)
    while True:
        peak = np.argmax(load)
        work[DONE] += n // 4
        if load[peak] <= limit:
            return True
        found = -1
        for i in ranked:
            if not uses[i] and (peak - made.gap_first[i]) % n <= made.gap_last[i] - made.gap_first[i]:
                found = i
                break
        work[DONE] += n_gaps // 4
        if found < 0:
            return False
        uses[found] = True
        _add(load, made.gap_first[found], made.gap_last[found], -of.size[made.tensor[made.gap_tensor[found]]])
