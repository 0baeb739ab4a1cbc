"""What is possible at all: against a search through every schedule of tiny jobs, and no policy gets further."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from cpu.support.scheduler_cases import smallest_budget
from cpu.support.scheduler_model import MS, Work, plateau, triangle
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import ProblemError
from zico.lab.simulator.oracle import possible
from zico.scheduler.policies import policy_named
from zico.scheduler.shares import GUARD
from zico.scheduler.simulate import Simulation

if TYPE_CHECKING:
    from collections.abc import Sequence

TINY = st.builds(Work, st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.just(MS))


def best_mean(works: Sequence[Work], budget: int) -> float:
    """Return the largest mean of cells done per time, by Karp's theorem over all states and sets that go on."""
    start = (0,) * len(works)
    states = list(itertools.product(*(range(len(work.levels)) for work in works)))
    walks: list[dict[tuple[int, ...], int]] = [{start: 0}]
    for _ in states:
        longer: dict[tuple[int, ...], int] = {}
        for at, gained in walks[-1].items():
            for goes in itertools.product((False, True), repeat=len(works)):
                held = sum(work.levels[c if go else c - 1] for work, c, go in zip(works, at, goes, strict=True))
                if any(goes) and held <= budget:
                    to = tuple((c + go) % len(work.levels) for work, c, go in zip(works, at, goes, strict=True))
                    longer[to] = max(longer.get(to, -1), gained + sum(goes))
        walks.append(longer)
    n = len(states)
    means = [
        min(Fraction(gained - walks[k][at], n - k) for k in range(n) if at in walks[k])
        for at, gained in walks[n].items()
    ]
    return float(max(means, default=Fraction(0))) / len(works)


@given(works=st.lists(TINY, min_size=1, max_size=3), budget=st.integers(1, 14))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_the_best_of_all_schedules_is_found(works: list[Work], budget: int) -> None:
    """The mean is that of the best cycle unless that starves a job, and what each gets and the peak belong to it."""
    found = possible([work.load(f"job{i}") for i, work in enumerate(works)], budget)
    most = best_mean(works, budget)
    assert (found is None) == (most == 0)
    if found is not None:
        assert found.mean <= most + 1e-9
        if min(found.normalised) > 1.001 * GUARD / len(works):  # else one is just given its floor
            assert found.mean == pytest.approx(most)
        assert sum(found.normalised) == pytest.approx(found.mean * len(works))
        assert max(max(work.levels) for work in works) <= found.peak <= budget


WORKS = [
    [triangle(60, kept=6, steps=32, duration_ns=32 * MS)] * 2,
    [
        triangle(60, kept=6, steps=32, duration_ns=32 * MS),
        plateau(40, rise=0.2, fall=0.1, steps=16, duration_ns=16 * MS),
    ],
    [
        triangle(60, kept=6, steps=32, duration_ns=32 * MS),
        plateau(40, rise=0.2, fall=0.1, steps=16, kept=4, duration_ns=16 * MS),
        plateau(50, rise=0.8, fall=0.1, steps=24, kept=5, duration_ns=24 * MS),
    ],
]


@pytest.mark.parametrize("works", WORKS, ids=["2 alike", "2 unlike", "3"])
@pytest.mark.parametrize("share", [0.6, 0.75])
def test_no_policy_gets_further(works: Sequence[Work], share: float) -> None:
    """Where cells are exact no policy exceeds what is possible, and zico comes near it."""
    budget = max(smallest_budget(works), int(share * sum(max(work.levels) for work in works)))
    loads = [work.load(f"job{i}") for i, work in enumerate(works)]
    most = possible(loads, budget)
    assert most is not None
    late = [dataclasses.replace(load, arrive_ns=7 * MS * i) for i, load in enumerate(loads)]
    means = {
        name: Simulation(policy_named(name), late, budget).run(220 * 32 * MS, 20 * 32 * MS).mean
        for name in ("zico", "claims", "serial")
    }
    assert max(means.values()) <= most.mean + 0.005
    assert means["zico"] >= 0.9 * most.mean


def test_a_slower_device_makes_less_possible() -> None:
    """At half the speed for two, two that never meet get half each, and no more than taking turns would give."""
    loads = [triangle(10).load("a"), triangle(10).load("b")]
    found = possible(loads, 99, (1.0, 1.0, 2.0))
    assert found is not None
    assert found.mean == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("works", "words"),
    [
        pytest.param([triangle(9)] * 5, "1 to 4 jobs, not 5", id="too many"),
        pytest.param([], "not 0", id="none"),
        pytest.param(
            [triangle(9, duration_ns=6_400_000 * MS, steps=256), *[triangle(9, duration_ns=64 * MS)] * 2],
            "job0's iteration is 100000 times as long as job",
            id="too unequal",
        ),
    ],
)
def test_what_is_too_large_is_said(works: Sequence[Work], words: str) -> None:
    """It says what is too many, or whose iteration is too long beside whose."""
    with pytest.raises(ProblemError, match=words):
        possible([work.load(f"job{i}") for i, work in enumerate(works)], 12)
