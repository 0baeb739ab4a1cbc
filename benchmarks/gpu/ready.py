"""Processes that are started early, make ready, and touch the device only when they are told to go.

A job on a GPU needs seconds for its imports. So the next one imports while one is measured, and
waits for a file that says go. Until then it holds nothing of the device, not even a context.

``wait`` is for the process that is started, ``Process`` for the one that starts it. What a process
has started, in whatever session, carries the process's mark in its environment, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # PYTHONSAFEPATH leaves it out

import common
import psutil

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Mapping, Sequence

PASSED, FAILED, KILLED = "passed", "failed", "killed"
MARK = "GPU_RUN_MARKS"
"""In the environment of a process and of all that it starts: the marks of the processes above it, and its own."""
ORDERLY_S = 5.0
"""After SIGTERM: a run under MPS that is killed at once may leave work on the device behind."""
REAP_S = 10.0
LONGEST_WAIT_S = 900.0
_POLL_S = 0.01
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


# -- the process that is started -------------------------------------------------------------------


def add_option(parser: ArgumentParser) -> None:
    """Offer ``--go``."""
    parser.add_argument("--go", type=Path, metavar="FILE", help="make ready, then wait until this file is there")


def wait(go: Path | None) -> None:
    """Say that this process is ready, and return when it is told to go; at once without a file.

    Ends this process where nobody is left who could tell it.
    """
    if go is None:
        return
    starter, end_s = os.getppid(), time.monotonic() + LONGEST_WAIT_S
    _ready(go).touch()
    while not go.exists():
        if os.getppid() != starter or time.monotonic() > end_s:
            sys.exit(f"nobody has made {go}")
        time.sleep(_POLL_S)


def _ready(go: Path) -> Path:
    return go.with_name(f"{go.name}.ready")


# -- the process that starts it --------------------------------------------------------------------


def adopt() -> None:
    """Become the parent of whatever a killed process leaves behind, so that it can be found and ended."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


_started: dict[int, subprocess.Popen[bytes]] = {}


def _reap() -> None:
    """Let adopted children that have ended go; those that were started here keep their exit code."""
    with contextlib.suppress(ChildProcessError):  # there is none
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            own = _started.pop(ended.si_pid, None)
            if own is None:
                os.waitpid(ended.si_pid, os.WNOHANG)
            else:
                own.poll()


def _end_with(starter: int) -> Callable[[], None]:
    """Return what lets a new process be told to end when its starter has ended, in whatever way."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_DEATH_SIGNAL, int(signal.SIGTERM))
        if os.getppid() != starter:
            os._exit(1)

    return ask


class Process:
    """A process, with all that it starts."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: IO[str],
        go: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; what it prints goes to the log. It is told to end when the thread that calls this ends.

        Args:
            argv: The command, which has been given ``--go`` where ``go`` is.
            log: Takes both of its outputs.
            go: The file that lets it go on; none: it begins at once.
            environment: Is added to that of this process.
        """
        self._go = go
        self._mark = uuid.uuid4().hex
        marks = " ".join(filter(None, (os.environ.get(MARK), self._mark)))
        self._process = subprocess.Popen(
            argv,
            cwd=common.ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {}), MARK: marks},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            preexec_fn=_end_with(os.getpid()),  # noqa: PLW1509 - this process has one thread
        )
        _started[self._process.pid] = self._process

    @property
    def exit_code(self) -> int | None:
        """Return how it ended, nothing while it runs."""
        return self._process.poll()

    @property
    def is_ready(self) -> bool:
        """Tell whether it waits for its go."""
        return self._go is not None and _ready(self._go).exists()

    def release(self) -> None:
        """Let it go on."""
        if self._go is not None:
            self._go.touch()

    def finish(self, deadline_s: float) -> str:
        """Wait for its end and leave nothing of it; returns ``passed``, ``failed`` or ``killed``.

        At the deadline it is asked to end by SIGTERM, and killed ``ORDERLY_S`` later.
        """
        try:
            if self._ends_within(deadline_s):
                return FAILED if self.exit_code else PASSED
            self._process.terminate()
            self._ends_within(ORDERLY_S)
            return KILLED
        finally:
            self.kill()

    def _ends_within(self, seconds: float) -> bool:
        """Wait for its end; meanwhile what was adopted and has ended goes, as whoever looks for it takes it to."""
        end_s = time.monotonic() + seconds
        while self.exit_code is None:
            if time.monotonic() > end_s:
                return False
            _reap()
            time.sleep(_POLL_S)
        return True

    def kill(self) -> None:
        """End it with all that it started, also what has left its process group; waits for at most ``REAP_S``."""
        end_s = time.monotonic() + REAP_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while family := self._family():
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            _, left = psutil.wait_procs(family, max(0.0, end_s - time.monotonic()))
            if left or time.monotonic() > end_s:  # a driver that hangs may keep it
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, end_s - time.monotonic()))

    def _family(self) -> list[psutil.Process]:
        """Return the processes below this one that carry the mark."""
        found = []
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE and self._mark in one.environ().get(MARK, ""):
                    found.append(one)
        return found
