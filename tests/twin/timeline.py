"""Streams that run by themselves: a thread each, operations in order, and a hand on the brake for tests.

Guarantees
    Nothing hangs: a wait on the device that is not met within the deadline loses its stream
    (``LAUNCH_TIMEOUT``), and so does whoever synchronises with a stream that is held for longer.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
import time
from typing import TYPE_CHECKING

from twin.entry import Refused, refuse_unless

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_POLL_S = 0.0002
_SLICE_S = 0.05
_JOIN_S = 10.0


def _always() -> bool:
    return True


@dataclasses.dataclass
class Operation:
    """Something in a stream: it runs once it is ready."""

    name: str
    run: Callable[[], None]
    ready: Callable[[], bool] = _always


class Stream:
    """One stream and its thread."""

    def __init__(self, context: int, deadline_s: float, on_fault: Callable[[str], None]) -> None:
        """Start the thread; ``on_fault`` is told the status that the stream is lost with."""
        self.context = context
        self.done = 0
        """Operations finished so far."""
        self.error = ""
        self._deadline_s = deadline_s
        self._on_fault = on_fault
        self._queue: collections.deque[Operation] = collections.deque()
        self._recording: list[Operation] | None = None
        self._is_broken = False  # the recording was
        self._allowed: int | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="zico-twin-stream", daemon=True)
        self._thread.start()

    # -- from the driver's functions ---------------------------------------------------------------

    def put(self, operation: Operation) -> None:
        """Append an operation; on a stream that captures it is recorded and not run.

        Raises:
            Refused: The stream is lost, or its capture is.
        """
        with self._changed:
            self._refuse_if_lost()
            if self._recording is not None:
                refuse_unless(not self._is_broken, "STREAM_CAPTURE_INVALIDATED")
                self._recording.append(operation)
                return
            self._queue.append(operation)
            self._changed.notify_all()

    def is_idle(self) -> bool:
        """Tell whether everything put so far is done."""
        with self._changed:
            self._refuse_if_lost()
            self.break_capture()
            return not self._queue

    def synchronize(self) -> None:
        """Wait until everything put so far is done.

        Raises:
            Refused: The stream is lost, or was now, since the deadline passed; or it captures, and
                no longer can.
        """
        with self._changed:
            self.break_capture()
            goal = self.done + len(self._queue)
        if not self._await(lambda: self.done >= goal or bool(self.error)):
            self._lose("LAUNCH_TIMEOUT")
        with self._changed:
            self._refuse_if_lost()

    def capture(self) -> None:
        """Record operations from now on."""
        with self._changed:
            refuse_unless(self._recording is None, "ILLEGAL_STATE")
            self._recording, self._is_broken = [], False

    def end_capture(self) -> list[Operation]:
        """Return what was recorded, and run operations again.

        Raises:
            Refused: Nothing was being recorded, or something broke it.
        """
        with self._changed:
            recorded, self._recording = self._recording, None
            refuse_unless(recorded is not None, "ILLEGAL_STATE")
            refuse_unless(not self._is_broken, "STREAM_CAPTURE_INVALIDATED")
            return recorded or []

    def is_capturing(self) -> bool:
        """Tell whether operations are recorded."""
        return self._recording is not None

    def is_broken(self) -> bool:
        """Tell whether the recording cannot be used any more."""
        return self._recording is not None and self._is_broken

    def break_capture(self) -> None:
        """Refuse a question that a stream cannot answer while it captures; asking loses the recording."""
        if self._recording is not None:
            self._is_broken = True
            raise Refused("STREAM_CAPTURE_UNSUPPORTED")

    def close(self) -> None:
        """End the thread; what was not run never is."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def _refuse_if_lost(self) -> None:
        if self.error:
            raise Refused(self.error)

    # -- from tests --------------------------------------------------------------------------------

    def hold(self, before: int) -> None:
        """Run no operation from number ``before`` on, counted from the stream's creation."""
        with self._changed:
            self._allowed = before
            self._changed.notify_all()

    def release(self) -> None:
        """Run freely again."""
        with self._changed:
            self._allowed = None
            self._changed.notify_all()

    def step(self) -> str:
        """Run one operation of a held stream to its end; returns its name, or nothing if there is none to run."""
        with self._changed:
            if not self._queue or self.error:
                return ""
            name, goal = self._queue[0].name, self.done + 1
            self._allowed = goal
            self._changed.notify_all()
        if not self._await(lambda: self.done >= goal or bool(self.error)):
            self._lose("LAUNCH_TIMEOUT")
        return name

    def can_step(self) -> bool:
        """Tell whether the next operation would run at once."""
        with self._changed:
            head = self._queue[0] if self._queue and not self.error else None
        try:
            return head is not None and head.ready()
        except Refused:
            return True  # it would run into its fault

    # -- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closing.is_set() or self._may_run(), _SLICE_S)
                if self._closing.is_set() or not self._may_run():
                    continue
                operation = self._queue[0]
            self._execute(operation)
            with self._changed:
                self._queue.popleft()
                self.done += 1
                self._changed.notify_all()

    def _may_run(self) -> bool:
        return bool(self._queue) and (self._allowed is None or self.done < self._allowed or bool(self.error))

    def _execute(self, operation: Operation) -> None:
        if self.error:
            return
        end_s = time.monotonic() + self._deadline_s
        try:
            while not operation.ready():
                refuse_unless(time.monotonic() < end_s, "LAUNCH_TIMEOUT")
                if self._closing.wait(_POLL_S):
                    return
            operation.run()
        except Refused as refused:
            self._lose(refused.status.name.removeprefix("CUDA_ERROR_"))
        except Exception:  # the top of a thread: a kernel that raises is a kernel that crashed
            self._lose("LAUNCH_FAILED")
            raise

    def _lose(self, name: str) -> None:
        with self._changed:
            self.error = self.error or name
            self._changed.notify_all()
        self._on_fault(name)

    def _await(self, reached: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(reached, self._deadline_s)


def run_shuffled(streams: Iterable[Stream], seed: int) -> list[int]:
    """Run held streams one operation at a time, in an order that the seed alone decides.

    Returns:
        The position of the stream that each step was taken in; it ends when no stream can go on.
    """
    numbered = list(enumerate(streams))
    choose = random.Random(seed)  # noqa: S311 - an order of a test
    order = []
    while candidates := [(position, stream) for position, stream in numbered if stream.can_step()]:
        position, stream = choose.choice(candidates)
        stream.step()
        order.append(position)
    return order
