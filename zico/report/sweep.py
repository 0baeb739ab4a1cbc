"""The results of a sweep by job: one table, and the same as JSON."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import msgspec

from zico.base.units import format_bytes
from zico.report.console import TextConsole
from zico.report.model import SweepFigures

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS_SCHEMA = "zico.sweep-results.v1"


class SweepRow(SweepFigures, frozen=True, kw_only=True):
    """One job of a sweep, by its last try."""

    parameters: dict[str, str]
    command: str


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep so far. New fields are only ever added."""

    schema_version: str = RESULTS_SCHEMA
    file: str
    """What ``--resume`` takes."""
    device: str
    """Of several devices all, with commas between them."""
    policy: str
    budget_bytes: int
    """Of several devices the sum."""
    at_most: int
    """So many jobs ran at once at the most that was allowed."""
    jobs: tuple[SweepRow, ...]

    @property
    def left(self) -> int:
        """Return how many jobs have not ended."""
        return sum(row.exit_code is None for row in self.jobs)


def write_sweep_table(report: SweepReport, outfile: IO[str]) -> None:
    """Write a row for each job to ``outfile``, and what is left below."""
    console = TextConsole(outfile)
    parameters = _parameter_columns(report)
    where = ["device"] if "," in report.device else []
    table = console.table(("job", *parameters, *where), no_wrap=True, overflow="fold")
    for column in ("exit", "iterations", "it/s", "waited", "peak", "tries"):
        table.add_column(column, justify="right", no_wrap=True)
    logged = list(dict.fromkeys(name for row in report.jobs for name in row.logged))
    for name in logged:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    for row in report.jobs:
        cells = [row.name, *(row.parameters.get(name, "") for name in parameters), *[row.device for _ in where]]
        *figures, note = _cells(row)
        numbers = (f"{row.logged[name]:.6g}" if name in row.logged else "" for name in logged)
        table.add_row(*cells, *figures, *numbers, note, style="red" if row.exit_code else None)
    console.print(table)
    for line in closing_lines(report):
        console.say(line)


def closing_lines(report: SweepReport) -> Iterator[str]:
    """Yield how many jobs have ended, and how to run those that are left."""
    ended = [row for row in report.jobs if row.exit_code is not None]
    failed = sum(row.exit_code != 0 for row in ended)
    yield (
        f"{len(ended)} of {len(report.jobs)} jobs have ended, {failed} of them failed; device {report.device}, policy "
        f"{report.policy}, budget {format_bytes(report.budget_bytes)}, at most {report.at_most} at once"
    )
    if report.left:
        yield f"{report.left} are left: zico run --resume {report.file}"


def _parameter_columns(report: SweepReport) -> list[str]:
    """Return the parameters that the jobs' names do not tell."""
    told = all(f"{name}={value}" in row.name for row in report.jobs for name, value in row.parameters.items())
    return [] if told else list(dict.fromkeys(name for row in report.jobs for name in row.parameters))


def _cells(row: SweepRow) -> tuple[str, ...]:
    is_left = row.exit_code is None
    notes = ("again, alone" * row.alone, "out of memory" * row.ran_out_of_memory, "left" * is_left, row.note)
    note = "; ".join(filter(None, notes))
    if is_left:
        return ("-", "-", "-", "-", "-", str(row.tries), note)
    return (
        str(row.exit_code),
        str(row.iterations),
        f"{row.iterations_per_s:.2f}",
        f"{row.waited_s:.1f} s",
        format_bytes(row.peak_bytes),
        str(row.tries),
        note,
    )
