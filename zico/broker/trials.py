"""Decide whether jobs that can save hold their shares of the budget: tried once against none. Pure.

Theory of operation
    Jobs that leave it to the broker (``--save auto``) hold what they want at first and wait for
    each other. Where they wait for a tenth of their time, each gets its share of the budget by
    weight (``zico.scheduler.shares.budget_shares``). Windows of some iterations are measured, waits
    included, and the faster setting stays::

        none      settles  .61 .60
        shares                     .81 .79     -> shares

    Two windows of a setting follow each other: jobs that go back to waiting wait most until the
    policy has shifted their iterations again.

    A window's figure is the sum over the jobs of weight and speed: iterations a second times the
    time of the shortest that was seen in the first window. It begins some iterations after a
    change, since the first ones learn. The first window does not count otherwise: jobs that begin
    together wait for each other until the policy has shifted their iterations.

Guarantees
    * After the trial, shares are in force only if they were faster than none.
    * A verdict lasts as long as the jobs, their weights and the budget, so nothing swings for ever.
    * Shares are rejected whose window takes more than ``SLOW`` times as long as one without.
    * Nothing is tried while jobs wait for less than ``LEAST_WAITED`` of their time. The last of
      ``WINDOWS`` windows says so: in the first one, jobs may still learn how much to save.
    * Nothing is tried where a share is less than what its job keeps between iterations.

Known limitations
    A job that ends no iteration keeps the first window, the one without, open.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

from zico.pool.layout import JobState
from zico.scheduler.shares import budget_shares

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zico.scheduler.state import JobView, PoolView

SETTLES = 3
"""Iterations of each job after a change that do not count."""
WINDOW = 5
"""Iterations of each job that a window has at least."""
WINDOWS = 2
"""Windows of each setting before the verdict."""
SLOW = 2.0
"""Times as long as a window without shares: a window with shares that takes longer ends the trial."""
LEAST_WAITED = 0.1
"""Of the jobs' time: where they wait for less, nothing is tried. Hooks for saved tensors alone take 4 to 6 % of a
ResNet's time on a processor, and copies come on top (docs/design/swapping.md)."""

Edge = tuple[int, int, int]
"""Iterations that a job has ended, when the one that runs began, and for how long it has waited, ever, in ns."""
NONE: Mapping[int, int] = {}


def wanted_of(job: JobView) -> int:
    """Return the regions that a job without a limit would hold, as far as is known."""
    return max(job.wanted, job.profile.peak if job.profile is not None else 0)


def shares_of(view: PoolView) -> Mapping[int, int]:
    """Return the share of each job that can save and wants more than that; empty: there is nothing to try."""
    wants = [wanted_of(job) for job in view.jobs]
    shares = zip(view.jobs, wants, budget_shares(wants, [job.weight for job in view.jobs], view.budget), strict=True)
    limited = [(job, share) for job, want, share in shares if job.saves and share < want]
    if any(share < max(1, job.persistent) for job, share in limited):
        return NONE
    return {job.job: share for job, share in limited}


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

    @property
    def waited(self) -> float:
        """Return the share of their time that jobs waited for memory."""
        return statistics.fmean((self.last[job][2] - self.first[job][2]) / self._took_ns(job) for job in self.since)

    def _took_ns(self, job: int) -> int:
        return max(1, self.last[job][1] - self.first[job][1])


class SavingTrial:
    """Keeps what was measured of the jobs that are there."""

    def __init__(self) -> None:
        self._begin(())

    def _begin(self, case: tuple[object, ...]) -> None:
        self._case = case
        self._alone_ns: dict[int, int] = {}
        self._is_settled = False
        """A window has ended."""
        self._without: list[float] = []
        self._with: list[float] = []
        self._without_ns = 0
        self._shares = NONE
        """What each job may hold that saves now; empty: nobody does."""
        self._is_over = False
        self._window: _Window | None = None

    @property
    def is_open(self) -> bool:
        """Tell whether shares are on trial: jobs that wait for nobody tell nobody, so somebody has to look."""
        return bool(self._shares) and not self._is_over

    def limits_for(self, view: PoolView) -> Mapping[int, int]:
        """Return how many regions each job may hold that is to save now; the others hold what they want."""
        case = (view.budget, *sorted((job.job, job.saves, job.weight) for job in view.jobs))
        if case != self._case:
            self._begin(case)
        if not self._is_over and any(job.saves for job in view.jobs):
            self._measure(view)
        return self._shares

    def _measure(self, view: PoolView) -> None:
        """Go on with the window; draw the conclusion when it has ended."""
        if not self._is_settled:  # a job's first iterations may take several times as long
            for job in view.jobs:
                if job.profile is not None:
                    took_ns = max(1, job.profile.duration_ns)
                    self._alone_ns[job.job] = min(took_ns, self._alone_ns.get(job.job, took_ns))
        if any(job.job not in self._alone_ns for job in view.jobs):
            return
        if self._window is None:
            self._window = _Window(view.now_ns, {job.job: job.iteration for job in view.jobs})
        window = self._window
        for job in view.jobs:
            window.follow(job)
        took_ns = view.now_ns - window.changed_ns
        if window.is_whole:
            self._window = None
            self._conclude(view, window, took_ns)
        elif self._shares and took_ns > SLOW * self._without_ns:
            self._end(NONE)

    def _conclude(self, view: PoolView, window: _Window, took_ns: int) -> None:
        """Enter the figure of a window that has ended; go over to shares, or to the faster setting."""
        if not self._is_settled:
            self._is_settled = True
            return
        weight_of = {job.job: job.weight * self._alone_ns[job.job] for job in view.jobs}
        figure = sum(weight * window.speed(job) for job, weight in weight_of.items())
        if self._shares:
            self._with.append(figure)
            if len(self._with) == WINDOWS:
                is_faster = statistics.fmean(self._with) > statistics.fmean(self._without)
                self._end(self._shares if is_faster else NONE)
            return
        self._without = [*self._without, figure][-WINDOWS:]
        self._without_ns = took_ns
        if len(self._without) == WINDOWS and window.waited >= LEAST_WAITED:
            self._shares = shares_of(view)

    def _end(self, shares: Mapping[int, int]) -> None:
        self._is_over, self._shares, self._window = True, shares, None
