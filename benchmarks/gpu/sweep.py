"""Eight small jobs of a grid: one after the other, or by ``zico run --grid --mps`` in half of the sum of their peaks.

Both times are a user's: from the first command to the end of the last one, starts of processes
included. One after the other is measured with one job of each model, and counted for all jobs of
that model. The same command also says what each job takes (part ``peaks``).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[0]))  # PYTHONSAFEPATH leaves it out
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import record
import run_jobs

GPU = Path(__file__).resolve().parent
PART = "sweep"
MODELS = ("resnet18_small", "lstm")
SEEDS = 4
ITERATIONS = 400
SHARE = 50
"""Of the sum of the jobs' peaks, in percent."""
REPORTED = ("name", "exit_code", "iterations", "waited_s", "peak_bytes", "tries", "note")
"""What Zico's report says of a job and is kept."""
KEPT = 300
"""Characters of what a failed command said last."""


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("way", choices=("serial", "zico"))
    parser.add_argument("--expected", type=float, default=35.0, metavar="SECONDS")
    parser.add_argument("--twin", action="store_true", help="rehearse: two jobs on the host")
    options = parser.parse_args()
    options.models, options.seeds, options.iterations = MODELS, SEEDS, ITERATIONS
    if options.twin:
        options.models, options.seeds, options.iterations, options.expected = MODELS[1:], 2, 2, 200.0
    return options


def job(options: argparse.Namespace, model: str, seed: str, folder: str) -> list[str]:
    """Return the command of a job; its figures go to a file of the folder."""
    kind = "cpu" if options.twin else "cuda"
    words = [sys.executable, str(GPU / "job.py"), model, "--device", kind, "--seed", seed]
    return [*words, "--iterations", str(options.iterations), "--figures", f"{folder}/{model}-{seed}.json"]


def run(argv: list[str], folder: str, deadline_s: float) -> float:
    """Run a command to its end, in a folder that takes the journal of a sweep; returns its seconds.

    Raises:
        RuntimeError: It failed.
        TimeoutExpired: It took too long.
    """
    begun_s = time.monotonic()
    done = subprocess.run(
        argv,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    if done.returncode:
        message = f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-KEPT:]}"
        raise RuntimeError(message)
    return time.monotonic() - begun_s


def serial(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run one job of each model, one after the other, and write what each takes."""
    seconds, stages = {}, {}
    for model in options.models:
        seconds[model] = run(job(options, model, "1", folder), folder, options.expected)
        figures = json.loads(Path(folder, f"{model}-1.json").read_text())
        stages[model] = {"stages": figures["stages"], "mean_ms": figures["mean_ms"], "median_ms": figures["median_ms"]}
        size = {name: figures.get(name, 1 << 27) for name in ("max_memory_reserved", "max_memory_allocated")}
        record.append(options.result, record.PEAKS, model, {**size, "losses": []}, seconds=0.0, turn=options.round)
    return {"each_s": seconds, "makespan_s": options.seeds * sum(seconds.values()), "jobs": stages}


def with_zico(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run the whole grid at once in a part of the sum of the peaks."""
    peaks = run_jobs.peaks_of(options.result, options.models)
    budget_bytes = options.seeds * run_jobs.budget_bytes(peaks, SHARE, "reserved")
    report = Path(folder, "report.json")
    count = str(options.seeds * len(options.models))
    argv = [*common.ZICO, "run", "--quiet", "--device", "host" if options.twin else "cuda:0"]
    argv += ["--budget", f"{budget_bytes}B", "--json", str(report), "--at-most", count]
    argv += ["--grid", f"model={','.join(options.models)}", "--grid", f"seed=1..{options.seeds}"]
    argv += [] if options.twin else ["--mps"]
    makespan_s = run([*argv, shlex.join(job(options, "{model}", "{seed}", folder))], folder, options.expected)
    rows = [{name: row.get(name) for name in REPORTED} for row in json.loads(report.read_text())["jobs"]]
    jobs = {}
    for file in sorted(Path(folder).glob("*-*.json")):
        figures = json.loads(file.read_text())
        names = ("stages", "iterations", "mean_ms", "median_ms", "out_of_memory")
        jobs[file.stem] = {name: figures[name] for name in names}
    lacking = [name for name, one in jobs.items() if one["out_of_memory"] or one["iterations"] < options.iterations]
    return {"makespan_s": makespan_s, "budget_bytes": budget_bytes, "zico": rows, "jobs": jobs, "not_ended": lacking}


def main() -> int:
    """Run, and append the line; returns 1 where the run failed."""
    options = parsed()
    begun_s = time.monotonic()
    status, figures = record.DONE, {}
    with tempfile.TemporaryDirectory(prefix="zico-sweep-") as folder:
        try:
            figures = (serial if options.way == "serial" else with_zico)(options, folder)
        except (OSError, LookupError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            status, figures = record.FAILED, {"why": f"{type(error).__name__}: {error}"}
    told = {"seconds": time.monotonic() - begun_s, "turn": options.round, "status": status}
    record.append(options.result, PART, options.way, figures, **told)
    return int(status != record.DONE)


if __name__ == "__main__":
    sys.exit(main())
