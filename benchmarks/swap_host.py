"""How long does an iteration take when a PyTorch job has less memory than its peak, and swaps?

The ResNet example alone in a pool that has all it wants, then with 80, 70, 60 and 50 % of that
peak, swapping to a memory tier and to a file tier, then alone again. The same seed each time, so
the losses must be the same bits. Reported is the median over the iterations behind the first few,
in which a plan is made. What the machine does besides falls on all runs, and not on all alike: the
two runs alone say how much.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

from zico.base.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTION = "How long does an iteration take when a PyTorch job has less memory than its peak, and swaps?"
SHARES = (0.8, 0.7, 0.6, 0.5)
TIERS = ("memory", "file")
REGION = "1MiB"
BUDGET = "1GiB"
NAME = "digits"
JOB = Path(__file__).with_name("swap_job.py")
EXAMPLES = common.ROOT / "examples"
RESNET = "digits_resnet.py"
LIMIT_S = 3000.0
SMOKE_LIMIT_S = 100.0


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is run, and how large."""

    example: str
    arguments: tuple[str, ...]
    iterations: int
    skipped: int
    """Iterations at the beginning that are not reported."""
    shares: tuple[float, ...]
    tiers: tuple[str, ...]
    limit_s: float


FULL = Scale(RESNET, (), 40, 10, SHARES, TIERS, LIMIT_S)
SMOKE = Scale(RESNET, ("--depth", "14", "--batch", "256"), 5, 3, (0.6,), ("memory",), SMOKE_LIMIT_S)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to go on with a share of the peak."""

    share: float
    label: dict[str, str]
    """What tells it from the others of that share, as it stands in the results."""
    options: tuple[str, ...]
    """Of ``zico run``."""
    environ: tuple[tuple[str, str], ...] = ()


def run(
    scale: Scale, directory: Path, options: Sequence[str] = (), environ: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """Run the example in a pool; returns its rows, its losses and its figures of the run."""
    rows, losses, report = directory / "rows.json", directory / "losses.json", directory / "report.json"
    arguments = ("--iterations", str(scale.iterations), "--quiet", "--losses", str(losses), *scale.arguments)
    command = shlex.join([sys.executable, str(JOB), str(rows), str(EXAMPLES / scale.example), *arguments])
    pool = ("--budget", BUDGET, "--region", REGION, "--name", NAME, "--quiet", "--json", str(report))
    done = subprocess.run(
        [*common.ZICO, "run", *pool, *options, command],
        capture_output=True,
        text=True,
        timeout=scale.limit_s,
        check=False,
        env={**os.environ, **dict(environ)},
    )
    if done.returncode:
        sys.exit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    (job,) = json.loads(report.read_text())["jobs"]
    return {"rows": json.loads(rows.read_text()), "losses": json.loads(losses.read_text()), "job": job}


def summary(found: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """Return medians over an iteration, and what counts over all of them; of a turn, the first one does not count."""
    rows = [row for row in found["rows"][scale.skipped - 1 :] if not row["is_first"]]
    medians = {field: statistics.median(row[field] for row in rows) for field in rows[0]}
    whole = {field: found["job"][field] for field in ("peak_bytes", "spilled_bytes")}
    each = {"faults_each": [row["faults"] for row in found["rows"]]}
    wall = common.spread(row["wall_s"] for row in rows)
    return {**medians, **whole, **each, "wall": wall, "saving": found["job"]["saving"]}


def measure(scale: Scale, ways: Sequence[Way]) -> dict[str, Any]:
    """Run everything, one after the other, and alone before and behind it; ends where losses are not those alone."""
    with tempfile.TemporaryDirectory(prefix="zico-") as name:
        directory = Path(name)
        common.note("alone")
        first = run(scale, directory)
        peak_bytes = first["job"]["peak_bytes"]
        cases = []
        for way in ways:
            said = f"{way.share:.0%} of {format_bytes(peak_bytes)}, {', '.join(way.label.values())}"
            common.note(said)
            limit = ("--limit", f"{NAME}={int(way.share * peak_bytes) // MIB}MiB")
            found = run(scale, directory, (*way.options, *limit), way.environ)
            if found["losses"] != first["losses"]:
                sys.exit(f"other losses with {said}")
            cases.append({**way.label, "share": way.share, **summary(found, scale)})
        common.note("alone, again")
        again = run(scale, directory)
    return {"alone": [summary(first, scale), summary(again, scale)], "cases": cases}


def text_of(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    alone_s = statistics.mean(one["wall_s"] for one in result["alone"])
    rows = [
        [name, "-", f"{one['wall_s']:.3f}", f"{one['wall_s'] / alone_s:.2f}", f"{one['cpu_s']:.3f}", *["-"] * 4]
        for name, one in zip(("alone", "alone, again"), result["alone"], strict=True)
    ]
    rows += [
        [
            f"{case['share']:.0%}",
            case["tier"],
            f"{case['wall_s']:.3f}",
            f"{case['wall_s'] / alone_s:.2f}",
            f"{case['cpu_s']:.3f}",
            format_bytes(int(case["out_bytes"])),
            f"{case['late']:.0f}",
            f"{case['copy_waited_ns'] / 1e6:.1f}",
            f"{case['need_waited_ns'] / 1e6:.1f}",
        ]
        for case in result["cases"]
    ]
    header = ["share of the peak", "tier", "s / iteration", "x alone", "processor s", "moved out", "late"]
    table = common.table([*header, "ms waited for copies", "ms waited for memory"], rows)
    peak = format_bytes(result["alone"][0]["peak_bytes"])
    return f"Peak alone: {peak}. Medians over an iteration. The losses of all runs are the same bits.\n\n{table}"


def main() -> None:
    """Measure and write."""
    options = common.parser(__doc__).parse_args()
    scale = SMOKE if options.smoke else FULL
    result = common.document("swap_host", QUESTION, dataclasses.asdict(scale))
    result |= measure(
        scale,
        [
            Way(share, {"tier": tier}, ("--save", "swap", "--tier", tier))
            for tier in scale.tiers
            for share in scale.shares
        ],
    )
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
