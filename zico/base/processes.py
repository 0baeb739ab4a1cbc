"""Which processes live, as Python asks ``/proc``; compiled code asks by ``zico.base.libc.process_is_gone``.

A number alone tells nothing: the kernel gives it to another process later, and a process that
nobody has reaped keeps it. So a process is known by its number and its start.
"""

from __future__ import annotations

import os
from pathlib import Path

_THREADS_FIELD, _STARTED_FIELD = 16, 18  # num_threads and starttime, counted behind the state (proc_pid_stat(5))


def started_at(pid: int) -> int | None:
    """Return when a process started, in clock ticks after the machine's start; ``None`` if it has ended.

    A process that nobody has reaped has ended. One lives whose first thread has ended while others
    run.

    Raises:
        OSError: That cannot be read, for lack of descriptors for example; it is no sign of an end.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    has_ended = state in "ZXx" and int(fields[_THREADS_FIELD]) <= 1
    return None if has_ended else int(fields[_STARTED_FIELD])


def pid_namespace() -> int:
    """Return the number of this process's pid namespace: in another one, numbers of processes mean others."""
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a link of the kernel's, not a path
