"""Copies out and in that nobody has to stand by: two threads, one a direction, each a queue in order.

A copy's fence is the ``Copy`` that asking for it returns. Compiled code moves the bytes, without the GIL.

Guarantees
    Asking never waits. Copies of one direction are made one after the other in the order of asking.
    Until a copy has ended it keeps what it was given alive. A copy out that fails leaves its source as it was.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol, Self

from zico.errors import LocalProtocolError
from zico.tiers.layout import FULL

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Then = Callable[["Copy"], None]

_IDLE_S = 10.0
"""How long a thread sleeps that has nothing to do."""
CLOSE_S = 30.0
"""How long closing waits for the copy that is being made."""


class Payloads(Protocol):
    """Where copies go: ``zico.tiers.stack.TierStack``, or of a GPU ``zico.tiers.pinned.PinnedStack``."""

    def put(self, address: int, size_bytes: int) -> int:
        """Copy memory there; returns a ticket, or why there is none."""
        ...

    def get(self, ticket: int, address: int, size_bytes: int) -> int:
        """Copy a payload to memory; returns 0 or an errno."""
        ...

    def drop(self, ticket: int) -> None:
        """Forget a payload."""
        ...

    def why(self, result: int) -> str:
        """Return a sentence on why ``put`` gave no ticket."""
        ...


class Outcome(enum.Enum):
    """What has become of a copy."""

    PENDING = "pending"
    """It has not ended."""
    COPIED = "copied"
    FULL = "full"
    """No tier has room; the source is as it was."""
    FAILED = "failed"
    """The tier could not be written or read: out, the source is as it was; in, the target holds anything."""
    CANCELLED = "cancelled"
    """It never began."""


class Copy:
    """One copy, and the fence that tells of its end."""

    __slots__ = ("_begun", "_ended", "_kept", "_then", "address", "outcome", "size_bytes", "ticket", "why")

    def __init__(self, ticket: int, address: int, size_bytes: int, kept: object, then: Then | None) -> None:
        """Describe a copy that nobody has begun."""
        self.ticket = ticket
        """What brings the payload back: of a copy out from when it is copied."""
        self.address = address
        self.size_bytes = size_bytes
        self.outcome = Outcome.PENDING
        self.why = ""
        """One sentence for the user where it was not copied."""
        self._kept = kept
        self._then = then
        self._begun = threading.Lock()  # whoever gets it makes the copy, or cancels it
        self._ended = threading.Event()

    def done(self) -> bool:
        """Tell whether it has ended, whichever way."""
        return self._ended.is_set()

    def wait(self, deadline_s: float) -> bool:
        """Wait until it has ended, at most so long; returns whether it has."""
        return self._ended.wait(deadline_s)

    def cancel(self) -> bool:
        """Keep it from beginning; returns whether that was still possible, or had been done."""
        if self._begun.acquire(blocking=False):
            self._end(Outcome.CANCELLED, "")
        return self.outcome is Outcome.CANCELLED

    def _end(self, outcome: Outcome, why: str) -> None:
        self.outcome = outcome
        self.why = why
        self._kept = None
        then, self._then = self._then, None
        try:
            if then is not None:
                then(self)
        finally:
            self._ended.set()


class Transfers:
    """The two threads of one process that copy to a stack of tiers and from it.

    Close it, or use it as a context manager, before the stack. No other thread of the process may put to the stack or
    get from it meanwhile; dropping is anybody's.
    """

    def __init__(self, stack: Payloads) -> None:
        """Start the threads; they end with the interpreter, whatever is queued."""
        self._stack = stack
        self._pid = os.getpid()
        self._closed = False
        self._out: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(queued, make), name=f"zico-{name}", daemon=True)
            for name, queued, make in (("out", self._out, self._copy_out), ("in", self._in, self._copy_in))
        ]
        for thread in self._threads:
            thread.start()

    def out(self, address: int, size_bytes: int, *, kept: object = None, then: Then | None = None) -> Copy:
        """Ask for a copy to the tiers.

        Args:
            address: Where the memory is. Nobody may write to it until the copy has ended.
            size_bytes: How much, at least 1.
            kept: Held until the copy has ended, such as the tensor.
            then: Called in the copying thread when it has ended, before anybody who waits goes on; in the caller's
                when it is cancelled. It must be short: later copies wait for it.

        Raises:
            LocalProtocolError: This is closed, or another process's, from before a fork.
        """
        return self._ask(self._out, Copy(FULL, address, size_bytes, kept, then))

    def back(
        self,
        ticket: int,
        address: int,
        size_bytes: int,
        *,
        kept: object = None,
        then: Then | None = None,
    ) -> Copy:
        """Ask for a payload, which stays in its tier; arguments and errors are those of ``out``."""
        return self._ask(self._in, Copy(ticket, address, size_bytes, kept, then))

    def drop(self, ticket: int) -> None:
        """Forget a payload, at once."""
        self._stack.drop(ticket)

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and end the threads; nothing in a forked child or again."""
        closed, self._closed = self._closed, True
        if closed or os.getpid() != self._pid:
            return
        for queued in (self._out, self._in):
            queued.put(None)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        for queued in (self._out, self._in):  # what was asked for at the same time
            with contextlib.suppress(queue.Empty):
                while True:
                    if copy := queued.get_nowait():
                        copy.cancel()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()

    def _ask(self, queued: queue.SimpleQueue[Copy | None], copy: Copy) -> Copy:
        if self._closed or os.getpid() != self._pid:
            raise LocalProtocolError("a copy was asked of transfers that are closed, or of another process: make new")
        queued.put(copy)
        return copy

    def _work(self, queued: queue.SimpleQueue[Copy | None], make: Callable[[Copy], tuple[Outcome, str]]) -> None:
        while True:
            try:
                copy = queued.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            if copy is None:
                return
            self._make(copy, make)
            del copy  # it keeps nothing alive while the next is waited for

    def _make(self, copy: Copy, make: Callable[[Copy], tuple[Outcome, str]]) -> None:
        try:
            if self._closed:
                copy.cancel()
            elif copy._begun.acquire(blocking=False):  # noqa: SLF001 - the other half of Copy.cancel
                copy._end(*make(copy))  # noqa: SLF001 - the same
        except Exception:  # noqa: BLE001 - the caller's `then` failed; later copies must still be made
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def _copy_out(self, copy: Copy) -> tuple[Outcome, str]:
        copy.ticket = self._stack.put(copy.address, copy.size_bytes)
        if copy.ticket >= 0:
            return Outcome.COPIED, ""
        return (Outcome.FULL if copy.ticket == FULL else Outcome.FAILED), self._stack.why(copy.ticket)

    def _copy_in(self, copy: Copy) -> tuple[Outcome, str]:
        status = self._stack.get(copy.ticket, copy.address, copy.size_bytes)
        if status == 0:
            return Outcome.COPIED, ""
        return Outcome.FAILED, f"memory could not come back from its tier: {os.strerror(status)}"
