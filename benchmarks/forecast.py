"""How far is what a job holds from what was forecast before it ran?

Small models of many kinds (``models/small.py``) train on the host, each in a process of its own in a
pool without a limit. Before, each step is traced without computing, and the trace goes through
the heap that jobs have: as ``zico fit SCRIPT:function`` does it. The forecast is compared with the most
bytes of live tensors and the most bytes of regions that the job then had.

Each model trains at three batches with its usual optimizer; at the middle batch also with three other
optimizers, with blocks that compute again where it has blocks, and some of them by ``torch.compile``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import common

from zico.base.settings import DEFAULT_REGION_BYTES
from zico.base.units import MIB
from zico.integrations.kept_broker import KeptBroker
from zico.lab.cli.forecast import MARGIN, MARGIN_REGIONS, with_margin
from zico.lab.simulator.held import held_by
from zico.lab.simulator.roofline import device_model

sys.path.insert(0, str(common.ROOT / "benchmarks" / "models"))

import small
from zoo import fake_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

QUESTION = "How far is what a job holds from what was forecast before it ran?"
HOST = "cpu-2core"
ITERATIONS = 8
"""Of the real job: until it follows a plan of its own."""
TRACED = 2
COMPILED = (
    *("perceptron", "N-BEATS", "ViT", "GPT-2", "autoencoder", "ResNet", "GCN", "Switch", "DLRM", "Llama, LoRA"),
    *("diffusion transformer", "VGG", "PointNet", "BERT"),
)
SMOKE = ("perceptron",)
MARGINS: dict[str, Callable[[int], float]] = {
    "no margin": lambda held_bytes: held_bytes,
    "+2 %": lambda held_bytes: 1.02 * held_bytes,
    "+5 %": lambda held_bytes: 1.05 * held_bytes,
    "zico fit": lambda held_bytes: with_margin(held_bytes, DEFAULT_REGION_BYTES),
}
"""The budget by the forecast."""
GOAL_MEDIAN, GOAL_MOST, GOAL_PERCENT = 0.02, 0.08, 95
JOB_S = 600.0
_STRIDE = 6
"""Optimizers change for every sixth model first, so that a run that ends early has some of each kind."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One job."""

    model: str
    batch: int
    optimizer: str
    how: str = ""
    """``checkpoint``, ``compile``, or nothing."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what ``small.build`` is called with."""
        given = {"name": self.model, "batch": self.batch, "optimizer": self.optimizer}
        return {**given, "checkpointing": self.how == "checkpoint", "compiles": self.how == "compile"}


def cases(names: Sequence[str], *, smoke: bool = False) -> list[Case]:
    """Return the jobs of some models: those that say most about different models first."""
    of = {name: small.models()[name] for name in names}
    found = [Case(name, batch, model.optimizer) for name, model in of.items() for batch in model.batches]
    if smoke:
        return found
    with_blocks = [name for name in names if small.checkpoints(of[name].make())]
    found += [Case(name, of[name].batches[1], of[name].optimizer, "checkpoint") for name in with_blocks]
    compiled = [name for name in COMPILED if name in of]
    found += [Case(name, of[name].batches[1], of[name].optimizer, "compile") for name in compiled]
    mixed = [name for first in range(_STRIDE) for name in list(of)[first::_STRIDE]]
    for name in mixed:
        others = [one for one in small.OPTIMIZERS if one != of[name].optimizer]
        found += [Case(name, of[name].batches[1], one) for one in others]
    return found


# -- what is measured ------------------------------------------------------------------------------


def forecast(case: Case) -> dict[str, Any]:
    """Return what the job will hold, by a trace on which nothing is computed."""
    began_s = time.process_time()
    marks: list[int] = []
    trace = fake_trace(lambda: small.build(**case.arguments), device_model(HOST), TRACED, marks=marks, copies=True)
    held = held_by(trace, DEFAULT_REGION_BYTES, marks)
    cpu_s = time.process_time() - began_s
    return {"live_bytes": held.live_bytes, "held_bytes": held.held_bytes, "cpu_s": cpu_s}


class Jobs:
    """A pool without a limit, and what starts one job after the other in it."""

    def __init__(self, directory: Path) -> None:
        """Start both; the pool ends with this process, or when this is closed."""
        socket = directory / "socket"
        self._broker = KeptBroker(socket, {"budget": "none"}, os.getpid())
        self._broker.look()
        argv = (sys.executable, str(common.ROOT / "benchmarks" / "forecast_job.py"), str(socket), str(ITERATIONS))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, case: Case) -> dict[str, Any]:
        """Train a job and return what it held.

        Raises:
            RuntimeError: It failed.
            TimeoutError: It took too long.
        """
        asked, answers = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        print(json.dumps(case.arguments), file=asked, flush=True)
        if not select.select([answers], [], [], JOB_S)[0]:
            message = f"{case} took more than {JOB_S:.0f} s"
            raise TimeoutError(message)
        found: dict[str, Any] = json.loads(answers.readline())
        if "failed" in found:
            message = f"{case} ended with {found['failed']}"
            raise RuntimeError(message)
        return found

    def close(self) -> None:
        """End the jobs' process, then the pool."""
        cast("IO[str]", self._process.stdin).close()
        self._process.wait(timeout=JOB_S)
        cast("IO[str]", self._process.stdout).close()
        self._broker.end()


def error(row: dict[str, Any], what: str) -> float:
    """Return the forecast over the fact, less one."""
    return row["forecast"][what] / row["real"][what] - 1


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of many jobs: of errors either way, and of jobs that would not have fitted."""
    found: dict[str, Any] = {"jobs": len(rows)}
    for what in ("live_bytes", "held_bytes"):
        errors = [error(row, what) for row in rows]
        sizes = [abs(one) for one in errors]
        found[what] = {
            "median": statistics.median(sizes),
            "percentile": common.percentile(sizes, GOAL_PERCENT),
            "too_low": min(errors),
            "too_high": max(errors),
            "within": sum(size <= GOAL_MOST for size in sizes) / len(sizes),
        }
    budgets = {name: [budget(row["forecast"]["held_bytes"]) for row in rows] for name, budget in MARGINS.items()}
    held = [row["real"]["held_bytes"] for row in rows]
    found["no_fit"] = {name: sum(map(operator.gt, held, those)) for name, those in budgets.items()}
    return found


# -- what is shown ---------------------------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _summary_line(name: str, rows: Sequence[dict[str, Any]], what: str) -> tuple[str, ...]:
    found = summary(rows)
    of = found[what]
    shown = (f"{100 * of['median']:.2f} %", f"{100 * of['percentile']:.2f} %", f"{100 * of['within']:.0f} %")
    ends = (_percent(of["too_low"]), _percent(of["too_high"]))
    misses = (str(one) for one in found["no_fit"].values()) if what == "held_bytes" else ()
    return (name, str(found["jobs"]), *shown, *ends, *misses)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    cells = [row["model"], row["kind"], str(row["batch"]), row["optimizer"], row["how"] or "-"]
    for what in ("live_bytes", "held_bytes"):
        cells += [f"{row[of][what] / MIB:.1f}" for of in ("forecast", "real")] + [_percent(error(row, what))]
    return (*cells, f"{row['forecast']['cpu_s']:.1f}")


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = result["rows"]
    kinds = sorted({row["kind"] for row in rows})
    groups = {"all": rows, "not compiled": [row for row in rows if row["how"] != "compile"]}
    groups |= {how: [row for row in rows if row["how"] == how] for how in ("checkpoint", "compile")}
    groups |= {name: [row for row in rows if row["optimizer"] == name and not row["how"]] for name in small.OPTIMIZERS}
    groups |= {kind: [row for row in rows if row["kind"] == kind and row["how"] != "compile"] for kind in kinds}
    columns = ("jobs", "count", "median", f"{GOAL_PERCENT} % within", f"within {GOAL_MOST:.0%}", "lowest", "highest")
    parts = []
    misses = tuple(f"too much, {name}" for name in MARGINS)
    for what, title, more in (("held_bytes", "Regions held", misses), ("live_bytes", "Bytes of live tensors", ())):
        lines = [_summary_line(name, found, what) for name, found in groups.items() if found]
        parts += [f"{title}, forecast over fact:\n", common.table((*columns, *more), lines)]
    names = ("model", "kind", "batch", "optimizer", "how")
    columns = ("live MiB, forecast", "real", "error", "held MiB, forecast", "real", "error", "CPU s")
    parts += [common.table((*names, *columns), map(_row, rows)), _TEXT]
    if result["left_out"]:
        parts.append(f"Time was up for {result['left_out']} jobs of the design, the last ones of it.\n")
    parts += [f"Not measured: {one['why']}\n" for one in result["failed"]]
    parts += [f"Some jobs were measured at commit `{commit[:12]}`.\n" for commit in result.get("earlier_commits", [])]
    return "\n".join(parts)


_TEXT = f"""
Errors are the forecast over the most that the job had, less one; median and percentile are of their
size. *Too much*: jobs that held more than a budget of the forecast and a margin. That of `zico fit` is
{MARGIN_REGIONS} regions or {MARGIN:.0%}, whichever is more. It was chosen after these figures were known.

Regions have {DEFAULT_REGION_BYTES // MIB} MiB. Live tensors are those of 64 KiB and more; what lies below is not in
the pool. A real job trains {ITERATIONS} steps in one thread. *CPU s* is what the forecast took, in a process
that has PyTorch loaded.
"""


def _earlier(path: Path | None, result: dict[str, Any]) -> dict[Case, dict[str, Any]]:
    """Return the rows of earlier results, and let the new ones say whose these are."""
    if path is None:
        return {}
    before = json.loads(path.read_text())
    result["earlier_commits"] = [*before.get("earlier_commits", []), before["commit"]]
    fields = [field.name for field in dataclasses.fields(Case)]
    return {Case(**{name: row[name] for name in fields}): row for row in before["rows"]}


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no job after so long")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="take over the jobs of these results")
    parser.add_argument("--again", action="store_true", help=common.AGAIN)
    options = parser.parse_args()
    if options.again:
        result = json.loads((common.RESULTS / "forecast.json").read_text())
        result["summary"] = summary(result["rows"])
        common.write(result, text_of(result), common.output_directory(options))
        return
    known = small.models()
    names = options.model or (SMOKE if options.smoke else list(known))
    end_s = time.monotonic() + (options.seconds or math.inf)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"forecast.py: --model {unknown[0]}: give one of {', '.join(known)}")
    settings = {"iterations": ITERATIONS, "traced": TRACED, "region_bytes": DEFAULT_REGION_BYTES, "threads": 1}
    settings["seconds"] = options.seconds
    result = common.document("forecast", QUESTION, settings)
    result["rows"], result["failed"], result["left_out"] = [], [], 0
    known_rows = _earlier(options.earlier, result)
    with tempfile.TemporaryDirectory() as directory, contextlib.closing(Jobs(Path(directory))) as jobs:
        for case in cases(names, smoke=options.smoke):
            if (row := known_rows.get(case)) is not None:
                result["rows"].append(row)
                continue
            if time.monotonic() > end_s:
                result["left_out"] += 1
                continue
            try:
                figures = {"forecast": forecast(case), "real": jobs.run(case)}
            except RuntimeError as failure:
                common.note(str(failure))
                result["failed"].append({**dataclasses.asdict(case), "why": str(failure)})
                continue
            row = {"kind": known[case.model].kind, **dataclasses.asdict(case), **figures}
            result["rows"].append(row)
            errors = [_percent(error(row, what)) for what in ("live_bytes", "held_bytes")]
            common.note(" ".join([case.model, str(case.batch), case.optimizer, case.how, *errors]))
    result["summary"] = summary(result["rows"])
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
