"""A choice of less memory stays only if it is measured to be no slower, against a model of jobs."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import pytest

from zico.broker.trials import LEAST_WAITED, MOST, MOST_TRIALS, SETTLES, SLOW, WINDOW, Trials
from zico.pool.layout import JobState
from zico.scheduler.state import JobView, OperatingPoint, PoolView, Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MS = 1_000_000
ALONE_NS = 100 * MS
LOOK_NS = 7 * MS
CHOSEN = {0: 60, 1: 60}


@dataclasses.dataclass
class Running:
    """A job of the model."""

    number: int
    iteration: int = 0
    started_ns: int = 0
    ends_ns: int = 0


class Model:
    """Jobs whose iterations take as long as their limits make them, more or less."""

    def __init__(self, slower: Callable[[Mapping[int, int]], float], *, jitter: float = 0.0, peak: int = 100) -> None:
        """Take what iterations with these limits take over those alone, and by up to what share they vary."""
        self.trials = Trials()
        self.limits: Mapping[int, int] = {}
        self.changes = 0
        self.now_ns = 0
        self._slower, self._jitter, self._peak = slower, jitter, peak
        self.waits = 0.3
        """The share of its time that a job waits for memory while nobody saves."""
        self.asked = 0
        """How often a choice was made."""
        self._waited_ns = 0.0
        self._random = random.Random(7)  # noqa: S311 - a model
        self._jobs = [Running(0), Running(1)]

    def _view(self) -> PoolView:
        profile = Profile((self._peak, 0), (0, ALONE_NS // 2), ALONE_NS, 6, 128)
        jobs = tuple(
            JobView(
                job=job.number,
                name=f"job-{job.number}",
                phase=JobState.RUNNING,
                held=0,
                persistent=0,
                claim=0,
                kept=0,
                profile=profile,
                iteration=job.iteration,
                started_ns=job.started_ns,
                limit=self.limits.get(job.number, 0),
                waited_ns=int(self._waited_ns),
                less=(OperatingPoint("swap", 60, ALONE_NS),),
            )
            for job in self._jobs
        )
        return PoolView(self.now_ns, 160, jobs)

    def run(self, seconds: float, chosen: Mapping[int, int] = CHOSEN) -> Mapping[int, int]:
        """Let time pass; returns the limits in force at the end."""
        until_ns = self.now_ns + int(seconds * 1e9)
        while self.now_ns < until_ns:
            self.now_ns += LOOK_NS
            self._waited_ns += 0 if any(self.limits.values()) else self.waits * LOOK_NS
            for job in self._jobs:
                while job.ends_ns <= self.now_ns:
                    took = self._slower(self.limits) * (1 + self._jitter * self._random.uniform(-1, 1))
                    job.started_ns, job.ends_ns = job.ends_ns, job.ends_ns + int(took * ALONE_NS)
                    job.iteration += 1
            if self.trials.is_open or not any(self.limits.values()):  # else nobody waits, and nobody asks
                self.asked += self.trials.asks
                limits = self.trials.limits_for(self._view(), chosen if self.trials.asks else {})
                self.changes += {**limits} != {**self.limits}
                self.limits = limits
        return {job: limit for job, limit in self.limits.items() if limit}


def with_saving(factor: float, without: float = 1.5) -> Callable[[Mapping[int, int]], float]:
    """Return a model in which saving multiplies the time of an iteration."""
    return lambda limits: without * (factor if any(limits.values()) else 1.0)


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
def test_what_is_slower_is_left_for_good(jitter: float) -> None:
    """The first U-Nets' case: it gives three quarters of what waiting gives."""
    model = Model(with_saving(1.3), jitter=jitter)
    assert model.run(60) == {}
    assert not model.trials.saves
    changes = model.changes
    assert changes <= 2 * MOST
    assert model.run(600) == {}
    assert model.changes == changes


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
def test_what_is_faster_is_kept_for_good(jitter: float) -> None:
    """Once the verdict is there nothing is measured anew, whatever noise there is."""
    model = Model(with_saving(0.75), jitter=jitter)
    assert model.run(60) == CHOSEN
    assert model.trials.saves
    changes = model.changes
    assert model.run(600) == CHOSEN
    assert model.changes == changes


def test_what_makes_no_difference_comes_to_rest() -> None:
    """Noise decides, and that stands."""
    model = Model(with_saving(1.0), jitter=0.3)
    model.run(120)
    changes = model.changes
    model.run(600)
    assert model.changes == changes


def test_a_choice_that_stops_the_jobs_is_left_soon() -> None:
    """A window that takes too long ends before its iterations do."""
    model = Model(with_saving(1000.0))
    model.run(5)
    assert model.run(60) == {}


def test_choices_that_are_alike_share_a_verdict_and_others_are_few() -> None:
    """A planner that changes its mind all the time causes some trials and then no more."""
    model = Model(with_saving(1.3))
    model.run(60)
    changes = model.changes
    model.run(60, {0: 63, 1: 58})
    assert model.changes == changes, "it is alike"
    tried = 1
    for limit in range(10, 60, 10):
        changes = model.changes
        assert model.run(60, {0: limit, 1: 95 - limit}) == {}
        tried += model.changes > changes
    assert tried == MOST_TRIALS
    assert not model.trials.asks


def test_another_budget_or_job_is_another_case() -> None:
    """What was measured before says nothing."""
    speeds = {"factor": 1.3}
    model = Model(lambda limits: 1.5 * (speeds["factor"] if any(limits.values()) else 1.0))
    assert model.run(60) == {}
    speeds["factor"] = 0.7
    assert model.run(60) == {}
    model._jobs.append(Running(2, started_ns=model.now_ns, ends_ns=model.now_ns + ALONE_NS))
    assert model.run(60) == CHOSEN


def test_a_pool_without_jobs_has_nothing_to_try() -> None:
    """Nothing is measured, and nothing is wrong."""
    trials = Trials()
    for now_ns in range(3):
        assert trials.limits_for(PoolView(now_ns, 160, ()), {}) == {}
    assert not trials.is_open


def test_where_jobs_hardly_wait_nothing_is_tried() -> None:
    """There is nothing to be won; once they wait for longer, there may be."""
    model = Model(with_saving(0.75))
    model.waits = 0.5 * LEAST_WAITED
    model.run(4)
    assert not model.trials.is_open, "nobody has to look on"
    asked = model.asked
    assert model.run(60) == {}
    assert model.asked == asked, "and no choice is made"
    assert model.changes == 1, "the one to nothing"
    model.waits = 2 * LEAST_WAITED
    assert model.run(60) == CHOSEN


def test_what_is_a_little_slower_is_left_after_few_windows() -> None:
    """It need not be clear: to go on trying would cost more than to be wrong."""
    model = Model(with_saving(1.06), jitter=0.2)
    assert model.run(60) == {}
    assert model.changes == 3, "to nothing, to the choice, and back: the windows of a side follow each other"


def test_a_choice_that_is_taken_back_is_on_trial_no_more() -> None:
    """Nobody has to look on once there is nothing to be tried."""
    model = Model(with_saving(1.3))
    model.run(2)
    assert model.trials.is_open
    assert model.run(60) == {}
    assert not model.trials.is_open


def test_jobs_that_wait_only_at_first_try_nothing() -> None:
    """Those that begin together wait for each other until their iterations are shifted; that is no reason to save."""
    model = Model(with_saving(0.8))
    model.waits = 0.5
    model.run((2 * (SETTLES + WINDOW) + 1) * 1.5 * ALONE_NS / 1e9)
    assert model.trials._without.waited > LEAST_WAITED, "a window says so"
    model.waits = 0.5 * LEAST_WAITED
    assert model.run(60) == {}
    assert model.changes == 1, "the one to nothing"


def test_a_choice_that_is_gone_is_on_trial_no_more() -> None:
    """Predictions say nothing of it any more."""
    model = Model(with_saving(1.3))
    model.run(2)
    assert model.trials.is_open
    model.run(2, {})
    assert not model.trials.is_open


def test_a_choice_makes_way_for_one_that_more_jobs_take_part_in() -> None:
    """The first one was made when the other job had not told its ways yet, and nothing has been measured of it."""
    took = [1.5, 15.0, 0.75]  # where so many jobs save
    model = Model(lambda limits: took[sum(limit > 0 for limit in limits.values())])
    window_s = (SETTLES + WINDOW) * 1.5 * ALONE_NS / 1e9
    model.run(2 * window_s + 0.9 * SLOW * window_s, {0: 60})
    assert model.limits == {0: 60, 1: 0}
    assert model.run(LOOK_NS / 1e9) == CHOSEN
    assert model.run(60) == CHOSEN, "what came before does not count"
    assert model.trials.saves


def test_a_choice_that_has_been_measured_makes_way_for_none() -> None:
    """Its trial goes on."""
    model = Model(with_saving(0.75))
    window_s = (SETTLES + WINDOW) * 1.5 * ALONE_NS / 1e9
    model.run(4 * window_s)
    assert model.trials.is_open
    for _ in range(10):
        assert model.run(window_s / 10, {0: 30, 1: 30}) in ({}, CHOSEN)


def test_choices_that_change_all_the_time_are_tried_all_the_same() -> None:
    """One makes way a few times only, else no window would ever end."""
    model = Model(with_saving(0.75))
    for number in range(40):
        model.run(0.7, {0: 60 - number % 2 * 30, 1: 60})
    assert any(model.limits.values())
    assert model.trials.saves
    assert not model.trials.is_open


@pytest.mark.parametrize("compiling", [1, 20])
def test_a_first_iteration_that_compiles_does_not_weigh(compiling: int) -> None:
    """Else the job's speed would count so many times: with the choice one job is twice as fast, this one is slower."""
    model = Model(lambda _limits: 1.0)
    trials, limits, done = Trials(), dict[int, int](), {0: 0.0, 1: 0.0}
    for now_ns in range(0, 60_000 * MS, LOOK_NS):
        jobs = []
        for job in model._view().jobs:
            done[job.job] += LOOK_NS / ALONE_NS / ((0.5, 1.2)[job.job] if limits.get(0) else 1.0)
            compiles = job.job == 1 and done[1] < SETTLES
            assert job.profile is not None
            profile = dataclasses.replace(job.profile, duration_ns=(compiling if compiles else 1) * ALONE_NS)
            since_ns = int(done[job.job] % 1 * ALONE_NS)
            seen = dataclasses.replace(job, profile=profile, iteration=int(done[job.job]), started_ns=now_ns - since_ns)
            jobs.append(dataclasses.replace(seen, waited_ns=now_ns // 3, limit=limits.get(job.job, 0)))
        limits = dict(trials.limits_for(PoolView(now_ns, 160, tuple(jobs)), CHOSEN))
    assert limits == CHOSEN


def test_who_does_not_fit_saves_without_a_trial() -> None:
    """Its peak is more than the budget."""
    model = Model(with_saving(1.3), peak=200)
    model.run(0.01)
    assert model.run(60) == CHOSEN
    assert model.changes == 1
    assert model.trials.saves


def test_a_jobs_weight_counts() -> None:
    """Saving that costs the heavy job more than the light one gains is left."""
    model = Model(with_saving(1.0))
    took = {0: 1.5, 1: 0.5}
    jobs = model._jobs

    def slower(number: int) -> float:
        return took[number] if any(model.limits.values()) else 1.0

    def run(weights: Mapping[int, float]) -> Mapping[int, int]:
        trials = Trials(weights)
        limits: Mapping[int, int] = {}
        for _ in range(60_000 // 7):
            model.now_ns += LOOK_NS
            model._waited_ns += model.waits * LOOK_NS
            for job in jobs:
                while job.ends_ns <= model.now_ns:
                    job.started_ns, job.ends_ns = job.ends_ns, job.ends_ns + int(slower(job.number) * ALONE_NS)
                    job.iteration += 1
            model.limits = limits = trials.limits_for(model._view(), CHOSEN)
        return {job: limit for job, limit in limits.items() if limit}

    assert run({0: 1.0, 1: 1.0}) == CHOSEN
    assert run({0: 9.0, 1: 1.0}) == {}
