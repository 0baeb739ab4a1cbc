"""What jobs held that have left or are dead: given to the pool, by the broker, or without one by whoever waits.

Theory of operation
    On the host a job's work ends with its process. A GPU goes on with what it was given until the
    driver ends the job's context. The driver does that when nobody has its files open any more; a
    forked child may. The broker therefore first *buries* a dead job: the job gets nothing more and
    keeps its regions. When nothing holds its context (``zico.broker.lingering``), the broker reaps
    it. Without a broker nobody can tell, so a job's progress thread or one that waits reaps it after
    ``LINGER_NS``.

    A context that outlives ``LINGER_NS`` goes on with its marks, and sets counters to smaller
    values than the reaping has. So its place *lingers*: no job gets it, and its counters are set
    again at each look, until the context has ended. No region is behind such a counter. Only
    streams are that were given their waits before, and each of them goes on at the next look.

Guarantees
    5. What a dead job held is free again, and nobody waits for it; a death in here is made good by
       the next one. The counters of a job that lives never fall: its place had no context left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line
from zico.base.libc import monotonic_ns
from zico.pool.fences import overtake
from zico.pool.layout import EMPTY, LEAVING, MEMBER, NOBODY, header_of, job_at, regions_of, waits_at_boundary
from zico.pool.living import job_is_gone
from zico.pool.mutex import append, disown, forget, lock, note_change, tell, unlock, unlock_changed

if TYPE_CHECKING:
    from zico.pool.layout import Header, Job, Member

LINGER_NS = 20_000_000_000
"""A dead job's regions are taken back after this time, even if its context cannot be seen to end.

Nobody gives a dead job's streams more work, and the driver queues about a thousand launches a
stream. It is below
``rules.IDLE_NS``: a job that waits for these regions does not go to the next tier
meanwhile.
"""


@entry(MEMBER, int, int)
def reap(pool: Member, job: int, lingers: int) -> int:
    """Take back everything held by a job whose process is gone; returns the number of regions.

    Whoever waits on the device for the dead goes on: only when the process is gone is its device
    work, too.

    Args:
        pool: This process's member record.
        job: Its place.
        lingers: 1: its context may still live, so nobody gets the place before ``release_place``.
    """
    keep_out_of_line()
    lock(pool)
    count = _reap(pool, job, lingers)
    unlock_changed(pool)
    return count


@compiled
def _reap_if_gone(pool: Member, job: int) -> None:
    """Reap a job unless somebody else has: a new broker may have given its place to another process by now."""
    keep_out_of_line()
    lock(pool)
    if job_is_gone(pool, job):
        _reap(pool, job, header_of(pool).on_timeline)
    unlock_changed(pool)


@entry(MEMBER, int)
def settle_place(pool: Member, job: int) -> None:
    """Let whoever waits on the device for a dead job go on, again: its context has set counters back since."""
    overtake(pool, job)


@entry(MEMBER, int)
def release_place(pool: Member, job: int) -> None:
    """Let a place be given away whose last job's context has ended."""
    overtake(pool, job)
    job_at(pool, job).lingers = 0


@inlined
def _reap(pool: Member, job: int, lingers: int) -> int:
    header = header_of(pool)
    record = job_at(pool, job)
    if record.state == EMPTY:
        return 0
    record.lingers = lingers
    overtake(pool, job)  # first: whoever dies further down leaves a job to be reaped, or one that nobody waits for
    _end_waits(header, record, job)
    record.state = EMPTY
    regions = regions_of(pool)
    count = 0
    for r in range(header.n_regions):
        forget(regions, r, job)
        if regions[r].owner == job:
            disown(regions, r)
            append(header, regions, r)
            count += 1
    header.granted -= count
    record.held = 0
    return count


@inlined
def _end_waits(header: Header, record: Job, job: int) -> None:
    """Count a dead job's threads among the waiting ones no longer."""
    if waits_at_boundary(record):
        header.boundary_waiters -= 1
    header.waiters -= record.waiting_threads
    record.waiting_threads = 0
    header.notified = 0  # it may have died between noting that it would write the pipe and writing it
    if header.alone_job == job:
        header.alone_job = NOBODY


@entry(MEMBER, int)
def leave(pool: Member, job: int) -> None:
    """Grant a job nothing more; it keeps what it holds until it is reaped."""
    header = header_of(pool)
    record = job_at(pool, job)
    lock(pool)
    if waits_at_boundary(record):
        header.boundary_waiters -= 1
    if record.state != EMPTY:
        record.state = LEAVING
    if header.alone_job == job:
        header.alone_job = NOBODY
    unlock_changed(pool)


@entry(MEMBER, int)
def bury(pool: Member, job: int) -> None:
    """Grant a dead job nothing more; it keeps its regions until it is reaped. A second time does nothing."""
    keep_out_of_line()
    header = header_of(pool)
    record = job_at(pool, job)
    wake = notify = False
    lock(pool)
    if record.state != EMPTY and record.died_ns == 0:  # else every look of a waiting job would wake all the others
        _end_waits(header, record, job)
        record.state = LEAVING
        record.died_ns = monotonic_ns()
        wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)


@compiled
def reap_dead(pool: Member) -> None:
    """Take back what jobs held whose process is gone: the broker's work, done by whoever waits when it is dead.

    Where a device may still do their work, they are buried first and reaped after ``LINGER_NS``.
    """
    keep_out_of_line()
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if job.lingers != 0:
            overtake(pool, j)
        if j == pool.job or job.state == EMPTY or not job_is_gone(pool, j):
            continue
        if header_of(pool).on_timeline == 0 or (job.died_ns != 0 and monotonic_ns() - job.died_ns >= LINGER_NS):
            _reap_if_gone(pool, j)
        else:
            bury(pool, j)
