"""The broker of a run: a child process of its own, or the user's daemon of the device, which the run joins."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from zico.base import interpreter
from zico.base.errors import BrokerError, CommandError, ZicoError
from zico.base.rundir import SOCKET_NAME
from zico.broker import transport
from zico.broker.client import BrokerClient
from zico.broker.starting import hears_ready, words_of
from zico.launch.processes import KILL_S, LEFT_BEHIND_S, Child, LinePipe, readable
from zico.report.model import read_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zico.base.settings import Settings
    from zico.broker.metrics import Address
    from zico.broker.protocol.messages import Report, Status
    from zico.launch.watchdog import Watchdog
    from zico.report.model import Record

READY_S = 1800.0
"""The first start on a machine compiles: five minutes of a processor and more; a few seconds afterwards."""
END_S = 5.0
ANSWER_S = 2.0
RECORD_NAME = "record.npz"
_LAST_WORDS = 5


class JoinedBroker:
    """A daemon that serves the jobs of one run beside others; it goes on when the run ends."""

    record: Path | None = None
    """It keeps none for a run."""

    def __init__(self, run_dir: Path, socket: Path, run: str) -> None:
        """Count the jobs of others that are in the pool already.

        Args:
            run_dir: Where the profiles of the run's jobs go.
            socket: The daemon's.
            run: What the run's jobs tell the daemon of whose they are.

        Raises:
            BrokerError: It does not answer, or is of another version.
        """
        self.socket = socket
        self.is_ready = True
        self.compiles = asyncio.Event()
        self._profiles = run_dir / RECORD_NAME
        self._client = BrokerClient(socket, ANSWER_S)
        self._run = run
        self.others = len(self._client.status().jobs)
        """Jobs of others that were in the pool when the run began."""

    async def wait_ready(self) -> None:
        """Wait for nothing."""

    async def ended(self) -> None:
        """Wait until the daemon has ended; the caller sets the deadline."""
        with contextlib.suppress(BrokerError, ProcessLookupError), contextlib.ExitStack() as owned:
            connection = owned.enter_context(transport.connect(self.socket, ANSWER_S))
            pidfd = transport.peer_pidfd(connection)
            if pidfd is not None:
                owned.callback(os.close, pidfd)
            await readable(connection.fileno() if pidfd is None else pidfd)  # by its end, in another pid namespace

    def status(self) -> Status | None:
        """Return how the pool is now, ``None`` if the daemon does not answer within ``ANSWER_S``."""
        with contextlib.suppress(ZicoError, OSError):
            return self._client.status()
        return None

    def report(self, *, record: bool = True) -> Report | None:  # noqa: ARG002 - as a run's own broker
        """Return the figures of the run's own jobs, ``None`` as with ``status``."""
        with contextlib.suppress(ZicoError, OSError):
            found = self._client.report(record=False)
            jobs = tuple(job for job in found.jobs if job.run == self._run)
            outside = tuple(one for one in found.outside if one.run == self._run)
            return msgspec.structs.replace(found, jobs=jobs, outside=outside)
        return None

    def look(self) -> Record | None:
        """Return the profiles of the run's own jobs, ``None`` as with ``status``."""
        with contextlib.suppress(ZicoError, OSError):
            found = self._client.report(record=False, profiles_to=self._profiles)
            record = read_record(self._profiles)
            return record.of([n for n, job in enumerate(found.jobs) if job.run == self._run])
        return None

    async def end(self) -> None:
        """Hang up; the daemon goes on."""
        self._client.close()

    def close(self, guardian: Watchdog) -> None:  # noqa: ARG002 - as a run's own broker
        """Hang up; does nothing the second time."""
        self._client.close()


RunBroker: TypeAlias = "BrokerProcess | JoinedBroker"


class BrokerProcess:
    """A broker that serves the jobs of one run."""

    def __init__(
        self,
        run_dir: Path,
        settings: Settings,
        guardian: Watchdog,
        message: Callable[[str], None],
        *,
        pages: bool = False,
        mps_pipes: Path | None = None,
        metrics: Address | None = None,
    ) -> None:
        """Start it; ``wait_ready`` says when jobs can join.

        Args:
            run_dir: Where its socket and its record go.
            settings: Device, budget, region size and policy.
            guardian: Will end the broker if we are killed.
            message: Called with each line that the broker writes.
            pages: Some job may page.
            mps_pipes: Directory of an MPS daemon that serves the jobs and not the broker.
            metrics: Where the broker serves metrics; stays the caller's.
        """
        self.socket = run_dir / SOCKET_NAME
        self.record = run_dir / RECORD_NAME
        self._message = message
        self._words: collections.deque[str] = collections.deque(maxlen=_LAST_WORDS)
        self._pipes: list[LinePipe] = []
        self.is_ready = False
        """Whether jobs can join, or could before it ended."""
        self.compiles = asyncio.Event()
        """Set when it has to compile before it is ready."""
        self._client = BrokerClient(self.socket, ANSWER_S)
        with contextlib.ExitStack() as undo:
            self._ready_fd, told_fd = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, self._ready_fd)
            try:
                words = [*words_of(settings, self.socket), "--record", str(self.record)]
                words += ["--ready-fd", str(told_fd), "--parent-pid", str(os.getpid())]
                passed = [told_fd]
                if pages:
                    words.append("--paging")
                if mps_pipes is not None:
                    words += ["--mps-pipes", str(mps_pipes)]
                if metrics is not None:
                    passed.append(metrics.socket.fileno())
                    words += ["--metrics-fd", str(metrics.socket.fileno())]
                argv = interpreter.command("-m", "zico.broker", *words)
                self._child = Child(argv, os.environ, stdin=subprocess.DEVNULL, pass_fds=tuple(passed))
            finally:
                os.close(told_fd)
            undo.pop_all()
        guardian.add(self._child.pid)

    async def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until jobs can join.

        Raises:
            CommandError: It ended instead, or was not ready in time; ``close`` is still to be
                called.
        """
        for pipe in self._child.pipes:
            self._pipes.append(await LinePipe.connect(pipe, self._hear))
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await readable(self._ready_fd)
                    is_ready = hears_ready(self._ready_fd, self._tell_compiling)
                    if is_ready is not None:
                        break
        except TimeoutError:
            raise CommandError(f"the broker was not ready within {timeout_s:.0f} s", exit_code=1) from None
        if not is_ready:
            await asyncio.gather(*(pipe.close(wait_s=LEFT_BEHIND_S) for pipe in self._pipes))
            raise CommandError(f"the broker could not start: {' / '.join(self._words) or 'no reason given'}", 1)
        self.is_ready = True

    async def ended(self) -> None:
        """Wait until the broker has ended; the caller sets the deadline."""
        await self._child.ended()

    def status(self) -> Status | None:
        """Return how the pool is now, ``None`` if the broker is not ready or does not answer within ``ANSWER_S``."""
        if not self.is_ready:
            return None
        with contextlib.suppress(ZicoError, OSError):
            return self._client.status()
        self._client.close()
        return None

    def report(self, *, record: bool = True) -> Report | None:
        """Return every job's figures so far, ``None`` as with ``status``; with ``record`` it is written first."""
        if not self.is_ready:
            return None
        with contextlib.suppress(ZicoError, OSError):
            return self._client.report(record=record)
        self._client.close()
        return None

    def look(self) -> Record | None:
        """Return the record up to now; ``None`` if the broker does not answer within ``ANSWER_S``."""
        return None if self.report() is None else read_record(self.record)

    async def end(self) -> None:
        """End the broker and wait for it, ``END_S`` at most before it is killed."""
        self._client.close()
        self._child.send(signal.SIGTERM)
        await self._child.end_session(quiet_s=END_S, grace_s=KILL_S)
        await asyncio.gather(*(pipe.close(wait_s=LEFT_BEHIND_S) for pipe in self._pipes))

    def close(self, guardian: Watchdog) -> None:
        """Kill whatever is left, and give the pipes back; does nothing the second time."""
        self._client.close()
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
            guardian.remove(self._child.pid)
            self._child.kill()

    def _tell_compiling(self, text: str) -> None:
        self.compiles.set()
        self._message(text)

    def _hear(self, lines: list[bytes]) -> None:
        """Pass the broker's words on; before it is ready, keep them for the error that says why it is not."""
        for line in lines:
            text = line.decode(errors="replace")
            self._words.append(text)
            if self.is_ready:
                self._message(text.removeprefix("zico "))
