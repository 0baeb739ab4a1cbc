"""Regions change hands: grants and releases, compiled and under one robust mutex.

Theory of operation
    A region is free or has one owner. Free regions form a list, least recently released first. A job first gets the
    region that is still mapped at the slot it needs (affinity: no system call), else the head of the list, whose
    last owner is most likely in its trough. A grant is refused if it would leave a state in which some job that could
    have finished its iteration no longer can (the banker's rule with claims, ``zico.pool.rules``).

    On a device that works behind the processor's back a region is released with a fence (``zico.pool.fences``) and may
    be granted before that has passed, if it is issued: the answer is ``BEHIND``, and the member record says for which
    counters the new owner's stream has to wait. Regions that need no such wait go first.

    B, which gets a region behind A's fence and releases it, leaves two fences on it while A's device is still at work:
    its own, and A's as ``before``. B's mark comes after its wait for A, but when B dies it is overtaken, and the region
    must be behind A's fence again. So that two are enough, C gets it only when ``before`` is clear.

Guarantees (numbers as in docs/design/invariants.md)
    1. ``granted`` never exceeds ``budget_regions`` by a grant, nor a job's ``held`` its limit.
    2. A region has at most one owner, and is granted only when its fence has passed, or with the demand to wait for it.
    3. After every grant the set of jobs that can finish has not shrunk.
    5. Whoever dies inside, the next one to lock rebuilds every counter and the free list from the owners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.compiled import call, compiled, futex_wake_all, inlined, keep_out_of_line, release_fence, write_bytes
from zico.pool.fences import NO_FENCE, has_passed, is_clear, pair_in
from zico.pool.layout import HEADER, NAMED, NOBODY
from zico.pool.mutex import append, give_to, lock, unlock
from zico.pool.safety import least_lacking, may_grant
from zico.pool.shared import LEAVING, cap_of, header_of, job_at, regions_of

if TYPE_CHECKING:
    from zico.pool.layout import Header, Member, Region
    from zico.records import Records

GRANTED = 0
WAIT = 1
NEVER = 2
GONE = 3
BEHIND = 4

HOST_SLOT = 0
"""Where no device works behind the processor's back, everything is on one timeline."""

_SEQUENCE_OFFSET = int(HEADER.fields["sequence"][1])

Array = Any


# -- grants ---------------------------------------------------------------------------------------------------------


@compiled
def try_acquire(pool: Member, wanted: Array, n: int) -> int:
    """Grant ``n`` regions to this process's job as ``acquire`` does, on the host device."""
    return acquire(pool, wanted, n, HOST_SLOT)


@compiled
def acquire(pool: Member, wanted: Array, n: int, slot: int) -> int:
    """Grant ``n`` regions to this process's job, all or none; never waits.

    Args:
        pool: This process's member record.
        wanted: For each region the one still mapped where it is needed, or ``NOBODY``. Overwritten with what is
            granted.
        n: How many.
        slot: The stream that is going to use them.

    Returns:
        ``GRANTED``; ``BEHIND``: granted, but the stream must wait before it touches them, for each of the ``n_waits``
        pairs in the member record; ``WAIT``: ask again when the table has changed; ``NEVER``: the job would hold more
        than any budget since it joined; ``GONE``: the job has left and gets nothing more.
    """
    me = job_at(pool, pool.job)
    lock(pool)
    if me.state == LEAVING:
        status = GONE
    elif me.held + n > me.promised:
        status = NEVER
    else:
        me.over = me.held + n > cap_of(pool, me)
        status = WAIT
        if me.over == 0 and may_grant(pool, me, n):
            status = _take(pool, wanted, n, slot)
    unlock(pool)
    return status


@compiled
def take_back(pool: Member, wanted: Array, n: int) -> bool:
    """Grant the regions for ``n`` regions' worth of evicted memory, all or none; never waits.

    What is evicted still counts until then, and not after, so that the job's claim stays what it was. While another
    job waits that lacks less, it is that one for which memory was evicted, or which would ask for it again.
    """
    keep_out_of_line()
    me = job_at(pool, pool.job)
    lock(pool)
    me.evicted -= n
    granted = me.state != LEAVING and me.held + n <= cap_of(pool, me) and least_lacking(pool) in (NOBODY, pool.job)
    granted = granted and may_grant(pool, me, n)
    granted = granted and _take(pool, wanted, n, HOST_SLOT) == GRANTED
    if not granted:
        me.evicted += n
    unlock(pool)
    return granted


@inlined
def _take(pool: Member, wanted: Array, n: int, slot: int) -> int:
    header = header_of(pool)
    regions = regions_of(pool)
    missing = 0
    for i in range(n):
        r = wanted[i]
        if r != NOBODY and _is_takable(pool, regions, r, slot):
            give_to(pool, header, regions, r)
        else:
            named = r != NOBODY and regions[r].owner == NOBODY
            wanted[i] = NAMED - r if named else NOBODY
            missing += 1
    r = header.free_head
    i = 0
    while missing > 0 and r != NOBODY:
        after = regions[r].next
        if _is_takable(pool, regions, r, slot):
            while wanted[i] >= 0:
                i += 1
            wanted[i] = r
            give_to(pool, header, regions, r)
            missing -= 1
        r = after
    status = GRANTED
    if missing > 0:  # free by number, but the device still uses some
        status = _take_behind(pool, wanted, n, missing, slot)
        if status == WAIT:
            return WAIT
    me = job_at(pool, pool.job)
    me.held += n
    me.peak_held = max(me.peak_held, me.held)
    header.granted += n
    header.peak_granted = max(header.peak_granted, header.granted)
    return status


@inlined
def _is_takable(pool: Member, regions: Records[Region], r: int, slot: int) -> bool:
    """Tell whether the region is free and needs no wait. Where its fence is clear, so is the one before it."""
    return regions[r].owner == NOBODY and (regions[r].fence == NO_FENCE or _is_clear(pool, regions[r].fence, slot))


@compiled
def _is_clear(pool: Member, fence: int, slot: int) -> bool:
    keep_out_of_line()
    return is_clear(pool, fence, slot)


@compiled
def _take_behind(pool: Member, wanted: Array, n: int, missing: int, slot: int) -> int:
    """Take what is missing behind fences that are issued, or take back what has been taken."""
    keep_out_of_line()
    status = WAIT
    if header_of(pool).on_timeline == 1:
        status = call(pool.behind_address, (pool.address, wanted.ctypes.data, n, missing, slot))
    if status == WAIT:
        _untake(header_of(pool), regions_of(pool), wanted, n)
    return status


@inlined
def _untake(header: Header, regions: Records[Region], wanted: Array, n: int) -> None:
    """Undo a half-done grant; the counters have not been touched yet."""
    for i in range(n):
        r = wanted[i]
        if r >= 0:
            regions[r].owner = NOBODY
            append(header, regions, r)


@inlined
def has_others_bytes(pool: Member, r: int) -> bool:
    """Tell whether this job's region may hold what another has left there: whoever is not known to be us."""
    return regions_of(pool)[r].last_owner != pool.job


@inlined
def note_scrubbed(pool: Member, r: int) -> None:
    """Note that nothing of another job is left in this job's region; from here on what is there is this job's.

    Only once it is so: who dies before leaves the region to be scrubbed by the next.
    """
    regions_of(pool)[r].last_owner = pool.job


# -- releases -------------------------------------------------------------------------------------------------------


@compiled
def release(pool: Member, given: Array, n: int) -> None:
    """Return ``n`` regions of this process's job to the pool as ``give_back`` does, on the host device."""
    give_back(pool, given, n, NO_FENCE)


@compiled
def give_back(pool: Member, given: Array, n: int, fence: int) -> bool:
    """Return ``n`` regions of this process's job to the pool and wake whoever waits for memory.

    Args:
        pool: This process's member record.
        given: The regions.
        n: How many.
        fence: What guards them until the device has finished with them; need not be issued yet.

    Returns:
        Whether somebody waits for memory.
    """
    header = header_of(pool)
    regions = regions_of(pool)
    me = job_at(pool, pool.job)
    lock(pool)
    for i in range(n):
        r = given[i]
        if fence != NO_FENCE:
            _guard(pool, regions, r, fence)
        regions[r].last_owner = pool.job
        release_fence()
        regions[r].owner = NOBODY  # last: who dies in between leaves a region that is still its own
        append(header, regions, r)
    me.held -= n
    header.granted -= n
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)
    return wake


@inlined
def _guard(pool: Member, regions: Records[Region], r: int, fence: int) -> None:
    """Put a fence on a region that is being released, in front of the one behind which the releasing job had got it.

    Where that was a fence of the same stream, what is before it stays.
    """
    old = regions[r].fence
    if old == NO_FENCE or has_passed(pool, old):
        regions[r].before = NO_FENCE
    elif pair_in(old) != pair_in(fence):
        regions[r].before = old
    release_fence()
    regions[r].fence = fence


@compiled
def give_back_unused(pool: Member, given: Array, n: int) -> None:
    """Undo a grant of which nothing has been used: the regions' fences are what they were before it."""
    keep_out_of_line()
    header = header_of(pool)
    regions = regions_of(pool)
    lock(pool)
    for i in range(n):
        regions[given[i]].owner = NOBODY
        append(header, regions, given[i])
    job_at(pool, pool.job).held -= n
    header.granted -= n
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)


@compiled
def announce(pool: Member) -> None:
    """Wake whoever waits for memory: a grant may be possible that was not, although no region has come back."""
    keep_out_of_line()
    lock(pool)
    wake, notify = note_change(header_of(pool))
    unlock(pool)
    tell(pool, wake, notify)


@inlined
def note_change(header: Header) -> tuple[bool, bool]:
    """Note, inside the mutex, that a wait may have ended; returns whom ``tell`` must wake afterwards."""
    header.sequence += 1
    notify = header.boundary_waiters > 0 and header.notified == 0
    if notify:
        header.notified = 1
    return header.waiters > 0, notify


@inlined
def tell(pool: Member, wake: bool, notify: bool) -> None:  # noqa: FBT001 - two independent facts, compiled
    """Wake waiting allocations and the broker, outside the mutex."""
    if wake:
        futex_wake_all(pool.header_address + _SEQUENCE_OFFSET)
    if notify:
        write_bytes(pool.notify_fd, pool.one_address, 8)
