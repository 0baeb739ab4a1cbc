"""Which processes live, as Python asks ``/proc``; compiled code asks by ``zico.base.libc.process_is_gone``.

A number alone tells nothing: the kernel gives it to another process later, and a process that
nobody has reaped keeps it. So a process is known by its number and its start.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_THREADS_FIELD, _STARTED_FIELD = 16, 18  # num_threads and starttime, counted behind the state (proc_pid_stat(5))
_MINOR_FIELD, _MAJOR_FIELD, _USER_FIELD, _SYSTEM_FIELD = 6, 8, 10, 11  # minflt, majflt, utime and stime


def started_at(pid: int) -> int | None:
    """Return when a process started, in clock ticks after the machine's start; ``None`` if it has ended.

    A process that nobody has reaped has ended. One lives whose first thread has ended while others
    run.

    Raises:
        OSError: That cannot be read, for lack of descriptors for example; it is no sign of an end.
    """
    state, *fields = _stat_of(pid)
    has_ended = state in "ZXx" and (not fields or int(fields[_THREADS_FIELD]) <= 1)
    return None if has_ended else int(fields[_STARTED_FIELD])


def _stat_of(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` from its state on: of one that is gone its state alone, ``X``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]


class Counters(NamedTuple):
    """What the kernel has counted of a process since its start."""

    processor_ns: int
    system_ns: int
    """Of that in the kernel: page faults are there."""
    queued_ns: int | None
    """The threads that live waited so long for a processor, all together; ``None``: this kernel does not count it."""
    minor_faults: int
    major_faults: int


def counters_of(pid: int, started: int) -> Counters | None:
    """Return what the kernel has counted of the process of that number and start, ``None`` if it cannot be seen.

    Sources: proc_pid_stat(5); ``schedstat`` of each thread (Documentation/scheduler/sched-stats.rst).
    """
    with contextlib.suppress(OSError):
        _, *fields = _stat_of(pid)
        if fields and int(fields[_STARTED_FIELD]) == started:
            ticks_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
            user_ns, system_ns = (int(fields[field]) * ticks_ns for field in (_USER_FIELD, _SYSTEM_FIELD))
            queued_ns = [*_queued_ns(pid)]
            return Counters(
                user_ns + system_ns,
                system_ns,
                sum(queued_ns) if queued_ns else None,
                int(fields[_MINOR_FIELD]),
                int(fields[_MAJOR_FIELD]),
            )
    return None


def _queued_ns(pid: int) -> Iterator[int]:
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - names only
        with contextlib.suppress(OSError):  # it has just ended
            yield int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_bytes().split()[1])


def pid_namespace() -> int:
    """Return the number of this process's pid namespace: in another one, numbers of processes mean others."""
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a link of the kernel's, not a path
