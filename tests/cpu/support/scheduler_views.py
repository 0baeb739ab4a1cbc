"""The compiled predictions on Python's views, for tests that say what they expect in those terms."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zico.pool.layout import JobState
from zico.scheduler import demand, greedy
from zico.scheduler.packed import Snapshot
from zico.scheduler.state import PoolView
from zico.trace.profile import claim_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.scheduler.state import JobView, Profile


class Staircase(NamedTuple):
    """Regions over time from now on, the last level for ever."""

    t_ns: NDArray[np.int64]
    level: NDArray[np.int64]


class Shift(NamedTuple):
    """When a waiting job may start, and what keeps it from starting now."""

    delay_ns: int
    conflict_ns: int


def _in_a_snapshot(job: JobView, now_ns: int = 0) -> tuple[Snapshot, Any]:
    snapshot = Snapshot(PoolView(now_ns, 0, (job,)))
    return snapshot, snapshot.jobs[0]


def claim(job: JobView) -> int:
    """Return the most that a job may still come to hold, by its profile."""
    if job.profile is None:
        return job.held
    if job.phase == JobState.BOUNDARY:
        return max(job.held, job.profile.peak)
    record = job.profile.record[0]
    return max(job.held, int(claim_at(record, record["claims"], job.progress)))


def in_pool(view: PoolView) -> PoolView:
    """Return the jobs with what a pool says that they claim, which goes by their profiles."""
    jobs = tuple(
        dataclasses.replace(
            job,
            claim=claim(job),
            must_finish=int(job.phase == JobState.RUNNING and job.profile is not None),
            most=max(claim(job), job.persistent, job.profile.peak if job.profile is not None else 0),
        )
        for job in view.jobs
    )
    return dataclasses.replace(view, jobs=jobs)


def that_yields(job: JobView) -> JobView:
    """Return the job as one that evicts at its boundary what others wait for."""
    yielded = job.held if job.phase == JobState.BOUNDARY else 0
    return dataclasses.replace(job, held=job.held - yielded, yielded=yielded, kept=0)


def keeping(job: JobView) -> JobView:
    """Return the job as one that evicts nothing."""
    return dataclasses.replace(job, held=job.held + job.yielded, yielded=0, kept=job.persistent)


def position_ns(job: JobView) -> int:
    """Return how far into its profile's time a job has come."""
    _snapshot, record = _in_a_snapshot(job, 0)
    return int(demand.position_ns(record))


def remaining(job: JobView, now_ns: int) -> Staircase:
    """Return what a job holds from now on if it starts nothing new."""
    return total_of(now_ns, [job])


def planned(job: JobView, profile: Profile, delay_ns: int) -> Staircase:
    """Return what a job at its boundary holds if it starts after a delay."""
    _snapshot, record = _in_a_snapshot(dataclasses.replace(job, profile=profile))
    return Staircase(*demand.reserved(demand.level(job.held), record, delay_ns))


def total(staircases: Sequence[Staircase]) -> Staircase:
    """Return the sum."""
    merged = tuple(demand.level(0))
    for staircase in staircases:
        merged = demand.added(merged, tuple(staircase))
    return Staircase(*merged)


def total_of(now_ns: int, jobs: Sequence[JobView]) -> Staircase:
    """Return what all jobs of a snapshot hold from now on."""
    snapshot = Snapshot(PoolView(now_ns, 0, tuple(jobs)))
    return Staircase(*demand.total(snapshot.snapshot[0]))


def level_at(staircase: Staircase, t_ns: int) -> int:
    """Return the regions held at a time from now."""
    return int(staircase.level[np.searchsorted(staircase.t_ns, t_ns, side="right") - 1])


def smallest_delay(others: Staircase, job: JobView, profile: Profile, budget: int) -> Shift:
    """Return the smallest delay after which a job's iteration fits, and the first conflict of a start now."""
    _snapshot, record = _in_a_snapshot(dataclasses.replace(job, profile=profile))
    return Shift(*greedy.smallest_delay(tuple(others), record, budget))
