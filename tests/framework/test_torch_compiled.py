"""Compiled graphs whose recomputation Zico plans: the same bits, within the budget, for no more than by dp."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import custom_graph_pass

if not hasattr(custom_graph_pass, "CustomKnapsackSolver"):
    pytest.skip("PyTorch before 2.11 has no class for solvers", allow_module_level=True)

from zico.lab.frameworks import torch_compiled
from zico.lab.frameworks.torch_compiled import Joint, Solver
from zico.lab.saving import schedules
from zico.lab.saving.schedules import Schedule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # what Inductor imports warns

BUDGETS = (0.4, 0.2)
PATIENCE_S = 300


class Block(nn.Module):
    """Attention and a perceptron, as in GPT-2."""

    def __init__(self, width: int, p: float) -> None:
        """Make it."""
        super().__init__()
        self.into = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.out = nn.Linear(width, width)
        inner = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.perceptron = nn.Sequential(nn.LayerNorm(width), *inner, nn.Dropout(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it with what is added."""
        n, length, width = x.shape
        query, key, value = self.into(x).view(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / 4).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(n, length, width))
        return x + self.perceptron(x)


class Residual(nn.Module):
    """Two convolutions with batch normalisation, as in ResNet."""

    def __init__(self, channels: int) -> None:
        """Make it."""
        super().__init__()
        half = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        other = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.inside = nn.Sequential(*half, nn.ReLU(), *other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it with what is added."""
        return torch.relu(x + self.inside(x))


def model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with fixed weights, and its batch."""
    torch.manual_seed(0)
    if kind == "resnet":
        ends = (nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        return nn.Sequential(ends[0], *(Residual(8) for _ in range(3)), *ends[1:]), torch.randn(4, 3, 16, 16)
    if kind == "perceptron":
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))), torch.randn(64, 16)
    p = 0.1 if kind == "dropout" else 0.0
    return nn.Sequential(*(Block(32, p) for _ in range(2))), torch.randn(2, 16, 32)


class Asked(Solver):
    """A solver that notes what it was asked, and what PyTorch's own would have had."""

    def __init__(self, planner: str = "zico") -> None:
        """Plan with a planner."""
        super().__init__(planner)
        self.budget_bytes = self.own_bytes = self.own_cost = self.again_cost = 0
        self.costs: dict[str, int] = {}
        self.joint: Joint | None = None

    def __call__(self, memory: Any, joint_graph: Any, max_memory: float, node_info: Any, candidates: Any) -> Any:  # noqa: ANN401 - torch's
        """Answer as the solver does."""
        answer = super().__call__(memory, joint_graph, max_memory, node_info, candidates)
        joint = self.joint = Joint(joint_graph, node_info, candidates)
        self.costs = {node.name: joint.cost_of(node) for node in candidates}
        self.budget_bytes = int(max_memory * torch_compiled._nbytes(candidates[0]) / memory[0])
        again = torch_compiled.dp_knapsack(memory, [float(cost) for cost in self.costs.values()], max_memory)[2]
        own = joint.cut(candidates[i] for i in again)
        self.own_bytes, self.own_cost = own.saved_bytes, own.again_cost
        self.again_cost = joint.cut(candidates[i] for i in answer[1]).again_cost
        return answer


class Ran(NamedTuple):
    """What a compiled training step did."""

    gradients: list[torch.Tensor]
    forward: Any
    backward: Any


def ran(kind: str, budget: float, solver: Solver | str) -> Ran:
    """Compile a model by this budget and train on its batch, once."""
    net, batch = model(kind)
    graphs: list[Any] = []

    def keep(module: Any, _inputs: Any) -> Any:  # noqa: ANN401 - torch's
        graphs.append(module.graph)
        return make_boxed_func(module)

    from torch._inductor.compile_fx import select_decomp_table

    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table
    )
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
        torch.manual_seed(1)
        torch.compile(net, backend=backend)(batch).square().mean().backward()
    return Ran([parameter.grad for parameter in net.parameters() if parameter.grad is not None], *graphs)


@functools.cache
def without_budget(kind: str) -> Ran:
    """Return what PyTorch does by itself."""
    return ran(kind, 1.0, "dp")


@functools.cache
def planned(kind: str, budget: float) -> tuple[Ran, Asked]:
    """Return what PyTorch does by Zico's planner."""
    asked = Asked()
    return ran(kind, budget, asked), asked


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["gpt", "dropout", "resnet"])
def test_gradients_are_the_same_bits(kind: str, budget: float) -> None:
    """Invariant 6: what runs again gives what it gave, and nothing random runs again."""
    found, _ = planned(kind, budget)
    expected = without_budget(kind)
    assert all(map(torch.equal, found.gradients, expected.gradients))
    assert len(found.gradients) == len(expected.gradients) > 0


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["gpt", "dropout", "resnet"])
def test_the_compiled_graphs_keep_the_budget(kind: str, budget: float) -> None:
    """The forward graph returns no more than the budget for the backward graph, inputs aside, and less than else."""
    found, asked = planned(kind, budget)
    assert 0 < saved_bytes(found) <= asked.budget_bytes
    assert saved_bytes(found) < saved_bytes(without_budget(kind))


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["gpt", "dropout", "resnet"])
def test_no_more_runs_again_than_by_dp(kind: str, budget: float) -> None:
    """By PyTorch's estimates, what both compiled graphs run costs no more than by dp, if that keeps the budget."""
    found, asked = planned(kind, budget)
    forward, backward = (
        {node.name for node in graph.nodes if node.op == "call_function"} for graph in (found.forward, found.backward)
    )
    again = sum(cost for name, cost in asked.costs.items() if name in forward & backward)
    assert again > 0
    assert again <= asked.own_cost or asked.own_bytes > asked.budget_bytes


@pytest.mark.timeout(PATIENCE_S)
def test_checkmate_plans_joint_graphs() -> None:
    """Its program proves what a compiled graph must run again, which the cut that PyTorch makes of our plan does."""
    _, asked = planned("perceptron", BUDGETS[0])
    joint = asked.joint
    assert joint is not None
    best = schedules.plan("checkmate", joint.graph, joint.beside_bytes + asked.budget_bytes, 60.0)
    assert isinstance(best, Schedule)
    assert best.optimal
    again_cost = sum(joint.graph.cost_ns[op] for op in best.order) - sum(joint.graph.cost_ns)
    assert joint.cut(joint.run_again(best.order)).again_cost == again_cost == asked.again_cost > 0


def saved_bytes(of: Ran) -> int:
    """Return the bytes of results that the forward graph returns for the backward graph."""
    (outputs,) = next(node for node in of.forward.nodes if node.op == "output").args
    kept = [node for node in outputs[1:] if isinstance(node, torch.fx.Node) and node.op != "placeholder"]
    return sum(torch_compiled._nbytes(node) for node in kept)
