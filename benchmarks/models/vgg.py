"""Plain deep networks. Source: K. Simonyan, A. Zisserman, "Very deep convolutional networks" (2014), table 1.

For ImageNet as in the paper, and for CIFAR-10 as in AutoSwap's evaluation: there, batch norm after
each convolution and one linear layer at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from training import classifier, sgd

if TYPE_CHECKING:
    from training import Step

# Convolutions in each of the five stages.
_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg_cifar(layers: int = 16, batch: int = 100) -> Step:
    """Build a VGG for CIFAR-10; 100 is the batch in the evaluation of AutoSwap."""
    made: list[nn.Module] = []
    inputs = 3
    for width, repetitions in zip((64, 128, 256, 512, 512), _STAGES[layers], strict=True):
        for _ in range(repetitions):
            made += [nn.Conv2d(inputs, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        made.append(nn.MaxPool2d(2))
    model = nn.Sequential(*made, nn.Flatten(), nn.Linear(inputs, 10))
    return classifier(model, sgd(model), batch, 32, 10)


def vgg16(batch: int = 256) -> Step:
    """Build VGG-16 for ImageNet; 256 is the batch that vDNN trains in 12 GB."""
    made: list[nn.Module] = []
    inputs = 3
    for width, repetitions in zip((64, 128, 256, 512, 512), _STAGES[16], strict=True):
        for _ in range(repetitions):
            made += [nn.Conv2d(inputs, width, 3, 1, 1), nn.ReLU(inplace=True)]
            inputs = width
        made.append(nn.MaxPool2d(2))
    hidden = 4096
    linear = (nn.Linear(7 * 7 * inputs, hidden), nn.ReLU(inplace=True), nn.Dropout())
    again = (nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout())
    model = nn.Sequential(*made, nn.Flatten(), *linear, *again, nn.Linear(hidden, 1000))
    return classifier(model, sgd(model), batch, 224, 1000)
