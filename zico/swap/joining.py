"""A swapper for a job: its tier, its heap as a gauge, and room for its threads that wait.

The gauge reads from the heap what the job holds and what its last iteration did to memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.libc import FUTEX_WAKE, SYS_FUTEX, WAKE_ALL
from zico.base.programs import PATIENCE_S
from zico.base.records import view_at, word_of
from zico.base.saying import inform
from zico.base.units import format_bytes
from zico.base.warming import LATER, compile_beside
from zico.heap.history import SIZE_BITS
from zico.heap.layout import LIFETIME, LOG, LOGS, MAX_LIFETIMES
from zico.heap.reclaim import NOBODY_TO_ASK, NOT_ASKED
from zico.planning.saving.registry import LONGEST, OURS
from zico.pool.layout import HEADER, PLANNER_NOTE_BYTES, SaveMode
from zico.swap.job import Job
from zico.swap.learning import Ended, Learner
from zico.swap.mover import Mover
from zico.swap.schedule import load
from zico.swap.state_return import allow
from zico.swap.swapper import Swapper
from zico.tiers.destinations import parse_tiers
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.heap.build import Heap
    from zico.swap.device_tier import DeviceTier
    from zico.swap.mover import Figures
    from zico.swap.observed import Int64s, Observed
    from zico.tiers.destinations import TierWish
    from zico.tiers.layout import Rates


# -- what the heap knows ---------------------------------------------------------------------------


_libc = ctypes.CDLL(None, use_errno=True)
_SIZE_MASK = (1 << SIZE_BITS) - 1
_TOLD = (
    "out_bytes",
    "in_bytes",
    "out_now_bytes",
    "copy_waited_ns",
    "copy_hidden_ns",
    "late",
    "dropped_bytes",
    "making_ns",
)
"""What the job's record says of its copies."""


class HeapGauge:
    """The heap of this process, and its job."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap.record[0]
        self._job = heap.pool.jobs[int(heap.pool.member[0]["job"])]
        self._region_bytes = heap.pool.region_bytes
        self._word_address = int(heap.pool.member[0]["header_address"]) + HEADER.fields["sequence"][1]
        self._logs = view_at(int(self._heap["logs_address"]), LOG, LOGS)
        self._lifetimes = [view_at(int(log["lifetimes_address"]), LIFETIME, MAX_LIFETIMES) for log in self._logs]
        self._budget = word_of(heap.pool.header, "budget_regions")
        job, of_heap = functools.partial(word_of, self._job), functools.partial(word_of, self._heap)
        self._limit, self._held, self._live = job("limit"), job("held"), job("live_bytes")
        self._waiting, self._iteration, self._waited = job("waiting_threads"), job("iteration"), job("need_waited_ns")
        self._state_slots, self._state_limit, self._events = (
            of_heap("optimizer", "in_use"),
            of_heap("optimizer", "limit"),
            of_heap("events"),
        )
        self._sequence, self._leaving = of_heap("swap", "sequence"), of_heap("swap", "leaving_bytes")
        self._told = tuple(job(name) for name in _TOLD)
        self._optimizer = tuple(of_heap("optimizer", name) for name in ("left", "returned", "away", "late_ns", "late"))

    def cap_bytes(self) -> int:
        """Return what the job may hold: the budget, or its own limit where that is lower."""
        budget, limit = self._budget[0], self._limit[0]
        return (min(budget, limit) if limit else budget) * self._region_bytes

    def live_bytes(self) -> int:
        """Return what its tensors take in the pool, but for what is away between steps, or can be."""
        return max(0, self._live[0] - self.state_bytes())

    def state_bytes(self) -> int:
        """Return what can be out of the pool wherever tensors are idle: the state of optimizers, in whole regions."""
        return min(self._state_slots[0], self._state_limit[0]) * self._region_bytes

    def be_patient(self, thread: int) -> None:
        """Note which thread allocates for later, 0: none does."""
        self._heap["swap"]["patient_thread"] = thread

    def has_room(self, size_bytes: int) -> bool:
        """Tell whether so much can be had at once, by what it may hold and by what lies free in its regions."""
        free_bytes = self.cap_bytes() - self._held[0] * self._region_bytes
        if size_bytes + self._region_bytes <= free_bytes:
            return True
        return self._waiting[0] == 0 and self.live_bytes() + 2 * size_bytes <= self.cap_bytes()

    def tick(self) -> int:
        """Return how many allocations and frees there have been."""
        return self._events[0]

    def iteration(self) -> int:
        """Return how many iterations have ended."""
        return self._iteration[0]

    def waited_ns(self) -> int:
        """Return for how long it has waited for memory."""
        return self._waited[0]

    def peak_regions(self) -> int:
        """Return the most regions that it has ever held."""
        return int(self._job["peak_held"])

    def needed_bytes(self) -> int:
        """Return what a thread of it waits for."""
        return int(self._job["need"]) * self._region_bytes

    def publish(self, figures: Figures) -> None:
        """Write down what has been moved where reports and waiting threads find it, and let those ask again."""
        left, returned, away, late_ns, late = (word[0] for word in self._optimizer)
        self._sequence[0] = NOT_ASKED
        self._leaving[0] = figures.leaving_bytes
        values = (
            figures.out_bytes + left * self._region_bytes,
            figures.in_bytes + returned * self._region_bytes,
            figures.away_bytes + away * self._region_bytes,
            figures.waited_ns + late_ns,
            figures.hidden_ns,
            figures.late + late,
            figures.dropped_bytes,
            figures.making_ns,
        )
        for word, value in zip(self._told, values, strict=True):
            word[0] = value
        self.wake()

    def wake(self) -> None:
        """Let a thread of the job that waits for memory look again: what has left need not have emptied a region."""
        if self._waiting[0]:
            _libc.syscall(SYS_FUTEX, ctypes.c_void_p(self._word_address), FUTEX_WAKE, WAKE_ALL, None, None, 0)

    def lacking(self) -> str:
        """Return what the job has begun to overflow for, as people read it."""
        limit, budget = self._limit[0], self._budget[0]
        whose = "its limit is" if 0 < limit < budget else "the budget is"
        lacked_bytes = int(self._heap["swap"]["lacked_bytes"])
        return f"needs {format_bytes(lacked_bytes)} and {whose} {format_bytes(self.cap_bytes())}"

    def ended(self) -> Ended | None:
        """Return what the iteration that ended last did to memory; ``None`` if its log is not whole.

        Nothing is locked: what other threads allocate or free meanwhile makes it that much wrong.
        """
        now = int(self._heap["log"])
        log = self._logs[now - 1]
        begin, end = int(log["begin"]), int(log["end"])
        if not 0 < int(log["n"]) < MAX_LIFETIMES or end <= begin:
            return None
        change = np.zeros(end - begin + 1, np.int64)
        since = 0
        for index in (now, now - 1, now - 2):
            lifetimes = self._lifetimes[index][: int(self._logs[index]["n"])].copy()
            size_bytes = lifetimes["key"] & _SIZE_MASK
            for ticks, sign in ((lifetimes["lower"], 1), (lifetimes["upper"], -1)):
                inside = (ticks > begin) & (ticks <= end)
                np.add.at(change, ticks[inside] - begin, sign * size_bytes[inside])
                since += sign * int(size_bytes[ticks > end].sum())
        done: Int64s = np.cumsum(change)
        return Ended(begin, self.live_bytes() - since - done[-1] + done, int(self._job["last_boundary_ns"]))


# -- joining ---------------------------------------------------------------------------------------


DEFAULT_TIER = "memory"
BLOCK_BYTES = 256 << 10
"""Of a job's own tiers: what is smaller than a few of these never leaves."""


class SwappingJob(HeapGauge, Job):
    """The job of a heap, once it swaps: with its tier, and with what its record says of its planner."""

    def __init__(
        self, heap: Heap, tier: TierStack | DeviceTier, prepare: Callable[[str], None], *, as_auto: bool
    ) -> None:
        """Let the job's record say that it swaps, where that was left open.

        Args:
            heap: One that is in a pool.
            tier: Where tensors go.
            prepare: As ``Job.prepare``; the adapter's.
            as_auto: Whether the broker chooses what the job may hold, unless a person has.
        """
        super().__init__(heap)
        self._tier, self._prepare = tier, prepare
        self._said: set[str] = set()
        self._job["save"] = SaveMode.SWAP
        if as_auto:
            self._job["auto"] = self._job["limit"] == 0

    def rates(self) -> Rates:
        """Return those of the tier, now."""
        return self._tier.rates()[0]

    def prepare(self, planner: str) -> None:
        """Let the adapter get ready for a planner."""
        self._prepare(planner)

    def follow(self, planner: str, note: str) -> None:
        """Write a planner's name and a note into the job's record; inform the user once where ``LONGEST`` stands in."""
        self._job["planner"] = planner.encode()
        text = note.encode("ascii", errors="replace")
        self._job["planner_note"] = text if len(text) <= PLANNER_NOTE_BYTES else text[: PLANNER_NOTE_BYTES - 3] + b"..."
        asked = note.partition(" ")[0]
        if note and planner == LONGEST and asked not in self._said:
            self._said.add(asked)
            inform(note)

    def tell(self, seen: Observed) -> None:
        """Tell a broker that chooses for the job what it would hold without a limit."""
        if self._job["auto"]:
            peak_bytes = int(seen.load_bytes.max()) + self.state_bytes()
            self._job["wanted"] = -(-peak_bytes // self._region_bytes)


def start(
    heap: Heap,
    tier: str = "",
    directory: str | None = None,
    *,
    as_auto: bool = False,
    planners: Sequence[str] = (LONGEST,),
    prepare: Callable[[str], None] = lambda _planner: None,
) -> Swapper:
    """Let idle tensors of this process leave for a tier and come back; an adapter tells of them.

    Starts threads, makes the tier that is wanted and measures it. Files of tiers lie in
    ``directory``. What exceeds all that the job may hold goes to the next tier, if nothing can leave.
    With ``as_auto`` the broker chooses what it may hold. Of ``planners``, some of
    ``zico.planning.saving.registry.JOB_PLANNERS``, the fastest chooses what leaves;
    ``prepare`` is told of each but the first before an iteration is observed for it. Waits until
    their code is compiled: a minute or two, once on a machine.

    Raises:
        ConfigError: There is no such planner or tier, or it cannot be made.
        DriverError: The kernel has no memory for it.
    """
    if OURS in planners and (compiling := compile_beside(*LATER)):
        inform("this job waits until what plans its swaps is compiled: a minute or two, once on a machine")
        with contextlib.suppress(subprocess.TimeoutExpired):  # then this process compiles
            compiling.wait(PATIENCE_S)
    for planner in planners:
        load(planner)
    record = heap.record[0]
    wishes = parse_tiers(tier or DEFAULT_TIER, directory)
    on_device = bool(heap.pool.header["on_timeline"])
    of_stack: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "directory": directory, "label": "zico-swap"}
    stack = _device_tier(heap, wishes, of_stack) if on_device else TierStack.create(wishes, **of_stack)

    job = SwappingJob(heap, stack, prepare, as_auto=as_auto)
    mover = Mover(stack, job, int(record["wait"]["limit_ns"]) / 1e9)
    swapper = Swapper(mover, job, Learner(job, planners), logs_returns=not on_device)  # the log is of one stream
    asked_fd = os.eventfd(0, os.EFD_CLOEXEC)
    threading.Thread(target=_make_room, args=(heap, job, swapper, asked_fd), name="zico-room", daemon=True).start()
    record["swap"]["sequence"] = NOT_ASKED
    record["swap"]["fd"] = asked_fd
    if not record["swap"]["overflows"]:
        record["swap"]["start_fd"] = asked_fd  # it has begun
        record["swap"]["overflows"] = 1
    if not on_device:  # a forked child can reach nothing that is on a GPU, and no state can leave from there
        allow(heap, wishes)
        os.register_at_fork(before=swapper.hold, after_in_parent=swapper.go_on, after_in_child=swapper.leave_to_parent)
    return swapper


def _device_tier(heap: Heap, wishes: Sequence[TierWish], of_stack: dict[str, Any]) -> DeviceTier:
    from zico.swap.device_tier import DeviceTier  # compiled or loaded by this, so only where it is needed

    return DeviceTier(heap, wishes, **of_stack)


def _make_room(heap: Heap, gauge: HeapGauge, swapper: Swapper, asked_fd: int) -> None:
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
            swapper.make_room(gauge.needed_bytes())
            record["swap"]["answered"] = asked
            gauge.wake()
