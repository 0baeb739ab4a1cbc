"""A swapper for a job: its tier, its heap as a gauge, and relief for its threads that wait."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import TYPE_CHECKING

from zico.heap.reclaim import NOBODY_TO_ASK, NOT_ASKED
from zico.swapping.gauge import HeapGauge
from zico.swapping.learning import Learner
from zico.swapping.mover import Mover
from zico.swapping.resting import allow
from zico.swapping.swapper import Swapper
from zico.swapping.ways import ways
from zico.tiers.stack import TierStack
from zico.tiers.wishes import parse_tiers

if TYPE_CHECKING:
    from zico.heap.build import Heap
    from zico.swapping.schedule import Observed
    from zico.tiers.rates import Rates

DEFAULT_TIER = "memory"
BLOCK_BYTES = 256 << 10
"""Of a job's own tiers: what is smaller than a few of these never leaves."""


def start(heap: Heap, tier: str = "", directory: str | None = None) -> Swapper:
    """Let idle tensors of this process leave for a tier and come back; an adapter tells of them.

    Starts threads, makes the tier that is wanted and measures it. Files of tiers lie in ``directory``.

    Raises:
        ConfigError: There is no such tier, or it cannot be made.
        DriverError: The kernel has no memory for it.
    """
    record = heap.record[0]
    wishes = parse_tiers(tier or DEFAULT_TIER, directory)
    stack = TierStack.create(wishes, block_bytes=BLOCK_BYTES, directory=directory, label="zico-swap")

    gauge = HeapGauge(heap)
    gauge.choose_swapping()
    mover = Mover(stack, gauge.publish, int(record["wait"]["limit_ns"]) / 1e9, gauge.has_room, gauge.be_patient)

    def rates() -> Rates:
        return stack.rates()[0]

    def tell(seen: Observed, margin: float) -> None:
        if gauge.leaves_it_to_the_broker():
            peak_bytes = int(seen.load_bytes.max()) + gauge.restable_bytes()
            gauge.tell(peak_bytes, ways(seen, rates(), margin))

    swapper = Swapper(mover, gauge, Learner(gauge.ended, gauge.cap_bytes, rates, tell))
    asked_fd = os.eventfd(0, os.EFD_CLOEXEC)
    threading.Thread(target=_relieve, args=(heap, gauge, swapper, asked_fd), name="zico-relief", daemon=True).start()
    record["swap"]["sequence"] = NOT_ASKED
    record["swap"]["fd"] = asked_fd
    allow(heap, wishes)
    os.register_at_fork(before=swapper.hold, after_in_parent=swapper.go_on, after_in_child=swapper.leave_to_parent)
    return swapper


def _relieve(heap: Heap, gauge: HeapGauge, swapper: Swapper, asked_fd: int) -> None:
    """Answer allocations that wait, for as long as the process lives; if this fails nobody asks any more."""
    record = heap.record[0]
    poll = select.poll()
    poll.register(asked_fd, select.POLLIN)
    with contextlib.ExitStack() as undo:
        undo.callback(record["swap"].__setitem__, "fd", NOBODY_TO_ASK)
        while True:
            poll.poll()  # no deadline: who asks goes on without an answer when its own deadline has passed
            os.eventfd_read(asked_fd)
            asked = int(record["swap"]["asked"])
            swapper.relieve(gauge.needed_bytes())
            record["swap"]["answered"] = asked
            gauge.wake()
