"""Decides what leaves and comes back while an iteration runs: by a plan, or by what is known without one.

Theory of operation
    An adapter tells of every tensor that becomes idle (``saved``) and of every use (``used``).
    The events of an iteration may be those of the plan. Then the plan's tensors leave as soon as
    nobody can reach them, and are fetched at the plan's events. Without a plan, and from the first
    event that is not the plan's: what became idle first leaves as soon as memory is nearly full.
    After a use comes what became idle before that, as long as there is room. Backward passes use
    last what was saved first.

    In either case a thread of the job that waits for memory gets room (``make_room``): whatever is
    idle and needed last leaves.

Guarantees
    8. A plan that is wrong costs time, never correctness.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from zico.base.errors import SwapError, ZicoError
from zico.swap.learning import ProcessorClock
from zico.swap.mover import Place
from zico.swap.observed import SAVED, USED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zico.swap.job import Job
    from zico.swap.learning import Clock, Learner
    from zico.swap.mover import Figures, Idle, Mover
    from zico.swap.schedule import Plan

Taken = TypeVar("Taken")

LEAST_BYTES = 1 << 20
"""Smaller tensors stay. Source: AutoSwap (Zhang et al., "Efficient memory management for GPU-based deep learning
systems", 2019), section IV: candidates of at least 1 MB."""
FULL_SHARE = 0.85
"""Without a plan: of what the job may hold, above which idle tensors leave before anybody waits."""
ROOM_SHARE = 0.9
"""Without a plan: of what the job may hold, up to which tensors come back before they are needed."""
LANDING_S = 1.0
"""Seconds. No copy from a useful tier takes longer, and no wait for the device to tell what may go."""
FORK_S = 60.0
"""Longest that a fork waits for copies on their way, and a parent for its child's."""
_LOOK_BACK = 16
"""Without a plan: of so many tensors that became idle before one that is used, those come back that have room."""
MOST_EVENTS = 1 << 17
"""Of an iteration; beyond that something else is going on."""


class Swapper:
    """Watches the idle tensors of a job and moves them."""

    def __init__(self, mover: Mover, job: Job, learner: Learner, *, logs_returns: bool = True) -> None:
        """Start without a plan.

        Args:
            mover: Moves tensors.
            job: Whose tensors they are.
            learner: Makes plans.
            logs_returns: Whether the learner's iterations know of memory that tensors come back to. If
                not, a tensor that has left is added to them until it dies.
        """
        self._logs_returns = logs_returns
        self._mover = mover
        self._job = job
        self._learner = learner
        self._lock = threading.RLock()
        self._held: list[Any] | None = None
        """Locks that a thread that forks has taken; ``None``: it began before anybody told it to."""
        self._pipe: tuple[int, int] | None = None
        self._idle: dict[int, weakref.ref[Idle]] = {}
        """By number; of earlier iterations only what is still alive, below zero."""
        self._wishes: list[weakref.ref[Idle]] = []
        self._due: list[int] = []
        self._plan: Plan | None = None
        self._event = 0
        self._numbers = 0
        self._iteration = job.iteration()
        self._waited_before_ns = job.waited_ns()
        self._late_before_ns = 0
        self._stood_by_at: int | None = None
        """The job's peak when nothing had to leave any more; ``None``: something may have to."""
        self.most_events = MOST_EVENTS
        self.follows_plans = True
        """Switch it off to compare with what happens without plans."""
        self.planned_iterations = 0
        """Iterations in which everything happened as planned, and something was to leave."""
        self.passive_iterations = 0
        """All others."""
        self.on_event: Callable[[], None] = lambda: None
        """Told of every event."""
        mover.on_moved = self._note_moved
        learner.clock = ProcessorClock(self._waited_ns)

    @property
    def tier(self) -> Any:  # noqa: ANN401 - a ``mover.Tier``, which may tell more
        """Return where tensors go."""
        return self._mover.tier

    def tell_time_by(self, clock: Clock) -> None:
        """Let iterations be observed by another clock than the processor's."""
        self._learner.clock = clock

    @property
    def figures(self) -> Figures:
        """Return what has been moved, and what that has cost."""
        return self._mover.figures

    @property
    def planned_bytes(self) -> int:
        """Return what leaves in an iteration by the plan in force."""
        return self._plan.out_bytes if self._plan is not None else 0

    @property
    def drops(self) -> frozenset[int]:
        """Return what is dropped by the plan in force, by number."""
        plan = self._plan
        return frozenset() if plan is None else plan.drops

    @property
    def turns(self) -> int:
        """Return how many iterations have ended."""
        return self.planned_iterations + self.passive_iterations

    def stands_by(self) -> bool:
        """Tell, at a boundary, whether nothing has to leave, so that nobody has to tell of tensors.

        That is so while iterations fit what the job may hold, as far as they have been seen and the
        job's peak does not grow. Once they do not fit any more, a plan is made at once.
        """
        with self._lock:
            fits, peak = self._learner.fits, self._job.peak_regions()
            if self._stood_by_at is None:
                self._stood_by_at = peak if fits else None
            elif not fits:
                self._stood_by_at = None
                self._learner.plan_again()
            elif peak > self._stood_by_at:
                self._stood_by_at = None
                self._learner.forget()
            return self._stood_by_at is not None

    # -- what the adapter tells --------------------------------------------------------------------

    def saved(self, idle: Idle, maker: str = "") -> None:
        """Note a tensor that is idle until it is used. Waits for nothing.

        Args:
            idle: The tensor.
            maker: The framework's name of the operation that made it, empty: not known.
        """
        with self._lock:
            self._turn_if_due()
            number = idle.ordinal = self._numbers
            self._numbers += 1
            self._idle[number] = weakref.ref(idle)
            self._learner.note_size(idle.size_bytes)
            plan = self._pass(2 * number + SAVED, idle.size_bytes, maker)
            if plan is None:
                self._thin_out()
            elif number in plan.leaves or number in plan.drops:
                self._wishes.append(weakref.ref(idle))

    def used(self, idle: Idle, take: Callable[[], Taken], reader: str = "") -> Taken:
        """Have a tensor here that is needed now; waits until it is.

        Args:
            idle: The tensor.
            take: Reaches for it, so that it is not idle any more.
            reader: The framework's name of the operation that has saved it and needs it, empty: not
                known.

        Returns:
            What ``take`` returns.

        Raises:
            SwapError: It cannot be brought back.
        """
        with self._lock:
            self._turn_if_due()
            plan = self._pass(2 * idle.ordinal + USED, 0, reader)
        was_late, taken = self._mover.need(idle, take)
        if plan is None:
            with self._lock:
                self._fetch_before(idle.ordinal)
        elif was_late:
            self._learner.note_late(idle.ordinal)
        return taken

    def bring(self, idle: Idle, take: Callable[[], Taken]) -> Taken:
        """Have a tensor here, as ``used`` does, though that is no event of the iteration."""
        return self._mover.need(idle, take)[1]

    def can_be_made(self, idle: Idle, cost_ns: int, sources: Sequence[Idle]) -> None:
        """Note that a tensor of this iteration can be made again, what that takes, and of which others."""
        with self._lock:
            if idle.ordinal >= 0 and all(source.ordinal >= 0 for source in sources):
                self._learner.note_way(idle.ordinal, cost_ns, [source.ordinal for source in sources])

    def forget(self, idle: Idle) -> None:
        """Let the tier's copy of a tensor go that nobody needs any more; from any thread at any moment."""
        if idle.is_unlogged:
            self._learner.note_moved(self._job.tick(), -idle.size_bytes)
        self._mover.forget_all_of(idle)

    def _pass(self, code: int, size_bytes: int, name: str) -> Plan | None:
        """Go by an event; returns the plan, if the iteration is still the plan's."""
        event = self._event
        self._event += 1
        self.on_event()
        self._learner.note_event(code, self._job.tick(), name)
        plan = self._plan
        if plan is None:
            return None
        seen = plan.observed
        is_other = event >= len(seen.sequence) or seen.sequence[event] != code
        if is_other or (code & 1 == SAVED and seen.size_bytes[code >> 1] != size_bytes):
            plan = None
        self._plan = plan
        if plan is None:
            self._wishes, self._due = [], []
            return None
        if self._wishes:
            self._wishes = [wish for wish in self._wishes if self._is_still_wished(wish)]
        returns = plan.returns.get(event)
        if returns is not None or self._due:
            due = (*self._due, *(returns or ()))
            self._due = [number for number in due if self._is_still_due(number)]
        return plan

    def _is_still_due(self, number: int) -> bool:
        """Let what is to be back come, if there is room for it; tells whether to look again."""
        idle = self._at(number)
        return idle is not None and self._mover.fetch(idle)

    def _is_still_wished(self, wish: weakref.ref[Idle]) -> bool:
        """Let what is to leave go if nobody can reach it any more; tells whether to try again."""
        idle, plan = wish(), self._plan
        if idle is None or idle.place is not Place.HERE:
            return False
        if plan is not None and idle.ordinal in plan.drops:
            return not self._mover.drop(idle)
        return not self._mover.send(idle) and idle.place is Place.HERE and not idle.stays

    def _waited_ns(self) -> int:
        return self._job.waited_ns() + self._mover.figures.waited_ns

    def _at(self, number: int) -> Idle | None:
        reference = self._idle.get(number)
        return None if reference is None else reference()

    # -- without a plan ----------------------------------------------------------------------------

    def _thin_out(self) -> None:
        """Let go what became idle first while memory is nearly full."""
        full_bytes = int(FULL_SHARE * self._job.cap_bytes())
        excess = self._job.live_bytes() - self._mover.figures.leaving_bytes - full_bytes
        if excess > 0:
            self._send(excess)

    def _fetch_before(self, number: int) -> None:
        """Bring back what became idle before, as long as there is room for it."""
        room = int(ROOM_SHARE * self._job.cap_bytes()) - self._job.live_bytes()
        for earlier in range(number - 1, max(number - _LOOK_BACK, 0) - 1, -1):
            idle = self._at(earlier)
            if idle is None or idle.place in (Place.HERE, Place.LEAVING):
                continue
            room -= idle.size_bytes
            if room < 0 or not self._mover.fetch(idle):
                return

    def _send(self, wanted_bytes: int) -> int:
        """Let idle tensors leave, those that became idle first first; returns the bytes."""
        sent = 0
        for idle in self._all():
            if sent >= wanted_bytes:
                break
            if self._mover.send(idle):
                sent += idle.size_bytes
        return sent

    def _all(self) -> Iterator[Idle]:
        """Go through what is idle, what is needed last first."""
        for number, reference in list(self._idle.items()):
            idle = reference()
            if idle is None:
                self._idle.pop(number, None)
            else:
                yield idle

    def publish(self) -> None:
        """Write down what has been moved, by others than the mover, too."""
        self._mover.publish()

    # -- forks -------------------------------------------------------------------------------------

    @property
    def _locks(self) -> tuple[Any, ...]:
        return self._lock, *self._mover.locks

    def hold(self) -> None:
        """Let nothing move before a fork; makes what is dropped, and waits for copies that come back.

        A child cannot always make it: OpenMP's threads are not there.
        """
        for idle in list(self._all()):
            if idle.is_dropped:
                with contextlib.suppress(Exception):  # whoever needs it tries again, and is told
                    self.bring(idle, lambda: None)
        self._held = [lock for lock in self._locks if lock.acquire(timeout=FORK_S)]
        if any(idle.place in (Place.AWAY, Place.COMING) for idle in self._all()):
            self._pipe = os.pipe()

    def go_on(self) -> None:
        """Go on after a fork; waits until the child has what was away, or is dead."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            reading, writing = pipe
            os.close(writing)
            poll = select.poll()  # not select, which cannot wait for a high number
            poll.register(reading, select.POLLIN)
            poll.poll(FORK_S * 1000)
            os.close(reading)
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        for lock in reversed(held or ()):
            lock.release()

    def leave_to_parent(self) -> None:
        """Have everything here and move nothing any more: for a forked child."""
        self.on_event = lambda: None
        if self._held is None:  # swapping has begun while the parent forked: nothing has left yet
            return
        stands = len(self._held) == len(self._locks)
        self._release()
        try:
            if not stands:
                raise SwapError(f"what is being copied did not stand still within {FORK_S:g} s")
            self._mover.leave_to_parent(self._all())
        except ZicoError as error:
            os.write(2, f"zico: forked process {os.getpid()} ends: {error}\n".encode())
            os._exit(1)
        pipe, self._pipe = self._pipe, None
        for descriptor in pipe or ():
            os.close(descriptor)

    # -- somebody waits ----------------------------------------------------------------------------

    def make_room(self, needed_bytes: int) -> None:
        """Let so much leave that somebody who waits for memory can go on.

        What is to go without a copy goes first, if the device only has to tell that it may. Waits
        for that, though no longer than ``LANDING_S``. Where nothing else can leave, it waits for
        what is being copied in, since that can leave when it is here.
        """
        end_s = time.monotonic() + LANDING_S
        while True:
            with self._lock:
                missing = needed_bytes - self._mover.figures.leaving_bytes
                if missing <= 0 or self._drop_wished():
                    return
                asked = [idle for wish in self._wishes if (idle := wish()) is not None]
            within_s = end_s - time.monotonic()
            if within_s > 0 and any(idle.await_check(within_s) for idle in asked):
                continue
            with self._lock:
                if self._send(missing) > 0:
                    return
            if not self._mover.await_landing(LANDING_S):
                return

    def _drop_wished(self) -> bool:
        """Let go what the plan lets go without a copy, as far as it can by now; tells whether anything went."""
        before_bytes = self._mover.figures.dropped_bytes
        self._wishes = [wish for wish in self._wishes if self._is_still_wished(wish)]
        return self._mover.figures.dropped_bytes > before_bytes

    def settle(self, within_s: float) -> bool:
        """Wait until nothing is leaving and what is forgotten has gone; false if that takes longer."""
        return self._mover.settle(within_s)

    # -- iterations --------------------------------------------------------------------------------

    def _turn_if_due(self) -> None:
        """Begin the next iteration at its first event; one without a boundary is cut."""
        iteration = self._job.iteration()
        if iteration == self._iteration and self._event < self.most_events:
            return
        is_planned = self._plan is not None and self._event == len(self._plan.observed.sequence)
        if is_planned and self._plan is not None and (self._plan.leaves or self._plan.drops):
            self.planned_iterations += 1
        else:
            self.passive_iterations += 1
        waited_ns, self._waited_before_ns = self._job.waited_ns() - self._waited_before_ns, self._job.waited_ns()
        late_ns, self._late_before_ns = self.figures.waited_ns - self._late_before_ns, self.figures.waited_ns
        if iteration == self._iteration + 1:
            self._plan = self._learner.turn(waited_ns, late_ns)
            if not self.follows_plans:
                self._plan = None
        else:
            self._plan = self._learner.skip()
        living = list(self._all())
        self._idle = {}
        for position, idle in enumerate(living):  # of graphs that outlive their iteration
            idle.ordinal = position - len(living)
            self._idle[idle.ordinal] = weakref.ref(idle)
        self._iteration = iteration
        self._event = self._numbers = 0
        self._wishes, self._due = [], []
        self._mover.tidy()

    def _note_moved(self, idle: Idle, size_bytes: int) -> None:
        if self._logs_returns or not idle.is_unlogged:
            self._learner.note_moved(self._job.tick(), size_bytes)
        idle.is_unlogged = not self._logs_returns
