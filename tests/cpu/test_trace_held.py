"""Regions held beside bytes alive, as a trace says."""

from __future__ import annotations

import numpy as np
import pytest

from zico.trace.events import EVENT, Kind, Origin, Trace
from zico.trace.lifetimes import lifetimes
from zico.trace.summary import held_figures


def trace_of(*rows: tuple[int, Kind, int, int]) -> Trace:
    """Return a trace of (time, kind, tensor, bytes)."""
    events = np.zeros(len(rows), EVENT)
    for column, values in zip(("t_ns", "kind", "tensor", "size_bytes"), zip(*rows, strict=True), strict=True):
        events[column] = values
    return Trace(Origin(), events)


def test_held_is_compared_with_alive_over_time() -> None:
    """Peak and integral of what is held are put over those of what is alive, each for as long as it lasts."""
    trace = trace_of(
        (0, Kind.BEGIN, 0, 0),
        (0, Kind.ALLOC, 0, 3),
        (0, Kind.HELD, 0, 4),
        (10, Kind.ALLOC, 1, 4),
        (10, Kind.HELD, 0, 8),
        (20, Kind.FREE, 1, 0),
        (25, Kind.HELD, 0, 4),
        (30, Kind.FREE, 0, 0),
        (40, Kind.BEGIN, 1, 0),
    )
    figures = held_figures(trace, lifetimes(trace), 0, 8)
    assert figures is not None
    assert figures.peak_bytes == 8
    assert figures.peak_ratio == pytest.approx(8 / 7)
    alive = 10 * 3 + 10 * 7 + 10 * 3
    held = 10 * 4 + 10 * 8 + 5 * 8 + 5 * 4 + 10 * 4
    assert figures.mean_ratio == pytest.approx(held / alive)


def test_what_is_held_before_the_iteration_counts_in_it() -> None:
    """Regions and tensors from before the first event looked at are there from the beginning."""
    trace = trace_of(
        (0, Kind.ALLOC, 0, 6),
        (0, Kind.HELD, 0, 8),
        (10, Kind.ALLOC, 1, 1),
        (20, Kind.FREE, 1, 0),
        (30, Kind.BEGIN, 1, 0),
    )
    figures = held_figures(trace, lifetimes(trace), 2, 4)
    assert figures is not None
    assert figures.mean_ratio == pytest.approx(16 / 13)


def test_a_trace_that_does_not_say_has_no_such_figures() -> None:
    """Without held events, or with none before the end, there is nothing to compare."""
    silent = trace_of((0, Kind.ALLOC, 0, 6), (10, Kind.FREE, 0, 0))
    assert held_figures(silent, lifetimes(silent), 0, 2) is None
    late = trace_of((0, Kind.ALLOC, 0, 6), (10, Kind.FREE, 0, 0), (20, Kind.HELD, 0, 4))
    assert held_figures(late, lifetimes(late), 0, 2) is None
