"""The table of simulated policies: those of one budget below each other."""

from __future__ import annotations

import itertools
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zico.report.table import PLAIN_WIDTH
from zico.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zico.report.simulation_model import SimulatedJob, SimulationReport

COLUMNS = (
    "budget",
    "policy",
    "normalised",
    "each job",
    "/ serial",
    "slowest",
    "Jain",
    "waited",
    "peak",
    "deadlocks",
    "decisions",
    "us each",
)
JOB_COLUMNS = ("budget", "policy", "job", "iterations/s", "normalised", "slowdown", "waited", "why it waited")
_SHOWN_JOBS = 4
_DISPENSABLE = ("us each", "decisions", "waited", "Jain", "peak", "slowest", "each job")
_BETWEEN = 3


def write_simulation_table(report: SimulationReport, outfile: IO[str]) -> None:
    """Write the table and the notes to ``outfile``."""
    console = Console(file=outfile, width=None if outfile.isatty() else PLAIN_WIDTH, highlight=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2, pad_edge=False)
    rows = list(rows_of(report))
    shown = _columns_within(console.width, rows)
    for column in shown:
        is_text = COLUMNS[column] in {"policy", "each job"}
        table.add_column(COLUMNS[column], justify="left" if is_text else "right", no_wrap=True, overflow="fold")
    for _budget, of_budget in itertools.groupby(rows, key=lambda cells: cells[0]):
        for cells in of_budget:
            table.add_row(*(escape(cells[column]) for column in shown))
        table.add_section()
    console.print(table)
    for line in lines_of(report):
        console.print(line, markup=False, soft_wrap=True)


def _columns_within(width: int, rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the columns that a terminal has room for: the least telling ones are left to the JSON."""
    widths = [max(map(len, cells)) + _BETWEEN for cells in zip(COLUMNS, *rows, strict=True)]
    shown = list(range(len(COLUMNS)))
    for name in _DISPENSABLE:
        if sum(widths[column] for column in shown) > width:
            shown.remove(COLUMNS.index(name))
    return shown


def rows_of(report: SimulationReport) -> Iterator[tuple[str, ...]]:
    """Yield the table's cells, in the order of ``COLUMNS``."""
    labels = _budget_labels(report)
    for row in report.rows:
        yield (
            labels[row.budget_bytes],
            row.policy,
            f"{row.normalised:.3f}",
            _each(row.jobs),
            "-" if row.vs_serial is None else f"{row.vs_serial:.2f}",
            _times(row.slowdown),
            f"{row.jain:.3f}",
            _seconds(row.waited_s) if row.decisions else "-",
            format_bytes(row.peak_granted_bytes),
            str(row.deadlocks),
            str(row.decisions),
            f"{row.decision_us:.2g}" if row.decisions else "-",
        )


def lines_of(report: SimulationReport) -> Iterator[str]:
    """Yield what the table does not say."""
    jobs = f"{len(report.jobs)} job" + ("s" if len(report.jobs) > 1 else "")
    span = _range([row.seconds for row in report.rows])
    warm_up = _range([row.warm_up_s for row in report.rows])
    counted = "" if warm_up == "0" else f" of which {warm_up} s do not count"
    yield (
        f"{jobs}, sum of peaks {format_bytes(report.sum_of_peaks_bytes)}; {span} s simulated{counted}; "
        f"device model {report.device_model}, seed {report.seed}"
    )
    yield from report.notes


def simulation_markdown(report: SimulationReport, pictures: Mapping[str, str]) -> str:
    """Return the report as Markdown, with links to pictures by what they show."""
    lines = ["# Simulated policies", "", *_markdown_table(COLUMNS, rows_of(report), n_text=2), ""]
    lines += [f"* {line}" for line in lines_of(report)]
    lines += ["", "## Job by job", "", *_markdown_table(JOB_COLUMNS, _job_rows(report), n_text=3), ""]
    lines += [f"![{title}]({name})\n" for title, name in pictures.items()]
    return "\n".join(lines).rstrip() + "\n"


def _job_rows(report: SimulationReport) -> Iterator[tuple[str, ...]]:
    labels = _budget_labels(report)
    for row in report.rows:
        for job in row.jobs:
            yield (
                labels[row.budget_bytes],
                row.policy,
                job.name,
                f"{job.iterations_per_s:.3f}",
                f"{job.normalised:.3f}",
                _times(job.slowdown),
                _seconds(job.waited_s),
                job.reason,
            )


def _markdown_table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]], n_text: int) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join(['---'] * n_text + ['---:'] * (len(columns) - n_text))} |"
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _budget_labels(report: SimulationReport) -> dict[int, str]:
    """Return each budget's size and its share of the sum of peaks."""
    whole = report.sum_of_peaks_bytes
    return {size: f"{format_bytes(size)} ({size / whole:.0%})" for size in report.budgets_bytes}


def _each(jobs: tuple[SimulatedJob, ...]) -> str:
    shares = [job.normalised for job in jobs]
    if len(shares) > _SHOWN_JOBS:
        return f"{min(shares):.2f} to {max(shares):.2f}"
    return " ".join(f"{share:.2f}" for share in shares)


def _range(values: Sequence[float]) -> str:
    low, high = (f"{pick(values, default=0):.4g}" for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def _times(slowdown: float | None) -> str:
    return "never" if slowdown is None else f"{slowdown:.2f}x"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:.0f} s"  # noqa: PLR2004 - four digits are enough
