"""The figures of a run as they are shown and written: frozen, in bytes and seconds, with one JSON form."""

from __future__ import annotations

import dataclasses
import zipfile
from typing import TYPE_CHECKING

import msgspec

from zico.base.errors import ConfigError
from zico.base.units import format_bytes
from zico.broker.protocol.messages import JobReport, PoolReport, ProcessFigures, Status
from zico.report.attribution import Attribution  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from zico.broker.protocol.messages import WaitKind

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

RUN_SCHEMA = "zico.report.v1"


class OutsideProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a command that computes outside the budget."""

    pid: int
    framework: str
    """What it has imported; of several, with commas between them."""
    reason: str
    memory_bytes: int = 0
    """The most that it was seen to have of the machine's memory, beside files and shared memory; 0: not looked at."""

    @property
    def text(self) -> str:
        """Return all of that as people read it."""
        has = f" (it has had {format_bytes(self.memory_bytes)} of memory)" if self.memory_bytes else ""
        return f"process {self.pid} uses {self.framework} outside the budget{has}: {self.reason}"


class JobFigures(ProcessFigures, frozen=True, kw_only=True):
    """One command: how it ended and what its first process in the pool did; zeros if none joined."""

    command: str
    device: str = ""
    """Where it ran."""
    exit_code: int
    wall_s: float
    note: str = ""
    """Why figures are zero; empty if they are not."""
    other_processes: tuple[ProcessFigures, ...] = ()
    """Further processes that imported a framework."""
    outside: tuple[OutsideProcess, ...] = ()
    """Those of its processes that share no memory of a framework, or not of one of several."""
    weight: float = 1.0
    priority: int = 0
    slo: float | None = None
    compute: float = 1.0
    """The most that it could use of its device's processors, 1: all."""
    logged: dict[str, float] = msgspec.field(default_factory=dict)
    """The last of each number that the job has logged (``zico.log``)."""
    attribution: Attribution | msgspec.UnsetType = msgspec.UNSET
    """Where the time of its first process in the pool went; left out if none joined."""


class SweepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept and shown of one try of a sweep's job: how it ended, and what its first process did."""

    name: str
    device: str = ""
    """Where it ran."""
    tries: int = 0
    """This one included."""
    alone: bool = False
    """It was tried again with nothing beside it, since memory was out."""
    exit_code: int | None = None
    """``None``: it has not ended."""
    ran_out_of_memory: bool = False
    iterations: int = 0
    iterations_per_s: float = 0.0
    waited_s: float = 0.0
    peak_bytes: int = 0
    wall_s: float = 0.0
    logged: dict[str, float] = msgspec.field(default_factory=dict)
    note: str = ""


class PoolFigures(PoolReport, frozen=True, kw_only=True):
    """One device's pool over the whole run, or all pools of a run together."""

    device: str = ""
    policy: str = ""
    budget_bytes: int = 0
    """In the beginning."""
    budget_origin: str = ""
    n_jobs: int = 0
    """Commands that ran there."""
    sum_of_job_peaks_bytes: int = 0
    jain_index: float | msgspec.UnsetType = msgspec.UNSET
    """Jain's index of normalised throughputs: 1 if all are equal, 1/n if one has all. Left out where one is unknown."""

    @property
    def budget_then_bytes(self) -> int:
        """Return the budget in the end."""
        return self.last_budget_bytes or self.budget_bytes


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. New fields are only ever added."""

    schema_version: str = RUN_SCHEMA
    device: str
    """``host``, ``host:N`` or ``cuda:N``; of several devices all, with commas between them."""
    policy: str
    budget_bytes: int
    """In the beginning; of several devices the sum."""
    budget_origin: str = ""
    pool: PoolFigures
    """Of the only device, or of all together."""
    pools: tuple[PoolFigures, ...] = ()
    """Of each device."""
    jobs: tuple[JobFigures, ...]

    @property
    def budget_then_bytes(self) -> int:
        """Return the budget in the end; of several devices the sum."""
        return self.pool.last_budget_bytes or self.budget_bytes

    @property
    def budget_told(self) -> str:
        """Return the budget as people read it, and what it came to be where it was changed."""
        first, then = format_bytes(self.budget_bytes), format_bytes(self.budget_then_bytes)
        origin = f" ({self.budget_origin})" if self.budget_origin else ""
        return f"{first}{origin}" + (f", {then} in the end" if first != then else "")

    @property
    def peaks_told(self) -> str:
        """Return how the budget in the end compares with the jobs' own peaks; empty if no job had one."""
        peaks_bytes = self.pool.sum_of_job_peaks_bytes
        if not peaks_bytes:
            return ""
        if self.budget_then_bytes >= peaks_bytes:
            return "the budget holds all jobs' own peaks at the same time"
        return f"the budget is {self.budget_then_bytes / peaks_bytes:.0%} of the sum of the jobs' own peaks"

    @property
    def has_several_devices(self) -> bool:
        """Tell whether the run had more than one device."""
        return len(self.pools) > 1

    def on(self, number: int) -> RunReport:
        """Return the report of one of the devices, as if the run had no other."""
        pool = self.pools[number]
        return msgspec.structs.replace(
            self,
            device=pool.device,
            policy=pool.policy,
            budget_bytes=pool.budget_bytes,
            budget_origin=pool.budget_origin,
            pool=pool,
            pools=(pool,),
            jobs=tuple(job for job in self.jobs if job.device == pool.device),
        )


def together(pools: Sequence[PoolFigures], jain_index: float | msgspec.UnsetType) -> PoolFigures:
    """Return the sums of several pools' figures; peaks are added, whenever each was.

    How much slower jobs are together is a pool's own, and empty here.
    """
    first, *_ = pools

    def total(field: str) -> int:
        return sum(getattr(pool, field) for pool in pools)

    def known(field: str) -> int | msgspec.UnsetType:
        values = [getattr(pool, field) for pool in pools]
        return msgspec.UNSET if msgspec.UNSET in values else sum(values)

    return PoolFigures(
        device=",".join(pool.device for pool in pools),
        policy=first.policy,
        budget_bytes=total("budget_bytes"),
        budget_origin=first.budget_origin,
        n_jobs=total("n_jobs"),
        region_bytes=first.region_bytes if len({pool.region_bytes for pool in pools}) == 1 else 0,
        peak_granted_bytes=total("peak_granted_bytes"),
        peak_physical_bytes=total("peak_physical_bytes"),
        last_budget_bytes=total("budget_then_bytes"),
        stalls=total("stalls"),
        recoveries=total("recoveries"),
        peak_shared_bytes=total("peak_shared_bytes"),
        context_bytes=known("context_bytes"),
        foreign_bytes=known("foreign_bytes"),
        sum_of_job_peaks_bytes=total("sum_of_job_peaks_bytes"),
        jain_index=jain_index,
    )


def jain_index(values: Sequence[float]) -> float:
    """Return Jain's fairness index of what each has got: 1 if all is equal, 1/n if one has all, 0 if nobody has any.

    Source: R. Jain, D. Chiu, W. Hawe, DEC-TR-301, 1984.
    """
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 0.0


class JobProgress(msgspec.Struct, frozen=True):
    """One command of a run in progress."""

    name: str
    exit_code: int | None
    """``None`` while it runs."""
    pool: int = 0
    """The number of its pool."""
    is_outside: bool = False
    """Whether a process of it computes outside the budget."""


class PoolProgress(msgspec.Struct, frozen=True):
    """One device's pool in a run in progress."""

    device: str
    first_budget_bytes: int
    status: Status | None
    """``None`` while the broker does not answer."""
    run: str = ""
    """Whose processes are the run's own where others join the pool, too; empty: all."""

    @property
    def budget_bytes(self) -> int:
        """Return the budget now, as far as that is known."""
        return self.status.budget_bytes if self.status else self.first_budget_bytes

    @property
    def members(self) -> tuple[JobReport, ...]:
        """Return all processes in the pool."""
        return self.status.jobs if self.status else ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run in progress."""

    elapsed_s: float
    pools: tuple[PoolProgress, ...]
    jobs: tuple[JobProgress, ...]

    @property
    def has_several_devices(self) -> bool:
        """Tell whether the run has more than one device."""
        return len(self.pools) > 1

    def pool_of(self, job: JobProgress) -> PoolProgress:
        """Return the pool of a job."""
        return self.pools[job.pool]

    def processes_of(self, job: JobProgress) -> tuple[JobReport, ...]:
        """Return the members of the job's pool that belong to the job, its first process first."""
        names, pool = {one.name for one in self.jobs}, self.pool_of(job)
        own = (member for member in pool.members if pool.run in ("", member.run))
        return tuple(member for member in own if owner_of(member.name, names) == job.name)


def waits_for(member: JobReport, members: tuple[JobReport, ...]) -> str:
    """Return the names of those whom ``member`` waits for, separated by commas; ``memory`` if it is nobody's."""
    names = {other.job: other.name for other in members}
    return ", ".join(names.get(job, f"job {job}") for job in member.waits_for) or "memory"


def state_of(member: JobReport) -> str:
    """Return what a member does now, as people read it."""
    if member.waiting_s > 0:
        return "waits for memory" if member.need_bytes else "waits to start"
    return member.state


def owner_of(member: str, names: set[str]) -> str | None:
    """Return which of the jobs called ``names`` a member of the pool belongs to: ``a`` owns ``a``, ``a.2`` ...

    ``None`` if none of them: a process that somebody else let join.
    """
    if member in names:
        return member
    name, dot, number = member.rpartition(".")
    return name if dot and number.isdigit() and name in names else None


# -- the history of a run that the broker wrote: who held what and when, and every wait ------------


@dataclasses.dataclass(frozen=True)
class Record:
    """A history: n instants, m jobs, k iterations' ends, w waits, c budgets; seconds since the broker began.

    q pairs say which jobs a wait was for.
    """

    names: tuple[str, ...]
    peak_bytes: Ints
    """[m]: the most that each job held at once, as in the tables: the instants may miss it."""
    budget_t_s: Floats
    """[c]: when each budget came into force."""
    budget_bytes: Ints
    """[c]"""
    t_s: Floats
    """[n]"""
    held_bytes: Ints
    """[n, m]: regions held by each job."""
    out_bytes: Ints
    """[n, m]: of each job's live tensors, in a tier and nowhere else, in whole regions."""
    physical_bytes: Ints
    """[n]: the pool's memory as the kernel counted it, the most since the instant before."""
    boundary_job: Ints
    """[k]"""
    boundary_t_s: Floats
    """[k]"""
    wait_job: Ints
    """[w]"""
    wait_t_s: Floats
    """[w, 2]: from, to."""
    wait_kind: Ints
    """[w]: a ``WaitKind``."""
    blocker_wait: Ints
    """[q]: index of a wait."""
    blocker_job: Ints
    """[q]: a job that it was for at some time of it."""
    iteration_s: Floats
    """[m]: of each job's profile, 0 where it has none."""
    persistent_bytes: Ints
    """[m]: held at the last boundary."""
    profile_job: Ints
    """[p]"""
    profile_t_s: Floats
    """[p]: since the iteration began."""
    profile_bytes: Ints
    """[p]: held from then on, the most of recent iterations."""

    @property
    def most_budget_bytes(self) -> int:
        """Return the largest budget."""
        return int(self.budget_bytes.max())

    def of(self, jobs: Sequence[int]) -> Record:
        """Return what is recorded of these jobs, in this order; waits of others, and for others, are left out."""
        import numpy as np

        order, place = list(jobs), np.full(len(self.names), -1)
        place[order] = np.arange(len(order))
        ended, waited, profiled = (place[of] >= 0 for of in (self.boundary_job, self.wait_job, self.profile_job))
        blocked = waited[self.blocker_wait] & (place[self.blocker_job] >= 0)
        return dataclasses.replace(
            self,
            names=tuple(self.names[job] for job in order),
            peak_bytes=self.peak_bytes[order],
            held_bytes=self.held_bytes[:, order],
            out_bytes=self.out_bytes[:, order],
            boundary_job=place[self.boundary_job[ended]],
            boundary_t_s=self.boundary_t_s[ended],
            wait_job=place[self.wait_job[waited]],
            wait_t_s=self.wait_t_s[waited],
            wait_kind=self.wait_kind[waited],
            blocker_wait=(np.cumsum(waited) - 1)[self.blocker_wait[blocked]],
            blocker_job=place[self.blocker_job[blocked]],
            iteration_s=self.iteration_s[order],
            persistent_bytes=self.persistent_bytes[order],
            profile_job=place[self.profile_job[profiled]],
            profile_t_s=self.profile_t_s[profiled],
            profile_bytes=self.profile_bytes[profiled],
        )

    def boundaries_of(self, job: int) -> Floats:
        """Return when the job's iterations ended, in seconds."""
        of_job: Floats = self.boundary_t_s[self.boundary_job == job]
        return of_job

    def waits_of(self, job: int, kind: WaitKind) -> Floats:
        """Return the job's waits of that kind as [count, 2] seconds."""
        of_kind: Floats = self.wait_t_s[(self.wait_job == job) & (self.wait_kind == kind)]
        return of_kind

    def blockers(self) -> list[tuple[int, ...]]:
        """Return for each wait the jobs that it was for; empty where nobody but the pool itself was seen."""
        found: list[list[int]] = [[] for _ in self.wait_job]
        for wait, job in zip(self.blocker_wait.tolist(), self.blocker_job.tolist(), strict=True):
            found[wait].append(job)
        return [tuple(jobs) for jobs in found]

    def curve_of(self, job: int) -> tuple[Floats, Ints]:
        """Return when in its iteration a job comes to hold how many bytes; nothing if it has no profile."""
        import numpy as np

        of_job = self.profile_job == job
        held: Ints = self.profile_bytes[of_job]
        changes = np.flatnonzero(np.diff(held, prepend=-1))
        return self.profile_t_s[of_job][changes], held[changes]


_KINDS = {one.name: "i8" if one.type == "Ints" else "f8" for one in dataclasses.fields(Record)[1:]}
"""The type of each array of a record; its first field is the names."""
MAX_RECORD_BYTES = 1 << 31
"""Bytes of all fields, uncompressed. A day of sixteen jobs has some hundred MB."""


def read_record(path: Path) -> Record:
    """Return the record that a broker wrote to ``path``.

    Raises:
        ConfigError: It cannot be read, a field is missing, or the fields' lengths do not fit each
            other.
    """
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            size_bytes = sum(one.file_size for one in archive.infolist())
        if size_bytes > MAX_RECORD_BYTES:
            raise ConfigError(f"cannot read the record {path}: it has {size_bytes} bytes, more than {MAX_RECORD_BYTES}")
        with np.load(path, allow_pickle=False) as fields:
            names = tuple(str(name) for name in fields["names"])
            arrays = {name: fields[name].astype(kind) for name, kind in _KINDS.items()}
        record = Record(names=names, **arrays | {"wait_t_s": arrays["wait_t_s"].reshape(-1, 2)})
    except (OSError, KeyError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot read the record {path}: {error}") from None
    _check_lengths(record, path)
    return record


def _check_lengths(record: Record, path: Path) -> None:
    n, m = len(record.t_s), len(record.names)
    fits = {
        "budget_bytes": record.budget_t_s.shape == record.budget_bytes.shape and record.budget_bytes.size > 0,
        "held_bytes": record.held_bytes.shape == (n, m),
        "out_bytes": record.out_bytes.shape == (n, m),
        "physical_bytes": record.physical_bytes.shape == (n,),
        "boundary_t_s": record.boundary_t_s.shape == record.boundary_job.shape,
        "peak_bytes": record.peak_bytes.shape == (m,),
        "iteration_s": record.iteration_s.shape == record.persistent_bytes.shape == (m,),
        "profile_t_s": record.profile_t_s.shape == record.profile_job.shape == record.profile_bytes.shape,
        "wait_t_s": len(record.wait_t_s) == len(record.wait_job) == len(record.wait_kind),
        "blocker_job": record.blocker_job.shape == record.blocker_wait.shape
        and bool((record.blocker_wait < len(record.wait_job)).all() and (record.blocker_job < m).all()),
    }
    wrong = [field for field, is_right in fits.items() if not is_right]
    if wrong:
        raise ConfigError(f"cannot read the record {path}: the length of {', '.join(wrong)} does not fit the others")
