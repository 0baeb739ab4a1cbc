"""Who of a pool lives, who is stopped, and who stands still, so that nobody waits for it.

The broker
    It holds a lock of the kernel's on the table's first byte, by an open file that it gives to
    nobody (``F_OFD_SETLK``, fcntl(2)). The kernel lets go of the lock when the process ends: also of
    one that nobody reaps, and whatever pid namespace it is in. So jobs need not know its number.

The jobs
    The broker watches each by a pidfd. Without a broker a waiting job judges the others by number
    and start. The numbers are of the broker's pid namespace: a job in another one judges nobody. A
    job whose number the broker does not see has number 0, and nobody judges it. Jobs hold no locks
    as the broker does: a forked child would keep its parent's.

Standing still
    Whoever waits for memory looks around, and so does the broker while somebody waits: at most once
    a slice, whoever it is. A look notes in each job's record whether the kernel says that its
    process is stopped (SIGSTOP, Ctrl-Z, a debugger). It also notes whether the job has done
    anything since the last look. All others read what it noted::

        stopped      its process is, as of the last look
        past         it has been in its iteration for several times its usual time (``rules.is_still``)
        idle         it runs, and has done nothing for ``rules.IDLE_NS``: a prompt in a first iteration

    A look takes no lock. Two at a time write the same.

Guarantees
    * What a look noted counts for ``SEEN_NS``: a job that goes on is soon taken for one that runs,
      also where nobody looks any more.
    * A job that waits is never idle.

Known limitations
    The kernel does not say of a process in a frozen cgroup that it is stopped. Nor is that seen
    across pid namespaces.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line
from zico.base.libc import STOPPED, TRACED, file_is_locked, monotonic_ns, process_is_gone, state_of
from zico.pool import rules
from zico.pool.layout import (
    BOUNDARY,
    MEMBER,
    RUNNING,
    SLICE_NS,
    STREAMS,
    at,
    counters_of,
    header_of,
    job_at,
    pair_of,
    waits_for_memory,
)

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid

SEEN_NS = 4 * SLICE_NS
_ITERATION_SHIFT = 32  # so that the end of an iteration and the progress lost with it do not cancel out


def hold_life(table_fd: int) -> int:
    """Be a pool's broker until the descriptor that this returns is closed, or the process ends."""
    life_fd = os.open(f"/proc/self/fd/{table_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Shared, so that the next broker need not wait until the one before has closed it.
        fcntl.fcntl(life_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    except OSError:
        os.close(life_fd)
        raise
    return life_fd


@compiled
def broker_is_gone(pool: Member) -> bool:
    """Tell whether the pool has no broker."""
    keep_out_of_line()
    return not file_is_locked(pool.table_fd)


@inlined
def sees_numbers(pool: Member) -> bool:
    """Tell whether the numbers of processes in the table mean the same processes to this one."""
    return bool(header_of(pool).pid_namespace == pool.pid_namespace)


@compiled
def job_is_gone(pool: Member, job: int) -> bool:
    """Tell whether a job's process has ended, as far as this process can tell."""
    keep_out_of_line()
    record = job_at(pool, job)
    is_known = record.pid > 0 and record.started > 0
    return bool(is_known and sees_numbers(pool) and process_is_gone(record.pid, record.started))


@inlined
def job_is_stopped(pool: Member, job: int) -> bool:
    """Tell whether job control or a debugger has stopped a job's process, as far as this process can tell."""
    record = job_at(pool, job)
    return bool(record.pid > 0 and sees_numbers(pool) and state_of(record.pid)[0] in (STOPPED, TRACED))


# -- standing still --------------------------------------------------------------------------------


@entry(MEMBER)
def look_around(pool: Member) -> None:
    """Note which jobs are stopped and which have moved, unless somebody has just done so; waits for nothing."""
    keep_out_of_line()
    header = header_of(pool)
    now_ns = monotonic_ns()
    sees = sees_numbers(pool)  # who does not leaves alone what others have seen
    if sees and header.looked_ns <= now_ns < header.looked_ns + SLICE_NS:
        return
    if sees:
        header.looked_ns = now_ns
    for j in range(header.places):
        job = job_at(pool, j)
        if job.state not in (RUNNING, BOUNDARY):
            continue
        if sees:
            stopped = j != pool.job and job_is_stopped(pool, j)
            job.stopped_until_ns = monotonic_ns() + SEEN_NS if stopped else 0
        moves = moves_of(pool, j)
        if job.moves != moves or job.waiting_threads > 0:
            job.moved_ns = monotonic_ns()
            job.moves = moves


@inlined
def moves_of(pool: Member, j: int) -> int:
    """Return a number that changes whenever a job or its device makes progress."""
    job = job_at(pool, j)
    moves = job.progress + (job.iteration << _ITERATION_SHIFT)
    for slot in range(STREAMS):
        moves += counters_of(pool)[at(pair_of(j, slot))]
    return moves


@inlined
def is_stopped(job: Job, now_ns: int) -> bool:
    """Tell whether a job's process is stopped, as somebody saw lately."""
    return bool(job.stopped_until_ns > now_ns)


@inlined
def is_past(job: Job, now_ns: int) -> bool:
    """Tell whether a job has been in its iteration for so long, without its waits, that it does something else."""
    inside_ns = now_ns - job.started_ns - job.iteration_waited_ns
    if job.need_since_ns > 0:
        inside_ns -= now_ns - job.need_since_ns
    known = job.state == RUNNING and job.profiled == 1
    return bool(known and rules.is_still(0, inside_ns, job.profile.duration_ns, 0))


@inlined
def is_idle(job: Job, now_ns: int) -> bool:
    """Tell whether a job that runs has done nothing for long."""
    return bool(job.waiting_threads == 0 and now_ns - max(job.moved_ns, job.started_ns) > rules.IDLE_NS)


@inlined
def stands_still(job: Job, now_ns: int) -> bool:
    """Tell whether a job inside is not to be waited for (``rules.is_still``)."""
    inside_ns = now_ns - job.started_ns - job.iteration_waited_ns
    return rules.is_still(waits_for_memory(job), inside_ns, job.profile.duration_ns, is_stopped(job, now_ns))
