"""What do pairs of jobs gain from sharing a GPU's memory under Zico, and what becomes of one when the other is killed?

Jobs of ``job.py`` in pairs, as ``colocation.py`` measures them, one round: without a budget,
without Zico (time slices), ``zico`` at shares of the sum of the peaks, ``serial`` at the lowest of
them, and under MPS where its daemon is installed, with ``zico`` and with no policy. Both are in
Zico's pool: plain MPS with PyTorch's own allocator is not among them. Then one job of the first pair
kills itself in mid-run.

``--paper`` takes the kinds of pairs that the paper shows. ``--device host`` runs tiny jobs on the
host, to see that the script works. The result is written after each pair. Managed memory is no
peer: within what the card has free, nothing is paged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import colocation
import colocation_text
import common
import together
from colocation import BASE, Configuration, Group
from colocation_text import PLAIN
from together import Job

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

QUESTION = "What do pairs of jobs gain from sharing a GPU's memory under Zico?"
SHARES = (100, 70)
GOAL = (70, 0.95)
"""Share of the sum of the peaks, and throughput over that with no budget."""
KILLED_AT = 12
"""Iterations that the job launches before it kills itself."""
MPS_DAEMON = "nvidia-cuda-mps-control"


def pairs(options: Namespace) -> list[Group]:
    """Return the pairs; on the host they are tiny."""

    def job(model: str, batch: int, seed: int) -> Job:
        kind = "cpu" if options.device == "host" else "cuda"
        arguments = (model, "--batch", str(batch), "--device", kind, "--seed", str(seed))
        return Job(f"{model}-{seed}", "benchmarks/gpu/job.py", arguments)

    def pair(first: tuple[str, int], second: tuple[str, int]) -> Group:
        return Group(f"{first[0]}+{second[0]}", (job(*first, 1), job(*second, 2)), options.device)

    if options.device == "host":
        first = job("dcgan", 4, 1)  # alike, so that one is measured alone
        return [Group("dcgan+dcgan", (first, dataclasses.replace(first, name="dcgan-2")), options.device)]
    if options.paper:
        return [
            pair(("gnmt", 512), ("gnmt", 512)),
            pair(("resnet110", 800), ("bert_base", 64)),
            pair(("gpt2", 24), ("gnmt", 512)),
        ]
    models = (("resnet50", 128), ("bert_base", 64), ("dcgan", 128))
    return [pair(one, one) for one in models]


def measure_pair(pair: Group, options: Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return one round of a pair; ``keep`` gets what there is of it after each run."""
    runner = colocation.Runner(pair, options.seconds, options.warm_up)
    least = min(options.shares)
    bounded = [Configuration("zico", share) for share in options.shares]
    peers = [] if options.smoke else [Configuration("serial", least)]
    plain = [Configuration(PLAIN)]
    if options.smoke and options.paper:
        bounded, plain = [], []
    runs: list[tuple[str, Configuration, tuple[str, ...]]] = [
        (configuration.label, configuration, ()) for configuration in (BASE, *plain, *bounded, *peers)
    ]
    if shutil.which(MPS_DAEMON) and pair.device != "host":
        under = (Configuration("none", None), Configuration("zico", least))
        runs += [(f"MPS, {configuration.label}", configuration, ("--mps",)) for configuration in under]
    done: list[dict[str, Any]] = []
    measured: dict[str, Any] = {}
    for label, configuration, told in runs:
        done.append({"label": label, **runner.attempt(configuration, told=told)})
        said = done[-1].get("failed") or ", ".join(f"{rate:.2f}" for rate in done[-1]["rates"]) + " it/s"
        common.note(f"{pair.name}: {label}: {said}")
        measured = {
            "peaks_bytes": runner.peaks_bytes,
            "summary": colocation.summarise([done], [one["label"] for one in done]),
            "failures": [f"{run['label']}: {run['failed']}" for run in done if "failed" in run],
            "rounds": [done],
            "budget_bytes": runner.budget_bytes(least),
            "alone_losses": list(runner.alone_losses[1]),
        }
        keep(measured)
    return measured


def killed(pair: Group, measured: dict[str, Any], options: Namespace) -> dict[str, Any]:
    """Return how the second job went when the first one killed itself with work on the device."""
    with tempfile.TemporaryDirectory() as folder:
        losses, report = Path(folder) / "losses.json", Path(folder) / "report.json"
        until = ("--seconds", str(options.seconds))
        first = dataclasses.replace(pair.jobs[0], arguments=(*pair.jobs[0].arguments, "--killed-at", str(KILLED_AT)))
        budget = f"{measured['budget_bytes']}B"
        argv = (*common.ZICO, "run", "--quiet", "--device", pair.device, "--budget", budget, "--json", str(report))
        commands = [shlex.join(first.argv()), shlex.join(pair.jobs[1].argv(losses, *until))]
        deadline_s = options.seconds + together.MARGIN_S
        try:
            done = subprocess.run(
                (*argv, *commands), cwd=common.ROOT, stdin=subprocess.DEVNULL, timeout=deadline_s, check=False
            )
            found = json.loads(losses.read_text())
            jobs = json.loads(report.read_text())["jobs"]
        except (ValueError, OSError, subprocess.SubprocessError) as error:
            return {"failed": f"{type(error).__name__}: {error}"}
    shared = min(len(found), len(measured["alone_losses"]))
    return {
        "exit_code": done.returncode,
        "exit_codes": [job["exit_code"] for job in jobs],
        "losses_compared": shared,
        "losses_equal": found[:shared] == measured["alone_losses"][:shared],
    }


# -- what is shown ---------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    parts = [colocation_text.text_of(result)]
    for name, pair in result["pairs"].items():
        found = pair["summary"].get(f"zico {GOAL[0]} %")
        if found is not None:
            value = found["throughput"]["median"]
            word = "reached" if value >= GOAL[1] else "missed"
            parts.append(f"* {name} at {GOAL[0]} %: {value:.3f}, goal {GOAL[1]:.2f}: {word}\n")
    if "killed" in result:
        parts.append(f"* one job killed: {result['killed']}\n")
    return "\n".join(parts)


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or host to try the script")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each job trains in each run")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations of each job left out")
    parser.add_argument("--only", metavar="NAME", help="only this pair")
    parser.add_argument("--paper", action="store_true", help="kinds of pairs that the paper shows, at 70 %%")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.warm_up = 1.5, 1
    options.shares = (GOAL[0],) if options.paper or options.smoke else SHARES
    name = "gpu_pairs_paper" if options.paper else "gpu_pairs"
    settings = {key: getattr(options, key) for key in ("device", "seconds", "warm_up", "shares")}
    result = common.document(name, QUESTION, settings | {"policies": ["zico"]})
    result["pairs"] = {}
    directory = common.output_directory(options)

    def keep() -> None:
        if directory is not None:
            common.save(result, text_of(result), directory)

    def keep_pair(name: str, measured: dict[str, Any]) -> None:
        result["pairs"][name] = measured
        keep()

    for index, pair in enumerate(one for one in pairs(options) if options.only in (None, one.name)):
        try:
            result["pairs"][pair.name] = measured = measure_pair(pair, options, functools.partial(keep_pair, pair.name))
        except subprocess.CalledProcessError as error:  # a job that cannot even run alone
            common.note(f"{pair.name}: a job alone ended with exit code {error.returncode}")
            result.setdefault("failures", []).append(f"{pair.name}: exit code {error.returncode}")
            continue
        if index == 0 and not options.paper:
            keep()
            result["killed"] = killed(pair, measured, options)
            common.note(f"{pair.name}, the first job killed: {result['killed']}")
        del measured["alone_losses"]
        keep()
    common.write(result, text_of(result), directory)
    if directory is not None:
        with contextlib.suppress(KeyError):  # a pair without a base has no picture
            colocation_text.draw(result, directory / f"{name}.png")
    failed = any(pair["failures"] for pair in result["pairs"].values()) or "failed" in result.get("killed", {})
    return int(failed or "failures" in result)


if __name__ == "__main__":
    sys.exit(main())
