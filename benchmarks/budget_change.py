"""What does a budget that changes while jobs train do to them?

The paper's experiment (USENIX ATC 2021, figure 10): two equal jobs, the budget 70 %, then 50 %,
then 70 % again, there of the GPU's memory, here of the sum of the peaks that the jobs show alone.
``zico limit`` changes it while they run. The *gap* after an iteration is how long the job then
waits to begin the next one; what it waits inside iterations, for memory, is beside it. Figures of a
part leave out the warm-up, and the time in which memory is still coming back, which is measured by
itself.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import together
from colocation import NO_BUDGET, TINY_RESNET
from live import LiveRun
from together import Job

from zico.broker.protocol.messages import WaitKind
from zico.report.files import JSON_NAME, PICTURE_NAME

if TYPE_CHECKING:
    from argparse import Namespace

    from zico.report.model import Record

QUESTION = "What does a budget that changes while jobs train do to them?"
SHARES = (70, 50, 70)
PAPER = {
    "models": "two NASNet on a V100 of 32 GB, budget a share of its memory",
    "gap_s": {"70 %": 0.0, "50 %": 0.14, "70 % again": 0.0},
}
PARTS = ("70 %", "50 %", "70 % again")
_SAME_S = 1e-3
"""A wait that begins this close to the end of an iteration is the one after it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of the run with one budget."""

    name: str
    begin_s: float
    end_s: float
    budget_bytes: int


# -- what it comes to ------------------------------------------------------------------------------


def parts_of(record: Record, warm_up: int) -> list[Part]:
    """Return the parts of a run."""
    begins = [max(float(record.boundaries_of(job)[warm_up - 1]) for job in range(len(record.names)))]
    begins += record.budget_t_s[1:].tolist()
    ends = [*begins[1:], float(record.t_s[record.held_bytes.sum(axis=1) > 0][-1])]
    budgets = record.budget_bytes.tolist()
    return [Part(*fields) for fields in zip(PARTS, begins, ends, budgets, strict=True)]


def settled_s(record: Record, part: Part) -> float:
    """Return after how long in a part no more was held than its budget."""
    inside = (record.t_s >= part.begin_s) & (record.t_s < part.end_s)
    over = record.t_s[inside & (record.held_bytes.sum(axis=1) > part.budget_bytes)]
    later = record.t_s[inside & (record.t_s > over[-1])] if len(over) else record.t_s[:0]
    return float(later[0]) - part.begin_s if len(later) else 0.0


def gaps_of(record: Record, job: int, begin_s: float, end_s: float) -> list[float]:
    """Return how long the job waited after each iteration that ended in a span of time, in seconds."""
    waits = record.waits_of(job, WaitKind.BOUNDARY)
    gaps = []
    for boundary_s in record.boundaries_of(job):
        if begin_s <= boundary_s < end_s:
            after = waits[np.abs(waits[:, 0] - boundary_s) < _SAME_S]
            gaps.append(float(after[0, 1] - after[0, 0]) if len(after) else 0.0)
    return gaps


def inside_s(record: Record, job: int, begin_s: float, end_s: float) -> float:
    """Return how long the job waited for memory in a span of time, in seconds."""
    waits = np.clip(record.waits_of(job, WaitKind.ALLOCATION), begin_s, end_s)
    return float((waits[:, 1] - waits[:, 0]).sum())


def figures_of(record: Record, part: Part) -> dict[str, Any]:
    """Return a part's figures, raw ones included."""
    settling_s = settled_s(record, part)
    begin_s = part.begin_s + settling_s
    inside = (record.t_s >= begin_s) & (record.t_s < part.end_s)
    jobs = []
    for job, name in enumerate(record.names):
        ends = record.boundaries_of(job)
        ends = ends[(ends >= begin_s) & (ends < part.end_s)]
        gaps = gaps_of(record, job, begin_s, part.end_s)
        periods = np.diff(ends).tolist()
        figures: dict[str, Any] = {}
        if periods:
            figures |= {"gap_s": common.spread(gaps), "period_s": common.spread(periods)}
        figures["inside_s"] = inside_s(record, job, begin_s, part.end_s) / max(1, len(ends))
        jobs.append({"name": name, **figures, "gaps_s": gaps, "periods_s": periods})
    return {
        "part": part.name,
        "budget_bytes": part.budget_bytes,
        "settled_after_s": settling_s,
        "peak_held_bytes": int(record.held_bytes[inside].sum(axis=1).max(initial=0)),
        "jobs": jobs,
    }


HEADER = (
    "budget",
    "fits after",
    "held at most",
    "gap (median, least-most)",
    "waited inside (mean)",
    "iteration (median)",
    "paper's gap",
)


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    peaks = " + ".join(f"{peak / 2**20:.0f}" for peak in result["peaks_bytes"])
    rows = []
    for part in result["parts"]:
        known = [job for job in part["jobs"] if "gap_s" in job]
        gaps = [f"{gap['median']:.3f} ({gap['min']:.3f}-{gap['max']:.3f}) s" for gap in (job["gap_s"] for job in known)]
        rows.append((
            f"{part['part']}, {part['budget_bytes'] / 2**20:.0f} MiB",
            f"{part['settled_after_s']:.2f} s",
            f"{part['peak_held_bytes'] / 2**20:.0f} MiB",
            "; ".join(gaps) or "-",
            "; ".join(f"{job['inside_s']:.3f} s" for job in known) or "-",
            "; ".join(f"{job['period_s']['median']:.3f} s" for job in known) or "-",
            f"{PAPER['gap_s'][part['part']]:.2f} s",  # type: ignore[index]
        ))  # fmt: skip
    lines = [f"Peaks alone {peaks} MiB; gaps and iterations of each job.\n", common.table(HEADER, rows)]
    return "\n".join([*lines, f"The paper's: {PAPER['models']}.\n"])


def measure(options: Namespace) -> tuple[dict[str, Any], Path]:
    """Return the figures, and where the report with its picture lies."""
    arguments = TINY_RESNET if options.smoke else ()
    jobs = tuple(Job(f"resnet-{n}", "examples/digits_resnet.py", (*arguments, "--seed", str(n))) for n in (1, 2))
    common.note("each job alone")
    alone = [
        together.run_zico(
            [job], "--iterations", "8", policy="zico", budget=NO_BUDGET, deadline_s=together.MARGIN_S
        ).report or {}
        for job in jobs
    ]  # fmt: skip
    peaks_bytes = [report["jobs"][0]["peak_bytes"] for report in alone]
    region_bytes = alone[0]["pool"]["region_bytes"]
    budgets_bytes = [share * sum(peaks_bytes) // 100 // region_bytes * region_bytes for share in SHARES]
    common.note("both, " + ", ".join(f"{share} %" for share in SHARES))
    report = Path(tempfile.mkdtemp(prefix="zico-bench-"))
    budgets = [f"{budget_bytes}B" for budget_bytes in budgets_bytes]
    record = LiveRun(jobs, budgets, options.seconds, options.warm_up).record_to(report)
    figures = [figures_of(record, part) for part in parts_of(record, options.warm_up)]
    run = json.loads((report / JSON_NAME).read_text())
    return {"peaks_bytes": peaks_bytes, "parts": figures, "paper": PAPER, "report": run}, report


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each budget lasts")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations of each job left out")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.warm_up = 4.0, 2
    settings = common.chosen(options, "seconds", "warm_up") | {"shares": SHARES}
    result = common.document("budget_change", QUESTION, settings)
    figures, report = measure(options)
    try:
        result |= figures
        directory = common.output_directory(options)
        common.write(result, text_of(result), directory)
        if directory is not None:
            shutil.copyfile(report / PICTURE_NAME, directory / "budget_change.png")
    finally:
        shutil.rmtree(report, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
