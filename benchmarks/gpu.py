"""What Zico costs and brings on a GPU: all of it in one run of less than eight minutes.

Driver operations, tensors through PyTorch, then jobs of ``gpu_job.py``: one alone with and without Zico, pairs in 60 to
100 % of the sum of their peaks. Throughput as in ``colocation.py``, one round of it. What a mark on the device costs is
``progress.py``'s. ``--device host`` runs tiny jobs on the host, to see that the script works. Results are written after
each part, so a run that is cut short leaves what it had.

Managed memory is not among the peers: it may never be asked for beyond what the card has free, and within that
nothing is paged.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import colocation
import colocation_text
import common
import heap
import together
from colocation import BASE, Configuration, Pair
from colocation_text import PLAIN
from together import Job

from zico.errors import ConfigError, DriverError
from zico.units import MIB

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

QUESTION = "What does Zico cost and bring on a GPU?"
REGION_BYTES = 64 * MIB
OPERATIONS = 32
"""Regions with which each driver operation is timed."""
GOAL_EQUAL = (70, 0.97)
GOAL_UNEQUAL = (80, 0.90)
"""Share of the sum of the peaks, and throughput over that with no budget."""
CURVE_SHARES = (60, 70, 80, 90, 100)
SHARES = (70, 80)
SERIAL_SHARE = 80


def pairs(device: str) -> list[Pair]:
    """Return the pairs; on the host they are tiny."""

    def job(model: str, batch: int, seed: int) -> Job:
        kind = "cpu" if device == "host" else "cuda"
        arguments = (model, "--batch", str(batch), "--device", kind, "--seed", str(seed))
        return Job(f"{model}-{seed}", "benchmarks/gpu_job.py", arguments)

    if device == "host":
        return [Pair("dcgan+dcgan", (job("dcgan", 4, 1), job("dcgan", 4, 2)), device)]
    return [
        Pair("resnet50+resnet50", (job("resnet50", 128, 1), job("resnet50", 128, 2)), device),
        Pair("bert_base+bert_base", (job("bert_base", 64, 1), job("bert_base", 64, 2)), device),
        Pair("gpt2+gnmt", (job("gpt2", 24, 1), job("gnmt", 512, 2)), device),
    ]


# -- the driver -----------------------------------------------------------------------------------------------------


def driver_operations() -> dict[str, Any]:
    """Return microseconds of each driver operation on one region, and what the device says of itself.

    Raises:
        ConfigError, DriverError: There is no device that Zico can use.
    """
    from zico.driver.cuda import CudaDriver

    times: dict[str, list[float]] = {}
    with contextlib.closing(CudaDriver(0)) as driver, driver.context.current(), contextlib.ExitStack() as stack:

        def timed(name: str, operation: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - its result
            begun_ns = time.perf_counter_ns()
            result = operation(*arguments)
            times.setdefault(name, []).append((time.perf_counter_ns() - begun_ns) / 1e3)
            return result

        window = stack.enter_context(timed("reserve", driver.reserve, OPERATIONS * REGION_BYTES))
        for i in range(OPERATIONS):
            offset = i * REGION_BYTES
            made = stack.enter_context(timed("create", driver.create_memory, REGION_BYTES, "benchmark"))
            descriptors = timed("export", driver.export_pieces, made)
            memory = stack.enter_context(timed("import", driver.import_pieces, descriptors, REGION_BYTES))
            timed("map", driver.map, window, offset, memory, 0, REGION_BYTES)
            timed("unmap", driver.unmap, window, offset, REGION_BYTES)
        facts = driver.facts
    return {
        "device": f"{facts.name}, driver for CUDA {facts.driver_text}",
        "microseconds": {name: common.spread(values) for name, values in times.items()},
    }


# -- jobs -----------------------------------------------------------------------------------------------------------


def alone(job: Job, device: str, options: Namespace) -> dict[str, Any]:
    """Return iterations per second of a job by itself, without Zico and with it, and whether the losses are equal."""
    extra = ("--seconds", str(options.seconds))
    deadline_s = options.seconds + together.MARGIN_S
    plain = together.run_plain([job], *extra, deadline_s=deadline_s)
    ours = together.run_zico([job], *extra, policy="zico", budget="none", deadline_s=deadline_s, device=device)
    n = min(len(plain.losses[0]), len(ours.losses[0]))
    return {
        "plain": plain.rates(options.warm_up)[0],
        "zico": ours.rates(options.warm_up)[0],
        "losses_compared": n,
        "losses_equal": plain.losses[0][:n] == ours.losses[0][:n],
        "report": ours.report,
    }


def measure_pair(pair: Pair, shares: Sequence[int], options: Namespace) -> dict[str, Any]:
    """Return one round of a pair: no budget, without Zico, each share, and one iteration at a time."""
    runner = colocation.Runner(pair, options.seconds, options.warm_up)
    done = []
    bounded = [Configuration("zico", share) for share in shares]
    others = [] if options.smoke else [Configuration(policy, SERIAL_SHARE) for policy in ("serial", "none")]
    for configuration in (BASE, Configuration(PLAIN), *bounded, *others):
        figures = runner.attempt(configuration)
        done.append({"label": configuration.label, **figures})
        said = figures.get("failed") or ", ".join(f"{rate:.2f}" for rate in figures["rates"]) + " it/s"
        common.note(f"{pair.name}: {configuration.label}: {said}")
    labels = [run["label"] for run in done]
    return {
        "peaks_bytes": runner.peaks_bytes,
        "summary": colocation.summarise([done], labels),
        "failures": [f"{run['label']}: {run['failed']}" for run in done if "failed" in run],
        "rounds": [done],
    }


# -- what is shown --------------------------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    parts = []
    if "driver" in result:
        operations = result["driver"]["microseconds"]
        rows = [
            (name, *(f"{spread[key]:.1f}" for key in ("median", "min", "max"))) for name, spread in operations.items()
        ]
        parts.append(f"{result['driver']['device']}\n")
        parts.append(common.table((f"{REGION_BYTES // MIB} MiB, us", "median", "min", "max"), rows))
    if "torch" in result:
        parts.append(heap.torch_table(result["torch"]))
    rows = [
        (
            name,
            *(f"{figures[kind]:.2f}" for kind in ("plain", "zico")),
            f"{figures['zico'] / figures['plain']:.3f}",
            f"{'same' if figures['losses_equal'] else 'DIFFER'} ({figures['losses_compared']})",
        )
        for name, figures in result["alone"].items()
    ]
    parts.append(common.table(("alone, it/s", "without Zico", "with", "ratio (goal 0.99)", "losses"), rows))
    parts.append(colocation_text.text_of(result))
    parts.extend(_goals(result))
    return "\n".join(parts)


def _goals(result: dict[str, Any]) -> list[str]:
    """Say of each pair whether its goal is reached."""
    said = []
    for name, pair in result["pairs"].items():
        first, second = name.split("+")
        share, goal = GOAL_EQUAL if first == second else GOAL_UNEQUAL
        found = pair["summary"].get(f"zico {share} %")
        if found is not None:
            value = found["throughput"]["median"]
            word = "reached" if value >= goal else "missed"
            said.append(f"* {name} at {share} %: {value:.3f}, goal {goal:.2f}: {word}\n")
    return said


def main() -> int:
    """Measure, print, write; returns the exit code, 1 if a run failed."""
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or host to try the script")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each job trains in each run")
    parser.add_argument("--warm-up", type=int, default=together.WARM_UP, help="iterations of each job left out")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.warm_up = 2.0, 1
    result = common.document("gpu", QUESTION, {key: getattr(options, key) for key in ("device", "seconds", "warm_up")})
    result["settings"]["policies"] = ["zico"]
    result |= {"alone": {}, "pairs": {}}
    directory = common.output_directory(options)

    def keep() -> None:
        if directory is not None:
            common.save(result, text_of(result), directory)

    if options.device != "host":
        try:
            result["driver"] = driver_operations()
        except (ConfigError, DriverError) as error:
            sys.exit(f"gpu.py measures on a CUDA device, and there is none that Zico can use: {error}")
        keep()
    rounds, batches = (1, 2) if options.smoke else (5, 20)
    result["torch"] = heap.measure_torch(rounds, batches, device=options.device)
    keep()
    chosen = pairs(options.device)
    for model, job in {job.arguments[0]: job for pair in chosen for job in pair.jobs}.items():
        result["alone"][model] = figures = alone(job, options.device, options)
        keep()
        common.note(f"{model} alone: {figures['zico'] / figures['plain']:.3f} of its speed without Zico")
    curves = (CURVE_SHARES, *[SHARES] * (len(chosen) - 1))
    for pair, shares in zip(chosen, curves, strict=True):
        result["pairs"][pair.name] = measure_pair(pair, (70,) if options.smoke else shares, options)
        keep()
    common.write(result, text_of(result), directory)
    if directory is not None:
        colocation_text.draw(result, directory / "gpu.png")
    return int(any(pair["failures"] for pair in result["pairs"].values()))


if __name__ == "__main__":
    sys.exit(main())
