"""What ``zico plan --swap`` prints, and its picture."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from zico.report.table import PLAIN_WIDTH
from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.planners.swap.problem import SwapProblem
    from zico.planners.swap.replay import History

SCHEMA = "zico.swap.v1"
PLANNED = "planned"


@dataclasses.dataclass(frozen=True)
class SwapRow:
    """One planner's judged answer; the first row is the iteration without swaps."""

    planner: str
    answer: str
    """``PLANNED``, the rule that the judge found broken, or the planner's own reason."""
    detail: str = ""
    limit_bytes: int | None = None
    """What was asked for, or the lowest limit found."""
    peak_bytes: int = 0
    packed_bytes: int | None = None
    """The highest byte that the packing planner needs for the iteration as it comes to be."""
    iteration_ms: float = 0.0
    overhead: float = 0.0
    tensor_wait_ms: float = 0.0
    memory_wait_ms: float = 0.0
    moved_bytes: int = 0
    swaps: int = 0
    elapsed_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class SwapReport:
    """What ``--json`` writes."""

    file: str
    tensors: int
    operations: int
    peak_bytes: int
    least_bytes: int
    """No plan keeps a lower limit."""
    limit_bytes: int | None
    allowed_overhead: float | None
    """With it, the lowest limit was looked for."""
    out_bandwidth: float
    back_bandwidth: float
    bound: float | None
    """What no plan is below: bytes of a limit, or with a limit the share of overhead; if ``--bound`` was given."""
    packed_by: str
    rows: list[SwapRow]
    schema_version: str = SCHEMA


def show(report: SwapReport, json_path: Path | None, write: Callable[[Path, bytes], None]) -> None:
    """Print the table, or write the figures as JSON; ``-`` is stdout."""
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if json_path == Path("-"):
        click.echo(encoded)
        return
    if json_path is not None:
        write(json_path, encoded + b"\n")
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    limit = "" if report.limit_bytes is None else f", limit {format_bytes(report.limit_bytes)}"
    console.print(
        f"{report.file}: {report.tensors} tensors, {report.operations} operations, "
        f"at most {format_bytes(report.peak_bytes)} alive at once, at least {format_bytes(report.least_bytes)} "
        f"needed at once{limit}; "
        f"{format_bytes(report.out_bandwidth)}/s out, {format_bytes(report.back_bandwidth)}/s back",
        markup=False,
        soft_wrap=True,
    )
    console.print(_table(report, plain=not console.is_terminal))
    for row in report.rows:
        if row.detail:
            console.print(f"{row.planner}: {row.answer}: {row.detail}", markup=False, soft_wrap=True)
    if report.bound is not None:
        what = f"an overhead below {report.bound:.1%}"
        if report.allowed_overhead is not None:
            what = f"a limit below {format_bytes(report.bound)} at that overhead"
        console.print(f"no plan has {what}", markup=False, soft_wrap=True)


def _table(report: SwapReport, *, plain: bool) -> Table:
    table = Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("planner")
    packed = f"packed by {report.packed_by}"
    for column in ("peak", "of before", packed, "iteration", "overhead", "waits", "moved", "swaps", "seconds"):
        table.add_column(column, justify="right")
    for row in report.rows:
        if not row.peak_bytes:
            table.add_row(row.planner, row.answer, *["-"] * 7, f"{row.elapsed_s:.2f}")
            continue
        waits = f"{row.tensor_wait_ms:.1f} + {row.memory_wait_ms:.1f} ms"
        table.add_row(
            *(row.planner, format_bytes(row.peak_bytes), f"{row.peak_bytes / report.peak_bytes:.1%}"),
            "-" if row.packed_bytes is None else format_bytes(row.packed_bytes),
            *(f"{row.iteration_ms:.1f} ms", f"{row.overhead:.1%}", waits if row.answer else ""),
            *(format_bytes(row.moved_bytes), str(row.swaps), f"{row.elapsed_s:.2f}"),
        )
    if report.rows[1:]:
        table.caption = "waits: of operations for their tensors, and for memory"
    return table


def picture(problem: SwapProblem, row: SwapRow, history: History) -> bytes:
    """Return the picture of a plan, of the last iteration that the judge replayed.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    from zico.report.swap_picture import swap_png

    begin, end = history.iteration_ns[-2:]
    starts = np.append(problem.op_start_ns, problem.period_ns)
    before = starts, np.append(problem.load_bytes, problem.load_bytes[-1])
    at = np.array([t_ns for t_ns, _ in history.load_bytes])
    loads = np.array([load for _, load in history.load_bytes])
    inside = (at >= begin) & (at <= end)
    after = at[inside] - begin, loads[inside]
    lanes = [
        [
            (max(one.begin_ns, begin) - begin, min(one.end_ns, end) - begin)
            for one in history.transfers
            if one.direction == direction and one.begin_ns < end and one.end_ns > begin
        ]
        for direction in ("out", "back")
    ]
    title = f"{row.planner}: {row.swaps} swaps, {row.overhead:.1%} longer"
    return swap_png(title, before, after, row.limit_bytes, lanes)
