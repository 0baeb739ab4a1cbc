"""What do pairs gain on a GPU that go on with less instead of taking turns? Simulated."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import common

from zico.lab.simulator.compare import Pool, horizon_of, simulate
from zico.lab.simulator.device_models import device_model_named
from zico.lab.simulator.jobs_file import finest_region
from zico.lab.simulator.paging_simulation import by_paging
from zico.lab.simulator.points import by_planner
from zico.lab.simulator.saving import SavingLoad, limited, loads_in_regions, over, simulate_saving
from zico.planning.packing.from_trace import iteration_problem
from zico.scheduler.curves import profile_of
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import peak_of

if TYPE_CHECKING:
    from pathlib import Path

    from zico.lab.simulator.compare import Result
    from zico.lab.simulator.saving import OperatingPoint
    from zico.trace.events import Trace

QUESTION = "What do pairs gain on a V100 in half of the sum of their peaks that go on with less?"
DEVICE = "v100-32gb"
SHARE = 0.5
POLICIES = ("serial", "zico")
JOBS = 2


def load_of(name: str, trace: Trace) -> tuple[SavingLoad, dict[str, float]]:
    """Return a traced job in bytes, with all its operating points, and what they took to make."""
    found = iteration_problem(trace)
    tick_ns = found.problem.tick_ns
    if tick_ns is None:
        raise ValueError(f"the trace of {name} has no times")
    profile = profile_of(found.iteration.live_bytes[: len(tick_ns) - 1], tick_ns)
    device = device_model_named(DEVICE)
    points: list[OperatingPoint] = []
    took_s = {}
    for how, make in (("swap", functools.partial(by_planner, "flow")), ("page", by_paging)):
        began_s = time.process_time()
        points += make(trace, device.copy_bytes_per_s, JOBS)
        took_s[how] = time.process_time() - began_s
    return SavingLoad(name, profile, min(profile.held), points=tuple(points)), took_s


def pair(one: SavingLoad, other: SavingLoad) -> dict[str, Any]:
    """Simulate two jobs in half of the sum of their peaks."""
    both = (one, other)
    region_bytes = finest_region(both)
    loads = loads_in_regions(both, region_bytes, whole=False)
    budget = int(SHARE * sum(map(peak_of, both))) // region_bytes
    row: dict[str, Any] = {"jobs": [one.name, other.name], "budget_bytes": budget * region_bytes}
    pool, horizon = Pool(budget, device_model_named(DEVICE), region_bytes), horizon_of(loads)
    forced = [_that_fits(load, budget) for load in loads]
    row["too large"] = [peak_of(load) > budget for load in loads]
    for name in POLICIES:
        row[name] = _figures(over(simulate(policy_named(name), forced, pool, horizon), loads, forced))
    result, points = simulate_saving(loads, pool, horizon)
    row["auto"] = _figures(result)
    row["less"] = [
        point
        and {
            "how": point.how,
            "share": point.limit / peak_of(load),
            "slower": limited(load, point).profile.duration_ns / load.profile.duration_ns,
        }
        for load, point in zip(loads, points, strict=True)
    ]
    return row


def _that_fits(load: SavingLoad, budget: int) -> SavingLoad:
    """Return a job as it is, or at its fastest point where it is larger than the budget even alone."""
    if peak_of(load) <= budget:
        return load
    return limited(load, min((one for one in load.points if one.limit <= budget), key=lambda one: one.duration_ns))


def _figures(result: Result) -> dict[str, Any]:
    return {
        "normalised": result.normalised,
        "jobs": [job.normalised for job in result.jobs],
        "deadlocks": result.deadlocks,
    }


# -- what is shown ---------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        (
            " + ".join(name + "*" * large for name, large in zip(row["jobs"], row["too large"], strict=True)),
            *(_rate(row[name]) for name in (*POLICIES, "auto")),
            *(f"{_ratio(row, name):.2f}" if _stays(row[name]) else "-" for name in POLICIES),
            f"{_over_one_by_one(row):.2f}",
            *(_way(way) for way in row["less"]),
        )
        for row in result["pairs"]
    ]
    header = (
        "pair",
        *POLICIES,
        "auto",
        *(f"auto / {name}" for name in POLICIES),
        "auto, times one after the other",
        "first does with",
        "second does with",
    )
    return common.table(header, lines) + _summary(result["pairs"]) + _NOTES


def _stays(figures: dict[str, Any]) -> bool:
    """Tell whether nobody went on outside the budget."""
    return not figures["deadlocks"]


def _rate(figures: dict[str, Any]) -> str:
    return f"{figures['normalised']:.3f}" + ("" if _stays(figures) else "!")


def _ratio(row: dict[str, Any], name: str) -> float:
    ratio: float = row["auto"]["normalised"] / row[name]["normalised"]
    return ratio


def _over_one_by_one(row: dict[str, Any]) -> float:
    gain: float = sum(row["auto"]["jobs"])
    return gain


def _way(way: dict[str, Any] | None) -> str:
    return "all" if way is None else f"{way['share']:.0%}, {way['how']}, {way['slower']:.2f} x"


def _summary(rows: list[dict[str, Any]]) -> str:
    parts = []
    for name in POLICIES:
        some = [row for row in rows if _stays(row[name])]
        parts.append(f"* `{name}` goes outside the budget in {len(rows) - len(some)} of {len(rows)} pairs")
        ratios = [_ratio(row, name) for row in some]
        if ratios:
            parts[-1] += (
                f"; in the other {len(some)} `auto` gets: mean {statistics.mean(ratios):.2f} times as much, median "
                f"{statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
            )
    parts.append(f"* `auto` goes outside the budget in {sum(not _stays(row['auto']) for row in rows)} pairs")
    gains = [_over_one_by_one(row) for row in rows]
    parts.append(
        f"* `auto` is faster than one job after the other in {sum(gain > 1 for gain in gains)} of {len(rows)} pairs: "
        f"median {statistics.median(gains):.2f} times, from {min(gains):.2f} to {max(gains):.2f}"
    )
    return "\n" + "\n".join(parts) + "\n"


_NOTES = """
Normalised throughput, mean of the two jobs: iterations per second over that alone with all the memory that the job
wants, so 1 is both at full speed, and turns come to about a half. A job with a star is larger than half of the sum of
the peaks: without its fastest way that fits it could not run at all, so it has that under `serial` and `zico`, too.

`times one after the other` is the sum of both: so much longer the same work takes if each job in turn has the device
and all the memory. It is an upper bound, since these jobs do not slow each other by computing.

Waiting jobs keep what outlives their iterations, so that in half of the sum of their peaks even turns may not fit:
where a figure has `!`, jobs came to a deadlock and went on outside the budget, so it is no throughput within it.

The zoo's training steps at published batches on a roofline of a V100; jobs do not slow each other but by memory and by
the link. Copies go at 12 GB/s each way; where both jobs move memory, each way was planned with half of that. Ways: swap
plans by `flow`, and paging by the simulator with everything on. `first does with`: share of its peak, means, and how
much longer its iterations take alone.

Roofline times are lower bounds of real ones: real iterations take longer, and leave more time for copies.
"""


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw each pair's throughput, in the order of what ``auto`` gets."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted(result["pairs"], key=lambda row: row["auto"]["normalised"])
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for name, mark in (("serial", "s"), ("zico", "^"), ("auto", "o")):
        within = [row[name]["normalised"] if _stays(row[name]) else math.nan for row in rows]
        axes.plot(within, mark, ms=4, label=name)
    axes.set(xlabel="pair", ylabel="normalised throughput, mean of both", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Make ways, simulate pairs, print, write; returns the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", action="append", help="only pairs of these; may be repeated")
    options = parser.parse_args()
    import zoo

    names = options.model or (["DCGAN"] if options.smoke else list(zoo.ZOO))
    result = common.document("saving", QUESTION, {"device": DEVICE, "share": SHARE})
    loads, result["models"] = [], {}
    for name in names:
        load, took_s = load_of(name, zoo.zoo_trace(zoo.ZOO[name], DEVICE))
        common.note(
            f"{name}: {len(load.points)} points, {took_s['swap']:.1f} s for plans, {took_s['page']:.1f} s for paging"
        )
        loads.append(load)
        peak, alone_ns = peak_of(load), load.profile.duration_ns
        result["models"][name] = {
            "peak_bytes": peak,
            "iteration_s": alone_ns / 1e9,
            "cpu_s": took_s,
            "ways": [[way.how, way.among, way.limit / peak, way.duration_ns / alone_ns] for way in load.points],
        }
    result["pairs"] = []
    for one, other in itertools.combinations_with_replacement(loads, 2):
        common.note(f"{one.name} + {other.name}")
        result["pairs"].append(
            pair(one, dataclasses.replace(other, name=f"{other.name} (2)") if one is other else other)
        )
    directory = common.output_directory(options)
    common.write(result, text_of(result), directory)
    if directory is not None:
        draw(result, directory / "saving.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
