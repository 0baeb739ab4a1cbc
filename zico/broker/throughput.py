"""What each job has got lately of its throughput, and what it is owed of it.

Theory of operation
    A guarantee counts against a job's first iterations: the first one runs alone, and the others
    have little company. A profile's times are of the last iterations, in whatever company and
    however much the job saves. Policies count in the profile's times. So the floor that they see
    is what was promised, times how much longer iterations take now::

        first iterations 10 ms, now 12 ms, promised .75       floor .9

Guarantees
    * A floor changes by more than ``NOTICEABLE`` or not at all, since another one makes a new plan.
    * A job whose iterations do something else, such as with another batch size, has other first
      iterations.

Known limitations
    A job's first iterations may have company that never leaves it alone. Then they are longer than
    alone, and the job is owed that much less.
"""

from __future__ import annotations

import dataclasses
import math
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
FIRST = 8
"""Iterations, the shortest of which is what a guarantee counts against."""
NOTICEABLE = 0.05
"""Of a floor: less of a change is none."""
_OTHER_SHIFT = 4
"""A job whose number of events changes by more than a 16th does something else."""
_SPREAD_OF = 12
"""Iterations, which say how much their times vary."""
_KEEPS = math.exp(-1 / 256)
"""Of how much times have varied, with every iteration."""
_MOST_JITTER, _EVEN = 0.5, 0.05
"""The most that is told, and the least: times that vary by less are taken as even."""


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


@dataclasses.dataclass
class _Pace:
    """How long a job's iterations take, waits left out."""

    iteration: int
    n_events: int
    duration_ns: int
    """Of the profile: the mean of its last value and of the last iteration."""
    first_ns: int
    until: int
    """The iteration that is the last of the first ones."""
    _mean_ns: float
    """Fades; begins with the shortest of the first ones."""
    longer: float = 1.0
    """Times as long as the first ones, in the mean over as many as recent throughput looks back."""
    _squares: float = 0.0
    _counted: float = 0.0

    @classmethod
    def begun(cls, iteration: int, profile: Profile) -> _Pace:
        """Return that of a job of which one iteration is known."""
        took_ns = profile.duration_ns
        return cls(iteration, profile.n_events, took_ns, took_ns, iteration + FIRST - 1, took_ns)

    def is_of(self, iteration: int, profile: Profile) -> bool:
        """Tell whether what is known is of such iterations."""
        return iteration >= self.iteration and abs(profile.n_events - self.n_events) <= self.n_events >> _OTHER_SHIFT

    def note(self, iteration: int, profile: Profile) -> None:
        """Take in the iterations that have ended since the last look."""
        change = abs(profile.duration_ns / max(1, self.duration_ns) - 1)
        is_next = iteration == self.iteration + 1
        self.iteration, self.n_events, self.duration_ns = iteration, profile.n_events, profile.duration_ns
        if iteration <= self.until:
            self.first_ns = min(self.first_ns, profile.duration_ns)
            self._mean_ns = self.first_ns
            return
        if is_next and change <= _MOST_JITTER / 2:  # else something else happened, such as a checkpoint
            self._squares = _KEEPS * self._squares + change**2
            self._counted = _KEEPS * self._counted + 1
        self._mean_ns += (profile.duration_ns - self._mean_ns) / rules.FADE_ITERATIONS
        longer = max(1.0, self._mean_ns / max(1, self.first_ns))
        if abs(longer / self.longer - 1) > NOTICEABLE:
            self.longer = longer

    @property
    def jitter(self) -> float:
        """Return by up to what share iterations are longer or shorter, as if evenly; 0 if hardly or if too few.

        A mean of two changes by half of how far the iteration lies from the mean before. With evenly
        spread times of variance v, that is a mean square of v / 3; half the width is sqrt(3 v).
        """
        if self._counted < _SPREAD_OF:
            return 0.0
        jitter = min(_MOST_JITTER, 3 * math.sqrt(self._squares / self._counted))
        return jitter if jitter > _EVEN else 0.0


class Service:
    """Remembers the iterations that jobs have ended."""

    def __init__(self) -> None:
        self._got: dict[int, _Got] = {}
        self._paces: dict[int, _Pace] = {}
        """Also of jobs that are paused."""

    def noted(self, view: PoolView, shares: Mapping[int, Share] = NO_SHARES) -> PoolView:
        """Return the view with what each job has got and is to get: what it was promised, or its guard.

        Args:
            view: Of the pool.
            shares: By job; whoever is not in it has the default one.
        """
        self._got = {job.job: self._of(job, view.now_ns) for job in view.jobs}
        for job in view.jobs:
            self._note_pace(job)
        jobs = [self._with_share(job, view, shares.get(job.job, DEFAULT_SHARE)) for job in view.jobs]
        owed = zip(jobs, floors(jobs), strict=True)
        return dataclasses.replace(view, jobs=tuple(dataclasses.replace(job, floor=floor) for job, floor in owed))

    def _with_share(self, job: JobView, view: PoolView, share: Share) -> JobView:
        pace = self._paces.get(job.job)
        longer, jitter = (1.0, 0.0) if pace is None else (pace.longer, pace.jitter)
        return dataclasses.replace(
            job,
            served=self._got[job.job].share(view.now_ns, job.profile),
            jitter=jitter,
            floor=0.0 if share.slo is None else min(1.0, longer * floor_of(share.slo)),
            weight=share.weight,
            priority=share.priority,
        )

    def _note_pace(self, job: JobView) -> None:
        pace = self._paces.get(job.job)
        if pace is not None and job.iteration < pace.iteration:  # another one in that place
            pace = self._paces.pop(job.job)
        if job.profile is None or not job.in_main_phase or (pace is not None and job.iteration == pace.iteration):
            return
        if pace is None or not pace.is_of(job.iteration, job.profile):
            self._paces[job.job] = _Pace.begun(job.iteration, job.profile)
        else:
            pace.note(job.iteration, job.profile)

    def _of(self, job: JobView, now_ns: int) -> _Got:
        known = self._got.get(job.job)
        if known is None or job.iteration < known.iteration or job.profile is None or known.iteration == 0:
            return _Got(job.iteration, now_ns)  # from its first iteration on, which is not as all others are
        known.note(job.iteration, now_ns, job.profile)
        return known
