"""Orders in which operations run again, and repeats left out of them or put in, with the load of each step kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import compiled
from zico.planning.saving.iteration import FORWARD, LIMIT

if TYPE_CHECKING:
    from zico.planning.saving.iteration import Given
    from zico.planning.saving.problem import Bools, Int64s

NEVER = 1 << 62
DONE, MOST, SEED = range(3)
"""What has been done, what may be, and the state of what is drawn at random; all in steps of about a nanosecond."""

# -- orders ----------------------------------------------------------------------------------------


@compiled
def order_of(of: Given, dropped: Bools, order: Int64s) -> int:
    """Write the order in which results are dropped for their longest pause, and made again for its end.

    Returns its length, below 0: an operation that must not run again would have to, or it is too long.
    """
    held = np.zeros(len(of.bytes), np.bool_)
    ahead = np.empty(len(of.rest) + 1, np.int64)
    n = 0
    for op in range(len(of.rest)):
        ahead[0], depth = op, 1
        while depth > 0:
            top = ahead[depth - 1]
            lacking = _lacking(of, held, top)
            if lacking >= 0:
                ahead[depth] = lacking
                depth += 1
                continue
            depth -= 1
            if n == len(order) or (top != op and op > of.until[top]):
                return -1
            order[n] = top
            n += 1
            for i in range(of.results_begin[top], of.results_begin[top + 1]):
                held[of.results[i]] = True
        for i in range(of.leaves_begin[op], of.leaves_begin[op + 1]):
            if dropped[of.leaves[i]]:
                held[of.leaves[i]] = False
    return n


@compiled
def can_return(of: Given, result: int) -> bool:
    """Tell whether a result can be made again for its last reader."""
    last = of.readers_begin[result + 1] - 1
    return last >= of.readers_begin[result] and of.readers[last] <= of.until[of.maker[result]]


@compiled
def _around_ns(of: Given, result: int, lost: Bools, seen: Int64s, stamp: int, sides: int) -> float:
    """Return what making a result again costs, with all that is lost on the way, and, of two sides, behind it."""
    stack = np.empty(_MOST_AROUND, np.int64)
    cost = float(of.cost[of.maker[result]])
    for side in range(sides):
        stack[0], depth, found = result, 1, 0
        while depth > 0:
            depth -= 1
            at = stack[depth]
            if side == 0:
                begin, end = of.inputs_begin[of.maker[at]], of.inputs_begin[of.maker[at] + 1]
            else:
                begin, end = of.readers_begin[at], of.readers_begin[at + 1]
            for i in range(begin, end):
                if side == 0:
                    low, high = of.inputs[i], of.inputs[i] + 1
                else:
                    low, high = of.results_begin[of.readers[i]], of.results_begin[of.readers[i] + 1]
                for j in range(low, high):
                    each = j if side == 0 else of.results[j]
                    if lost[each] and seen[each] != stamp and found < _MOST_AROUND - 1 and depth < _MOST_AROUND:
                        seen[each] = stamp
                        cost += of.cost[of.maker[each]]
                        stack[depth] = each
                        depth += 1
                        found += 1
    return cost


_MOST_AROUND = 64
BY_STALENESS, BY_NEXT_USE, BY_BYTES = range(3)


class _Run(NamedTuple):
    """A run that drops results: what is held, and what is known of it."""

    held: Bools
    lost: Bools
    pinned: Int64s
    """How many waiting operations need each result."""
    used: Int64s
    """The clock at the last use of each result."""
    seen: Int64s
    here: Int64s
    """The results that are held, in any order."""
    place: Int64s
    """The place of each of them there."""
    at_ns: Int64s
    """When each operation begins if nothing is dropped."""
    numbers: Int64s


_HERE, _TOTAL, _CLOCK, _STAMP = range(4)


@compiled
def evicting(of: Given, limit: int, by: int, order: Int64s, work: Int64s) -> int:
    """Write the order of a run that drops a result when memory is full; returns its length, below 0: there is none.

    It drops the one that costs least for its bytes and the time since its last use, as h_DTR does
    (M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021), or the time until its next.
    """
    n_ops, n_results, n = len(of.rest), len(of.bytes), 0
    none = np.zeros(n_results, np.int64)
    at_ns = np.cumsum(of.cost) - of.cost
    run = _Run(none > 0, none > 0, none, none.copy(), none - 1, none.copy(), none.copy(), at_ns, np.zeros(4, np.int64))
    ahead = np.empty(n_ops + 1, np.int64)
    for first in range(n_ops):
        ahead[0], depth = first, 1
        _pin(of, run, first, 1)
        while depth > 0:
            top = ahead[depth - 1]
            lacking = _lacking(of, run.held, top)
            if lacking >= 0:
                if depth == len(ahead):
                    return -1
                ahead[depth] = lacking
                depth += 1
                _pin(of, run, lacking, 1)
                continue
            depth -= 1
            if n == len(order) or (top != first and first > of.until[top]):
                return -1
            if not _makes_room(of, run, top, first, limit, by, work):
                return -1
            order[n] = top
            n += 1
            _pin(of, run, top, -1)
            _note_run(of, run, top, first + (top == first))
    return n


@compiled
def _lacking(of: Given, held: Bools, op: int) -> int:
    """Return the maker of something that an operation reads and that is not held; -1: all is."""
    for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
        if not held[of.inputs[i]]:
            return of.maker[of.inputs[i]]
    return -1


@compiled
def _pin(of: Given, run: _Run, op: int, by: int) -> None:
    for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
        run.pinned[of.inputs[i]] += by
    for i in range(of.results_begin[op], of.results_begin[op + 1]):
        run.pinned[of.results[i]] += by


@compiled
def _let_go(of: Given, run: _Run, result: int) -> None:
    run.held[result] = False
    run.numbers[_TOTAL] -= of.bytes[result]
    run.numbers[_HERE] -= 1
    last = run.here[run.numbers[_HERE]]
    run.here[run.place[result]], run.place[last] = last, run.place[result]


@compiled
def _makes_room(of: Given, run: _Run, op: int, first: int, limit: int, by: int, work: Int64s) -> bool:
    """Drop results until an operation's fit; tells whether they do."""
    needs = of.rest[first]
    for i in range(of.results_begin[op], of.results_begin[op + 1]):
        if not run.held[of.results[i]]:
            needs += of.bytes[of.results[i]]
    while run.numbers[_TOTAL] + needs > limit:
        worst = _worst(of, run, first, by)
        work[DONE] += 60 * run.numbers[_HERE] + 100
        if worst < 0 or work[DONE] > work[MOST]:
            return False
        _let_go(of, run, worst)
        run.lost[worst] = True
    return True


@compiled
def _worst(of: Given, run: _Run, first: int, by: int) -> int:
    """Return what is dropped next; -1: nothing can be."""
    worst, least = -1, np.inf
    for result in run.here[: run.numbers[_HERE]]:
        if run.pinned[result] > 0 or not can_return(of, result):
            continue
        run.numbers[_STAMP] += 1
        pause = 1
        if by == BY_STALENESS:
            pause = run.numbers[_CLOCK] - run.used[result] + 1
        elif by == BY_NEXT_USE:
            i = of.readers_begin[result]
            while i < of.readers_begin[result + 1] - 1 and of.readers[i] < first:
                i += 1
            pause = max(run.at_ns[of.readers[i]] - run.at_ns[first], 0) + 1
        cost = _around_ns(of, result, run.lost, run.seen, run.numbers[_STAMP], 2 if by == BY_STALENESS else 1)
        score = (cost + 1) / (max(of.bytes[result], 1) * float(pause))
        if score < least:
            worst, least = result, score
    return worst


@compiled
def _note_run(of: Given, run: _Run, op: int, first: int) -> None:
    """Note that an operation has run; what nobody reads from ``first`` on is let go."""
    for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
        run.used[of.inputs[i]] = run.numbers[_CLOCK]
    run.numbers[_CLOCK] += of.cost[op]
    for i in range(of.results_begin[op], of.results_begin[op + 1]):
        result = of.results[i]
        run.used[result], run.lost[result] = run.numbers[_CLOCK], False
        if not run.held[result]:
            run.held[result] = True
            run.here[run.numbers[_HERE]], run.place[result] = result, run.numbers[_HERE]
            run.numbers[_HERE] += 1
            run.numbers[_TOTAL] += of.bytes[result]
        _end(of, run, result, first)
    for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
        _end(of, run, of.inputs[i], first)


@compiled
def _end(of: Given, run: _Run, result: int, first: int) -> None:
    last = of.readers_begin[result + 1] - 1
    is_over = last < of.readers_begin[result] or of.readers[last] < first
    if is_over and run.held[result] and run.pinned[result] == 0:
        _let_go(of, run, result)


@compiled
def segmented(of: Given, bound_bytes: int, order: Int64s) -> int:  # noqa: C901, PLR0912 - one pass over arrays
    """Write the order that runs a segment again when the backward pass first needs it; returns its length, or -1.

    A new segment begins when so many bytes are made. Source: T. Chen et al., "Training Deep Nets
    with Sublinear Memory Cost" (2016), algorithm 3.
    """
    n_ops, n_forward = len(of.rest), of.numbers[FORWARD]
    begin, segment = np.empty(n_forward + 1, np.int64), np.empty(n_forward, np.int64)
    count = made = 0
    for op in range(n_forward):
        if made == 0:
            begin[count] = op
            count += 1
        segment[op] = count - 1
        for i in range(of.results_begin[op], of.results_begin[op + 1]):
            made += of.bytes[of.results[i]]
        if made > bound_bytes:
            made = 0
    begin[count] = n_forward
    again = np.zeros(count, np.bool_)
    stays = np.zeros(n_forward, np.bool_)
    for op in range(n_forward):
        for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
            maker = of.maker[of.inputs[i]]
            stays[maker] |= segment[maker] != segment[op]
        order[op] = op
    n = n_forward
    for op in range(n_forward, n_ops):
        for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
            maker = of.maker[of.inputs[i]]
            if maker >= n_forward or stays[maker] or again[segment[maker]]:
                continue
            again[segment[maker]] = True
            for each in range(begin[segment[maker]], begin[segment[maker] + 1]):
                if not stays[each] and op <= of.until[each]:
                    if n == len(order):
                        return -1
                    order[n] = each
                    n += 1
        if n == len(order):
            return -1
        order[n] = op
        n += 1
    return n


# -- pruning ---------------------------------------------------------------------------------------


class Line(NamedTuple):
    """An order of which some repeats run, and the load of each step."""

    step: Int64s
    """The graph's operations."""
    runs: Bools
    again: Bools
    """Whether a step is a repeat."""
    load: Int64s
    made_begin: Int64s
    made: Int64s
    """The steps of each operation."""
    used_begin: Int64s
    used: Int64s
    """The steps that read each result."""
    waiting: Int64s
    """Room for the steps that a walk along the order has still to look at."""
    marked: Bools
    """All false between two walks."""


@compiled
def line_of(of: Given, order: Int64s, runs: Bools) -> Line:  # noqa: C901 - one pass over arrays
    """Return an order of which these steps run."""
    n, n_ops, n_results = len(order), len(of.rest), len(of.bytes)
    made_begin, used_begin = np.zeros(n_ops + 1, np.int64), np.zeros(n_results + 1, np.int64)
    again, load = np.zeros(n, np.bool_), np.zeros(n + 1, np.int64)
    for i in range(n):
        op = order[i]
        again[i] = made_begin[op + 1] > 0
        made_begin[op + 1] += 1
        for j in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
            used_begin[of.inputs[j] + 1] += 1
    for i in range(n_ops):
        made_begin[i + 1] += made_begin[i]
    for i in range(n_results):
        used_begin[i + 1] += used_begin[i]
    made, used = np.empty(n, np.int64), np.empty(used_begin[n_results], np.int64)
    at_made, at_used = made_begin[:n_ops].copy(), used_begin[:n_results].copy()
    for i in range(n):
        op = order[i]
        made[at_made[op]] = i
        at_made[op] += 1
        for j in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
            used[at_used[of.inputs[j]]] = i
            at_used[of.inputs[j]] += 1
    for result in range(n_results):
        op = of.maker[result]
        at, k = used_begin[result], made_begin[op]
        while k < made_begin[op + 1]:
            begin = end = made[k]
            k += 1
            while k < made_begin[op + 1] and not runs[made[k]]:
                k += 1
            until = made[k] if k < made_begin[op + 1] else n
            while at < used_begin[result + 1] and used[at] < until:
                if runs[used[at]]:
                    end = max(end, used[at])
                at += 1
            load[begin] += of.bytes[result]
            load[end + 1] -= of.bytes[result]
    first = held = 0
    for i in range(n):
        held += load[i]
        load[i] = held + of.rest[min(first, n_ops - 1)]
        first += order[i] == first
    return Line(
        order,
        runs.copy(),
        again,
        load[:n],
        made_begin,
        made,
        used_begin,
        used,
        np.empty(n, np.int64),
        np.zeros(n, np.bool_),
    )


@compiled
def _before(values: Int64s, begin: int, end: int, step: int, runs: Bools) -> int:
    """Return the last step ahead of one, of an ascending row, that runs; -1: there is none."""
    i = _first_from(values, begin, end, step) - 1
    while i >= begin and not runs[values[i]]:
        i -= 1
    return values[i] if i >= begin else -1


@compiled
def _behind(values: Int64s, begin: int, end: int, step: int, runs: Bools) -> int:
    """Return the first step behind one that runs; a large one: there is none."""
    i = _first_from(values, begin, end, step + 1)
    while i < end and not runs[values[i]]:
        i += 1
    return values[i] if i < end else NEVER


@compiled
def _first_from(values: Int64s, begin: int, end: int, least: int) -> int:
    """Return where an ascending row has its first value that is not below the least; its end: there is none."""
    while begin < end:
        middle = (begin + end) // 2
        if values[middle] < least:
            begin = middle + 1
        else:
            end = middle
    return begin


@compiled
def _raise(load: Int64s, begin: int, end: int, size_bytes: int) -> int:
    """Add to the load of some steps; returns the highest there."""
    most = 0
    for i in range(begin, end):
        load[i] += size_bytes
        most = max(most, load[i])
    return most


@compiled
def _turn(of: Given, line: Line, step: int, sign: int, work: Int64s) -> int:
    """Let a repeat run no more, or run: change the load, not ``runs``, which says that it does not run.

    With ``sign`` 1 it is left out, with -1 put in. Returns the highest load where that was raised.
    """
    op, most = line.step[step], 0
    for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
        result = of.inputs[i]
        maker = of.maker[result]
        made = _before(line.made, line.made_begin[maker], line.made_begin[maker + 1], step, line.runs)
        behind = _behind(line.made, line.made_begin[maker], line.made_begin[maker + 1], step, line.runs)
        low, high = line.used_begin[result], line.used_begin[result + 1]
        if _behind(line.used, low, high, step, line.runs) <= min(behind, NEVER - 1):
            continue  # another one reads the same copy later
        before = max(made, _before(line.used, low, high, step, line.runs))
        most = max(most, _raise(line.load, before + 1, step + 1, -sign * of.bytes[result]))
        work[DONE] += 60 + step - before
    for i in range(of.results_begin[op], of.results_begin[op + 1]):
        result = of.results[i]
        made = _before(line.made, line.made_begin[op], line.made_begin[op + 1], step, line.runs)
        behind = _behind(line.made, line.made_begin[op], line.made_begin[op + 1], step, line.runs)
        low, high = line.used_begin[result], line.used_begin[result + 1]
        if _behind(line.used, low, high, step, line.runs) > min(behind, NEVER - 1):
            most = max(most, _raise(line.load, step, step + 1, -sign * of.bytes[result]))
            continue
        before = max(made, _before(line.used, low, high, step, line.runs))
        most = max(most, _raise(line.load, before + 1, step, sign * of.bytes[result]))
        work[DONE] += 60 + step - before
    return most


@compiled
def _is_needed(of: Given, line: Line, step: int) -> bool:
    """Tell whether a step that runs makes something that is read before it is made again."""
    op = line.step[step]
    behind = _behind(line.made, line.made_begin[op], line.made_begin[op + 1], step, line.runs)
    for i in range(of.results_begin[op], of.results_begin[op + 1]):
        result = of.results[i]
        low, high = line.used_begin[result], line.used_begin[result + 1]
        if _behind(line.used, low, high, step, line.runs) <= min(behind, NEVER - 1):
            return True
    return False


@compiled
def leave_out(of: Given, line: Line, step: int, limit: int, work: Int64s) -> bool:
    """Leave a repeat out, and those that nobody reads then, unless more than the limit is held."""
    line.runs[step] = False
    if _turn(of, line, step, 1, work) > limit:
        _turn(of, line, step, -1, work)
        line.runs[step] = True
        return False
    _tidy(of, line, step, work)
    return True


@compiled
def _tidy(of: Given, line: Line, step: int, work: Int64s) -> None:
    """Leave out the repeats that were only for one that is left out."""
    waiting, depth = line.waiting, 1
    waiting[0] = step
    while depth > 0:
        depth -= 1
        at = waiting[depth]
        op = line.step[at]
        for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
            maker = of.maker[of.inputs[i]]
            made = _before(line.made, line.made_begin[maker], line.made_begin[maker + 1], at, line.runs)
            if made >= 0 and line.again[made] and not _is_needed(of, line, made):
                line.runs[made] = False
                _turn(of, line, made, 1, work)
                waiting[depth] = made
                depth += 1


@compiled
def put_in(of: Given, line: Line, step: int, work: Int64s) -> None:
    """Let a repeat run, and ahead of it those that the order has for it."""
    waiting, marked, depth = line.waiting, line.marked, 1
    waiting[0] = lowest = step
    marked[step] = True
    while depth > 0:
        depth -= 1
        at = waiting[depth]
        lowest = min(lowest, at)
        op = line.step[at]
        for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
            maker = of.maker[of.inputs[i]]
            begin, last = line.made_begin[maker], line.made_begin[maker + 1] - 1
            while last >= begin and line.made[last] > at:
                last -= 1
            if last >= begin and not line.runs[line.made[last]] and not marked[line.made[last]]:
                marked[line.made[last]] = True
                waiting[depth] = line.made[last]
                depth += 1
    for at in range(lowest, step + 1):
        if marked[at]:
            marked[at] = False
            _turn(of, line, at, -1, work)
            line.runs[at] = True


@compiled
def again_ns(of: Given, line: Line) -> int:
    """Return what the repeats that run cost."""
    cost = 0
    for i in range(len(line.step)):
        if line.again[i] and line.runs[i]:
            cost += of.cost[line.step[i]]
    return cost


@compiled
def random(work: Int64s) -> float:
    """Return the next number of a row from 0 to 1. Source: G. Marsaglia, "Xorshift RNGs" (2003)."""
    x = work[SEED]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    work[SEED] = x
    return x / 4294967296.0


BY_COST, BY_WORTH = range(2)


@compiled
def prune(of: Given, line: Line, limit: int, by: int, disorder: float, work: Int64s) -> None:
    """Leave out repeats as long as the limit is kept, the dearest first, by cost or by that for their bytes."""
    n = len(line.step)
    repeats, dear = np.empty(n, np.int64), np.empty(n, np.float64)
    count = 0
    for i in range(n):
        if line.again[i] and line.runs[i]:
            op = line.step[i]
            made = 1
            for j in range(of.results_begin[op], of.results_begin[op + 1]):
                made += of.bytes[of.results[j]]
            cost = float(of.cost[op] + 1)
            if by == BY_WORTH:
                cost /= made
            if disorder > 0:
                cost *= np.exp(disorder * 2 * (random(work) + random(work) + random(work) - 1.5))
            repeats[count], dear[count] = i, -cost
            count += 1
    work[DONE] += n + 30 * count
    ranked = np.argsort(dear[:count], kind="mergesort")
    for i in ranked:
        if line.runs[repeats[i]]:
            leave_out(of, line, repeats[i], limit, work)


@compiled
def copied(line: Line) -> Line:
    """Return a line of which other steps may run."""
    return Line(
        line.step,
        line.runs.copy(),
        line.again,
        line.load.copy(),
        line.made_begin,
        line.made,
        line.used_begin,
        line.used,
        line.waiting,
        line.marked,
    )


@compiled
def take(line: Line, other: Line) -> None:
    """Let the same steps run as in another line of the same order."""
    line.runs[:] = other.runs
    line.load[:] = other.load


@compiled
def cost_of(of: Given, line: Line, limit: int, dear_ns: float) -> float:
    """Return what repeats take, and bytes held beyond a limit at so many ns each; infinite where those are 0."""
    excess = max(line.load.max() - limit, 0)
    if excess > 0 and dear_ns == 0:
        return np.inf
    return again_ns(of, line) + dear_ns * excess


@compiled
def disturbed(of: Given, line: Line, limit: int, dear_ns: float, until: int, work: Int64s) -> None:
    """Put repeats back at random and prune again, as long as there is work; keeps what costs least by ``cost_of``."""
    n = len(line.step)
    tried = copied(line)
    best = cost_of(of, line, limit, dear_ns)
    while work[DONE] < until:
        take(tried, line)
        width = max(2, int(n * 0.5 ** (1 + 6 * random(work))))
        begin = int(random(work) * n) - width // 2
        share = 0.1 + 0.6 * random(work)
        changed = False
        for i in range(max(begin, 0), min(begin + width, n)):
            if line.again[i] and not tried.runs[i] and random(work) < share:
                put_in(of, tried, i, work)
                changed = True
        work[DONE] += n + 200
        most = tried.load.max()
        target = max(limit, most)
        if dear_ns == 0:
            if not changed or most > limit:
                continue
        elif int(random(work) * 2):
            target = max(target, limit + int(random(work) * (line.load.max() - limit)))
        prune(of, tried, target, int(random(work) * 2), 0.2 + 1.2 * random(work), work)
        cost = cost_of(of, tried, limit, dear_ns)
        if cost <= best:
            best = cost
            take(line, tried)


@compiled
def dropping(of: Given, dropped: Bools, returns: Int64s, dear_ns: float, until: int, work: Int64s) -> None:
    """Drop or keep single results, as long as there is work; keeps what costs least by ``cost_of``."""
    order = np.empty(_MOST_LENGTH * len(of.rest), np.int64)
    best = np.inf
    change = np.empty(2, np.int64)
    while work[DONE] < until:
        n_changes = 0
        if best < np.inf:
            n_changes = 1 + int(random(work) * 2)
            for i in range(n_changes):
                change[i] = returns[int(random(work) * len(returns))]
                dropped[change[i]] ^= True
        n = order_of(of, dropped, order)
        cost = np.inf
        if n > 0:
            now = order[:n].copy()
            line = line_of(of, now, np.ones(n, np.bool_))
            cost = cost_of(of, line, of.numbers[LIMIT], dear_ns)
            work[DONE] += 60 * n
        work[DONE] += 40 * len(of.rest)
        if cost <= best:
            best = cost
        else:
            for i in range(n_changes):
                dropped[change[i]] ^= True
        if best == np.inf:
            return


_MOST_LENGTH = 3
"""An order by single drops has at most so many entries for each operation: longer ones make no good start."""
