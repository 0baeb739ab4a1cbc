"""Run jobs in the simulator and say what came of it, by the paper's definitions."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from paper.loads import slowdown
from paper.published import REGION_BYTES

from zico.base.errors import ConfigError
from zico.lab.simulator.device_models import DEVICE_MODELS
from zico.report.model import jain_index
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from paper.loads import Job

    from zico.scheduler.state import CompiledPolicy

WARM_UP, ROUNDS = 10, 60
"""Iterations of the longest job."""
ENOUGH = 0.97
"""Of the throughput with unlimited memory."""
LOG = 1 << 18
"""Changes of what jobs hold that a simulation keeps for a picture."""


def named(name: str) -> CompiledPolicy | None:
    """Return a policy; ``None`` if this version has none of that name."""
    try:
        return policy_named(name)
    except ConfigError:
        return None


def least_budget(jobs: Sequence[Job]) -> int:
    """Return the regions without which some job can never end an iteration beside what the others keep."""
    kept = sum(job.keeps for job in jobs)
    return kept + max(job.profile.peak - job.keeps for job in jobs)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Jobs, and what they have."""

    jobs: tuple[Job, ...]
    budget: int
    """Regions."""
    assumption: str
    rounds: int = ROUNDS


def measure(setting: Setting, policy: str) -> dict[str, Any] | None:
    """Simulate jobs under a policy; ``None`` if there is no such policy, or somebody can never end an iteration.

    Returns:
        ``normalised``: each job's iterations per second over alone's; ``waited``: share of the time
            that each waited.
    """
    chosen = named(policy)
    if chosen is None or least_budget(setting.jobs) > setting.budget:
        return None
    loads = [job.load(number) for number, job in enumerate(setting.jobs)]
    longest_ns = max(job.profile.duration_ns for job in setting.jobs)
    factors = slowdown(setting.jobs, setting.assumption)
    until_ns = int((WARM_UP + setting.rounds) * longest_ns * factors[-1])
    warm_up_ns = int(WARM_UP * longest_ns * factors[-1])
    device = DEVICE_MODELS[setting.jobs[0].card]
    simulation = Simulation(chosen, loads, setting.budget, slowdown=factors, device=device, region_bytes=REGION_BYTES)
    outcome = simulation.run(until_ns, warm_up_ns)
    return {
        "normalised": [round(value, 5) for value in outcome.normalised],
        "mean": round(outcome.mean, 5),
        "peak_granted": outcome.peak_granted,
        "waited": [round(waited / (until_ns - warm_up_ns), 5) for waited in outcome.waited_ns],
        "jain": round(jain_index(outcome.normalised), 5),
        "stalls": outcome.stalls,
        "faulted_regions": round(outcome.faulted / max(1, sum(outcome.iterations)), 3),
    }


def unlimited(setting: Setting) -> dict[str, Any]:
    """Return what the jobs do if memory is never short."""
    budget = sum(job.profile.peak for job in setting.jobs)
    found = measure(dataclasses.replace(setting, budget=budget), "none")
    assert found is not None  # noqa: S101 - all peaks fit
    return found


def enough_memory(setting: Setting, policy: str) -> int | None:
    """Return the fewest regions with which jobs get ``ENOUGH`` of their throughput with unlimited memory.

    By halving the range: throughput need not grow with every region, so a smaller budget may do as
    well by luck. ``None`` if not even a twentieth more than the sum of the peaks does.
    """
    goal = ENOUGH * unlimited(setting)["mean"]

    def is_enough(budget: int) -> bool:
        found = measure(dataclasses.replace(setting, budget=budget), policy)
        return found is not None and found["mean"] >= goal and not found["stalls"]

    few, many = least_budget(setting.jobs) - 1, 1 + sum(job.profile.peak for job in setting.jobs) * 21 // 20
    if not is_enough(many):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if is_enough(middle) else (middle, many)
    return many


# -- over time -------------------------------------------------------------------------------------


def during(simulation: Simulation, begin_ns: int, end_ns: int) -> dict[str, list[float]]:
    """Run to a time and on to another; return how each job fared between them.

    Returns:
        ``gap_ms``: what it waited in each iteration; ``iterations_per_s``.
    """
    simulation.run(begin_ns)
    before = simulation.sim_jobs.copy()
    simulation.run(end_ns)
    n, waited_ns = (simulation.sim_jobs[field] - before[field] for field in ("iteration", "waited_ns"))
    return {"gap_ms": (waited_ns / n / 1e6).tolist(), "iterations_per_s": (n / (end_ns - begin_ns) * 1e9).tolist()}


def held_over_time(simulation: Simulation) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when what jobs hold changes, and the regions of each job from then on, a row for each.

    Raises:
        ValueError: More has changed than the simulation was told to keep.
    """
    n = int(simulation._run[0]["n_log"])  # noqa: SLF001 - how much of the log is filled
    if n >= len(simulation.log):
        raise ValueError(f"more than {len(simulation.log)} changes of what jobs hold: simulate less, or raise LOG")
    log = simulation.log[:n]
    held = np.zeros((len(simulation.loads), n), np.int64)
    for number, row in enumerate(held):
        last = np.maximum.accumulate(np.where(log["sim_job"] == number, np.arange(n), -1))
        row[last >= 0] = log["held"][last[last >= 0]]
    return log["t_ns"].astype(np.int64), held


def thinned(times_ns: NDArray[np.int64], held: NDArray[np.int64], edges_ns: NDArray[np.float64]) -> list[int]:
    """Return the most that is held between each two of some times."""
    at = np.clip(np.searchsorted(times_ns, edges_ns, side="right") - 1, 0, None)
    return [int(held[first : last + 1].max()) for first, last in itertools.pairwise(at.tolist())]
