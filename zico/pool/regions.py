"""Regions change hands: grants, releases and the budget, compiled and under one robust mutex.

Theory of operation
    A region is free or has one owner. A free region that has no pages is *bare*: nobody has had it,
    or the broker has given its pages back. Free regions form a list. Those with pages come first,
    the least recently released at the head; the bare ones follow. A job first gets the region that
    is still mapped at the slot it needs and has pages (affinity: no system call). Else it gets the
    head of the list. That costs no new physical memory, and its last owner is most likely in its
    trough. A grant is refused if some job could have finished its iteration before it, and could
    not afterwards (the banker's rule with claims, ``zico.pool.rules``). Of the jobs without a
    profile, one at a time grows.

    On a device that works behind the processor's back a region is released with a fence
    (``zico.pool.fences``). It may be granted before that has passed, if it is issued. The answer is
    ``BEHIND`` then, and the member record says for which counters the new owner's stream has to
    wait. Regions that need no such wait go first.

    B, which gets a region behind A's fence and releases it, leaves two fences on it while A's
    device is still at work. They are its own, and A's as ``before``. B's mark comes after its wait
    for A, but when B dies it is overtaken, and the region must be behind A's fence again. So that
    two are enough, C gets it only when ``before`` is clear.

    The pool has regions for the largest budget that it can ever get; on the host a bare one costs
    nothing. The budget bounds what is granted. When it is lowered, the broker empties free regions
    until no more have pages than the budget has, and others as jobs give them back::

        budget 6      a a b b . . _ _      _ bare, . free with pages
        lowered to 3  a a b b _ _ _ _      one too many is held: nothing is granted
        b gives back  a a . _ _ _ _ _      one of its two is bare now, either can be granted

    The broker also empties what nobody has needed for a while: ``spare`` is the least that was free
    and had pages since it last asked. It empties a region inside the mutex, so that nobody is
    granted a region that is about to lose what is written there. Where a device works behind the
    processor's back, no region is ever bare.

Guarantees (numbers as in docs/design/invariants.md)
    1. ``granted`` never exceeds ``budget_regions`` by a grant or by what jobs share, nor a job's
       ``held`` its limit. As long as a free region has pages, no grant takes a bare one.
    2. A region has at most one owner, and is granted only when its fence has passed, or with the
       demand to wait for it.
    3. After every grant the set of jobs that can finish has not shrunk.
    5. Whoever dies inside, the next one to lock rebuilds every counter and the free list. It takes
       them from the owners, and from ``last_owner``, which says what is bare.
    11. A region that counts as bare holds nobody's bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line, release_fence
from zico.base.libc import monotonic_ns
from zico.pool import groups, living, rules
from zico.pool.fences import NO_FENCE, has_passed, is_clear, is_issued, may_run_ahead, pair_in, value_in
from zico.pool.layout import (
    EMPTY,
    LEAVING,
    MEMBER,
    NAMED,
    NO_PAGES,
    NOBODY,
    RUNNING,
    cap_of,
    header_of,
    job_at,
    profile_is_known,
    regions_of,
    waits_for_memory,
    will_yield,
    yields_at_boundary,
)
from zico.pool.mutex import append, free_with_pages, give_to, lock, unlink, unlock, unlock_changed
from zico.pool.results import BEHIND, GRANTED, MUST_WAIT, NEVER_FITS, NOT_SERVED
from zico.trace import profile

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.pool.layout import Header, Job, Member, Region


# -- which grants are safe -------------------------------------------------------------------------


Array = Any


@inlined
def claim_of(job: Job) -> int:
    """Return the most regions that the job may still come to hold in its current iteration."""
    if job.state != RUNNING or not profile_is_known(job):
        return job.held
    return rules.claim_of(job, job.profile, job.claims)


@inlined
def most_of(job: Job) -> int:
    """Return the most regions that the job may come to hold in its iteration and in the next one."""
    return max(claim_of(job), groups.peak_of(job))


@entry(MEMBER, int)
def claim_now(pool: Member, job: int) -> int:
    """Return the claim of a job (``claim_of``), outside the mutex."""
    return claim_of(job_at(pool, job))


@inlined
def remaining_of(job: Job) -> int:
    """Return the regions that a job which waits for some still lacks to end its iteration, as far as is known."""
    return max(job.need, claim_of(job) - job.held)


@compiled
def least_lacking(pool: Member) -> int:
    """Return the job that waits in an allocation and lacks the least, or ``NOBODY``.

    A job of which nothing is known comes behind all others: it may come to need the whole budget. A
    stopped one does not count, since it cannot go on.
    """
    keep_out_of_line()
    header = header_of(pool)
    best = NOBODY
    least = 0
    now_ns = monotonic_ns()
    for j in range(header.places):
        job = job_at(pool, j)
        if waits_for_memory(job) and not living.is_stopped(job, now_ns):
            lack = remaining_of(job) + (0 if profile_is_known(job) else header.budget_regions)
            if best == NOBODY or lack < least:
                best = j
                least = lack
    return best


@inlined
def put_debts(pool: Member, requester: int) -> int:
    """Put what each job has and owes into the banker's arrays; returns the regions that are free.

    What jobs yield at their boundaries counts as free, but for the requester's: it comes when
    somebody waits for it. Who is inside and will yield there keeps nothing.
    """
    header = header_of(pool)
    held, claims, residual, must_finish = pool.scratch[0], pool.scratch[1], pool.scratch[2], pool.scratch[3]
    free = header.budget_regions - header.granted
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        yields = j != requester and yields_at_boundary(pool, job)
        free += job.held if yields else 0
        held[j] = job.held if job.state != EMPTY and not yields else 0
        claims[j] = claim_of(job) if job.state != EMPTY else 0
        keeps = job.state != EMPTY and not will_yield(pool, job)
        residual[j] = rules.residual(job.persistent, job.held, job.evicted) if keeps else 0
        must_finish[j] = 1 if job.state == RUNNING and profile_is_known(job) else 0
    return free


@compiled
def stays_safe(pool: Member, requester: int, n: int, claim: int) -> bool:
    """Tell whether ``n`` more regions for the requester, then claiming ``claim``, leave everybody able to finish.

    As ``rules.is_safe`` says it, or else ``rules.is_no_worse``: only then is it found out who stands living.
    """
    header = header_of(pool)
    held, claims, residual = pool.scratch[0], pool.scratch[1], pool.scratch[2]
    must_finish, done = pool.scratch[3], pool.scratch[4]
    free = put_debts(pool, requester) - n
    held[requester] += n
    claims[requester] = max(claim, held[requester])
    must_finish[requester] = 1 if profile_is_known(job_at(pool, requester)) else 0
    place = groups.merge(pool, requester, monotonic_ns()) if header.grouped == 1 else requester
    if rules.is_safe(free, held, claims, residual, must_finish, done, header.places):
        return True
    return _is_no_worse(pool, free, place, n)


@compiled
def _is_no_worse(pool: Member, free: int, place: int, n: int) -> bool:
    keep_out_of_line()
    held, claims, residual, must_finish = pool.scratch[0], pool.scratch[1], pool.scratch[2], pool.scratch[3]
    done, given_up = pool.scratch[4], pool.scratch[6]
    now_ns = monotonic_ns()
    places = header_of(pool).places
    for j in range(places):
        given_up[j] = must_finish[j] and groups.stands_still(pool, j, now_ns)
    return rules.is_no_worse(free, held, claims, residual, must_finish, given_up, done, places, place, n)


@compiled
def is_crowded(pool: Member) -> bool:
    """Tell whether some job's iteration does not fit beside what all others keep between theirs."""
    keep_out_of_line()
    header = header_of(pool)
    kept = 0
    for j in range(header.places):
        job = job_at(pool, j)
        kept += job.persistent if job.state != EMPTY else 0
    for j in range(header.places):
        job = job_at(pool, j)
        if job.state == EMPTY:
            continue
        own, peak = job.persistent, rules.within_limit(job, job.claim_peak)
        if job.group != 0:
            own, peak = groups.kept_with_group(pool, j), groups.peak_with_group(pool, j)
        if kept > own and kept - own + peak > header.budget_regions:
            return True
    return False


# -- running alone ---------------------------------------------------------------------------------


@inlined
def someone_else_grows_alone(pool: Member, me: int, now_ns: int) -> bool:
    """Tell whether a job of which nothing is known is growing, so that no other may start an iteration.

    The ranks of a group grow together: each waits for the others in its collectives.
    """
    other = header_of(pool).alone_job
    return other not in (NOBODY, me) and not groups.are_mates(pool, me, other) and grows_alone(pool, other, now_ns)


@inlined
def grows_alone(pool: Member, j: int, now_ns: int) -> bool:
    """Tell whether a job that has the right to grow alone still keeps the others from starting iterations."""
    header, job = header_of(pool), job_at(pool, j)
    if job.state != RUNNING or profile_is_known(job):
        return False
    waits, waited_ns, grown_ns = waits_for_memory(job), now_ns - job.need_since_ns, now_ns - header.alone_since_ns
    is_still = living.is_past(job, now_ns) or living.is_stopped(job, now_ns)
    return rules.grows_alone(job.alone_spent_ns, waits, waited_ns, grown_ns, is_still)


@inlined
def _grow_alone(pool: Member, job: Job, now_ns: int) -> None:
    header = header_of(pool)
    if header.alone_job == pool.job:
        job.alone_spent_ns += min(now_ns - header.alone_since_ns, rules.STILL_NS)
    header.alone_job = pool.job
    header.alone_since_ns = now_ns


# -- both ------------------------------------------------------------------------------------------


@inlined
def may_grant(pool: Member, me: Job, n: int) -> bool:
    """Tell whether budget and claims allow this process's job ``n`` more regions; notes that it grows."""
    header = header_of(pool)
    if header.granted + n > header.budget_regions:
        return False
    if header.use_claims == 0:
        return True
    claim = claim_of(me)
    exceeds = me.held + n > claim
    if exceeds and me.profiled == 1 and profile.is_outgrown(me.profile, me.progress, me.held + n, me.claim_peak):
        me.outgrown = 1
    if exceeds and me.remembered == 1 and profile.is_above(me.claim_peak, me.held + n):
        me.outgrown = 1
    if not profile_is_known(me):
        now_ns = monotonic_ns()
        if someone_else_grows_alone(pool, pool.job, now_ns) or not stays_safe(pool, pool.job, n, 0):
            return False
        _grow_alone(pool, me, now_ns)
        return True
    if exceeds:
        claim = rules.exceed(me, me.profile, me.claims, n)
    return stays_safe(pool, pool.job, n, claim)


HOST_SLOT = 0
"""Where no device works behind the processor's back, everything is on one timeline."""


# -- grants ----------------------------------------------------------------------------------------


@compiled
def acquire(pool: Member, wanted: Array, n: int, slot: int) -> int:
    """Grant ``n`` regions to this process's job, all or none; never waits.

    Args:
        pool: This process's member record.
        wanted: For each region the one still mapped where it is needed, or ``NOBODY``. Overwritten
            with what is granted.
        n: How many.
        slot: The stream that is going to use them.

    Returns:
        ``GRANTED``. ``BEHIND``: granted, but the stream must wait before it touches them, for each
        of the ``n_waits`` pairs in the member record. ``MUST_WAIT``: ask again when the table has
        changed. ``NEVER_FITS``: the job would hold more than it could have held at any time since it
        joined. ``NOT_SERVED``: the job has left and gets nothing more.
    """
    me = job_at(pool, pool.job)
    lock(pool)
    if me.state == LEAVING:
        status = NOT_SERVED
    elif me.held + n > me.promised:
        status = NEVER_FITS
    else:
        me.over = me.held + n > cap_of(pool, me)
        status = MUST_WAIT
        if me.over == 0 and may_grant(pool, me, n):
            status = _take(pool, wanted, n, slot)
    unlock(pool)
    return status


@compiled
def take_back(pool: Member, wanted: Array, n: int) -> bool:
    """Grant the regions for ``n`` regions' worth of evicted memory, all or none; never waits.

    What is evicted still counts until then, and not after, so that the job's claim stays what it
    was. While another job waits that lacks less, it is that one for which memory was evicted, or
    which would ask for it again. The member record says for what a stream must wait before it
    writes to the regions, as after ``acquire``.
    """
    keep_out_of_line()
    me = job_at(pool, pool.job)
    lock(pool)
    me.evicted -= n
    granted = me.state != LEAVING and me.held + n <= cap_of(pool, me) and least_lacking(pool) in (NOBODY, pool.job)
    granted = granted and may_grant(pool, me, n)
    granted = granted and _take(pool, wanted, n, HOST_SLOT) in (GRANTED, BEHIND)
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
        if r != NOBODY and regions[r].last_owner != NO_PAGES and _is_takable(pool, regions, r, slot):
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
        if status == MUST_WAIT:
            return MUST_WAIT
    me = job_at(pool, pool.job)
    me.held += n
    me.peak_held = max(me.peak_held, me.held)
    me.recent_peak = max(me.recent_peak, me.held)
    me.need = 0  # at once: until the waiting thread says so, others would free memory that nobody needs
    header.granted += n
    header.peak_granted = max(header.peak_granted, header.granted + header.shared)
    header.spare = min(header.spare, free_with_pages(header))
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
    """Take what is missing behind fences that are issued and demand the waits, or take back what has been taken."""
    keep_out_of_line()
    header = header_of(pool)
    regions = regions_of(pool)
    if header.on_timeline == 1 and may_run_ahead(pool, slot, missing):
        for i in range(n):
            r = NAMED - wanted[i]
            if r >= 0 and _is_takable_behind(pool, regions, r, slot):
                wanted[i] = r
                give_to(pool, header, regions, r)
                missing -= 1
        r = header.free_head
        i = 0
        while missing > 0 and r != NOBODY:
            after = regions[r].next
            if _is_takable_behind(pool, regions, r, slot):
                while wanted[i] >= 0:
                    i += 1
                wanted[i] = r
                give_to(pool, header, regions, r)
                missing -= 1
            r = after
    if missing > 0:
        _untake(header, regions, wanted, n)
        return MUST_WAIT
    for i in range(n):
        _demand_wait(pool, regions[wanted[i]].fence, slot)
    return BEHIND


@inlined
def _is_takable_behind(pool: Member, regions: Records[Region], r: int, slot: int) -> bool:
    return (
        regions[r].owner == NOBODY
        and is_issued(pool, regions[r].fence)
        and (regions[r].before == NO_FENCE or is_clear(pool, regions[r].before, slot))
    )


@inlined
def _demand_wait(pool: Member, fence: int, slot: int) -> None:
    """Enter in the member record that the stream must wait for a fence, once per counter, for the largest value."""
    if is_clear(pool, fence, slot):
        return
    pair = pair_in(fence)
    if pool.wait_values[pair] == 0:
        pool.wait_pairs[pool.n_waits] = pair
        pool.n_waits += 1
    pool.wait_values[pair] = max(pool.wait_values[pair], value_in(fence))


@inlined
def _untake(header: Header, regions: Records[Region], wanted: Array, n: int) -> None:
    """Undo a half-done grant; the counters have not been touched yet."""
    for i in range(n):
        r = wanted[i]
        if r >= 0:
            regions[r].owner = NOBODY
            append(header, regions, r)


@inlined
def has_pages(pool: Member, r: int) -> bool:
    """Tell whether physical memory may be behind this job's region."""
    return bool(regions_of(pool)[r].last_owner != NO_PAGES)


@inlined
def has_others_bytes(pool: Member, r: int) -> bool:
    """Tell whether this job's region may hold what another has left there: true unless this job was its last owner."""
    return regions_of(pool)[r].last_owner not in (NO_PAGES, pool.job)


@inlined
def note_emptied(pool: Member, r: int) -> None:
    """Note that this job has given the pages of its region to the kernel. Only once it is so."""
    regions_of(pool)[r].last_owner = NO_PAGES


@inlined
def note_scrubbed(pool: Member, r: int) -> None:
    """Note that nothing of another job is left in this job's region; from here on what is there is this job's.

    Only once it is so: who dies before leaves the region to be scrubbed by the next.
    """
    regions_of(pool)[r].last_owner = pool.job


# -- releases --------------------------------------------------------------------------------------


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
    return unlock_changed(pool)


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
    unlock_changed(pool)


# -- the budget while jobs run ---------------------------------------------------------------------


@entry(MEMBER, int)
def set_budget(pool: Member, regions: int) -> None:
    """Let jobs hold so many regions together, what they share included, and promise it to those that are there."""
    keep_out_of_line()
    lock(pool)
    header_of(pool).budget_total = regions
    _divide_budget(pool)
    unlock_changed(pool)


@inlined
def _divide_budget(pool: Member) -> None:
    header = header_of(pool)
    header.budget_regions = max(0, header.budget_total - header.shared)
    for j in range(header.places):
        job = job_at(pool, j)
        job.promised = max(job.promised, cap_of(pool, job))


@entry(MEMBER, int)
def set_shared(pool: Member, regions: int) -> bool:
    """Let jobs have so many regions' worth of memory in common; false: the budget has no room for more than now."""
    keep_out_of_line()
    header = header_of(pool)
    lock(pool)
    more = regions - header.shared
    fits = more <= 0 or header.granted + more <= header.budget_regions
    if fits:
        header.shared = regions
        _divide_budget(pool)
        header.peak_granted = max(header.peak_granted, header.granted + regions)
    unlock_changed(pool)
    return fits


@entry(MEMBER, int, int)
def set_limit(pool: Member, job: int, regions: int) -> None:
    """Let a job hold so many regions from now on, 0: as many as the budget has."""
    keep_out_of_line()
    lock(pool)
    record = job_at(pool, job)
    record.limit = regions
    record.promised = max(record.promised, cap_of(pool, record))
    unlock_changed(pool)


@entry(MEMBER, int)
def empty(pool: Member, region: int) -> None:
    """Note that a free region, whose pages the caller has given back, has none. Inside the mutex."""
    keep_out_of_line()
    header = header_of(pool)
    regions = regions_of(pool)
    unlink(header, regions, region)
    regions[region].last_owner = NO_PAGES
    append(header, regions, region)


@entry(MEMBER)
def take_spare(pool: Member) -> int:
    """Return how many free regions with pages nobody has needed since the last call, and begin to count anew."""
    keep_out_of_line()
    header = header_of(pool)
    lock(pool)
    spare = min(header.spare, free_with_pages(header))
    header.spare = free_with_pages(header)
    unlock(pool)
    return spare
