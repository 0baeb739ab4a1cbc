"""Memory curves and profiles against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.compiled import compiled
from zico.trace import profile as curve
from zico.trace.profile import CURVE, CURVE_BINS

Record = Any
FLAT = curve.UNPROFILED_SHIFT
PATIENT = settings(deadline=None)  # the first call loads machine code


@compiled
def claim_at(profile: Record, claims: Record, progress: int) -> int:
    """Give ``curve.claim_at``, which is merged into its callers, a machine function of its own."""
    return curve.claim_at(profile, claims, progress)


@compiled
def raise_to(record: Record, held: int) -> None:
    """Give ``curve.raise_to`` a machine function of its own."""
    curve.raise_to(record, held)


@compiled
def is_typical(profile: Record, n_events: int) -> bool:
    """Give ``curve.is_typical`` a machine function of its own."""
    return curve.is_typical(profile, n_events)


def make(held: list[int], *, shift: int = 0, n_events: int | None = None, t_ns: list[int] | None = None) -> Record:
    """Return a curve's record; by default it covers its bins to the end and bins take 10 ns."""
    record = np.zeros(1, CURVE)
    n = len(held)
    record["shift"], record["n_bins"] = shift, n
    record["n_events"] = (n << shift) - 1 if n_events is None else n_events
    record["held"][0, :n] = held
    record["t_ns"][0, :n] = [10 * i for i in range(n)] if t_ns is None else t_ns
    record["duration_ns"] = 10 * n
    return record[0]


def levels(record: Record) -> list[int]:
    """Return the levels of the bins in use."""
    return record["held"][: int(record["n_bins"])].tolist()


def times(record: Record) -> list[int]:
    """Return the times of the bins in use."""
    return record["t_ns"][: int(record["n_bins"])].tolist()


HELD = st.lists(st.integers(0, 200), min_size=1, max_size=CURVE_BINS)


def test_the_figure_in_the_module_is_true() -> None:
    """Bins of two events with 1 3 5 6 4 2 become bins of four with 3 6 4."""
    record = make([1, 3, 5, 6, 4, 2], shift=1)
    curve.halve(record)
    assert (levels(record), times(record), int(record["shift"])) == ([3, 6, 4], [0, 20, 40], 2)


@PATIENT
@given(HELD)
def test_halving_keeps_the_higher_level_and_the_earlier_time(held: list[int]) -> None:
    """Each new bin has the maximum of its two and the time of the first; an odd last one stays."""
    record = make(held, shift=3)
    before = times(record)
    curve.halve(record)
    assert levels(record) == [max(held[i : i + 2]) for i in range(0, len(held), 2)]
    assert times(record) == before[::2]
    assert record["shift"] == 4


@settings(PATIENT, max_examples=40)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 50), st.integers(0, 50)), max_size=60),
)
def test_a_recorded_curve_is_an_upper_bound_of_any_length(shift: int, steps: list[tuple[int, int, int]]) -> None:
    """However long the iteration, each bin holds at least every level within it, and no more than was reached."""
    record = make([0])
    curve.begin(record, shift, 7)
    truth = [(0, 7)]
    progress, held = 0, 7
    for gap, then, peak in steps:
        progress += gap
        curve.extend(record, progress, held, progress * 5)
        truth.append((progress, held))
        raise_to(record, max(held, peak))
        truth.append((progress, max(held, peak)))
        held = then
    width, n = int(record["shift"]), int(record["n_bins"])
    assert n == (progress >> width) + 1 <= CURVE_BINS
    assert width == shift or n > CURVE_BINS // 2 - 1
    for at, level in truth:
        assert record["held"][at >> width] >= level
    assert curve.peak(record) == max(level for _, level in truth)
    assert times(record) == sorted(times(record))


@PATIENT
@given(HELD)
def test_claims_are_the_suffix_maximum(held: list[int]) -> None:
    """A claim is the most from its bin to the end; they never rise, and the first is the peak."""
    claims = np.zeros(CURVE_BINS, "i4")
    peak = curve.suffix_maximum(make(held), claims)
    assert claims[: len(held)].tolist() == [max(held[i:]) for i in range(len(held))]
    assert peak == claims[0] == curve.peak(make(held))


@PATIENT
@given(HELD, st.integers(0, 8), st.data())
def test_a_claim_bounds_the_rest_of_the_iteration(held: list[int], shift: int, data: st.DataObject) -> None:
    """At any progress the claim is at least what the profile has from the bin before on, and at most its peak."""
    last_event = (len(held) << shift) - 1
    record = make(held, shift=shift, n_events=data.draw(st.integers((len(held) - 1) << shift, last_event)))
    claims = np.zeros(CURVE_BINS, "i4")
    curve.suffix_maximum(record, claims)
    progress = data.draw(st.integers(0, 3 * last_event + 20))
    claim = int(claim_at(record, claims, progress))
    assert max(held[max(0, (progress >> shift) - 1) :], default=0) <= claim <= max(held)
    if progress > record["n_events"] + max(8, int(record["n_events"]) >> 4):
        assert claim == max(held)


@pytest.mark.parametrize(("n_bins", "guard"), [(1, 1), (24, 1), (64, 2), (100, 3), (128, 4), (CURVE_BINS, 4)])
def test_a_claim_falls_a_thirty_second_of_an_iteration_late(n_bins: int, guard: int) -> None:
    """From so many bins behind a drop on the claim is what comes; one bin earlier it is what was."""
    profile, claims = make([9] + [3] * (n_bins - 1), shift=2), np.zeros(CURVE_BINS, "i4")
    curve.suffix_maximum(profile, claims)
    bin_of_drop = min(1, n_bins - 1)
    levels = [int(claim_at(profile, claims, number << 2)) for number in range(n_bins)]
    assert levels == [9 if number < bin_of_drop + guard else 3 for number in range(n_bins)]


def test_a_flat_profile_claims_its_peak_at_any_time() -> None:
    """After an iteration with set-up, only its peak is known: at the start, late, and in a far longer iteration."""
    profile, claims = make([0]), np.zeros(CURVE_BINS, "i4")
    curve.flatten(profile, make([3, 9, 2], shift=5))
    assert curve.suffix_maximum(profile, claims) == 9
    for progress in (0, 1, 100, 1 << 39, (1 << 40) + 5, 1 << 50):
        assert claim_at(profile, claims, progress) == 9
    assert (int(profile["n_bins"]), int(profile["shift"]), int(profile["duration_ns"])) == (1, FLAT, 30)


@PATIENT
@given(HELD, st.integers(0, 12))
def test_replace_copies_the_iteration(held: list[int], shift: int) -> None:
    """The profile becomes the finished iteration, with levels, times, events and duration."""
    profile, current = make([99] * CURVE_BINS), make(held, shift=shift)
    curve.replace(profile, current)
    assert (levels(profile), times(profile)) == (held, times(current))
    for field in ("shift", "n_events", "duration_ns"):
        assert profile[field] == current[field]


@settings(PATIENT, max_examples=150)
@given(HELD, HELD, st.integers(0, 3), st.integers(0, 3))
def test_merging_is_the_envelope_with_decay(old: list[int], new: list[int], old_shift: int, new_shift: int) -> None:
    """Each bin becomes the larger of the new level and the decayed old one, at the coarser width of the two."""
    profile, current = make(old, shift=old_shift), make(new, shift=new_shift)
    events = (int(profile["n_events"]), int(current["n_events"]))
    a, b = make(old, shift=old_shift), make(new, shift=new_shift)
    while a["shift"] < b["shift"]:
        curve.halve(a)
    while b["shift"] < a["shift"]:
        curve.halve(b)
    curve.merge(profile, current)
    was, now = levels(a), levels(b)
    decayed = [level - max(1, level // 8) for level in was]
    assert levels(profile)[: len(now)] == [max([x, *decayed[i : i + 1]]) for i, x in enumerate(now)]
    assert profile["shift"] == max(old_shift, new_shift)
    assert profile["n_events"] == sum(events) // 2


@PATIENT
@given(HELD, st.integers(0, 20))
def test_after_a_merge_claims_bound_the_iteration_just_seen(held: list[int], fewer: int) -> None:
    """Claims from the folded profile are upper bounds of the iteration that was folded in."""
    profile, current = make([5] * len(held)), make(held[: max(1, len(held) - fewer)])
    seen = levels(current)
    curve.merge(profile, current)
    claims = np.zeros(CURVE_BINS, "i4")
    curve.suffix_maximum(profile, claims)
    for progress in range(len(seen)):
        assert claim_at(profile, claims, progress) >= max(seen[progress:])


def test_a_slightly_shorter_iteration_does_not_forget_the_end() -> None:
    """A peak near the end is still claimed after an iteration that ended a few events before it."""
    held = [1] * 95 + [50] * 5
    profile, claims = make(held), np.zeros(CURVE_BINS, "i4")
    short = make([1] * 94)
    assert is_typical(profile, int(short["n_events"]))
    curve.merge(profile, short)
    curve.suffix_maximum(profile, claims)
    assert claim_at(profile, claims, 90) >= 50 - 50 // 8


def test_a_profile_covers_the_iteration_before_the_last_one() -> None:
    """Levels that take turns are claimed in every iteration, at whatever bin width each was recorded."""
    profile, before = make([20, 30, 20, 20], shift=1), make([1] * 2 + [40] * 2 + [1] * 10)
    curve.cover(profile, before)
    assert levels(profile) == [20, 40, 20, 20]
    curve.cover(profile, make([]))
    assert levels(profile) == [20, 40, 20, 20], "there is no iteration"


def test_a_peak_that_does_not_come_back_is_forgotten() -> None:
    """A peak of 100 regions has decayed to the level of what comes instead after forty iterations."""
    profile = make([100, 100])
    for _ in range(40):
        curve.merge(profile, make([10, 10]))
    assert levels(profile) == [10, 10]


@PATIENT
@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30))
def test_typical_means_within_a_sixteenth_or_eight_events(expected: int, seen: int) -> None:
    """An iteration is typical if its events differ by at most eight or a sixteenth of the profile's."""
    profile = make([1], n_events=expected)
    assert is_typical(profile, seen) == (abs(expected - seen) <= max(8, expected // 16))
