"""What does the scheduler itself cost: a decision, a plan, an iteration in the simulator?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from loops import call_often

from zico.pool.layout import JobState
from zico.scheduler.packed import Snapshot
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import JobView, PoolView, Profile
from zico.trace.profile import GUARD_BINS

if TYPE_CHECKING:
    from micro.conftest import Measure

POLICIES = ("zico", "claims", "serial")
STEPS = 64
BINS = 256
JOBS = ((2, 1), (8, 8), (64, 1), (64, 16), (64, 64), (256, 64), (1024, 64), (1024, 1024))
"""Jobs of a snapshot, and how many of them are at their boundaries."""
SNAPSHOTS = 9
PLANS = 5
SIMULATIONS = 5
GOALS_NS = {2: 20e3, 64: 200e3}
"""Of a decision of ``zico``, by the number of jobs."""
GOAL_PLAN_NS = 0.5e9
GOAL_ITERATION_NS = 5e3
GOAL_DAY_NS = 120e9
DAY_NS = 24 * 3600 * 10**9
DAY_JOBS = 1000
PART = 8
"""The simulated time is this part of a day, with this part of its jobs and of its goal."""
ITERATIONS = 50_000
MS = 1_000_000
SHARE = 0.7


def triangle(steps: int, step_ns: int, peak: int, keeps: int) -> Profile:
    """Return an iteration that rises to its peak half-way and falls again."""
    up = np.linspace(keeps, peak, steps - steps // 2)
    held = np.concatenate([up, up[: steps // 2][::-1]]).round().astype(int)
    return Profile(tuple(held.tolist()), tuple(range(0, steps * step_ns, step_ns)), steps * step_ns, 2, steps << 2)


def wavy(rng: np.random.Generator) -> Profile:
    """Return an iteration of mixed shape in as many steps as a profile can have."""
    held = np.abs(np.cumsum(rng.integers(-40, 44, BINS))) + 20
    t_ns = np.arange(BINS) * int(rng.integers(1, 4)) * MS
    return Profile(tuple(held.tolist()), tuple(t_ns.tolist()), int(t_ns[-1]) + 3 * MS, 2, BINS << 2)


def snapshot(n: int, waiting: int, seed: int) -> PoolView:
    """Return a pool whose jobs are anywhere in their iterations, in seven tenths of the sum of their peaks."""
    rng = np.random.default_rng(seed)
    jobs = []
    for number in range(n):
        profile = wavy(rng)
        at = int(rng.integers(0, BINS))
        kept = min(profile.held)
        is_waiting = number < waiting
        jobs.append(
            JobView(
                job=number,
                name=str(number),
                phase=JobState.BOUNDARY if is_waiting else JobState.RUNNING,
                held=kept if is_waiting else profile.held[at],
                persistent=kept,
                claim=profile.peak if is_waiting else max(profile.held[max(0, at - GUARD_BINS) :]),
                kept=kept,
                most=profile.peak,
                must_finish=int(not is_waiting),
                progress=0 if is_waiting else at << 2,
                profile=profile,
                iteration=9,
                started_ns=DAY_NS - profile.t_ns[at],
                waiting_since_ns=DAY_NS - number if is_waiting else 0,
            )
        )
    budget = int(SHARE * sum(job.profile.peak for job in jobs if job.profile))
    return PoolView(DAY_NS, budget, tuple(jobs))


@pytest.mark.parametrize(("jobs", "waiting"), JOBS)
@pytest.mark.parametrize("policy", POLICIES)
def test_decision(measure: Measure, policy: str, jobs: int, waiting: int) -> None:
    """The call of the machine code alone, each round for another snapshot."""
    snapshots = [Snapshot(snapshot(jobs, waiting, seed)) for seed in range(SNAPSHOTS + 1)]
    addresses = iter([one.snapshot.ctypes.data for one in snapshots])
    address, n = policy_named(policy).address, max(2, 4096 // jobs)
    goal_ns = GOALS_NS.get(jobs) if policy == "zico" else None
    measure.figures["name"] = f"{jobs}, {waiting}"

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (address, next(addresses), n), {}

    how: dict[str, Any] = {"setup": setup, "rounds": SNAPSHOTS, "warmup_rounds": 1}
    measure(f"a decision of {policy}; jobs, of them waiting", call_often, per=n, goal_ns=goal_ns, **how)


def loads(n: int, seed: int = 0) -> list[Load]:
    """Return jobs of different lengths and sizes."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(n):
        keeps = int(rng.integers(5, 20))
        profile = triangle(STEPS, int(rng.integers(2, 7)) * MS, int(rng.integers(60, 200)), keeps)
        made.append(Load(str(number), profile, keeps))
    return made


def budget_of(jobs: list[Load]) -> int:
    """Return seven tenths of the sum of the peaks."""
    return int(SHARE * sum(job.profile.peak for job in jobs))


@pytest.mark.parametrize("jobs", [2, 3, 4, 8])
def test_plan(measure: Measure, jobs: int) -> None:
    """The search of ``zico`` for a plan, each round for other jobs."""
    plan = policy_named("zico").plan
    assert plan is not None
    seeds = iter(range(PLANS + 1))

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = loads(jobs, next(seeds))
        views = tuple(
            JobView(
                job=i,
                name=job.name,
                phase=JobState.BOUNDARY,
                held=job.persistent,
                persistent=job.persistent,
                claim=job.persistent,
                kept=job.persistent,
                most=job.profile.peak,
                profile=job.profile,
                iteration=1,
            )
            for i, job in enumerate(made)
        )
        return (PoolView(0, budget_of(made), views),), {}

    how: dict[str, Any] = {"setup": setup, "rounds": PLANS, "warmup_rounds": 1}
    measure("a plan of zico; jobs", plan, goal_ns=GOAL_PLAN_NS, **how)


@pytest.mark.parametrize("policy", POLICIES)
def test_iteration(measure: Measure, policy: str) -> None:
    """An iteration of two jobs of 64 steps in the simulator."""
    until_ns = (ITERATIONS if measure.enabled else ITERATIONS // 100) // 2 * STEPS * 6 * MS

    def simulation() -> Simulation:
        jobs = [Load(str(i), triangle(STEPS, 6 * MS, 100, 10), 10) for i in range(2)]
        return Simulation(policy_named(policy), jobs, budget_of(jobs))

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (simulation(), until_ns), {}

    done = sum(simulation().run(until_ns).iterations)
    goal_ns = GOAL_ITERATION_NS if policy == "zico" else None
    how: dict[str, Any] = {"setup": setup, "rounds": SIMULATIONS, "goal_ns": goal_ns}
    measure("an iteration in the simulator", Simulation.run, per=done, **how)


def test_day(measure: Measure) -> None:
    """An eighth of a day: of 1000 jobs an eighth come, stay for some minutes to hours, and leave."""
    part = PART if measure.enabled else PART * 100
    n, until_ns = DAY_JOBS // part, DAY_NS // part
    rng = np.random.default_rng(1)
    jobs = []
    for number in range(n):
        keeps = int(rng.integers(5, 20))
        profile = triangle(STEPS, int(rng.integers(3, 30)) * MS, int(rng.integers(60, 200)), keeps)
        stays_ns = rng.exponential(until_ns / n * 20)  # some twenty at a time
        arrives_ns = int(rng.integers(0, until_ns))
        many = max(1, int(stays_ns / profile.duration_ns))
        jobs.append(Load(str(number), profile, keeps, jitter=0.05, arrive_ns=arrives_ns, iterations=many))
    simulation = Simulation(policy_named("zico"), jobs, 1400)
    outcome = measure("a day in the simulator", simulation.run, until_ns, goal_ns=GOAL_DAY_NS / part)
    measure.figures |= {"jobs": n, "iterations": sum(outcome.iterations), "stalls": outcome.stalls}
