r"""A swap plan as one sees it: memory over an iteration before and after, and below it when each direction moves.

memory |     __        before
       |- - /- -\- - - limit
       |  _/_____\__   after
out    |   ## ###
back   |          ## ##
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from zico.errors import ConfigError
from zico.report.picture import COLOURS, DPI, INK, WIDTH_IN
from zico.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

_HEIGHT_IN = 5.2
_NS_PER_MS = 1e6
_OUT, _BACK, _AFTER = COLOURS[5], COLOURS[2], COLOURS[0]

Curve = tuple["NDArray[np.int64]", "NDArray[np.int64]"]
"""Nanoseconds into the iteration, ascending, and the bytes in memory from then on."""


def swap_png(
    title: str, before: Curve, after: Curve, limit_bytes: int | None, lanes: Sequence[Sequence[tuple[int, int]]]
) -> bytes:
    """Return the picture of a swap plan as PNG.

    Args:
        title: What stands above it.
        before: The load with all tensors at hand.
        after: The load under the plan.
        limit_bytes: What the plan keeps.
        lanes: When transfers out, and back, begin and end.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install zico[plot]") from None
    peaks = [int(curve[1].max()) for curve in (before, after)]
    unit_bytes, unit = next(
        pair for pair in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")) if peaks[0] >= pair[0]
    )
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN), layout="constrained", facecolor="white")
    axis, *below = figure.subplots(3, 1, sharex=True, height_ratios=(8, 1, 1))
    for (at_ns, bytes_), peak, style in zip((before, after), peaks, ("before", "after"), strict=True):
        x, y = at_ns / _NS_PER_MS, bytes_ / unit_bytes
        label = f"{style}: at most {format_bytes(peak)}"
        if style == "before":
            axis.step(x, y, where="post", color="#999999", linewidth=1.0, label=label)
        else:
            axis.fill_between(x, y, step="post", color=_AFTER, alpha=0.75, linewidth=0, label=label)
    if limit_bytes is not None:
        label = f"limit {format_bytes(limit_bytes)}"
        axis.axhline(limit_bytes / unit_bytes, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label=label)
    axis.set_ylabel(unit)
    axis.set_ylim(0, 1.05 * max(peaks) / unit_bytes)
    for lane, spans, name, colour in zip(below, lanes, ("out", "back"), (_OUT, _BACK), strict=True):
        _draw_lane(lane, spans, name, colour)
    end_ns = max(before[0][-1], after[0][-1])
    axis.set_xlim(0, end_ns / _NS_PER_MS)
    below[-1].set_xlabel("milliseconds")
    for each in (axis, *below):
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12, color=INK)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _draw_lane(lane: Axes, spans: Sequence[tuple[int, int]], name: str, colour: str) -> None:
    bars = [(begin / _NS_PER_MS, (end - begin) / _NS_PER_MS) for begin, end in spans]
    lane.broken_barh(bars, (0, 1), facecolors=colour, edgecolors="white", linewidth=0.3)
    lane.set_yticks([])
    lane.set_ylabel(name, rotation=0, ha="right", va="center")
    lane.set_ylim(0, 1)
