"""One job: its command started, its output passed on, its session ended with it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

from zico.launch.listener import Stream
from zico.launch.processes import LEFT_BEHIND_S, Child, LinePipe

if TYPE_CHECKING:
    from zico.launch.commands import Command
    from zico.launch.ward import Ward

NOT_FOUND_CODE = 127
NOT_EXECUTABLE_CODE = 126
"""Both as in POSIX shells."""

Output = Callable[[str, Stream, list[bytes]], None]


class Job:
    """A command on its way from being started to its exit code."""

    def __init__(self, command: Command) -> None:
        """Do not start it yet."""
        self.command = command
        self.child: Child | None = None
        self.exit_code: int | None = None
        self.wall_s = 0.0
        self.ended_s = 0.0
        """When it ended, on the monotonic clock."""
        self._started_s = time.monotonic()
        self._pipes: list[LinePipe] = []

    @property
    def living(self) -> bool:
        """Say whether a process of it may live."""
        return self.child is not None and self.exit_code is None

    def start(self, environ: Mapping[str, str], *, takes_input: bool) -> str | None:
        """Start the command; return why it could not be started, else ``None``.

        Args:
            environ: The job's whole environment.
            takes_input: Let it read our standard input instead of nothing.
        """
        self._started_s = time.monotonic()
        try:
            self.child = Child(self.command.argv, environ, stdin=None if takes_input else subprocess.DEVNULL)
        except OSError as error:
            found = not isinstance(error, FileNotFoundError)
            self.exit_code = NOT_EXECUTABLE_CODE if found else NOT_FOUND_CODE
            self.ended_s = time.monotonic()
            return self._why_not(error)
        return None

    async def run(self, output: Output, ward: Ward, grace_s: float) -> int:
        """Pass its output on until it has ended, end what it left behind, and keep its exit code.

        Changes ``exit_code``, ``wall_s`` and ``ended_s``. The wait for the process itself has no deadline: that is
        how long training takes.

        Returns:
            How many processes it left behind that had to be ended.
        """
        child = cast("Child", self.child)
        for stream, pipe in zip(Stream, child.pipes, strict=True):
            self._pipes.append(await LinePipe.connect(pipe, partial(output, self.command.name, stream)))
        await child.ended()
        self.ended_s = time.monotonic()
        self.wall_s = self.ended_s - self._started_s
        left = await child.end_session(quiet_s=LEFT_BEHIND_S, grace_s=grace_s)
        # Processes that have left the session may still hold the pipes.
        await asyncio.gather(*(pipe.close(wait_s=LEFT_BEHIND_S) for pipe in self._pipes))
        ward.remove(child.pid)
        self.exit_code = child.reap()
        return left

    def expire_output(self) -> None:
        """Pass on output that has been held back for long enough."""
        for pipe in self._pipes:
            pipe.expire()

    def _why_not(self, error: OSError) -> str:
        program = self.command.argv[0]
        if self.exit_code == NOT_EXECUTABLE_CODE:
            return f"{self.command.name}: cannot run {program!r}: {(error.strerror or str(error)).lower()}"
        text = f"{self.command.name}: the program {program!r} does not exist"
        if len(self.command.argv) == 1:
            return f'{text}; a whole command goes into one pair of quotes ("python train.py") or after --'
        if "=" in program:
            return f"{text}; to set a variable put env before it: env {self.command.text}"
        return text
