"""How long does it take to plan the swaps of an iteration of thousands of tensors?

The models of the zoo with the most tensors, at four limits each: ``flow``, ours; ``swdoa``, one of the published
scores; ``bayes``, their mix, which plans 35 times. All is compiled before; the clock is the wall's, and the processor's
beside it. What the problem is made from, a trace, is read before.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import common
from swap import stand_in, zoo_problems

from zico.planners.plan import NoPlan
from zico.planners.swap.registry import swap_planner
from zico.planners.swap.replay import replay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zico.planners.swap.problem import SwapProblem

QUESTION = "How long does it take to plan the swaps of an iteration of thousands of tensors?"
FEWEST = 5000
SHARES = (0.8, 0.7, 0.6, 0.5)
GOALS_S = {"flow": 5.0, "swdoa": 5.0, "bayes": 60.0}
DEADLINE_S = 600.0
"""Of a plan: none of them is to be cut short."""


def measure(problem: SwapProblem) -> Iterator[dict[str, Any]]:
    """Yield what planning took for each limit and planner; ``overhead`` is ``None`` where there is no plan."""
    for share in SHARES:
        limited = dataclasses.replace(problem, limit_bytes=round(share * problem.peak_bytes))
        for name in GOALS_S:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            plan = swap_planner(name).plan(limited, DEADLINE_S)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            overhead = None if isinstance(plan, NoPlan) else replay(limited, plan).overhead
            yield {"share": share, "planner": name, "wall_s": wall_s, "cpu_s": cpu_s, "overhead": overhead}


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown: seconds by the wall and by the processor."""
    rows = []
    for model in result["models"]:
        for share in SHARES:
            found = {row["planner"]: row for row in model["plans"] if row["share"] == share}
            cells = [
                f"{row['wall_s']:.2f} ({row['cpu_s']:.2f})" + ("" if row["overhead"] is not None else ", no plan")
                for row in found.values()
            ]
            rows.append((model["name"], str(model["tensors"]), f"{share:.0%}", *cells))
    parts = [common.table(("model", "tensors", "limit", *(f"{name}, s (CPU)" for name in GOALS_S)), rows)]
    for name, goal_s in GOALS_S.items():
        worst_s = max(row["wall_s"] for model in result["models"] for row in model["plans"] if row["planner"] == name)
        said = "reached" if worst_s <= goal_s else "missed"
        parts.append(f"* {name}: {worst_s:.2f} s at most, goal {goal_s:.0f} s: {said}\n")
    return "\n".join(parts)


def main() -> None:
    """Measure, print, write."""
    parser = common.parser(__doc__)
    options = parser.parse_args()
    result = common.document("plan_time", QUESTION, {"shares": SHARES, "fewest_tensors": FEWEST})
    list(measure(stand_in()))
    problems = [("no model", "", stand_in())] if options.smoke else zoo_problems()
    models = result["models"] = []
    for name, _, problem in problems:
        if options.smoke or len(problem) >= FEWEST:
            common.note(f"{name}: {len(problem)} tensors")
            plans = list(measure(problem))
            models.append({"name": name, "tensors": len(problem), "operations": problem.n_ops, "plans": plans})
    common.write(result, text_of(result), common.output_directory(options))


if __name__ == "__main__":
    main()
