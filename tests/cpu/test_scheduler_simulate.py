"""The simulator: who comes and goes, how fast a shared device is, what is logged, nothing left to chance."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from scheduler_cases import Eager
from scheduler_model import MS, Work, plateau, triangle

from zico.errors import ProblemError
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation

NONE = policy_named("none")
ZICO = policy_named("zico")


def two(**changes: object) -> list[Load]:
    """Return two equal jobs."""
    return [dataclasses.replace(triangle(20, kept=4).load(name), **changes) for name in ("a", "b")]  # type: ignore[arg-type]


def held_over_time(simulation: Simulation) -> list[tuple[int, int, int]]:
    """Return the log: when, who, how much."""
    entries = simulation.log[: int(simulation._run[0]["n_log"])]
    return [(int(e["t_ns"]), int(e["tenant"]), int(e["held"])) for e in entries]


def test_a_job_leaves_after_its_iterations() -> None:
    """It does as many as it was given, leaves nothing behind, and the other has all from then on."""
    first, second = two()
    simulation = Simulation(NONE, [dataclasses.replace(first, iterations=7), second], 40, log=10_000)
    outcome = simulation.run(20 * 100 * MS)
    assert outcome.iterations == (7, 20)
    assert simulation.tenants["left_ns"].tolist() == [700 * MS, 0]
    assert [entry for entry in held_over_time(simulation) if entry[1] == 0][-1] == (700 * MS, 0, 0)


def test_a_departure_makes_room() -> None:
    """Two jobs of which one fits at a time get half each, and one of them everything once it is alone."""
    loads = [plateau(20, rise=0.02, fall=0.02).load(name) for name in ("a", "b")]
    loads[0] = dataclasses.replace(loads[0], iterations=5)
    outcome = Simulation(ZICO, loads, 21).run(40 * 100 * MS)
    assert outcome.iterations[0] == 5
    assert outcome.iterations[1] >= 33


def test_jobs_arrive_when_they_are_due() -> None:
    """Nobody holds anything before it arrives, and its first iteration begins then."""
    first, second = two()
    simulation = Simulation(NONE, [dataclasses.replace(first, arrive_ns=250 * MS), second], 40, log=10_000)
    outcome = simulation.run(1_000 * MS)
    began_ns = [min(t_ns for t_ns, who, _held in held_over_time(simulation) if who == job) for job in (0, 1)]
    assert began_ns == [250 * MS, 0]
    assert outcome.iterations == (7, 10)


@pytest.mark.parametrize(("slowdown", "each"), [((1.0,), 1.0), ((1.0, 1.0, 2.0), 0.5), ((1.0, 1.0, 1.25), 0.8)])
def test_a_shared_device_is_slower(slowdown: tuple[float, ...], each: float) -> None:
    """At a slowdown of 2 for two working jobs, each gets half of what it had alone."""
    outcome = Simulation(NONE, two(), 40, slowdown=slowdown).run(100 * 100 * MS, 20 * 100 * MS)
    assert outcome.normalised == pytest.approx((each, each), abs=0.01)


def test_the_last_slowdown_holds_for_any_more_jobs() -> None:
    """Three jobs are slowed as the last figure says, and one that is alone is not."""
    loads = [*two(), dataclasses.replace(two()[0], arrive_ns=0)]
    outcome = Simulation(NONE, loads, 60, slowdown=(1.0, 1.0, 4.0)).run(100 * 100 * MS, 20 * 100 * MS)
    assert outcome.normalised == pytest.approx((0.25,) * 3, abs=0.01)
    alone = Simulation(NONE, loads[:1], 60, slowdown=(1.0, 1.0, 4.0)).run(100 * 100 * MS, 20 * 100 * MS)
    assert alone.normalised == pytest.approx((1.0,), abs=0.01)


def test_the_log_is_what_was_held() -> None:
    """Replayed, it never exceeds the budget, comes to the peak that was granted, and stops when it is full."""
    loads = [dataclasses.replace(load, arrive_ns=9 * i * MS) for i, load in enumerate(two())]
    simulation = Simulation(ZICO, loads, 28, log=100_000)
    outcome = simulation.run(10 * 100 * MS)
    held, sums = [0, 0], []
    for _t_ns, job, regions in held_over_time(simulation):
        held[job] = regions
        sums.append(sum(held))
    assert max(sums) == outcome.peak_granted <= 28
    assert [t for t, _job, _held in held_over_time(simulation)] == sorted(t for t, _j, _h in held_over_time(simulation))
    short = Simulation(ZICO, loads, 28, log=5)
    assert short.run(10 * 100 * MS) == outcome
    assert held_over_time(short) == held_over_time(simulation)[:5]


@pytest.mark.parametrize("name", ["zico", "claims", "serial", "none"])
def test_a_seed_is_all_the_chance_there_is(name: str) -> None:
    """The same seed gives the same outcome and log; another one does not."""
    loads = [dataclasses.replace(load, arrive_ns=9 * i * MS, jitter=0.2) for i, load in enumerate(two())]
    runs = [Simulation(policy_named(name), loads, 30, seed=seed, log=5_000) for seed in (3, 3, 4)]
    outcomes = [run.run(20 * 100 * MS) for run in runs]
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert np.array_equal(runs[0].log, runs[1].log)


def test_running_in_parts_is_running_in_one() -> None:
    """Stopping and going on changes nothing."""
    loads = [dataclasses.replace(load, arrive_ns=9 * i * MS, jitter=0.2) for i, load in enumerate(two())]
    whole, parts = Simulation(ZICO, loads, 30), Simulation(ZICO, loads, 30)
    for until_ms in range(50, 2_000, 130):
        parts.run(until_ms * MS)
    assert parts.run(2_000 * MS) == whole.run(2_000 * MS)


def test_who_is_blocked_asks_again_when_a_claim_falls() -> None:
    """A claim falls a bin after the profile's level, while nobody gives anything back: whoever waits for it goes on."""
    a = Work((6, 6, 6, 3, 3, 3, 3, 3, 3, 1), 10 * MS)
    b = Work((1, 1, 4, 4, 6, 6, 1), 9 * MS)
    loads = [a.load("a"), dataclasses.replace(b.load("b"), arrive_ns=10 * MS)]
    simulation = Simulation(Eager(), loads, 7, log=100_000)
    assert simulation.run(200 * 100 * MS).stalls == 0
    log = held_over_time(simulation)
    falls_ns = [t_ns for t_ns, job, held in log if (job, held) == (0, 3)]
    rises_ns = [t_ns for t_ns, job, held in log if (job, held) == (1, 4)]
    after_ns = [rise - max((fall for fall in falls_ns if fall <= rise), default=-1) for rise in rises_ns]
    assert 10 * MS in after_ns
    assert not [ns for ns in after_ns if 0 <= ns < 10 * MS and ns != 0]


def test_a_job_is_owed_its_floor() -> None:
    """Where the sum would be largest if one job hardly ran, a floor lets it run: each comes near half."""
    loads = [
        plateau(60, rise=0.05, fall=0.05).load("long"),
        plateau(60, rise=0.05, fall=0.05, duration_ns=30 * MS).load("short"),
    ]
    loads = [dataclasses.replace(load, floor=0.45) for load in loads]
    outcome = Simulation(ZICO, loads, 66).run(300 * 100 * MS, 30 * 100 * MS)
    assert min(outcome.normalised) >= 0.9 * 0.45


def test_no_jobs_are_refused() -> None:
    """A simulation of nobody is a mistake, and says so."""
    with pytest.raises(ProblemError, match="no jobs: give at least one"):
        Simulation(ZICO, [], 10)


@pytest.mark.parametrize("n", [3, 40, 200])
def test_many_equal_steps_end_in_the_order_in_which_they_began(n: int) -> None:
    """Any number of jobs at once: each does as many iterations as it has time for, none is lost in the queue."""
    loads = [
        dataclasses.replace(triangle(4, steps=4, duration_ns=(20 + i % 7) * MS).load(f"job{i}"), arrive_ns=i % 5 * MS)
        for i in range(n)
    ]
    outcome = Simulation(NONE, loads, 4 * n).run(1_000 * MS)
    whole = [(1_000 * MS - load.arrive_ns) // load.profile.duration_ns for load in loads]
    assert list(outcome.iterations) == whole
    assert all(x == y for x, y in itertools.pairwise(outcome.waited_ns))


def test_an_arrival_amid_a_step_costs_no_work_and_gives_none() -> None:
    """A step under way on a slowed device ends when it would have, whoever comes meanwhile."""
    loads = [Work((3,), 100 * MS).load(name) for name in ("a", "b")]
    loads = [dataclasses.replace(loads[0], iterations=1), dataclasses.replace(loads[1], arrive_ns=50 * MS)]
    simulation = Simulation(NONE, loads, 6, slowdown=(1.0, 2.0))
    simulation.run(1_000 * MS)
    assert simulation.tenants["left_ns"][0] == 200 * MS
