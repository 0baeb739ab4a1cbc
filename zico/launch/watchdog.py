"""End the jobs and the broker if the process that supervises them is killed.

Theory of operation: ``zico run`` holds the only write end of this process's standard input and
tells it which sessions live. However the supervisor ends, even by SIGKILL, the kernel closes that
pipe. Without a ``done`` before it, this process ends the sessions and removes the run directory.
``PR_SET_PDEATHSIG`` would reach direct children only, and needs code between fork and exec.

Standard library only, also what it imports of Zico, so that it starts in milliseconds. It runs as a
file, with the directory of the run as its argument (``zico.base.interpreter.bare``). It says so when
it has begun; what it writes beside that, and that it has ended, its supervisor tells the user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


# -- find and signal every process of a session, whatever process groups it has made since ---------
#
# Each job leads a session of its own. Its process group alone would not do: ``timeout`` and shells
# with job control move their children to other groups, but they stay in the session.
#
# Standard library only: the guardian runs this module without site packages.

PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")
_THREADS_FIELD = 17  # num_threads, counted from the state: 0 (proc_pid_stat(5))


def members(session: int) -> dict[int, int]:
    """Return the living processes of ``session`` as process id to process group id.

    Meaningful only while the leader has not been reaped or others of it live: after that, the
    number may be reused.
    """
    return {pid: int(fields[2]) for pid, fields in processes() if int(fields[3]) == session}


def send(sessions: Iterable[int], signum: int) -> int:
    """Signal every process of sessions by its groups, then continue the stopped ones; return how many there were.

    By groups, because a group gets a signal at once: no child forked meanwhile is missed. What a
    process has on a GPU under MPS is ended before it is killed, which can take ``mps.END_S``.
    """
    from zico.base import mps

    found: dict[int, int] = {}
    for session in sessions:
        found |= members(session)
    mps.end_work(found, signum)
    for group in set(found.values()):
        # Gone in the meantime, or has changed its user id: neither can be helped from here.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)
            os.killpg(group, signal.SIGCONT)
    return len(found)


def processes() -> Iterator[tuple[int, list[str]]]:
    """Yield the number of every process that lives, also if its first thread has ended, and its ``stat``.

    The fields are those of proc_pid_stat(5) from the state on: that is 0, and the parent 1.
    """
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        try:
            stat = (PROC / entry.name / "stat").read_text(errors="replace")
        except OSError:
            continue
        # The command name stands in brackets and may contain spaces and brackets itself.
        fields = stat.rpartition(")")[2].split()
        if fields[0] not in _DEAD_STATES or int(fields[_THREADS_FIELD]) > 1:
            yield int(entry.name), fields


# --------------------------------------------------------------------------------------------------

GRACE_S = 2.0
POLL_S = 0.02
DONE = "done"
_FIRST, _LAST = "+", "*"
BEGUN = b"."


def watch(lines: Iterable[str]) -> tuple[set[int], set[int]] | None:
    """Return the sessions to end, and those to end after them; ``None`` after ``done``.

    They are announced by ``+N`` and ``*N``, and withdrawn by ``-N``. Waits for the end of
    ``lines``, which is the end of the supervisor: this wait alone has no deadline.
    """
    living: dict[str, set[int]] = {_FIRST: set(), _LAST: set()}
    for line in lines:
        word = line.strip()
        if word == DONE:
            return None
        if word.startswith(tuple(living)):
            living[word[0]].add(int(word[1:]))
        elif word.startswith("-"):
            for sessions in living.values():
                sessions.discard(int(word[1:]))
    return living[_FIRST], living[_LAST]


def end(living: set[int]) -> None:
    """Terminate the sessions, and kill what is left of them after ``GRACE_S``."""
    for signum, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        send(living, signum)
        deadline = time.monotonic() + grace_s
        while any(members(session) for session in living):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)


def main() -> None:
    """Watch standard input; afterwards end what is left and remove the directory given as the only argument."""
    sys.path.append(str(Path(__file__).absolute().parents[2]))  # what ``send`` imports, behind the standard library
    # A terminal's Ctrl-C and a closing terminal are the supervisor's to handle.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):  # the supervisor is dead already
        os.write(sys.stdout.fileno(), BEGUN)
    living = watch(sys.stdin)
    if living is not None:
        for sessions in living:
            end(sessions)
        shutil.rmtree(sys.argv[1], ignore_errors=True)


# -- the supervisor's side of the guardian: which sessions it must end if we are killed ------------

CLOSE_S = 2.0
BEGIN_S = 30.0
"""A busy machine may take seconds to start it."""
_SAID_BYTES = 1 << 16


class Watchdog:
    """A running guardian; ``close`` tells it that all is well."""

    def __init__(self, run_dir: Path) -> None:
        from zico.base import interpreter  # the guardian itself could not import it

        self._popen = subprocess.Popen(  # noqa: S603 - ourselves
            interpreter.bare(str(Path(__file__).absolute()), str(run_dir)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pipe = cast("IO[bytes]", self._popen.stdin)
        self.said = cast("IO[bytes]", self._popen.stdout)
        """Readable when it has begun, and when it has ended."""

    def fault(self) -> str:
        """Return why it watches no more, an empty text if it does; waits for what it says next."""
        said = os.read(self.said.fileno(), _SAID_BYTES)
        if said == BEGUN:
            return ""
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return last or "it has ended"

    def add(self, session: int, *, last: bool = False) -> None:
        """Let the guardian end ``session`` if we are killed; ``last``: after the others, which it serves."""
        self._tell(f"{_LAST if last else _FIRST}{session}")

    def remove(self, session: int) -> None:
        """Forget ``session``; call it before its leader is reaped."""
        self._tell(f"-{session}")

    def close(self) -> None:
        """Send the guardian away; the directory is then the caller's to remove."""
        self._tell(DONE)
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._popen.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(timeout=CLOSE_S)
        self.said.close()

    def _tell(self, word: str) -> None:
        """Write one line. A guardian that somebody has killed is missed only if we are killed as well."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(f"{word}\n".encode())
            self._pipe.flush()


if __name__ == "__main__":
    main()
