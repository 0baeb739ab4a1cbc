"""Whether a plan that drops and moves keeps all rules, and what it costs. Shares no code with planners."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.lab.saving import graphs
from zico.lab.saving.replay import History, Replay, replay_with_history
from zico.lab.saving.rewriting import rewritten

if TYPE_CHECKING:
    from zico.planning.saving.mixed import SavePlan
    from zico.planning.saving.problem import SwapProblem
    from zico.planning.saving.recomputation import Graph


def judge(problem: SwapProblem, graph: Graph, plan: SavePlan) -> tuple[Replay, History]:
    """Return what an iteration costs beside the given one, and all that happens; or which rule breaks.

    The rule ``again`` is the judge's of ``recomputation``; the others are those of ``replay``.
    """
    if not plan.order:
        return replay_with_history(problem, plan.swaps)
    broken = graphs.judge(graph, plan.order).broken
    if broken is not None:
        none = Replay("again", broken, 0.0, 0.0, 0, 0.0, 0.0, 0, repeats=False)
        return none, History([], [], [0], [])
    result, history = replay_with_history(rewritten(problem, graph, plan.order).problem, plan.swaps)
    return dataclasses.replace(result, overhead=result.duration_ns / max(problem.period_ns, 1) - 1), history
