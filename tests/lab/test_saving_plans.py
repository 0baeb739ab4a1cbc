"""Plans that drop tensors and move others: the iteration that an order makes, and every planner before the judges."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.saving_cases import graphs, training
from cpu.support.swap_cases import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.base.units import MIB
from zico.lab.saving import graphs as of_graphs
from zico.lab.saving import portfolio, schedules
from zico.lab.saving.combined import Capuchin, Echo, Recomputing
from zico.lab.saving.flow import Flow, FlowOptions
from zico.lab.saving.graphs import graph_of
from zico.lab.saving.judge import judge
from zico.lab.saving.portfolio import Portfolio, dearness, flat, peak_of, pruned
from zico.lab.saving.rewriting import order_of, rewritten
from zico.planning.packing.problem import NoPlan
from zico.planning.saving.mixed import SavePlan, SavePlanner, Swapping
from zico.planning.saving.planner import Planner
from zico.planning.saving.problem import READ, WRITE, Link, SwapProblem, no_swaps
from zico.planning.saving.recomputation import Graph
from zico.planning.saving.registry import SAVE_PLANNERS, SWAP_PLANNERS, save_planner

if TYPE_CHECKING:
    from collections.abc import Sequence

SECONDS = 60.0
OURS = ("zico", "portfolio")
NAMES = [name for name in (*SAVE_PLANNERS, *SWAP_PLANNERS) if name not in ("bayes", "checkmate", "checkmate-lp")]


def of_graph(graph: Graph, sizes: Sequence[int], link: Link, limit: int | None = None) -> SwapProblem:
    """Return the iteration whose operations make one result each, held to its last reader, and have a graph's costs."""
    readers = [[op for op, inputs in enumerate(graph.inputs) if r in inputs] for r in range(len(graph))]
    tensors = [
        (sizes[op], op, max([op, *readers[op]]), {op: WRITE, **dict.fromkeys(readers[op], READ)})
        for op in range(len(graph))
    ]
    made = problem(list(graph.cost_ns), tensors, links=(link, link))
    return dataclasses.replace(made, limit_bytes=limit)


@given(graphs(), st.data())
@settings(max_examples=100, deadline=None)
def test_an_order_makes_the_iteration_that_its_judge_saw(graph: Graph, data: st.DataObject) -> None:
    """The new iteration holds and takes what the judge of schedules says; a plan knows whose tensors it moves."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=len(graph), max_size=len(graph)))
    iteration = of_graph(graph, sizes, Link())
    known = graph_of(iteration)
    limit = data.draw(st.integers(known.least_bytes, max(known.least_bytes, iteration.peak_bytes)))
    name = data.draw(st.sampled_from(("dtr", "chen")))
    answer = schedules.plan(name, known, limit, SECONDS)
    order = tuple(range(len(known))) if isinstance(answer, NoPlan) else answer.order
    judged, made = of_graphs.judge(known, order), rewritten(iteration, known, order)
    assert made.problem.peak_bytes == judged.peak_bytes
    assert made.problem.period_ns == judged.cost_ns
    assert made.again.sum() == len(order) - len(known)
    assert (made.problem.size_bytes == iteration.size_bytes[made.tensor]).all()
    each = dataclasses.replace(no_swaps("all"), tensor=np.arange(len(made.problem)))
    assert np.array_equal(SavePlan("all", 0.0, each, order).moved(iteration, known), made.tensor)


def test_what_runs_again_finds_its_source() -> None:
    """A result whose only reader runs again lives until then, though it was free before."""
    graph = Graph((1,) * 6, (0,) * 6, ((), (), (), (0,), (1,), (3,)), n_forward=0)
    iteration = of_graph(graph, [1, 1, 1, 2, 3, 1], Link())
    order = (0, 1, 2, 3, 4, 3, 5)
    made = rewritten(iteration, graph_of(iteration), order).problem
    assert made.free_op[0] == 5
    assert made.peak_bytes == of_graphs.judge(graph_of(iteration), order).peak_bytes == 5


def test_an_iteration_without_repeats_is_the_given_one() -> None:
    """Times, tensors and uses are the same, those over the boundary, too."""
    iteration = problem([3, 5, 4], [(7, 1, 3, (1, 3)), (2, -1, -1, (0, 2))], tail=6)
    made = rewritten(iteration, graph_of(iteration), ()).problem
    for field in dataclasses.fields(SwapProblem):
        assert np.array_equal(getattr(made, field.name), getattr(iteration, field.name)), field.name


def test_dropping_goes_by_the_longest_pause_and_makes_sources_first() -> None:
    """Of a chain, two results in a row are dropped behind the forward pass and made again in order."""
    iteration = training(2)
    graph = graph_of(iteration)
    assert order_of(graph, [1]) == (0, 1, 2, 3, 4, 5, 1, 6, 7)
    assert order_of(graph, [0, 1]) == (0, 1, 2, 3, 4, 5, 0, 1, 6, 7)
    frozen = dataclasses.replace(graph, until=tuple(range(len(graph))))
    assert order_of(frozen, [1]) is None


@given(graphs(), st.data())
@settings(max_examples=100, deadline=None)
def test_pruning_keeps_what_the_judge_says(graph: Graph, data: st.DataObject) -> None:
    """Of an order with repeats, those go that the limit does not need; the compiled peak is the judge's."""
    dropped = data.draw(st.sets(st.sampled_from(range(len(graph.size_bytes))))) if graph.size_bytes else set()
    of, order = flat(graph), order_of(graph, [r for r in dropped if graph.readers[r]])
    is_dropped = np.isin(np.arange(len(graph.size_bytes)), list(dropped))
    if order is None or len(order) > portfolio._MOST_RUNS * len(graph):
        assert peak_of(of, is_dropped) == -1
        return
    before = of_graphs.judge(graph, order)
    assert peak_of(of, is_dropped) == before.peak_bytes
    dear = dearness(graph, order, by_worth=data.draw(st.booleans()))
    left = pruned(of, order, before.peak_bytes, dear, float("inf"))
    after = of_graphs.judge(graph, left, before.peak_bytes)
    assert after.broken is None
    assert after.cost_ns <= before.cost_ns
    assert pruned(of, order, 1 << 50, dear, float("inf")) == tuple(range(len(graph)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("speed", [1e8, 4e9, 1e14])
def test_every_plan_is_believed_and_keeps_the_limit(name: str, share: float, speed: float) -> None:
    """Links slow, of the pace of computing, and fast; a planner has a plan that both judges believe, or none."""
    iteration = training(link=Link(speed))
    limited = dataclasses.replace(iteration, limit_bytes=int(share * iteration.peak_bytes))
    graph = graph_of(limited)
    answer = save_planner(name).plan(limited, graph, SECONDS)
    if isinstance(answer, NoPlan):
        assert name not in (*OURS, "flow", "dtr"), answer.detail
        return
    result, _ = judge(limited, graph, answer)
    assert result.is_good, (result.rule, result.detail)
    assert result.peak_bytes <= (limited.limit_bytes or 0)
    assert (answer.runs_again(graph) > 0) <= (name in SAVE_PLANNERS)


def overhead(planner: SavePlanner, limited: SwapProblem) -> float:
    """Return what a planner's plan costs; infinite if it has none."""
    graph = graph_of(limited)
    answer = planner.plan(limited, graph, SECONDS)
    return float("inf") if isinstance(answer, NoPlan) else judge(limited, graph, answer)[0].overhead


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.6, 0.5])
@pytest.mark.parametrize("speed", [1e8, 1e9, 4e9, 1e14])
def test_ours_are_never_behind_the_best_of_the_others(share: float, speed: float) -> None:
    """By no more than a hundredth of an iteration; the planner of jobs is not asked for parts of tensors."""
    iteration = training(link=Link(speed))
    limited = dataclasses.replace(iteration, limit_bytes=int(share * iteration.peak_bytes))
    costs = {name: overhead(save_planner(name), limited) for name in NAMES}
    in_parts = costs.pop("flow")
    zico, portfolio = (costs.pop(name) for name in OURS)
    assert zico <= min(costs.values()) + 0.01
    assert portfolio <= min(in_parts, *costs.values()) + 0.01


def test_with_links_of_no_use_cheap_results_are_made_again_and_with_fast_ones_nothing_is() -> None:
    """Capuchin and ours choose by what it costs."""
    slow, fast = (training(link=Link(speed)) for speed in (1e7, 1e14))
    for planner in (Planner(), Portfolio(), Capuchin()):
        answers = []
        for iteration in (slow, fast):
            limited = dataclasses.replace(iteration, limit_bytes=int(0.75 * iteration.peak_bytes))
            answer = planner.plan(limited, graph_of(limited), SECONDS)
            assert not isinstance(answer, NoPlan)
            answers.append(answer)
        assert len(answers[0].swaps) == 0 < len(answers[0].order)
        assert len(answers[1].swaps) > 0 == len(answers[1].order)


def test_echo_makes_no_dear_operation_again() -> None:
    """Only what is not a convolution or a product runs again."""
    iteration = training()
    limited = dataclasses.replace(iteration, limit_bytes=int(0.7 * iteration.peak_bytes))
    graph = graph_of(limited)
    answer = Echo().plan(limited, graph, SECONDS)
    assert not isinstance(answer, NoPlan)
    made = rewritten(limited, graph, answer.order)
    names = limited.op_names or ()
    assert {names[op] for op in made.op[made.again].tolist()} == {"relu"}


def test_what_a_schedule_does_not_free_is_seen() -> None:
    """A tensor that the iteration holds longer than its last reader is held; the schedule is planned for less."""
    iteration = training(4)
    late = iteration.free_op.copy()
    late[:4] = iteration.n_ops - 1
    longer = dataclasses.replace(iteration, free_op=late)
    limited = dataclasses.replace(longer, limit_bytes=int(0.9 * longer.peak_bytes))
    answer = Recomputing("dtr").plan(limited, graph_of(limited), SECONDS)
    if not isinstance(answer, NoPlan):
        assert judge(limited, graph_of(limited), answer)[0].peak_bytes <= (limited.limit_bytes or 0)


def test_a_link_far_behind_brings_nothing_back_before_it_has_left() -> None:
    """Parts that leave late are asked back when they have been asked out."""
    iteration = training(24, 4000, ns=100, link=Link(5e8, 3))
    for share in (0.8, 0.65, 0.5, 0.4):
        limited = dataclasses.replace(iteration, limit_bytes=int(share * iteration.peak_bytes))
        planner = Swapping(Flow(options=FlowOptions(region_bytes=1000, least_bytes=1)))
        answer = planner.plan(limited, graph_of(limited), SECONDS)
        assert not isinstance(answer, NoPlan)
        result, _ = judge(limited, graph_of(limited), answer)
        assert result.is_good, (share, result.rule, result.detail)


def test_unknown_planners_are_named_with_those_there_are() -> None:
    """One sentence."""
    with pytest.raises(ConfigError, match="'magic' is no planner: give one of zico, portfolio, capuchin"):
        save_planner("magic")


def moved(name: str, share: float, iteration: SwapProblem) -> list[int]:
    """Return the tensors that a planner of swaps lets leave, in the order in which they are asked out."""
    limited = dataclasses.replace(iteration, limit_bytes=int(share * iteration.peak_bytes))
    answer = save_planner(name).plan(limited, graph_of(limited), SECONDS)
    assert not isinstance(answer, NoPlan), answer.detail
    return answer.swaps.tensor[answer.swaps.out.swap].tolist()


def test_published_rules_choose_what_they_say() -> None:
    """FlashNeuron and LMS take what was made first, TFLMS what has the longest way, which here are the same ones."""
    iteration = training(6, link=Link(1e14))
    for name in ("flashneuron", "tflms", "lms"):
        assert moved(name, 0.75, iteration)[:3] == [0, 1, 2], name
    uneven = problem(
        [10] * 8,
        [(100, 0, 5, {0: WRITE, 5: READ}), (100, 1, 7, {1: WRITE, 7: READ}), (100, 2, 6, {2: WRITE, 6: READ})],
        links=(Link(1e14), Link(1e14)),
    )
    wide = dataclasses.replace(uneven, size_bytes=uneven.size_bytes * MIB)
    assert moved("tflms", 0.7, wide) == [1]
    assert moved("flashneuron", 0.7, wide) == [0, 1]
    assert moved("lms", 0.7, wide) == [0, 1]


def test_vdnn_takes_inputs_of_convolutions_first_and_then_all() -> None:
    """As much as it must, in these steps; the outputs of the last layer are no inputs."""
    iteration = training(6, link=Link(1e14))
    assert moved("vdnn", 1.0, iteration) == []
    assert moved("vdnn", 0.8, iteration) == [1, 3, 5, 7, 9], "what convolutions read"
    assert moved("vdnn", 0.5, iteration) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10][: len(moved("vdnn", 0.5, iteration))]
