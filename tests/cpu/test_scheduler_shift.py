"""Staircases and the smallest delay against counting every instant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu.support.scheduler_views import (
    Shift,
    Staircase,
    claim,
    level_at,
    planned,
    position_ns,
    remaining,
    smallest_delay,
    total,
    total_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.pool.layout import JobState
from zico.scheduler import demand
from zico.scheduler.greedy import NEVER
from zico.scheduler.state import JobView, Profile

JOB = JobView(
    job=0,
    name="job",
    phase=JobState.BOUNDARY,
    held=1,
    persistent=1,
    claim=1,
    kept=1,
    most=1,
    profile=None,
    iteration=1,
    waiting_since_ns=5,
)


def profile(levels: list[int], step_ns: int = 1) -> Profile:
    """Return a profile of equal steps of four events each."""
    times = tuple(i * step_ns for i in range(len(levels)))
    return Profile(tuple(levels), times, len(levels) * step_ns, shift=2, n_events=4 * len(levels))


def staircase(levels: list[int], width_ns: int = 1) -> Staircase:
    """Return a staircase of equal steps."""
    return Staircase(np.arange(len(levels), dtype=np.int64) * width_ns, np.array(levels, np.int64))


def fits(others: Staircase, held: int, levels: list[int], delay_ns: int, budget: int) -> bool:
    """Look at every nanosecond of the iteration."""
    return all(own <= held or own + level_at(others, delay_ns + t) <= budget for t, own in enumerate(levels))


LEVELS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(LEVELS, LEVELS, st.integers(0, 6), st.integers(0, 14))
@settings(max_examples=500, derandomize=True, deadline=None)
def test_the_delay_is_the_smallest_that_fits(others: list[int], levels: list[int], held: int, budget: int) -> None:
    """The delay found fits, no smaller one does, and never is said only if none ever fits."""
    demand = staircase(others)
    job = dataclasses.replace(JOB, held=held)
    found = smallest_delay(demand, job, profile(levels), budget)
    possible = [delay for delay in range(len(others) + 1) if fits(demand, held, levels, delay, budget)]
    assert found.delay_ns == (possible[0] if possible else NEVER)


@given(LEVELS, LEVELS, st.integers(0, 6), st.integers(0, 14))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_conflict_is_where_memory_is_first_short(
    others: list[int], levels: list[int], held: int, budget: int
) -> None:
    """The conflict is the first instant at which a start now would exceed the budget, -1 if there is none."""
    demand = staircase(others)
    found = smallest_delay(demand, dataclasses.replace(JOB, held=held), profile(levels), budget)
    short = [t for t, own in enumerate(levels) if own > held and own + level_at(demand, t) > budget]
    assert found.conflict_ns == (short[0] if short else -1)


def test_the_drawn_example() -> None:
    """The example in the module's text holds: the 3 may begin when the others come down to 1."""
    assert smallest_delay(staircase([4, 4, 4, 1]), JOB, profile([1, 3, 3, 2]), 6) == Shift(2, 1)


@given(st.lists(LEVELS, min_size=1, max_size=5), st.integers(1, 4))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_the_total_is_the_sum_at_every_instant(parts: list[list[int]], width_ns: int) -> None:
    """Merging staircases adds their levels everywhere and keeps times rising."""
    staircases = [staircase(part, width_ns + i) for i, part in enumerate(parts)]
    merged = total(staircases)
    assert all(level_at(merged, t) == sum(level_at(part, t) for part in staircases) for t in range(70))
    assert merged.t_ns[0] == 0
    assert np.all(np.diff(merged.t_ns) > 0)


@given(st.lists(st.tuples(LEVELS, st.integers(0, 50), st.sampled_from(list(JobState)[1:])), min_size=1, max_size=6))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_the_total_of_a_snapshot_is_the_sum_of_what_remains(drawn: list[tuple[list[int], int, JobState]]) -> None:
    """All jobs at once come to what the jobs come to one by one."""
    jobs = [
        dataclasses.replace(JOB, phase=phase, progress=progress, profile=profile(levels, 3), held=levels[0])
        for levels, progress, phase in drawn
    ]
    one_by_one = total([remaining(job, now_ns=40) for job in jobs])
    together = total_of(40, jobs)
    assert all(level_at(together, t) == level_at(one_by_one, t) for t in range(90))


TIMES = st.one_of(st.integers(0, 60), st.integers(0, 1 << 40))


@given(st.lists(TIMES, min_size=1, max_size=300))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_changes_are_put_in_the_order_of_their_times(drawn: list[int]) -> None:
    """However far apart or crowded they are, each keeps what it changes, and those at one time their order."""
    when_ns, changes = np.array(drawn, np.int64), np.arange(len(drawn))
    sorted_ns, sorted_changes = demand.in_time(when_ns, changes)
    order = np.argsort(when_ns, kind="stable")
    assert sorted_ns.tolist() == when_ns[order].tolist()
    assert sorted_changes.tolist() == changes[order].tolist()


def test_very_many_jobs_hold_hardly_more_than_they_do() -> None:
    """The total of more jobs than are sorted at once is nowhere below their sum, and above it by a few per cent."""
    rng = np.random.default_rng(2)
    jobs = []
    for number in range(160):
        levels = (np.abs(np.cumsum(rng.integers(-40, 44, 256))) + 20).tolist()
        own = profile(levels, int(rng.integers(1_000, 3_000)))
        running = dataclasses.replace(JOB, job=number, phase=JobState.RUNNING, persistent=min(levels), profile=own)
        jobs.append(dataclasses.replace(running, held=0, progress=int(rng.integers(0, 300))))
    together = total_of(40, jobs)
    exact = total([remaining(job, now_ns=40) for job in jobs])
    instants = range(0, int(exact.t_ns[-1]), 997)
    ratios = [level_at(together, t) / level_at(exact, t) for t in instants]
    assert min(ratios) >= 1
    assert 1 < np.mean(ratios) < 1.05


@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(1, 7), st.integers(1, 12))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_coarse_staircase_is_nowhere_lower(levels: list[int], width_ns: int, most: int) -> None:
    """It has few steps, ends at the same level, and is as high only where the fine one is within a span of time."""
    fine = staircase(levels, width_ns)
    rough = Staircase(*demand.coarse(tuple(fine), most))
    span_ns = max(1, int(fine.t_ns[-1]) // most)
    assert len(rough.t_ns) <= max(2 * most, most + 3)
    assert rough.t_ns[0] == 0
    assert np.all(np.diff(rough.t_ns) > 0)
    assert rough.level[-1] == fine.level[-1] or len(rough.level) < len(fine.level)
    for t in range(width_ns * (len(levels) + 2)):
        near = {level_at(fine, u) for u in range(max(0, t - span_ns), t + span_ns)}
        assert level_at(fine, t) <= level_at(rough, t) <= max(near)


def test_a_running_job_goes_on_from_its_progress() -> None:
    """What remains begins where the job is in its bin, with what it holds if that is more, and ends at the residual."""
    steps = profile([3, 3, 7, 7, 7, 5, 4], 4)
    job = dataclasses.replace(JOB, phase=JobState.RUNNING, progress=14, in_bin_ns=2, held=8, kept=2, profile=steps)
    rest = remaining(job, now_ns=0)
    assert rest.t_ns.tolist() == [0, 6, 10, 14]
    assert rest.level.tolist() == [8, 5, 4, 2]


def test_a_planned_job_holds_its_own_until_it_starts_and_after_it_ends() -> None:
    """A reservation is the whole iteration behind its delay, between what the job holds at its boundary."""
    plan = planned(dataclasses.replace(JOB, held=2), profile([3, 3, 7, 4]), 5)
    assert plan.t_ns.tolist() == [0, 5, 7, 8, 9]
    assert plan.level.tolist() == [2, 3, 7, 4, 2]


@pytest.mark.parametrize("phase", [JobState.BOUNDARY, JobState.LEAVING])
def test_who_is_in_no_iteration_stays_level(phase: JobState) -> None:
    """A job at a boundary or leaving is expected to keep exactly what it holds."""
    job = dataclasses.replace(JOB, phase=phase, held=6, profile=profile([9, 9]))
    assert remaining(job, now_ns=0).level.tolist() == [6]


def test_who_overruns_is_expected_to_take_as_long_again() -> None:
    """A job past its profile's end keeps what it holds for as long as it has overrun, then its residual."""
    ended = profile([9, 9], 100)
    job = dataclasses.replace(JOB, phase=JobState.RUNNING, progress=99, in_bin_ns=150, held=6, profile=ended)
    rest = remaining(job, now_ns=250)
    assert rest.t_ns.tolist() == [0, 50]
    assert rest.level.tolist() == [6, 1]


@pytest.mark.parametrize(
    ("progress", "in_bin_ns", "expected"), [(0, 0, 0), (3, 30, 30), (3, 90, 50), (4, 20, 70), (7, 90, 100)]
)
def test_a_bin_is_followed_by_the_clock(progress: int, in_bin_ns: int, expected: int) -> None:
    """Progress tells the bin, and the clock the way through it, at most to its end."""
    job = dataclasses.replace(
        JOB, phase=JobState.RUNNING, progress=progress, in_bin_ns=in_bin_ns, profile=profile([9, 3], 50)
    )
    assert position_ns(job) == expected


@pytest.mark.parametrize(("progress", "expected"), [(0, 7), (19, 7), (20, 7), (24, 5), (28, 4), (36, 4), (37, 7)])
def test_a_claim_falls_a_step_late_and_is_whole_beyond_the_end(progress: int, expected: int) -> None:
    """The claim follows the profile with one step's delay; past the expected end all of the peak is possible again."""
    job = dataclasses.replace(
        JOB, phase=JobState.RUNNING, progress=progress, held=3, profile=profile([3, 3, 7, 7, 7, 5, 4])
    )
    assert claim(job) == expected
