"""Recomputation: which results are dropped and computed again, on a graph of operations.

Operations have one order, in which each runs for the first time, and make results. A schedule is
the sequence of operations that run, repeats included. Everything else follows from it. A result is
held from the operation that makes it to the last one that reads it before it is made again::

    chain   f0 f1 f2 b2 b1 b0       f0 is held from the beginning to b0
    chain   f0 f1 f2 b2 b1 f0 b0    f0 is dropped behind f1, and made again for b0

Known limitations
    Memory is counted in bytes, without addresses. An operation that runs again makes all its results
    again. Random operations are taken to give the same when they run again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from zico.base.errors import ProblemError

Order = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Graph:
    """Operations in the order in which they first run.

    Raises:
        ProblemError: A number is out of range; the message names the first operation.
    """

    cost_ns: tuple[int, ...]
    size_bytes: tuple[int, ...]
    """Of each result; an operation's workspace is part of one."""
    inputs: tuple[tuple[int, ...], ...]
    """The results that each operation reads, all of operations before it."""
    n_forward: int
    """Operations of the forward pass: the first ones."""
    until: tuple[int, ...] = ()
    """The last operation ahead of whose first run each one may run again, itself: never; nothing: always."""
    rest_bytes: tuple[int, ...] = ()
    """What is held besides results while each operation is the next one to run for the first time; nothing: 0."""
    maker: tuple[int, ...] = ()
    """The operation that makes each result; nothing: each makes one, in the same order."""
    op_of: tuple[int, ...] = ()
    """Of a graph that was made of a problem: the operation that each of the problem's is part of."""
    tensor: tuple[int, ...] = ()
    """Of such a graph: the problem's tensor that each result is."""

    def __post_init__(self) -> None:
        n, n_results = len(self.cost_ns), len(self.size_bytes)
        object.__setattr__(self, "maker", self.maker or tuple(range(n if self.size_bytes else 0)))
        if not n or len(self.maker) != n_results or len(self.inputs) != n:
            counts = f"{n} costs, {n_results} sizes, {len(self.maker)} makers, {len(self.inputs)} lists of inputs"
            raise ProblemError(f"{counts}: give one for every operation or result, and one operation at least")
        if len(self.until) not in (0, n):
            raise ProblemError(f"{len(self.until)} ends of {n} operations: give one each, or none")
        if len(self.rest_bytes) not in (0, n):
            raise ProblemError(f"{len(self.rest_bytes)} times other bytes for {n} operations: give one each, or none")
        if not 0 <= self.n_forward <= n:
            raise ProblemError(f"a forward pass of {self.n_forward} of {n} operations: give 0 to {n}")
        for r in range(n_results):
            if self.size_bytes[r] < 0 or not 0 <= self.maker[r] < n:
                what = f"has {self.size_bytes[r]} bytes and is made by operation {self.maker[r]}"
                raise ProblemError(f"result {r} {what}: give 0 bytes or more, and one of {n} operations")
        for i in range(n):
            if self.cost_ns[i] < 0:
                raise ProblemError(f"operation {i} takes {self.cost_ns[i]} ns: give 0 or more")
            wrong = next((r for r in self.inputs[i] if not 0 <= r < n_results or self.maker[r] >= i), None)
            if wrong is not None:
                raise ProblemError(f"operation {i} reads result {wrong}: give results of operations before it")

    def __len__(self) -> int:
        return len(self.cost_ns)

    def may_run(self, op: int, ahead_of: int) -> bool:
        """Tell whether an operation may run ahead of another one's first run."""
        return op == ahead_of or not self.until or ahead_of <= self.until[op]

    def rest(self, op: int) -> int:
        """Return what is held besides results until an operation has run for the first time."""
        return self.rest_bytes[op] if self.rest_bytes else 0

    @functools.cached_property
    def results(self) -> tuple[tuple[int, ...], ...]:
        """Return the results of each operation."""
        found: list[list[int]] = [[] for _ in self.cost_ns]
        for result, op in enumerate(self.maker):
            found[op].append(result)
        return tuple(map(tuple, found))

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Return the operations that read each result, ascending."""
        found: list[list[int]] = [[] for _ in self.size_bytes]
        for op, inputs in enumerate(self.inputs):
            for result in dict.fromkeys(inputs):
                found[result].append(op)
        return tuple(map(tuple, found))

    @functools.cached_property
    def leaves(self) -> tuple[tuple[int, ...], ...]:
        """Return for each operation the results that can be dropped behind it, for their longest pause."""
        found: list[list[int]] = [[] for _ in self.cost_ns]
        for result, op in enumerate(self.maker):
            pauses = list(itertools.pairwise((op, *self.readers[result])))
            if pauses:
                before, _ = max(pauses, key=lambda pause: pause[1] - pause[0])
                found[before].append(result)
        return tuple(map(tuple, found))

    @functools.cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Return the bytes of all results of each operation."""
        return tuple(sum(self.size_bytes[r] for r in results) for results in self.results)

    @property
    def least_bytes(self) -> int:
        """Return what the neediest operation takes at once: no schedule holds less."""
        read = (sum(self.size_bytes[r] for r in set(inputs)) for inputs in self.inputs)
        return max(self.rest(i) + self.made_bytes[i] + each for i, each in enumerate(read))
