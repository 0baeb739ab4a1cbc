"""What comes of each way to decide about certain jobs: tried in the simulator, the few best of them for longer.

Theory of operation
    What jobs get is a cycle that they settle into, and which one depends on where they stand when it begins: all at
    their boundaries, in a trial as in use (``planned``). Every way is tried for a short time; what comes near the best,
    and both greedy ways whatever they gave, again; and of those the best few and the greedy for longer::

        every way          once
        near the best      with two more draws of times that vary; and with times that vary more than the jobs' do
        the best few       for longer

    The mean of these is what a way is chosen by. What it gave at best is what it promises: where a better cycle is
    known to be there, it is worth a look.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.pool.rules import FADE_ITERATIONS
from zico.scheduler import torus
from zico.scheduler.learning import MOST_JOBS
from zico.scheduler.packed import Compiled
from zico.scheduler.planned import Way, decide
from zico.scheduler.shares import worths
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import Manner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt

    from zico.scheduler.state import PoolView

    Records = npt.NDArray[np.void]

FEW = 8
"""Jobs; with more of them each way is tried once."""
_WARM_UP = 8
_ITERATIONS = 40
"""Of the longest job, after the warm-up."""
_LEAST_ITERATIONS = 4
_MOST_ITERATIONS = 4_000  # of all jobs: one that is a thousand times shorter than its neighbour must not take seconds
_DRAWS = 2  # of times that vary; one with more jobs than a torus has
_LONGER = 3
_BEST = 3  # ways that are tried for longer, besides the greedy ones
_JITTER = 0.1
"""That a way has to stand, however little the jobs' own times vary: profiles are never quite right."""
_JITTERY = 0.02  # where times vary more than that, a better run was luck and no cycle to be had
_UNFAIR = 8.0  # times what jobs lack of their floors: no throughput of others makes up for it
_OWED = 0.97  # of its floor: an iteration at the edge of what was simulated must not decide
_NEAR = 0.97
AT_BOUNDARIES = Manner(asks=True, offline=True)
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
    lacking = sum(max(0.0, _OWED * floor - x) for floor, x in zip(owed, got, strict=True))
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
        few = n <= torus.MOST_JOBS
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
        policy = Compiled("", decide, plan=lambda _view: _Trial(trial), manner=AT_BOUNDARIES)
        simulation = Simulation(policy, loads, self._pool.budget, draw, slowdown=self._pool.slowdown)
        # A job begins with its floor behind it. If it began with more, it could be passed over for a whole trial, and
        # the others would get what they cannot keep.
        served_ns = FADE_ITERATIONS * np.array([load.profile.duration_ns for load in loads])
        simulation.tenants["served_work"], simulation.tenants["served_time"] = owed * served_ns, served_ns
        rounds = times * self._rounds
        until_ns, warm_up_ns = (_WARM_UP + rounds) * self._longest_ns, _WARM_UP * self._longest_ns
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
