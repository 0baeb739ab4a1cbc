"""What jobs come to in simulated time where each waits or does with less, whichever is better."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.lab.simulator.compare import simulate
from zico.scheduler.operating_points import choose, limited
from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.lab.simulator.compare import Horizon, Pool, Result
    from zico.scheduler.simulate import Load
    from zico.scheduler.state import OperatingPoint


def simulate_saving(
    loads: Sequence[Load], pool: Pool, horizon: Horizon, *, seed: int = 0
) -> tuple[Result, tuple[OperatingPoint | None, ...]]:
    """Return what jobs come to under ``zico`` where each does what is best, and what that is.

    Raises:
        ProblemError: One fits the budget in none of its ways.
    """
    less = choose(loads, pool.budget, slowdown=pool.device.slowdown, seed=seed).less
    forced = [limited(load, way) if way else load for load, way in zip(loads, less, strict=True)]
    result = simulate(policy_named("zico"), forced, pool, horizon, seed=seed)
    return over(result, loads, forced), less


def over(result: Result, loads: Sequence[Load], forced: Sequence[Load]) -> Result:
    """Return what jobs came to that did with less, over what they would alone with all that they want."""
    jobs = tuple(
        dataclasses.replace(job, normalised=job.normalised * load.profile.duration_ns / one.profile.duration_ns)
        for job, load, one in zip(result.jobs, loads, forced, strict=True)
    )
    return dataclasses.replace(result, jobs=jobs)
