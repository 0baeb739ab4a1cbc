"""Rebuild a trace from a log that knows addresses only: snapshots and profiler traces of frameworks.

Such logs begin in the middle of a life: a free of an address of which no allocation was seen means that the tensor was
there before, and an allocation at an address that is taken means that its free was missed.
"""

from __future__ import annotations

import numpy as np

from zico.trace.events import EVENT, NO_NAME, Kind, Origin, Trace

_Row = tuple[int, int, int, int, int, int, int]


class Rebuilder:
    """Take a log's entries in their order; ``trace`` is what they mean."""

    def __init__(self) -> None:
        """Start with nothing alive."""
        self._rows: list[_Row] = []
        self._before: list[_Row] = []
        self._live: dict[int, int] = {}  # address -> tensor; those from before are numbered -1, -2...
        self._n_tensors = 0
        self._names: dict[str, int] = {}

    def allocate(self, t_ns: int, address: int, size_bytes: int, name: str = "", stream: int = 0) -> None:
        """Begin a tensor at an address."""
        if address in self._live:
            self.free(t_ns, address, 0, stream)
        tensor = self._n_tensors
        self._n_tensors += 1
        self._live[address] = tensor
        self._rows.append((t_ns, tensor, size_bytes, self._number(name), stream, Kind.ALLOC, 0))

    def free(self, t_ns: int, address: int, size_bytes: int, stream: int = 0) -> None:
        """End the tensor at an address; if none is known, it was there before the log began."""
        if address not in self._live:
            self.was_there(address, size_bytes)
        self._rows.append((t_ns, self._live.pop(address), 0, NO_NAME, stream, Kind.FREE, 0))

    def was_there(self, address: int, size_bytes: int, name: str = "") -> None:
        """Know of a tensor that is at an address and was there before the log began."""
        if address not in self._live and size_bytes > 0:
            self._live[address] = -1 - len(self._before)
            self._before.append((0, len(self._before), size_bytes, self._number(name), 0, Kind.ALLOC, 0))

    @property
    def bytes_before(self) -> int:
        """Return how much was there before the log began, as far as it is known."""
        return sum(size_bytes for _, _, size_bytes, *_ in self._before)

    def operate(self, t_ns: int, duration_ns: int, name: str, stream: int = 0) -> None:
        """Note an operation."""
        self._rows.append((t_ns, 0, duration_ns, self._number(name), stream, Kind.OP, 0))

    def mark(self, t_ns: int, kind: Kind, iteration: int) -> None:
        """Note an iteration's BEGIN or END."""
        self._rows.append((t_ns, iteration, 0, NO_NAME, 0, kind, 0))

    def trace(self, origin: Origin, path: str) -> Trace:
        """Return the trace: what was there before is allocated first, at its beginning."""
        n_before = len(self._before)
        events = np.array(self._before + self._rows, EVENT)
        rows = events[n_before:]
        of_tensors = np.isin(rows["kind"], (Kind.ALLOC, Kind.FREE))
        number = rows["tensor"][of_tensors]
        rows["tensor"][of_tensors] = np.where(number < 0, -1 - number, number + n_before)
        return Trace(origin, events, tuple(self._names), path)

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names)) if name else NO_NAME
