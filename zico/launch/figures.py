"""How a run ended, and its figures: what the supervisor saw of each command, joined with what the brokers tell."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from zico.base.decoding import fields_for
from zico.broker.protocol.messages import ProcessFigures, Spent
from zico.launch.jobs import NOT_EXECUTABLE_CODE, NOT_FOUND_CODE
from zico.report.attribution import attribute
from zico.report.model import JobFigures, OutsideProcess, PoolFigures, RunReport, jain_index, owner_of, together

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from zico.base.settings import Settings
    from zico.broker.protocol.messages import JobReport, Outside, Report
    from zico.launch.jobs import Command

NEVER_JOINED = "no framework was imported"
NEVER_ITERATED = "Zico saw no iteration end"
NOTHING_LARGE = "all its tensors are smaller than those of the pool (64 KiB, or ZICO_THRESHOLD), and outside the budget"
NOT_STARTED = "was not started"
NEVER_READY = "it ended before the broker was ready"
BROKER_GONE = "there are no figures: the broker did not answer"


@dataclasses.dataclass(frozen=True)
class JobOutcome:
    """How one command ended."""

    command: Command
    exit_code: int
    wall_s: float
    ended_s: float
    """On the monotonic clock."""
    pool: int = 0
    """The number of the device on which it ran."""
    outside: tuple[OutsideProcess, ...] = ()
    """Its processes that were seen outside the pool."""
    loaded: str = ""
    """The frameworks that a process of it has loaded."""
    logged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What it has logged."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    jobs: tuple[JobOutcome, ...]
    reports: tuple[Report | None, ...]
    """The figures of each device's broker; ``None`` if it had ended before, or was not ready."""
    signum: int = 0
    """The signal that ended the run; 0: none did."""
    never_ready: frozenset[int] = frozenset()
    """The numbers of the devices whose brokers were not ready before all jobs had ended."""

    @property
    def exit_code(self) -> int:
        """Return 0 if every job's is, else that of the job which failed first."""
        failed = [job for job in self.jobs if job.exit_code != 0]
        return min(failed, key=lambda job: job.ended_s).exit_code if failed else 0


def run_report(outcome: Outcome, settings: Sequence[Settings]) -> RunReport:
    """Return the figures of a run that has ended. The first process of a job that joined stands for the job.

    Args:
        outcome: Of the run.
        settings: Of each of its devices.
    """
    first, *_ = settings
    names = {one.command.name for one in outcome.jobs}
    jobs = tuple(
        msgspec.structs.replace(
            job_figures(job, outcome.reports[job.pool], names, was_ready=job.pool not in outcome.never_ready),
            device=settings[job.pool].device.value,
        )
        for job in outcome.jobs
    )
    pools = tuple(
        _pool_figures(report, of_one, sum(job.pool == number for job in outcome.jobs))
        for number, (report, of_one) in enumerate(zip(outcome.reports, settings, strict=True))
    )
    return RunReport(
        device=",".join(one.device.value for one in settings),
        policy=first.policy.value,
        budget_bytes=sum(one.budget_bytes.value for one in settings),
        budget_origin=first.budget_bytes.origin,
        pool=pools[0] if len(pools) == 1 else together(pools, _fairness(jobs)),
        pools=pools,
        jobs=jobs,
    )


def job_figures(job: JobOutcome, report: Report | None, names: set[str], *, was_ready: bool) -> JobFigures:
    """Return the figures of a command that has ended.

    Args:
        job: How it ended.
        report: Of the broker of its device; ``None`` if it did not answer.
        names: Of all commands of the run.
        was_ready: That broker was ready.
    """
    of_job = job.command.name
    members = [one for one in (report.jobs if report else ()) if owner_of(one.name, names) == of_job]
    told = [one for one in (report.outside if report else ()) if owner_of(one.name, names) == of_job]
    missing = NEVER_JOINED if report else BROKER_GONE if was_ready else NEVER_READY
    return _joined(job, members, told, missing)


def _joined(job: JobOutcome, members: Sequence[JobReport], told: Sequence[Outside], missing: str) -> JobFigures:
    name, command = job.command.name, job.command.text
    outside = tuple(_outside(job.outside, told, {member.pid for member in members}))
    if not members:
        not_started = job.wall_s == 0.0 and job.exit_code in {NOT_FOUND_CODE, NOT_EXECUTABLE_CODE}
        if job.loaded and missing == NEVER_JOINED:
            missing = f"{job.loaded} was imported, but no process joined the pool"
        note = NOT_STARTED if not_started else outside[0].text if outside else missing
        return JobFigures(
            name=name,
            command=command,
            exit_code=job.exit_code,
            wall_s=job.wall_s,
            compute=job.command.share.compute,
            note=note,
            outside=outside,
            logged=dict(job.logged),
        )
    first, *others = members
    return JobFigures(
        **fields_for(ProcessFigures, first) | {"name": name},
        command=command,
        exit_code=job.exit_code,
        wall_s=job.wall_s,
        logged=dict(job.logged),
        weight=first.share.weight,
        priority=first.share.priority,
        slo=first.share.slo,
        compute=job.command.share.compute,
        attribution=attribute(first.spent) if isinstance(first.spent, Spent) else msgspec.UNSET,
        outside=outside,
        note=_note(first, outside),
        other_processes=tuple(
            ProcessFigures(**fields_for(ProcessFigures, other) | {"name": f"{name}.{number}"})
            for number, other in enumerate(others, 2)
        ),
    )


def _note(first: JobReport, outside: Sequence[OutsideProcess]) -> str:
    """Return why figures of a job are zero that joined."""
    shares_nothing = first.oom is not None or any(one.pid == first.pid for one in outside)
    nothing_large = not first.requested_bytes and not shares_nothing
    return ", and ".join([*([] if first.iterations else [NEVER_ITERATED]), *([NOTHING_LARGE] if nothing_large else [])])


def _outside(
    seen: Sequence[OutsideProcess], told: Sequence[Outside], members: Collection[int]
) -> Iterator[OutsideProcess]:
    """Yield the processes that were seen outside and those that told so themselves, each once for each framework."""
    memory_bytes = {one.pid: one.memory_bytes for one in seen}
    for one in told:
        yield OutsideProcess(
            pid=one.pid, framework=one.framework, reason=one.reason, memory_bytes=memory_bytes.get(one.pid, 0)
        )
    known = {one.pid for one in told} | set(members)
    yield from (one for one in seen if one.pid not in known)


def _pool_figures(report: Report | None, settings: Settings, n_jobs: int) -> PoolFigures:
    where = PoolFigures(
        device=settings.device.value,
        policy=settings.policy.value,
        budget_bytes=settings.budget_bytes.value,
        budget_origin=settings.budget_bytes.origin,
        n_jobs=n_jobs,
        region_bytes=settings.region_bytes.value,
    )
    if report is None:
        return where
    return msgspec.structs.replace(
        where,
        **msgspec.structs.asdict(report.pool),
        sum_of_job_peaks_bytes=sum(member.peak_bytes for member in report.jobs),
        jain_index=_fairness(report.jobs),
    )


def _fairness(members: Sequence[ProcessFigures]) -> float | msgspec.UnsetType:
    shares = [member.normalised for member in members]
    known = [share for share in shares if isinstance(share, float)]
    return (jain_index(known) or 1.0) if known and len(known) == len(shares) else msgspec.UNSET  # nobody: all alike
