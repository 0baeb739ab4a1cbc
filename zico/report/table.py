"""The closing table of a run: a line per job, the pool below it, then what needs the reader's attention."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import msgspec

from zico.base.errors import OutOfMemory
from zico.base.settings import kind_of
from zico.base.units import format_bytes
from zico.report.attribution import PARTS, Attribution
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.table import Table

    from zico.broker.protocol.messages import ProcessFigures
    from zico.report.model import JobFigures, RunReport

Cells = tuple[str, ...]

COLUMNS = ("job", "exit", "iterations", "it/s", "waited", "peak", "tensors", "persistent", "in the pool")
PHASE_COLUMNS = ("evaluations", "parts")
"""In reports of jobs that did more than iterations."""
SAVING_COLUMNS = (
    *("job", "saves by", "moved out", "moved in", "time hidden", "time lost", "faults", "late"),
    *("dropped", "made again"),
)
TIME_COLUMNS = ("job", "in the pool", *PARTS.values(), "own iteration", "minor faults", "major faults")


def write_table(report: RunReport, outfile: IO[str]) -> None:
    """Write the closing table to ``outfile``, in colour if it is a terminal and ``NO_COLOR`` is not set."""
    console = TextConsole(outfile)
    rows = list(job_rows(report))
    failed = [row for row in rows if row[1] not in {"0", ""}]
    console.print(_table(console, columns_of(report), rows, failed))
    if saved := list(saving_rows(report)):
        console.print(_table(console, SAVING_COLUMNS, saved))
    for line in pool_lines(report):
        console.print(line)
    for line in attention_lines(report):
        console.say(line, "yellow")


def columns_of(report: RunReport) -> Cells:
    """Return the columns of the jobs' table: with several devices each job's is among them, and other phases."""
    first, iterations, last = COLUMNS[:2], COLUMNS[2:3], COLUMNS[3:]
    device = ("device",) if report.has_several_devices else ()
    return (*first, *device, *iterations, *(PHASE_COLUMNS if _has_phases(report) else ()), *last)


def _has_phases(report: RunReport) -> bool:
    return any(one.evaluations or one.parts for job in report.jobs for one in (job, *job.other_processes))


def pool_lines(report: RunReport) -> Iterator[str]:
    """Yield what the pool did, or that of each device, as text."""
    if report.has_several_devices:
        for number in range(len(report.pools)):
            yield from pool_lines(report.on(number))
        return
    pool = report.pool
    yield f"device {report.device}, policy {report.policy}, budget {report.budget_told}"
    yield (
        f"pool: peak granted {format_bytes(pool.peak_granted_bytes)}, "
        f"peak physical by the {'kernel' if kind_of(report.device) == 'host' else 'driver'} "
        f"{format_bytes(pool.peak_physical_bytes)}, "
        f"sum of the jobs' own peaks {format_bytes(pool.sum_of_job_peaks_bytes)}"
    )
    if pool.peak_shared_bytes:
        yield f"frozen memory that jobs held once: {format_bytes(pool.peak_shared_bytes)}, within the budget"
    yield from outside_lines(pool.context_bytes, pool.foreign_bytes)
    if report.peaks_told:
        yield report.peaks_told


def shared_text(shared_bytes: int) -> str:
    """Return what jobs have in common, as the end of what they hold; empty if nothing."""
    return f" and share {format_bytes(shared_bytes)}" if shared_bytes else ""


def outside_lines(context_bytes: int | msgspec.UnsetType, foreign_bytes: int | msgspec.UnsetType) -> Iterator[str]:
    """Yield what of the device's memory lies outside the pool, where that is known."""
    if isinstance(context_bytes, int) and isinstance(foreign_bytes, int):
        yield (
            f"outside the pool: framework contexts and workspaces {format_bytes(context_bytes)}, "
            f"others {format_bytes(foreign_bytes)}"
        )


def attention_lines(report: RunReport) -> Iterator[str]:
    """Yield what the reader should know or do about single jobs and the pool."""
    for job in report.jobs:
        yield from _job_lines(report, job)
    if report.pool.stalls:
        yield f"times no job could continue, and tensors moved outside the budget: {report.pool.stalls}"
    if report.pool.recoveries:
        yield f"times a process died inside the pool's lock, and the pool was repaired: {report.pool.recoveries}"


def _job_lines(report: RunReport, job: JobFigures) -> Iterator[str]:
    if job.oom is not None:
        line = out_of_memory_line(job, _budget_of(report, job))
        yield f"{job.name} ran out of memory{_where(report, job)}: {line}"
    if job.saving.planner_note:
        yield f"{job.name}: {job.saving.planner_note}"
    for note in dict.fromkeys((job.note, *(process.text for process in job.outside))):
        if note:
            yield f"{job.name}: {note}"
    if job.spilled_bytes:
        yield f"{job.name}: {format_bytes(job.spilled_bytes)} of tensors lay in the next tier (slower, but correct)"
    if job.evicted_bytes:
        yield f"{job.name}: {format_bytes(job.evicted_bytes)} were moved outside the budget while it waited"
    for process in (job, *job.other_processes):
        if process.growth_bytes:
            yield growth_line(process, _budget_of(report, job))


def growth_line(process: ProcessFigures, budget_bytes: int) -> str:
    """Return what a process keeps more after each iteration, and when that fills the budget, as one sentence."""
    left = max(0, budget_bytes - process.persistent_bytes) // process.growth_bytes
    return (
        f"{process.name} kept {format_bytes(process.growth_bytes)} more after each of its last iterations (a leak?), "
        f"and {format_bytes(process.persistent_bytes)} in the end. Others had that much less room; "
        f"{left:,} iterations more would fill the budget, and what comes then would lie in the next tier "
        "(slower; on the host a file)"
    )


def _budget_of(report: RunReport, job: JobFigures) -> int:
    its = (pool.budget_then_bytes for pool in report.pools if pool.device == job.device)
    return next(its, report.budget_then_bytes)


def _where(report: RunReport, job: JobFigures) -> str:
    """Return on which of several devices a job ran, and which has most."""
    if not report.has_several_devices:
        return ""
    largest = max(report.pools, key=lambda pool: pool.budget_then_bytes)
    if largest.budget_then_bytes == _budget_of(report, job):
        return f" on {job.device}, and no device has a larger budget"
    return f" on {job.device} (the largest budget is {format_bytes(largest.budget_then_bytes)}, of {largest.device})"


def out_of_memory_line(job: JobFigures, budget_bytes: int) -> str:
    """Return a job's peak, its last refused request, the budget or limit and what to do, as one sentence."""
    if job.oom is None:
        return ""
    advice = OutOfMemory(job.oom.request_bytes, job.oom.held_bytes, budget_bytes, job.oom.limit_bytes)
    return f"its peak was {format_bytes(job.peak_bytes)}; it {advice}"


def job_rows(report: RunReport) -> Iterator[tuple[str, ...]]:
    """Yield the table's cells, in the order of ``columns_of``; further processes of a job follow it, indented."""
    has_phases = _has_phases(report)
    for job in report.jobs:
        where = (job.device,) if report.has_several_devices else ()
        yield (job.name, str(job.exit_code), *where, *_cells(job, has_phases=has_phases))
        for process in job.other_processes:
            yield (f"  {process.name}", "", *where, *_cells(process, has_phases=has_phases))


def saving_rows(report: RunReport) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the jobs that went on with less than their peaks, in the order of ``SAVING_COLUMNS``."""
    for job in report.jobs:
        saving = job.saving
        if saving.how != "none":
            yield (
                job.name,
                f"{saving.how} ({saving.planner})" if saving.planner else saving.how,
                format_bytes(saving.out_bytes),
                format_bytes(saving.in_bytes),
                f"{saving.hidden_s:.1f} s",
                f"{saving.waited_s:.1f} s",
                str(saving.faults),
                str(saving.late),
                format_bytes(saving.dropped_bytes),
                f"{saving.making_s:.1f} s",
            )


def time_rows(report: RunReport) -> Iterator[tuple[str, ...]]:
    """Yield the cells of where the jobs' time went, in the order of ``TIME_COLUMNS``."""
    for job in report.jobs:
        time = job.attribution
        if isinstance(time, Attribution):
            yield (
                job.name,
                *(_known(getattr(time, name), "{:.1f} s") for name in ("elapsed_s", *PARTS)),
                _known(time.own_iteration_s, f"{{:.3f}} s ({time.own_iteration_is})"),
                _known(time.minor_faults, "{}"),
                _known(time.major_faults, "{}"),
            )


def _known(value: float | msgspec.UnsetType, form: str) -> str:
    return "not known" if isinstance(value, msgspec.UnsetType) else form.format(value)


def _cells(figures: ProcessFigures, *, has_phases: bool) -> tuple[str, ...]:
    return (
        str(figures.iterations),
        *((str(figures.evaluations), str(figures.parts)) if has_phases else ()),
        f"{figures.iterations_per_s:.2f}",
        f"{figures.waited_s:.1f} s",
        format_bytes(figures.peak_bytes),
        format_bytes(figures.peak_tensor_bytes),
        format_bytes(figures.persistent_bytes),
        f"{figures.pool_fraction:.1%}",
    )


def _table(console: TextConsole, columns: Cells, rows: Iterable[Cells], failed: Sequence[Cells] = ()) -> Table:
    table = console.table(columns[:1], columns[1:], no_wrap=True, overflow="fold")
    for row in rows:
        table.add_row(*row, style="red" if row in failed else None)
    return table
