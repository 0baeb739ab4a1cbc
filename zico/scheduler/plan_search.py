"""What ``zico`` works out about the jobs that are there, apart from its decisions and in its own time.

Theory of operation
    No rule tells which way is best for given jobs, and a best schedule is made of cells and may be
    off by a few. So every way is tried on the jobs' profiles in the simulator. What jobs get is a
    cycle that they settle into, and which one depends on where they stand when it begins: all at
    their boundaries, in a trial as in use (``zico.scheduler.plan``). What comes near the best, and
    both greedy ways whatever they gave, are tried again; of those the best few and the greedy for
    longer::

        every way          once
        near the best      with two more draws of times that vary; and with times that vary more than the jobs' do
        the best few       for longer

    The mean of these is what a way is chosen by. What it gave at best is what it promises: where a
    better cycle is known to be there, it is worth a look. The good ways are the plan, the best
    first. While it is in use, they are measured (``zico.scheduler.learning``).

Guarantees
    * On exact profiles no way that was tried gets the jobs noticeably further, over the time that
      was simulated.
    * A job's floor counts: a way that gives a job less than it is owed is taken only if all others
      are as unfair.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

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
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt

    Records = npt.NDArray[np.void]


FEW = 8
"""Jobs; with more of them each way is tried once."""
_ITERATIONS = 40
"""Of the longest job, after the warm-up."""
_LEAST_ITERATIONS = 4
_MOST_ITERATIONS = 4_000  # of all jobs: one that is a thousand times shorter than its neighbour must not take seconds
_DRAWS = 2  # of times that vary; one with more jobs than a schedule is for
_LONGER = 3
_BEST = 3  # ways that are tried for longer, besides the greedy ones
_JITTER = 0.1
"""That a way has to stand, however little the jobs' own times vary: profiles are never quite right."""
_JITTERY = 0.02  # where times vary more than that, a better run was luck and no cycle to be had
_UNFAIR = 8.0  # times what jobs lack of their floors: no throughput of others makes up for it
_NEAR = 0.97
AT_BOUNDARIES = Capabilities(asks=True, offline=True)
"""Jobs of a trial begin at their boundaries with known profiles: as many first iterations, one at a time, would be what
is measured."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one simulation came to."""

    score: float
    """The jobs' throughput over alone's, by weight, less what they lack of what they are owed."""
    mean: float
    least: float
    """The least that a job got."""
    rounds: int


@dataclasses.dataclass(frozen=True)
class Tried:
    """A way and what it came to."""

    way: Way
    setting: int
    runs: tuple[Run, ...]
    """With times that vary as the jobs' do."""
    sturdy: tuple[Run, ...] = ()
    """With times that vary more."""
    jittery: bool = False

    @property
    def key(self) -> tuple[Way, int]:
        """Return the way and its setting."""
        return self.way, self.setting

    @property
    def expected(self) -> float:
        """Return what it gives if times vary as the jobs' do."""
        return _mean(self.runs)

    @property
    def score(self) -> float:
        """Return what it is chosen by among those that are expected to give the same."""
        return (self.expected + _mean(self.sturdy)) / 2 if self.sturdy else self.expected

    @property
    def promise(self) -> float:
        """Return what it gives where things go well."""
        best = self.expected if self.jittery else max(run.score for run in self.runs)
        return max(best, _mean(self.sturdy)) if self.sturdy else best

    @property
    def mean(self) -> float:
        """Return the throughput by weight that is expected."""
        return sum(run.mean * run.rounds for run in self.runs) / sum(run.rounds for run in self.runs)

    @property
    def least(self) -> float:
        """Return the least that a job got."""
        return min(run.least for run in self.runs)


def mean_of(got: Sequence[float], worth: Sequence[float]) -> float:
    """Return the mean by weight of what jobs get of their throughputs alone."""
    return sum(each * x for each, x in zip(worth, got, strict=True))


def score_of(got: Sequence[float], owed: Sequence[float], worth: Sequence[float]) -> float:
    """Return the same less what jobs lack of what they are owed, which no throughput of others makes up for."""
    lacking = sum(max(0.0, OWED * floor - x) for floor, x in zip(owed, got, strict=True))
    return mean_of(got, worth) - _UNFAIR * lacking


def _mean(runs: Sequence[Run]) -> float:
    return sum(run.score * run.rounds for run in runs) / sum(run.rounds for run in runs)


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
        """Take a plan that has the schedules of all ways."""
        self._trial = record.copy()
        known = self._trial[0]["learnt"]
        known["n_ways"] = 1  # nothing to learn
        n = len(loads)
        if n <= MOST_JOBS:
            known["n_jobs"], known["jobs"][:n] = n, range(n)
        self._loads, self._pool, self._worth = loads, pool, worths(loads)
        self._longest_ns = max(load.profile.duration_ns for load in loads)
        per_round = sum(self._longest_ns / load.profile.duration_ns for load in loads)
        few = n <= best_schedule.MOST_JOBS
        self._draws, self._times = (_DRAWS, _LONGER) if few else (1, 1)
        self._rounds = min(
            _ITERATIONS if few else _ITERATIONS // 2,
            max(_LEAST_ITERATIONS, int(_MOST_ITERATIONS / per_round)),
        )
        jitter = max(load.jitter for load in loads)
        self._jittery, self._steady, self._exact = jitter > _JITTERY, jitter < _JITTER, jitter == 0

    def once(self, way: Way, setting: int) -> Tried:
        """Return what comes of a way in a short time."""
        return Tried(way, setting, (self._run(way, setting, 0),), jittery=self._jittery)

    def again(self, one: Tried) -> Tried:
        """Return the same tried again if times vary, and with times that vary more."""
        draws = range(1, 1 if self._exact else 1 + self._draws)
        sturdy = tuple(self._run(*one.key, draw, _JITTER) for draw in range(self._draws)) if self._steady else ()
        return dataclasses.replace(one, runs=(*one.runs, *(self._run(*one.key, draw) for draw in draws)), sturdy=sturdy)

    def longer(self, one: Tried) -> Tried:
        """Return the same tried for longer as well."""
        return dataclasses.replace(one, runs=(*one.runs, self._run(*one.key, 1 + self._draws, times=self._times)))

    def _run(self, way: Way, setting: int, draw: int, jitter: float = 0.0, times: int = 1) -> Run:
        """Return what comes of a way with one draw of the times, where they vary."""
        trial = self._trial.copy()  # which is written to
        first = trial[0]["learnt"]["ways"][0]
        first["way"], first["setting"] = way, setting
        loads = [dataclasses.replace(load, jitter=max(load.jitter, jitter)) for load in self._loads]
        owed = [load.floor for load in loads]
        policy = Compiled("", decide, plan=lambda _view: _Trial(trial), capabilities=AT_BOUNDARIES)
        simulation = Simulation(policy, loads, self._pool.budget, draw, slowdown=self._pool.slowdown)
        # A job begins with its floor behind it. If it began with more, it could be passed over for
        # a whole trial, and the others would get what they cannot keep.
        served_ns = FADE_ITERATIONS * np.array([load.profile.duration_ns for load in loads])
        simulation.sim_jobs["served_work"], simulation.sim_jobs["served_time"] = owed * served_ns, served_ns
        rounds = times * self._rounds
        until_ns, warm_up_ns = (LOOK_ROUNDS + rounds) * self._longest_ns, LOOK_ROUNDS * self._longest_ns
        got = simulation.run(until_ns, warm_up_ns).normalised
        return Run(score_of(got, owed, self._worth), mean_of(got, self._worth), min(got), rounds)


def tried(
    trials: Trials, ways: Sequence[tuple[Way, int]], greedy: Collection[tuple[Way, int]], *, many: bool
) -> list[Tried]:
    """Return what comes of every way; those that come near the best, and the greedy ones, are tried for longer."""
    all_of_them = [trials.once(way, setting) for way, setting in ways]
    if many:
        return all_of_them
    best = max(one.expected for one in all_of_them)
    all_of_them = _more(all_of_them, trials.again, lambda one: one.expected >= _NEAR * best or one.key in greedy)
    few = sorted(all_of_them, key=lambda one: -one.expected)[:_BEST]
    return _more(all_of_them, trials.longer, lambda one: one in few or one.key in greedy)


def _more(some: Sequence[Tried], again: Callable[[Tried], Tried], chosen: Callable[[Tried], bool]) -> list[Tried]:
    return [again(one) if chosen(one) else one for one in some]


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
are no finer, and profiles grow a little with every iteration. So it is where its jitter is
``_UNEVEN`` more or less."""


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

    Jobs without a profile are left out. A plan that the pool has already is kept where it does for
    these jobs.
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
    if len(loads) == len(pool.jobs) and best_schedule.solve(
        loads, pool.budget, np.array(worths(loads)), pool.slowdown, record[0]["best"]
    ):
        ways.append((Way.SCHEDULE, 0))
    return ways


def _limits(n: int) -> list[int]:
    """Return how many of so many jobs may be inside: every number if they are few, else some."""
    return sorted({n // 4, n // 2, 3 * n // 4, n - 1} - {0}) if n > best_schedule.MOST_JOBS else list(range(1, n))


def _as_good(score: float, best: float) -> bool:
    """Tell whether a score is as good as the best; where jobs lack much of their floors, scores are below 0."""
    return score >= best - _ALIKE * abs(best)


def _chosen(record: Records, tried: list[Tried]) -> Tried:
    """Fill in the plan's ways, and return the first: the best, before the others that may turn out to be better.

    Of those that are expected to give the most, the best where times vary more; of those as good as
    that, the fairest.
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
