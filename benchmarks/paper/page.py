"""docs/evaluation.md, written from the results and the prose in page.md."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from paper import budget, identical, many, over_time, pairs, tables
from paper.loads import ASSUMPTIONS
from paper.pictures import write_pictures
from paper.runs import ENOUGH
from paper.text import gain, number, percent
from paper.work import KERNEL_NS

if TYPE_CHECKING:
    from collections.abc import Callable

PROSE = Path(__file__).with_suffix(".md")
PAGE = common.ROOT / "docs" / "evaluation.md"
IMAGES = common.ROOT / "docs" / "images"
MODULES = {module.NAME.removeprefix("paper-"): module for module in (identical, pairs, over_time, budget, tables, many)}
HOST = ("agreement", "agreement-paced", "budget_change")
"""What was measured with real processes."""


def write_page() -> None:
    """Write the page and its pictures from the results."""
    results = {
        name: json.loads((common.RESULTS / f"{module.NAME}.json").read_text()) for name, module in MODULES.items()
    }
    write_pictures(results, IMAGES)
    PAGE.write_text(page_of(results, *(json.loads((common.RESULTS / f"{name}.json").read_text()) for name in HOST)))
    print(f"written: {PAGE}")


def page_of(
    results: dict[str, dict[str, Any]], trained: dict[str, Any], paced: dict[str, Any], change: dict[str, Any]
) -> str:
    """Return the page."""
    sets = results["many"]["sets"]
    values = {
        "kernel_us": str(KERNEL_NS / 1e3),
        "enough": str(ENOUGH),
        "identical_throughput": identical.throughput_table(results["identical"]),
        "identical_policies": identical.policies_table(results["identical"]),
        "identical_memory": identical.memory_table(results["identical"]),
        "pairs_each": pairs.pairs_table(results["pairs"]),
        "pairs_groups": pairs.groups_table(results["pairs"]),
        "pairs_policies": pairs.policies_table(results["pairs"]),
        "over_time_rounds": str(results["over-time"]["settings"]["rounds"]),
        "over_time_identical": over_time.over_time_table(results["over-time"], 7),
        "over_time_pair": over_time.over_time_table(results["over-time"], 9),
        "budget_periods": budget.budget_table(results["budget"]),
        "tables_tracking": tables.tracking_table(results["tables"]),
        "tables_regions": tables.regions_table(results["tables"]),
        "region_ns": number(results["tables"]["settings"]["region_ns"]),
        "many_share": percent(many.SHOWN),
        "many_sums": "\n".join(_by_set(sets, many.throughput_table, each) for each in ASSUMPTIONS),
        "many_shares": _by_set(sets, lambda rows, each: many.shares_table(rows, each, 4), "apart"),
        "many_saved": many.saved_table(results["many"]),
        "many_fairness": _by_set(sets, many.fairness_table, "roofline"),
        "host": host_table(trained),
        "host_paced": host_table(paced),
        "host_budget": change_table(change),
        "provenance": "".join(
            f"* `{each['name']}.json`: {common.provenance(each)}"
            for each in (*results.values(), trained, paced, change)
        ),
    }
    return string.Template(PROSE.read_text()).substitute(values)


def _by_set(
    sets: dict[str, list[dict[str, Any]]], table: Callable[[list[dict[str, Any]], str], str], assumption: str
) -> str:
    return "\n".join(f"{name}, {assumption}:\n\n{table(rows, assumption)}" for name, rows in sets.items())


def host_table(result: dict[str, Any]) -> str:
    """Return throughput of real processes on the host device over that without a limit, and what is simulated."""
    header = ("pair", "budget over peaks", "policy", "measured", "simulated", "possible", "over serial")
    lines = []
    for name, pair in result["pairs"].items():
        serial = {row["share"]: row["throughput"]["median"] for row in pair["rows"] if row["policy"] == "serial"}
        for row in pair["rows"]:
            share, of = row["share"], row["throughput"]
            measured = f"{of['median']:.3f} ({of['min']:.3f}-{of['max']:.3f})"
            over = gain(of["median"] / serial[share] if share in serial else None)
            figures = (number(row["simulated"], 3), number(row["possible"], 3), over)
            lines.append((name, f"{share} %", row["policy"], measured, *figures))
    return common.table(header, lines)


def change_table(result: dict[str, Any]) -> str:
    """Return what two real jobs waited while their budget changed."""
    header = ("budget over peaks", "fits after", "wait between iterations", "wait inside", "iteration")
    return common.table(header, [_change_row(part) for part in result["parts"]])


def _change_row(part: dict[str, Any]) -> tuple[str, ...]:
    jobs = [job for job in part["jobs"] if "gap_s" in job]
    gaps = "; ".join(f"{job['gap_s']['median']:.2f} s" for job in jobs)
    inside = "; ".join(f"{job['inside_s']:.2f} s" for job in jobs)
    periods = "; ".join(f"{job['period_s']['median']:.2f} s" for job in jobs)
    return part["part"], f"{part['settled_after_s']:.1f} s", gaps, inside, periods
