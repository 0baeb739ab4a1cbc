"""Training loops as sequences of allocations and frees, with the truth about where iterations begin."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

WEIGHT = 4000
"""Bytes of a layer's parameters, of which all layers have the same."""


@dataclasses.dataclass
class Recording:
    """What a job did, in order: ``(tensor, size)`` for an allocation, ``(tensor, 0)`` for a free."""

    ops: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    """Allocations before each iteration."""
    allocations: int = 0

    def alloc(self, size: int) -> int:
        """Allocate; returns the tensor's number."""
        self.ops.append((self.allocations, size))
        self.allocations += 1
        return self.allocations - 1

    def free(self, tensor: int) -> None:
        """Free a tensor."""
        self.ops.append((tensor, 0))

    def passing(self, size: int) -> None:
        """Allocate a temporary, and free it at once."""
        self.free(self.alloc(size))

    def arrays(self) -> tuple[Int64s, Int64s]:
        """Return sizes and the bytes live before each allocation."""
        sizes: dict[int, int] = {}
        live, out = 0, []
        for tensor, size in self.ops:
            if size:
                out.append((size, live))
                sizes[tensor] = size
            live += size or -sizes[tensor]
        both = np.array(out, np.int64).reshape(-1, 2)
        return both[:, 0].copy(), both[:, 1].copy()

    def disturbed(self, swaps: float, extras: float, seed: int = 0) -> Recording:
        """Return the same with neighbours swapped, and temporaries inserted, each with that probability."""
        rng = random.Random(seed)  # noqa: S311 - a test's own luck
        found = Recording(list(self.ops), [], self.allocations)
        for i in range(len(found.ops) - 1):
            if rng.random() < swaps and found.ops[i][0] != found.ops[i + 1][0]:
                found.ops[i], found.ops[i + 1] = found.ops[i + 1], found.ops[i]
        ops, found.ops = found.ops, []
        pending, seen = list(self.starts), 0
        made = 0
        for tensor, size in ops:
            if rng.random() < extras:
                found.passing(rng.randrange(1, WEIGHT))
                made += 1
            while size and pending and pending[0] <= seen:
                found.starts.append(pending.pop(0) + made)
            seen += size > 0
            found.ops.append((tensor, size))
        return found


@dataclasses.dataclass(frozen=True)
class Network:
    """A stack of equal layers, and how it is trained."""

    layers: int = 12
    batch: int = 32
    micro_batches: int = 1
    keeps_gradients: bool = False
    """Gradients stay allocated from one optimizer step to the next."""
    temporaries: int = 2
    """That the optimizer makes for each layer, of different sizes."""

    def set_up(self, job: Recording) -> None:
        """Allocate parameters and optimizer states."""
        for _ in range(3 * self.layers):
            job.alloc(WEIGHT)

    def step(self, job: Recording) -> None:
        """Do one iteration: micro-batches, then the optimizer."""
        job.starts.append(job.allocations)
        gradients: list[int] = []
        for _ in range(self.micro_batches):
            first = not gradients and not self.keeps_gradients
            gradients += self._micro_batch(job, gradients_stay=first)
        for i in range(self.layers * self.temporaries):
            job.passing(WEIGHT + i % self.temporaries)
        for tensor in gradients:
            job.free(tensor)

    def _micro_batch(self, job: Recording, *, gradients_stay: bool) -> list[int]:
        maps = []
        for layer in range(self.layers):
            maps += [job.alloc(self._map_bytes(layer, channels)) for channels in (3, 7, 2)]
            job.passing(self.batch * 50)
        job.passing(self.batch * 11)
        kept = []
        for layer in reversed(range(self.layers)):
            for channels in (2, 7, 3):
                job.passing(self._map_bytes(layer, channels))
                job.free(maps.pop())
            gradient = job.alloc(WEIGHT)
            if gradients_stay:
                kept.append(gradient)
            else:
                job.free(gradient)
        return kept

    def validate(self, job: Recording) -> None:
        """Go forward once, keeping nothing."""
        before = None
        for layer in range(self.layers):
            for channels in (3, 7, 2):
                feature = job.alloc(self._map_bytes(layer, channels))
                if before is not None:
                    job.free(before)
                before = feature
            job.passing(self.batch * 50)
        job.passing(self.batch * 11)
        if before is not None:
            job.free(before)

    def _map_bytes(self, layer: int, channels: int) -> int:
        return channels * self.batch * 100 + (0 if layer else 5)


def trained(network: Network, steps: int) -> Recording:
    """Return the network's set-up and so many iterations."""
    job = Recording()
    network.set_up(job)
    for _ in range(steps):
        network.step(job)
    return job
