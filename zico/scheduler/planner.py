"""What ``zico`` works out about the jobs that are there, apart from its decisions and in its own time.

Theory of operation
    No rule tells which way is best for given jobs, and a pair's best schedule is made of cells and may be off by a few.
    So every way is tried on the jobs' profiles in the simulator, with times as they are and with times that vary, and
    the good ones are the plan, the best first. While it is in use, they are measured (``zico.scheduler.learning``).

Guarantees
    * On exact profiles no way that was tried gets the jobs noticeably further, over the time that was simulated.
    * A job's floor counts: a way that gives a job less than it is owed is taken only if all others are as unfair.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.scheduler import torus
from zico.scheduler.claiming import EVERYBODY
from zico.scheduler.learning import BETTER_BY, MOST_JOBS, MOST_WAYS
from zico.scheduler.packed import packed
from zico.scheduler.pair import solve
from zico.scheduler.planned import FIRST_FIT, FIRST_SHIFT, PLAN, Way
from zico.scheduler.shares import floors, worths
from zico.scheduler.shifting import MARGIN_SHIFT
from zico.scheduler.simulate import Load, load_of
from zico.scheduler.state import PoolView
from zico.scheduler.trials import FEW, Trials, Tried, tried
from zico.scheduler.turns import LEAST_SERVED, LONGEST, LONGEST_WAITING, SHORTEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from zico.scheduler.state import PoolView

    Records = npt.NDArray[np.void]

_MANY = 16  # jobs; more are left to shift: a plan would take longer to make than jobs stay the same
_ALIKE = 0.005
_HOPEFUL = 0.9  # a way that promises less than so much of the best is not tried for real
_NO_MARGIN = 62
_PAIR = 2
_GREEDY = ((Way.SHIFT, MARGIN_SHIFT), (Way.CLAIMS, EVERYBODY))
_WIDE_MARGIN = 3
_SHIFTS = (
    *(_NO_MARGIN | first << FIRST_SHIFT for first in (LONGEST_WAITING, SHORTEST, LONGEST)),
    *(_NO_MARGIN | FIRST_FIT | first << FIRST_SHIFT for first in (LONGEST_WAITING, SHORTEST, LONGEST, LEAST_SERVED)),
    _WIDE_MARGIN | FIRST_FIT,
)
"""Settings of shift: without a margin every iteration reserved, then first fit. A wide margin keeps jobs apart, so that
they come into cycles which jobs that begin close together do not reach."""
_UNEVEN = 0.1
_DURATION_SHIFT = 4
_PEAK_SHIFT = 5
"""A profile is another one when it takes a sixteenth longer or shorter, or holds a 32nd more or less: a plan's cells
are no finer, and profiles grow a little with every iteration. So it is where its jitter is ``_UNEVEN`` more or less."""


class Known(NamedTuple):
    """What of a job a plan is for."""

    job: int
    peak: int
    kept: int
    duration_ns: int
    asked: tuple[float, float, int]
    """Floor, weight and priority."""
    jitter: float


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A PLAN record, which this keeps, and what its first way promises."""

    record: Records
    mean: float = 0.0
    """The jobs' throughput over alone's, by weight."""
    made_for: PoolView | None = None

    def does_for(self, pool: PoolView) -> bool:
        """Tell whether it does for a pool as well: the same budget, and jobs that are nearly the same."""
        mine = self.made_for
        return (
            mine is not None
            and (mine.budget, mine.slowdown, len(mine.jobs)) == (pool.budget, pool.slowdown, len(pool.jobs))
            and alike(known_of(mine), known_of(pool))
        )

    @property
    def address(self) -> int:
        """Return where the record is."""
        return self.record.ctypes.data


def plan(pool: PoolView) -> Plan | None:
    """Return the best of the ways for these jobs; ``None`` if there is nothing to choose, or they are too many.

    Jobs without a profile are left out. A plan that the pool has already is kept where it does for these jobs.
    """
    if isinstance(pool.plan, Plan) and pool.plan.does_for(pool):
        return pool.plan
    loads = [load_of(job, job.profile) for job in pool.jobs if job.profile is not None]
    if not _PAIR <= len(loads) <= _MANY or sum(load.profile.peak for load in loads) <= pool.budget:
        return None
    if len(loads) > FEW and len(loads) < len(pool.jobs):
        return None  # soon they are all known, and out of the convoy that claims make of many jobs it is a long way
    loads = [dataclasses.replace(load, floor=floor) for load, floor in zip(loads, floors(loads), strict=True)]
    record = _record(pool, loads)
    ways = _ways(record, pool, loads)  # fills in the schedules that the trials use
    few = len(loads) <= FEW
    record[0]["learnt"]["gathers"] = few
    first = _chosen(record, tried(Trials(record, loads, pool), ways, _GREEDY, many=not few))
    if isinstance(pool.plan, Plan) and _goes_on(pool.plan.record, record):
        for field in ("gathers", "gathered_ns"):
            record[0]["learnt"][field] = pool.plan.record[0]["learnt"][field]
    return Plan(record, first.mean, dataclasses.replace(pool, plan=None))


def _goes_on(before: Records, record: Records) -> bool:
    """Tell whether the way in use is that of the plan before, so that jobs are in its cycle already."""
    one, other = before[0]["learnt"], record[0]["learnt"]
    n = int(one["n_jobs"])
    if n != other["n_jobs"] or (one["jobs"][:n] != other["jobs"][:n]).any():
        return False
    used = (known["ways"][int(known["used"])] for known in (one, other))
    return len({(int(way["way"]), int(way["setting"])) for way in used}) == 1


def known_of(pool: PoolView) -> tuple[Known, ...]:
    """Return what a plan for these jobs is for; those without a profile are left out."""
    return tuple(
        Known(
            job.job,
            job.profile.peak,
            job.kept,
            job.profile.duration_ns,
            (job.floor, job.weight, job.priority),
            job.jitter,
        )
        for job in pool.jobs
        if job.profile is not None
    )


def alike(some: Sequence[Known], others: Sequence[Known]) -> bool:
    """Tell whether what was planned for some does for others."""
    return len(some) == len(others) and all(
        (a.job, a.asked) == (b.job, b.asked)
        and abs(a.duration_ns - b.duration_ns) <= b.duration_ns >> _DURATION_SHIFT
        and abs(a.peak - b.peak) <= max(1, b.peak >> _PEAK_SHIFT)
        and abs(a.kept - b.kept) <= max(1, b.peak >> _PEAK_SHIFT)
        and abs(a.jitter - b.jitter) <= _UNEVEN
        for a, b in zip(some, others, strict=True)
    )


def _record(pool: PoolView, loads: Sequence[Load]) -> Records:
    """Return a plan without ways; with more jobs than it has room for, or strangers, nothing is learnt."""
    record = np.zeros(1, PLAN)
    if len(loads) == len(pool.jobs) <= MOST_JOBS:
        longest_ns = max(load.profile.duration_ns for load in loads)
        known = record[0]["learnt"]
        known["n_jobs"], known["round_ns"] = len(loads), longest_ns
        known["jobs"][: len(loads)] = [job.job for job in pool.jobs]
        known["worth"][: len(loads)] = worths(loads)
        known["length"][: len(loads)] = [load.profile.duration_ns / longest_ns for load in loads]
    return record


def _ways(record: Records, pool: PoolView, loads: Sequence[Load]) -> list[tuple[Way, int]]:
    """Return the ways to try, each with a setting."""
    ways = [*_GREEDY, *((Way.SHIFT, setting) for setting in _SHIFTS)]
    if len(loads) > FEW:
        return ways
    ways += [(Way.CLAIMS, most) for most in _limits(len(loads))]
    if len(loads) == _PAIR == len(pool.jobs):
        profiles = [packed(load.profile) for load in loads]  # to be kept while their addresses are used
        a, b = (profile.ctypes.data for profile in profiles)
        keeps = np.array([load.persistent for load in loads], np.int64)
        together = pool.slowdown[min(_PAIR, len(pool.slowdown) - 1)]
        if solve(a, b, keeps, pool.budget, together, np.array(worths(loads)), record[0]["pairs"][0]):
            ways.append((Way.PAIR, 0))
    elif len(loads) == len(pool.jobs) and torus.solve(
        loads, pool.budget, np.array(worths(loads)), pool.slowdown, record[0]["torus"]
    ):
        ways.append((Way.TORUS, 0))
    return ways


def _limits(n: int) -> list[int]:
    """Return how many of so many jobs may be inside: every number if they are few, else some."""
    return sorted({n // 4, n // 2, 3 * n // 4, n - 1} - {0}) if n > torus.MOST_JOBS else list(range(1, n))


def _as_good(score: float, best: float) -> bool:
    """Tell whether a score is as good as the best; where jobs lack much of their floors, scores are below 0."""
    return score >= best - _ALIKE * abs(best)


def _chosen(record: Records, tried: list[Tried]) -> Tried:
    """Fill in the plan's ways, and return the first: the best, before the others that may turn out to be better.

    Of those that are expected to give the most, the best where times vary more; of those as good as that, the fairest.
    """
    most = max(one.expected for one in tried)
    good = [one for one in tried if _as_good(one.expected, most)]
    best = max(one.score for one in good)
    first = max((one for one in good if _as_good(one.score, best)), key=lambda one: one.least)
    promised = max(one.promise for one in tried)
    same = {(one.way, one.runs, one.sturdy): one for one in reversed(tried)}  # the first of those that are alike
    rest = [one for one in same.values() if one is not first]
    hopeful = [one for one in rest if one.promise >= _HOPEFUL * promised and one.key not in _GREEDY]
    rest = [one for one in rest if one.key in _GREEDY]
    rest += sorted(hopeful, key=lambda one: -one.promise)[: MOST_WAYS - len(rest) - 1]
    rest.sort(key=lambda one: -one.promise)
    known = record[0]["learnt"]
    known["n_ways"] = 1 + len(rest)
    for way, one in zip(known["ways"], [first, *rest], strict=False):
        way["way"], way["setting"], way["promise"] = one.way, one.setting, one.promise
    promises = known["ways"]["promise"][: 1 + len(rest)]
    known["used"] = int(np.argmax(promises - BETTER_BY * (np.arange(len(promises)) > 0)))
    return first
