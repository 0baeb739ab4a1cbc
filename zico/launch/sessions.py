"""Find and signal every process of a session, whatever process groups it has made since.

Each job leads a session of its own. Its process group alone would not do: ``timeout`` and shells with job control
move their children to other groups, but they stay in the session.

Standard library only: the guardian imports this module without site packages.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
_DEAD_STATES = frozenset("ZXx")


def members(session: int) -> dict[int, int]:
    """Return the living processes of ``session`` as process id to process group id.

    Meaningful only while the leader has not been reaped or others of it live: after that, the number may be reused.
    """
    return {pid: group for pid, group, its_session in _processes() if its_session == session}


def send(session: int, signum: int) -> int:
    """Signal every process of ``session`` by its groups, then continue the stopped ones; return how many there were.

    By groups, because a group gets a signal at once: no child forked meanwhile is missed.
    """
    found = members(session)
    for group in set(found.values()):
        # Gone in the meantime, or has changed its user id: neither can be helped from here.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)
            os.killpg(group, signal.SIGCONT)
    return len(found)


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield (pid, process group, session) of every process that is not dead."""
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        try:
            stat = (PROC / entry.name / "stat").read_text(errors="replace")
        except OSError:
            continue
        # The command name stands in brackets and may contain spaces and brackets itself.
        state, _, group, session = stat.rpartition(")")[2].split()[:4]
        if state not in _DEAD_STATES:
            yield int(entry.name), int(group), int(session)
