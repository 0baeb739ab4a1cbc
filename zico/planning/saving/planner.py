"""The planner of jobs: it drops, prunes and moves, in compiled code that holds no lock of the interpreter's.

Theory of operation
    A *start* is an order of operations in which results are made again. They are all that can be,
    a set that is changed in steps, or those that a run evicts when memory is full.
    ``_pruned`` leaves repeats out, the dearest first, as long as the limit is kept. The load of
    each step is kept while it does so: leaving a repeat out changes it only between the use before
    and the repeat. Where no start keeps the limit, the best are disturbed: repeats are put back at
    random. They are pruned again, at a price for what is held beyond it.

    Starts that are pruned to higher limits hold too much. There tensors move: at the highest peak
    the one that is idle longest beside its copies, until the limit is kept. Copies out go when their
    gap opens, those back as late as links and memory allow, by the times of the replay before.
    Then single tensors are moved or kept, and single repeats left out or put back. That goes on as
    long as the replay says that an iteration takes less::

        start      f0 f1 f2 b2 f1 b1 f0 b0
        pruned     f0 f1 f2 b2 b1 f0 b0         f1 fits
        moved      f0 f1 f2 b2 b1 b0            f0 leaves behind f1 and is back for b0

Guarantees
    The same problem gives the same plan, however busy the machine is: what ends the search is work
    that is counted, never a clock.

Known limitations
    Tensors move whole. No plan is proved best. What is done in any case takes 2 s for 40,000
    operations, and 10 s for 128,000.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zico.base.compiled import compiled, entry
from zico.base.programs import program
from zico.base.units import format_bytes
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving import fast
from zico.planning.saving.iteration import FORWARD, LIMIT, PERIOD, Given, Made, iteration_of, rows
from zico.planning.saving.mixed import SavePlan
from zico.planning.saving.moving import BOTH, EARLY, LATE, Moves, Times, chosen, ideal, streams, tried
from zico.planning.saving.problem import LEAST_BYTES, Int64s, SwapPlan, Transfers, no_swaps
from zico.planning.saving.pruning import (
    BY_BYTES,
    BY_COST,
    BY_NEXT_USE,
    BY_STALENESS,
    BY_WORTH,
    DONE,
    MOST,
    NEVER,
    Line,
    again_ns,
    can_return,
    copied,
    cost_of,
    disturbed,
    dropping,
    evicting,
    leave_out,
    line_of,
    order_of,
    prune,
    put_in,
    random,
    segmented,
    take,
)
from zico.planning.saving.registry import OURS

if TYPE_CHECKING:
    from zico.planning.saving.problem import Bools, SwapProblem
    from zico.planning.saving.recomputation import Graph

WORK = 400_000_000
"""A search costs at most so many steps, each of about a nanosecond."""
_WORK_EACH = WORK // 100
"""An iteration of fewer than a hundred operations gets so many steps for each."""
_MANY = 2500
"""Of more operations, fewer steps are left to count: what is done in any case takes longer."""
_MOST_OPS = 1 << 17
"""Longer iterations get no plan: the places of their operations do not fit ``moving``'s sort keys."""
_SEED = 88172645


# -- the best plan ---------------------------------------------------------------------------------


class Best(NamedTuple):
    """The best plan so far: arrays that are large enough for any plan."""

    ns: Int64s
    """One entry: what an iteration takes."""
    order: Int64s
    tensor: Int64s
    """The tensor of each swap, of the iteration that the order makes."""
    gap: Int64s
    size: Int64s
    out: Int64s
    """Swap, operation and delay of each transfer out, one transfer after another."""
    back: Int64s
    numbers: Int64s
    """How many entries the order has, how many swaps there are, and how many of them return."""


N_ORDER, N_SWAPS, N_BACKS = range(3)


class Mix(NamedTuple):
    """An order with moves, and what an iteration takes by it."""

    ids: Int64s
    """Each entry's step of the line that the order was taken from."""
    order: Int64s
    made: Made
    uses: Bools
    """Which gaps are used."""
    moves: Moves
    times: Times
    took_ns: float
    """What an iteration takes, in ns; infinite if the moves break a rule."""
    bytes: int
    """How much leaves in an iteration."""


@compiled
def _keep(of: Given, best: Best, mix: Mix) -> None:
    """Keep a plan if it is the best."""
    n = len(mix.moves.which)
    if mix.took_ns >= best.ns[0] or n > len(best.tensor):
        return
    best.ns[0] = int(np.ceil(mix.took_ns))
    best.numbers[N_ORDER], best.numbers[N_SWAPS] = len(mix.order), n
    best.order[: len(mix.order)] = mix.order
    for i in range(n):
        gap = mix.moves.which[i]
        best.tensor[i], best.gap[i] = mix.made.gap_tensor[gap], mix.made.gap[gap]
        best.size[i] = of.size[mix.made.tensor[mix.made.gap_tensor[gap]]]
    outs, backs = streams(mix.made, mix.moves)
    best.out[: 3 * n], best.back[: 3 * len(backs)] = outs.ravel(), backs.ravel()
    best.numbers[N_BACKS] = len(backs)


@compiled
def _alone(of: Given, line: Line, work: Int64s) -> Mix:
    """Return the order of a line without moves, which takes no time of its own where it keeps the limit."""
    order = line.step[line.runs]
    made, none = iteration_of(of, order), np.empty(0, np.int64)
    took_ns = float(made.period) if made.load.max() <= of.numbers[LIMIT] else np.inf
    work[DONE] += 101 * len(order)
    moves, uses = Moves(none, none, none, LATE), np.zeros(len(made.gap), np.bool_)
    return Mix(np.flatnonzero(line.runs), order, made, uses, moves, ideal(made), took_ns, 0)


@compiled
def _with_moves(of: Given, mix: Mix, uses: Bools, times: Times, ways: int, passes: int, work: Int64s) -> Mix:
    """Return the same order with moves in these gaps; ``times`` become those of the replay."""
    made, moved = mix.made, 0
    for gap in range(len(uses)):
        if uses[gap]:
            moved += of.size[made.tensor[made.gap_tensor[gap]]]
    took_ns, moves = tried(of, made, np.flatnonzero(uses), times, ways, passes, work)
    return Mix(mix.ids, mix.order, made, uses, moves, times, took_ns, moved)


@compiled
def _moved(of: Given, mix: Mix, by: int, ways: int, passes: int, work: Int64s) -> Mix:
    """Return the same order with moves of what it holds beyond the limit; of more, where that comes to a deadlock."""
    limit, uses, share = of.numbers[LIMIT], np.zeros(len(mix.made.gap), np.bool_), 0
    found = mix
    while found.took_ns == np.inf and share < _MOST_LOWER:
        times = ideal(mix.made)
        if not chosen(of, mix.made, times, by, limit - share * limit // 128, uses, work):
            break
        found = _with_moves(of, mix, uses, times, ways, passes, work)
        share = 2 * share + 1
    return found


_MOST_LOWER = 64
"""Where moves come to a deadlock, they are chosen for limits that are lower by up to so many 128ths."""


# -- starts ----------------------------------------------------------------------------------------


class Starts(NamedTuple):
    """Orders to begin with, and the best that recomputation alone has made of each."""

    order: Any
    length: Int64s
    cost: Any
    """What repeats take, in ns, once the order is pruned to the limit; infinite if it does not keep that."""
    with_moves: Any
    """What repeats take, in ns, and moves of all bytes beyond the limit at the pace of the links."""
    number: Int64s
    """One entry: how many orders there are."""


_STARTS = 32
_MOST_RUNS = 6
"""An order has at most so many entries for each operation."""
_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_BEST_SEGMENTS = 3
_LOWER = (1.0, 0.85, 0.7, 0.5)
"""Runs evict to these shares of the limit: an order for less can be cheaper once it is pruned."""


@compiled
def _whole(starts: Starts, i: int) -> Int64s:
    return starts.order[i, : starts.length[i]].copy()


@compiled
def _full(of: Given, order: Int64s) -> Line:
    return line_of(of, order, np.ones(len(order), np.bool_))


@compiled
def _note(starts: Starts, length: int) -> None:
    """Count a start that was written behind the others, if it is one."""
    starts.length[starts.number[0]] = length
    starts.number[0] += length > 0


@compiled
def _drop(of: Given, starts: Starts, work: Int64s) -> None:
    """Write orders in which results are dropped for their longest pause: all, and what changes in steps find."""
    n, dear_ns = len(of.bytes), _dear_ns(of)
    returns = np.zeros(n, np.bool_)
    for result in range(n):
        returns[result] = can_return(of, result)
    if not returns.any():
        return
    _note(starts, order_of(of, returns, starts.order[starts.number[0]]))
    dropped = np.zeros(n, np.bool_)
    begun, which = work[DONE], np.flatnonzero(returns)
    for turn in range(3):
        if turn < 2:  # noqa: PLR2004 - the last one goes on with what the second has found, bytes being dearer
            dropped[:] = False
        until = begun + (work[MOST] - begun) * (turn + 1) // 4
        dropping(of, dropped, which, dear_ns * 10 if turn > 1 else dear_ns, until, work)
        _note(starts, order_of(of, dropped, starts.order[starts.number[0]]))


@compiled
def _divide(of: Given, starts: Starts, work: Int64s) -> None:
    """Write orders of segments, those that cost least."""
    made = 0
    for op in range(of.numbers[FORWARD]):
        for i in range(of.results_begin[op], of.results_begin[op + 1]):
            made += of.bytes[of.results[i]]
    costs = np.full(len(_SEGMENTS), np.inf)
    order = np.empty(starts.order.shape[1], np.int64)
    for k in range(len(_SEGMENTS)):
        n = segmented(of, made // _SEGMENTS[k], order)
        work[DONE] += 150 * len(of.rest)
        if n > 0:
            costs[k] = cost_of(of, _full(of, order[:n].copy()), of.numbers[LIMIT], _dear_ns(of))
    ranked = np.argsort(costs, kind="mergesort")
    for k in ranked[:_BEST_SEGMENTS]:
        if costs[k] < np.inf:
            _note(starts, segmented(of, made // _SEGMENTS[k], starts.order[starts.number[0]]))


@compiled
def _evict(of: Given, starts: Starts, work: Int64s) -> None:
    """Write orders of runs that evict."""
    for share in _LOWER:
        for by in (BY_STALENESS, BY_NEXT_USE, BY_BYTES):
            limit = int(share * of.numbers[LIMIT])
            _note(starts, evicting(of, limit, by, starts.order[starts.number[0]], work))


@compiled
def _dear_ns(of: Given) -> float:
    """Return what a byte takes to leave and to return on links that never rest."""
    took_ns, size = 0, 1
    for tensor in range(len(of.size)):
        took_ns += of.out_ns[tensor] + of.back_ns[tensor]
        size += of.size[tensor]
    return took_ns / size


# -- recomputation alone ---------------------------------------------------------------------------

_TRIES = 3


@compiled
def _pruned(of: Given, order: Int64s, target: int, by: int, work: Int64s) -> Line:
    """Return an order without the repeats that a target has room for."""
    line = _full(of, order)
    work[DONE] += 20 * len(order)
    prune(of, line, max(target, line.load.max()), by, 0.0, work)
    return line


@compiled
def _recompute(of: Given, starts: Starts, best: Best, until: int, work: Int64s) -> None:
    """Prune starts to the limit; tensors of the iteration may end later than their last reader, so to less where so."""
    limit = of.numbers[LIMIT]
    for by in (BY_COST, BY_WORTH):
        for i in range(starts.number[0]):
            target = limit
            for _ in range(_TRIES):
                if work[DONE] > until:
                    return
                line = _pruned(of, _whole(starts, i), target, by, work)
                cost = again_ns(of, line)
                if target == limit:
                    starts.with_moves[i] = min(starts.with_moves[i], cost_of(of, line, limit, _dear_ns(of)))
                if line.load.max() > target or cost >= starts.cost[i]:
                    break
                mix = _alone(of, line, work)
                if mix.took_ns < np.inf:
                    starts.cost[i] = cost
                    _keep(of, best, mix)
                    break
                target -= mix.made.load.max() - limit


# -- with moves ------------------------------------------------------------------------------------

_MIXES, _SCORES = 8, 3
_SHARES = (0.0, 0.15, 0.3, 0.5, 0.75)
"""Starts are pruned to limit + share * (peak - limit); moves do the rest."""
_PRICES = (2.5, 1.0, 0.3)
"""A byte beyond the limit costs so many times what moving it takes: links have time to spare, or make others wait."""
_AT_ONCE = 6
_ONLY_MOVES = 0.6
"""The share of changes that are of moves, instead of repeats."""
_FEWER, _MORE = 0.7, 0.3
"""A number drawn from 0 to 1 that is below the first makes one move less; one above the second makes one more."""
_OTHER_WAY = 0.15
"""The share of changes for which both ways are tried of when to ask back."""


class Mixes(NamedTuple):
    """The best orders with moves, before they are changed in steps."""

    ns: Any
    start: Int64s
    runs: Any


@compiled
def _try_moves(of: Given, line: Line, start: int, by: int, mixes: Mixes, best: Best, work: Int64s) -> None:
    """Move what a line holds beyond the limit, by a score, and note what that takes."""
    alone = _alone(of, line, work)
    if alone.made.period >= best.ns[0]:
        return
    mix = _moved(of, alone, by, EARLY, 1, work)
    if mix.took_ns == np.inf:
        mix = _moved(of, alone, by, LATE, 1, work)
    _keep(of, best, mix)
    worst = np.argmax(mixes.ns)
    if mix.took_ns < mixes.ns[worst]:
        mixes.ns[worst], mixes.start[worst] = mix.took_ns, start
        mixes.runs[worst, : len(line.runs)] = line.runs


@compiled
def _mixed(of: Given, starts: Starts, peak: int, best: Best, until: int, work: Int64s) -> Mixes:
    """Return orders with moves: starts that are pruned to higher limits.

    Where none keeps the limit by recomputation alone, also the best that are disturbed by what moving costs.
    """
    limit, dear_ns, begun, count = of.numbers[LIMIT], _dear_ns(of), work[DONE], starts.number[0]
    mixes = Mixes(
        np.full(_MIXES, np.inf),
        np.zeros(_MIXES, np.int64),
        np.zeros((_MIXES, starts.order.shape[1]), np.bool_),
    )
    ranked = np.argsort(starts.with_moves[:count], kind="mergesort")
    is_tight = starts.cost.min() == np.inf  # then there are more orders to look at, and one score each has to do
    for k in range(min(2, count) if is_tight else 0):
        line = _pruned(of, _whole(starts, ranked[k]), limit, BY_COST, work)
        for turn in range(len(_PRICES)):
            end = begun + (until - begun) * (len(_PRICES) * k + turn + 1) // 12
            disturbed(of, line, limit, _PRICES[turn] * dear_ns, end, work)
            _try_moves(of, line, ranked[k], turn, mixes, best, work)
    turn = 0
    for low in range(0, count, _AT_ONCE):
        for share in _SHARES:
            target = limit + int(share * (peak - limit))
            for i in ranked[low : low + _AT_ONCE]:
                if work[DONE] > until:
                    return mixes
                line = _pruned(of, _whole(starts, i), target, BY_COST, work)
                for k in range(1 if is_tight else _SCORES):
                    _try_moves(of, line, i, (turn + k) % _SCORES, mixes, best, work)
                turn += 1
    return mixes


@compiled
def _ways(mix: Mix, work: Int64s) -> int:
    return BOTH if random(work) < _OTHER_WAY else mix.moves.way


@compiled
def _with_other_moves(of: Given, mix: Mix, work: Int64s) -> Mix:
    """Return a mix with one move less, one more, or another one."""
    uses, dice = mix.uses.copy(), random(work)
    here, away = np.flatnonzero(~uses), np.flatnonzero(uses)
    if dice < _FEWER and len(away) > 0:
        uses[away[int(random(work) * len(away))]] = False
    if dice > _MORE and len(here) > 0:
        uses[here[int(random(work) * len(here))]] = True
    times = Times(mix.times.begin.copy(), mix.times.period.copy())
    return _with_moves(of, mix, uses, times, _ways(mix, work), 1, work)


@compiled
def _with_other_order(of: Given, mix: Mix, line: Line, by: int, work: Int64s) -> Mix:
    """Return a mix by another line of the same order: with the moves that still are, and more if that needs them."""
    alone = _alone(of, line, work)
    if alone.made.period >= mix.took_ns:
        return alone
    uses = _carried(mix, alone)
    times = ideal(alone.made)
    if not chosen(of, alone.made, times, by, of.numbers[LIMIT], uses, work):
        return alone
    return _with_moves(of, alone, uses, times, _ways(mix, work), 2, work)


@compiled
def _carried(old: Mix, new: Mix) -> Bools:
    """Return the gaps of another order that end as those that are used end."""
    found = np.zeros(len(new.made.gap), np.bool_)
    begin = 0
    for gap in np.flatnonzero(old.uses):
        tensor = old.made.tensor[old.made.gap_tensor[gap]]
        end = (old.made.gap_last[gap] + 1) % len(old.made.op)
        while begin < len(found) and new.made.tensor[new.made.gap_tensor[begin]] < tensor:
            begin += 1
        for other in range(begin, len(found)):
            if new.made.tensor[new.made.gap_tensor[other]] != tensor:
                break
            ends = (new.made.gap_last[other] + 1) % len(new.made.op)
            if new.made.op[ends] == old.made.op[end] and new.ids[new.made.step[ends]] == old.ids[old.made.step[end]]:
                found[other] = True
                break
    return found


@compiled
def _climb(of: Given, line: Line, best: Best, until: int, work: Int64s) -> None:
    """Move or keep single tensors, leave out or put in single repeats, as long as there is work and that helps."""
    if work[DONE] >= until:
        return
    alone, by = _alone(of, line, work), 0
    now = _moved(of, alone, by, BOTH, 3, work)
    for score in range(1, _SCORES):
        other = _moved(of, alone, score, BOTH, 3, work)
        if other.took_ns < now.took_ns:
            now, by = other, score
    if now.took_ns == np.inf:
        return
    _keep(of, best, now)
    trial, repeats = copied(line), np.flatnonzero(line.again)
    while work[DONE] < until and now.took_ns > of.numbers[PERIOD]:
        work[DONE] += 1000
        changes_order = len(repeats) > 0 and random(work) > _ONLY_MOVES
        if changes_order:
            take(trial, line)
            step = repeats[int(random(work) * len(repeats))]
            if trial.runs[step]:
                leave_out(of, trial, step, NEVER, work)
            else:
                put_in(of, trial, step, work)
            other = _with_other_order(of, now, trial, by, work)
        else:
            other = _with_other_moves(of, now, work)
        if other.took_ns < now.took_ns or (other.took_ns == now.took_ns and other.bytes < now.bytes):
            now = other
            _keep(of, best, now)
            if changes_order:
                take(line, trial)


@entry(Given, Best, [np.dtype(np.int64)])
def _search(of: Given, best: Best, work: Int64s) -> None:
    """Search until so much work is done."""
    n_ops, most = len(of.rest), work[MOST]
    plain = np.arange(n_ops)
    alone = _alone(of, _full(of, plain), work)
    for by in range(_SCORES):
        _keep(of, best, _moved(of, alone, by, BOTH, 3, work))
        if best.ns[0] <= of.numbers[PERIOD]:
            return
    length = _MOST_RUNS * n_ops
    starts = Starts(
        np.empty((_STARTS, length), np.int64),
        np.zeros(_STARTS, np.int64),
        np.full(_STARTS, np.inf),
        np.full(_STARTS, np.inf),
        np.zeros(1, np.int64),
    )
    work[MOST] = work[DONE] + (most - work[DONE]) // 5
    _divide(of, starts, work)
    _drop(of, starts, work)
    _evict(of, starts, work)
    work[MOST] = most
    _recompute(of, starts, best, work[DONE] + (most - work[DONE]) // 5, work)
    mixes = _mixed(of, starts, alone.made.load.max(), best, work[DONE] + (most - work[DONE]) // 2, work)
    ranked = np.argsort(mixes.ns, kind="mergesort")
    for i in ranked:
        if mixes.ns[i] < np.inf:
            order = _whole(starts, mixes.start[i])
            line = line_of(of, order, mixes.runs[i, : len(order)].copy())
            _climb(of, line, best, work[DONE] + (most - work[DONE]) // 2, work)
    _climb(of, _full(of, plain), best, most, work)


# -- planning --------------------------------------------------------------------------------------


def given(problem: SwapProblem, graph: Graph) -> Given:
    """Return a problem and its graph as arrays."""
    n = len(graph)
    ends = problem.op_start_ns + problem.op_duration_ns
    node = np.array(graph.op_of, np.int64)
    result_of = np.full(len(problem), -1)
    result_of[np.array(graph.tensor, np.int64)] = np.arange(len(graph.tensor))
    limit = problem.peak_bytes if problem.limit_bytes is None else problem.limit_bytes
    return Given(
        problem.op_start_ns - np.append(ends[-1] - problem.period_ns, ends[:-1]),
        problem.op_duration_ns,
        problem.size_bytes,
        problem.alloc_op,
        problem.free_op,
        problem.access_begin,
        problem.access_op,
        fast.transfer_ns(problem.out, problem.size_bytes),
        fast.transfer_ns(problem.back, problem.size_bytes),
        result_of,
        np.searchsorted(node, np.arange(n + 1)),
        np.argsort(node, kind="stable"),
        np.array(graph.cost_ns, np.int64),
        np.array(graph.until or [n] * n, np.int64),
        np.array([graph.rest(op) for op in range(n)], np.int64),
        np.array(graph.size_bytes, np.int64),
        np.array(graph.maker, np.int64),
        *rows(tuple(tuple(dict.fromkeys(each)) for each in graph.inputs)),
        *rows(graph.results),
        *rows(graph.readers),
        *rows(graph.leaves),
        np.array([problem.period_ns, limit, min(LEAST_BYTES, max(limit // 1000, 1)), graph.n_forward], np.int64),
    )


def searched(problem: SwapProblem, graph: Graph, work: int) -> Best:
    """Return the best plan for a problem with a limit that so much work finds."""
    n_swaps = _MOST_RUNS * len(problem.access_op) + len(problem)
    tensor, gap, size = np.empty(n_swaps, np.int64), np.empty(n_swaps, np.int64), np.empty(n_swaps, np.int64)
    out, back = np.empty(3 * n_swaps, np.int64), np.empty(3 * n_swaps, np.int64)
    order = np.empty(_MOST_RUNS * len(graph), np.int64)
    best = Best(np.array([NEVER]), order, tensor, gap, size, out, back, np.zeros(3, np.int64))
    n = problem.n_ops
    _search(given(problem, graph), best, np.array([0, min(work, _WORK_EACH * n, work * _MANY // n), _SEED]))
    return best


class Planner:
    """Drops, prunes and moves."""

    name = OURS

    def __init__(self, work: int = WORK) -> None:
        """Load the search's machine code, or compile it; search for so long, in steps of about a nanosecond."""
        program(__name__).load()
        self._work = work

    def plan(self, problem: SwapProblem, graph: Graph, deadline_s: float = 0.0) -> SavePlan | NoPlan:  # noqa: ARG002 - counts
        """Return the plan of the fastest iteration that was found, or why there is none."""
        began_s = time.thread_time()
        if problem.limit_bytes is None or problem.peak_bytes <= problem.limit_bytes:
            return SavePlan(self.name, 0.0, no_swaps(self.name))
        limit = problem.limit_bytes
        if problem.n_ops > _MOST_OPS:
            detail = f"an iteration of {problem.n_ops} operations is too long: at most {_MOST_OPS} can be planned"
            return NoPlan(Reason.NOT_FOUND, self.name, 0.0, detail)
        if limit < problem.least_bytes:
            detail = f"an operation needs {problem.least_bytes} bytes at once: give that limit or a higher one"
            return NoPlan(Reason.INFEASIBLE, self.name, time.thread_time() - began_s, detail)
        best = searched(problem, graph, self._work)
        took_s = time.thread_time() - began_s
        if best.ns[0] == NEVER:
            detail = f"nothing that was tried stays within {format_bytes(limit)}"
            return NoPlan(Reason.NOT_FOUND, self.name, took_s, detail)
        order = tuple(best.order[: best.numbers[N_ORDER]].tolist())
        n = best.numbers[N_SWAPS]
        out, back = best.out[: 3 * n].reshape(n, 3).T, best.back[: 3 * best.numbers[N_BACKS]].reshape(-1, 3).T
        swaps = SwapPlan(
            tensor=best.tensor[:n],
            gap=best.gap[:n],
            first_byte=np.zeros(n, np.int64),
            size_bytes=best.size[:n],
            out=Transfers(*out),
            back=Transfers(*back),
            planner=self.name,
            elapsed_s=took_s,
        )
        return SavePlan(self.name, took_s, swaps, order if len(order) > len(graph) else ())
