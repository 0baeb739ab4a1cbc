"""Iteration boundaries: who begins the next iteration at once, who waits there, and what ends that wait.

Theory of operation
    A job that ends an iteration begins the next one unasked where that fits whatever the others do.
    Else it stands at its boundary, and sleeps on a word of its own until the broker admits it. The
    ranks of a group begin together. Without a broker a job admits itself as soon as that is safe.

Guarantees
    7. Every sleep ends after one slice at the latest (``zico.pool.waits``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line
from zico.base.libc import futex_wait, monotonic_ns
from zico.pool import groups, living, profiles
from zico.pool.deaths import reap_dead
from zico.pool.layout import (
    BOUNDARY,
    EMPTY,
    MEMBER,
    MOVES,
    NO_MORE,
    RUNNING,
    header_of,
    job_at,
    waits_at_boundary,
    yields_at_boundary,
)
from zico.pool.mutex import lock, unlock, unlock_changed
from zico.pool.regions import is_crowded, most_of, remaining_of, someone_else_grows_alone, stays_safe
from zico.pool.results import ADMITTED, COMING, GIVES_WAY, INTERRUPTED, STAYS
from zico.pool.waits import call_up, is_passed_over, wait, wake_job, word_address
from zico.trace import profile

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member
    from zico.pool.waits import Look


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
        me.evict = 0  # a NO_MORE of an earlier wait says nothing about this one
        _begin_to_wait(pool, me, now_ns)
    unlock_changed(pool)
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
        total += most_of(job) if job.state != EMPTY else 0
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
    call_up(record)


@inlined
def _begin_to_wait(pool: Member, record: Job, now_ns: int) -> None:
    if waits_at_boundary(record):
        record.boundary_since_ns = now_ns
        header_of(pool).boundary_waiters += 1


@inlined
def _end_wait(pool: Member, record: Job, now_ns: int) -> None:
    if waits_at_boundary(record):
        record.boundary_waited_ns += now_ns - record.boundary_since_ns
        header_of(pool).boundary_waiters -= 1
    record.boundary_since_ns = 0
    record.waits_for = 0


@compiled
def _wake(pool: Member, job: int) -> None:
    keep_out_of_line()
    for j in range(header_of(pool).places):
        if j == job or groups.are_mates(pool, j, job):
            wake_job(pool, j)


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
        call_up(record)  # so that it looks what it is to do
        if record.evict == NO_MORE:
            record.evict = 0  # it is to try again
    record.paused = how
    unlock_changed(pool)
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
    unlock_changed(pool)


@entry(MEMBER, int)
def set_gate(pool: Member, until_ns: int) -> None:
    """Close the gate of this process's job until a time of the monotonic clock, or open it: 0."""
    keep_out_of_line()
    lock(pool)
    job_at(pool, pool.job).gate_ns = until_ns
    unlock_changed(pool)


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
    unlock_changed(pool)


@inlined
def _nobody_else_runs(pool: Member, job: int) -> bool:
    """Tell whether all other jobs stand at boundaries, or stand still: then it must start, even if it will overflow.

    Ranks of its group may be inside, and wait for it in a collective.
    """
    now_ns = monotonic_ns()
    for j in range(header_of(pool).places):
        runs = job_at(pool, j).state == RUNNING and not groups.are_mates(pool, j, job)
        if runs and not is_passed_over(pool, j, now_ns):
            return False
    return True


RETURN_NS = 1_000_000_000
"""A job at its boundary goes back to its caller after so long: Python sees signals that ended no sleep."""


@compiled
def await_admission(pool: Member) -> int:
    """Sleep at the boundary until admitted; if the broker has died, start as soon as that is safe, paused or not.

    Returns:
        ``ADMITTED``. ``GIVES_WAY``: the job is to evict memory, since it is asked to, or swaps and
        others wait for some. ``STAYS``: it is paused, and a slice has passed, or ``RETURN_NS`` has.
        ``INTERRUPTED``: a signal has come.
    """
    keep_out_of_line()
    return wait(pool, pool, pool.job, _word_of, _look, _sleep)


@compiled
def rest(pool: Member) -> bool:
    """Sleep for a slice at most while this process's job is paused at its boundary.

    Returns:
        Whether to call again: false when the job may go on, and when a signal has come.
    """
    keep_out_of_line()
    me = job_at(pool, pool.job)
    word = _word_of(pool, pool.job)
    interrupted = me.state == BOUNDARY and me.paused != 0 and _sleep(pool, word)
    return bool(me.state == BOUNDARY and me.paused != 0 and not interrupted)


@inlined
def _word_of(pool: Member, job: int) -> int:
    return job_at(pool, job).broker_admits


@compiled
def _look(pool: Member, job: int, look: Look) -> tuple[int, bool]:
    """Return how the wait of a job at its boundary ends, or ``COMING``."""
    keep_out_of_line()
    me = job_at(pool, job)
    if me.state != BOUNDARY:
        return ADMITTED, False
    if look.interrupted:
        return INTERRUPTED, False
    if look.number > 0 and (me.paused != 0 or look.waited_ns > RETURN_NS):
        return STAYS, False
    if me.evict == 0 and yields_at_boundary(pool, me) and header_of(pool).waiters > 0:
        me.evict = min(_others_lack(pool), me.held)
    if me.evict == 0 and me.paused == MOVES:
        me.evict = me.held
    return GIVES_WAY if me.evict > 0 else COMING, False


@compiled
def _sleep(pool: Member, word: int) -> bool:
    """Sleep until the job is called up or a slice has passed; if the broker is gone, see to the dead and to itself."""
    keep_out_of_line()
    interrupted = futex_wait(word_address(pool, pool.job), word, pool.slice_address)
    if job_at(pool, pool.job).state == BOUNDARY and living.broker_is_gone(pool):
        reap_dead(pool)
        living.look_around(pool)
        resume(pool, pool.job)  # nobody else could
        admit(pool, pool.job)
    return interrupted


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
        if waits and job.over == 0 and not living.is_stopped(job, now_ns):
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
