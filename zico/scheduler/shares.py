"""What jobs are to get beside each other: weights, priorities and guarantees, in one place.

* A job's **weight** is what its throughput counts in the mean that plans maximise.
* A job of higher **priority** comes first where several wait. Its throughput counts so much more
  that no plan trades it for that of lower ones.
* A job's **floor** is the least normalised throughput that it is owed. That is what was guaranteed
  (``--slo 10%``: at most 10 % slower than alone). Else it is half of its share by weight, a guard
  against starving and no more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from zico.base.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Sequence

GUARD = 0.5
"""Where nothing was guaranteed, a job is owed so much of its share by weight."""
RANK = 8.0
"""A job counts so many times as much as one of the next lower priority."""


class Asked(Protocol):
    """A job and what was asked for it; ``JobView`` and ``Load`` are such."""

    @property
    def name(self) -> str:
        """Return what it is called."""
        ...

    @property
    def weight(self) -> float:
        """Return what its throughput counts beside the others'."""
        ...

    @property
    def priority(self) -> int:
        """Return its priority; higher comes first."""
        ...

    @property
    def floor(self) -> float:
        """Return the least normalised throughput that was guaranteed, 0 if nothing was."""
        ...


def floor_of(slowdown: float) -> float:
    """Return the floor of a job that may be slower than alone by at most that share (0.1 for ``--slo 10%``).

    Raises:
        ProblemError: The share is below 0 or no number.
    """
    if not (math.isfinite(slowdown) and slowdown >= 0):
        message = f"a job cannot be {slowdown:.0%} slower than alone at most: give 0% or more"
        raise ProblemError(message)
    return 1 / (1 + slowdown)


def check(jobs: Sequence[Asked]) -> None:
    """See that what is asked for jobs can be granted together.

    Raises:
        ProblemError: A weight is not above 0, or a floor not from 0 to 1. Or a job is owed
            something although others, that are owed nothing, come before it.
    """
    for job in jobs:
        if not (math.isfinite(job.weight) and job.weight > 0):
            message = f"{job.name} has the weight {job.weight:g}: give one above 0"
            raise ProblemError(message)
        if not 0 <= job.floor <= 1:
            message = f"{job.name} is owed {job.floor:g} of its throughput alone: give 0 to 1"
            raise ProblemError(message)
    for owed in jobs:
        before = [job.name for job in jobs if job.priority > owed.priority and job.floor == 0]
        if owed.floor > 0 and before:
            message = (
                f"{owed.name} is guaranteed its speed, but {', '.join(before)} of higher priority may take it: "
                "give it their priority, or no guarantee"
            )
            raise ProblemError(message)


def worths(jobs: Sequence[Asked]) -> tuple[float, ...]:
    """Return what each job's throughput counts in a mean over the jobs; their sum is 1."""
    ranks = {priority: rank for rank, priority in enumerate(sorted({job.priority for job in jobs}))}
    counts = [job.weight * RANK ** ranks[job.priority] for job in jobs]
    return tuple(count / sum(counts) for count in counts)


def floors(jobs: Sequence[Asked]) -> tuple[float, ...]:
    """Return the least normalised throughput that each job is owed."""
    weights = sum(job.weight for job in jobs)
    return tuple(job.floor or GUARD * job.weight / weights for job in jobs)


def budget_shares(wants: Sequence[int], weights: Sequence[float], budget: int) -> tuple[int, ...]:
    """Return each job's share of a budget by weight, in whole regions; what a job does not want goes to the others.

    Max-min fairness by weight: whoever gets less than it wants gets at least as much for its weight
    as any other job.
    """
    shares, left, weight_left = [0] * len(wants), budget, sum(weights)
    for i in sorted(range(len(wants)), key=lambda i: wants[i] / weights[i]):
        shares[i] = min(wants[i], int(left * weights[i] / weight_left))
        left -= shares[i]
        weight_left -= weights[i]
    return tuple(shares)
