"""What the models' training steps share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], torch.Tensor]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return stochastic gradient descent with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def classifier(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, size: int, classes: int) -> Step:
    """Return a training step on colour images, with its loss; each brings a batch of its own, as a loader would."""

    def step() -> torch.Tensor:
        images = torch.randn(batch, 3, size, size)
        labels = torch.randint(classes, (batch,))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the image's size but for its stride, without the bias that a norm would undo."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
