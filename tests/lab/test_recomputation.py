"""Schedules that run operations again: Checkmate's program against brute force, and every planner before the judge."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.saving_cases import graphs
from cpu.support.swap_cases import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError, ProblemError
from zico.lab.saving.checkmate import layers, least_cost_ns
from zico.lab.saving.graphs import graph_of, judge
from zico.lab.saving.schedules import PLANNERS, Schedule, plan
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.problem import PERSISTENT, READ, WRITE
from zico.planning.saving.recomputation import Graph

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 120.0


def chain(n: int) -> Graph:
    """Return ``n`` forward operations and ``n + 1`` that read them backwards, all of cost and size 1.

    Operation ``2 n - i`` reads forward operation ``i`` and the one before it.
    """
    inputs: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(n + 1)]
    inputs += [(2 * n - i, i - 1) for i in range(n + 1, 2 * n + 1)]
    ones = (1,) * (2 * n + 1)
    return Graph(ones, ones, tuple(inputs), n)


def after(graph: Graph, limit_bytes: int, held: frozenset[int], done: int) -> Iterator[tuple[int, frozenset[int], int]]:
    """Yield what can come next: its cost, the results that are then held, and the operations that have run."""
    for result in held:
        yield 0, held - {result}, done
    for op in range(min(done + 1, len(graph))):
        more = held.union(graph.results[op])
        size = sum(graph.size_bytes[result] for result in more) + graph.rest(done)
        if held.issuperset(graph.inputs[op]) and graph.may_run(op, done) and size <= limit_bytes:
            yield graph.cost_ns[op], more, max(done, op + 1)


def cheapest(graph: Graph, limit_bytes: int) -> int | None:
    """Return what the best schedule costs, by trying every set of results that may be held; ``None``: there is none.

    Operations run for the first time in the graph's order, as Checkmate has it.
    """
    numbered = itertools.count()
    ahead, known = [(0, 0, frozenset[int](), 0)], {(frozenset[int](), 0): 0}
    while ahead:
        cost, _, held, done = heapq.heappop(ahead)
        if done == len(graph):
            return cost
        if cost > known[held, done]:
            continue
        for more, *state in after(graph, limit_bytes, held, done):
            key = (state[0], state[1])
            if cost + more < known.get(key, 1 << 60):
                known[key] = cost + more
                heapq.heappush(ahead, (cost + more, next(numbered), *key))
    return None


@pytest.mark.parametrize(("budget", "runs"), [(10, 17), (8, 19), (6, 21), (5, 22)])
def test_the_chains_optimum_is_the_published_one(budget: int, runs: int) -> None:
    """8 forward and 9 further operations of unit cost and size: so many runs, and proved to be the least."""
    answer = plan("checkmate", chain(8), budget, SECONDS)
    assert isinstance(answer, Schedule)
    assert (judge(chain(8), answer.order, budget).cost_ns, answer.optimal) == (runs, True)


@given(graphs(), st.data())
@settings(max_examples=40, deadline=None)
def test_checkmate_is_as_good_as_brute_force(graph: Graph, data: st.DataObject) -> None:
    """Its program finds the cheapest schedule, or proves that there is none."""
    budget = data.draw(st.integers(0, sum(graph.size_bytes) + max(graph.rest_bytes, default=0)))
    answer, best = plan("checkmate", graph, budget, SECONDS), cheapest(graph, budget)
    if isinstance(answer, NoPlan):
        assert (answer.reason, best) == (Reason.INFEASIBLE, None)
    else:
        assert judge(graph, answer.order, budget) == (best, judge(graph, answer.order).peak_bytes, None)


@given(graphs(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_relaxation_is_a_bound(graph: Graph, data: st.DataObject) -> None:
    """No schedule costs less than the relaxation of the program, and with room for all that is what all costs once."""
    budget = data.draw(st.integers(graph.least_bytes, max(graph.least_bytes, sum(graph.size_bytes))))
    best, bound = cheapest(graph, budget), least_cost_ns(graph, budget, SECONDS)
    assert best is None or bound is not None
    assert best is None or bound <= best * (1 + 1e-6)
    roomy = least_cost_ns(graph, 2 * (sum(graph.size_bytes) + max(graph.rest_bytes, default=0)) + 1, SECONDS)
    assert roomy == pytest.approx(sum(graph.cost_ns))


@given(graphs(most_more=2), st.data())
@settings(max_examples=60, deadline=None)
def test_every_schedule_is_believed(graph: Graph, data: st.DataObject) -> None:
    """What a planner gives keeps the limit, by the judge, and costs no less than the best there is."""
    budget = data.draw(st.integers(graph.least_bytes, max(graph.least_bytes, sum(graph.size_bytes))))
    best = cheapest(graph, budget)
    for name in PLANNERS:
        answer = plan(name, graph, budget, SECONDS)
        if isinstance(answer, Schedule):
            judged = judge(graph, answer.order, budget)
            assert judged.broken is None
            assert best is not None
            assert judged.cost_ns >= best
        else:
            assert answer.reason is not Reason.INFEASIBLE or best is None


@given(graphs(most_more=2), st.data())
@settings(max_examples=200, deadline=None)
def test_layers_hold_no_less_than_their_operations(graph: Graph, data: st.DataObject) -> None:
    """An order of layers is one of operations at the same cost, with nothing broken, that holds as much at most."""
    limit = data.draw(st.integers(1, 3000))
    of_layers = layers(graph, limit)
    assert [op for part in of_layers.parts for op in part] == list(range(len(graph)))
    n = len(of_layers.graph)
    order = list(range(n))
    repeats = data.draw(st.lists(st.integers(0, n - 2), max_size=4)) if n > 1 else []
    for layer in repeats:
        order.insert(order.index(data.draw(st.integers(layer + 1, n - 1))), layer)
    judged = judge(of_layers.graph, order)
    if judged.broken is None:
        found = judge(graph, of_layers.expanded(tuple(order)))
        assert (found.cost_ns, found.broken) == (judged.cost_ns, None)
        assert found.peak_bytes <= judged.peak_bytes


def test_a_chain_with_a_view_for_every_reader_has_the_published_optimum() -> None:
    """Of 357 operations, 340 make nothing and read what is at hand: the program is one for 17 layers."""
    plain, size, n_views = chain(8), 1000, 20
    inputs: list[tuple[int, ...]] = []
    for reads in plain.inputs:
        inputs.append(tuple(r * (n_views + 1) for r in reads))
        inputs += [(len(inputs) - 1,)] * n_views
    unit = (1, *(0,) * n_views) * len(plain)
    graph = Graph(unit, tuple(size * each for each in unit), tuple(inputs), 8 * (n_views + 1))
    for name, most in (("checkmate", 21), ("checkmate-lp", 26)):
        answer = plan(name, graph, 6 * size, SECONDS)
        assert isinstance(answer, Schedule), answer
        judged = judge(graph, answer.order, 6 * size)
        assert judged.broken is None
        assert 21 <= judged.cost_ns <= most
        assert not answer.optimal, "of layers it is"


def test_layers_keep_apart_what_needs_more_at_once_and_what_must_not_run_again() -> None:
    """A backward operation that makes nothing has a layer's own reads; an update has a layer that may run again."""
    reads = Graph((1, 1, 1, 1), (100, 100), ((), (), (1,), (0,)), 2, maker=(0, 1))
    assert layers(reads, 1000).parts == ((0,), (1, 2), (3,))
    graph = Graph((1, 1, 1), (100,), ((), (0,), (0,)), 1, until=(3, 1, 3), maker=(0,))
    assert layers(graph, 1000).parts == ((0,), (1,), (2,))
    assert layers(dataclasses.replace(graph, until=(3, 3, 3)), 1000).parts == ((0, 1, 2),)


def test_that_there_is_no_schedule_is_proved() -> None:
    """Each operation fits, and none may run again: the program tells that from having found nothing."""
    graph = dataclasses.replace(chain(4), until=tuple(range(9)))
    answer = plan("checkmate", graph, 4, SECONDS)
    assert isinstance(answer, NoPlan)
    assert (answer.reason, cheapest(graph, 4)) == (Reason.INFEASIBLE, None)


@pytest.mark.parametrize("name", ["chen", "dtr"])
def test_planners_end_at_their_deadline(name: str) -> None:
    """Without any time DTR has nothing, and segments are what was tried first."""
    answer = plan(name, chain(9), 6, -1.0)
    assert isinstance(answer, NoPlan)


@pytest.mark.parametrize("name", ["checkmate", "checkmate-lp"])
def test_programs_of_hundreds_of_operations_end_near_their_deadline(name: str) -> None:
    """Writing a program down and handing it over count, too: the processor works for little more than the deadline."""
    n = 240
    backward = [tuple(sorted({n // 2 + k - 1, n // 2 - 1 - k})) for k in range(n // 2)]
    graph = Graph((1,) * n, (2,) * n, ((), *((i,) for i in range(n // 2 - 1)), *backward), n // 2)
    began_s = time.thread_time()
    answer = plan(name, graph, graph.least_bytes + 8, 0.3)
    assert time.thread_time() - began_s < 3.0
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.OUT_OF_TIME


def test_a_long_chain_is_made_again_without_recursion() -> None:
    """A large result leaves no room for that of 1,500 operations in a row, all of which then run again."""
    n = 1500
    inputs = (*((i - 1,) if i else () for i in range(n)), (), (n - 1,))
    answer = plan("dtr", Graph((1,) * (n + 2), (*(1,) * n, 10, 1), inputs, n), 10, SECONDS)
    assert isinstance(answer, Schedule)
    assert answer.order == (*range(n + 1), *range(n), n + 1)


def test_segments_are_those_of_the_paper() -> None:
    """A chain of nine in three segments: the last result of each stays, and each inside is made again once."""
    answer = plan("chen", chain(9), 6, SECONDS)
    assert isinstance(answer, Schedule)
    assert answer.order == (*range(11), 6, 7, 11, 12, 13, 3, 4, 14, 15, 16, 0, 1, 17, 18)


def test_what_is_full_of_dear_results_drops_cheap_ones() -> None:
    """Of two results as large as each other, DTR drops the one that costs less, though it was used later."""
    graph = Graph((9, 1, 0, 0), (1, 1, 2, 1), ((), (), (), (0, 1)), 3)
    answer = plan("dtr", graph, 3, SECONDS)
    assert isinstance(answer, Schedule)
    assert answer.order == (0, 1, 2, 1, 3)


@pytest.mark.parametrize(
    ("order", "broken"),
    [
        ((0, 2, 1), "operation 2 runs before operation 1 has"),
        ((0, 1), "operation 2 never runs"),
        ((0, 1, 0, 1, 2), "operation 1 runs again ahead of 2, and must not"),
        ((0, 1, 0, 2), None),
        ((0, 1, 2), None),
    ],
)
def test_the_judge_says_what_is_wrong(order: tuple[int, ...], broken: str | None) -> None:
    """An order that is another one, an operation that never runs or must not run again, too much at once."""
    graph = Graph((1, 2, 3), (4, 5, 6), ((), (0,), (1,)), 2, until=(2, 1, 2))
    judged = judge(graph, order)
    assert judged.broken is None if broken is None else broken in str(judged.broken)
    if broken is None:
        assert (judged.cost_ns, judged.peak_bytes) == (sum((1, 2, 3)[op] for op in order), 11)
        assert "the limit is 10" in str(judge(graph, order, 10).broken)


def test_a_result_is_held_until_its_last_reader_before_it_is_made_again() -> None:
    """By a count of what each step can still need."""
    graph, order = chain(3), (0, 1, 2, 3, 4, 1, 5, 0, 6)
    live = 0
    for step, _ in enumerate(order):
        needed = 0
        for op in set(order[: step + 1]):
            made = max(i for i in range(step + 1) if order[i] == op)
            again = next((i for i in range(step + 1, len(order)) if order[i] == op), len(order))
            readers = (i for i in range(step, again) if op in graph.inputs[order[i]])
            needed += made == step or any(True for _ in itertools.islice(readers, 1))
        live = max(live, needed)
    assert judge(graph, order).peak_bytes == live


def test_a_traced_iteration_is_a_graph() -> None:
    """What changes a result in place is one with what made it; what reads weights may run again until they change."""
    weight, statistic, counter = (
        (50, PERSISTENT, PERSISTENT),
        (1 << 19, PERSISTENT, PERSISTENT),
        (9, PERSISTENT, PERSISTENT),
    )
    tensors = [
        (*weight, {0: READ, 3: READ, 5: READ + WRITE}),
        (*statistic, {0: READ + WRITE}),
        (*counter, {4: READ}),
        (20, 0, 3, {0: WRITE, 1: READ + WRITE, 2: READ, 3: READ}),
        (7, 2, 4, {2: WRITE, 4: READ}),
        (50, 3, 5, {3: WRITE, 5: READ}),
        (3, 3, 8, {3: WRITE, 4: READ + WRITE}),
    ]
    traced = problem([10] * 6, [(size, first, last, list(uses)) for size, first, last, uses in tensors])
    kinds = np.array([kind for *_, uses in tensors for kind in uses.values()])
    graph = graph_of(dataclasses.replace(traced, access_kind=kinds))
    assert graph.cost_ns == (20, 10, 10, 10, 10), "the first two are one"
    assert (graph.size_bytes, graph.maker) == ((20, 7, 50), (0, 1, 2))
    assert graph.inputs == ((), (0,), (0,), (1,), (2,))
    assert [graph.may_run(0, i) for i in range(1, 5)] == [True] * 4, "its statistics are put back"
    assert not graph.may_run(2, 3), "another one changes its other result"
    rest = 50 + (1 << 19) + 9
    assert graph.rest_bytes == tuple(rest + 3 for _ in range(5)), (
        "what crosses the boundary is there from the last round"
    )
    assert judge(graph, range(5)).peak_bytes == traced.peak_bytes


def test_without_scipy_the_programs_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other planners need nothing."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match="pip install"):
        plan("checkmate", chain(8), 8, SECONDS)
    assert isinstance(plan("dtr", chain(8), 8, SECONDS), Schedule)


def test_bad_graphs_and_limits_are_refused() -> None:
    """The message names the operation and the number; a limit below all schedules says the lowest."""
    with pytest.raises(ProblemError, match="operation 1 reads result 1"):
        Graph((1, 1), (1, 1), ((), (1,)), 1)
    with pytest.raises(ProblemError, match="result 1 has 1 bytes and is made by operation 2"):
        Graph((1,), (1, 1), ((),), 1, maker=(0, 2))
    with pytest.raises(ProblemError, match="operation 0 takes -1 ns"):
        Graph((-1,), (1,), ((),), 0)
    with pytest.raises(ProblemError, match="2 costs, 1 sizes"):
        Graph((1, 1), (1,), ((), ()), 0)
    with pytest.raises(ProblemError, match="a forward pass of 3 of 1"):
        Graph((1,), (1,), ((),), 3)
    answer = plan("checkmate", chain(8), 2, SECONDS)
    assert isinstance(answer, NoPlan)
    assert (answer.reason, "3 bytes" in answer.detail) == (Reason.INFEASIBLE, True)
