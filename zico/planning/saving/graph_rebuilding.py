"""What a compiled training step should compute twice, so that less waits for its backward pass.

Theory of operation
    A step's graph has forward operations, and backward ones that read what those made. The *pivot*
    is the last forward operation: all that the backward pass proper depends on it. What backward
    operations read from before the pivot is *kept* across it, and that is most of a step's peak.

    A kept result of a cheap operation is dropped. A copy of the operation runs again just before
    the first backward operation that reads it. Its inputs are kept then, or are made again
    themselves. The search begins with copies of everything that can run again. It takes back what
    costs most time for the memory that it saves, as long as what is kept stays within the limit.

    Frameworks also run backward operations early that need nothing but forward results, and keep
    what these make. Such an operation waits for its place in the backward pass, unless its result
    is much smaller than what it reads.

Guarantees
    6. Copies run the same operations on the same values. New edges are control edges, from an
    operation to one that comes later in an order of the whole graph, so there is no cycle.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from zico.planning.saving.clock import now_s
from zico.planning.saving.problem import LEAST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Result = tuple[int, int]
    """An operation's number, and which of its results."""

PIVOT_BYTES = 1024
SHRINKS = 2
"""An operation runs early if what it reads is so many times what it makes."""
_MOST_AMONG_FORWARD = 10
"""One in so many operations named as backward may come before the pivot: graph optimizers share equal operations."""
_MOST_ROUNDS = 6
DEADLINE_S = 5.0
"""Most time that a search takes, while the step waits: a graph of 2,000 operations takes half a second."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a step's graph, by its number in a sequence of them."""

    inputs: tuple[Result, ...]
    """The results that it reads."""
    waits_for: tuple[int, ...] = ()
    """Operations that end before it begins, besides those."""
    output_bytes: tuple[int, ...] = (0,)
    """The bytes of each result; 0 where nobody knows."""
    passes: float | None = None
    """The time that it takes again, in passes over its largest operand; ``None``: it must not run again."""
    is_view: bool = False
    """Its result has the memory of its first input."""
    lasts: bool = False
    """Its results outlive the step, or take no memory of it: weights, constants, arguments."""
    is_gradient: bool = False
    """The framework's name for it says that it belongs to the backward pass."""
    can_be_pivot: bool = False
    """Its results are floating-point tensors that the forward pass made."""


@dataclasses.dataclass(frozen=True)
class Rebuilding:
    """What to change in a graph."""

    copies: tuple[tuple[int, int], ...]
    """Operations to run again, in an order that works, each after an operation of the backward pass."""
    delays: tuple[tuple[int, int], ...]
    """Backward operations that would run early, each with one to wait for."""
    readers: tuple[tuple[int, int], ...]
    """Inputs that read a copy from now on: an operation, and which of its inputs."""
    kept_bytes: int
    """What is kept across the pivot."""
    copied_bytes: float
    """The passes of all copies, times the bytes of each one's largest operand."""


class StepGraph:
    """A step's graph, with its pivot and its backward pass found."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Sort the operations and find the pivot; takes time in proportion to the square of their number, in bits.

        Raises:
            ValueError: There is no backward pass, or operations wait for each other in a circle.
        """
        self._operations = operations
        self._followers: list[list[int]] = [[] for _ in operations]
        for i, operation in enumerate(operations):
            for before in self._before(operation):
                self._followers[before].append(i)
        self._order = self._sorted()
        self._pivot = self._find_pivot()
        self._forward = self._reach(reversed(self._order), self._followers)
        late = self._reach(self._order, [list(self._before(operation)) for operation in operations])
        self._spine = [i for i in self._order if late[i] and i != self._pivot]
        self._place = {i: place for place, i in enumerate(self._spine)}
        self._delayed = self._find_delayed()
        self._seeds = [
            result
            for i, operation in enumerate(operations)
            if i in self._place
            for result in operation.inputs
            if result[0] not in self._place
        ]
        self._again = frozenset(
            i for i, operation in enumerate(operations) if operation.passes is not None and i not in self._place
        )

    @staticmethod
    def _before(operation: Operation) -> Iterable[int]:
        yield from (before for before, _ in operation.inputs)
        yield from operation.waits_for

    def _sorted(self) -> list[int]:
        missing = [sum(1 for _ in self._before(operation)) for operation in self._operations]
        ready = deque(i for i, count in enumerate(missing) if count == 0)
        order = []
        while ready:
            i = ready.popleft()
            order.append(i)
            for follower in self._followers[i]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready.append(follower)
        if len(order) < len(self._operations):
            raise ValueError("operations wait for each other in a circle")
        return order

    def _find_pivot(self) -> int:
        """Return the deepest forward operation of which a backward one reads a large result.

        Graph optimizers let forward operations share some that are named as backward ones, so a few
        of these may come before.
        """
        depth, gradients = [0] * len(self._operations), [0] * len(self._operations)
        n_gradients = 0
        for i in self._order:
            operation = self._operations[i]
            counts = operation.is_gradient and not operation.lasts
            n_gradients += counts
            gradients[i] = counts << i
            for before, _ in operation.inputs:
                depth[i] = max(depth[i], depth[before] + 1)
                gradients[i] |= gradients[before]
        found = [
            i
            for i, operation in enumerate(self._operations)
            if operation.can_be_pivot
            and not operation.is_gradient
            and max(operation.output_bytes, default=0) >= PIVOT_BYTES
            and gradients[i].bit_count() <= n_gradients // _MOST_AMONG_FORWARD
            and any(self._operations[follower].is_gradient for follower in self._followers[i])
        ]
        if not found:
            raise ValueError("no forward operation whose result a backward one reads")
        return max(found, key=lambda i: (depth[i], i))

    def _reach(self, order: Iterable[int], neighbours: Sequence[Sequence[int]]) -> list[bool]:
        """Tell which operations lead to the pivot, or follow it, by neighbours that come earlier in the order."""
        reached = [False] * len(self._operations)
        for i in order:
            reached[i] = i == self._pivot or any(reached[j] for j in neighbours[i])
        return reached

    def _find_delayed(self) -> list[int]:
        """Give a place in the backward pass to early operations that only it reads; returns them."""
        delayed = []
        for i in reversed(self._order):
            operation = self._operations[i]
            if self._forward[i] or i in self._place or operation.lasts or not self._followers[i]:
                continue
            read = sum(self._operations[before].output_bytes[which] for before, which in operation.inputs)
            places = [self._place.get(follower) for follower in self._followers[i]]
            known = [place for place in places if place is not None]
            if len(known) == len(places) and SHRINKS * sum(operation.output_bytes) >= read:
                self._place[i] = min(known)
                delayed.append(i)
        return delayed

    def _root(self, result: Result) -> Result:
        """Return the result that has the memory."""
        operation = self._operations[result[0]]
        while operation.is_view and operation.inputs:
            result = operation.inputs[0]
            operation = self._operations[result[0]]
        return result

    def _cost(self, i: int) -> float:
        operation = self._operations[i]
        read = (self._operations[before].output_bytes[which] for before, which in operation.inputs)
        return (operation.passes or 0.0) * max((*operation.output_bytes, *read), default=0)

    def _needed(self, again: frozenset[int] | set[int]) -> tuple[int, float, set[int]]:
        """Return the bytes kept, the cost, and the copies, if these operations and no others may run again."""
        kept, copies, seen = {}, set(), set()
        waiting = list(self._seeds)
        while waiting:
            result = waiting.pop()
            if result in seen:
                continue
            seen.add(result)
            i, which = result
            operation = self._operations[i]
            if i in again and (operation.is_view or operation.output_bytes[which] >= LEAST_BYTES):
                copies.add(i)
                waiting.extend(operation.inputs)
            else:
                root = self._root(result)
                if not self._operations[root[0]].lasts:
                    kept[root] = self._operations[root[0]].output_bytes[root[1]]
        return sum(kept.values()), sum(map(self._cost, copies)), copies

    def kept_bytes(self) -> int:
        """Return what is kept across the pivot if nothing runs again."""
        return self._needed(frozenset())[0]

    def least_bytes(self) -> int:
        """Return what is kept across the pivot if everything runs again that can."""
        return self._needed(self._again)[0]

    def plan(self, limit_bytes: int, deadline_s: float = DEADLINE_S) -> Rebuilding:
        """Return copies that keep at most so many bytes across the pivot, or as few as can be, cheap ones first.

        Each step of the search passes through the whole graph. When the deadline has passed, more
        runs again than is needed.
        """
        end_s = now_s() + deadline_s
        again = set(self._again)
        kept, cost, copies = self._needed(again)
        limit = max(limit_bytes, kept)
        for _ in range(_MOST_ROUNDS):
            gains = []
            for i in copies:
                if now_s() > end_s:
                    break
                without = self._needed(again - {i})
                if without[1] < cost:
                    gains.append(((cost - without[1]) / max(without[0] - kept, 1), i))
            taken = False
            for _, i in sorted(gains, reverse=True):
                if now_s() > end_s:
                    break
                without = self._needed(again - {i})
                if without[0] <= limit and without[1] <= cost:
                    again.discard(i)
                    kept, cost, copies = without
                    taken = True
            if not taken:
                break
        return self._rebuilding(copies, kept, cost)

    def _rebuilding(self, copies: set[int], kept_bytes: int, copied_bytes: float) -> Rebuilding:
        readers = [
            (i, at)
            for i in self._place
            for at, (before, _) in enumerate(self._operations[i].inputs)
            if before in copies
        ]
        places: dict[int, int] = {}
        for i, at in readers:
            before = self._operations[i].inputs[at][0]
            places[before] = min(places.get(before, self._place[i]), self._place[i])
        ordered = [i for i in self._order if i in copies]
        for i in reversed(ordered):
            for before, _ in self._operations[i].inputs:
                if before in copies:
                    places[before] = min(places.get(before, places[i]), places[i])
        return Rebuilding(
            copies=tuple((i, self._ahead_of(places[i])) for i in ordered),
            delays=tuple((i, self._ahead_of(self._place[i])) for i in self._delayed),
            readers=tuple(readers),
            kept_bytes=kept_bytes,
            copied_bytes=copied_bytes,
        )

    def _ahead_of(self, place: int) -> int:
        return self._spine[place - 1] if place > 0 else self._pivot
