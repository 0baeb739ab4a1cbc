"""The policies' rules, one by one and as properties of arbitrary views."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from cpu.support.scheduler_cases import Debt, some_order_works
from cpu.support.scheduler_views import claim, in_pool, planned, remaining, smallest_delay, that_yields, total
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.pool.layout import JobState
from zico.scheduler.plan import FIRST_FIT, PLAN
from zico.scheduler.plan_search import Plan
from zico.scheduler.policies import POLICIES, REAL, policy_named
from zico.scheduler.state import JobView, PoolView, Profile, Start, Wait

MS = 1_000_000
NOW_NS = 20 * MS
NO_MARGIN = 62


def profile(*levels: int) -> Profile:
    """Return a profile of 10 ms steps of 16 events each."""
    times = tuple(i * 10 * MS for i in range(len(levels)))
    return Profile(levels, times, len(levels) * 10 * MS, shift=4, n_events=16 * len(levels))


def job(
    number: int,
    levels: Profile | None,
    phase: JobState = JobState.BOUNDARY,
    *,
    held: int = 1,
    kept: int | None = None,
    progress: int = 0,
    since_ns: int | None = None,
) -> JobView:
    """Return a job at its boundary, or elsewhere; the events of a step of its profile go evenly."""
    return JobView(
        job=number,
        name=f"job{number}",
        phase=phase,
        held=held,
        persistent=held if kept is None else kept,
        claim=held,
        kept=held if kept is None else kept,
        most=held,
        progress=progress,
        in_bin_ns=progress % 16 * 10 * MS // 16,
        profile=levels,
        iteration=3,
        started_ns=NOW_NS - 5 * MS,
        waiting_since_ns=(number + 1 if since_ns is None else since_ns) if phase is JobState.BOUNDARY else 0,
    )


def pool(budget: int, *jobs: JobView, alone: int | None = None) -> PoolView:
    """Return a view of these jobs."""
    return in_pool(PoolView(NOW_NS, budget, jobs, alone))


SAW = profile(1, 3, 5, 3, 1)
LEVELS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@st.composite
def jobs(draw: st.DrawFn, phases: list[JobState]) -> list[JobView]:
    """Draw up to five profiled jobs that hold what their profiles say."""
    drawn = []
    for number in range(draw(st.integers(1, 5))):
        known = profile(*draw(LEVELS))
        phase = draw(st.sampled_from(phases))
        kept = known.held[-1]
        progress = draw(st.integers(0, known.n_events - 1)) if phase is JobState.RUNNING else 0
        held = known.held[progress >> 4] if phase is JobState.RUNNING else kept
        since_ns = draw(st.integers(1, 4))
        drawn.append(job(number, known, phase, held=held, kept=kept, progress=progress, since_ns=since_ns))
    return drawn


def first_in_turn(view: PoolView) -> JobView:
    """Return the job that has waited longest."""
    return min((j for j in view.jobs if j.phase is JobState.BOUNDARY), key=lambda j: (j.waiting_since_ns, j.job))


def smallest_budget(drawn: list[JobView]) -> int:
    """Return the least budget in which each job fits beside what all others keep between iterations."""
    kept = sum(j.persistent for j in drawn)
    return kept + max(max(j.persistent, j.profile.peak) - j.persistent for j in drawn if j.profile)


@pytest.mark.parametrize("name", REAL)
@given(waiting=jobs([JobState.BOUNDARY]), spare=st.integers(0, 9))
@settings(max_examples=120, derandomize=True, deadline=None)
def test_the_first_in_turn_starts_if_everybody_waits(name: str, waiting: list[JobView], spare: int) -> None:
    """If all are at their boundaries and each fits beside what the others keep, the longest waiting one starts."""
    view = pool(smallest_budget(waiting) + spare, *waiting)
    assert policy_named(name).decide(view)[first_in_turn(view).job] == Start()


@pytest.mark.parametrize("name", REAL)
@given(waiting=jobs([JobState.BOUNDARY]), spare=st.integers(0, 3))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_what_is_lent_keeps_nobody_from_its_turn(name: str, waiting: list[JobView], spare: int) -> None:
    """If all yield what they hold at their boundaries, who fits alone starts when it has waited longest."""
    yielding = [that_yields(j) for j in waiting]
    view = pool(max(max(j.persistent, j.profile.peak) for j in yielding if j.profile) + spare, *yielding)
    assert policy_named(name).decide(view)[first_in_turn(view).job] == Start()


@pytest.mark.parametrize("name", ["zico", "claims"])
@given(
    drawn=jobs([JobState.BOUNDARY, JobState.RUNNING, JobState.LEAVING]),
    yielding=st.lists(st.booleans(), min_size=5, max_size=5),
    spare=st.integers(0, 6),
)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_policies_start_only_to_safe_states(name: str, drawn: list[JobView], yielding: list[bool], spare: int) -> None:
    """Where those inside can all finish, those that start leave an order in which all can."""
    pairs = zip(drawn, yielding, strict=False)
    drawn = [that_yields(j) if yields and j.phase is JobState.BOUNDARY else j for j, yields in pairs]
    budget = smallest_budget(drawn) + spare
    inside = [Debt(j.held, claim(j), j.persistent) for j in drawn if j.phase is JobState.RUNNING]
    assume(some_order_works(budget - sum(j.held for j in drawn), inside))
    decisions = policy_named(name).decide(pool(budget, *drawn))
    assume(any(decision == Start() for decision in decisions.values()))
    going = [j for j in drawn if j.phase is JobState.RUNNING or decisions.get(j.job) == Start()]
    free = budget - sum(j.held for j in drawn) - sum(j.yielded for j in going)
    assert some_order_works(free, [Debt(j.held + j.yielded, claim(j), j.persistent) for j in going])


@given(drawn=jobs([JobState.BOUNDARY, JobState.RUNNING]), spare=st.integers(0, 3))
@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_nobody_behind_postpones_the_first_in_turn(drawn: list[JobView], spare: int) -> None:
    """With those who start now in flight, the first waiter's predicted start is no later than it was told."""
    assume(any(j.phase is JobState.BOUNDARY for j in drawn))
    budget = smallest_budget(drawn) + spare
    view = pool(budget, *drawn)
    first = first_in_turn(view)
    decisions = policy_named("zico").decide(view)
    told = decisions[first.job]
    if not isinstance(told, Wait) or told.until_ns is None or first.profile is None:
        reject()
    others = [
        planned(j, j.profile, 0) if decisions.get(j.job) == Start() and j.profile else remaining(j, NOW_NS)
        for j in view.jobs
        if j is not first
    ]
    again = smallest_delay(total(others), first, first.profile, budget)
    assert again.delay_ns <= told.until_ns - NOW_NS
    assert told.for_jobs


@given(drawn=jobs([JobState.BOUNDARY, JobState.RUNNING]), budget=st.integers(0, 30))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_every_waiting_job_gets_an_answer_and_the_same_one_twice(drawn: list[JobView], budget: int) -> None:
    """Every policy decides for exactly the jobs at their boundaries, and always alike."""
    view = pool(budget, *drawn)
    waiting = {j.job for j in drawn if j.phase is JobState.BOUNDARY}
    for name in POLICIES:
        decisions = policy_named(name).decide(view)
        assert set(decisions) == waiting
        assert policy_named(name).decide(view) == decisions


def test_zico_shifts_an_iteration_into_the_others_descent() -> None:
    """Beside a job that has just begun, a second one waits until both fit, names it and says when."""
    view = pool(8, job(0, SAW, JobState.RUNNING, held=1, kept=1), job(1, SAW))
    decision = policy_named("zico").decide(view)[1]
    assert decision == Wait((0,), NOW_NS + 10 * MS, "its peak would meet that of job0")


def test_zico_starts_when_the_delay_is_too_small_to_tell() -> None:
    """A predicted delay below the resolution of a profile does not keep a job waiting."""
    early = dataclasses.replace(SAW, t_ns=(0, *(t - 5 * MS for t in SAW.t_ns[1:])), duration_ns=45 * MS)
    runs = dataclasses.replace(job(0, early, JobState.RUNNING, held=1, kept=1), in_bin_ns=15 * 5 * MS // 16)
    view = pool(8, runs, job(1, SAW))
    others = total([remaining(view.jobs[0], NOW_NS)])
    assert 0 < smallest_delay(others, view.jobs[1], SAW, 8).delay_ns < SAW.duration_ns / 128
    assert policy_named("zico").decide(view)[1] == Start()


def test_zico_lets_a_small_job_pass_one_that_waits() -> None:
    """A later job starts beside the reservation of an earlier one if it does not touch it."""
    large, small = profile(1, 9, 9, 9, 1), profile(1, 2, 1)
    view = pool(12, job(0, large, JobState.RUNNING, held=9, kept=1, progress=17), job(1, large), job(2, small))
    decisions = policy_named("zico").decide(view)
    assert isinstance(decisions[1], Wait)
    assert decisions[2] == Start()


def test_zico_holds_a_later_job_that_would_postpone_an_earlier_one() -> None:
    """A later job that fits now but would still sit on memory at the reservation waits, also for the earlier one."""
    first, second, long = profile(1, 9, 1), profile(1, 10, 1), profile(1, *[3] * 9, 1)
    view = pool(13, job(0, first, JobState.RUNNING, held=1, kept=1, progress=15), job(1, second), job(2, long))
    decisions = policy_named("zico").decide(view)
    assert isinstance(decisions[1], Wait)
    assert isinstance(decisions[2], Wait)
    assert decisions[2].for_jobs == (1,)


@pytest.mark.parametrize(("served", "starts"), [(0.3, True), (0.2, False)])
def test_by_first_fit_a_later_job_waits_for_one_below_its_floor_only(served: float, *, starts: bool) -> None:
    """A later job may postpone an earlier one that has got its floor, and none that has not."""
    first, second, long = profile(1, 9, 1), profile(1, 10, 1), profile(1, *[3] * 9, 1)
    earlier = dataclasses.replace(job(1, second), served=served, floor=0.25)
    view = pool(13, job(0, first, JobState.RUNNING, held=1, kept=1, progress=15), earlier, job(2, long))
    record = np.zeros(1, PLAN)
    learnt = record[0]["learnt"]
    learnt["n_ways"], learnt["ways"][0]["setting"] = 1, NO_MARGIN | FIRST_FIT
    decisions = policy_named("zico").decide(dataclasses.replace(view, plan=Plan(record)))
    assert isinstance(decisions[1], Wait)
    assert (decisions[2] == Start()) is starts


@pytest.mark.parametrize("name", ["zico", "claims", "serial"])
def test_a_job_that_can_never_fit_waits_and_holds_nobody_up(name: str) -> None:
    """A peak that does not fit beside what the others keep is refused with the quantities; the next one starts."""
    view = pool(10, job(0, profile(1, 9, 1)), job(1, SAW, held=2), job(2, SAW, held=1))
    decisions = policy_named(name).decide(view)
    refused = decisions[0]
    assert isinstance(refused, Wait)
    assert refused.until_ns is None
    assert refused.for_jobs == (1, 2)
    assert all(quantity in refused.reason for quantity in ("peak of 9 regions", "keep 3", "budget of 10"))
    assert decisions[1] == Start()


@pytest.mark.parametrize("name", ["zico", "claims", "serial"])
def test_the_first_in_turn_starts_if_none_fits_and_all_wait(name: str) -> None:
    """Jobs none of which fits beside what the others keep take turns all the same instead of waiting for ever."""
    large = profile(4, 9, 4)
    view = pool(10, job(0, large, held=4, since_ns=7), job(1, large, held=4, since_ns=3))
    decisions = policy_named(name).decide(view)
    assert decisions[1] == Start()
    assert isinstance(decisions[0], Wait)
    leaving = policy_named(name).decide(pool(10, *view.jobs, job(2, None, JobState.LEAVING, held=1)))
    assert {type(decision) for decision in leaving.values()} == {Wait}


@pytest.mark.parametrize("name", ["zico", "claims", "serial"])
def test_nobody_starts_while_a_first_iteration_grows(name: str) -> None:
    """Everybody waits for the job that runs alone, however much memory there is."""
    view = pool(99, job(0, None, JobState.RUNNING), job(1, SAW), job(2, SAW), alone=0)
    decisions = policy_named(name).decide(view)
    assert decisions == dict.fromkeys((1, 2), Wait((0,), None, "the first iteration of job0 runs alone"))


def test_zico_lets_an_unknown_job_start_and_keeps_those_behind_it() -> None:
    """A job without a profile starts when its turn comes, and then runs alone."""
    decisions = policy_named("zico").decide(pool(99, job(0, None), job(1, SAW)))
    assert decisions == {0: Start(), 1: Wait((0,), None, "the first iteration of job0 runs alone")}


def test_zico_is_not_held_up_by_a_job_that_has_not_begun_to_grow() -> None:
    """A job without a profile that does not run alone counts with what it holds."""
    view = pool(8, job(0, None, JobState.RUNNING, held=3), job(1, SAW))
    assert policy_named("zico").decide(view)[1] == Start()


def test_zico_refuses_a_start_that_no_order_survives() -> None:
    """While jobs in flight exceed what their profiles said and cannot all finish, only who can finish joins them."""
    stuck = [job(i, profile(1, 9, 1), JobState.RUNNING, held=5, kept=1, progress=16) for i in (0, 1)]
    decision = policy_named("claims").decide(pool(12, *stuck, job(2, profile(1, 4, 1))))[2]
    assert isinstance(decision, Wait)
    assert decision.for_jobs == (0, 1)
    assert decision.until_ns is None
    assert policy_named("zico").decide(pool(12, *stuck, job(2, profile(1))))[2] == Start()


def test_serial_runs_one_iteration_at_a_time() -> None:
    """While one job is in an iteration the others wait for it; then the one that has waited longest starts."""
    view = pool(99, job(0, SAW, JobState.RUNNING), job(1, SAW, since_ns=9), job(2, SAW, since_ns=3))
    assert {type(d) for d in policy_named("serial").decide(view).values()} == {Wait}
    idle = pool(99, job(0, SAW, since_ns=12), *view.jobs[1:])
    decisions = policy_named("serial").decide(idle)
    assert [number for number, d in decisions.items() if d == Start()] == [2]
    assert all(d.for_jobs == (2,) for d in decisions.values() if isinstance(d, Wait))


def test_none_starts_everybody() -> None:
    """Without coordination nobody waits at a boundary, whatever fits, and no grant is checked."""
    policy = policy_named("none")
    assert set(policy.decide(pool(1, job(0, SAW), job(1, None), alone=0)).values()) == {Start()}
    assert (policy.use_claims, policy.self_admit) == (False, True)


def test_policies_are_found_by_their_names() -> None:
    """Every listed policy says its own name and whether brokers can run it; three forbid jobs to start unasked."""
    found = [policy_named(name) for name in POLICIES]
    assert [policy.name for policy in found] == list(POLICIES)
    assert [policy.name for policy in found if policy.capabilities.runs] == list(REAL)
    assert [policy.name for policy in found if not policy.self_admit] == ["shift", "serial", "salus"]


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    """The message quotes the name and lists every policy."""
    with pytest.raises(
        ConfigError, match="'fair' is not a policy: choose one of zico, shift, claims, serial, salus, none, gan"
    ):
        policy_named("fair")


def test_listing_policies_loads_no_compiler() -> None:
    """The names can be shown by a command without waiting for Numba."""
    code = "import sys, zico.scheduler.policies; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def crowd(n: int, budget: int) -> PoolView:
    """Return so many equal jobs at their boundaries; the last has waited longest."""
    return pool(budget, *(job(i, SAW, since_ns=1 + n - i) for i in range(n)))


@pytest.mark.parametrize("known", [None, SAW], ids=["unknown", "known by now"])
@pytest.mark.parametrize("name", ["zico", "claims"])
def test_a_first_iteration_grows_alone_even_where_all_peaks_fit(name: str, known: Profile | None) -> None:
    """Peaks that fit together start nobody while a job of which nothing is known grows."""
    view = pool(1_000, job(0, known, JobState.RUNNING), job(1, SAW), job(2, SAW), alone=0)
    assert all(isinstance(one, Wait) for one in policy_named(name).decide(view).values())


@pytest.mark.parametrize("n", [2, 24, 25, 200])
@pytest.mark.parametrize("name", ["zico", "serial"])
def test_the_longest_waiting_of_any_number_starts_first(name: str, n: int) -> None:
    """Where one more fits beside what all keep, that is the one that has waited longest, and no other."""
    said = policy_named(name).decide(crowd(n, n - 1 + SAW.peak))
    assert [i for i in range(n) if isinstance(said[i], Start)] == [n - 1]


def test_claims_look_at_so_many_and_no_more() -> None:
    """Of a crowd that could all finish in turn, those that have waited longest start; the rest wait for the first."""
    said = policy_named("claims").decide(crowd(200, 199 + SAW.peak))
    started = [i for i in range(200) if isinstance(said[i], Start)]
    assert 0 < len(started) < 200
    assert started == list(range(200 - len(started), 200))
    waiting = said[0]
    assert isinstance(waiting, Wait)
    assert waiting.for_jobs == (199,)


@pytest.mark.parametrize("name", ["zico", "claims"])
def test_all_start_where_all_peaks_fit(name: str) -> None:
    """With room for every peak nobody waits, however many they are."""
    said = policy_named(name).decide(crowd(100, 100 * SAW.peak + 100))
    assert all(isinstance(one, Start) for one in said.values())
