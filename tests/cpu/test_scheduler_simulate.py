"""The simulator: who comes and goes, how fast a shared device is, what is logged, nothing left to chance."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.scheduler_cases import Eager
from cpu.support.scheduler_model import MS, Work, plateau, triangle

from zico.base.errors import ProblemError
from zico.lab.simulator.device_models import device_model_named
from zico.scheduler.device_model import taken_ahead
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, LoadPhase, Simulation
from zico.scheduler.state import Profile

if TYPE_CHECKING:
    from zico.scheduler.state import PoolView

NONE = policy_named("none")
ZICO = policy_named("zico")
CLAIMS = policy_named("claims")


def two(**changes: object) -> list[Load]:
    """Return two equal jobs."""
    return [dataclasses.replace(triangle(20, kept=4).load(name), **changes) for name in ("a", "b")]  # type: ignore[arg-type]


def held_over_time(simulation: Simulation) -> list[tuple[int, int, int]]:
    """Return the log: when, who, how much."""
    entries = simulation.log[: int(simulation._run[0]["n_log"])]
    return [(int(e["t_ns"]), int(e["sim_job"]), int(e["held"])) for e in entries]


def test_a_job_leaves_after_its_iterations() -> None:
    """It does as many as it was given, leaves nothing behind, and the other has all from then on."""
    first, second = two()
    simulation = Simulation(NONE, [dataclasses.replace(first, iterations=7), second], 40, log=10_000)
    outcome = simulation.run(20 * 100 * MS)
    assert outcome.iterations == (7, 20)
    assert simulation.sim_jobs["left_ns"].tolist() == [700 * MS, 0]
    assert [entry for entry in held_over_time(simulation) if entry[1] == 0][-1] == (700 * MS, 0, 0)


def test_a_wait_from_the_first_instant_counts() -> None:
    """Of two jobs that come at time 0 one waits for the other's first iteration, from then on."""
    outcome = Simulation(ZICO, two(), 40).run(50 * MS)
    assert outcome.waited_ns == (0, 50 * MS)


def test_a_first_iteration_that_no_longer_grows_keeps_nobody() -> None:
    """By the pool's rule, others wait at their boundaries until a second after a job without a profile last grew."""
    short = Load("short", Profile((1, 1), (0, 50 * MS), 100 * MS, 0, 2), 1)
    grows = Load("grows", Profile((2, 4), (0, 300 * MS), 10_000 * MS, 0, 2), 1, arrive_ns=450 * MS)
    outcome = Simulation(CLAIMS, [short, grows], 10).run(5_000 * MS)
    assert outcome.waited_ns == (1_250 * MS, 0)  # from 500 to 450 + 300 + 1000 ms
    assert outcome.iterations[0] == 5 + (5_000 - 1_750) // 100


def test_who_is_blocked_for_the_longest_overflows() -> None:
    """Where nobody can go on, the one that was blocked first gets its memory and ends, though its number is higher."""
    rises = [Profile(held, (0, MS, 2 * MS), 3 * MS, 0, 3) for held in ((6, 6, 9), (3, 9, 9))]
    simulation = Simulation(NONE, [Load(str(number), rise, 1) for number, rise in enumerate(rises)], 10)
    outcome = simulation.run(4 * MS)
    assert outcome.stalls == 1
    assert outcome.iterations == (0, 1)


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
    assert simulation.sim_jobs["left_ns"][0] == 200 * MS


# -- devices, phases, budgets ----------------------------------------------------------------------


def test_a_load_can_change_while_it_is_there() -> None:
    """After five iterations of 100 ms it does iterations of 50 ms and half the memory; work counts in its own time."""
    small = triangle(10, kept=2, duration_ns=50 * MS, steps=50)
    load = two()[0]
    load = dataclasses.replace(load, phases=(LoadPhase(5, small.load("a").profile, 2),))
    simulation = Simulation(NONE, [load], 20, log=10_000)
    outcome = simulation.run(1_000 * MS)
    assert outcome.iterations == (15,)
    assert outcome.normalised == (1.0,)
    later = [held for t_ns, _who, held in held_over_time(simulation) if t_ns > 500 * MS]
    assert (max(later), min(later)) == (10, 2)


def test_a_scheduler_learns_of_a_change_by_the_first_iteration_that_ends() -> None:
    """A plan is made anew then, with the new profile and not before."""
    small = triangle(10, kept=2, duration_ns=50 * MS, steps=50).load("a").profile
    seen: list[tuple[int, int]] = []

    def plan(view: PoolView) -> None:
        known = view.jobs[0].profile
        seen.append((view.now_ns // MS, known.peak if known else 0))

    policy = dataclasses.replace(policy_named("claims"), plan=plan)
    load = dataclasses.replace(two()[0], phases=(LoadPhase(5, small, 2),))
    Simulation(policy, [load], 20).run(1_000 * MS)
    assert seen == [(0, 0), (100, 20), (550, 10)]


def test_a_lowered_budget_is_kept_as_soon_as_memory_has_come_back() -> None:
    """Nothing more is granted above it, what is held falls within an iteration, and all go on."""
    loads = [dataclasses.replace(load, arrive_ns=3 * i * MS) for i, load in enumerate(two())]
    simulation = Simulation(CLAIMS, loads, 40, log=100_000, budgets=[(2_000 * MS, 26)])
    outcome = simulation.run(4_000 * MS)
    assert outcome.stalls == 0
    peaks = [0, 0, 0]
    held = [0, 0]
    before = 0
    for t_ns, job, regions in held_over_time(simulation):
        held[job] = regions
        part = 0 if t_ns < 2_000 * MS else 1 if t_ns < 2_100 * MS else 2
        peaks[part] = max(peaks[part], sum(held))
        assert part != 1 or sum(held) <= max(26, before)
        before = sum(held)
    assert peaks[0] > 26
    assert peaks[2] <= 26
    assert min(outcome.iterations) > 25


def test_a_raised_budget_is_used_at_once() -> None:
    """Two jobs of which one fits at a time have half each for 2 s, and everything for the next 2 s."""
    loads = [plateau(20, rise=0.02, fall=0.02).load(name) for name in ("a", "b")]
    outcome = Simulation(CLAIMS, loads, 21, budgets=[(2_000 * MS, 40)]).run(4_000 * MS)
    assert sum(outcome.iterations) == pytest.approx(20 + 40, abs=2)


def test_memory_is_taken_ahead_of_its_use() -> None:
    """By the device's run-ahead each rise comes earlier, no fall does, and the peak is the same."""
    profile = triangle(20, kept=4).load("a").profile
    ahead = taken_ahead(profile, 10 * MS)
    assert all(now >= before for now, before in zip(ahead.held, profile.held, strict=True))
    assert ahead.peak == profile.peak
    assert ahead.held[0] == max(held for held, t in zip(profile.held, profile.t_ns, strict=True) if t < 11 * MS)
    assert taken_ahead(profile, 0) is profile
    device = dataclasses.replace(device_model_named("v100-32gb"), run_ahead_ns=10 * MS)
    late, early = (Simulation(CLAIMS, two(), 26, device=one) for one in (device_model_named("v100-32gb"), device))
    assert early.run(10_000 * MS, 1_000 * MS).mean < late.run(10_000 * MS, 1_000 * MS).mean


def test_what_an_outcome_says() -> None:
    """Throughput counts while a job is there; rates and waits follow from it."""
    first, second = two()
    loads = [dataclasses.replace(first, iterations=10), dataclasses.replace(second, arrive_ns=500 * MS)]
    outcome = Simulation(NONE, loads, 40).run(2_000 * MS)
    assert outcome.normalised == (1.0, 1.0)
    assert outcome.left_ns == (1_000 * MS, 0)
    assert outcome.present_ns == (1_000 * MS, 1_500 * MS)
    assert outcome.iterations_per_s == (10.0, 10.0)
    assert outcome.waited_ns == (0, 0)
    assert outcome.stalls == 0


def test_a_simulation_that_keeps_snapshots_ends_alike() -> None:
    """It keeps some of what the policy is asked about, and another one keeps nothing."""
    loads = [dataclasses.replace(load, arrive_ns=9 * i * MS) for i, load in enumerate(two())]
    plain, kept = Simulation(ZICO, loads, 30), Simulation(ZICO, loads, 30, samples=True)
    assert kept.run(5_000 * MS) == plain.run(5_000 * MS)
    assert len(plain.snapshots()[0]) == 0 < len(kept.snapshots()[0])
