"""What jobs have got lately, as the broker counts it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.broker.protocol.messages import Share
from zico.broker.throughput import FIRST, NOTICEABLE, Service
from zico.pool.layout import JobState
from zico.scheduler.state import JobView, PoolView, Profile

MS = 1_000_000
PROFILE = Profile(held=(4, 6, 4), t_ns=(0, 10 * MS, 20 * MS), duration_ns=30 * MS, shift=4, n_events=48)


def view(now_ns: int, *iterations: int, profile: Profile | None = PROFILE) -> PoolView:
    """Return jobs that have ended so many iterations."""
    jobs = (
        JobView(
            job=number,
            name=f"job{number}",
            phase=JobState.RUNNING,
            held=4,
            persistent=4,
            claim=4,
            kept=4,
            most=6,
            profile=profile,
            iteration=iteration,
        )
        for number, iteration in enumerate(iterations)
    )
    return PoolView(now_ns, 10, tuple(jobs))


def test_a_job_has_got_what_its_iterations_are_worth() -> None:
    """One that ends an iteration of 30 ms every 60 ms has got a half, one that ends all in time has got all."""
    service = Service()
    for i in range(200):
        noted = service.noted(view(60 * MS * i, i, 2 * i))
    assert [job.served for job in noted.jobs] == pytest.approx([0.5, 1.0])
    assert [job.floor for job in noted.jobs] == [0.25, 0.25]


def test_what_was_long_ago_does_not_count() -> None:
    """After many iterations at full pace a slow past is forgotten."""
    service = Service()
    for i in range(50):
        service.noted(view(300 * MS * i, i))
    start_ns = 300 * MS * 49
    for i in range(200):
        noted = service.noted(view(start_ns + 30 * MS * i, 49 + i))
    assert noted.jobs[0].served > 0.97


def test_nobody_is_owed_before_anything_is_known_of_him() -> None:
    """A job without a profile, one just seen, and another in a place that was somebody's have got all they could."""
    service = Service()
    for i in range(9):
        service.noted(view(90 * MS * i, i))
    assert service.noted(view(900 * MS, 9)).jobs[0].served < 0.5
    assert service.noted(view(990 * MS, 2)).jobs[0].served == 1.0
    assert service.noted(view(999 * MS, 3, profile=None)).jobs[0].served == 1.0
    assert service.noted(view(1100 * MS)).jobs == ()


def test_a_first_iteration_is_not_throughput() -> None:
    """It has traced and compiled for long, and nobody has seen it begin: what counts is what comes after it."""
    service = Service()
    service.noted(view(0, 0, profile=None))
    long = dataclasses.replace(PROFILE, duration_ns=9000 * MS)
    assert service.noted(view(9000 * MS, 1, profile=long)).jobs[0].served == 1.0
    assert service.noted(view(9120 * MS, 2)).jobs[0].served == pytest.approx(0.25)


def test_a_job_that_ends_no_iteration_comes_to_be_owed() -> None:
    """What it got long ago counts for less and less while nothing is added."""
    service = Service()
    for i in range(50):
        service.noted(view(30 * MS * i, i))
    start_ns = 30 * MS * 49
    shares = [service.noted(view(start_ns + passed * 30 * MS, 49)).jobs[0].served for passed in (0, 1, 9, 90)]
    assert shares[0] == shares[1] == pytest.approx(1.0)
    assert shares[1] > shares[2] > 0.5 > shares[3]


def test_shares_reach_what_policies_see() -> None:
    """Weight and priority of a job are in its view; what was promised is owed, else half of a share."""
    shares = {0: Share(weight=2.5, priority=3), 1: Share(slo=0.25), 2: Share(slo=99.0)}
    jobs = Service().noted(view(0, 0, 0, 0, 0), shares).jobs
    assert [(job.weight, job.priority) for job in jobs] == [(2.5, 3), (1.0, 0), (1.0, 0), (1.0, 0)]
    assert [job.floor for job in jobs] == pytest.approx([0.5 * 2.5 / 5.5, 0.8, 0.01, 0.5 / 5.5])


# -- what is owed counts against the first iterations ----------------------------------------------

PROMISED = {0: Share(slo=0.25)}
"""0.8 of the throughput alone."""


def longer(factor: float, n_events: int = PROFILE.n_events) -> Profile:
    """Return a profile whose iteration takes so many times as long."""
    return dataclasses.replace(PROFILE, duration_ns=round(factor * PROFILE.duration_ns), n_events=n_events)


def floor_after(service: Service, profiles: list[Profile | None], first: int = 1) -> float:
    """Return what a job is owed of its throughput by its profile, once so many iterations have ended."""
    for number, profile in enumerate(profiles, first):
        noted = service.noted(view(number * 60 * MS, number, profile=profile), PROMISED)
    return noted.jobs[0].floor


def about(value: float) -> object:
    """Return what is equal to a floor that has come near to its value, but for what is not noticeable."""
    return pytest.approx(value, rel=1.1 * NOTICEABLE)


def test_a_guarantee_counts_against_the_first_iterations() -> None:
    """Iterations that come to take 1.15 times as long in company make .8 of the throughput alone .92 of theirs."""
    service, alone = Service(), [longer(3.0), longer(1.0), longer(1.1)]
    assert floor_after(service, [*alone, *[longer(1.15)] * 97]) == about(0.8 * 1.15)
    assert floor_after(service, [longer(2.0)] * 100, 101) == 1.0, "no job gets more than all"
    assert floor_after(service, [longer(0.5)] * 100, 201) == about(0.8), "who has become faster is owed no less"
    noted = service.noted(view(99999 * MS, 301, profile=longer(2.0)))
    assert noted.jobs[0].floor == pytest.approx(0.5), "a guard is of what there is"


def test_later_iterations_are_no_measure() -> None:
    """One that is short by chance after the first ones, or long among them, makes nobody owe more."""
    service = Service()
    profiles = [*[longer(1.0)] * (FIRST - 1), longer(4.0), longer(0.5), *[longer(1.0)] * 50]
    assert floor_after(service, profiles) == about(0.8)


def test_a_floor_changes_noticeably_or_not_at_all() -> None:
    """Another one makes a plan, which takes tenths of a second: times that vary from one to the next make none."""
    service = Service()
    varies = [longer(1.0), longer(1.2)] * 40
    floors = {floor_after(service, [profile], number) for number, profile in enumerate([longer(1.1)] * 8 + varies, 1)}
    assert floors == {0.8}
    assert floor_after(service, [longer(1.1 * (1 + 1.1 * NOTICEABLE))] * 99, 89) > 0.8 * (1 + NOTICEABLE)


def test_who_does_something_else_has_other_first_iterations() -> None:
    """With another batch size, or another job in its place; evaluations say nothing, and a pause forgets nothing."""
    for change in (longer(1.5, 2 * PROFILE.n_events), None):
        service = Service()
        floor_after(service, [longer(1.0)] * 20)
        later: list[Profile | None] = [longer(1.5, 2 * PROFILE.n_events)] * 99
        assert floor_after(service, [change, *later], 21 if change else 0) == pytest.approx(0.8)
    service = Service()
    floor_after(service, [longer(1.0)] * 20)
    service.noted(PoolView(1500 * MS, 10, ()))
    evaluates = view(1560 * MS, 21, profile=longer(0.1, 5))
    service.noted(dataclasses.replace(evaluates, jobs=(dataclasses.replace(evaluates.jobs[0], in_main_phase=False),)))
    assert floor_after(service, [longer(1.15)] * 99, 22) == about(0.8 * 1.15)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 9.0), st.sampled_from((48, 49, 96))), max_size=60))
def test_a_guarantee_never_comes_to_less_than_was_promised(steps: list[tuple[int, float, int]]) -> None:
    """Whatever iterations do, a job is owed its promise of them at least, and never more than all."""
    service, iteration = Service(), 0
    for number, (ended, factor, n_events) in enumerate(steps):
        iteration += ended
        noted = service.noted(view(number * MS, iteration, profile=longer(factor, n_events)), PROMISED)
        assert 0.8 <= noted.jobs[0].floor <= 1.0
        assert 0.0 <= noted.jobs[0].jitter <= 0.5


@pytest.mark.parametrize(("jitter", "told"), [(0.0, 0.0), (0.03, 0.0), (0.1, 0.1), (0.3, 0.3)])
def test_how_much_times_vary_is_told(jitter: float, told: float) -> None:
    """A profile is the mean of its last value and the last iteration. First iterations may take longer."""
    service, chance, mean = Service(), random.Random(5), 4.0  # noqa: S311 - a model
    for number in range(1, 400):
        mean = (mean + 1 + chance.uniform(-jitter, jitter)) / 2
        noted = service.noted(view(number * 40 * MS, number, profile=longer(mean)))
        assert noted.jobs[0].jitter == 0 or number > FIRST + 12
    assert noted.jobs[0].jitter == pytest.approx(told, rel=0.2)
