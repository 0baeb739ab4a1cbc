"""How much longer does an iteration take with less memory than its peak, by each planner that drops or moves tensors?

Training steps of published nets on a roofline of the card that their papers used, with PCIe 3.0.
Each planner is asked for shares of the peak; its plan is replayed by judges that share no code with
planners. Planners' time is the processor's, so that other work on the machine changes little.
Nothing has run on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import common
import swap

from zico.lab.saving.graphs import graph_of
from zico.lab.saving.judge import judge
from zico.planning.packing.problem import NoPlan
from zico.planning.saving.clock import by_processor_time
from zico.planning.saving.registry import SAVE_PLANNERS, SWAP_PLANNERS, save_planner

if TYPE_CHECKING:
    from zico.planning.saving.problem import SwapProblem

QUESTION = "How much longer does an iteration take with less memory, by each planner that drops or moves tensors?"
SHARES = (0.8, 0.65, 0.5, 0.4)
LEFT_OUT = ("checkmate", "checkmate-lp", "flow-whole", "doa", "aoa", "wdoa")
"""Programs too large for whole nets, and what ``flow`` tries itself."""
PLANNERS = tuple(name for name in (*SWAP_PLANNERS, *SAVE_PLANNERS) if name not in LEFT_OUT)
OURS = ("zico", "portfolio")
DEADLINE_S = 10.0
LEVEL, AHEAD = 0.01, 0.05


def measure(problem: SwapProblem, planners: tuple[str, ...], deadline_s: float) -> dict[str, Any]:
    """Return what each planner's plan costs at each share of the peak; ``None``: it has none."""
    graph, rows = graph_of(problem), []
    for share in SHARES:
        limited = dataclasses.replace(problem, limit_bytes=int(share * problem.peak_bytes))
        row: dict[str, Any] = {"share": share, "overhead": {}, "again": {}, "moved_bytes": {}, "plan_s": {}}
        for name in planners:
            with by_processor_time():
                answer = save_planner(name).plan(limited, graph, deadline_s)
            row["plan_s"][name] = answer.elapsed_s
            row["overhead"][name] = None
            if not isinstance(answer, NoPlan):
                result, _ = judge(limited, graph, answer)
                if not result.is_good:
                    row["overhead"][name] = result.rule
                    continue
                row["overhead"][name] = result.overhead
                row["again"][name] = answer.runs_again(graph)
                row["moved_bytes"][name] = result.moved_bytes
        rows.append(row)
    figures = {"peak_bytes": problem.peak_bytes, "least_bytes": problem.least_bytes, "operations": problem.n_ops}
    return {**figures, "period_ns": problem.period_ns, "rows": rows}


def best_other(row: dict[str, Any]) -> tuple[str, float] | None:
    """Return the best planner that is not ours, and what its plan costs."""
    found = {name: cost for name, cost in row["overhead"].items() if name not in OURS and isinstance(cost, float)}
    name = min(found, key=lambda each: found[each], default=None)
    return None if name is None else (name, found[name])


def gains(rows: list[dict[str, Any]], ours: str) -> list[float]:
    """Return how much faster one of ours is than the best other, where some planner has a plan; 1: no other has."""
    found = []
    for row in rows:
        other, cost = best_other(row), row["overhead"][ours]
        if other is not None:
            found.append(((1 + other[1]) / (1 + cost) - 1) if isinstance(cost, float) else -1.0)
        elif isinstance(cost, float):
            found.append(1.0)
    return found


def _shown(row: dict[str, Any], name: str) -> str:
    if name not in row["overhead"]:
        return ""
    cost = row["overhead"][name]
    return f"{cost:.1%}" if isinstance(cost, float) else "-" if cost is None else f"{cost}!"


def text_of(result: dict[str, Any]) -> str:
    """Return the result as a table, and in how many cases ours are ahead or behind."""
    names, said = result["planners"], []
    for ours in OURS:
        asked = [row for figures in result["nets"].values() for row in figures["rows"] if ours in row["overhead"]]
        if not asked:
            continue
        found = gains(asked, ours)
        said.append(
            f"Of {len(found)} cases that some planner can do, `{ours}` is at least {AHEAD:.0%} faster than the best "
            f"other in {sum(gain >= AHEAD for gain in found)}, and more than {LEVEL:.0%} slower in "
            f"{sum(gain < -LEVEL for gain in found)}."
        )
    said.append("`-`: no plan; nothing: not asked. Iterations that ours alone can do count as ahead.")
    rows = [
        [net, f"{row['share']:.0%}", *(_shown(row, name) for name in names)]
        for net, figures in result["nets"].items()
        for row in figures["rows"]
    ]
    commits = {net: figures["commit"][:12] for net, figures in result["nets"].items()}
    if len(set(commits.values())) > 1:
        said.append("Commits: " + ", ".join(f"{net} `{commit}`" for net, commit in commits.items()) + ".")
    table = common.table(["net", "of the peak", *names], rows)
    return "How much longer an iteration takes than with all memory.\n\n" + "\n".join(said) + f"\n\n{table}"


def main() -> None:
    """Measure and write."""
    parser = common.parser(__doc__)
    parser.add_argument("--net", action="append", help="only this one; the others stay as they are in the results")
    parser.add_argument("--again", action="store_true", help=common.AGAIN)
    options = parser.parse_args()
    directory = common.output_directory(options)
    if options.again:
        common.write_again("save_nets", text_of, directory)
        return
    planners = ("swdoa", "dtr", *OURS) if options.smoke else PLANNERS
    result = common.document("save_nets", QUESTION, {"shares": SHARES, "deadline_s": DEADLINE_S})
    result |= {"planners": planners, "nets": {}}
    known = directory / "save_nets.json" if directory is not None else None
    if options.net and known is not None and known.exists():
        kept = json.loads(known.read_text())
        result |= {name: kept[name] for name in ("nets", "note") if name in kept}
    problems = [("stand-in", "", swap.stand_in())] if options.smoke else swap.zoo_problems()
    for name, _, problem in problems:
        if options.net and name not in options.net:
            continue
        common.note(f"{name}: {problem.n_ops} operations")
        result["nets"][name] = {"commit": result["commit"], **measure(problem, planners, DEADLINE_S)}
        common.write(result, text_of(result), directory)


if __name__ == "__main__":
    main()
