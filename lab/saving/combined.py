"""Published planners that drop some tensors and move others: Capuchin, SuperNeurons and Echo.

* ``capuchin``: swaps by free time as long as they cost nothing; then, of the next swap and the best
  recomputation, the one that costs less. Source: X. Peng et al., "Capuchin: Tensor-based GPU Memory
  Management for Deep Learning" (ASPLOS 2020), section 4, algorithms 1 and 2. Its feedback is the
  executor's (``zico.swap.learning``).
* ``superneurons``: results of cheap layers are made again. Those of convolutions and products move
  and nothing else does. The least recently used ones go first, which are those made first.
  Source: L. Wang et al., "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural
  Networks" (PPoPP 2018), sections 3.3 and 3.4. Recomputation is the speed-centric one.
* ``echo``: results of cheap operations are made again where that lowers the peak of the whole graph;
  nothing moves. Source: B. Zheng et al., "Echo: Compiler-based GPU Memory Footprint Reduction for
  LSTM RNN Training" (ISCA 2020), section 4.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from zico.base.units import format_bytes
from zico.lab.saving import schedules
from zico.lab.saving.autoswap import AutoSwap, Candidates, Limited, begin_ns, doa, end_ns
from zico.lab.saving.replayer import Replayer
from zico.lab.saving.rewriting import order_of, rewritten
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.clock import now_s
from zico.planning.saving.mixed import SavePlan, straight
from zico.planning.saving.problem import WRITE, no_swaps

if TYPE_CHECKING:
    from zico.lab.saving.autoswap import Gaps
    from zico.lab.saving.replayer import FastReplay
    from zico.planning.saving.problem import SwapPlan, SwapPlanner, SwapProblem
    from zico.planning.saving.recomputation import Graph, Order


_TRIES = 4


class Recomputing:
    """A planner of ``schedules``: nothing moves."""

    def __init__(self, name: str) -> None:
        self.name = name

    def plan(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return its schedule, for a lower limit where tensors of the iteration end later than their last reader."""
        began_s = now_s()
        limit = asked = limit_of(problem)
        for _ in range(_TRIES):
            answer = schedules.plan(self.name, graph, limit, began_s + deadline_s - now_s())
            if isinstance(answer, NoPlan):
                return answer
            made = rewritten(problem, graph, answer.order).problem
            if made.peak_bytes <= asked:
                took_s = now_s() - began_s
                swaps = no_swaps(self.name)
                proved = answer.optimal and limit == asked
                return SavePlan(self.name, took_s, swaps, answer.order, optimal=proved)
            limit -= made.peak_bytes - asked
        detail = f"its schedules hold {format_bytes(made.peak_bytes)} when tensors end where the iteration ends them"
        return NoPlan(Reason.NOT_FOUND, self.name, now_s() - began_s, detail)


def limit_of(problem: SwapProblem) -> int:
    """Return what a plan is to keep below."""
    return problem.peak_bytes if problem.limit_bytes is None else problem.limit_bytes


class Mixing:
    """What planners that drop and move share: they are asked where a limit lies below the peak, and timed."""

    name: str

    def plan(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return a plan, or why there is none."""
        began_s = now_s()
        if problem.peak_bytes <= limit_of(problem):
            return straight(no_swaps(self.name))
        found = self.found(problem, graph, deadline_s)
        return dataclasses.replace(found, planner=self.name, elapsed_s=now_s() - began_s)

    def found(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return a plan, or what is in the way."""
        raise NotImplementedError


def with_swaps(
    planner: SwapPlanner, problem: SwapProblem, graph: Graph, order: Order, deadline_s: float
) -> tuple[float, SavePlan | NoPlan]:
    """Return how long an iteration takes in which this runs again and the planner moves the rest, and that plan."""
    made = rewritten(problem, graph, order).problem
    answer = no_swaps(planner.name) if made.peak_bytes <= limit_of(problem) else planner.plan(made, deadline_s)
    if isinstance(answer, NoPlan):
        return math.inf, answer
    replayed = Replayer(made).replay(answer)
    if not replayed.is_good:
        return math.inf, NoPlan(Reason.NOT_FOUND, planner.name, 0.0, f"the plan breaks the rule {replayed.rule}")
    runs = order if len(order) > len(graph) else ()
    return replayed.duration_ns, SavePlan(planner.name, 0.0, answer, runs)


def replayed(problem: SwapProblem, graph: Graph, plan: SavePlan) -> FastReplay:
    """Return what an iteration takes by a plan, as planners see it."""
    made = rewritten(problem, graph, plan.order).problem if plan.order else problem
    return Replayer(made).replay(plan.swaps)


# -- Capuchin --------------------------------------------------------------------------------------


class Capuchin(Mixing):
    """Free swaps, then whatever costs less."""

    name = "capuchin"

    def found(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return a plan, or what is in the way."""
        order = order_of(graph, self.dropped(problem, graph, now_s() + deadline_s / 2))
        if order is None:
            return NoPlan(Reason.NOT_FOUND, self.name, 0.0, "no order")
        return with_swaps(AutoSwap("doa"), problem, graph, order, deadline_s)[1]

    @staticmethod
    def dropped(problem: SwapProblem, graph: Graph, end_s: float) -> set[int]:
        """Return the results that are cheaper to make again than to move, as far as it gets by ``clock.now_s``."""
        gaps = Candidates(problem).gaps
        free_ns = doa(problem, gaps)
        result_of = {tensor: result for result, tensor in enumerate(graph.tensor)}
        waiting = np.argsort(-free_ns, kind="stable").tolist()
        moved: list[int] = []
        load, n, limit = problem.load_bytes.copy(), problem.n_ops, limit_of(problem)
        again = {
            i: result
            for i, tensor in enumerate(gaps.tensor.tolist())
            if (result := result_of.get(tensor)) is not None and can_return(graph, result)
        }
        dropped: set[int] = set()
        while waiting and load.max() > limit and now_s() < end_s:
            i = waiting[0]
            waits_ns = _late_ns(problem, gaps.take(np.array([*moved, i])))
            if waits_ns > 0 and again:
                cost = {k: _again_ns(graph, result, dropped) for k, result in again.items()}
                best = max(cost, key=lambda k: gaps.size_bytes[k] / max(cost[k], 1))
                if cost[best] < waits_ns - _late_ns(problem, gaps.take(np.array(moved, np.int64))):
                    i = best
                    dropped.add(again[i])
            if again.get(i) not in dropped:
                moved.append(i)
            waiting.remove(i)
            again.pop(i, None)
            load[np.arange(gaps.first[i], gaps.last[i] + 1) % n] -= gaps.size_bytes[i]
        return dropped


def _late_ns(problem: SwapProblem, gaps: Gaps) -> int:
    """Return by how much the last transfers are late: no link carries two at a time."""
    out_ns = back_ns = 0
    left_ns = np.zeros(len(gaps), np.int64)
    for i in np.argsort(gaps.first, kind="stable").tolist():
        out_ns = max(out_ns, int(end_ns(problem, gaps.first[i] - 1))) + int(gaps.out_ns[i])
        left_ns[i] = out_ns
    late_ns, back_ns = 0, 1 << 62
    for i in np.argsort(-gaps.last, kind="stable").tolist():
        back_ns = min(back_ns, int(begin_ns(problem, gaps.last[i] + 1))) - int(gaps.back_ns[i])
        late_ns = max(late_ns, int(left_ns[i]) - back_ns)
    return late_ns


def can_return(graph: Graph, result: int) -> bool:
    """Tell whether a result can be made again for its last reader, from results that may be made again, too."""
    readers = graph.readers[result]
    return bool(readers) and graph.may_run(graph.maker[result], readers[-1])


def _again_ns(graph: Graph, result: int, dropped: set[int]) -> int:
    """Return what making a result again costs, with all that is dropped on the way."""
    around, ahead = {graph.maker[result]}, [result]
    while ahead:
        for source in graph.inputs[graph.maker[ahead.pop()]]:
            if source in dropped and graph.maker[source] not in around:
                around.add(graph.maker[source])
                ahead.append(source)
    return sum(graph.cost_ns[op] for op in around)


# -- by the kind of operation ----------------------------------------------------------------------

_DEAR = ("conv", "mm", "matmul", "linear", "einsum", "attention", "lstm", "gru", "embedding", "dot")
"""In names of operations that cost more than they write; all others are cheap to run again."""


def _is_dear(name: str) -> bool:
    return any(part in name.lower() for part in _DEAR)


def cheap(problem: SwapProblem, graph: Graph) -> list[int]:
    """Return the results of cheap operations that can be made again, in the order of making."""
    if problem.made_by is not None:
        dear = {r for r, tensor in enumerate(graph.tensor) if _is_dear(problem.made_by[tensor])}
    else:
        names = problem.op_names or ("",) * problem.n_ops
        nodes = {node for op, node in enumerate(graph.op_of) if _is_dear(names[op])}
        dear = {r for r, maker in enumerate(graph.maker) if maker in nodes}
    return [r for r in range(len(graph.maker)) if r not in dear and can_return(graph, r)]


def _made_by(problem: SwapProblem, tensor: int) -> str:
    """Return the name of what made a tensor; empty: it was there before, or nobody knows."""
    if problem.made_by is not None:
        return problem.made_by[tensor]
    first = problem.access_begin[tensor]
    if problem.op_names is None or first == problem.access_begin[tensor + 1] or problem.persistent[tensor]:
        return ""
    is_written = bool(problem.access_kind[first] & WRITE)
    return problem.op_names[int(problem.access_op[first]) % problem.n_ops] if is_written else ""


class _Offloading(Limited):
    """Results of dear operations, those that were made first first; nothing else."""

    name = "superneurons"

    def found(self, problem: SwapProblem, limit_bytes: int, end_s: float) -> SwapPlan | str:  # noqa: ARG002
        """Return a plan, or what is in the way; it never takes long."""
        candidates = Candidates(problem)
        gaps = candidates.gaps
        candidates.gaps = gaps.take(np.array([_is_dear(_made_by(problem, i)) for i in gaps.tensor.tolist()], bool))
        return candidates.plan(-candidates.gaps.first.astype(float), limit_bytes, self.name)


class SuperNeurons(Mixing):
    """All cheap layers again; results of the others move, those that were made first first."""

    name = "superneurons"

    def found(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return a plan, or what is in the way."""
        order = order_of(graph, cheap(problem, graph))
        if order is None:
            return NoPlan(Reason.NOT_FOUND, self.name, 0.0, "an operation would run again that must not")
        return with_swaps(_Offloading(), problem, graph, order, deadline_s)[1]


def worth(graph: Graph, result: int) -> float:
    """Return the bytes that a result has for each nanosecond of its operation."""
    return graph.size_bytes[result] / max(graph.cost_ns[graph.maker[result]], 1)


class Echo(Mixing):
    """Cheap operations again, those that lower the peak."""

    name = "echo"

    def found(self, problem: SwapProblem, graph: Graph, deadline_s: float) -> SavePlan | NoPlan:
        """Return a plan, or what is in the way."""
        end_s, limit = now_s() + deadline_s, limit_of(problem)
        best: tuple[int, Order] = problem.peak_bytes, ()
        dropped: list[int] = []
        for result in sorted(cheap(problem, graph), key=lambda r: -worth(graph, r)):
            if best[0] <= limit or now_s() > end_s:
                break
            order = order_of(graph, [*dropped, result])
            peak = None if order is None else rewritten(problem, graph, order).problem.peak_bytes
            if order is not None and peak is not None and peak <= best[0]:
                dropped.append(result)
                best = peak, order
        if best[0] > limit:
            detail = f"without {len(dropped)} results of cheap operations {format_bytes(best[0])} are left"
            return NoPlan(Reason.NOT_FOUND, self.name, 0.0, detail)
        return SavePlan(self.name, 0.0, no_swaps(self.name), best[1])
