"""A plan as one sees it: tensors as rectangles, time across, addresses upwards, coloured by how long they live."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from zico.errors import ConfigError
from zico.report.picture import DPI, INK, WIDTH_IN
from zico.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from zico.planners.problem import Int64s, Problem

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
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install zico[plot]") from None
    top_bytes = int((offset_bytes + problem.size_bytes).max(initial=1))
    scale, scale_name = next(
        pair for pair in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")) if top_bytes >= pair[0]
    )
    at = np.arange(problem.n_ticks + 1) if problem.tick_ns is None else problem.tick_ns
    times = at / 1e6 if unit == "ns" else at * 1.0
    left, right = times[problem.lower], times[problem.upper]
    low, high = offset_bytes / scale, (offset_bytes + problem.size_bytes) / scale
    corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN), layout="constrained", facecolor="white")
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
