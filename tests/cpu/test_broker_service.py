"""What jobs have got lately, as the broker counts it."""

from __future__ import annotations

import dataclasses

import pytest

from zico.broker.protocol.messages import Share
from zico.broker.throughput import Service
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
