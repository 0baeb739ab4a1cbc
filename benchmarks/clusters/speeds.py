"""How fast jobs are that share one device: what its processors give them, and what waiting for memory leaves of that.

Assumptions about processors, the main unknown of every result; ``i`` is the jobs' mean idle share:

* ``slices``: one job's kernels run at a time. k jobs together do ``1 + i + i^2 + ... + i^(k-1)`` of
  what one does alone: each finds the time that all others leave idle. Without idle time sharing
  gains nothing.
* ``measured``: of that, ``MEASURED_PAIR``, the sum that two ResNet-50 kept on an H200.
* ``idle-P``: as ``slices``, but every job leaves P percent idle whatever its profile shows.

Memory is what the simulator says: the broker's policy and claims decide who waits, with these
factors as the device's slowdown. Where all peaks fit, nobody waits.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from paper.published import REGION_BYTES

from clusters.kinds import CARD, regions_of
from zico.lab.simulator.device_models import DEVICE_MODELS
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clusters.kinds import Kind

MEASURED_PAIR = 0.91
"""Iterations per second of two ResNet-50 together over one alone: 14.6 to 15.0 over 16.2, benchmarks/results/gpu."""
WARM_UP, ITERATIONS = 5, 30
"""Of the longest job."""
_MOST_STEPS = 200_000  # a job that is a thousand times shorter than its neighbour must not take minutes

Speeds = tuple[float, ...]
"""Of jobs that share a device, each one's throughput over alone's, in the order of the jobs."""


def idle_share(idle: Sequence[float], assumption: str) -> float:
    """Return the mean idle share of jobs, as profiles show it or as the assumption has it."""
    _, dash, percent = assumption.partition("idle-")
    return int(percent) / 100 if dash else sum(idle) / len(idle)


def together(idle: Sequence[float], assumption: str) -> float:
    """Return the sum of the throughputs over alone's of jobs that share processors and never wait for memory.

    Args:
        idle: Each job's idle share, alone.
        assumption: See above.
    """
    share = idle_share(idle, assumption)
    total = sum(share**n for n in range(len(idle)))
    return total * (MEASURED_PAIR if assumption == "measured" and len(idle) > 1 else 1)


@dataclasses.dataclass(frozen=True)
class Memory:
    """What memory leaves of jobs' speeds on one device."""

    kinds: tuple[Kind, ...]
    policy: str = "zico"
    regions: Callable[[int], int] = regions_of
    """Of a device, for so many jobs."""

    def peaks_fit(self, members: Sequence[int]) -> bool:
        """Return whether all jobs could be at their peaks at once."""
        return sum(self.kinds[member].profile.peak for member in members) <= self.regions(len(members))

    def can_run(self, members: Sequence[int]) -> bool:
        """Return whether each job can end an iteration beside what the others keep between theirs."""
        kept = sum(self.kinds[member].keeps for member in members)
        most = max(self.kinds[member].profile.peak - self.kinds[member].keeps for member in members)
        return kept + most <= self.regions(len(members))

    def speeds(self, members: Sequence[int], assumption: str) -> Speeds | None:
        """Return how fast jobs are together; ``None``: they cannot share the device."""
        mean = sum(self.kinds[member].idle for member in members) / len(members)
        factors = [1.0, *(n / together([mean] * n, assumption) for n in range(1, len(members) + 1))]
        if self.peaks_fit(members):
            return (1 / factors[-1],) * len(members)
        if not self.can_run(members):
            return None
        loads = [Load(f"{number}", self.kinds[k].profile, self.kinds[k].keeps) for number, k in enumerate(members)]
        longest_ns = int(max(load.profile.duration_ns for load in loads) * factors[-1])
        steps = sum(len(load.profile.held) * longest_ns / load.profile.duration_ns for load in loads)
        counted = max(WARM_UP, min(ITERATIONS, round(_MOST_STEPS / steps)))
        device = DEVICE_MODELS[CARD]
        simulation = Simulation(
            *(policy_named(self.policy), loads, self.regions(len(members))),
            slowdown=factors,
            device=device,
            region_bytes=REGION_BYTES,
        )
        outcome = simulation.run((WARM_UP + counted) * longest_ns, WARM_UP * longest_ns)
        return None if outcome.stalls else tuple(outcome.normalised)


class Table:
    """The speeds of every set of kinds that is asked for, each worked out once; sets are sorted tuples of numbers."""

    def __init__(self, memory: Memory, assumption: str) -> None:
        """Take what answers; nothing is worked out yet."""
        self.memory, self.assumption = memory, assumption
        self.known: dict[tuple[int, ...], Speeds | None] = {(): ()}
        self.spent_s = 0.0
        """Processor time of all answers."""

    def of(self, members: tuple[int, ...]) -> Speeds | None:
        """Return the speeds of a set of kinds; ``None``: they cannot share a device."""
        if members not in self.known:
            began_s = time.process_time()
            self.known[members] = self.memory.speeds(members, self.assumption)
            self.spent_s += time.process_time() - began_s
        return self.known[members]
