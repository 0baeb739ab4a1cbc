"""Waits that need no Python: the loop of every wait, and how one for memory begins, ends and turns to others.

Guarantees
    7. Every sleep ends after one slice at the latest and then looks around. It looks at dead
       processes if the broker is gone, at a state in which nobody can go on, and at the deadline.
    A waiting thread sleeps on a futex in the shared table. Whoever ends the wait needs nothing from
    this process. The job that asks others to evict is not asked, nor is one that runs. No regions
    change hands here.

Blocked jobs as a reserve
    When every job in an iteration waits and nothing moves, some profile was wrong. No order is left
    in which all can end. The job that lacks the least asks blocked ones to evict what it lacks to
    end its iteration. Jobs at their boundary come first, whose threads have the least to do, then
    whoever holds the most, so that few are asked. Victims evict only what is lacking.

    Only its owner can change what is mapped in a process, so nothing is taken. The wish stands in
    the owner's record, and the thread of it that waits obeys (``zico.heap.evicting``). A stopped
    job is not asked (``zico.pool.living``), nor is its answer waited for. One that has nothing more
    to give is not asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from zico.base.compiled import compiled, inlined, keep_in_line, keep_out_of_line
from zico.base.libc import futex_wait, futex_wake_all, monotonic_ns
from zico.pool import groups, living, rules
from zico.pool.deaths import reap_dead
from zico.pool.fences import NO_FENCE, is_issued, job_in
from zico.pool.layout import (
    BOUNDARY,
    EMPTY,
    HEADER,
    JOB,
    NOBODY,
    RUNNING,
    STREAMS,
    at,
    counters_of,
    header_of,
    issued_of,
    job_at,
    pair_of,
    profile_is_known,
    regions_of,
    waits_for_memory,
    yields_at_boundary,
)
from zico.pool.mutex import lock, note_change, tell, unlock
from zico.pool.regions import claim_of, least_lacking, remaining_of
from zico.pool.results import AGAIN, ASKED, COMING, NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.pool.layout import Job, Member

Owner = TypeVar("Owner")
What = TypeVar("What")
Word = TypeVar("Word")

_JOB_BYTES = JOB.itemsize
_SEQUENCE_OFFSET = int(HEADER.fields["sequence"][1])
_MARKS_ASKED_OFFSET = int(HEADER.fields["marks_asked"][1])
_ADMITS_OFFSET = int(JOB.fields["broker_admits"][1])
_WORD_MASK = 0x3FFFFFFF
_GROWTH_SHIFT = 3  # an eighth: few questions, and little that leaves needlessly

STUCK_NS = living.SEEN_NS
"""A state in which every job waits, and nothing has changed for so long, will not change by itself. Who
goes on is seen to within this time.

Beside a job that does something else, and may free memory as it does, it takes ``rules.STILL_NS``. So
it does where devices still work for ranks that wait for each other, perhaps in a collective. Where
some job runs, but neither allocates nor frees, it takes ``rules.IDLE_NS``: that job may compute.
"""
NEVER_STUCK_NS = 1 << 62


# -- the loop --------------------------------------------------------------------------------------


class Look(NamedTuple):
    """How things stand when a waiting thread looks whether its wait is over."""

    word: Any  # what the thread is going to sleep on, as it was before the look
    number: int  # of looks before this one
    now_ns: int
    waited_ns: int  # since the wait began
    still_ns: int  # since anybody made progress that others may wait for (``standstill``)
    vain_since_ns: int  # since when the looks have found the wait to be in vain, 0: the last one did not
    asked_ns: int  # when a look last asked others to evict, 0: none has
    interrupted: bool  # a signal has ended the last sleep


@compiled
def wait(
    pool: Member,
    owner: Owner,
    what: What,
    begin: Callable[[Owner, What], Word],
    look: Callable[[Owner, What, Look], tuple[int, bool]],
    sleep: Callable[[Owner, Word], bool],
) -> int:
    """Look and sleep by turns until a look finds what ends the wait: each wait of a job is this loop.

    Args:
        pool: This process's member record.
        owner: The record that the three functions get: that one, or the heap's.
        what: The thread waits for; the functions get it, too.
        begin: What the thread does for others before it looks; returns the word to sleep on.
        look: Returns a result, and whether the wait is in vain as things stand. The thread looks
            again after ``AGAIN``, sleeps after ``COMING`` and ``ASKED``, and ends the wait after
            anything else.
        sleep: Sleeps while the word is what it was, for a slice at most; tells whether a signal has
            ended that.

    Returns:
        What the last look has found.
    """
    keep_in_line()  # else Numba would not keep what calls it: a function that is passed is an address
    began_ns = still_since_ns = monotonic_ns()
    number = vain_since_ns = asked_ns = 0
    before = -1
    interrupted = False
    found = AGAIN
    while found in (AGAIN, COMING, ASKED):
        word = begin(owner, what)
        now_ns = monotonic_ns()
        now = standstill(pool)
        if now != before:
            before, still_since_ns = now, now_ns
        waited_ns, still_ns = now_ns - began_ns, now_ns - still_since_ns
        found, is_vain = look(
            owner, what, Look(word, number, now_ns, waited_ns, still_ns, vain_since_ns, asked_ns, interrupted)
        )
        number += 1
        vain_since_ns = (vain_since_ns or now_ns) if is_vain else 0
        if found == ASKED:
            asked_ns = now_ns
        interrupted = found in (COMING, ASKED) and sleep(owner, word)
    return found


# -- the word of a boundary ------------------------------------------------------------------------


@inlined
def call_up(job: Job) -> None:
    """Change the word that a job sleeps on at its boundary, inside the mutex: the job looks again."""
    job.broker_admits = (job.broker_admits + 1) & _WORD_MASK


@inlined
def word_address(pool: Member, j: int) -> int:
    """Return where that word is."""
    return pool.jobs_address + j * _JOB_BYTES + _ADMITS_OFFSET


@inlined
def wake_job(pool: Member, j: int) -> None:
    """Wake a job that sleeps at its boundary, outside the mutex."""
    futex_wake_all(word_address(pool, j))


# -- waiting for memory ----------------------------------------------------------------------------


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
                wake_job(pool, j)


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
    header.marks_asked = (header.marks_asked + 1) & _WORD_MASK


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
    """Call up the jobs that yield at their boundaries; tells whether there are any."""
    some = False
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if j != pool.job and yields_at_boundary(pool, job):
            call_up(job)
            some = True
    return some


@inlined
def _note_holders(pool: Member, me: Job) -> None:
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
    if living.broker_is_gone(pool):
        reap_dead(pool)
    return interrupted


@compiled
def standstill(pool: Member) -> int:
    """Return a number that stays the same while nobody makes progress that others may wait for.

    A job that has been in its iteration for too long does not count, since it may evaluate for
    hours. Nor does the memory that comes and goes with it.
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
        if not living.is_past(job, now_ns):
            total += living.moves_of(pool, j) + job.held * (2 * j + 3)  # so that no two jobs' changes cancel out
    return total


@compiled
def idlers(pool: Member) -> int:
    """Return a number for those inside that nobody waits for, and their iterations; 0: there are none."""
    keep_out_of_line()
    now_ns = monotonic_ns()
    total = 0
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if j != pool.job and job.state == RUNNING and not waits_for_memory(job) and is_passed_over(pool, j, now_ns):
            total += (job.iteration + 1) * (2 * j + 3)
    return total


@inlined
def is_passed_over(pool: Member, j: int, now_ns: int) -> bool:
    """Tell whether nobody waits for a job inside: it is stopped, or does nothing or something else."""
    job = job_at(pool, j)
    by_profile = job.profiled == 1 and groups.stands_still(pool, j, now_ns)
    return bool(living.is_stopped(job, now_ns) or living.is_idle(job, now_ns) or by_profile)


@compiled
def patience_ns(pool: Member, has_next_tier: int) -> int:
    """Return how long a standstill must last before it counts as stuck.

    What exceeds the budget or the job's limit waits for nobody: it goes to the next tier soon,
    while others go on. On a device without one it waits for its deadline: the budget may be raised.

    A job that runs is waited for unless it stands living. What that frees while it does something
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
            return rules.IDLE_NS
        if job.state != RUNNING or living.is_stopped(job, now_ns):
            continue
        is_behind = _device_is_behind(pool, j)
        if (is_behind or not waits_for_memory(job)) and not groups.is_held_up(pool, j):
            if (is_behind and not living.is_idle(job, now_ns)) or not is_passed_over(pool, j, now_ns):
                return rules.IDLE_NS
            longest_ns = rules.STILL_NS
        if is_behind:
            longest_ns = rules.STILL_NS
    return longest_ns


@inlined
def _device_is_behind(pool: Member, job: int) -> bool:
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


# -- blocked jobs as a reserve ---------------------------------------------------------------------


@compiled
def ask_to_evict(pool: Member, sequence: int) -> int:
    """Ask blocked jobs for what this one lacks.

    Args:
        pool: This process's member record.
        sequence: As it was before the job last looked whether it can go on.

    Returns:
        ``ASKED``; ``COMING``: somebody has been asked and has not answered, or has since;
        ``NOTHING``: nobody can.
    """
    keep_out_of_line()
    header = header_of(pool)
    if header.on_timeline == 1 or job_at(pool, pool.job).over:  # nobody can help who wants more than it may hold
        return NOTHING
    lock(pool)
    if header.sequence != sequence or _is_pending(pool):
        answer = COMING
    elif _ask_for(pool, _lack(pool)):
        answer = ASKED
    else:
        answer = NOTHING
    wake, notify = note_change(header) if answer == ASKED else (False, False)
    unlock(pool)
    if answer == ASKED:
        tell(pool, wake, notify)
        for j in range(header.places):
            if job_at(pool, j).state == BOUNDARY and job_at(pool, j).evict > 0:
                wake_job(pool, j)
    return answer


@inlined
def _lack(pool: Member) -> int:
    """Return the regions without which this job cannot end its iteration, or which its tensor needs at least.

    Where no profile says what it lacks, it asks for an eighth of what it holds. Each time it asks,
    everybody has come to a standstill before.
    """
    header = header_of(pool)
    me = job_at(pool, pool.job)
    remaining = remaining_of(me)
    if not profile_is_known(me) or me.held + me.need > claim_of(me):
        remaining = max(remaining, me.held >> _GROWTH_SHIFT)
    lack = remaining + header.granted - header.budget_regions
    return lack if lack > 0 else me.need


@inlined
def _can_evict(pool: Member, j: int, now_ns: int) -> bool:
    """Tell whether a thread of another job waits, and so obeys when it is asked."""
    job = job_at(pool, j)
    is_blocked = job.state == BOUNDARY or (job.state == RUNNING and job.waiting_threads > 0)
    return j != pool.job and is_blocked and not living.is_stopped(job, now_ns)


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
        call_up(job)  # so that it does not fall asleep at its boundary
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
