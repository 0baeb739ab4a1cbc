"""Plans that drop some tensors and move others: an order with repeats, and swaps of the iteration that it makes.

An order of operations in which some run again is an iteration of its own. What is dropped ends
behind its last reader there, and what is made again begins as another tensor.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zico.planning.packing.problem import NoPlan

if TYPE_CHECKING:
    from zico.planning.saving.problem import Int64s, SwapPlan, SwapPlanner, SwapProblem
    from zico.planning.saving.recomputation import Graph, Order


@dataclasses.dataclass(frozen=True, eq=False)
class SavePlan:
    """What runs again, and what moves in the iteration that this makes. Believe it once the judge has."""

    planner: str
    elapsed_s: float
    swaps: SwapPlan
    order: Order = ()
    """The graph's operations with repeats; nothing: none runs again. The swaps are of the iteration that it makes."""
    optimal: bool = False
    """The planner has proved that no plan of its kind costs less."""

    def runs_again(self, graph: Graph) -> int:
        """Return how many operations run again in an iteration."""
        return max(0, len(self.order) - len(graph))

    def moved(self, problem: SwapProblem, graph: Graph) -> Int64s:
        """Return the problem's tensor that each swap moves: one that is made again is several of the iteration's."""
        times = np.ones(len(problem), np.int64)
        if self.order:
            runs = np.bincount(np.array(self.order), minlength=len(graph))
            times[np.array(graph.tensor, np.int64)] = runs[np.array(graph.maker, np.int64)]
        return np.repeat(np.arange(len(problem)), times)[self.swaps.tensor]


def straight(swaps: SwapPlan) -> SavePlan:
    """Return the plan that makes these swaps and drops nothing."""
    return SavePlan(swaps.planner, swaps.elapsed_s, swaps, optimal=swaps.optimal)


class SavePlanner(Protocol):
    """Something that plans what a job with too little memory drops and moves."""

    name: str

    def plan(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return a plan that keeps the problem's limit, or why there is none.

        Args:
            problem: The iteration, with a limit.
            graph: Its operations, as far as they can run again.
            deadline_s: After so many seconds a planner gives the best that it has, or nothing.
        """
        ...


class Swapping:
    """A planner of swaps: nothing is dropped."""

    def __init__(self, planner: SwapPlanner) -> None:
        self.name = planner.name
        self.planner = planner

    def plan(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:  # noqa: ARG002
        """Return its plan."""
        answer = self.planner.plan(problem, deadline_s)
        return answer if isinstance(answer, NoPlan) else straight(answer)
