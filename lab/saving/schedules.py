"""Planners of recomputation by name, each a schedule of a graph's operations.

* ``chen``: the forward pass is cut into segments, of which only the last results stay. T. Chen et
  al., "Training Deep Nets with Sublinear Memory Cost" (2016), algorithm 3 with its search.
* ``dtr``: results are dropped when memory is full, the one with the least cost by bytes and
  staleness first. M. Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021), h_DTR.
* ``checkmate``, ``checkmate-lp``: ``zico.lab.saving.checkmate``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.base.units import format_bytes
from zico.lab.saving.checkmate import MOST_ALONE, MOST_OPS, checkmate, checkmate_lp, layers
from zico.lab.saving.graphs import judge
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zico.planning.saving.recomputation import Graph, Order

    Found = tuple[Order | None, bool]
    """What a planner has found within its seconds, and whether it has proved that nothing is better."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a planner answers. Believe it once the judge has."""

    order: Order
    planner: str
    elapsed_s: float
    optimal: bool = False
    """No schedule with the graph's order of first runs costs less."""


# -- Chen et al.: segments -------------------------------------------------------------------------


def chen(graph: Graph, limit_bytes: int, deadline_s: float) -> Found:
    """Return the cheapest schedule of segments that keeps the limit, over the bytes that a segment may make."""
    end_s = now_s() + deadline_s
    made = np.cumsum(graph.made_bytes[: graph.n_forward]).tolist()
    best: tuple[int, Order] | None = None
    bounds = sorted({0, *made})
    for bound in dict.fromkeys(each for step in (_COARSE, 1) for each in bounds[::step]):  # soon some of each size
        order = _segmented(graph, _segments(graph, bound))
        judged = judge(graph, order, limit_bytes)
        if judged.broken is None and (best is None or judged.cost_ns < best[0]):
            best = judged.cost_ns, order
        if now_s() > end_s:
            break
    return (best[1] if best else None), False


_COARSE = 128


def _segments(graph: Graph, bound_bytes: int) -> list[int]:
    """Return the segment of each operation of the forward pass: a new one begins when so many bytes are made."""
    segment, made = 0, 0
    found = []
    for op in range(graph.n_forward):
        found.append(segment)
        made += graph.made_bytes[op]
        if made > bound_bytes:
            segment, made = segment + 1, 0
    return found


def _segmented(graph: Graph, segment: Sequence[int]) -> Order:
    """Return the schedule that runs a segment again when the backward pass first needs something of its inside."""
    n = graph.n_forward
    stays = {op for op in range(n) if op == n - 1 or segment[op + 1] != segment[op]}
    reads = [[graph.maker[result] for result in sorted(graph.inputs[op])] for op in range(len(graph))]
    stays |= {j for op in range(n) for j in reads[op] if segment[j] != segment[op]}
    stays |= {j for op in range(n, len(graph)) for j in reads[op] if j < n and not graph.may_run(j, op)}
    order, again = list(range(n)), set[int]()
    for op in range(n, len(graph)):
        for j in reads[op]:
            if j < n and j not in stays and segment[j] not in again:
                again.add(segment[j])
                order += [i for i in range(n) if segment[i] == segment[j] and i not in stays]
        order.append(op)
    return tuple(order)


# -- DTR: drop when memory is full -----------------------------------------------------------------


def dtr(graph: Graph, limit_bytes: int, deadline_s: float) -> Found:
    """Return the schedule of a run that drops results when memory is full; ``None``: it cannot go on."""
    run = _Dtr(graph, limit_bytes, now_s() + deadline_s)
    done = all(run.make(op) for op in range(len(graph)))
    return (tuple(run.order) if done else None), False


_MOST_RUNS = 50
"""Of each operation, in the mean: a run that needs more is thrashing and has failed."""


class _Dtr:
    """A run: what is held, and since when nobody has read it."""

    def __init__(self, graph: Graph, limit_bytes: int, end_s: float) -> None:
        self.order: list[int] = []
        self._graph, self._room, self._end_s = graph, limit_bytes, end_s
        self._clock_ns = 0
        self._held: dict[int, int] = {}
        """Result -> the clock at its last use."""
        self._dropped: set[int] = set()
        self._first = 0
        """The operation that runs for the first time now."""

    def make(self, op: int) -> bool:
        """Run an operation, after those whose results it lacks; false if there is no room, or no end."""
        ahead = [op]
        while ahead:
            lacking = next((result for result in self._graph.inputs[ahead[-1]] if result not in self._held), None)
            if lacking is not None:
                ahead.append(self._graph.maker[lacking])
            elif not self._run(ahead.pop(), self._used_by(ahead)):
                return False
        return True

    def _used_by(self, ops: Sequence[int]) -> set[int]:
        return {result for op in ops for result in (*self._graph.inputs[op], *self._graph.results[op])}

    def _run(self, op: int, pinned: set[int]) -> bool:
        """Run an operation whose inputs are held; what others wait with is pinned."""
        graph, inputs, results = self._graph, self._graph.inputs[op], self._graph.results[op]
        if len(self.order) >= _MOST_RUNS * len(graph) or now_s() > self._end_s:
            return False
        new_bytes = sum(graph.size_bytes[result] for result in results if result not in self._held)
        may_run = graph.may_run(op, self._first)
        if not may_run or not self._make_room(new_bytes + graph.rest(self._first), pinned | self._used_by([op])):
            return False
        self._clock_ns += graph.cost_ns[op]
        self._room -= new_bytes
        self._held |= dict.fromkeys((*inputs, *results), self._clock_ns)
        self._dropped.difference_update(results)
        self.order.append(op)
        self._first += op == self._first
        for result in {*inputs, *results} - pinned:
            if all(reader < self._first for reader in graph.readers[result]):
                self._room += graph.size_bytes[result]  # nobody reads it any more
                del self._held[result]
        return True

    def _make_room(self, size_bytes: int, pinned: set[int]) -> bool:
        while self._room < size_bytes:
            free = [result for result in self._held if result not in pinned and self._can_return(result)]
            if not free:
                return False
            worst = min(free, key=self._score)
            self._room += self._graph.size_bytes[worst]
            del self._held[worst]
            self._dropped.add(worst)
        return True

    def _can_return(self, result: int) -> bool:
        readers = self._graph.readers[result]
        return not readers or self._graph.may_run(self._graph.maker[result], readers[-1])

    def _score(self, result: int) -> float:
        """Return h_DTR: the cost of having it and its dropped neighbours again, by bytes and staleness."""
        makers = {self._graph.maker[each] for each in (result, *self._dropped_around(result))}
        stale_ns = self._clock_ns - self._held[result] + 1
        cost_ns = sum(self._graph.cost_ns[op] for op in makers)
        return cost_ns / (max(self._graph.size_bytes[result], 1) * stale_ns)

    def _dropped_around(self, result: int) -> set[int]:
        """Return what is dropped and reaches the result, or is reached from it, by dropped results alone."""
        graph, around = self._graph, set[int]()

        def below(each: int) -> Iterable[int]:
            return graph.inputs[graph.maker[each]]

        def above(each: int) -> Iterable[int]:
            return (one for reader in graph.readers[each] for one in graph.results[reader])

        for next_to in (below, above):
            ahead = [result]
            while ahead:
                for each in next_to(ahead.pop()):
                    if each in self._dropped and each not in around:
                        around.add(each)
                        ahead.append(each)
        return around


# -- planners by name ------------------------------------------------------------------------------


def plan(name: str, graph: Graph, limit_bytes: int, deadline_s: float) -> Schedule | NoPlan:
    """Plan with one of ``PLANNERS``.

    Args:
        name: The planner.
        graph: The operations.
        limit_bytes: No more may be held at once.
        deadline_s: After so many seconds a planner gives the best that it has, or nothing.

    Returns:
        A schedule that the judge has believed, or why there is none.

    Raises:
        ConfigError: SciPy is not installed, which the programs need.
    """
    began_s = now_s()

    def none(reason: Reason, detail: str) -> NoPlan:
        return NoPlan(reason, name, now_s() - began_s, detail)

    if limit_bytes < graph.least_bytes:
        least = f"{format_bytes(graph.least_bytes)}, {graph.least_bytes} bytes"
        return none(Reason.INFEASIBLE, f"an operation needs {least}, at once: give that limit or a higher one")
    straight = tuple(range(len(graph)))
    if judge(graph, straight, limit_bytes).broken is None:
        return Schedule(straight, name, now_s() - began_s, optimal=True)
    if name.startswith("checkmate") and len(graph) > MOST_ALONE:
        by_layer = layers(graph, limit_bytes)
        if len(by_layer.graph) > MOST_OPS:
            what = f"a program for {len(by_layer.graph)} layers is too large, {MOST_OPS} are the most"
            return none(Reason.NOT_FOUND, f"{what}: ask chen or dtr")
        found, _ = PLANNERS[name](by_layer.graph, limit_bytes, deadline_s)
        order, optimal = None if found is None else by_layer.expanded(found), False
    else:
        order, optimal = PLANNERS[name](graph, limit_bytes, deadline_s)
    if order is None:
        if not optimal and now_s() - began_s >= deadline_s:
            reason, what = Reason.OUT_OF_TIME, f"nothing found in {deadline_s:.3g} s: give it longer"
        else:
            reason = Reason.INFEASIBLE if optimal else Reason.NOT_FOUND
            what = f"no schedule holds {format_bytes(limit_bytes)}, {limit_bytes} bytes, or less"
        return none(reason, what)
    broken = judge(graph, order, limit_bytes).broken
    if broken is not None:
        return none(Reason.NOT_FOUND, broken)
    return Schedule(order, name, now_s() - began_s, optimal)


PLANNERS: Mapping[str, Callable[[Graph, int, float], Found]] = {
    "chen": chen,
    "dtr": dtr,
    "checkmate": checkmate,
    "checkmate-lp": checkmate_lp,
}
