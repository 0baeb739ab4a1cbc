"""Run eight trials of two frameworks on a Ray cluster: one at a time, by fractional resources, and by bytes with Zico.

How it works
    A trial trains an example in a process of its own, a task of Ray: a ResNet (PyTorch) or a small
    transformer (Keras on TensorFlow), each with four seeds. Each has one thread, so a trial alone
    leaves all other processors idle. Each kind is first trained alone in a large pool, which tells
    its peak: the predicted bytes.

    The budget is a share of two of the smaller peaks, so no two trials fit with their peaks. Ray
    alone either runs one trial at a time, or two by halves of a device. Two need more than the budget
    when their peaks meet: on a GPU they would then run out of memory. On the host they do not, so
    this way is timed as if memory were no object. With Zico, Ray hands out ``--together`` peaks, and
    no more than the budget is held.

    The ways take turns, each in a cluster of its own that is there before the clock starts, and all
    of them are run ``--rounds`` times. The losses of each trial are those of its first run one at a
    time, to the last bit, or are counted as others.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import ray
from ray.cluster_utils import Cluster

from zico.integrations import ray as integration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

QUESTION = "How long do eight trials of two frameworks take on a Ray cluster, alone and with Zico?"
KINDS = {
    "resnet": ("digits_resnet.py", ("--batch", "256", "--depth", "80")),
    "lm": ("stdlib_lm.py", ("--batch", "12", "--layers", "3")),
}
SMOKE = {
    "resnet": ("digits_resnet.py", ("--batch", "64", "--depth", "8")),
    "lm": ("stdlib_lm.py", ("--batch", "4", "--layers", "1", "--context", "64")),
}
SEEDS = range(4)
LARGE = "8GiB"
REGION = "1MiB"
STORE_BYTES = 80 << 20
WAIT_S = 1800.0
Trial = tuple[str, int]
Placed = dict[str, dict[str, Any]]


def trial(script: str, arguments: tuple[str, ...], losses: str) -> dict[str, Any]:
    """Train an example in this process; return what it held, when it ended, and its losses."""
    import zico

    sys.argv = [script, *arguments, "--quiet", "--losses", losses]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{script} ended with {ended.code}") from None
    figures = zico.status() or zico.JobStatus()
    names = ("peak_bytes", "waited_s", "iterations", "spilled_bytes", "evicted_bytes")
    return {"losses": json.loads(Path(losses).read_text()), **{name: figures.get(name) for name in names}}


class Runs:
    """A cluster of one node, and the trials that it runs."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        """Keep what to run, and where its files go."""
        self._kinds = SMOKE if options.smoke else KINDS
        self._iterations = options.iterations
        self._directory = directory

    def run(self, trials: list[Trial], resources: Mapping[str, float], placed: Placed) -> dict[str, Any]:
        """Run trials on a node with these resources, each kind with its options; return what they did."""
        cluster = Cluster(
            initialize_head=True,
            connect=True,
            head_node_args={"num_cpus": 16, "resources": dict(resources), "object_store_memory": STORE_BYTES},
        )
        try:
            pooled = any(name.startswith("zico_") for name in resources)
            if pooled:
                integration.start(region=REGION)
            began_s = time.monotonic()
            asked = [self._start(kind, seed, placed[kind]) for kind, seed in trials]
            found = ray.get(asked, timeout=WAIT_S)
            took_s = time.monotonic() - began_s
            if pooled:
                integration.stop()
        finally:
            ray.shutdown()
            cluster.shutdown()
        named = {f"{kind}-{seed}": figures for (kind, seed), figures in zip(trials, found, strict=True)}
        return {"makespan_s": took_s, "trials": named}

    def _start(self, kind: str, seed: int, placed: dict[str, Any]) -> Any:  # noqa: ANN401 - a reference of Ray
        script, arguments = self._kinds[kind]
        words = (*arguments, "--iterations", str(self._iterations), "--seed", str(seed))
        losses = self._directory / f"{kind}-{seed}-{time.monotonic_ns()}.json"
        task = ray.remote(num_cpus=1, max_calls=1, max_retries=0, **placed)(trial)
        return task.remote(str(common.ROOT / "examples" / script), words, str(losses))


def ways(runs: Runs, options: argparse.Namespace) -> dict[str, Any]:
    """Learn the peaks, then run all trials in each way, round by round."""
    trials = [(kind, seed) for seed in (SEEDS[:2] if options.smoke else SEEDS) for kind in KINDS]
    common.note("the peak of each kind")
    large = integration.node_resources(LARGE)
    joins = {kind: {"runtime_env": integration.environment(name=kind)} for kind in KINDS}
    alone = {kind: runs.run([(kind, 0)], large, joins)["trials"][f"{kind}-0"]["peak_bytes"] for kind in KINDS}
    peak = max(alone.values())
    budget = max(peak, round(options.share * 2 * min(alone.values()))) >> 20
    times = max(1.0, options.together * peak / (budget << 20))
    offers = integration.node_resources(f"{budget}MiB", oversubscription=times)
    by_bytes = {
        kind: {"resources": {"zico_host": bytes_}, "runtime_env": integration.environment(name=kind)}
        for kind, bytes_ in alone.items()
    }
    whole, half = ({kind: {"resources": {"device": share}} for kind in KINDS} for share in (1, 0.5))
    device = {"device": 1}
    chosen = (
        ("one at a time", device, whole),
        ("by halves of a device", device, half),
        ("by bytes, with Zico", offers, by_bytes),
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in chosen}
    for number in range(1, options.rounds + 1):
        for name, resources, placed in chosen:
            common.note(f"round {number} of {options.rounds}: {name}")
            found[name].append(runs.run(trials, resources, placed))
    return {"peak_bytes": alone, "budget_bytes": budget << 20, "offered_bytes": offers["zico_host"], "ways": found}


def shown(result: dict[str, Any]) -> str:
    """Return the table, and what is to be said of it."""
    first = result["ways"]["one at a time"]
    losses = {name: one["losses"] for name, one in first[0]["trials"].items()}
    rows = []
    for name, rounds in result["ways"].items():
        trials = [(which, one) for way in rounds for which, one in way["trials"].items()]
        same = sum(one["losses"] == losses[which] for which, one in trials)
        waited_s = sum(one["waited_s"] or 0.0 for _, one in trials) / len(rounds)
        share = common.spread(way["makespan_s"] / its["makespan_s"] for way, its in zip(rounds, first, strict=True))
        makespan = common.spread(way["makespan_s"] for way in rounds)
        figures = (_range(makespan, ".1f", " s"), _range(share, ".2f"), f"{waited_s:.1f} s")
        rows.append((name, *figures, f"{same} of {len(trials)}"))
    mib = {kind: f"{peak >> 20} MiB" for kind, peak in result["peak_bytes"].items()}
    said = (
        f"Peaks: resnet {mib['resnet']}, lm {mib['lm']}. Budget: {result['budget_bytes'] >> 20} MiB. Two halves of a "
        "device need more when their peaks meet; they are timed as if memory were no object. Medians of "
        f"{len(first)} rounds, with the least and the most; shares are of the same round.\n"
    )
    header = ("way", "makespan", "of one at a time", "waited, all trials", "same losses")
    return common.table(header, rows) + "\n" + said


def _range(values: Mapping[str, float], form: str, unit: str = "") -> str:
    """Return a median with the least and the most, as text."""
    return f"{values['median']:{form}}{unit} ({values['min']:{form}} to {values['max']:{form}})"


def main() -> int:
    """Measure, and write the results."""
    parser = common.parser(__doc__)
    parser.add_argument("--iterations", type=int, help="of each trial (default: 24)")
    parser.add_argument("--rounds", type=int, help="runs of each way, in turns (default: 2)")
    parser.add_argument("--share", type=float, default=0.75, help="the budget, of two smaller peaks (default: 0.75)")
    parser.add_argument(
        "--together", type=float, default=3.0, help="so many peaks Ray hands out with Zico (default: 3)"
    )
    options = parser.parse_args()
    options.iterations = options.iterations or (4 if options.smoke else 24)
    options.rounds = options.rounds or (1 if options.smoke else 2)
    told = {name: getattr(options, name) for name in ("iterations", "rounds", "share", "together")}
    result = common.document("ray_trials", QUESTION, {**told, "region": REGION, "ray": ray.__version__})
    os.environ.update(OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="2")
    with tempfile.TemporaryDirectory(prefix="zr-") as directory:
        result |= ways(Runs(options, Path(directory)), options)
    common.write(result, shown(result), common.output_directory(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
