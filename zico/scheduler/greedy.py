"""Who may start, decided greedily: by exact time shift, or by claims alone.

By shift an iteration begins when all of it is predicted to fit. The rules, in order, for every job
at a boundary (longest waiting first):

1. While a job without a profile grows, nobody starts.
2. A job whose peak does not fit beside what the others keep between iterations waits, and holds
   nobody up.
3. It starts where the state with its claim is safe, and the smallest delay after which its
   iteration fits is zero or too small.
4. Otherwise it waits, and its iteration is reserved at that delay. Those behind it start only where
   they fit beside the reservation, so they cannot postpone it, and nobody starves. Where the state
   would not be safe nothing is reserved, since profiles are wrong then. By *first fit* only a job
   that has got less than its floor has its iteration reserved. Any other job that fits starts, even
   if that postpones the jobs before it: a large job waits until its floor is at stake.
5. If all jobs wait and none fits, the first one starts all the same: it overflows into the next
   tier, but moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled
from zico.pool.layout import JobState
from zico.scheduler.demand import coarse, is_passing_at, job_at, profile_at, reserved, total
from zico.scheduler.layout import NO_TIME, NOBODY, Reason
from zico.scheduler.turns import (
    alone_in,
    banker_of,
    blocked_by,
    count_in,
    decision_at,
    fits_beside_kept,
    in_order,
    in_turn,
    kept_by_all,
    lacks,
    may_start,
    peaks_together,
    starts,
    unstick,
    waits,
    waits_for_alone,
    waits_to_fit,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import Snapshot, SnapshotJob

    Int64s = NDArray[np.int64]


# --------------------------------------------------------------------------------------------------
# The time shift: the smallest delay after which a whole iteration fits beside what the others are
# going to hold.
#
# Theory of operation
#     Both sides are staircases. A step of the newcomer and a step of the others may together exceed
#     the budget. Then they forbid every delay with which they would overlap, an open interval of
#     delays. The answer is the smallest delay in none of these intervals, so it is 0 or the end of
#     one of them. That is an instant at which a step of the newcomer would begin just when the
#     others come down a step. From a delay that is forbidden we go to the end of an interval that
#     forbids it, all at once, until no step complains::
#
#         budget 6     others   4 4 4 1 1 ...        delay 0: 3 + 4 > 6 from 1 to 3: the 3 may begin at 3, so delay 2
#                      job      1 3 3 2              delay 2: - - 1 3 3 2 fits
#
#     Time here is exact (nanoseconds, no polling interval), and steps on which the newcomer holds
#     no more than it does while it waits forbid nothing.
#
# Source: the delay search of the Zico paper (USENIX ATC 2021, section 4), which polls instead.

NEVER = -1
"""No delay helps: the others' last step leaves too little."""

_PLENTY = 1 << 62  # of regions


@compiled
def smallest_delay(others: tuple[Int64s, Int64s], job: SnapshotJob, budget: int) -> tuple[int, int]:
    """Return the smallest delay after which the job's whole next iteration fits, and what forbids a start now.

    Args:
        others: What everybody but the job is going to hold.
        job: The JOB record, at its boundary, with a profile; what it holds there it may hold in any
            case.
        budget: Regions.

    Returns:
        The delay in nanoseconds, or ``NEVER``; and when, after a start now, memory would first be
        short, -1 if never.
    """
    t_ns, levels = others
    profile = profile_at(job)
    own_ns, own, n = profile.step_ns, profile.level, profile.n_steps
    last = len(t_ns) - 1
    delay_ns = 0
    conflict_ns = -1
    clean = 0  # newcomer's steps in a row that fit at this delay; n of them, round the end, prove it
    i = k = begin = 0  # the newcomer's step, the others' beside it, and the others' that the delay lies in
    while clean < n:
        if i == n:
            while begin < last and t_ns[begin + 1] <= delay_ns:
                begin += 1
            i, k = 0, begin
        room = budget - own[i] if own[i] > job.held else _PLENTY
        end_ns = own_ns[i + 1] if i + 1 < n else profile.duration_ns
        moved_ns = delay_ns
        while k < last and t_ns[k + 1] <= delay_ns + own_ns[i]:
            k += 1
        at = k
        while True:
            if levels[at] > room:
                if conflict_ns < 0:
                    conflict_ns = max(own_ns[i], t_ns[at])
                if at == last:
                    return NEVER, conflict_ns
                moved_ns = t_ns[at + 1] - own_ns[i]
            if at == last or t_ns[at + 1] >= moved_ns + end_ns:
                break
            at += 1
        k = at
        clean = clean + 1 if moved_ns == delay_ns else 1
        delay_ns = moved_ns
        i += 1
    return delay_ns, conflict_ns


# --------------------------------------------------------------------------------------------------

MARGIN_SHIFT = 5
"""A 32nd of the budget is left out of predictions where that leaves a solution.

Real iterations differ from their profiles by a region or two and by some per cent of time. Where
two jobs fill the budget exactly, each such difference makes one of them wait inside its iteration.
There it delays what it would give back. That was measured on two copies of the ResNet example at 70
% (``docs/design/scheduling.md``).
"""
LOOKAHEAD = 16
"""So many of those that wait have their iterations reserved; whoever is further behind waits for them to start."""
MOST_STEPS = 256
"""With many jobs, what they hold together is looked at in so many spans of time: no finer than a profile is."""

_NO_PLAN = -1
_MEETS, _UNSAFE = int(Reason.MEETS), int(Reason.UNSAFE)
_RUNNING = int(JobState.RUNNING)


@compiled
def decide_by_shift(snapshot: Snapshot, margin_shift: int, first: int, first_fit: int) -> None:
    """Decide for every job at its boundary.

    Args:
        snapshot: The pool.
        margin_shift: ``1 / 2**margin_shift`` of the budget is left out of predictions where that
            leaves a solution.
        first: Whose iteration is planned before the others', as for ``in_order``.
        first_fit: Not 0: only iterations of jobs that have got less than their floor are reserved.
    """
    order = in_order(snapshot, first)
    alone = alone_in(snapshot)
    if alone == NOBODY and 0 <= peaks_together(snapshot) <= snapshot.budget:
        _start_all(snapshot, order)
        return
    promised = coarse(total(snapshot), MOST_STEPS)
    delays_ns = np.full(snapshot.n, _NO_PLAN, np.int64)
    banker = banker_of(snapshot)
    considered = 0
    for index in order:
        job = job_at(snapshot, index)
        if alone != NOBODY:
            waits_for_alone(snapshot, index, alone)
        elif job.profile_address == 0:
            starts(snapshot, index)
            alone = index
        elif considered == LOOKAHEAD:
            waits(snapshot, index, _MEETS, NO_TIME)
            blocked_by(snapshot, index, order[0])
        else:
            considered += 1
            delay_ns, conflict_ns = _delay(snapshot, job, promised, margin_shift)
            if delay_ns == NEVER:
                waits_to_fit(snapshot, index)
                continue
            if delay_ns <= profile_at(job).tick_ns:
                delay_ns = 0
                is_reserved = starts_if_safe(snapshot, index, banker)
            else:
                waits(snapshot, index, _MEETS, snapshot.now_ns + delay_ns)
                _blame(snapshot, index, delays_ns, conflict_ns)
                is_reserved = not first_fit or job.served < job.floor
            if not is_reserved:
                continue
            delays_ns[index] = delay_ns
            if index != order[-1]:
                promised = reserved(promised, job, delay_ns)
    unstick(snapshot, order)


@compiled
def _start_all(snapshot: Snapshot, order: Int64s) -> None:
    for index in order:
        starts(snapshot, index)


@compiled
def _delay(snapshot: Snapshot, job: SnapshotJob, promised: tuple[Int64s, Int64s], margin_shift: int) -> tuple[int, int]:
    """Return after what delay a job fits beside what all, itself at rest included, hold; with the margin if it can."""
    budget = snapshot.budget + job.held
    delay_ns, conflict_ns = smallest_delay(promised, job, budget - (snapshot.budget >> margin_shift))
    return (delay_ns, conflict_ns) if delay_ns != NEVER else smallest_delay(promised, job, budget)


@compiled
def _waits_for_safety(snapshot: Snapshot, index: int) -> None:
    """Wait for whoever is in an iteration: profiles were wrong, and one more job might block them all."""
    waits(snapshot, index, _UNSAFE, NO_TIME)
    for other in range(snapshot.n):
        if job_at(snapshot, other).phase == _RUNNING:
            blocked_by(snapshot, index, other)


@compiled
def starts_if_safe(snapshot: Snapshot, index: int, banker: tuple[Any, Any, Any]) -> bool:
    """Start a job if the pool would let it begin, else let it wait; tells whether it starts."""
    may = may_start(snapshot, banker, index)
    if may:
        starts(snapshot, index)
    else:
        _waits_for_safety(snapshot, index)
    return may


@compiled
def _blame(snapshot: Snapshot, index: int, delays_ns: NDArray[np.int64], conflict_ns: int) -> None:
    """Say who holds more than in the end when memory would be short; all others if none does."""
    for other in range(snapshot.n):
        passing = is_passing_at(job_at(snapshot, other), snapshot.now_ns, delays_ns[other], conflict_ns)
        if other != index and passing:
            blocked_by(snapshot, index, other)
    for other in range(snapshot.n):
        if decision_at(snapshot, index).against == NOBODY and other != index:
            blocked_by(snapshot, index, other)


# --------------------------------------------------------------------------------------------------
# Who may start, by claims alone: as soon as everybody can still finish, whatever that does to who
# waits inside.

MOST_JUDGED = 64
"""So many of those that wait are looked at one by one in a decision; whoever is further behind waits for them."""

_TURN = int(Reason.TURN)
EVERYBODY = 1 << 30
"""With this limit any number may be in an iteration at a time."""


@compiled
def waits_for_its_turn(snapshot: Snapshot, index: int, flags: NDArray[np.uint8]) -> None:
    """Wait for one of those that are in an iteration, or begin one now, to end it."""
    waits(snapshot, index, _TURN, NO_TIME)
    for other in range(snapshot.n):
        if other != index and flags[0, other] and not flags[1, other]:
            blocked_by(snapshot, index, other)


@compiled
def decide_by_claims(snapshot: Snapshot, most_inside: int) -> None:
    """Decide for every job at its boundary, in turn, while fewer than ``most_inside`` jobs are in an iteration."""
    order = in_turn(snapshot)
    alone = alone_in(snapshot)
    banker = banker_of(snapshot)
    free, _sums, flags = banker
    inside = 0
    missing = 0  # regions that those need together who must finish: if so many are free, any order will do
    for i in range(snapshot.n):
        missing += lacks(snapshot, banker, i) if flags[0, i] else 0
        inside += flags[0, i] and not flags[1, i]
    kept = kept_by_all(snapshot)
    judged = 0
    for index in order:
        job = job_at(snapshot, index)
        lacking = lacks(snapshot, banker, index)
        if alone != NOBODY:
            waits_for_alone(snapshot, index, alone)
        elif job.profile_address == 0:
            starts(snapshot, index)
            alone = index
        elif not fits_beside_kept(snapshot, index, kept):
            waits_to_fit(snapshot, index)
        elif inside >= most_inside:
            waits_for_its_turn(snapshot, index, flags)
        elif missing + lacking <= free[0]:
            starts(snapshot, index)
            count_in(snapshot, banker, index)
            missing += lacking - job.yielded
            inside += 1
        elif judged == MOST_JUDGED:
            waits(snapshot, index, _UNSAFE, NO_TIME)
            blocked_by(snapshot, index, order[0])
        else:
            judged += 1
            if starts_if_safe(snapshot, index, banker):
                missing += lacking - job.yielded
                inside += 1
    unstick(snapshot, order)
