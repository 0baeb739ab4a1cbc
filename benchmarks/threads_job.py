"""One process of ``threads.py``: trains in several threads whenever it is asked, with Zico or without.

    operators   a ResNet, each of whose operators runs in so many threads
    loaders     so many threads enlarge, shift and disturb the batches of a smaller ResNet
    replicas    so many threads each train a copy of the ResNet on a part of the batch

It is asked over a Unix socket, so that a process of its own and one under ``zico run`` can take
turns. The same seeds and threads give the same losses.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import zico
from zico.job import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
example: Any = importlib.import_module("digits_resnet")

WIDTH = 8
AHEAD = 2
"""Batches that each thread of ``loaders`` has ready or in work."""
END_S = 60.0


def digits() -> tuple[Tensor, Tensor]:
    """Return all images as they are in the file, and their labels."""
    data = example.Digits()
    return data.images, data.labels


def enlarged(images: Tensor) -> Tensor:
    """Return the images as the networks take them."""
    return functional.interpolate(images, size=example.IMAGE_SIZE, mode="bilinear")


def batches(length: int, batch: int) -> Iterator[list[int]]:
    """Return the indices of each batch, without an end."""
    return iter(example.ShuffledBatches(length, itertools.repeat(batch), seed=1))


def resnet(depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network and its optimizer."""
    model = example.ResNet(depth, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def threads_of(count: int) -> ThreadPoolExecutor:
    """Return threads whose operators run in the thread that calls them."""
    torch.set_num_threads(1)
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def operators(threads: int, depth: int, batch: int) -> Iterator[float]:
    """Yield the loss of each iteration."""
    torch.set_num_threads(threads)
    images, labels = digits()
    images = enlarged(images)
    model, optimizer = resnet(depth)
    for at in batches(len(labels), batch):
        yield example.train_step(model, optimizer, images[at], labels[at])


def prepared(images: Tensor, labels: Tensor, at: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Return a batch that is shifted, mirrored in part, disturbed and normalised, in operators of PyTorch."""
    generator = torch.Generator().manual_seed(seed)
    large = functional.pad(enlarged(images[at]), (2, 2, 2, 2))
    x, y = torch.randint(5, (2,), generator=generator).tolist()
    large = large[:, :, y : y + example.IMAGE_SIZE, x : x + example.IMAGE_SIZE].contiguous()
    mirrored = torch.rand(len(at), 1, 1, 1, generator=generator) < 0.5
    large = torch.where(mirrored, large.flip(3), large)
    large = large * (0.9 + 0.2 * torch.rand(len(at), 1, 1, 1, generator=generator))
    large = large + 0.05 * torch.randn(large.shape, generator=generator)
    return (large - large.mean()) / large.std(), labels[at]


def loaders(threads: int, depth: int, batch: int) -> Iterator[float]:
    """Yield the loss of each iteration, whose batch a thread has prepared meanwhile."""
    images, labels = digits()
    model, optimizer = resnet(depth)
    with threads_of(threads) as executor:
        ready: deque[Future[tuple[Tensor, Tensor]]] = deque()
        for seed, at in enumerate(batches(len(labels), batch)):
            ready.append(executor.submit(prepared, images, labels, at, seed))
            if len(ready) > AHEAD * threads:
                yield example.train_step(model, optimizer, *ready.popleft().result(END_S))


def replicas(threads: int, depth: int, batch: int) -> Iterator[float]:
    """Yield the loss of each iteration, whose gradients are the mean of those of all copies."""
    images, labels = digits()
    images = enlarged(images)
    model, optimizer = resnet(depth)
    copies = [model, *(example.ResNet(depth, WIDTH) for _ in range(threads - 1))]

    def trained(copy: nn.Module, at: list[int]) -> float:
        copy.zero_grad()
        loss = functional.cross_entropy(copy(images[at]), labels[at])
        loss.backward()
        return loss.item()

    with threads_of(threads) as executor:
        for at in batches(len(labels), batch):
            for copy in copies[1:]:
                copy.load_state_dict(model.state_dict())
            parts = [at[n::threads] for n in range(threads)]
            losses = list(executor.map(trained, copies, parts, timeout=END_S))
            for parameter, *others in zip(*(copy.parameters() for copy in copies), strict=True):
                parameter.grad = sum((other.grad for other in others), start=parameter.grad) / threads
            optimizer.step()
            yield sum(losses) / threads


KINDS: dict[str, Callable[[int, int, int], Iterator[float]]] = {
    "operators": operators,
    "loaders": loaders,
    "replicas": replicas,
}


def allocations() -> int:
    """Return how many tensors the pool has served, 0 outside a pool."""
    joined = session.current()
    return 0 if joined is None else int(joined.record["allocations"])


def serve(connection: Connection, losses: Iterator[float]) -> None:
    """Train so many iterations as are asked for, until the other end closes.

    The first word is whether this process is in a pool; each answer is seconds, allocations, losses.
    """
    connection.send(zico.status() is not None)
    while True:
        try:
            count = connection.recv()
        except EOFError:
            return
        before, began_s = allocations(), time.perf_counter()
        found = [next(losses) for _ in range(count)]
        connection.send((time.perf_counter() - began_s, allocations() - before, [loss.hex() for loss in found]))


def main() -> None:
    """Connect to the socket that the command line names, behind it kind, threads, depth and batch."""
    address, _, kind, *numbers = sys.argv[1:]
    torch.manual_seed(1)
    threads, depth, batch = map(int, numbers)
    with Client(address) as connection:
        serve(connection, KINDS[kind](threads, depth, batch))


if __name__ == "__main__":
    main()
