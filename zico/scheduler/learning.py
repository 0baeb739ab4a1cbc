"""Which of a plan's ways is in use: the one that is worth the most by what it promised and by what it then gave.

Theory of operation
    A promise comes from profiles, which may be wrong, and from times, which vary. So a way that is in
    use is measured, and its worth is the mean of both. The promise counts as much as
    ``PROMISE_ROUNDS`` of use. The best is used::

        promised        .90   .84         the first is used
        gives           .70     -
        worth after it  .83   .84         the second is tried; if it gives .75, it is worth .82 before long,
                                          and the first comes back

    A way that was not tried is worth what it promised: so whatever promises more than what is had
    gets its trial, a bad one is left within a few rounds, and in the end the one is used that gives
    the most.

    What a way gives is the time that jobs do not wait. Iterations that take longer for another
    reason, such as a neighbour on the machine, count neither for nor against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from zico.base.compiled import compiled
from zico.base.records import F8, I8, Numbers, Record, Records
from zico.scheduler.demand import job_at

if TYPE_CHECKING:
    from zico.scheduler.layout import Snapshot

MOST_WAYS = 6
MOST_JOBS = 64
"""Of so many jobs it is measured what they get."""
PROMISE_ROUNDS = 12.0
"""A round is an iteration of the longest job; a promise counts as much as so many of use."""
LOOK_ROUNDS = 8
"""The way in use is measured once in so many rounds. After a change half as many are not measured."""
_FORGETS = 0.01  # of what a way gave, at each look while another is used: some day it gets another trial
_MOST_ROUNDS = 512.0  # what lies further back counts less and less
BETTER_BY = 0.008
"""So much more another way has to be worth before it is used."""
_CHOICE = 2
OWED = 0.97
"""A job lacks what it gets below so much of its floor: an iteration more or less must not decide."""


class WayRecord(Record):
    """A way, what it promised, and for how many of the rounds of its use each job did not wait."""

    way: I8
    setting: I8
    promise: F8
    rounds: F8
    got: Annotated[Numbers, "f8", (MOST_JOBS,)]


class Learnt(Record):
    """What is known of some jobs and of the ways to decide on them."""

    n_jobs: I8
    jobs: Annotated[Numbers, "i8", (MOST_JOBS,)]  # their numbers
    worth: Annotated[Numbers, "f8", (MOST_JOBS,)]  # what the throughput of each counts; together 1
    round_ns: I8
    n_ways: I8
    ways: Annotated[Records[WayRecord], WayRecord, (MOST_WAYS,)]
    used: I8
    since_ns: I8  # what was waited until then is counted
    counts: I8  # 0: from then on nothing is, until things have settled
    waited_ns: Annotated[Numbers, "i8", (MOST_JOBS,)]  # by each job, until then
    gathers: I8  # before the way in use decides, all come to their boundaries
    gathered_ns: I8  # when they were; 0: never


@compiled
def is_of(known: Learnt, snapshot: Snapshot) -> bool:
    """Tell whether the snapshot is of the jobs that this is about."""
    if snapshot.n != known.n_jobs:
        return False
    for i in range(snapshot.n):  # noqa: SIM110 - compiled
        if job_at(snapshot, i).job != known.jobs[i]:
            return False
    return True


@compiled
def _waited_ns(snapshot: Snapshot, index: int) -> int:
    job = job_at(snapshot, index)
    return job.waited_ns + (snapshot.now_ns - job.waiting_since_ns if job.waiting_since_ns != 0 else 0)


@compiled
def _gave(known: Learnt, snapshot: Snapshot, way: WayRecord) -> float:
    """Return what a way that was used gave, less what jobs lacked of what they are owed."""
    gave = 0.0
    for i in range(snapshot.n):
        share = way.got[i] / way.rounds
        gave += known.worth[i] * share - max(0.0, OWED * job_at(snapshot, i).floor - share)
    return gave


@compiled
def _value(known: Learnt, snapshot: Snapshot, way: WayRecord) -> float:
    """Return what a way is worth: the mean of what it promised and gave."""
    if way.rounds == 0.0:
        return way.promise
    gave = _gave(known, snapshot, way)
    return (way.promise * PROMISE_ROUNDS + gave * way.rounds) / (PROMISE_ROUNDS + way.rounds)


@compiled
def learn(known: Learnt, snapshot: Snapshot) -> None:
    """Measure the way in use, and change it if another one is worth more."""
    if known.n_ways < _CHOICE:
        return
    if known.since_ns != 0 and snapshot.now_ns < known.since_ns + LOOK_ROUNDS * known.round_ns:
        return
    if not is_of(known, snapshot):
        known.since_ns = 0
    elif known.since_ns == 0:
        _settle(known, snapshot)
    else:
        if known.counts:
            _count(known, snapshot)
            if _changes(known, snapshot):
                _settle(known, snapshot)
                return
        known.since_ns, known.counts = snapshot.now_ns, 1
        for i in range(snapshot.n):
            known.waited_ns[i] = _waited_ns(snapshot, i)


@compiled
def _settle(known: Learnt, snapshot: Snapshot) -> None:
    known.since_ns, known.counts = snapshot.now_ns - LOOK_ROUNDS // 2 * known.round_ns, 0


@compiled
def _count(known: Learnt, snapshot: Snapshot) -> None:
    """Count for the way in use what jobs have not waited since the last look."""
    used = known.ways[known.used]
    passed_ns = snapshot.now_ns - known.since_ns
    rounds = passed_ns / known.round_ns
    keeps = min(1.0, _MOST_ROUNDS / (used.rounds + rounds))
    used.rounds = keeps * (used.rounds + rounds)
    for i in range(snapshot.n):
        waited_ns = max(0, _waited_ns(snapshot, i) - known.waited_ns[i])  # below 0 for one in another's place
        used.got[i] = keeps * (used.got[i] + max(0, passed_ns - waited_ns) / known.round_ns)


@compiled
def _changes(known: Learnt, snapshot: Snapshot) -> bool:
    """Use the way that is worth the most, if it is worth noticeably more; tells whether that is another one."""
    best = known.used
    worth = _value(known, snapshot, known.ways[best]) + BETTER_BY
    for i in range(known.n_ways):
        way = known.ways[i]
        if i == known.used:
            continue
        way.rounds *= 1 - _FORGETS
        for k in range(snapshot.n):
            way.got[k] *= 1 - _FORGETS
        value = _value(known, snapshot, way)
        if value > worth:
            best, worth = i, value
    changes = best != known.used
    known.used = best
    if changes and known.gathered_ns != 0:
        known.gathers = 1
    return changes
