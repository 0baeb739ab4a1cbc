"""Small recurrent nets, graph nets, mixtures of experts, and nets of sounds, points, tables and click logs.

Sources, in the order of ``MODELS``: Zaremba 2014; Cho 2014; Sutskever 2014; Bai 2018; Kipf 2016;
Velickovic 2017; Xu 2018; Fedus 2021; Jacobs 1991; Naumov 2019; Gorishniy 2021; Oreshkin 2019; Qi 2016.
"""
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import itertools

import torch
from small import Classifier, Small, Stack, tokens
from torch import nn
from torch.nn import functional

_WORDS = 2000
_WIDTH = 128


# -- recurrent -------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(_WORDS, 256), kind(256, 256, 2, batch_first=True)
        self.classes = nn.Linear(256, _WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.layers(self.words(x[:, :-1]))
        return functional.cross_entropy(self.classes(outputs).flatten(0, 1), x[:, 1:].flatten())


class _Translation(nn.Module):
    """One recurrent net reads, another one writes and attends to what was read, cell by cell."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(_WORDS, _WIDTH), nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.cell, self.classes = nn.GRUCell(2 * _WIDTH, _WIDTH), nn.Linear(_WIDTH, _WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source, target = x.chunk(2, 1)
        read, last = self.read(self.words(source))
        state, states = last[0], []
        for word in self.words(target[:, :-1]).unbind(1):
            weights = torch.einsum("bw,blw->bl", state, read).softmax(1)
            state = self.cell(torch.cat([word, torch.einsum("bl,blw->bw", weights, read)], 1), state)
            states.append(state)
        found = self.classes(torch.stack(states, 1))
        return functional.cross_entropy(found.flatten(0, 1), target[:, 1:].flatten())


# -- sounds ----------------------------------------------------------------------------------------


class _Causal(nn.Module):
    """A dilated convolution of what was before, added to what came in."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.inner, self.outer = nn.Conv1d(width, width, 2, dilation=dilation), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(functional.pad(x, (self.dilation, 0))).relu())


def _sound() -> nn.Module:
    blocks = Stack(*(_Causal(64, 1 << i) for i in range(6)))
    return Classifier(nn.Conv1d(1, 64, 1), blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10))


def _sounds(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 1, 2000), torch.randint(10, (batch,))


# -- graphs: the batch is a number of nodes, with eight neighbours each --------------------------------


class _Graph(nn.Module):
    """Layers that pass messages along edges: sums, sums through a perceptron, or weighed by attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        widths = (64, _WIDTH, _WIDTH, _WIDTH)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.inner = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in self.layers)
        self.scores = nn.ModuleList(nn.Linear(2 * _WIDTH, 1) for _ in self.layers)
        self.classes = nn.Linear(_WIDTH, 10)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer, inner, score in zip(self.layers, self.inner, self.scores, strict=True):
            h = layer(x)
            messages = h[source]
            if self.how == "attention":
                weights = functional.leaky_relu(score(torch.cat([messages, h[target]], 1)), 0.2).exp()
                sums = torch.zeros(len(h), 1).index_add(0, target, weights)
                messages = messages * (weights / sums[target])
            x = torch.zeros_like(h).index_add(0, target, messages).relu()
            if self.how == "perceptron":
                x = inner(x + h).relu()
        return functional.cross_entropy(self.classes(x), labels)


def _graph(batch: int) -> tuple[torch.Tensor, ...]:
    edges = torch.randint(batch, (2, 8 * batch))
    return torch.randn(batch, 64), edges, torch.randint(10, (batch,))


# -- experts ---------------------------------------------------------------------------------------


class _Experts(nn.Module):
    """Feeds each word to one expert of some, each of which has room for as many words."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.first = nn.Parameter(torch.randn(count, width, 4 * width) / width)
        self.second = nn.Parameter(torch.randn(count, 4 * width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x.flatten(0, 1)
        room = len(words) // len(self.first)
        weights, chosen = self.gate(words).softmax(1).topk(room, 0)
        inner = functional.gelu(torch.bmm(words[chosen.T], self.first))
        made = torch.bmm(inner, self.second) * weights.T[:, :, None]
        return x + torch.zeros_like(words).index_add(0, chosen.T.flatten(), made.flatten(0, 1)).view_as(x)


class _Switch(nn.Module):
    """A language model whose transformer has experts for its linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.classes = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, _WORDS)

        def block() -> nn.Module:
            attention = nn.TransformerEncoderLayer(_WIDTH, 4, _WIDTH, 0.0, batch_first=True)
            return nn.Sequential(attention, _Experts(_WIDTH, 8))

        self.blocks = Stack(*(block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.classes(self.blocks(self.words(x[:, :-1])))
        return functional.cross_entropy(found.flatten(0, 1), x[:, 1:].flatten())


class _Mixture(nn.Module):
    """The weighed sum of what all of some experts make."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        made = torch.stack([expert(x) for expert in self.experts], 2)
        return functional.cross_entropy((made * self.gate(x).softmax(1)[:, None]).sum(2), labels)


def _table(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 64), torch.randint(10, (batch,))


# -- clicks, tables, series, points ----------------------------------------------------------------


class _Clicks(nn.Module):
    """Numbers and names of things, of which each pair is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.ModuleList(nn.Embedding(20_000, 32) for _ in range(8))
        self.numbers = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 9 * 8 // 2, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: torch.Tensor, names: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        dense = self.numbers(numbers)
        found = torch.stack([dense, *(table(names[:, i]) for i, table in enumerate(self.names))], 1)
        first, second = torch.tril_indices(9, 9, -1)
        pairs = torch.bmm(found, found.transpose(1, 2))[:, first, second]
        return functional.binary_cross_entropy_with_logits(self.top(torch.cat([dense, pairs], 1))[:, 0], clicked)


def _clicks(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 13), torch.randint(20_000, (batch, 8)), torch.rand(batch)


def _perceptron() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(512), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.1))

    return Classifier(nn.Linear(64, 512), Stack(*(block() for _ in range(6))), nn.Linear(512, 10))


class _Series(nn.Module):
    """Blocks of which each explains what the ones before have left."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(200, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 220))
            for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, future = x[:, :200], x[:, 200:]
        found = torch.zeros_like(future)
        for block in self.blocks:
            back, ahead = block(left).split((200, 20), 1)
            left, found = left - back, found + ahead
        return functional.l1_loss(found, future)


class _Points(nn.Module):
    """Clouds of points: the same layers for each, and the most of all."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 64), (64, 64), (64, 256)):
            layers += [nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.each, self.all = nn.Sequential(*layers), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.all(self.each(x).amax(2)), labels)


def _points(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 3, 1024), torch.randint(10, (batch,))


MODELS = {
    "LSTM": Small("recurrent", lambda: _Recurrent(nn.LSTM), tokens(_WORDS, 33), (32, 64, 128), "sgd"),
    "GRU": Small("recurrent", lambda: _Recurrent(nn.GRU), tokens(_WORDS, 33), (32, 64, 128), "sgd"),
    "translation": Small("recurrent", _Translation, tokens(_WORDS, 40), (64, 128, 256)),
    "TCN": Small("sound", _sound, _sounds, (8, 16, 32)),
    "GCN": Small("graph", lambda: _Graph("sum"), _graph, (4000, 8000, 16000)),
    "GAT": Small("graph", lambda: _Graph("attention"), _graph, (2000, 4000, 8000)),
    "GIN": Small("graph", lambda: _Graph("perceptron"), _graph, (4000, 8000, 16000)),
    "Switch": Small("experts", _Switch, tokens(_WORDS, 65), (8, 16, 32)),
    "mixture of experts": Small("experts", _Mixture, _table, (1024, 2048, 4096)),
    "DLRM": Small("clicks", _Clicks, _clicks, (4096, 8192, 16384), "adagrad"),
    "perceptron": Small("tables", _perceptron, _table, (1024, 2048, 4096)),
    "N-BEATS": Small("series", _Series, lambda batch: (torch.randn(batch, 220),), (1024, 2048, 4096)),
    "PointNet": Small("points", _Points, _points, (16, 32, 64)),
}
