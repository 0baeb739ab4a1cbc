"""DCGAN, two optimizers that take turns. Source: A. Radford et al., "Unsupervised representation learning" (2015)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from training import Step

_NOISE = 100
_WIDTHS = (64, 128, 256, 512)


def _generator() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = _NOISE
    for i, width in enumerate(reversed(_WIDTHS)):
        layers.append(nn.ConvTranspose2d(inputs, width, 4, 2 if i else 1, 1 if i else 0, bias=False))
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        inputs = width
    return nn.Sequential(*layers, nn.ConvTranspose2d(inputs, 3, 4, 2, 1, bias=False), nn.Tanh())


def _discriminator() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for i, width in enumerate(_WIDTHS):
        layers.append(nn.Conv2d(inputs, width, 4, 2, 1, bias=False))
        layers += [*([nn.BatchNorm2d(width)] if i else []), nn.LeakyReLU(0.2, inplace=True)]
        inputs = width
    return nn.Sequential(*layers, nn.Conv2d(inputs, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def dcgan(batch: int = 128) -> Step:
    """Build DCGAN for 64 x 64 images; 128 is the paper's batch. The layers are those of PyTorch's example."""
    generator, discriminator = _generator(), _discriminator()
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (generator, discriminator)
    ]

    def loss(images: torch.Tensor, label: float) -> torch.Tensor:
        found = discriminator(images)
        return functional.binary_cross_entropy_with_logits(found, torch.full_like(found, label))

    def step() -> torch.Tensor:
        images = torch.randn(batch, 3, 64, 64)
        optimizers[1].zero_grad()
        loss(images, 1).backward()
        made = generator(torch.randn(batch, _NOISE, 1, 1))
        loss(made.detach(), 0).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = loss(made, 1)
        fooled.backward()
        optimizers[0].step()
        return fooled.detach()

    return step
