"""Which jobs are said to keep more after each iteration."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from cpu.support.broker_messages import STATUS

from zico.base.units import MIB
from zico.broker.growth import WINDOW, Growth
from zico.broker.protocol.messages import JobReport, ProcessFigures
from zico.cli.top_screen import frame
from zico.report.console import TextConsole
from zico.report.table import growth_line

if TYPE_CHECKING:
    from collections.abc import Iterable


def growth_of(kept: Iterable[int], step: int = 1) -> float:
    """Return what is said of a job that kept so many regions, seen every so many iterations."""
    growth = Growth()
    for number, regions in enumerate(kept):
        growth.note(number * step, regions)
        growth.note(number * step, regions + 1)  # a second look at the same iteration
    return growth.regions


@pytest.mark.parametrize(("step", "regions"), [(1, 0.5), (10, 0.05)])
def test_a_job_that_collects_grows(step: int, regions: float) -> None:
    """By as much as it keeps more, over the iterations, seen or not; also behind a first phase of another kind."""
    assert growth_of((number // 2 for number in range(WINDOW)), step) == pytest.approx(regions, rel=0.05)
    assert growth_of([90] * 9 + [number // 2 for number in range(WINDOW)], step) == pytest.approx(regions, rel=0.05)


@pytest.mark.parametrize(
    "kept",
    [
        [5] * WINDOW,
        [1, 4, 9, 12] + [12] * WINDOW,
        [5] * (WINDOW // 2) + [9] * (WINDOW // 2),
        [5 + number % 7 for number in range(WINDOW)],
        [number // 2 for number in range(WINDOW - 1)],
        list(range(WINDOW, 0, -1)),
    ],
    ids=["even", "first iterations", "one new buffer", "comes and goes", "too few", "falls"],
)
def test_others_do_not(kept: list[int]) -> None:
    """Nothing is said of a job that has no steady rise."""
    assert growth_of(kept) == 0


def test_chance_is_not_taken_for_growth() -> None:
    """Of a thousand jobs that keep what chance says, none grows."""
    for seed in range(1000):
        chance = random.Random(seed)  # noqa: S311 - for a test
        assert growth_of(chance.randrange(3, 6) for _ in range(WINDOW)) == 0


def test_another_job_in_its_place_begins_anew() -> None:
    """Iterations that begin anew are another program's."""
    growth = Growth()
    for number in range(WINDOW):
        growth.note(number, number)
    assert growth.regions > 0
    growth.note(0, 100)
    assert growth.regions == 0


def test_the_report_says_how_much_and_for_how_long_it_can_go_on() -> None:
    """The line names the job, what it keeps more and keeps, and when the budget is full."""
    figures = ProcessFigures(name="train", growth_bytes=2 * MIB, persistent_bytes=300 * MIB)
    assert growth_line(figures, 500 * MIB) == (
        "train kept 2 MiB more after each of its last iterations (a leak?), and 300 MiB in the end. "
        "Others had that much less room; 100 iterations more would fill the budget, "
        "and what comes then would lie in the next tier (slower; on the host a file)"
    )


@pytest.mark.parametrize("growth_bytes", [0, MIB])
def test_top_has_a_column_where_somebody_grows(growth_bytes: int) -> None:
    """Else there is none."""
    job = JobReport(name="a", framework="t", job=0, state="running", growth_bytes=growth_bytes)
    file = io.StringIO()
    TextConsole(file).print(frame([(Path("s"), msgspec.structs.replace(STATUS, jobs=(job,)))], 160))
    assert ("+1 MiB/it" in file.getvalue()) == ("grows" in file.getvalue()) == bool(growth_bytes)
