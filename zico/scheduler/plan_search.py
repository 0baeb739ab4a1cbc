"""What ``zico`` works out about the jobs that are there, apart from its decisions and in its own time.

Theory of operation
    No rule tells which way is best for given jobs, and a best schedule is made of cells and may be
    off by a few. So every way is tried on the jobs' profiles in the simulator. What jobs get is a
    cycle that they settle into. Which one depends on where they stand when it begins: all at their
    boundaries, in a trial as in use (``zico.scheduler.plan``). What a way gave there is its promise.
    The good ways are the plan, the best first. While it is in use, they are measured
    (``zico.scheduler.learning``).

Guarantees
    * On exact profiles no way that was tried gets the jobs noticeably further, over the time that
      was simulated.
    * A job's floor counts: a way that gives a job less than it is owed is taken only if all others
      are as unfair.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from zico.pool.rules import FADE_ITERATIONS
from zico.scheduler import best_schedule
from zico.scheduler.greedy import EVERYBODY, MARGIN_SHIFT
from zico.scheduler.learning import BETTER_BY, LOOK_ROUNDS, MOST_JOBS, MOST_WAYS, OWED
from zico.scheduler.packed import Compiled
from zico.scheduler.plan import FIRST_FIT, FIRST_SHIFT, PLAN, Way, decide
from zico.scheduler.shares import floors, worths
from zico.scheduler.simulate import Load, Simulation, load_of
from zico.scheduler.state import Capabilities, PoolView
from zico.scheduler.turns import LEAST_SERVED, LONGEST, LONGEST_WAITING, SHORTEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Records = npt.NDArray[np.void]


FEW = 8
"""More jobs than these few have fewer ways, and do not come to their boundaries before one begins."""
_ITERATIONS = 40
"""A trial lasts so many of the longest job's, after the warm-up."""
_LEAST_ITERATIONS = 4
_MOST_ITERATIONS = 4_000  # of all jobs: one that is a thousand times shorter than its neighbour must not take seconds
_UNFAIR = 8.0  # times what jobs lack of their floors: no throughput of others makes up for it
AT_BOUNDARIES = Capabilities(asks=True, offline=True)
"""Jobs of a trial begin at their boundaries with known profiles: as many first iterations, one at a time, would be what
is measured."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A way and what came of it."""

    way: Way
    setting: int
    score: float
    """The jobs' throughput over alone's, by weight, less what they lack of what they are owed."""
    mean: float
    least: float
    """The least that a job got."""

    @property
    def key(self) -> tuple[Way, int]:
        """Return the way and its setting."""
        return self.way, self.setting


def mean_of(got: Sequence[float], worth: Sequence[float]) -> float:
    """Return the mean by weight of what jobs get of their throughputs alone."""
    return sum(each * x for each, x in zip(worth, got, strict=True))


def score_of(got: Sequence[float], owed: Sequence[float], worth: Sequence[float]) -> float:
    """Return the same less what jobs lack of what they are owed, which no throughput of others makes up for."""
    lacking = sum(max(0.0, OWED * floor - x) for floor, x in zip(owed, got, strict=True))
    return mean_of(got, worth) - _UNFAIR * lacking


@dataclasses.dataclass(frozen=True, eq=False)
class _Trial:
    """The plan of a trial."""

    record: Records

    @property
    def address(self) -> int:
        return self.record.ctypes.data


class Trials:
    """Simulates jobs under one way after the other."""

    def __init__(self, record: Records, loads: Sequence[Load], pool: PoolView) -> None:
        self._trial = record.copy()
        known = self._trial[0]["learnt"]
        known["n_ways"] = 1  # nothing to learn
        n = len(loads)
        if n <= MOST_JOBS:
            known["n_jobs"], known["jobs"][:n] = n, range(n)
        self._loads, self._pool, self._worth = loads, pool, worths(loads)
        self._longest_ns = max(load.profile.duration_ns for load in loads)
        per_round = sum(self._longest_ns / load.profile.duration_ns for load in loads)
        self._rounds = min(
            _ITERATIONS if n <= best_schedule.MOST_JOBS else _ITERATIONS // 2,
            max(_LEAST_ITERATIONS, int(_MOST_ITERATIONS / per_round)),
        )

    def run(self, way: Way, setting: int) -> Tried:
        """Return what comes of a way."""
        trial = self._trial.copy()  # which is written to
        first = trial[0]["learnt"]["ways"][0]
        first["way"], first["setting"] = way, setting
        owed = [load.floor for load in self._loads]
        policy = Compiled("", decide, plan=lambda _view: _Trial(trial), capabilities=AT_BOUNDARIES)
        simulation = Simulation(policy, self._loads, self._pool.budget, slowdown=self._pool.slowdown)
        # A job begins with its floor behind it. If it began with more, it could be passed over for
        # a whole trial, and the others would get what they cannot keep.
        served_ns = FADE_ITERATIONS * np.array([load.profile.duration_ns for load in self._loads])
        simulation.sim_jobs["served_work"], simulation.sim_jobs["served_time"] = owed * served_ns, served_ns
        warm_up_ns = LOOK_ROUNDS * self._longest_ns
        got = simulation.run(warm_up_ns + self._rounds * self._longest_ns, warm_up_ns).normalised
        return Tried(way, setting, score_of(got, owed, self._worth), mean_of(got, self._worth), min(got))


_MANY = 16  # jobs; more are left to shift: a plan would take longer to make than jobs stay the same
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
"""A profile is another one when it takes a sixteenth longer or shorter, or holds a 32nd more or
less. A plan's cells are no finer, and profiles grow a little with every iteration. So it is where
its jitter is ``_UNEVEN`` more or less."""


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

    def holds_for(self, pool: PoolView) -> bool:
        """Tell whether its jobs hold nearly the same there, in the same budget, however long they take."""
        mine = self.made_for
        return (
            mine is not None
            and mine.budget == pool.budget
            and len(mine.jobs) == len(pool.jobs)
            and all(_hold_alike(a, b) for a, b in zip(known_of(mine), known_of(pool), strict=False))
        )

    @property
    def learnt(self) -> np.void:
        """Return its ways, and what they have given."""
        return cast("np.void", self.record[0]["learnt"])

    @property
    def address(self) -> int:
        """Return where the record is."""
        return self.record.ctypes.data


def plan(pool: PoolView) -> Plan | None:
    """Return the best of the ways for these jobs; ``None`` if there is nothing to choose, or they are too many.

    Jobs whose iterations are not known are left out. A plan that the pool has already is kept where
    it does for these jobs.
    """
    if isinstance(pool.plan, Plan) and pool.plan.does_for(pool):
        return pool.plan
    loads = [load_of(job, job.profile) for job in pool.jobs if job.profile is not None and not job.profile.is_flat]
    if not _PAIR <= len(loads) <= _MANY or sum(load.profile.peak for load in loads) <= pool.budget:
        return None
    if len(loads) > FEW and len(loads) < len(pool.jobs):
        return None  # soon they are all known, and out of the convoy that claims make of many jobs it is a long way
    loads = [dataclasses.replace(load, floor=floor) for load, floor in zip(loads, floors(loads), strict=True)]
    record = _record(pool, loads)
    ways = _ways(record, pool, loads)  # fills in the schedules that the trials use
    few = len(loads) <= FEW
    record[0]["learnt"]["gathers"] = few
    trials = Trials(record, loads, pool)
    known = record[0]["learnt"]
    before = pool.plan if isinstance(pool.plan, Plan) and _are_of_same_jobs(pool.plan.learnt, known) else None
    in_use = None if before is None else _in_use(before.learnt)
    first = _chosen(record, [trials.run(*way) for way in ways], in_use)
    if before is not None:
        if first.key == in_use:  # the jobs are in its cycle already
            for field in ("gathers", "gathered_ns"):
                known[field] = before.learnt[field]
        if before.holds_for(pool):
            _take_over(before.learnt, known)
    return Plan(record, first.mean, dataclasses.replace(pool, plan=None))


def _are_of_same_jobs(before: np.void, known: np.void) -> bool:
    n = int(before["n_jobs"])
    return n == known["n_jobs"] and not (before["jobs"][:n] != known["jobs"][:n]).any()


def _ways_of(known: np.void) -> dict[tuple[Way, int], np.void]:
    return {(Way(int(way["way"])), int(way["setting"])): way for way in known["ways"][: int(known["n_ways"])]}


def _in_use(known: np.void) -> tuple[Way, int]:
    return list(_ways_of(known))[int(known["used"])]


def _take_over(before: np.void, known: np.void) -> None:
    """Keep what the ways of the plan before have given."""
    measured = _ways_of(before)
    for key, way in _ways_of(known).items():
        if key in measured:
            for field in ("rounds", "got"):
                way[field] = measured[key][field]


def known_of(pool: PoolView) -> tuple[Known, ...]:
    """Return what a plan for these jobs is for; those whose iterations are not known are left out."""
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
        if job.profile is not None and not job.profile.is_flat
    )


def _hold_alike(a: Known, b: Known) -> bool:
    slack = max(1, b.peak >> _PEAK_SHIFT)
    return abs(a.peak - b.peak) <= slack and abs(a.kept - b.kept) <= slack


def alike(some: Sequence[Known], others: Sequence[Known]) -> bool:
    """Tell whether what was planned for some does for others."""
    return len(some) == len(others) and all(
        (a.job, a.asked) == (b.job, b.asked)
        and abs(a.duration_ns - b.duration_ns) <= b.duration_ns >> _DURATION_SHIFT
        and _hold_alike(a, b)
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
    return record


def _ways(record: Records, pool: PoolView, loads: Sequence[Load]) -> list[tuple[Way, int]]:
    """Return the ways to try, each with a setting."""
    ways = [*_GREEDY, *((Way.SHIFT, setting) for setting in _SHIFTS)]
    if len(loads) > FEW:
        return ways
    ways += [(Way.CLAIMS, most) for most in _limits(len(loads))]
    if len(loads) == len(pool.jobs) and best_schedule.solve(
        loads, pool.budget, np.array(worths(loads)), pool.slowdown, record[0]["best"]
    ):
        ways.append((Way.SCHEDULE, 0))
    return ways


def _limits(n: int) -> list[int]:
    """Return how many of so many jobs may be inside: every number if they are few, else some."""
    return sorted({n // 4, n // 2, 3 * n // 4, n - 1} - {0}) if n > best_schedule.MOST_JOBS else list(range(1, n))


def _chosen(record: Records, tried: list[Tried], in_use: tuple[Way, int] | None) -> Tried:
    """Fill in the plan's ways, and return the first: the best, before the others that may turn out to be better.

    Of those that give the same it is the fairest. The way in use stays, unless another is
    noticeably better. The greedy ways are among them, whatever they gave.
    """
    best = max(tried, key=lambda one: (one.score, one.least))
    good = [one for one in tried if one.key == in_use and one.score > best.score - BETTER_BY]
    first = (good or [best])[0]
    different = {(one.way, one.score, one.mean, one.least): one for one in (*reversed(tried), first)}.values()
    rest = sorted((one for one in different if one is not first), key=lambda one: (one.key not in _GREEDY, -one.score))
    ways = sorted([first, *rest[: MOST_WAYS - 1]], key=lambda one: (one is not first, -one.score))
    known = record[0]["learnt"]
    known["n_ways"] = len(ways)
    for way, one in zip(known["ways"], ways, strict=False):
        way["way"], way["setting"], way["promise"] = one.way, one.setting, one.score
    return first
