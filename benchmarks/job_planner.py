"""Are plans of the planner in jobs as good as the portfolio of published planners, and how soon are they made?

Iterations are those of published nets on a roofline of the card that their papers used, with PCIe
3.0, and those that jobs of PyTorch have seen on this machine: with the tier's own links, and with
links that move the peak in 2.5 and in 12 iterations, as a GPU's do. A judge that shares no code
with planners replays each plan. Planners' time is the processor's. The portfolio has five seconds
of it, and moves whole tensors, as jobs do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import swap

from zico.lab.saving.flow import Flow
from zico.lab.saving.graphs import graph_of
from zico.lab.saving.judge import judge
from zico.lab.saving.portfolio import Portfolio
from zico.planning.packing.problem import NoPlan
from zico.planning.saving import clock
from zico.planning.saving.planner import Planner
from zico.planning.saving.problem import READ, WRITE, Link, SwapProblem
from zico.swap.observed import problem_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.planning.saving.recomputation import Graph

QUESTION = "Are plans of the planner in jobs as good as the portfolio's, and how soon are they made?"
SHARES = (0.6, 0.5, 0.4)
PORTFOLIO_S = 5.0
LEVEL = 1.01
RATIOS = {"fast": 2.5, "slow": 12.0}
"""Iterations in which a link moves the peak."""
LATENCY = 2e-4
"""Of an iteration, that a transfer takes besides."""
JOBS = {
    "ResNet": ("400MiB", "examples/digits_resnet.py", "--iterations", "6", "--quiet"),
    "GPT": ("400MiB", "benchmarks/gpt_job.py", "--batch", "16", "--iterations", "6", "--quiet"),
}
"""A limit, about the peak, and what runs within half of it."""
JOB_S = 600.0
LAYERS = 1250
"""Of a chain of 5,000 operations."""


def chain(layers: int, size: int = 4 << 20, ns: int = 1_000_000) -> SwapProblem:
    """Return layers of a dear operation and a cheap one, and their backward pass, with a link that moves all in three.

    The backward pass of a layer reads what both have made.
    """
    n = 4 * layers
    uses = []
    for i in range(layers):
        uses.append((2 * i, {2 * i: WRITE, 2 * i + 1: READ, n - 1 - 2 * i: READ}))
        reads = [2 * i + 2] if i < layers - 1 else []
        uses.append((2 * i + 1, {2 * i + 1: WRITE, **dict.fromkeys([*reads, n - 2 - 2 * i], READ)}))
    durations = np.array([ns, ns // 50] * (2 * layers))
    link = Link(2 * layers * size / (3 * durations.sum() / 1e9), 10_000)
    return SwapProblem(
        op_start_ns=np.cumsum(durations) - durations,
        op_duration_ns=durations,
        period_ns=int(durations.sum()),
        size_bytes=np.full(2 * layers, size),
        alloc_op=np.array([op for op, _ in uses]),
        free_op=np.array([max(each) for _, each in uses]),
        access_begin=np.cumsum([0, *(len(each) for _, each in uses)]),
        access_op=np.array([op for _, each in uses for op in each]),
        access_kind=np.array([kind for _, each in uses for kind in each.values()]),
        out=link,
        back=link,
    )


def seen_by_jobs() -> Iterator[tuple[str, SwapProblem, Graph]]:
    """Yield what jobs have seen of an iteration, by each kind of links."""
    for name, (limit, script, *arguments) in JOBS.items():
        with tempfile.TemporaryDirectory(prefix="zico-") as directory:
            found = Path(directory) / "seen.pickle"
            command = [sys.executable, __file__, "--seen", str(found), str(common.ROOT / script), *arguments]
            pool = (
                "--budget",
                "1GiB",
                "--region",
                "1MiB",
                "--name",
                "job",
                "--limit",
                f"job={int(limit[:-3]) // 2}MiB",
            )
            subprocess.run(
                [*common.ZICO, "run", "--quiet", *pool, "--save", "zico", shlex.join(command)],
                check=True,
                timeout=JOB_S,
                stdout=subprocess.DEVNULL,
            )
            seen, rates = pickle.loads(found.read_bytes())  # noqa: S301 - from our own job
        own = problem_of(seen, rates)
        yield f"{name}, own links", own.problem, own.graph
        for kind, ratio in RATIOS.items():
            problem = own.problem
            link = Link(problem.peak_bytes / ratio / (problem.period_ns / 1e9), int(LATENCY * problem.period_ns))
            yield f"{name}, {kind} links", dataclasses.replace(problem, out=link, back=link), own.graph


def see(path: str, script: str, *arguments: str) -> None:
    """Run a script as a job, and write down the iteration that its first plan is for."""
    from zico.swap import schedule as swap_schedule

    def note(_planner: object, seen: object, _limit: int, rates: object) -> None:
        Path(path).write_bytes(pickle.dumps((seen, rates)))

    swap_schedule._chosen_by = note  # type: ignore[assignment]  # noqa: SLF001 - nothing is to be planned
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def planned(planner: Planner | Portfolio, limited: SwapProblem, graph: Graph) -> dict[str, Any]:
    """Return what a plan costs, or why there is none."""
    began_s = time.thread_time()
    answer = planner.plan(limited, graph, PORTFOLIO_S)
    took_s = time.thread_time() - began_s
    if isinstance(answer, NoPlan):
        return {"plan_s": took_s, "why": answer.detail}
    result, _ = judge(limited, graph, answer)
    return {
        "plan_s": took_s,
        "duration_ns": result.duration_ns if result.is_good else None,
        "rule": result.rule,
        "moved_bytes": result.moved_bytes,
        "again": answer.runs_again(graph),
    }


def measure(problem: SwapProblem, graph: Graph) -> dict[str, Any]:
    """Return what both planners' plans cost at each share of the peak."""
    rows = []
    for share in SHARES:
        limited = dataclasses.replace(problem, limit_bytes=int(share * problem.peak_bytes))
        row = {"share": share, "planner": planned(Planner(), limited, graph)}
        with clock.by_processor_time():
            row["portfolio"] = planned(Portfolio(Flow("flow-whole")), limited, graph)
        rows.append(row)
    figures = {"operations": problem.n_ops, "tensors": len(problem), "graph": len(graph)}
    return {**figures, "peak_bytes": problem.peak_bytes, "period_ns": problem.period_ns, "rows": rows}


def text_of(result: dict[str, Any]) -> str:
    """Return the result as a table, and in how many cases the planner is behind."""
    rows, ratios = [], []
    for name, figures in result["iterations"].items():
        for row in figures["rows"]:
            costs = [row[by].get("duration_ns") for by in ("planner", "portfolio")]
            if not any(costs):
                continue
            ratio = "-"
            if all(costs):
                ratios.append(costs[0] / costs[1])
                ratio = f"{ratios[-1]:.3f}"
            shown = [f"{cost / figures['period_ns']:.3f}" if cost else "-" for cost in costs]
            took = [f"{row[by]['plan_s']:.2f}" for by in ("planner", "portfolio")]
            rows.append([name, str(figures["operations"]), f"{row['share']:.0%}", *shown, ratio, *took])
    behind = sum(ratio > LEVEL for ratio in ratios)
    said = (
        f"Of {len(ratios)} cases in which both have a plan, the planner's iteration takes more than {LEVEL - 1:.0%} "
        f"longer in {behind}, and {LEVEL - 1:.0%} less in {sum(ratio < 2 - LEVEL for ratio in ratios)}. "
        "Times are in iterations with all memory; `-`: no plan. Cases without a plan of either are left out."
    )
    header = [
        "iteration",
        "operations",
        "of the peak",
        "planner",
        "portfolio",
        "ratio",
        "s to plan",
        "s of the portfolio",
    ]
    return f"{said}\n\n{common.table(header, rows)}"


def main() -> None:
    """Measure and write."""
    if sys.argv[1:2] == ["--seen"]:
        see(*sys.argv[2:])
        return
    parser = common.parser(__doc__)
    parser.add_argument(
        "--iteration", action="append", help="only those whose names begin so; the others stay as they are"
    )
    options = parser.parse_args()
    directory = common.output_directory(options)
    result = common.document("job_planner", QUESTION, {"shares": SHARES, "portfolio_s": PORTFOLIO_S})
    result["iterations"] = {}
    known = directory / "job_planner.json" if directory is not None else None
    if options.iteration and known is not None and known.exists():
        result["iterations"] = json.loads(known.read_text())["iterations"]
    for name, problem, graph in _iterations(smoke=options.smoke):
        if options.iteration and not name.startswith(tuple(options.iteration)):
            continue
        common.note(f"{name}: {problem.n_ops} operations")
        result["iterations"][name] = {"commit": result["commit"], **measure(problem, graph)}
        common.write(result, text_of(result), directory)


def _iterations(*, smoke: bool) -> Iterator[tuple[str, SwapProblem, Graph]]:
    if smoke:
        problem = swap.stand_in()
        yield "stand-in", problem, graph_of(problem)
        return
    problem = chain(LAYERS)
    yield "chain", problem, graph_of(problem)
    yield from seen_by_jobs()
    for name, _, problem in swap.zoo_problems():
        yield name, problem, graph_of(problem)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
