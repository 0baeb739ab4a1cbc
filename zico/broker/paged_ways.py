r"""How long iterations of jobs that page would take with less: predicted, then corrected by what they took.

What lies above a limit leaves and comes back, at the rates that the job's tier was measured with, and nothing of that
is hidden: in each iteration as much as what the job holds rises above the limit by::

    held        ___/##\__/#\___      above the limit: what rises there has to leave
    limit    ----------------        and to come back once

Once an iteration under a limit has been measured, all predictions are scaled so that this one is right.

Known limitations
    A measured iteration is also slower for what its neighbours did to the processor and to memory.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.scheduler.state import LESS_SHARES, Less

if TYPE_CHECKING:
    from zico.scheduler.state import JobView, Profile

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

    def of(self, job: JobView, wanted: Profile | None) -> tuple[Less, ...]:
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
            Less(HOW, limit, wanted.duration_ns + round(seen.scale * region_ns * rises(wanted, limit)))
            for limit in (int(share * wanted.peak) for share in LESS_SHARES)
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
