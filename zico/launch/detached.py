"""Runs that go on without a terminal: what each has said, whether it still runs, and how it ended.

A run has a directory in the user's state directory, named as the run::

    words.json    what followed ``zico run``
    log           what the run has said, and what its jobs have
    log.before    that of the run of this name before
    lock          locked for as long as the run lives
    pid           of its process, which counts while the lock is held
    begun         there once its command line is known to be good
    exit          its exit code, once it has ended by itself

Only the lock tells whether a run lives. The kernel lets it go with the process, however that ends.
The number of a process is given away again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from zico.base import interpreter
from zico.base.errors import CommandError, ConfigError
from zico.base.rundir import PRIVATE_MODE
from zico.report.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODULE = "zico.cli.detached"
"""What runs in the process of a run, with its directory and the words as arguments."""
DIRECTORY_VARIABLE = "ZICO_DETACHED"
"""Tells the process of a run its directory."""
LOOK_S = 0.05
BEGIN_S = 120.0
"""A command line that is refused is refused by then, on a slow machine, too."""
_CHUNK_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was detached, and may have ended."""

    directory: Path

    @property
    def name(self) -> str:
        """Return its name."""
        return self.directory.name

    @property
    def log(self) -> Path:
        """Return the file of what it has said."""
        return self.directory / "log"

    @property
    def words(self) -> tuple[str, ...]:
        """Return what followed ``zico run``."""
        try:
            return tuple(json.loads((self.directory / "words.json").read_text()))
        except (OSError, ValueError):
            return ()

    @property
    def began_s(self) -> float:
        """Return when it was started, in seconds since the epoch."""
        return (self.directory / "words.json").stat().st_mtime

    @property
    def exit_code(self) -> int | None:
        """Return its exit code; ``None``: it has not ended, or was killed."""
        try:
            return int((self.directory / "exit").read_text())
        except (OSError, ValueError):
            return None

    @property
    def lives(self) -> bool:
        """Tell whether its process lives."""
        return not self._has_lock_within(wait=False)

    def wait(self) -> None:
        """Wait until its process has ended."""
        self._has_lock_within(wait=True)

    def _has_lock_within(self, *, wait: bool) -> bool:
        with (self.directory / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return False
            return True

    def end(self) -> bool:
        """Send SIGTERM, which ends its jobs, and wait until it has ended; tells whether it was there to be ended."""
        while self.lives:
            with contextlib.suppress(OSError, ValueError):  # it is just being started, or ends now
                descriptor = os.pidfd_open(int((self.directory / "pid").read_text()))
                try:
                    if self.lives:  # so the number was its own when the descriptor was opened
                        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                        self.wait()
                        return True
                finally:
                    os.close(descriptor)
            time.sleep(LOOK_S)
        return False

    def said(self, *, from_byte: int = 0, follow: bool = False) -> Iterator[bytes]:
        """Yield what it has said from a byte of its log on; with ``follow`` until it has ended."""
        with self.log.open("rb") as log:
            log.seek(from_byte)
            while True:
                lives = self.lives  # before the last look: what is said after it is not missed
                while chunk := log.read(_CHUNK_BYTES):
                    yield chunk
                if not follow or not lives:
                    return
                time.sleep(LOOK_S)


def runs_directory() -> Path:
    """Return where the directories of runs lie; it may be missing."""
    return platformdirs.user_state_path("zico") / "runs"


def known() -> list[Run]:
    """Return this user's runs, the latest last."""
    found = [Run(path.parent) for path in runs_directory().glob("*/words.json")]
    return sorted(found, key=lambda run: run.began_s)


def named(name: str) -> Run:
    """Return the run of that name.

    Raises:
        ConfigError: There is none.
    """
    runs = known()
    for run in runs:
        if run.name == name:
            return run
    there = f"there are {', '.join(run.name for run in runs)}" if runs else "zico run --detach starts one"
    raise ConfigError(f"no run is called {name!r}: {there}")


def start(name: str, words: Sequence[str]) -> Run:
    """Start ``zico run`` with these words in a session of its own; waits until it has begun, or has ended at once.

    Args:
        name: Of the run; one that has ended gives way.
        words: What follows ``zico run``.

    Raises:
        ConfigError: A run of that name lives, or there is no place for its files.
        CommandError: It has ended at once; the message is what it said.
    """
    if name in {".", ".."}:
        raise ConfigError(f"{name!r} is no name for a run: give another --name")
    run = Run(runs_directory() / name)
    try:
        run.directory.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        lock = os.open(run.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{run.directory} cannot be made ({error.strerror}): set XDG_STATE_HOME") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"a run called {name} lives: zico stop {name} ends it, or give another --name") from None
        process = _started(run, words, lock)
    finally:
        os.close(lock)  # its process has it
    end_s = time.monotonic() + BEGIN_S
    while time.monotonic() < end_s and not (run.directory / "begun").exists() and process.poll() is None:
        time.sleep(LOOK_S)
    if process.poll():
        said = b"".join(run.said()).decode(errors="replace").strip().removeprefix("zico: ")
        raise CommandError(said or f"it ended at once with {process.returncode}", exit_code=max(1, process.returncode))
    return run


def note_begun() -> None:
    """Tell whoever has started this run, if it is a detached one, that its command line is good."""
    directory = os.environ.pop(DIRECTORY_VARIABLE, None)  # a run of a job's is another one
    if directory:
        Path(directory, "begun").touch()


def _started(run: Run, words: Sequence[str], lock: int) -> subprocess.Popen[bytes]:
    if run.log.exists():
        run.log.replace(run.directory / "log.before")
    for name in ("begun", "exit", "pid"):
        (run.directory / name).unlink(missing_ok=True)
    write_atomically(run.directory / "words.json", json.dumps(list(words)).encode())
    with run.log.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - ours
            interpreter.command("-m", MODULE, str(run.directory), *words),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )
    write_atomically(run.directory / "pid", str(process.pid).encode())
    return process
