"""Train a PyTorch and a TensorFlow job side by side in three quarters of the sum of their peaks: ``make demo``.

First each example runs for a few iterations in a pool of its own, to see its own peak. Both do so at
the same time, since a peak is no time. Then both run together in a budget that is smaller than the
sum of the two. What they show and the picture of it are in ``demo-report``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ROOT, ZICO
from together import ENDLESS, Job

from zico.base.errors import CommandError, ZicoError
from zico.base.units import format_bytes
from zico.base.warming import called, compile_all, missing
from zico.report.files import JSON_NAME, MARKDOWN_NAME, PICTURE_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

REPORT = ROOT / "demo-report"
DEADLINE_S = 600.0
"""Beyond the training time, on a machine that is busy."""
OVERLAP_S = 20.0
"""How long both jobs train side by side: the first to start trains for as much longer as it started earlier alone."""
JOBS = (Job("resnet-torch", "examples/digits_resnet.py"), Job("lm-tensorflow", "examples/stdlib_lm.py"))


def peak_alone(job: Job, iterations: int, losses: Path) -> tuple[int, int, float]:
    """Run an example alone under ``zico run``; returns its peak and the size of a region in bytes, and its seconds.

    Raises:
        CommandError: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="zico-demo-") as directory:
        figures = Path(directory) / "alone.json"
        options = ("--quiet", "--budget", "none", "--json", str(figures), "--name", job.name)
        argv = (*ZICO, "run", *options, "--", *job.argv(losses, "--iterations", str(iterations), "--quiet"))
        begin_s = time.monotonic()
        done = subprocess.run(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, timeout=DEADLINE_S)
        seconds = time.monotonic() - begin_s
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise CommandError(f"{job.name} failed alone", done.returncode)
        report: dict[str, Any] = json.loads(figures.read_text())
    return report["jobs"][0]["peak_bytes"], report["pool"]["region_bytes"], seconds


def run_together(budget_bytes: int, seconds: Sequence[float], directory: Path) -> int:
    """Run each example for so long in the budget, with all output on this terminal; returns the exit code."""
    names = [option for job in JOBS for option in ("--name", job.name)]
    commands = [
        shlex.join(job.argv(directory / f"{job.name}.json", *ENDLESS, "--seconds", str(trains_s)))
        for job, trains_s in zip(JOBS, seconds, strict=True)
    ]
    options = ("--budget", f"{budget_bytes}B", "--report", str(REPORT))
    argv = (*ZICO, "run", *options, *names, *commands)
    return subprocess.run(argv, cwd=ROOT, check=False, timeout=max(seconds) + DEADLINE_S).returncode


def same_losses(directory: Path) -> str:
    """Return in words whether the jobs' losses together are those alone, bit by bit."""
    words = []
    for job in JOBS:
        alone, together = (
            json.loads((directory / name).read_text()) for name in (f"{job.name}.alone.json", f"{job.name}.json")
        )
        count = min(len(alone), len(together))
        verdict = "the same" if alone[:count] == together[:count] else "NOT the same"
        words.append(f"{job.name}: the first {count} losses are {verdict} bits as alone")
    return "\n".join(words)


def say(text: str) -> None:
    """Print at once: the jobs write to the same place."""
    print(text, flush=True)


def demonstrate(options: argparse.Namespace, directory: Path) -> int:
    """Run everything; returns the exit code."""
    if missing(called("host")):
        say("0. Zico compiles its code, once on a machine (a minute or more)")
        compile_all(*called("host"))
    say(f"1. Each job in a pool of its own for {options.alone} iterations, to see its own peak")
    peaks_bytes, took_s, region_bytes = [], [], 0
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(peak_alone, job, options.alone, directory / f"{job.name}.alone.json") for job in JOBS]
        for job, run in zip(JOBS, runs, strict=True):
            peak_bytes, region_bytes, seconds = run.result()
            peaks_bytes.append(peak_bytes)
            took_s.append(seconds)
            say(f"   {job.name}: {format_bytes(peak_bytes)}")
    budget_bytes = int(options.share / 100 * sum(peaks_bytes)) // region_bytes * region_bytes
    sum_text = format_bytes(sum(peaks_bytes))
    say(f"2. Both together in {format_bytes(budget_bytes)}, {options.share:.0f} % of {sum_text}")
    trains_s = [options.seconds or OVERLAP_S + max(took_s) - each_s for each_s in took_s]
    code = run_together(budget_bytes, trains_s, directory)
    if code == 0:
        say(same_losses(directory))
        say(f"The picture: {REPORT / PICTURE_NAME} (figures beside it: {MARKDOWN_NAME}, {JSON_NAME})")
    return code


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--seconds", type=float, help=f"how long each job trains (default: so that {OVERLAP_S:g} s are side by side)"
    )
    parser.add_argument("--alone", type=int, default=3, help="iterations of each job in a pool of its own")
    parser.add_argument("--share", type=float, default=75.0, help="the budget in percent of the sum of the peaks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zico-demo-") as directory:
        try:
            return demonstrate(options, Path(directory))
        except ZicoError as error:
            print(f"demo: {error}", file=sys.stderr)
            return error.exit_code if isinstance(error, CommandError) else 1


if __name__ == "__main__":
    sys.exit(main())
