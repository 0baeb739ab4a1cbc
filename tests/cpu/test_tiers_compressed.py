"""The compressed tier: every bit comes back, and what does not get smaller goes on as it is."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.units import MIB
from zico.tiers import stores
from zico.tiers.compressing import PIECE_BYTES
from zico.tiers.destinations import TierWish
from zico.tiers.layout import FULL, TIER_MASK
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPRESSED, MEMORY = 0, 1
BLOCK = 32 * 4096
"""So that the compressed tier has blocks of a page."""


@pytest.fixture(scope="module")
def stack() -> Iterator[TierStack]:
    """Give a compressed tier above memory."""
    with TierStack.create((TierWish("compressed", 2 * MIB), TierWish("memory", 8 * MIB)), block_bytes=BLOCK) as made:
        yield made


def features(n: int, seed: int = 0) -> np.ndarray:
    """Return numbers as behind a ReLU."""
    return np.maximum(np.random.default_rng(seed).standard_normal(n, np.float32), 0)


def noise(size_bytes: int) -> np.ndarray:
    """Return bytes that nothing makes smaller."""
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)


def put(stack: TierStack, data: np.ndarray) -> int:
    """Put an array."""
    return stack.put(data.ctypes.data, data.nbytes)


def got(stack: TierStack, ticket: int, data: np.ndarray) -> bool:
    """Tell whether the same bits come back."""
    back = np.full(data.nbytes, 0xA5, np.uint8)
    assert stack.get(ticket, back.ctypes.data, data.nbytes) == 0
    elsewhere = np.full(data.nbytes + 1, 0xA5, np.uint8)[1:]  # at an address as no tensor has
    assert stack.get(ticket, elsewhere.ctypes.data, data.nbytes) == 0
    return np.array_equal(back, data.view(np.uint8)) and np.array_equal(elsewhere, back)


@given(size_bytes=st.integers(1, 3 * PIECE_BYTES), share=st.floats(0, 1), seed=st.integers(0, 99), at=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_every_bit_comes_back(stack: TierStack, size_bytes: int, share: float, seed: int, at: int) -> None:
    """Payloads that are noise to any share, of any size, at any address, come back from where they went."""
    data = np.zeros(size_bytes + at, np.uint8)[at:]
    data[: int(size_bytes * share)] = np.random.default_rng(seed).integers(0, 256, int(size_bytes * share))
    ticket = put(stack, data)
    assert ticket >= 0
    assert got(stack, ticket, data)
    stack.drop(ticket)
    assert [use.used_bytes for use in stack.usage()] == [0, 0]


def test_feature_maps_take_less_and_noise_goes_on_as_it_is(stack: TierStack) -> None:
    """What gets smaller takes fewer blocks than it has bytes; noise lies in the next tier, uncompressed."""
    maps = features(MIB // 4)
    ticket = put(stack, maps)
    assert ticket & TIER_MASK == COMPRESSED
    assert stores.where(stack.record[0], ticket) == 0
    assert 0 < stack.usage()[COMPRESSED].used_bytes < 0.7 * maps.nbytes
    other = put(stack, noise(MIB))
    assert other & TIER_MASK == MEMORY
    assert got(stack, ticket, maps)
    assert got(stack, other, noise(MIB))
    stack.drop(ticket)
    assert stack.usage()[COMPRESSED].used_bytes == 0
    stack.drop(other)


def test_what_stops_getting_smaller_half_way_goes_on_and_leaves_no_block(stack: TierStack) -> None:
    """A payload that begins well and is noise after that is given up, and the blocks that it had are free."""
    data = np.concatenate([np.zeros(PIECE_BYTES // 4, np.uint8), noise(6 * PIECE_BYTES)])
    before = stack.usage()[COMPRESSED].refused
    ticket = put(stack, data)
    assert ticket & TIER_MASK == MEMORY
    assert stack.usage()[COMPRESSED].used_bytes == 0
    assert stack.usage()[COMPRESSED].refused == before
    assert got(stack, ticket, data)
    stack.drop(ticket)


def test_a_compressed_tier_without_another_below_takes_everything() -> None:
    """Noise is kept as it is, in smaller blocks; what has no room is ``FULL``, and nothing of it stays."""
    with TierStack.create((TierWish("compressed", MIB),), block_bytes=BLOCK) as alone:
        ticket = put(alone, noise(700_000))
        assert ticket & TIER_MASK == COMPRESSED
        used = alone.usage()[0].used_bytes
        assert 700_000 < used < 720_000
        assert put(alone, noise(400_000)) == FULL
        assert alone.usage()[0].used_bytes == used
        assert got(alone, ticket, noise(700_000))


def test_a_full_compressed_tier_hands_on(stack: TierStack) -> None:
    """Payloads for which it has no more room lie in the next tier, and all can be read."""
    held = {}
    for seed in range(5):
        maps = features(MIB // 4, seed)
        held[put(stack, maps)] = maps
    assert {ticket & TIER_MASK for ticket in held} == {COMPRESSED, MEMORY}
    for ticket, maps in held.items():
        assert got(stack, ticket, maps)
        stack.drop(ticket)


def test_a_stale_ticket_or_too_long_a_payload_is_an_error(stack: TierStack) -> None:
    """What is not there, or not so long, is ``EINVAL`` and no crash."""
    maps = features(1000)
    ticket = put(stack, maps)
    back = np.zeros(10 * PIECE_BYTES, np.uint8)
    assert stack.get(ticket, back.ctypes.data, back.nbytes) in (errno.EINVAL, errno.EIO)
    stack.drop(ticket)
    assert stack.get(ticket, back.ctypes.data, maps.nbytes) == errno.EINVAL
