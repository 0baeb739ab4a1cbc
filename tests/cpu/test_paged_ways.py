"""What the broker expects of jobs that page in less: by the tier's rates, then by what was measured."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.broker.operating_points import PagedWays, rises
from zico.pool.layout import JobState
from zico.scheduler.state import POINT_SHARES, JobView, OperatingPoint, Profile

NS = 80_000_000
REGION_NS = 1_000_000
TOLD = (OperatingPoint("page", 16, 16 * REGION_NS),)


def profile(held: tuple[int, ...], ns: int = NS) -> Profile:
    """Return an iteration in equal steps."""
    return Profile(held, tuple(i * ns // len(held) for i in range(len(held))), ns, 6, len(held) << 6)


WANTED = profile((0, 100, 100, 40, 90, 0))


def job(limit: int = 0, iteration: int = 9, ns: int = NS) -> JobView:
    """Return a job that pages, whose last iteration took so long."""
    held = tuple(min(held, limit or held) for held in WANTED.held)
    view = JobView(
        job=3,
        name="a",
        phase=JobState.RUNNING,
        held=0,
        persistent=0,
        claim=0,
        kept=0,
        profile=profile(held, ns),
        iteration=iteration,
    )
    return dataclasses.replace(view, limit=limit, less=TOLD)


def test_what_rises_above_a_limit_leaves_and_comes_back() -> None:
    """Above 50: 50 at first, and 40 once more after the dip; each for the time of both ways."""
    found = {way.limit: way for way in PagedWays().of(job(), WANTED)}
    assert sorted(found) == [int(share * 100) for share in sorted(POINT_SHARES)]
    assert found[50] == OperatingPoint("page", 50, NS + (50 + 40) * REGION_NS)
    assert found[90].duration_ns == NS + 10 * REGION_NS


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(0, 100))
def test_no_more_rises_above_a_higher_limit(held: list[int], limit: int) -> None:
    """Nothing rises above the peak, and lower limits never cost less."""
    of = profile(tuple(held))
    assert rises(of, max(held)) == 0
    assert rises(of, limit) >= rises(of, limit + 1) >= 0
    assert rises(of, limit) >= (max(held) - max(limit, min(held))) * (max(held) > limit)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(0, 100), st.integers(0, 20))
def test_iterations_are_a_circle(held: list[int], limit: int, turn: int) -> None:
    """What is above the limit when an iteration ends is when the next begins, and need not come back for that."""
    turned = held[turn % len(held) :] + held[: turn % len(held)]
    assert rises(profile(tuple(turned)), limit) == rises(profile(tuple(held)), limit)


def test_a_measured_iteration_corrects_all_predictions() -> None:
    """Twice as much lost as predicted at one limit doubles it at all; the first iterations under it do not count."""
    ways = PagedWays()
    ways.of(job(), WANTED)
    lost_ns = 2 * rises(WANTED, 50) * REGION_NS
    fresh = ways.of(job(50, 10, NS + lost_ns), WANTED)
    assert fresh == PagedWays().of(job(), WANTED)
    learned = {way.limit: way.duration_ns for way in ways.of(job(50, 20, NS + lost_ns), WANTED)}
    assert learned[50] == pytest.approx(NS + lost_ns)
    assert learned[80] == pytest.approx(NS + 2 * rises(WANTED, 80) * REGION_NS)
    ways.keep(set())
    assert ways.of(job(), WANTED) == PagedWays().of(job(), WANTED)


def test_jobs_that_say_themselves_are_believed() -> None:
    """What a job that swaps has told is passed on; of one that pages nothing is known before its first iteration."""
    swaps = dataclasses.replace(job(), less=(OperatingPoint("swap", 50, NS),))
    assert PagedWays().of(swaps, WANTED) == swaps.less
    assert PagedWays().of(job(), None) == ()
