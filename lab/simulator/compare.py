"""One policy on one budget, simulated, in the figures by which policies are compared.

Work is counted from the warm-up's end or a job's arrival, whichever is later, until it leaves or
the simulation ends. Of a job that has left before the warm-up ended, over all its stay.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.lab.simulator.decision_cost import decision_us
from zico.report.model import jain_index
from zico.scheduler.parameters import Unit
from zico.scheduler.simulate import Simulation, peak_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from zico.lab.simulator.oracle import Possible
    from zico.scheduler.device_model import DeviceModel
    from zico.scheduler.packed import Compiled
    from zico.scheduler.simulate import Load, Outcome
    from zico.scheduler.state import CompiledPolicy

_NS_A_SECOND = 1e9
WARM_UP, ITERATIONS = 10, 100
"""Of the longest job, for every two jobs."""
_FEWEST = 5
_MOST_STEPS = 20_000_000  # a job that is ten thousand times shorter than its neighbour must not take hours
_PATIENCE = 4  # by how much longer than one after the other jobs may take before they count as stuck
_ROUNDS = 10  # of time slices


@dataclasses.dataclass(frozen=True)
class Horizon:
    """How long to simulate, and from when on to count."""

    until_ns: int
    warm_up_ns: int


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What one job came to under one policy and budget."""

    name: str
    iterations_per_s: float
    normalised: float
    """Iterations per second over alone's."""
    waited_s: float = 0.0
    """At boundaries and in allocations, after the warm-up."""
    iterations: int = 0
    slowdown: float | None = None
    """How many times longer an iteration takes than alone, worked out here; ``None``: the job never got on."""
    reason: str = ""
    """What the policy said most often when it made the job wait."""
    left_s: float | None = None
    """When it had done all its iterations, if it has."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "slowdown", 1 / self.normalised if self.normalised > 0 else None)


@dataclasses.dataclass(frozen=True)
class Result:
    """What all jobs came to under a policy and a budget."""

    jobs: tuple[SimulatedJob, ...]
    peak: int
    """Regions."""
    deadlocks: int
    """How often nobody could go on, and a job went on outside the budget."""
    decisions: int
    decision_us: float
    seconds: float
    """Until the simulation's end, or until the last job left."""
    warm_up_s: float

    @property
    def normalised(self) -> float:
        """Return the mean over the jobs."""
        return sum(job.normalised for job in self.jobs) / len(self.jobs)

    @property
    def jain(self) -> float:
        """Return Jain's index of the normalised throughputs."""
        return jain_index([job.normalised for job in self.jobs])


def horizon_of(loads: Sequence[Load], seconds: float | None = None, round_ns: int = 0) -> Horizon:
    """Return how long to simulate jobs.

    Until all have left, where each has a number of iterations. Else for some iterations of the
    longest job after the last has arrived and changed, or for the seconds that are given. Of that
    the warm-up takes its share.

    Args:
        loads: The jobs.
        seconds: Of simulated time.
        round_ns: After which a policy that divides time has had each job's turn; some rounds are
            simulated.

    Raises:
        ConfigError: A job arrives after the end.
    """
    lengths_ns = [_longest_ns(load) for load in loads]
    settled_ns = max(_settled_ns(load) for load in loads)
    if seconds is None and all(load.iterations for load in loads):
        one_by_one_ns = sum(_alone_ns(load, load.iterations) for load in loads)
        return Horizon(settled_ns + _PATIENCE * one_by_one_ns + _ROUNDS * round_ns, 0)
    longest_ns = max(lengths_ns)
    scale = max(1.0, len(loads) / 2)
    warm_up_ns = max(round_ns, round(scale * WARM_UP * longest_ns))
    if seconds is None:
        steps = sum(_n_steps(load) * longest_ns / ns for load, ns in zip(loads, lengths_ns, strict=True))
        lengths = scale * max(_FEWEST, min(ITERATIONS, _MOST_STEPS / steps / scale))
        counted_ns = max(_ROUNDS * round_ns, round(lengths * longest_ns))
        return Horizon(settled_ns + warm_up_ns + counted_ns, warm_up_ns)
    until_ns = round(seconds * _NS_A_SECOND)
    late = max(loads, key=lambda load: load.arrive_ns)
    if late.arrive_ns >= until_ns:
        raise ConfigError(
            f"job {late.name!r} arrives at {late.arrive_ns / _NS_A_SECOND:g} s, but the simulation ends at "
            f"{seconds:g} s: raise --seconds"
        )
    return Horizon(until_ns, min(warm_up_ns, until_ns * WARM_UP // (WARM_UP + ITERATIONS)))


def round_ns_of(policy: Compiled, jobs: int) -> int:
    """Return after how long a policy that divides time has had each job's turn; 0 for all others."""
    slices_ns = (
        value
        for parameter, value in zip(policy.parameters, policy.options, strict=True)
        if policy.capabilities.pauses and parameter.unit is Unit.TIME
    )
    return jobs * int(max(slices_ns, default=0))


def _longest_ns(load: Load) -> int:
    return max([load.profile.duration_ns, *(phase.profile.duration_ns for phase in load.phases)])


def _settled_ns(load: Load) -> int:
    """Return when a job would have come to its last phase, were it as fast as alone."""
    return load.arrive_ns + (_alone_ns(load, load.phases[-1].after) if load.phases else 0)


def _n_steps(load: Load) -> int:
    profiles = [load.profile, *(phase.profile for phase in load.phases)]
    return max(1 + int(np.count_nonzero(np.diff(profile.held))) for profile in profiles)


def check_fits(loads: Sequence[Load], budget: int, region_bytes: int, *, need: Callable[[Load], int] = peak_of) -> None:
    """Refuse a job that is larger than the whole budget.

    Args:
        loads: The jobs.
        budget: Regions.
        region_bytes: Their size, for the message.
        need: What a job cannot do without, in regions.

    Raises:
        ConfigError: There is one; the message names both.
    """
    largest = max(loads, key=need)
    if need(largest) > budget:
        raise ConfigError(
            f"job {largest.name!r} needs {format_bytes(need(largest) * region_bytes)}, more than the budget of "
            f"{format_bytes(budget * region_bytes)}: raise --budget or give a smaller curve"
        )


def check_guarantees(loads: Sequence[Load], budget: int, region_bytes: int, slowdown: Sequence[float]) -> None:
    """Refuse guarantees that no schedule can keep all: by what the device does, and by memory held over time.

    Both conditions are necessary, not sufficient. A job with normalised throughput x is inside an
    iteration at least for the share x of the time. It holds its curve's mean there, and elsewhere
    at least what is persistent. Jobs that leave or change are not counted: the others may come to
    have the device to themselves.

    Raises:
        ConfigError: They contradict each other.
    """
    stay = [load for load in loads if not load.iterations and not load.phases]
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


class _Logged(Simulation):
    """A simulation whose log can be read."""

    @property
    def changes(self) -> NDArray[np.void]:
        """Return the part of the log that was written."""
        written: NDArray[np.void] = self.log[: int(self._run[0]["n_log"])]
        return written


@dataclasses.dataclass(frozen=True)
class Pool:
    """What jobs share."""

    budget: int
    """Regions."""
    device: DeviceModel
    region_bytes: int


def simulate(policy: CompiledPolicy, loads: Sequence[Load], pool: Pool, horizon: Horizon, *, seed: int = 0) -> Result:
    """Return what jobs come to under a policy and a budget."""
    simulation = Simulation(
        policy, loads, pool.budget, seed, device=pool.device, region_bytes=pool.region_bytes, samples=True
    )
    outcome = simulation.run(horizon.until_ns, horizon.warm_up_ns)
    jobs = tuple(_job_result(load, outcome, number) for number, load in enumerate(simulation.loads))
    ended_ns = max(left_ns or horizon.until_ns for left_ns in outcome.left_ns)
    return Result(
        jobs=jobs,
        peak=outcome.peak_granted,
        deadlocks=outcome.stalls,
        decisions=outcome.decisions,
        decision_us=decision_us(simulation) if outcome.decisions else 0.0,
        seconds=ended_ns / _NS_A_SECOND,
        warm_up_s=horizon.warm_up_ns / _NS_A_SECOND,
    )


def _job_result(load: Load, outcome: Outcome, number: int) -> SimulatedJob:
    left_ns, waited_ns = outcome.left_ns[number], outcome.waited_ns[number]
    normalised, iterations_per_s = outcome.normalised[number], outcome.iterations_per_s[number]
    if left_ns and not outcome.present_ns[number]:  # before the warm-up ended
        stay_ns = left_ns - load.arrive_ns
        normalised = _alone_ns(load, load.iterations) / stay_ns
        iterations_per_s = load.iterations * _NS_A_SECOND / stay_ns
    return SimulatedJob(
        name=load.name,
        iterations=outcome.iterations[number],
        iterations_per_s=iterations_per_s,
        normalised=normalised,
        waited_s=waited_ns / _NS_A_SECOND,
        reason=outcome.reasons[number] or ("memory is short within its iteration" if waited_ns else ""),
        left_s=left_ns / _NS_A_SECOND if left_ns else None,
    )


def _alone_ns(load: Load, iterations: int) -> int:
    total_ns, done, length_ns = 0, 0, load.profile.duration_ns
    for phase in load.phases:
        until = min(phase.after, iterations)
        total_ns += (until - done) * length_ns
        done, length_ns = until, phase.profile.duration_ns
    return total_ns + (iterations - done) * length_ns


def possible(found: Possible, loads: Sequence[Load], horizon: Horizon) -> Result:
    """Return the oracle's answer in the figures of a policy's; it decides nothing, and waits are not told."""
    jobs = tuple(
        SimulatedJob(name=load.name, iterations_per_s=share * _NS_A_SECOND / load.profile.duration_ns, normalised=share)
        for load, share in zip(loads, found.normalised, strict=True)
    )
    seconds, warm_up_s = horizon.until_ns / _NS_A_SECOND, horizon.warm_up_ns / _NS_A_SECOND
    return Result(jobs, found.peak, 0, 0, 0.0, seconds, warm_up_s)


# -- memory over time ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """What each job holds over a piece of time."""

    t_s: NDArray[np.float64]
    """[n]: when it changes; the last one is the end."""
    regions: NDArray[np.int64]
    """[jobs, n]"""


def memory(
    policy: CompiledPolicy, loads: Sequence[Load], pool: Pool, span_ns: tuple[int, int], *, seed: int = 0
) -> Held:
    """Return what jobs hold from the first to the second of two times, simulated anew."""
    begin_ns, end_ns = span_ns
    room = min(_MOST_STEPS, sum(_most_changes(load, end_ns) for load in loads))
    logged = _Logged(policy, loads, pool.budget, seed, device=pool.device, region_bytes=pool.region_bytes, log=room)
    logged.run(end_ns)
    changes = logged.changes
    regions = np.zeros((len(loads), len(changes) + 1), np.int64)
    t_ns = np.append(changes["t_ns"], end_ns)
    for number in range(len(loads)):
        mine = changes["sim_job"] == number
        last = np.maximum.accumulate(np.where(mine, np.arange(1, len(changes) + 1), 0))
        held = np.append(0, changes["held"])[last]
        regions[number] = np.append(held, held[-1:] if len(held) else 0)
    first = max(0, int(np.searchsorted(t_ns, begin_ns, side="right")) - 1)
    t_s = np.maximum(t_ns[first:], begin_ns) / _NS_A_SECOND
    return Held(t_s, regions[:, first:])


def _most_changes(load: Load, end_ns: int) -> int:
    """Return how often a job may change what it holds until a time; a growth may come in pieces."""
    shortest_ns = min([load.profile.duration_ns, *(phase.profile.duration_ns for phase in load.phases)])
    iterations = 1 + max(0, end_ns - load.arrive_ns) / shortest_ns / (1 - load.jitter)
    return int(2 * iterations * (2 + _n_steps(load)))
