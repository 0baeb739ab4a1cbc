"""What ``zico`` works out about the jobs that are there, apart from its decisions and in its own time.

Theory of operation
    Neither shift nor claims is always the better, and a pair's best schedule is made of cells and may be off by a few.
    So every way is tried on the jobs' profiles in the simulator, which takes milliseconds, and the best is the plan.

Guarantees
    * On exact profiles no way that was tried gets the jobs further, over the time that was simulated.
    * A job's share counts: a way that gives a job less than it is owed is taken only if all others are as unfair.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.scheduler.packed import Compiled, packed
from zico.scheduler.pair import solve
from zico.scheduler.planned import PLAN, Way, decide
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import JobView, Phase, PoolView, Profile

if TYPE_CHECKING:
    import numpy.typing as npt

    Records = npt.NDArray[np.void]

_WARM_UP = 8
_ITERATIONS = 40
"""Of the longest job, after the warm-up."""
_LEAST_ITERATIONS = 4
_MOST_ITERATIONS = 4_000  # of all jobs: one that is a thousand times shorter than its neighbour must not take seconds
_OWED = 0.97  # of its floor: an iteration at the edge of what was simulated must not decide
_PAIR = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A PLAN record, which this keeps, and what it promises."""

    record: Records
    score: float = 0.0
    mean: float = 0.0
    """The jobs' throughput over alone's."""

    @property
    def address(self) -> int:
        """Return where the record is."""
        return self.record.ctypes.data


def plan(pool: PoolView) -> Plan | None:
    """Return the best of the ways for these jobs; ``None`` if there is nothing to choose.

    Jobs without a profile are left out. Takes milliseconds for a few jobs.
    """
    loads = [load for job in pool.jobs if (load := _load(job)) is not None]
    if len(loads) < _PAIR or sum(load.profile.peak for load in loads) <= pool.budget:
        return None
    ways = [_way(Way.SHIFT), _way(Way.CLAIMS)]
    if len(loads) == _PAIR == len(pool.jobs):
        ways += _pair(pool, loads)
    return max((_tried(way, loads, pool.budget) for way in ways), key=lambda plan: plan.score)


def rehearse() -> None:
    """Plan for two small jobs, so that no plan that somebody could use comes late because its code is being made."""
    profile = Profile((1, 2, 3, 2, 1), (0, 1_000, 2_000, 3_000, 4_000), 5_000, 2, 20)
    jobs = (JobView(number, "", Phase.BOUNDARY, 1, 1, 0, profile, 1, 0, 0, 0) for number in range(_PAIR))
    plan(PoolView(0, profile.peak + 1, tuple(jobs)))


def _way(way: Way) -> Records:
    record = np.zeros(1, PLAN)
    record[0]["way"] = way
    return record


def _pair(pool: PoolView, loads: list[Load]) -> list[Records]:
    record = _way(Way.PAIR)
    record[0]["jobs"] = [job.job for job in pool.jobs]
    profiles = [packed(load.profile) for load in loads]  # to be kept while their addresses are used
    a, b = (profile.ctypes.data for profile in profiles)
    keeps = np.array([load.persistent for load in loads], np.int64)
    return [record] if solve(a, b, keeps, pool.budget, 1.0, record[0]["pair"]) else []


def _load(job: JobView) -> Load | None:
    return None if job.profile is None else Load(job.name, job.profile, job.persistent, floor=job.floor)


def _tried(record: Records, loads: list[Load], budget: int) -> Plan:
    """Simulate the jobs under a plan."""
    trial = record.copy()
    trial[0]["jobs"] = 0, 1
    longest_ns = max(load.profile.duration_ns for load in loads)
    per_round = sum(longest_ns / load.profile.duration_ns for load in loads)
    rounds = min(_ITERATIONS, max(_LEAST_ITERATIONS, int(_MOST_ITERATIONS / per_round)))
    simulation = Simulation(Compiled("", decide, plan=lambda _view: Plan(trial)), loads, budget)
    outcome = simulation.run((_WARM_UP + rounds) * longest_ns, _WARM_UP * longest_ns)
    short = sum(max(0.0, _OWED * load.floor - x) for load, x in zip(loads, outcome.normalised, strict=True))
    return Plan(record, outcome.mean - short, outcome.mean)
