"""Published planners together: many starts, each pruned to what the limit needs, and swaps for the rest.

Theory of operation
    A *start* is an order in which results are dropped and made again. Published planners say which,
    for the limit and for lower ones, or it is all that can be. ``pruned`` leaves out repeats, the
    dearest first, as long as the limit is kept. That is repeated with other orders of leaving out,
    drawn at random, while there is time. Starts that are pruned to higher limits hold too much; a
    planner of swaps moves the rest. The fastest iteration stays.

    The plans of Capuchin and SuperNeurons are among those that are compared.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import compiled
from zico.lab.saving import schedules
from zico.lab.saving.autoswap import AutoSwap
from zico.lab.saving.combined import (
    Capuchin,
    Mixing,
    SuperNeurons,
    can_return,
    cheap,
    limit_of,
    replayed,
    with_swaps,
    worth,
)
from zico.lab.saving.rewriting import order_of, rewritten
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving import pruning
from zico.planning.saving.clock import now_s
from zico.planning.saving.iteration import rows
from zico.planning.saving.mixed import SavePlan
from zico.planning.saving.problem import no_swaps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from zico.planning.saving.problem import Bools, Int64s, SwapPlanner, SwapProblem
    from zico.planning.saving.recomputation import Graph, Order

    Float64s = NDArray[np.float64]

_SHARES = (0.15, 0.3, 0.5, 0.75)
"""Of the way from the limit up to the peak, to which starts are pruned whose rest moves."""
_LOWER = (0.85, 0.7, 0.5)
"""Of the limit, for which published planners are asked: a plan for less can be cheaper once it is pruned."""
_TRIES = 4
_DRAWS, _MIXED = 32, 12
"""Orders of leaving out for each start, and starts to be mixed with swaps."""
_DISORDER = (0.3, 1.0)
"""Standard deviations of the logarithm of what a repeat is taken to cost, in orders drawn at random."""
_SEED = 5
_STARTING, _DRAWING, _PRUNING, _RANKING = 0.5, 0.55, 0.65, 0.8
"""Of the time, until when starts are tried, leaving out is drawn, starts are pruned to be mixed, and mixes ranked."""
_LAST = ("lms", "autotm", "swapadvisor")
"""Planners of swaps that are asked where nothing else has found a plan."""


class Portfolio(Mixing):
    """The fastest of many mixes."""

    name = "portfolio"

    def __init__(self, swaps: SwapPlanner | None = None) -> None:
        """Let this planner choose what moves; by default ``flow``."""
        self._swaps = swaps

    def found(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return a plan, or what is in the way."""
        from zico.lab.saving.flow import Flow

        search = _Search(problem, graph, deadline_s)
        search.compare()
        search.recompute()
        search.mix(self._swaps or Flow())
        if search.best is None and self._swaps is None:
            search.move_by_others()
        return search.best or search.why


class _Search:
    """The best plan so far."""

    def __init__(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> None:
        self.best: SavePlan | None = None
        self.best_ns = float("inf")
        """What an iteration takes by it."""
        self.why = NoPlan(Reason.NOT_FOUND, Portfolio.name, 0.0, "nothing was tried")
        self._problem, self._graph, self._limit = problem, graph, limit_of(problem)
        self._began_s, self._deadline_s = now_s(), deadline_s
        self._flat = flat(graph)
        self._tried: set[Order] = set()
        self._ranked: list[tuple[Order, bool]] = []
        """Starts, and whether what is dear is meant by worth; those first that alone gave the fastest iterations."""

    def _until(self, share: float) -> float:
        return self._began_s + share * self._deadline_s

    # -- recomputation alone -----------------------------------------------------------------------

    def recompute(self) -> None:
        """Try orders that keep the limit, if they can, without moving anything."""
        took_ns: dict[tuple[Order, bool], float] = {}
        for order in starts(self._problem, self._graph, self._flat, self._until(_STARTING)):
            for by_worth in (False, True):
                if (order, by_worth) not in took_ns and now_s() < self._until(_DRAWING):
                    took_ns[order, by_worth] = self._keep(order, dearness(self._graph, order, by_worth=by_worth))
            if now_s() > self._until(_STARTING):
                break
        self._ranked = sorted(took_ns, key=lambda each: took_ns[each])
        random, n = np.random.default_rng(_SEED), int(np.isfinite(list(took_ns.values())).sum())
        for _ in range(_DRAWS * n):
            if now_s() > self._until(_DRAWING):
                break
            order, by_worth = self._ranked[min(int(random.exponential(1.5)), n - 1)]  # mostly good ones
            dear = dearness(self._graph, order, by_worth=by_worth)
            self._keep(order, dear * np.exp(random.normal(0.0, random.choice(_DISORDER), len(dear))))

    def _keep(self, order: Order, dear: Float64s) -> float:
        """Prune an order to the limit and keep it if it is the best; returns what an iteration takes by it."""
        target, excess = self._limit, 0
        for _ in range(_TRIES):
            target -= excess  # tensors of the iteration end later than their last reader
            made = pruned(self._flat, order, target, dear, self._until(_PRUNING))
            duration_ns = self._problem.period_ns + self._again_ns(made)
            if duration_ns >= self.best_ns or (made in self._tried and not excess):
                return duration_ns if self.best is not None else float("inf")
            if made not in self._tried:
                self._tried.add(made)
                excess = rewritten(self._problem, self._graph, made).problem.peak_bytes - self._limit
            if excess <= 0:
                self._note(duration_ns, SavePlan(Portfolio.name, 0.0, no_swaps(Portfolio.name), made))
                return duration_ns
        return float("inf")

    def _note(self, duration_ns: float, plan: SavePlan) -> None:
        if duration_ns < self.best_ns:
            self.best, self.best_ns = plan, duration_ns

    # -- with swaps --------------------------------------------------------------------------------

    def mix(self, swaps: SwapPlanner) -> None:
        """Let a planner move what orders hold beyond the limit; a quick one says with which orders to begin."""
        again_ns = {order: self._again_ns(order) for order in self._mixes()}

        def can_win(order: Order) -> bool:
            return self._problem.period_ns + again_ns[order] < self.best_ns

        quick, took_ns = AutoSwap("doa"), {}
        for order in sorted(again_ns, key=lambda each: again_ns[each]):
            if can_win(order):
                took_ns[order] = self._move(quick, order, self._until(_RANKING))
        for order in sorted(took_ns, key=lambda each: (took_ns[each], again_ns[each])):
            if can_win(order):
                self._move(swaps, order, self._until(1.0))

    def _mixes(self) -> set[Order]:
        """Return the plain order and starts, pruned to the limit and to higher ones."""
        peak, orders = self._problem.peak_bytes, {tuple(range(len(self._graph)))}
        for share in (0.0, *_SHARES):
            target = self._limit + int(share * (peak - self._limit))
            some = scheduled("dtr", self._graph, target, (now_s() + self._until(_PRUNING)) / 2)
            for order, by_worth in (*self._ranked[:_MIXED], *((each, False) for each in some)):
                if now_s() < self._until(_PRUNING):
                    dear = dearness(self._graph, order, by_worth=by_worth)
                    orders.add(pruned(self._flat, order, target, dear, self._until(_PRUNING)))
        return orders

    def _again_ns(self, order: Order) -> int:
        return sum(self._graph.cost_ns[op] for op in order) - sum(self._graph.cost_ns)

    def _move(self, planner: SwapPlanner, order: Order, end_s: float) -> float:
        """Let a planner move what an order holds beyond the limit, in half of the time; returns what that takes."""
        left_s = end_s - now_s()
        if left_s <= 0:
            return float("inf")
        took_ns, found = with_swaps(planner, self._problem, self._graph, order, left_s / 2)
        if isinstance(found, NoPlan):
            self.why = found
        else:
            self._note(took_ns, found)
        return took_ns

    def compare(self) -> None:
        """Keep a published planner's plan, if that is faster."""
        for planner in (Capuchin(), SuperNeurons()):
            answer = planner.plan(self._problem, self._graph, self._deadline_s / 4)  # they hardly ever need it
            if not isinstance(answer, NoPlan):
                self._note(replayed(self._problem, self._graph, answer).duration_ns, answer)

    def move_by_others(self) -> None:
        """Take the best plan of other planners of swaps, where there is none."""
        from zico.planning.saving.registry import swap_planner

        order = tuple(range(len(self._graph)))
        for name in _LAST:
            self._move(swap_planner(name), order, max(self._until(1.0), now_s() + 0.1 * self._deadline_s))


# -- starts ----------------------------------------------------------------------------------------


def starts(problem: SwapProblem, graph: Graph, of: Flat, end_s: float) -> Iterator[Order]:
    """Yield orders by published planners and by none; each takes a third of the time that is left at most."""
    limit = limit_of(problem)
    everything = [r for r in range(len(graph.size_bytes)) if can_return(graph, r)]
    some = cheap(problem, graph)

    def part_s() -> float:
        return (2 * now_s() + end_s) / 3

    yield from ordered(graph, everything)
    yield from ordered(graph, some)
    yield from ordered(graph, Capuchin.dropped(problem, graph, part_s()))
    yield from scheduled("chen", graph, limit, part_s())
    yield from scheduled("dtr", graph, limit, part_s())
    yield from ordered(graph, greedy(graph, of, some, limit, part_s()))
    yield from ordered(graph, greedy(graph, of, everything, limit, part_s()))
    for share in _LOWER:
        lower = max(int(share * limit), 1)
        yield from ordered(graph, Capuchin.dropped(dataclasses.replace(problem, limit_bytes=lower), graph, part_s()))
        yield from scheduled("dtr", graph, lower, part_s())
        yield from scheduled("chen", graph, lower, part_s())


def ordered(graph: Graph, dropped: Collection[int]) -> Iterator[Order]:
    """Yield the order in which these results are dropped for their longest pause, if there is one."""
    order = order_of(graph, dropped)
    if order is not None:
        yield order


def scheduled(planner: str, graph: Graph, limit_bytes: int, end_s: float) -> Iterator[Order]:
    """Yield the schedule of a planner of ``schedules``, if it finds one in time."""
    left_s = end_s - now_s()
    if left_s > 0:
        answer = schedules.plan(planner, graph, limit_bytes, left_s)
        if not isinstance(answer, NoPlan):
            yield answer.order


def greedy(graph: Graph, of: Flat, candidates: Sequence[int], limit_bytes: int, end_s: float) -> list[int]:
    """Return results that are dropped, those worth most first, each if the peak is not higher without it.

    Source: Echo (B. Zheng et al., ISCA 2020), section 4, for any candidates.
    """
    dropped = np.zeros(len(graph.size_bytes), np.bool_)
    best = peak_of(of, dropped)
    for result in sorted(candidates, key=lambda r: -worth(graph, r)):
        if best <= limit_bytes or now_s() > end_s:
            break
        dropped[result] = True
        peak = peak_of(of, dropped)
        dropped[result] = 0 <= peak <= best
        best = peak if dropped[result] else best
    return [int(result) for result in np.flatnonzero(dropped)]


# -- pruning ---------------------------------------------------------------------------------------


def dearness(graph: Graph, order: Order, *, by_worth: bool) -> Float64s:
    """Return what each step of an order costs, for each byte that it makes, or by itself."""
    cost = np.array([graph.cost_ns[op] for op in order], np.float64)
    return cost / np.maximum([graph.made_bytes[op] for op in order], 1) if by_worth else cost


def pruned(of: Flat, order: Order, limit_bytes: int, dear: Float64s, end_s: float) -> Order:
    """Return an order with as few repeats as the limit allows.

    Args:
        of: The operations.
        order: An order of them.
        limit_bytes: A repeat goes if no more is held without it; or no more than before.
        dear: For each step; the dearest repeat is left out first.
        end_s: No repeat is tried after this, by ``clock.now_s``.
    """
    steps = np.array(order, np.int64)
    runs = np.ones(len(order), np.bool_)
    is_repeat = np.ones(len(order), np.bool_)
    is_repeat[np.unique(steps, return_index=True)[1]] = False
    repeats = np.flatnonzero(is_repeat)
    ranked = repeats[np.argsort(-dear[repeats], kind="stable")]
    limit_bytes = max(limit_bytes, _peak(of, steps, runs))
    for begin in range(0, len(ranked), _AT_ONCE):
        if now_s() > end_s:
            break
        _leave_out(of, steps, runs, ranked[begin : begin + _AT_ONCE], limit_bytes)
    return tuple(steps[runs].tolist())


_AT_ONCE = 256
"""Repeats that are tried between two looks at the clock."""


# -- compiled --------------------------------------------------------------------------------------


class Flat(NamedTuple):
    """A graph as arrays, named as in ``iteration.Given``: operation ``i`` has ``begin[i]`` to ``begin[i + 1]``."""

    bytes: Int64s
    """The bytes of each result."""
    rest: Int64s
    until: Int64s
    maker: Int64s
    inputs_begin: Int64s
    inputs: Int64s
    results_begin: Int64s
    results: Int64s
    leaves_begin: Int64s
    leaves: Int64s
    """What can be dropped behind an operation, for its longest pause."""


def flat(graph: Graph) -> Flat:
    """Return a graph as arrays."""
    n = len(graph)
    inputs = tuple(tuple(dict.fromkeys(each)) for each in graph.inputs)
    rest = np.array([graph.rest(op) for op in range(n)], np.int64)
    until = np.array(graph.until or [n] * n, np.int64)
    sizes, makers = np.array(graph.size_bytes, np.int64), np.array(graph.maker, np.int64)
    return Flat(sizes, rest, until, makers, *rows(inputs), *rows(graph.results), *rows(graph.leaves))


_MOST_RUNS = 8
"""Of each operation, in the mean: what takes more is no start."""


def peak_of(of: Flat, dropped: Bools) -> int:
    """Return the most bytes that are held in the order of ``order_of``; below 0: there is none."""
    order = np.empty(_MOST_RUNS * len(of.rest), np.int64)
    n = pruning.order_of(of, dropped, order)  # type: ignore[arg-type] # it reads the fields that both have
    return -1 if n < 0 else int(_peak(of, order[:n], np.ones(n, np.bool_)))


@compiled
def _leave_out(of: Flat, order: Int64s, runs: Bools, repeats: Int64s, limit_bytes: int) -> None:
    """Leave out each of some steps, unless more than the limit is held without it: all at once, or by halves."""
    waiting = np.empty((64, 2), np.int64)
    waiting[0, 0], waiting[0, 1], depth = 0, len(repeats), 1
    while depth > 0:
        depth -= 1
        begin, end = waiting[depth, 0], waiting[depth, 1]
        for i in range(begin, end):
            runs[repeats[i]] = False
        if _peak(of, order, runs) <= limit_bytes:
            continue
        for i in range(begin, end):
            runs[repeats[i]] = True
        if end - begin > 1:
            middle = (begin + end) // 2
            waiting[depth, 0], waiting[depth, 1] = middle, end
            waiting[depth + 1, 0], waiting[depth + 1, 1] = begin, middle  # the dearest first
            depth += 2


@compiled
def _peak(of: Flat, order: Int64s, runs: Bools) -> int:
    """Return the most bytes that are held at once when those steps run, from the last one to the first."""
    ahead, n = np.zeros(len(order), np.int64), 0
    for step in range(len(order)):
        ahead[step] = n
        if runs[step] and order[step] == n:
            n += 1
    needed = np.zeros(len(of.bytes), np.bool_)
    held = peak = 0
    for step in range(len(order) - 1, -1, -1):
        if not runs[step]:
            continue
        op = order[step]
        made = 0
        for i in range(of.results_begin[op], of.results_begin[op + 1]):
            result = of.results[i]
            made += of.bytes[result]
            if needed[result]:
                needed[result] = False
                held -= of.bytes[result]
        for i in range(of.inputs_begin[op], of.inputs_begin[op + 1]):
            result = of.inputs[i]
            if not needed[result]:
                needed[result] = True
                held += of.bytes[result]
        peak = max(peak, held + made + of.rest[ahead[step]])
    return peak
