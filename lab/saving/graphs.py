"""The graph of a traced iteration, and the judge of its schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.planning.saving.problem import READ, WRITE
from zico.planning.saving.recomputation import Graph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.planning.saving.problem import SwapProblem

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
