"""What ``zico`` plans for the jobs that are there: never the worse way, and nobody left behind."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.scheduler_cases import smallest_budget
from cpu.support.scheduler_model import MS, Model, Outcome, Work, plateau, triangle
from cpu.support.scheduler_views import in_pool, keeping, that_yields
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.pool.layout import JobState
from zico.pool.rules import STILL_ITERATIONS, STILL_NS
from zico.scheduler.best_schedule import best_run, bit_of, cells_for, graph
from zico.scheduler.layout import Reason
from zico.scheduler.learning import BETTER_BY
from zico.scheduler.packed import Compiled
from zico.scheduler.plan import PLAN, Way, decide
from zico.scheduler.plan_search import Plan, plan
from zico.scheduler.policies import policy_named
from zico.scheduler.shares import GUARD
from zico.scheduler.simulate import Load, Simulation, load_of
from zico.scheduler.state import Decision, JobView, PoolView, Start, Wait

if TYPE_CHECKING:
    from zico.scheduler.state import CompiledPolicy

ZICO = policy_named("zico")
SHIFT = Compiled("shift", decide)
CLAIMS = policy_named("claims")
ROUNDING = 0.02
"""The figures of 30 iterations can differ by a part of one at either end."""

WORKS = st.builds(
    plateau,
    st.integers(20, 60),
    rise=st.sampled_from([0.1, 0.4, 0.8]),
    fall=st.sampled_from([0.1, 0.2]),
    steps=st.sampled_from([32, 48]),
    kept=st.integers(0, 8),
    duration_ns=st.sampled_from([48, 72, 144]).map(lambda ms: ms * MS),
)


def view_of(works: list[Work], budget: int, floor: float = 0.0) -> PoolView:
    """Return jobs at their boundaries, whose profiles are known."""
    loads = [work.load(f"job{i}") for i, work in enumerate(works)]
    return PoolView(
        now_ns=MS,
        budget=budget,
        jobs=tuple(
            JobView(
                job=i + 5,
                name=load.name,
                phase=JobState.BOUNDARY,
                held=load.persistent,
                persistent=load.persistent,
                claim=load.persistent,
                kept=load.persistent,
                most=load.profile.peak,
                profile=load.profile,
                iteration=3,
                waiting_since_ns=1 + i,
                floor=floor,
            )
            for i, load in enumerate(loads)
        ),
    )


def decided(view: PoolView) -> dict[int, Decision]:
    """Return what zico decides where the pool goes by the jobs' profiles."""
    return ZICO.decide(in_pool(view))


def budget_of(works: list[Work], share: float) -> int:
    """Return a share of the sum of the peaks, at least what lets each job end."""
    return max(smallest_budget(works), int(share * sum(max(work.levels) for work in works)))


def score(outcome: Outcome) -> float:
    """Return the mean throughput less what the jobs lack of half of an equal share."""
    owed = 0.97 * GUARD / len(outcome.normalised)
    return outcome.mean - sum(max(0.0, owed - each) for each in outcome.normalised)


@given(works=st.lists(WORKS, min_size=2, max_size=3), share=st.sampled_from([0.6, 0.7, 0.8]))
@settings(max_examples=12, derandomize=True, deadline=None)
def test_zico_is_the_better_of_shift_and_claims(works: list[Work], share: float) -> None:
    """With exact profiles the plan gets the jobs as far as either greedy way that is as fair, up to rounding."""
    budget = budget_of(works, share)
    arriving = [dataclasses.replace(work, arrive_ns=7 * i * MS) for i, work in enumerate(works)]
    longest_ns = max(work.duration_ns for work in works)
    outcomes = [Model(p, arriving, budget).run(48 * longest_ns, 8 * longest_ns) for p in (ZICO, SHIFT, CLAIMS)]
    scores = [score(outcome) for outcome in outcomes]
    assert scores[0] >= max(scores[1:]) - ROUNDING


@pytest.mark.parametrize("n", [12, 16])
def test_many_equal_jobs_get_what_shift_gives_them(n: int) -> None:
    """Trials are of jobs whose profiles are known, so what shift gives is no surprise and no worse way is tried."""
    works = [plateau(60, rise=0.3, fall=0.1, steps=48, kept=4, duration_ns=96 * MS)] * n
    budget = budget_of(works, 0.6)
    until_ns, warm_up_ns = (n + 48) * works[0].duration_ns, (n + 8) * works[0].duration_ns
    got = [Model(p, works, budget).run(until_ns, warm_up_ns).mean for p in (ZICO, SHIFT, policy_named("shift"))]
    assert got[0] >= 0.98 * max(got[1:])


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("work", [triangle(60), plateau(60, rise=0.1, fall=0.1, kept=7)])
def test_nobody_is_held_back_where_all_peaks_fit(work: Work, n: int) -> None:
    """With exactly the sum of the peaks everybody is as fast as alone."""
    works = [dataclasses.replace(work, step_ns=work.step_ns + i * MS // 8) for i in range(n)]
    longest_ns = max(each.duration_ns for each in works)
    outcome = Model(ZICO, works, budget_of(works, 1)).run(88 * longest_ns, (8 + n) * longest_ns)
    assert min(outcome.normalised) >= 0.999


@given(works=st.lists(WORKS, min_size=2, max_size=4), share=st.sampled_from([0.6, 0.7, 0.8]))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_nobody_starves(works: list[Work], share: float) -> None:
    """Every job comes near half of the share that serial execution would give it."""
    longest_ns = max(work.duration_ns for work in works)
    outcome = Model(ZICO, works, budget_of(works, share)).run(68 * longest_ns, 8 * longest_ns)
    assert outcome.stalls == 0
    assert min(outcome.normalised) >= 0.8 * GUARD / len(works)


def test_a_floor_is_heeded() -> None:
    """A plan under which a job falls below what it is owed gives way to one under which none does."""
    works = [plateau(60, rise=0.05, fall=0.05), plateau(60, rise=0.05, fall=0.05, duration_ns=33 * MS)]
    loads = [dataclasses.replace(work.load(f"job{i}"), floor=0.5) for i, work in enumerate(works)]
    outcome = Simulation(ZICO, loads, 66).run(200 * 100 * MS, 20 * 100 * MS)
    assert min(outcome.normalised) >= 0.9 / 2


@pytest.mark.parametrize(
    ("works", "budget"),
    [
        pytest.param([triangle(60)], 40, id="one job"),
        pytest.param([triangle(60)] * 2, 120, id="the peaks fit together"),
        pytest.param([], 10, id="nobody"),
    ],
)
def test_there_is_nothing_to_choose(works: list[Work], budget: int) -> None:
    """One job, or jobs whose peaks fit together, need no plan."""
    assert plan(view_of(works, budget)) is None


def test_a_plan_is_made_though_all_lack_what_they_are_owed() -> None:
    """Guarantees that no way can give leave scores below 0, and still the best way is taken."""
    view = view_of([plateau(60, rise=0.05, fall=0.05, kept=2)] * 4, 70, floor=0.95)
    found = plan(view)
    assert isinstance(found, Plan)
    assert 0.1 < found.mean < 0.5


def test_a_plan_is_kept_for_jobs_that_are_nearly_the_same() -> None:
    """What was learnt with a plan outlasts a profile that changes a little; another budget needs another plan."""
    works = [plateau(60, rise=0.2, fall=0.2, kept=2)] * 2
    pool = view_of(works, 80)
    found = plan(pool)
    slower = view_of([dataclasses.replace(work, step_ns=work.step_ns * 33 // 32) for work in works], 80)
    other = view_of([dataclasses.replace(work, step_ns=work.step_ns * 5 // 4) for work in works], 80)
    assert plan(dataclasses.replace(slower, plan=found)) is found
    assert plan(dataclasses.replace(other, plan=found)) is not found
    assert plan(dataclasses.replace(pool, budget=81, plan=found)) is not found


def test_a_profile_that_mends_is_planned_for() -> None:
    """A plan is asked for with what is believed at first, and again once something else is."""
    works = [plateau(60, rise=0.2, fall=0.2, kept=2)] * 2
    wrong = plateau(50, rise=0.2, fall=0.2, kept=2).load("").profile
    loads = [work.load(f"job{i}") for i, work in enumerate(works)]
    loads = [dataclasses.replace(load, believed=wrong, later=((3, load.profile),)) for load in loads]
    peaks: list[list[int]] = []

    def noted(view: PoolView) -> None:
        peaks.append([job.profile.peak for job in view.jobs if job.profile is not None])

    Simulation(Compiled("", decide, plan=noted), loads, 90).run(10 * works[0].duration_ns)
    assert peaks[-1] == [60, 60]
    assert [50, 50] in peaks


def test_jobs_without_a_profile_are_left_out() -> None:
    """With only one job known there is nothing to choose yet."""
    pool = view_of([triangle(60)] * 2, 90)
    unknown = dataclasses.replace(pool.jobs[1], profile=None)
    assert plan(dataclasses.replace(pool, jobs=(pool.jobs[0], unknown))) is None


def test_many_jobs_are_planned_for_once_all_are_known() -> None:
    """Claims for most of them, however good, leave a convoy behind; few that are known do not wait for a stranger."""
    works = [plateau(20, rise=0.2, fall=0.2, kept=2)] * 10
    for n, planned in ((8, True), (10, False)):
        pool = view_of(works[:n], 12 * n)
        unknown = dataclasses.replace(pool.jobs[0], profile=None)
        assert (plan(dataclasses.replace(pool, jobs=(unknown, *pool.jobs[1:]))) is not None) is planned
        assert plan(pool) is not None


def test_a_pairs_plan_is_for_that_pair() -> None:
    """It names the jobs that it is for; of other jobs it decides as if there were none."""
    works = [
        plateau(60, rise=0.2, fall=0.2, steps=48, kept=6, duration_ns=144 * MS),
        triangle(40, steps=48, kept=3, duration_ns=48 * MS),
    ]
    pool = view_of(works, 84)
    found = plan(pool)
    assert isinstance(found, Plan)
    learnt = found.record[0]["learnt"]
    assert learnt["ways"][0]["way"] == Way.SCHEDULE
    assert learnt["jobs"][: learnt["n_jobs"]].tolist() == [5, 6]
    loads = [load_of(job, job.profile) for job in pool.jobs if job.profile is not None]
    cells = cells_for(loads, int(found.record[0]["best"]["cell_ns"]))
    _chosen, ratio = best_run(graph(cells, pool.budget, any_wait=False), np.full(2, 0.5), (1.0,))
    assert found.mean == pytest.approx(ratio[0], abs=ROUNDING)
    other = dataclasses.replace(pool, jobs=(pool.jobs[0], dataclasses.replace(pool.jobs[1], job=9)), plan=found)
    mine = dataclasses.replace(pool, plan=found)
    assert decisions_along(ZICO, other) == decisions_along(SHIFT, pool)
    assert decisions_along(ZICO, mine) != decisions_along(SHIFT, pool)


def decisions_along(policy: CompiledPolicy, pool: PoolView) -> list[str]:
    """Return what is said of the second job while the first goes through its iteration."""
    first, profile = pool.jobs[0], pool.jobs[0].profile
    assert profile is not None
    said = []
    for step, held in enumerate(profile.held):
        running = dataclasses.replace(first, phase=JobState.RUNNING, held=held, progress=step << profile.shift)
        view = dataclasses.replace(pool, now_ns=MS + profile.t_ns[step], jobs=(running, pool.jobs[1]))
        said += [type(decision).__name__ for decision in policy.decide(view).values()]
    return said


def starving(n: int, cell_ns: int, last: int) -> Plan:
    """Return a plan for the first jobs by which all but one go on for ever, unless that one alone is owed something."""
    record = np.zeros(1, PLAN)
    learnt, best = record[0]["learnt"], record[0]["best"]
    learnt["n_jobs"], learnt["jobs"][:n] = n, range(n)
    learnt["n_ways"], learnt["ways"][0]["way"] = 1, Way.SCHEDULE
    best["cell_ns"], best["n_cells"][:n] = cell_ns, 4
    best["actions"] = (1 << n) - 1 - bit_of(last, n)
    best["actions"][1 + last] = bit_of(last, n)
    return Plan(record)


@pytest.mark.parametrize(("n", "last"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_who_is_never_started_comes_to_be_owed_that(n: int, last: int) -> None:
    """By a plan that starves a job its share falls although it ends no iteration, and then it is favoured."""
    works = [triangle(60, kept=2)] * n
    policy = Compiled("starving", decide, plan=lambda _view: starving(n, 25 * MS, last))
    outcome = Model(policy, works, 60 * n - 50).run(200 * 100 * MS)
    assert min(outcome.normalised) > 0.4 / n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_who_waits_for_one_that_begins_now_is_asked_again_in_time(n: int) -> None:
    """Where all stand at their boundaries and one is to begin later, it waits until the others are that far."""
    known = starving(n, 25 * MS, last=n - 1)
    best = known.record[0]["best"]
    beside = int(np.ravel_multi_index([2] * (n - 1) + [0], [4] * n))
    best["actions"][0, beside:] = (1 << n) - 1
    view = view_of([triangle(60, kept=2)] * n, 60 * n - 50)
    jobs = tuple(dataclasses.replace(job, job=i, served=1.0) for i, job in enumerate(view.jobs))
    decisions = ZICO.decide(dataclasses.replace(view, jobs=jobs, plan=known))
    assert [decisions[i] for i in range(n - 1)] == [Start()] * (n - 1)
    assert isinstance(waits := decisions[n - 1], Wait)
    assert waits.until_ns == view.now_ns + 2 * 25 * MS


def test_a_pair_that_does_not_fit_any_more_is_not_left_to_its_plan() -> None:
    """Where both stand at their boundaries and keep too much, what they lack is said, and the first goes on."""
    works = [triangle(60, kept=2)] * 2
    view = view_of(works, max(works[0].levels) + 1)
    jobs = tuple(dataclasses.replace(job, job=i) for i, job in enumerate(view.jobs))
    decisions = decided(dataclasses.replace(view, jobs=jobs, plan=starving(2, 25 * MS, last=1)))
    assert decisions[0] == Start()
    assert isinstance(decisions[1], Wait)
    assert "does not fit" in decisions[1].reason


def test_a_turn_is_after_one_who_begins_in_the_same_decision() -> None:
    """Where one at a time goes, whoever stands behind the one that starts now is told its name."""
    view = view_of([triangle(60, kept=2)] * 2, 90)
    record = np.zeros(1, PLAN)
    learnt = record[0]["learnt"]
    learnt["n_ways"], learnt["ways"][0]["way"], learnt["ways"][0]["setting"] = 1, Way.CLAIMS, 1
    decisions = decided(dataclasses.replace(view, plan=Plan(record)))
    assert decisions[view.jobs[0].job] == Start()
    waits = decisions[view.jobs[1].job]
    assert isinstance(waits, Wait)
    assert waits.reason == "its turn comes after job0's iteration"


def gathering() -> Plan:
    """Return a plan for jobs 5 to 7 by which all are to meet at their boundaries."""
    record = np.zeros(1, PLAN)
    learnt = record[0]["learnt"]
    learnt["n_jobs"], learnt["jobs"][:3], learnt["n_ways"], learnt["gathers"] = 3, (5, 6, 7), 1, 1
    return Plan(record)


def running(view: PoolView, plan: Plan, *, since_ns: int) -> PoolView:
    """Return the same jobs, the first in an iteration that has run for so long and stands in its middle."""
    first = view.jobs[0]
    assert first.profile is not None
    first = dataclasses.replace(
        first,
        phase=JobState.RUNNING,
        held=max(first.profile.held),
        progress=first.profile.n_events // 2,
        started_ns=view.now_ns - since_ns,
        given_up=int(since_ns > STILL_ITERATIONS * first.profile.duration_ns + STILL_NS),
    )
    return dataclasses.replace(view, jobs=(first, *view.jobs[1:]), plan=plan)


def test_all_meet_at_their_boundaries_before_a_way_begins() -> None:
    """Those that are there wait for those inside, whatever fits; then all are released at once, and no one twice."""
    view = dataclasses.replace(view_of([triangle(60, kept=2)] * 3, 200), now_ns=1000 * MS)
    known = gathering()
    decisions = decided(running(view, known, since_ns=50 * MS))
    assert decisions == dict.fromkeys(
        (6, 7), Wait((5,), None, "all begin anew together once the iteration of job0 has ended")
    )
    together = decided(dataclasses.replace(view, plan=known))
    assert together == dict.fromkeys((5, 6, 7), Start())
    again = decided(running(view, known, since_ns=50 * MS))
    assert again == dict.fromkeys((6, 7), Start())


def test_nobody_waits_to_meet_a_job_that_stands_still() -> None:
    """Who has been in one iteration for far longer than any takes may never come to its end."""
    view = dataclasses.replace(view_of([triangle(60, kept=2)] * 3, 200), now_ns=100_000 * MS)
    known = gathering()
    assert decided(running(view, known, since_ns=90_000 * MS)) == dict.fromkeys((6, 7), Start())
    assert not known.record[0]["learnt"]["gathers"]


def test_who_has_waited_before_all_met_comes_first_no_more() -> None:
    """From there on jobs are in the order in which the trials had them, not in that of how they came."""
    works = [triangle(60, kept=2)] * 3
    view = view_of(works, 70)
    jobs = tuple(dataclasses.replace(job, waiting_since_ns=10 - i) for i, job in enumerate(view.jobs))
    learnt = (known := gathering()).record[0]["learnt"]
    view = dataclasses.replace(view, jobs=jobs, plan=known)
    assert isinstance(decided(view)[5], Start)
    learnt["gathers"] = learnt["gathered_ns"] = 0
    assert isinstance(decided(view)[7], Start)


def test_jobs_meet_again_only_for_another_way() -> None:
    """Where a plan's way is that of the plan before, jobs are in its cycle and go on."""
    works = [plateau(60, rise=0.2, fall=0.2, kept=2)] * 2
    before = plan(view_of(works, 80))
    assert isinstance(before, Plan)
    assert before.record[0]["learnt"]["gathers"]
    before.record[0]["learnt"]["gathers"], before.record[0]["learnt"]["gathered_ns"] = 0, 7 * MS
    longer = view_of([dataclasses.replace(work, step_ns=work.step_ns * 5 // 4) for work in works], 80)
    goes_on = plan(dataclasses.replace(longer, plan=before))
    assert isinstance(goes_on, Plan)
    assert goes_on is not before
    learnt = goes_on.record[0]["learnt"]
    assert (learnt["gathers"], learnt["gathered_ns"]) == (0, 7 * MS)
    used = before.record[0]["learnt"]["ways"][int(before.record[0]["learnt"]["used"])]
    used["setting"] += 1
    another = plan(dataclasses.replace(longer, plan=before))
    assert isinstance(another, Plan)
    assert another.record[0]["learnt"]["gathers"]


def slower(works: list[Work], percent: int) -> list[Load]:
    """Return jobs whose iterations take so much longer than their profiles say."""
    real = [dataclasses.replace(work, step_ns=work.step_ns * (100 + percent) // 100) for work in works]
    return [
        dataclasses.replace(each.load(f"job{i}"), believed=work.load("").profile)
        for i, (each, work) in enumerate(zip(real, works, strict=True))
    ]


@pytest.mark.parametrize("budget", [90, 70])
def test_longer_iterations_are_no_reason_for_another_way(budget: int) -> None:
    """Where all iterations take 7 % longer than profiles say, nobody stops for another way to begin."""
    works = [triangle(60, kept=2)] * 2
    simulation = Simulation(ZICO, slower(works, 7), budget)
    simulation.run(400 * works[0].duration_ns, 60 * works[0].duration_ns)
    assert not simulation.sim_jobs["reasons"][:, Reason.ANEW].any()


def test_a_job_that_takes_anothers_place_has_waited_nothing() -> None:
    """What the job before had waited makes no way give more than all the time."""
    view = view_of([triangle(60, kept=2)] * 2, 90)
    known = plan(view)
    assert isinstance(known, Plan)
    learnt = known.learnt
    learnt["since_ns"], learnt["counts"], learnt["waited_ns"] = 1, 1, 10**12
    ZICO.decide(dataclasses.replace(view, now_ns=1 + 9 * int(learnt["round_ns"]), plan=known))
    used = learnt["ways"][0]
    assert 0 < used["rounds"] == used["got"][:2].max()


def test_a_new_plan_knows_what_ways_have_given() -> None:
    """Of jobs that hold the same in the same budget it is kept, however long they take; in another budget it is not."""
    works = [triangle(60, kept=2)] * 2
    before = plan(view_of(works, 90))
    assert isinstance(before, Plan)
    learnt = before.record[0]["learnt"]
    learnt["ways"]["rounds"][:2], learnt["ways"]["got"][:2, :2] = (7.0, 9.0), 5.0
    keys = [(way["way"], way["setting"]) for way in learnt["ways"][:2]]
    longer = view_of([dataclasses.replace(work, step_ns=work.step_ns * 5 // 4) for work in works], 90)
    for view, rounds in ((longer, [7.0, 9.0]), (dataclasses.replace(longer, budget=80), [0.0, 0.0])):
        found = plan(dataclasses.replace(view, plan=before))
        assert isinstance(found, Plan)
        ways = {(way["way"], way["setting"]): way for way in found.record[0]["learnt"]["ways"]}
        assert [ways[key]["rounds"] for key in keys if key in ways] == rounds


def test_a_new_plan_keeps_the_way_in_use_where_no_other_is_noticeably_better() -> None:
    """Jobs that hardly wait by one way have nothing of another that promises as much."""
    works = [triangle(60, kept=2)] * 2
    before = plan(view_of(works, 90))
    assert isinstance(before, Plan)
    learnt = before.record[0]["learnt"]
    ways = learnt["ways"][: learnt["n_ways"]]
    as_good = [i for i, way in enumerate(ways) if way["promise"] > ways["promise"].max() - BETTER_BY]
    assert len(as_good) > 1
    longer = view_of([dataclasses.replace(work, step_ns=work.step_ns * 5 // 4) for work in works], 90)
    for used in as_good:
        learnt["used"] = used
        found = plan(dataclasses.replace(longer, plan=before))
        assert isinstance(found, Plan)
        first = found.record[0]["learnt"]["ways"][0]
        assert (first["way"], first["setting"]) == (ways[used]["way"], ways[used]["setting"])


def test_jobs_whose_times_vary_more_get_another_plan() -> None:
    """By a little more or less nothing changes."""
    view = view_of([plateau(60, rise=0.2, fall=0.2, kept=2)] * 2, 80)
    found = plan(view)

    def uneven(jitter: float) -> PoolView:
        jobs = tuple(dataclasses.replace(job, jitter=jitter) for job in view.jobs)
        return dataclasses.replace(view, jobs=jobs, plan=found)

    assert plan(uneven(0.08)) is found
    assert plan(uneven(0.3)) is not found


def crowd(waited_ns: int) -> PoolView:
    """Return three jobs that yield what they keep: one inside, two that wait, the last longer and for everything."""
    view = view_of([triangle(60, kept=2), triangle(60, kept=2), triangle(80, kept=2)], 80)
    view = running(dataclasses.replace(view, now_ns=waited_ns + MS), by_claims(), since_ns=50 * MS)
    since_ns = (0, view.now_ns - 10 * MS, MS)
    jobs = [
        dataclasses.replace(that_yields(job), waiting_since_ns=since, floor=GUARD / 3)
        for job, since in zip(view.jobs, since_ns, strict=True)
    ]
    return dataclasses.replace(view, jobs=tuple(jobs))


def by_claims() -> Plan:
    """Return a plan for jobs 5 to 7 by which whoever can goes on."""
    record = np.zeros(1, PLAN)
    learnt = record[0]["learnt"]
    learnt["n_jobs"], learnt["jobs"][:3], learnt["n_ways"] = 3, (5, 6, 7), 1
    learnt["ways"][0]["way"], learnt["ways"][0]["setting"] = Way.CLAIMS, 3
    return Plan(record)


def inside_falling(view: PoolView) -> PoolView:
    """Let the job inside be past its peak, so that another of its size fits beside the rest of its iteration."""
    first = view.jobs[0]
    assert first.profile is not None
    first = dataclasses.replace(first, held=first.profile.held[-2], progress=first.profile.n_events - 2)
    return dataclasses.replace(view, jobs=(first, *view.jobs[1:]))


def test_who_fits_beside_what_is_lent_begins() -> None:
    """By shift it does not wait for those inside to end: what they keep then comes when it needs that."""
    view = dataclasses.replace(inside_falling(crowd(100 * MS)), plan=None)
    decisions = decided(view)
    assert {job: type(decision) for job, decision in decisions.items()} == {6: Wait, 7: Start}
    assert isinstance(waits := decisions[6], Wait)
    assert waits.reason == "its peak would meet that of job2"
    kept = dataclasses.replace(view, jobs=tuple(keeping(job) for job in view.jobs))
    decisions = decided(kept)
    assert decisions[6] == Start()
    assert isinstance(waits := decisions[7], Wait)
    assert "does not fit" in waits.reason


def test_nobody_is_passed_over_for_longer_than_three_turns_of_all() -> None:
    """Where a way lets others begin beside one another for ever, whoever they pass goes next, if it is owed that."""
    turns_ns = sum(job.profile.duration_ns for job in crowd(0).jobs if job.profile is not None)
    soon, late = (inside_falling(crowd(waited_ns)) for waited_ns in (3 * turns_ns, 3 * turns_ns + 1))
    assert decided(soon)[6] == Start()
    decisions = decided(late)
    assert {job: type(decision) for job, decision in decisions.items()} == {6: Wait, 7: Start}
    assert isinstance(waits := decisions[6], Wait)
    assert waits.reason == "its turn comes after job2's iteration"
    undemanding = dataclasses.replace(late.jobs[2], floor=GUARD / 3 / 2)
    assert decided(dataclasses.replace(late, jobs=(*late.jobs[:2], undemanding)))[6] == Start()
    first = dataclasses.replace(late.jobs[0], phase=JobState.BOUNDARY, held=2, progress=0, waiting_since_ns=late.now_ns)
    first = that_yields(first)
    decisions = decided(dataclasses.replace(late, jobs=(first, *late.jobs[1:])))
    assert {job: type(decision) for job, decision in decisions.items()} == {5: Wait, 6: Wait, 7: Start}


def test_who_has_ended_its_first_iteration_goes_next() -> None:
    """What that took says nothing of the others: it has traced and compiled. The second one is as all that follow."""
    view = inside_falling(crowd(100 * MS))
    last = view.jobs[2]
    assert last.profile is not None
    flat = dataclasses.replace(
        last.profile, held=(max(last.profile.held),), t_ns=(0,), duration_ns=90_000 * MS, shift=40
    )
    new = dataclasses.replace(view, jobs=(*view.jobs[:2], dataclasses.replace(last, profile=flat, iteration=1)))
    for planned in (new, dataclasses.replace(new, plan=None)):
        assert {job: type(decision) for job, decision in decided(planned).items()} == {6: Wait, 7: Start}
    known = dataclasses.replace(view, jobs=(*view.jobs[:2], dataclasses.replace(last, profile=flat, iteration=2)))
    assert decided(known)[6] == Start()


def test_nobody_waits_for_one_that_cannot_be_served() -> None:
    """Who does not fit beside what others keep holds nobody up; beside one that stands still it starts when late."""
    late = inside_falling(crowd(100_000 * MS))
    kept = dataclasses.replace(late, jobs=tuple(keeping(job) for job in late.jobs))
    assert decided(kept)[6] == Start()
    still = dataclasses.replace(late.jobs[0], given_up=1)
    decisions = decided(dataclasses.replace(late, jobs=(still, *late.jobs[1:])))
    assert [decisions[job] == Start() for job in (6, 7)] == [False, True], "nobody waits for that one's end"
