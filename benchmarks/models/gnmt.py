"""An attentive translator of LSTM layers, as MLPerf Training's.

Source: Y. Wu et al., "Google's neural machine translation system" (2016); its smaller form with
four layers on either side in MLPerf Training v0.7 (rnn_translator).
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from training import Step

_WIDTH = 1024
_WORDS = 32_320
_LAYERS = 4


class _Layer(nn.Module):
    """An LSTM layer, word by word: a cell of its own on each, so that memory is the framework's and not a library's."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(inputs, _WIDTH)

    def forward(self, words: list[torch.Tensor]) -> list[torch.Tensor]:
        state = None
        outputs = []
        for word in words:
            state = self.cell(word, state)
            outputs.append(state[0])
        return outputs


class _Attention(nn.Module):
    """Normalised additive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.key = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.score = nn.Parameter(torch.randn(_WIDTH))
        self.scale = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, queries: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        query, key = self.query(queries).transpose(0, 1), self.key(source).transpose(0, 1)
        mixed = (query[:, :, None] + key[:, None] + self.bias).tanh()
        scores = mixed @ (self.score / self.score.norm() * self.scale)
        return (scores.softmax(2) @ source.transpose(0, 1)).transpose(0, 1)


class _Gnmt(nn.Module):
    """An encoder whose first layer reads both ways, and a decoder that attends at its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.both_ways = nn.ModuleList(_Layer(_WIDTH) for _ in range(2))
        self.encoder = nn.ModuleList(_Layer(_WIDTH if i else 2 * _WIDTH) for i in range(_LAYERS - 1))
        self.first = _Layer(_WIDTH)
        self.attention = _Attention()
        self.decoder = nn.ModuleList(_Layer(2 * _WIDTH) for _ in range(_LAYERS - 1))
        self.classes = nn.Linear(_WIDTH, _WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = list(functional.dropout(self.words(source), 0.2))
        ahead, back = self.both_ways[0](x), self.both_ways[1](x[::-1])[::-1]
        x = [torch.cat(pair, 1) for pair in zip(ahead, back, strict=True)]
        for i, layer in enumerate(self.encoder):
            found = layer([functional.dropout(word, 0.2) for word in x])
            x = [new + old for new, old in zip(found, x, strict=True)] if i else found
        y = self.first(list(functional.dropout(self.words(target), 0.2)))
        context = self.attention(torch.stack(y), torch.stack(x))
        for i, layer in enumerate(self.decoder):
            inputs = [
                torch.cat([functional.dropout(word, 0.2), seen], 1) for word, seen in zip(y, context, strict=True)
            ]
            found = layer(inputs)
            y = [new + old for new, old in zip(found, y, strict=True)] if i else found
        return self.classes(torch.stack(y))


def gnmt(batch: int = 1000, length: int = 25) -> Step:
    """Build the translator; 1000 is the largest batch in the evaluation of Zico, which does not say the length."""
    model = _Gnmt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> torch.Tensor:
        source, target = torch.randint(_WORDS, (length, batch)), torch.randint(_WORDS, (length + 1, batch))
        optimizer.zero_grad()
        words = model(source, target[:-1])
        loss = functional.cross_entropy(words.flatten(0, 1), target[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        return loss.detach()

    return step
