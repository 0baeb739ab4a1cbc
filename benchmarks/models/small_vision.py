"""Small convolutional nets, transformers of images, and what generates images.

Sources, in the order of ``MODELS``: Krizhevsky 2012; Simonyan 2014; He 2015; Xie 2016; Sandler 2018;
Huang 2016; Iandola 2016; Liu 2022; Szegedy 2014; Dosovitskiy 2020; Ronneberger 2015; Long 2014; Hinton
2006; Kingma 2013; Ho 2020; Peebles 2022.
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import itertools

import torch
from small import Classifier, Small, Stack, images
from torch import nn
from torch.nn import functional

_CLASSES = 10


def _layer(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _head(width: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES))


class _Sum(nn.Module):
    """Adds what some layers change to what came in."""

    def __init__(self, layers: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.shortcut = layers, shortcut or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.shortcut(x)


class _Concatenation(nn.Module):
    """Puts what branches make side by side; with ``keeps``, what came in as well."""

    def __init__(self, *branches: nn.Module, keeps: bool = False) -> None:
        super().__init__()
        self.branches, self.keeps = nn.ModuleList(branches), keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([*([x] if self.keeps else []), *(branch(x) for branch in self.branches)], 1)


def _alexnet() -> nn.Module:
    pool = nn.MaxPool2d(3, 2)
    features = (*_layer(3, 48, 5, 2), pool, *_layer(48, 96, 5), pool, *_layer(96, 192), *_layer(192, 128))
    linear = (nn.Linear(128 * 49, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, _CLASSES))
    return Classifier(*features, nn.Flatten(), *linear)


def _vgg() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for width in (32, 64, 128):
        layers += [_layer(inputs, width), _layer(width, width), nn.MaxPool2d(2)]
        inputs = width
    return Classifier(*layers, nn.Flatten(), nn.Linear(16 * inputs, 256), nn.ReLU(), nn.Linear(256, _CLASSES))


def _residual(inputs: int, outputs: int, groups: int = 1, *, narrow: bool = False) -> nn.Module:
    stride = 1 if inputs == outputs else 2
    inner = outputs // 2
    layers = (
        nn.Sequential(_layer(inputs, inner, 1), _layer(inner, inner, 3, stride, groups), _layer(inner, outputs, 1))
        if narrow
        else nn.Sequential(_layer(inputs, outputs, 3, stride), _layer(outputs, outputs))
    )
    return _Sum(layers, None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride))


def _resnet() -> nn.Module:
    widths = (24, 24, 24, 48, 48, 96, 96)
    blocks = [_residual(a, b) for a, b in itertools.pairwise(widths)]
    return Classifier(_layer(3, 24), Stack(*blocks), _head(96))


def _resnext() -> nn.Module:
    widths = (32, 32, 64, 64, 128, 128)
    blocks = [_residual(a, b, 8, narrow=True) for a, b in itertools.pairwise(widths)]
    return Classifier(_layer(3, 32), Stack(*blocks), _head(128))


def _inverted(inputs: int, outputs: int) -> nn.Module:
    inner, stride = 4 * inputs, 1 if inputs == outputs else 2
    last = nn.Sequential(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
    middle = _layer(inner, inner, 3, stride, inner)
    layers = nn.Sequential(_layer(inputs, inner, 1), middle, last)
    return layers if stride == 2 else _Sum(layers)


def _mobilenet() -> nn.Module:
    widths = (16, 16, 24, 24, 48, 48, 96)
    blocks = [_inverted(a, b) for a, b in itertools.pairwise(widths)]
    return Classifier(_layer(3, 16, 3, 2), Stack(*blocks), _head(96))


def _densenet() -> nn.Module:
    layers: list[nn.Module] = [_layer(3, 24)]
    width, growth = 24, 12
    for _ in range(3):
        for _ in range(4):
            inner = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False))
            layers.append(_Concatenation(nn.Sequential(*inner, *_layer(4 * growth, growth)), keeps=True))
            width += growth
        layers += [_layer(width, width // 2, 1), nn.AvgPool2d(2)]
        width //= 2
    return Classifier(*layers, _head(width))


def _fire(inputs: int, width: int) -> nn.Module:
    wide = _Concatenation(_layer(width, 4 * width, 1), _layer(width, 4 * width))
    return nn.Sequential(_layer(inputs, width, 1), wide)


def _squeezenet() -> nn.Module:
    first = (_layer(3, 32, 3, 2), _fire(32, 16), _fire(128, 16), nn.MaxPool2d(2))
    return Classifier(*first, _fire(128, 32), _fire(256, 32), nn.MaxPool2d(2), _fire(256, 48), _head(384))


class _LastNorm(nn.Module):
    """A layer norm over channels that are the first dimension but the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _convnext() -> nn.Module:
    def block(width: int) -> nn.Module:
        first = (nn.Conv2d(width, width, 7, padding=3, groups=width), _LastNorm(width))
        return _Sum(nn.Sequential(*first, nn.Conv2d(width, 3 * width, 1), nn.GELU(), nn.Conv2d(3 * width, width, 1)))

    stages = (block(48), block(48), nn.Conv2d(48, 96, 2, 2), block(96), block(96))
    return Classifier(nn.Conv2d(3, 48, 4, 4), Stack(*stages), _head(96))


def _inception() -> nn.Module:
    def block(inputs: int, width: int) -> nn.Module:
        branches = (
            _layer(inputs, width, 1),
            nn.Sequential(_layer(inputs, width, 1), _layer(width, width)),
            nn.Sequential(_layer(inputs, width // 2, 1), _layer(width // 2, width // 2, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), _layer(inputs, width // 2, 1)),
        )
        return _Concatenation(*branches)

    blocks = (block(32, 32), nn.MaxPool2d(2), block(96, 48), nn.MaxPool2d(2), block(144, 64))
    return Classifier(_layer(3, 32, 3, 2), *blocks, _head(192))


# -- transformers of images ------------------------------------------------------------------------


class _Patches(nn.Module):
    """Cuts images into words, and gives each its place."""

    def __init__(self, width: int, patch: int, count: int, channels: int = 3) -> None:
        super().__init__()
        self.words = nn.Conv2d(channels, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, count, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x).flatten(2).transpose(1, 2) + self.places


class _Mean(nn.Module):
    """The mean of all words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def _vit() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(128, 4, 512, 0.1, "gelu", batch_first=True) for _ in range(4))
    return Classifier(_Patches(128, 4, 64), Stack(*layers), _Mean(), nn.Linear(128, _CLASSES))


def _perceptron(width: int, inner: int) -> tuple[nn.Module, ...]:
    return nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)


# -- images from images ----------------------------------------------------------------------------


class _Pixels(nn.Module):
    """Classes of pixels: a net that goes down and up again, with or without shortcuts."""

    def __init__(self, width: int, *, shortcuts: bool) -> None:
        super().__init__()
        self.shortcuts = shortcuts
        widths = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(_double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.joined = nn.ModuleList(_double((2 if shortcuts else 1) * a, a) for a in widths[:-1])
        self.classes = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, layers in enumerate(self.down):
            x = layers(functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, joined, before in zip(reversed(self.up), reversed(self.joined), reversed(kept[:-1]), strict=True):
            x = up(x)
            x = joined(torch.cat([x, before], 1) if self.shortcuts else x)
        return functional.cross_entropy(self.classes(x), labels)


def _double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(_layer(inputs, outputs), _layer(outputs, outputs))


def _pixels(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 3, 48, 48), torch.randint(2, (batch, 48, 48))


class _Autoencoder(nn.Module):
    """Makes images of a few numbers; with ``samples``, of random ones round these."""

    def __init__(self, *, samples: bool) -> None:
        super().__init__()
        self.samples = samples
        self.encode = nn.Sequential(_layer(3, 32, 3, 2), _layer(32, 64, 3, 2), nn.Flatten(), nn.Linear(64 * 64, 256))
        self.decode = nn.Linear(128, 64 * 64)
        up = (nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))
        self.up = nn.Sequential(nn.Unflatten(1, (64, 8, 8)), *up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, deviation = self.encode(x).chunk(2, 1)
        found = mean + torch.randn_like(mean) * deviation.exp() if self.samples else mean
        loss = functional.mse_loss(self.up(self.decode(found)), x)
        return loss + (mean.square() + deviation.exp() - deviation).mean() if self.samples else loss


def _only_images(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 3, 32, 32),)


class _Timed(nn.Module):
    """Two convolutions that know how noisy an image is, added to what came in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.time, self.shortcut = nn.Linear(64, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + self.time(time)[:, :, None, None]) + self.shortcut(x)


class _Diffusion(nn.Module):
    """Predicts the noise in images: a net that goes down and up, with attention at its bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, 64))
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)
        self.down = nn.ModuleList((_Timed(32, 32), _Timed(32, 64)))
        self.middle, self.attention = _Timed(64, 64), nn.MultiheadAttention(64, 4, batch_first=True)
        self.up = nn.ModuleList((_Timed(128, 32), _Timed(64, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise, time = torch.randn_like(x), torch.rand(len(x), 1)
        known = self.time(time)
        h, kept = self.first(x + time[:, :, None, None] * noise), []
        for layers in self.down:
            h = layers(h, known)
            kept.append(h)
            h = functional.avg_pool2d(h, 2)
        h = self.middle(h, known)
        words = h.flatten(2).transpose(1, 2)
        h = h + self.attention(words, words, words, need_weights=False)[0].transpose(1, 2).unflatten(2, h.shape[2:])
        for layers, before in zip(self.up, reversed(kept), strict=True):
            h = layers(torch.cat([functional.interpolate(h, scale_factor=2), before], 1), known)
        return functional.mse_loss(self.last(h), noise)


class _Conditioned(nn.Module):
    """A block of a transformer whose norms are scaled and shifted by how noisy an image is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.layers, self.scales = nn.Sequential(*_perceptron(width, 4 * width)), nn.Linear(width, 6 * width)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, known = pair
        a, b, c, d, e, f = self.scales(known)[:, None].chunk(6, 2)
        normed = functional.layer_norm(x, x.shape[2:]) * (1 + a) + b
        x = x + c * self.attention(normed, normed, normed, need_weights=False)[0]
        return x + f * self.layers(functional.layer_norm(x, x.shape[2:]) * (1 + d) + e), known


class _DiffusionTransformer(nn.Module):
    """Predicts the noise in images, word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.time, self.last = _Patches(128, 2, 256), nn.Linear(1, 128), nn.Linear(128, 12)
        self.blocks = Stack(*(_Conditioned(128) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise, time = torch.randn_like(x), torch.rand(len(x), 1)
        words, _ = self.blocks((self.words(x + time[:, :, None, None] * noise), self.time(time)))
        return functional.mse_loss(functional.fold(self.last(words).transpose(1, 2), (32, 32), 2, stride=2), noise)


MODELS = {
    "AlexNet": Small("vision", _alexnet, images(64), (32, 64, 128), "sgd"),
    "VGG": Small("vision", _vgg, images(32), (48, 96, 192), "sgd"),
    "ResNet": Small("vision", _resnet, images(32), (32, 48, 96), "sgd"),
    "ResNeXt": Small("vision", _resnext, images(32), (32, 64, 96), "sgd"),
    "MobileNetV2": Small("vision", _mobilenet, images(64), (24, 32, 64), "sgd"),
    "DenseNet": Small("vision", _densenet, images(32), (16, 32, 64), "sgd"),
    "SqueezeNet": Small("vision", _squeezenet, images(64), (16, 32, 64), "sgd"),
    "ConvNeXt": Small("vision", _convnext, images(64), (32, 64, 96)),
    "Inception": Small("vision", _inception, images(64), (16, 32, 64), "sgd"),
    "ViT": Small("vision", _vit, images(32), (32, 64, 128)),
    "U-Net": Small("vision", lambda: _Pixels(16, shortcuts=True), _pixels, (24, 32, 64), "sgd"),
    "FCN": Small("vision", lambda: _Pixels(24, shortcuts=False), _pixels, (16, 32, 64), "sgd"),
    "autoencoder": Small("vision", lambda: _Autoencoder(samples=False), _only_images, (256, 512, 1024)),
    "VAE": Small("vision", lambda: _Autoencoder(samples=True), _only_images, (256, 512, 1024)),
    "diffusion U-Net": Small("diffusion", _Diffusion, _only_images, (16, 24, 48)),
    "diffusion transformer": Small("diffusion", _DiffusionTransformer, _only_images, (8, 16, 32)),
}
