"""A device whose streams do one thing at a time, and only when told: any order of what a real one may do can be had.

A stream is a queue: marks set a counter, waits hold the queue until a counter is high enough,
scrubbing zeroes memory, kernels are Python functions. Jobs of one process share it; a stream's
handle is any number above 0.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from typing import TYPE_CHECKING

from cpu.support.members import is_mapped

from zico.heap.cuda.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zico.pool.table import PoolTable

_STREAM_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_DEVICE_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
REFUSED = 719
"""What a call returns that is to fail (CUDA_ERROR_LAUNCH_FAILED): the context is lost."""
INVALID_HANDLE = 400
"""What a call returns for a stream that was destroyed."""


class SoftwareDevice:
    """The device; ``refuses`` says of each mark, wait, scrub and synchronisation whether it fails."""

    def __init__(self, refusal: int = REFUSED) -> None:
        """Make one with no stream, whose calls fail by a status: of a lost context, or ``INVALID_HANDLE``."""
        self._refusal = refusal
        self.queues: dict[int, collections.deque[Callable[[], bool]]] = collections.defaultdict(collections.deque)
        self.marks = 0
        self.waits = 0
        self.scrubs = 0
        self.synchronized = 0
        self.looks = 0
        self._outlived: set[int] = set()
        self.refuses: Callable[[str, int], bool] = lambda _what, _stream: False
        self._lock = threading.RLock()
        in_order = (_STREAM_CALL(f) for f in (self._mark, self._await, self._scrub))
        self._functions = (*in_order, _DEVICE_CALL(self._synchronize), _DEVICE_CALL(self._look))

    def timeline(self, member: PoolTable, **spacing: int) -> Timeline:
        """Return what a member's heap needs to use this device."""
        mark, wait, scrub, *of_device = (int(ctypes.cast(f, ctypes.c_void_p).value or 0) for f in self._functions)
        synchronize, look = of_device
        counters_address = int(member.member[0]["counters_address"])
        options = {"alone_bytes": 0, "beside_bytes": 0, "look_ns": 0, "settle_ns": 0} | spacing
        return Timeline(mark, wait, synchronize, counters_address, **options, scrub_address=scrub, look_address=look)

    # -- what jobs do

    def launch(self, stream: int, kernel: Callable[[], object]) -> None:
        """Put a kernel on a stream."""
        with self._lock:
            self.queues[stream].append(lambda: (kernel(), True)[1])

    def mark(self, stream: int, counter_address: int, value: int) -> None:
        """Put a mark on a stream."""
        word = ctypes.c_int64.from_address(counter_address)

        def write() -> bool:
            assert word.value < value or stream in self._outlived, "a counter only grows, one mark after the other"
            word.value = value
            return True

        with self._lock:
            self.queues[stream].append(write)

    def wait(self, stream: int, counter_address: int, value: int) -> None:
        """Put a wait on a stream."""
        word = ctypes.c_int64.from_address(counter_address)
        self.wait_until(stream, lambda: word.value >= value)

    def wait_until(self, stream: int, condition: Callable[[], bool]) -> None:
        """Hold a stream until a condition is true."""
        with self._lock:
            self.queues[stream].append(condition)

    def _mark(self, _context: int, stream: int, counter_address: int, value: int) -> int:
        if self.refuses("mark", stream):
            return self._refusal
        self.marks += 1
        self.mark(stream, counter_address, value)
        return 0

    def _await(self, _context: int, stream: int, counter_address: int, value: int) -> int:
        if self.refuses("wait", stream):
            return self._refusal
        self.waits += 1
        self.wait(stream, counter_address, value)
        return 0

    def _scrub(self, _context: int, stream: int, address: int, size_bytes: int) -> int:
        if self.refuses("scrub", stream):
            return self._refusal

        def zero() -> None:
            assert is_mapped(address), "a kernel scrubs what is not mapped"
            ctypes.memset(address, 0, size_bytes)

        self.scrubs += 1
        self.launch(stream, zero)
        return 0

    def _synchronize(self, _context: int) -> int:
        if self.refuses("synchronize", 0):
            return self._refusal
        self.synchronized += 1
        self.drain()
        return 0

    def _look(self, _context: int) -> int:
        self.looks += 1
        return self._refusal if self.refuses("synchronize", 0) else 0

    # -- what the device does

    def step(self, stream: int) -> bool:
        """Do the next thing of a stream; false if it has nothing, or waits."""
        with self._lock:
            queue = self.queues[stream]
            if queue and queue[0]():
                queue.popleft()
                return True
            return False

    def step_any(self, choice: int) -> bool:
        """Do one thing on some stream, the ``choice``-th that can or a later one; false if none can."""
        with self._lock:
            streams = sorted(self.queues)
            return any(self.step(streams[(choice + i) % len(streams)]) for i in range(len(streams)))

    def drain(self) -> None:
        """Do everything; fails if streams wait for each other."""
        with self._lock:
            while self.step_any(0):
                pass
            assert not any(self.queues.values()), "streams wait for what never comes"

    def outlives(self, streams: Iterable[int]) -> None:
        """Go on with the work of a process that is gone: counters may have been set to its last marks meanwhile."""
        self._outlived.update(streams)

    def kill(self, streams: Iterable[int]) -> None:
        """End the device work of a process that is gone."""
        with self._lock:
            for stream in streams:
                self.queues.pop(stream, None)
