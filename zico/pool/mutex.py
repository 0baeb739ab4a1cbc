"""The table's mutex, the free list that it guards, and the repair after a death inside.

The truth is ``REGION.owner`` and the fences; every counter and the list are rebuilt from them.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line, release_fence
from zico.base.libc import (
    EBUSY,
    EOWNERDEAD,
    ETIMEDOUT,
    futex_wake_all,
    mutex_consistent,
    mutex_lock_within,
    mutex_owner,
    mutex_try_lock,
    mutex_unlock,
    send_signal,
    thread_is_stopped,
    write_bytes,
)
from zico.pool.fences import NO_FENCE, job_in
from zico.pool.layout import (
    EMPTY,
    HEADER,
    MEMBER,
    NO_PAGES,
    NOBODY,
    SLICE_NS,
    header_of,
    job_at,
    regions_of,
    waits_at_boundary,
)

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.pool.layout import Header, Member, Region


_SEQUENCE_OFFSET = int(HEADER.fields["sequence"][1])
_CONTINUE, _STOP = int(signal.SIGCONT), int(signal.SIGSTOP)


@inlined
def lock(pool: Member) -> None:
    """Enter the critical section; repairs the table if the last one inside died there."""
    code = mutex_try_lock(pool.mutex_address)
    if code != 0:
        _lock_after(pool, code)


@compiled
def _lock_after(pool: Member, code: int) -> None:
    """Enter behind whoever is inside or has died there.

    Nobody is inside for a slice unless it is stopped there, or the machine has no processor for it.
    Whoever was stopped inside (SIGSTOP, Ctrl-Z) is continued until it is out, and stopped again.
    The kernel ends a dead owner's hold, but not a stopped one's. Of several who continue it, the
    first one inside stops it. The others would stop it after its user has let it go on.
    """
    keep_out_of_line()
    header = header_of(pool)
    continued = 0
    while code in (EBUSY, ETIMEDOUT):
        code = mutex_lock_within(pool.mutex_address, SLICE_NS)
        if code == ETIMEDOUT:
            owner = mutex_owner(pool.mutex_address)
            stands = owner != 0 and header.mixed == 0 and thread_is_stopped(owner)
            if stands and mutex_owner(pool.mutex_address) == owner:  # so it has not been let out meanwhile
                continued = header.continued = owner
                send_signal(owner, _CONTINUE)
    if continued != 0 and header.continued == continued:
        header.continued = 0
        if code != EOWNERDEAD:
            send_signal(continued, _STOP)  # while we are inside, so it is not
    if code == EOWNERDEAD:
        recover(pool)
        mutex_consistent(pool.mutex_address)


@inlined
def unlock(pool: Member) -> None:
    """Leave the critical section."""
    mutex_unlock(pool.mutex_address)


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


@inlined
def unlock_changed(pool: Member) -> bool:
    """Leave the mutex where a wait may have ended, and wake whose; tells whether a thread waits for memory."""
    wake, notify = note_change(header_of(pool))
    unlock(pool)
    tell(pool, wake, notify)
    return wake


@compiled
def announce(pool: Member) -> None:
    """Wake whoever waits for memory: a grant may be possible that was not, although no region has come back."""
    keep_out_of_line()
    lock(pool)
    unlock_changed(pool)


@compiled
def recover(pool: Member) -> None:
    """Rebuild counters and the free list from the owners."""
    keep_out_of_line()
    header = header_of(pool)
    regions = regions_of(pool)
    header.recoveries += 1
    header.granted = 0
    header.bare = 0
    header.bare_head = NOBODY
    header.free_head = NOBODY
    header.free_tail = NOBODY
    header.waiters = 0
    header.boundary_waiters = 0
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        job.held = 0
        if job.state != EMPTY:
            header.waiters += job.waiting_threads
        if waits_at_boundary(job):
            header.boundary_waiters += 1
    for r in range(header.n_regions):
        owner = regions[r].owner
        if owner >= 0 and job_at(pool, owner).state == EMPTY:  # whoever reaped that job died half-way
            disown(regions, r)
            owner = NOBODY
        if owner == NOBODY:
            append(header, regions, r)
        else:
            job_at(pool, owner).held += 1
            header.granted += 1
        _forget_if_gone(pool, regions, r, job_in(regions[r].before))
        _forget_if_gone(pool, regions, r, job_in(regions[r].fence))
        _forget_if_gone(pool, regions, r, regions[r].last_owner)
    header.spare = min(header.spare, free_with_pages(header))
    header.sequence += 1


@inlined
def _forget_if_gone(pool: Member, regions: Records[Region], r: int, job: int) -> None:
    if job >= 0 and job_at(pool, job).state == EMPTY:
        forget(regions, r, job)


@inlined
def forget(regions: Records[Region], r: int, job: int) -> None:
    """Take a dead job's fences off a region. What it had got behind another's fence is behind that one again."""
    if regions[r].before == regions[r].fence:  # it died in a release, when the fence was to follow
        regions[r].before = NO_FENCE
    if regions[r].before != NO_FENCE and job_in(regions[r].before) == job:
        regions[r].before = NO_FENCE
    if regions[r].fence != NO_FENCE and job_in(regions[r].fence) == job:
        regions[r].fence = regions[r].before
        regions[r].before = NO_FENCE
    if regions[r].last_owner == job:
        regions[r].last_owner = NOBODY


@inlined
def disown(regions: Records[Region], r: int) -> None:
    """Let a dead job's region belong to nobody; what the job has left there is unknown."""
    if regions[r].last_owner == NO_PAGES:
        regions[r].last_owner = NOBODY
    release_fence()
    regions[r].owner = NOBODY  # last: who dies in between leaves a region that is still the dead job's


@inlined
def free_with_pages(header: Header) -> int:
    """Return how many free regions have pages."""
    return header.n_regions - header.granted - header.bare


@inlined
def append(header: Header, regions: Records[Region], r: int) -> None:
    """Put a free region at the end of the list, or, if it has pages, in front of those that have none."""
    after = NOBODY
    if regions[r].last_owner != NO_PAGES:
        after = header.bare_head
    else:
        header.bare += 1
        if header.bare_head == NOBODY:
            header.bare_head = r
    before = header.free_tail
    if after != NOBODY:
        before = regions[after].previous
        regions[after].previous = r
    else:
        header.free_tail = r
    regions[r].previous = before
    regions[r].next = after
    if before == NOBODY:
        header.free_head = r
    else:
        regions[before].next = r


@inlined
def unlink(header: Header, regions: Records[Region], r: int) -> None:
    """Take a region out of the list."""
    before = regions[r].previous
    after = regions[r].next
    if regions[r].last_owner == NO_PAGES:
        header.bare -= 1
        if header.bare_head == r:
            header.bare_head = after
    if before == NOBODY:
        header.free_head = after
    else:
        regions[before].next = after
    if after == NOBODY:
        header.free_tail = before
    else:
        regions[after].previous = before


@inlined
def give_to(pool: Member, header: Header, regions: Records[Region], r: int) -> None:
    """Take a free region out of the list for this process's job."""
    unlink(header, regions, r)
    regions[r].owner = pool.job


@entry(MEMBER)
def lock_for_python(pool: Member) -> None:
    """Enter the critical section from Python; keep it short."""
    lock(pool)


@entry(MEMBER)
def unlock_for_python(pool: Member) -> None:
    """Leave it."""
    unlock(pool)
