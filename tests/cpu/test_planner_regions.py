"""The planner for regions held over time, against the judge and against all there is to try."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ProblemError
from zico.planning.packing import regions as planner
from zico.planning.packing import regions_packing as packing
from zico.planning.packing.judge import held_regions, judge, live_bytes, mean_over_time
from zico.planning.packing.problem import NoPlan, Plan, Problem, Reason
from zico.planning.packing.regions import Options, Regions, place

LONG_S = 600.0
"""Never reached: the runs end after so many moves."""
FEW_MOVES = 40
SWITCHES = tuple(field.name for field in dataclasses.fields(Options) if field.type == "bool")
REGION_BYTES = 6


def problem_of(*tensors: tuple[int, int, int], **more: Any) -> Problem:  # noqa: ANN401 - fields of Problem
    """Return the problem of (lower, upper, size) tensors."""
    lower, upper, size = np.array(tensors, np.int64).reshape(-1, 3).T
    return Problem(lower, upper, size, **more)


def iteration(n_layers: int, rng: np.random.Generator) -> Problem:
    """Return an iteration: weights, feature maps that die in reverse order, gradients, a temporary a layer."""
    n_ticks = 4 * n_layers + 4
    tensors = [(0, n_ticks, int(rng.integers(1, 9))) for _ in range(n_layers)]
    for i in range(n_layers):
        end = n_ticks - 2 * i - 2
        tensors.append((2 * i + 1, end, int(rng.integers(1, 40))))
        tensors.append((2 * i + 1, 2 * i + 2, int(rng.integers(1, 60))))
        tensors.append((end - 1, n_ticks - 1, int(rng.integers(1, 9))))
    return problem_of(*tensors)


def scattered(n: int, rng: np.random.Generator) -> Problem:
    """Return tensors that are born and die at random."""
    lower = rng.integers(0, 100, n)
    return Problem(lower, lower + rng.integers(1, 40, n), rng.integers(1, 60, n))


@st.composite
def problems(draw: st.DrawFn, most: int = 12) -> Problem:
    """Draw problems that are small enough for every accident to happen."""
    tensor = st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 20))
    rows = [(lower, lower + alive, size) for lower, alive, size in draw(st.lists(tensor, min_size=1, max_size=most))]
    n_ticks = max(upper for _, upper, _ in rows)
    durations = draw(st.none() | st.lists(st.integers(0, 5), min_size=n_ticks, max_size=n_ticks))
    tick_ns = None if durations is None else np.concatenate([[0], np.cumsum(durations)])
    return problem_of(*rows, tick_ns=tick_ns, alignment_bytes=draw(st.sampled_from([1, 1, 2, 3])))


options = st.builds(Options, most_moves=st.just(FEW_MOVES), **dict.fromkeys(SWITCHES, st.booleans()))


def packing_of(problem: Problem, region_bytes: int = REGION_BYTES) -> packing.Packing:
    """Return the empty packing of a problem whose tensors are sorted by their start."""
    return planner._packing(
        problem.compact(), np.arange(len(problem)), region_bytes, Options(), np.full(len(problem), packing.NOWHERE)
    )


def check(problem: Problem, region_bytes: int, chosen: Options) -> planner.Placed:
    """Place a problem; the plan is good and holds what the planner says."""
    placed = place(problem, region_bytes, LONG_S, chosen)
    assert placed.reason is None
    plan = Plan(placed.offset_bytes, "regions", 0.0)
    verdict = judge(problem, plan)
    assert verdict.is_good, verdict
    compact = problem.compact()
    assert compact.tick_ns is not None
    held = held_regions(compact, plan, region_bytes)
    bound = -(-live_bytes(compact) // region_bytes)
    assert placed.peak == held.max()
    assert placed.mean == pytest.approx(held @ planner._weights(compact.tick_ns))
    touched = [
        range(offset // region_bytes, (offset + size - 1) // region_bytes + 1)
        for offset, size in zip(placed.offset_bytes.tolist(), problem.size_bytes.tolist(), strict=True)
    ]
    assert placed.distinct == len(set(itertools.chain(*touched)))
    if placed.optimal and problem.alignment_bytes == 1:
        assert held.tolist() == bound.tolist()
    return placed


def test_what_dies_together_lives_together() -> None:
    """In the module's drawing, the slot of the three that die together is given back with them."""
    problem = problem_of((0, 2, 2), (0, 3, 3), (0, 2, 2), (0, 3, 3), (0, 2, 2))
    placed = check(problem, REGION_BYTES, Options())
    assert placed.optimal
    assert (placed.peak, placed.distinct) == (2, 2)
    slots = placed.offset_bytes // REGION_BYTES
    assert slots[0] == slots[2] == slots[4] != slots[1] == slots[3]


@given(problems(), options)
@settings(deadline=None, max_examples=200)
def test_plans_are_good_and_counted_right(problem: Problem, chosen: Options) -> None:
    """With any parts switched off, the judge finds a plan good and counts the same regions as the planner."""
    check(problem, REGION_BYTES, chosen)


@pytest.mark.parametrize("switched", list(itertools.product((False, True), repeat=len(SWITCHES))))
def test_every_combination_of_switches_plans_an_iteration(switched: tuple[bool, ...]) -> None:
    """Each combination of switches places a training iteration of a hundred tensors."""
    chosen = Options(**dict(zip(SWITCHES, switched, strict=True)), most_moves=FEW_MOVES)
    check(iteration(25, np.random.default_rng(0)), 32, chosen)


def test_each_part_is_worth_it() -> None:
    """Over some iterations and random lifetimes, each further part of the planner lets fewer regions be held."""
    rngs = [np.random.default_rng(seed) for seed in range(6)]
    cases = [iteration(25, rng) for rng in rngs] + [scattered(60, rng) for rng in rngs]

    def held(**switched: bool) -> tuple[int, float]:
        placed = [check(case, 32, Options(**switched, most_moves=400)) for case in cases]
        return sum(one.peak for one in placed), sum(one.mean for one in placed)

    stack_only = held(improve=False, portfolio=False, pile=False)
    one_pile = held(improve=False, portfolio=False)
    built = held(improve=False)
    assert held() < built < one_pile < stack_only


def fewest(problem: Problem, region_bytes: int) -> tuple[int, float]:
    """Return the least peak and the least mean at that peak, over all placements below three regions."""
    weights = planner._weights(problem.compact().tick_ns)  # type: ignore[arg-type]
    compact = problem.compact()
    best = (1 << 30, 0.0)
    for offsets in itertools.product(range(3 * region_bytes), repeat=len(problem)):
        plan = Plan(np.array(offsets), "all", 0.0)
        if judge(problem, plan).is_good:
            held = held_regions(compact, plan, region_bytes)
            best = min(best, (int(held.max()), float(held @ weights)))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_tiny_problems_are_solved_as_well_as_by_trying_everything(seed: int) -> None:
    """Of three tensors in slots of three bytes, no placement at all holds less."""
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, 4, 3)
    problem = Problem(lower, lower + rng.integers(1, 4, 3), rng.integers(1, 4, 3))
    placed = check(problem, 3, Options(most_moves=FEW_MOVES))
    peak, mean = fewest(problem, 3)
    assert placed.peak == peak
    assert placed.mean == pytest.approx(mean)


@given(problems(most=8), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=30)
def test_no_other_place_is_cheaper(problem: Problem, seed: int) -> None:
    """The place chosen for a tensor among others adds as little slot-time as any free address; none if none is."""
    problem = dataclasses.replace(problem, alignment_bytes=1)
    by_start = np.argsort(problem.lower, kind="stable")
    problem = problem_of(
        *zip(problem.lower[by_start], problem.upper[by_start], problem.size_bytes[by_start], strict=True)
    )
    p = packing_of(problem)
    rng = np.random.default_rng(seed)
    last = len(problem) - 1
    order = rng.permutation(len(problem))
    for i in order[:last]:  # anywhere free, not where it is cheapest
        free = [at for at in range(p.limit - int(p.size[i]) + 1) if is_free(p, i, at)]
        if free:
            packing.put(p, i, int(rng.choice(free)))
    packing.aim(p, 1 << 30)
    packing.reprice(p)
    i = int(order[last])
    chosen = packing.best_offset(p, i, 0)
    before = p.figures[packing.INTEGRAL]
    costs = {}
    for at in range(p.limit - int(p.size[i]) + 1):
        if is_free(p, i, at):
            packing.put(p, i, at)
            costs[at] = p.figures[packing.INTEGRAL] - before
            packing.take(p, i)
    assert costs[chosen] == pytest.approx(min(costs.values())) if costs else chosen == packing.NOWHERE


def is_free(p: packing.Packing, i: int, at: int) -> bool:
    """Tell whether no placed tensor that lives with ``i`` is in the way."""
    others = (p.offset >= 0) & (p.lower < p.upper[i]) & (p.lower[i] < p.upper)
    return not (others & (p.offset < at + p.size[i]) & (at < p.offset + p.size)).any()


@given(problems(), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=100)
def test_taking_out_undoes_putting_in(problem: Problem, seed: int) -> None:
    """When all tensors are out again, in any order, nothing is held and no slot has users."""
    by_start = np.argsort(problem.lower, kind="stable")
    rows = zip(problem.lower[by_start], problem.upper[by_start], problem.size_bytes[by_start], strict=True)
    p = packing_of(problem_of(*rows))
    packing.aim(p, 1)
    rng = np.random.default_rng(seed)
    for i in rng.permutation(len(problem)):
        packing.reprice(p)
        packing.put(p, i, packing.best_offset(p, i, 0))
    for i in rng.permutation(len(problem)):
        packing.take(p, i)
    assert not p.held.any()
    assert not p.users.any()
    assert p.figures == pytest.approx(0.0, abs=1e-9)
    assert p.state[[packing.PLACED, packing.SLOTS, packing.SLOT_TICKS]].tolist() == [0, 0, 0]


def test_the_peak_of_a_stack_is_the_lower_bound() -> None:
    """Feature maps that die in the reverse order of their births hold no region more than their bytes fill."""
    rng = np.random.default_rng(3)
    n = 200
    sizes = rng.integers(1, 300, n)
    problem = Problem(np.arange(n), 2 * n - np.arange(n), sizes)
    placed = check(problem, 64, Options(improve=False))
    assert placed.peak == -(-int(sizes.sum()) // 64)
    assert placed.optimal


def test_lasting_tensors_share_their_last_slot() -> None:
    """What lives all the time fills slots of its own, and the rest of the last one is used by others."""
    problem = problem_of((0, 9, 7), (0, 9, 8), (0, 9, 6), (2, 4, 3), (5, 6, 3), (6, 7, 3))
    placed = check(problem, 8, Options())
    assert (placed.peak, placed.distinct) == (3, 3)


def test_a_run_of_so_many_moves_repeats() -> None:
    """The same problem, options and seed give the same offsets."""
    problem = iteration(25, np.random.default_rng(1))
    first, second = (place(problem, 32, LONG_S, Options(most_moves=300)).offset_bytes for _ in range(2))
    assert first.tolist() == second.tolist()


def test_without_a_deadline_work_ends_the_improvement() -> None:
    """The answer is the same every time, whatever the clock says: each machine finds this one."""
    random = np.random.default_rng(3)
    lower = random.integers(0, 100, 80)
    problem = Problem(lower, lower + random.integers(1, 40, 80), random.integers(1, 60, 80))
    first, second = (place(problem, 32, math.inf, Options(most_moves=FEW_MOVES)) for _ in range(2))
    assert first.offset_bytes.tolist() == second.offset_bytes.tolist()
    assert first.moves == second.moves > 0


def test_no_time_is_a_reason() -> None:
    """A deadline that is over before anything is built is said to be the reason."""
    answer = Regions(32).plan(iteration(25, np.random.default_rng(1)), 0.0)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.OUT_OF_TIME
    assert answer.detail.startswith("100 tensors, ")
    assert "; nothing found in " in answer.detail


def test_a_capacity_below_the_live_bytes_is_infeasible() -> None:
    """More live bytes than the capacity: no plan, with both figures."""
    answer = Regions(4).plan(problem_of((0, 2, 5), (1, 3, 6), capacity_bytes=10), LONG_S)
    assert isinstance(answer, NoPlan)
    assert answer.reason is Reason.INFEASIBLE
    assert "11 bytes alive at once, which is more than the capacity of 10" in answer.detail


@given(problems(), st.integers(0, 30))
@settings(deadline=None, max_examples=100)
def test_no_plan_exceeds_the_capacity(problem: Problem, spare: int) -> None:
    """With a capacity, the plan stays inside it or there is none."""
    bounded = dataclasses.replace(problem, capacity_bytes=problem.peak_live_bytes + spare)
    answer = Regions(REGION_BYTES, Options(most_moves=FEW_MOVES)).plan(bounded, LONG_S)
    if isinstance(answer, Plan):
        assert judge(bounded, answer).is_good
    else:
        assert answer.reason is Reason.NOT_FOUND


def test_a_problem_without_tensors_has_a_plan() -> None:
    """Nothing to place takes nothing."""
    answer = Regions(4).plan(problem_of(), LONG_S)
    assert isinstance(answer, Plan)
    assert answer.optimal
    assert not len(answer.offset_bytes)


@pytest.mark.parametrize(
    ("region_bytes", "message"),
    [(0, "a region of 0 bytes"), (6, "a multiple of the alignment, 4"), (1 << 60, "at most"), (4, "at most")],
)
def test_a_region_size_that_cannot_be_used_is_refused(region_bytes: int, message: str) -> None:
    """A region of no bytes, of part of an alignment, or of a size that makes too many slots is refused with why."""
    problem = problem_of((0, 1, 1 << 40), (0, 1, 1), alignment_bytes=4)
    with pytest.raises(ProblemError, match=message):
        place(problem, region_bytes, LONG_S)


def test_an_iteration_comes_close_to_the_lower_bound() -> None:
    """An iteration's regions held over time come within a twentieth of the lower bound."""
    problem = iteration(60, np.random.default_rng(5))
    placed = check(problem, 32, Options(most_moves=400))
    plan = Plan(placed.offset_bytes, "regions", 0.0)
    bound = mean_over_time(problem, -(-live_bytes(problem) // 32))
    assert mean_over_time(problem, held_regions(problem, plan, 32)) <= 1.05 * bound
