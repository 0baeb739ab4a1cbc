"""DenseNet-121. Source: G. Huang et al., "Densely connected convolutional networks" (2017), table 1."""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from training import classifier, convolution, sgd

if TYPE_CHECKING:
    from training import Step

_GROWTH = 32


class _Dense(nn.Module):
    """Appends new channels to those that came in."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), convolution(inputs, 4 * _GROWTH, 1)),
            *(nn.BatchNorm2d(4 * _GROWTH), nn.ReLU(inplace=True), convolution(4 * _GROWTH, _GROWTH)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.layers(x)], 1)


def densenet121(batch: int = 84) -> Step:
    """Build DenseNet-121 for ImageNet; 84 is the batch of a recomputation paper's public trace."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for n_layers in (6, 12, 24, 16):
        if channels > 64:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), convolution(channels, channels // 2, 1)]
            layers.append(nn.AvgPool2d(2))
            channels //= 2
        layers += [_Dense(channels + i * _GROWTH) for i in range(n_layers)]
        channels += n_layers * _GROWTH
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(channels, 1000))
    return classifier(model, sgd(model), batch, 224, 1000)
