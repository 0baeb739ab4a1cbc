"""How far is Checkmate's two-phase rounding from the best schedule, and ours, on ten nets?

Training steps of nets that Checkmate's program can take (256 operations at most), on a roofline of
an A100. Every result may be computed again, and nothing moves. *Bound* is the relaxation of the
program; *program* what HiGHS has found in its time. Simulated: nothing has run on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import common
import zoo

from zico.lab.saving.checkmate import least_cost_ns
from zico.lab.saving.files import swap_iteration
from zico.lab.saving.graphs import graph_of, judge
from zico.lab.saving.schedules import Schedule, plan
from zico.planning.packing.problem import NoPlan
from zico.planning.saving.recomputation import Graph
from zico.planning.saving.registry import save_planner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.planning.saving.problem import SwapProblem

QUESTION = "How far is Checkmate's two-phase rounding from the best schedule, and ours, on ten nets?"
SHARES = (0.9, 0.75)
SECONDS = {"program": 60.0, "others": 30.0}
OURS = ("zico", "portfolio")
SLOW = 1.0
"""Bytes a second of a link over which nothing can move."""
NETS = {
    **{f"VGG{layers} (CIFAR)": ("vgg", "vgg_cifar", {"layers": layers}) for layers in (11, 13, 16, 19)},
    "VGG-16": ("vgg", "vgg16", {}),
    "ResNet-18 (CIFAR)": ("resnet", "resnet_cifar", {"layers": 18}),
    "DCGAN": ("dcgan", "dcgan", {}),
    "U-Net": ("unet", "unet", {}),
    "3D U-Net": ("unet", "unet3d", {}),
}


def chain(n: int) -> Graph:
    """Return ``n`` forward operations and ``n + 1`` that read them backwards, all of cost and size 1."""
    inputs: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(n + 1)]
    inputs += [(2 * n - i, i - 1) for i in range(n + 1, 2 * n + 1)]
    return Graph((1,) * (2 * n + 1), (1,) * (2 * n + 1), tuple(inputs), n)


def graphs(names: list[str]) -> Iterator[tuple[str, Graph, SwapProblem | None]]:
    """Yield name, graph and problem of each net, and a chain of 24 forward operations, which has no problem."""
    from swap import PCIE

    slow = dataclasses.replace(PCIE, bandwidth=SLOW)
    for name in names:
        script, function, arguments = NETS[name]
        trace = zoo.zoo_trace(zoo.Model(name, script, function, "", 0, "", {}), zoo.DEVICE, **arguments)
        problem = swap_iteration(trace, out=slow, back=slow).problem
        yield name, graph_of(problem), problem
    yield "a chain of 24", chain(24), None


def measure(graph: Graph, problem: SwapProblem | None, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return what schedules cost beside running everything once, for each share of the peak that can be kept."""
    straight = judge(graph, tuple(range(len(graph))))
    rows = []
    for share in shares:
        limit = int(share * (problem.peak_bytes if problem is not None else straight.peak_bytes))
        if limit < graph.least_bytes:
            continue
        bound = least_cost_ns(graph, limit, SECONDS["others"])
        row: dict[str, Any] = {"share": share, "bound": None if bound is None else bound / straight.cost_ns - 1}
        for name in ("checkmate", "checkmate-lp", "dtr", "chen"):
            found = plan(name, graph, limit, SECONDS["program" if name == "checkmate" else "others"])
            row[name] = None
            if isinstance(found, Schedule):
                row[name] = judge(graph, found.order, limit).cost_ns / straight.cost_ns - 1
                row[f"{name}_s"] = found.elapsed_s
        if problem is not None:
            limited = dataclasses.replace(problem, limit_bytes=limit)
            for name in OURS:
                ours = save_planner(name).plan(limited, graph, SECONDS["others"] / 6)
                row[name] = None
                if not isinstance(ours, NoPlan) and not len(ours.swaps):
                    row[name] = judge(graph, ours.order, limit).cost_ns / straight.cost_ns - 1
        rows.append(row)
    return rows


def _shown(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return ""
    return "-" if row[name] is None else f"{row[name]:.1%}"


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    columns = ("bound", "checkmate", "checkmate-lp", *OURS, "dtr", "chen")
    lines, gaps = [], []
    for net, found in result["nets"].items():
        for row in found["rows"]:
            shown = [_shown(row, name) for name in columns]
            lines.append((net, str(found["operations"]), f"{row['share']:.0%}", *shown))
            if None not in (row["checkmate"], row["checkmate-lp"]):
                gaps.append((1 + row["checkmate-lp"]) / (1 + row["checkmate"]) - 1)
    header = ("net", "operations", "of the peak", "bound", "program", "rounded", *OURS, "dtr", "chen")
    mean = sum(gaps) / max(len(gaps), 1)
    said = (
        f"How much more is computed than without a limit. Where both have a schedule ({len(gaps)} cases), the rounded "
        f"one costs {mean:.1%} more than the program's in the mean, {max(gaps, default=0):.1%} at most. `-`: no "
        f"schedule within {SECONDS['program']:.0f} s, or none without moving tensors; nothing: not asked."
    )
    return f"{said}\n\n{common.table(header, lines)}"


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    parser.add_argument("--again", action="store_true", help=common.AGAIN)
    options = parser.parse_args()
    if options.again:
        common.write_again("rounding", text_of, common.output_directory(options))
        return
    result = common.document("rounding", QUESTION, {"shares": SHARES, "seconds": SECONDS})
    result["nets"] = {}
    for name, graph, problem in graphs([] if options.smoke else list(NETS)):
        common.note(name)
        small = chain(8) if options.smoke else graph
        rows = measure(small, problem, SHARES[1:2] if options.smoke else SHARES)
        result["nets"][name] = {"operations": len(small), "rows": rows}
        common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
