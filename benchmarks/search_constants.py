"""Which constants of the search for a plan matter?

Each is changed in turn, and every fourth set of two and three jobs of ``few_jobs.py`` is simulated
in 60, 70 and 80 % of the sum of its peaks, without guarantees and with .8 owed to the first job.
Ratios are of mean throughputs, changed over unchanged. Only constants that Python reads are
changed: those in compiled code are part of the program. Deterministic but for ``plan_s``::

    python benchmarks/search_constants.py -o benchmarks/results
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import common
import few_jobs

from zico.scheduler import best_schedule, plan_search

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

QUESTION = "Which constants of the search for a plan matter?"
SHARES = (0.6, 0.7, 0.8)
EVERY = 4
CHANGES: tuple[tuple[ModuleType, str, float], ...] = (
    (best_schedule, "RANK", 1.0),
    (best_schedule, "RANK", 3.0),
    (best_schedule, "RANK", 24.0),
    (plan_search, "_UNFAIR", 2.0),
    (plan_search, "_UNFAIR", 30.0),
)


def simulated() -> list[dict[str, Any]]:
    """Return the figures of all cases."""
    sets = [(group, loads) for group, loads in few_jobs.sets() if group[0] in "23"][::EVERY]
    owed = (0.0, few_jobs.OWED)
    return [few_jobs.judged(group, loads, share, each) for group, loads in sets for share in SHARES for each in owed]


def compared(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a change comes to, and the figures of each case after it."""
    ratios = [b["means"]["zico"] / a["means"]["zico"] for a, b in zip(before, after, strict=True)]
    owed = [case for case in after if case["owed"]]
    return {
        "ratio": {"mean": statistics.fmean(ratios), "least": min(ratios), "most": max(ratios)},
        "other": sum(ratio != 1 for ratio in ratios),
        "met": sum(case["lacks"] < few_jobs.MET for case in owed),
        "lacks": statistics.fmean(case["lacks"] for case in owed),
        "plan_s": statistics.fmean(case["plan_s"] for case in after),
        "zico": [case["means"]["zico"] for case in after],
        "lacks_each": [case["lacks"] for case in after],
    }


def text_of(changes: Sequence[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    rows = [
        (
            f"{one['constant']} {one['from']:g} -> {one['to']:g}" if one["constant"] else "unchanged",
            f"{one['ratio']['mean']:.4f}",
            f"{one['ratio']['least']:.3f}",
            f"{one['ratio']['most']:.3f}",
            f"{one['other']} of {len(one['zico'])}",
            f"{one['met']} of {len(one['zico']) // 2}",
            f"{one['lacks']:.4f}",
            f"{one['plan_s']:.3f}",
        )
        for one in changes
    ]
    header = ("constant", "ratio, mean", "least", "most", "other", "met", "lacks, mean", "plan, s of a processor")
    return common.table(header, rows)


def main() -> None:
    """Simulate, print, write."""
    options = common.parser(__doc__).parse_args()
    result = common.document("search_constants", QUESTION, {"shares": SHARES, "every": EVERY})
    before = simulated()
    result["changes"] = [{"constant": "", "from": 0, "to": 0} | compared(before, before)]
    for module, name, value in CHANGES[: 1 if options.smoke else None]:
        was = getattr(module, name)
        setattr(module, name, value)
        result["changes"].append({"constant": name, "from": was, "to": value} | compared(before, simulated()))
        setattr(module, name, was)
        common.note(f"{name} {was} -> {value}")
    common.write(result, text_of(result["changes"]), common.output_directory(options))


if __name__ == "__main__":
    main()
