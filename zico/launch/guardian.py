"""End the jobs and the broker if the process that supervises them is killed.

Theory of operation: ``zico run`` holds the only write end of this process's standard input and tells it which sessions
live. However the supervisor ends, even by SIGKILL, the kernel closes that pipe; without a ``done`` before it, this
process ends the sessions and removes the run directory. ``PR_SET_PDEATHSIG`` would reach direct children only, and
needs code between fork and exec.

Standard library only, so that it starts in milliseconds: ``python -S -m zico.launch.guardian RUN_DIRECTORY``.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

from zico.launch import sessions

if TYPE_CHECKING:
    from collections.abc import Iterable

GRACE_S = 2.0
POLL_S = 0.02
DONE = "done"


def watch(lines: Iterable[str]) -> set[int] | None:
    """Return the sessions to end: those announced by ``+N`` and not withdrawn by ``-N``; ``None`` after ``done``.

    Waits for the end of ``lines``, which is the end of the supervisor: this wait alone has no deadline.
    """
    living: set[int] = set()
    for line in lines:
        word = line.strip()
        if word == DONE:
            return None
        if word.startswith("+"):
            living.add(int(word[1:]))
        elif word.startswith("-"):
            living.discard(int(word[1:]))
    return living


def end(living: set[int]) -> None:
    """Terminate the sessions, and kill what is left of them after ``GRACE_S``."""
    for signum, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        deadline = time.monotonic() + grace_s
        for session in living:
            sessions.send(session, signum)
        while any(sessions.members(session) for session in living):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)


def main() -> None:
    """Watch standard input; afterwards end what is left and remove the directory given as the only argument."""
    # A terminal's Ctrl-C and a closing terminal are the supervisor's to handle.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    living = watch(sys.stdin)
    if living is not None:
        end(living)
        shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
