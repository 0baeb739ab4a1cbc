"""Plans made beside the broker's work: nobody waits for one, and it lasts as long as the jobs are the same."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import TYPE_CHECKING

import pytest

from zico.broker.planning import Planning
from zico.pool.layout import JobState
from zico.scheduler.policies import policy_named
from zico.scheduler.state import JobView, PoolView, Profile
from zico.trace.profile import UNPROFILED_SHIFT

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.scheduler.state import Decision, Plan

WITHIN_S = 20.0
MS = 1_000_000
PROFILE = Profile(held=(40, 64, 40), t_ns=(0, 10 * MS, 20 * MS), duration_ns=32 * MS, shift=4, n_events=48)


@dataclasses.dataclass(frozen=True)
class Made:
    """A plan that nothing reads."""

    number: int
    address: int = 0


class Thinker:
    """A policy that makes numbered plans, each when it is told to go on; it fails on demand."""

    name = "thinker"
    use_claims = True
    self_admit = True

    def __init__(self) -> None:
        """Let the first plan go on at once."""
        self.go_on = threading.Event()
        self.go_on.set()
        self.began = threading.Event()
        self.threads: list[str] = []
        self.fails = False

    @property
    def plan(self) -> Callable[[PoolView], Plan | None]:
        """Return what thinks."""
        return self._think

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Decide nothing."""
        assert pool
        return {}

    def _think(self, _pool: PoolView) -> Plan | None:
        self.threads.append(threading.current_thread().name)
        self.began.set()
        assert self.go_on.wait(WITHIN_S)
        if self.fails:
            raise ArithmeticError("no such number")
        return Made(len(self.threads))


class Clock:
    """Stands still but for the time that a thought takes."""

    def __init__(self, thought_s: float) -> None:
        """Begin at 0."""
        self.at_s = 0.0
        self._thought_s = thought_s

    def __call__(self) -> float:
        """Return the time; in a thread that plans, a thought has passed by the next reading."""
        now_s = self.at_s
        if threading.current_thread().name == "zico-plan":
            self.at_s += self._thought_s
        return now_s


def job(number: int, **changes: object) -> JobView:
    """Return a job in an iteration, with fields of its profile or its own changed."""
    of_profile = {name: value for name, value in changes.items() if name in ("held", "duration_ns", "shift")}
    own = {name: value for name, value in changes.items() if name not in of_profile}
    view = JobView(
        job=number,
        name=f"job{number}",
        phase=JobState.RUNNING,
        held=40,
        persistent=4,
        claim=40,
        kept=4,
        most=40,
        profile=dataclasses.replace(PROFILE, **of_profile),  # type: ignore[arg-type]
        iteration=3,
        started_ns=1,
    )
    return dataclasses.replace(view, **own)  # type: ignore[arg-type]


def view(*jobs: JobView, budget: int = 100) -> PoolView:
    """Return a pool of these jobs."""
    return PoolView(now_ns=1, budget=budget, jobs=jobs or (job(0), job(1)))


def planned(planning: Planning, pool: PoolView) -> Plan | None:
    """Return the plan once there is no better one to come."""
    planning.plan_for(pool)
    assert planning.wait(WITHIN_S)
    return planning.plan_for(pool)


def test_nobody_waits_for_a_plan() -> None:
    """While it is thought of, in a thread of its own, there is none; one thought at a time; then there is one."""
    policy = Thinker()
    policy.go_on.clear()
    planning = Planning(policy)
    assert planning.plan_for(view()) is None
    assert policy.began.wait(WITHIN_S)
    assert planning.plan_for(view(job(0), job(2))) is None
    assert not planning.wait(0.0)
    assert policy.threads == ["zico-plan"]
    policy.go_on.set()
    assert planning.wait(WITHIN_S)
    assert planned(planning, view(job(0), job(2))) == Made(2)


def test_a_plan_is_kept_but_not_used_while_a_job_evaluates() -> None:
    """It is for the jobs' usual iterations; when these are back so is the plan, without another thought."""
    planning = Planning(Thinker())
    plan = planned(planning, view())
    assert plan is not None
    evaluates = job(1, held=(9,), in_main_phase=False)
    assert planned(planning, view(job(0), evaluates)) is None
    assert planned(planning, view()) == plan


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(view(job(0), job(1, duration_ns=33 * MS)), id="a little longer"),
        pytest.param(view(job(0), job(1, held=(40, 65, 40))), id="a region more"),
        pytest.param(view(job(0), job(1, progress=30, held=PROFILE.held)), id="further on"),
        pytest.param(view(job(0), job(1), job(2, profile=None)), id="somebody without a profile"),
        pytest.param(view(job(0), job(1), job(2, shift=UNPROFILED_SHIFT)), id="somebody with a peak alone"),
    ],
)
def test_alike_profiles_keep_the_plan(other: PoolView) -> None:
    """A profile that has changed a little, or a job of which nothing is known, is no reason to think again."""
    policy = Thinker()
    planning = Planning(policy)
    assert planned(planning, view()) == Made(1)
    assert planned(planning, other) == Made(1)
    assert len(policy.threads) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(view(job(0), job(1, duration_ns=36 * MS)), id="an eighth longer"),
        pytest.param(view(job(0), job(1, held=(40, 70, 40))), id="a higher peak"),
        pytest.param(view(job(0), job(1, kept=9)), id="keeps more"),
        pytest.param(view(budget=90), id="another budget"),
    ],
)
def test_what_has_changed_is_thought_of_again_while_the_old_plan_lasts(other: PoolView) -> None:
    """Until the new plan is there, the same jobs are decided by the old one."""
    policy = Thinker()
    planning = Planning(policy, Clock(thought_s=0.0))
    assert planned(planning, view()) == Made(1)
    policy.go_on.clear()
    assert planning.plan_for(other) == Made(1)
    policy.go_on.set()
    assert planned(planning, other) == Made(2)


def test_the_first_iterations_that_are_known_are_thought_of_at_once() -> None:
    """Nobody plans by an iteration that contained set-up, and rests after that."""
    policy, clock = Thinker(), Clock(thought_s=1.0)
    planning = Planning(policy, clock)
    planned(planning, view(job(0), job(1, shift=UNPROFILED_SHIFT)))
    assert planned(planning, view()) == Made(2)


def test_between_thoughts_about_the_same_jobs_it_rests() -> None:
    """After a thought of a tenth of a second five seconds go by before profiles that vary are thought about again."""
    policy, clock = Thinker(), Clock(thought_s=0.1)
    planning = Planning(policy, clock)
    longer, longest = (view(job(0), job(1, duration_ns=ms * MS)) for ms in (40, 50))
    assert planned(planning, view()) == Made(1)
    clock.at_s += 4.5
    assert planned(planning, longer) == Made(1)
    clock.at_s += 1
    assert planned(planning, longer) == Made(2)
    assert planned(planning, longest) == Made(2)
    assert planned(planning, view(job(0), job(1, weight=3.0))) == Made(3)
    assert planned(planning, view(job(0), job(1, weight=3.0), budget=90)) == Made(4)


def test_a_plan_is_dropped_at_once_when_the_jobs_are_other_ones() -> None:
    """A plan for jobs that have left says nothing about those that are there."""
    policy = Thinker()
    planning = Planning(policy)
    assert planned(planning, view()) == Made(1)
    policy.go_on.clear()
    assert planning.plan_for(view(job(0), job(1), job(2))) is None
    policy.go_on.set()
    assert planning.wait(WITHIN_S)


def test_a_plan_that_fails_is_logged_and_jobs_go_on_without(caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong in the thread stays there, names the jobs, and the next change is thought of again."""
    policy = Thinker()
    policy.fails = True
    planning = Planning(policy)
    with caplog.at_level(logging.ERROR):
        assert planned(planning, view()) is None
    assert "no plan could be made for job0, job1" in caplog.text
    assert "no such number" in caplog.text
    policy.fails = False
    assert planned(planning, view(budget=90)) == Made(2)


def test_a_policy_without_plans_is_never_asked() -> None:
    """Where there is nothing to plan, no thread is made."""
    planning = Planning(policy_named("serial"))
    assert planning.plan_for(view()) is None
    assert planning.wait(0.0)
