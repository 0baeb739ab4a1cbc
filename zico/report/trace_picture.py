"""The memory curve of one iteration, stacked and coloured by tensor class (drawn in ``zico/trace/classes.py``)."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING

import numpy as np

from zico.errors import ConfigError
from zico.report.files import write_atomically
from zico.report.picture import COLOURS, DPI, INK, MAX_COLUMNS, WIDTH_IN
from zico.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

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
    buffer = io.BytesIO()
    draw(title, tick_ns, bytes_of, classes).savefig(buffer, format="png", dpi=DPI)
    write_atomically(path, buffer.getvalue())


def draw(title: str, tick_ns: NDArray[np.int64], bytes_of: NDArray[np.int64], classes: Sequence[str]) -> Figure:
    """Return the figure; arguments as for ``write_trace_picture``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install zico[plot]") from None
    total = bytes_of.sum(axis=0)
    peak, peak_bytes = int(np.argmax(total)), int(total.max())
    unit_bytes, unit = next(
        pair for pair in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")) if peak_bytes >= pair[0]
    )
    is_timed = tick_ns[-1] > tick_ns[0]
    at = tick_ns / _NS_PER_MS if is_timed else np.arange(len(tick_ns), dtype=np.float64)
    ticks = fullest_ticks(total)
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN), layout="constrained", facecolor="white")
    axis = figure.subplots()
    x = np.append(at[ticks], at[-1])
    y = np.append(bytes_of[:, ticks], bytes_of[:, -1:], axis=1) / unit_bytes
    labels = [
        f"{name} ({format_bytes(of_class[peak])} at the peak)" for name, of_class in zip(classes, bytes_of, strict=True)
    ]
    axis.stackplot(x, y, labels=labels, colors=COLOURS[: len(classes)], step="post", linewidth=0, alpha=0.9)
    axis.axvline(at[peak], color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label=f"peak {format_bytes(peak_bytes)}")
    axis.set_xlim(at[0], at[-1])
    axis.set_ylim(0, 1.05 * peak_bytes / unit_bytes)
    axis.set_ylabel(unit)
    axis.set_xlabel("milliseconds" if is_timed else "allocations and frees")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    figure.suptitle(title, fontsize=12, color=INK)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def fullest_ticks(total: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ticks to draw: all, or the fullest of each column's so that no peak is lost."""
    if len(total) <= MAX_COLUMNS:
        return np.arange(len(total), dtype=np.int64)
    bounds = np.linspace(0, len(total), MAX_COLUMNS + 1).astype(np.int64)
    return np.array([a + int(np.argmax(total[a:b])) for a, b in itertools.pairwise(bounds)])
