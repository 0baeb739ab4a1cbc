"""What does the scheduler itself cost: a decision, a plan, an iteration in the simulator?"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import common
import numpy as np
from loops import call_often

from zico.pool.layout import JobState
from zico.scheduler.packed import Scene
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import Load, Simulation
from zico.scheduler.state import JobView, PoolView, Profile

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

QUESTION = "What does the scheduler itself cost: a decision, a plan, an iteration in the simulator?"
POLICIES = ("zico", "claims", "serial")
"""Whose decisions are timed."""
STEPS = 64
BINS = 256
JOBS = ((2, 1), (8, 8), (64, 1), (64, 16), (64, 64), (256, 64), (1024, 64), (1024, 1024))
"""Jobs of a scene, and how many of them are at their boundaries."""
PLANNED = (2, 3, 4, 8)
GOALS_US = {2: 20.0, 64: 200.0}
GOAL_PLAN_S = 0.5
GOAL_RATE = 200_000
GOAL_DAY_S = 120.0
DAY_NS = 24 * 3600 * 10**9
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


# -- decisions ------------------------------------------------------------------------------------------------------


def scene(n: int, waiting: int, seed: int) -> PoolView:
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
                progress=0 if is_waiting else at << 2,
                profile=profile,
                iteration=9,
                started_ns=DAY_NS - profile.t_ns[at],
                waiting_since_ns=DAY_NS - number if is_waiting else 0,
            )
        )
    budget = int(SHARE * sum(job.profile.peak for job in jobs if job.profile))
    return PoolView(DAY_NS, budget, tuple(jobs))


def decision_us(name: str, n: int, waiting: int, options: Namespace) -> dict[str, float]:
    """Return the spread over scenes of the microseconds of a decision: the machine code's call alone."""
    policy = policy_named(name)
    times = []
    for seed in range(options.scenes):
        packed = Scene(scene(n, waiting, seed))
        address = packed.scene.ctypes.data
        call_often(policy.address, address, 2)
        often = max(2, int(options.scene_us / max(1.0, call_often(policy.address, address, 2) / 1e3)))
        times.append(call_often(policy.address, address, often) / 1e3)
    return common.spread(times)


# -- plans and simulations ------------------------------------------------------------------------------------------


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


def plan_s(n: int, repeat: int) -> dict[str, float]:
    """Return the spread of the seconds that ``zico`` thinks about so many jobs."""
    plan = policy_named("zico").plan
    if plan is None:
        raise ValueError("zico does not plan")
    times = []
    for seed in range(repeat + 1):
        jobs = loads(n, seed)
        views = tuple(
            JobView(
                job=i,
                name=job.name,
                phase=JobState.BOUNDARY,
                held=job.persistent,
                persistent=job.persistent,
                profile=job.profile,
                iteration=1,
            )
            for i, job in enumerate(jobs)
        )
        began = time.perf_counter()
        plan(PoolView(0, budget_of(jobs), views))
        times.append(time.perf_counter() - began)
    return common.spread(times[1:])  # the first one loads code


def rate(name: str, iterations: int, repeat: int) -> dict[str, float]:
    """Return the spread of the iterations of two jobs that are simulated in a second."""
    rates = []
    for _ in range(repeat + 1):
        jobs = [Load(str(i), triangle(STEPS, 6 * MS, 100, 10), 10) for i in range(2)]
        simulation = Simulation(policy_named(name), jobs, budget_of(jobs))
        began = time.perf_counter()
        outcome = simulation.run(iterations // 2 * STEPS * 6 * MS)
        rates.append(sum(outcome.iterations) / (time.perf_counter() - began))
    return common.spread(rates[1:])


def day(n: int, day_ns: int) -> dict[str, float]:
    """Simulate a day in which so many jobs come, stay for some minutes to hours, and leave; returns what it took."""
    rng = np.random.default_rng(1)
    jobs = []
    for number in range(n):
        keeps = int(rng.integers(5, 20))
        profile = triangle(STEPS, int(rng.integers(3, 30)) * MS, int(rng.integers(60, 200)), keeps)
        stays_ns = rng.exponential(day_ns / n * 20)  # some twenty at a time
        arrives_ns = int(rng.integers(0, day_ns))
        many = max(1, int(stays_ns / profile.duration_ns))
        jobs.append(Load(str(number), profile, keeps, jitter=0.05, arrive_ns=arrives_ns, iterations=many))
    began = time.perf_counter()
    outcome = Simulation(policy_named("zico"), jobs, 1400).run(day_ns)
    seconds = time.perf_counter() - began
    done = sum(outcome.iterations)
    return {"jobs": n, "seconds": seconds, "iterations": done, "stalls": outcome.stalls, "rate": done / seconds}


# -- what is shown --------------------------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    cost = [
        (f"{n}, {waiting}", *(f"{row['us'][name]['median']:.3g}" for name in POLICIES))
        for n, waiting, row in ((row["jobs"], row["waiting"], row) for row in result["decisions"])
    ]
    plans = [(str(n), f"{of['median'] * 1e3:.0f}", f"{of['max'] * 1e3:.0f}") for n, of in result["plans"].items()]
    rates = [(name, f"{of['median']:,.0f}") for name, of in result["rates"].items()]
    day_of = result["day"]
    parts = [
        "Microseconds of a decision\n",
        common.table(("jobs, of them waiting", *POLICIES), cost),
        "Milliseconds of a plan\n",
        common.table(("jobs", "median", "most"), plans),
        f"Iterations a second of two jobs of {STEPS} steps in the simulator\n",
        common.table(("policy", "iterations/s"), rates),
        f"A day of {day_of['jobs']} jobs: {day_of['seconds']:.1f} s for {day_of['iterations']:,} iterations\n",
        *_goals(result),
    ]
    return "\n".join(parts)


def _goals(result: dict[str, Any]) -> Iterator[str]:
    for n, goal in GOALS_US.items():
        most = max([row["us"]["zico"]["median"] for row in result["decisions"] if row["jobs"] == n], default=None)
        if most is not None:
            yield _goal(f"a decision with {n} jobs, us", most, goal)
    yield _goal("a plan, s", max(of["max"] for of in result["plans"].values()), GOAL_PLAN_S)
    yield _goal("a day, s", result["day"]["seconds"], GOAL_DAY_S)
    slowest = result["rates"]["zico"]["median"]
    yield f"* iterations/s under zico {slowest:,.0f}, goal {GOAL_RATE:,}: {_word(slowest >= GOAL_RATE)}\n"


def _goal(what: str, value: float, most: float) -> str:
    return f"* {what}: {value:.3g}, at most {most:g}: {_word(value <= most)}\n"


def _word(is_reached: bool) -> str:  # noqa: FBT001
    return "reached" if is_reached else "missed"


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="of plans and simulations")
    options = parser.parse_args()
    options.scenes, options.scene_us = (1, 1e2) if options.smoke else (9, 2e4)
    repeat, iterations, n_day, day_ns = options.repeat, 200_000, 1000, DAY_NS
    if options.smoke:
        repeat, iterations, n_day, day_ns = 1, 2_000, 20, DAY_NS // 1000
    result = common.document("scheduler", QUESTION, {"repeat": repeat, "scenes": options.scenes})
    common.note("decisions")
    result["decisions"] = [
        {"jobs": n, "waiting": k, "us": {name: decision_us(name, n, k, options) for name in POLICIES}} for n, k in JOBS
    ]
    common.note("plans")
    result["plans"] = {n: plan_s(n, repeat) for n in PLANNED}
    common.note("simulations")
    result["rates"] = {name: rate(name, iterations, repeat) for name in POLICIES}
    common.note("a day")
    result["day"] = day(n_day, day_ns)
    common.write(result, text_of(result), common.output_directory(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
