"""What does paging with learned prefetch bring on a GPU, by the simulator, beside what was published?

The zoo's training steps on a model of a V100 whose memory is a share of their peak: on demand, with
DeepUM's parts one after another, with ours, and beside swapping on demand (LMS) and by a fixed rule
(vDNN). Then the chain's length, the tables' sizes, what names an execution, and what a fault costs,
each alone. ``--only rivals`` puts DeepUM's six rivals and OC-DNN beside it: those that page by the
pager's tables, the planners by the judge of their plans.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import common
import numpy as np

from zico.base.units import KIB
from zico.lab.packing.caching import reserved_apart, reserved_by_caching
from zico.lab.saving.files import swap_iteration
from zico.lab.saving.graphs import graph_of
from zico.lab.saving.judge import judge
from zico.lab.simulator.lms_vdnn import lms, tensors_of, vdnn
from zico.lab.simulator.paging_simulation import Device, Paging
from zico.lab.simulator.paging_workload import Naming, Workload, workload
from zico.lab.simulator.points import LATENCY_NS
from zico.paging.layout import ALL, APART, BLOCK_BYTES, DEEPUM, DEGREE, PREEVICT, PREFETCH, TUNE, Sizes
from zico.planning.packing.from_trace import iteration_problem
from zico.planning.packing.problem import NoPlan
from zico.planning.saving.clock import by_processor_time
from zico.planning.saving.problem import Link
from zico.planning.saving.registry import save_planner

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from zico.lab.simulator.lms_vdnn import Tensors
    from zico.planning.saving.problem import SwapProblem
    from zico.trace.events import Trace

QUESTION = "What does paging with learned prefetch bring on a GPU, by the simulator, beside what was published?"
RIVALS = "How much faster than paging on demand are DeepUM, its rivals and ours on a GPU? (simulated)"
DEVICE = "v100-32gb"
SHARES = (0.8, 0.7, 0.6, 0.5)
SWEPT = 0.6
"""The share at which one thing is changed at a time."""
ITERATIONS = 14
TUNED_ITERATIONS = 44
"""So many, where the degree is tuned: all trials and a few more."""
PARTS = {
    "on demand": 0,
    "prefetch": PREFETCH,
    "+ pre-evict": PREFETCH | PREEVICT,
    "+ invalidate": DEEPUM,
}
"""As published, one more each."""
OURS = "ours"
PUBLISHED = {"prefetch": -45.6, "+ pre-evict": -63.7, "+ invalidate": -66.7}
"""Per cent of the time on demand, mean over models. Source: DeepUM (ASPLOS 2023), figure 10."""
RIVAL_SHARES = (0.6, 0.2)
"""Sentinel's paper keeps a fifth of the peak in fast memory."""
LAYERS = (1, 4)
"""Executions that OC-DNN's advice looks ahead: an operation, and about as many as a convolution's layer has."""
INTERVALS = (4, 8, 16, 32, 64)
"""Executions of an interval of Sentinel's, of which trials choose."""
PLANNERS = {"AutoTM": "autotm", "SwapAdvisor": "swapadvisor", "Capuchin": "capuchin"}
"""Rivals whose plans a judge replays, by the names of ``--save``."""
PLAN_S = 10.0
"""Processor time for a plan."""
RIVALS_PUBLISHED = {
    "on demand": "1",
    "LMS": "2.8",
    "vDNN": "2.0",
    "AutoTM": "3.6",
    "SwapAdvisor": "2.0",
    "Capuchin": "3.9",
    "Sentinel": "4.6",
    "DeepUM": "4.5",
    "OC-DNN": "up to 1.9",
}
"""Times faster than unified memory on demand. Source: DeepUM's figure 13, read off, geometric means over four nets in
16 GB; LMS: its figure 9, 3.06 over 1.11, other nets in 32 GB. DeepUM took all but LMS from Sentinel's paper. OC-DNN:
its own paper."""
NEAREST = ("ResNet-110", "BERT-base", "DCGAN", "MobileNetV2")
"""Of the zoo, to the nets of that figure: ResNet-200 on CIFAR, BERT-large, DCGAN and MobileNet."""
DEGREES = (8, 16, 32, 64, 128, 256)
TABLES: tuple[dict[str, int], ...] = (
    *({"rows": rows} for rows in (128, 512, 2048, 8192)),
    *({"ways": ways} for ways in (1, 4)),
    *({"successors": successors} for successors in (1, 2, 8)),
)
DEVICES: dict[str, dict[str, Any]] = {
    "a batch is a block, 45 us": {},
    "a batch is 8 blocks": {"batch_blocks": 8},
    "a fault brings in 64 KiB": {"fault_bytes": 64 * KIB},
    "12 GB/s": {"copy_bytes_per_s": 12e9},
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model's iteration, as paging and as swapping see it."""

    name: str
    peak_bytes: int
    tensors: Tensors
    works: dict[Naming, Workload]
    apart: tuple[Workload, range]
    """The same with temporaries in blocks of their own, and these blocks."""
    problem: SwapProblem
    """The same for planners."""


def case_of(name: str, trace: Trace) -> Case:
    """Place a trace's iteration as PyTorch's caching allocator does, and cut it into blocks."""
    found = iteration_problem(trace)
    parts = (trace, found.life, found.iterations, found.iteration)
    offsets = reserved_by_caching(found.problem).offset_bytes
    works = {naming: workload(*parts, offsets, naming) for naming in Naming}
    offsets, temporaries = reserved_apart(found.problem, found.classes, BLOCK_BYTES)
    apart = workload(*parts, offsets, Naming.ARGUMENTS), temporaries
    link = Link(Device.copy_bytes_per_s, LATENCY_NS)
    problem = swap_iteration(trace, out=link, back=link).problem
    return Case(name, found.problem.peak_live_bytes, tensors_of(*parts), works, apart, problem)


# -- measuring -------------------------------------------------------------------------------------


def measure(
    case: Case,
    share: float,
    flags: int,
    *,
    naming: Naming = Naming.ARGUMENTS,
    degree: int = DEGREE,
    tables: dict[str, int] | None = None,
    iterations: int = ITERATIONS,
    **told: Any,  # noqa: ANN401 - of Device
) -> dict[str, Any]:
    """Simulate iterations; return the last one's figures, and all iterations' blocks that were missing."""
    work, kept = case.apart if flags & APART else (case.works[naming], range(0))
    sizes = Sizes(work.n_blocks, executions=int(work.name.max()) + 1, **(tables or {}))
    paging = Paging(work, Device(int(case.peak_bytes * share), **told), flags, degree, sizes, kept)
    began_s = time.process_time()
    runs = [paging.iterate() for _ in range(iterations)]
    figures = dataclasses.asdict(runs[-1])
    cpu_s = time.process_time() - began_s
    return figures | {
        "faults_by_iteration": [run.faults for run in runs],
        "cpu_s": cpu_s,
        "compute_ns": work.compute_ns,
    }


def ablation(case: Case, share: float) -> dict[str, Any]:
    """Measure DeepUM's parts, ours and the baselines."""
    row: dict[str, Any] = {name: measure(case, share, flags) for name, flags in PARTS.items()}
    row[OURS] = measure(case, share, ALL, iterations=TUNED_ITERATIONS, keeps_copies=1)
    return row | swapping(case, share)


def swapping(case: Case, share: float) -> dict[str, Any]:
    """Measure LMS and vDNN's two rules; ``None``, or ``fits`` is false: it cannot run."""
    row, copy = dict[str, Any](), Device.copy_bytes_per_s
    swapped = lms(case.tensors, int(case.peak_bytes * share), copy)
    row["LMS"] = None if swapped is None else dataclasses.asdict(swapped)
    for name, layers in (("vDNN all", ""), ("vDNN conv", "convolution")):
        static = vdnn(case.tensors, copy, layers=layers)
        fits = static.moved_bytes and static.peak_bytes <= case.peak_bytes * share
        row[name] = dataclasses.asdict(static) | {"fits": bool(fits)}
    return row


def rivals(case: Case, share: float) -> dict[str, Any]:
    """Measure DeepUM, its six rivals, OC-DNN and ours; ``None``: it cannot run in so little memory.

    OC-DNN asks for what the next layer uses and gives away what the last one used: a short degree.
    Sentinel moves for the next interval of layers, and trials choose how long one is. Its
    temporaries lie in blocks of their own, which stay.
    """
    row: dict[str, Any] = {"on demand": measure(case, share, 0)}
    swapped = swapping(case, share)
    row["LMS"] = swapped["LMS"]
    rules = [swapped[name] for name in ("vDNN all", "vDNN conv") if swapped[name]["fits"]]
    row["vDNN"] = _fastest(rules) if rules else None
    row |= {name: planned(case, share, planner) for name, planner in PLANNERS.items()}
    for name, flags in (("Sentinel, no placement", DEEPUM), ("Sentinel", DEEPUM | APART)):
        row[name] = _fastest([measure(case, share, flags, degree=interval) for interval in INTERVALS])
    row["DeepUM"] = measure(case, share, DEEPUM)
    row["OC-DNN"] = _fastest([measure(case, share, PREFETCH | PREEVICT, degree=layers) for layers in LAYERS])
    row[OURS] = measure(case, share, ALL, iterations=TUNED_ITERATIONS, keeps_copies=1)
    return row


def _fastest(trials: list[dict[str, Any]]) -> dict[str, Any]:
    return min(trials, key=lambda trial: trial["time_ns"])


def planned(case: Case, share: float, planner: str) -> dict[str, Any] | None:
    """Return what an iteration takes by a planner's plan, as the judge replays it; ``None``: there is no good one."""
    problem = dataclasses.replace(case.problem, limit_bytes=int(case.peak_bytes * share))
    graph = graph_of(problem)
    with by_processor_time():
        plan = save_planner(planner).plan(problem, graph, PLAN_S)
    if isinstance(plan, NoPlan):
        return None
    found, _ = judge(problem, graph, plan)
    time_ns = case.tensors.compute_ns + round(found.overhead * problem.period_ns)
    return {"time_ns": time_ns, "moved_bytes": found.moved_bytes} if found.is_good else None


def rivals_text(result: dict[str, Any]) -> str:
    """Return what they need over computing alone, and how much faster than paging on demand they are."""
    parts = []
    for share, found in result["rivals"].items():
        ways = list(next(iter(found.values())))
        rows = [
            [name, *(_ratio(row[way], row["on demand"]["compute_ns"]) for way in ways)] for name, row in found.items()
        ]
        nearest = [row for name, row in found.items() if name in NEAREST]
        rows.append(["times faster than on demand", *(_faster(list(found.values()), way) for way in ways)])
        rows.append(["the same, nets like DeepUM's", *(_faster(nearest, way) for way in ways)])
        rows.append(["published", *(RIVALS_PUBLISHED.get(way, "") for way in ways)])
        parts.append(f"Time over computing alone, memory {share} of the peak:\n")
        parts.append(common.table(("", *ways), rows))
    return "\n".join(parts) + _RIVALS_NOTE


_RIVALS_NOTE = """
`-`: it has no plan, or its rule does not fit. Geometric means are over the nets that it runs, `of` how many if not all.
Nets like DeepUM's are ResNet-110, BERT-base, DCGAN and MobileNetV2. Published are geometric means over four nets of its
figure 13, LMS over those of figure 9; OC-DNN's is of its own paper.

Planners, LMS and vDNN count bytes of tensors, and paging also counts fragments of blocks, which flatters the former. A
planner's iteration has no faults. OC-DNN is the faster of an operation and four ahead.
"""


def _ratio(one: dict[str, Any] | None, compute_ns: int) -> str:
    return "-" if one is None else f"{one['time_ns'] / compute_ns:.2f}"


def _faster(rows: list[dict[str, Any]], way: str) -> str:
    """Return how much faster than paging on demand a way is: a geometric mean over the nets that it runs."""
    ratios = [row["on demand"]["time_ns"] / row[way]["time_ns"] for row in rows if row[way] is not None]
    if not ratios:
        return "-"
    mean = f"{statistics.geometric_mean(ratios):.2f}"
    return mean if len(ratios) == len(rows) else f"{mean} ({len(ratios)} of {len(rows)})"


def sweeps(case: Case) -> dict[str, Any]:
    """Change one thing at a time."""
    found: dict[str, Any] = {"degree": {}, "furthest": {}, "tables": {}, "naming": {}, "device": {}}
    for degree in DEGREES:
        found["degree"][str(degree)] = measure(case, SWEPT, DEEPUM, degree=degree)
        found["furthest"][str(degree)] = measure(case, SWEPT, ALL & ~TUNE, degree=degree)
    for tables in TABLES:
        name = ", ".join(f"{key} {value}" for key, value in tables.items())
        found["tables"][name] = measure(case, SWEPT, DEEPUM, tables=tables)
    for naming in Naming:
        found["naming"][naming.value] = measure(case, SWEPT, DEEPUM, naming=naming)
        found["naming"][f"{naming.value}, ours"] = measure(case, SWEPT, ALL & ~TUNE, naming=naming, keeps_copies=1)
    for name, told in DEVICES.items():
        found["device"][name] = {part: measure(case, SWEPT, flags, **told) for part, flags in PARTS.items()}
    return found


# -- text ------------------------------------------------------------------------------------------


def change(row: dict[str, Any], name: str) -> float | None:
    """Return by how many per cent a way's time differs from that on demand; ``None``: it cannot run."""
    found = row[name]
    if found is None or not found.get("fits", True):
        return None
    return float(100 * (found["time_ns"] / row["on demand"]["time_ns"] - 1))


def means(rows: dict[str, dict[str, Any]], name: str) -> str:
    """Return the mean over the models on which a way runs, and how many these are if not all."""
    values = [value for row in rows.values() if (value := change(row, name)) is not None]
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):+.1f}"
    return mean if len(values) == len(rows) else f"{mean} ({len(values)} of {len(rows)})"


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    ways = (*PARTS, OURS, "LMS", "vDNN all", "vDNN conv")
    parts = ["![parts and missing blocks](paging.png)\n"]
    parts.append("Time of an iteration against paging on demand, per cent, mean over models:\n")
    rows = [
        [f"memory {share} of the peak", *(means(found, way) for way in ways[1:])] for share, found in _shares(result)
    ]
    rows.append(["published", *(f"{PUBLISHED[way]:+.1f}" if way in PUBLISHED else "" for way in ways[1:])])
    parts.append(common.table(("", *ways[1:]), rows))
    for share, found in _shares(result):
        parts.append(f"Time over computing alone, memory {share} of the peak; blocks missing in an iteration:\n")
        parts.append(common.table(("", *ways, "missing on demand", "published parts", OURS), _by_model(found, ways)))
    if result["sweeps"]:
        parts.append(_sweeps_text(result["sweeps"]))
    return "\n".join(parts)


def _shares(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(result["ablation"].items())


def _by_model(found: dict[str, Any], ways: tuple[str, ...]) -> list[list[str]]:
    rows = []
    for name, row in found.items():
        compute_ns = row["on demand"]["compute_ns"]
        runs = [None if change(row, way) is None else row[way]["time_ns"] / compute_ns for way in ways]
        times = ["-" if run is None else f"{run:.2f}" for run in runs]
        faults = [f"{row[way]['faults']:,}" for way in ("on demand", "+ invalidate", OURS)]
        rows.append([name, *times, *faults])
    return rows


def _sweeps_text(found: dict[str, dict[str, Any]]) -> str:
    """Return a table for each thing that was changed alone."""
    parts = [
        f"One thing changed at a time, memory {SWEPT} of the peak. Mean over models of time over computing alone:\n"
    ]
    for kind, title in (
        ("degree", "degree, published parts"),
        ("furthest", "degree, ours"),
        ("tables", "tables, published parts"),
        ("naming", "what names an execution, published parts and ours"),
    ):
        names = list(next(iter(found.values()))[kind])
        values = [f"{_over_computing([row[kind][name] for row in found.values()]):.3f}" for name in names]
        parts.append(common.table((title, *names), [["", *values]]))
    names = list(DEVICES)
    rows = []
    for name in names:
        some = {model: row["device"][name] for model, row in found.items()}
        demand = _over_computing([row["on demand"] for row in some.values()])
        rows.append([name, f"{demand:.2f}", *(means(some, way) for way in list(PARTS)[1:])])
    header = ("what a fault costs", "on demand / computing", *(f"{way}, %" for way in list(PARTS)[1:]))
    parts.append(common.table(header, rows))
    return "\n".join(parts)


def _over_computing(rows: list[dict[str, Any]]) -> float:
    return statistics.fmean(row["time_ns"] / row["compute_ns"] for row in rows)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the parts beside the published ones, and how missing blocks become fewer."""
    from matplotlib.figure import Figure

    from zico.report.picture import COLOURS, DPI

    figure = Figure(figsize=(12, 4.2), layout="constrained", facecolor="white")
    bars, curves = figure.subplots(1, 2)
    ways = [*list(PARTS)[1:], OURS]
    width = 0.8 / (len(result["ablation"]) + 1)
    for i, (share, rows) in enumerate(_shares(result)):
        values = [statistics.fmean(change(row, way) or 0.0 for row in rows.values()) for way in ways]
        bars.bar(np.arange(len(ways)) + i * width, values, width, color=COLOURS[i], label=f"memory {share} of the peak")
    at = np.arange(len(PUBLISHED)) + len(result["ablation"]) * width
    bars.bar(at, list(PUBLISHED.values()), width, color="#999999", label="published")
    bars.set_xticks(np.arange(len(ways)) + 0.4, ways)
    bars.set_ylabel("time against paging on demand, %")
    bars.set_ylim(-108, 0)
    bars.legend(fontsize=8, loc="lower left", ncols=2)
    for i, (share, rows) in enumerate(_shares(result)):
        some = [
            np.array(row[OURS]["faults_by_iteration"][:ITERATIONS]) / max(1, row["on demand"]["faults"])
            for row in rows.values()
        ]
        curves.plot(np.arange(ITERATIONS) + 1, np.mean(some, axis=0) * 100, color=COLOURS[i], label=f"memory {share}")
    curves.set_xlabel("iteration")
    curves.set_ylabel("missing blocks against paging on demand, %, ours")
    curves.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


# -- running ---------------------------------------------------------------------------------------


def stand_in() -> Case:
    """Return a case that is no model, for smoke runs: eight layers forward and back, and their weights."""
    from zico.trace.events import EVENT, NO_NAME, Kind, Origin, Trace

    rows = [(layer, 4 << 20, Kind.ALLOC) for layer in range(8)]
    for number in range(3):
        first = 8 * (number + 1)
        rows.append((number, 0, Kind.BEGIN))
        for layer in range(8):
            rows += [(first + layer, 16 << 20, Kind.ALLOC), (layer, 0, Kind.READ), (first + layer, 0, Kind.WRITE)]
            rows.append((NO_NAME, 2_000_000, Kind.OP))
        for layer in reversed(range(8)):
            rows += [(first + layer, 0, Kind.READ), (layer, 0, Kind.WRITE), (NO_NAME, 4_000_000, Kind.OP)]
            rows.append((first + layer, 0, Kind.FREE))
    events = [(i, tensor, size, 0, 0, kind, 0) for i, (tensor, size, kind) in enumerate(rows)]
    return case_of("no model", Trace(Origin(), np.array(events, EVENT), ("convolution",)))


def options_of() -> argparse.Namespace:
    """Return what the command line says."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", action="append", help="only this one of the zoo; may be repeated")
    parser.add_argument("--only", choices=("ablation", "sweeps", "rivals"), help="one part")
    return parser.parse_args()


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the models that are asked for, one after the other."""
    if options.smoke:
        yield stand_in()
        return
    import zoo

    for name in options.model or zoo.ZOO:
        case = case_of(name, zoo.zoo_trace(zoo.ZOO[name], DEVICE))
        common.note(f"{name}: {len(case.works[Naming.SHAPES])} executions, {case.peak_bytes / 2**30:.1f} GiB")
        yield case


def compare_rivals(options: argparse.Namespace) -> None:
    """Measure rivals, print and write; with ``--model``, what others stand in the results of this commit stay."""
    settings = {"device": DEVICE, "iterations": ITERATIONS, "plan_s": PLAN_S, "published": RIVALS_PUBLISHED}
    result = common.document("paging-rivals", RIVALS, settings)
    result["rivals"] = {str(share): {} for share in RIVAL_SHARES}
    directory = common.output_directory(options)
    known = directory / "paging-rivals.json" if directory is not None else None
    if options.model and known is not None and known.exists():
        before = json.loads(known.read_text())
        if before["commit"] == result["commit"]:
            result["rivals"] = before["rivals"]
    for case in cases_of(options):
        for share in RIVAL_SHARES:
            result["rivals"][str(share)][case.name] = rivals(case, share)
        common.write(result, rivals_text(result), directory)


def main() -> None:
    """Measure, print, write, draw."""
    options = options_of()
    if options.only == "rivals":
        compare_rivals(options)
        return
    settings = {"device": DEVICE, "shares": SHARES, "swept": SWEPT, "iterations": ITERATIONS, "published": PUBLISHED}
    result = common.document("paging", QUESTION, settings | {"tuned_iterations": TUNED_ITERATIONS})
    result |= {"ablation": {str(share): {} for share in SHARES}, "sweeps": {}}
    for case in cases_of(options):
        for share in SHARES:
            if options.only != "sweeps":
                result["ablation"][str(share)][case.name] = ablation(case, share)
        if options.only != "ablation":
            result["sweeps"][case.name] = sweeps(case)
    directory = common.output_directory(options)
    common.write(result, text_of(result), directory)
    if directory is not None and options.only != "sweeps":
        draw(result, directory / "paging.png")


if __name__ == "__main__":
    main()
