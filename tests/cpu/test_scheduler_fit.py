"""Whether jobs fit together: the simulator's answer against what is known without it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu.support.scheduler_cases import WORKS, smallest_budget
from cpu.support.scheduler_model import Work, plateau, triangle
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ProblemError
from zico.base.units import MIB
from zico.scheduler.curves import MOST_BINS, profile_of
from zico.scheduler.fit import Answer, Fit, fit
from zico.scheduler.policies import policy_named
from zico.scheduler.simulate import LoadPhase
from zico.scheduler.state import Profile

POLICY = policy_named("zico")


def asked(works: list[Work], budget: int, policy: str = "zico") -> Fit:
    """Ask for jobs named A, B and so on, in regions of 64 MiB."""
    loads = [work.load(chr(ord("A") + i)) for i, work in enumerate(works)]
    return fit(loads, budget, policy_named(policy), 64 * MIB)


def test_jobs_within_the_sum_of_their_peaks_cost_nothing() -> None:
    """With the sum of the peaks as budget nobody waits, and the answer says so."""
    found = asked([triangle(50), triangle(30)], 80)
    assert found.answer is Answer.FITS
    assert [job.delay_s for job in found.jobs] == [0, 0]
    assert found.reason == "peaks 3.1 GiB + 1.9 GiB are within 5 GiB"


def test_a_phase_that_needs_more_than_usual_iterations_counts() -> None:
    """A job that evaluates in twice its usual peak does not fit into that peak."""
    load = triangle(50).load("A")
    evaluates = dataclasses.replace(load, phases=(LoadPhase(10, triangle(100).load("A").profile, load.persistent),))
    assert fit([load], 60, POLICY, 64 * MIB).answer is Answer.FITS
    found = fit([evaluates], 60, POLICY, 64 * MIB)
    assert found.answer is Answer.NO
    assert found.reason == "A alone needs 6.1 GiB"
    assert found.jobs[0].peak_bytes == evaluates.phases[0].profile.peak * 64 * MIB


MEETS, SHORT = "its peak would meet that of A: ", "memory is short within its iteration: "


@pytest.mark.parametrize(("policy", "reasons"), [("shift", (MEETS,)), ("claims", (SHORT,)), ("zico", (MEETS, SHORT))])
def test_two_plateaus_take_turns(policy: str, reasons: tuple[str, ...]) -> None:
    """Two jobs that hold their peak nearly all the time do half the work each, and the reason says where they wait."""
    found = asked([plateau(50, rise=0.02, fall=0.02, kept=5)] * 2, 60, policy)
    assert found.answer is Answer.WAITS
    assert [job.normalised for job in found.jobs] == pytest.approx([0.5, 0.5], abs=0.05)
    assert [job.delay_s * 1e3 for job in found.jobs] == pytest.approx([100, 100], abs=10)
    assert found.jobs[1].reason.startswith(reasons)
    assert found.peak <= 60


def test_two_triangles_hardly_wait_at_seven_tenths() -> None:
    """Equal jobs whose peaks interleave lose next to nothing."""
    found = asked([triangle(60)] * 2, 84)
    assert found.answer is not Answer.NO
    assert all(job.normalised > 0.95 for job in found.jobs)


def test_a_job_above_the_budget_is_named() -> None:
    """A job that does not fit alone is said to be the reason, with the least that would do."""
    found = asked([plateau(98, rise=0.1, fall=0.1), triangle(10, kept=2)], 80)
    assert (found.answer, found.peak) == (Answer.NO, 100)
    assert found.reason == "A alone needs 6.1 GiB"


def test_what_others_keep_may_leave_too_little() -> None:
    """Two jobs that fit alone but not beside what the other keeps do not fit."""
    found = asked([plateau(60, rise=0.1, fall=0.1, kept=10), triangle(50, kept=30)], 80)
    assert found.answer is Answer.NO
    assert found.peak == 90
    assert found.reason == "A needs 3.8 GiB, and the others keep 1.9 GiB between iterations"


def test_without_coordination_memory_overflows() -> None:
    """Under a policy that starts everybody, two plateaus come to block each other."""
    found = asked([plateau(50, rise=0.3, fall=0.02)] * 2, 60, "none")
    assert found.answer is Answer.NO
    assert "wait for each other" in found.reason


@settings(max_examples=40, derandomize=True, deadline=None)
@given(works=st.lists(WORKS, min_size=1, max_size=4), budget=st.integers(1, 20))
def test_the_answer_is_no_exactly_below_the_smallest_budget(works: list[Work], budget: int) -> None:
    """Jobs fit if each fits beside what the others keep, and waiting is never reported where all peaks fit."""
    works = [dataclasses.replace(work, jitter=0.0) for work in works]
    found = asked(works, budget)
    assert (found.answer is Answer.NO) == (budget < smallest_budget(works))
    if budget >= sum(max(work.levels) for work in works):
        assert found.answer is Answer.FITS


@settings(max_examples=20, derandomize=True, deadline=None)
@given(works=st.lists(WORKS, min_size=1, max_size=3), budget=st.integers(8, 20))
def test_the_same_question_has_the_same_answer(works: list[Work], budget: int) -> None:
    """The simulation is deterministic, jitter included."""
    assert asked(works, budget) == asked(works, budget)


def test_nothing_to_ask_about_is_refused() -> None:
    """No jobs, or a job whose iteration takes no time, is an error and not an answer."""
    with pytest.raises(ProblemError, match="no job"):
        fit([], 10, POLICY, MIB)
    instant = dataclasses.replace(triangle(5).load("A"), profile=Profile((1,), (0,), 0, 0, 1))
    with pytest.raises(ProblemError, match="takes no time"):
        fit([instant], 10, POLICY, MIB)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=1500))
def test_a_profile_has_the_highest_level_of_each_bin(ticks: list[tuple[int, int]]) -> None:
    """No more than so many bins, each at its first tick's time, and together the curve's envelope."""
    held = np.array([level for level, _ in ticks], np.int64)
    times = np.concatenate(([7], 7 + np.cumsum([length for _, length in ticks])))
    profile = profile_of(held, times)
    width = 1 << profile.shift
    assert len(profile.held) == -(-len(ticks) // width) <= MOST_BINS
    assert profile.shift == 0 or len(ticks) > MOST_BINS * width // 2
    assert list(profile.held) == [max(held[i : i + width]) for i in range(0, len(ticks), width)]
    assert list(profile.t_ns) == [int(times[i]) - 7 for i in range(0, len(ticks), width)]
    assert (profile.duration_ns, profile.n_events) == (int(times[-1]) - 7, len(ticks))


@pytest.mark.parametrize(
    ("held", "times"),
    [([], [0]), ([1], [0]), ([1], [1, 0]), ([-1], [0, 1])],
)
def test_a_profile_of_nonsense_is_refused(held: list[int], times: list[int]) -> None:
    """No ticks, too few times, falling times and negative levels are errors."""
    with pytest.raises(ProblemError):
        profile_of(np.array(held, np.int64), np.array(times, np.int64))
