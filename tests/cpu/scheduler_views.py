"""The compiled predictions on Python's views, for tests that say what they expect in those terms."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zico.scheduler import demand, greedy
from zico.scheduler.packed import Snapshot
from zico.scheduler.state import PoolView

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
    """Return the most that a job may still come to hold."""
    _snapshot, record = _in_a_snapshot(job)
    return int(demand.claim_of(record))


def position_ns(job: JobView, now_ns: int) -> int:
    """Return how far into its profile's time a job has come."""
    _snapshot, record = _in_a_snapshot(job, now_ns)
    return int(demand.position_ns(record, now_ns))


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
