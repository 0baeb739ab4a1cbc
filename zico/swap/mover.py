"""Copies out and in, by two threads of the job, so that neither computing nor the other direction waits for one.

Theory of operation
    What can be swapped is memory that nobody reaches for between two uses (``Idle``).

    What leaves is copied while it lies still: nobody but the mover can reach it
    (``Idle.address_if_idle``). So the copy cannot be torn, and whoever needs the memory before it
    has gone simply keeps it. It is freed by the thread that copied it, at once. What comes back is
    copied into memory that nobody sees until it is complete.

Guarantees
    A contents is always whole in one place. The memory is freed only when the tier has all of it,
    and the tier's copy goes only when nobody can ask for it again. Nothing waits without a
    deadline. Whoever needs something that nobody has begun to bring back brings it himself.

Known limitations
    Where the tier has no room, what was to leave stays.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import enum
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from zico.base.errors import SwapError
from zico.tiers.encodings import ZEROS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zico.swap.job import Job


# -- an idle tensor --------------------------------------------------------------------------------


class Place(enum.IntEnum):
    """Where the contents are."""

    HERE = 0
    LEAVING = 1
    """Here, and being copied to the tier."""
    AWAY = 2
    """In the tier only; the memory is the pool's again."""
    COMING = 3
    """In the tier, and somebody is to bring them back."""


class Idle(abc.ABC):
    """A piece of memory that may be away between two uses; an adapter says what it is to its framework.

    All methods are called with the mover's lock held, but for ``settle`` and ``make``.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.ordinal = -1
        """Its number among those of its iteration, in the order in which they became idle."""
        self.place = Place.HERE
        self.ticket = -1
        """Of its contents in the tier, -1: none."""
        self.stays = False
        """The tier had no room for it."""
        self.departures = 0
        """Times it was sent, so that a copy is known to be of the last one."""
        self.is_begun = False
        """Somebody is bringing it back at this moment."""
        self.is_dropped = False
        """It is in no tier: who needs it makes it again."""
        self.is_unlogged = False
        """It has left, and the heap's log does not know the memory that it gets when it comes back."""

    def keep_sources(self) -> bool:
        """Keep what its contents are made of until ``arrive``; tells whether they can be made again.

        They can if nobody else can reach them or their sources, as ``address_if_idle`` says.
        """
        return False

    def await_check(self, within_s: float) -> bool:  # noqa: ARG002 - for devices that take time to tell
        """Wait until the device has told ``keep_sources`` what it asked, without the lock; false if it did not ask."""
        return False

    def sources(self) -> list[Idle]:
        """Return what ``make`` brings."""
        return []

    def make(self, bring: Callable[[Any, Callable[[], Any]], Any]) -> None:
        """Make the contents again, in memory of their own, for ``arrive``; without the lock.

        Args:
            bring: Returns what its second argument returns, once its first one, an ``Idle``, is here.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def address_if_idle(self) -> int:
        """Return its address if nobody else can reach it, so that it cannot be read or written meanwhile; else 0."""

    def encoding(self) -> int:
        """Return what a tier may keep of its numbers, while ``address_if_idle`` returns its address."""
        return ZEROS

    @abc.abstractmethod
    def let_go(self) -> None:
        """Free the memory."""

    @abc.abstractmethod
    def settle(self) -> int:
        """Get memory for the contents, which are not there yet; returns its address. May wait for memory."""

    @abc.abstractmethod
    def arrive(self) -> None:
        """Take over what ``settle`` got: the contents are there."""


# -- the mover -------------------------------------------------------------------------------------


Taken = TypeVar("Taken")

_SLICE_S = 1.0
_NOT_READ = -1


class Tier(Protocol):
    """Where contents go: ``zico.tiers.stack.TierStack``, or a test's own."""

    def put(self, address: int, size_bytes: int, encoding: int) -> int:
        """Copy memory to the tier, encoded if it encodes; returns a ticket, or below 0 why there is none."""

    def get(self, ticket: int, address: int, size_bytes: int) -> int:
        """Copy it back; returns 0 or an errno."""

    def drop(self, ticket: int) -> None:
        """Forget it."""


class Figures:
    """What has been moved and what that has cost; bytes, counts and nanoseconds."""

    def __init__(self) -> None:
        self.out_bytes = 0
        self.in_bytes = 0
        self.moving_ns = 0
        """Time that copies took, both directions."""
        self.waited_ns = 0
        """Time for which the job stood still until something was back."""
        self.late = 0
        """Times something was not back when it was needed."""
        self.kept = 0
        """Times the tier had no room."""
        self.dropped_bytes = 0
        """What has been let go without a copy."""
        self.making_ns = 0
        """Time for which the job made again what was dropped."""
        self.away_bytes = 0
        """In the tier and nowhere else now."""
        self.leaving_bytes = 0
        """Being copied out, or about to be: free soon."""
        self.landing_bytes = 0
        """Being copied in: idle soon, and then free to go again."""

    @property
    def hidden_ns(self) -> int:
        """Return the time of copies that nobody waited for."""
        return max(0, self.moving_ns - self.waited_ns)


class Mover:
    """Moves idle memory between the pool and a tier."""

    def __init__(self, tier: Tier, job: Job, deadline_s: float) -> None:
        """Start two threads.

        Args:
            tier: Where contents go.
            job: Whose memory it is.
            deadline_s: The longest that anybody waits for a copy.
        """
        self._job = job
        self.figures = Figures()
        self.tier = tier
        self._is_child = False
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._arrival = threading.Condition(self._lock)
        self._getting = threading.Lock()
        self._out: queue.SimpleQueue[tuple[Idle, int, int, int] | threading.Event | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Idle | None] = queue.SimpleQueue()
        self._forgotten: collections.deque[int] = collections.deque()
        self._dead_bytes: collections.deque[int] = collections.deque()
        self.on_moved: Callable[[Idle, int], None] = lambda _idle, _bytes: None
        """Told of every piece that has left (its bytes) or come back (minus its bytes)."""
        for name, work in (("zico-swap-out", self._send_all), ("zico-swap-in", self._fetch_all)):
            threading.Thread(target=work, name=name, daemon=True).start()

    # -- forks -------------------------------------------------------------------------------------

    @property
    def locks(self) -> tuple[Any, ...]:
        """Return the locks under which nothing moves and the tier forgets nothing, in the order to take them."""
        return self._getting, self._lock

    def leave_to_parent(self, known: Iterable[Idle]) -> None:
        """Bring here what is in a tier, and move nothing any more: for a forked child, which has none of the threads.

        Args:
            known: All that may be away; the caller had the locks over the fork.

        Raises:
            SwapError: The tier does not give something back.
        """
        self._is_child = True
        for idle in known:
            if idle.is_dropped:  # made when it is needed, since a forked child's threads may not compute
                idle.place, idle.is_begun = Place.AWAY, False
                continue
            if idle.place in (Place.AWAY, Place.COMING):
                errno = self.tier.get(idle.ticket, idle.settle(), idle.size_bytes)
                if errno:
                    raise SwapError(f"{idle.size_bytes} bytes of a tensor cannot be read back (errno {errno})")
                idle.arrive()
            idle.place = Place.HERE
            idle.is_begun = False
            idle.ticket = -1  # the parent's

    def publish(self) -> None:
        """Have the figures read again."""
        with self._lock:
            self._publish()

    def _publish(self) -> None:
        if not self._is_child:
            self._job.publish(self.figures)

    # -- out ---------------------------------------------------------------------------------------

    def send(self, idle: Idle) -> bool:
        """Let it leave, if it is here and nobody else can reach it; tells whether it is leaving. Waits for nothing."""
        with self._lock:
            if idle.place is not Place.HERE or idle.stays or self._is_child:
                return False
            address = idle.address_if_idle()
            if address == 0:
                return False
            if idle.ticket >= 0:  # it came back and nobody has used it: the tier still has it
                self._free(idle)
                return True
            idle.place = Place.LEAVING
            idle.departures += 1
            wish = idle, address, idle.departures, idle.encoding()
            self._count_leaving(idle.size_bytes)
        self._out.put(wish)
        return True

    def drop(self, idle: Idle) -> bool:
        """Let it go without a copy, if nobody else can reach it and it can be made again; tells whether it has gone."""
        with self._lock:
            if idle.place is not Place.HERE or self._is_child or not idle.keep_sources():
                return False
            idle.is_dropped = True
            self.figures.dropped_bytes += idle.size_bytes
            self._free(idle)
            return True

    def _send_all(self) -> None:
        while (wish := self._out.get()) is not None:  # no deadline: nobody waits for this thread
            self._forget_all()
            if isinstance(wish, threading.Event):
                wish.set()
            else:
                self._send_one(*wish)
            del wish

    def _send_one(self, idle: Idle, address: int, departure: int, encoding: int) -> None:
        ticket = -1
        if self._still_leaves(idle, departure):
            began_ns = time.monotonic_ns()
            ticket = self.tier.put(address, idle.size_bytes, encoding)
            self.figures.moving_ns += time.monotonic_ns() - began_ns
        with self._lock:
            if not self._still_leaves(idle, departure):  # somebody needs it, or has, and the copy may be of the past
                self.forget(ticket)
            elif ticket < 0:
                idle.place = Place.HERE
                idle.stays = True
                self.figures.kept += 1
            else:
                idle.ticket = ticket
                self.figures.out_bytes += idle.size_bytes
                self._free(idle)
            self._count_leaving(-idle.size_bytes)

    @staticmethod
    def _still_leaves(idle: Idle, departure: int) -> bool:
        return idle.place is Place.LEAVING and idle.departures == departure

    def _free(self, idle: Idle) -> None:
        idle.place = Place.AWAY
        idle.is_begun = False
        idle.let_go()
        self.figures.away_bytes += idle.size_bytes
        self.on_moved(idle, idle.size_bytes)
        self._publish()

    def _count_leaving(self, size_bytes: int) -> None:
        self.figures.leaving_bytes += size_bytes
        self._publish()

    # -- in ----------------------------------------------------------------------------------------

    def fetch(self, idle: Idle) -> bool:
        """Let it be brought back if it is away; tells whether it is on its way. Waits for nothing."""
        with self._lock:
            if self._is_child or idle.is_dropped:
                return False
            if idle.place is not Place.AWAY:
                return idle.place is Place.COMING
            idle.place = Place.COMING
        self._in.put(idle)
        return True

    def need(self, idle: Idle, take: Callable[[], Taken]) -> tuple[bool, Taken]:
        """Have it here and reach for it.

        Args:
            idle: What is needed.
            take: Reaches for it; from then on it is not idle as long as its result lives.

        Returns:
            Whether it had to be waited for, and what ``take`` returned.

        Raises:
            SwapError: The tier does not give it back, or not within the deadline.
        """
        began_ns = 0
        while True:
            with self._lock:
                if idle.place is Place.LEAVING:
                    idle.place = Place.HERE
                if idle.place is Place.HERE:
                    self._touch(idle)
                    if began_ns:
                        self.figures.late += 1
                        self.figures.waited_ns += time.monotonic_ns() - began_ns
                        self._publish()
                    return began_ns > 0, take()
                began_ns = began_ns or (0 if idle.is_dropped else time.monotonic_ns())
                if idle.is_begun:
                    self._await(idle)
                    continue
                idle.place = Place.COMING
                idle.is_begun = True
            self._bring_or_leave(idle)

    def _touch(self, idle: Idle) -> None:
        """Forget the tier's copy: who needs the memory may write to it."""
        if idle.ticket >= 0:
            self.forget(idle.ticket)
            idle.ticket = -1

    def _await(self, idle: Idle) -> None:
        end_s = time.monotonic() + self._deadline_s
        self._job.be_patient(0)
        while idle.place is Place.COMING and idle.is_begun:
            if time.monotonic() > end_s:
                raise SwapError(f"{idle.size_bytes} bytes have not come back within {self._deadline_s:g} s")
            self._arrival.wait(_SLICE_S)

    def await_landing(self, within_s: float) -> bool:
        """Wait until something has come back, if anything is being copied in; tells whether anything was."""
        with self._lock:
            return self.figures.landing_bytes > 0 and self._arrival.wait(within_s)

    def _fetch_all(self) -> None:
        while (idle := self._in.get()) is not None:  # no deadline: nobody waits for this thread
            if self._begins(idle):
                with contextlib.suppress(Exception):  # whoever needs it tries again, and is told
                    self._bring_or_leave(idle)
            del idle  # this thread may sleep for long, and the tier keeps what it refers to

    def _begins(self, idle: Idle) -> bool:
        """Tell whether it is to be brought back now: it still is expected, and there is room for it."""
        with self._lock:
            if idle.place is not Place.COMING or idle.is_begun:
                return False
            if not self._job.has_room(idle.size_bytes):
                idle.place = Place.AWAY
                return False
            idle.is_begun = True
            self._job.be_patient(threading.get_ident())
            return True

    def _bring_or_leave(self, idle: Idle) -> None:
        """Bring it back; where that fails it is where it was."""
        try:
            self._bring(idle)
        except BaseException:
            with self._lock:
                idle.place = Place.AWAY
                idle.is_begun = False
                self._arrival.notify_all()
            raise

    def _bring(self, idle: Idle) -> None:
        if idle.is_dropped:
            self._make(idle)
            return
        address = idle.settle()
        errno = _NOT_READ
        self.figures.landing_bytes += idle.size_bytes
        try:
            with self._getting:
                began_ns = time.monotonic_ns()
                errno = self.tier.get(idle.ticket, address, idle.size_bytes)
                self.figures.moving_ns += time.monotonic_ns() - began_ns
        finally:
            with self._lock:  # what lands counts until it is here: who makes room waits for it, and sends it again
                self.figures.landing_bytes -= idle.size_bytes
                if errno == 0:
                    self._note_arrival(idle)
        if errno:
            raise SwapError(f"{idle.size_bytes} bytes of a tensor cannot be read back (errno {errno})")

    def _make(self, idle: Idle) -> None:
        """Make it again. What its sources take is theirs."""
        began_ns = time.monotonic_ns()
        self._make_sources(idle)
        idle.make(lambda source, take: self.need(source, take)[1])
        with self._lock:
            self.figures.making_ns += time.monotonic_ns() - began_ns
            self.figures.in_bytes -= idle.size_bytes  # it was in no tier
            self._note_arrival(idle)

    def _make_sources(self, idle: Idle) -> None:
        """Make the sources that are dropped, the first of a chain first: a chain can be longer than Python's stack."""
        chain = [idle]
        while chain:
            dropped = [source for source in chain[-1].sources() if source.is_dropped]
            if dropped:
                chain += dropped
            elif (made := chain.pop()) is not idle:
                self.need(made, lambda: None)

    def _note_arrival(self, idle: Idle) -> None:
        idle.arrive()
        idle.place = Place.HERE
        idle.is_begun = idle.is_dropped = False
        self.figures.in_bytes += idle.size_bytes
        self.figures.away_bytes -= idle.size_bytes
        self._publish()
        self.on_moved(idle, -idle.size_bytes)
        self._arrival.notify_all()

    # -- what nobody needs any more ----------------------------------------------------------------

    def forget(self, ticket: int) -> None:
        """Let the tier's copy go, soon; for any thread at any moment, a finalizer's too. Below 0: there is none."""
        if ticket >= 0:
            self._forgotten.append(ticket)

    def forget_all_of(self, idle: Idle) -> None:
        """Let the tier's copy of what is dead go; for any thread at any moment, a finalizer's too."""
        if idle.place is not Place.HERE:
            self._dead_bytes.append(idle.size_bytes)
        self.forget(idle.ticket)

    def tidy(self) -> None:
        """Let what has been forgotten go soon, though nothing leaves."""
        if not self._is_child:
            self._out.put(threading.Event())

    def close(self) -> None:
        """End the threads once everything asked for has been done; for tests, since jobs swap until they end."""
        self._out.put(None)
        self._in.put(None)

    def settle(self, within_s: float) -> bool:
        """Wait until what is leaving, and what has been forgotten, has gone; false if that takes longer."""
        done = threading.Event()
        self._out.put(done)
        return done.wait(within_s)

    def _forget_all(self) -> None:
        with self._lock:  # so that a fork finds in the tier what is away
            while self._forgotten:
                self.tier.drop(self._forgotten.popleft())
            while self._dead_bytes:
                self.figures.away_bytes -= self._dead_bytes.popleft()
            self._publish()
