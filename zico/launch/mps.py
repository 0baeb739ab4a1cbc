"""A private MPS daemon for the jobs of one run: started before them, ended after them.

NVIDIA's Multi-Process Service lets kernels of several processes run on a GPU at the same time. The
control program finds its daemon by a directory, so one in the run's own directory is nobody else's.
The broker is no client of it: if one job's fault takes the service down, the pool must not go with
it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zico.base.errors import CommandError, ConfigError
from zico.base.mps import CONTROL, PIPE_VARIABLE, end_work_at, is_process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zico.launch.watchdog import Watchdog

LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
START_S = 20.0
QUIT_S = 5.0
"""How long the daemon may take to end by itself: its servers end with their clients, which are gone by then."""
KILL_S = 5.0
POLL_S = 0.02

_PROC = Path("/proc")


class MpsDaemon:
    """The daemon of one run. ``close`` ends it whatever happened; a second time does nothing."""

    def __init__(self, run_dir: Path, environ: Mapping[str, str]) -> None:
        """Prepare directories in ``run_dir`` for a daemon that sees the GPUs that ``environ`` shows.

        Raises:
            ConfigError: The control program is not installed.
        """
        found = shutil.which(CONTROL, path=environ.get("PATH"))
        if found is None:
            raise ConfigError(
                f"--mps: {CONTROL} is not on PATH; it comes with the NVIDIA driver: install it, or run without --mps"
            )
        self._program = found
        self.pipes = run_dir / "mps"
        """The directory by which clients and the control program find the daemon."""
        self.variables = {PIPE_VARIABLE: str(self.pipes), LOG_VARIABLE: str(run_dir / "mps-log")}
        """What makes a process a client of this daemon."""
        for directory in self.variables.values():
            Path(directory).mkdir(mode=0o700)
        self._environ = {**environ, **self.variables}
        self._words = run_dir / "mps-log" / "control.txt"
        self._sessions: set[int] = set()

    def start(self, guardian: Watchdog) -> None:
        """Start the daemon and wait until it serves, ``START_S`` at most; ``guardian`` will end it if we are killed.

        Raises:
            CommandError: It does not start; the message has its last words. ``close`` is still to
                be called.
        """
        reason = self._control("-d", timeout_s=START_S)
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                self._sessions.add(os.getsid(pid))
        for session in self._sessions:
            guardian.add(session, last=True)
        if reason is not None or not self._sessions:
            words = self._words.read_text(errors="replace").strip().rpartition("\n")[2]
            raise CommandError(f"--mps: {CONTROL} -d {reason or 'left no daemon'}: {words or 'it said nothing'}", 1)

    def close(self, guardian: Watchdog) -> None:
        """Ask the daemon to end, and kill what has not ended after ``QUIT_S``; a second time does nothing.

        Clients that are left have left their job's session; their work on the GPU ends first.
        """
        try:
            if self._processes():
                end_work_at(self.pipes)
                self._control(stdin=b"quit\n", timeout_s=QUIT_S)
                self._await_end(QUIT_S)
        finally:
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(pid), signal.SIGKILL)
            self._await_end(KILL_S)
            for session in self._sessions:
                guardian.remove(session)
            self._sessions.clear()

    def _control(self, *arguments: str, stdin: bytes = b"", timeout_s: float) -> str | None:
        """Run the control program to its end; return how it failed, ``None`` if it did not."""
        # Not a pipe: the daemon would keep its other end.
        with self._words.open("wb") as words:
            try:
                done = subprocess.run(  # noqa: S603 - the program that the user's PATH names
                    [self._program, *arguments],
                    env=self._environ,
                    input=stdin,
                    stdout=words,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"did not end within {timeout_s:g} s"
            except OSError as error:
                return f"could not be run ({error.strerror})"
        return None if done.returncode == 0 else f"ended with {done.returncode}"

    def _await_end(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while self._processes() and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _processes(self) -> list[int]:
        """Return the living processes of this daemon: those of its name that were started with its directory."""
        mark = f"{PIPE_VARIABLE}={self.pipes}".encode()
        return [pid for pid in psutil.pids() if is_process(pid) and _has(pid, mark)]


def _has(pid: int, mark: bytes) -> bool:
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return False
