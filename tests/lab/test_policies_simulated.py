"""The policies that only a simulator can run, against cases computed by hand; and what holds for every policy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu.support.scheduler_cases import WORKS, smallest_budget
from cpu.support.scheduler_model import MS, Work, triangle
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.scheduler.device_model import DeviceModel
from zico.scheduler.policies import POLICIES, policy_named
from zico.scheduler.simulate import Load, Outcome, Simulation

MIB = 1 << 20
DEVICE = DeviceModel("test", copy_bytes_per_s=MIB * 1e3, fault_ns=10 * MS, fault_bytes=MIB)
"""A region of 1 MiB is copied in 1 ms, and comes by a page fault of 10 ms."""
STARVE = {"partition", "tgs", "shift"}
"""Who is too large for its share cannot run, who does not come first may get nothing, and two small jobs in turn can
keep a large one waiting for as long as they run."""


def run(policy: str, loads: list[Load], budget: int, seconds: float = 20.0, **options: object) -> Outcome:
    """Simulate on that device."""
    simulation = Simulation(policy_named(policy), loads, budget, device=DEVICE, region_bytes=MIB, **options)  # type: ignore[arg-type]
    return simulation.run(round(seconds * 1e9))


def pair(work: Work, **second: object) -> list[Load]:
    """Return two jobs that do the same; the second differs as told."""
    return [work.load("a"), dataclasses.replace(work.load("b"), **second)]  # type: ignore[arg-type]


FLAT = Work((10,), 100 * MS)
"""Iterations of one step that touch ten regions, all of which the job keeps."""


# -- mps -------------------------------------------------------------------------------------------


def test_what_fits_is_not_paged() -> None:
    """Side by side in a budget of both peaks, every iteration takes as long as alone."""
    outcome = run("mps", pair(FLAT), 20)
    assert outcome.normalised == (1.0, 1.0)
    assert outcome.faulted == 0


def test_a_job_larger_than_memory_pages_in_every_iteration() -> None:
    """Of 20 regions 10 are elsewhere: each iteration brings 10 in for 10 ms each, and sends 10 out for 1 ms each.

    The first iteration fills its regions without a fault, and sends nothing out.
    """
    outcome = run("mps", [Work((20,), 100 * MS).load("a")], 10, seconds=0.1 + 0.21 * 50)
    assert outcome.iterations == (51,)
    assert outcome.peak_granted == 20
    assert outcome.faulted == pytest.approx(510)


def test_peaks_add_up_although_they_do_not_meet() -> None:
    """Frameworks keep what they once had: two triangles that would fit together page all the same."""
    loads = pair(triangle(20, kept=2), arrive_ns=50 * MS)
    outcome = run("mps", loads, 30)
    assert outcome.peak_granted == 40
    assert max(outcome.normalised) < 0.6
    assert run("claims", loads, 30).mean == pytest.approx(1.0, abs=0.02)


def test_the_scarcer_memory_is_the_more_is_paged() -> None:
    """Throughput rises with the budget up to the sum of the peaks."""
    means = [run("mps", pair(triangle(20, kept=2)), budget).mean for budget in (16, 24, 32, 40)]
    assert means == sorted(means)
    assert means[0] < means[1] < means[2] < means[3] == pytest.approx(1.0, abs=0.01)


# -- nvshare ---------------------------------------------------------------------------------------


def test_each_quantum_begins_with_page_faults() -> None:
    """Whoever gets the device brings its 10 regions in, in 110 ms: 9 of 10 iterations begin in a quantum of 1 s."""
    outcome = run("nvshare:quantum=1s", pair(FLAT), 10, seconds=20)
    assert outcome.iterations == (91, 90)
    assert outcome.faulted == pytest.approx(10 * 19, abs=20)


def test_a_quantum_costs_nothing_where_both_fit() -> None:
    """Half of the time each, no page fault, and jobs stop inside their iterations."""
    simulation = Simulation(policy_named("nvshare:quantum=170ms"), pair(triangle(20, kept=2)), 40)
    outcome = simulation.run(17 * 1_000 * MS)
    assert outcome.normalised == pytest.approx((0.5, 0.5), abs=0.015)
    assert outcome.faulted == 0
    assert outcome.reasons[1] == "the device is a's for a while"


def test_nobody_works_beside_the_holder() -> None:
    """On a device on which two are half as fast, nothing is lost: they never work together for longer than a step."""
    outcome = Simulation(
        policy_named("nvshare:quantum=1s"), pair(triangle(20, kept=2)), 40, slowdown=(1.0, 1.0, 2.0)
    ).run(20_000 * MS)
    assert outcome.normalised == pytest.approx((0.5, 0.5), abs=0.01)


# -- gandiva ---------------------------------------------------------------------------------------


def test_a_suspended_job_is_copied_out_at_its_boundary() -> None:
    """Where one fits at a time, ten slices of 1 s end nine times with the two kept regions on their way out."""
    outcome = run("gandiva:slice=1s", pair(triangle(20, kept=2)), 22, seconds=10)
    assert outcome.copied == 2 * 9
    assert sum(outcome.normalised) == pytest.approx(1.0, abs=0.05)
    assert outcome.peak_granted <= 22
    assert outcome.reasons[1] == "the device is a's for a while"


def test_copies_take_their_time() -> None:
    """Jobs that keep 20 regions lose 20 ms out and 20 ms in, and what is left of an iteration, in every slice."""
    many = run("gandiva:slice=1s", pair(triangle(30, kept=20)), 40, seconds=40)
    assert many.copied == 20 * 39
    assert 0.93 < sum(many.normalised) < 0.99


@pytest.mark.parametrize(("together", "each"), [(1.0, 1.0), (1.5, 2 / 3), (2.5, 0.5)])
def test_a_shared_slice_is_kept_only_if_it_pays(together: float, each: float) -> None:
    """Two jobs that fit try it; where each is slower than half, they go back to slices of their own."""
    outcome = Simulation(
        policy_named("gandiva:slice=1s"), pair(triangle(20, kept=2)), 40, slowdown=(1.0, 1.0, together)
    ).run(60_000 * MS, 6_000 * MS)
    assert outcome.mean == pytest.approx(each, abs=0.02)


def test_sharing_a_slice_can_be_forbidden() -> None:
    """Then each has half of the time, although both would fit."""
    assert run("gandiva:slice=1s,pack=off", pair(triangle(20, kept=2)), 40).mean == pytest.approx(0.5, abs=0.02)


# -- tgs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [{"priority": 1}, {"weight": 2.0}])
def test_who_comes_first_loses_nothing(by: dict[str, object]) -> None:
    """By priority, else by weight; on a device that two share evenly the other gets what little costs it nothing."""
    loads = pair(triangle(20, kept=2), **by)
    outcome = run("tgs:period=2s", loads, 40, seconds=200, slowdown=(1.0, 1.0, 2.0))
    assert outcome.normalised[1] > 0.9
    assert 0 < outcome.normalised[0] < 0.2
    assert outcome.reasons[0] in {"", "it runs as far as b loses nothing"}


def test_the_others_get_everything_if_it_costs_nothing() -> None:
    """Where jobs do not slow each other and both fit, the second one's share rises to the whole."""
    outcome = Simulation(policy_named("tgs:period=1s"), pair(triangle(20, kept=2)), 40).run(60 * 10**9, 30 * 10**9)
    assert outcome.normalised == pytest.approx((1.0, 1.0), abs=0.02)


def test_the_firsts_pages_stay() -> None:
    """Memory for one: the first never faults for the other's sake, and runs as if alone."""
    outcome = run("tgs:period=1s", pair(triangle(20, kept=2)), 22, seconds=60)
    assert outcome.normalised[0] > 0.99
    assert outcome.normalised[1] < 0.2
    assert outcome.faulted > 0


# -- partition -------------------------------------------------------------------------------------


def test_shares_are_by_weight_and_who_is_too_large_cannot_run() -> None:
    """Of 40 regions 30 are the first's, whose 20 fit, and 10 the second's, whose 20 do not."""
    loads = pair(triangle(20, kept=2))
    outcome = run("partition", [dataclasses.replace(loads[0], weight=3.0), loads[1]], 40)
    assert outcome.normalised == (1.0, 0.0)
    assert outcome.reasons == ("", "its peak exceeds its share of the budget")
    assert outcome.waited_ns[1] == pytest.approx(20e9, abs=1e7)
    assert run("partition", loads, 40).normalised == pytest.approx((1.0, 1.0), abs=0.01)


# -- every policy ----------------------------------------------------------------------------------

SLICED = {
    "gandiva": "gandiva:slice=1ms",
    "nvshare": "nvshare:quantum=1ms",
    "tgs": "tgs:period=1ms",
    "shift": "shift:poll=50us",
}


@pytest.mark.parametrize("name", list(POLICIES))
@given(
    works=st.lists(WORKS, min_size=1, max_size=4),
    spare=st.integers(0, 6),
    late=st.integers(0, 20),
    leaves=st.integers(0, 5),
)
@settings(max_examples=20, derandomize=True, deadline=None)
def test_what_holds_for_every_policy(name: str, works: list[Work], spare: int, late: int, leaves: int) -> None:
    """The budget is kept by all that do not page, the same seed gives the same, and who promises it starves nobody."""
    policy = policy_named(SLICED.get(name, name))
    budget = smallest_budget(works) + spare
    ms_each = [dataclasses.replace(work, step_ns=work.step_ns * MS // 16) for work in works]
    loads = [dataclasses.replace(work.load(f"job{i}"), arrive_ns=late * i * MS) for i, work in enumerate(ms_each)]
    loads[0] = dataclasses.replace(loads[0], iterations=leaves)
    runs = [Simulation(policy, loads, budget, 7, device=DEVICE, region_bytes=1 << 10, log=200) for _ in "ab"]
    outcomes = [one.run(100 * MS) for one in runs]
    assert outcomes[0] == outcomes[1]
    assert np.array_equal(runs[0].log, runs[1].log)
    assert policy.capabilities.pages or outcomes[0].peak_granted <= budget
    assert all(0 <= x <= 2.1 for x in outcomes[0].normalised)
    if name not in STARVE:
        assert all(outcomes[0].iterations)


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_job_alone_is_as_fast_as_alone(name: str) -> None:
    """Under every policy, with memory for its peak."""
    assert run(name, [triangle(20, kept=2).load("a")], 20).normalised == pytest.approx((1.0,), abs=0.001)
