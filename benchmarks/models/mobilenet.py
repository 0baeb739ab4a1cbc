"""MobileNetV2. Source: M. Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks" (2018), table 2."""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from training import classifier, convolution

if TYPE_CHECKING:
    from training import Step

# Expansion, channels, repetitions, first stride.
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _activated(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layers = [convolution(inputs, outputs, kernel, stride, groups), nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]
    return list(layers)


class _Inverted(nn.Module):
    """Widens, filters each channel, and narrows; adds what came in where the shape is the same."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = expansion * inputs
        self.adds = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *(_activated(inputs, width, 1) if expansion > 1 else ()),
            *_activated(width, width, 3, stride, groups=width),
            *(convolution(width, outputs, 1), nn.BatchNorm2d(outputs)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenet_v2(batch: int = 96) -> Step:
    """Build MobileNetV2 for ImageNet; 96 is the paper's batch per device."""
    layers = _activated(3, 32, 3, 2)
    inputs = 32
    for expansion, outputs, repetitions, stride in _STAGES:
        for i in range(repetitions):
            layers.append(_Inverted(inputs, outputs, 1 if i else stride, expansion))
            inputs = outputs
    layers += [*_activated(inputs, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(1280, 1000))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.045, momentum=0.9, weight_decay=4e-5)
    return classifier(model, optimizer, batch, 224, 1000)
