"""What the policies share: whose turn it is, and the answers that need no prediction. Compiled, over scenes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import compiled, inlined, record_at
from zico.pool.layout import JobState
from zico.scheduler.demand import claim_of, is_iterating, job_at, profile_at
from zico.scheduler.layout import BLOCKERS, DECISION, NO_TIME, NOBODY, SCENE, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import DecisionRecord, Scene, SceneJob

_DECISION_BYTES = DECISION.itemsize
_FEW = 24  # so many are sorted by insertion, without a call
_RUNNING = int(JobState.RUNNING)
_BOUNDARY = int(JobState.BOUNDARY)
_NONE, _ALONE, _MISFIT = int(Reason.NONE), int(Reason.ALONE), int(Reason.MISFIT)

LONGEST_WAITING, SHORTEST, LONGEST, LEAST_SERVED = 0, 1, 2, 3
"""The job that comes first: the one that waits longest, that of the shortest or of the longest iteration, the one that
has got the least lately."""
_FINE = 1 << 20
_OWED = 1 << 40  # above any priority

Array = Any


@inlined
def scene_at(address: int) -> Scene:
    """Return the scene at an address."""
    return record_at(address, SCENE)


@inlined
def decision_at(scene: Scene, index: int) -> DecisionRecord:
    """Return the DECISION record of the job at an index."""
    return record_at(scene.decisions_address + index * _DECISION_BYTES, DECISION)


@compiled
def in_turn(scene: Scene) -> NDArray[np.int64]:
    """Return the indices of the jobs at their boundaries: who is owed, then by priority, then who waits longest."""
    return in_order(scene, LONGEST_WAITING)


@inlined
def _key(job: SceneJob, first: int) -> int:
    """Return what is least for the job that comes first."""
    if first == LEAST_SERVED:
        return int(job.served * _FINE)
    if job.profile_address == 0:
        return 0
    duration_ns = profile_at(job).duration_ns
    return duration_ns if first == SHORTEST else -duration_ns


@compiled
def in_order(scene: Scene, first: int) -> NDArray[np.int64]:
    """Return the indices of the jobs at their boundaries.

    Who has got less than it is owed comes before all others, so that priorities starve nobody; then it goes by
    priority, and among equals by what is to come first.
    """
    waiting = np.empty(scene.n, np.int64)
    key = np.empty(scene.n, np.int64)
    rank = np.empty(scene.n, np.int64)
    n = 0
    ranked = False
    for i in range(scene.n):
        job = job_at(scene, i)
        if job.phase == _BOUNDARY:
            waiting[n] = i
            key[n] = job.waiting_since_ns if job.waiting_since_ns != 0 else scene.now_ns
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
def alone_in(scene: Scene) -> int:
    """Return the index of the job whose first iteration is growing now, if it still runs, else ``NOBODY``."""
    return scene.alone if scene.alone >= 0 and job_at(scene, scene.alone).phase == _RUNNING else NOBODY


@compiled
def starts(scene: Scene, index: int) -> None:
    """Decide that a job begins its next iteration now."""
    decision = decision_at(scene, index)
    decision.starts = 1
    decision.reason = _NONE
    decision.until_ns = NO_TIME
    decision.against = NOBODY
    decision.blockers = 0


@compiled
def waits(scene: Scene, index: int, reason: int, until_ns: int) -> None:
    """Decide that a job stays at its boundary; who keeps it there is to be added by ``blocked_by``."""
    starts(scene, index)
    decision = decision_at(scene, index)
    decision.starts = 0
    decision.reason = reason
    decision.until_ns = until_ns


@inlined
def blocked_by(scene: Scene, index: int, other: int) -> None:
    """Add to those who keep a waiting job at its boundary."""
    decision = decision_at(scene, index)
    if decision.against == NOBODY:
        decision.against = other
    if other < BLOCKERS:
        decision.blockers |= np.uint64(1) << np.uint64(other)


@compiled
def waits_for_alone(scene: Scene, index: int, alone: int) -> None:
    """Wait for the end of a job's first iteration, of which nothing is known."""
    waits(scene, index, _ALONE, NO_TIME)
    blocked_by(scene, index, alone)


@inlined
def kept_regions(job: SceneJob) -> int:
    """Return what of a job stays when its iteration has ended; what it holds now if it is in none that is known."""
    return job.kept if is_iterating(job) else job.held


@compiled
def kept_by_all(scene: Scene) -> int:
    """Return the regions that stay when all iterations have ended."""
    kept = 0
    for i in range(scene.n):
        kept += kept_regions(job_at(scene, i))
    return kept


@compiled
def fits_beside_kept(scene: Scene, index: int, kept: int) -> bool:
    """Tell whether a job's iteration fits once the others' have ended, all keeping ``kept``; true if it is unknown."""
    job = job_at(scene, index)
    most = job.held if job.profile_address == 0 else profile_at(job).peak
    return most <= job.held or most + kept - kept_regions(job) <= scene.budget


@compiled
def waits_to_fit(scene: Scene, index: int) -> None:
    """Wait for somebody to leave or to let go of memory that does not come back at the end of an iteration."""
    waits(scene, index, _MISFIT, NO_TIME)
    for other in range(scene.n):
        if other >= BLOCKERS and decision_at(scene, index).against != NOBODY:
            break
        if other != index and kept_regions(job_at(scene, other)) > 0:
            blocked_by(scene, index, other)


@compiled
def peaks_together(scene: Scene) -> int:
    """Return what all jobs together could ever hold at once; ``NOBODY`` knows if one has no profile."""
    together = 0
    for i in range(scene.n):
        job = job_at(scene, i)
        if job.profile_address == 0:
            return NOBODY
        together += max(profile_at(job).peak, job.held, job.persistent)
    return together


@compiled
def unstick(scene: Scene, order: Array) -> None:
    """Start the first in turn if nobody starts and nobody is left to wait for.

    Its iteration exceeds the budget and will overflow into the next tier of memory: slow, but the jobs move.
    """
    if len(order) == 0 or len(order) < scene.n:
        return
    for index in order:
        if decision_at(scene, index).starts == 1:
            return
    starts(scene, order[0])


@compiled
def banker_of(scene: Scene) -> tuple[int, Array, Array]:
    """Return the state that the banker's rule judges: what is free; held, claim, residual in rows; who must finish."""
    sums = np.empty((3, scene.n), np.int64)
    flags = np.zeros((2, scene.n), np.uint8)
    free = scene.budget
    for i in range(scene.n):
        job = job_at(scene, i)
        free -= job.held
        sums[0, i] = job.held
        sums[1, i] = claim_of(job)
        sums[2, i] = job.held if job.profile_address == 0 else job.persistent  # what was evicted or lent comes back
        flags[0, i] = is_iterating(job)
    return free, sums, flags
