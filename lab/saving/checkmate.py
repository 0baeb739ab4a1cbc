"""Checkmate: the schedule that drops and computes again at the least cost, by a mixed integer program.

``checkmate_lp`` rounds the program's relaxation in two phases. ``checkmate`` solves the program, and
rounds where that takes too long, as its authors advise for large graphs. Source:
P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys
2020), sections 4 and 5.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import ConfigError
from zico.lab.saving.graphs import judge
from zico.planning.saving.clock import now_s
from zico.planning.saving.recomputation import Graph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scipy.optimize import LinearConstraint

    from zico.planning.saving.recomputation import Order

# -- layers ----------------------------------------------------------------------------------------
#
# In the authors' graphs a node is a layer, and another one its gradient, whatever operations these
# consist of. A trace has views, statistics and updates between them. So an operation may be part of
# the one before it. That is so if it makes nothing of size and reads nothing of size but what that
# one has at hand. Of size are all results but the smallest ones, which together are a hundredth of
# the limit. Those are taken to be held all the time. Source: ``dfgraph_from_keras`` of the
# published code.

_SMALL_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class Layers:
    """A graph whose operations are layers of another one's."""

    graph: Graph
    parts: tuple[tuple[int, ...], ...]
    """The other graph's operations that each one consists of, in order."""

    def expanded(self, order: Order) -> Order:
        """Return the order of operations that an order of layers is."""
        return tuple(op for layer in order for op in self.parts[layer])


def layers(graph: Graph, limit_bytes: int) -> Layers:
    """Return the layers of a graph, none of which holds less than its operations do."""
    small, small_bytes = _small(graph, limit_bytes)
    of_size = [{r for r in each if r not in small} for each in graph.inputs]
    made = [[r for r in each if r not in small] for each in graph.results]
    again = [graph.until[op] > op if graph.until else True for op in range(len(graph))]
    parts: list[list[int]] = []
    at_hand: set[int] = set()
    for op in range(len(graph)):
        if parts and not made[op] and of_size[op] <= at_hand and again[op] == again[op - 1]:
            parts[-1].append(op)
        else:
            parts.append([op])
            at_hand = of_size[op] | {*made[op]}
    kept = [r for each in made for r in each]
    return Layers(_merged(graph, parts, of_size, kept, small_bytes), tuple(map(tuple, parts)))


def _small(graph: Graph, limit_bytes: int) -> tuple[set[int], int]:
    """Return the smallest results, which together are a hundredth of the limit at most, and their bytes."""
    found, total = set[int](), 0
    for r in sorted(range(len(graph.size_bytes)), key=lambda r: graph.size_bytes[r]):
        if total + graph.size_bytes[r] > _SMALL_SHARE * limit_bytes:
            break
        found.add(r)
        total += graph.size_bytes[r]
    return found, total


def _merged(
    graph: Graph,
    parts: Sequence[Sequence[int]],
    of_size: Sequence[set[int]],
    kept: Sequence[int],
    more_bytes: int,
) -> Graph:
    """Return the graph of parts in a row that make and read these results; more is held all the time."""
    node = [i for i, ops in enumerate(parts) for _ in ops]
    number = {r: place for place, r in enumerate(kept)}
    until = [min(graph.until[op] for op in ops) if graph.until else len(graph) for ops in parts]
    return Graph(
        cost_ns=tuple(sum(graph.cost_ns[op] for op in ops) for ops in parts),
        size_bytes=tuple(graph.size_bytes[r] for r in kept),
        inputs=tuple(
            tuple(sorted({number[r] for op in ops for r in of_size[op] if node[graph.maker[r]] != i}))
            for i, ops in enumerate(parts)
        ),
        n_forward=node[max(graph.n_forward, 1) - 1] + 1,
        until=tuple(
            i if last <= ops[0] else len(parts) if last >= len(graph) else node[last]
            for i, (ops, last) in enumerate(zip(parts, until, strict=True))
        ),
        rest_bytes=tuple(max(graph.rest(op) for op in ops) + more_bytes for ops in parts),
        maker=tuple(node[graph.maker[r]] for r in kept),
    )


# -- the program -----------------------------------------------------------------------------------
#
# In stage t operation t runs for the first time, and before it others may run again::
#
#     run[t, i]       operation i runs in stage t
#     stays[t, r]     result r is held when the stage begins
#     used[t, k]      bytes held when operation k has run, or was passed over, in stage t
#     frees[t, r, k]  result r goes behind operation k
#
# A result goes behind k exactly if k runs, nobody in the stage reads it later, and the next stage
# does not begin with it. Without the first of these, results would go that are not there.

_LP_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 1.0)
"""Of the limit, for which the relaxation is solved: the published tenth of slack first, then others until it fits."""
_ROUND_AT = 0.5
_PROVED = (0, 2)
"""What ``scipy.optimize.milp`` says where the answer is optimal, and where there is none."""
MOST_OPS = 256
"""The program has some five variables for each pair of operations: above, it is not tried."""
MOST_ALONE = 40
"""Operations for which the optimum is found and proved within seconds: of more, layers are made."""


class _OutOfTime(Exception):  # noqa: N818 - control flow, of this module alone
    """The deadline has passed while a program was written down or handed over."""


class _Program:
    """The mixed integer program as sparse rows."""

    def __init__(self, graph: Graph, limit_bytes: int, end_s: float) -> None:
        """Write the program down; raises ``_OutOfTime`` after ``end_s``, by ``clock.now_s``."""
        n = len(graph)
        self._end_s = end_s
        self.graph, self.n = graph, n
        self._columns: dict[tuple[str, int, int, int], int] = {}
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self.scale = max(1, *graph.size_bytes)
        self.limit = limit_bytes / self.scale
        for t in range(n):
            self._left_s()
            self._stage(t)

    def _left_s(self) -> float:
        left_s = self._end_s - now_s()
        if left_s <= 0:
            raise _OutOfTime
        return left_s

    def run(self, t: int, i: int) -> int:
        return self._column("run", t, i)

    def stays(self, t: int, r: int) -> int:
        return self._column("stays", t, r)

    def _column(self, kind: str, t: int, i: int, k: int = 0) -> int:
        return self._columns.setdefault((kind, t, i, k), len(self._columns))

    def _row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        self._rows.append((dict(terms), low, high))

    def _stage(self, t: int) -> None:
        size = [each / self.scale for each in self.graph.size_bytes]
        self._row({self.run(t, t): 1.0}, 1.0, 1.0)
        for i in range(t):
            if not self.graph.may_run(i, t):
                self._row({self.run(t, i): 1.0}, 0.0, 0.0)
        maker = self.graph.maker
        for i in range(t + 1):
            for r in set(self.graph.inputs[i]):
                self._row({self.run(t, i): 1.0, self.run(t, maker[r]): -1.0, self.stays(t, r): -1.0}, -np.inf, 0.0)
        for r in self.before(t):
            terms = {self.stays(t, r): 1.0, self.run(t - 1, maker[r]): -1.0}
            if maker[r] < t - 1:
                terms[self.stays(t - 1, r)] = -1.0
            self._row(terms, -np.inf, 0.0)
        self._memory(t, size)

    def before(self, t: int) -> list[int]:
        """Return the results of all operations before one."""
        return [r for op in range(t) for r in self.graph.results[op]]

    def _memory(self, t: int, size: Sequence[float]) -> None:
        """Count what is held in a stage, from one operation to the next."""
        graph = self.graph
        before = {self.stays(t, r): size[r] for r in self.before(t)}
        for k in range(t + 1):
            used = self._column("used", t, k)
            terms = {used: 1.0, self.run(t, k): -sum(size[r] for r in graph.results[k])}
            for column, factor in before.items():
                terms[column] = terms.get(column, 0.0) - factor
            self._row(terms, 0.0, 0.0)
            before = {used: 1.0}
            for r in {*graph.inputs[k], *graph.results[k]}:
                frees = self._column("frees", t, r, k)
                before[frees] = -size[r]
                later = [self.run(t, j) for j in graph.readers[r] if k < j <= t]
                hazards = {self.run(t, k): -1.0} | dict.fromkeys(later, 1.0)
                if t + 1 < self.n:
                    hazards[self.stays(t + 1, r)] = 1.0
                most = len(hazards)
                self._row(hazards | {frees: 1.0}, 0.0, np.inf)
                self._row(hazards | {frees: float(most)}, -np.inf, most - 1.0)

    @functools.cached_property
    def _constraints(self) -> LinearConstraint:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        terms = [row[0] for row in self._rows]
        begins = np.cumsum([0, *map(len, terms)])
        columns = np.fromiter(itertools.chain.from_iterable(terms), np.int64, begins[-1])
        values = np.fromiter(itertools.chain.from_iterable(each.values() for each in terms), np.float64, begins[-1])
        matrix = csr_array((values, columns, begins), shape=(len(terms), len(self._columns)))
        return LinearConstraint(matrix, [row[1] for row in self._rows], [row[2] for row in self._rows])

    def solve(self, share: float = 1.0, *, relaxed: bool = False) -> tuple[_Solution | None, bool]:
        """Return what stays and what runs, and whether that, or that there is nothing, is proved."""
        try:
            from scipy.optimize import Bounds, milp
        except ImportError:
            raise ConfigError("the programs of Checkmate need SciPy: pip install 'zico-memory[swap]'") from None
        n_columns = len(self._columns)
        cost, high, whole = np.zeros(n_columns), np.ones(n_columns), np.ones(n_columns)
        cost_scale = max(1, *self.graph.cost_ns)
        for (kind, t, i, _), column in self._columns.items():
            if kind == "run":
                cost[column] = self.graph.cost_ns[i] / cost_scale
            elif kind == "used":
                high[column], whole[column] = self.limit * share - self.graph.rest(t) / self.scale, 0
        if (high < 0).any():  # a share of the limit is below what is held besides results
            return None, False
        answer = milp(
            cost,
            constraints=self._constraints,
            bounds=Bounds(np.zeros(n_columns), high),
            integrality=np.zeros(n_columns) if relaxed else whole,
            options={"time_limit": self._left_s()},
        )
        return (None if answer.x is None else _Solution(self, answer.x)), answer.status in _PROVED


class _Solution:
    """A solution: which operations run, and which results stay; of a relaxation, what is above a half."""

    def __init__(self, program: _Program, x: Sequence[float]) -> None:
        self._program, self._x = program, x

    def runs(self, t: int, i: int) -> bool:
        return bool(self._x[self._program.run(t, i)] > _ROUND_AT)

    def cost_ns(self) -> float:
        """Return what all runs cost, shares of runs included."""
        n, cost_ns = self._program.n, self._program.graph.cost_ns
        return sum(cost_ns[i] * float(self._x[self._program.run(t, i)]) for t in range(n) for i in range(t + 1))

    def staying(self, t: int) -> set[int]:
        """Return the results that are held when a stage begins."""
        if t >= self._program.n:
            return set()
        return {r for r in self._program.before(t) if self._x[self._program.stays(t, r)] > _ROUND_AT}


def _rounded(graph: Graph, found: _Solution) -> Order:
    """Return the schedule of two-phase rounding: what stays is rounded, and the least runs that this needs."""
    order: list[int] = []
    made: set[int] = set()
    for t in range(len(graph)):
        held = {result for result in found.staying(t) if graph.maker[result] in made}
        wanted = {t} | {graph.maker[result] for result in found.staying(t + 1) - held}
        for op in range(t, -1, -1):
            if op in wanted:
                wanted |= {graph.maker[result] for result in set(graph.inputs[op]) - held}
        order += sorted(wanted)
        made |= wanted
    return tuple(order)


def least_cost_ns(graph: Graph, limit_bytes: int, deadline_s: float) -> float | None:
    """Return what every schedule within the limit costs at least, by the relaxation; ``None``: not known in time.

    What an operation with several results makes again while it is held is counted twice, as in the
    program. So it is no bound where schedules do that.
    """
    try:
        found, is_proved = _Program(graph, limit_bytes, now_s() + deadline_s).solve(relaxed=True)
    except _OutOfTime:
        return None
    return found.cost_ns() if found is not None and is_proved else None


def checkmate(graph: Graph, limit_bytes: int, deadline_s: float) -> tuple[Order | None, bool]:
    """Return the best schedule that the program has after half of the time, and whether it is proved to be the best.

    Where it has none by then, the relaxation is rounded.
    """
    end_s = now_s() + deadline_s
    found, is_proved = None, False
    with contextlib.suppress(_OutOfTime):
        found, is_proved = _Program(graph, limit_bytes, now_s() + deadline_s / 2).solve()
    if found is None and not is_proved:
        return checkmate_lp(graph, limit_bytes, max(0.0, end_s - now_s()))
    # Where operations have several results, it counts twice what is made again while it is held.
    is_proved &= graph.maker == tuple(range(len(graph)))
    if found is None:
        return None, is_proved
    return tuple(i for t in range(len(graph)) for i in range(t + 1) if found.runs(t, i)), is_proved


def checkmate_lp(graph: Graph, limit_bytes: int, deadline_s: float) -> tuple[Order | None, bool]:
    """Return the first rounded schedule that keeps the limit; nothing is proved of it."""
    with contextlib.suppress(_OutOfTime):
        program = _Program(graph, limit_bytes, now_s() + deadline_s)
        for share in _LP_SHARES:
            found, _ = program.solve(share, relaxed=True)
            order = None if found is None else _rounded(graph, found)
            if order is not None and judge(graph, order, limit_bytes).broken is None:
                return order, False
    return None, False
