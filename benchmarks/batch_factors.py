"""How much larger a batch fits on the card of the paper, by each published planner and by ours?

One training step of each net is traced without the hardware at two batches. What lies between and
beyond them is linear: bytes and times of an operation grow with the batch, or stay. A batch fits if
the planner has a plan for the card's memory that the judge finds good, at whatever cost. Nothing
has run on a GPU, so workspaces of cuDNN are not counted; the papers' batches are those of their
frameworks, which keep other tensors than PyTorch does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import swap
import zoo

from zico.base.units import GIB
from zico.lab.saving.files import swap_iteration
from zico.lab.saving.graphs import graph_of
from zico.lab.saving.judge import judge
from zico.lab.simulator.roofline import device_model
from zico.planning.packing.problem import NoPlan
from zico.planning.saving.clock import by_processor_time
from zico.planning.saving.problem import Link
from zico.planning.saving.registry import save_planner

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.planning.saving.problem import SwapProblem

QUESTION = "How much larger a batch fits on the card of the paper, by each published planner and by ours?"
OURS = ("zico", "portfolio")
DEADLINE_S = 6.0
LIMIT = 1 << 14
"""Largest batch that is asked for."""
NEAR = 0.02
"""Of a batch: no closer is looked."""
NVLINK = Link(60e9, 10_000)
"""POWER9 to V100, three bricks of NVLink 2: 75 GB/s a direction, four fifths of it reached."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure of a paper."""

    planner: str
    net: str
    script: str
    function: str
    batches: tuple[int, int]
    """At which it is traced."""
    device: str
    published: str
    link: Link = swap.PCIE
    arguments: tuple[tuple[str, int], ...] = ()


ROWS = (
    Row("capuchin", "VGG-16", "vgg", "vgg16", (64, 128), "p100-16gb", "mean 5.49, most 9.27"),
    Row("capuchin", "ResNet-50", "resnet", "resnet50", (64, 128), "p100-16gb", "mean 5.49, most 9.27"),
    Row("capuchin", "DenseNet-121", "densenet", "densenet121", (32, 64), "p100-16gb", "mean 5.49, most 9.27"),
    Row(
        *("capuchin", "BERT-base", "transformer", "bert_base", (16, 32), "p100-16gb", "64 to 450: 7.0"),
        arguments=(("length", 128),),
    ),
    Row("tflms", "ResNet-50", "resnet", "resnet50", (64, 128), "v100-16gb", "4.7", NVLINK),
    Row("tflms", "3D U-Net", "unet", "unet3d", (2, 4), "v100-16gb", "2.0", NVLINK),
    Row("flashneuron", "ResNet-50", "resnet", "resnet50", (64, 128), "v100-16gb", "12.4 to 14.0, other nets"),
    Row(
        *("flashneuron", "BERT-base", "transformer", "bert_base", (16, 32), "v100-16gb", "12.4 to 14.0, other nets"),
        arguments=(("length", 128),),
    ),
)


# -- a net at any batch ----------------------------------------------------------------------------


def at_any_batch(row: Row) -> Callable[[int], SwapProblem]:
    """Return what makes the problem of a batch, from the traces of two."""
    model = zoo.Model(row.net, row.script, row.function, "", 0, "", {})
    low, high = (
        swap_iteration(
            zoo.zoo_trace(model, row.device, batch=batch, **dict(row.arguments)), out=row.link, back=row.link
        ).problem
        for batch in row.batches
    )
    return lambda batch: between(low, high, row.batches, batch)


def between(low: SwapProblem, high: SwapProblem, batches: tuple[int, int], batch: int) -> SwapProblem:
    """Return the problem of a batch, on the line through two.

    Raises:
        ValueError: The two differ in more than sizes and times.
    """
    for field in ("alloc_op", "free_op", "access_begin", "access_op", "access_kind"):
        if not np.array_equal(getattr(low, field), getattr(high, field)):
            message = f"batches {batches} differ in {field}: take two that run the same operations"
            raise ValueError(message)
    share = (batch - batches[0]) / (batches[1] - batches[0])
    size, duration = (
        np.maximum(np.ceil(a + share * (b - a)), 1).astype(np.int64)
        for a, b in ((low.size_bytes, high.size_bytes), (low.op_duration_ns, high.op_duration_ns))
    )
    duration[low.op_duration_ns == 0] = 0
    return dataclasses.replace(
        low,
        size_bytes=size,
        op_duration_ns=duration,
        op_start_ns=np.cumsum(duration) - duration,
        period_ns=int(duration.sum()),
    )


def largest(fits: Callable[[int], bool], least: int = 1) -> int:
    """Return a batch that fits, of which none fits that is larger by ``NEAR``, if what fits is all that is smaller."""
    if not fits(least):
        return 0
    below, above = least, 2 * least
    while above <= LIMIT and fits(above):
        below, above = above, 2 * above
    while above - below > max(1, int(NEAR * below)):
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


# -- measuring -------------------------------------------------------------------------------------


def plan_at(problem: SwapProblem, planner: str, limit_bytes: int) -> float | None:
    """Return what a plan for a limit costs, over an iteration with all memory; ``None``: there is no good one."""
    limited = dataclasses.replace(problem, limit_bytes=limit_bytes)
    if limited.least_bytes > limit_bytes:
        return None
    graph = graph_of(limited)
    with by_processor_time():
        answer = save_planner(planner).plan(limited, graph, DEADLINE_S)
    if isinstance(answer, NoPlan):
        return None
    result, _ = judge(limited, graph, answer)
    return result.overhead if result.is_good else None


def measure(row: Row) -> dict[str, Any]:
    """Return the largest batches without a plan, by the planner, by ours, and those no plan can exceed."""
    make, memory = at_any_batch(row), device_model(row.device).memory_bytes
    plain = largest(lambda batch: make(batch).peak_bytes <= memory)
    most = largest(lambda batch: make(batch).least_bytes <= memory, plain)
    batches = {}
    for planner in (row.planner, *OURS):
        batch = largest(functools.partial(_fits, make, planner, memory), plain)
        batches[planner] = {"batch": batch, "overhead": plan_at(make(batch), planner, memory)}
    return {"plain": plain, "most": most, "batches": batches, **_named(row)}


def _fits(make: Callable[[int], SwapProblem], planner: str, memory: int, batch: int) -> bool:
    return plan_at(make(batch), planner, memory) is not None


def _named(row: Row) -> dict[str, Any]:
    return {"planner": row.planner, "net": row.net, "device": row.device, "published": row.published}


VDNN = Row("vdnn", "VGG-16, batch 256", "vgg", "vgg16", (128, 256), "titan-x", "18 % loss of time")


def vdnn(row: Row) -> dict[str, Any]:
    """Return what VGG-16 at batch 256 loses in 12 GB, by vDNN and by ours."""
    problem, memory = at_any_batch(row)(256), device_model(row.device).memory_bytes
    overheads = {planner: plan_at(problem, planner, memory) for planner in ("vdnn", *OURS)}
    return {"peak_bytes": problem.peak_bytes, "overheads": overheads, **_named(row)}


FOOTPRINTS = (
    ("echo", "GNMT, 4 layers", "1.89 mean, 3.13 most, for LSTM nets"),
    ("echo", "RHN", "1.89 mean, 3.13 most, for LSTM nets"),
    ("superneurons", "ResNet-50", "the peak of the largest layer"),
)
STEP_SHARE = 0.05


def footprint(planner: str, net: str, published: str) -> dict[str, Any]:
    """Return how far down the peak a planner goes, in steps of a twentieth, and what that costs."""
    trace = zoo.zoo_trace(zoo.ZOO[net])
    problem = swap_iteration(trace, out=swap.PCIE, back=swap.PCIE).problem
    found: dict[str, Any] = {"factor": 1.0, "overhead": 0.0}
    for step in range(1, round(1 / STEP_SHARE)):
        share = 1 - step * STEP_SHARE
        overhead = plan_at(problem, planner, int(share * problem.peak_bytes))
        if overhead is None:
            break
        found = {"factor": 1 / share, "overhead": overhead}
    least = problem.peak_bytes / problem.least_bytes
    return {"planner": planner, "net": net, "published": published, "most": least, **found}


def text_of(result: dict[str, Any]) -> str:
    """Return the result as tables."""
    rows = []
    for each in result["batches"]:
        cells = []
        for planner in (each["planner"], *OURS):
            if planner not in each["batches"]:
                cells.append("")
                continue
            found = each["batches"][planner]
            cost = "" if found["overhead"] is None else f", +{found['overhead']:.0%} time"
            cells.append(f"{found['batch']}, {found['batch'] / each['plain']:.1f}x{cost}")
        rows.append(
            [
                *(each["planner"], each["net"], each["device"], f"{each['plain']}", *cells),
                *(f"{each['most']}, {each['most'] / each['plain']:.1f}x", each["published"]),
            ]
        )
    mean = statistics.mean(
        each["batches"]["capuchin"]["batch"] / each["plain"]
        for each in result["batches"]
        if each["planner"] == "capuchin"
    )
    header = ["planner", "net", "card", "no plan", "its batch", *OURS, "no plan can exceed", "published"]
    saved = result["vdnn"]
    costs = "; ".join(
        f"`{name}` {'has no plan' if cost is None else f'loses {cost:.0%}'}"
        for name, cost in saved["overheads"].items()
    )
    down = []
    for each in result["footprints"]:
        factors = f"{each['factor']:.2f}x", f"{each['overhead']:.0%}", f"{each['most']:.2f}x"
        down.append([each["planner"], each["net"], *factors, each["published"]])
    parts = (*result["batches"], saved, *result["footprints"])
    commits = {f"{each['planner']}, {each['net']}": each["commit"][:12] for each in parts}
    said = ""
    if len(set(commits.values())) > 1:
        said = "Commits: " + "; ".join(f"{part} `{commit}`" for part, commit in commits.items()) + ".\n\n"
    return (
        f"Largest batches on the papers' cards, simulated. Nothing: not asked.\n\n{said}"
        + common.table(header, rows)
        + f"\n\nCapuchin's mean factor: {mean:.2f} (published: 5.49).\n\n"
        + f"{saved['net']} needs {saved['peak_bytes'] / GIB:.1f} GiB. In the {saved['device']}'s memory {costs} of "
        + f"time (published: {saved['published']}).\n\n"
        + "How far down a planner takes the peak:\n\n"
        + common.table(["planner", "net", "factor", "more time", "no plan can exceed", "published"], down)
    )


def main() -> None:
    """Measure and write."""
    parser = common.parser(__doc__)
    parser.add_argument("--net", action="append", help="only this one; the others stay as they are in the results")
    parser.add_argument("--again", action="store_true", help=common.AGAIN)
    options = parser.parse_args()
    directory = common.output_directory(options)
    if options.again:
        common.write_again("batch_factors", text_of, directory)
        return
    rows: tuple[Row, ...] = ROWS
    nets: tuple[tuple[str, str, str], ...] = FOOTPRINTS
    large = VDNN
    if options.smoke:
        small = Row("capuchin", "VGG16 (CIFAR)", "vgg", "vgg_cifar", (8, 16), "gtx-1080-ti", "none")
        rows, nets, large = (small,), (), dataclasses.replace(small, planner="vdnn")
    result = common.document("batch_factors", QUESTION, {"deadline_s": DEADLINE_S, "near": NEAR})
    known = json.loads((common.RESULTS / "batch_factors.json").read_text()) if options.net else {}
    result |= {name: known[name] for name in ("note",) if name in known}

    def measured(planner: str, net: str, among: list[dict[str, Any]], measure: Callable[[], Any]) -> dict[str, Any]:
        """Measure, unless it was asked for other nets alone."""
        if options.net and net not in options.net:
            return next(each for each in among if (each["planner"], each["net"]) == (planner, net))
        common.note(f"{planner}, {net}")
        return {"commit": result["commit"], **measure()}

    result["batches"] = [
        measured(row.planner, row.net, known.get("batches", []), functools.partial(measure, row)) for row in rows
    ]
    result["vdnn"] = measured(large.planner, large.net, [known.get("vdnn", {})], functools.partial(vdnn, large))
    result["footprints"] = [
        measured(planner, net, known.get("footprints", []), functools.partial(footprint, planner, net, published))
        for planner, net, published in nets
    ]
    common.write(result, text_of(result), directory)


if __name__ == "__main__":
    main()
