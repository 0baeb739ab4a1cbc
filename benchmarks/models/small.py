"""Small models of many kinds that train on the host in seconds, each at any batch, with any of four optimizers.

They are cut down from published ones, in width and depth, not in kind. ``build`` makes a step as
``zico trace --fake`` and ``zico fit`` take it.
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-4),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-4),
}
"""Momentum, two moments, moments of rows and columns, and sums that are there before the first step."""


@dataclasses.dataclass(frozen=True)
class Small:
    """A model of this collection."""

    kind: str
    make: Callable[[], nn.Module]
    """Makes a module whose call on a batch returns the loss."""
    data: Callable[[int], tuple[torch.Tensor, ...]]
    """Makes a batch."""
    batches: tuple[int, int, int]
    optimizer: str = "adamw"
    """What it is usually trained by."""


class Stack(nn.Sequential):
    """Blocks, one after the other; where it is checkpointing, they compute again for the backward pass."""

    checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply them."""
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


class Classifier(nn.Module):
    """Layers whose output is classes, and their loss."""

    def __init__(self, *layers: nn.Module) -> None:
        """Put the layers together."""
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return functional.cross_entropy(self.layers(x), labels)


def images(size: int, channels: int = 3, classes: int = 10) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return what makes batches of square images and their classes."""
    return lambda batch: (torch.randn(batch, channels, size, size), torch.randint(classes, (batch,)))


def tokens(words: int, length: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return what makes batches of texts."""
    return lambda batch: (torch.randint(words, (batch, length)),)


def checkpoints(model: nn.Module) -> bool:
    """Let a model compute its blocks again for the backward pass; tells whether it has such blocks."""
    if hasattr(model, "checkpoint_blocks"):
        model.checkpoint_blocks()
        return True
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    for stack in stacks:
        stack.checkpointing = True
    return bool(stacks)


def build(name: str, batch: int, optimizer: str = "", *, checkpointing: bool = False, compiles: bool = False) -> Step:
    """Build a model and its optimizer, the model's usual one by default; returns the training step."""
    small = models()[name]
    torch.manual_seed(0)
    model = small.make()
    if checkpointing:
        checkpoints(model)
    steps = OPTIMIZERS[optimizer or small.optimizer]([one for one in model.parameters() if one.requires_grad])
    call = torch.compile(model) if compiles else model

    def step() -> torch.Tensor:
        steps.zero_grad()
        loss = call(*small.data(batch))
        loss.backward()
        steps.step()
        return loss.detach()

    return step


def models() -> dict[str, Small]:
    """Return all models by name; those of transformers only where that is installed."""
    import small_sequences
    import small_texts
    import small_vision

    return {**small_vision.MODELS, **small_sequences.MODELS, **small_texts.models()}
