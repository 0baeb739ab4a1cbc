"""Judge a choice of operating points by the throughput that was measured with it and without it. Pure.

Theory of operation
    What is chosen comes from predictions (``zico.broker.operating_points``), which know nothing of
    what copies cost other jobs. So a choice is on trial first. Windows of some iterations are
    measured with it and without it by turns, waits included, until the better one is clear::

        without  .77 .75
        with             .58 .60            -> without, for good

    Two windows of a side follow each other where they can: jobs that go back to waiting wait most
    until the policy has shifted their iterations again.

    A window's figure is the sum over the jobs of weight and speed: iterations a second times the
    time of the shortest that was seen in the first window. It begins some iterations after a
    change, since the first ones learn. The first window does not count otherwise: jobs that begin
    together wait for each other until the policy has shifted their iterations.

Guarantees
    * After its trial, a choice is in force only if it was not slower than none.
    * A verdict lasts as long as jobs and budget: what was rejected, or is like that, does not come
      back. After ``MOST_TRIALS`` rejections no other choice is tried, so nothing swings for ever.
    * A choice of which nothing has been measured yet makes way for a newer one, a few times.
    * A choice is rejected whose window takes more than ``SLOW`` times as long as one without.
    * Nothing is tried while jobs wait for less than ``LEAST_WAITED`` of their time. The last of at
      least ``FEWEST`` windows says so: in the first one, jobs may still learn how much to save.
    * Jobs that do not fit the budget with all that they want save without a trial.

Known limitations
    A job that ends no iteration keeps the first window, the one without, open.
    Windows of a choice that is much slower cost what they take.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

from zico.pool.layout import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zico.scheduler.state import JobView, PoolView

SETTLES = 3
"""Iterations of each job after a change that do not count."""
WINDOW = 5
"""Iterations of each job that a window has at least."""
FEWEST, MOST = 2, 5
"""Windows of each side before a verdict: so many where it is slower or clearly faster, and where it is unclear."""
SLOW = 2.0
MOST_TRIALS = 3
CLEAR = 3.0
"""A difference is clear that is so many of its standard errors."""
ALIKE = 0.125
"""Of a limit: choices that differ by less are one."""

LEAST_WAITED = 0.1
"""Of the jobs' time: where they wait for less, nothing is tried. Hooks for saved tensors alone take 4 to 6 % of a
ResNet's time on a processor, and copies come on top (docs/design/swapping.md)."""

Edge = tuple[int, int, int]
"""Iterations that a job has ended, when the one that runs began, and for how long it has waited, ever, in ns."""


@dataclasses.dataclass
class _Side:
    """What one way to go on gave."""

    figures: list[float] = dataclasses.field(default_factory=list)
    took_ns: int = 0
    waited: float = 0.0
    """The share of their time that jobs waited for memory in the last window."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.figures)

    @property
    def error(self) -> float:
        """Return the standard error of the mean."""
        return statistics.stdev(self.figures) / len(self.figures) ** 0.5


@dataclasses.dataclass
class _Trial:
    """One choice against none."""

    limits: Mapping[int, int]
    found: _Side = dataclasses.field(default_factory=_Side)
    is_good: bool | None = None
    """``None``: not known yet."""


@dataclasses.dataclass
class _Window:
    """What is seen of the jobs since a change."""

    changed_ns: int
    since: dict[int, int]
    """Iterations that each job had ended then."""
    first: dict[int, Edge] = dataclasses.field(default_factory=dict)
    last: dict[int, Edge] = dataclasses.field(default_factory=dict)

    def follow(self, job: JobView) -> None:
        """Note where a job is that runs."""
        if job.phase is JobState.RUNNING and job.iteration >= self.since[job.job] + SETTLES:
            edge = (job.iteration, job.started_ns, job.waited_ns)
            self.first.setdefault(job.job, edge)
            self.last[job.job] = edge

    def done(self, job: int) -> int:
        """Return the iterations of a job that count."""
        return self.last[job][0] - self.first[job][0] if job in self.first else 0

    @property
    def is_whole(self) -> bool:
        """Tell whether every job has ended enough iterations."""
        return all(self.done(job) >= WINDOW for job in self.since)

    def speed(self, job: int) -> float:
        """Return a job's iterations per ns."""
        return self.done(job) / self._took_ns(job)

    def waited(self, job: int) -> float:
        """Return the share of its time that a job waited for memory."""
        return (self.last[job][2] - self.first[job][2]) / self._took_ns(job)

    def _took_ns(self, job: int) -> int:
        return max(1, self.last[job][1] - self.first[job][1])


class Trials:
    """Keeps what was measured of the jobs that are there."""

    def __init__(self, weight_of: Mapping[int, float] | None = None) -> None:
        """Know nothing; each job's throughput counts 1 unless ``weight_of`` says otherwise."""
        self.weight_of: Mapping[int, float] = weight_of or {}
        self._forget((), 0)

    def _forget(self, jobs: tuple[int, ...], budget: int) -> None:
        self._jobs, self._budget = jobs, budget
        self._alone_ns: dict[int, int] = {}
        self._peak: dict[int, int] = {}
        self._without = _Side()
        self._trials: list[_Trial] = []
        self._replaced = 0
        self._used: _Trial | None = None
        self._window: _Window | None = None
        self._is_settled = False
        """A window has ended."""
        self._is_open = False

    @property
    def saves(self) -> bool:
        """Tell whether the choice is in force."""
        return self._used is not None

    @property
    def is_open(self) -> bool:
        """Tell whether a choice is on trial: jobs that wait for nobody tell nobody, so somebody has to look."""
        return self._is_open

    @property
    def asks(self) -> bool:
        """Tell whether a choice could come into force: else none needs to be made, which takes time."""
        if self._used is not None or any(trial.is_good is None and trial.found.figures for trial in self._trials):
            return True
        waits = not self._without.figures or self._without.waited >= LEAST_WAITED
        return waits and self._rejected < MOST_TRIALS

    @property
    def _rejected(self) -> int:
        return sum(trial.is_good is False for trial in self._trials)

    def limits_for(self, view: PoolView, chosen: Mapping[int, int]) -> Mapping[int, int]:
        """Return what the jobs that leave it to the broker may hold now, in regions, 0: what they want.

        Args:
            view: The pool, now.
            chosen: What predictions say is best, for each job that leaves it to the broker; nothing
                where nobody ``asks``.
        """
        jobs = tuple(sorted(job.job for job in view.jobs))
        if jobs != self._jobs or view.budget != self._budget:
            self._forget(jobs, view.budget)
        self._note(view)
        wishes = {job: limit for job, limit in chosen.items() if limit > 0}
        if any(self._peak.get(job.job, 0) > view.budget for job in view.jobs if job.less):
            self._used, self._is_open = _Trial(chosen), False
            return chosen
        trial = self._trial_of(wishes) if wishes else None
        self._measure(view)
        wanted = self._next(trial)
        self._is_open = trial is not None and trial.is_good is None and not self._is_not_worth_it(trial)
        if wanted is not self._used:
            self._used, self._window = wanted, None
        if wanted is None:
            return {job.job: 0 for job in view.jobs if job.less}
        return {job.job: wanted.limits.get(job.job, 0) for job in view.jobs if job.less}

    def _note(self, view: PoolView) -> None:
        for job in view.jobs:
            if job.profile is not None:
                if not self._is_settled:  # a job's first iterations may take several times as long
                    took_ns = max(1, job.profile.duration_ns)
                    self._alone_ns[job.job] = min(took_ns, self._alone_ns.get(job.job, took_ns))
                if job.limit == 0:
                    self._peak[job.job] = job.profile.peak
            self._peak[job.job] = max(self._peak.get(job.job, 0), job.wanted)

    # -- which choice is on trial ------------------------------------------------------------------

    def _trial_of(self, limits: Mapping[int, int]) -> _Trial | None:
        """Return the trial of a choice, or of one like it; ``None``: enough were rejected."""
        for trial in self._trials:
            if _is_alike(trial.limits, limits):
                return trial
        open_one = next((trial for trial in self._trials if trial.is_good is None), None)
        if open_one is not None:
            if not open_one.found.figures and self._replaced < MOST_TRIALS:  # others have told their ways since
                self._replaced += 1
                open_one.limits = limits
                if self._used is open_one:
                    self._window = None
            return open_one
        if self._rejected >= MOST_TRIALS:
            return None
        self._trials.append(_Trial(limits))
        return self._trials[-1]

    def _next(self, trial: _Trial | None) -> _Trial | None:
        """Return what is to be in force now."""
        if trial is None or trial.is_good is False:
            return None
        if trial.is_good:
            return trial
        if self._window is not None:
            return self._used  # it ends first
        n_with, n_without = len(trial.found.figures), len(self._without.figures)
        if n_without < FEWEST or self._is_not_worth_it(trial):
            return None
        fewest = min(n_with, n_without)
        is_faster = fewest > 0 and trial.found.mean >= self._without.mean
        if fewest >= MOST or (fewest >= FEWEST and (not is_faster or self._is_clear(trial))):
            trial.is_good = is_faster
            return trial if trial.is_good else None
        is_second = n_with % 2 == 1  # in pairs, since each change costs
        return trial if is_second or n_with < n_without else None

    def _is_not_worth_it(self, trial: _Trial) -> bool:
        """Tell whether jobs wait for so little that a choice which has not been tried yet is not tried."""
        return not trial.found.figures and bool(self._without.figures) and self._without.waited < LEAST_WAITED

    def _is_clear(self, trial: _Trial) -> bool:
        error = (trial.found.error**2 + self._without.error**2) ** 0.5
        return abs(trial.found.mean - self._without.mean) > CLEAR * error

    # -- measuring ---------------------------------------------------------------------------------

    def _measure(self, view: PoolView) -> None:
        """Go on with the window; enter its figure when it has ended."""
        if any(job.job not in self._alone_ns for job in view.jobs):
            return
        if self._window is None:
            self._window = _Window(view.now_ns, {job.job: job.iteration for job in view.jobs})
        window = self._window
        for job in view.jobs:
            window.follow(job)
        took_ns = view.now_ns - window.changed_ns
        is_slow = self._used is not None and took_ns > SLOW * self._without.took_ns > 0
        if not window.is_whole and not is_slow:
            return
        if self._used is not None and not window.is_whole:
            self._used.is_good = False
            self._window = None
            return
        if not self._is_settled:
            self._is_settled, self._window = True, None
            return
        side = self._used.found if self._used is not None else self._without
        weights = {job: self.weight_of.get(job, 1.0) * alone_ns for job, alone_ns in self._alone_ns.items()}
        side.figures.append(sum(weights[job] * window.speed(job) for job in window.since))
        side.took_ns = took_ns
        side.waited = sum(map(window.waited, window.since)) / max(1, len(window.since))
        if len(self._without.figures) > MOST:
            del self._without.figures[0]
        self._window = None


def _is_alike(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    return one.keys() == other.keys() and all(abs(one[job] - other[job]) <= ALIKE * one[job] for job in one)
