"""Residual networks. Source: K. He et al., "Deep residual learning for image recognition" (2015)."""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from training import classifier, convolution, sgd

if TYPE_CHECKING:
    from training import Step


class _Residual(nn.Module):
    """Adds what some layers change to what came in."""

    def __init__(self, layers: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.layers(x) + self.shortcut(x))


class _Padded(nn.Module):
    """Halves an image and fills up with channels of zeros: the paper's option A, without parameters."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra // 2))


def _bottleneck(inputs: int, width: int, stride: int) -> nn.Module:
    outputs = 4 * width
    layers = nn.Sequential(
        *(convolution(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(convolution(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(convolution(width, outputs, 1), nn.BatchNorm2d(outputs)),
    )
    same = inputs == outputs
    projected = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
    return _Residual(layers, nn.Identity() if same else projected)


def _basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    layers = nn.Sequential(
        *(convolution(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
        *(convolution(outputs, outputs), nn.BatchNorm2d(outputs)),
    )
    return _Residual(layers, nn.Identity() if inputs == outputs else _Padded(outputs - inputs))


def resnet50(batch: int = 200) -> Step:
    """Build ResNet-50 for ImageNet; 200 is the largest batch in the evaluation of Zico."""
    blocks = []
    inputs = 64
    for stage, n_blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for i in range(n_blocks):
            blocks.append(_bottleneck(inputs, width, 2 if stage and not i else 1))
            inputs = 4 * width
    model = nn.Sequential(
        *(convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)),
    )
    return classifier(model, sgd(model), batch, 224, 1000)


def resnet110(batch: int = 800) -> Step:
    """Build ResNet-110 for CIFAR-10; 800 is the largest batch in the evaluation of Zico."""
    blocks = []
    inputs = 16
    for width in (16, 32, 64):
        for i in range(18):
            blocks.append(_basic(inputs, width, 2 if width > 16 and not i else 1))
            inputs = width
    model = nn.Sequential(
        *(convolution(3, 16), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)),
    )
    return classifier(model, sgd(model), batch, 32, 10)


# Whether blocks are bottlenecks, and how many each stage has.
_CIFAR = {18: (False, (2, 2, 2, 2)), 34: (False, (3, 4, 6, 3)), 50: (True, (3, 4, 6, 3)), 101: (True, (3, 4, 23, 3))}


class _Summed(nn.Module):
    """A residual block none of whose layers works in place: what each makes is a tensor of its own."""

    def __init__(self, inputs: int, width: int, stride: int, *, narrow: bool) -> None:
        super().__init__()
        outputs = 4 * width if narrow else width
        shape = (
            ((1, width, 1), (3, width, stride), (1, outputs, 1)) if narrow else ((3, width, stride), (3, outputs, 1))
        )
        layers: list[nn.Module] = []
        made = inputs
        for kernel, channels, step in shape:
            layers += [convolution(made, channels, kernel, step), nn.BatchNorm2d(channels), nn.ReLU()]
            made = channels
        self.layers = nn.Sequential(*layers[:-1])
        same = inputs == outputs and stride == 1
        projected = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else projected
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.layers(x) + self.shortcut(x))


def resnet_cifar(layers: int = 50, batch: int = 100) -> Step:
    """Build the ImageNet paper's ResNet on images of CIFAR-10; 100 is the batch in the evaluation of AutoSwap."""
    narrow, stages = _CIFAR[layers]
    blocks = []
    inputs = 64
    for stage, n_blocks in enumerate(stages):
        width = 64 << stage
        for i in range(n_blocks):
            blocks.append(_Summed(inputs, width, 2 if stage and not i else 1, narrow=narrow))
            inputs = 4 * width if narrow else width
    model = nn.Sequential(
        *(convolution(3, 64), nn.BatchNorm2d(64), nn.ReLU()),
        *(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)),
    )
    return classifier(model, sgd(model), batch, 32, 10)


def resnet18_small(batch: int = 64) -> Step:
    """Build ResNet-18 for images of 32 x 32, as a search for its hyperparameters trains it."""
    return resnet_cifar(18, batch)
