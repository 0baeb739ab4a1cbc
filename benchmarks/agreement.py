"""Does the simulator say what really happens, and how near does that come to what is possible?

Each job of a pair runs alone first: that gives its rate, its profile (what the broker has learned of its iterations)
and how much its iterations vary. Together with no budget they give the *slowdown*: by what factor each is slower beside
the other although memory is no concern, here because they share caches and memory channels. Then the pair runs for real
under each policy in shares of the sum of its peaks, and the same is simulated: the recorded profiles, that slowdown,
that jitter, the very policy. Nothing else is taken from the real runs together.

Throughput of a run is the mean over its jobs of iterations per second over the same job's together with no budget, as
in ``colocation.py``, and of a simulation the same over its own with no budget. *Possible* is the oracle's, over the
same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import together
from together import Job

from zico.report.record import read_record
from zico.scheduler.from_problem import profile_of
from zico.scheduler.oracle import possible
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

QUESTION = "Does the simulator say what really happens, and how near does that come to what is possible?"
NO_BUDGET = "none"
ENDLESS = ("--iterations", "1000000")
SHARES = (60, 70, 75, 80)
POLICIES = ("zico", "shift", "claims", "serial")
ITERATIONS = 60
"""Of the longest job, simulated after the warm-up."""
WITHIN = {"throughput": 0.10, "peak": 0.05}
"""How far the simulated figures may be from the real ones."""
TWINS_SHARE, TWINS_GOAL = 70, 0.97
UNEQUAL_SHARE, UNEQUAL_GOAL = 75, 0.95  # of what is possible
LOW_SHARE, LOW_GOAL = 60, 1.4  # over serial, where the simulator says that it is possible
_UNIFORM = math.sqrt(3)  # half the width of a uniform distribution over its standard deviation

RESNET = Job("resnet", "examples/digits_resnet.py")
LM = Job("lm", "examples/stdlib_lm.py")
SHORT = Job("short-resnet", "examples/digits_resnet.py", ("--depth", "32", "--batch", "512"))
TINY = Job("tiny", "examples/digits_resnet.py", ("--depth", "20", "--batch", "256"))


@dataclasses.dataclass(frozen=True)
class Alone:
    """What a run of one job by itself tells of it."""

    rate: float
    load: Load
    region_bytes: int


def pairs(*, smoke: bool) -> dict[str, tuple[Job, ...]]:
    """Return the pairs to measure; a smoke run's is tiny."""
    if smoke:
        return {
            "tiny+tiny": (TINY, dataclasses.replace(TINY, name="tiny-2", arguments=(*TINY.arguments, "--seed", "2")))
        }
    return {
        "resnet+resnet": (RESNET, dataclasses.replace(RESNET, name="resnet-2", arguments=("--seed", "2"))),
        "resnet+lm": (RESNET, LM),
        "resnet+short": (RESNET, SHORT),
        "lm+short": (LM, SHORT),
    }


# -- real runs ------------------------------------------------------------------------------------------------------


class Real:
    """Runs jobs under ``zico run``."""

    def __init__(self, options: Namespace) -> None:
        """Take how long each run lasts."""
        self._extra = (*ENDLESS, "--seconds", str(options.seconds))
        self._deadline_s = options.seconds + together.MARGIN_S
        self._warm_up = options.warm_up

    def alone(self, job: Job) -> Alone:
        """Run one job by itself and return what its last profile says."""
        with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
            run = self._run([job], "zico", NO_BUDGET, Path(directory))
            record = read_record(Path(directory) / "record.npz")
        region_bytes = (run.report or {})["pool"]["region_bytes"]
        t_s, held_bytes = record.curve_of(0)
        t_ns = np.append(np.rint(t_s * 1e9), round(record.iteration_s[0] * 1e9)).astype(np.int64)
        lengths_s = np.diff(run.ends_s[0][self._warm_up :])
        jitter = min(0.5, _UNIFORM * float(np.std(lengths_s) / np.mean(lengths_s)))
        kept = int(record.persistent_bytes[0]) // region_bytes
        load = Load(job.name, profile_of(held_bytes // region_bytes, t_ns), kept, jitter=jitter)
        return Alone(run.rates(self._warm_up)[0], load, region_bytes)

    def beside(self, jobs: Sequence[Job], policy: str, budget_bytes: int | None) -> dict[str, Any]:
        """Run the jobs together and return rates, peak and stalls."""
        budget = NO_BUDGET if budget_bytes is None else f"{budget_bytes}B"
        run = self._run(jobs, policy, budget)
        report = run.report or {}
        return {
            "rates": run.rates(self._warm_up),
            "iterations": [len(ends) for ends in run.ends_s],
            "peak_granted_bytes": report["pool"]["peak_granted_bytes"],
            "stalls": report["pool"]["stalls"],
            "waited_s": [job["waited_s"] for job in report["jobs"]],
        }

    def _run(self, jobs: Sequence[Job], policy: str, budget: str, report: Path | None = None) -> together.Together:
        return together.run_zico(
            jobs, *self._extra, policy=policy, budget=budget, deadline_s=self._deadline_s, report_to=report
        )


# -- simulated ones -------------------------------------------------------------------------------------------------


def simulated(loads: Sequence[Load], policy: str, budget: int, slowdown: Sequence[float]) -> tuple[list[float], int]:
    """Return each job's throughput over alone's, and the most regions granted."""
    longest_ns = max(load.profile.duration_ns for load in loads)
    run = Simulation(policy_named(policy), loads, budget, slowdown=slowdown)
    outcome = run.run((together.WARM_UP + ITERATIONS) * longest_ns, together.WARM_UP * longest_ns)
    return list(outcome.normalised), outcome.peak_granted


def over(ours: Sequence[float], base: Sequence[float]) -> float:
    """Return the mean over jobs of a figure over the same job's with no budget."""
    return statistics.mean(one / of for one, of in zip(ours, base, strict=True))


# -- a pair ---------------------------------------------------------------------------------------------------------


def measure(name: str, jobs: tuple[Job, ...], options: Namespace) -> dict[str, Any]:
    """Return all figures of a pair."""
    real = Real(options)
    common.note(f"{name}: each job alone")
    alone = [real.alone(job) for job in jobs]
    region_bytes = alone[0].region_bytes
    loads = [one.load for one in alone]
    peaks = sum(load.profile.peak for load in loads)
    budgets = {share: share * peaks // 100 for share in options.share}
    plan = list(itertools.product(options.policy, options.share))
    rounds = []
    for index in range(options.repeat):
        done: dict[str, Any] = {"base": _attempt(real, name, jobs, "zico", None)}
        for policy, share in plan if index % 2 == 0 else plan[::-1]:
            done[f"{policy} {share}"] = _attempt(real, f"{name} {share} %", jobs, policy, budgets[share] * region_bytes)
        rounds.append(done)
    bases = [done["base"]["rates"] for done in rounds if "rates" in done["base"]]
    factors = [one.rate / rate for rates in bases for one, rate in zip(alone, rates, strict=True)]
    slowdown = (1.0, 1.0, max(1.0, statistics.median(factors or [1.0])))
    return {
        "region_bytes": region_bytes,
        "slowdown": slowdown[-1],
        "alone": [
            {"name": one.load.name, "rate": one.rate, "peak": one.load.profile.peak, "jitter": one.load.jitter}
            | {"persistent": one.load.persistent, "iteration_s": one.load.profile.duration_ns / 1e9}
            | {"curve": list(zip(one.load.profile.t_ns, one.load.profile.held, strict=True))}
            for one in alone
        ],
        "budgets": budgets,
        "rows": [
            _row(
                *(policy, share, budgets[share]),
                loads=loads,
                slowdown=slowdown,
                region_bytes=region_bytes,
                rounds=rounds,
            )
            for policy, share in plan
        ],
        "rounds": rounds,
    }


def _attempt(real: Real, label: str, jobs: tuple[Job, ...], policy: str, budget_bytes: int | None) -> dict[str, Any]:
    """Run the jobs, or say why they did not run: one run must not end all others."""
    try:
        figures = real.beside(jobs, policy, budget_bytes)
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        figures = {"failed": f"{type(error).__name__}: {error}"}
    said = figures.get("failed") or ", ".join(f"{rate:.2f}" for rate in figures["rates"]) + " it/s"
    common.note(f"{label} {policy if budget_bytes else 'no budget'}: {said}")
    return figures


def _row(
    policy: str,
    share: int,
    budget: int,
    *,
    loads: Sequence[Load],
    slowdown: tuple[float, ...],
    region_bytes: int,
    rounds: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return what happened, what was simulated and what is possible."""
    free = sum(load.profile.peak for load in loads)
    base, _ = simulated(loads, "zico", free, slowdown)
    ours, peak = simulated(loads, policy, budget, slowdown)
    best = possible(loads, budget, slowdown)
    label = f"{policy} {share}"
    runs = [(done[label], done["base"]) for done in rounds if "rates" in done[label] and "rates" in done["base"]]
    row: dict[str, Any] = {"policy": policy, "share": share, "simulated": over(ours, base), "simulated_peak": peak}
    row["possible"] = min(1.0, over(best.normalised, base)) if best else 0.0
    if runs:
        row["throughput"] = common.spread(over(run["rates"], of["rates"]) for run, of in runs)
        row["peak_granted_bytes"] = statistics.median(run["peak_granted_bytes"] for run, _ in runs)
        row["peak_ratio"] = peak * region_bytes / row["peak_granted_bytes"]
        row["stalls"] = sum(run["stalls"] for run, _ in runs)
    return row


# -- what is shown --------------------------------------------------------------------------------------------------

HEADER = (
    "pair",
    "budget",
    "policy",
    "real",
    "min-max",
    "simulated",
    "simulated / real",
    "possible",
    "real / possible",
    "peak: simulated / real",
    "stalls",
)


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown, and of each goal whether it is reached."""
    rows = [cells for name, pair in result["pairs"].items() for cells in _cells(name, pair)]
    parts = [common.table(HEADER, rows)]
    for name, pair in result["pairs"].items():
        jobs = ", ".join(
            f"{job['name']} {job['iteration_s']:.2f} s, {job['peak']} regions, jitter {job['jitter']:.1%}"
            for job in pair["alone"]
        )
        parts.append(f"* {name}: {jobs}; together each is {pair['slowdown']:.2f} times slower\n")
    parts.extend(_goals(result["pairs"]))
    return "\n".join(parts)


def _cells(name: str, pair: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in pair["rows"]:
        if "throughput" not in row:
            yield (name, f"{row['share']} %", row["policy"], "failed", *["-"] * 7)
            continue
        of = row["throughput"]
        yield (
            name,
            f"{row['share']} %",
            row["policy"],
            f"{of['median']:.3f}",
            f"{of['min']:.3f}-{of['max']:.3f}",
            f"{row['simulated']:.3f}",
            f"{row['simulated'] / of['median']:.3f}",
            f"{row['possible']:.3f}",
            f"{of['median'] / row['possible']:.3f}",
            f"{row['peak_ratio']:.3f}",
            str(row["stalls"]),
        )


def _goals(measured: dict[str, Any]) -> Iterator[str]:
    """Say of each goal whether it is reached."""
    real = {
        (name, row["policy"], row["share"]): row
        for name, pair in measured.items()
        for row in pair["rows"]
        if "throughput" in row
    }
    ratios = [row["simulated"] / row["throughput"]["median"] for row in real.values()]
    if ratios:
        near = sum(abs(ratio - 1) <= WITHIN["throughput"] for ratio in ratios)
        yield f"* throughput: within {WITHIN['throughput']:.0%} of the real one in {near} of {len(ratios)} cases\n"
        peaks = [row["peak_ratio"] for row in real.values()]
        near = sum(abs(ratio - 1) <= WITHIN["peak"] for ratio in peaks)
        yield f"* peak granted: within {WITHIN['peak']:.0%} of the real one in {near} of {len(peaks)} cases\n"
    for (name, policy, share), row in real.items():
        median = row["throughput"]["median"]
        if policy != "zico":
            continue
        if name == "resnet+resnet" and share == TWINS_SHARE:
            yield _goal(f"{name} at {share} %: throughput", median, TWINS_GOAL)
        if name != "resnet+resnet" and share == UNEQUAL_SHARE:
            yield _goal(f"{name} at {share} %: of what is possible", median / row["possible"], UNEQUAL_GOAL)
            shift = real.get((name, "shift", share))
            if shift:
                yield _goal(f"{name} at {share} %: over shift", median / shift["throughput"]["median"], 1.0)
        serial = real.get((name, "serial", share))
        if share == LOW_SHARE and serial and row["possible"] / serial["simulated"] >= LOW_GOAL:
            yield _goal(f"{name} at {share} %: over serial", median / serial["throughput"]["median"], LOW_GOAL)


def _goal(what: str, value: float, goal: float) -> str:
    return f"* {what} {value:.3f}, goal {goal:.2f}: {'reached' if value >= goal else 'missed'}\n"


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each job trains in each run")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations of each job left out")
    parser.add_argument("--share", type=int, action="append", help="budget in percent (default: 60, 70, 75, 80)")
    parser.add_argument("--policy", action="append", help=f"default: {', '.join(POLICIES)}")
    parser.add_argument("--pair", action="append", help="a pair's name (default: all)")
    options = parser.parse_args()
    options.share, options.policy = options.share or list(SHARES), options.policy or list(POLICIES)
    if options.smoke:
        options.seconds, options.repeat, options.warm_up, options.share, options.policy = 4.0, 1, 2, [70], ["zico"]
    chosen = {
        name: jobs for name, jobs in pairs(smoke=options.smoke).items() if not options.pair or name in options.pair
    }
    names = ("seconds", "repeat", "warm_up", "share", "policy")
    result = common.document("agreement", QUESTION, {name: getattr(options, name) for name in names})
    result["pairs"] = {name: measure(name, jobs, options) for name, jobs in chosen.items()}
    common.write(result, text_of(result), common.output_directory(options))
    return int(
        any("failed" in run for pair in result["pairs"].values() for done in pair["rounds"] for run in done.values())
    )


if __name__ == "__main__":
    sys.exit(main())
