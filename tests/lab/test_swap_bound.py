"""The bound of swap plans: never above what a plan reaches, and as high as it should be where that is known."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.swap_cases import cases, plan, problem, problems
from hypothesis import example, given, settings

from zico.lab.saving.bound import least_overhead, least_peak
from zico.lab.saving.replay import replay
from zico.planning.saving.problem import PERSISTENT, Link, SwapPlan, SwapProblem, no_swaps

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("scipy")

SLACK = 1e-5  # of the peak or the period: what a solver of linear programs may be off


def assert_bounded(of: SwapProblem, made: SwapPlan, segments: int = 1000) -> None:
    """Check that neither bound is above what the judge says of a plan."""
    judged = replay(of, made)
    if not judged.is_good or not judged.repeats:
        return
    peak = max(judged.peak_bytes, 1)
    overhead_ns = judged.duration_ns - of.period_ns
    bound_ns = least_overhead(of, peak, least_bytes=1, most_segments=segments).value
    assert bound_ns <= overhead_ns + SLACK * max(of.period_ns, 1)
    if of.period_ns:
        bound_bytes = least_peak(of, judged.overhead + SLACK, least_bytes=1, most_segments=segments).value
        assert bound_bytes <= peak * (1 + SLACK)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_no_plan_beats_the_bound(case: tuple[SwapProblem, SwapPlan]) -> None:
    """The judge's replay of no random plan is below the least peak of its overhead, or the least overhead."""
    of, made = case
    assert_bounded(of, made)
    assert_bounded(dataclasses.replace(of, limit_bytes=None), made)


WIDE = SwapProblem(
    *(np.array([0, 0, 0]), np.array([0, 0, 0]), 1, np.array([3, 2, 1, 1, 1, 2])),
    *(np.array([0, 1, 0, 0, 0, 1]), np.array([2, 1, 0, 0, 0, 3]), np.array([0, 2, 3, 4, 5, 6, 8])),
    *(np.array([0, 2, 1, 0, 0, 0, 1, 2]), np.array([2, 1, 2, 2, 2, 2, 2, 1])),
    *(Link(0.5e9, 1), Link(0.5e9, 0), 6),
)
"""Its gaps are in one class, and those above its least peak in several: only these have the links' true speed."""


@given(cases())
@example((WIDE, no_swaps("by hand")))
@settings(max_examples=25, deadline=None)
def test_merged_points_only_lower_the_bound(case: tuple[SwapProblem, SwapPlan]) -> None:
    """With an iteration looked at in three pieces, the bound is one, and not above the one of all pieces."""
    of, made = case
    assert_bounded(of, made, segments=3)
    coarse, fine = (least_peak(of, least_bytes=1, most_segments=n).value for n in (3, 1000))
    assert coarse <= fine * (1 + SLACK)


def test_merged_points_leave_the_highest_load_alone() -> None:
    """Links move nothing for the peak while it lasts, though its 200 ns are less than what is merged around it."""
    layers = 400
    features = [(10, i, 2 * layers - i, (i, 2 * layers - i)) for i in range(layers)]
    durations = [10] * layers + [200] + [10] * layers
    of = problem(durations, [*features, (4000, layers, layers, (layers,))], links=(Link(0.5e9), Link(0.5e9)))
    coarse, fine = (least_peak(of, most_segments=n).value for n in (300, 5000))
    assert fine - 50 < coarse <= fine * (1 + SLACK)


def every_plan(of: SwapProblem) -> Iterator[SwapPlan]:
    """Yield all plans that move whole tensors, each at most once, without delays."""
    n, gaps = of.n_ops, []
    for tensor in range(len(of)):
        for gap, access in enumerate(of.accesses(tensor).tolist()):
            needed = of.next_access(tensor, gap)
            if needed is not None and needed > access + 1:
                gaps.append((tensor, gap, access, needed))
    for count in range(len(gaps) + 1):
        for chosen in itertools.combinations(gaps, count):
            asks = [list(itertools.combinations_with_replacement(range(g[2], g[3]), 2)) for g in chosen]
            swaps = [(tensor, gap, int(of.size_bytes[tensor])) for tensor, gap, _, _ in chosen]
            for times in itertools.product(*asks):
                out = sorted((ask[0] % n, i) for i, ask in enumerate(times))
                back = sorted((ask[1] % n, i) for i, ask in enumerate(times))
                yield plan(swaps, [(i, op, 0) for op, i in out], [(i, op, 0) for op, i in back])


@given(problems(most_ops=4, most_tensors=3))
@settings(max_examples=25, deadline=None)
def test_the_best_of_all_small_plans_is_not_below_the_bound(of: SwapProblem) -> None:
    """On small problems the least overhead of all plans without delays, tried one by one, is at least the bound."""
    best = np.inf
    for made in itertools.islice(every_plan(of), 3000):
        judged = replay(of, made)
        if judged.is_good and judged.repeats:
            best = min(best, judged.duration_ns - of.period_ns)
    bound = least_overhead(of, of.limit_bytes or 1, least_bytes=1).value
    assert bound <= best + SLACK * max(of.period_ns, 1)


def idle_feature_map(limit: int | None = None, latency: int = 0) -> SwapProblem:
    """Return 100 bytes idle for operations 1 to 3 of 40 ns each, while 60 bytes live in operation 2."""
    links = Link(1e9, latency), Link(1e9, latency)
    return problem([40] * 5, [(100, 0, 4, (0, 4)), (60, 2, 2, (2,))], limit=limit, links=links)


def test_the_least_peak_is_what_the_time_allows() -> None:
    """In 40 ns 40 bytes leave before the peak and 40 return behind it, so 120 of 160 bytes stay: no less, no more."""
    assert idle_feature_map().peak_bytes == 160
    assert least_peak(idle_feature_map(), least_bytes=1).value == pytest.approx(120, rel=1e-4)


def test_the_least_overhead_is_both_directions() -> None:
    """Within 100 bytes 60 leave and return; 40 of each have the time, the other 20 are waited for twice."""
    assert least_overhead(idle_feature_map(), 100, least_bytes=1).value == pytest.approx(40, rel=1e-3)


def test_the_least_peak_falls_with_the_overhead() -> None:
    """An iteration of 200 ns that may take a tenth longer moves 10 bytes more each way."""
    assert least_peak(idle_feature_map(), 0.1, least_bytes=1).value == pytest.approx(110, rel=1e-4)


def test_latency_makes_the_bound_higher() -> None:
    """With 100 ns of latency for 100 bytes a link is half as fast, so half as much leaves."""
    assert least_peak(idle_feature_map(latency=100), least_bytes=1).value == pytest.approx(140, rel=1e-4)


def test_what_persists_leaves_across_the_boundary() -> None:
    """A weight used in the middle alone leaves at the end; what returns in operation 1 alone, 40 bytes, can be away."""
    of = problem([40] * 5, [(100, PERSISTENT, PERSISTENT, (2,)), (60, 0, 0, (0,))])
    assert least_peak(of, least_bytes=1).value == pytest.approx(120, rel=1e-4)


def test_what_ends_need_not_return() -> None:
    """Bytes that leave before the peak and end behind it take the link out only."""
    links = Link(1e9), Link(1e3)
    of = problem([40, 40, 40, 40], [(100, 0, 3, (0,)), (60, 2, 2, (2,))], links=links)
    assert least_peak(of, least_bytes=1).value == pytest.approx(120, rel=1e-4)


def test_a_limit_below_what_an_operation_needs_has_no_overhead_that_helps() -> None:
    """The bound is infinite where no plan can be."""
    assert least_overhead(idle_feature_map(), 99, least_bytes=1).value == np.inf


def test_the_bound_is_the_peak_where_nothing_is_idle() -> None:
    """Tensors that every operation uses cannot leave, and small ones do not."""
    busy = problem([5, 5], [(10, 0, 1, (0, 1))])
    assert least_peak(busy, least_bytes=1).value == pytest.approx(10)
    assert least_peak(idle_feature_map(), least_bytes=101).value == pytest.approx(160, rel=1e-4)
    assert replay(busy, no_swaps("none")).peak_bytes == 10
