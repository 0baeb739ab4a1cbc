"""Recomputation: which results are dropped and computed again, on a graph of operations; published planners.

Operations have one order, in which each runs for the first time, and make results. A schedule is
the sequence of operations that run, repeats included. Everything else follows from it: a result is
held from the operation that makes it to the last one that reads it before it is made again::

    chain   f0 f1 f2 b2 b1 b0       f0 is held from the beginning to b0
    chain   f0 f1 f2 b2 b1 f0 b0    f0 is dropped behind f1, and made again for b0

Planners:

* ``chen``: the forward pass is cut into segments, of which only the last results stay. T. Chen et
  al., "Training Deep Nets with Sublinear Memory Cost" (2016), algorithm 3 with its search.
* ``dtr``: results are dropped when memory is full, the one with the least cost by bytes and
  staleness first. M. Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021), h_DTR.
* ``checkmate``: the mixed integer program of P. Jain et al., "Checkmate: Breaking the Memory Wall
  with Optimal Tensor Rematerialization" (MLSys 2020), section 4. It is optimal for the order.
* ``checkmate-lp``: its relaxation, and the two-phase rounding of section 5.

Known limitations
    Memory is counted in bytes, without addresses. An operation that runs again makes all its results
    again. Random operations are taken to give the same when they run again. No job runs these
    schedules yet.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.errors import ConfigError, ProblemError
from zico.base.units import format_bytes
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.problem import READ, WRITE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zico.planning.saving.problem import SwapProblem

Order = tuple[int, ...]
Found = tuple[Order | None, bool]
"""What a planner has found within its seconds, and whether it has proved that nothing is better."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """Operations in the order in which they first run.

    Raises:
        ProblemError: A number is out of range; the message names the first operation.
    """

    cost_ns: tuple[int, ...]
    size_bytes: tuple[int, ...]
    """Of each result; an operation's workspace is part of one."""
    inputs: tuple[tuple[int, ...], ...]
    """The results that each operation reads, all of operations before it."""
    n_forward: int
    """Operations of the forward pass: the first ones."""
    until: tuple[int, ...] = ()
    """The last operation ahead of whose first run each one may run again, itself: never; nothing: always."""
    rest_bytes: tuple[int, ...] = ()
    """What is held besides results while each operation is the next one to run for the first time; nothing: 0."""
    maker: tuple[int, ...] = ()
    """The operation that makes each result; nothing: each makes one, in the same order."""
    op_of: tuple[int, ...] = ()
    """Of a graph that was made of a problem: the operation that each of the problem's is part of."""
    tensor: tuple[int, ...] = ()
    """Of such a graph: the problem's tensor that each result is."""

    def __post_init__(self) -> None:
        """Check everything."""
        n, n_results = len(self.cost_ns), len(self.size_bytes)
        object.__setattr__(self, "maker", self.maker or tuple(range(n if self.size_bytes else 0)))
        if not n or len(self.maker) != n_results or len(self.inputs) != n:
            counts = f"{n} costs, {n_results} sizes, {len(self.maker)} makers, {len(self.inputs)} lists of inputs"
            raise ProblemError(f"{counts}: give one for every operation or result, and one operation at least")
        if len(self.until) not in (0, n):
            raise ProblemError(f"{len(self.until)} ends of {n} operations: give one each, or none")
        if len(self.rest_bytes) not in (0, n):
            raise ProblemError(f"{len(self.rest_bytes)} times other bytes for {n} operations: give one each, or none")
        if not 0 <= self.n_forward <= n:
            raise ProblemError(f"a forward pass of {self.n_forward} of {n} operations: give 0 to {n}")
        for r in range(n_results):
            if self.size_bytes[r] < 0 or not 0 <= self.maker[r] < n:
                what = f"has {self.size_bytes[r]} bytes and is made by operation {self.maker[r]}"
                raise ProblemError(f"result {r} {what}: give 0 bytes or more, and one of {n} operations")
        for i in range(n):
            if self.cost_ns[i] < 0:
                raise ProblemError(f"operation {i} takes {self.cost_ns[i]} ns: give 0 or more")
            wrong = next((r for r in self.inputs[i] if not 0 <= r < n_results or self.maker[r] >= i), None)
            if wrong is not None:
                raise ProblemError(f"operation {i} reads result {wrong}: give results of operations before it")

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.cost_ns)

    def may_run(self, op: int, ahead_of: int) -> bool:
        """Tell whether an operation may run ahead of another one's first run."""
        return op == ahead_of or not self.until or ahead_of <= self.until[op]

    def rest(self, op: int) -> int:
        """Return what is held besides results until an operation has run for the first time."""
        return self.rest_bytes[op] if self.rest_bytes else 0

    @functools.cached_property
    def results(self) -> tuple[tuple[int, ...], ...]:
        """Return the results of each operation."""
        found: list[list[int]] = [[] for _ in self.cost_ns]
        for result, op in enumerate(self.maker):
            found[op].append(result)
        return tuple(map(tuple, found))

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Return the operations that read each result, ascending."""
        found: list[list[int]] = [[] for _ in self.size_bytes]
        for op, inputs in enumerate(self.inputs):
            for result in dict.fromkeys(inputs):
                found[result].append(op)
        return tuple(map(tuple, found))

    @functools.cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Return the bytes of all results of each operation."""
        return tuple(sum(self.size_bytes[r] for r in results) for results in self.results)

    @property
    def least_bytes(self) -> int:
        """Return what the neediest operation takes at once: no schedule holds less."""
        read = (sum(self.size_bytes[r] for r in set(inputs)) for inputs in self.inputs)
        return max(self.rest(i) + self.made_bytes[i] + each for i, each in enumerate(read))


RESTORED_BYTES = 1 << 20
"""An operation that changes no more than this of what persists, a layer's statistics, may run again: it is put back."""


def graph_of(problem: SwapProblem) -> Graph:
    """Return the operations of a traced iteration, those that change a result in place as part of what made it.

    Results are the tensors that end within the iteration and are whole before others read them. All
    else is held as in the trace. An operation may run again until something that it reads is
    changed; never, if it changes something else. The forward pass ends with the peak.
    """
    n = problem.n_ops
    uses = [_uses(problem, tensor) for tensor in range(len(problem))]
    ends = np.asarray(~problem.persistent & (problem.free_op < n)).tolist()
    made = [ends[i] and _is_whole(writes, reads) for i, (writes, reads) in enumerate(uses)]
    is_part = np.zeros(n, bool)  # of the operation before it
    for tensor, (writes, _) in enumerate(uses):
        if made[tensor]:
            is_part[writes[1:]] = True
    node = (np.cumsum(~is_part) - 1).tolist()
    n_nodes = node[-1] + 1
    size, maker, tensor_of = list[int](), list[int](), list[int]()
    inputs, until = [set[int]() for _ in range(n_nodes)], [n_nodes] * n_nodes
    rest, changed = problem.load_bytes.copy(), [0] * n_nodes
    for tensor, (writes, reads) in enumerate(uses):
        size_bytes = int(problem.size_bytes[tensor])
        if made[tensor]:
            rest[problem.alloc_op[tensor] : problem.free_op[tensor] + 1] -= size_bytes
            for op in reads:
                if node[op] != node[writes[0]]:
                    inputs[node[op]].add(len(size))
            size.append(size_bytes)
            maker.append(node[writes[0]])
            tensor_of.append(tensor)
            continue
        end = n_nodes if problem.persistent[tensor] or not ends[tensor] else node[int(problem.free_op[tensor])]
        for op in writes:
            changed[node[op]] += size_bytes if problem.persistent[tensor] else RESTORED_BYTES + 1
        for op in reads:
            later = (node[write] for write in writes if node[write] > node[op])
            until[node[op]] = min(until[node[op]], *later, end)
    most = np.zeros(n_nodes, np.int64)
    np.maximum.at(most, node, rest)
    return Graph(
        tuple(np.bincount(node, problem.op_duration_ns).astype(int).tolist()),
        tuple(size),
        tuple(tuple(sorted(each)) for each in inputs),
        node[int(np.argmax(problem.load_bytes))] + 1,
        tuple(i if changed[i] > RESTORED_BYTES else until[i] for i in range(n_nodes)),
        tuple(most.tolist()),
        tuple(maker),
        tuple(node),
        tuple(tensor_of),
    )


def _uses(problem: SwapProblem, tensor: int) -> tuple[list[int], list[int]]:
    """Return the operations that write a tensor, and those that read it."""
    part = slice(problem.access_begin[tensor], problem.access_begin[tensor + 1])
    ops, kinds = problem.access_op[part] % problem.n_ops, problem.access_kind[part]
    return ops[kinds & WRITE > 0].tolist(), ops[kinds & READ > 0].tolist()


def _is_whole(writes: Sequence[int], reads: Sequence[int]) -> bool:
    """Tell whether operations in a row write a tensor, and the first of them is the first to use it."""
    in_a_row = list(writes) == list(range(writes[0], writes[0] + len(writes))) if writes else False
    return in_a_row and writes[0] not in reads and all(op >= writes[0] for op in reads)


class Judged(NamedTuple):
    """What a schedule takes."""

    cost_ns: int
    peak_bytes: int
    broken: str | None
    """What is wrong with it."""


def judge(graph: Graph, order: Sequence[int], limit_bytes: int | None = None) -> Judged:
    """Run a schedule step by step; tells what is wrong with it. Shares no code with planners."""
    cost = peak = held = first = 0
    last_reader: dict[tuple[int, int], int] = {}
    made_at: dict[int, int] = {}
    frontier = []
    for step, op in enumerate(order):
        if op > first:
            return Judged(0, 0, f"step {step}: operation {op} runs before operation {first} has")
        if not graph.may_run(op, first):
            return Judged(0, 0, f"step {step}: operation {op} runs again ahead of {first}, and must not")
        for result in graph.inputs[op]:
            last_reader[result, made_at[graph.maker[result]]] = step
        made_at[op] = step
        frontier.append(first)
        first += op == first
    if first < len(graph):
        return Judged(0, 0, f"operation {first} never runs")
    dies: list[list[int]] = [[] for _ in order]
    for step, op in enumerate(order):
        for result in graph.results[op]:
            dies[last_reader.get((result, step), step)].append(result)
    for step, op in enumerate(order):
        cost += graph.cost_ns[op]
        held += sum(graph.size_bytes[result] for result in graph.results[op])
        peak = max(peak, held + graph.rest(frontier[step]))
        held -= sum(graph.size_bytes[dead] for dead in dies[step])
    if limit_bytes is not None and peak > limit_bytes:
        return Judged(cost, peak, f"{peak} bytes are held at once: the limit is {limit_bytes}")
    return Judged(cost, peak, None)


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
    end_s = time.monotonic() + deadline_s
    made = np.cumsum(graph.made_bytes[: graph.n_forward]).tolist()
    best: tuple[int, Order] | None = None
    bounds = sorted({0, *made})
    for bound in dict.fromkeys(each for step in (_COARSE, 1) for each in bounds[::step]):  # soon some of each size
        order = _segmented(graph, _segments(graph, bound))
        judged = judge(graph, order, limit_bytes)
        if judged.broken is None and (best is None or judged.cost_ns < best[0]):
            best = judged.cost_ns, order
        if time.monotonic() > end_s:
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
    run = _Dtr(graph, limit_bytes, time.monotonic() + deadline_s)
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
        if len(self.order) >= _MOST_RUNS * len(graph) or time.monotonic() > self._end_s:
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
        """Tell whether the result can be made again for its last reader."""
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


# -- Checkmate -------------------------------------------------------------------------------------
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


def checkmate(graph: Graph, limit_bytes: int, deadline_s: float) -> Found:
    """Return the best schedule that the program has at the deadline."""
    found, is_proved = _Program(graph, limit_bytes).solve(deadline_s)
    # Where operations have several results, it counts twice what is made again while it is held.
    is_proved &= graph.maker == tuple(range(len(graph)))
    if found is None:
        return None, is_proved
    return tuple(i for t in range(len(graph)) for i in range(t + 1) if found.runs(t, i)), is_proved


def checkmate_lp(graph: Graph, limit_bytes: int, deadline_s: float) -> Found:
    """Return the first rounded schedule that keeps the limit."""
    program = _Program(graph, limit_bytes)
    end_s = time.monotonic() + deadline_s
    for share in _LP_SHARES:
        found, _ = program.solve(max(0.0, end_s - time.monotonic()), share, relaxed=True)
        order = None if found is None else _rounded(graph, found)
        if order is not None and judge(graph, order, limit_bytes).broken is None:
            return order, False
    return None, False


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
    began_s = time.monotonic()

    def none(reason: Reason, detail: str) -> NoPlan:
        return NoPlan(reason, name, time.monotonic() - began_s, detail)

    if limit_bytes < graph.least_bytes:
        least = f"{format_bytes(graph.least_bytes)}, {graph.least_bytes} bytes"
        return none(Reason.INFEASIBLE, f"an operation needs {least}, at once: give that limit or a higher one")
    if len(graph) > MOST_OPS and name.startswith("checkmate"):
        what = f"a program for {len(graph)} operations is too large, {MOST_OPS} are the most"
        return none(Reason.NOT_FOUND, f"{what}: ask chen or dtr")
    straight = tuple(range(len(graph)))
    if judge(graph, straight, limit_bytes).broken is None:
        return Schedule(straight, name, time.monotonic() - began_s, optimal=True)
    order, optimal = PLANNERS[name](graph, limit_bytes, deadline_s)
    if order is None:
        reason = Reason.INFEASIBLE if optimal else Reason.NOT_FOUND
        return none(reason, f"no schedule holds {format_bytes(limit_bytes)}, {limit_bytes} bytes, or less")
    broken = judge(graph, order, limit_bytes).broken
    if broken is not None:
        return none(Reason.NOT_FOUND, broken)
    return Schedule(order, name, time.monotonic() - began_s, optimal)


PLANNERS: Mapping[str, Callable[[Graph, int, float], Found]] = {
    "chen": chen,
    "dtr": dtr,
    "checkmate": checkmate,
    "checkmate-lp": checkmate_lp,
}
