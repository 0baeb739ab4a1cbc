"""How many regions does a job hold for the bytes that live, if its tensors are placed by plan?

The zoo's iterations, each placed by dynamic best fit, by dynamic best fit in three classes and by
the planner for regions. The judge counts the regions that each placement holds.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import common
import numpy as np

from zico.base.units import GIB, KIB, MIB, format_bytes, parse_size
from zico.lab.packing.classic import DYNAMIC, ByClass
from zico.planning.packing.judge import held_regions, judge, live_bytes
from zico.planning.packing.problem import NoPlan, Problem
from zico.planning.packing.regions import Options, Regions
from zico.trace.classes import TensorClass, classify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from zico.planning.packing.problem import Planner

QUESTION = "How many regions does a job hold for the bytes that live, if its tensors are placed by plan?"
GOAL = 1.05
ONLINE_S = 0.5
ONLINE_BYTES = 64 * KIB
ALIGNMENTS = (64, 512, 4 * KIB, 64 * KIB)
LONG_S = 600.0


# -- what is measured ------------------------------------------------------------------------------


def over_time(problem: Problem, values: NDArray[np.float64]) -> float:
    """Return the mean of what is given per tick, each tick weighing as long as it takes."""
    assert problem.tick_ns is not None  # noqa: S101 - a trace has times
    return float(np.average(values, weights=np.diff(problem.tick_ns[: problem.n_ticks + 1])))


def bounds(problem: Problem, region_bytes: int) -> dict[str, float]:
    """Return the live bytes and the fewest regions that can hold them, at the peak and over time, in regions."""
    live = live_bytes(problem) / region_bytes
    return {
        "live_peak": float(live.max()),
        "live_mean": over_time(problem, live),
        "bound_peak": int(np.ceil(live).max()),
        "bound_mean": over_time(problem, np.ceil(live)),
    }


def figures(problem: Problem, planner: Planner, region_bytes: int, deadline_s: float) -> dict[str, Any]:
    """Place with a planner and return what the plan holds, judged, and the time it took."""
    begun_s = time.process_time()
    plan = planner.plan(problem, deadline_s)
    cpu_s = time.process_time() - begun_s
    if isinstance(plan, NoPlan):
        return {"reason": plan.reason.value, "cpu_s": cpu_s}
    verdict = judge(problem, plan)
    if not verdict.is_good:
        raise RuntimeError(f"{planner.name}: {verdict.rule}: {verdict.detail}")
    held = held_regions(problem, plan, region_bytes).astype(np.float64)
    first = plan.offset_bytes // region_bytes
    last = (plan.offset_bytes + problem.size_bytes - 1) // region_bytes
    touched = np.zeros(int(last.max()) + 2, np.int64)
    np.add.at(touched, first, 1)
    np.subtract.at(touched, last + 1, 1)
    return {
        "held_peak": int(held.max()),
        "held_mean": over_time(problem, held),
        "distinct": int((np.cumsum(touched) > 0).sum()),
        "optimal": plan.optimal,
        "elapsed_s": plan.elapsed_s,
        "cpu_s": cpu_s,
    }


def planners(problem: Problem, region_bytes: int) -> dict[str, Planner]:
    """Return what is compared; the paper's classes are what lasts, feature and gradient maps, and temporaries."""
    labels = classify(problem.lower, problem.upper, problem.size_bytes, problem.n_ticks)
    labels = np.where(labels == TensorClass.GRADIENT_MAP, TensorClass.FEATURE_MAP, labels)
    return {
        "dynamic": DYNAMIC,
        "classes": ByClass(labels, region_bytes),
        "built": Regions(region_bytes, Options(improve=False)),
        "regions": Regions(region_bytes),
    }


def offline(problem: Problem, region_bytes: int, deadline_s: float) -> dict[str, Any]:
    """Return all planners' figures on the whole iteration."""
    row: dict[str, Any] = {"tensors": len(problem), **bounds(problem, region_bytes)}
    for name, planner in planners(problem, region_bytes).items():
        row[name] = figures(problem, planner, region_bytes, deadline_s if name == "regions" else LONG_S)
    return row


def online(problem: Problem, region_bytes: int, deadline_s: float) -> dict[str, Any] | None:
    """Return the figures of what a job plans for itself: the pool's tensors that die within the iteration."""
    inside = (problem.size_bytes >= ONLINE_BYTES) & (problem.upper - problem.lower < problem.n_ticks)
    if not inside.any():
        return None
    lower, upper, size_bytes = (column[inside] for column in (problem.lower, problem.upper, problem.size_bytes))
    part = Problem(lower, upper, size_bytes, tick_ns=problem.tick_ns).compact()
    row: dict[str, Any] = {"tensors": len(part), **bounds(part, region_bytes), "aligned": {}}
    row["regions"] = figures(part, Regions(region_bytes), region_bytes, deadline_s)
    for alignment_bytes in ALIGNMENTS:
        aligned = dataclasses.replace(part, alignment_bytes=alignment_bytes)
        row["aligned"][alignment_bytes] = figures(
            aligned, Regions(region_bytes, Options(improve=False)), region_bytes, LONG_S
        )
    return row


def measure(
    problems: Iterator[tuple[str, Problem]], region_bytes: int, how: Callable[..., Any], deadline_s: float
) -> dict[str, Any]:
    """Return a row for each model."""
    rows = {}
    for name, problem in problems:
        common.note(f"{name}, {len(problem)} tensors, {how.__name__}, {format_bytes(region_bytes)}")
        row = how(problem, region_bytes, deadline_s)
        if row is not None:
            rows[name] = row
    return rows


# -- what is shown ---------------------------------------------------------------------------------


def _over(row: dict[str, Any], name: str) -> str:
    """Return the held over live, over time, and the peak above the lower bound."""
    one = row[name]
    if "reason" in one:
        return str(one["reason"])
    return f"{one['held_mean'] / row['live_mean']:.3f} ({one['held_peak'] - row['bound_peak']:+d})"


def offline_table(rows: dict[str, Any], region_bytes: int) -> str:
    """Return a line per model: regions held over live bytes, for each way of placing."""
    header = (
        *("model", "tensors", "peak GiB", "mean GiB", "lower bound", "best fit", "three classes"),
        *("built", "regions", "above the bound", "slots beyond the peak", "s to build", "proved"),
    )
    lines = []
    for name, row in rows.items():
        ours = row["regions"]
        lines.append(
            (
                *(name, str(row["tensors"])),
                *(f"{row[key] * region_bytes / GIB:.2f}" for key in ("live_peak", "live_mean")),
                f"{row['bound_mean'] / row['live_mean']:.3f}",
                *(_over(row, key) for key in ("dynamic", "classes", "built", "regions")),
                "-" if "reason" in ours else f"{100 * (ours['held_mean'] / row['bound_mean'] - 1):.2f} %",
                "-" if "reason" in ours else str(ours["distinct"] - ours["held_peak"]),
                f"{row['built']['cpu_s']:.2f}",
                "yes" if ours.get("optimal") else "no",
            )
        )
    return common.table(header, lines)


def online_table(rows: dict[str, Any]) -> str:
    """Return a line per model: what a job's own plan holds, and what coarser alignments cost."""
    aligned = tuple(f"{format_bytes(each)} aligned" for each in ALIGNMENTS)
    header = ("model", "tensors", "lower bound", "regions", "CPU s", *aligned)
    return common.table(
        header,
        (
            (
                *(name, str(row["tensors"]), f"{row['bound_mean'] / row['live_mean']:.3f}", _over(row, "regions")),
                f"{row['regions']['cpu_s']:.2f}",
                *(_over({**row, "aligned": row["aligned"][each]}, "aligned") for each in ALIGNMENTS),
            )
            for name, row in rows.items()
        ),
    )


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    what = f"Regions held over bytes alive, both over time; in brackets the peak above its lower bound. Goal: {GOAL} at"
    parts = [f"{what} 64 MiB. The lower bound is the live bytes rounded up at every moment.\n"]
    for region_bytes, rows in result["offline"].items():
        parts += [f"{format_bytes(region_bytes)} regions, whole iterations:\n", offline_table(rows, region_bytes)]
    for region_bytes, rows in result["online"].items():
        what = f"{format_bytes(ONLINE_BYTES)} or more that die within the iteration, {ONLINE_S} s to plan"
        parts += [f"{format_bytes(region_bytes)} regions, tensors of {what}:\n", online_table(rows)]
    return "\n".join(parts)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--deadline", type=float, default=10.0, metavar="S", help="to plan a whole iteration")
    parser.add_argument("--region", action="append", metavar="SIZE", help="default: 64MiB and 4MiB")
    parser.add_argument("--model", action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    from zoo import zoo_problems

    deadline_s, online_s = (0.2, 0.1) if options.smoke else (options.deadline, ONLINE_S)
    names = options.model or (["DCGAN"] if options.smoke else [])
    regions = [parse_size(size, whole_bytes=1 << 50) for size in options.region or ("64MiB", "4MiB")]
    settings = {"deadline_s": deadline_s, "online_s": online_s, "regions_bytes": regions}
    result = common.document("regions", QUESTION, settings)
    chosen = (tuple(names),) if names else ()
    for name, problem in zoo_problems(("DCGAN",)):  # compiles, before anything is timed
        offline(problem, 64 * MIB, 0.1)
        common.note(f"compiled on {name}")
    for kind, how, seconds in (("offline", offline, deadline_s), ("online", online, online_s)):
        result[kind] = {size: measure(zoo_problems(*chosen), size, how, seconds) for size in regions}
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
