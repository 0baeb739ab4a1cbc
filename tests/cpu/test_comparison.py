"""Ways to go on that are tried and measured, of which the one that takes least is kept."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from zico.base.comparison import Comparison

TIMES = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(TIMES, st.integers(0, 3), st.integers(1, 5))
def test_a_window_has_the_median_of_what_counts(times: list[int], settle: int, window: int) -> None:
    """The first measurements after a change never count, and each other one counts once."""
    compared = Comparison("one", settle=settle, window=window)
    found = [whole for each in times if (whole := compared.note(each, -each)) is not None]
    counted = times[settle:]
    medians = [statistics.median(counted[i : i + window]) for i in range(0, len(counted) - window + 1, window)]
    assert found == [(median, -median) for median in medians]
    assert compared.took == ({"one": medians[-1]} if medians else {})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from((1.0, 1.5)))
def test_the_way_that_took_least_is_the_best(times: list[int], clear: float) -> None:
    """Of those alike it is the first one; a way has lost that takes more than is clear."""
    compared = Comparison(0, settle=1, window=1, clear=clear)
    for way, took in enumerate(times):
        compared.turn(way)
        compared.note(100)
        compared.note(took)
        assert compared.has_lost == (took > clear * min(times[: way + 1]))
    assert compared.best == times.index(min(times))


def test_a_window_that_is_not_steady_says_nothing() -> None:
    """It is over all the same, and no way has lost by it."""
    compared = Comparison("one", settle=0, window=2, steady=0.1)
    assert [compared.note(10), compared.note(10)] == [None, (10,)]
    compared.turn("two")
    assert [compared.note(10), compared.note(90)] == [None, (50,)]
    assert (compared.took, compared.has_lost) == ({"one": 10}, False)
