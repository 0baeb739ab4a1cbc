"""What ``agreement.py`` found, as Markdown, and of each goal whether it is reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHIN = {"throughput": 0.10, "peak": 0.05}
"""How far the simulated figures may be from the real ones."""
TWINS = "resnet+resnet"
FRAMEWORKS = {"resnet": "PyTorch", "wide": "PyTorch", "deep": "PyTorch", "lm": "TensorFlow", "short": "TensorFlow"}
"""Of the jobs by the first word of their names."""
TWINS_SHARE, TWINS_GOAL = 70, 0.97
UNEQUAL_SHARE, UNEQUAL_GOAL = 75, 0.95  # of what is possible
HIGH_SHARE, TWO_FRAMEWORKS_GOAL = 80, 0.90
TIGHT_TWINS_SHARE, TIGHT_TWINS_GOAL = 72, 0.95
LOW_SHARE, LOW_GOAL = 60, 1.4  # over serial, where the simulator says that it is possible
HEADER = (
    "pair",
    "budget",
    "policy",
    "real",
    "min-max",
    "simulated",
    "simulated / real",
    "possible",
    "real / possible",
    "peak: simulated / real",
    "stolen, then and without a limit",
)


def are_twins(name: str) -> bool:
    """Tell whether a pair, in whatever form, is of equal jobs."""
    one, _, other = name.partition(",")[0].partition("+")
    return one == other


def are_of_two_frameworks(name: str) -> bool:
    """Tell whether a pair, in whatever form, has a job of PyTorch and one of TensorFlow."""
    return len({FRAMEWORKS.get(job) for job in name.partition(",")[0].split("+")}) > 1


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown, and of each goal whether it is reached."""
    rows = [_cells(name, row) for name, pair in result["pairs"].items() for row in pair["rows"]]
    parts = [common.table(HEADER, rows)]
    earlier = [
        f"{name} of commit `{pair['commit'][:12]}`" for name, pair in result["pairs"].items() if "commit" in pair
    ]
    if earlier:
        parts.append(f"Measured before the others: {', '.join(earlier)}.\n")
    for name, pair in result["pairs"].items():
        jobs = ", ".join(
            f"{job['name']} {job['iteration_s']:.2f} s, {job['peak']} regions, jitter {job['jitter']:.1%}"
            for job in pair["jobs"]
        )
        parts.append(f"* {name}: {jobs}; together each is {pair['slowdown']:.2f} times slower\n")
    parts.extend(_goals(result["pairs"]))
    return "\n".join(parts)


def again_text(result: dict[str, Any]) -> str:
    """Return what was simulated then and is simulated now beside what was real, and how far both are off."""
    rows = [(name, row) for name, pair in result["pairs"].items() for row in pair]
    off = {when: [abs(row[when] / row["real"] - 1) for _, row in rows] for when in ("then", "now")}
    cells = [
        (
            *(name, f"{row['share']} %", row["policy"], f"{row['real']:.3f}"),
            *(f"{row[when]:.3f}, {row[when] / row['real'] - 1:+.1%}" for when in off),
        )
        for name, row in rows
    ]
    means = ", ".join(f"{when} {sum(each) / len(each):.1%} and {max(each):.1%}" for when, each in off.items())
    table = common.table(("pair", "budget", "policy", "real", "simulated then", "simulated now"), cells)
    return f"{table}\nOff by, on average and at most: {means}.\n"


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    of = row["throughput"]
    reached = f"{of['median'] / row['possible']:.3f}" if row["possible"] else "-"
    return (
        name,
        f"{row['share']} %",
        row["policy"],
        f"{of['median']:.3f}",
        f"{of['min']:.3f}-{of['max']:.3f}",
        f"{row['simulated']:.3f}",
        f"{row['simulated'] / of['median']:.3f}",
        f"{row['possible']:.3f}",
        reached,
        f"{row['peak_ratio']:.3f}",
        ", ".join(f"{stolen:.0%}" for stolen in row["stolen"]),
    )


def _goals(measured: dict[str, Any]) -> Iterator[str]:
    """Say of each goal whether it is reached."""
    real = {(name, row["policy"], row["share"]): row for name, pair in measured.items() for row in pair["rows"]}
    ratios = [row["simulated"] / row["throughput"]["median"] for row in real.values()]
    if ratios:
        near = sum(abs(ratio - 1) <= WITHIN["throughput"] for ratio in ratios)
        yield f"* throughput: within {WITHIN['throughput']:.0%} of the real one in {near} of {len(ratios)} cases\n"
        peaks = [row["peak_ratio"] for row in real.values()]
        near = sum(abs(ratio - 1) <= WITHIN["peak"] for ratio in peaks)
        yield f"* peak granted: within {WITHIN['peak']:.0%} of the real one in {near} of {len(peaks)} cases\n"
    for (name, policy, share), row in real.items():
        if policy == "zico":
            others = {other: real[name, other, share] for other in ("shift", "serial") if (name, other, share) in real}
            yield from _goals_of(name, share, row, others)


def _goals_of(name: str, share: int, row: dict[str, Any], others: dict[str, Any]) -> Iterator[str]:
    """Say of each goal of a pair in a budget whether ``zico`` reaches it; ``others`` are rows of other policies."""
    median = row["throughput"]["median"]
    if are_twins(name):
        goals = {TWINS_SHARE: TWINS_GOAL, TIGHT_TWINS_SHARE: TIGHT_TWINS_GOAL}
    else:
        goals = {HIGH_SHARE: TWO_FRAMEWORKS_GOAL} if are_of_two_frameworks(name) else {}
        if share in (UNEQUAL_SHARE, HIGH_SHARE):
            yield _goal(f"{name} at {share} %: of what is possible", median / row["possible"], UNEQUAL_GOAL)
    if share in goals:
        yield _goal(f"{name} at {share} %: throughput", median, goals[share])
    if share == UNEQUAL_SHARE and "shift" in others and not are_twins(name):
        yield _goal(f"{name} at {share} %: over shift", median / others["shift"]["throughput"]["median"], 1.0)
    if share == LOW_SHARE and "serial" in others and row["possible"] / others["serial"]["simulated"] >= LOW_GOAL:
        over = median / others["serial"]["throughput"]["median"]
        yield _goal(f"{name} at {share} %: over serial", over, LOW_GOAL)


def _goal(what: str, value: float, goal: float) -> str:
    return f"* {what} {value:.3f}, goal {goal:.2f}: {'reached' if value >= goal else 'missed'}\n"
