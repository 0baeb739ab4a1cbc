"""The two ends of a recording: a file of one ``RING`` that a job writes into and that another process reads.

The reader makes the file and names it to the job. The first process to open it writes; a later one
is refused.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from zico.base.errors import TraceError
from zico.trace.events import EVENT, NO_NAME, Kind
from zico.trace.profile import RING, RING_EVENTS, RING_MAGIC, RING_NAME_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

FILE_BYTES = RING.itemsize + RING_EVENTS * EVENT.itemsize + RING_NAME_BYTES
_NAMES_OFFSET = FILE_BYTES - RING_NAME_BYTES
_LEAST_NS = 20_000_000
"""Both clocks are read so far apart before their rate is believed: to about one part in 100,000."""


class _Mapped:
    """The ring's memory, seen as records."""

    size_bytes = FILE_BYTES

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, FILE_BYTES)
        self.header: Any = np.frombuffer(self._mapping, RING, 1)[0:1]
        self.events = np.frombuffer(self._mapping, EVENT, RING_EVENTS, RING.itemsize)
        self.names = np.frombuffer(self._mapping, np.uint8, RING_NAME_BYTES, _NAMES_OFFSET)

    @property
    def address(self) -> int:
        """Return where the ring lies in this process."""
        return int(self.header.ctypes.data)


class RingFile(_Mapped):
    """The writer's end. Compiled code writes at ``address``; names come from Python."""

    def __init__(self, path: Path | str, framework: str, threshold_bytes: int) -> None:
        """Open the file that a reader has made.

        Raises:
            TraceError: It is not there, is none, or another process writes already.
        """
        from zico.trace import ring

        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_size != FILE_BYTES:
                raise TraceError(str(path), 0, "is no ring of this version of Zico: use the zico that records")
            super().__init__(descriptor)
            self._claim(path)
        except OSError as error:
            raise TraceError(str(path), 0, f"nothing is recorded: {error.strerror}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        header = self.header[0]
        header["framework"] = framework.encode()[: RING.fields["framework"][0].itemsize]
        header["threshold_bytes"] = threshold_bytes
        header["start_ticks"], header["start_ns"] = ring.now_ticks(), time.monotonic_ns()
        self._numbers: dict[str, int] = {}

    def _claim(self, path: Path | str) -> None:
        header = self.header[0]
        if header["magic"] != RING_MAGIC or header["pid"]:
            raise TraceError(str(path), 0, f"process {int(header['pid'])} records here already: give each job its own")
        header["pid"] = os.getpid()

    def number_of(self, name: str) -> int:
        """Return the number of an operation's name, writing it down the first time; ``NO_NAME`` if there is no room."""
        known = self._numbers.get(name)
        if known is not None:
            return known
        text = np.frombuffer(name.encode().replace(b"\0", b"") + b"\0", np.uint8)
        start = int(self.header[0]["names_bytes"])
        if start + len(text) > RING_NAME_BYTES:
            return NO_NAME
        self.names[start : start + len(text)] = text
        self.header[0]["names_bytes"] = start + len(text)
        return self._numbers.setdefault(name, len(self._numbers))


class RingReader(_Mapped):
    """The reader's end: makes the file; a context manager that removes it."""

    def __init__(self, path: Path) -> None:
        """Make an empty ring that nobody writes to yet.

        Raises:
            OSError: The file cannot be made.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, FILE_BYTES)
            super().__init__(descriptor)
        finally:
            os.close(descriptor)
        self.header[0]["magic"] = RING_MAGIC
        self._dropped = 0
        self._rate = 0.0
        self._last_ns = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file; a writer goes on into memory that nobody reads."""
        self.path.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        """Return the process that writes, 0 if none does yet."""
        return int(self.header[0]["pid"])

    def names_so_far(self) -> list[str]:
        """Return the names of operations."""
        text = self.names[: int(self.header[0]["names_bytes"])].tobytes()
        return text.decode(errors="replace").split("\0")[:-1]

    def read(self) -> NDArray[np.void]:
        """Take what has been written since the last call out of the ring; never waits.

        Returns:
            Events in their order, with times in nanoseconds since the writer began. Those that
            found no room are counted by one of kind ``DROPPED`` at the end.
        """
        header = self.header[0]
        if not self._rate and not self._find_rate():
            return np.zeros(0, EVENT)
        dropped = int(header["dropped"])  # before head: what is missing came before what is read next
        head, tail = int(header["head"]), int(header["tail"])
        events = self.events[np.arange(tail, head) & (RING_EVENTS - 1)]
        header["tail"] = head
        self._tell_nanoseconds(events)
        if dropped == self._dropped:
            return events
        gap = np.zeros(1, EVENT)
        gap["kind"], gap["name"], gap["t_ns"], gap["size_bytes"] = (
            Kind.DROPPED,
            NO_NAME,
            self._last_ns,
            dropped - self._dropped,
        )
        self._dropped = dropped
        return np.concatenate([events, gap])

    def _find_rate(self) -> bool:
        """Compare the writer's clock with the monotonic one; tells whether both have run for long enough."""
        from zico.trace import ring

        header = self.header[0]
        now = int(ring.now_ticks())  # the first call in a process loads code: so read the other clock after it
        passed_ns = time.monotonic_ns() - int(header["start_ns"])
        if not header["start_ns"] or passed_ns < _LEAST_NS:
            return False
        self._rate = passed_ns / (now - int(header["start_ticks"]))
        return True

    def _tell_nanoseconds(self, events: NDArray[np.void]) -> None:
        """Turn readings of the writer's clock into nanoseconds since it began.

        Times never fall, but an operation is recorded when it has ended, with the time at which it
        began.
        """
        if not len(events):
            return
        since_ns = ((events["t_ns"] - int(self.header[0]["start_ticks"])) * self._rate).astype(np.int64)
        ops = events["kind"] == Kind.OP
        events["size_bytes"][ops] = (events["size_bytes"][ops] * self._rate).astype(np.int64)
        in_order = np.maximum.accumulate(np.where(ops, self._last_ns, np.maximum(since_ns, self._last_ns)))
        events["t_ns"] = np.where(ops, np.maximum(since_ns, 0), in_order)
        self._last_ns = int(in_order[-1])
