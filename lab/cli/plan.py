"""``zico plan``: place the tensors of an iteration, or of a file of lifetimes, and say what that needs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zico.base.errors import ConfigError
from zico.base.units import format_bytes, parse_size
from zico.cli.options import errors_end_with, json_option, told_as_json, whole_option, write_file
from zico.lab.cli.plan_function import is_function, plan_function
from zico.lab.cli.plan_save import SaveAsked, Work, plan_saving, save_options
from zico.report.console import TextConsole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from zico.lab.packing.compare import Row
    from zico.planning.packing.problem import Plan, Planner, Problem

SCHEMA = "zico.plan.v1"
FITS, DOES_NOT_FIT, NOT_KNOWN, FAILED = range(4)
"""Exit codes."""
ANSWERS = ("fits", "does not fit", "not known")
_LARGEST_CAPACITY = 1 << 60
_EXACT_UP_TO = 1000
"""Tensors: what the exact planner is made for; above, the improving search is asked."""
_FILE = click.Path(path_type=Path, dir_okay=False)


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``--json`` writes."""

    file: str
    tensors: int
    live_peak_bytes: int
    capacity_bytes: int | None
    region_bytes: int | None
    rows: list[Row]
    answer: str | None
    """One of ``ANSWERS`` if there was a capacity."""
    schema_version: str = SCHEMA


@click.command()
@click.argument("file", type=_FILE)
@click.option("--planner", metavar="NAME", help="The planner (default: regions with --region, else exact or improve).")
@click.option("--compare", is_flag=True, help="Run every planner.")
@click.option(
    "--region", metavar="SIZE", help="Plan for regions of SIZE: as few as possible, held as briefly as possible."
)
@click.option(
    "--capacity", metavar="BYTES", help="Tell whether it fits. Exit code 0: yes, 1: no, 2: not known, 3: error."
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0.01),
    metavar="SECONDS",
    help="Time for each planner (default: a fixed amount of work, about 10 s; 60 s with --save).",
)
@click.option("--iteration", type=int, metavar="N", help="The iteration of a trace (default: a typical one).")
@whole_option
@json_option
@click.option(
    "-o",
    "plan_path",
    type=_FILE,
    metavar="FILE",
    help="Write the plan: CSV of id,lower,upper,size,offset; with --save JSON.",
)
@click.option(
    "--picture",
    type=_FILE,
    metavar="PNG",
    help="Draw addresses over time; with --save memory, swaps and repeats.",
)
@save_options
@errors_end_with(FAILED)
def plan(  # noqa: PLR0913 - one parameter per option
    *,
    file: Path,
    planner: str | None,
    compare: bool,
    region: str | None,
    capacity: str | None,
    deadline: float | None,
    iteration: int | None,
    whole: bool,
    json_path: Path | None,
    plan_path: Path | None,
    picture: Path | None,
    **save_asked: Any,  # noqa: ANN401 - the options of --save
) -> int:
    """Plan addresses for the tensors of an iteration, or how it keeps a limit with --save.

    FILE is a trace in any format that zico trace show reads, or a CSV of lifetimes. SCRIPT.py:function
    in its place says what a compiled function keeps between its passes (PyTorch, JAX).
    """
    from zico.lab.packing.compare import ask

    asked = SaveAsked(**save_asked)
    work = Work(file, planner, compare, deadline, iteration, whole, json_path, plan_path, picture)
    if asked.save is not None or is_function(file):
        if region or capacity:
            raise ConfigError("--region and --capacity plan addresses of a trace: leave out --save, or leave them out")
        return (plan_function if is_function(file) else plan_saving)(asked, work)
    asked.refuse_alone()
    region_bytes = _size("--region", region)
    problem = dataclasses.replace(
        _read(file, iteration, whole=whole), capacity_bytes=_size("--capacity", capacity)
    ).compact()
    rows: list[Row] = []
    best: tuple[Row, Plan] | None = None
    for one in _planners(planner, compare=compare, region_bytes=region_bytes, problem=problem):
        row, placed = ask(one, problem, deadline or math.inf, region_bytes or 0)
        rows.append(row)
        if placed is not None and (best is None or _cost(row) < _cost(best[0])):
            best = row, placed
    code = _code(rows)
    report = Report(
        file=str(file),
        tensors=len(problem),
        live_peak_bytes=problem.peak_live_bytes,
        capacity_bytes=problem.capacity_bytes,
        region_bytes=region_bytes,
        rows=rows,
        answer=None if problem.capacity_bytes is None else ANSWERS[code],
    )
    _show(report, json_path)
    if best is not None:
        _write(problem, best[1], plan_path)
        if picture is not None:
            from zico.lab.report.plan_picture import plan_png

            unit = "ticks" if _is_csv(file) else "ns"
            write_file(picture, plan_png(problem, best[1].offset_bytes, best[1].planner, region_bytes, unit))
    return code


def _code(rows: Sequence[Row]) -> int:
    """Return what the answers come to: "no" only if a planner has proved it."""
    from zico.lab.packing.compare import PLACED
    from zico.planning.packing.problem import Reason

    answers = {row.answer for row in rows}
    if PLACED in answers:
        return FITS
    return DOES_NOT_FIT if Reason.INFEASIBLE.value in answers else NOT_KNOWN


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text, whole_bytes=_LARGEST_CAPACITY)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _is_csv(file: Path) -> bool:
    return file.suffix.lower() == ".csv"


def _read(file: Path, iteration: int | None, *, whole: bool) -> Problem:
    """Return the problem in a file: lifetimes as CSV, or an iteration of a trace."""
    if _is_csv(file):
        from zico.lab.packing.files import read_csv

        return read_csv(file).problem
    from zico.planning.packing.from_trace import iteration_problem
    from zico.trace.files import read_trace

    return iteration_problem(read_trace(file, whole=whole), iteration).problem


def _planners(name: str | None, *, compare: bool, region_bytes: int | None, problem: Problem) -> list[Planner]:
    from zico.lab.packing.compare import PLANNERS
    from zico.planning.packing.regions import Regions

    if name is not None and name not in PLANNERS:
        raise ConfigError(f"--planner {name!r} is unknown: give one of {', '.join(PLANNERS)}")
    if compare:
        names = [key for key in PLANNERS if key != "regions" or region_bytes]
        if len(problem) > _EXACT_UP_TO:
            names.remove("exact")
    else:
        names = [name or ("regions" if region_bytes else "exact" if len(problem) <= _EXACT_UP_TO else "improve")]
    return [Regions(region_bytes) if key == "regions" and region_bytes else PLANNERS[key]() for key in names]


def _cost(row: Row) -> tuple[float, ...]:
    """Return what makes one plan worse than another: regions if they count, else its peak."""
    if row.held is not None:
        return (row.held.peak_regions, row.held.mean_ratio)
    return (row.peak_bytes,)


def _show(report: Report, json_path: Path | None) -> None:
    if told_as_json(report, json_path):
        return
    console = TextConsole()
    console.say(
        f"{report.file}: {report.tensors} tensors, at most {format_bytes(report.live_peak_bytes)} alive at once"
        + (f", capacity {format_bytes(report.capacity_bytes)}" if report.capacity_bytes is not None else "")
    )
    console.print(_table(report, console))
    for row in report.rows:
        if row.detail:
            console.say(f"{row.planner}: {row.answer}: {row.detail}")
    if report.answer is not None:
        console.say(f"into {report.capacity_bytes} bytes: {report.answer}")


def _table(report: Report, console: TextConsole) -> Table:
    of_regions = ("regions (least)", "held / live: peak", "mean (least)", "slots")
    columns = ("answer", "peak", "peak / live", "seconds", *(of_regions if report.region_bytes is not None else ()))
    table = console.table(("planner",), columns)
    for row in report.rows:
        table.add_row(*_cells(row, with_regions=report.region_bytes is not None))
    return table


def _cells(row: Row, *, with_regions: bool) -> list[str]:
    has_plan = row.ratio > 0
    answer = "optimal" if row.optimal and has_plan else row.answer
    cells = [row.planner, answer, format_bytes(row.peak_bytes) if has_plan else "-"]
    cells += [f"{row.ratio:.4f}" if has_plan else "-", f"{row.elapsed_s:.2f}"]
    if with_regions and row.held is not None:
        held = row.held
        cells += [f"{held.peak_regions} ({held.least_peak_regions})", f"{held.peak_ratio:.4f}"]
        cells += [f"{held.mean_ratio:.4f} ({held.least_mean_ratio:.4f})", str(held.slots)]
    return cells


def _write(problem: Problem, best: Plan, csv_path: Path | None) -> None:
    if csv_path is not None:
        from zico.lab.packing.files import csv_text

        write_file(csv_path, csv_text(problem, best.offset_bytes).encode())
