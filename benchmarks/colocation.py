"""What does a budget cost jobs that share it?

Pairs of the examples train together in 50 to 100 % of the sum of their peaks, under each policy,
and beside it without a budget, without Zico, and one after the other with the whole machine.
Rounds go through all of these in turn, every second one backwards, so that what else the machine
does falls on all alike.

Throughput of a run is the mean over its jobs of iterations per second, over the same job's together
with no budget (``--budget none``, which on a GPU leaves each job its reserve) in the same round.
``together.py`` says how iterations per second are measured.

All runs of a pair have regions of one size, peaks included: that which ``zico run`` takes by default
for a budget of the sum of the peaks. On a GPU a pool without a budget would have larger ones, and a
job holds more of these than of its budget's.

One after the other: the jobs' work of one second together with no budget is done by each job alone
with the whole machine, by one thread or by all cores, whichever is faster. The time that takes is
the sum over the jobs of (rate together / rate alone), and its reciprocal is the throughput. Start-up
is left out, which favours it. The same sum over the rates of any other run says how many times as
fast as one after the other that run is.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import common
import together
from colocation_text import ONE_BY_ONE, PLAIN, draw, text_of
from together import ENDLESS, Job

from zico.base.settings import HOST, cuda_region_bytes
from zico.base.units import MIB

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

QUESTION = "What does a budget cost jobs that share it?"
TINY_RESNET = ("--depth", "20", "--batch", "256")
SHARES = (50, 60, 70, 80, 90, 100)
OTHER_SHARES = (60, 80, 100)
"""Where the other policies are measured: they react less to the budget than ``zico`` does."""
PLANLESS_SHARES = (60, 70, 80)
"""Where ``zico`` is measured without plans too."""
NO_BUDGET = "none"
ALONE_WARM_UP = 2
"""Iterations left out of a job alone without Zico, which learns nothing."""
UNTIL_PEAK = ("--iterations", "8", "--seconds", "20")
"""A job's peak is that of so many iterations, or of those that end in so many seconds."""
LEAST_CUDA_REGION = 2 * MIB
"""What CUDA maps at once."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Jobs that train together."""

    name: str
    jobs: tuple[Job, ...]
    device: str = "host"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run a group."""

    policy: str
    """A policy, ``PLAIN`` or ``ONE_BY_ONE``."""
    share: int | None = None
    """Budget in percent of the sum of the peaks; ``None``: no budget."""
    plans: bool = True
    """Whether the jobs' heaps follow plans, or place tensors by their classes alone."""
    save: str = "none"
    """How jobs go on with less than their peaks."""

    @property
    def label(self) -> str:
        """Return its name in tables and result files."""
        if self.policy in {PLAIN, ONE_BY_ONE}:
            return self.policy
        budget = "no budget" if self.share is None else f"{self.share} %"
        saves = "" if self.save == "none" else f" {self.save}"
        return f"{self.policy} {budget}{saves}{'' if self.plans else ' without plans'}"


BASE = Configuration("zico")


def pairs(*, smoke: bool) -> tuple[Group, ...]:
    """Return the pairs to measure; a smoke run's are tiny."""
    arguments = TINY_RESNET if smoke else ()
    resnets = tuple(Job(f"resnet-{n}", "examples/digits_resnet.py", (*arguments, "--seed", str(n))) for n in (1, 2))
    twins = Group("resnet+resnet", resnets)
    return (twins,) if smoke else (twins, Group("resnet+lm", (resnets[0], Job("lm", "examples/stdlib_lm.py"))))


def configurations(options: Namespace) -> list[Configuration]:
    """Return what one round runs, the base at its begin and in its middle."""
    shares = options.share or SHARES
    bounded = [
        Configuration(policy, share)
        for policy in options.policy
        for share in (shares if policy == "zico" or options.share else OTHER_SHARES)
    ]
    bounded += [Configuration("zico", share, save=save) for share in shares for save in options.save]
    if options.smoke:
        return [BASE, Configuration(PLAIN), *bounded]
    bounded += [Configuration("zico", share, plans=False) for share in PLANLESS_SHARES if share in shares]
    middle = len(bounded) // 2
    return [BASE, Configuration(PLAIN), *bounded[:middle], BASE, *bounded[middle:], Configuration(ONE_BY_ONE)]


# -- measuring -------------------------------------------------------------------------------------


class Runner:
    """Runs a group in any configuration."""

    def __init__(self, group: Group, seconds: float, warm_up: int) -> None:
        """Find the jobs' own peaks and their losses without Zico; runs jobs alone, one for all of equal work."""
        common.note(f"{group.name}: each job alone")
        self.group = group
        self._warm_up = warm_up
        self._seconds = seconds
        self._deadline_s = seconds + together.MARGIN_S
        self.peaks_bytes: list[int] = []
        self.environment: dict[str, str] = {}
        """Is added to that of ``zico run``."""
        self._regions: tuple[str, ...] = ()
        self.region_bytes = self._measure_peaks()
        default_bytes = self._default_region_bytes()
        if default_bytes != self.region_bytes:
            self._regions = ("--region", f"{default_bytes}B")
            self.region_bytes = self._measure_peaks()
        losses = self._losses_without_zico()
        self.alone_losses = [losses[job.argv()] for job in group.jobs]

    def _measure_peaks(self) -> int:
        """Find each job's peak alone without a budget, and return the size of the regions that it was measured with."""
        reports: dict[tuple[str, ...], dict[str, Any]] = {}
        for job in self.group.jobs:
            if job.work() not in reports:
                reports[job.work()] = self._zico([job], "zico", NO_BUDGET, *UNTIL_PEAK).report or {}
        found = [reports[job.work()] for job in self.group.jobs]
        self.peaks_bytes = [report["jobs"][0]["peak_bytes"] for report in found]
        region_bytes: int = found[0]["pool"]["region_bytes"]
        return region_bytes

    def _losses_without_zico(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Return each command's losses; on the host, where all have room, from processes that train at once."""
        jobs = list({job.argv(): job for job in self.group.jobs}.values())
        losses: dict[tuple[str, ...], tuple[str, ...]] = {}
        for some in [jobs] if self.group.device == HOST else [[job] for job in jobs]:
            run = together.run_plain(some, *self._until_time(), deadline_s=self._deadline_s)
            losses |= dict(zip([job.argv() for job in some], run.losses, strict=True))
        return losses

    def _default_region_bytes(self) -> int:
        """Return the regions that ``zico run`` takes for a budget of the sum of the peaks."""
        if self.group.device == HOST:
            return self.region_bytes
        return max(cuda_region_bytes(sum(self.peaks_bytes)), LEAST_CUDA_REGION)

    def attempt(self, configuration: Configuration, told: Sequence[str] = ()) -> dict[str, Any]:
        """Run the group so and return the raw figures, or why there are none: one run must not end all others."""
        try:
            return self.run(configuration, told)
        except subprocess.CalledProcessError as error:
            return {"failed": f"a job ended with exit code {error.returncode}; what it said is in this run's output"}
        except (ValueError, OSError, subprocess.SubprocessError) as error:
            return {"failed": f"{type(error).__name__}: {error}"}

    def run(self, configuration: Configuration, told: Sequence[str] = ()) -> dict[str, Any]:
        """Run the group so, with further options of ``zico run``, and return the raw figures."""
        switch = () if configuration.plans else ("env", "ZICO_PLAN=off")
        jobs = [dataclasses.replace(job, before=switch) for job in self.group.jobs]
        if configuration.policy == ONE_BY_ONE:
            return self._alone()
        if configuration.policy == PLAIN:
            return self._figures(together.run_plain(jobs, *self._until_time(), deadline_s=self._deadline_s))
        budget = NO_BUDGET if configuration.share is None else f"{self.budget_bytes(configuration.share)}B"
        told = (*told, "--save", configuration.save)
        return self._figures(self._zico(jobs, configuration.policy, budget, *self._until_time(), told=told))

    def budget_bytes(self, share: int) -> int:
        """Return a share of the sum of the peaks, in percent, rounded down to regions."""
        return share * sum(self.peaks_bytes) // 100 // self.region_bytes * self.region_bytes

    def _until_time(self) -> tuple[str, ...]:
        return (*ENDLESS, "--seconds", str(self._seconds))

    def _zico(
        self, jobs: Sequence[Job], policy: str, budget: str, *extra: str, told: Sequence[str] = ()
    ) -> together.Together:
        return together.run_zico(
            jobs,
            *extra,
            policy=policy,
            budget=budget,
            deadline_s=self._deadline_s,
            device=self.group.device,
            told=(*self._regions, *told),
            environment=self.environment,
        )

    def _alone(self) -> dict[str, Any]:
        """Return each job's rate alone, the better one of those with one thread and with as many as there are cores.

        Jobs of equal work are measured once, and those of unequal work share the time.
        """
        jobs = {job.work(): job for job in self.group.jobs}
        extra = (*ENDLESS, "--seconds", str(self._seconds / len(jobs)), "--threads")
        by_threads: dict[int, list[float]] = {}
        for threads in dict.fromkeys((1, os.cpu_count() or 1)):
            runs = {
                work: together.run_plain([job], *extra, str(threads), deadline_s=self._deadline_s)
                for work, job in jobs.items()
            }
            by_threads[threads] = [runs[job.work()].rates(ALONE_WARM_UP)[0] for job in self.group.jobs]
        return {"rates": list(map(max, zip(*by_threads.values(), strict=True))), "by_threads": by_threads}

    def _figures(self, run: together.Together) -> dict[str, Any]:
        begin_s, end_s = run.window_s(self._warm_up)
        figures: dict[str, Any] = {
            "rates": run.rates(self._warm_up),
            "window_s": end_s - begin_s,
            "iterations": [len(ends) for ends in run.ends_s],
            "ends_s": [[round(end, 4) for end in ends] for ends in run.ends_s],
            "losses_compared": self._compared(run),
            "losses_equal": self._are_equal(run),
        }
        if run.report is not None:
            figures["report"] = run.report
        return figures

    def _compared(self, run: together.Together) -> list[int]:
        return [min(len(alone), len(ours)) for alone, ours in zip(self.alone_losses, run.losses, strict=True)]

    def _are_equal(self, run: together.Together) -> bool:
        return all(
            alone[:count] == ours[:count]
            for alone, ours, count in zip(self.alone_losses, run.losses, self._compared(run), strict=True)
        )


def measure(runner: Runner, plan: Sequence[Configuration], repeat: int) -> dict[str, Any]:
    """Return the raw figures of all rounds of a group, each of which runs the plan, and what they come to."""
    name = runner.group.name
    rounds: list[list[dict[str, Any]]] = []
    for index in range(repeat):
        done = []
        for configuration in plan if index % 2 == 0 else plan[::-1]:
            figures = runner.attempt(configuration)
            done.append({"label": configuration.label, **dataclasses.asdict(configuration), **figures})
            said = figures.get("failed") or ", ".join(f"{rate:.2f}" for rate in figures["rates"]) + " it/s"
            common.note(f"{name}: round {index + 1} of {repeat}: {configuration.label}: {said}")
        rounds.append(done)
    shares = dict.fromkeys(configuration.share for configuration in plan if configuration.share is not None)
    return {
        "peaks_bytes": runner.peaks_bytes,
        "budgets_bytes": {str(share): runner.budget_bytes(share) for share in shares},
        "summary": summarise(rounds, list(dict.fromkeys(configuration.label for configuration in plan))),
        "failures": [f"{run['label']}: {run['failed']}" for done in rounds for run in done if "failed" in run],
        "rounds": rounds,
    }


# -- what it comes to ------------------------------------------------------------------------------


def summarise(rounds: list[list[dict[str, Any]]], labels: list[str]) -> dict[str, Any]:
    """Return for each configuration that ever ran the spread over rounds of its throughput and rates."""
    succeeded = [[run for run in done if "failed" not in run] for done in rounds]
    usable = [done for done in succeeded if any(run["label"] == BASE.label for run in done)]
    summary: dict[str, Any] = {}
    for label in labels:
        runs = [(run, base_rates(done)) for done in usable for run in done if run["label"] == label]
        if not runs:
            continue
        gains = [gain for done in usable for gain in over_one_by_one(label, done)]
        ratio = one_by_one if label == ONE_BY_ONE else throughput
        summary[label] = {
            "throughput": common.spread(ratio(run["rates"], base) for run, base in runs),
            "rates": [common.spread(rates) for rates in zip(*(run["rates"] for run, _ in runs), strict=True)],
            **({"over_one_by_one": common.spread(gains)} if gains else {}),
            **_side_checks([run for run, _ in runs]),
        }
    if PLAIN in summary:
        for figures in summary.values():
            figures["over_without_zico"] = figures["throughput"]["median"] / summary[PLAIN]["throughput"]["median"]
    return summary


def base_rates(done: list[dict[str, Any]]) -> list[float]:
    """Return each job's mean rate together with no budget in one round."""
    bases = [run["rates"] for run in done if run["label"] == BASE.label]
    return [statistics.mean(rates) for rates in zip(*bases, strict=True)]


def throughput(rates: Sequence[float], base: Sequence[float]) -> float:
    """Return the mean over jobs of rate over rate with no budget."""
    return statistics.mean(rate / of for rate, of in zip(rates, base, strict=True))


def one_by_one(alone: Sequence[float], base: Sequence[float]) -> float:
    """Return the throughput of one job after the other; see the module's docstring."""
    return 1 / sum(of / rate for rate, of in zip(alone, base, strict=True))


def over_one_by_one(label: str, done: list[dict[str, Any]]) -> list[float]:
    """Return for each such run of a round how much longer its work takes one job after the other, if that ran."""
    alone = [run["rates"] for run in done if run["label"] == ONE_BY_ONE]
    runs = [run["rates"] for run in done if run["label"] == label != ONE_BY_ONE]
    return [sum(rate / of for rate, of in zip(rates, alone[0], strict=True)) for rates in runs if alone]


def _side_checks(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whether losses were right and the budget was kept, and how long jobs waited."""
    checks: dict[str, Any] = {}
    if all("losses_equal" in run for run in runs):
        checks["losses_equal"] = all(run["losses_equal"] for run in runs)
        checks["losses_compared_min"] = min(min(run["losses_compared"]) for run in runs)
    reports = [run["report"] for run in runs if "report" in run]
    if reports:
        budget_bytes = reports[0]["budget_bytes"]
        checks["granted_over_budget"] = max(r["pool"]["peak_granted_bytes"] for r in reports) / budget_bytes
        checks["physical_over_budget"] = max(r["pool"]["peak_physical_bytes"] for r in reports) / budget_bytes
        checks["stalls"] = sum(r["pool"]["stalls"] for r in reports)
        checks["spilled_bytes"] = sum(job["spilled_bytes"] for r in reports for job in r["jobs"])
        checks["waited_share"] = max(job["waited_s"] / job["wall_s"] for r in reports for job in r["jobs"])
        checks["pool_fraction_min"] = min(job["pool_fraction"] for r in reports for job in r["jobs"])
    return checks


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = together.parser(__doc__, seconds=40.0, repeat=3)
    parser.add_argument("--share", type=int, action="append", help="budget in percent (default: 50 to 100)")
    parser.add_argument("--policy", action="append", choices=("zico", "serial", "none"), help="default: all")
    parser.add_argument("--save", action="append", choices=("swap", "page", "auto"), help="measure these, too")
    parser.add_argument("--name", default="colocation", help="of the files of results")
    parser.add_argument("--pair", action="append", help="resnet+resnet or resnet+lm (default: both)")
    options = parser.parse_args()
    options.policy = options.policy or ["zico", "serial", "none"]
    options.save = options.save or []
    if options.smoke:
        options.seconds, options.repeat, options.share, options.policy, options.warm_up = 4.0, 1, [70], ["zico"], 1
    chosen = [pair for pair in pairs(smoke=options.smoke) if not options.pair or pair.name in options.pair]
    settings = common.chosen(options, "seconds", "repeat", "warm_up")
    settings |= {"shares": options.share or SHARES, "policies": options.policy, "save": options.save}
    result = common.document(options.name, QUESTION, settings)
    result["pairs"] = {
        pair.name: measure(Runner(pair, options.seconds, options.warm_up), configurations(options), options.repeat)
        for pair in chosen
    }
    directory = common.output_directory(options)
    common.write(result, text_of(result), directory)
    if directory is not None:
        draw(result, directory / f"{options.name}.png")
    return int(any(pair["failures"] for pair in result["pairs"].values()))


if __name__ == "__main__":
    sys.exit(main())
