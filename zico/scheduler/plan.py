"""Who may start, by a plan where there is one.

A plan is the best schedule of a few jobs, or the way that does best for any jobs. It is for certain
jobs and has one way or several, of which one is in use (``zico.scheduler.learning``). Where the
snapshot is of other jobs, or one does not do what its profile says, shift decides.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import callback, compiled, inlined, record_at
from zico.base.records import Record, dtype_of
from zico.pool.layout import JobState
from zico.scheduler.best_schedule import ScheduleRecord, bit_of
from zico.scheduler.demand import job_at, position_ns, profile_at, will_end
from zico.scheduler.greedy import MARGIN_SHIFT, decide_by_claims, decide_by_shift, starts_if_safe
from zico.scheduler.layout import NO_TIME, NOBODY, Reason
from zico.scheduler.learning import Learnt, is_of, learn
from zico.scheduler.shares import GUARD
from zico.scheduler.turns import (
    LONGEST_WAITING,
    banker_of,
    blocked_by,
    fits_beside_kept,
    in_turn,
    kept_by_all,
    peaks_together,
    snapshot_at,
    unstick,
    waits,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import Snapshot, SnapshotJob


class Way(enum.IntEnum):
    """How jobs are decided on; each has a setting."""

    SHIFT = 0
    """The setting is the margin's shift, who comes first ``<< FIRST_SHIFT``, and ``FIRST_FIT`` or not."""
    CLAIMS = 1
    """The setting is how many may be inside their iterations."""
    SCHEDULE = 2
    """The best schedule of a few jobs; no setting."""


FIRST_SHIFT, FIRST_MASK, MARGIN_MASK, FIRST_FIT = 8, 255, 255, 1 << 16


class PlanRecord(Record):
    """How certain jobs are to be decided on."""

    learnt: Learnt
    best: ScheduleRecord


PLAN = dtype_of(PlanRecord)

_SHIFT, _CLAIMS, _SCHEDULE = int(Way.SHIFT), int(Way.CLAIMS), int(Way.SCHEDULE)
_RUNNING, _BOUNDARY = int(JobState.RUNNING), int(JobState.BOUNDARY)
_BETTER, _UNSAFE, _ANEW, _TURN = int(Reason.BETTER), int(Reason.UNSAFE), int(Reason.ANEW), int(Reason.TURN)
_AT_BOUNDARY = -1
_STARVED = 2  # iterations of the longest job
_OF_FLOOR = 2 / 3  # so that no way comes to its floors by this in its trials
_PASSED_OVER = 1 / (GUARD * _OF_FLOOR)  # turns of all: so late is one of equal jobs that has waited for so long


@compiled
def _is_planned(snapshot: Snapshot) -> bool:
    """Tell whether the snapshot is of the jobs that the plan is for, each fits, and all do what their profiles say."""
    if not is_of(record_at(snapshot.plan_address, PLAN).learnt, snapshot):
        return False
    kept = kept_by_all(snapshot)
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if job.profile_address == 0 or not fits_beside_kept(snapshot, i, kept):
            return False
        if job.phase != _BOUNDARY and not will_end(job):
            return False
    return True


@compiled
def _favoured(snapshot: Snapshot) -> int:
    """Return which of the best schedules counts: 1 and a job's index if it alone is owed something, else 0."""
    favoured = 0
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if job.served < job.floor:
            if favoured:
                return 0
            favoured = 1 + i
    return favoured


@compiled
def _node(best: ScheduleRecord, at_ns: NDArray[np.int64], later: int) -> int:
    """Return at which node the jobs are if those that are not at their boundaries go on for so many cells."""
    node = 0
    for i in range(len(at_ns)):
        cell = 0 if at_ns[i] < 0 else (at_ns[i] + best.cell_ns // 2) // best.cell_ns + later
        node = node * best.n_cells[i] + min(cell, best.n_cells[i] - 1)
    return node


@compiled
def _decide_by_schedule(snapshot: Snapshot) -> None:
    """Decide for those of a few jobs that are at their boundaries."""
    best = record_at(snapshot.plan_address, PLAN).best
    actions = best.actions[_favoured(snapshot)]
    banker = banker_of(snapshot)
    at_ns = np.full(snapshot.n, _AT_BOUNDARY, np.int64)
    for i in range(snapshot.n):
        if job_at(snapshot, i).phase != _BOUNDARY:
            at_ns[i] = position_ns(job_at(snapshot, i))
    order = in_turn(snapshot)
    those = actions[_node(best, at_ns, 0)]
    for i in order:
        if those & bit_of(i, snapshot.n) and starts_if_safe(snapshot, i, banker):
            at_ns[i] = 0
    for i in order:
        if not those & bit_of(i, snapshot.n):
            _wait_for_cell(snapshot, best, actions, i, at_ns)
    unstick(snapshot, order)


@compiled
def _wait_for_cell(
    snapshot: Snapshot, best: ScheduleRecord, actions: NDArray[np.int8], index: int, at_ns: NDArray[np.int64]
) -> None:
    """Wait until the others are where it is best to start beside them."""
    most = 0  # cells until the last of the others has ended
    early_ns = best.cell_ns  # by how much the first of them is before its cell, to which times are rounded
    for other in range(snapshot.n):
        if at_ns[other] >= 0:
            cell = min((at_ns[other] + best.cell_ns // 2) // best.cell_ns, best.n_cells[other] - 1)
            most = max(most, best.n_cells[other] - cell)
            early_ns = min(early_ns, cell * best.cell_ns - at_ns[other])
    later = 1
    while later < most and not actions[_node(best, at_ns, later)] & bit_of(index, snapshot.n):
        later += 1
    until_ns = NO_TIME
    if later < most:
        until_ns = snapshot.now_ns + max(later * best.cell_ns + early_ns, best.cell_ns >> 1)
    waits(snapshot, index, _BETTER, until_ns)
    for other in range(snapshot.n):
        if at_ns[other] >= 0:
            blocked_by(snapshot, index, other)


@compiled
def _is_starved(snapshot: Snapshot) -> bool:
    """Keep all at their boundaries where somebody inside has been without memory for longer than two of any iteration.

    With right profiles that does not happen. With wrong ones a job can wait for ever for what
    others, whose iterations begin again and again, never leave free at one time. Once they stand
    still, it gets it or goes to the next tier.
    """
    longest_ns = 0
    for i in range(snapshot.n):
        if job_at(snapshot, i).profile_address != 0:
            longest_ns = max(longest_ns, profile_at(job_at(snapshot, i)).duration_ns)
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        is_short = job.phase == _RUNNING and job.need > 0 and job.given_up == 0
        if is_short and snapshot.now_ns - job.waiting_since_ns > _STARVED * longest_ns:
            for index in range(snapshot.n):
                if job_at(snapshot, index).phase == _BOUNDARY:
                    waits(snapshot, index, _UNSAFE, NO_TIME)
                    blocked_by(snapshot, index, i)
            return True
    return False


@inlined
def _is_new(job: SnapshotJob) -> bool:
    """Tell whether of a job only its first iteration is known: that it has held at most so much, at any time."""
    return job.iteration == 1 and profile_at(job).n_bins == 1


@compiled
def _passed_over(snapshot: Snapshot) -> int:
    """Return who goes next, if it fits, whatever the way, or ``NOBODY``.

    That is who has ended its first iteration only, which traces and compiles. By what that took its
    next one would be put off for seconds. Or who has waited longest, for longer than three turns of
    all, and got but two thirds of its floor. A way gives everybody that by the profiles that it was
    tried with. With a region more than those say, a job that had fitted beside another does not.
    The others go on to fit beside each other.
    """
    first = NOBODY
    turns_ns = since_ns = 0
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        is_known = job.profile_address != 0 or job.given_up != 0
        if job.phase != _BOUNDARY and not (job.phase == _RUNNING and is_known):
            return NOBODY
        if job.profile_address != 0:
            turns_ns += profile_at(job).duration_ns
            own_ns = 0 if _is_new(job) else job.waiting_since_ns
            waits_here = job.phase == _BOUNDARY and job.waiting_since_ns > 0
            if waits_here and (first == NOBODY or own_ns < since_ns):
                first, since_ns = i, own_ns
    if first == NOBODY or 0 <= peaks_together(snapshot) <= snapshot.budget:
        return NOBODY
    job = job_at(snapshot, first)
    waited_ns = snapshot.now_ns - since_ns
    is_late = waited_ns > _PASSED_OVER * turns_ns and waited_ns * job.floor * _OF_FLOOR > profile_at(job).duration_ns
    if since_ns > 0 and not is_late:
        return NOBODY
    return first if fits_beside_kept(snapshot, first, kept_by_all(snapshot)) else NOBODY


@compiled
def _serve(snapshot: Snapshot, index: int) -> None:
    """Let one job start as soon as that is safe, and nobody else before; the others are looked at again right after."""
    until_ns = snapshot.now_ns + 1 if starts_if_safe(snapshot, index, banker_of(snapshot)) else NO_TIME
    for i in range(snapshot.n):
        if i != index and job_at(snapshot, i).phase == _BOUNDARY:
            waits(snapshot, i, _TURN, until_ns)
            blocked_by(snapshot, i, index)
    unstick(snapshot, in_turn(snapshot))


@compiled
def _gathers(known: Learnt, snapshot: Snapshot) -> bool:
    """Keep those at their boundaries there until all are; tells whether it does.

    Which cycle jobs settle into depends on where they stand when it begins. They are all at their
    boundaries, as in the trials that a way was chosen by, nobody having waited for longer than the
    others.
    """
    if not is_of(known, snapshot):
        return False
    inside = False
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if job.phase == _BOUNDARY:
            continue
        if not will_end(job):
            known.gathers = 0
            return False
        inside = True
    if not inside:
        known.gathers, known.gathered_ns = 0, snapshot.now_ns
        return False
    for i in range(snapshot.n):
        if job_at(snapshot, i).phase == _BOUNDARY:
            waits(snapshot, i, _ANEW, NO_TIME)
            for other in range(snapshot.n):
                if job_at(snapshot, other).phase != _BOUNDARY:
                    blocked_by(snapshot, i, other)
    return True


@compiled
def _decide_by_plan(snapshot: Snapshot, known: Learnt) -> None:
    """Decide by the way in use."""
    used = known.ways[known.used]
    if used.way == _SCHEDULE and _is_planned(snapshot):
        _decide_by_schedule(snapshot)
    elif used.way == _CLAIMS:
        decide_by_claims(snapshot, used.setting)
    else:
        setting = used.setting if used.way == _SHIFT else MARGIN_SHIFT
        decide_by_shift(snapshot, setting & MARGIN_MASK, setting >> FIRST_SHIFT & FIRST_MASK, setting & FIRST_FIT)


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Decide for every job at its boundary; takes microseconds and waits for nothing."""
    snapshot = snapshot_at(snapshot_address)
    if snapshot.plan_address != 0:
        known = record_at(snapshot.plan_address, PLAN).learnt
        learn(known, snapshot)
        if _is_starved(snapshot) or (known.gathers and _gathers(known, snapshot)):
            return
        for i in range(snapshot.n):
            job = job_at(snapshot, i)
            if job.phase == _BOUNDARY and job.waiting_since_ns != 0:
                job.waiting_since_ns = max(job.waiting_since_ns, known.gathered_ns)
    passed_over = _passed_over(snapshot)
    if passed_over != NOBODY:
        _serve(snapshot, passed_over)
    elif snapshot.plan_address == 0:
        decide_by_shift(snapshot, MARGIN_SHIFT, LONGEST_WAITING, 0)
    else:
        _decide_by_plan(snapshot, record_at(snapshot.plan_address, PLAN).learnt)
