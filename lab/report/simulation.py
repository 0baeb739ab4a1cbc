"""The figures of simulated policies as they are shown and written: frozen, in bytes and seconds, with one JSON form."""

from __future__ import annotations

import itertools
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from zico.base.units import format_bytes, unit_of
from zico.report.console import TextConsole
from zico.report.files import write_atomically
from zico.report.picture import COLOURS, INK, WIDTH_IN, dress, empty_figure, fullest_ticks, png_of, short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from zico.lab.simulator.compare import SimulatedJob

SIMULATION_SCHEMA = "zico.simulation.v1"


class SimulatedRow(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs under one policy and budget."""

    policy: str
    budget_bytes: int
    normalised: float
    """The mean over the jobs."""
    peak_granted_bytes: int
    deadlocks: int
    decisions: int
    decision_us: float
    jobs: tuple[SimulatedJob, ...]
    jain: float
    slowdown: float | None
    """The slowest job's."""
    vs_serial: float | None
    """The mean over the jobs of their throughput over what serial gives them; null without a row of serial."""
    seconds: float
    """Simulated, or until the last job left."""
    warm_up_s: float
    """Of which this does not count."""

    @property
    def waited_s(self) -> float:
        """Return what all jobs waited together."""
        return sum(job.waited_s for job in self.jobs)


class SimulatedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One job as it was given."""

    name: str
    iteration_s: float
    peak_bytes: int
    persistent_bytes: int


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``zico simulate`` found. New fields are only ever added."""

    schema_version: str = SIMULATION_SCHEMA
    rows: tuple[SimulatedRow, ...]
    jobs: tuple[SimulatedLoad, ...]
    sum_of_peaks_bytes: int
    region_bytes: int
    device_model: str
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        """Return the budgets in the order of the rows."""
        return tuple(dict.fromkeys(row.budget_bytes for row in self.rows))

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the policies in the order of the rows."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))


# --------------------------------------------------------------------------------------------------
# Pictures of simulated policies: throughput against the budget, and memory of the jobs over a few
# iterations.

# With the colours of Okabe and Ito, seven of which stand out on white, no two of 42 policies look
# alike.
_LINE_COLOURS = tuple(colour for colour in COLOURS if colour != "#F0E442")
_MARKERS = ("o", "s", "^", "D", "v", "X")
_LARGEST_MARKER, _WIDEST_LINE = 11.0, 4.5  # the first policy's; later ones are smaller, so that none hides another
_MOST_NAMED = 12
_HEIGHT_IN = 4.6


def write_throughput(report: SimulationReport, path: Path) -> None:
    """Draw the throughput of each policy against the budget and write it to ``path`` as PNG, atomically.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    write_atomically(path, png_of(draw_throughput(report)))


def draw_throughput(report: SimulationReport) -> Figure:
    """Return the figure: a line for each policy."""
    with empty_figure(0.7 * WIDTH_IN, _HEIGHT_IN) as figure:
        axis = figure.subplots()
        unit_bytes, unit = unit_of(max(report.budgets_bytes))
        for number, policy in enumerate(report.policies):
            points = sorted(
                (row.budget_bytes / unit_bytes, row.normalised) for row in report.rows if row.policy == policy
            )
            axis.plot(
                [budget for budget, _ in points],
                [normalised for _, normalised in points],
                color=_LINE_COLOURS[number % len(_LINE_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=_LARGEST_MARKER - 6 * number / len(report.policies),
                linewidth=_WIDEST_LINE - 3 * number / len(report.policies),
                label=policy,
            )
        axis.set_ylim(0, 1.05 * max(1.0, *(row.normalised for row in report.rows)))
        axis.set_xlabel(f"budget, {unit}")
        axis.set_ylabel("throughput over alone's, mean over the jobs")
        dress(axis)
        whole = report.sum_of_peaks_bytes / unit_bytes
        top = axis.secondary_xaxis("top", functions=_percent_of(whole))
        top.set_xlabel("percent of the sum of the jobs' peaks", fontsize=9, color=INK)
        figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure


def write_memory(
    title: str,
    names: Sequence[str],
    t_s: NDArray[np.float64],
    held_bytes: NDArray[np.int64],
    budget_bytes: int,
    path: Path,
) -> None:
    """Draw what jobs hold, stacked, under the budget, and write it to ``path`` as PNG, atomically.

    Args:
        title: What stands above it.
        names: The jobs', from the bottom up.
        t_s: When something changes; the last one is the end.
        held_bytes: Per job and time.
        budget_bytes: The line.
        path: Where to.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    write_atomically(path, png_of(draw_memory(title, names, t_s, held_bytes, budget_bytes)))


def draw_memory(
    title: str, names: Sequence[str], t_s: NDArray[np.float64], held_bytes: NDArray[np.int64], budget_bytes: int
) -> Figure:
    """Return the figure; arguments as for ``write_memory``."""
    with empty_figure(WIDTH_IN, _HEIGHT_IN) as figure:
        axis = figure.subplots()
        total = held_bytes.sum(axis=0)
        top_bytes = max(budget_bytes, int(total.max(initial=0)))
        unit_bytes, unit = unit_of(top_bytes)
        shown = np.append(fullest_ticks(total[:-1]), len(t_s) - 1) if len(t_s) > 1 else np.arange(1)
        labels = [short(name) if number < _MOST_NAMED else "" for number, name in enumerate(names)]
        axis.stackplot(
            t_s[shown],
            held_bytes[:, shown] / unit_bytes,
            labels=labels,
            colors=[COLOURS[number % len(COLOURS)] for number in range(len(names))],
            step="post",
            linewidth=0,
            alpha=0.9,
        )
        axis.axhline(
            budget_bytes / unit_bytes,
            color=INK,
            linewidth=1.6,
            linestyle=(0, (6, 3)),
            label=f"budget {format_bytes(budget_bytes)}",
        )
        axis.set_xlim(float(t_s[0]), max(float(t_s[-1]), float(t_s[0]) + 1e-9))
        axis.set_ylim(0, 1.08 * top_bytes / unit_bytes)
        axis.set_xlabel("simulated seconds")
        axis.set_ylabel(f"memory held, {unit}")
        dress(axis)
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        figure.suptitle(title, fontsize=12, color=INK)
        figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False, title=more or None)
    return figure


def _percent_of(whole: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return from a budget to its percentage, and back, as matplotlib wants them for any array."""
    return lambda budget: 100 * budget / whole, lambda percent: percent * whole / 100


# -- the table of simulated policies: those of one budget below each other -------------------------

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
    console = TextConsole(outfile)
    table = console.table(())
    rows = list(rows_of(report))
    shown = _columns_within(console.width, rows)
    for column in shown:
        is_text = COLUMNS[column] in {"policy", "each job"}
        table.add_column(COLUMNS[column], justify="left" if is_text else "right", no_wrap=True, overflow="fold")
    for _budget, of_budget in itertools.groupby(rows, key=lambda cells: cells[0]):
        for cells in of_budget:
            table.add_row(*(cells[column] for column in shown))
        table.add_section()
    console.print(table)
    for line in lines_of(report):
        console.say(line)


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
