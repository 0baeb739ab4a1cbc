"""What do eight fine-tunings of one frozen base hold, when the base is held once?

Eight LoRA jobs (``lora_job.py``) with seeds of their own train at once with ``--share-frozen``, in the
memory that the base, eight times a job's own memory and two percent take. Without the option they
train in what eight bases and eight times a job's own memory take. *Own* is the most that one job
held beside the base, once it was shared. Losses are compared with those of each job alone without
Zico. Then one job trains with and without the option in turns, in ample memory, and its iterations
are compared.
"""

from __future__ import annotations

import dataclasses
import json
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

from zico.base.units import format_bytes
from zico.report.model import read_record

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTION = "What do eight fine-tunings of one frozen base hold, when the base is held once?"
SHARES = ("--share-frozen",)
WAYS = ("shared", "not shared")
MARGIN = 1.02
AMPLE = "12GiB"
OF_POOL = ("peak_granted_bytes", "peak_physical_bytes", "peak_shared_bytes")
OF_JOB = ("name", "peak_bytes", "shared_bytes", "spilled_bytes", "evicted_bytes", "waited_s")
FIRST = 2
"""Iterations of a run that are not compared."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is run."""

    jobs: int
    iterations: int
    turns: int
    """Runs of each kind whose iterations are compared."""
    compared: int
    """Iterations of each of these."""
    model: tuple[str, ...] = ()


FULL = Scale(8, 8, 12, 16)
SMOKE = Scale(2, 3, 1, 4, ("--width", "256", "--layers", "2"))


def job(scale: Scale, seed: int) -> Job:
    """Return a job."""
    return Job(f"lora-{seed}", "benchmarks/lora_job.py", ("--seed", str(seed), *scale.model))


def run(jobs: Sequence[Job], iterations: int, budget: str, told: Sequence[str], report: Path) -> dict[str, Any]:
    """Run jobs and return what they and the pool held."""
    done = together.run_zico(
        jobs,
        "--iterations",
        str(iterations),
        policy="zico",
        budget=budget,
        deadline_s=4 * together.MARGIN_S,
        report_to=report,
        told=told,
    )
    found = done.report or {}
    return {
        "losses": done.losses,
        "ends_s": done.ends_s,
        "pool": {name: found["pool"][name] for name in OF_POOL},
        "jobs": [{name: one[name] for name in OF_JOB} for one in found["jobs"]],
    }


def own_bytes(report: Path) -> int:
    """Return the most that the only job of a report held from its second iteration on."""
    record = read_record(report / "record.npz")
    since_s = record.boundary_t_s[0]
    return int(record.held_bytes[np.searchsorted(record.t_s, since_s) :, 0].max())


def alone(jobs: Sequence[Job], iterations: int) -> list[list[str]]:
    """Return the losses of each job alone, without Zico, in hexadecimal."""
    found = []
    for one in jobs:
        with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
            path = Path(directory) / "losses.json"
            subprocess.run(
                one.argv(path, "--iterations", str(iterations)),
                cwd=common.ROOT, check=True, stdout=subprocess.DEVNULL, timeout=together.MARGIN_S,
            )  # fmt: skip
            found.append(json.loads(path.read_text()))
    return found


def measure(scale: Scale) -> dict[str, Any]:
    """Return all figures."""
    jobs = [job(scale, seed) for seed in range(1, scale.jobs + 1)]
    with tempfile.TemporaryDirectory(prefix="zico-bench-") as directory:
        report = Path(directory) / "report"
        one = run(jobs[:1], scale.iterations, AMPLE, SHARES, report)
        own, base = own_bytes(report), one["pool"]["peak_shared_bytes"]
        common.note(f"base {format_bytes(base)}, own {format_bytes(own)}")
        budgets = [round(MARGIN * (base + scale.jobs * own)), round(MARGIN * scale.jobs * (base + own))]
        result: dict[str, Any] = {"base_bytes": base, "own_bytes": own, "budgets_bytes": budgets, "one": one}
        result["alone_losses"] = alone(jobs, scale.iterations)
        for name, told, budget in zip(WAYS, (SHARES, ()), budgets, strict=True):
            result[name] = run(jobs, scale.iterations, str(budget), told, report)
            common.note(f"{name}: peak {format_bytes(result[name]['pool']['peak_granted_bytes'])}")
        turns: dict[str, list[float]] = {"shared": [], "not shared": []}
        for turn in range(scale.turns):
            for name, told in (("shared", SHARES), ("not shared", ()))[:: 1 if turn % 2 == 0 else -1]:
                ends = run(jobs[:1], scale.compared, AMPLE, told, report)["ends_s"][0]
                turns[name].append(statistics.median(np.diff(ends[FIRST:])))
        result["turns_s"] = turns
    return result


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    base, own, n = result["base_bytes"], result["own_bytes"], len(result["alone_losses"])
    rows = []
    for name, budget in zip(WAYS, result["budgets_bytes"], strict=True):
        found = result[name]
        ended_s = max(ends[-1] for ends in found["ends_s"])
        away = sum(one["spilled_bytes"] + one["evicted_bytes"] for one in found["jobs"])
        same = [[*losses] for losses in found["losses"]] == result["alone_losses"]
        rows.append(
            (
                name,
                format_bytes(budget),
                format_bytes(found["pool"]["peak_granted_bytes"]),
                format_bytes(found["pool"]["peak_physical_bytes"]),
                format_bytes(away),
                f"{ended_s:.1f}",
                "same" if same else "DIFFER",
            )
        )
    header = (f"{n} jobs, base", "budget", "peak of the pool", "physical", "left the budget", "all ended, s", "losses")
    ratios = [a / b for a, b in zip(*(result["turns_s"][name] for name in WAYS), strict=True)]
    spread = common.spread(ratios)
    reached = result["shared"]["pool"]["peak_granted_bytes"] <= result["budgets_bytes"][0]
    return (
        f"The base has {format_bytes(base)}, a job's own memory is {format_bytes(own)}.\n\n"
        f"{common.table(header, rows)}\n\n"
        f"* peak within the budget: {'reached' if reached else 'missed'}\n\n"
        f"* an iteration of one job, shared over not shared: {spread['median']:.3f} "
        f"({spread['min']:.3f} to {spread['max']:.3f}, {len(ratios)} turns), goal 1.005"
    )


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--name", default="frozen", help="of the files of results")
    options = parser.parse_args()
    scale = SMOKE if options.smoke else FULL
    result = common.document(options.name, QUESTION, dataclasses.asdict(scale))
    try:
        result |= measure(scale)
    except (subprocess.SubprocessError, TimeoutError) as error:
        common.note(str(error))
        return 1
    common.write(result, text_of(result), common.output_directory(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
