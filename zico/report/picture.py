"""The picture in which one sees the peaks interleave: memory of each job stacked over time, under the budget.

memory |-- budget ---------------------
       |    B    B        the whole run, then its last iterations enlarged if there are many
       | A     A    A
job A  |..|...|..|...|.   one lane per job: ticks where iterations end, spans where it waited
job B  |#.|..|#..|..|#.

What lies in a tier hangs below the axis, hatched, in the job's colour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zico.base.errors import ConfigError
from zico.base.units import GIB, MIB, format_bytes, unit_of
from zico.broker.protocol.messages import WaitKind
from zico.report.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from zico.report.model import Record, RunReport

# Okabe and Ito's palette: told apart with any kind of colour blindness (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
INK = "#222222"
PHYSICAL_COLOUR = "#7A0019"
WAIT_COLOURS = {WaitKind.BOUNDARY: "#BBBBBB", WaitKind.ALLOCATION: "#444444"}
WAIT_LABELS = {WaitKind.BOUNDARY: "waits to start an iteration", WaitKind.ALLOCATION: "waits inside an allocation"}

OUT_HATCH = "////"
OUT_LABEL = "in a tier, outside the budget"
WIDTH_IN, DPI = 12.0, 150
MAX_COLUMNS = 1500
"""Instants drawn per panel: about one per pixel; of those that fall together the fullest one is drawn."""
ENLARGE_FROM = 16
"""Iterations of one job from which on the last ones get a panel of their own."""
SLOWEST_ITERATIONS, FASTEST_ITERATIONS = 10, 40
"""At most this many iterations of the slowest and the fastest job in the enlarged panel."""
MAX_LABEL_CHARS = 24
MOST_BUDGETS_NAMED = 3
PEAKS_WITHIN = 2.5
"""The sum of the peaks is drawn if it is above the budget and below this many budgets: else it squeezes the rest."""


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of time, in seconds."""

    start_s: float
    stop_s: float


def write_picture(report: RunReport, record: Record, path: Path) -> None:
    """Draw the run and write it to ``path`` as PNG, atomically.

    Raises:
        ConfigError: matplotlib is not installed, or the record has no instants.
    """
    if len(record.t_s) == 0 or not record.names:
        raise ConfigError("no job joined the pool, so there is nothing to draw")
    write_atomically(path, png_of(draw(report, record)))


@contextlib.contextmanager
def empty_figure(width_in: float, height_in: float) -> Iterator[Figure]:
    """Give a figure to draw in; a name with dollars is no formula there.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install 'zico-memory[plot]'") from None
    with rc_context({"text.parse_math": False}):
        yield Figure(figsize=(width_in, height_in), layout="constrained", facecolor="white")


def png_of(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def draw(report: RunReport, record: Record) -> Figure:
    """Return the figure of a run with at least one instant and one job."""
    record = in_order(record, [job.name for job in report.jobs])
    whole, last = whole_span(record), last_iterations(record)
    panels = [whole] if last is None else [whole, last]
    lanes_in = 0.5 + 0.3 * len(record.names)
    heights = [3.4] if last is None else [2.4, 3.6]
    with empty_figure(WIDTH_IN, sum(heights) + lanes_in + 1.6) as figure:
        axes = figure.subplots(len(panels) + 1, 1, height_ratios=[*heights, lanes_in])
        for axis, span in zip(axes, panels, strict=False):
            _draw_memory(axis, report, record, span)
        _draw_lanes(axes[-1], record, panels[-1])
        if last is not None:
            axes[0].set_title("the whole run", loc="left", fontsize=9, color=INK)
            axes[1].set_title("its last iterations", loc="left", fontsize=9, color=INK)
            axes[0].axvspan(last.start_s, last.stop_s, facecolor="none", edgecolor=INK, linewidth=1.2)
        axes[-1].set_xlabel("seconds since the broker began")
        title = f"zico run on {report.device}, policy {report.policy}, budget {report.budget_told}"
        figure.suptitle(f"{title}: {report.peaks_told}" if report.peaks_told else title, fontsize=12, color=INK)
        _draw_legend(figure, report, record)
    return figure


def in_order(record: Record, names: Sequence[str]) -> Record:
    """Return the record with its jobs in the order of ``names``, as in the table; those not named come last."""
    places = {name: place for place, name in enumerate(names)}
    return record.of(sorted(range(len(record.names)), key=lambda job: places.get(record.names[job], len(names))))


def whole_span(record: Record) -> Span:
    """Return the time from the first to the last instant at which anything was held, a little more around it."""
    busy = np.flatnonzero(record.held_bytes.sum(axis=1))
    if len(busy) == 0:
        return Span(float(record.t_s[0]), float(record.t_s[-1]) + 1e-3)
    start_s, stop_s = float(record.t_s[busy[0]]), float(record.t_s[busy[-1]])
    margin_s = 0.01 * (stop_s - start_s) + 1e-3
    return Span(start_s - margin_s, stop_s + margin_s)


def last_iterations(record: Record) -> Span | None:
    """Return the span of the last iterations in which all jobs trained, ``None`` if there are too few to enlarge."""
    ends = [record.boundaries_of(job) for job in range(len(record.names))]
    ends = [end for end in ends if len(end) > 1]
    if max(map(len, ends), default=0) < ENLARGE_FROM:
        return None
    starts_together = max(float(end[0]) for end in ends)
    stop_s = min(float(end[-1]) for end in ends)
    if stop_s <= starts_together:  # the jobs did not train at the same time: show the longest-lived one
        stop_s = max(float(end[-1]) for end in ends)
    counts = [end[end <= stop_s] for end in ends]
    periods = [float(np.median(np.diff(count))) for count in counts if len(count) > 1]
    length_s = min(SLOWEST_ITERATIONS * max(periods), FASTEST_ITERATIONS * min(periods))
    return Span(stop_s - length_s, stop_s + 0.01 * length_s)


def fullest_rows(record: Record, span: Span) -> npt.NDArray[np.int64]:
    """Return the rows to draw in ``span``: all, or the fullest of each column's so that no peak is lost.

    A drawn row is always one true instant, never a mixture of several.
    """
    first = max(0, int(np.searchsorted(record.t_s, span.start_s, side="right")) - 1)
    last = int(np.searchsorted(record.t_s, span.stop_s, side="right"))
    rows = np.arange(first, max(last, first + 1), dtype=np.int64)
    return rows[fullest_ticks(record.held_bytes[rows].sum(axis=1))]


def _draw_memory(axis: Axes, report: RunReport, record: Record, span: Span) -> None:
    """Draw the stacked memory, the budget and the kernel's count."""
    rows = fullest_rows(record, span)
    unit_bytes, unit = (GIB, "GiB") if record.most_budget_bytes >= GIB else (MIB, "MiB")
    t_s = record.t_s[rows]
    held = record.held_bytes[rows].T / unit_bytes
    axis.stackplot(t_s, held, colors=_colours(len(record.names)), step="post", linewidth=0, alpha=0.9)
    axis.plot(t_s, record.physical_bytes[rows] / unit_bytes, drawstyle="steps-post", **_PHYSICAL_LINE)
    budget = record.most_budget_bytes / unit_bytes
    until_s = np.append(record.budget_t_s, max(span.stop_s, record.budget_t_s[-1]))
    budgets = np.append(record.budget_bytes, record.budget_bytes[-1]) / unit_bytes
    axis.plot(until_s, budgets, drawstyle="steps-post", **_BUDGET_LINE)
    top = max(budget, float(held.sum(axis=0).max(initial=0.0)))
    if _shows_peaks(report, record):
        top = report.pool.sum_of_job_peaks_bytes / unit_bytes
        axis.axhline(top, **_PEAKS_LINE)
    axis.set_ylim(-1.1 * _draw_below(axis, record, rows, unit_bytes), 1.1 * top)
    axis.set_ylabel(unit)
    _dress(axis, span)


def _shows_peaks(report: RunReport, record: Record) -> bool:
    """Tell whether the sum of the peaks is above the budget, and near enough to be drawn."""
    budget_bytes = record.most_budget_bytes
    return budget_bytes < report.pool.sum_of_job_peaks_bytes < PEAKS_WITHIN * budget_bytes


def _draw_below(axis: Axes, record: Record, rows: npt.NDArray[np.int64], unit_bytes: int) -> float:
    """Draw what lies in a tier, below the axis; returns how far that reaches."""
    out = record.out_bytes[rows].T / unit_bytes
    if not out.any():
        return 0.0
    stacks = axis.stackplot(
        record.t_s[rows], -out, colors=_colours(len(record.names)), step="post", linewidth=0, alpha=0.5
    )
    for stack in stacks:
        stack.set_hatch(OUT_HATCH)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.yaxis.set_major_formatter(lambda value, _position: f"{abs(value):g}")
    return float(out.sum(axis=0).max())


def _draw_lanes(axis: Axes, record: Record, span: Span) -> None:
    """Draw a lane per job: waits as spans, the ends of iterations as ticks."""
    names = record.names
    for job, colour in enumerate(_colours(len(names))):
        lane = len(names) - 1 - job
        held = record.t_s[record.held_bytes[:, job] > 0]
        if len(held):
            axis.broken_barh([(held[0], held[-1] - held[0])], (lane - 0.32, 0.64), facecolor=colour, alpha=0.3)
        for kind, wait_colour in WAIT_COLOURS.items():
            spans = [(start, max(stop - start, 0.0)) for start, stop in record.waits_of(job, kind)]
            axis.broken_barh(spans, (lane - 0.32, 0.64), facecolor=wait_colour, linewidth=0)
        axis.vlines(record.boundaries_of(job), lane - 0.42, lane + 0.42, color=INK, linewidth=0.9)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_yticks(range(len(names)), [short(name) for name in reversed(names)])
    _dress(axis, span)
    axis.grid(visible=False)


_BUDGET_LINE: dict[str, Any] = {"color": INK, "linewidth": 1.6, "linestyle": (0, (6, 3))}
_PEAKS_LINE: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": (0, (1, 2))}
_PHYSICAL_LINE: dict[str, Any] = {"color": PHYSICAL_COLOUR, "linewidth": 0.8}


def _draw_legend(figure: Figure, report: RunReport, record: Record) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = _colours(len(record.names))
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, label=f"{short(name)} (peak {format_bytes(int(peak))})")
        for name, colour, peak in zip(record.names, colours, record.peak_bytes, strict=True)
    ]
    budgets = ", ".join(format_bytes(int(size_bytes)) for size_bytes in record.budget_bytes[:MOST_BUDGETS_NAMED])
    more = ", ..." if len(record.budget_bytes) > MOST_BUDGETS_NAMED else ""
    handles.append(Line2D([], [], label=f"budget {budgets}{more}", **_BUDGET_LINE))
    if _shows_peaks(report, record):
        label = f"the peaks at the same time {format_bytes(report.pool.sum_of_job_peaks_bytes)}"
        handles.append(Line2D([], [], label=label, **_PEAKS_LINE))
    handles.append(Line2D([], [], label="physical, by the kernel", **_PHYSICAL_LINE))
    if record.out_bytes.any():
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch=OUT_HATCH, label=OUT_LABEL))
    handles.append(Line2D([], [], color=INK, linestyle="none", marker="|", markersize=10, label="an iteration ends"))
    handles += [Patch(facecolor=colour, label=WAIT_LABELS[kind]) for kind, colour in WAIT_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9, frameon=False)


def _dress(axis: Axes, span: Span) -> None:
    axis.set_xlim(span.start_s, span.stop_s)
    dress(axis)


def dress(axis: Axes) -> None:
    """Give an axis the look that all pictures share."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _colours(count: int) -> Sequence[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def short(name: str) -> str:
    """Return a name as a picture has room for it."""
    return name if len(name) <= MAX_LABEL_CHARS else name[: MAX_LABEL_CHARS - 1] + "…"


# --------------------------------------------------------------------------------------------------
# The memory curve of one iteration, stacked and coloured by tensor class (drawn in
# ``zico/trace/classes.py``).

_HEIGHT_IN = 4.6
_NS_PER_MS = 1e6


def write_trace_picture(
    title: str, tick_ns: NDArray[np.int64], bytes_of: NDArray[np.int64], classes: Sequence[str], path: Path
) -> None:
    """Draw the curve and write it to ``path`` as PNG, atomically.

    Args:
        title: What stands above it.
        tick_ns: When each tick begins, and when the last one ends.
        bytes_of: Live bytes per class and tick.
        classes: The classes' names, from the bottom up.
        path: Where to.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    write_atomically(path, png_of(draw_trace(title, tick_ns, bytes_of, classes)))


def draw_trace(title: str, tick_ns: NDArray[np.int64], bytes_of: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Return the figure; arguments as for ``write_trace_picture``."""
    total = bytes_of.sum(axis=0)
    peak, peak_bytes = int(np.argmax(total)), int(total.max())
    unit_bytes, unit = unit_of(peak_bytes)
    is_timed = tick_ns[-1] > tick_ns[0]
    at = tick_ns / _NS_PER_MS if is_timed else np.arange(len(tick_ns), dtype=np.float64)
    ticks = fullest_ticks(total)
    with empty_figure(WIDTH_IN, _HEIGHT_IN) as figure:
        axis = figure.subplots()
        x = np.append(at[ticks], at[-1])
        y = np.append(bytes_of[:, ticks], bytes_of[:, -1:], axis=1) / unit_bytes
        labels = [
            f"{name} ({format_bytes(of_class[peak])} at the peak)"
            for name, of_class in zip(classes, bytes_of, strict=True)
        ]
        axis.stackplot(x, y, labels=labels, colors=COLOURS[: len(classes)], step="post", linewidth=0, alpha=0.9)
        axis.axvline(
            at[peak], color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label=f"peak {format_bytes(peak_bytes)}"
        )
        _dress(axis, Span(at[0], at[-1]))
        axis.set_ylim(0, 1.05 * peak_bytes / unit_bytes)
        axis.set_ylabel(unit)
        axis.set_xlabel("milliseconds" if is_timed else "allocations and frees")
        figure.suptitle(title, fontsize=12, color=INK)
        figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def fullest_ticks(total: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ticks to draw: all, or the fullest of each column's so that no peak is lost."""
    if len(total) <= MAX_COLUMNS:
        return np.arange(len(total), dtype=np.int64)
    bounds = np.linspace(0, len(total), MAX_COLUMNS + 1).astype(np.int64)
    return np.array([a + int(np.argmax(total[a:b])) for a, b in itertools.pairwise(bounds)])
