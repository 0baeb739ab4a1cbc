"""Pictures of simulated policies: throughput against the budget, and memory of the jobs over a few iterations."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from zico.errors import ConfigError
from zico.report.files import write_atomically
from zico.report.picture import COLOURS, DPI, INK, MAX_LABEL_CHARS, WIDTH_IN
from zico.report.trace_picture import fullest_ticks
from zico.units import GIB, KIB, MIB, TIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from zico.report.simulation_model import SimulationReport

# With the colours of Okabe and Ito, seven of which stand out on white, no two of 42 policies look alike.
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
    _write(draw_throughput(report), path)


def draw_throughput(report: SimulationReport) -> Figure:
    """Return the figure: a line for each policy."""
    figure = _figure(0.7 * WIDTH_IN)
    axis = figure.subplots()
    unit_bytes, unit = _unit(max(report.budgets_bytes))
    for number, policy in enumerate(report.policies):
        points = sorted((row.budget_bytes / unit_bytes, row.normalised) for row in report.rows if row.policy == policy)
        axis.plot(
            [budget for budget, _ in points],
            [normalised for _, normalised in points],
            color=_LINE_COLOURS[number % len(_LINE_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=_LARGEST_MARKER - 6 * number / len(report.policies),
            linewidth=_WIDEST_LINE - 3 * number / len(report.policies),
            label=_plain(policy),
        )
    axis.set_ylim(0, 1.05 * max(1.0, *(row.normalised for row in report.rows)))
    axis.set_xlabel(f"budget, {unit}")
    axis.set_ylabel("throughput over alone's, mean over the jobs")
    _dress(axis)
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
    _write(draw_memory(title, names, t_s, held_bytes, budget_bytes), path)


def draw_memory(
    title: str, names: Sequence[str], t_s: NDArray[np.float64], held_bytes: NDArray[np.int64], budget_bytes: int
) -> Figure:
    """Return the figure; arguments as for ``write_memory``."""
    figure = _figure(WIDTH_IN)
    axis = figure.subplots()
    total = held_bytes.sum(axis=0)
    top_bytes = max(budget_bytes, int(total.max(initial=0)))
    unit_bytes, unit = _unit(top_bytes)
    shown = np.append(fullest_ticks(total[:-1]), len(t_s) - 1) if len(t_s) > 1 else np.arange(1)
    labels = [_short(name) if number < _MOST_NAMED else "" for number, name in enumerate(names)]
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
    _dress(axis)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    figure.suptitle(_plain(title), fontsize=12, color=INK)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False, title=more or None)
    return figure


def _percent_of(whole: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return from a budget to its percentage, and back, as matplotlib wants them for any array."""
    return lambda budget: 100 * budget / whole, lambda percent: percent * whole / 100


def _figure(width_in: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install zico[plot]") from None
    return Figure(figsize=(width_in, _HEIGHT_IN), layout="constrained", facecolor="white")


def _write(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    write_atomically(path, buffer.getvalue())


def _dress(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)


def _unit(most_bytes: int) -> tuple[int, str]:
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next((pair for pair in units if most_bytes >= pair[0]), (1, "B"))


def _short(name: str) -> str:
    return _plain(name if len(name) <= MAX_LABEL_CHARS else name[: MAX_LABEL_CHARS - 1] + "…")


def _plain(text: str) -> str:
    """Return text that matplotlib takes for no formula."""
    return text.replace("$", r"\$")
