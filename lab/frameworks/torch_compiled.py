"""What compiled graphs of PyTorch save is chosen by Zico's planners of recomputation.

Theory of operation
    ``torch.compile`` traces forward and backward pass into one joint graph. With an
    ``activation_memory_budget`` below 1, a solver says which of its dear operations run again in
    the backward pass. PyTorch's own solvers are knapsacks: they do not see that an operation that
    runs again needs its inputs, which may have to run again, too. ``Joint`` is that graph as
    ``zico.planning.saving.recomputation`` has it, with one operation between the passes::

        f0 f1 f2 | backward               all that the backward pass reads is held at |
        f0 f1 f2 | f0 f1 backward         f0 and f1 run again: f2 alone is held

    At ``|`` much is held besides, so that the limit binds there and nowhere else. A planner's
    schedule says what runs again. PyTorch then cuts the graph where least is saved; ``Solver``
    tries that cut for each proposal, PyTorch's own among them, and lets the judge say what it costs.

Guarantees
    An operation that draws random numbers does not run again, where PyTorch asks this solver.
    Where PyTorch's ``dp`` keeps the budget, no more is computed again than by it.

Known limitations
    PyTorch before 2.11 copies a solver for each graph, and writes it as JSON: there is none for it.
    PyTorch asks no solver where its own heuristics already save less than the budget.
    Only the operations that PyTorch calls dear have a cost, as its own solvers have it.
"""

from __future__ import annotations

import contextvars
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch._functorch import config
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, greedy_knapsack
from torch._functorch.partitioners import (
    MinCutOptions,
    estimate_runtime,
    min_cut_rematerialization_partition,
    solve_min_cut,
)
from torch._inductor import custom_graph_pass
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from zico.base.errors import ConfigError
from zico.lab.saving import checkmate, graphs, portfolio, schedules
from zico.lab.saving.graphs import judge
from zico.planning.packing.problem import NoPlan
from zico.planning.saving import recomputation
from zico.planning.saving.recomputation import Graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._functorch.partitioners import NodeInfo

    from zico.planning.saving.recomputation import Order

if not hasattr(custom_graph_pass, "CustomKnapsackSolver"):
    message = f"compiled graphs are planned with PyTorch 2.11 or later, and this is {torch.__version__}"
    raise ConfigError(message)

PLANNERS = ("zico", *schedules.PLANNERS)
SECONDS = 2.0


class Solver(custom_graph_pass.CustomKnapsackSolver):
    """Says what compiled graphs compute again, for ``torch._functorch.config.activation_memory_budget_solver``."""

    def __init__(self, planner: str = "zico", seconds: float = SECONDS) -> None:
        """Plan with one of ``PLANNERS``, for so many seconds for each graph."""
        self._planner, self._seconds = planner, seconds

    def uuid(self) -> Any:  # noqa: ANN401 - as torch's
        """Return what PyTorch's cache of compiled graphs knows this solver by."""
        files = (each.__file__ for each in (checkmate, graphs, portfolio, recomputation, schedules))
        return self._planner, self._seconds, custom_graph_pass.get_hash_for_files(files)

    def __call__(
        self,
        memory: list[float],
        joint_graph: Any,  # noqa: ANN401 - torch has no types
        max_memory: float,
        node_info: NodeInfo,
        candidates: list[Node],
    ) -> tuple[list[int], list[int]]:
        """Return which candidates are saved, and which may run again, by index.

        Args:
            memory: Of each candidate, as a share of what PyTorch saves without a budget.
            joint_graph: Forward and backward pass. Its random operations are marked to be saved.
            max_memory: The budget, as such a share.
            node_info: Which operations belong to which pass.
            candidates: Operations that run again only if this says so.
        """
        keep_random(joint_graph)
        joint = Joint(joint_graph, node_info, candidates)
        heaviest = int(np.argmax(memory))
        share_bytes = _nbytes(candidates[heaviest]) / memory[heaviest] if memory[heaviest] else 0.0
        budget_bytes = int(max_memory * share_bytes)
        costs = [float(joint.cost_of(node)) for node in candidates]
        proposals = [
            {candidates[i] for i in solve(memory, costs, max_memory)[2]} for solve in (dp_knapsack, greedy_knapsack)
        ]
        proposals += [joint.run_again(order) for order in _orders(self._planner, joint, budget_bytes, self._seconds)]
        best = min((joint.cut(proposal) for proposal in proposals), key=lambda cut: cut.rank(budget_bytes))
        again = [i for i, node in enumerate(candidates) if node in best.may_run]
        return [i for i in range(len(candidates)) if i not in set(again)], again


class Cut(NamedTuple):
    """Where PyTorch parts the passes."""

    may_run: frozenset[Node]
    saved: list[Node]
    saved_bytes: int
    """Bytes of results. The inputs of the graph are there in any case."""
    again_cost: int
    """What runs again costs, as PyTorch estimates it."""

    def rank(self, budget_bytes: int) -> tuple[int, int, int]:
        """Return what is less where the cut is better."""
        return max(0, self.saved_bytes - budget_bytes), self.again_cost, self.saved_bytes


class Joint:
    """A joint graph as operations of the forward pass, the point between the passes, and the backward pass."""

    def __init__(self, joint_graph: Any, node_info: NodeInfo, candidates: Sequence[Node]) -> None:  # noqa: ANN401
        self._joint_graph, self._info, self._candidates = joint_graph, node_info, frozenset(candidates)
        backward, no_operations = node_info.required_bw_nodes, ("placeholder", "output")
        self.nodes = [node for node in joint_graph.nodes if node not in backward and node.op not in no_operations]
        """What needs no gradient; behind it come the point between the passes, and the backward pass."""
        self._index = {node: i for i, node in enumerate(self.nodes)}
        self._costs = dict(zip(candidates, _costs(candidates), strict=True))
        _, banned = self._cut(())
        n, size = len(self.nodes), tuple(map(_nbytes, self.nodes))
        self.beside_bytes = sum(size)
        """Held besides at the point between the passes: a limit there is this and what may be saved."""
        read = [self._index[node] for node in self.nodes if self._is_read_backwards(node)]
        until = [
            i if node in banned - self._candidates or _is_random(node) else n + 2 for i, node in enumerate(self.nodes)
        ]
        self.graph = Graph(
            cost_ns=(*(self.cost_of(node) for node in self.nodes), 0, 0),
            size_bytes=(*size, 0, 0),
            inputs=(*(self._reads(node) for node in self.nodes), (), tuple(read)),
            n_forward=n,
            until=(*until, n, n + 1),
            rest_bytes=(*(0,) * n, self.beside_bytes, 0),
        )

    def _is_read_backwards(self, node: Node) -> bool:
        return any(user in self._info.required_bw_nodes and user.op != "output" for user in node.users)

    def _reads(self, node: Node) -> tuple[int, ...]:
        return tuple(sorted(self._index[each] for each in node.all_input_nodes if each in self._index))

    def cost_of(self, node: Node) -> int:
        """Return what an operation costs, by PyTorch's estimate; 0 if it is none of the dear ones."""
        return self._costs.get(node, 0)

    def _cut(self, may_run: Iterable[Node]) -> tuple[list[Node], Any]:
        options = MinCutOptions(
            ban_if_used_far_apart=False,
            ban_if_long_fusible_chains=False,
            ban_if_materialized_backward=False,
            ban_if_not_in_allowlist=False,
            ban_if_reduction=config.ban_recompute_reductions,
        )
        return solve_min_cut(self._joint_graph, self._info, options, set(may_run))

    def cut(self, may_run: Iterable[Node]) -> Cut:
        """Return where PyTorch cuts if these may run again, and what the judge says of that."""
        allowed = frozenset(may_run)
        saved, _ = self._cut(allowed)
        judged = judge(self.graph, self.order_of(saved))
        if judged.broken is not None:
            return Cut(allowed, saved, 1 << 62, 1 << 62)
        return Cut(allowed, saved, judged.peak_bytes - self.beside_bytes, judged.cost_ns - sum(self.graph.cost_ns))

    def order_of(self, saved: Iterable[Node]) -> Order:
        """Return the schedule in which all runs again that the backward pass needs and is not saved."""
        n, kept = len(self.nodes), {self._index[node] for node in saved if node in self._index}
        again, ahead = set[int](), list(self.graph.inputs[n + 1])
        while ahead:
            op = ahead.pop()
            if op not in kept and op not in again:
                again.add(op)
                ahead += self.graph.inputs[op]
        return (*range(n + 1), *sorted(again), n + 1)

    def run_again(self, order: Order) -> set[Node]:
        """Return the candidates that run again in a schedule."""
        n = len(self.nodes)
        behind = order[order.index(n) + 1 : -1]
        return {self.nodes[op] for op in behind if op < n} & self._candidates


class Passes(NamedTuple):
    """What the compiled graphs of a function keep between their passes, and what they compute; inputs aside."""

    saved_bytes: int
    again_flops: int
    """Operations that both passes run cost this."""
    flops: int
    """Both passes cost this, with what runs again."""


def passes_of(
    build: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], budget: float = 1.0, solver: Solver | str = "dp"
) -> Passes:
    """Return how ``torch.compile`` parts the passes of a function, which is traced on fake tensors and never run.

    Args:
        build: Returns the function and its arguments; runs on fake tensors, too.
        budget: Of memory between the passes, as ``torch._functorch.config.activation_memory_budget`` has it.
        solver: What says which operations run again, as ``activation_memory_budget_solver`` has it.

    Raises:
        ConfigError: No graph of the function has a backward pass.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import select_decomp_table

    found: list[tuple[Any, Any]] = []

    def part(joint: Any, inputs: Any, **how: Any) -> Any:  # noqa: ANN401 - torch's
        made = min_cut_rematerialization_partition(joint, inputs, **{**how, "compiler": "inductor"})
        found.append(made)
        return made

    def keep(module: Any, _inputs: Any) -> Any:  # noqa: ANN401 - torch's
        return make_boxed_func(module)

    decompositions = select_decomp_table()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=part, decompositions=decompositions)
    torch.compiler.reset()
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver),
        ):
            function, arguments = build()
            torch.compile(function, backend=backend)(*arguments)
    finally:
        torch.compiler.reset()  # nobody else should find these graphs
    if not found:
        message = "no graph of the function has a backward pass: return a function of what needs gradients"
        raise ConfigError(message)
    return Passes(*map(sum, zip(*(_passes(forward.graph, backward.graph) for forward, backward in found), strict=True)))


def _passes(forward: Any, backward: Any) -> Passes:  # noqa: ANN401 - torch has no types
    (outputs,) = next(node for node in forward.nodes if node.op == "output").args
    returned = {node for node in outputs if isinstance(node, Node) and node.op != "placeholder"}
    read = {node.name for node in backward.nodes if node.op == "placeholder"}
    saved_bytes = sum(_nbytes(node) for node in returned if node.name in read)
    first, second = (
        [node for node in graph.nodes if isinstance(node.target, OpOverload)] for graph in (forward, backward)
    )
    names = {node.name for node in first}
    costs = dict(zip([*first, *second], _costs([*first, *second]), strict=True))
    return Passes(saved_bytes, sum(costs[node] for node in second if node.name in names), sum(costs.values()))


def keep_random(joint_graph: Any) -> None:  # noqa: ANN401 - torch has no types
    """Let what draws random numbers be saved: PyTorch would draw others in the backward pass."""
    for node in joint_graph.nodes:
        if _is_random(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _nbytes(node: Node) -> int:
    """Return the bytes of an operation's result; of several results none, since those that take them out have them."""
    value = node.meta.get("val")
    return int(value.numel()) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def _costs(nodes: Sequence[Node]) -> list[int]:
    """Estimate by a thread of its own: in this one PyTorch has turned off what counts."""
    found: list[int] = []

    def estimate() -> None:
        found.extend(max(1, int(estimate_runtime(node))) for node in nodes)

    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(estimate))
    thread.start()
    thread.join()
    return found or [1] * len(nodes)


def _orders(planner: str, joint: Joint, budget_bytes: int, seconds: float) -> Iterator[Order]:
    """Yield schedules of a planner for a budget."""
    graph, limit = joint.graph, joint.beside_bytes + budget_bytes
    if planner != "zico":
        answer = schedules.plan(planner, graph, limit, seconds)
        if not isinstance(answer, NoPlan):
            yield answer.order
        return
    end_s = time.monotonic() + seconds
    flat = portfolio.flat(graph)
    n = len(joint.nodes)
    everything = (*range(n + 1), *(op for op in range(n) if graph.may_run(op, n + 1)), n + 1)
    yield everything
    for by_worth in (False, True):
        yield portfolio.pruned(flat, everything, limit, portfolio.dearness(graph, everything, by_worth=by_worth), end_s)
