"""Choose operating points: which jobs go on with less memory, and what each of them may hold then.

A job goes on with less where that gets all jobs further. A job that leaves the choice to the broker
(``--save auto``) says how long an iteration would take with how much (``less_limit``, ``less_ns``);
one that pages says how long a region takes to go and come, and the rest is predicted. What it would
do with all that it wants is known from iterations without a limit; of one that has never had all of
it the job says how much that would be.

Guarantees
    * Nobody waits for a choice, and a job whose limit was set by a person keeps it.
    * After a choice it rests (``zico.broker.planning.RESTS``), unless jobs, budget or shares are
      others.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.broker.planning import BackgroundPlanning
from zico.scheduler.operating_points import choose
from zico.scheduler.plan_search import alike, known_of
from zico.scheduler.simulate import load_of
from zico.scheduler.state import POINT_SHARES, OperatingPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zico.scheduler.plan_search import Known
    from zico.scheduler.simulate import Load
    from zico.scheduler.state import JobView, PoolView, Profile


# --------------------------------------------------------------------------------------------------
# How long iterations of jobs that page would take with less: predicted, then corrected by what they
# took.
#
# What lies above a limit leaves and comes back, at the rates that the job's tier was measured with,
# and nothing of that is hidden: in each iteration as much as what the job holds rises above the
# limit by::
#
#     held        ___/##\__/#\___      above the limit: what rises there has to leave
#     limit    ----------------        and to come back once
#
# Once an iteration under a limit has been measured, all predictions are scaled so that this one is
# right.
#
# Known limitations
#     A measured iteration is also slower for what its neighbours did to the processor and to
#     memory.

HOW = "page"
_SETTLES = 3
"""Iterations after a limit's change that do not count: its first ones learn."""
_ALIKE = 0.1  # of the time lost: what differs less is not told


@dataclasses.dataclass
class _Seen:
    """What is known of one job."""

    limit: int = 0
    since: int = 0
    """The iteration at which it got that."""
    scale: float = 1.0
    """Of the time lost, over what was predicted."""


class PagedWays:
    """What was measured of jobs that page."""

    def __init__(self) -> None:
        """Know nothing."""
        self._seen: dict[int, _Seen] = {}

    def keep(self, jobs: set[int]) -> None:
        """Forget all others."""
        self._seen = {job: seen for job, seen in self._seen.items() if job in jobs}

    def of(self, job: JobView, wanted: Profile | None) -> tuple[OperatingPoint, ...]:
        """Return a job's ways; what it has told is how long one region takes to leave and come back.

        Args:
            job: The job, as it is now.
            wanted: Its iteration with all that it wants, if that is known.
        """
        if not job.less or job.less[0].how != HOW:
            return job.less
        if wanted is None:
            return ()
        region_ns = job.less[0].duration_ns / job.less[0].limit
        seen = self._seen.setdefault(job.job, _Seen(job.limit, job.iteration))
        self._learn(job, wanted, seen, region_ns)
        return tuple(
            OperatingPoint(HOW, limit, wanted.duration_ns + round(seen.scale * region_ns * rises(wanted, limit)))
            for limit in (int(share * wanted.peak) for share in POINT_SHARES)
            if limit > 0
        )

    def _learn(self, job: JobView, wanted: Profile, seen: _Seen, region_ns: float) -> None:
        if job.limit != seen.limit:
            seen.limit, seen.since = job.limit, job.iteration
        if not job.limit or job.profile is None or job.iteration < seen.since + _SETTLES:
            return
        predicted_ns = region_ns * rises(wanted, job.limit)
        if predicted_ns > 0:
            scale = max(0.0, job.profile.duration_ns - wanted.duration_ns) / predicted_ns
            if abs(scale - seen.scale) > _ALIKE * max(seen.scale, _ALIKE):
                seen.scale = scale


def rises(profile: Profile, limit: int) -> int:
    """Return by how many regions in all a job rises above a limit in an iteration."""
    above = np.maximum(np.asarray(profile.held, np.int64) - limit, 0)
    return int(np.maximum(np.diff(above, prepend=above[-1]), 0).sum())


# --------------------------------------------------------------------------------------------------

_WHOLE = 0.95
"""Of what a job wants: an iteration that held less went on with less, since its limit has only just been lifted, or
since a neighbour waited for it."""

Ways = tuple[tuple[int, tuple["OperatingPoint", ...]], ...]
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
        self._background_planning: BackgroundPlanning[Mapping[int, int]] = BackgroundPlanning("zico-savings", now_s)

    def limits_for(self, view: PoolView) -> Mapping[int, int]:
        """Return what the jobs that leave it to the broker may hold, in regions, 0: what they want.

        Begins to think in a thread if the last choice is out of date.
        """
        chosen = self._background_planning.answer or {}
        if self._background_planning.is_busy:
            return chosen
        for job in view.jobs:
            if job.profile is not None and job.limit == 0 and job.profile.peak >= _WHOLE * job.wanted:
                self._wanted[job.job] = job.profile
        self._paged.keep({job.job for job in view.jobs})
        ways = tuple((job.job, self._paged.of(job, self._wanted_by(job))) for job in view.jobs if job.less)
        known = tuple(
            one._replace(peak=self._wanted[one.job].peak, duration_ns=self._wanted[one.job].duration_ns)
            for one in known_of(view)
            if one.job in self._wanted
        )
        same = view.budget == self._budget and ways == self._ways
        if (
            not ways
            or (same and alike(known, self._known))
            or (view.budget == self._budget and self._background_planning.rests)
        ):
            return chosen if ways else {}
        self._budget, self._ways, self._known = view.budget, ways, known
        told = dict(ways)
        loads = {
            job.job: load_of(job, wanted, told.get(job.job, ()))
            for job in view.jobs
            if (wanted := self._wanted_by(job)) is not None
        }
        names = ", ".join(load.name for load in loads.values())
        self._background_planning.begin(lambda: _limits(loads, view), f"no way to save was chosen for {names}")
        return chosen

    def wait(self, within_s: float) -> bool:
        """Wait until no choice is being made; false if that takes longer."""
        return self._background_planning.wait(within_s)

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
