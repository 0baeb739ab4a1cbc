"""U-Net, and the same of volumes.

Sources: O. Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation" (2015);
O. Cicek et al., "3D U-Net: learning dense volumetric segmentation from sparse annotation" (2016).
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from training import Step


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    first, second = nn.Conv2d(inputs, outputs, 3), nn.Conv2d(outputs, outputs, 3)  # without padding, as in the paper
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True))


class _UNet(nn.Module):
    """Goes down four times, keeping what it saw, and up again beside it."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 << i for i in range(5)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[-2::-1])
        self.merge = nn.ModuleList(_twice(2 * width, width) for width in widths[-2::-1])
        self.dropout = nn.Dropout(0.5)
        self.classes = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for layers in self.down[:-1]:
            x = layers(x)
            seen.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.dropout(self.down[-1](x))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = up(x)
            beside = seen.pop()
            edge = (beside.shape[-1] - x.shape[-1]) // 2
            x = merge(torch.cat([beside[:, :, edge : edge + x.shape[2], edge : edge + x.shape[3]], x], 1))
        return self.classes(x)


def _segmenter(model: nn.Module, classes: int, images: tuple[int, ...], labels: tuple[int, ...]) -> Step:
    """Return a training step on images and labels of these shapes, with its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99)

    def step() -> torch.Tensor:
        seen, wanted = torch.randn(images), torch.randint(classes, labels)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(seen), wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def unet(batch: int = 6, size: int = 572) -> Step:
    """Build U-Net at the paper's image size; 6 is the batch of a recomputation paper's public trace."""
    return _segmenter(_UNet(), 2, (batch, 1, size, size), (batch, size - 184, size - 184))


def _twice_of_volumes(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    first, second = nn.Conv3d(inputs, middle, 3, padding=1), nn.Conv3d(middle, outputs, 3, padding=1)
    return nn.Sequential(
        *(first, nn.BatchNorm3d(middle), nn.ReLU(inplace=True)),
        *(second, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)),
    )


class _UNet3D(nn.Module):
    """Goes down three times, keeping what it saw, and up again beside it."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        self.down = nn.ModuleList(_twice_of_volumes(a, b // 2, b) for a, b in zip((1, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(width, width, 2, 2) for width in widths[:0:-1])
        self.merge = nn.ModuleList(
            _twice_of_volumes(width + beside, beside, beside)
            for width, beside in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.classes = nn.Conv3d(widths[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for layers in self.down[:-1]:
            x = layers(x)
            seen.append(x)
            x = functional.max_pool3d(x, 2)
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([seen.pop(), up(x)], 1))
        return self.classes(x)


def unet3d(batch: int = 1, size: int = 128) -> Step:
    """Build 3D U-Net on cubes; the paper's blocks are of about 128 voxels a side."""
    return _segmenter(_UNet3D(), 3, (batch, 1, size, size, size), (batch, size, size, size))
