"""How long an iteration takes with less is played through, not guessed."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zico.base.units import MIB
from zico.swap.learning import played, ways
from zico.swap.observed import SAVED, USED, Observed
from zico.swap.schedule import plan
from zico.tiers.layout import Rates

MS = 1_000_000
EACH_MS = 10
FAST = Rates(1e15, 1e15, 0.0, 0.0)


def stacked(sizes: list[int]) -> Observed:
    """Return an iteration that saves tensors one after the other, uses them from the last on, and frees each then."""
    n = len(sizes)
    sequence = [2 * i + SAVED for i in range(n)] + [2 * i + USED for i in reversed(range(n))]
    up = np.cumsum(sizes)
    load = np.concatenate([up, [up[-1]], up[::-1][:-1], [0]])
    ticks = (*range(n), *range(n + 1, 2 * n + 1))
    return Observed(tuple(sequence), tuple(sizes), ticks, load, np.arange(2 * n + 1) * EACH_MS * MS)


def test_with_a_fast_tier_less_costs_nothing() -> None:
    """Every share that can be reached takes as long as everything; the least is what is used at once."""
    seen = stacked([8 * MIB] * 16)
    found = ways(seen, FAST, 0.0)
    assert [way.limit_bytes for way in found] == [int(128 * MIB * share) for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)]
    assert all(0 <= way.duration_ns - int(seen.t_ns[-1]) < MS for way in found)


def test_a_slow_tier_costs_the_more_the_less_there_is() -> None:
    """A tensor takes three times as long to leave as to be made: what does not leave in time is waited for."""
    seen = stacked([8 * MIB] * 16)
    slow = Rates(8 * MIB / 0.030, 8 * MIB / 0.030, 0.0, 0.0)
    durations = [way.duration_ns for way in ways(seen, slow, 0.0)]
    assert durations == sorted(durations)
    assert durations[-1] >= int(seen.t_ns[-1]) + 10 * MS
    least = ways(seen, slow, 0.0)[-1]
    planned = plan(seen, least.limit_bytes, slow)
    assert least.duration_ns <= int(seen.t_ns[-1]) + 2 * len(planned.leaves) * 30 * MS


def test_what_cannot_fit_is_no_way() -> None:
    """A plan that moves nothing does not fit half of the peak, nor is there a way below what lives at once."""
    seen = stacked([64 * MIB, MIB])
    nothing = dataclasses.replace(plan(seen, 1 << 40, FAST), leaves=frozenset(), returns={})
    assert played(nothing, 32 * MIB, FAST) is None
    assert ways(seen, FAST, 0.0, shares=(0.5,)) == []


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    speed=st.floats(1e6, 1e12),
    share=st.floats(0.3, 1.0),
)
def test_less_is_never_faster(sizes: list[int], speed: float, share: float) -> None:
    """An iteration takes at least as long as with everything, and at most all its copies longer."""
    seen = stacked([size * MIB for size in sizes])
    rates = Rates(speed, speed, 1e-6, 1e-6)
    limit_bytes = int(share * sum(sizes) * MIB)
    planned = plan(seen, limit_bytes, rates)
    took_ns = played(planned, limit_bytes, rates)
    if took_ns is not None:
        copies_ns = sum(rates.out_s(size * MIB) + rates.in_s(size * MIB) for size in sizes) * 1e9
        assert int(seen.t_ns[-1]) <= took_ns <= int(seen.t_ns[-1]) + copies_ns + len(sizes)
