"""Lets the state of optimizers leave the pool between steps, and brings it back ahead of them.

What makes it leave, and what a step still waits for, is compiled (``zico.heap.state_offload``).
Here is when it begins to come back. A thread brings as much as there is room for, from the event of
the iteration on behind which there is just enough time (``Lead``). Where it came too late, it
begins earlier in the next iteration.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from typing import TYPE_CHECKING

from zico.base.records import word_of
from zico.heap import state_offload
from zico.heap.layout import Attached
from zico.swap.schedule import EARLIER, LEAD_NS
from zico.tiers.layout import KIND_NAMES, MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zico.heap.build import Heap
    from zico.swap.swapper import Swapper
    from zico.tiers.destinations import TierWish


def allow(heap: Heap, wishes: Sequence[TierWish]) -> None:
    """Let as much leave as the job's tiers have of memory: no other tier can hold what must stay at its address."""
    memory_bytes = sum(wish.size_bytes for wish in wishes if wish.kind == KIND_NAMES[MEMORY])
    heap.record[0]["optimizer"]["limit"] = memory_bytes // heap.slot_bytes


class Lead:
    """Says from which event of an iteration on the state is to come back."""

    def __init__(self) -> None:
        """Begin with a lead for a thread to wake up."""
        self.lead_ns = LEAD_NS
        self._times_ns: list[int] = []
        self._first: int | None = None

    def is_due(self, now_ns: int) -> bool:
        """Note the next event; tells whether the state is to come back."""
        self._times_ns.append(now_ns)
        return self._first is not None and len(self._times_ns) > self._first

    def turn(self, now_ns: int, late_ns: int, *, was_in_vain: bool) -> None:
        """Begin the next iteration: a step has come.

        Args:
            now_ns: When.
            late_ns: For how long it has waited for what was late. That begins to come back earlier
                by that time, and by 5 % of it beyond (Capuchin's rule).
            was_in_vain: Most of what had come back left again before the step: half the lead is
                enough.
        """
        if not self._times_ns:  # another optimizer's step, behind the same backward pass
            return
        if was_in_vain:
            self.lead_ns = (self.lead_ns + LEAD_NS) // 2
        elif late_ns > 0:
            self.lead_ns = min(self.lead_ns + round(late_ns * (1 + EARLIER)), now_ns - self._times_ns[0])
        self._first = max(0, bisect.bisect_right(self._times_ns, now_ns - self.lead_ns) - 1)
        self._times_ns = []


class StateOffload:
    """What an adapter tells of steps."""

    def __init__(self, heap: Heap, swapper: Swapper) -> None:
        """Let a heap's state leave; starts a thread that brings it back at the swapper's events."""
        self._heap = heap.record[0]
        self._away = word_of(self._heap, "optimizer", "away")
        self._swapper = swapper
        self._lead = Lead()
        self._due = threading.Event()
        self._brought = 0
        """Slots that came back ahead of the next step."""
        self._left = 0
        """Slots that had left, ever, when the last ones of these came."""
        state_offload.return_ahead(self._heap)  # only so that it is compiled or loaded before the thread needs it
        swapper.on_event = self._note_event
        threading.Thread(target=self._bring, name="zico-state", daemon=True).start()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Put what this thread allocates meanwhile where it can leave from."""
        self.put_apart(on=True)
        try:
            yield
        finally:
            self.put_apart(on=False)

    def put_apart(self, *, on: bool) -> None:
        """Put what this thread allocates from now on where it can leave from, or elsewhere."""
        self._heap["optimizer"]["thread"] = threading.get_ident() if on else 0

    def begin_step(self) -> None:
        """Have the state back; waits until it is, unless that cannot be."""
        if self._heap["attached"] != Attached.YES:
            return
        late_ns = int(self._heap["optimizer"]["late_ns"])
        began_ns = time.monotonic_ns()
        state_offload.begin_step(self._heap)
        went_again = int(self._heap["optimizer"]["left"]) - self._left
        self._lead.turn(
            began_ns, int(self._heap["optimizer"]["late_ns"]) - late_ns, was_in_vain=2 * went_again > self._brought > 0
        )
        self._brought = 0

    def end_step(self) -> None:
        """Let it leave from now on, where memory is short."""
        if self._heap["attached"] != Attached.YES:
            return
        state_offload.end_step(self._heap)
        self._swapper.publish()

    def _note_event(self) -> None:
        if self._lead.is_due(time.monotonic_ns()) and self._away[0] > 0:
            self._due.set()

    def _bring(self) -> None:
        while True:
            self._due.wait()  # no deadline: nobody waits for this thread
            self._due.clear()
            self._brought += state_offload.return_ahead(self._heap)
            self._left = int(self._heap["optimizer"]["left"])
