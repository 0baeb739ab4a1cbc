"""The pictures of docs/evaluation.md, from the results."""

# ruff: noqa: ANN401 - matplotlib's axes

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
from paper import identical, many, over_time, pairs
from paper.loads import ASSUMPTIONS
from paper.published import BUDGET_CHANGE, IDENTICAL, PAIRS, REGION_BYTES

from zico.report.picture import COLOURS, DPI, INK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STYLES = {
    "unlimited": ("#999999", ":", ""),
    "zico": (COLOURS[0], "-", "o"),
    "shift": (COLOURS[1], "-", "s"),
    "shift:fallback=0": (COLOURS[1], "--", ""),
    "claims": (COLOURS[2], "-", "^"),
    "serial": (COLOURS[3], "-", "v"),
    "mps": (COLOURS[5], "-", "x"),
    "salus:order=pack": (COLOURS[4], "-", "D"),
    "partition": (COLOURS[6], "-", "P"),
    "tgs": (INK, "-", "*"),
}
"""Colour, line and marker, the same in every picture."""
_TWO = (COLOURS[0], COLOURS[1])
_GB = 1e9


def _figure(width_in: float, height_in: float, rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _plot(panel: Any, x: list[float], y: list[float | None], policy: str, **more: Any) -> None:
    colour, line, marker = STYLES[policy]
    values = [np.nan if value is None else value for value in y]
    style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4, "linewidth": 1.4, "label": policy}
    panel.plot(x, values, **(style | more))


def draw_identical(result: dict[str, Any]) -> Any:
    """Draw throughput over time slices against the batch, a panel for each model."""
    figure, panels = _figure(12, 7, 2, 3)
    for panel, (key, found) in zip(panels.flat, result["models"].items(), strict=False):
        rows = found[identical.PRESSURE]
        ticks = [row["tick"] for row in rows]
        for policy in ("unlimited", *identical.POLICIES):
            means = [_over_slices(row["roofline"].get(policy)) for row in rows]
            if any(means):
                _plot(panel, ticks, means, policy)
        _plot(panel, ticks, [_over_slices(row["apart"].get("zico")) for row in rows], "zico", linestyle="--", marker="")
        model = IDENTICAL[key]
        panel.plot(
            ticks[-1], model.gain, marker="*", markersize=13, linestyle="", color=COLOURS[5], markeredgecolor=INK
        )
        panel.axvline(model.first_over, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        panel.set_title(f"two {found['title']}, {found['card']}", fontsize=10)
        panel.set(xlabel="the paper's batch", ylim=(0, 2.1))
        panel.grid(alpha=0.3)
    panels[0, 0].set_ylabel("throughput over time slices")
    panels[1, 0].set_ylabel("throughput over time slices")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    labels = [f"{label}, roofline" for label in labels[:-1]] + ["zico, apart"]
    star = panels[0, 0].get_lines()[-2]
    figure.legend([*handles, star], [*labels, "the paper's Zico [fig]"], loc="outside lower center", ncols=4)
    return figure


def _over_slices(found: dict[str, Any] | None) -> float | None:
    return found["mean"] / identical.SLICE if found else None


def draw_memory(result: dict[str, Any]) -> Any:
    """Draw the two jobs' peaks at the largest batch, and what sharing needs, over the card."""
    from paper.loads import regions_of

    figure, panels = _figure(9, 4, 1, 1)
    panel = panels[0, 0]
    models = {key: IDENTICAL[key] for key in result["models"]}
    found = [result["models"][key] for key in models]
    bars = {
        "both peaks, paper [fig]": [model.aggregate for model in models.values()],
        "both peaks, our models as printed": [each[identical.PRINTED][-1]["two_peaks"] for each in found],
        "granted by zico, equal pressure": [
            each[identical.PRESSURE][-1]["roofline"]["zico"]["peak_granted"] / regions_of(each["card"])
            for each in found
        ],
    }
    _bars(panel, [each["title"] for each in found], bars, (COLOURS[5], COLOURS[4], COLOURS[0]), percent=True)
    panel.axhline(100, color=INK, linewidth=1.2, linestyle=(0, (6, 3)))
    panel.set(ylabel="memory, % of the card", ylim=(0, 230))
    for i, value in enumerate(bars["both peaks, our models as printed"]):
        if value > 2.3:
            panel.annotate(f"{100 * value:.0f} %", (i, 222), ha="center", fontsize=8)
    return figure


def _bars(
    panel: Any, names: list[str], bars: dict[str, list[float]], colours: tuple[str, ...], *, percent: bool = False
) -> None:
    width = 0.8 / len(bars)
    for i, (label, values) in enumerate(bars.items()):
        at = np.arange(len(names)) + (i - (len(bars) - 1) / 2) * width
        heights = [100 * value for value in values] if percent else values
        panel.bar(at, heights, width, label=label, color=colours[i])
    panel.set_xticks(range(len(names)), names)
    panel.grid(axis="y", alpha=0.3)
    panel.legend(fontsize=8)


def draw_pairs(result: dict[str, Any]) -> Any:
    """Draw each pair's mean throughput over time slices beside the paper's."""
    figure, panels = _figure(12, 4.5, 1, 1)
    known = [pair for pair in PAIRS if pair.name in result["pairs"]]

    def means(assumption: str, policy: str) -> list[float]:
        rows = (result["pairs"][pair.name] for pair in known)
        return [statistics.fmean(pairs.gains(row, assumption, policy) or [0.0]) for row in rows]

    bars = {
        "paper [fig]": [statistics.fmean(pair.zico) for pair in known],
        "zico, apart": means("apart", "zico"),
        "zico, roofline": means("roofline", "zico"),
        "unlimited memory, roofline": means("roofline", "unlimited"),
    }
    _bars(panels[0, 0], [pair.name for pair in known], bars, (COLOURS[5], COLOURS[4], COLOURS[0], COLOURS[7]))
    panels[0, 0].axhline(1, color=INK, linewidth=0.8)
    panels[0, 0].set_ylabel("throughput over time slices, mean of both jobs")
    panels[0, 0].tick_params(axis="x", labelsize=8)
    return figure


def draw_budget(result: dict[str, Any]) -> Any:
    """Draw what both jobs hold over time under the budget, for the policies that differ."""
    policies = [policy for policy in ("zico", "shift", "serial") if policy in result["roofline"]]
    figure, panels = _figure(10, 2.2 * len(policies), len(policies), 1)
    for panel, policy in zip(panels[:, 0], policies, strict=True):
        found = result["roofline"][policy]
        edges_s = np.arange(4) * found["period_s"]
        _areas(panel, edges_s[-1], {policy: found["held"]}, (STYLES[policy][0],))
        limits = [share * result["card_bytes"] / _GB for share in BUDGET_CHANGE.shares]
        panel.stairs(limits, edges_s, color=INK, linewidth=1.4, linestyle=(0, (6, 3)), label="budget")
        panel.set(ylabel="GB", ylim=(0, 27), xlim=(0, edges_s[-1]))
        panel.set_title(f"{policy}, roofline", loc="left", fontsize=9)
    panels[-1, 0].set_xlabel("simulated seconds")
    panels[0, 0].legend(loc="upper right", fontsize=8)
    return figure


def _areas(panel: Any, end: float, held: dict[str, list[int]], colours: tuple[str, ...]) -> None:
    """Draw regions held over even stretches of time, one area on the other."""
    below = np.zeros(len(next(iter(held.values()))))
    edges = np.linspace(0, end, len(below) + 1)
    for (label, regions), colour in zip(held.items(), colours, strict=True):
        top = below + np.array(regions) * REGION_BYTES / _GB
        panel.stairs(top, edges, baseline=below, fill=True, color=colour, label=label)
        below = top


def draw_over_time(result: dict[str, Any], figure_number: int) -> Any:
    """Draw what two jobs hold over a few iterations, one on the other; a row for each policy."""
    shown = [found for found in result["pairs"].values() if found["figure"] == figure_number]
    figure, panels = _figure(6.5 * len(shown), 2.4 * len(over_time.DRAWN), len(over_time.DRAWN), len(shown))
    for line, policy in zip(panels, over_time.DRAWN, strict=True):
        for panel, found in zip(line, shown, strict=True):
            drawn = found["roofline"][policy]
            _areas(panel, drawn["window_ms"], dict(zip(found["names"], drawn["held"], strict=True)), _TWO)
            card_gb = found["card_regions"] * REGION_BYTES / _GB
            panel.axhline(card_gb, color=INK, linewidth=1.2, linestyle=(0, (6, 3)), label="the card")
            panel.set(ylabel="GB", ylim=(0, 1.25 * card_gb), xlim=(0, drawn["window_ms"]))
            panel.set_title(f"{policy}, roofline, {found['card']}", loc="left", fontsize=9)
            panel.legend(loc="upper right", fontsize=8, ncols=3)
    for panel in panels[-1]:
        panel.set_xlabel("simulated milliseconds")
    return figure


def draw_many(result: dict[str, Any]) -> Any:
    """Draw the sum of the throughputs against the number of jobs."""
    names = list(result["sets"])
    figure, panels = _figure(11, 4 * len(names), len(names), len(ASSUMPTIONS))
    for line, name in zip(panels, names, strict=True):
        for panel, assumption in zip(line, ASSUMPTIONS, strict=True):
            rows = [row for row in result["sets"][name] if row["share"] == many.SHOWN]
            for policy in ("unlimited", *many.POLICIES):
                sums = [_sum(row, assumption, policy) for row in rows]
                if any(sums):
                    _plot(panel, [row["n"] for row in rows], sums, policy)
            panel.set_title(f"{name}, {assumption}", fontsize=10)
            panel.set(xlabel="jobs", ylabel="sum of throughputs, alone: 1 each", ylim=(0, None))
            panel.grid(alpha=0.3)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def _sum(row: dict[str, Any], assumption: str, policy: str) -> float | None:
    found = row[assumption].get(policy)
    return found["mean"] * row["n"] if found else None


DRAWN: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "identical": ("identical", draw_identical),
    "memory": ("identical", draw_memory),
    "pairs": ("pairs", draw_pairs),
    "identical-over-time": ("over-time", functools.partial(draw_over_time, figure_number=7)),
    "pair-over-time": ("over-time", functools.partial(draw_over_time, figure_number=9)),
    "budget": ("budget", draw_budget),
    "many": ("many", draw_many),
}
"""Each picture's experiment, and what draws it."""


def write_pictures(results: dict[str, dict[str, Any]], directory: Path) -> None:
    """Draw what there are results for."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, (experiment, draw) in DRAWN.items():
        if experiment in results:
            figure = draw(results[experiment])
            figure.savefig(directory / f"evaluation-{name}.png", dpi=DPI, metadata={"Software": None})
