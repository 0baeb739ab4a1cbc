"""A forked child sees its parent's tensors as they were, and shares nothing with the pool (invariant 10).

The window is a shared mapping, so copy-on-write does not come by itself. The child copies the slots that hold live
tensors into private memory at the same addresses before ``fork`` returns in it; the parent's tensors stand still until
then, because the forking thread keeps the heap's mutex. The copies are the child's own memory, outside the budget.

The window of a paged job is not in its child at all: what the child touched there would be filled with zeros for both.
Its pager stands still while the child copies, from the pages that are there and from the tier.

Known limitations
    Applies to ``os.fork`` (so to ``multiprocessing``, data loaders and ``pty``), not to a fork made by C code that
    then goes on without ``exec``.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import compiled, private_lock, private_unlock
from zico.driver import host
from zico.errors import DriverError
from zico.heap.layout import Attached

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from zico.heap.build import Heap
    from zico.paging.pager import PagedMemory

COPY_DEADLINE_S = 60.0
"""How long a parent waits for its child's copies; a child that dies ends the wait at once."""


@compiled
def lock(heap: Any) -> None:  # noqa: ANN401 - the HEAP record
    """Enter the heap's critical section."""
    private_lock(heap.mutex_address)


@compiled
def unlock(heap: Any) -> None:  # noqa: ANN401 - the HEAP record
    """Leave it."""
    private_unlock(heap.mutex_address)


class ForkGuard:
    """Makes ``os.fork`` safe for one heap; registered for the life of the process."""

    def __init__(self, heap: Heap, on_child: Callable[[], None]) -> None:
        """Watch forks from now on; ``on_child`` runs in a child when its copies are made."""
        self._heap = heap
        self._on_child = on_child
        self._pipe: tuple[int, int] | None = None
        self._stands = True
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    @property
    def _is_member(self) -> bool:
        return bool(self._heap.record[0]["attached"] == Attached.YES)

    def _before(self) -> None:
        if self._is_member:
            self._pipe = os.pipe()
            lock(self._heap.record[0])
            if self._heap.paged is not None:
                self._stands = self._heap.paged.hold_still(COPY_DEADLINE_S)

    def _in_parent(self) -> None:
        """Wait until the child has copied, then let other threads allocate again."""
        if self._pipe is None:
            return
        reading, writing = self._pipe
        self._pipe = None
        os.close(writing)
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        poll.poll(COPY_DEADLINE_S * 1000)  # ends by the child's close, or by its death
        os.close(reading)
        if self._heap.paged is not None:
            self._heap.paged.go_on()
        unlock(self._heap.record[0])

    def _in_child(self) -> None:
        if self._pipe is None:
            return
        reading, writing = self._pipe
        self._pipe = None
        os.close(reading)
        shared = 0
        if self._heap.paged is not None:
            shared = int(self._heap.record[0]["spill_offset"]) // self._heap.pool.region_bytes
            self._copy_paged(self._heap.paged)
        for first, count in live_runs(self._heap.slots["live"][shared:]):
            _make_private(self._heap, shared + first, count)
        self._heap.record[0]["attached"] = Attached.FORKED
        os.close(writing)
        unlock(self._heap.record[0])
        self._on_child()

    def _copy_paged(self, paged: PagedMemory) -> None:
        """Put copies of the blocks in use where the window was in the parent."""
        try:
            if not self._stands:
                _die("the pager did not stand still")
            for first, count in live_runs(paged.live):
                paged.copy_private(first, count)
            paged.close_in_child()
        except (DriverError, OSError) as error:
            _die(str(error))


def live_runs(live: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Return (first, count) of each run of slots with live blocks."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (live > 0).astype(np.int8), [0]))))
    return [(int(first), int(end - first)) for first, end in edges.reshape(-1, 2)]


def _make_private(heap: Heap, first: int, count: int) -> None:
    """Replace a run of shared slots by a private copy at the same addresses."""
    region_bytes = heap.pool.region_bytes
    try:
        host.make_private(heap.base + first * region_bytes, count * region_bytes)
    except DriverError as error:
        _die(str(error))


def _die(reason: str) -> None:
    """End a child that would otherwise write into its parent's tensors."""
    os.write(2, f"zico: forked process {os.getpid()} ends: {reason}\n".encode())
    os._exit(1)
