"""Join what the supervisor saw of each command with the broker's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from zico.broker.messages import ProcessFigures
from zico.launch.jobs import NOT_EXECUTABLE_CODE, NOT_FOUND_CODE
from zico.report.model import JobFigures, PoolFigures, RunReport, jain_index, owner_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.broker.messages import JobReport, PoolReport
    from zico.config import Settings
    from zico.launch.supervisor import JobOutcome, Outcome

NEVER_JOINED = "no framework was imported"
NEVER_ITERATED = "Zico saw no iteration end"
NOT_STARTED = "was not started"
BROKER_GONE = "there are no figures: the broker had ended"


def run_report(outcome: Outcome, settings: Settings) -> RunReport:
    """Return the figures of a run that has ended. The first process of a job that joined stands for the job."""
    members = outcome.report.jobs if outcome.report else ()
    names = {job.command.name for job in outcome.jobs}
    missing = NEVER_JOINED if outcome.report else BROKER_GONE
    jobs = tuple(
        _job_figures(job, [member for member in members if owner_of(member.name, names) == job.command.name], missing)
        for job in outcome.jobs
    )
    return RunReport(
        device=settings.device.value,
        policy=settings.policy.value,
        budget_bytes=settings.budget_bytes.value,
        budget_origin=settings.budget_bytes.origin,
        pool=_pool_figures(outcome.report.pool if outcome.report else None, members, settings),
        jobs=jobs,
    )


def _job_figures(job: JobOutcome, members: Sequence[JobReport], missing: str) -> JobFigures:
    name, command = job.command.name, job.command.text
    if not members:
        not_started = job.wall_s == 0.0 and job.exit_code in {NOT_FOUND_CODE, NOT_EXECUTABLE_CODE}
        note = NOT_STARTED if not_started else job.complaint or missing
        return JobFigures(name=name, command=command, exit_code=job.exit_code, wall_s=job.wall_s, note=note)
    first, *others = members
    return JobFigures(
        **_figures(first) | {"name": name},
        command=command,
        exit_code=job.exit_code,
        wall_s=job.wall_s,
        weight=first.share.weight,
        priority=first.share.priority,
        slo=first.share.slo,
        note="" if first.iterations else NEVER_ITERATED,
        other_processes=tuple(
            ProcessFigures(**_figures(other) | {"name": f"{name}.{number}"}) for number, other in enumerate(others, 2)
        ),
    )


def _figures(member: JobReport) -> dict[str, Any]:
    """Return what a run's report tells of a member as the broker tells it."""
    return {field: getattr(member, field) for field in ProcessFigures.__struct_fields__}


def _pool_figures(pool: PoolReport | None, members: Sequence[JobReport], settings: Settings) -> PoolFigures:
    if pool is None:
        return PoolFigures(region_bytes=settings.region_bytes.value)
    return PoolFigures(
        **msgspec.structs.asdict(pool),
        sum_of_job_peaks_bytes=sum(member.peak_bytes for member in members),
        jain_index=_fairness(members),
    )


def _fairness(members: Sequence[JobReport]) -> float | msgspec.UnsetType:
    shares = [member.normalised for member in members]
    known = [share for share in shares if isinstance(share, float)]
    return jain_index(known) if known and len(known) == len(shares) else msgspec.UNSET
