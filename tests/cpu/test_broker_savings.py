"""Who goes on with less is chosen beside the broker's work, by what jobs say of themselves."""

from __future__ import annotations

import dataclasses

from zico.broker.operating_points import Savings
from zico.pool.layout import JobState
from zico.scheduler.state import JobView, OperatingPoint, PoolView, Profile

WITHIN_S = 30.0
MS = 1_000_000
STEPS = 8
NS = 80 * MS


def profile(peak: int, duration_ns: int = NS) -> Profile:
    """Return one that is at its peak for nearly all of the iteration."""
    t_ns = tuple(step * duration_ns // STEPS for step in range(STEPS))
    return Profile((peak,) * (STEPS - 1) + (0,), t_ns, duration_ns, 6, STEPS << 6)


def job(number: int, *less: OperatingPoint, peak: int = 100, limit: int = 0, wanted: int = 0, ns: int = NS) -> JobView:
    """Return a job inside its iteration."""
    return JobView(
        job=number,
        name=f"job-{number}",
        phase=JobState.RUNNING,
        held=0,
        persistent=0,
        claim=0,
        kept=0,
        profile=profile(peak, ns),
        iteration=5,
        limit=limit,
        wanted=wanted,
        less=less,
    )


def way(limit: int, slower: float) -> OperatingPoint:
    """Return a way to go on with so many regions."""
    return OperatingPoint("swap", limit, round(NS * slower))


def pool(*jobs: JobView, budget: int = 100) -> PoolView:
    """Return a pool of jobs."""
    return PoolView(0, budget, jobs)


def settled(savings: Savings, view: PoolView) -> dict[int, int]:
    """Return what is chosen once it has been thought of."""
    savings.limits_for(view)
    assert savings.wait(WITHIN_S)
    return dict(savings.limits_for(view))


def test_two_jobs_in_half_of_the_sum_of_their_peaks_get_half_each() -> None:
    """Both had what they want and could only take turns; a tenth slower they run beside each other."""
    savings = Savings()
    assert settled(savings, pool(job(0, way(50, 1.1)), job(3, way(50, 1.1)))) == {0: 50, 3: 50}


def test_an_iteration_that_held_less_does_not_say_what_a_job_wants() -> None:
    """Its limit has only just been lifted, or it moved something for a neighbour: what was known of it stays."""
    now = [0.0]
    savings = Savings(lambda: now[0])
    jobs = [job(n, way(50, 1.1), wanted=100) for n in range(2)]
    assert settled(savings, pool(*jobs)) == {0: 50, 1: 50}
    now[0] += 100
    less = [job(n, way(50, 1.1), wanted=100, peak=40, ns=NS // 2) for n in range(2)]
    assert settled(savings, pool(*less, budget=101)) == {0: 50, 1: 50}


def test_the_choice_stays_when_the_jobs_have_become_what_was_chosen() -> None:
    """What a limited job does is not taken for what it wants: nothing is thought of again."""
    now = [0.0]
    savings = Savings(lambda: now[0])
    chosen = settled(savings, pool(job(0, way(50, 1.1)), job(1, way(50, 1.1))))
    now[0] += 100
    limited = [job(n, way(50, 1.1), peak=50, limit=50, ns=round(1.1 * NS)) for n in range(2)]
    assert settled(savings, pool(*limited)) == chosen == {0: 50, 1: 50}
    alone = pool(dataclasses.replace(limited[0]))
    assert settled(savings, alone) == {0: 0}


def test_a_job_that_has_never_had_all_of_it_says_what_it_wants() -> None:
    """It is larger than the budget, so it keeps to its way; the other one, which saves nothing, gets no limit."""
    large = job(0, way(60, 1.2), peak=60, limit=60, wanted=150)
    assert settled(Savings(), pool(large, job(1, peak=30))) == {0: 60}


def test_jobs_that_leave_nothing_to_the_broker_are_left_alone() -> None:
    """Nobody thinks."""
    savings = Savings()
    assert savings.limits_for(pool(job(0), job(1))) == {}
    assert savings.wait(0)


def test_what_cannot_be_chosen_changes_nothing() -> None:
    """A job that fits the budget in none of its ways keeps what it has."""
    savings = Savings()
    assert settled(savings, pool(job(0, way(120, 1.2), peak=60, limit=60, wanted=150))) == {}
