"""What jobs held that have left or are dead: given to the pool, by the broker, or without one by whoever waits.

Guarantees
    5. What a dead job held is free again, and nobody waits for it; a death in here is made good by the next one.
"""

from __future__ import annotations

from typing import Any

from zico.compiled import compiled, inlined, keep_out_of_line, process_is_gone
from zico.pool.fences import overtake
from zico.pool.layout import NOBODY
from zico.pool.mutex import append, forget, lock, unlock
from zico.pool.regions import note_change, tell
from zico.pool.shared import BOUNDARY, EMPTY, LEAVING, header_of, job_at, regions_of

Record = Any


@compiled
def reap(pool: Record, job: int) -> int:
    """Take back everything held by a job whose process is gone, and free its place; returns the number of regions.

    Whoever waits on the device for the dead goes on: only when the process is gone is its device work, too.
    """
    keep_out_of_line()
    lock(pool)
    count = _reap(pool, job)
    wake, notify = note_change(header_of(pool))
    unlock(pool)
    tell(pool, wake, notify)
    return count


@inlined
def _reap(pool: Record, job: int) -> int:
    header = header_of(pool)
    record = job_at(pool, job)
    if record.state == EMPTY:
        return 0
    overtake(pool, job)  # first: whoever dies further down leaves a job to be reaped, or one that nobody waits for
    if record.state == BOUNDARY:
        header.boundary_waiters -= 1
    header.waiters -= record.waiting_threads
    record.waiting_threads = 0
    record.state = EMPTY
    header.notified = 0  # it may have died between noting that it would write the eventfd and writing it
    if header.alone_job == job:
        header.alone_job = NOBODY
    regions = regions_of(pool)
    count = 0
    for r in range(header.n_regions):
        forget(regions, r, job)
        if regions[r].owner == job:
            regions[r].owner = NOBODY
            append(header, regions, r)
            count += 1
    header.granted -= count
    record.held = 0
    return count


@compiled
def leave(pool: Record, job: int) -> None:
    """Grant a job nothing more; it keeps what it holds until it is reaped."""
    header = header_of(pool)
    record = job_at(pool, job)
    lock(pool)
    if record.state == BOUNDARY:
        header.boundary_waiters -= 1
    if record.state != EMPTY:
        record.state = LEAVING
    if header.alone_job == job:
        header.alone_job = NOBODY
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)


@compiled
def reap_dead(pool: Record) -> None:
    """Take back what jobs held whose process is gone: the broker's work, done by whoever waits when it is dead."""
    keep_out_of_line()
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if j != pool.job and job.state != EMPTY and process_is_gone(job.pid):
            reap(pool, j)
