"""Is a pair of jobs that could just wait for memory ever slower because its jobs may save it (`--save auto`)?

Two ResNets share 70 and 80 % of the sum of their peaks, without saving and with ``auto`` by turns. A
round has one run of each, in an order that changes from round to round, and its ratio is of two
runs side by side: the speed of a shared machine drifts.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import colocation
import common
import together
from colocation import Configuration

QUESTION = "Is a pair that could just wait ever slower because its jobs may save memory?"
SHARES = (70, 80)
SAVES = ("none", "auto")
GOAL = 0.99
"""What ``auto`` may be slower by."""


def measure(runner: colocation.Runner, share: int, number: int) -> dict[str, Any]:
    """Return the raw figures of one round: each way's, and the ratio of the sums of their rates."""
    order = SAVES if number % 2 == 0 else SAVES[::-1]
    runs = {save: runner.attempt(Configuration("zico", share, save=save)) for save in order}
    failures = [f"{save}: {run['failed']}" for save, run in runs.items() if "failed" in run]
    sums = {save: sum(run["rates"]) for save, run in runs.items() if "failed" not in run}
    ratio = None if failures else sums["auto"] / sums["none"]
    common.note(f"{share} %, round {number + 1}: {failures or f'{ratio:.3f}'} {sums}")
    return {"share": share, "order": order, "runs": runs, "ratio": ratio, "failures": failures}


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for share in SHARES:
        done = [one for one in result["rounds"] if one["share"] == share and one["ratio"] is not None]
        if not done:
            continue
        ratios = [one["ratio"] for one in done]
        median = statistics.median(ratios)
        equal = all(run["losses_equal"] for one in done for run in one["runs"].values())
        sums = [statistics.median(sum(one["runs"][save]["rates"]) for one in done) for save in SAVES]
        word = "reached" if median >= GOAL else "missed"
        rows.append(
            (
                f"{share} %",
                *(f"{each:.2f}" for each in sums),
                f"{median:.3f}",
                f"{min(ratios):.3f}-{max(ratios):.3f}",
                f"{len(done)}",
                "same" if equal else "DIFFER",
                f"{word} ({GOAL})",
            )
        )
    header = ("budget", "none, it/s of both", "auto", "auto over none", "min-max", "rounds", "losses", "asked")
    return common.table(header, rows)


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = together.parser(__doc__, seconds=75.0, repeat=4)
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.repeat, options.warm_up = 4.0, 1, 1
    (pair, *_) = colocation.pairs(smoke=options.smoke)
    result = common.document("auto_turns", QUESTION, common.chosen(options, "seconds", "repeat", "warm_up"))
    result["rounds"] = []
    directory = common.output_directory(options)
    runner = colocation.Runner(pair, options.seconds, options.warm_up)
    for number in range(options.repeat):
        for share in SHARES[:1] if options.smoke else SHARES:
            result["rounds"].append(measure(runner, share, number))
            if directory is not None:
                common.save(result, text_of(result), directory)
    common.write(result, text_of(result), directory)
    return int(any(one["failures"] for one in result["rounds"]))


if __name__ == "__main__":
    sys.exit(main())
