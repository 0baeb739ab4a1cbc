"""Lets the state of optimizers leave the pool between steps; an adapter says when a step begins and ends."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from zico.heap import resting, stepping
from zico.tiers.layout import KIND_NAMES, MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.heap.build import Heap
    from zico.tiers.wishes import TierWish


def allow(heap: Heap, wishes: Sequence[TierWish]) -> None:
    """Let as much rest as the job's tiers have of memory: no other tier can hold what must stay at its address."""
    memory_bytes = sum(wish.size_bytes for wish in wishes if wish.kind == KIND_NAMES[MEMORY])
    heap.record[0]["rest_limit"] = memory_bytes // heap.slot_bytes


class Resting:
    """What an adapter tells of steps."""

    def __init__(self, heap: Heap, publish: Callable[[], None]) -> None:
        """Let a heap's state rest; ``publish`` is called when what has been moved can be read."""
        self._heap = heap.record[0]
        self._publish = publish

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Put what this thread allocates meanwhile where it can rest."""
        self.put_apart(on=True)
        try:
            yield
        finally:
            self.put_apart(on=False)

    def put_apart(self, *, on: bool) -> None:
        """Put what this thread allocates from now on where it can rest, or no longer."""
        self._heap["apart_thread"] = threading.get_ident() if on else 0

    def begin_step(self) -> None:
        """Have the state back; waits until it is, unless that cannot be."""
        stepping.begin_step(self._heap)

    def end_step(self) -> None:
        """Let it rest from now on, where memory is short."""
        resting.end_step(self._heap)
        self._publish()
