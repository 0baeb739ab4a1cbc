"""Blocked jobs as a reserve: whom to ask for memory when nobody can go on.

Theory of operation
    When every job in an iteration waits and nothing moves, some profile was wrong, and no order is left in which all
    can end. The job that lacks the least asks blocked ones to evict what it lacks to end its iteration: jobs at their
    boundary first, whose threads have the least to do, then whoever holds the most, so that few are asked. However
    that is chosen, what moves is what is lacking and no more.

    Only its owner can change what is mapped in a process, so nothing is taken. The wish stands in the owner's record,
    and the thread of it that waits (``zico.pool.waiting``) obeys (``zico.heap.evicting``). One that does not answer,
    since it is stopped, is not asked again, nor is one that has nothing more to give.

Guarantees
    The job that asks is not asked, nor is one that runs. Nobody's regions change hands here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled, futex_wake_all, inlined, keep_out_of_line
from zico.pool.layout import JOB, NOBODY
from zico.pool.mutex import lock, unlock
from zico.pool.regions import note_change, tell
from zico.pool.safety import remaining_of
from zico.pool.shared import BOUNDARY, RUNNING, header_of, job_at

if TYPE_CHECKING:
    from zico.pool.layout import Member

NOBODY_CAN = 0
ASKED = 1
PENDING = 2

_JOB_BYTES = JOB.itemsize
_ADMITS_OFFSET = int(JOB.fields["broker_admits"][1])
_ADMITS_MASK = 0x3FFFFFFF


@compiled
def ask(pool: Member, sequence: int) -> int:
    """Ask blocked jobs for what this one lacks.

    Args:
        pool: This process's member record.
        sequence: As it was before the job last looked whether it can go on.

    Returns:
        ``ASKED``; ``PENDING``: somebody has been asked and has not answered, or has since; ``NOBODY_CAN``.
    """
    keep_out_of_line()
    header = header_of(pool)
    if header.on_timeline == 1 or job_at(pool, pool.job).over:  # nobody can help who wants more than it may hold
        return NOBODY_CAN
    lock(pool)
    if header.sequence != sequence or _is_pending(pool):
        answer = PENDING
    elif _ask_for(pool, _lack(pool)):
        answer = ASKED
    else:
        answer = NOBODY_CAN
    wake, notify = note_change(header) if answer == ASKED else (False, False)
    unlock(pool)
    if answer == ASKED:
        tell(pool, wake, notify)
        for j in range(header.places):
            if job_at(pool, j).state == BOUNDARY and job_at(pool, j).evict > 0:
                futex_wake_all(pool.jobs_address + j * _JOB_BYTES + _ADMITS_OFFSET)
    return answer


@inlined
def _lack(pool: Member) -> int:
    """Return the regions without which this job cannot end its iteration, or which its tensor needs at least."""
    header = header_of(pool)
    me = job_at(pool, pool.job)
    lack = remaining_of(me) + header.granted - header.budget_regions
    return lack if lack > 0 else me.need


@inlined
def _is_blocked(pool: Member, j: int) -> bool:
    job = job_at(pool, j)
    return j != pool.job and (job.state == BOUNDARY or (job.state == RUNNING and job.waiting_threads > 0))


@inlined
def _is_pending(pool: Member) -> bool:
    for j in range(header_of(pool).places):
        if _is_blocked(pool, j) and job_at(pool, j).evict > 0:
            return True
    return False


@compiled
def _ask_for(pool: Member, lack: int) -> bool:
    """Ask for so many regions, as few jobs as can be; false if there is nobody."""
    keep_out_of_line()
    some = False
    while lack > 0:
        best = _best(pool)
        if best == NOBODY:
            break
        job = job_at(pool, best)
        job.evict = min(lack, job.held)
        job.broker_admits = (job.broker_admits + 1) & _ADMITS_MASK  # so that it does not fall asleep at its boundary
        lack -= job.evict
        some = True
    return some


@inlined
def _best(pool: Member) -> int:
    """Return the blocked job to ask next: at a boundary rather than in an allocation, and with the most regions."""
    best = NOBODY
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if not _is_blocked(pool, j) or job.evict != 0 or job.held == 0:
            continue
        if best == NOBODY:
            best = j
            continue
        other = job_at(pool, best)
        at_boundary = int(job.state == BOUNDARY)
        others = int(other.state == BOUNDARY)
        if at_boundary > others or (at_boundary == others and job.held > other.held):
            best = j
    return best
