"""Train a small transformer by CUDA graphs or compiled: ``graph_job.py captured --iterations 20``.

``captured`` replays one graph of a whole step, ``callables`` is ``make_graphed_callables`` on the
network, and ``compiled`` is ``torch.compile(mode="reduce-overhead")``. Prints each iteration's loss in
hexadecimal, so that a run with Zico and one without can be compared to the last bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH, LENGTH, WIDTH, LAYERS, CLASSES = 64, 128, 512, 4, 100
WARM_UP = 3
"""Steps before a capture, as PyTorch's documentation asks."""
TEMPORARIES = 8
"""Tensors that come and go beside the graph in each iteration."""


class Trained:
    """A network, its optimizer, and one batch that each iteration fills anew."""

    def __init__(self) -> None:
        """Make them, the same in each run."""
        torch.manual_seed(1)
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
        network = nn.Sequential(nn.TransformerEncoder(layer, LAYERS), nn.Linear(WIDTH, CLASSES)).cuda()
        self.network: Callable[[torch.Tensor], torch.Tensor] = network
        self._optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self.inputs = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")
        self._wanted = torch.randint(CLASSES, (BATCH * LENGTH,), device="cuda")

    def step(self) -> torch.Tensor:
        """Train for an iteration; returns the loss."""
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self.network(self.inputs).flatten(0, 1), self._wanted)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def renew(self, iteration: int) -> None:
        """Fill the batch for an iteration, with temporaries beside whatever a graph holds."""
        generator = torch.Generator("cuda").manual_seed(iteration)
        fresh = [torch.randn(BATCH, LENGTH, WIDTH, device="cuda", generator=generator) for _ in range(TEMPORARIES)]
        self.inputs.copy_(sum(fresh[1:], fresh[0]))


def captured(trained: Trained) -> Callable[[], torch.Tensor]:
    """Capture a whole step; returns its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            trained.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = trained.step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def callables(trained: Trained) -> Callable[[], torch.Tensor]:
    """Capture the network's passes; the rest of a step runs as it does without a graph."""
    network: Any = trained.network
    trained.network = torch.cuda.make_graphed_callables(network, (torch.randn_like(trained.inputs),))
    return trained.step


def compiled(trained: Trained) -> Callable[[], torch.Tensor]:
    """Compile the network for CUDA graphs."""
    trained.network = torch.compile(trained.network, mode="reduce-overhead")
    return trained.step


WAYS = {way.__name__: way for way in (captured, callables, compiled)}


def losses(way: str, iterations: int) -> Iterator[float]:
    """Train; yields losses."""
    trained = Trained()
    step = WAYS[way](trained)
    told: Any = sys.modules.get("zico")
    for iteration in range(iterations):
        trained.renew(iteration)
        yield float(step())
        if told is not None and way == "captured":
            told.step()  # a replay has no optimizer's step that Zico could see


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    for number, loss in enumerate(losses(options.way, options.iterations), 1):
        sys.stdout.write(f"iteration {number} loss {loss.hex()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
