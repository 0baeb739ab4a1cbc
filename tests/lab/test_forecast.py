"""What a job will hold, by its trace, and the largest batch of it that a budget holds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cpu.support.trace_cases import MIB, Loop, train
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.cli import main
from zico.lab.cli.forecast import largest_that_fits, range_of, with_margin
from zico.lab.simulator.held import held_by
from zico.trace.events import Kind

# -- the largest batch -----------------------------------------------------------------------------


class Asked:
    """A need for each batch, and for which of them it was asked."""

    def __init__(self, least: int, needs: list[int]) -> None:
        """Know the needs from the least batch on."""
        self.least, self.needs, self.batches = least, needs, list[int]()

    def __call__(self, batch: int) -> int:
        """Return the need of a batch."""
        self.batches.append(batch)
        return self.needs[batch - self.least]

    def fit(self, budget: int) -> int | None:
        """Return the answer, after which nothing may have been asked for twice."""
        found = largest_that_fits(self, budget, self.least, self.least + len(self.needs) - 1)
        assert len(set(self.batches)) == len(self.batches)
        return found


NEEDS = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=300)


@given(least=st.integers(1, 1000), needs=NEEDS.map(sorted), budget=st.integers(0, 1 << 40))
def test_where_needs_rise_the_answer_is_that_of_all_batches(least: int, needs: list[int], budget: int) -> None:
    """The search finds what trying every batch finds, by four times the logarithm of their number at most."""
    asked = Asked(least, needs)
    fitting = [least + i for i, need in enumerate(needs) if need <= budget]
    assert asked.fit(budget) == (fitting[-1] if fitting else None)
    assert len(asked.batches) <= 2 + 4 * math.ceil(math.log2(len(needs) + 1))


@given(least=st.integers(1, 1000), needs=NEEDS, budget=st.integers(0, 1 << 40))
def test_whatever_the_needs_the_answer_fits_and_the_next_does_not(least: int, needs: list[int], budget: int) -> None:
    """Both were asked for; only where the least batch does not fit there is no answer."""
    asked = Asked(least, needs)
    found = asked.fit(budget)
    if found is None:
        assert needs[0] > budget
    else:
        assert found in asked.batches
        assert needs[found - least] <= budget
        if found + 1 < least + len(needs):
            assert found + 1 in asked.batches
            assert needs[found + 1 - least] > budget


def test_a_line_in_regions_takes_few_traces() -> None:
    """Needs that are a line, rounded up to regions: no more than five of 505 batches are traced."""
    needs = [-(-(300 + 7 * batch) // 4) for batch in range(8, 513)]
    for budget in range(needs[0], needs[-1] + 5, 13):
        asked = Asked(8, needs)
        asked.fit(budget)
        assert len(asked.batches) <= 5


@pytest.mark.parametrize(("text", "found"), [("8..512", (8, 512)), ("7", (7, 7)), ("1..1", (1, 1))])
def test_a_range_is_two_batches_or_one(text: str, found: tuple[int, int]) -> None:
    """The first is the least one."""
    assert range_of(text) == found


@pytest.mark.parametrize("text", ["", "0..4", "9..8", "8...9", "-1..4", "8..", "a..b", "8,9", "1..9999999999999", "²"])
def test_what_is_no_range_is_named(text: str) -> None:
    """The message has what was given, and what to give."""
    with pytest.raises(ConfigError) as raised:
        range_of(text)
    assert str(raised.value) == (
        f"--batch {text!r} is no range of batches: give the least and the largest, as in 8..512"
    )


# -- what a job holds ------------------------------------------------------------------------------


def test_live_bytes_are_the_traces_and_regions_hold_them() -> None:
    """Tensors of 64 KiB count, smaller ones do not; regions hold them, and at most a quarter more."""
    trace = train(6)
    held = held_by(trace, MIB)
    sizes = np.zeros(int(trace.events["tensor"].max()) + 1, np.int64)
    births, deaths = (trace.events["kind"] == kind for kind in (Kind.ALLOC, Kind.FREE))
    sizes[trace.events["tensor"][births]] = trace.events["size_bytes"][births]
    large = np.where(sizes < 64 << 10, 0, sizes)[trace.events["tensor"]]
    live = int(np.cumsum(np.where(births, large, 0) - np.where(deaths, large, 0)).max())
    assert held.live_bytes == live
    assert live <= held.held_bytes <= 1.25 * live
    assert held.held_bytes % MIB == 0
    assert 0 < held.small_bytes < 64 << 10


def test_a_peak_before_the_first_iteration_counts() -> None:
    """A program that holds most while it begins needs that, however little its iterations need."""
    loop = Loop()
    loop.free(loop.allocate(100 * MIB))
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        loop.free(loop.allocate(2 * MIB))
    held = held_by(loop.trace(), MIB)
    assert (held.live_bytes, held.held_bytes) == (100 * MIB, 100 * MIB)


def test_marks_say_where_iterations_end() -> None:
    """The same events with the marks at the BEGINs, given and not: the same regions."""
    trace = train(5)
    marks = np.flatnonzero(trace.events["kind"] == Kind.BEGIN).tolist()
    assert held_by(trace, MIB, marks) == held_by(trace, MIB)


def test_no_page_is_made_for_what_is_larger_than_the_machine() -> None:
    """A job of a TiB is forecast."""
    loop = Loop()
    kept = loop.allocate(1 << 39)
    for number in range(4):
        loop.event(Kind.BEGIN, number)
        loop.free(loop.allocate(1 << 39))
    loop.free(kept)
    assert held_by(loop.trace(), 256 * MIB).held_bytes == 1 << 40


@pytest.mark.parametrize(("held", "needed"), [(1, 3), (20, 22), (40, 42), (41, 44), (100, 105), (1000, 1050)])
def test_the_margin_is_two_regions_or_a_twentieth(held: int, needed: int) -> None:
    """Whichever is more, in whole regions."""
    assert with_margin(held * MIB, MIB) == needed * MIB


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.py:build", "--batch", "8..512"], "--budget: say how much memory the jobs share"),
        (["a.py:build", "--batch", "8..4", "--budget", "1GiB"], "--batch '8..4' is no range of batches: give"),
        (["a.py:build", "--batch", "4", "--budget", "1GiB"], "'a.py:build' does not name a function: give SCRIPT:"),
        (["a.py:build", "b.zst", "--budget", "1GiB"], "'a.py:build b.zst': give one SCRIPT:function, or a trace of"),
        (["a.py:build", "--budget", "1GiB", "--save", "none"], "--save is about traces: leave it out"),
        (["a.py:build", "--budget", "1GiB", "--device-model", "z1"], "'z1' is not a device model: give one of"),
        (["--measure", "--batch", "4", "python a.py"], "--batch is about files: leave it out with --measure"),
        (["a.zst", "--batch", "4", "--budget", "1GiB"], "'a.zst' does not name a function: give SCRIPT:function"),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the value and the remedy, and the code is 2: 1 would say that it does not fit."""
    assert main(["fit", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
