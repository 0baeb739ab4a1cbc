"""AutoSwap: the worked example from the problem alone, the scores by hand, and plans that the judge believes."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import msgspec
import numpy as np
import pytest
from cpu.support.swap_cases import EXAMPLE_LIMIT, example, loads, problem, problems
from hypothesis import given, settings

from zico.base.errors import ConfigError
from zico.lab.saving.autoswap import SCORES, AutoSwap, Candidates, gaps_between_accesses, schedule, score
from zico.lab.saving.bayes import Bayes
from zico.lab.saving.files import Asked, PlanFile, SwapIteration, plan_json
from zico.lab.saving.graphs import graph_of
from zico.lab.saving.packing import lowest_limit, packing_problem
from zico.lab.saving.replay import replay, replay_with_history
from zico.lab.saving.rewriting import rewritten
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.mixed import straight
from zico.planning.saving.problem import PERSISTENT, SwapPlan, SwapProblem, Transfers, no_swaps
from zico.planning.saving.registry import SWAP_PLANNERS, swap_planner

SECONDS = 30.0


def planned(answer: SwapPlan | NoPlan) -> SwapPlan:
    """Return a plan that is there."""
    assert isinstance(answer, SwapPlan), answer
    return answer


@pytest.mark.parametrize("by", SCORES)
def test_the_example_is_planned_as_published(by: str) -> None:
    """Figure 7: whatever the score, w1, w2 and w3 leave at t0, t1, t2 and return at t10, t8, t7; t4 is delayed."""
    plan = planned(AutoSwap(by, least_bytes=1).plan(example(), SECONDS))
    assert plan.size_bytes.tolist() == [30, 20, 10]
    assert [(plan.tensor[s], op) for s, op in zip(plan.out.swap, plan.out.op, strict=True)] == [(0, 0), (1, 1), (2, 2)]
    back = [(plan.tensor[s], op) for s, op in zip(plan.back.swap, plan.back.op, strict=True)]
    assert back == [(2, 7), (1, 8), (0, 10)]
    assert not plan.back.delay_ns.any()
    _, history = replay_with_history(example(), plan)
    assert loads(history) == [30, 50, 60, 60, 50, 60, 50, 40, 50, 40, 60, 50, 30, 0]


def test_the_scores_by_hand() -> None:
    """Of the example's three gaps, in nanoseconds and bytes."""
    gaps = gaps_between_accesses(example(), 10)
    assert gaps.size_bytes.tolist() == [30, 20, 10]
    assert score("doa", example(), gaps).tolist() == [140 - 10 - 60, 110 - 25 - 40, 90 - 40 - 20]
    assert score("aoa", example(), gaps).tolist() == [70 * 30, 45 * 20, 30 * 10]
    # w1 from t1: 50 x 15 + 60 x 15 + 90 x 10 + (100 + 120 + 110 + 90 + 80 + 70) x 10 + 60 x 15 + 50
    # x 15
    area = 750 + 900 + 900 + 5700 + 900 + 750
    assert score("wdoa", example(), gaps).tolist() == [area, area - 750 - 1650, 900 + 1000 + 1200 + 1100 + 900]
    # Then w1 is off the load by 30 bytes while the others are away, and w2 by 20 more while w3 is.
    expected = [area, area - 2400 - 30 * 85, 5100 - 50 * 50]
    assert score("swdoa", example(), gaps).tolist() == expected


def test_an_absence_that_is_too_short_has_a_negative_area() -> None:
    """A negative duration of absence is divided by the bytes, not multiplied with them."""
    hasty = problem([1, 1, 1], [(8, 0, 2, [0, 2]), (4, 0, 2, [0, 2])])
    gaps = gaps_between_accesses(hasty, 1)
    assert score("doa", hasty, gaps).tolist() == [1 - 16, 1 - 8]
    assert score("aoa", hasty, gaps).tolist() == [-15 / 8, -7 / 4]


@given(problems(most_ops=10, most_tensors=9))
@settings(max_examples=25, deadline=None)
def test_every_plan_is_good(made: SwapProblem) -> None:
    """What a planner gives keeps all rules of the judge; what it refuses as impossible is below what is needed."""
    for by in SCORES:
        answer = AutoSwap(by, least_bytes=1).plan(made, SECONDS)
        if isinstance(answer, NoPlan):
            assert answer.reason is Reason.NOT_FOUND  # limits of these problems begin at the least one
        else:
            result = replay(made, answer)
            assert (result.rule, result.peak_bytes <= (made.limit_bytes or 0)) == (None, True)


def test_what_is_needed_first_returns_first() -> None:
    """Two tensors for which there is no time: both are asked back behind the peak, in the order of their accesses."""
    late = problem([1] * 6, [(8, 0, 5, [0, 5]), (8, 1, 4, [1, 4]), (10, 2, 2, [2])], limit=10)
    plan = planned(AutoSwap("wdoa", 1).plan(late, SECONDS))
    assert plan.tensor[plan.out.swap].tolist() == [0, 1]
    assert (plan.tensor[plan.back.swap].tolist(), plan.back.op.tolist()) == ([1, 0], [3, 3])


def test_more_leave_where_too_few_come_to_a_deadlock() -> None:
    """Without their transfers the first candidates keep the limit; with them only all three do."""
    forward = [(8, 0, 8, (0, 1, 8)), (7, 1, 7, (1, 2, 7)), (2, 2, 6, (2, 3, 6)), (6, 3, 5, (3, 4, 5))]
    backward = [(4, 8, 8, (8,)), (4, 7, 8, (7, 8)), (5, 6, 7, (6, 7)), (1, 5, 6, (5, 6))]
    net = problem([4, 5, 7, 4, 8, 3, 1, 2, 3], [*forward, *backward], limit=23)
    candidates = Candidates(net, 1)
    order = np.argsort(-score("doa", net, candidates.gaps), kind="stable")
    fewest = int(np.argmax(candidates.load_after(order) <= 23))
    first = schedule(net, candidates.gaps.take(order[:fewest]), candidates.peak_op, "doa")
    assert (fewest, replay(net, first).rule) == (1, "deadlock")
    plan = planned(AutoSwap("doa", 1).plan(net, SECONDS))
    assert (len(plan), replay(net, plan).rule) == (3, None)


def test_a_limit_below_what_an_operation_needs_is_infeasible() -> None:
    """The answer says the least possible limit; what it cannot find it does not call impossible."""
    answer = AutoSwap("doa", 1).plan(example(EXAMPLE_LIMIT - 1), SECONDS)
    assert isinstance(answer, NoPlan)
    assert (answer.reason, answer.detail) == (
        Reason.INFEASIBLE,
        "an operation needs 60 bytes at once: give that limit or a higher one",
    )
    answer = AutoSwap("doa").plan(example(), SECONDS)  # none of its tensors has a megabyte
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.NOT_FOUND
    assert "with all 0 candidates away 120 B are left" in answer.detail


def test_a_limit_above_the_peak_needs_no_swaps() -> None:
    """And none at all is the same."""
    for limit in (120, None):
        assert not len(planned(AutoSwap("aoa", 1).plan(example(limit), SECONDS)))


def test_loads_with_candidates_away() -> None:
    """Taken in an order, each candidate lowers the peak that is left."""
    candidates = Candidates(example(), 1)
    assert candidates.peak_op == 5
    assert candidates.load_after(np.array([0, 1, 2])).tolist() == [120, 90, 70, 60]


# -- the mix ---------------------------------------------------------------------------------------


def layers(n: int = 6) -> SwapProblem:
    """Return a net of layers: activations that backward needs in reverse, and weights with their optimizer state."""
    n_ops = 2 * n + 1
    sizes = [(i * 37) % 11 + 4 for i in range(n)]
    activations = [(4 * sizes[i], i, 2 * n - 1 - i, [i, i + 1, 2 * n - 1 - i]) for i in range(n - 1)]
    states = [(sizes[i], PERSISTENT, PERSISTENT, [n_ops - 1]) for i in range(n)]
    return problem([20 + sizes[i % n] for i in range(n_ops)], [*activations, *states])


def test_the_mix_is_at_least_as_good_as_each_score_and_the_same_every_time() -> None:
    """Bayesian optimisation begins with the four scores alone."""
    whole = layers()
    tight = dataclasses.replace(whole, limit_bytes=(whole.peak_bytes + 2 * whole.least_bytes) // 3)
    best = min(
        replay(tight, answer).overhead
        for by in SCORES
        if isinstance(answer := AutoSwap(by, 1).plan(tight, SECONDS), SwapPlan)
    )
    mixes = [planned(Bayes(8, least_bytes=1).plan(tight, SECONDS)) for _ in range(2)]
    assert replay(tight, mixes[0]).overhead <= best
    assert mixes[0].out.swap.tolist() == mixes[1].out.swap.tolist()


def test_without_its_package_the_mix_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the extra's name."""
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(ConfigError, match=r"bayesian-optimization is not installed: pip install 'zico-memory\[swap\]'"):
        Bayes().plan(example(), SECONDS)


def test_planners_have_names() -> None:
    """All of the registry can be made; another name is refused with those there are."""
    assert {name: swap_planner(name).name for name in SWAP_PLANNERS} == {name: name for name in SWAP_PLANNERS}
    with pytest.raises(ConfigError, match="'belady' plans no swaps: give one of doa"):
        swap_planner("belady")


# -- lowest limits, packing, files -----------------------------------------------------------------


@given(problems(most_ops=10, most_tensors=9))
@settings(max_examples=20, deadline=None)
def test_the_lowest_limit_is_kept_at_its_overhead(made: SwapProblem) -> None:
    """What is found is a plan that keeps the limit and costs no more; no overhead allowed never costs less memory."""
    found = [lowest_limit(made, AutoSwap("swdoa", 1), share, SECONDS) for share in (0.0, 0.5)]
    for share, one in zip((0.0, 0.5), found, strict=True):
        result = replay(dataclasses.replace(made, limit_bytes=max(one.limit_bytes, 1)), one.plan)
        assert (result.rule, result.overhead <= share) == (None, True)
        assert made.least_bytes <= one.limit_bytes <= made.peak_bytes


def test_what_is_packed_is_the_iteration_that_comes_to_be() -> None:
    """The example under its plan: w1, w2 and w3 are two tensors each, and 60 bytes live at most."""
    plan = planned(AutoSwap("doa", 1).plan(example(), SECONDS))
    packed = packing_problem(example(), plan)
    assert packed is not None
    assert (len(packed), packed.peak_live_bytes) == (3 + 8, EXAMPLE_LIMIT)
    assert packed.tick_ns is not None
    took_ns = packed.tick_ns[packed.upper] - packed.tick_ns[packed.lower]
    assert (took_ns * packed.size_bytes).sum() == area(example(), plan)
    assert packed.tick_ns[-1] - packed.tick_ns[0] == 170


def area(made: SwapProblem, plan: SwapPlan) -> int:
    """Return the load over the replay's last iteration, in byte nanoseconds."""
    _, history = replay_with_history(made, plan)
    begin_ns, end_ns = history.iteration_ns[-2:]
    return sum(
        load * (min(until_ns, end_ns) - max(at_ns, begin_ns))
        for (at_ns, load), (until_ns, _) in itertools.pairwise(history.load_bytes)
        if until_ns > begin_ns
    )


@given(problems())
@settings(max_examples=25, deadline=None)
def test_packing_loses_no_bytes(made: SwapProblem) -> None:
    """At no time does the packing problem have fewer bytes alive than the peak of an iteration without swaps."""
    free = dataclasses.replace(made, limit_bytes=None)
    packed = packing_problem(free, no_swaps("none"))
    assert packed is not None
    assert packed.peak_live_bytes >= made.peak_bytes
    assert packed.size_bytes.sum() == made.size_bytes.sum()


def as_planned(file: PlanFile) -> SwapPlan:
    """Return what a file says as planners give it."""

    def transfers(asked: list[Asked]) -> Transfers:
        names = ("swap", "at", "delay_ns")
        return Transfers(*(np.array([getattr(one, name) for one in asked], np.int64) for name in names))

    names = ("tensor", "gap", "first_byte", "size_bytes")
    columns = (np.array([getattr(swap, name) for swap in file.swaps], np.int64) for name in names)
    return SwapPlan(*columns, transfers(file.out), transfers(file.back), file.planner, 0.0)


def test_a_plan_survives_its_file() -> None:
    """The file says what the plan says, and where in the trace that is."""
    made = example()
    found = SwapIteration(made, 3, np.arange(100, 100 + len(made)), np.arange(1000, 1000 + made.n_ops))
    plan = planned(AutoSwap("doa", 1).plan(made, SECONDS))
    unchanged = rewritten(found.problem, graph_of(found.problem), ())
    content = msgspec.json.decode(plan_json(found, unchanged, straight(plan), EXAMPLE_LIMIT), type=PlanFile)
    assert (content.iteration, content.limit_bytes, content.operations) == (3, EXAMPLE_LIMIT, 14)
    assert [(swap.trace_tensor, swap.after, swap.before) for swap in content.swaps] == [
        (100, 0, 12),
        (101, 1, 10),
        (102, 2, 8),
    ]
    assert [asked.event for asked in content.back] == [1007, 1008, 1010]
    assert replay(made, as_planned(content)) == replay(made, plan)
