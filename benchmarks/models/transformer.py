"""BERT, GPT-2 and ViT: one block, attention written out.

Sources: J. Devlin et al., "BERT" (2018); A. Radford et al., "Language models are unsupervised
multitask learners" (2019); A. Dosovitskiy et al., "An image is worth 16x16 words" (2020).
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from training import classifier

if TYPE_CHECKING:
    from training import Step

_WIDTH = 768
_HEADS = 12
_LAYERS = 12


class _Attention(nn.Module):
    """Attends from every position to every other one, or to those before it."""

    def __init__(self, dropout: float, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.inputs = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.outputs = nn.Linear(_WIDTH, _WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (_HEADS, -1)).transpose(1, 2) for part in self.inputs(x).split(_WIDTH, 2)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(_WIDTH // _HEADS)
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, -math.inf)
        weights = self.dropout(scores.softmax(3))
        return self.dropout(self.outputs((weights @ value).transpose(1, 2).flatten(2)))


class _Block(nn.Module):
    """Attention and two linear layers, each added to what came in; normalised before (as later models) or after."""

    def __init__(
        self, dropout: float, *, before: bool, mask: torch.Tensor | None = None, approximate: str = "none"
    ) -> None:
        super().__init__()
        self.before = before
        self.attention = _Attention(dropout, mask)
        self.layers = nn.Sequential(
            *(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(approximate), nn.Linear(4 * _WIDTH, _WIDTH), nn.Dropout(dropout)),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layers, norm in zip((self.attention, self.layers), self.norms, strict=True):
            x = x + layers(norm(x)) if self.before else norm(x + layers(x))
        return x


class _Bert(nn.Module):
    """BERT-base with its two pre-training heads; the word head shares the embedding's weights."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, _WIDTH)
        self.positions = nn.Embedding(512, _WIDTH)
        self.segments = nn.Embedding(2, _WIDTH)
        self.embedded = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Dropout(0.1))
        self.blocks = nn.Sequential(*(_Block(0.1, before=False) for _ in range(_LAYERS)))
        self.pooler = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh())
        self.word_head = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH))
        self.word_bias = nn.Parameter(torch.zeros(vocabulary))
        self.next_head = nn.Linear(_WIDTH, 2)
        self.register_buffer("order", torch.arange(length))

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks(self.embedded(self.words(tokens) + self.positions(self.order) + self.segments(segments)))
        words = functional.linear(self.word_head(x), self.words.weight, self.word_bias)
        return words, self.next_head(self.pooler(x[:, 0]))


def bert_base(batch: int = 64, length: int = 512, optimizer: str = "AdamW") -> Step:
    """Build BERT-base (uncased) for pre-training; words are predicted at all positions, masked or not."""
    vocabulary = 30522
    model = _Bert(vocabulary, length)
    descent = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        tokens, segments = torch.randint(vocabulary, (batch, length)), torch.randint(2, (batch, length))
        missing, follows = torch.randint(vocabulary, (batch, length)), torch.randint(2, (batch,))
        descent.zero_grad()
        words, following = model(tokens, segments)
        loss = functional.cross_entropy(words.flatten(0, 1), missing.flatten())
        loss = loss + functional.cross_entropy(following, follows)
        loss.backward()
        descent.step()
        return loss.detach()

    return step


class _Gpt2(nn.Module):
    """The smallest GPT-2; the head shares the embedding's weights."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.words = nn.Embedding(vocabulary, _WIDTH)
        self.positions = nn.Embedding(1024, _WIDTH)
        self.dropout = nn.Dropout(0.1)
        blocks = (_Block(0.1, before=True, mask=mask, approximate="tanh") for _ in range(_LAYERS))
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(_WIDTH))
        self.register_buffer("order", torch.arange(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.words(tokens) + self.positions(self.order))
        return functional.linear(self.blocks(x), self.words.weight)


def gpt2(batch: int = 8, length: int = 1024) -> Step:
    """Build the smallest GPT-2 at its full context."""
    vocabulary = 50257
    model = _Gpt2(vocabulary, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        tokens = torch.randint(vocabulary, (batch, length + 1))
        optimizer.zero_grad()
        words = model(tokens[:, :-1])
        loss = functional.cross_entropy(words.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class _Vit(nn.Module):
    """ViT-B/16: an image as words of 16 x 16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Conv2d(3, _WIDTH, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, _WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 1 + 14 * 14, _WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(_Block(0.1, before=True) for _ in range(_LAYERS)), nn.LayerNorm(_WIDTH))
        self.classes = nn.Linear(_WIDTH, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        words = self.words(images).flatten(2).transpose(1, 2)
        words = torch.cat([self.first.expand(len(words), -1, -1), words], 1)
        return self.classes(self.blocks(self.dropout(words + self.positions))[:, 0])


def vit_b16(batch: int = 128) -> Step:
    """Build ViT-B/16 for ImageNet."""
    model = _Vit()
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.3), batch, 224, 1000)
