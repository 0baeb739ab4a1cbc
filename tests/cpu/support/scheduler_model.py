"""Jobs for tests of the scheduler: shapes of memory in equal steps, and the product's simulator to run them in."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.scheduler.simulate import Load, Outcome, Simulation
from zico.scheduler.state import Profile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zico.scheduler.state import Policy

EVENTS_PER_STEP = 16
MS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """What one job does in every iteration."""

    levels: tuple[int, ...]
    """Regions held during each step."""
    step_ns: int
    """Nominal length of a step."""
    jitter: float = 0.0
    """Each iteration's steps are longer or shorter by up to this share."""
    believed: tuple[int, ...] | None = None
    """Levels as the profile has them, if it is wrong."""
    arrive_ns: int = 0

    @property
    def duration_ns(self) -> int:
        """Return the nominal length of an iteration."""
        return self.step_ns * len(self.levels)

    def load(self, name: str) -> Load:
        """Return the job as the simulator takes it; what it holds in its last step it keeps."""
        believed = None if self.believed is None else self._profile(self.believed)
        return Load(name, self._profile(self.levels), self.levels[-1], believed, self.jitter, self.arrive_ns)

    def _profile(self, held: tuple[int, ...]) -> Profile:
        n = len(self.levels)
        return Profile(
            held=held,
            t_ns=tuple(i * self.step_ns for i in range(n)),
            duration_ns=self.duration_ns,
            shift=EVENTS_PER_STEP.bit_length() - 1,
            n_events=n * EVENTS_PER_STEP,
        )


def triangle(peak: int, *, steps: int = 64, kept: int = 0, duration_ns: int = 100 * MS) -> Work:
    """Return a job that rises to its peak in the middle and falls again, as feature maps do."""
    return plateau(peak, rise=0.5, fall=0.5, steps=steps, kept=kept, duration_ns=duration_ns)


def plateau(
    peak: int, *, rise: float, fall: float, steps: int = 64, kept: int = 0, duration_ns: int = 100 * MS
) -> Work:
    """Return a job that rises for a share of its iteration, stays at its peak, and falls for another share."""
    middles = [(i + 0.5) / steps for i in range(steps)]
    shares = [min(1.0, t / rise, (1 - t) / fall) for t in middles]
    levels = [kept + round((peak - kept) * share) for share in shares]
    return Work(levels=(*levels[:-1], kept), step_ns=duration_ns // steps)


class Model(Simulation):
    """A simulation of works."""

    def __init__(self, policy: Policy, works: Iterable[Work], budget: int, seed: int = 0) -> None:
        """Take the jobs in the order of their numbers."""
        super().__init__(policy, [work.load(f"job{i}") for i, work in enumerate(works)], budget, seed)


__all__ = ["MS", "Model", "Outcome", "Work", "plateau", "triangle"]
