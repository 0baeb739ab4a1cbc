"""Idle memory, tiers and gauges for tests of swapping (``zico.swap``), without a framework."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import numpy as np

from zico.swap.job import Job
from zico.swap.mover import Figures, Idle, Mover
from zico.tiers.layout import Rates

if TYPE_CHECKING:
    from zico.swap.learning import Ended
    from zico.swap.observed import Observed

DEADLINE_S = 30.0
SCRIBBLE = 0xEE


class Shelf:
    """A tier that can be full, broken or held up."""

    def __init__(self, room: int = 1 << 30) -> None:
        """Have room for so many bytes."""
        self.room = room
        self.errno = 0
        self.kept: dict[int, bytes] = {}
        self.held_up: threading.Event | None = None
        self.begun = threading.Event()
        self.held_up_in: threading.Event | None = None
        self.begun_in = threading.Event()
        self._tickets = 0

    def put(self, address: int, size_bytes: int, _encoding: int) -> int:
        """Keep a copy, if there is room."""
        if size_bytes > self.room - sum(map(len, self.kept.values())):
            return -1
        self._tickets += 1
        self.kept[self._tickets] = ctypes.string_at(address, size_bytes)
        self.begun.set()
        if self.held_up is not None:
            assert self.held_up.wait(DEADLINE_S)
        return self._tickets

    def get(self, ticket: int, address: int, size_bytes: int) -> int:
        """Give it back, unless broken."""
        self.begun_in.set()
        if self.held_up_in is not None:
            assert self.held_up_in.wait(DEADLINE_S)
        if not self.errno:
            ctypes.memmove(address, self.kept[ticket], size_bytes)
        return self.errno

    def drop(self, ticket: int) -> None:
        """Forget it; a second time is an error."""
        del self.kept[ticket]

    def why(self, result: int) -> str:
        """Say so."""
        return f"full ({result})"


class Array(Idle):
    """An array that is idle unless it is held."""

    def __init__(self, mover: Mover, contents: bytes) -> None:
        """Begin with contents, here."""
        super().__init__(len(contents))
        self.mover = mover
        self.here: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(contents, np.uint8).copy()
        self._settled = self.here
        self.held = False

    def __del__(self) -> None:
        """Let the tier's copy go."""
        self.mover.forget_all_of(self)

    def address_if_idle(self) -> int:
        """Return its address, unless held."""
        assert self.here is not None, "what is lent is here"
        return 0 if self.held else int(self.here.ctypes.data)

    def let_go(self) -> None:
        """Free it: who still reads it finds that out."""
        assert self.here is not None
        assert not self.held, "what is held does not go"
        self.here[:] = SCRIBBLE
        self.here = None

    def settle(self) -> int:
        """Take new memory, full of something else."""
        self._settled = np.full(self.size_bytes, SCRIBBLE, np.uint8)
        return int(self._settled.ctypes.data)

    def arrive(self) -> None:
        """Be here."""
        self.here = self._settled

    def take(self) -> bytes:
        """Hold it and return its contents."""
        assert self.here is not None
        self.held = True
        return self.here.tobytes()


class Gauge(Job):
    """A job whose memory is what the test says, and which keeps what it is told."""

    def __init__(self, cap: int = 1 << 40, rate: float = 1e9) -> None:
        """May hold so many bytes; links carry so many a second."""
        self.cap = cap
        self.live = self.ticks = self.iterations = self.peak = 0
        self.speed = Rates(rate, rate, 0.0, 0.0)
        self.last: Ended | None = None
        self.figures: list[Figures] = []
        self.prepared: list[str] = []
        self.followed: list[tuple[str, str]] = []
        self.told: list[Observed] = []

    def cap_bytes(self) -> int:
        """Return what it may hold."""
        return self.cap

    def live_bytes(self) -> int:
        """Return what its tensors take."""
        return self.live

    def has_room(self, _size_bytes: int) -> bool:
        """There always is."""
        return True

    def peak_regions(self) -> int:
        """Return the most regions that it has ever held."""
        return self.peak

    def tick(self) -> int:
        """Return how many allocations and frees there have been."""
        return self.ticks

    def iteration(self) -> int:
        """Return how many iterations have ended."""
        return self.iterations

    def ended(self) -> Ended | None:
        """Return the memory of the last iteration."""
        return self.last

    def waited_ns(self) -> int:
        """Return for how long it has waited for memory."""
        return 0

    def rates(self) -> Rates:
        """Return those of its links."""
        return self.speed

    def be_patient(self, thread: int) -> None:
        """Take no notice."""

    def publish(self, figures: Figures) -> None:
        """Keep them."""
        self.figures.append(figures)

    def prepare(self, planner: str) -> None:
        """Keep its name."""
        self.prepared.append(planner)

    def follow(self, planner: str, note: str) -> None:
        """Keep both."""
        self.followed.append((planner, note))

    def tell(self, seen: Observed) -> None:
        """Keep it."""
        self.told.append(seen)


def make_mover(shelf: Shelf) -> tuple[Mover, list[Figures]]:
    """Return a mover and where it publishes."""
    gauge = Gauge()
    return Mover(shelf, gauge, DEADLINE_S), gauge.figures
