"""Recomputation: which results are dropped and computed again, on a graph of operations.

Operations have one order, in which each runs for the first time, and make results. A schedule is
the sequence of operations that run, repeats included. Everything else follows from it: a result is
held from the operation that makes it to the last one that reads it before it is made again::

    chain   f0 f1 f2 b2 b1 b0       f0 is held from the beginning to b0
    chain   f0 f1 f2 b2 b1 f0 b0    f0 is dropped behind f1, and made again for b0

Known limitations
    Memory is counted in bytes, without addresses. An operation that runs again makes all its results
    again. Random operations are taken to give the same when they run again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.errors import ProblemError
from zico.planning.saving.problem import READ, WRITE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.planning.saving.problem import SwapProblem

Order = tuple[int, ...]


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
