"""One policy on one budget, simulated, in the figures by which policies are compared.

A job's iterations per second are counted in its *window*: from the warm-up's end or its arrival, whichever is later, to
the end of the simulation; those of a job that has left, over all the time that it was there.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from zico.compiled import call, compiled
from zico.errors import ConfigError
from zico.scheduler.simulate import Simulation
from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.scheduler.simulate import Load
    from zico.scheduler.state import CompiledPolicy

_NS_A_SECOND = 1e9
WARM_UP, ITERATIONS = 10, 100
"""Of the longest job, for every two jobs."""
_FEWEST = 5
_MOST_STEPS = 20_000_000  # a job that is ten thousand times shorter than its neighbour must not take hours
_PATIENCE = 4  # by how much longer than one after the other jobs may take before they count as stuck
_SCENES, _TRIES, _REPEATS = 24, 4, 50


@dataclasses.dataclass(frozen=True)
class Horizon:
    """How long to simulate, and from when on to count."""

    until_ns: int
    warm_up_ns: int


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What one job came to."""

    name: str
    iterations: int
    iterations_per_s: float
    normalised: float
    """Iterations per second over alone's."""
    waited_s: float
    """At boundaries and in allocations, after the warm-up."""
    reason: str
    """What the policy said most often when it made the job wait."""
    left_s: float | None
    """When it had done all its iterations, if it has."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What all jobs came to under a policy and a budget."""

    jobs: tuple[JobResult, ...]
    peak: int
    """Regions."""
    deadlocks: int
    """How often nobody could go on, and a job went on outside the budget."""
    decisions: int
    decision_us: float
    seconds: float
    """Until the simulation's end, or until the last job left."""

    @property
    def normalised(self) -> float:
        """Return the mean over the jobs."""
        return sum(job.normalised for job in self.jobs) / len(self.jobs)

    @property
    def jain(self) -> float:
        """Return Jain's fairness index of the normalised throughputs: 1 equal, 1/n all for one.

        Source: R. Jain, D. Chiu, W. Hawe, DEC-TR-301, 1984.
        """
        squares = sum(job.normalised**2 for job in self.jobs)
        return sum(job.normalised for job in self.jobs) ** 2 / (len(self.jobs) * squares) if squares else 1.0


def horizon_of(loads: Sequence[Load], seconds: float | None = None) -> Horizon:
    """Return how long to simulate jobs.

    Until all have left, where each has a number of iterations; else for some iterations of the longest job, or for
    the seconds that are given, of which the warm-up takes its share.

    Raises:
        ConfigError: A job arrives after the end.
    """
    lengths_ns = [load.profile.duration_ns for load in loads]
    arrived_ns = max(load.arrive_ns for load in loads)
    if seconds is None and all(load.iterations for load in loads):
        one_by_one_ns = sum(2 * load.iterations * load.profile.duration_ns for load in loads)
        return Horizon(arrived_ns + _PATIENCE * len(loads) * one_by_one_ns, 0)
    longest_ns = max(lengths_ns)
    scale = max(1.0, len(loads) / 2)
    steps = sum(_n_steps(load) * longest_ns / ns for load, ns in zip(loads, lengths_ns, strict=True))
    lengths = scale * max(_FEWEST, min(ITERATIONS, _MOST_STEPS / steps / scale))
    warm_up_ns = round(scale * WARM_UP * longest_ns)
    if seconds is None:
        return Horizon(arrived_ns + warm_up_ns + round(lengths * longest_ns), warm_up_ns)
    until_ns = round(seconds * _NS_A_SECOND)
    late = max(loads, key=lambda load: load.arrive_ns)
    if late.arrive_ns >= until_ns:
        raise ConfigError(
            f"job {late.name!r} arrives at {late.arrive_ns / _NS_A_SECOND:g} s, but the simulation ends at "
            f"{seconds:g} s: raise --seconds"
        )
    return Horizon(until_ns, min(warm_up_ns, until_ns * WARM_UP // (WARM_UP + ITERATIONS)))


def _n_steps(load: Load) -> int:
    return 1 + int(np.count_nonzero(np.diff(load.profile.held)))


def check_fits(loads: Sequence[Load], budget: int, region_bytes: int) -> None:
    """Refuse a job that is larger than the whole budget.

    Raises:
        ConfigError: There is one; the message names both.
    """
    largest = max(loads, key=lambda load: load.profile.peak)
    if largest.profile.peak > budget:
        raise ConfigError(
            f"job {largest.name!r} needs {format_bytes(largest.profile.peak * region_bytes)}, more than the budget of "
            f"{format_bytes(budget * region_bytes)}: raise --budget or give a smaller curve"
        )


def check_guarantees(loads: Sequence[Load], budget: int, region_bytes: int, slowdown: Sequence[float]) -> None:
    """Refuse guarantees that no schedule can keep all: by what the device does, and by memory held over time.

    Both conditions are necessary, not sufficient. A job with normalised throughput x is inside an iteration at least
    for the share x of the time and holds its curve's mean there, elsewhere at least what is persistent. Jobs that leave
    are not counted: the others may come to have the device to themselves.

    Raises:
        ConfigError: They contradict each other.
    """
    stay = [load for load in loads if not load.iterations]
    owed = [load for load in stay if load.floor]
    if not owed:
        return
    names = ", ".join(repr(load.name) for load in owed)
    most = max(k / slowdown[min(k, len(slowdown) - 1)] for k in range(1, len(stay) + 1))
    together = sum(load.floor for load in owed)
    if together > most * (1 + 1e-9):
        raise ConfigError(
            f"the guarantees of {names} add up to {together:.2f} of the device, which does at most {most:.2f} for jobs "
            "that run together: raise slo"
        )
    mean = sum(load.persistent + load.floor * (_mean(load) - load.persistent) for load in stay)
    if mean > budget * (1 + 1e-9):
        raise ConfigError(
            f"the guarantees of {names} cannot all hold: they would keep {format_bytes(mean * region_bytes)} on the "
            f"average, more than the budget of {format_bytes(budget * region_bytes)}: raise slo or --budget"
        )


def _mean(load: Load) -> float:
    lengths = np.diff(load.profile.t_ns, append=load.profile.duration_ns)
    return float(np.dot(lengths, load.profile.held)) / load.profile.duration_ns


@compiled
def _decide_often(policy_address: int, scene_address: int, times: int) -> None:
    for _ in range(times):
        call(policy_address, (scene_address,))


class _Watched(Simulation):
    """A simulation that shows what lies behind its outcome."""

    @property
    def now_ns(self) -> int:
        return int(self._run[0]["now_ns"])

    @property
    def changes(self) -> NDArray[np.void]:
        """Return the part of the log that was written."""
        written: NDArray[np.void] = self.log[: int(self._run[0]["n_log"])]
        return written

    def decide_ns(self, times: int) -> float:
        """Return how long a decision takes on the scene that was decided last."""
        addresses = int(self._run[0]["policy_address"]), int(self._run[0]["scene_address"])
        begun = time.perf_counter_ns()
        _decide_often(*addresses, times)
        return (time.perf_counter_ns() - begun) / times

    def decisions(self) -> int:
        return int(self._run[0]["decisions"])


def simulate(
    policy: CompiledPolicy,
    loads: Sequence[Load],
    budget: int,
    horizon: Horizon,
    *,
    seed: int = 0,
    slowdown: Sequence[float] = (1.0,),
) -> Result:
    """Return what jobs come to under a policy and a budget."""
    simulation = _Watched(policy, loads, budget, seed, slowdown=slowdown)
    outcome = simulation.run(horizon.until_ns, horizon.warm_up_ns)
    jobs = tuple(
        _job_result(load, tenant, outcome.reasons[number], horizon)
        for number, (load, tenant) in enumerate(zip(simulation.loads, simulation.tenants, strict=True))
    )
    ended_ns = max(round(job.left_s * _NS_A_SECOND) if job.left_s is not None else horizon.until_ns for job in jobs)
    return Result(
        jobs=jobs,
        peak=outcome.peak_granted,
        deadlocks=outcome.stalls,
        decisions=outcome.decisions,
        decision_us=decision_us(policy, loads, budget, horizon, slowdown) if outcome.decisions else 0.0,
        seconds=ended_ns / _NS_A_SECOND,
    )


def _job_result(load: Load, tenant: Any, reason: str, horizon: Horizon) -> JobResult:  # noqa: ANN401 - a TENANT record
    length_ns, left_ns = load.profile.duration_ns, int(tenant["left_ns"])
    if left_ns:
        window_ns, work_ns = left_ns - load.arrive_ns, int(tenant["iteration"]) * length_ns
    else:
        window_ns = horizon.until_ns - max(load.arrive_ns, horizon.warm_up_ns)
        work_ns = int(tenant["counted_ns"])
    normalised = work_ns / window_ns
    since_ns = 0 if left_ns else int(tenant["waiting_since_ns"])
    waits_ns = max(0, horizon.until_ns - max(since_ns, horizon.warm_up_ns)) if since_ns else 0
    waited_ns = int(tenant["waited_ns"]) + waits_ns
    return JobResult(
        name=load.name,
        iterations=int(tenant["iteration"]),
        iterations_per_s=normalised * _NS_A_SECOND / length_ns,
        normalised=normalised,
        waited_s=waited_ns / _NS_A_SECOND,
        reason=reason or ("memory is short within its iteration" if waited_ns else ""),
        left_s=left_ns / _NS_A_SECOND if left_ns else None,
    )


def decision_us(
    policy: CompiledPolicy, loads: Sequence[Load], budget: int, horizon: Horizon, slowdown: Sequence[float] = (1.0,)
) -> float:
    """Return what a decision costs on this machine: the mean over scenes of a simulation of its own.

    The policy is asked again and again what it has just been asked, so that the clock's own cost does not count; of a
    few tries the fastest counts, so that other processes do not. The figure is the only one that differs each time.
    """
    watched = _Watched(policy, loads, budget, slowdown=slowdown)
    stop_ns = min(horizon.until_ns, max(2 * horizon.warm_up_ns, horizon.until_ns // 10))
    costs_ns = []
    for scene in range(1, _SCENES + 1):
        before = watched.decisions()
        watched.run(stop_ns * scene // _SCENES)
        if watched.decisions() > before:
            costs_ns.append(min(watched.decide_ns(_REPEATS) for _ in range(_TRIES)))
    return sum(costs_ns) / len(costs_ns) / 1e3 if costs_ns else 0.0


class Possible(Protocol):
    """What ``zico.scheduler.oracle`` says of jobs: the best that any schedule can do."""

    @property
    def normalised(self) -> Sequence[float]:
        """Return the throughput of each job over alone's."""
        ...

    @property
    def peak(self) -> int:
        """Return the most regions held at once."""
        ...


def possible(found: Possible, loads: Sequence[Load], horizon: Horizon) -> Result:
    """Return the oracle's answer in the figures of a policy's; it decides nothing, and waits are not told."""
    jobs = tuple(
        JobResult(load.name, 0, share * _NS_A_SECOND / load.profile.duration_ns, share, 0.0, "", None)
        for load, share in zip(loads, found.normalised, strict=True)
    )
    return Result(jobs, found.peak, 0, 0, 0.0, horizon.until_ns / _NS_A_SECOND)


# -- memory over time -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """What each job holds over a piece of time."""

    t_s: NDArray[np.float64]
    """[n]: when it changes; the last one is the end."""
    regions: NDArray[np.int64]
    """[jobs, n]"""


def memory(
    policy: CompiledPolicy,
    loads: Sequence[Load],
    budget: int,
    span_ns: tuple[int, int],
    *,
    seed: int = 0,
    slowdown: Sequence[float] = (1.0,),
) -> Held:
    """Return what jobs hold from the first to the second of two times, simulated anew."""
    begin_ns, end_ns = span_ns
    room = sum(_most_changes(load, end_ns) for load in loads)
    watched = _Watched(policy, loads, budget, seed, slowdown=slowdown, log=min(room, _MOST_STEPS))
    watched.run(end_ns)
    changes = watched.changes
    regions = np.zeros((len(loads), len(changes) + 1), np.int64)
    t_ns = np.append(changes["t_ns"], end_ns)
    for number in range(len(loads)):
        mine = changes["tenant"] == number
        last = np.maximum.accumulate(np.where(mine, np.arange(1, len(changes) + 1), 0))
        held = np.append(0, changes["held"])[last]
        regions[number] = np.append(held, held[-1:] if len(held) else 0)
    first = max(0, int(np.searchsorted(t_ns, begin_ns, side="right")) - 1)
    t_s = np.maximum(t_ns[first:], begin_ns) / _NS_A_SECOND
    return Held(t_s, regions[:, first:])


def _most_changes(load: Load, end_ns: int) -> int:
    """Return how often a job may change what it holds until a time; a growth may come in pieces."""
    iterations = 1 + max(0, end_ns - load.arrive_ns) / load.profile.duration_ns / (1 - load.jitter)
    return int(2 * iterations * (2 + _n_steps(load)))
