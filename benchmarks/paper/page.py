"""docs/evaluation.md, written from the results and the prose in page.md."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from paper import budget, identical, many, pairs, tables
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
MODULES = {module.NAME.removeprefix("paper-"): module for module in (identical, pairs, budget, tables, many)}
_HOST_SHARES = (60, 70, 80)


def write_page() -> None:
    """Write the page and its pictures from the results."""
    results = {
        name: json.loads((common.RESULTS / f"{module.NAME}.json").read_text()) for name, module in MODULES.items()
    }
    write_pictures(results, IMAGES)
    PAGE.write_text(page_of(results, json.loads((common.RESULTS / "colocation.json").read_text())))
    print(f"written: {PAGE}")


def page_of(results: dict[str, dict[str, Any]], host: dict[str, Any]) -> str:
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
        "budget_periods": budget.budget_table(results["budget"]),
        "tables_tracking": tables.tracking_table(results["tables"]),
        "tables_regions": tables.regions_table(results["tables"]),
        "region_ns": number(results["tables"]["settings"]["region_ns"]),
        "many_share": percent(many.SHOWN),
        "many_sums": "\n".join(_by_set(sets, many.throughput_table, each) for each in ASSUMPTIONS),
        "many_shares": _by_set(sets, lambda rows, each: many.shares_table(rows, each, 4), "apart"),
        "many_saved": many.saved_table(results["many"]),
        "many_fairness": _by_set(sets, many.fairness_table, "roofline"),
        "host": host_table(host),
        "provenance": "".join(
            f"* `{MODULES[name].NAME}.json`: {common.provenance(each)}" for name, each in results.items()
        ),
    }
    return string.Template(PROSE.read_text()).substitute(values)


def _by_set(
    sets: dict[str, list[dict[str, Any]]], table: Callable[[list[dict[str, Any]], str], str], assumption: str
) -> str:
    return "\n".join(f"{name}, {assumption}:\n\n{table(rows, assumption)}" for name, rows in sets.items())


def host_table(result: dict[str, Any]) -> str:
    """Return throughput of real jobs on the host device over that with no budget."""
    header = ("pair", "budget over peaks", "zico over no budget", "serial over no budget", "zico over serial")
    lines = []
    for name, pair in result["pairs"].items():
        for share in _HOST_SHARES:
            zico, serial = (_median(pair["summary"], f"{policy} {share} %") for policy in ("zico", "serial"))
            ratio = zico / serial if zico and serial else None
            lines.append((name, f"{share} %", number(zico, 3), number(serial, 3), gain(ratio)))
    return common.table(header, lines)


def _median(summary: dict[str, Any], label: str) -> float | None:
    found: float | None = summary[label]["throughput"]["median"] if label in summary else None
    return found
