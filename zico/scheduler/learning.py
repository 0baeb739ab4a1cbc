"""Which of a plan's ways is in use: the one that is worth the most by what it promised and by what it then gave.

Theory of operation
    A promise comes from profiles, which may be wrong, and from times, which vary. So a way that is in use is measured,
    and its worth is the mean of both, the promise counting as much as so many rounds of use. The best is used::

        promised        .90   .84         the first is used
        gives           .70     -
        worth after it  .83   .84         the second is tried; if it gives .75, it is worth .82 before long,
                                          and the first comes back

    A way that was not tried is worth what it promised: so whatever promises more than what is had gets its trial, a
    bad one is left within a few rounds, and in the end the one is used that gives the most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled
from zico.scheduler.demand import is_iterating, job_at, position_ns, profile_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_WAYS = 12
MOST_JOBS = 64
"""Of whom what they get is measured."""
PROMISE_ROUNDS = 12.0
"""A round is an iteration of the longest job; a promise counts as much as so many of use."""
_LOOK_ROUNDS = 2  # between two measurements
_SETTLE_ROUNDS = 4  # after a change, not measured
_MOST_ROUNDS = 512.0  # what lies further back counts less and less
_BETTER_BY = 0.008
_OWED = 0.97  # of its floor: an iteration more or less must not decide

WAY = np.dtype([("way", "i8"), ("setting", "i8"), ("promise", "f8"), ("gain", "f8"), ("rounds", "f8")], align=True)
"""A way, what it promised, and what it gave in so many rounds of use; both in rounds of all jobs running alone."""

LEARNT = np.dtype(
    [
        ("n_jobs", "i8"),
        ("jobs", "i8", (MOST_JOBS,)),  # their numbers
        ("worth", "f8", (MOST_JOBS,)),  # of an iteration of each, in rounds
        ("round_ns", "i8"),
        ("n_ways", "i8"),
        ("ways", WAY, (MOST_WAYS,)),
        ("used", "i8"),
        ("since_ns", "i8"),  # what was done until then is counted
        ("done", "f8"),
    ],
    align=True,
)
"""What is known of some jobs and of the ways to decide on them."""

Record = Any


@compiled
def is_of(known: Record, scene: Record) -> bool:
    """Tell whether the scene is of the jobs that this is about."""
    if scene.n != known.n_jobs:
        return False
    for i in range(scene.n):
        if job_at(scene, i).number != known.jobs[i]:
            return False
    return True


@compiled
def _done(known: Record, scene: Record) -> float:
    """Return what the jobs have done since ever."""
    done = 0.0
    for i in range(scene.n):
        job = job_at(scene, i)
        iterations = float(job.iteration)
        if is_iterating(job):
            iterations += position_ns(job, scene.now_ns) / max(1, profile_at(job).duration_ns)
        done += known.worth[i] * iterations
    return done


@compiled
def _lacking(scene: Record) -> float:
    """Return what the jobs lack of what they are owed, together."""
    lacking = 0.0
    for i in range(scene.n):
        job = job_at(scene, i)
        lacking += max(0.0, _OWED * job.floor - job.served)
    return lacking


@compiled
def _value(way: Record) -> float:
    return (way.promise * PROMISE_ROUNDS + way.gain) / (PROMISE_ROUNDS + way.rounds)


@compiled
def learn(known: Record, scene: Record) -> None:
    """Measure the way in use, and change it if another one is worth more."""
    if known.n_ways < 2 or (known.since_ns != 0 and scene.now_ns < known.since_ns + _LOOK_ROUNDS * known.round_ns):  # noqa: PLR2004 - nothing to choose
        return
    if not is_of(known, scene):
        known.since_ns = 0
        return
    done = _done(known, scene)
    if known.since_ns == 0:
        _measure_from(known, scene.now_ns + (_SETTLE_ROUNDS - _LOOK_ROUNDS) * known.round_ns, -1.0)
        return
    if known.done < 0:
        _measure_from(known, scene.now_ns, done)
        return
    used = known.ways[known.used]
    rounds = (scene.now_ns - known.since_ns) / known.round_ns
    used.rounds += rounds
    used.gain += done - known.done - _lacking(scene) * rounds
    if used.rounds > _MOST_ROUNDS:
        used.gain *= _MOST_ROUNDS / used.rounds
        used.rounds = _MOST_ROUNDS
    _measure_from(known, scene.now_ns, done)
    best = known.used
    worth = _value(used) + _BETTER_BY
    for i in range(known.n_ways):
        if i != known.used and _value(known.ways[i]) > worth:
            best, worth = i, _value(known.ways[i])
    if best != known.used:
        known.used = best
        _measure_from(known, scene.now_ns + (_SETTLE_ROUNDS - _LOOK_ROUNDS) * known.round_ns, -1.0)


@compiled
def _measure_from(known: Record, since_ns: int, done: float) -> None:
    known.since_ns = since_ns
    known.done = done
