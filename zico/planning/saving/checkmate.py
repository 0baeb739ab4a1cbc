"""Checkmate: the schedule that drops and computes again at the least cost, by a mixed integer program.

``checkmate`` solves the program and ``checkmate_lp`` rounds its relaxation in two phases. Source:
P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys
2020), sections 4 and 5.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import ConfigError
from zico.planning.saving.recomputation import judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zico.planning.saving.recomputation import Graph, Order

# -- the program -----------------------------------------------------------------------------------
#
# In stage t operation t runs for the first time, and before it others may run again:
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


class _Program:
    """The mixed integer program as sparse rows."""

    def __init__(self, graph: Graph, limit_bytes: int) -> None:
        n = len(graph)
        self.graph, self.n = graph, n
        self._columns: dict[tuple[str, int, int, int], int] = {}
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self.scale = max(1, *graph.size_bytes)
        self.limit = limit_bytes / self.scale
        for t in range(n):
            self._stage(t)

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

    def solve(self, deadline_s: float, share: float = 1.0, *, relaxed: bool = False) -> tuple[_Solution | None, bool]:
        """Return what stays and what runs, and whether that, or that there is nothing, is proved."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise ConfigError("the programs of Checkmate need SciPy: pip install 'zico[swap]'") from None
        n_columns = len(self._columns)
        cost, high, whole = np.zeros(n_columns), np.ones(n_columns), np.ones(n_columns)
        cost_scale = max(1, *self.graph.cost_ns)
        for (kind, t, i, _), column in self._columns.items():
            if kind == "run":
                cost[column] = self.graph.cost_ns[i] / cost_scale
            elif kind == "used":
                high[column], whole[column] = self.limit * share - self.graph.rest(t) / self.scale, 0
        entries = [(r, c, v) for r, (terms, _, _) in enumerate(self._rows) for c, v in terms.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), n_columns))
        low_of, high_of = np.array([row[1] for row in self._rows]), np.array([row[2] for row in self._rows])
        if (high < 0).any():  # a share of the limit is below what is held besides results
            return None, False
        answer = milp(
            cost,
            constraints=LinearConstraint(matrix, low_of, high_of),
            bounds=Bounds(np.zeros(n_columns), high),
            integrality=np.zeros(n_columns) if relaxed else whole,
            options={"time_limit": deadline_s},
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
    for t in range(len(graph)):
        held = {result for result in found.staying(t) if graph.maker[result] in order}
        wanted = {t} | {graph.maker[result] for result in found.staying(t + 1) - held}
        for op in range(t, -1, -1):
            if op in wanted:
                wanted |= {graph.maker[result] for result in set(graph.inputs[op]) - held}
        order += sorted(wanted)
    return tuple(order)


def least_cost_ns(graph: Graph, limit_bytes: int, deadline_s: float) -> float | None:
    """Return what every schedule within the limit costs at least, by the relaxation; ``None``: not known in time.

    What an operation with several results makes again while it is held is counted twice, as in the
    program, so that it is no bound where schedules do that.
    """
    program = _Program(graph, limit_bytes)
    found, is_proved = program.solve(deadline_s, relaxed=True)
    return found.cost_ns() if found is not None and is_proved else None


def checkmate(graph: Graph, limit_bytes: int, deadline_s: float) -> tuple[Order | None, bool]:
    """Return the best schedule that the program has at the deadline, and whether it is proved to be the best."""
    found, is_proved = _Program(graph, limit_bytes).solve(deadline_s)
    # Where operations have several results, it counts twice what is made again while it is held.
    is_proved &= graph.maker == tuple(range(len(graph)))
    if found is None:
        return None, is_proved
    return tuple(i for t in range(len(graph)) for i in range(t + 1) if found.runs(t, i)), is_proved


def checkmate_lp(graph: Graph, limit_bytes: int, deadline_s: float) -> tuple[Order | None, bool]:
    """Return the first rounded schedule that keeps the limit; nothing is proved of it."""
    program = _Program(graph, limit_bytes)
    end_s = time.monotonic() + deadline_s
    for share in _LP_SHARES:
        found, _ = program.solve(max(0.0, end_s - time.monotonic()), share, relaxed=True)
        order = None if found is None else _rounded(graph, found)
        if order is not None and judge(graph, order, limit_bytes).broken is None:
            return order, False
    return None, False
