"""A plan as one sees it: tensors as rectangles, time across, addresses upwards, coloured by how long they live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.units import format_bytes, unit_of
from zico.report.picture import COLOURS, INK, WIDTH_IN, empty_figure, png_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from zico.planning.packing.problem import Int64s, Problem

_HEIGHT_IN = 6.0
_MOST_LINES = 200
"""Borders of regions are drawn if they are no more: above, they would cover the tensors."""


def plan_png(problem: Problem, offset_bytes: Int64s, title: str, region_bytes: int | None, unit: str) -> bytes:
    """Return the picture of a plan as PNG.

    Args:
        problem: Its ``tick_ns`` is what stands on the time axis, in ``unit``.
        offset_bytes: Where each tensor lies.
        title: What stands above it.
        region_bytes: Draw borders of regions of this size; ``None``: none.
        unit: What the times are: ``ns`` (shown as milliseconds), or ``ticks``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    top_bytes = int((offset_bytes + problem.size_bytes).max(initial=1))
    scale, scale_name = unit_of(top_bytes)
    at = np.arange(problem.n_ticks + 1) if problem.tick_ns is None else problem.tick_ns
    times = at / 1e6 if unit == "ns" else at * 1.0
    left, right = times[problem.lower], times[problem.upper]
    low, high = offset_bytes / scale, (offset_bytes + problem.size_bytes) / scale
    corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
    with empty_figure(WIDTH_IN, _HEIGHT_IN) as figure:
        from matplotlib.collections import PolyCollection

        axis = figure.subplots()
        rectangles = PolyCollection(list(corners), cmap="viridis_r", edgecolors="white", linewidths=0.2)
        rectangles.set_array((right - left) / max(float(times[-1] - times[0]), 1e-9))
        axis.add_collection(rectangles)
        if region_bytes is not None and top_bytes // region_bytes <= _MOST_LINES:
            for border in range(region_bytes, top_bytes, region_bytes):
                axis.axhline(border / scale, color=INK, linewidth=0.3, alpha=0.5)
        axis.set_xlim(times[0], times[-1])
        axis.set_ylim(0, top_bytes / scale)
        axis.set_ylabel(f"address, {scale_name}")
        axis.set_xlabel("milliseconds" if unit == "ns" else "ticks")
        axis.spines[["top", "right"]].set_visible(False)
        figure.colorbar(rectangles, label="share of the time that a tensor lives", pad=0.01)
        figure.suptitle(f"{title}: {len(problem)} tensors, up to {format_bytes(top_bytes)}", fontsize=12, color=INK)
    return png_of(figure)


# --------------------------------------------------------------------------------------------------
# A swap plan as one sees it: memory over an iteration before and after, and below it when each
# direction moves.
#
# memory |     __        before
#        |- - /- -\- - - limit
#        |  _/_____\__   after
# out    |   ## ###
# back   |          ## ##

_SWAP_HEIGHT_IN = 5.2
_NS_PER_MS = 1e6
_OUT, _BACK, _AGAIN, _AFTER = COLOURS[5], COLOURS[2], COLOURS[1], COLOURS[0]

Curve = tuple["NDArray[np.int64]", "NDArray[np.int64]"]
"""Nanoseconds into the iteration, ascending, and the bytes in memory from then on."""


def saving_png(
    title: str, before: Curve, after: Curve, limit_bytes: int | None, lanes: Mapping[str, Sequence[tuple[int, int]]]
) -> bytes:
    """Return the picture of a plan that saves memory, as PNG.

    Args:
        title: What stands above it.
        before: The load with all tensors at hand.
        after: The load under the plan.
        limit_bytes: What the plan keeps.
        lanes: When transfers ``out`` and ``back``, and operations that run ``again``, begin and end.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    peaks = [int(curve[1].max()) for curve in (before, after)]
    unit_bytes, unit = unit_of(peaks[0])
    with empty_figure(WIDTH_IN, _SWAP_HEIGHT_IN) as figure:
        axis, *below = figure.subplots(4, 1, sharex=True, height_ratios=(8, 1, 1, 1))
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
        for lane, (name, spans), colour in zip(below, lanes.items(), (_OUT, _BACK, _AGAIN), strict=True):
            _draw_lane(lane, spans, name, colour)
        end_ns = max(before[0][-1], after[0][-1])
        axis.set_xlim(0, end_ns / _NS_PER_MS)
        below[-1].set_xlabel("milliseconds")
        for each in (axis, *below):
            each.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=12, color=INK)
        figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return png_of(figure)


def _draw_lane(lane: Axes, spans: Sequence[tuple[int, int]], name: str, colour: str) -> None:
    bars = [(begin / _NS_PER_MS, (end - begin) / _NS_PER_MS) for begin, end in spans]
    lane.broken_barh(bars, (0, 1), facecolors=colour, edgecolors="white", linewidth=0.3)
    lane.set_yticks([])
    lane.set_ylabel(name, rotation=0, ha="right", va="center")
    lane.set_ylim(0, 1)
