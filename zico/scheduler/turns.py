"""What the policies share: whose turn it is, and the answers that need no prediction. Compiled, over snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled, inlined, record_at
from zico.pool.layout import JobState
from zico.pool.rules import is_no_worse, is_safe
from zico.scheduler.demand import is_iterating, job_at, profile_at, will_end
from zico.scheduler.layout import BLOCKERS, DECISION, NO_TIME, NOBODY, SNAPSHOT, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import DecisionRecord, Snapshot, SnapshotJob

_DECISION_BYTES = DECISION.itemsize
_FEW = 24  # so many are sorted by insertion, without a call
_RUNNING = int(JobState.RUNNING)
_BOUNDARY = int(JobState.BOUNDARY)
_NONE, _ALONE, _MISFIT = int(Reason.NONE), int(Reason.ALONE), int(Reason.MISFIT)

LONGEST_WAITING, SHORTEST, LONGEST, LEAST_SERVED = 0, 1, 2, 3
"""The job comes first that waits longest, that has the shortest or the longest iteration, or that
has got the least lately."""
_FINE = 1 << 20
_OWED = 1 << 40  # above any priority

Array = Any


@inlined
def snapshot_at(address: int) -> Snapshot:
    """Return the snapshot at an address."""
    return record_at(address, SNAPSHOT)


@inlined
def decision_at(snapshot: Snapshot, index: int) -> DecisionRecord:
    """Return the DECISION record of the job at an index."""
    return record_at(snapshot.decisions_address + index * _DECISION_BYTES, DECISION)


@compiled
def in_turn(snapshot: Snapshot) -> NDArray[np.int64]:
    """Return the indices of the jobs at their boundaries: who is owed, then by priority, then who waits longest."""
    return in_order(snapshot, LONGEST_WAITING)


@inlined
def _key(job: SnapshotJob, first: int) -> int:
    if first == LEAST_SERVED:
        return int(job.served * _FINE)
    if job.profile_address == 0:
        return 0
    duration_ns = profile_at(job).duration_ns
    return duration_ns if first == SHORTEST else -duration_ns


@compiled
def in_order(snapshot: Snapshot, first: int) -> NDArray[np.int64]:
    """Return the indices of the jobs at their boundaries.

    Who has got less than it is owed comes before all others, so that priorities starve nobody. Then
    it goes by priority, and among equals by what is to come first.
    """
    waiting = np.empty(snapshot.n, np.int64)
    key = np.empty(snapshot.n, np.int64)
    rank = np.empty(snapshot.n, np.int64)
    n = 0
    ranked = False
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if job.phase == _BOUNDARY:
            waiting[n] = i
            key[n] = job.waiting_since_ns if job.waiting_since_ns != 0 else snapshot.now_ns
            if first != LONGEST_WAITING:
                key[n] = _key(job, first)
            rank[n] = -job.priority - (_OWED if job.served < job.floor else 0)
            ranked = ranked or rank[n] != rank[0]
            n += 1
    if n > _FEW:
        order = np.argsort(key[:n], kind="mergesort")
        if ranked:
            order = order[np.argsort(rank[:n][order], kind="mergesort")]
        return waiting[:n][order]
    for i in range(1, n):
        index, own_key, own = waiting[i], key[i], rank[i]
        at = i
        while at > 0 and (rank[at - 1] > own or (rank[at - 1] == own and key[at - 1] > own_key)):
            waiting[at], key[at], rank[at] = waiting[at - 1], key[at - 1], rank[at - 1]
            at -= 1
        waiting[at], key[at], rank[at] = index, own_key, own
    return waiting[:n]


@compiled
def alone_in(snapshot: Snapshot) -> int:
    """Return the index of the job whose first iteration is growing now, if it still runs, else ``NOBODY``."""
    return snapshot.alone if snapshot.alone >= 0 and job_at(snapshot, snapshot.alone).phase == _RUNNING else NOBODY


@compiled
def starts(snapshot: Snapshot, index: int) -> None:
    """Decide that a job begins its next iteration now."""
    decision = decision_at(snapshot, index)
    decision.starts = 1
    decision.reason = _NONE
    decision.until_ns = NO_TIME
    decision.against = NOBODY
    decision.blockers = 0


@compiled
def waits(snapshot: Snapshot, index: int, reason: int, until_ns: int) -> None:
    """Decide that a job stays at its boundary; who keeps it there is to be added by ``blocked_by``."""
    starts(snapshot, index)
    decision = decision_at(snapshot, index)
    decision.starts = 0
    decision.reason = reason
    decision.until_ns = until_ns


@inlined
def blocked_by(snapshot: Snapshot, index: int, other: int) -> None:
    """Add to those who keep a waiting job at its boundary."""
    decision = decision_at(snapshot, index)
    if decision.against == NOBODY:
        decision.against = other
    if other < BLOCKERS:
        decision.blockers |= np.uint64(1) << np.uint64(other)


@compiled
def waits_for_alone(snapshot: Snapshot, index: int, alone: int) -> None:
    """Wait for the end of a job's first iteration, of which nothing is known."""
    waits(snapshot, index, _ALONE, NO_TIME)
    blocked_by(snapshot, index, alone)


@inlined
def kept_regions(job: SnapshotJob) -> int:
    """Return what of a job stays when its iteration has ended; what it holds now if it is in none that is known."""
    return job.kept if is_iterating(job) else job.held


@compiled
def kept_by_all(snapshot: Snapshot) -> int:
    """Return the regions that stay when all iterations have ended."""
    kept = 0
    for i in range(snapshot.n):
        kept += kept_regions(job_at(snapshot, i))
    return kept


@compiled
def fits_beside_kept(snapshot: Snapshot, index: int, kept: int) -> bool:
    """Tell whether a job's iteration fits once the others' have ended, all keeping ``kept``; true if it is unknown."""
    job = job_at(snapshot, index)
    most = job.held if job.profile_address == 0 else profile_at(job).peak
    return most <= job.held or most + kept - kept_regions(job) <= snapshot.budget


@compiled
def waits_to_fit(snapshot: Snapshot, index: int) -> None:
    """Wait for somebody to leave or to let go of memory that does not come back at the end of an iteration."""
    waits(snapshot, index, _MISFIT, NO_TIME)
    for other in range(snapshot.n):
        if other >= BLOCKERS and decision_at(snapshot, index).against != NOBODY:
            break
        if other != index and kept_regions(job_at(snapshot, other)) > 0:
            blocked_by(snapshot, index, other)


@compiled
def peaks_together(snapshot: Snapshot) -> int:
    """Return what all jobs together could ever hold at once; ``NOBODY`` knows if one has no profile.

    By the same sum the pool lets a job begin that comes to its boundary
    (``boundaries._may_start_unasked``). There a job without a profile counts what it holds, since
    nobody else begins while it grows. Here all would begin at once, and it beside them.
    """
    together = 0
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if job.profile_address == 0:
            return NOBODY
        together += job.most
    return together


@compiled
def unstick(snapshot: Snapshot, order: Array) -> None:
    """Start the first in turn if nobody starts and nobody is left to wait for.

    Its iteration exceeds the budget and will overflow into the next tier of memory: slow, but the
    jobs move. A job that has left is waited for while it still holds something, and one without a
    profile until it is given up.
    """
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        runs = will_end(job) if job.profile_address != 0 else job.given_up == 0
        if (job.phase == _RUNNING and runs) or (job.phase not in (_RUNNING, _BOUNDARY) and job.held > 0):
            return
    for index in order:
        if decision_at(snapshot, index).starts == 1:
            return
    if len(order) > 0:
        starts(snapshot, order[0])


@compiled
def banker_of(snapshot: Snapshot) -> tuple[Array, Array, Array]:
    """Return the state that the banker's rule judges.

    What is free, in an array of one; held, claim, kept in rows; who must finish, who is given up, and scratch in rows.
    """
    free = np.full(1, snapshot.budget, np.int64)
    sums = np.empty((3, snapshot.n), np.int64)
    flags = np.empty((4, snapshot.n), np.uint8)
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        put_debt(job, sums, flags, i)
        free[0] -= job.held
    return free, sums, flags


@inlined
def put_debt(job: SnapshotJob, sums: Array, flags: Array, index: int) -> None:
    """Put what a job has and owes into the banker's rows, as long as it begins no iteration."""
    stays = job.phase == _BOUNDARY and job.must_finish == 1  # a group of which some ranks are inside
    sums[0, index] = job.held
    sums[1, index], sums[2, index] = (job.inside_claim, job.inside_kept) if stays else (job.claim, job.kept)
    flags[0, index], flags[1, index] = job.must_finish, job.given_up


@inlined
def lacks(snapshot: Snapshot, banker: tuple[Array, Array, Array], index: int) -> int:
    """Return the regions that a job at its boundary lacks for its next iteration, with what it yields until then."""
    _free, sums, _flags = banker
    job = job_at(snapshot, index)
    return max(job.claim, job.kept, sums[0, index] + job.yielded) - sums[0, index]


@compiled
def count_in(snapshot: Snapshot, banker: tuple[Array, Array, Array], index: int) -> None:
    """Let the banker's rule take a job for one that has begun its next iteration: it yields nothing more."""
    free, sums, flags = banker
    job = job_at(snapshot, index)
    free[0] -= job.yielded
    sums[0, index] += job.yielded
    sums[1, index], sums[2, index] = job.claim, job.kept
    flags[0, index] |= job.profile_address != 0


@compiled
def may_start(snapshot: Snapshot, banker: tuple[Array, Array, Array], index: int) -> bool:
    """Tell whether the pool would let a job at its boundary begin; counts it among those inside if so."""
    free, sums, flags = banker
    n, must_finish, before = snapshot.n, flags[0], flags[3]
    before[:] = must_finish
    count_in(snapshot, banker, index)
    if is_safe(free[0], sums[0], sums[1], sums[2], must_finish, flags[2], n):
        return True
    counted = must_finish[index]
    may = is_no_worse(free[0], sums[0], sums[1], sums[2], must_finish, flags[1], flags[2], n, index, 0)
    must_finish[:] = before
    if may:
        must_finish[index] = counted
    else:
        job = job_at(snapshot, index)
        free[0] += job.yielded
        put_debt(job, sums, flags, index)
    return may
