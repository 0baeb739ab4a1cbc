"""What ``colocation.py`` shows: tables, goals, a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GOALS = {("resnet+resnet", 70): 0.95, ("resnet+lm", 80): 0.90}
GOAL_PLAIN = 0.98
PLAIN = "without Zico"
ONE_BY_ONE = "one after the other"

HEADER = (
    "configuration",
    "throughput",
    "min-max",
    "over without Zico",
    "over serial",
    "times one after the other, whole machine",
    "it/s",
    "most waited",
    "granted",
    "physical",
    "losses",
)


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown, a table for each pair."""
    parts = []
    for name, pair in result["pairs"].items():
        peaks = " + ".join(f"{peak / 2**20:.0f}" for peak in pair["peaks_bytes"])
        parts.append(f"**{name}**, peaks {peaks} MiB\n")
        parts.append(common.table(HEADER, _rows(pair["summary"])))
        parts.extend(_goal_lines(name, pair["summary"]))
        parts.extend(f"* failed: {failure}\n" for failure in pair["failures"])
    return "\n".join(parts)


def _rows(summary: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for label, figures in summary.items():
        of = figures["throughput"]
        rates = " + ".join(f"{rate['median']:.2f}" for rate in figures["rates"])
        equal = figures.get("losses_equal")
        losses = "-" if equal is None else f"{'same' if equal else 'DIFFER'} ({figures['losses_compared_min']})"
        yield (
            label,
            f"{of['median']:.3f}",
            f"{of['min']:.3f}-{of['max']:.3f}",
            f"{figures['over_without_zico']:.3f}" if "over_without_zico" in figures else "-",
            _over_serial(label, summary),
            _over_one_by_one(label, figures),
            rates,
            *(_percent(figures.get(key)) for key in ("waited_share", "granted_over_budget", "physical_over_budget")),
            losses,
        )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _over_one_by_one(label: str, figures: dict[str, Any]) -> str:
    of = figures.get("over_one_by_one", {"median": 1.0} if label == ONE_BY_ONE else None)
    return "-" if of is None else f"{of['median']:.2f}"


def _over_serial(label: str, summary: dict[str, Any]) -> str:
    """Return the throughput over the serial policy's in the same budget."""
    policy, _, budget = label.partition(" ")
    serial = summary.get(f"serial {' '.join(budget.split()[:2])}")
    if policy != "zico" or serial is None:
        return "-"
    return f"{summary[label]['throughput']['median'] / serial['throughput']['median']:.2f}"


def _goal_lines(name: str, summary: dict[str, Any]) -> Iterator[str]:
    """Say of each goal whether it is reached."""
    for (pair, share), goal in GOALS.items():
        label = f"zico {share} %"
        if pair == name and label in summary:
            yield _goal(f"{label}: throughput", summary[label]["throughput"]["median"], goal)
    if "over_without_zico" in summary.get("zico 100 %", {}):
        yield _goal("zico 100 % over without Zico", summary["zico 100 %"]["over_without_zico"], GOAL_PLAIN)


def _goal(what: str, value: float, goal: float) -> str:
    return f"* {what} {value:.3f}, goal {goal:.2f}: {'reached' if value >= goal else 'missed'}\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw throughput against budget, a panel for each pair, with the spread as bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(result["pairs"]), figsize=(5.5 * len(result["pairs"]), 4), squeeze=False)
    for panel, (name, pair) in zip(panels[0], result["pairs"].items(), strict=True):
        saves = [("zico", f" {save}") for save in result["settings"].get("save", [])]
        for policy, suffix in [*((policy, "") for policy in result["settings"]["policies"]), *saves]:
            _draw_policy(panel, policy, suffix, pair["summary"])
        for label, style in ((PLAIN, ":"), (ONE_BY_ONE, "--")):
            if label in pair["summary"]:
                level = pair["summary"][label]["throughput"]["median"]
                panel.axhline(level, linestyle=style, color="black", linewidth=1, label=label)
        panel.set(title=name, xlabel="budget, % of the sum of the peaks", ylabel="throughput (no budget: 1)")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_policy(panel: Any, policy: str, suffix: str, summary: dict[str, Any]) -> None:  # noqa: ANN401 - matplotlib's axes
    found = {share: summary.get(f"{policy} {share} %{suffix}") for share in range(101)}
    shares = [share for share, figures in found.items() if figures is not None]
    spreads = [figures["throughput"] for figures in found.values() if figures is not None]
    medians = [spread["median"] for spread in spreads]
    below = [spread["median"] - spread["min"] for spread in spreads]
    above = [spread["max"] - spread["median"] for spread in spreads]
    panel.errorbar(shares, medians, yerr=(below, above), marker="o", capsize=3, label=policy + suffix)
