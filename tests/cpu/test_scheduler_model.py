"""The very policies on a model of jobs, memory and time: no deadlock, never over budget, and the throughput owed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from cpu.support.scheduler_cases import WORKS, smallest_budget
from cpu.support.scheduler_model import MS, Model, Outcome, Work, plateau, triangle
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.scheduler.policies import policy_named

if TYPE_CHECKING:
    from collections.abc import Sequence

TWO = [triangle(60)] * 2
TWO_KEEPING = [triangle(60, kept=6)] * 2
FOUR = [triangle(40)] * 4
FOUR_KEEPING = [triangle(40, kept=4)] * 4
MIXED = [plateau(100, rise=0.2, fall=0.2), triangle(60)]
UNEQUAL = [triangle(50, duration_ns=400 * MS), triangle(40, kept=3, duration_ns=130 * MS)]


def run(name: str, works: Sequence[Work], share: float, jitter: float = 0.0, iterations: int = 40) -> Outcome:
    """Run jobs that arrive 7 ms apart under a budget that is a share of the sum of their peaks."""
    arriving = [dataclasses.replace(w, arrive_ns=7 * i * MS, jitter=jitter) for i, w in enumerate(works)]
    budget = int(share * sum(max(work.levels) for work in works))
    until_ns = iterations * max(work.duration_ns for work in works)
    outcome = Model(policy_named(name), arriving, budget).run(until_ns, warm_up_ns=until_ns // 4)
    assert outcome.peak_granted <= budget
    assert outcome.stalls == 0
    return outcome


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.2])
@pytest.mark.parametrize(
    ("works", "share", "least"),
    [
        pytest.param(TWO, 0.70, 0.95, id="two identical at 0.70"),
        pytest.param(TWO_KEEPING, 0.70, 0.95, id="two identical that keep a tenth at 0.70"),
        pytest.param(FOUR, 0.61, 0.90, id="four identical at 0.61"),
        pytest.param(FOUR_KEEPING, 0.61, 0.90, id="four identical that keep a tenth at 0.61"),
        pytest.param(MIXED, 0.77, 0.75, id="beefy and lean at 0.77"),
        pytest.param(UNEQUAL, 0.80, 0.75, id="long and short at 0.80"),
    ],
)
def test_zico_reaches_the_throughput_it_owes(works: list[Work], share: float, least: float, jitter: float) -> None:
    """Relative to unlimited memory, jobs reach at least the bound, with times right and up to a fifth wrong."""
    unlimited = run("none", works, 1.0, jitter)
    assert run("zico", works, share, jitter).mean >= least * unlimited.mean


@pytest.mark.parametrize("works", [TWO, FOUR, MIXED], ids=["two", "four", "mixed"])
def test_serial_does_one_jobs_worth(works: list[Work]) -> None:
    """One iteration at a time comes to the throughput of one job, shared alike."""
    outcome = run("serial", works, 0.8)
    assert sum(outcome.normalised) == pytest.approx(1, abs=0.03)
    assert max(outcome.iterations) - min(outcome.iterations) <= 1


def test_everything_fits_and_nothing_waits() -> None:
    """With the sum of the peaks as budget, zico costs nothing."""
    assert run("zico", MIXED, 1.0).normalised == run("none", MIXED, 1.0).normalised


def test_a_large_job_does_not_starve_among_small_ones() -> None:
    """A job that needs all the budget comes to its peak again and again while three small ones keep going."""
    works = [plateau(40, rise=0.1, fall=0.1), *[triangle(14, duration_ns=30 * MS)] * 3]
    outcome = run("zico", works, 0.5, jitter=0.1)
    assert outcome.iterations[0] >= 15
    assert outcome.longest_wait_ns <= 200 * MS  # two iterations of the large one; all meet before another way begins


@pytest.mark.parametrize("name", ["zico", "serial"])
@given(works=st.lists(WORKS, min_size=1, max_size=5), spare=st.integers(0, 4), seed=st.integers(0, 99))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_arbitrary_jobs_all_go_on(name: str, works: list[Work], spare: int, seed: int) -> None:
    """Any jobs that fit one by one all finish iterations, within the budget and without ever being stuck."""
    budget = smallest_budget(works) + spare
    outcome = Model(policy_named(name), works, budget, seed).run(until_ns=400)
    assert outcome.stalls == 0
    assert outcome.peak_granted <= budget
    assert min(outcome.iterations) > 0


@given(
    works=st.lists(WORKS, min_size=2, max_size=4),
    lie=st.integers(-3, 3),
    spare=st.integers(0, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_wrong_profiles_cost_time_only(works: list[Work], lie: int, spare: int, seed: int) -> None:
    """With profiles too low or too high everywhere, all jobs still go on and the budget still holds."""
    believing = [dataclasses.replace(w, believed=tuple(max(0, level + lie) for level in w.levels)) for w in works]
    budget = smallest_budget(works) + spare
    outcome = Model(policy_named("zico"), believing, budget, seed).run(until_ns=400)
    assert outcome.peak_granted <= budget
    assert min(outcome.iterations) > 0
