"""A GPU's tiers: tensors leave by one side stream and come back by another, and the device alone waits for copies.

Theory of operation
    Whoever puts or gets only queues copies. The tensor's memory is freed at once: its free waits for
    the side stream, as it does for every stream that was recorded (``zico.heap.cuda.on_stream``). So
    the memory goes to others when the device has done the copy::

        main    kernels, mark |                                                  | wait, kernels
        out              wait | copy out, mark: the memory is free               |
        in                                     wait | copy in, mark: it is there |

    A copy out waits for all that the tensor's streams were given. A copy in waits for the payload's
    copy out, and goes to memory that was allocated for its own stream. A stream that uses the tensor
    waits for the copy in.

    The first tier is pinned memory: ordinary pages that are registered with the driver. A buffer has
    the size of its payload. A buffer that is free again serves payloads of its size, so that an
    iteration finds what the last one has left. Other tiers (``zico.tiers.stack``) are the
    processor's. A payload for them goes through a pinned buffer, and the thread that puts or gets it
    waits for the device.

Guarantees
    A buffer's next copy waits on the device for its last one. What the driver refuses leaves the
    tensor where it is. A wait that the device refuses is done by the thread that asks.

Known limitations
    One ``put`` and one ``get`` at a time, each by any thread; ``drop`` by the thread that puts.
    Memory is tried first, wherever it stands in the list of tiers. The buffer for other tiers is as
    large as their largest payload, and counts for no tier. Pinning is slow: a size costs its first
    iteration milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import itertools
import mmap
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zico.base.compiled import interpreted
from zico.base.errors import ConfigError, DriverError
from zico.base.units import format_bytes
from zico.heap.cuda import on_stream
from zico.pool.fences import NO_FENCE, pair_in, value_in
from zico.pool.layout import PAIRS, at
from zico.swap.swapper import LEAST_BYTES
from zico.tiers.layout import FAILED, FULL, KIND_NAMES, MEMORY, Rates
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zico.device.api import Registered
    from zico.device.cuda.driver import CudaDriver
    from zico.heap.build import Heap
    from zico.swap.device_clock import DeviceClock
    from zico.tiers.destinations import TierWish

SMALL_BYTES = 4096
LARGE_BYTES = 16 << 20
"""What rates are measured with: a latency, and a bandwidth. Of the device's memory outside the pool, for a moment."""
TIMES = 3
"""Of which the fastest copy counts."""
_at, _pair_in, _value_in = interpreted(at), interpreted(pair_in), interpreted(value_in)


class Marks:
    """Tells whether the device has come by marks. Reading a counter is a tenth of what a compiled call takes."""

    def __init__(self, heap: Heap) -> None:
        """Read the counters of a heap's pool, which must stay."""
        counters = (ctypes.c_int64 * _at(PAIRS)).from_address(int(heap.pool.member[0]["counters_address"]))
        self._counters = memoryview(counters).cast("B").cast("q")

    def has_passed(self, fence: int) -> bool:
        """Tell whether a fence is passed; ``NO_FENCE`` is."""
        return self._counters[_at(_pair_in(fence))] >= _value_in(fence)


# -- pinned memory ---------------------------------------------------------------------------------


class Buffer:
    """Pinned memory of the host, and the mark behind its last copy."""

    def __init__(self, driver: CudaDriver, size_bytes: int) -> None:
        """Pin new memory.

        Raises:
            DriverError: The driver refuses.
            OSError: There is no memory.
        """
        self.size_bytes = size_bytes
        self.fence = NO_FENCE
        self._pages = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        self.address = int(self._pages.ctypes.data)
        self._registered: Registered = driver.register_host(self.address, size_bytes)
        self.device_address = self._registered.device_address

    def words(self, kind: type[np.generic]) -> Any:  # noqa: ANN401 - an array of this kind
        """Return a view of it."""
        return self._pages.view(kind)

    def close(self) -> None:
        """Give it back; no copy may be under way."""
        self._registered.close()


class Buffers:
    """Pinned buffers up to a total size; those that are free wait for the next payload of their size."""

    def __init__(self, driver: CudaDriver, most_bytes: int, settle: Callable[[], None]) -> None:
        """Start with none; ``settle`` waits until no copy is under way."""
        self._driver = driver
        self._most_bytes = most_bytes
        self._settle = settle
        self._held_bytes = 0
        self._free: dict[int, list[Buffer]] = {}

    def take(self, size_bytes: int) -> Buffer | None:
        """Return a buffer; ``None`` if there is no room, or the driver pins no more."""
        if free := self._free.get(size_bytes):
            return free.pop()
        if self._held_bytes + size_bytes > self._most_bytes:
            self.close()
        if self._held_bytes + size_bytes > self._most_bytes:
            return None
        try:
            made = Buffer(self._driver, size_bytes)
        except (DriverError, OSError):
            return None
        self._held_bytes += size_bytes
        return made

    def give(self, buffer: Buffer) -> None:
        """Keep a buffer for the next payload of its size."""
        self._free.setdefault(buffer.size_bytes, []).append(buffer)

    def close(self) -> None:
        """Give back all that is free; waits for copies."""
        if self._free:
            self._settle()
        for buffer in itertools.chain.from_iterable(self._free.values()):
            self._held_bytes -= buffer.size_bytes
            buffer.close()
        self._free = {}


# -- the tiers -------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Payload:
    """Where a payload is: in a buffer, or below; and the mark behind its last copy."""

    buffer: Buffer | None
    below: int = FULL
    fence: int = NO_FENCE


class DeviceTier:
    """A ``zico.swap.mover.Tier`` of a heap on a GPU; closed only by tests."""

    def __init__(self, heap: Heap, wishes: Sequence[TierWish], **of_stack: Any) -> None:  # noqa: ANN401
        """Make two streams and the tiers, and measure their rates.

        Args:
            heap: Whose tensors leave.
            wishes: What ``zico.tiers.destinations.parse_tiers`` returns.
            of_stack: Further arguments of ``TierStack.create``, for tiers but memory.

        Raises:
            ConfigError: A tier cannot be made.
            DriverError: The device refuses a stream, or memory to measure with.
        """
        self._record = heap.record[0]
        self._driver = driver = cast("CudaDriver", heap.pool.driver)
        self.has_passed = Marks(heap).has_passed
        """Tells whether the device has come by a mark."""
        self.clock: DeviceClock | None = None
        """Told of each copy, if there is one."""
        self._payloads: dict[int, _Payload] = {}
        self._tickets = itertools.count()
        self._bounces: dict[str, Buffer] = {}
        below = [wish for wish in wishes if wish.kind != KIND_NAMES[MEMORY]]
        pinned_bytes = sum(wish.size_bytes for wish in wishes if wish.kind == KIND_NAMES[MEMORY])
        self._is_pinned = len(below) < len(wishes)
        if self._is_pinned and pinned_bytes < LEAST_BYTES:
            got, least = format_bytes(pinned_bytes), format_bytes(LEAST_BYTES)
            raise ConfigError(f"the memory tier has {got}, less than any tensor that leaves: give at least {least}")
        with contextlib.ExitStack() as undo:
            self.outgoing = undo.enter_context(driver.create_stream()).handle
            """The stream that copies out."""
            self.incoming = undo.enter_context(driver.create_stream()).handle
            """The stream that copies in, for which memory is to be allocated that is copied to."""
            self._buffers = Buffers(driver, pinned_bytes, self._settle)
            self._below = undo.enter_context(TierStack.create(below, **of_stack)) if below else None
            self._link = self._measured()
            self._undo = undo.pop_all()

    def put(self, address: int, size_bytes: int, encoding: int) -> int:
        """Let a tensor be copied to the first tier that has room, behind all that its streams were given until now.

        Its memory may be freed as soon as this returns. Waits for the device where the tier is not memory.

        Args:
            address: The tensor's.
            size_bytes: How much.
            encoding: As ``zico.tiers.stores.put``.

        Returns:
            The payload's ticket, 0 or more; ``FULL``; ``FAILED``. Without a ticket nothing is kept.
        """
        buffer = None
        with contextlib.suppress(DriverError):
            buffer = self._buffers.take(size_bytes)
            if buffer is None:
                return self._put_below(address, size_bytes, encoding)
            if self._copy_out(buffer, address, size_bytes):
                return self._note(_Payload(buffer, fence=buffer.fence))
        if buffer is not None:
            self._buffers.give(buffer)
        return FAILED

    def get(self, ticket: int, address: int, size_bytes: int) -> int:
        """Let a payload be copied to memory that was allocated for ``incoming``; it stays where it is.

        ``fence_of`` says behind which mark it is there. Waits for the device where the tier is not memory.

        Returns:
            0, or an errno: then the memory holds anything.
        """
        payload = self._payloads[ticket]
        try:
            buffer = payload.buffer or self._bounce("in", size_bytes)
            if payload.buffer is None and self._below is not None:
                self._driver.synchronize(self.incoming)  # the buffer may still be read from
                if status := self._below.get(payload.below, buffer.address, size_bytes):
                    return status
            self.follow(self.incoming, payload.fence)
            self._driver.copy_in(self.incoming, address, buffer.address, size_bytes)
            payload.fence = self.mark(self.incoming)
            self._note_copy(self.incoming, payload.fence)
        except (DriverError, OSError):
            return errno.EIO
        return 0

    def drop(self, ticket: int) -> None:
        """Forget a payload. Copies that are queued are done."""
        payload = self._payloads.pop(ticket)
        if payload.buffer is not None:
            payload.buffer.fence = payload.fence
            self._buffers.give(payload.buffer)
        elif self._below is not None:
            self._below.drop(payload.below)

    def fence_of(self, ticket: int) -> int:
        """Return the mark behind which the last copy of a payload is done."""
        return self._payloads[ticket].fence

    def follow(self, stream: int, fence: int) -> None:
        """Let a stream go on behind a mark; waits here only where the device takes no such wait.

        Raises:
            DriverError: The device cannot be waited for.
        """
        if not on_stream.wait_for(self._record, stream, fence):
            self._settle()

    def mark(self, stream: int) -> int:
        """Return the fence of what a stream was given; where it takes no mark, that is done when this returns.

        Raises:
            DriverError: The device cannot be waited for.
        """
        fence = int(on_stream.mark_stream(self._record, stream))
        if fence == NO_FENCE:
            self._driver.synchronize(stream)
        return fence

    def rates(self) -> tuple[Rates, ...]:
        """Return how fast each tier is: memory as it was measured, others with the way through memory."""
        link = self._link
        below = () if self._below is None else self._below.rates()
        through = tuple(
            Rates(
                1 / (1 / link.out_bytes_per_s + 1 / one.out_bytes_per_s),
                1 / (1 / link.in_bytes_per_s + 1 / one.in_bytes_per_s),
                link.out_latency_s + one.out_latency_s,
                link.in_latency_s + one.in_latency_s,
            )
            for one in below
        )
        return (link, *through) if self._is_pinned else through

    def close(self) -> None:
        """Wait for all copies and give everything back."""
        self._settle()
        for ticket in list(self._payloads):
            self.drop(ticket)
        for buffer in self._bounces.values():
            buffer.close()
        self._buffers.close()
        self._undo.close()

    # -- copies ------------------------------------------------------------------------------------

    def _put_below(self, address: int, size_bytes: int, encoding: int) -> int:
        if self._below is None:
            return FULL
        try:
            buffer = self._bounce("out", size_bytes)
        except OSError:
            return FULL
        if not self._copy_out(buffer, address, size_bytes):
            return FAILED
        self._driver.synchronize(self.outgoing)
        below = self._below.put(buffer.address, size_bytes, encoding)
        return below if below < 0 else self._note(_Payload(None, below))

    def _copy_out(self, buffer: Buffer, address: int, size_bytes: int) -> bool:
        """Queue a copy to a buffer behind the tensor's streams; false if the device does not wait for those."""
        if not on_stream.use_behind(self._record, address, self.outgoing):
            return False
        self.follow(self.outgoing, buffer.fence)
        self._driver.copy_out(self.outgoing, buffer.address, address, size_bytes)
        buffer.fence = self.mark(self.outgoing)
        self._note_copy(self.outgoing, buffer.fence)
        return True

    def _note_copy(self, stream: int, fence: int) -> None:
        if self.clock is not None:
            self.clock.note_copy(stream, fence)

    def _settle(self) -> None:
        self._driver.synchronize(self.outgoing)
        self._driver.synchronize(self.incoming)

    def _note(self, payload: _Payload) -> int:
        ticket = next(self._tickets)
        self._payloads[ticket] = payload
        return ticket

    def _bounce(self, way: str, size_bytes: int) -> Buffer:
        """Return the buffer of a direction for payloads of other tiers, at least so large."""
        known = self._bounces.get(way)
        if known is None or known.size_bytes < size_bytes:
            if known is not None:
                self._settle()
                self._bounces.pop(way).close()
            known = self._bounces[way] = Buffer(self._driver, size_bytes)
        return known

    def _measured(self) -> Rates:
        """Return how fast copies are, by some between pinned memory and memory of the device outside the pool."""
        driver = self._driver
        unit_bytes = driver.granularity_bytes
        large_bytes = -(-LARGE_BYTES // unit_bytes) * unit_bytes
        with contextlib.ExitStack() as undo:
            buffer = Buffer(driver, large_bytes)
            undo.callback(buffer.close)
            memory = undo.enter_context(driver.create_memory(large_bytes, "rates", unit_bytes))
            window = undo.enter_context(driver.reserve(large_bytes))
            driver.map(window, 0, memory, 0, large_bytes)
            here, there = buffer.address, window.handle
            found = []
            for stream, copy, ends in (
                (self.outgoing, driver.copy_out, (here, there)),
                (self.incoming, driver.copy_in, (there, here)),
            ):
                small_s, large_s = (
                    min(self._seconds(stream, copy, ends, size_bytes) for _ in range(TIMES))
                    for size_bytes in (SMALL_BYTES, large_bytes)
                )
                found.append((large_bytes / max(large_s - small_s, 1e-9), small_s))
        (out_bytes_per_s, out_latency_s), (in_bytes_per_s, in_latency_s) = found
        return Rates(out_bytes_per_s, in_bytes_per_s, out_latency_s, in_latency_s)

    def _seconds(self, stream: int, copy: Callable[..., None], ends: tuple[int, int], size_bytes: int) -> float:
        began_s = time.monotonic()
        copy(stream, *ends, size_bytes)
        self._driver.synchronize(stream)
        return time.monotonic() - began_s
