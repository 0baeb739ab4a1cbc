"""Traces that tests make: a training loop whose every figure is known."""

from __future__ import annotations

import numpy as np

from zico.trace.events import EVENT, NO_NAME, Kind, Origin, Trace

MIB = 1 << 20
STEP_NS = 1000

_Row = tuple[int, int, int, int, int, int, int]


class Loop:
    """Write the events of a job by hand: every call takes a microsecond."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.rows: list[_Row] = []
        self.names: dict[str, int] = {}
        self.n_tensors = 0

    def event(self, kind: Kind, tensor: int = 0, size_bytes: int = 0, name: str = "", stream: int = 0) -> None:
        """Append an event."""
        number = self.names.setdefault(name, len(self.names)) if name else NO_NAME
        self.rows.append((len(self.rows) * STEP_NS, tensor, size_bytes, number, stream, kind, 0))

    def allocate(self, size_bytes: int, name: str = "") -> int:
        """Allocate a tensor; returns its number."""
        self.event(Kind.ALLOC, self.n_tensors, size_bytes, name)
        self.n_tensors += 1
        return self.n_tensors - 1

    def free(self, *tensors: int) -> None:
        """Free tensors."""
        for tensor in tensors:
            self.event(Kind.FREE, tensor)

    def trace(self) -> Trace:
        """Return what has been written."""
        return Trace(Origin(job="loop", framework="test"), np.array(self.rows, EVENT), tuple(self.names))


def train(iterations: int, *, layers: int = 12, marked: bool = True, gradients: int = 6) -> Trace:
    """Return a training loop: weights, feature maps, temporaries, gradient maps, and gradients freed one step later."""
    loop = Loop()
    weights = [loop.allocate((i + 1) * MIB, "init") for i in range(layers)]
    gradient: list[int] = []
    for number in range(iterations):
        if marked:
            loop.event(Kind.BEGIN, number)
        loop.free(*gradient)
        maps = []
        for i in range(layers):
            maps.append(loop.allocate((i + 3) * MIB + 512, f"forward {i}"))
            loop.free(loop.allocate((i + 1) * 1024, "workspace"))
        loop.event(Kind.OP, size_bytes=500, name="forward")
        gradient = []
        upper: int | None = None
        for i in reversed(range(layers)):
            flow = loop.allocate((i + 3) * MIB + 256, f"backward {i}")
            if i < gradients:
                gradient.append(loop.allocate((i + 1) * MIB + 128, "gradient"))
            loop.free(maps[i])
            if upper is not None:
                loop.free(upper)
            upper = flow
        assert upper is not None
        loop.free(upper)
    loop.free(*gradient, *weights)
    return loop.trace()
