"""Our planner of swaps: its plans are good, near the bound, and never worse than the published ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.swap_cases import example, problem, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.lab.saving.autoswap import AutoSwap
from zico.lab.saving.bound import Rounding, fluid_of, least_overhead, least_peak
from zico.lab.saving.flow import Chosen, Flow, FlowOptions, Try, nudged, scheduled
from zico.lab.saving.network import cheapest_circulation, cut_open
from zico.lab.saving.packing import lowest_limit
from zico.lab.saving.replay import replay
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving.problem import PERSISTENT, Link, SwapPlan, SwapProblem

if TYPE_CHECKING:
    from zico.lab.saving.network import Line

FINE = FlowOptions(region_bytes=1, least_bytes=1)
WHOLE = FlowOptions(region_bytes=None, least_bytes=1)
DEADLINE_S = 60.0


def training(layers: int = 24, size: int = 4000, latency: int = 0) -> SwapProblem:
    """Return a forward and a backward pass, twice as long, over equal layers, with a weight that outlives them each."""
    durations = [400] * layers + [800] * layers
    features = [(size, i, 2 * layers - 1 - i, (i, 2 * layers - 1 - i)) for i in range(layers)]
    weights = [(size // 4, PERSISTENT, PERSISTENT, (i, 2 * layers - 1 - i)) for i in range(layers)]
    return problem(durations, features + weights, links=(Link(1e9, latency), Link(1e9, latency)))


@given(problems(), st.sampled_from((FINE, WHOLE)))
@settings(max_examples=25, deadline=None)
def test_every_plan_keeps_the_limit(of: SwapProblem, options: FlowOptions) -> None:
    """The judge finds nothing wrong with any plan, in parts or of whole tensors, and none is below the bound."""
    made = Flow(options=options).plan(of, DEADLINE_S)
    if isinstance(made, NoPlan):
        assert made.reason is Reason.NOT_FOUND
        return
    judged = replay(of, made)
    assert judged.is_good, judged.detail
    assert judged.peak_bytes <= (of.limit_bytes or 0)
    if options is WHOLE:
        assert (made.size_bytes == of.size_bytes[made.tensor]).all()
    pytest.importorskip("scipy")
    if judged.repeats:
        bound_ns = least_overhead(of, of.limit_bytes or 1).value
        assert judged.duration_ns - of.period_ns >= bound_ns - 1e-5 * max(of.period_ns, 1)


@given(problems())
@settings(max_examples=25, deadline=None)
def test_no_published_score_is_better(of: SwapProblem) -> None:
    """Where a quick published score finds a plan, ours costs no more."""
    ours = Flow(options=FINE).plan(of, DEADLINE_S)
    for by in ("doa", "aoa", "wdoa"):
        theirs = AutoSwap(by).plan(of, DEADLINE_S)
        if isinstance(theirs, SwapPlan):
            assert isinstance(ours, SwapPlan)
            assert replay(of, ours).overhead <= replay(of, theirs).overhead + 1e-12


@pytest.mark.parametrize("overhead", [0.0, 0.1])
def test_it_comes_near_the_bound(overhead: float) -> None:
    """On a training step it takes at least 0.95 of what the bound says can be taken off the peak."""
    pytest.importorskip("scipy")
    of = training()
    found = lowest_limit(of, Flow(options=dataclasses.replace(FINE, region_bytes=100)), overhead, DEADLINE_S, 4096)
    assert replay(dataclasses.replace(of, limit_bytes=found.limit_bytes), found.plan).overhead <= overhead + 1e-12
    bound = least_peak(of, overhead).value
    assert bound <= found.limit_bytes
    assert of.peak_bytes - found.limit_bytes >= 0.95 * (of.peak_bytes - bound)


def small_ones_first() -> SwapProblem:
    """Return a recurrent net's step: 120 small tensors, then eight large ones, one peak, and the way back.

    A small tensor takes a link for 200 ns, and a latency is 120 ns, as in RHN.
    """
    sizes = [200] * 120 + [5500] * 8
    n = len(sizes)
    features = [(size, i, 2 * n - i, (i, 2 * n - i)) for i, size in enumerate(sizes)]
    peak = [(60_000, n, n, (n,))]
    durations = [150] * 120 + [100] * 8 + [1000] + [300] * n
    return problem(durations, features + peak, links=(Link(1e9, 120), Link(1e9, 120)))


@pytest.mark.parametrize("overhead", [0.0, 0.1])
def test_small_tensors_beside_large_ones_pay_their_latencies(overhead: float) -> None:
    """With parts as large as ten small tensors, at least 0.95 of what the bound says is taken off the peak."""
    pytest.importorskip("scipy")
    of = small_ones_first()
    options = FlowOptions(region_bytes=2000, least_bytes=1, enough=overhead)
    bound = least_peak(of, overhead).value
    found = lowest_limit(of, Flow(options=options), overhead, DEADLINE_S, 2048, int(bound))
    assert of.peak_bytes - found.limit_bytes >= 0.95 * (of.peak_bytes - bound)


def late(limit: int) -> tuple[SwapProblem, Line, Chosen]:
    """Return a peak that begins behind the first of three transfers, and all three."""
    features = [(40, i, 6 - i, (i, 6 - i)) for i in range(3)]
    of = problem([10] * 4 + [200] * 3, [*features, (100, 3, 3, (3,))], limit=limit)
    fluid = fluid_of(of, limit, 1000, Rounding.INWARD)
    line = cut_open(fluid, 1)
    once = np.ones(len(line.load_bytes))
    return of, line, Chosen(fluid.size_bytes, 40, np.zeros(len(line.point_ns), np.int64), (once, once))


def test_a_schedule_that_is_late_waits() -> None:
    """Where three tensors must leave before such a peak, there is no deadlock, but a wait."""
    of, line, chosen = late(limit=100)
    judged = replay(of, scheduled(of, line, chosen, "")[0])
    assert judged.is_good, judged.detail
    assert judged.memory_wait_ns >= 100


def test_what_leaves_for_nothing_stays() -> None:
    """Where two of three need not leave, plans are tried in which one, two and all stay; what is better stays so."""
    of, line, chosen = late(limit=180)
    tried, better = [240], [False]
    for made in nudged(of, Try(scheduled(of, line, chosen, "")[0], line, chosen), 40, lambda: better[-1]):
        better.append(replay(of, made).is_good)
        tried.append(made.moved_bytes)
    assert tried == [240, 160, 80, 0]
    assert better == [False, True, True, False]


def test_gaps_over_the_cut_are_used_on_both_sides() -> None:
    """Weights that are used once an iteration are away before and after any cut: 0.95 of the bound is reached."""
    pytest.importorskip("scipy")
    weights = [(4000, PERSISTENT, PERSISTENT, (op,)) for op in range(0, 40, 4)]
    peaks = [(12000, at, at + 2, (at, at + 2)) for at in (11, 31)]
    of = problem([1000] * 40, weights + peaks, links=(Link(1e9), Link(1e9)))
    found = lowest_limit(of, Flow(options=dataclasses.replace(FINE, region_bytes=500)), 0.0, DEADLINE_S)
    assert of.peak_bytes - found.limit_bytes >= 0.95 * (of.peak_bytes - least_peak(of).value)


def test_joining_parts_saves_latencies() -> None:
    """With a latency as long as a part takes, transfers of the plan are larger than its parts on average."""
    of = dataclasses.replace(training(latency=100), limit_bytes=int(0.85 * training().peak_bytes))
    made = Flow(options=FlowOptions(region_bytes=100, least_bytes=1)).plan(of, DEADLINE_S)
    assert isinstance(made, SwapPlan)
    assert made.size_bytes.mean() > 200


def test_a_limit_too_low_is_refused_with_the_least_one() -> None:
    """Below what an operation needs at once there is no plan, and the answer says what it would need."""
    of = example(limit=example().least_bytes - 1)
    made = Flow(options=FINE).plan(of, DEADLINE_S)
    assert isinstance(made, NoPlan)
    assert made.reason is Reason.INFEASIBLE
    assert str(of.least_bytes) in made.detail


def test_nothing_moves_where_nothing_must() -> None:
    """Without a limit, and with one at the peak, the plan has no swaps."""
    for limit in (None, example().peak_bytes):
        made = Flow(options=FINE).plan(example(limit=limit), DEADLINE_S)
        assert isinstance(made, SwapPlan)
        assert not len(made)


@given(st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_circulation_costs_what_a_linear_program_says(random: object) -> None:
    """On random networks the network simplex finds the optimum of SciPy's solver, or misses as it is infeasible."""
    optimize = pytest.importorskip("scipy.optimize")
    drawn = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined] # hypothesis' Random
    n_nodes, n_arcs = int(drawn.integers(2, 9)), int(drawn.integers(1, 25))
    tail, head = drawn.integers(0, n_nodes, (2, n_arcs))
    least = drawn.integers(0, 3, n_arcs) * (drawn.random(n_arcs) < 0.4)
    most, cost = least + drawn.integers(0, 6, n_arcs), drawn.integers(-5, 10, n_arcs)
    found = cheapest_circulation(n_nodes, (tail, head), (least, most), cost)
    balance = np.zeros((n_nodes, n_arcs))
    np.add.at(balance, (tail, np.arange(n_arcs)), 1)
    np.subtract.at(balance, (head, np.arange(n_arcs)), 1)
    answer = optimize.linprog(cost, A_eq=balance, b_eq=np.zeros(n_nodes), bounds=np.stack([least, most]).T)
    assert (found.missing == 0) == (answer.status == 0)
    if found.missing == 0:
        assert (balance @ found.flow == 0).all()
        assert ((found.flow >= least) & (found.flow <= most)).all()
        assert cost @ found.flow == pytest.approx(answer.fun, abs=1e-6)
