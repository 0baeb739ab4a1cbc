"""What does Zico cost a job that has a GPU to itself?

Each case trains in the order plain, Zico, Zico, plain, so that a clock that drifts falls on both
alike; ``job.py`` is the job. Then, once plain and once with Zico: cuDNN's own choice of algorithms,
workers of a data loader, and a request that no device can serve; at last, what PyTorch's calls for
memory take. ``--spacing`` measures one case with several distances between marks instead, and
``--saving`` jobs that may hold less than their peak.

``--device host`` runs a tiny job on the host, to see that the script works. The result is written
after each case.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import together
import torch_calls
from together import Job

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

QUESTION = "What does Zico cost a job that has a GPU to itself?"
COUNTED = ("maps", "peak_bytes", "spilled_bytes", "waited_s", "saving")
TURNS = ("plain", "zico", "zico", "plain")
CASES = (
    ("resnet50", 128, "float32"),
    ("resnet50", 128, "bfloat16"),
    ("bert_base", 64, "float32"),
    ("bert_base", 64, "bfloat16"),
)
HOST_CASES = (("dcgan", 4, "float32"),)
EXTRAS = {"cudnn.benchmark": ("--benchmark",), "loader workers": ("--workers", "4"), "out of memory": ("--oom",)}
SMOKE_EXTRAS = {"out of memory": tuple(word for words in EXTRAS.values() for word in words)}
"""All at once."""
SPACINGS_MIB = (None, 0, 64, 256, 1024)
"""Freed on a stream between two marks, with ``--spacing``; ``None``: by the rules for who is there."""
SAVING_WAYS = ("longest:80", "zico:80", "longest:60", "zico:60")
"""With ``--saving``: a planner, and what the job may hold of its peak, in percent."""


class Runner:
    """Runs one job at a time, and notes what it did."""

    def __init__(self, options: Namespace) -> None:
        """Take where, and how long each run lasts."""
        self._options = options
        self._kind = "cpu" if options.device == "host" else "cuda"

    def run(
        self, way: str, case: tuple[str, int, str], *extra: str, before: tuple[str, ...] = (), **told: str
    ) -> dict[str, Any]:
        """Return the figures of one run, or why there are none: one run must not end all others."""
        model, batch, dtype = case
        seconds = self._options.seconds
        with tempfile.TemporaryDirectory() as folder:
            figures = Path(folder) / "figures.json"
            arguments = (model, "--batch", str(batch), "--dtype", dtype, "--device", self._kind)
            given = (*arguments, *extra, "--figures", str(figures), "--seconds", str(seconds))
            job = Job(model, "benchmarks/gpu/job.py", given, before)
            options = [word for name, value in told.items() for word in (f"--{name}", value)]
            deadline_s = seconds + together.MARGIN_S
            try:
                if way == "plain":
                    done = together.run_plain([job], deadline_s=deadline_s)
                else:
                    where = self._options.device
                    done = together.run_zico(
                        [job], policy="zico", budget="none", deadline_s=deadline_s, device=where, told=options
                    )
                rate = done.rates(self._options.warm_up)[0]
                counted = json.loads(figures.read_text())
            except subprocess.CalledProcessError as error:
                return {"way": way, "failed": f"exit code {error.returncode}; what it said is in this run's output"}
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                return {"way": way, "failed": f"{type(error).__name__}: {error}"}
        report = done.report or {"jobs": [{}]}
        counted |= {name: report["jobs"][0].get(name) for name in COUNTED}
        return {"way": way, "rate": rate, "losses": list(done.losses[0]), "counted": counted}


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratio of Zico's rate to the plain one, and whether all losses are the same bits."""
    failed = [f"{run['way']}: {run['failed']}" for run in runs if "failed" in run]
    if failed:
        return {"failed": failed, "runs": runs}
    rates = {way: statistics.mean(run["rate"] for run in runs if run["way"] == way) for way in ("plain", "zico")}
    shared = min(len(run["losses"]) for run in runs)
    equal = all(run["losses"][:shared] == runs[0]["losses"][:shared] for run in runs)
    return {
        **rates,
        "ratio": rates["zico"] / rates["plain"],
        "losses_compared": shared,
        "losses_equal": equal,
        "runs": [{**run, "losses": len(run["losses"])} for run in runs],
    }


def measure_saving(
    runner: Runner,
    case: tuple[str, int, str],
    ways: Sequence[tuple[str, int]],
    keep: Callable[[str, list[dict[str, Any]]], None],
) -> None:
    """Run a job with all the memory that it wants, then by each way with its share of the peak, in percent."""
    name = " ".join(map(str, case))
    plain, whole = (runner.run(way, case) for way in ("plain", "zico"))
    keep(f"{name}, all", [plain, whole])
    if "failed" in whole:
        return
    for save, share in ways:
        limit = f"{case[0]}={share * whole['counted']['peak_bytes'] // 100}B"
        keep(f"{name}, {share} %, {save}", [plain, runner.run("zico", case, save=save, limit=limit)])


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for name, case in result["cases"].items():
        if "failed" in case:
            rows.append((name, *["failed"] * 6))
            continue
        counted = next(run["counted"] for run in case["runs"] if run["way"] == "zico")
        iterations = max(counted["iterations"], 1)
        each = (f"{counted[key] / iterations:.1f}" for key in ("marks", "maps"))
        same = f"{'same' if case['losses_equal'] else 'DIFFER'} ({case['losses_compared']})"
        figures = (f"{case['plain']:.2f}", f"{case['zico']:.2f}", f"{case['ratio']:.3f}", *each)
        rows.append((name, *figures, same))
    header = ("alone", "plain, it/s", "with Zico", "ratio", "marks an iteration", "maps an iteration", "losses")
    failures = [f"* {name}: {text}\n" for name, case in result["cases"].items() for text in case.get("failed", ())]
    calls = torch_calls.text_of(result["torch"]) if "torch" in result else ""
    return "\n".join([common.table(header, rows), "".join(failures), calls])


def options_of() -> Namespace:
    """Read the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or host to try the script")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long the job trains in each run")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations left out")
    parser.add_argument("--spacing", action="store_true", help="measure distances between marks instead")
    parser.add_argument("--saving", action="store_true", help="measure less memory than the peak instead")
    parser.add_argument("--way", action="append", metavar="SAVE:SHARE", help="with --saving, only these")
    parser.add_argument("--case", type=int, action="append", metavar="N", help="only these cases, from 0 on")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.warm_up = 1.0, 1
    return options


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    options = options_of()
    name = "gpu_spacing" if options.spacing else "gpu_saving" if options.saving else "gpu_alone"
    result = common.document(name, QUESTION, {key: getattr(options, key) for key in ("device", "seconds", "warm_up")})
    result["cases"] = {}
    directory = common.output_directory(options)
    runner = Runner(options)

    def keep(label: str, runs: list[dict[str, Any]]) -> None:
        result["cases"][label] = case = compared(runs)
        common.note(f"{label}: {case.get('failed') or format(case['ratio'], '.3f') + ' of its speed without Zico'}")
        if directory is not None:
            common.save(result, text_of(result), directory)

    cases: tuple[tuple[str, int, str], ...] = HOST_CASES if options.device == "host" else CASES
    cases = cases if options.case is None else tuple(cases[n] for n in options.case)
    turns = TURNS[:2] if options.smoke else TURNS
    if options.spacing:
        case = cases[-1]
        for mib in SPACINGS_MIB[2:3] if options.smoke else SPACINGS_MIB:
            before = () if mib is None else ("env", f"ZICO_SPACING={mib << 20}")
            label = "default" if mib is None else f"a mark every {mib} MiB"
            keep(label, [runner.run(way, case, before=before) for way in turns])
    elif options.saving:
        ways = [(save, int(share)) for save, _, share in (way.partition(":") for way in options.way or SAVING_WAYS)]
        for case in cases if options.case is not None else cases[:1]:
            measure_saving(runner, case, ways, keep)
    else:
        for case in cases:
            keep(" ".join(map(str, case)), [runner.run(way, case) for way in turns])
        if options.case is None:
            for label, extra in (SMOKE_EXTRAS if options.smoke else EXTRAS).items():
                keep(label, [runner.run(way, cases[0], *extra) for way in ("plain", "zico")])
            rounds, batches = (1, 2) if options.smoke else (5, 20)
            result["torch"] = torch_calls.measure(rounds, batches, device=options.device)
    common.write(result, text_of(result), directory)
    return int(any("failed" in case for case in result["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
