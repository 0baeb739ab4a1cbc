"""The paper's two tables about its design: how often frees are tracked, and how large regions are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from paper.published import IDENTICAL, REGIONS, TRACKING
from paper.text import number, percent
from paper.work import work_of

from zico.base.units import KIB, MIB
from zico.planning.packing.from_trace import iteration_problem
from zico.planning.packing.judge import live_bytes, mean_over_time
from zico.planning.packing.problem import Plan
from zico.planning.packing.regions import Options, Regions
from zico.trace.events import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from paper.published import Identical

    from zico.planning.packing.problem import Problem

NAME = "paper-tables"
QUESTION = "What do tracking and regions ask of an allocator? (the paper's tables 1 and 2)"
SIZES = {"64 MB": 64 * MIB, "512 KB": 512 * KIB}
SPACINGS = {"event per kernel": 0, "8 MB": 8 * MIB, "256 MB": 256 * MIB}
_LONG_S = 600.0


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Count what each model's iteration asks of an allocator, at the paper's largest batch."""
    models = [IDENTICAL["RN"]] if smoke else list(IDENTICAL.values())
    pool = json.loads((common.RESULTS / "pool.json").read_text())["benchmarks"][0]["ns"]["median"]
    result = common.document(NAME, QUESTION, {"sizes": SIZES, "spacings": SPACINGS, "region_ns": pool})
    result["models"] = {}
    for model in models:
        common.note(model.title)
        result["models"][model.key] = _counted(model)
    return result


def _counted(model: Identical) -> dict[str, Any]:
    trace = work_of(model).trace(model.batches[-1], model.card)
    found = iteration_problem(trace)
    row: dict[str, Any] = {
        "title": model.title,
        "batch": model.batches[-1],
        "tracking": {name: tracked(trace.events, spacing) for name, spacing in SPACINGS.items()},
        "regions": {name: _in_regions(found.problem, size) for name, size in SIZES.items()},
    }
    row["tensors"] = int((found.problem.upper - found.problem.lower < found.problem.n_ticks).sum())
    row["live_mean"] = mean_over_time(found.problem, live_bytes(found.problem))
    return row


# -- tracking --------------------------------------------------------------------------------------


def tracked(events: NDArray[np.void], spacing_bytes: int) -> dict[str, int]:
    """Return the marks of the second iteration, and its peak if memory is free only at the next mark.

    Args:
        events: Of a trace.
        spacing_bytes: A mark follows whenever so much has been allocated; 0: after every operation.
    """
    begin = np.flatnonzero(events["kind"] == Kind.BEGIN)[1]
    sizes: dict[int, int] = {}
    live = most = marks = allocated = pending = 0
    for i, (kind, tensor, size) in enumerate(
        zip(events["kind"].tolist(), events["tensor"].tolist(), events["size_bytes"].tolist(), strict=True)
    ):
        if kind == Kind.ALLOC:
            sizes[tensor] = size
            live, allocated = live + size, allocated + size
            most = max(most, live) if i >= begin else most
        elif kind == Kind.FREE:
            pending += sizes.pop(tensor)
        is_marked = allocated >= spacing_bytes if spacing_bytes else kind == Kind.OP
        marks += int(is_marked and i >= begin)
        if is_marked or not spacing_bytes:  # what an operation was the last to use is free at its own mark
            live, pending, allocated = live - pending, 0, 0
    return {"marks": marks, "peak_bytes": most}


# -- regions ---------------------------------------------------------------------------------------


def _in_regions(problem: Problem, region_bytes: int) -> dict[str, float]:
    """Return what an iteration that is placed by plan asks for and holds, in regions."""
    plan = Regions(region_bytes, Options(improve=False)).plan(problem, _LONG_S)
    if not isinstance(plan, Plan):
        raise TypeError(f"{plan.reason.value}: {plan.detail}")
    acquired, held = turnover(problem, plan.offset_bytes, region_bytes)
    return {"acquired": acquired, "held_mean_bytes": mean_over_time(problem, held) * region_bytes}


def turnover(problem: Problem, offset_bytes: NDArray[np.int64], region_bytes: int) -> tuple[int, NDArray[np.int64]]:
    """Return how often a region begins to hold something within an iteration, and the regions held at each tick.

    A region that is held over the end of an iteration is not asked for again at the beginning of
    the next one.
    """
    n_ticks = problem.n_ticks
    first = offset_bytes // region_bytes
    n_regions = (offset_bytes + problem.size_bytes - 1) // region_bytes - first + 1
    tensor = np.repeat(np.arange(len(problem)), n_regions)
    region = first[tensor] + np.arange(len(tensor)) - np.repeat(np.cumsum(n_regions) - n_regions, n_regions)
    # One line of ticks after the other, a line for each region: stretches that touch are one.
    begin, end = region * (n_ticks + 1) + problem.lower[tensor], region * (n_ticks + 1) + problem.upper[tensor]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    starts = np.append(True, begin[1:] > end[:-1])
    begin, end = begin[starts], end[np.append(np.flatnonzero(starts)[1:] - 1, len(end) - 1)]
    line, begin, end = begin // (n_ticks + 1), begin % (n_ticks + 1), end % (n_ticks + 1)
    stays = np.intersect1d(line[begin == 0], line[end == n_ticks])
    change = np.bincount(begin, minlength=n_ticks + 1) - np.bincount(end, minlength=n_ticks + 1)
    return len(begin) - len(stays), np.cumsum(change)[:n_ticks]


# -- what is shown ---------------------------------------------------------------------------------


def tracking_table(result: dict[str, Any]) -> str:
    """Return marks and memory beside the paper's throughput."""
    header = ["model", *(f"{name}: {what}" for name in SPACINGS for what in ("paper [table]", "marks", "peak"))]
    lines = []
    for key, row in result["models"].items():
        at = list(IDENTICAL).index(key)
        least = min(each["peak_bytes"] for each in row["tracking"].values())
        cells = [row["title"]]
        for name in SPACINGS:
            found = row["tracking"][name]
            more = f"+{100 * (found['peak_bytes'] / least - 1):.1f} %"
            cells += [percent(TRACKING[name][at]), number(found["marks"]), more]
        lines.append(cells)
    return common.table(header, lines)


def regions_table(result: dict[str, Any]) -> str:
    """Return how often the pool is asked, at what cost, beside the paper's throughput."""
    header = (
        *("model", "tensors: paper [table]", "requests", "held over alive"),
        *("512 KB: paper [table]", "requests", "held over alive"),
        *("64 MB: requests", "held over alive", "cost of tensors' requests", "paper's loss for each of them"),
    )
    lines = []
    for key, row in result["models"].items():
        model, at = IDENTICAL[key], list(IDENTICAL).index(key)
        iteration_ns = 1e9 * model.batches[-1] / model.samples_per_s[1]
        small, large = row["regions"]["512 KB"], row["regions"]["64 MB"]
        lost_ns = (1 - REGIONS["tensors"][at]) * iteration_ns / row["tensors"]
        cost = row["tensors"] * result["settings"]["region_ns"] / iteration_ns
        lines.append(
            (
                *(row["title"], percent(REGIONS["tensors"][at]), number(row["tensors"]), "1.000"),
                *(percent(REGIONS["512 KB"][at]), number(small["acquired"])),
                *(f"{each['held_mean_bytes'] / row['live_mean']:.3f}" for each in (small,)),
                *(number(large["acquired"]), f"{large['held_mean_bytes'] / row['live_mean']:.3f}"),
                *(f"{100 * cost:.2f} %", f"{lost_ns / 1e3:.1f} us"),
            )
        )
    return common.table(header, lines)


def text_of(result: dict[str, Any]) -> str:
    """Return both tables."""
    return (
        "Tracking: throughput over that without (paper), marks in an iteration and the peak over the lowest (ours):\n\n"
        + tracking_table(result)
        + "\nRegions: throughput over 64 MB (paper), requests to the pool in an iteration (ours):\n\n"
        + regions_table(result)
    )
