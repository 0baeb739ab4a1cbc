"""Who of a pool lives: the one place that judges the broker and the jobs.

The broker
    It holds a lock of the kernel's on the table's first byte, by an open file that it gives to
    nobody (``F_OFD_SETLK``, fcntl(2)). The kernel lets go of the lock when the process ends: also of
    one that nobody reaps, and whatever pid namespace it is in. So jobs need not know its number.

The jobs
    The broker watches each by a pidfd. Without a broker a waiting job judges the others by number
    and start. The numbers are of the broker's pid namespace: a job in another one judges nobody. A
    job whose number the broker does not see has number 0, and nobody judges it.

Why jobs hold no such locks: a forked child would keep its parent's.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

from zico.base.compiled import compiled, inlined, keep_out_of_line
from zico.base.libc import STOPPED, TRACED, file_is_locked, process_is_gone, state_of
from zico.pool.layout import header_of, job_at

if TYPE_CHECKING:
    from zico.pool.layout import Member

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


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
