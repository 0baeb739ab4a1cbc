"""A recurrent highway network. Source: J. G. Zilly et al., "Recurrent highway networks" (2017), table 1, tied."""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from training import Step

_WIDTH = 830
_DEPTH = 10
_WORDS = 10_000


class _Rhn(nn.Module):
    """Ten highway layers for each word, over words one after the other; one dropout mask a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.inputs = nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, 2 * _WIDTH) for _ in range(_DEPTH))
        self.bias = nn.Parameter(torch.zeros(_WORDS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.words(tokens)
        ones = torch.ones(tokens.shape[1], _WIDTH)
        in_mask, state_mask, out_mask = (functional.dropout(ones, p) for p in (0.75, 0.25, 0.75))
        state = torch.zeros(tokens.shape[1], _WIDTH)
        states = []
        for word in embedded:
            for depth, layer in enumerate(self.layers):
                change = layer(state * state_mask)
                if depth == 0:
                    change = change + self.inputs(word * in_mask)
                new, gate = change.chunk(2, 1)
                state = (new.tanh() - state) * gate.sigmoid() + state
            states.append(state * out_mask)
        return functional.linear(torch.stack(states), self.words.weight, self.bias)


def rhn(batch: int = 60, length: int = 35) -> Step:
    """Build the network for Penn Treebank; 60 is the largest batch in the evaluation of Zico."""
    model = _Rhn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=1e-7)

    def step() -> torch.Tensor:
        tokens = torch.randint(_WORDS, (length + 1, batch))
        optimizer.zero_grad()
        words = model(tokens[:-1])
        loss = functional.cross_entropy(words.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10)
        optimizer.step()
        return loss.detach()

    return step
