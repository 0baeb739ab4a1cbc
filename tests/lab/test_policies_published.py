"""The published schedulers: what shift predicts and when it asks, and whom the lanes of salus let go on."""

from __future__ import annotations

import dataclasses

import pytest
from cpu.support.scheduler_cases import WORKS, smallest_budget
from cpu.support.scheduler_model import MS, Work, triangle
from cpu.support.scheduler_views import in_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.lab.policies.salus import lanes_of
from zico.pool.layout import JobState
from zico.scheduler.packed import Snapshot
from zico.scheduler.policies import policy_named
from zico.scheduler.policies.shift import iteration_demand
from zico.scheduler.simulate import Load, Outcome, Simulation
from zico.scheduler.state import JobView, PoolView, Profile, Start, Wait


def profile(*levels: int) -> Profile:
    """Return a profile of steps of 10 ms."""
    times = tuple(i * 10 * MS for i in range(len(levels)))
    return Profile(levels, times, len(levels) * 10 * MS, shift=4, n_events=16 * len(levels))


def view_of(number: int, known: Profile | None, phase: JobState = JobState.BOUNDARY, **changes: object) -> JobView:
    """Return a job that holds one region and has waited the longer the smaller its number."""
    job = JobView(
        job=number,
        name=f"job{number}",
        phase=phase,
        held=1,
        persistent=1,
        claim=1,
        kept=1,
        most=1,
        profile=known,
        iteration=1,
        started_ns=900 * MS,
        waiting_since_ns=number + 1,
    )
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]


def pool(budget: int, *jobs: JobView, now_ns: int = 1_000 * MS) -> PoolView:
    """Return a view of these jobs."""
    return in_pool(PoolView(now_ns, budget, jobs))


def run(policy: str, loads: list[Load], budget: int, seconds: float = 20.0, **options: object) -> Outcome:
    """Simulate; the first second does not count."""
    simulation = Simulation(policy_named(policy), loads, budget, **options)  # type: ignore[arg-type]
    return simulation.run(round(seconds * 1e9), 1_000 * MS)


# -- shift -----------------------------------------------------------------------------------------

FIGURE = profile(1, 4, 2, 6, 9, 5, 6, 2)


def demand(job: JobView, lasts_ns: int, since_ns: int) -> tuple[list[int], list[int]]:
    """Return what is predicted of a job, in milliseconds and regions."""
    snapshot = Snapshot(pool(99, job))
    t_ns, levels = iteration_demand(snapshot.jobs[0], lasts_ns, since_ns)
    return [t // MS for t in t_ns.tolist()], levels.tolist()


def test_feature_maps_rise_until_the_peak_and_fall_after_it() -> None:
    """The figure at the top of the module; what comes and goes meanwhile is kept apart all the time."""
    t_ms, levels = demand(view_of(0, FIGURE), 80 * MS, 0)
    assert levels == [3, 4, 4, 8, 11, 7, 7, 4, 1]
    assert t_ms == [0, 10, 20, 30, 40, 50, 60, 70, 80]


def test_a_prediction_is_as_long_as_the_last_iteration() -> None:
    """Twice as long an iteration stretches it all."""
    assert demand(view_of(0, FIGURE), 160 * MS, 0)[0] == [0, 20, 40, 60, 80, 100, 120, 140, 160]


def test_of_an_iteration_in_flight_the_rest_is_predicted_by_the_clock() -> None:
    """What is live is held at least until the next step; an overdue one holds what it holds."""
    inside = view_of(0, FIGURE, JobState.RUNNING, held=12)
    assert demand(inside, 80 * MS, 45 * MS) == ([0, 5, 15, 25, 35], [12, 7, 7, 4, 1])
    assert demand(inside, 80 * MS, 80 * MS) == ([0], [12])


def late_start_ms(policy: str) -> int:
    """Return when the second of two jobs first rises beside the first one, whose peaks do not fit together."""
    loads = [Work((2, 10, 10, 2), 10 * MS).load(name) for name in "ab"]
    simulation = Simulation(policy_named(policy), loads, 14, log=1_000)
    simulation.run(200 * MS)
    entries = simulation.log[: int(simulation._run[0]["n_log"])]
    return int(min(e["t_ns"] for e in entries if (e["sim_job"], e["held"]) == (1, 10) and e["t_ns"] > 80 * MS)) // MS


@pytest.mark.parametrize(("poll_ms", "begins_ms"), [(7, 101), (5, 100), (30, 110), (20, 100)])
def test_shift_begins_at_the_first_question_after_the_delay(poll_ms: int, begins_ms: int) -> None:
    """After first iterations, one after the other until 80 ms, a delay of 20 ms ends at a multiple of the quantum.

    It rises a step of 10 ms after it began.
    """
    assert late_start_ms(f"shift:ramp=1,poll={poll_ms}ms") == begins_ms + 10


def test_shift_does_not_ask_before_its_quantum_is_over() -> None:
    """A job that would fit by now waits all the same; once it asks it starts."""
    policy = policy_named("shift:ramp=1,poll=10ms")
    saw, now_ns = profile(1, 9, 1), 1_000 * MS
    inside = view_of(0, saw, JobState.RUNNING, started_ns=now_ns)
    first = policy.decide(pool(12, inside, view_of(1, saw)))[1]
    assert first == Wait((0,), now_ns + 10 * MS, "its peak would meet that of job0")
    ended = view_of(0, saw, JobState.RUNNING, started_ns=now_ns - 29 * MS)
    assert policy.decide(pool(12, ended, view_of(1, saw), now_ns=now_ns + 5 * MS))[1] == first
    assert policy.decide(pool(12, ended, view_of(1, saw), now_ns=now_ns + 10 * MS))[1] == Start()


def test_shift_forgets_when_the_jobs_are_others() -> None:
    """With another job there, the one that waits asks again at once."""
    policy = policy_named("shift:ramp=1,poll=10ms")
    saw, now_ns = profile(1, 9, 1), 1_000 * MS
    inside = view_of(0, saw, JobState.RUNNING, started_ns=now_ns)
    assert isinstance(policy.decide(pool(12, inside, view_of(1, saw)))[1], Wait)
    other = view_of(2, saw, JobState.RUNNING, started_ns=now_ns - 29 * MS)
    assert policy.decide(pool(12, other, view_of(1, saw), now_ns=now_ns + 1))[1] == Start()


def test_a_first_iteration_runs_alone() -> None:
    """Nobody begins beside it, nor it beside anybody, until others have waited long enough for one that never ends."""
    policy = policy_named("shift:profiling=1s")
    saw = profile(1, 3, 1)
    unknown = view_of(0, None, JobState.RUNNING)
    told = policy.decide(pool(99, unknown, view_of(1, saw)))[1]
    assert isinstance(told, Wait)
    assert told.reason == "the first iteration of job0 runs alone"
    assert policy.decide(pool(99, unknown, view_of(1, saw), now_ns=1_901 * MS))[1] == Start()
    beside = policy_named("shift").decide(pool(99, view_of(0, saw, JobState.RUNNING), view_of(1, None)))[1]
    assert isinstance(beside, Wait)


def test_a_newcomer_gets_its_first_iteration() -> None:
    """Jobs that are never all at their boundaries make room for one that has to run alone."""
    loads = [dataclasses.replace(triangle(2).load(f"job{i}"), arrive_ns=i * 30 * MS) for i in range(3)]
    assert run("shift", loads, 99, seconds=5).mean == pytest.approx(1.0, abs=0.01)


def test_the_ramp_lowers_the_budget_of_predictions() -> None:
    """With half of it and no step up, jobs never hold more than half together; with the whole they do."""
    loads = [dataclasses.replace(triangle(20, kept=2).load(name), arrive_ns=i * MS) for i, name in enumerate("ab")]
    low, whole = run("shift:ramp=0.5,step=0", loads, 44), run("shift:ramp=1", loads, 44)
    assert low.peak_granted <= 22 < whole.peak_granted
    assert run("shift:ramp=0.5,step=0.1", loads, 44).peak_granted > 22


def test_a_failed_prediction_falls_back_to_one_at_a_time() -> None:
    """Profiles that say too little let jobs block inside; then iterations take turns, for as many as told."""
    loads = [dataclasses.replace(triangle(20, kept=2).load(n), believed=profile(2, 3, 2)) for n in "ab"]
    loads[1] = dataclasses.replace(loads[1], arrive_ns=9 * MS)
    falls_back = run("shift:ramp=1,fallback=1000", loads, 26)
    assert falls_back.mean == pytest.approx(0.5, abs=0.02)
    assert "its turn comes after" in "".join(falls_back.reasons)
    assert run("shift:ramp=1,fallback=0", loads, 26).mean > 0.6


# -- salus -----------------------------------------------------------------------------------------


def lanes(budget: int, *peaks: int, most: int = 0) -> list[int]:
    """Return the lanes of jobs that hold nothing between iterations."""
    jobs = [view_of(i, profile(0, peak, 0), held=0, persistent=0) for i, peak in enumerate(peaks)]
    snapshot = Snapshot(pool(budget, *jobs))
    return lanes_of(snapshot.snapshot[0], most).tolist()  # type: ignore[no-any-return]


def test_lanes_open_while_they_fit_and_are_joined_then() -> None:
    """As the published code has it: a lane of one's own if it fits, else the lane that has to grow the least."""
    assert lanes(60, 20, 20, 20) == [0, 1, 2]
    assert lanes(30, 20, 20, 10) == [0, 0, 1]
    assert lanes(35, 20, 10, 25) == [0, 1, 0]
    assert lanes(30, 20, 10, 29) == [0, 1, -1]
    assert lanes(60, 20, 20, 20, most=1) == [0, 0, 0]


def test_the_jobs_of_a_lane_take_turns_beside_another_lane() -> None:
    """Two jobs of 20 share a lane and get half each; the one of 10 has its own and gets everything."""
    loads = [triangle(peak).load(name) for peak, name in ((20, "a"), (20, "b"), (10, "c"))]
    outcome = run("salus", loads, 30)
    assert outcome.normalised == pytest.approx((0.5, 0.5, 1.0), abs=0.02)
    assert outcome.reasons[0] == "it shares a lane with b, whose iteration goes on"
    assert run("salus:lanes=1", loads, 60).normalised == pytest.approx((1 / 3,) * 3, abs=0.02)


def shared_lane(**second: object) -> list[Load]:
    """Return two jobs of which one fits at a time; the second differs as told."""
    first = dataclasses.replace(triangle(20).load("a"), iterations=50)
    other = dataclasses.replace(triangle(20).load("b"), iterations=50)
    return [first, dataclasses.replace(other, **second)]  # type: ignore[arg-type]


def left_s(policy: str, loads: list[Load]) -> list[float]:
    """Return when jobs have done their iterations, in seconds."""
    return [left_ns / 1e9 for left_ns in run(policy, loads, 20, seconds=30).left_ns]


def test_the_order_of_a_lane() -> None:
    """First come first served ends one after the other, shortest first the short one, fairness both together."""
    short = shared_lane(iterations=10)
    assert left_s("salus:order=fifo", shared_lane()) == pytest.approx([5.1, 10.0], abs=0.11)
    assert left_s("salus:order=srtf", short) == pytest.approx([6.0, 1.1], abs=0.11)
    assert left_s("salus:order=fifo", short) == pytest.approx([5.1, 6.0], abs=0.11)
    assert left_s("salus:order=fair", shared_lane()) == pytest.approx([10.0, 10.0], abs=0.21)
    assert left_s("salus:order=pack", shared_lane()) == pytest.approx([10.0, 10.0], abs=0.11)


def test_fairness_heeds_weights() -> None:
    """A job of weight 3 gets three turns of four."""
    loads = [dataclasses.replace(load, iterations=0) for load in shared_lane(weight=3.0)]
    assert run("salus:order=fair", loads, 20).normalised == pytest.approx((0.25, 0.75), abs=0.05)


@given(works=st.lists(WORKS, min_size=1, max_size=5), spare=st.integers(0, 6), order=st.sampled_from(["pack", "fifo"]))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_lanes_are_safe_without_any_prediction(works: list[Work], spare: int, order: str) -> None:
    """Whatever the jobs do and however long they take, nobody overflows and the budget is kept."""
    budget = smallest_budget(works) + spare
    loads = [dataclasses.replace(work.load(f"job{i}"), arrive_ns=3 * i) for i, work in enumerate(works)]
    outcome = Simulation(policy_named(f"salus:order={order}"), loads, budget).run(2_000)
    assert outcome.stalls == 0
    assert outcome.peak_granted <= budget
    if order == "pack":
        assert all(outcome.iterations)
