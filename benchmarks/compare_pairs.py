"""Are pairs of real jobs as fast as at an older commit, in less memory than the sum of their peaks?

Runs of the older commit and of this checkout take turns, in an order that changes from round to
round. A round's ratio is of two runs one after the other, since the speed of a shared machine
drifts. The jobs' scripts are this checkout's in both.

With ``--form paced`` jobs hold what trained ones held (``results/agreement-paced.json``) and wait
where those computed (``paced_job.py``). The machine's speed has no part in these, so both commits
run at the same time, each with jobs and a pool of its own.

With ``--slo`` each pair's first job is promised its speed alone but for that many percent, as by
``zico run --slo``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import colocation
import common
import compare_commits
import together
from agreement import NAMES
from colocation import Configuration, Group
from together import Job

if TYPE_CHECKING:
    from argparse import Namespace

    Trees = dict[str, dict[str, str]]
    """For each of ``TREES`` what its processes are told."""

QUESTION = "Are pairs of real jobs as fast as at an older commit?"
SHARES = (70, 80)
TREES = ("old", "new")
WIDE = ("--width", "16", "--depth", "56", "--batch", "256", "--seed", "3")
SHORT = ("--layers", "6", "--context", "128", "--batch", "32", "--seed", "4")


def pairs(*, smoke: bool) -> tuple[Group, ...]:
    """Return the pairs of ``colocation.py``, and one whose jobs no other benchmark runs."""
    known = colocation.pairs(smoke=smoke)
    if smoke:
        return known
    wide = Job("wide", "examples/digits_resnet.py", WIDE)
    return (*known, Group("wide+short", (wide, Job("short", "examples/stdlib_lm.py", SHORT))))


def environment(tree: Path) -> dict[str, str]:
    """Return what lets a process use this tree."""
    told = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tree}/build/inplace"}
    argv = (sys.executable, "-c", "import zico; print(zico.__file__)")
    found = subprocess.run(argv, check=True, capture_output=True, text=True, env=os.environ | told).stdout.strip()
    if not found.startswith(f"{tree}/build"):
        raise RuntimeError(f"a job would use {found}, not {tree}")
    return told


def measure(pair: Group, trees: Trees, options: Namespace) -> list[dict[str, Any]]:
    """Return the raw figures of each round of each configuration, runs of the trees by turns."""
    runner = colocation.Runner(pair, options.seconds, options.warm_up)
    promise = ("--slo", f"{pair.jobs[0].name}={options.slo}") if options.slo else ()
    rounds = []
    for number in range(options.repeat):
        for save, share in itertools.product(options.save, options.share):
            runs = {}
            for name in TREES if number % 2 == 0 else TREES[::-1]:
                runner.environment = trees[name]
                runs[name] = runner.attempt(Configuration("zico", share, save=save), promise)
            rounds.append(_round(pair.name, share, save, runs))
    return rounds


def paced(trees: Trees, options: Namespace) -> list[dict[str, Any]]:
    """Return the raw figures of pairs whose jobs only wait, both trees at the same time."""
    rounds = []
    named = [pair for name, pair in _committed().items() if not options.pair or name in options.pair]
    for number, pair in itertools.product(range(options.repeat), named[:1] if options.smoke else named):
        with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
            jobs = [_copy(job, pair["region_bytes"], Path(directory)) for job in pair["jobs"]]
            for share in options.share:
                run = functools.partial(_paced_run, pair, jobs, share, number, options)
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    runs = dict(zip(TREES, pool.map(run, (trees[name] for name in TREES)), strict=True))
                rounds.append(_round(pair["name"], share, "none", runs))
    return rounds


def _committed() -> dict[str, dict[str, Any]]:
    """Return the pairs whose jobs' curves are committed, each with its name."""
    pairs = json.loads((common.RESULTS / f"{NAMES['paced']}.json").read_text())["pairs"]
    return {name: {"name": name, **pair} for name, pair in pairs.items()}


def _copy(job: dict[str, Any], region_bytes: int, directory: Path) -> Job:
    path = directory / f"{job['name']}.json"
    curve = [[t_ns / 1e9, held] for t_ns, held in job["curve"]]
    facts = {name: job[name] for name in ("iteration_s", "persistent", "jitter")}
    path.write_text(json.dumps({"curve": curve, "region_bytes": region_bytes} | facts))
    return Job(job["name"], "benchmarks/paced_job.py", (str(path),))


def _paced_run(
    pair: dict[str, Any], jobs: list[Job], share: int, number: int, options: Namespace, told: dict[str, str]
) -> dict[str, Any]:
    seeded = [
        dataclasses.replace(job, arguments=(*job.arguments, "--seed", str(number * len(jobs) + index)))
        for index, job in enumerate(jobs)
    ]
    budget = share * sum(job["peak"] for job in pair["jobs"]) // 100 * pair["region_bytes"]
    run = together.run_zico(
        seeded,
        *together.ENDLESS,
        "--seconds",
        str(options.seconds),
        policy="zico",
        budget=f"{budget}B",
        deadline_s=options.seconds + together.MARGIN_S,
        told=("--region", f"{pair['region_bytes']}B"),
        environment=told,
    )
    return {"rates": run.rates(options.warm_up), "losses_equal": None, "report": run.report}


def _round(pair: str, share: int, save: str, runs: dict[str, Any]) -> dict[str, Any]:
    failures = [f"{name}: {run['failed']}" for name, run in runs.items() if "failed" in run]
    ratio = None if failures else colocation.throughput(runs["new"]["rates"], runs["old"]["rates"])
    common.note(f"{pair}, {save} at {share} %: new over old {'; '.join(failures) or f'{ratio:.3f}'}")
    return {"pair": pair, "share": share, "save": save, "ratio": ratio, "failures": failures, "runs": runs}


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    kinds = dict.fromkeys((one["pair"], one["save"], one["share"]) for one in result["rounds"])
    for pair, save, share in kinds:
        of = [one for one in result["rounds"] if (one["pair"], one["save"], one["share"]) == (pair, save, share)]
        done = [one for one in of if one["ratio"] is not None]
        if not done:
            rows.append((pair, save, f"{share} %", "-", "-", "-", "-", f"0 of {len(of)}", "-"))
            continue
        ratio = common.spread(one["ratio"] for one in done)
        rates = [
            " + ".join(
                f"{statistics.median(each):.2f}"
                for each in zip(*(one["runs"][name]["rates"] for one in done), strict=True)
            )
            for name in TREES
        ]
        equal = {run["losses_equal"] for one in done for run in one["runs"].values()}
        losses = "DIFFER" if False in equal else "same" if True in equal else "none"
        first = common.spread(one["runs"]["new"]["rates"][0] / one["runs"]["old"]["rates"][0] for one in done)
        spreads = [f"{each['median']:.3f} ({each['min']:.3f}-{each['max']:.3f})" for each in (ratio, first)]
        rows.append((pair, save, f"{share} %", *rates, *spreads, f"{len(done)} of {len(of)}", losses))
    over = ("new over old (min-max)", "first job's")
    header = ("pair", "save", "budget", "old, it/s", "new, it/s", *over, "rounds", "losses")
    return common.table(header, rows)


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = together.parser(__doc__, seconds=40.0, repeat=3)
    parser.add_argument("old", nargs="?", default="HEAD", help="the commit to compare with (default: HEAD)")
    parser.add_argument("--share", type=int, action="append", help="budget in percent (default: 70 and 80)")
    parser.add_argument("--save", action="append", choices=("none", "auto"), help="of trained jobs (default: none)")
    parser.add_argument("--slo", help="what a trained pair's first job is promised, such as 25%%")
    parser.add_argument("--pair", action="append", help="a pair's name (default: all)")
    parser.add_argument("--name", default="compare_pairs", help="of the files of results")
    parser.add_argument("--form", choices=tuple(NAMES), default="trained", help="trained jobs, or such as only wait")
    options = parser.parse_args()
    options.share, options.save = options.share or list(SHARES), options.save or ["none"]
    if options.smoke:
        options.seconds, options.repeat, options.warm_up, options.share = 4.0, 1, 1, [70]
    known = [pair.name for pair in pairs(smoke=options.smoke)] if options.form == "trained" else list(_committed())
    if unknown := set(options.pair or known) - set(known):
        parser.error(f"--pair: there is no {'; '.join(sorted(unknown))}. There are: {'; '.join(known)}")
    settings = common.chosen(options, "old", "form", "slo", "seconds", "repeat", "warm_up")
    result = common.document(options.name, QUESTION, settings)
    result["rounds"] = []
    directory = common.output_directory(options)
    with compare_commits.older(options.old) as old:
        trees = {"old": environment(old), "new": environment(common.ROOT)}
        if options.form == "paced":
            result["rounds"] = paced(trees, options)
        for pair in pairs(smoke=options.smoke) if options.form == "trained" else ():
            if not options.pair or pair.name in options.pair:
                result["rounds"] += measure(pair, trees, options)
                if directory is not None:
                    common.save(result, text_of(result), directory)
    common.write(result, text_of(result), directory)
    return int(any(one["failures"] for one in result["rounds"]))


if __name__ == "__main__":
    sys.exit(main())
