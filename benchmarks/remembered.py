"""What does a job save that begins with what it did in its last run?

Pairs train for a few iterations in a budget below the sum of their peaks. Rounds go through two ways
in turn, every second one backwards: *anew*, where jobs remember nothing, and *again*, where a run
before has taught them. *Early* is the time from the start to a job's last iteration, the mean of
both jobs. *Learning* is what ``zico run`` attributes to it, *waited* all waits, both as sums.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import common
import together
from together import Job

from zico.base.settings import PROFILES_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTION = "What does a job save that begins with what it did in its last run?"
ITERATIONS = 12
SHARE = 0.72
"""Budget over the sum of the peaks."""
MEASURED_IN = "16GiB"
WAYS = {"anew": "off", "again": "on"}


def pairs(*, smoke: bool) -> dict[str, tuple[Job, ...]]:
    """Return the pairs by name; a smoke run's is tiny."""
    resnet = "examples/digits_resnet.py"
    if smoke:
        tiny = ("--depth", "20", "--batch", "128")
        return {"two tiny": tuple(Job(f"tiny-{n}", resnet, (*tiny, "--seed", str(n))) for n in (1, 2))}
    waits = "benchmarks/idle_job.py"
    return {
        "two ResNets": tuple(Job(f"resnet-{n}", resnet, ("--batch", "128", "--seed", str(n))) for n in (1, 2)),
        "ResNet and LM": (Job("resnet", resnet, ("--batch", "128")), Job("lm", "examples/stdlib_lm.py")),
        "two input-bound": tuple(Job(f"input-{n}", waits, ("input", "--seed", str(n))) for n in (1, 2)),
    }


def run(jobs: Sequence[Job], budget: str, profiles: str) -> dict[str, Any]:
    """Run the jobs and return the figures of the run."""
    done = together.run_zico(
        jobs,
        "--iterations",
        str(ITERATIONS),
        policy="zico",
        budget=budget,
        deadline_s=together.MARGIN_S,
        environment={PROFILES_VARIABLE: profiles},
    )
    report = (done.report or {})["jobs"]
    return {
        "ends_s": done.ends_s,
        "losses": done.losses,
        "peak_bytes": [job["peak_bytes"] for job in report],
        "early_s": sum(ends[-1] for ends in done.ends_s) / len(jobs),
        "waited_s": sum(job["waited_s"] for job in report),
        "learning_s": sum(job["attribution"]["learning_s"] for job in report),
    }


def measure(jobs: Sequence[Job], repeat: int) -> dict[str, Any]:
    """Return the figures of a pair."""
    peaks = run(jobs, MEASURED_IN, "off")["peak_bytes"]
    budget = str(round(SHARE * sum(peaks)))
    run(jobs, budget, "on")
    rounds: list[dict[str, Any]] = []
    for number in range(repeat):
        order = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
        rounds.append({way: run(jobs, budget, WAYS[way]) for way in order})
        common.note(json.dumps({way: round(rounds[-1][way]["early_s"], 2) for way in WAYS}))
    return {"peaks_bytes": peaks, "budget_bytes": int(budget), "rounds": rounds}


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for name, pair in result["pairs"].items():
        rounds = pair["rounds"]
        saved = common.spread(one["anew"]["early_s"] - one["again"]["early_s"] for one in rounds)
        same = all(one[way]["losses"] == rounds[0]["anew"]["losses"] for one in rounds for way in WAYS)
        cells = [
            f"{common.spread(one[way][field] for one in rounds)['median']:.2f}"
            for field in ("early_s", "waited_s", "learning_s")
            for way in WAYS
        ]
        shown = f"{saved['median']:.2f} ({saved['min']:.2f} to {saved['max']:.2f})"
        rows.append((name, shown, *cells, "same" if same else "DIFFER"))
    told = (f"{what} {way}, s" for what in ("early", "waited", "learning") for way in WAYS)
    return common.table(("pair", "saved a job, s", *told, "losses"), rows)


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--name", default="remembered", help="of the files of results")
    options = parser.parse_args()
    repeat = 1 if options.smoke else options.repeat
    result = common.document(options.name, QUESTION, {"repeat": repeat, "iterations": ITERATIONS, "share": SHARE})
    result["pairs"] = {}
    try:
        for name, jobs in pairs(smoke=options.smoke).items():
            result["pairs"][name] = measure(jobs, repeat)
    except (subprocess.SubprocessError, TimeoutError) as error:
        common.note(str(error))
        return 1
    common.write(result, text_of(result), common.output_directory(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
