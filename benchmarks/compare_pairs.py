"""Are pairs of real jobs as fast as at an older commit, in less memory than the sum of their peaks?

Runs of the older commit and of this checkout take turns, in an order that changes from round to
round. A round's ratio is of two runs side by side, since the speed of a shared machine drifts. The
jobs' scripts are this checkout's in both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import colocation
import common
import compare_commits
import together
from colocation import Configuration, Pair
from together import Job

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

QUESTION = "Are pairs of real jobs as fast as at an older commit?"
SHARES = (70, 80)
TREES = ("old", "new")
WIDE = ("--width", "16", "--depth", "56", "--batch", "256", "--seed", "3")
SHORT = ("--layers", "6", "--context", "128", "--batch", "32", "--seed", "4")


def pairs(*, smoke: bool) -> tuple[Pair, ...]:
    """Return the pairs of ``colocation.py``, and one whose jobs no other benchmark runs."""
    known = colocation.pairs(smoke=smoke)
    if smoke:
        return known
    wide = Job("wide", "examples/digits_resnet.py", WIDE)
    return (*known, Pair("wide+short", (wide, Job("short", "examples/stdlib_lm.py", SHORT))))


def chosen(tree: Path) -> str:
    """Let every process that starts from now on use this tree; returns the path that Python is told."""
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tree}/build/inplace"}
    told = subprocess.run(
        (sys.executable, "-c", "import zico; print(zico.__file__)"), check=True, capture_output=True, text=True
    )
    if not told.stdout.startswith(f"{tree}/build"):
        raise RuntimeError(f"a job would use {told.stdout.strip()}, not {tree}")
    return os.environ["PYTHONPATH"]


def measure(pair: Pair, trees: dict[str, Path], options: Namespace) -> list[dict[str, Any]]:
    """Return the raw figures of each round of each configuration."""
    chosen(trees["new"])
    common.note(f"{pair.name}: each job alone")
    runner = colocation.Runner(pair, options.seconds, options.warm_up)
    rounds = []
    for number in range(options.repeat):
        for save, share in ((save, share) for save in options.save for share in options.share):
            order = TREES if number % 2 == 0 else TREES[::-1]
            runs = {}
            for name in order:
                chosen(trees[name])
                runs[name] = runner.attempt(Configuration("zico", share, save=save))
            failures = [f"{name}: {run['failed']}" for name, run in runs.items() if "failed" in run]
            ratio = None if failures else _throughput(runs)
            rounds.append(
                {
                    "pair": pair.name,
                    "share": share,
                    "save": save,
                    "order": order,
                    "ratio": ratio,
                    "failures": failures,
                    "runs": runs,
                }
            )
            said = "; ".join(failures) or f"{ratio:.3f}"
            common.note(f"{pair.name}, {save} at {share} %, round {number + 1}: new over old {said}")
    return rounds


def _throughput(runs: dict[str, Any]) -> float:
    """Return the mean over jobs of the new rate over the old one."""
    return colocation.throughput(runs["new"]["rates"], runs["old"]["rates"])


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    kinds = dict.fromkeys((one["pair"], one["save"], one["share"]) for one in result["rounds"])
    for pair, save, share in kinds:
        of = [one for one in result["rounds"] if (one["pair"], one["save"], one["share"]) == (pair, save, share)]
        done = [one for one in of if one["ratio"] is not None]
        if not done:
            rows.append((pair, save, f"{share} %", "-", "-", "-", f"0 of {len(of)}", "-"))
            continue
        ratio = common.spread(one["ratio"] for one in done)
        rates = [
            " + ".join(
                f"{statistics.median(each):.2f}"
                for each in zip(*(one["runs"][name]["rates"] for one in done), strict=True)
            )
            for name in TREES
        ]
        same = all(run["losses_equal"] for one in done for run in one["runs"].values())
        spread = f"{ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f})"
        rows.append(
            (pair, save, f"{share} %", *rates, spread, f"{len(done)} of {len(of)}", "same" if same else "DIFFER")
        )
    header = ("pair", "save", "budget", "old, it/s", "new, it/s", "new over old (min-max)", "rounds", "losses")
    return common.table(header, rows)


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("old", nargs="?", default="HEAD", help="the commit to compare with (default: HEAD)")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long each job trains in each run")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of each budget")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations of each job left out")
    parser.add_argument("--share", type=int, action="append", help="budget in percent (default: 70 and 80)")
    parser.add_argument("--save", action="append", choices=("none", "auto"), help="default: none")
    parser.add_argument("--pair", action="append", help="one of the pairs (default: all)")
    parser.add_argument("--name", default="compare_pairs", help="of the files of results")
    options = parser.parse_args()
    options.share, options.save = options.share or list(SHARES), options.save or ["none"]
    if options.smoke:
        options.seconds, options.repeat, options.warm_up, options.share = 4.0, 1, 1, [70]
    settings = {name: getattr(options, name) for name in ("old", "seconds", "repeat", "warm_up")}
    result = common.document(options.name, QUESTION, settings)
    result["rounds"] = []
    directory = common.output_directory(options)
    with compare_commits.older(options.old) as old:
        trees = {"old": old, "new": common.ROOT}
        for pair in pairs(smoke=options.smoke):
            if not options.pair or pair.name in options.pair:
                result["rounds"] += measure(pair, trees, options)
                if directory is not None:
                    common.save(result, text_of(result), directory)
    common.write(result, text_of(result), directory)
    return int(any(one["failures"] for one in result["rounds"]))


if __name__ == "__main__":
    sys.exit(main())
