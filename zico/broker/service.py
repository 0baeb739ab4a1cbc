"""What each job has got lately of the throughput that it has alone, and what it is owed of it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zico.scheduler.state import JobView, PoolView, Profile

FADE_ITERATIONS = 16.0
"""How far back "lately" looks, in the job's own iterations; the simulator's jobs have the same memory."""


@dataclasses.dataclass
class _Got:
    iteration: int
    at_ns: int
    work_ns: float = 0.0
    time_ns: float = 0.0

    @property
    def share(self) -> float:
        return min(1.0, self.work_ns / self.time_ns) if self.time_ns > 0 else 1.0

    def note(self, iteration: int, now_ns: int, profile: Profile) -> None:
        """Count iterations that have ended since the last look."""
        done_ns = (iteration - self.iteration) * profile.duration_ns
        if done_ns <= 0:
            return
        passed_ns = now_ns - self.at_ns
        keeps = math.exp(-passed_ns / (FADE_ITERATIONS * done_ns))
        self.work_ns = keeps * self.work_ns + done_ns
        self.time_ns = keeps * self.time_ns + passed_ns
        self.iteration, self.at_ns = iteration, now_ns


class Service:
    """Remembers the iterations that jobs have ended."""

    def __init__(self) -> None:
        """Know nobody."""
        self._got: dict[int, _Got] = {}

    def noted(self, view: PoolView) -> PoolView:
        """Return the view with what each job has got and is owed: an equal share, as if the jobs took turns."""
        self._got = {job.job: self._of(job, view.now_ns) for job in view.jobs}
        floor = 1 / max(1, len(view.jobs))
        jobs = (dataclasses.replace(job, served=self._got[job.job].share, floor=floor) for job in view.jobs)
        return dataclasses.replace(view, jobs=tuple(jobs))

    def _of(self, job: JobView, now_ns: int) -> _Got:
        known = self._got.get(job.job)
        if known is None or job.iteration < known.iteration or job.profile is None:
            return _Got(job.iteration, now_ns)
        known.note(job.iteration, now_ns, job.profile)
        return known
