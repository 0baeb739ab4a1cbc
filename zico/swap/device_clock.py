"""A GPU's clock: when the device came by the events of an iteration, less what it waited for copies.

Theory of operation
    The processor is ahead of the device, so its times say little about when memory is needed. A
    stamp is a timing event on the stream that computes, and is read when the device has come by.

    While a job holds less than it needs, the device waits for copies out before it overwrites
    memory, and for copies in before it reads. It makes again what was dropped. A plan for other
    tensors waits elsewhere, so this clock stands still meanwhile. Which wait was put on the stream
    between two stamps is known (``STREAM.awaited``), and each copy has a stamp of its own::

        stamps    a            b      the wait for a copy lies between two stamps; what is computed
        stream    |....wait====|      between them follows the wait, since memory is asked for first:
        copies    ----|               so the wait is what lies between a and the end of the copy

Known limitations
    The time for which the device idles since the processor waits for memory counts as computing.
    Waits of other streams than the first one count as computing, too.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
from typing import TYPE_CHECKING, Any, cast

from zico.base.compiled import interpreted
from zico.base.errors import DriverError
from zico.heap.cuda.layout import STREAM
from zico.heap.layout import MAIN
from zico.kernels.launch import WORD_BYTES
from zico.pool.fences import NO_FENCE, slot_in, value_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zico.device.cuda.driver import CudaDriver
    from zico.heap.build import Heap
    from zico.swap.learning import Ended
    from zico.swap.observed import Observed

NS_PER_MS = 1e6
MOST_COPIES = 1024
"""The last copies of a direction that are remembered: more than an iteration has."""
_DEFAULT = 0
"""``CU_EVENT_DEFAULT``: with a time."""
_slot_in, _value_in = interpreted(slot_in), interpreted(value_in)


class Stamp:
    """A moment on a stream's timeline, as long as this lives."""

    __slots__ = ("_free", "awaited", "event", "number")

    def __init__(self, event: Any, free: collections.deque[Any], number: int, awaited: tuple[int, ...]) -> None:  # noqa: ANN401
        """Stand for an event of the driver's that has been put on a stream; ``free`` gets it back."""
        self.event, self._free, self.number, self.awaited = event, free, number, awaited

    def __del__(self) -> None:
        self._free.append(self.event)


class Stamps:
    """Puts stamps on streams and reads them."""

    def __init__(self, driver: CudaDriver) -> None:
        """Take a driver whose context is the job's."""
        self._driver = driver
        self._free: collections.deque[Any] = collections.deque()
        self._numbers = itertools.count()

    def put(self, stream: int, awaited: tuple[int, ...] = ()) -> Stamp | None:
        """Put a stamp on a stream; ``None``: the device refuses."""
        with contextlib.suppress(DriverError), self._driver.context.current():
            event = self._free.pop() if self._free else self._driver.call("cuEventCreate", _DEFAULT)
            stamp = Stamp(event, self._free, next(self._numbers), awaited)
            self._driver.call("cuEventRecord", event, stream)
            return stamp
        return None

    def since(self, first: Stamp, stamps: Iterable[Stamp]) -> list[float]:
        """Return the nanoseconds from one stamp to others; waits until the device has come by them.

        Raises:
            DriverError: The device does not tell.
        """
        call = self._driver.call
        found = []
        with self._driver.context.current():
            for stamp in stamps:
                call("cuEventSynchronize", stamp.event)
                found.append(call("cuEventElapsedTime", first.event, stamp.event) * NS_PER_MS)
        return found

    def close(self) -> None:
        """Give all events back; no stamp may live."""
        with self._driver.context.current():
            while self._free:
                self._driver.call("cuEventDestroy", self._free.pop())


class DeviceClock:
    """A ``zico.swap.learning.Clock`` of a GPU."""

    is_ahead = True

    def __init__(self, heap: Heap, copying: Sequence[int], computing: Callable[[], int | None]) -> None:
        """Tell the time of a stream.

        Args:
            heap: Whose memory is copied.
            copying: The streams that copy.
            computing: Returns the calling thread's stream; ``None``: what it is given becomes a graph.
        """
        self._computing = computing
        self._stamps = Stamps(cast("CudaDriver", heap.pool.driver))
        self._streams_address = int(heap.record[0]["streams"]["address"])
        self._copies: dict[int, collections.deque[tuple[int, Stamp]]] = {
            stream: collections.deque(maxlen=MOST_COPIES) for stream in copying
        }
        """By stream: the value of the mark behind each copy, and a stamp behind that."""
        self._made: collections.deque[tuple[Stamp, Stamp]] = collections.deque(maxlen=MOST_COPIES)
        self._awaited: dict[int, memoryview] = {}
        """By stream that copies: what the first stream has been told to wait for."""

    def stamp(self) -> Stamp | None:
        """Put a stamp on the stream that computes; ``None``: it takes none."""
        stream = self._computing()
        if stream is None:
            return None
        return self._stamps.put(stream, tuple(self._awaited_value(copying) for copying in self._copies))

    def end(self, _ended: Ended) -> Stamp | None:
        """Return a stamp of now: the next iteration begins."""
        return self.stamp()

    def note_copy(self, stream: int, fence: int) -> None:
        """Note that a stream was given a copy, and a mark behind it."""
        stamp = self._stamps.put(stream)
        if stamp is not None and fence != NO_FENCE:
            self._copies[stream].append((_value_in(fence), stamp))
            if stream not in self._awaited:
                address = self._streams_address + MAIN * STREAM.itemsize + STREAM.fields["awaited"][1]
                address += _slot_in(fence) * WORD_BYTES
                self._awaited[stream] = memoryview((ctypes.c_int64).from_address(address)).cast("B").cast("q")

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Stand still while the device computes what the block gives it."""
        begin = self.stamp()
        yield
        end = self.stamp()
        if begin is not None and end is not None:
            self._made.append((begin, end))

    def read(self, stamps: Sequence[Stamp | None]) -> list[int]:
        """Return the nanoseconds of stamps, from the first one on; waits until the device has come by the last.

        Raises:
            DriverError: The device does not tell, or has refused a stamp.
        """
        known = [stamp for stamp in stamps if stamp is not None]
        if len(known) < len(stamps):
            raise DriverError("cuEventRecord", 0, "an event of the iteration has no time")
        first, last = known[0].number, known[-1].number
        copies = [list(of_stream) for of_stream in self._copies.values()]
        made = [pair for pair in list(self._made) if first < pair[0].number and pair[1].number < last]
        times = self._stamps.since(known[0], known)
        spans = [
            span for number, of_stream in enumerate(copies) for span in self._waits(known, times, number, of_stream)
        ]
        for pair in made:
            begin, end = self._stamps.since(known[0], pair)
            spans.append((begin, end))
        return without(spans, times)

    def lost_ns(self, took_ns: int, waited_ns: int, seen: Observed) -> int:
        """Return by how much an iteration took longer than this clock had it go: the device waits unseen."""
        return max(took_ns - int(seen.t_ns[-1]), waited_ns)

    def _waits(
        self, stamps: Sequence[Stamp], times: Sequence[float], number: int, copies: Sequence[tuple[int, Stamp]]
    ) -> Iterator[tuple[float, float]]:
        """Return from when to when the stream may have waited for copies by one of the streams that copy."""
        for i in range(1, len(stamps)):
            value = stamps[i].awaited[number]
            if value > stamps[i - 1].awaited[number]:
                copied = next((stamp for behind, stamp in reversed(copies) if behind <= value), None)
                if copied is not None:
                    (done,) = self._stamps.since(stamps[0], [copied])
                    yield times[i - 1], min(done, times[i])

    def close(self) -> None:
        """Give all events back; nobody may have a stamp. For tests, since jobs swap until they end."""
        for copies in self._copies.values():
            copies.clear()
        self._made.clear()
        self._stamps.close()

    def _awaited_value(self, copying: int) -> int:
        word = self._awaited.get(copying)
        return 0 if word is None else word[0]


def without(spans: Iterable[tuple[float, float]], times: Iterable[float]) -> list[int]:
    """Return times on a clock that stands still in spans, which may overlap or end before they begin."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return [round(t - sum(min(t, end) - min(t, begin) for begin, end in merged)) for t in times]
