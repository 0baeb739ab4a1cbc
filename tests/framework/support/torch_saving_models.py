"""Trainings of every kind, with limits of 60 % of their own peaks or alone; run by ``test_torch_saving.py``.

    torch_saving_models.py RESULTS RUNS KIND ...

RUNS are those of ``FOLLOWS``, with commas between them, and only count in a pool. Writes, as JSON by
kind: the bits of losses and weights, and, in a pool, what was moved.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.swap.learning import Learner

SHARE = 0.6
Loss = torch.Tensor
MIB = 1 << 20
DEADLINE_S = 60.0
"""For a plan, also on a machine that is busy."""


def blocks(n: int, *, p: float = 0.0) -> list[nn.Module]:
    """Return convolutions with 2 MiB feature maps, batch normalisation, ReLU in place and dropout."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(n):
        layers += [nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(p), nn.Conv2d(8, 8, 3, padding=1)]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]


def images() -> torch.Tensor:
    """Return a batch."""
    return torch.randn(64, 3, 32, 32)


class Trained:
    """A model in training: a step returns a loss and is an iteration."""

    share = SHARE
    iterations = 5

    def __init__(self, model: nn.Module) -> None:
        """Train with momentum."""
        self.model = model
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]

    def forward(self) -> Loss:
        """Return a loss."""
        return self.model(images()).square().mean()

    def step(self) -> float:
        """Train on one batch."""
        loss = self.forward()
        loss.backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return loss.item()


class Resnet(Trained):
    """Residual blocks, whose input is saved and used again."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__(nn.ModuleList([nn.Sequential(*blocks(2, p=0.1)[:-3]), nn.Sequential(*blocks(2))]))

    def forward(self) -> Loss:
        """Add the first part's output to what its last block makes of it."""
        first, second = self.model
        features = first(images())
        features = nn.functional.relu(features + torch.sigmoid(features), inplace=True)
        return second(features[:, :3]).square().mean() + features.tanh().mean()


class Transformer(Trained):
    """Two encoder layers with dropout."""

    def __init__(self) -> None:
        """Make it, with AdamW."""
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-3)]

    def forward(self) -> Loss:
        """Return a loss of random texts."""
        return self.model(torch.randn(32, 64, 64)).square().mean()


class Views(Trained):
    """Halves, transposed views and strides of one storage, each saved by an operation of its own."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__(nn.Sequential(*[nn.Linear(256, 512) for _ in range(6)]))

    def forward(self) -> Loss:
        """Multiply views with one another."""
        features = torch.randn(1024, 256)
        for layer in self.model:
            first, second = layer(features).chunk(2, dim=1)
            features = (first * second).tanh() + (first.t() @ second)[:1, ::1] * second[::2].mean()
        return features.square().mean()


class Accumulated(Trained):
    """Three micro-batches make an iteration."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__(nn.Sequential(*blocks(6)))

    def step(self) -> float:
        """Step after the third."""
        total = 0.0
        for _ in range(3):
            loss = self.forward()
            loss.backward()
            total += loss.item()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return total


class Pair(Trained):
    """Two models with an optimizer each, stepped in turn."""

    def __init__(self) -> None:
        """Make both."""
        super().__init__(nn.ModuleList([nn.Sequential(*blocks(6)), nn.Sequential(*blocks(6))]))
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.model]

    def step(self) -> float:
        """Step one after the other."""
        total = 0.0
        for part, optimizer in zip(self.model, self.optimizers, strict=True):
            loss = part(images()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        return total


class Checkpointed(Trained):
    """Blocks that are computed again in the backward pass, between blocks that are not."""

    def __init__(self) -> None:
        """Make it."""
        parts = [nn.Sequential(*blocks(3)[:-3]), nn.Sequential(*blocks(1)[1:-3]), nn.Sequential(*blocks(2)[1:])]
        super().__init__(nn.ModuleList(parts))

    def forward(self) -> Loss:
        """Checkpoint the one in the middle."""
        first, middle, last = self.model
        return last(checkpoint(middle, first(images()), use_reentrant=False)).square().mean()


class Pooled(Trained):
    """Convolutions and ReLU before pooling, then dropout behind ReLU."""

    def __init__(self) -> None:
        """Make it."""
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=before > 3), nn.MaxPool2d(2)]
        linear = [nn.Flatten(1, 3), nn.Linear(1024, 512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 4)]
        super().__init__(nn.Sequential(*layers, *linear))


class Penalised(Trained):
    """A gradient of a gradient: what a backward pass saves is used by another.

    The gradients that the engine itself holds meanwhile are nobody's saved tensors: at 60 % they
    alone do not fit.
    """

    share = 0.75

    def __init__(self) -> None:
        """Make it."""
        super().__init__(nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(256, 256), nn.Tanh())]))

    def forward(self) -> Loss:
        """Add the norm of the gradient with respect to the input."""
        inputs = torch.randn(1024, 256, requires_grad=True)
        loss = self.model(inputs).square().mean()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()


class Retained(Trained):
    """A graph that is gone through twice."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__(nn.Sequential(*blocks(3)))

    def step(self) -> float:
        """Go back twice, then step."""
        loss = self.forward()
        loss.backward(retain_graph=True)
        loss.backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return loss.item()


KINDS = (Resnet, Transformer, Views, Accumulated, Pair, Checkpointed, Pooled, Penalised, Retained)


def train(kind: Callable[[], Trained], after_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train from the same seed as ever; returns bits."""
    torch.manual_seed(1)
    trained = kind()
    losses = []
    for _ in range(trained.iterations):
        losses.append(trained.step().hex())
        after_step()
    weights = hashlib.sha256()
    for weight in trained.model.parameters():
        weights.update(weight.detach().numpy().tobytes())
    return {"losses": losses, "weights": weights.hexdigest()}


FOLLOWS = {"needed": False, "planned": True}
"""Whether a run follows plans, or moves tensors by need alone."""


def train_in_less(joined: session.Session, kind: type[Trained], names: list[str]) -> dict[str, Any]:
    """Train with all memory, then, in each of some runs, with a share of what that took; returns bits and figures."""
    job = joined.record
    joined.pool.set_limit(joined.membership.job, 0)
    job["peak_held"] = 0
    found = train(kind)
    limit = int(kind.share * int(job["peak_held"]))
    joined.pool.set_limit(joined.membership.job, limit)
    runs = {}
    for name in names:
        joined.swapper.follows_plans = FOLLOWS[name]
        runs[name] = watched(joined, kind)
    joined.pool.set_limit(joined.membership.job, 0)
    return found | {"limit": limit, "runs": runs}


def await_plan(learner: Learner) -> None:
    """Wait for a plan that is being made."""
    if learner.planning is not None:
        learner.planning.join(DEADLINE_S)
        assert not learner.planning.is_alive(), "a plan takes too long"


def watched(joined: session.Session, kind: Callable[[], Trained]) -> dict[str, Any]:
    """Train, each step with the last one's plan; returns the bits and what the job's record says of it."""
    job, swapper = joined.record, joined.swapper
    fields = ("out_bytes", "in_bytes", "late", "spilled_bytes", "evictions")
    before = {field: int(job[field]) for field in fields}
    planned, dropped_bytes = swapper.planned_iterations, swapper.figures.dropped_bytes
    job["peak_held"] = 0
    found = train(kind, lambda: await_plan(joined.swapper._learner))
    dropped_bytes = swapper.figures.dropped_bytes - dropped_bytes
    figures = {field: int(job[field]) - before[field] for field in fields}
    figures |= {"peak": int(job["peak_held"]), "planned": swapper.planned_iterations - planned}
    return found | figures | {"dropped_bytes": dropped_bytes}


def main() -> None:
    """Train those that are named."""
    torch.set_num_threads(1)
    joined = session.current()
    runs, names = sys.argv[2].split(","), sys.argv[3:]
    kinds = [kind for kind in KINDS if kind.__name__ in names]
    found = {kind.__name__: train(kind) if joined is None else train_in_less(joined, kind, runs) for kind in kinds}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
