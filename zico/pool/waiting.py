"""Waits that need no Python: in an allocation for regions, at a boundary for admission.

Guarantees
    7. Every sleep ends after one slice at the latest and then looks around: at dead processes if
       the broker is gone, at a state in which nobody can go on, at the caller's deadline.
    A waiting thread sleeps on a futex in the shared table. Whoever ends the wait needs nothing from
    this process. The job that asks others to evict is not asked, nor is one that runs. No regions
    change hands here.

Blocked jobs as a reserve
    When every job in an iteration waits and nothing moves, some profile was wrong, and no order is
    left in which all can end. The job that lacks the least asks blocked ones to evict what it lacks
    to end its iteration: jobs at their boundary first, whose threads have the least to do, then
    whoever holds the most, so that few are asked. Victims evict only what is lacking.

    Only its owner can change what is mapped in a process, so nothing is taken. The wish stands in
    the owner's record, and the thread of it that waits (``zico.pool.waiting``) obeys
    (``zico.heap.evicting``). A stopped job is not asked (``zico.pool.still``), nor is its answer
    waited for. One that has nothing more to give is not asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line
from zico.base.libc import futex_wait, futex_wake_all, monotonic_ns
from zico.pool import groups, profiles, still
from zico.pool.deaths import reap_dead
from zico.pool.fences import NO_FENCE, at, counters_of, is_issued, issued_of, job_in, pair_of
from zico.pool.layout import (
    BOUNDARY,
    EMPTY,
    HEADER,
    JOB,
    MEMBER,
    MOVES,
    NOBODY,
    RUNNING,
    STREAMS,
    header_of,
    job_at,
    regions_of,
    waits_at_boundary,
    waits_for_memory,
    within_limit,
    yields_at_boundary,
)
from zico.pool.living import broker_is_gone
from zico.pool.mutex import lock, unlock
from zico.pool.regions import (
    claim_of,
    is_crowded,
    least_lacking,
    note_change,
    remaining_of,
    someone_else_grows_alone,
    stays_safe,
    tell,
)
from zico.trace import profile

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member


_JOB_BYTES = JOB.itemsize
_SEQUENCE_OFFSET = int(HEADER.fields["sequence"][1])
_MARKS_ASKED_OFFSET = int(HEADER.fields["marks_asked"][1])
_ADMITS_OFFSET = int(JOB.fields["broker_admits"][1])
_ADMITS_MASK = 0x3FFFFFFF
_GROWTH_SHIFT = 3  # an eighth: few questions, and little that leaves needlessly

STUCK_NS = 200_000_000
"""A state in which every job waits, and nothing has changed for so long, will not change by itself."""
STUCK_BEHIND_NS = 1_000_000_000
"""... and for so long where devices still work for ranks that wait for each other: perhaps at a collective."""
STUCK_BESIDE_STILL_NS = 1_000_000_000
"""... and for so long beside a job that does something else meanwhile, and may free memory as it does."""
STUCK_BESIDE_RUNNING_NS = 30_000_000_000
"""... and for so long where some job runs, but neither allocates nor frees: it may compute."""
NEVER_STUCK_NS = 1 << 62


# -- waiting in an allocation ----------------------------------------------------------------------


@compiled
def start_waiting(pool: Member, need: int) -> None:
    """Note that a thread of this job waits for ``need`` regions; from now on every release wakes it."""
    keep_out_of_line()
    me = job_at(pool, pool.job)
    lock(pool)
    if me.waiting_threads == 0:
        me.need_since_ns = monotonic_ns()
    me.waiting_threads += 1
    me.patient = 0
    me.need = need
    header_of(pool).waiters += 1
    _note_holders(pool, me)
    called = _call_lenders(pool)
    unmarked = header_of(pool).on_timeline == 1 and _others_have_unmarked(pool)
    if unmarked:
        change_marks_asked(pool)
    unlock(pool)
    if unmarked:
        wake_markers(pool)
    if called:
        for j in range(header_of(pool).places):
            if yields_at_boundary(pool, job_at(pool, j)):
                futex_wake_all(pool.jobs_address + j * _JOB_BYTES + _ADMITS_OFFSET)


@inlined
def _others_have_unmarked(pool: Member) -> bool:
    """Tell whether a free region lacks the mark of another job, without which nobody else may have it."""
    regions = regions_of(pool)
    for r in range(header_of(pool).n_regions):
        fence = regions[r].fence
        is_free = regions[r].owner == NOBODY and fence != NO_FENCE
        if is_free and job_in(fence) != pool.job and not is_issued(pool, fence):
            return True
    return False


@compiled
def change_marks_asked(pool: Member) -> None:
    """Change the word that threads sleep on which put marks for others. Inside the mutex."""
    keep_out_of_line()
    header = header_of(pool)
    header.marks_asked = (header.marks_asked + 1) & _ADMITS_MASK


@compiled
def wake_markers(pool: Member) -> None:
    """Wake the threads that put marks for others, outside the mutex: they look again."""
    keep_out_of_line()
    futex_wake_all(pool.header_address + _MARKS_ASKED_OFFSET)


@compiled
def sleep_until_marks_are_asked(pool: Member, word: int) -> None:
    """Sleep until somebody waits for a mark, as the word ``marks_asked`` says, or a slice has passed."""
    keep_out_of_line()
    futex_wait(pool.header_address + _MARKS_ASKED_OFFSET, word, pool.slice_address)


@inlined
def _call_lenders(pool: Member) -> bool:
    """Change the word that jobs sleep on which yield at boundaries: they look again. Tells whether there are any."""
    some = False
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if j != pool.job and yields_at_boundary(pool, job):
            job.broker_admits = (job.broker_admits + 1) & _ADMITS_MASK
            some = True
    return some


@inlined
def _note_holders(pool: Member, me: Job) -> None:
    """Write down whom an allocation waits for: everyone else who holds memory."""
    mask = np.uint64(0)
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if j != pool.job and job.state != EMPTY and job.held > 0:
            mask |= np.uint64(1) << np.uint64(j)
    me.waits_for = mask


@compiled
def stop_waiting(pool: Member) -> None:
    """Note that a thread of this job waits no longer, and add up the time."""
    keep_out_of_line()
    me = job_at(pool, pool.job)
    header = header_of(pool)
    lock(pool)
    me.waiting_threads -= 1
    header.waiters -= 1
    if me.waiting_threads == 0:
        me.evict = me.patient = 0
        waited_ns = monotonic_ns() - me.need_since_ns
        me.need_waited_ns += waited_ns
        me.iteration_waited_ns += waited_ns
        me.need_since_ns = 0
        me.need = 0
        me.waits_for = 0
    unlock(pool)


@inlined
def sequence_of(pool: Member) -> int:
    """Read the word that changes whenever a wait may have ended; read it before asking, sleep on it after."""
    return header_of(pool).sequence


@compiled
def sleep_until_change(pool: Member, sequence: int) -> bool:
    """Sleep until the pool changes or a slice has passed; then see to the dead if the broker is dead.

    Slices are short where the device may end the wait by passing a fence, since it wakes nobody.

    Returns:
        Whether a signal has ended the sleep.
    """
    longest_address = pool.poll_address if header_of(pool).on_timeline == 1 else pool.slice_address
    interrupted = futex_wait(pool.header_address + _SEQUENCE_OFFSET, sequence, longest_address)
    if broker_is_gone(pool):
        reap_dead(pool)
    return interrupted


@compiled
def standstill(pool: Member) -> int:
    """Return a number that stays the same while nobody makes progress that others may wait for.

    What a job does that has been in its iteration for too long does not count, nor does the memory
    that comes and goes with it: it may evaluate for hours.
    """
    keep_out_of_line()
    header = header_of(pool)
    now_ns = monotonic_ns()
    total = header.budget_regions
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if job.state == EMPTY:
            continue
        total += job.state + job.iteration
        if not still.is_past(job, now_ns):
            total += still.moves_of(pool, j) + job.held * (2 * j + 3)  # so that no two jobs' changes cancel out
    return total


@compiled
def idlers(pool: Member) -> int:
    """Return a number for those inside that nobody waits for, and their iterations; 0: there are none."""
    keep_out_of_line()
    now_ns = monotonic_ns()
    total = 0
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if j != pool.job and job.state == RUNNING and not waits_for_memory(job) and _is_still(pool, j, now_ns):
            total += (job.iteration + 1) * (2 * j + 3)
    return total


@inlined
def _is_still(pool: Member, j: int, now_ns: int) -> bool:
    """Tell whether nobody waits for a job inside: it is stopped, or does nothing or something else."""
    job = job_at(pool, j)
    by_profile = job.profiled == 1 and groups.stands_still(pool, j, now_ns)
    return bool(still.is_stopped(job, now_ns) or still.is_idle(job, now_ns) or by_profile)


@compiled
def patience_ns(pool: Member, has_next_tier: int) -> int:
    """Return how long a standstill must last before it counts as stuck.

    What exceeds the budget or the job's limit waits for nobody: it goes to the next tier soon,
    while others go on. On a device without one it waits for its deadline: the budget may be raised.

    A job that runs is waited for unless it stands still. What that frees while it does something
    else may do, so it has a little longer than those that wait.

    The pool does not see who waits in a collective. A rank that does not move while another one of
    its group waits counts as waiting with it. If it only computes, the other one has the next tier.
    """
    keep_out_of_line()
    me = job_at(pool, pool.job)
    if me.over:
        if header_of(pool).on_timeline == 1 and has_next_tier == 0:
            return NEVER_STUCK_NS
        return STUCK_NS if monotonic_ns() - me.need_since_ns < STUCK_NS else -1
    longest_ns = STUCK_NS
    now_ns = monotonic_ns()
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if job.state != EMPTY and job.died_ns != 0:  # its regions come back within LINGER_NS
            return STUCK_BESIDE_RUNNING_NS
        if job.state != RUNNING or still.is_stopped(job, now_ns):
            continue
        is_behind = _device_is_behind(pool, j)
        if (is_behind or not waits_for_memory(job)) and not groups.is_held_up(pool, j):
            if (is_behind and not still.is_idle(job, now_ns)) or not _is_still(pool, j, now_ns):
                return STUCK_BESIDE_RUNNING_NS
            longest_ns = STUCK_BESIDE_STILL_NS
        if is_behind:
            longest_ns = STUCK_BEHIND_NS
    return longest_ns


@inlined
def _device_is_behind(pool: Member, job: int) -> bool:
    """Tell whether a job's device has yet to come to some mark."""
    for slot in range(STREAMS):
        pair = pair_of(job, slot)
        if counters_of(pool)[at(pair)] < issued_of(pool)[pair]:
            return True
    return False


@compiled
def note_stall(pool: Member) -> None:
    """Count a state that nobody could leave."""
    keep_out_of_line()
    lock(pool)
    header_of(pool).stalls += 1
    unlock(pool)


@compiled
def is_first_to_yield(pool: Member) -> bool:
    """Tell whether this job is one that should go on by the next tier.

    The one that lacks the least, and whoever wants more than it may hold.
    """
    keep_out_of_line()
    if job_at(pool, pool.job).over:
        return True
    return least_lacking(pool) == pool.job


# -- iteration boundaries --------------------------------------------------------------------------


@compiled
def finish_iteration(pool: Member, phase: int) -> bool:
    """End the iteration: learn from it, and either begin the next (True) or stand at the boundary (False).

    Args:
        pool: This process's member record.
        phase: What begins (``zico.trace.phases``).
    """
    header = header_of(pool)
    me = job_at(pool, pool.job)
    now_ns = monotonic_ns()
    me.current.n_events = me.progress
    me.current.duration_ns = now_ns - me.started_ns - me.iteration_waited_ns
    lock(pool)
    if me.state != RUNNING:
        # Another thread of the job stands at the boundary already, or the job has left and need not
        # ask.
        admitted = me.state != BOUNDARY
        unlock(pool)
        return admitted
    profiles.learn(pool, me)
    if phase != me.phase:
        profiles.change(pool, me, phase)
    me.iteration += 1
    me.persistent = me.held + me.evicted
    header.crowded = 1 if header.on_timeline == 0 and is_crowded(pool) else 0
    me.last_boundary_ns = now_ns
    if me.first_boundary_ns == 0:
        me.first_boundary_ns = now_ns
    if header.alone_job == pool.job:
        header.alone_job = groups.heir_of(pool, pool.job)
    if groups.stays(pool, pool.job, now_ns):
        admitted = False
        if me.gate_ns > now_ns:
            me.waits_for = np.uint64(1) << np.uint64(pool.job)
    else:
        admitted = _may_start_unasked(pool, now_ns) if me.group == 0 else _may_start_with_group(pool, now_ns)
    if admitted:
        me.claim_floor = me.claim_peak
    else:
        me.state = BOUNDARY
        _begin_to_wait(pool, me, now_ns)
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)
    if admitted and me.group != 0:
        _wake(pool, pool.job)
    return admitted


@inlined
def _may_start_unasked(pool: Member, now_ns: int) -> bool:
    """Tell whether the next iteration fits whatever the others do."""
    header = header_of(pool)
    if header.self_admit == 0:
        return False
    if header.use_claims == 0:
        return True
    total = 0
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if job.state == EMPTY:
            continue
        total += within_limit(job, job.claim_peak + job.claim_extra)
    return total <= header.budget_regions and not someone_else_grows_alone(pool, pool.job, now_ns)


@compiled
def _may_start_with_group(pool: Member, now_ns: int) -> bool:
    """Tell whether a rank that has ended its iteration begins the next one at once, with those that wait for it.

    Where it has to wait for others of its group, it says for whom.
    """
    keep_out_of_line()
    me = job_at(pool, pool.job)
    if header_of(pool).use_claims == 0:
        return _may_start_unasked(pool, now_ns)
    if groups.is_awaited(pool, pool.job):
        admitted = stays_safe(pool, pool.job, 0, groups.peak_of(me))
    else:
        me.waits_for = np.uint64(groups.waits_for(pool, pool.job, now_ns))
        admitted = me.waits_for == 0 and _may_start_unasked(pool, now_ns)
    if admitted:
        _start_mates(pool, pool.job, now_ns)
    return admitted


@compiled
def _start_mates(pool: Member, job: int, now_ns: int) -> None:
    """Let those of a job's group begin that stand at their boundaries, and note the round of all that begin now."""
    keep_out_of_line()
    into = groups.next_round(pool, job)
    groups.note_start(pool, job, into)
    for j in range(header_of(pool).places):
        if j != job and groups.are_mates(pool, j, job) and job_at(pool, j).state == BOUNDARY:
            groups.note_start(pool, j, into)
            _start(pool, j, now_ns)


@inlined
def _start(pool: Member, job: int, now_ns: int) -> None:
    """Let a job at its boundary begin; it is woken later."""
    record = job_at(pool, job)
    _end_wait(pool, record, now_ns)
    record.evict = 0
    record.started_ns = now_ns  # until it has woken, too: whoever has been inside for long counts as standing still
    record.iteration_waited_ns = 0
    record.state = RUNNING
    record.claim_floor = record.claim_peak  # until it has woken its progress is that of the iteration it ended
    record.broker_admits = (record.broker_admits + 1) & _ADMITS_MASK


@inlined
def _begin_to_wait(pool: Member, record: Job, now_ns: int) -> None:
    """Count a job at its boundary among those that wait there, unless it is paused."""
    if waits_at_boundary(record):
        record.boundary_since_ns = now_ns
        header_of(pool).boundary_waiters += 1


@inlined
def _end_wait(pool: Member, record: Job, now_ns: int) -> None:
    """Count a job at its boundary no longer among those that wait there, and add up the time."""
    if waits_at_boundary(record):
        record.boundary_waited_ns += now_ns - record.boundary_since_ns
        header_of(pool).boundary_waiters -= 1
    record.boundary_since_ns = 0
    record.waits_for = 0


@compiled
def _wake(pool: Member, job: int) -> None:
    """Wake a job that sleeps at its boundary, and its group."""
    keep_out_of_line()
    for j in range(header_of(pool).places):
        if j == job or groups.are_mates(pool, j, job):
            futex_wake_all(pool.jobs_address + j * _JOB_BYTES + _ADMITS_OFFSET)


@entry(MEMBER, int)
def admit(pool: Member, job: int) -> bool:
    """Let a job at its boundary begin its next iteration, unless that would be unsafe or it is to stay; wakes it.

    Its group begins with it, all ranks or none. It may be named by any rank.
    """
    keep_out_of_line()
    header = header_of(pool)
    lock(pool)
    job = _rank_at_boundary(pool, job)
    record = job_at(pool, job)
    now_ns = monotonic_ns()
    may_start = record.state == BOUNDARY and not groups.stays(pool, job, now_ns)
    admitted = may_start and (
        header.use_claims == 0
        or (
            (record.group == 0 or groups.waits_for(pool, job, now_ns) == 0)
            and (_nobody_else_runs(pool, job) or stays_safe(pool, job, 0, groups.peak_of(record)))
        )
    )
    if admitted:
        if record.group != 0:
            _start_mates(pool, job, now_ns)
        _start(pool, job, now_ns)
    unlock(pool)
    if admitted:
        _wake(pool, job)
    return admitted


@inlined
def _rank_at_boundary(pool: Member, job: int) -> int:
    """Return the job, or one of its group that stands at its boundary where it does not itself."""
    if job_at(pool, job).state != BOUNDARY:
        for j in range(header_of(pool).places):
            if groups.are_mates(pool, j, job) and job_at(pool, j).state == BOUNDARY:
                return j
    return job


@entry(MEMBER, int, int)
def pause(pool: Member, job: int, how: int) -> None:
    """Keep a job at its boundary, or have it stop at its next one, until ``resume``; waits for nothing.

    Args:
        pool: This process's member record.
        job: Its place.
        how: ``Paused.STAYS`` or ``Paused.MOVES``.
    """
    keep_out_of_line()
    record = job_at(pool, job)
    lock(pool)
    if record.state == BOUNDARY:
        _end_wait(pool, record, monotonic_ns())
        record.broker_admits = (record.broker_admits + 1) & _ADMITS_MASK  # so that it looks what it is to do
    record.paused = how
    wake, notify = note_change(header_of(pool))
    unlock(pool)
    tell(pool, wake, notify)
    _wake(pool, job)


@entry(MEMBER, int)
def resume(pool: Member, job: int) -> None:
    """Let a paused job go on as any other: from its boundary when the broker admits it."""
    keep_out_of_line()
    record = job_at(pool, job)
    lock(pool)
    if record.paused != 0:
        record.paused = 0
        if record.state == BOUNDARY:
            _begin_to_wait(pool, record, monotonic_ns())
    wake, notify = note_change(header_of(pool))
    unlock(pool)
    tell(pool, wake, notify)


@entry(MEMBER, int)
def set_gate(pool: Member, until_ns: int) -> None:
    """Close the gate of this process's job until a time of the monotonic clock, or open it: 0."""
    keep_out_of_line()
    header = header_of(pool)
    lock(pool)
    job_at(pool, pool.job).gate_ns = until_ns
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)


@entry(MEMBER, int)
def join_group(pool: Member, group: int) -> None:
    """Make this process's job a rank of a group, or of none: 0. The others wait for it no longer than that lasts."""
    keep_out_of_line()
    header = header_of(pool)
    me = job_at(pool, pool.job)
    lock(pool)
    me.group = group
    me.uneven = 0
    header.grouped = 1
    for j in range(header.places):
        if groups.are_mates(pool, j, pool.job):
            me.round = max(me.round, job_at(pool, j).round)
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)


@inlined
def _nobody_else_runs(pool: Member, job: int) -> bool:
    """Tell whether all other jobs stand at boundaries, or stand still: then it must start, even if it will overflow.

    Ranks of its group may be inside, and wait for it in a collective.
    """
    now_ns = monotonic_ns()
    for j in range(header_of(pool).places):
        runs = job_at(pool, j).state == RUNNING and not groups.are_mates(pool, j, job)
        if runs and not _is_still(pool, j, now_ns):
            return False
    return True


RETURN_NS = 1_000_000_000
"""A job at its boundary goes back to its caller after so long: Python sees signals that ended no sleep."""
ADMITTED = 0
GIVES_WAY = 1
STAYS = 2
INTERRUPTED = 3


@compiled
def await_admission(pool: Member) -> int:
    """Sleep at the boundary until admitted; if the broker has died, start as soon as that is safe, paused or not.

    Returns:
        ``ADMITTED``; ``GIVES_WAY``: the job is to evict memory, since it is asked to, or swaps and
        others wait for some; ``STAYS``: it is paused, and a slice has passed, or ``RETURN_NS`` has;
        ``INTERRUPTED``: a signal has come.
    """
    me = job_at(pool, pool.job)
    began_ns = monotonic_ns()
    while me.state == BOUNDARY:
        word = me.broker_admits
        if me.state != BOUNDARY:
            break
        if me.evict == 0 and yields_at_boundary(pool, me) and header_of(pool).waiters > 0:
            me.evict = min(_others_lack(pool), me.held)
        if me.evict == 0 and me.paused == MOVES and header_of(pool).on_timeline == 0:
            me.evict = me.held
        if me.evict > 0:
            return GIVES_WAY
        address = pool.jobs_address + pool.job * _JOB_BYTES + _ADMITS_OFFSET
        interrupted = futex_wait(address, word, pool.slice_address)
        if me.state == BOUNDARY and broker_is_gone(pool):
            reap_dead(pool)
            still.look_around(pool)
            resume(pool, pool.job)  # nobody else could
            admit(pool, pool.job)
        if me.state == BOUNDARY and interrupted:
            return INTERRUPTED
        if me.state == BOUNDARY and (me.paused != 0 or monotonic_ns() - began_ns > RETURN_NS):
            return STAYS
    return ADMITTED


@compiled
def _others_lack(pool: Member) -> int:
    """Return the regions that are not free and that others who wait lack for their iterations, within their limits."""
    keep_out_of_line()
    header = header_of(pool)
    lock(pool)
    lack = header.granted - header.budget_regions
    now_ns = monotonic_ns()
    for j in range(header.places):
        job = job_at(pool, j)
        waits = j != pool.job and job.state == RUNNING and job.waiting_threads > 0
        if waits and job.over == 0 and not still.is_stopped(job, now_ns):
            lack += remaining_of(job)
    unlock(pool)
    return max(lack, 0)


@compiled
def begin_iteration(pool: Member) -> None:
    """Start the records of the new iteration; called by the job itself, which is their single writer."""
    me = job_at(pool, pool.job)
    me.iteration_waited_ns = 0
    me.started_ns = monotonic_ns()
    me.progress = 0
    me.claim_extra = 0
    me.outgrown = 0
    me.claim_floor = 0  # last: from here on progress says what may come
    profile.begin(me.current, 0 if profile.is_flat(me.profile) else me.profile.shift, me.held + me.evicted)


# -- blocked jobs as a reserve ---------------------------------------------------------------------


NOBODY_CAN = 0
ASKED = 1
PENDING = 2


@compiled
def ask_to_evict(pool: Member, sequence: int) -> int:
    """Ask blocked jobs for what this one lacks.

    Args:
        pool: This process's member record.
        sequence: As it was before the job last looked whether it can go on.

    Returns:
        ``ASKED``; ``PENDING``: somebody has been asked and has not answered, or has since;
        ``NOBODY_CAN``.
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
    """Return the regions without which this job cannot end its iteration, or which its tensor needs at least.

    Where no profile says what it lacks, it asks for an eighth of what it holds: each time it asks,
    everybody has come to a standstill before.
    """
    header = header_of(pool)
    me = job_at(pool, pool.job)
    remaining = remaining_of(me)
    if not profiles.is_known(me) or me.held + me.need > claim_of(me):
        remaining = max(remaining, me.held >> _GROWTH_SHIFT)
    lack = remaining + header.granted - header.budget_regions
    return lack if lack > 0 else me.need


@inlined
def _can_evict(pool: Member, j: int, now_ns: int) -> bool:
    """Tell whether a thread of another job waits, and so obeys when it is asked."""
    job = job_at(pool, j)
    is_blocked = job.state == BOUNDARY or (job.state == RUNNING and job.waiting_threads > 0)
    return j != pool.job and is_blocked and not still.is_stopped(job, now_ns)


@inlined
def _is_pending(pool: Member) -> bool:
    now_ns = monotonic_ns()
    for j in range(header_of(pool).places):
        if _can_evict(pool, j, now_ns) and job_at(pool, j).evict > 0:
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
    now_ns = monotonic_ns()
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if not _can_evict(pool, j, now_ns) or job.evict != 0 or job.held == 0:
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
