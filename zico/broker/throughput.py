"""What each job has got lately of the throughput that it has alone, and what it is owed of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.base.compiled import interpreted
from zico.broker.protocol.messages import DEFAULT_SHARE, Share
from zico.pool import rules
from zico.scheduler.shares import floor_of, floors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zico.scheduler.state import JobView, PoolView, Profile


_counted = interpreted(rules.counted)
_recent_throughput = interpreted(rules.recent_throughput)

NO_SHARES: Mapping[int, Share] = {}


@dataclasses.dataclass
class _Got:
    iteration: int
    at_ns: int
    work_ns: float = 0.0
    time_ns: float = 0.0

    def share(self, now_ns: int, profile: Profile | None) -> float:
        """Return the recent throughput over alone's, 1 for a job without a profile."""
        if profile is None:
            return 1.0
        return _recent_throughput(self.work_ns, self.time_ns, now_ns - self.at_ns, profile.duration_ns)

    def note(self, iteration: int, now_ns: int, profile: Profile) -> None:
        """Count iterations that have ended since the last look."""
        done_ns = (iteration - self.iteration) * profile.duration_ns
        if done_ns <= 0:
            return
        self.work_ns, self.time_ns = _counted(self.work_ns, self.time_ns, done_ns, now_ns - self.at_ns)
        self.iteration, self.at_ns = iteration, now_ns


class Service:
    """Remembers the iterations that jobs have ended."""

    def __init__(self) -> None:
        """Know nobody."""
        self._got: dict[int, _Got] = {}

    def noted(self, view: PoolView, shares: Mapping[int, Share] = NO_SHARES) -> PoolView:
        """Return the view with what each job has got and is to get: what it was promised, or its guard.

        Args:
            view: Of the pool.
            shares: By job; whoever is not in it has the default one.
        """
        self._got = {job.job: self._of(job, view.now_ns) for job in view.jobs}
        jobs = [self._with_share(job, view, shares.get(job.job, DEFAULT_SHARE)) for job in view.jobs]
        owed = zip(jobs, floors(jobs), strict=True)
        return dataclasses.replace(view, jobs=tuple(dataclasses.replace(job, floor=floor) for job, floor in owed))

    def _with_share(self, job: JobView, view: PoolView, share: Share) -> JobView:
        return dataclasses.replace(
            job,
            served=self._got[job.job].share(view.now_ns, job.profile),
            floor=0.0 if share.slo is None else floor_of(share.slo),
            weight=share.weight,
            priority=share.priority,
        )

    def _of(self, job: JobView, now_ns: int) -> _Got:
        known = self._got.get(job.job)
        if known is None or job.iteration < known.iteration or job.profile is None or known.iteration == 0:
            return _Got(job.iteration, now_ns)  # from its first iteration on, which is not as all others are
        known.note(job.iteration, now_ns, job.profile)
        return known
