"""A broker that is kept alive: started where there is none, looked after, and replaced when it dies.

How it works
    The broker is no child of the process that keeps it, so it outlives that process. Whoever keeps it
    next finds it by its socket. It ends when the process named by ``until`` and its last job have
    ended.

    A broker that does not answer is replaced. Jobs of the old one hold memory that the new one does
    not know of. So they are killed first: what has started them starts them again.

Known limitations
    A job that has joined since the last look at a broker that dies then is not killed. It goes on in
    the old pool, by claims alone, until it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, cast

from zico.base import interpreter
from zico.base.errors import BrokerError, ZicoError
from zico.broker import transport
from zico.broker.client import BrokerClient
from zico.broker.notes import read_head
from zico.broker.starting import await_ready, lines_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import IO

    from zico.broker.notes import Process
    from zico.broker.protocol.messages import Status

READY_S = 1800.0
"""The first broker on a machine compiles."""
ANSWER_S = 10.0
KILL_S = 5.0
_DETACHED = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


class KeptBroker:
    """The broker behind a socket. One thread at a time may use it."""

    def __init__(self, socket: Path, options: Mapping[str, str], until: int) -> None:
        """Start nothing.

        Args:
            socket: Where it listens.
            options: Of ``zico broker``, without dashes: ``{"budget": "8GiB"}``.
            until: The process with which it ends, if it has no job by then.
        """
        self._socket = socket
        self._words = ["--socket", str(socket), "--until", str(until)]
        for name, value in options.items():
            self._words += [f"--{name}", value]
        self._client = BrokerClient(socket, ANSWER_S)
        self._broker: int | None = None
        """A pidfd of the broker."""
        self._jobs: dict[Process, int] = {}
        """A pidfd of each job, by its process."""

    def look(self) -> Status:
        """Return how the pool is; starts a broker where none answers, after it has killed the jobs of the last one.

        Takes ``READY_S`` at most, where a broker has to compile.

        Raises:
            BrokerError: No broker can be started; the message says why.
        """
        try:
            status = self._client.status()
        except (ZicoError, OSError):
            self._client.close()
            self._replace()
            status = self._client.status()
        if self._broker is None:
            self._broker = self._pidfd_of_peer()
        self._note_jobs({job.pid for job in status.jobs})
        return status

    def peaks(self) -> dict[str, int]:
        """Return the most bytes that one process of each job's name has held in the pool, those that have ended too.

        Raises:
            BrokerError: No broker answers, and none can be started.
        """
        self.look()
        found: dict[str, int] = {}
        for job in self._client.report(record=False).jobs:
            found[job.name] = max(job.peak_bytes, found.get(job.name, 0))
        return found

    def end(self) -> None:
        """End the broker, ``KILL_S`` after it was asked to by force. Jobs go on by claims alone."""
        self._client.close()
        if self._broker is None:
            with contextlib.suppress(ZicoError, OSError):
                self._broker = self._pidfd_of_peer()
        self._end_broker(signal.SIGTERM)
        self._note_jobs(set())

    def _replace(self) -> None:
        """Kill the broker, if it lives and does not answer, and its jobs, and start another one."""
        self._end_broker(signal.SIGKILL)
        # Jobs wait for a socket that is not there, and are refused at one that nobody serves.
        self._socket.unlink(missing_ok=True)
        for pidfd in self._jobs.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in self._jobs.values():
            select.select([pidfd], [], [], KILL_S)
        self._note_jobs(set())
        self._start()

    def _end_broker(self, signum: int) -> None:
        pidfd, self._broker = self._broker, None
        if pidfd is None:
            return
        for one in dict.fromkeys((signum, signal.SIGKILL)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, one)
            if select.select([pidfd], [], [], KILL_S)[0]:
                break
        os.close(pidfd)

    def _start(self) -> None:
        with tempfile.TemporaryFile() as said:
            launcher = subprocess.Popen(  # noqa: S603 - this Python
                interpreter.bare("-c", _DETACHED, *interpreter.command("-m", "zico", "broker", *self._words)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
            )
            with cast("IO[bytes]", launcher.stdout) as ready:
                end_s = time.monotonic() + READY_S
                told = await_ready(ready.fileno(), READY_S, lambda _text: None)
            launcher.wait(timeout=max(KILL_S, end_s - time.monotonic()))
            lines = lines_of(said)
        # Another process may have been quicker: then that one's broker is looked after.
        if not told and not any("another broker lives" in line for line in lines):
            reason = lines[-1].removeprefix("zico: ") if lines else f"it was not ready within {READY_S:.0f} s"
            raise BrokerError(f"the broker could not start: {reason}")

    def _pidfd_of_peer(self) -> int | None:
        with transport.connect(self._socket, ANSWER_S) as connection:
            return transport.peer_pidfd(connection)

    def _note_jobs(self, pids: set[int]) -> None:
        """Keep a descriptor of each living job that has one of these numbers, by the starts that the note has."""
        head = read_head(self._socket)
        those = {job.process for job in head.jobs if job.process.pid in pids} if head else set()
        for process in self._jobs.keys() - those:
            os.close(self._jobs.pop(process))
        for process in those - self._jobs.keys():
            pidfd = process.watch()
            if pidfd is not None:
                self._jobs[process] = pidfd

    @property
    def pids(self) -> set[int]:
        """Return the jobs' processes, as of the last look."""
        return {process.pid for process in self._jobs}
