"""Print the tables of ``results/gpu/README.md`` that are worked out from raw files: whole runs first.

A pair's rates are those of the whole time in which both jobs iterate, after their warm-up. One of
the two iterates alone for a while when the other has ended: that is the only time of a DCGAN alone
in the files. The gain is what both do together over one after the other::

    gain = rate of a * time of one alone + rate of b * time of one alone
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import together

if TYPE_CHECKING:
    from collections.abc import Sequence

RAW = common.RESULTS / "gpu"
LEAST_ALONE = 20
"""Iterations alone from which a time is taken."""
PAIRS = {
    "64 MiB": ("one of two in 70 % of the sum of their peaks, nothing saved, 64 MiB, a", "the same, b"),
    "16 MiB": ("one of two in 70 %, nothing saved, 16 MiB, a", "the same, 16 MiB, b"),
}
"""Runs of ``gpu_saving_steps.json`` that were two jobs at once, by the size of their regions."""


def read(name: str) -> dict[str, Any]:
    """Return a raw file."""
    found: dict[str, Any] = json.loads((RAW / f"{name}.json").read_text())
    return found


def times_ms(ends_s: Sequence[float]) -> list[float]:
    """Return what each iteration took."""
    return [1e3 * (end - begin) for begin, end in itertools.pairwise(ends_s)]


def alone_ms(ends_s: Sequence[Sequence[float]]) -> list[float]:
    """Return the times of whichever job was alone at the end."""
    first = min(ends[-1] for ends in ends_s)
    return max(([*times_ms([end for end in ends if end > first])] for ends in ends_s), key=len)


def pair_rows() -> list[Sequence[str]]:
    """Return a row for each run of the two DCGANs."""
    (done,) = read("gpu_pairs")["pairs"]["dcgan+dcgan"]["rounds"]
    alone = [alone_ms(run["ends_s"]) for run in done]
    least_ms = min(statistics.mean(times) for times in alone if len(times) >= LEAST_ALONE)
    rows: list[Sequence[str]] = []
    for run, times in zip(done, alone, strict=True):
        rates = together.Together(tuple(map(tuple, run["ends_s"])), (), None).rates()
        found = f"{statistics.mean(times):.1f} ({len(times)})" if len(times) >= LEAST_ALONE else "-"
        each = ", ".join(f"{1e3 / rate:.1f}" for rate in rates)
        rows.append((label_of(run), each, f"{sum(rates):.0f}", found, f"{sum(rates) * least_ms / 1e3:.2f}"))
    return rows


def label_of(run: dict[str, Any]) -> str:
    """Return a run's name, its budget as a share of what its jobs held at most in regions of the run's size."""
    pool = run["report"]["pool"]
    share = 100 * pool["budget_bytes"] / pool["sum_of_job_peaks_bytes"]
    return re.sub(r"\d+ %", f"{share:.0f} % of the peaks", run["label"])


def step_rows() -> list[Sequence[str]]:
    """Return a row for each run of a ResNet-50 that had to save memory."""
    rows: list[Sequence[str]] = []
    for name, run in read("gpu_saving_steps")["runs"].items():
        if not any(one.get("out_bytes") for one in run["iterations"]):
            continue
        whole = [one["ms"] for one in run["iterations"]]
        planned = [one["ms"] for one in run["iterations"] if one.get("planned")]
        out = statistics.mean(one.get("out_bytes", 0) for one in run["iterations"]) / 1e9
        best = f"{statistics.median(planned):.0f} ({len(planned)})" if planned else "-"
        figures = (f"{statistics.mean(whole):.0f}", f"{statistics.median(whole):.0f}", str(len(whole)))
        rows.append((name, run["commit"], *figures, best, f"{out:.1f}"))
    return rows


def resnet_rows() -> list[Sequence[str]]:
    """Return a row for each pair of ResNet-50, by whole runs."""
    runs = read("gpu_saving_steps")["runs"]

    def mean_ms(name: str) -> float:
        return statistics.mean(one["ms"] for one in runs[name]["iterations"])

    rows: list[Sequence[str]] = []
    for size, names in PAIRS.items():
        alone, both = mean_ms(f"alone without a limit, regions of {size}"), [mean_ms(name) for name in names]
        each, rate = ", ".join(f"{ms:.0f}" for ms in both), sum(1e3 / ms for ms in both)
        rows.append((size, f"{alone:.0f}", each, f"{1e3 / alone:.1f}", f"{rate:.1f}", f"{rate * alone / 1e3:.2f}"))
    return rows


def tables() -> dict[str, str]:
    """Return each table as Markdown."""
    pairs = ("two DCGANs", "ms an iteration", "both, it/s", "one alone at the end, ms (iterations)", "gain")
    steps = ("ResNet-50", "commit", "mean, ms", "median, ms", "iterations", "median by a plan (iterations)", "GB out")
    resnets = ("regions", "one alone, ms", "together, ms each", "one alone, it/s", "both, it/s", "gain")
    return {
        "pairs": common.table(pairs, pair_rows()),
        "resnets": common.table(resnets, resnet_rows()),
        "steps": common.table(steps, step_rows()),
    }


if __name__ == "__main__":
    print("\n".join(tables().values()))
