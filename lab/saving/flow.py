"""Our planner of swaps: the cheapest flow of parts, scheduled, replayed, and the best of some tries.

Theory of operation
    ``network.py`` chooses how many parts of each gap leave so that the waits are least.
    ``scheduled`` gives each part its time, and the compiled replay says what that costs. Small
    parts hold little memory while they move, but pay a latency each; how many latencies joining
    saves is not known beforehand. So parts of several sizes and several expectations are tried, and
    the plan with the least overhead stays. Where many tensors are smaller than a part, the flow
    counts in parts of their size, since each of them pays a latency.

    A part is so many whole regions, so that what leaves gives regions back. Without parts, whole
    tensors leave: those of which the flow takes most. Then single ones leave more or less, as long
    as the replay says that it helps.

Known limitations
    * A plan is not proved best: ``bound.py`` says how far it may be from it.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.units import KIB, MIB
from zico.lab.saving.autoswap import AutoSwap, Limited
from zico.lab.saving.bound import Rounding, fluid_of
from zico.lab.saving.network import cut_open, shares_within
from zico.lab.saving.replayer import Replayer
from zico.planning.saving.clock import now_s
from zico.planning.saving.problem import SwapPlan, Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from zico.lab.saving.bound import Fluid
    from zico.lab.saving.network import Latencies, Line
    from zico.planning.saving.problem import Int64s, Link, SwapProblem


# -- from parts that leave to a plan: which part is when on which link -----------------------------
#
# Out as early as possible: whenever the link is free, of the parts that may go the one whose gap
# closes first. Back as late as possible: the same, with time running backwards. With given parts no
# other schedule holds less memory at any instant, up to one part for each direction. Both are made
# for operations that wait as was chosen, and are then tied to the operations. A transfer is asked
# for at the operation that has begun by then.
#
# Neighbouring parts of a tensor that follow each other on both links become one transfer where what
# they then hold longer is free. That saves latencies::
#
#     limit    --------------------------------
#     load     ____/  a may be one     \_______
#     out      [a|a|a|a][b][b][b]                  b must free part by part: the load is at the limit


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """What leaves, gap by gap of a line."""

    size_bytes: Int64s
    """Of each gap, from the tensor's beginning."""
    part_bytes: int
    """What a transfer moves at most, unless parts are joined."""
    wait_ns: Int64s
    """How long is waited at each point of the line."""
    latency: Latencies
    """What share of the link's latency a part is expected to take in each of the line's segments, out and back."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """The parts as parallel arrays, gap by gap, with their times on the links."""

    gap: Int64s
    size_bytes: Int64s
    returns: NDArray[np.bool_]
    over: NDArray[np.bool_]
    """Away where the line is cut: it returns, and then leaves."""
    may_ns: Int64s
    """From when it may leave."""
    leave_ns: Int64s
    away_ns: Int64s
    """When it has left."""
    back_ns: Int64s
    """When it begins to return, or its tensor ends."""
    here_ns: Int64s

    def __len__(self) -> int:
        return len(self.gap)


@dataclasses.dataclass(frozen=True, eq=False)
class _Clock:
    """The operations in the line's order, with waits."""

    op: Int64s
    begin_ns: Int64s
    end_ns: Int64s


def scheduled(
    problem: SwapProblem, line: Line, chosen: Chosen, planner: str, counted_bytes: int | None = None
) -> tuple[SwapPlan, Latencies]:
    """Return the plan in which these parts leave and return, and what shares of latencies joining leaves.

    The plan's ``elapsed_s`` is 0. The shares are of parts of ``counted_bytes``, by default of the chosen ones.
    """
    waited_ns = np.cumsum(chosen.wait_ns)
    parts = _timed(problem, line, chosen, waited_ns)
    clock = _clock(problem, line, waited_ns)
    head = _joined(problem, clock, parts)
    heads = np.flatnonzero(head)
    size = np.add.reduceat(parts.size_bytes, heads) if len(heads) else parts.size_bytes
    access = line.fluid.access[parts.gap[heads]]
    tensor = np.searchsorted(problem.access_begin, access, side="right") - 1
    before = np.cumsum(parts.size_bytes) - parts.size_bytes
    starts = before[np.searchsorted(parts.gap, parts.gap[heads])] if len(heads) else heads
    here_ns = parts.here_ns[heads]
    return_ns = np.maximum(here_ns - _transfers_ns(problem.back, size), 0)
    # A link that is far behind ends a transfer out after its way back was to begin: then that waits for it.
    return_ns = np.where(parts.over[heads], return_ns, np.maximum(return_ns, parts.leave_ns[heads]))
    swaps, returns = np.arange(len(heads)), parts.returns[heads]
    # Asked for in the order of the schedule, as early as that allows: the peak may come before a link that is late.
    first = np.argsort(parts.leave_ns[heads], kind="stable")
    may_ns = np.maximum.accumulate(parts.may_ns[heads][first])
    gap = problem.access_op[access], problem.gap_ops[1][access]
    plan = SwapPlan(
        tensor=tensor,
        gap=access - problem.access_begin[tensor],
        first_byte=before[heads] - starts,
        size_bytes=size,
        out=_asked(swaps[first], may_ns, (gap[0][first], gap[1][first]), clock, delayed=False),
        back=_asked(swaps[returns], return_ns[returns], (gap[0][returns], gap[1][returns]), clock, delayed=True),
        planner=planner,
        elapsed_s=0.0,
    )
    begins_ns = line.point_ns + waited_ns
    joins = np.diff(np.append(heads, len(parts)))
    latencies = (counted_bytes or chosen.part_bytes) / size
    out = _latency(begins_ns, parts.leave_ns[heads], joins, parts.away_ns, latencies)
    return plan, (out, _latency(begins_ns, parts.here_ns[heads], joins, parts.back_ns, latencies))


def _transfers_ns(link: Link, size_bytes: Int64s, share: float = 1.0) -> Int64s:
    """Return how long transfers take, with a share of the latency."""
    return np.asarray(np.ceil(link.latency_ns * share + size_bytes * 1e9 / link.bandwidth), np.int64)


def _timed(problem: SwapProblem, line: Line, chosen: Chosen, waited_ns: Int64s) -> _Parts:
    opens_ns = (line.point_ns + waited_ns - chosen.wait_ns)[line.opens]
    closes_ns = (line.point_ns + waited_ns)[line.closes]
    begins_ns = line.point_ns + waited_ns
    gone_ns = np.where(line.over, begins_ns[-1], closes_ns)
    come_ns = np.where(line.over, begins_ns[0], opens_ns)
    n_parts = -(-chosen.size_bytes // chosen.part_bytes)
    gap = np.repeat(np.arange(len(n_parts)), n_parts)
    is_last = np.append(gap[1:] != gap[:-1], True)[: len(gap)]
    size = np.where(is_last, (chosen.size_bytes - (n_parts - 1) * chosen.part_bytes)[gap], chosen.part_bytes)
    out = _Link(begins_ns, chosen.latency[0] * problem.out.latency_ns)
    leave_ns, away_ns = _as_early((opens_ns, gone_ns), n_parts, _transfers_ns(problem.out, size, 0.0), out)
    returns = line.fluid.returns[gap]
    here_ns, back_ns = closes_ns[gap], closes_ns[gap]
    back = _Link(-begins_ns[::-1], chosen.latency[1][::-1] * problem.back.latency_ns)
    returning = np.where(line.fluid.returns, n_parts, 0)
    took_ns = _transfers_ns(problem.back, size[returns], 0.0)
    begin_ns, end_ns = _as_early((-closes_ns, -come_ns), returning, took_ns, back)
    here_ns[returns], back_ns[returns] = -begin_ns, -end_ns
    return _Parts(gap, size, returns, line.over[gap], opens_ns[gap], leave_ns, away_ns, back_ns, here_ns)


@dataclasses.dataclass(frozen=True, eq=False)
class _Link:
    """What a part takes besides its bytes, depending on when it begins."""

    since_ns: Int64s
    latency_ns: NDArray[np.float64]
    """From each of the times to the next one."""


def _as_early(window_ns: tuple[Int64s, Int64s], n_parts: Int64s, part_ns: Int64s, link: _Link) -> tuple[Int64s, Int64s]:
    """Return when each part begins and ends on a link that never rests while one may; gap by gap.

    Args:
        window_ns: When a gap's parts may begin, and by when they should have ended: who must first,
            goes first.
        n_parts: Of each gap.
        part_ns: What each part takes without latency.
        link: The latency.
    """
    first = (np.cumsum(n_parts) - n_parts).tolist()
    begin_ns, end_ns = (np.zeros(int(n_parts.sum()), np.int64) for _ in range(2))
    may, must, took, left = window_ns[0].tolist(), window_ns[1].tolist(), part_ns.tolist(), n_parts.tolist()
    since, latency = link.since_ns.tolist(), link.latency_ns.tolist()
    come = [gap for gap in np.argsort(window_ns[0], kind="stable").tolist() if left[gap]]
    waiting: list[tuple[int, int]] = []
    at, i = may[come[0]] if come else 0, 0
    while waiting or i < len(come):
        if not waiting:
            at = max(at, may[come[i]])
        while i < len(come) and may[come[i]] <= at:
            heapq.heappush(waiting, (must[come[i]], come[i]))
            i += 1
        gap = waiting[0][1]
        begin_ns[first[gap]] = at
        at += took[first[gap]] + int(latency[min(max(bisect.bisect_right(since, at) - 1, 0), len(latency) - 1)])
        end_ns[first[gap]] = at
        first[gap] += 1
        left[gap] -= 1
        if not left[gap]:
            heapq.heappop(waiting)
    return begin_ns, end_ns


def _latency(
    point_ns: Int64s, begin_ns: Int64s, joins: Int64s, end_ns: Int64s, latencies: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share of a latency that a part takes in each segment: less than 1 where parts are joined.

    Args:
        point_ns: Where segments begin, and the last one ends.
        begin_ns: When the first part of each transfer begins, or ends with time running backwards.
        joins: How many parts it has.
        end_ns: When each part ends, or begins.
        latencies: How many transfers of this size make up a part.
    """
    share = np.full(len(point_ns) - 1, np.inf)
    last = np.cumsum(joins) - 1
    other_ns = end_ns[last] if len(last) else begin_ns
    low = np.searchsorted(point_ns, np.minimum(begin_ns, other_ns), side="right") - 1
    high = np.searchsorted(point_ns, np.maximum(begin_ns, other_ns), side="left")
    for first, behind, count in zip(np.maximum(low, 0).tolist(), high.tolist(), latencies.tolist(), strict=True):
        share[first:behind] = np.minimum(share[first:behind], count)
    return np.where(share > 1, 1.0, share)


def _clock(problem: SwapProblem, line: Line, waited_ns: Int64s) -> _Clock:
    """Return when operations begin and end from the line's first point on."""
    n = problem.n_ops
    cut = int(line.fluid.point[line.cut])
    begins = (2 * np.arange(n) + 1 - cut) % (2 * n)  # of each operation, in points from the cut on
    order = np.argsort(begins)
    end_ns = problem.op_start_ns + problem.op_duration_ns
    ends_before = np.concatenate([[end_ns[-1] - problem.period_ns], end_ns[:-1]])
    cut_ns = (problem.op_start_ns if cut % 2 else ends_before)[cut // 2]
    at_ns = problem.op_start_ns[order] - cut_ns + problem.period_ns * (2 * order + 1 < cut)
    kept = (np.roll(line.fluid.point, -line.cut) - cut) % (2 * n)
    point = np.flatnonzero(line.piece == 0)[np.searchsorted(kept, begins[order], side="right") - 1]
    begin_ns = at_ns + waited_ns[point]
    return _Clock(order, begin_ns, begin_ns + problem.op_duration_ns[order])


def _joined(problem: SwapProblem, clock: _Clock, parts: _Parts) -> NDArray[np.bool_]:
    """Return which parts begin a transfer; those behind one join it."""
    head = np.ones(len(parts), bool)
    if problem.limit_bytes is None:
        return head
    away = np.zeros(len(clock.op) + 1, np.int64)
    first = np.searchsorted(clock.begin_ns, parts.away_ns)
    last = np.searchsorted(clock.end_ns, parts.back_ns, side="right")
    last = np.where(parts.over, np.minimum(last, first), np.maximum(last, first))
    np.add.at(away, first, parts.size_bytes)
    away[0] += parts.size_bytes[parts.over].sum()
    np.subtract.at(away, last, parts.size_bytes)
    room = problem.limit_bytes - problem.load_bytes[clock.op] + np.cumsum(away)[:-1]
    next_out, next_back = _followers(parts.leave_ns), _followers(-parts.here_ns)
    held = 0
    for part in range(1, len(parts)):
        before = part - 1
        held = held + int(parts.size_bytes[before]) if not head[before] else int(parts.size_bytes[before])
        if parts.gap[before] != parts.gap[part] or not parts.returns[part]:
            continue
        if next_out[before] != part or next_back[before] != part:
            continue
        leaving, returning = slice(first[before], first[part]), slice(last[part], last[before])
        if min(room[leaving].min(initial=held), room[returning].min(initial=held)) >= held:
            room[leaving] -= held
            room[returning] -= held
            head[part] = False
    return head


def _followers(begin_ns: Int64s) -> Int64s:
    """Return which part comes after each one; -1 after the last."""
    order = np.argsort(begin_ns, kind="stable")
    follower = np.full(len(order), -1)
    follower[order[:-1]] = order[1:]
    return follower


def _asked(swap: Int64s, begin_ns: Int64s, gap: tuple[Int64s, Int64s], clock: _Clock, *, delayed: bool) -> Transfers:
    """Return transfers in the order of their beginning, each asked for at the operation that has begun by then.

    Those that are not ``delayed`` are asked for at the operation before, where one begins just then: it may have
    to wait for them. Where operations take no time, several begin at once. Then it is the nearest
    one of those from the access before the gap to the gap's last operation, which ``gap`` has.
    """
    order = np.argsort(begin_ns, kind="stable")
    access, last = gap[0][order], gap[1][order]
    begun = np.searchsorted(clock.begin_ns, begin_ns[order], side="right" if delayed else "left")
    op = clock.op[np.maximum(begun - 1, 0)]
    n = len(clock.op)
    outside = (op - access) % n > last - access
    before = (access - op) % n < (op - last) % n if not delayed else np.zeros(len(op), bool)
    op = np.where(outside, np.where(before, access, last) % n, op)
    op_ns = clock.begin_ns[np.argsort(clock.op)[op]]
    delay_ns = np.maximum(begin_ns[order] - op_ns, 0) if delayed else np.zeros_like(op)
    by_op = np.argsort(op, kind="stable")
    return Transfers(swap[order][by_op], op[by_op], delay_ns[by_op])


# --------------------------------------------------------------------------------------------------

_MOST_SLOTS = 4000  # parts that a link can move in an iteration; smaller parts cost time and gain nothing
_PIECE = 0.5  # of the time that a part takes: how finely operations above the limit are looked at
_SIZES = (1, 0, 2, 3)  # powers of two by which the smallest part is multiplied; the best most often first
_ROUNDS = 2  # the second one knows what latencies joining saved in the first
_PART_MARGINS = (0.0, 0.25, 0.5, 1.0)  # of a part: what the schedule may hold more than the flow
_MARGINS = (0.0, 0.5, 1.0, 2.0)  # of the largest tensor: memory that whole tensors hold while they move
_LEAST_SHARES = (0.5, 0.05, 0.25, 0.75, 0.95)  # of a tensor that the flow takes: then all of it leaves
_TOGGLES = 60
_NUDGES = 20  # gaps of which a region less and one more are tried
_COUNTS = 0.1  # of a transfer's bytes: what a latency must be worth, so that small tensors are counted one by one
_SMALLER = 8  # times smaller than the mean tensor are the parts in which whole tensors' shares are counted
_SCORES = ("doa", "aoa", "wdoa")  # the published ones that take no search


@dataclasses.dataclass(frozen=True)
class FlowOptions:
    """How the planner searches."""

    region_bytes: int | None = 2 * MIB
    """Parts are multiples of it; ``None``: whole tensors move. Default: what CUDA maps at once."""
    least_bytes: int = 64 * KIB
    """Smaller tensors stay."""
    most_segments: int = 1200
    """In how many pieces an iteration is looked at."""
    enough: float = 0.0
    """An overhead that ends the search."""


class Flow(Limited):
    """Flow, schedule, replay."""

    def __init__(self, name: str = "flow", options: FlowOptions | None = None) -> None:
        """Search with these options; by default ``flow-whole`` moves whole tensors, and ``flow`` parts of them."""
        self.name = name
        self._options = options or FlowOptions(region_bytes=None if name == "flow-whole" else 2 * MIB)

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:
        """Return the plan of least overhead that was tried and keeps the limit, or that there is none."""
        best = _Best(Replayer(problem))
        tries = _in_parts if self._options.region_bytes else _in_whole
        plans = tries(problem, limit_bytes, self._options, best)
        for plan in itertools.chain(_published(problem, end_s - now_s()), plans):
            best.see(plan)
            if best.cost[0] <= self._options.enough or now_s() > end_s:
                break
        if best.plan is None:
            return f"nothing that was tried stays within {limit_bytes} bytes"
        return dataclasses.replace(best.plan, optimal=best.cost[0] <= 0)


class _Best:
    """The best plan seen so far."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self.plan: SwapPlan | None = None
        self.cost: tuple[float, int] = (math.inf, 0)
        self.is_last = False
        """The plan seen last is the best."""

    def see(self, plan: SwapPlan) -> None:
        """Replay a plan and keep it if it is better."""
        replayed = self._replayer.replay(plan)
        cost = (replayed.overhead, plan.moved_bytes)
        self.is_last = replayed.is_good and cost < self.cost
        if self.is_last:
            self.plan, self.cost = plan, cost


def _published(problem: SwapProblem, deadline_s: float) -> Iterator[SwapPlan]:
    """Yield what AutoSwap's quick scores make of it, so that we are never worse."""
    for by in _SCORES:
        plan = AutoSwap(by).plan(problem, deadline_s)
        if isinstance(plan, SwapPlan):
            yield plan


def _smallest(problem: SwapProblem, unit_bytes: int) -> int:
    """Return the least multiple of a unit of which a link does not move too many in an iteration."""
    fastest = max(problem.out.bandwidth, problem.back.bandwidth)
    return max(1, math.ceil(fastest * problem.period_ns / 1e9 / _MOST_SLOTS / unit_bytes)) * unit_bytes


def _in_parts(problem: SwapProblem, limit: int, options: FlowOptions, best: _Best) -> Iterator[SwapPlan]:
    """Yield plans that move tensors in parts of several sizes, then whole tensors.

    In between, the flow counts small tensors one by one, then gaps over the cut are used, then the best plan is
    changed in steps.
    """
    fluid = fluid_of(problem, limit, options.most_segments, Rounding.INWARD, options.least_bytes)
    region_bytes = options.region_bytes or 1
    smallest = best_bytes = _smallest(problem, region_bytes)
    if not len(fluid.access):
        return
    found: Try | None = None
    for part_bytes in [smallest << size for size in _SIZES]:
        for tried in _of_parts(problem, limit, fluid, (part_bytes, region_bytes, part_bytes)):
            yield tried.plan
            found = tried if best.is_last else found
            best_bytes = part_bytes if best.is_last else best_bytes
    small_bytes = _small(problem, fluid, smallest)
    for part_bytes in [smallest << size for size in _SIZES[:3]] if small_bytes else []:
        for tried in _of_parts(problem, limit, fluid, (part_bytes, region_bytes, small_bytes)):
            yield tried.plan
            found = tried if best.is_last else found
    for part_bytes in sorted({best_bytes, max(best_bytes >> 1, smallest)}, reverse=True):
        for level in [limit - int(margin * part_bytes) for margin in _PART_MARGINS]:
            for tried in _of_parts(problem, level, fluid, (part_bytes, region_bytes, part_bytes), over=True):
                yield tried.plan
                found = tried if best.is_last else found
    if found is not None:
        yield from nudged(problem, found, region_bytes, lambda: best.is_last)
    yield from _in_whole(problem, limit, options, best)


class Try(NamedTuple):
    """A plan, and what it was made of."""

    plan: SwapPlan
    line: Line
    chosen: Chosen


def _of_parts(
    problem: SwapProblem, level: int, fluid: Fluid, sizes: tuple[int, int, int], *, over: bool = False
) -> Iterator[Try]:
    """Yield plans that move tensors in parts of one size.

    Args:
        problem: The problem.
        level: What the flow is to keep, in bytes.
        fluid: The problem's.
        sizes: Of a part, of a region, and of the parts in which the flow counts. Parts of tensors
            that leave are multiples of a region.
        over: Use gaps on both sides of the cut; without such gaps there is no plan.
    """
    part_bytes, region_bytes, counted_bytes = sizes
    line = cut_open(fluid, max(int(problem.out.transfer_ns(counted_bytes) * _PIECE), 1), over=over)
    latency = (np.ones(len(line.load_bytes)),) * 2
    for _ in range(_ROUNDS if line.over.any() or not over else 0):
        shares = shares_within(line, counted_bytes, level, (problem.out, problem.back), latency)
        if shares is None:
            break
        leaves = np.minimum(-(-shares.size_bytes // region_bytes) * region_bytes, fluid.size_bytes)
        fewer = _carried(shares.size_bytes, fluid, region_bytes)
        out, back = (np.minimum(share * (part_bytes / counted_bytes), 1) for share in latency)
        chosen = Chosen(leaves, part_bytes, shares.wait_ns, (out, back))
        plan, latency = scheduled(problem, line, chosen, "", counted_bytes)
        yield Try(plan, line, chosen)
        if (fewer < leaves).any():
            chosen = dataclasses.replace(chosen, size_bytes=fewer)
            yield Try(scheduled(problem, line, chosen, "")[0], line, chosen)


def _small(problem: SwapProblem, fluid: Fluid, part_bytes: int) -> int:
    """Return the size of tensors below a part that have half of their bytes; 0: a latency is little beside it."""
    size = np.sort(fluid.size_bytes[fluid.size_bytes < part_bytes])
    until = np.cumsum(size)
    middle = int(size[np.searchsorted(until, until[-1] / 2)]) if len(size) else 0
    links = problem.out, problem.back
    counts = any(link.latency_ns * link.bandwidth / 1e9 > _COUNTS * middle for link in links)
    return max(middle, _smallest(problem, 1)) if middle and counts else 0


def nudged(problem: SwapProblem, found: Try, region_bytes: int, is_better: Callable[[], bool]) -> Iterator[SwapPlan]:
    """Yield a plan with a region, or the rest of a tensor, less of a gap, or more, as long as that helps.

    Gaps that open last have the least time, so they are tried first.

    Args:
        problem: The problem.
        found: What is changed.
        region_bytes: By how much.
        is_better: Tells whether the plan yielded last is better than all before; then it stays.
    """
    fluid, leaves = found.line.fluid, found.chosen.size_bytes
    whole = np.minimum(fluid.size_bytes, -(-leaves // region_bytes) * region_bytes + region_bytes)
    fewer = np.maximum((leaves - 1) // region_bytes, 0) * region_bytes
    opens = np.argsort(-found.line.opens[leaves > 0], kind="stable")
    gaps = np.flatnonzero(leaves > 0)[opens]
    for gap in gaps[:_NUDGES].tolist():
        for size in (int(fewer[gap]), int(whole[gap])):
            if size == leaves[gap]:
                continue
            tried = leaves.copy()
            tried[gap] = size
            yield scheduled(problem, found.line, dataclasses.replace(found.chosen, size_bytes=tried), "")[0]
            if is_better():
                leaves = tried
                break


def _carried(share_bytes: Int64s, fluid: Fluid, region_bytes: int) -> Int64s:
    """Return shares in whole regions, or whole tensors: what some gaps give too much, others need not.

    Small tensors come last, so that little is too much in the end.
    """
    leaves = np.zeros_like(share_bytes)
    surplus = 0
    for gap in np.lexsort((-fluid.opens, -np.minimum(fluid.size_bytes, region_bytes))).tolist():
        lacking = int(share_bytes[gap]) - surplus
        if share_bytes[gap] and lacking > 0:
            leaves[gap] = min(-(-lacking // region_bytes) * region_bytes, int(fluid.size_bytes[gap]))
        surplus += int(leaves[gap] - share_bytes[gap])
    return leaves


def _in_whole(problem: SwapProblem, limit: int, options: FlowOptions, best: _Best) -> Iterator[SwapPlan]:
    """Yield plans that move whole tensors: those of which enough leaves, then with single ones more or less."""
    fluid = fluid_of(problem, limit, options.most_segments, Rounding.INWARD, options.least_bytes)
    if not len(fluid.access):
        return
    part_bytes = _smallest(problem, max(options.least_bytes, int(fluid.size_bytes.mean()) // _SMALLER))
    line = cut_open(fluid, max(int(problem.out.transfer_ns(part_bytes) * _PIECE), 1))
    latency = (np.zeros(len(line.load_bytes)),) * 2
    whole = latency[0] + 1, latency[1] + 1
    largest = int(fluid.size_bytes.max())
    found: tuple[Int64s, Int64s, NDArray[np.float64]] | None = None
    for margin in _MARGINS:
        level = limit - int(margin * largest)
        shares = shares_within(line, part_bytes, level, (problem.out, problem.back), latency)
        if shares is None:
            continue
        share = shares.size_bytes / fluid.size_bytes
        for least in _LEAST_SHARES:
            leaves = fluid.size_bytes * (share >= least)
            yield scheduled(problem, line, Chosen(leaves, largest, shares.wait_ns, whole), "")[0]
            if best.is_last or found is None:
                found = leaves, shares.wait_ns, share
    if found is None:
        return
    leaves, wait_ns, share = found
    for gap in np.argsort(np.abs(share - np.mean(_LEAST_SHARES)), kind="stable")[:_TOGGLES].tolist():
        leaves[gap] = fluid.size_bytes[gap] - leaves[gap]
        yield scheduled(problem, line, Chosen(leaves, largest, wait_ns, whole), "")[0]
        if not best.is_last:
            leaves[gap] = fluid.size_bytes[gap] - leaves[gap]
