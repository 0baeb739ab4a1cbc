"""Period detection on sequences that are made of iterations."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zico.trace import period

if TYPE_CHECKING:
    from collections.abc import Sequence

Event = tuple[int, int]
"""Size of an allocation, and the bytes live before it relative to the iteration's beginning."""


def find(events: Sequence[Event]) -> int:
    """Return the period that is found after exactly these allocations."""
    sizes, live = (np.array(column, "i8") for column in zip(*events, strict=True))
    return int(period.find_period(sizes, live, len(sizes), np.full(len(sizes), -1, "i8")))


def brute(events: Sequence[Event]) -> int:
    """Return the shortest right period by trying every length, the slow and obvious way."""
    n = len(events)
    sizes, live = [e[0] for e in events], [e[1] for e in events]
    for length in range(period.SHORTEST, n // period.REPEATS + 1):
        tail = sizes[n - 3 * length :]
        window = live[n - 1 - length :]
        rise = max(window) - min(window)
        if (
            tail[:length] == tail[length : 2 * length] == tail[2 * length :]
            and rise > 0
            and 2 * rise >= max(live) - min(live)
            and abs(live[-1] - window[0]) <= rise >> 5
        ):
            return length
    return period.NO_PERIOD


@st.composite
def iterations(draw: st.DrawFn) -> list[Event]:
    """Make one iteration: a rise through equal layers (an inner loop) and a fall through them backwards."""
    layers = draw(st.integers(1, 6))
    inner = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    back = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    live, events = 0, []
    for _ in range(layers):
        for size in inner:
            events.append((size * 100, live))
            live += size * 100
    rise = live
    for layer in range(layers):
        events += [(size * 100, live) for size in back]
        live = rise * (layers - 1 - layer) // layers
    return events


@settings(max_examples=300, deadline=None)
@given(
    iterations(),
    st.integers(3, 6),
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=30),
)
def test_repeated_iterations_are_found(
    iteration: list[Event], repeats: int, kept: int, setup: list[tuple[int, int]]
) -> None:
    """After set-up and three or more iterations the period is the iteration's length, a divisor or a multiple.

    What is found repeats, and ends at the height where it began, as the brute-force search says.
    """
    assume(len(iteration) >= period.SHORTEST)
    before = [(size * 100, live * 10) for size, live in setup]
    events = before + [(size, kept + live) for size, live in iteration] * repeats
    found = find([*events, (iteration[0][0], kept)][1:])
    assert found == brute([*events, (iteration[0][0], kept)][1:])
    if found and max(live for _, live in before or [(0, 0)]) <= kept:
        assert found % len(iteration) == 0 or len(iteration) % found == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_the_answer_is_that_of_the_obvious_search(events: list[Event]) -> None:
    """On any short sequence the prefix function finds what trying every length finds."""
    assert find(events) == brute(events)


@pytest.mark.parametrize("length", [4, 5, 17, 300, 4000])
def test_an_iteration_without_inner_repetition_is_found_exactly(length: int) -> None:
    """Distinct sizes repeated three times have exactly their length as period, whatever came before."""
    rng = random.Random(length)  # noqa: S311 - a test's own luck
    sizes = rng.sample(range(1, 100 * length), length)
    half = length // 2
    iteration = [(size, 1000 * min(i, 2 * half - i)) for i, size in enumerate(sizes)]
    noise = [(rng.randrange(1, 1000), rng.randrange(1000)) for _ in range(50)]
    events = noise + iteration * 3
    assert find(events) == length
    assert find(noise + iteration * 2 + iteration[:-1]) != length


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(3, 40))
def test_set_up_that_grows_is_no_iteration(layer: list[int], layers: int) -> None:
    """Equal layers built one after the other repeat their sizes, but never count as iterations."""
    live, events = 0, []
    for size in layer * layers:
        events.append((size * 100, live))
        live += size * 100
        if len(events) >= period.REPEATS:
            assert find(events) == period.NO_PERIOD


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.integers(10, 300))
def test_noise_has_no_period(seed: int, n: int) -> None:
    """Sizes that do not repeat give no period."""
    rng = random.Random(seed)  # noqa: S311 - a test's own luck
    events = [(rng.randrange(1 << 40), rng.randrange(1 << 20)) for _ in range(n)]
    assert find(events) == period.NO_PERIOD


@settings(deadline=None)
@given(st.integers(4, 40), st.integers(3, 5), st.integers(0, 3))
def test_an_iteration_of_equal_tensors_is_found(length: int, repeats: int, kept: int) -> None:
    """A model whose tensors all have one size is told apart into iterations by memory alone."""
    half = length // 2
    iteration = [(100, kept + 100 * min(i, 2 * half - i)) for i in range(2 * half)]
    assert find(iteration * repeats + iteration[:1]) == 2 * half


def test_constant_memory_is_no_iteration() -> None:
    """A loop that leaves memory as it is at every allocation shows no iteration, however often it repeats."""
    assert find([(100, 7)] * 60) == period.NO_PERIOD


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=60), st.data())
def test_the_phase_is_the_lowest_point_of_the_last_period(live: list[int], data: st.DataObject) -> None:
    """An iteration is taken to begin at the first lowest point within the last period."""
    length = data.draw(st.integers(1, len(live)))
    best = period.lowest(np.array(live, "i8"), len(live), length)
    tail = live[-length:]
    assert best == len(live) - length + tail.index(min(tail))
