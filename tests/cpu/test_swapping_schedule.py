"""A plan for the next iterations takes what is idle over the peak, and has it back in time."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.units import MIB
from zico.planning.packing.problem import NoPlan
from zico.swap.observed import SAVED, USED, Observed, Rebuild, problem_of
from zico.swap.schedule import Chosen, Plan, choose, plan
from zico.tiers.layout import Rates

MS = 1_000_000
FAST = Rates(1e15, 1e15, 0.0, 0.0)


def trained(sizes: list[int], each_ms: int = 10) -> Observed:
    """Return an iteration that saves tensors one after the other, and uses and frees them from the last on."""
    n = len(sizes)
    sequence = [2 * i + SAVED for i in range(n)] + [2 * i + USED for i in reversed(range(n))]
    up = np.cumsum(sizes)
    load = np.concatenate([up, [up[-1]], up[::-1][:-1], [0]])
    ticks = (*range(n), *range(n + 1, 2 * n + 1))
    return Observed(tuple(sequence), tuple(sizes), ticks, load, np.arange(2 * n + 1) * each_ms * MS)


def events_of(planned: Plan) -> dict[int, int]:
    """Return the event at which each tensor begins to come back."""
    return {number: event for event, numbers in planned.returns.items() for number in numbers}


def test_what_fits_stays() -> None:
    """Nothing leaves where the limit is the peak."""
    seen = trained([4 * MIB] * 8)
    planned = plan(seen, 32 * MIB, FAST)
    assert (planned.leaves, dict(planned.returns), planned.peak_bytes) == (frozenset(), {}, 32 * MIB)


def test_the_longest_idle_leave_and_return_in_order_of_use() -> None:
    """Of eight, where five fit, the first three leave; they come back last in, first out, after the peak."""
    seen = trained([4 * MIB] * 8)
    planned = plan(seen, 20 * MIB, Rates(4 * MIB / 0.010, 4 * MIB / 0.010, 0.0, 0.0))
    assert planned.leaves == {0, 1, 2}
    assert planned.peak_bytes <= 20 * MIB
    back = events_of(planned)
    assert 8 < back[2] < back[1] < back[0] < 16
    assert all(back[i] < 15 - i for i in planned.leaves), "before their uses"


def test_a_copy_that_ends_after_the_peak_does_not_count() -> None:
    """A tier so slow that nothing leaves before it is needed is not used."""
    seen = trained([4 * MIB] * 4)
    assert plan(seen, 8 * MIB, Rates(1.0, 1.0, 0.0, 0.0)).leaves == frozenset()


def test_who_was_late_comes_earlier() -> None:
    """The more a tensor is asked to come earlier, the earlier it comes, as far as there is room."""
    seen = trained([4 * MIB] * 20)
    rates = Rates(1e9, 1e9, 0.0, 0.0)
    events = [events_of(plan(seen, 60 * MIB, rates, {0: earlier_ms * MS}))[0] for earlier_ms in (0, 20, 40)]
    assert events == sorted(events, reverse=True)
    assert events[-1] < events[0]


def test_nothing_comes_back_before_there_is_room() -> None:
    """However early it would like to come, its memory does not break the limit."""
    seen = trained([4 * MIB] * 8)
    earlier = dict.fromkeys(range(8), 1e9)
    assert plan(seen, 20 * MIB, FAST, earlier).peak_bytes <= 20 * MIB


def test_uses_of_an_earlier_iterations_tensors_are_not_taken_for_this_ones() -> None:
    """A graph that outlives its iteration is used in the next one; that is no reason to have anything back."""
    seen = trained([4 * MIB] * 8)
    older = dataclasses.replace(seen, sequence=(-2 + USED, *seen.sequence), event_tick=(0, *seen.event_tick))
    planned, expected = plan(older, 20 * MIB, FAST), plan(seen, 20 * MIB, FAST)
    assert planned.leaves == expected.leaves
    assert events_of(planned) == {number: event + 1 for number, event in events_of(expected).items()}


def layered(n: int, cost_ms: float = 0.1) -> Observed:
    """Return an iteration in which every second tensor can be made of the one before it."""
    seen = trained([4 * MIB] * n)
    ways = {i: Rebuild(round(cost_ms * MS), (i - 1,)) for i in range(1, n, 2)}
    return dataclasses.replace(seen, ways=ways)


def test_an_observed_iteration_is_a_problem_with_its_load() -> None:
    """What planners see has the same peak and time; what can be made has an operation that makes it."""
    seen = layered(8, cost_ms=1.0)
    found = problem_of(seen, FAST)
    assert found.problem.peak_bytes == int(seen.load_bytes.max())
    assert found.problem.period_ns == int(seen.t_ns[-1])
    assert found.numbers == list(range(7)), "the last one is used at once"
    makers = [found.graph.maker[r] for r, number in enumerate(found.numbers) if number in seen.ways]
    assert all(found.graph.may_run(maker, len(found.graph)) for maker in makers)
    assert sum(found.graph.may_run(op, len(found.graph)) for op in range(len(found.graph))) == len(makers)
    assert {found.graph.cost_ns[maker] for maker in makers} == {MS}


def test_with_a_slow_tier_tensors_are_dropped_and_with_a_fast_one_they_leave() -> None:
    """Our planner drops what can be made again in the time of a copy's latency, unless copies are free."""
    seen = layered(12)
    slow = choose(seen, 30 * MIB, Rates(1e6, 1e6, 0.0, 0.0), "zico")
    fast = choose(seen, 30 * MIB, FAST, "zico")
    assert isinstance(slow, Chosen)
    assert isinstance(fast, Chosen)
    assert slow.leaves == frozenset()
    assert slow.drops <= set(seen.ways)
    assert len(slow.drops) >= 5
    assert (fast.drops, len(fast.leaves) > 0) == (frozenset(), True)
    planned = plan(seen, 30 * MIB, FAST, chosen=slow)
    assert (planned.drops, planned.leaves, dict(planned.returns)) == (slow.drops, frozenset(), {})
    assert planned.peak_bytes <= 32 * MIB


def test_planners_decide_by_what_made_a_tensor_and_what_keeps_it() -> None:
    """Of layers of a convolution and a ReLU, vDNN moves what the former read, SuperNeurons what they made."""
    n = 12
    made = ["ConvolutionBackward0", "ReluBackward0"] * (n // 2)
    kept = ["NativeBatchNormBackward0", "ConvolutionBackward0"] * (n // 2)
    seen = dataclasses.replace(layered(n), names=(*made, *reversed(kept)))
    inputs, results = {i for i in range(n - 1) if i % 2}, {i for i in range(n - 1) if i % 2 == 0}
    vdnn, supers = (choose(seen, share * MIB, FAST, name) for share, name in ((32, "vdnn"), (24, "superneurons")))
    assert vdnn == Chosen(frozenset(inputs), frozenset())
    assert isinstance(supers, Chosen)
    assert supers.drops == inputs
    assert frozenset() < supers.leaves <= results
    nameless = choose(dataclasses.replace(seen, names=()), 32 * MIB, FAST, "vdnn")
    assert isinstance(nameless, Chosen)
    assert nameless.leaves == inputs | results


def test_a_source_that_leaves_is_back_for_what_is_made_of_it() -> None:
    """It comes back for the first use of the two."""
    seen = layered(12)
    alone = plan(seen, 48 * MIB, FAST, chosen=Chosen(frozenset({2}), frozenset()))
    both = plan(seen, 48 * MIB, FAST, chosen=Chosen(frozenset({2}), frozenset({3})))
    used = seen.sequence.index(2 * 3 + USED)
    assert events_of(both)[2] < used
    assert events_of(both)[2] <= events_of(alone)[2]


def test_planners_without_a_plan_leave_it_to_what_is_idle_longest() -> None:
    """Nothing can leave in time: nobody is chosen, and the plan is the usual one."""
    seen = trained([4 * MIB] * 2)
    assert choose(seen, 4 * MIB, Rates(1.0, 1.0, 0.0, 0.0), "longest") is None


def test_a_planner_without_a_plan_below_the_peak_says_why() -> None:
    """Chen et al. drop tensors alone: where none can be made again there is no plan, rather than an empty one."""
    seen = trained([4 * MIB] * 8)
    answer = choose(seen, 20 * MIB, FAST, "chen")
    assert isinstance(answer, NoPlan)
    assert answer.detail.startswith("found no plan for 20 MiB to 31")
    assert "(no schedule holds 20 MiB, " in answer.detail


def test_a_plan_for_more_than_the_limit_says_so() -> None:
    """Of eight tensors three can be dropped, which is too few for the second limit: the note has the plan's own."""
    seen = layered(8)
    fits, more = choose(seen, 24 * MIB, FAST, "echo"), choose(seen, 14 * MIB, FAST, "echo")
    assert isinstance(fits, Chosen)
    assert isinstance(more, Chosen)
    assert fits.note == ""
    assert more.drops
    assert more.note.startswith("found no plan for 14 MiB (without 3 results of cheap operations 20 MiB are left); its")
    assert more.note.endswith(" MiB is used")


@st.composite
def iterations(draw: st.DrawFn) -> Observed:
    """Return any iteration: tensors saved and used in any order, loads that need not have to do with them."""
    n = draw(st.integers(1, 12))
    uses = draw(st.permutations(range(n)))
    codes = [2 * i + SAVED for i in range(n)]
    for number in uses[: draw(st.integers(0, n))]:
        codes.insert(draw(st.integers(codes.index(2 * number + SAVED) + 1, len(codes))), 2 * number + USED)
    saved = iter(range(n))
    numbers: dict[int, int] = {}
    for code in codes:  # numbers are in the order of saving
        if not code & 1:
            numbers[code >> 1] = next(saved)
    sequence = tuple(2 * numbers[code >> 1] + (code & 1) for code in codes)
    sizes = tuple(draw(st.lists(st.integers(1, 64), min_size=n, max_size=n)))
    ticks = tuple(sorted(draw(st.lists(st.integers(0, 40), min_size=len(codes), max_size=len(codes)))))
    load = np.array(draw(st.lists(st.integers(0, 400), min_size=41, max_size=41)), np.int64)
    times = np.cumsum(draw(st.lists(st.integers(0, 5 * MS), min_size=41, max_size=41)))
    return Observed(sequence, sizes, ticks, load, times)


@given(
    seen=iterations(),
    limit=st.integers(0, 400),
    speed=st.floats(1.0, 1e6),
    earlier=st.dictionaries(st.integers(0, 11), st.floats(0, 1e8)),
)
def test_any_plan_is_one(seen: Observed, limit: int, speed: float, earlier: dict[int, float]) -> None:
    """Each tensor that leaves is used later and comes back once, in between; the peak is no higher than before."""
    planned = plan(seen, limit, Rates(speed, speed, 1e-4, 1e-4), earlier)
    back = [number for numbers in planned.returns.values() for number in numbers]
    assert sorted(back) == sorted(planned.leaves)
    for number, event in events_of(planned).items():
        assert seen.sequence.index(2 * number + SAVED) <= event < seen.sequence.index(2 * number + USED)
    assert planned.peak_bytes <= max(seen.load_bytes)
    assert planned.out_bytes == sum(seen.size_bytes[number] for number in planned.leaves)


@given(seen=iterations(), limit=st.integers(0, 400))
def test_an_instant_tier_leaves_nothing_above_that_could_be_below(seen: Observed, limit: int) -> None:
    """Where copies take no time, a tick above the limit is one over which nothing that stays is idle."""
    seen = dataclasses.replace(seen, t_ns=np.arange(41) * MS)
    planned = plan(seen, limit, FAST)
    load = seen.load_bytes.copy()
    idle = {}
    for number in range(len(seen.size_bytes)):
        if 2 * number + USED in seen.sequence:
            saved, used = (seen.event_tick[seen.sequence.index(2 * number + kind)] for kind in (SAVED, USED))
            idle[number] = (saved, used)
            if number in planned.leaves:
                load[saved + 1 : used] -= seen.size_bytes[number]
    worst = int(np.argmax(load))
    if load[worst] > limit:
        staying = [i for i, (saved, used) in idle.items() if saved + 1 < worst < used and i not in planned.leaves]
        assert not staying


@given(seen=iterations(), limit=st.integers(0, 400), name=st.sampled_from(("swdoa", "tflms", "capuchin", "zico")))
@settings(max_examples=40, deadline=None)
def test_any_planner_can_be_asked_for_any_iteration(seen: Observed, limit: int, name: str) -> None:
    """What it chooses is idle at some time, and becomes a plan."""
    answer = choose(seen, limit, Rates(1e3, 1e3, 1e-4, 1e-4), name)
    chosen = None if isinstance(answer, NoPlan) else answer
    planned = plan(seen, limit, Rates(1e3, 1e3, 1e-4, 1e-4), chosen=chosen)
    assert planned.peak_bytes <= max(seen.load_bytes)
    if chosen is not None:
        assert planned.leaves <= chosen.leaves
        assert planned.drops == chosen.drops == frozenset()
