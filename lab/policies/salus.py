"""Lanes: jobs share a stretch of memory one iteration at a time, and as many lanes are open as fit.

Whatever the jobs of a lane do, no more than the largest of their needs is used in it. So what all
keep between iterations and the largest need of each lane fit the budget. There is no prediction and
no clock.

Source: P. Yu, M. Chowdhury, "Salus: Fine-Grained GPU Sharing Primitives for Deep Learning
Applications", MLSys 2020; who joins which lane as in its published code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, compiled
from zico.pool.layout import JobState
from zico.scheduler.demand import job_at, profile_at, will_end
from zico.scheduler.layout import NO_TIME, NOBODY, Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.parameters import Parameter, Unit
from zico.scheduler.turns import (
    alone_in,
    blocked_by,
    in_turn,
    kept_by_all,
    kept_regions,
    snapshot_at,
    starts,
    unstick,
    waits,
    waits_for_alone,
    waits_to_fit,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import Snapshot

    Int64s = NDArray[np.int64]

PARAMETERS = (
    Parameter(
        "order",
        "pack",
        Unit.CHOICE,
        "who of a lane is next: who waits longest, who came first, who has least left to do, or who got least lately",
        ("pack", "fifo", "srtf", "fair"),
    ),
    Parameter("lanes", "0", Unit.COUNT, "the most lanes; 0: as many as fit; 1: temporal sharing"),
)
_ORDER, _LANES = range(2)
_FIFO, _SRTF, _FAIR = 1, 2, 3
_N_OPTIONS = len(PARAMETERS)
_FLOAT64 = np.dtype(np.float64)
_LANE, _TURN = int(Reason.LANE), int(Reason.TURN)
_BOUNDARY = int(JobState.BOUNDARY)


@compiled
def lanes_of(snapshot: Snapshot, most: int) -> Int64s:
    """Return each job's lane, by the order in which they came; ``NOBODY`` for one that is unknown or fits into none.

    A job opens a lane as large as its need if that fits, else joins the one that has to grow the
    least for it.
    """
    lanes = np.full(snapshot.n, NOBODY, np.int64)
    sizes = np.zeros(snapshot.n + 1, np.int64)
    n = 0
    free = snapshot.budget - kept_by_all(snapshot)
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if job.profile_address == 0:
            continue
        need = max(0, profile_at(job).peak - kept_regions(job))
        if need <= free and (most == 0 or n < most):
            lanes[i], sizes[n] = n, need
            free -= need
            n += 1
            continue
        for lane in range(n):
            growth = max(0, need - sizes[lane])
            least = max(0, need - sizes[lanes[i]]) if lanes[i] != NOBODY else free + 1
            lanes[i] = lane if growth < least else lanes[i]
        if lanes[i] != NOBODY:
            growth = max(0, need - sizes[lanes[i]])
            sizes[lanes[i]] += growth
            free -= growth
    return lanes


@compiled
def _rank(snapshot: Snapshot, index: int, order: int) -> float:
    """Return what a job of a lane is chosen by: the least goes first."""
    job = job_at(snapshot, index)
    if order == _FIFO:
        return float(index)
    if order == _SRTF:
        return float(max(1, job.left)) * profile_at(job).duration_ns
    return job.served / job.weight if order == _FAIR else 0.0


@compiled
def _best(snapshot: Snapshot, waiting: Int64s, lanes: Int64s, lane: int, order: int) -> int:
    """Return whose turn it is in a lane."""
    best, least = NOBODY, 0.0
    for index in waiting:
        if lanes[index] == lane:
            rank = _rank(snapshot, index, order)
            if best == NOBODY or rank < least:
                best, least = index, rank
    return best


@compiled
def _occupants(snapshot: Snapshot, lanes: Int64s) -> Int64s:
    """Return who is inside an iteration in each lane."""
    occupants = np.full(snapshot.n + 1, NOBODY, np.int64)
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if will_end(job) and lanes[i] != NOBODY:
            occupants[lanes[i]] = i
    return occupants


@compiled
def _waits_for(snapshot: Snapshot, index: int, reason: int, other: int) -> None:
    waits(snapshot, index, reason, NO_TIME)
    blocked_by(snapshot, index, other)


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Start in each lane in which nobody is inside an iteration whose turn it is."""
    snapshot = snapshot_at(snapshot_address)
    options = array_at(snapshot.options_address, _N_OPTIONS, _FLOAT64)
    waiting, alone = in_turn(snapshot), alone_in(snapshot)
    lanes = lanes_of(snapshot, int(options[_LANES]))
    occupants = _occupants(snapshot, lanes)
    busy = int(np.max(occupants))
    for index in waiting:
        lane = lanes[index]
        if alone != NOBODY:
            waits_for_alone(snapshot, index, alone)
        elif job_at(snapshot, index).profile_address == 0:
            if busy == NOBODY:
                starts(snapshot, index)
                alone = index
            else:
                _waits_for(snapshot, index, _TURN, busy)
        elif lane == NOBODY:
            waits_to_fit(snapshot, index)
        elif occupants[lane] != NOBODY:
            _waits_for(snapshot, index, _LANE, int(occupants[lane]))
        else:
            chosen = _best(snapshot, waiting, lanes, lane, int(options[_ORDER]))
            occupants[lane] = busy = chosen
            if chosen == index:
                starts(snapshot, index)
            else:
                _waits_for(snapshot, index, _LANE, chosen)
    for lane in range(snapshot.n):
        chosen = occupants[lane]
        if alone == NOBODY and chosen != NOBODY and job_at(snapshot, chosen).phase == _BOUNDARY:
            starts(snapshot, chosen)
    unstick(snapshot, waiting)


POLICY = Compiled(
    "salus",
    decide,
    self_admit=False,
    parameters=PARAMETERS,
    knows="peak, persistent memory; for srtf what is left to do",
)
