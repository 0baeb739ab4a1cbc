"""The iteration that an order with repeats makes, and the order that dropping results makes.

A result that is made again is a new tensor there, and operations that run again use what they read.
So every planner of swaps can plan for it, and the judges of both stay what they are::

    chain       f0 f1 f2 b2 b1 b0         f0 lives from f0 to b0
    dropped     f0 f1 f2 b2 b1 f0' b0     f0 lives from f0 to f1, f0' from f0' to b0

Planners of jobs do the same in ``zico.planning.saving.iteration``. Nothing is shared with that.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.planning.saving.problem import PERSISTENT, READ, SwapProblem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zico.planning.saving.problem import Bools, Int64s
    from zico.planning.saving.recomputation import Graph, Order


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """An iteration in which operations run again, and what its operations and tensors were before."""

    problem: SwapProblem
    op: Int64s
    """The given problem's operation that each one is."""
    again: Bools
    """Whether it runs again."""
    tensor: Int64s
    """The given problem's tensor that each one is, or is again."""


def rewritten(problem: SwapProblem, graph: Graph, order: Order) -> Rewritten:
    """Return the iteration in which the operations of a problem's graph run in an order; none: the graph's own."""
    return _Rewriting(problem, graph, order or tuple(range(len(graph)))).done()


class _Rewriting:
    """Where operations stand in the new iteration, and the tensors one by one."""

    def __init__(self, problem: SwapProblem, graph: Graph, order: Order) -> None:
        self._problem, self._graph = problem, graph
        parts: list[list[int]] = [[] for _ in range(len(graph))]
        for op, node in enumerate(graph.op_of):
            parts[node].append(op)
        self._ops: list[int] = []
        self._first: dict[int, int] = {}
        self._places: list[list[int]] = [[] for _ in range(problem.n_ops)]
        self._is_first: list[bool] = []
        for node in order:
            for op in parts[node]:
                self._places[op].append(len(self._ops))
                self._is_first.append(op not in self._first)
                self._first.setdefault(op, len(self._ops))
                self._ops.append(op)
        self._tensors: list[int] = []
        self._lives: list[tuple[int, int]] = []
        self._accesses: list[dict[int, int]] = []

    def done(self) -> Rewritten:
        """Return it."""
        problem = self._problem
        result_of = {tensor: result for result, tensor in enumerate(self._graph.tensor)}
        for tensor in range(len(problem)):
            result = result_of.get(tensor)
            if result is None or len(self._places[self._writer(tensor)]) == 1:
                self._keep(tensor, is_result=result is not None)
            else:
                self._split(tensor)
        start_ns, duration_ns, period_ns = self._times()
        names = None if problem.op_names is None else tuple(problem.op_names[op] for op in self._ops)
        made_by, read_by = (
            None if each is None else tuple(each[tensor] for tensor in self._tensors)
            for each in (problem.made_by, problem.read_by)
        )
        made = SwapProblem(
            op_start_ns=start_ns,
            op_duration_ns=duration_ns,
            period_ns=period_ns,
            size_bytes=problem.size_bytes[self._tensors],
            alloc_op=np.array([begin for begin, _ in self._lives], np.int64),
            free_op=np.array([end for _, end in self._lives], np.int64),
            access_begin=np.cumsum([0, *map(len, self._accesses)]),
            access_op=np.array([op for uses in self._accesses for op in sorted(uses)], np.int64),
            access_kind=np.array([uses[op] for uses in self._accesses for op in sorted(uses)], np.int64),
            out=problem.out,
            back=problem.back,
            limit_bytes=problem.limit_bytes,
            op_names=names,
            made_by=made_by,
            read_by=read_by,
        )
        return Rewritten(made, np.array(self._ops), ~np.array(self._is_first), np.array(self._tensors))

    def _writer(self, tensor: int) -> int:
        return int(self._problem.access_op[self._problem.access_begin[tensor]])

    def _uses(self, tensor: int) -> list[tuple[int, int]]:
        problem = self._problem
        part = slice(problem.access_begin[tensor], problem.access_begin[tensor + 1])
        return list(zip(problem.access_op[part].tolist(), problem.access_kind[part].tolist(), strict=True))

    def _at(self, op: int) -> int:
        """Return where an operation runs first; one of the next iteration lies behind all of this one."""
        n = self._problem.n_ops
        return self._first[op % n] + op // n * len(self._ops)

    def _keep(self, tensor: int, *, is_result: bool) -> None:
        """Let a tensor live as it did, or, a result, to the last use, those of operations that run again included."""
        problem, n = self._problem, self._problem.n_ops
        persists = bool(problem.persistent[tensor])
        life = (PERSISTENT, PERSISTENT)
        if not persists:
            life = self._at(int(problem.alloc_op[tensor])), self._at(int(problem.free_op[tensor]))
            if is_result:
                life = life[0], max(life[1], *(self._places[op % n][-1] for op, _ in self._uses(tensor)))
        uses: dict[int, int] = {}
        for op, kind in self._uses(tensor):
            uses[self._at(op)] = uses.get(self._at(op), 0) | kind
            for again in self._places[op % n][1:]:
                if op < n and (persists or life[0] <= again <= life[1]):
                    uses[again] = uses.get(again, 0) | READ
        self._add(tensor, life, uses)

    def _split(self, tensor: int) -> None:
        """Let a result live from each run of its maker to its last reader before the next one."""
        writes = [op for op, kind in self._uses(tensor) if kind != READ]
        begins = list(self._places[writes[0]])
        begins[0] = min(begins[0], self._at(int(self._problem.alloc_op[tensor])))
        lives: list[dict[int, int]] = [{} for _ in begins]
        for op, kind in self._uses(tensor):
            for place in self._places[op]:
                uses = lives[bisect.bisect_right(begins, place) - 1]
                uses[place] = uses.get(place, 0) | kind
        for begin, uses in zip(begins, lives, strict=True):
            self._add(tensor, (begin, max(uses)), uses)

    def _add(self, tensor: int, life: tuple[int, int], uses: dict[int, int]) -> None:
        self._tensors.append(tensor)
        self._lives.append(life)
        self._accesses.append(uses)

    def _times(self) -> tuple[Int64s, Int64s, int]:
        """Return beginnings, durations and the period: pauses stay ahead of first runs."""
        problem = self._problem
        ends = problem.op_start_ns + problem.op_duration_ns
        pause = problem.op_start_ns - np.append(0, ends[:-1])
        duration_ns = problem.op_duration_ns[self._ops]
        pauses = np.where(self._is_first, pause[self._ops], 0)
        start_ns = np.cumsum(pauses + duration_ns) - duration_ns
        again_ns = int(duration_ns[~np.array(self._is_first)].sum())
        return start_ns, duration_ns, problem.period_ns + again_ns


# -- from what is dropped to an order --------------------------------------------------------------


def order_of(graph: Graph, dropped: Iterable[int]) -> Order | None:
    """Return the order in which results are dropped for their longest pause, and made again for its end.

    What has to be made again on the way stays until its last reader. ``None``: an operation that
    must not run again would have to.
    """
    leaves: dict[int, list[int]] = {}
    for result in dropped:
        uses = [graph.maker[result], *graph.readers[result]]
        if len(uses) > 1:
            pauses = np.diff(uses)
            leaves.setdefault(uses[int(np.argmax(pauses))], []).append(result)
    held: set[int] = set()
    order: list[int] = []
    for op in range(len(graph)):
        ahead = [op]
        while ahead:
            lacking = next((r for r in graph.inputs[ahead[-1]] if r not in held), None)
            if lacking is not None:
                ahead.append(graph.maker[lacking])
                continue
            runs = ahead.pop()
            if not graph.may_run(runs, op):
                return None
            order.append(runs)
            held.update(graph.results[runs])
        held.difference_update(leaves.get(op, ()))
    return tuple(order)
