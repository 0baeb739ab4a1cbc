"""What does each planner cost a real PyTorch job that has less memory than its peak?

The ResNet example and a GPT with plain attention, one thread each, alone and with shares of their
peaks, by each planner that jobs can follow. The runs of a round take turns of a few iterations, so
that what the machine does besides falls on all rows. The losses must be those alone, bit by bit,
but where a planner keeps fewer bits. ``--job "GPT, every name"`` has a row for each mode and name
that ``--save`` takes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import swap_host
import swap_job
from swap_host import Scale

from zico.base.units import MIB, format_bytes
from zico.planning.saving.registry import JOB_PLANNERS, PAGERS, REDUCING

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTION = "What does each planner cost a real PyTorch job that has less memory than its peak?"
LIMIT_S = 3000.0
PEAK_ITERATIONS = 4
TURN = 5
"""Iterations of a turn, the first of which is not reported."""
AT_ONCE = 6
"""Rows that take turns with one run alone: all of these runs hold their memory."""
KERAS = "stdlib_lm.py"
GPT = str(Path(__file__).with_name("gpt_job.py"))


@dataclasses.dataclass(frozen=True)
class Job:
    """A script, how long it runs, and with what."""

    name: str
    scale: Scale
    cases: tuple[tuple[str, float, tuple[str, ...]], ...]
    """Planner or mode, share of the peak, and more options of ``zico run``."""


SWAPPING = (
    "swdoa",
    "doa",
    "bayes",
    "vdnn",
    "tflms",
    "lms",
    "flashneuron",
    "gist",
    "autotm",
    "swapadvisor",
    "flow-whole",
)
DROPPING = ("dtr", "chen", "superneurons", "echo", "capuchin", "zico")
FILE = ("--tier", "file")
AUTO = (("auto", 0.6, ()), ("auto", 0.5, ()), ("auto", 0.4, ()))
EVERY = tuple((name, 0.6, ()) for name in ("swap", "page", *JOB_PLANNERS[1:], *PAGERS))
"""All names; ``swap`` is the first planner's."""
ROWS = (*((name, 0.6, ()) for name in ("swap", *SWAPPING, *DROPPING)), ("zico", 0.5, ()), ("zico", 0.4, ()))


def jobs(*, smoke: bool) -> list[Job]:
    """Return what is run."""
    if smoke:
        small = Scale(GPT, ("--batch", "4", "--layers", "2"), 6, 3, (), (), LIMIT_S)
        return [Job("GPT", small, (("swdoa", 0.7, ()), ("echo", 0.8, ()), ("sentinel", 0.7, ())))]
    resnet = Scale(swap_host.RESNET, (), 14, 8, (), (), LIMIT_S)
    gpt = Scale(GPT, ("--batch", "16"), 18, 10, (), (), LIMIT_S)
    short = Scale(GPT, ("--batch", "8"), 14, 9, (), (), LIMIT_S)
    longer, auto_gpt = dataclasses.replace(resnet, iterations=58, skipped=28), (("auto", 0.6, ()), ("auto", 0.45, ()))
    return [
        Job("ResNet, auto", longer, AUTO),
        Job("GPT, auto", dataclasses.replace(gpt, iterations=60, skipped=30), auto_gpt),
        Job("Keras, auto", Scale(KERAS, (), 60, 30, (), (), LIMIT_S), (("auto", 0.6, ()),)),
        Job("ResNet", resnet, ROWS),
        Job("GPT", gpt, (*ROWS, ("flashneuron", 0.6, FILE), ("zico", 0.6, FILE))),
        Job("GPT, every name", short, EVERY),
    ]


def measure(job: Job, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each case: medians of each round, and over the same round's alone."""
    rows: list[dict[str, Any]] = [
        {"planner": name, "share": share, "options": options, "rounds": []} for name, share, options in job.cases
    ]
    with tempfile.TemporaryDirectory(prefix="zico-") as name:
        common.note(f"{job.name}: its peak")
        brief = dataclasses.replace(job.scale, iterations=PEAK_ITERATIONS)
        peak_bytes = swap_host.run(brief, Path(name))["job"]["peak_bytes"]
        for number in range(rounds):
            for begin in range(0, len(rows), AT_ONCE):
                some = rows[begin : begin + AT_ONCE]
                said = ", ".join(f"{row['planner']} {row['share']:.0%}" for row in some)
                common.note(f"{job.name}, round {number + 1}: alone, {said}")
                options = [()] + [_options(row, peak_bytes) for row in some]
                first, *others = _by_turns(job.scale, Path(name), options)
                alone = swap_host.summary(first, job.scale)
                for row, found in zip(some, others, strict=True):
                    if found["losses"] != first["losses"] and row["planner"] not in REDUCING:
                        sys.exit(f"{job.name}: other losses with {row['planner']} at {row['share']:.0%}")
                    beside = {"alone_s": alone["wall_s"], "peak_alone_bytes": first["job"]["peak_bytes"]}
                    row["rounds"].append({**swap_host.summary(found, job.scale), **beside})
    return rows


def _options(row: dict[str, Any], peak_bytes: int) -> tuple[str, ...]:
    limit = f"{swap_host.NAME}={int(row['share'] * peak_bytes) // MIB}MiB"
    return "--save", row["planner"], "--limit", limit, *row["options"]


def _by_turns(scale: Scale, directory: Path, options: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Run the job once with each of the options, each in a pool of its own; they take turns."""
    directories = [directory / str(i) for i in range(len(options))]
    pipes = [each / "turn" for each in directories]
    for each, pipe in zip(directories, pipes, strict=True):
        each.mkdir(exist_ok=True)
        if not pipe.exists():
            os.mkfifo(pipe)

    def run(i: int) -> dict[str, Any]:
        turns = f"{pipes[i]} {pipes[(i + 1) % len(pipes)]} {scale.skipped} {TURN}"
        return swap_host.run(scale, directories[i], options[i], ((swap_job.TURNS, turns),))

    first = os.open(pipes[0], os.O_RDWR)
    os.write(first, b".")
    with concurrent.futures.ThreadPoolExecutor(len(options)) as pool:
        found = list(pool.map(run, range(len(options))))
    os.read(first, 1)  # the last one passed it on
    os.close(first)
    return found


def text_of(result: dict[str, Any]) -> str:
    """Return the result as tables."""
    parts = []
    for job in result["jobs"]:
        rows = []
        for row in job["rows"]:
            each = row["rounds"]
            ratios = sorted(one["wall_s"] / one["alone_s"] for one in each)

            def mean(field: str, each: list[dict[str, Any]] = each) -> float:
                return statistics.median(one[field] for one in each)

            rows.append(
                [
                    " ".join([row["planner"], *row["options"][1:]]),
                    f"{row['share']:.0%}",
                    f"{statistics.median(ratios):.2f}",
                    f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                    format_bytes(int(mean("out_bytes"))),
                    format_bytes(int(mean("dropped_bytes"))),
                    f"{mean('making_ns') / 1e6:.0f}",
                    f"{(mean('copy_waited_ns') + mean('need_waited_ns')) / 1e6:.1f}",
                ]
            )
        header = [
            "planner",
            "of the peak",
            "x alone",
            "over rounds",
            "moved out",
            "dropped",
            "ms made again",
            "ms waited",
        ]
        peak = format_bytes(int(job["rows"][0]["rounds"][0]["peak_alone_bytes"]))
        parts.append(f"## {job['name']}\n\nPeak alone: {peak}.\n\n{common.table(header, rows)}{_notes(job)}")
    note = "Medians over an iteration, then over rounds. The losses of all runs are those alone, the same bits"
    note += f", but with {', '.join(REDUCING)}, which keep fewer bits."
    return f"{note}\n\n" + "\n\n".join(parts)


def _notes(job: dict[str, Any]) -> str:
    """Return what jobs say of planners that found no plan for what they may hold."""
    said = {row["planner"]: row["rounds"][0]["saving"].get("planner_note", "") for row in job["rows"]}
    return "".join(f"\n* {name}: {note}" for name, note in said.items() if note)


def main() -> None:
    """Measure and write."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", action="append", help="only this one; the others stay as they are in the results")
    parser.add_argument("--planner", action="append", help="only this one")
    parser.add_argument("--name", default="save_planners", help="of the results")
    options = parser.parse_args()
    rounds = 1 if options.smoke else options.rounds
    found = jobs(smoke=options.smoke)
    if options.planner:
        found = [
            dataclasses.replace(job, cases=tuple(case for case in job.cases if case[0] in options.planner))
            for job in found
        ]
    result = common.document(options.name, QUESTION, {"rounds": rounds})
    directory = common.output_directory(options)
    known = directory / f"{options.name}.json" if directory is not None else None
    before = json.loads(known.read_text())["jobs"] if options.job and known is not None and known.exists() else []
    chosen = [job for job in found if not options.job or job.name in options.job]
    kept = [job for job in before if job["name"] not in options.job]
    done = [{"name": job.name, "commit": result["commit"], "rows": measure(job, rounds)} for job in chosen]
    result["jobs"] = kept + done
    common.write(result, text_of(result), directory)


if __name__ == "__main__":
    main()
