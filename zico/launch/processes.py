"""Child processes that lead their own session: started, awaited by pidfd, ended as a whole, then reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, cast

from zico.launch import sessions
from zico.launch.output import LineSplitter

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

    It is reaped only when nothing of its session is left: until then its number cannot become another process's.
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
            sessions.send(self.pid, signum)

    async def end_session(self, *, quiet_s: float, grace_s: float) -> int:
        """End what lives in the session and return how many processes had to be told.

        Waits ``quiet_s`` for them to end by themselves, then ``grace_s`` after SIGTERM, then kills.
        """
        if await self._empty_within(quiet_s):
            return 0
        told = sessions.send(self.pid, signal.SIGTERM)
        if not await self._empty_within(grace_s):
            sessions.send(self.pid, signal.SIGKILL)
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
            sessions.send(self.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.reap()

    async def _empty_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while sessions.members(self.pid):
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


class LinePipe(asyncio.Protocol):
    """The read end of one output stream, cut into lines that are handed to ``write`` as they come."""

    def __init__(self, write: LineWriter) -> None:
        """Hand every line to ``write``."""
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
            await asyncio.wait_for(self.closed.wait(), wait_s)
        except TimeoutError:
            cast("asyncio.BaseTransport", self._transport).close()
            await asyncio.wait_for(self.closed.wait(), KILL_S)

    def _pass(self, lines: list[bytes]) -> None:
        if lines:
            self._write(lines)
