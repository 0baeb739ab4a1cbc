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
import math
from typing import TYPE_CHECKING

import numpy as np

from zico.scheduler import torus
from zico.scheduler.claiming import EVERYBODY
from zico.scheduler.learning import MOST_JOBS, MOST_WAYS
from zico.scheduler.packed import Compiled, packed
from zico.scheduler.pair import solve
from zico.scheduler.planned import FIRST_SHIFT, PLAN, Way, decide
from zico.scheduler.shares import floors, worths
from zico.scheduler.shifting import MARGIN_SHIFT
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import JobView, Manner, Phase, PoolView, Profile
from zico.scheduler.turns import LARGEST, LEAST_SERVED, LONGEST, SHORTEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Records = npt.NDArray[np.void]

_WARM_UP = 8
_ITERATIONS = 40
"""Of the longest job, after the warm-up."""
_LEAST_ITERATIONS = 4
_MOST_ITERATIONS = 4_000  # of all jobs: one that is a thousand times shorter than its neighbour must not take seconds
_FEW = 8  # jobs, with which all ways are tried
_MANY = 16  # more are left to shift: a plan would take longer to make than jobs stay the same
_JITTER = 0.1
_SEEDS = (1, 2)
_UNFAIR = 8.0  # times what jobs lack of their floors: no throughput of others makes up for it
_OWED = 0.97  # of its floor: an iteration at the edge of what was simulated must not decide
_ALIKE = 0.005
_NEAR = 0.97
_HOPEFUL = 0.9  # a way that promises less than so much of the best is not tried for real
_NO_MARGIN = 62
_PAIR = 2
_KNOWN = Manner(asks=True, offline=True)
"""Jobs of a trial begin at their boundaries with known profiles: as many first iterations, one at a time, would be what
is measured."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A PLAN record, which this keeps, and what its first way promises."""

    record: Records
    mean: float = 0.0
    """The jobs' throughput over alone's, by weight."""

    @property
    def address(self) -> int:
        """Return where the record is."""
        return self.record.ctypes.data


@dataclasses.dataclass(frozen=True)
class _Tried:
    """A way and what it came to: with exact times, and with times that vary."""

    way: Way
    setting: int
    exact: float
    varying: float
    mean: float
    least: float

    @property
    def score(self) -> float:
        return (self.exact + self.varying) / 2

    @property
    def promise(self) -> float:
        return max(self.exact, self.varying)


def plan(pool: PoolView) -> Plan | None:
    """Return the best of the ways for these jobs; ``None`` if there is nothing to choose, or they are too many.

    Jobs without a profile are left out. Takes milliseconds for a few jobs.
    """
    loads = [load for job in pool.jobs if (load := _load(job)) is not None]
    if not _PAIR <= len(loads) <= _MANY or sum(load.profile.peak for load in loads) <= pool.budget:
        return None
    loads = [dataclasses.replace(load, floor=floor) for load, floor in zip(loads, floors(loads), strict=True)]
    record = _record(pool, loads)
    return _chosen(record, _tried(record, _ways(record, pool, loads), loads, pool))


def rehearse() -> None:
    """Plan for a few small jobs, so that no plan that somebody could use comes late because its code is being made."""
    profile = Profile((1, 2, 3, 2, 1), (0, 1_000, 2_000, 3_000, 4_000), 5_000, 2, 20)
    jobs = [JobView(number, "", Phase.BOUNDARY, 1, 1, 0, profile, 1, 0, 0, 0) for number in range(_PAIR + 1)]
    for n in (_PAIR, _PAIR + 1):
        plan(PoolView(0, profile.peak + n - 1, tuple(jobs[:n])))


def _load(job: JobView) -> Load | None:
    if job.profile is None:
        return None
    return Load(job.name, job.profile, job.persistent, floor=job.floor, weight=job.weight, priority=job.priority)


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
    ways = [(Way.SHIFT, MARGIN_SHIFT), (Way.CLAIMS, EVERYBODY)]
    if len(loads) > _FEW:
        return ways
    ways += [(Way.SHIFT, _NO_MARGIN), *((Way.CLAIMS, most) for most in _limits(len(loads)))]
    ways += [(Way.SHIFT, _NO_MARGIN | first << FIRST_SHIFT) for first in (SHORTEST, LONGEST, LARGEST, LEAST_SERVED)]
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


class _Trials:
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
        self._rounds = min(
            _ITERATIONS if n <= torus.MOST_JOBS else _ITERATIONS // 2,
            max(_LEAST_ITERATIONS, int(_MOST_ITERATIONS / per_round)),
        )

    def tried(self, way: Way, setting: int, hopeful: float) -> _Tried:
        """Return what comes of a way; with times that vary only if it is worth so much without."""
        first = self._trial[0]["learnt"]["ways"][0]
        first["way"], first["setting"] = way, setting
        exact, mean, least = self._run(0.0, 0)
        varying = [self._run(_JITTER, seed)[0] for seed in _SEEDS] if exact >= hopeful else [exact]
        return _Tried(way, setting, exact, sum(varying) / len(varying), mean, least)

    def _run(self, jitter: float, seed: int) -> tuple[float, float, float]:
        """Return the mean, less what jobs lack of what they are owed; the mean; and the least that a job got."""
        loads = [dataclasses.replace(load, jitter=jitter) for load in self._loads]
        policy = Compiled("", decide, plan=lambda _view: Plan(self._trial), manner=_KNOWN)
        simulation = Simulation(policy, loads, self._pool.budget, seed, slowdown=self._pool.slowdown)
        until_ns, warm_up_ns = (_WARM_UP + self._rounds) * self._longest_ns, _WARM_UP * self._longest_ns
        got = simulation.run(until_ns, warm_up_ns).normalised
        mean = sum(each * x for each, x in zip(self._worth, got, strict=True))
        lacking = sum(max(0.0, _OWED * load.floor - x) for load, x in zip(loads, got, strict=True))
        return mean - _UNFAIR * lacking, mean, min(got)


def _tried(record: Records, ways: Sequence[tuple[Way, int]], loads: Sequence[Load], pool: PoolView) -> list[_Tried]:
    """Try every way; with times that vary those that come near the best so far."""
    trials = _Trials(record, loads, pool)
    tried: list[_Tried] = []
    for way, setting in ways:
        best = max((one.exact for one in tried), default=0.0) if len(loads) <= _FEW else math.inf
        tried.append(trials.tried(way, setting, _NEAR * best))
    return tried


def _as_good(score: float, best: float) -> bool:
    """Tell whether a score is as good as the best; where jobs lack much of their floors, scores are below 0."""
    return score >= best - _ALIKE * abs(best)


def _chosen(record: Records, tried: list[_Tried]) -> Plan:
    """Return the plan that begins with the best, and knows the others that may turn out to be better.

    Of those that do well with exact times, the best where they vary as well; of those as good as that, the fairest.
    """
    most = max(one.exact for one in tried)
    good = [one for one in tried if _as_good(one.exact, most)]
    best = max(one.score for one in good)
    first = max((one for one in good if _as_good(one.score, best)), key=lambda one: one.least)
    promised = max(one.promise for one in tried)
    greedy = [(Way.SHIFT, MARGIN_SHIFT), (Way.CLAIMS, EVERYBODY)]
    same = {(one.way, one.exact, one.varying): one for one in reversed(tried)}  # the first of those that are alike
    rest = [one for one in same.values() if one is not first]
    hopeful = [one for one in rest if one.promise >= _HOPEFUL * promised and (one.way, one.setting) not in greedy]
    rest = [one for one in rest if (one.way, one.setting) in greedy]
    rest += sorted(hopeful, key=lambda one: -one.promise)[: MOST_WAYS - len(rest) - 1]
    rest.sort(key=lambda one: -one.promise)
    known = record[0]["learnt"]
    known["n_ways"] = 1 + len(rest)
    for way, one in zip(known["ways"], [first, *rest], strict=False):
        way["way"], way["setting"], way["promise"] = one.way, one.setting, one.promise
    return Plan(record, first.mean)
