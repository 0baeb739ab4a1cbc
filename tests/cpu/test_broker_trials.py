"""Shares of the budget stay only if they are measured to be faster than none, against a model of jobs."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.broker.trials import LEAST_WAITED, SETTLES, WINDOW, WINDOWS, SavingTrial, shares_of
from zico.pool.layout import JobState
from zico.scheduler.state import JobView, PoolView, Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MS = 1_000_000
ALONE_NS = 100 * MS
LOOK_NS = 7 * MS
PEAK, BUDGET = 100, 160
SHARES = {0: 80, 1: 80}


def view_of(number: int, *, peak: int = PEAK, weight: float = 1.0, kept: int = 0, saves: bool = True) -> JobView:
    """Return a job inside its iteration."""
    return JobView(
        job=number,
        name=f"job-{number}",
        phase=JobState.RUNNING,
        held=0,
        persistent=kept,
        claim=0,
        kept=kept,
        most=peak,
        profile=Profile((peak, 0), (0, ALONE_NS // 2), ALONE_NS, 6, 128),
        iteration=0,
        weight=weight,
        saves=saves,
    )


@dataclasses.dataclass
class Running:
    """A job of the model."""

    view: JobView
    iteration: int = 0
    started_ns: int = 0
    ends_ns: int = 0


class Model:
    """Jobs whose iterations take as long as their limits make them, more or less."""

    def __init__(self, slower: Callable[[int, Mapping[int, int]], float], *, jitter: float = 0.0) -> None:
        """Take what a job's iterations with limits take over those alone, and by up to what share they vary."""
        self.trial = SavingTrial()
        self.limits: Mapping[int, int] = {}
        self.changes = 0
        self.now_ns = 0
        self.budget = BUDGET
        self.waits = 0.3
        """The share of its time that a job waits for memory while nobody saves."""
        self.compiling: dict[int, int] = {}
        """How many times as long a job's first iterations take as its profile says later."""
        self._slower, self._jitter = slower, jitter
        self._waited_ns = 0.0
        self._random = random.Random(7)  # noqa: S311 - a model
        self.jobs = [Running(view_of(0)), Running(view_of(1))]

    def _view(self) -> PoolView:
        return PoolView(self.now_ns, self.budget, tuple(map(self._seen, self.jobs)))

    def _seen(self, job: Running) -> JobView:
        profile = job.view.profile
        assert profile is not None
        first = self.compiling.get(job.view.job, 1) if job.iteration < SETTLES else 1
        return dataclasses.replace(
            job.view,
            profile=dataclasses.replace(profile, duration_ns=first * ALONE_NS),
            iteration=job.iteration,
            started_ns=job.started_ns,
            limit=self.limits.get(job.view.job, 0),
            waited_ns=int(self._waited_ns),
        )

    def run(self, seconds: float) -> Mapping[int, int]:
        """Let time pass; returns the limits in force at the end."""
        until_ns = self.now_ns + int(seconds * 1e9)
        while self.now_ns < until_ns:
            self.now_ns += LOOK_NS
            self._waited_ns += 0 if self.limits else self.waits * LOOK_NS
            for job in self.jobs:
                while job.ends_ns <= self.now_ns:
                    took = self._slower(job.view.job, self.limits) * (1 + self._jitter * self._random.uniform(-1, 1))
                    job.started_ns, job.ends_ns = job.ends_ns, job.ends_ns + int(took * ALONE_NS)
                    job.iteration += 1
            if self.trial.is_open or not self.limits:  # else nobody waits, and nobody asks
                limits = self.trial.limits_for(self._view())
                self.changes += limits != self.limits
                self.limits = limits
        return self.limits


def with_saving(factor: float, without: float = 1.5) -> Callable[[int, Mapping[int, int]], float]:
    """Return a model in which saving multiplies the time of an iteration."""
    return lambda _job, limits: without * (factor if limits else 1.0)


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
def test_what_is_slower_is_left_for_good(jitter: float) -> None:
    """The first U-Nets' case: shares give three quarters of what waiting gives. They are tried once."""
    model = Model(with_saving(1.3), jitter=jitter)
    assert model.run(60) == {}
    assert model.changes == 2, "to shares and back"
    assert model.run(200) == {}
    assert model.changes == 2


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
def test_what_is_faster_is_kept_for_good(jitter: float) -> None:
    """Once the verdict is there nothing is measured anew, whatever noise there is."""
    model = Model(with_saving(0.75), jitter=jitter)
    assert model.run(60) == SHARES
    assert model.run(200) == SHARES
    assert model.changes == 1
    assert not model.trial.is_open


@settings(max_examples=30)
@given(
    without=st.floats(1.0, 3.0),
    factor=st.one_of(st.floats(0.4, 0.95), st.floats(1.05, 3.0)),
    waits=st.one_of(st.floats(0.0, 0.09), st.floats(0.11, 0.9)),
)
def test_the_faster_setting_stays(without: float, factor: float, waits: float) -> None:
    """Shares are tried where jobs wait for a tenth of their time, once, and stay where they are faster than none."""
    model = Model(with_saving(factor, without))
    model.waits = waits
    model.run(8 * (1 + 2 * WINDOWS) * (SETTLES + WINDOW) * ALONE_NS * 1e-9)
    is_tried, is_faster = waits > LEAST_WAITED, factor < 1
    assert model.limits == (SHARES if is_tried and is_faster else {})
    assert model.changes == is_tried * (1 if is_faster else 2)


def test_the_trial_comes_after_a_window_to_settle_and_two_without() -> None:
    """Jobs that begin together wait for each other at first; then each setting has its windows one after the other."""
    model = Model(with_saving(0.75))
    window_s = (SETTLES + WINDOW) * 1.5 * ALONE_NS * 1e-9
    model.run((1 + WINDOWS) * window_s - 0.1)
    assert not model.limits
    model.run(0.5)
    assert model.trial.is_open
    model.run(WINDOWS * 0.75 * window_s + 0.1)
    assert not model.trial.is_open
    assert model.limits == SHARES


def test_shares_that_stop_the_jobs_are_left_soon() -> None:
    """A window that takes too long ends before its iterations do."""
    model = Model(with_saving(1000.0))
    model.run(5)
    assert model.run(5) == {}
    assert not model.trial.is_open


def _with_another_job(model: Model) -> None:
    model.jobs.append(Running(view_of(2, saves=False), started_ns=model.now_ns, ends_ns=model.now_ns + ALONE_NS))


def _with_another_budget(model: Model) -> None:
    model.budget = 120


def _with_another_weight(model: Model) -> None:
    model.jobs[0].view = dataclasses.replace(model.jobs[0].view, weight=3.0)


def _with_a_job_that_saves_no_more(model: Model) -> None:
    model.jobs[1].view = dataclasses.replace(model.jobs[1].view, saves=False)


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        (_with_another_job, {0: 53, 1: 53}),
        (_with_another_budget, {0: 60, 1: 60}),
        (_with_another_weight, {1: 60}),
        (_with_a_job_that_saves_no_more, {0: 80}),
    ],
)
def test_another_case_is_tried_anew(change: Callable[[Model], None], shares: Mapping[int, int]) -> None:
    """Other jobs, another budget or weight, or a limit by a person: what was measured before says nothing."""
    factor = [1.3]
    model = Model(lambda _job, limits: 1.5 * (factor[0] if limits else 1.0))
    assert model.run(60) == {}
    factor[0] = 0.7
    assert model.run(60) == {}
    change(model)
    assert model.run(60) == shares


def test_a_pool_without_jobs_has_nothing_to_try() -> None:
    """Nothing is measured, and nothing is wrong."""
    trial = SavingTrial()
    for now_ns in range(3):
        assert trial.limits_for(PoolView(now_ns, BUDGET, ())) == {}
    assert not trial.is_open


def test_where_jobs_hardly_wait_nothing_is_tried() -> None:
    """There is nothing to be won; once they wait for longer, there may be."""
    model = Model(with_saving(0.75))
    model.waits = 0.5 * LEAST_WAITED
    assert model.run(60) == {}
    assert not model.trial.is_open, "nobody has to look on"
    assert model.changes == 0
    model.waits = 2 * LEAST_WAITED
    assert model.run(60) == SHARES


def test_jobs_that_wait_only_at_first_try_nothing() -> None:
    """Those that begin together wait for each other until their iterations are shifted; that is no reason to save."""
    model = Model(with_saving(0.8))
    model.waits = 0.5
    model.run((2 * (SETTLES + WINDOW) + 1) * 1.5 * ALONE_NS * 1e-9)
    model.waits = 0.5 * LEAST_WAITED
    assert model.run(60) == {}
    assert model.changes == 0


@pytest.mark.parametrize("compiling", [1, 20])
def test_a_first_iteration_that_compiles_does_not_weigh(compiling: int) -> None:
    """Else its job's speed would count so many times, which is slower with shares; the other is twice as fast."""
    model = Model(lambda job, limits: (0.5, 1.2)[job] if limits else 1.0)
    model.compiling = {1: compiling}
    assert model.run(60) == SHARES


def test_a_jobs_weight_counts() -> None:
    """Saving that costs the heavy job more than the light one gains is left."""
    for weight, shares in ((1.0, SHARES), (3.0, {})):
        model = Model(lambda job, limits: (1.5, 0.62)[job] if limits else 1.0)
        model.jobs[0].view = dataclasses.replace(model.jobs[0].view, weight=weight)
        assert model.run(60) == shares


# -- what is tried ---------------------------------------------------------------------------------


def test_only_who_can_save_and_wants_more_gets_a_limit() -> None:
    """The others have their share by weight, too: what one does not want goes to whoever wants more."""
    small, large, fixed = view_of(0, peak=20), view_of(1), view_of(2, saves=False)
    assert shares_of(PoolView(0, 160, (small, large, fixed))) == {1: 70}
    assert shares_of(PoolView(0, 160, (small, large))) == {}


def test_a_job_tells_what_it_wants_where_its_profile_does_not() -> None:
    """One that has never had all of it is larger than what it has held."""
    told = dataclasses.replace(view_of(0), wanted=300)
    assert shares_of(PoolView(0, 160, (told, view_of(1, peak=40)))) == {0: 120}


def test_nothing_is_tried_that_does_not_hold_what_a_job_keeps() -> None:
    """Its iterations would begin with memory away that they need."""
    keeps = view_of(0, kept=81)
    assert shares_of(PoolView(0, 160, (keeps, view_of(1)))) == {}
    assert shares_of(PoolView(0, 164, (keeps, view_of(1)))) == {0: 82, 1: 82}
    assert shares_of(PoolView(0, 1, (view_of(0), view_of(1)))) == {}
