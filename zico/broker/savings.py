"""Has jobs that can go on with less do so where that gets all of them further, and tells each what it may hold then.

A job that leaves the choice to the broker (``--save auto``) says how long an iteration would take with how much
(``JOB.less``); one that pages says how long a region takes to go and come, and the rest is predicted
(``paged_ways.py``). What it would do with all that it wants is known from iterations without a limit; of one that has
never had all of it the job says how much that would be.

Guarantees
    * Nobody waits for a choice, and a job whose limit was set by a person keeps it.
    * After a choice it rests (``thinking.RESTS``), unless jobs, budget or shares are others.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from zico.broker.paged_ways import PagedWays
from zico.broker.thinking import Thinking
from zico.scheduler.planner import alike, known_of
from zico.scheduler.saving import choose
from zico.scheduler.simulate import load_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zico.scheduler.planner import Known
    from zico.scheduler.simulate import Load
    from zico.scheduler.state import JobView, Less, PoolView, Profile

Ways = tuple[tuple[int, tuple["Less", ...]], ...]
"""By job."""


class Savings:
    """Keeps the last choice; makes a new one when the jobs, what they want, their ways or the budget are others."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Choose nothing yet."""
        self._wanted: dict[int, Profile] = {}
        self._known: tuple[Known, ...] = ()
        self._ways: Ways = ()
        self._budget = 0
        self._paged = PagedWays()
        self._thinking: Thinking[Mapping[int, int]] = Thinking("zico-savings", now_s)

    def limits_for(self, view: PoolView) -> Mapping[int, int]:
        """Return what the jobs that leave it to the broker may hold, in regions, 0: what they want.

        Begins to think in a thread if the last choice is out of date.
        """
        chosen = self._thinking.answer or {}
        if self._thinking.is_busy:
            return chosen
        for job in view.jobs:
            if job.profile is not None and job.limit == 0:
                self._wanted[job.job] = job.profile
        self._paged.keep({job.job for job in view.jobs})
        ways = tuple((job.job, self._paged.of(job, self._wanted_by(job))) for job in view.jobs if job.less)
        known = tuple(
            one._replace(peak=self._wanted[one.job].peak, duration_ns=self._wanted[one.job].duration_ns)
            for one in known_of(view)
            if one.job in self._wanted
        )
        same = view.budget == self._budget and ways == self._ways
        if not ways or (same and alike(known, self._known)) or (view.budget == self._budget and self._thinking.rests):
            return chosen if ways else {}
        self._budget, self._ways, self._known = view.budget, ways, known
        told = dict(ways)
        loads = {
            job.job: load_of(job, wanted, told.get(job.job, ()))
            for job in view.jobs
            if (wanted := self._wanted_by(job)) is not None
        }
        names = ", ".join(load.name for load in loads.values())
        self._thinking.begin(lambda: _limits(loads, view), f"no way to save was chosen for {names}")
        return chosen

    def wait(self, within_s: float) -> bool:
        """Wait until nothing is being thought of; false if that takes longer."""
        return self._thinking.wait(within_s)

    def _wanted_by(self, job: JobView) -> Profile | None:
        return self._wanted.get(job.job) or _without_limit(job)


def _without_limit(job: JobView) -> Profile | None:
    """Return the profile of a job that has never had all that it wants: where it was at its limit it wants that."""
    if job.profile is None:
        return None
    most = job.profile.peak
    held = tuple(max(held, job.wanted) if held == most else held for held in job.profile.held)
    return dataclasses.replace(job.profile, held=held)


def _limits(loads: Mapping[int, Load], view: PoolView) -> Mapping[int, int]:
    less = choose(tuple(loads.values()), view.budget, slowdown=view.slowdown).less
    chosen = zip(loads.items(), less, strict=True)
    return {job: way.limit if way else 0 for (job, load), way in chosen if load.less}
