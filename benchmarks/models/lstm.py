"""A language model of LSTM layers. Source: W. Zaremba et al., "Recurrent neural network regularization" (2014)."""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from training import Step

_WIDTH = 650
_WORDS = 10_000
_LAYERS = 2


class _Lstm(nn.Module):
    """The paper's medium network; the layers are a library's, in one call each way."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.LSTM(_WIDTH, _WIDTH, _LAYERS, dropout=0.5)
        self.classes = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.layers(functional.dropout(self.words(tokens)))
        return self.classes(functional.dropout(outputs))


def lstm(batch: int = 20, length: int = 35) -> Step:
    """Build the model for Penn Treebank; 20 sequences of 35 words are the paper's."""
    model = _Lstm()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> torch.Tensor:
        tokens = torch.randint(_WORDS, (length + 1, batch))
        optimizer.zero_grad()
        words = model(tokens[:-1])
        loss = functional.cross_entropy(words.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        return loss.detach()

    return step
