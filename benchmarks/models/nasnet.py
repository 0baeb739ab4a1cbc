"""NASNet-A (4 @ 1056), the mobile one.

Source: B. Zoph et al., "Learning transferable architectures for scalable image recognition" (2018),
figures 2 and 4, with the stem of the authors' code.
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from training import classifier, convolution, sgd

if TYPE_CHECKING:
    from training import Step

_FILTERS = 44
_STEM = 32


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _squeezed(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), convolution(inputs, outputs, 1), _norm(outputs))


def _separable(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, step in ((inputs, stride), (outputs, 1)):
        layers += [nn.ReLU(), convolution(channels, channels, kernel, step, groups=channels)]
        layers += [convolution(channels, outputs, 1), _norm(outputs)]
    return nn.Sequential(*layers)


class _Halved(nn.Module):
    """Halves an image by two grids of points, one shifted by a pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.paths = nn.ModuleList(convolution(inputs, outputs // 2, 1) for _ in range(2))
        self.norm = _norm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(x)
        shifted = functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        halves = [path(grid[:, :, ::2, ::2]) for path, grid in zip(self.paths, (x, shifted), strict=True)]
        return self.norm(torch.cat(halves, 1))


class _Normal(nn.Module):
    """The cell that keeps the image's size: six times its channels from two inputs."""

    def __init__(self, before: nn.Module, now: nn.Module, channels: int) -> None:
        super().__init__()
        self.before = before
        self.now = now
        self.separable = nn.ModuleList(_separable(channels, channels, kernel) for kernel in (5, 3, 5, 3, 3))
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def forward(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        before, now = self.before(before), self.now(now)
        parts = [
            self.separable[0](now) + self.separable[1](before),
            self.separable[2](before) + self.separable[3](before),
            self.pool(now) + before,
            self.pool(before) + self.pool(before),
            self.separable[4](now) + now,
        ]
        return torch.cat([before, *parts], 1)


class _Reduction(nn.Module):
    """The cell that halves the image: four times its channels from two inputs."""

    def __init__(self, before: nn.Module, now: nn.Module, inputs: int, channels: int) -> None:
        super().__init__()
        self.before = before
        self.now = now
        self.separable = nn.ModuleList(_separable(inputs, channels, kernel, 2) for kernel in (7, 7, 5))
        self.five = _separable(channels, channels, 5, 2)
        self.three = _separable(channels, channels, 3)
        self.largest = nn.MaxPool2d(3, 2, 1)
        self.mean = nn.AvgPool2d(3, 2, 1, count_include_pad=False)
        self.same = nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def forward(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        before, now = self.before(before), self.now(now)
        first = self.five(now) + self.separable[0](before)
        second = self.largest(now) + self.separable[1](before)
        third = self.mean(now) + self.separable[2](before)
        return torch.cat([second, third, self.same(first) + second, self.three(first) + self.largest(now)], 1)


class _NasNet(nn.Module):
    """Two reductions as a stem, then three rows of four normal cells with reductions between them."""

    def __init__(self) -> None:
        super().__init__()
        quarter, half = _FILTERS // 4, _FILTERS // 2
        self.first = nn.Sequential(nn.Conv2d(3, _STEM, 3, 2, bias=False), _norm(_STEM))
        cells: list[nn.Module] = [
            _Reduction(nn.Identity(), _squeezed(_STEM, quarter), _STEM, quarter),
            _Reduction(_Halved(_STEM, half), _squeezed(4 * quarter, half), half, half),
        ]
        before, now = 4 * quarter, 4 * half
        for row in range(3):
            channels = _FILTERS << row
            if row:
                reduced = (_squeezed(before, channels), _squeezed(now, channels))
                cells.append(_Reduction(*reduced, channels, channels))
                before, now = now, 4 * channels
            for i in range(4):
                prepared = _squeezed(before, channels) if i else _Halved(before, channels)
                cells.append(_Normal(prepared, _squeezed(now, channels), channels))
                before, now = now, 6 * channels
        self.cells = nn.ModuleList(cells)
        self.classes = nn.Sequential(
            *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(now, 1000)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = now = self.first(x)
        for cell in self.cells:
            before, now = now, cell(before, now)
        return self.classes(now)


def nasnet_mobile(batch: int = 140) -> Step:
    """Build NASNet-A mobile for ImageNet; 140 is the largest batch in the evaluation of Zico."""
    model = _NasNet()
    return classifier(model, sgd(model), batch, 224, 1000)
