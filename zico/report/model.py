"""The figures of a run as they are shown and written: frozen, in bytes and seconds, with one JSON form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from zico.broker.messages import JobReport, PoolReport, ProcessFigures, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN_SCHEMA = "zico.report.v1"


class JobFigures(ProcessFigures, frozen=True, kw_only=True):
    """One command: how it ended and what its first process in the pool did; zeros if none joined."""

    command: str
    exit_code: int
    wall_s: float
    note: str = ""
    """Why figures are zero; empty if they are not."""
    other_processes: tuple[ProcessFigures, ...] = ()
    """Further processes that imported a framework."""
    weight: float = 1.0
    priority: int = 0
    slo: float | None = None


class PoolFigures(PoolReport, frozen=True, kw_only=True):
    """The pool over the whole run."""

    sum_of_job_peaks_bytes: int = 0
    jain_index: float | msgspec.UnsetType = msgspec.UNSET
    """Of the jobs' normalised throughputs: 1 if all are equal, 1/n if one has all; left out where one is not known."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. New fields are only ever added."""

    schema_version: str = RUN_SCHEMA
    device: str
    policy: str
    budget_bytes: int
    budget_origin: str = ""
    pool: PoolFigures
    jobs: tuple[JobFigures, ...]

    @property
    def job_peaks_share(self) -> float:
        """Return the budget as a share of the sum of the jobs' peaks, 0 if there are none."""
        peaks_bytes = self.pool.sum_of_job_peaks_bytes
        return self.budget_bytes / peaks_bytes if peaks_bytes else 0.0


def jain_index(values: Sequence[float]) -> float:
    """Return Jain's fairness index of what each has got, 1 if nobody has got anything.

    Source: R. Jain, D. Chiu, W. Hawe, DEC-TR-301, 1984.
    """
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


def to_json(report: RunReport) -> bytes:
    """Return the report as indented JSON with a line end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


class JobProgress(msgspec.Struct, frozen=True):
    """One command of a run in progress."""

    name: str
    exit_code: int | None
    """``None`` while it runs."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run in progress."""

    elapsed_s: float
    budget_bytes: int
    jobs: tuple[JobProgress, ...]
    status: Status | None
    """``None`` while the broker does not answer."""

    @property
    def members(self) -> tuple[JobReport, ...]:
        """Return all processes in the pool."""
        return self.status.jobs if self.status else ()

    def processes_of(self, name: str) -> tuple[JobReport, ...]:
        """Return the pool's members that belong to the job called ``name``, its first process first."""
        members = self.members
        names = {job.name for job in self.jobs}
        return tuple(member for member in members if owner_of(member.name, names) == name)


def waits_for(member: JobReport, members: tuple[JobReport, ...]) -> str:
    """Return the names of those whom ``member`` waits for, separated by commas; ``memory`` if it is nobody's."""
    names = {other.job: other.name for other in members}
    return ", ".join(names.get(job, f"job {job}") for job in member.waits_for) or "memory"


def owner_of(member: str, names: set[str]) -> str | None:
    """Return which of the jobs called ``names`` a member of the pool belongs to: ``a`` owns ``a``, ``a.2`` ...

    ``None`` if none of them: a process that somebody else let join.
    """
    if member in names:
        return member
    name, dot, number = member.rpartition(".")
    return name if dot and number.isdigit() and name in names else None
