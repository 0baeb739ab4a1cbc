"""Regions change hands: grants, releases, deaths, all compiled and under one robust mutex.

Theory of operation
    A region is free or has one owner. Free regions form a list, least recently released first. A job first gets the
    region that is still mapped at the slot it needs (affinity: no system call), else the head of the list, whose
    last owner is most likely in its trough. A grant is refused if it would leave a state in which some job that could
    have finished its iteration no longer can (the banker's rule with claims, ``zico.scheduler.claims``).

Guarantees (numbers as in docs/design/invariants.md)
    1. ``granted`` never exceeds ``budget_regions`` by a grant.
    2. A region has at most one owner, and is granted only when its fence has passed.
    3. After every grant the set of jobs that can finish has not shrunk.
    5. Whoever dies inside, the next one to lock rebuilds every counter and the free list from the owners.
"""

from __future__ import annotations

from typing import Any

from zico.compiled import (
    EOWNERDEAD,
    array_at,
    compiled,
    futex_wake_all,
    inlined,
    keep_out_of_line,
    monotonic_ns,
    mutex_consistent,
    mutex_lock,
    mutex_unlock,
    record_at,
    write_bytes,
)
from zico.pool.layout import HEADER, JOB, NOBODY, REGION, JobState
from zico.scheduler.claims import is_safe
from zico.trace import curve

GRANTED = 0
WAIT = 1
NEVER = 2
GONE = 3

ALONE_FRESH_NS = 1_000_000_000
"""A job without a profile keeps the others from starting iterations for so long after it last grew."""
ALONE_LIMIT_NS = 30_000_000_000
"""... and for so long in all: a job that never iterates must not hold up the others."""
ALONE_WAIT_NS = 5_000_000_000
"""... and for so long while it waits for memory itself: whoever holds it may never reach a boundary."""

STILL_ITERATIONS = 4
STILL_NS = 1_000_000_000
"""A job that has been in its iteration for so many times its usual time and this longer stands still."""

EMPTY = int(JobState.EMPTY)
RUNNING = int(JobState.RUNNING)
BOUNDARY = int(JobState.BOUNDARY)
LEAVING = int(JobState.LEAVING)

_JOB_BYTES = JOB.itemsize
_SEQUENCE_OFFSET = int(HEADER.fields["sequence"][1])  # type: ignore[index]

Record = Any
Array = Any


@inlined
def header_of(pool: Record) -> Record:
    """Return the shared header."""
    return record_at(pool.header_address, HEADER)


@inlined
def regions_of(pool: Record) -> Array:
    """Return the shared region records."""
    return array_at(pool.regions_address, header_of(pool).n_regions, REGION)


@inlined
def job_at(pool: Record, job: int) -> Record:
    """Return a shared job record."""
    return record_at(pool.jobs_address + job * _JOB_BYTES, JOB)


# -- the mutex ------------------------------------------------------------------------------------------------------


@inlined
def lock(pool: Record) -> None:
    """Enter the critical section; repairs the table if the last one inside died there."""
    if mutex_lock(pool.mutex_address) == EOWNERDEAD:
        recover(pool)
        mutex_consistent(pool.mutex_address)


@inlined
def unlock(pool: Record) -> None:
    """Leave the critical section."""
    mutex_unlock(pool.mutex_address)


@compiled
def recover(pool: Record) -> None:
    """Rebuild counters and the free list from the owners."""
    keep_out_of_line()
    header = header_of(pool)
    regions = regions_of(pool)
    header.recoveries += 1
    header.granted = 0
    header.free_head = NOBODY
    header.free_tail = NOBODY
    header.waiters = 0
    header.boundary_waiters = 0
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        job.held = 0
        if job.state != EMPTY:
            header.waiters += job.waiting_threads
        if job.state == BOUNDARY:
            header.boundary_waiters += 1
    for r in range(header.n_regions):
        owner = regions[r].owner
        if owner != NOBODY and job_at(pool, owner).state == EMPTY:  # whoever reaped that job died half-way
            regions[r].owner = NOBODY
            regions[r].last_owner = NOBODY
            owner = NOBODY
        if owner == NOBODY:
            append(header, regions, r)
        else:
            job_at(pool, owner).held += 1
            header.granted += 1
    header.sequence += 1


# -- the free list --------------------------------------------------------------------------------------------------


@inlined
def append(header: Record, regions: Array, r: int) -> None:
    """Put a free region at the end of the list."""
    regions[r].previous = header.free_tail
    regions[r].next = NOBODY
    if header.free_tail == NOBODY:
        header.free_head = r
    else:
        regions[header.free_tail].next = r
    header.free_tail = r


@inlined
def _unlink(header: Record, regions: Array, r: int) -> None:
    before = regions[r].previous
    after = regions[r].next
    if before == NOBODY:
        header.free_head = after
    else:
        regions[before].next = after
    if after == NOBODY:
        header.free_tail = before
    else:
        regions[after].previous = before


@inlined
def _is_takable(pool: Record, region: Record) -> bool:
    """Tell whether the region is free and the device has finished with it."""
    if region.owner != NOBODY:
        return False
    return region.last_owner == NOBODY or region.fence <= job_at(pool, region.last_owner).fence_passed


@inlined
def _first_takable(pool: Record, header: Record, regions: Array) -> int:
    r = header.free_head
    while r != NOBODY and not _is_takable(pool, regions[r]):
        r = regions[r].next
    return r


# -- claims ---------------------------------------------------------------------------------------------------------


@inlined
def claim_of(job: Record) -> int:
    """Return the most regions that the job may still come to hold in its current iteration."""
    if job.state != RUNNING or job.profiled == 0:
        return job.held
    expected = curve.claim_at(job.profile, job.claims, job.progress) + job.claim_extra
    return max(job.held, job.claim_floor, expected)


@compiled
def stays_safe(pool: Record, requester: int, n: int, claim: int) -> bool:
    """Tell whether ``n`` more regions for the requester, then claiming ``claim``, leave everybody able to finish.

    Where some job cannot finish even now (a profile was wrong), it is left out: the grant must not make it worse. So
    is one that stands still; should it go on, it waits for memory like everybody else.
    """
    header = header_of(pool)
    held, claims, residual = pool.scratch[0], pool.scratch[1], pool.scratch[2]
    must_finish, done = pool.scratch[3], pool.scratch[4]
    free = header.budget_regions - header.granted
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        held[j] = job.held if job.state != EMPTY else 0
        claims[j] = claim_of(job) if job.state != EMPTY else 0
        residual[j] = job.persistent if job.state != EMPTY else 0
        must_finish[j] = 1 if job.state == RUNNING and job.profiled == 1 else 0
    known = job_at(pool, requester).profiled
    held[requester] += n
    claims[requester] = max(claim, held[requester])
    must_finish[requester] = known
    if is_safe(free - n, held, claims, residual, must_finish, done, header.places):
        return True
    if _leave_out_still(pool, requester, must_finish) and is_safe(
        free - n, held, claims, residual, must_finish, done, header.places
    ):
        return True
    held[requester] -= n
    must_finish[requester] = 0
    if is_safe(free, held, claims, residual, must_finish, done, header.places):
        return False
    for j in range(header_of(pool).places):
        must_finish[j] = done[j] if must_finish[j] else 0
    held[requester] += n
    must_finish[requester] = known
    return is_safe(free - n, held, claims, residual, must_finish, done, header.places)


@compiled
def _leave_out_still(pool: Record, requester: int, must_finish: Array) -> bool:
    """Strike those off that have been in their iteration for so long that they do something else; tells if any were.

    They may be stopped, at a prompt, or done with training.
    """
    keep_out_of_line()
    now_ns = monotonic_ns()
    some = False
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        limit_ns = STILL_ITERATIONS * job.profile.duration_ns + STILL_NS
        still = job.waiting_threads == 0 and now_ns - job.started_ns - job.iteration_waited_ns > limit_ns
        if must_finish[j] and still and j != requester:
            must_finish[j] = 0
            some = True
    return some


# -- running alone --------------------------------------------------------------------------------------------------


@inlined
def someone_else_grows_alone(pool: Record, me: int, now_ns: int) -> bool:
    """Tell whether a job without a profile is growing, so that no other may start an iteration."""
    header = header_of(pool)
    other = header.alone_job
    if other in (NOBODY, me):
        return False
    job = job_at(pool, other)
    if job.state != RUNNING or job.profiled == 1 or job.alone_spent_ns > ALONE_LIMIT_NS:
        return False
    if job.waiting_threads > 0:
        return now_ns - job.need_since_ns < ALONE_WAIT_NS
    return now_ns - header.alone_since_ns < ALONE_FRESH_NS


@inlined
def _grow_alone(pool: Record, job: Record, now_ns: int) -> None:
    """Take or renew the right to grow alone."""
    header = header_of(pool)
    if header.alone_job == pool.job:
        job.alone_spent_ns += min(now_ns - header.alone_since_ns, ALONE_FRESH_NS)
    header.alone_job = pool.job
    header.alone_since_ns = now_ns


# -- grants and releases --------------------------------------------------------------------------------------------


@compiled
def try_acquire(pool: Record, wanted: Array, n: int) -> int:
    """Grant ``n`` regions to this process's job, all or none; never waits.

    Args:
        pool: This process's member record.
        wanted: For each region the one still mapped where it is needed, or ``NOBODY``. Overwritten with what is
            granted.
        n: How many.

    Returns:
        ``GRANTED``; ``WAIT``: ask again when the table has changed; ``NEVER``: the job would hold more than the
        budget; ``GONE``: the job has left and gets nothing more.
    """
    header = header_of(pool)
    me = job_at(pool, pool.job)
    lock(pool)
    if me.state == LEAVING:
        status = GONE
    elif me.held + n > header.budget_regions:
        status = NEVER
    elif not _may_grant(pool, me, n):
        status = WAIT
    else:
        status = _take(pool, wanted, n)
    unlock(pool)
    return status


@inlined
def _may_grant(pool: Record, me: Record, n: int) -> bool:
    header = header_of(pool)
    if header.granted + n > header.budget_regions:
        return False
    if header.use_claims == 0:
        return True
    if me.profiled == 0:
        now_ns = monotonic_ns()
        if someone_else_grows_alone(pool, pool.job, now_ns) or not stays_safe(pool, pool.job, n, 0):
            return False
        _grow_alone(pool, me, now_ns)
        return True
    claim = claim_of(me)
    if me.held + n > claim:
        # The profile was wrong by so much: the rest of the iteration is expected to lie that much higher. To claim the
        # whole peak again would make states unsafe in which a job near its end lacks a region or two.
        me.claim_extra = me.held + n - curve.claim_at(me.profile, me.claims, me.progress)
        claim = me.held + n
    return stays_safe(pool, pool.job, n, claim)


@inlined
def _take(pool: Record, wanted: Array, n: int) -> int:
    header = header_of(pool)
    regions = regions_of(pool)
    for i in range(n):
        r = wanted[i]
        if r == NOBODY or not _is_takable(pool, regions[r]):
            wanted[i] = NOBODY
        else:
            _unlink(header, regions, r)
            regions[r].owner = pool.job
    for i in range(n):
        if wanted[i] == NOBODY:
            r = _first_takable(pool, header, regions)
            if r == NOBODY:  # free by number, but the device still uses some
                _untake(header, regions, wanted, n)
                return WAIT
            _unlink(header, regions, r)
            regions[r].owner = pool.job
            wanted[i] = r
    me = job_at(pool, pool.job)
    me.held += n
    me.peak_held = max(me.peak_held, me.held)
    header.granted += n
    header.peak_granted = max(header.peak_granted, header.granted)
    return GRANTED


@inlined
def _untake(header: Record, regions: Array, wanted: Array, n: int) -> None:
    """Undo a half-done grant; the counters have not been touched yet."""
    for i in range(n):
        r = wanted[i]
        if r != NOBODY:
            regions[r].owner = NOBODY
            append(header, regions, r)


@compiled
def release(pool: Record, given: Array, n: int) -> None:
    """Return ``n`` regions of this process's job to the pool and wake whoever waits for memory."""
    header = header_of(pool)
    regions = regions_of(pool)
    me = job_at(pool, pool.job)
    lock(pool)
    for i in range(n):
        r = given[i]
        regions[r].fence = me.fence_passed
        regions[r].last_owner = pool.job
        regions[r].owner = NOBODY  # last: who dies in between leaves a region that is still its own
        append(header, regions, r)
    me.held -= n
    header.granted -= n
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)


@inlined
def note_change(header: Record) -> tuple[bool, bool]:
    """Note, inside the mutex, that a wait may have ended; returns whom ``tell`` must wake afterwards."""
    header.sequence += 1
    notify = header.boundary_waiters > 0 and header.notified == 0
    if notify:
        header.notified = 1
    return header.waiters > 0, notify


@inlined
def tell(pool: Record, wake: bool, notify: bool) -> None:  # noqa: FBT001 - two independent facts, compiled
    """Wake waiting allocations and the broker, outside the mutex."""
    if wake:
        futex_wake_all(pool.header_address + _SEQUENCE_OFFSET)
    if notify:
        write_bytes(pool.notify_fd, pool.one_address, 8)


@compiled
def lock_for_python(pool: Record) -> None:
    """Enter the critical section from Python; keep it short."""
    lock(pool)


@compiled
def unlock_for_python(pool: Record) -> None:
    """Leave it."""
    unlock(pool)
