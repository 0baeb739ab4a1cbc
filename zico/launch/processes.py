"""Child processes that lead their own session: started, awaited by pidfd, ended as a whole, then reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import IO, cast

from zico.launch import watchdog

# --------------------------------------------------------------------------------------------------
# Cut a job's output into lines: bytes in, whole lines out, with nothing decoded and so nothing
# damaged.
#
# A progress bar redraws one line by carriage returns. Of such redraws the latest is let through
# about once a second, as a line of its own. Text without an end of line is let through when nothing
# has followed it for a while.

REDRAW_S = 1.0
"""A line that is being redrawn is passed on at most this often."""
RETURN_S = 0.1
"""A carriage return at the end of what was read may be half of a line's end for this long."""
PARTIAL_S = 2.0
"""A line without an end is passed on after this long."""
MAX_LINE_BYTES = 64 * 1024
"""A longer line is cut, so that no job can fill our memory."""

_END = re.compile(rb"\r\n|\n|\r")
# Cursor movements and erasures (ECMA-48 CSI with these final bytes) would draw over other jobs'
# lines. Colours stay.
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]")


class LineSplitter:
    """Turn chunks of one stream into lines without their ends. Keeps no clock: times in seconds are given."""

    def __init__(self) -> None:
        self._partial = b""
        self._partial_since_s = 0.0
        self._redrawn: bytes | None = None
        self._passed_s = float("-inf")

    def feed(self, chunk: bytes, now_s: float) -> list[bytes]:
        """Return the lines that ``chunk`` completes."""
        if not self._partial:
            self._partial_since_s = now_s
        text = self._partial + chunk
        # A carriage return at the very end may be the first half of "\r\n": keep it until more is
        # known.
        held_return = text.endswith(b"\r")
        lines = self._cut(text[:-1] if held_return else text, now_s)
        if held_return:
            self._partial += b"\r"
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._take_partial())
        return lines

    def expire(self, now_s: float) -> list[bytes]:
        """Return what has been held back for long enough."""
        lines = []
        if self._partial.endswith(b"\r") and now_s - self._partial_since_s >= RETURN_S:
            self._redrawn = self._take_partial()
        if self._redrawn is not None and now_s - self._passed_s >= REDRAW_S:
            lines.append(self._take_redrawn(now_s))
        if self._partial and now_s - self._partial_since_s >= PARTIAL_S:
            lines.append(self._take_partial())
        return lines

    def finish(self) -> list[bytes]:
        """Return all that is still held back: the stream has ended."""
        rest = [line for line in (self._redrawn, self._take_partial()) if line]
        self._redrawn = None
        return rest

    def _cut(self, text: bytes, now_s: float) -> list[bytes]:
        """Return the complete lines of ``text`` and keep the rest."""
        lines, start = [], 0
        for end in _END.finditer(text):
            line = _CURSOR.sub(b"", text[start : end.start()])
            start = end.end()
            if end[0] != b"\r":
                # An empty end of a redrawn line: what stands there is its last state.
                lines.append(line or self._redrawn or b"")
                self._redrawn = None
            elif line:
                self._redrawn = line
                if now_s - self._passed_s >= REDRAW_S:
                    lines.append(self._take_redrawn(now_s))
        if start:
            self._partial_since_s = now_s
        self._partial = text[start:]
        return lines

    def _take_partial(self) -> bytes:
        partial, self._partial = self._partial, b""
        return _CURSOR.sub(b"", partial.rstrip(b"\r"))

    def _take_redrawn(self, now_s: float) -> bytes:
        line, self._redrawn, self._passed_s = self._redrawn or b"", None, now_s
        return line


# --------------------------------------------------------------------------------------------------

POLL_S = 0.02
"""How often a session is looked at while it is being ended."""
LEFT_BEHIND_S = 1.0
"""How long the children of an ended job may take to end by themselves."""
KILL_S = 5.0
"""How long the kernel may take to end a killed process."""
FIRST_EXIT_CODE_OF_A_SIGNAL = 128

LineWriter = Callable[[list[bytes]], None]


class Child:
    """A process with a session of its own, and everything that it starts in it.

    It is reaped only when nothing of its session is left: until then its number cannot become
    another process's.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], *, stdin: int | None, pass_fds: Sequence[int] = ()
    ) -> None:
        """Start the process with pipes for its output.

        Raises:
            OSError: It cannot be started; nothing is left behind.
        """
        self._popen = subprocess.Popen(  # noqa: S603 - running the user's commands is the purpose
            argv,
            env=dict(environ),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return the read ends of standard output and standard error."""
        return cast("IO[bytes]", self._popen.stdout), cast("IO[bytes]", self._popen.stderr)

    async def ended(self) -> None:
        """Wait until the process itself has ended; the caller sets the deadline. Does not reap it."""
        pidfd = os.pidfd_open(self.pid)
        try:
            await readable(pidfd)
        finally:
            os.close(pidfd)

    def send(self, signum: int) -> None:
        """Signal the whole session."""
        if self._popen.returncode is None:
            watchdog.send([self.pid], signum)

    async def end_session(self, *, quiet_s: float, grace_s: float) -> int:
        """End what lives in the session and return how many processes had to be told.

        Waits ``quiet_s`` for them to end by themselves, then ``grace_s`` after SIGTERM, then kills.
        """
        if await self._empty_within(quiet_s):
            return 0
        told = watchdog.send([self.pid], signal.SIGTERM)
        if not await self._empty_within(grace_s):
            watchdog.send([self.pid], signal.SIGKILL)
            await self._empty_within(KILL_S)
        return told

    def reap(self) -> int:
        """Return the ended process's exit code, 128 + N if signal N ended it. Closes the pipes."""
        code = self._popen.wait(timeout=KILL_S)
        for pipe in self.pipes:
            pipe.close()
        return code if code >= 0 else FIRST_EXIT_CODE_OF_A_SIGNAL - code

    def kill(self) -> None:
        """Kill and reap the whole session at once; does nothing the second time."""
        if self._popen.returncode is None:
            watchdog.send([self.pid], signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.reap()

    async def _empty_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while watchdog.members(self.pid):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True


async def readable(fd: int) -> None:
    """Wait until ``fd`` can be read or has ended; the caller sets the deadline."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def within(seconds: float, waiting: Awaitable[object]) -> None:
    """Wait for something that has a deadline.

    Not by ``asyncio.wait_for``. Before Python 3.12 that forgets a cancellation which comes together
    with what it waits for, and the task that is cancelled goes on.

    Raises:
        TimeoutError: The time has gone by.
    """
    async with asyncio.timeout(seconds):
        await waiting


class LinePipe(asyncio.Protocol):
    """The read end of one output stream, cut into lines that are handed to ``write`` as they come."""

    def __init__(self, write: LineWriter) -> None:
        self._write = write
        self._splitter = LineSplitter()
        self._transport: asyncio.BaseTransport | None = None
        self.closed = asyncio.Event()

    @classmethod
    async def connect(cls, pipe: IO[bytes], write: LineWriter) -> LinePipe:
        """Return a reader of ``pipe`` that runs until ``close`` or the end of the stream."""
        loop = asyncio.get_running_loop()
        _, protocol = await loop.connect_read_pipe(lambda: cls(write), pipe)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by asyncio)."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass complete lines on (called by asyncio)."""
        self._pass(self._splitter.feed(data, asyncio.get_running_loop().time()))

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the rest on (called by asyncio)."""
        del exc  # a broken pipe ends a stream as well as its end does
        self._pass(self._splitter.finish())
        self.closed.set()

    def expire(self) -> None:
        """Pass on what has been held back for long enough."""
        self._pass(self._splitter.expire(asyncio.get_running_loop().time()))

    async def close(self, *, wait_s: float) -> None:
        """Wait ``wait_s`` at most for the end of the stream, then stop reading it."""
        try:
            await within(wait_s, self.closed.wait())
        except TimeoutError:
            cast("asyncio.BaseTransport", self._transport).close()
            await within(KILL_S, self.closed.wait())

    def _pass(self, lines: list[bytes]) -> None:
        if lines:
            self._write(lines)
