"""Stacks of tiers: what is put comes back, whatever the sizes, the kinds and the room."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.threads import in_thread
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zico.base.compiled import compiled, exchange
from zico.base.units import MIB
from zico.tiers import chains, stores
from zico.tiers.destinations import TierWish
from zico.tiers.layout import END, FULL, OUT, TIER_MASK, note
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 8192
Record = Any


def pattern(seed: int, size_bytes: int) -> np.ndarray:
    """Return bytes that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def put(stack: TierStack, data: np.ndarray) -> int:
    """Put an array."""
    return stack.put(data.ctypes.data, data.nbytes)


def got(stack: TierStack, ticket: int, size_bytes: int) -> np.ndarray:
    """Return what comes back, in memory that held something else before."""
    back = np.full(size_bytes, 0xA5, np.uint8)
    assert stack.get(ticket, back.ctypes.data, size_bytes) == 0
    return back


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[TierStack]:
    """Give memory for four blocks above a file for eight."""
    wishes = (TierWish("memory", 4 * BLOCK), TierWish("file", 8 * BLOCK))
    with TierStack.create(wishes, block_bytes=BLOCK, directory=str(tmp_path)) as made:
        yield made


class TierMachine(RuleBasedStateMachine):
    """Put, get and drop payloads of any size in any order; a dict says what must be there."""

    @initialize(blocks=st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def make(self, blocks: tuple[int, int]) -> None:
        """Make memory above a file, each of some blocks."""
        self.blocks = blocks
        wishes = (TierWish("memory", blocks[0] * BLOCK), TierWish("file", blocks[1] * BLOCK))
        self.stack = TierStack.create(wishes, block_bytes=BLOCK)
        self.held: dict[int, np.ndarray] = {}
        self.seed = 0

    def free_blocks(self, tier: int) -> int:
        """Return what the model says is free in a tier."""
        inside = [data for ticket, data in self.held.items() if ticket & TIER_MASK == tier]
        return self.blocks[tier] - sum(-(-len(data) // BLOCK) for data in inside)

    @rule(size_bytes=st.integers(1, 6 * BLOCK) | st.integers(1, 6).map(lambda n: n * BLOCK), shift=st.integers(0, 65))
    def put(self, size_bytes: int, shift: int) -> None:
        """A payload goes to the first tier that has room for all of it, or is refused."""
        self.seed += 1
        data = pattern(self.seed, size_bytes + shift)[shift:]
        ticket = put(self.stack, data)
        wanted = -(-size_bytes // BLOCK)
        fitting = [tier for tier in range(2) if self.free_blocks(tier) >= wanted]
        assert (ticket & TIER_MASK if ticket >= 0 else None) == (fitting[0] if fitting else None)
        assert ticket not in self.held
        assert np.array_equal(data, pattern(self.seed, size_bytes + shift)[shift:])
        if ticket >= 0:
            self.held[ticket] = data
        else:
            assert ticket == FULL

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A payload is forgotten."""
        ticket = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[ticket]
        self.stack.drop(ticket)

    @rule()
    def trim(self) -> None:
        """Physical memory that is not needed goes back, and nothing else."""
        self.stack.trim()
        self.stack.trim()
        resident = os.fstat(int(self.stack.record["tiers"][0][0]["descriptor"])).st_blocks * 512
        highest = max((ticket >> 2 for ticket in self.held if ticket & TIER_MASK == 0), default=-1)
        assert resident <= (self.blocks[0] if highest >= 0 else 0) * BLOCK

    @invariant()
    def contents_are_there(self) -> None:
        """Every payload can be read, by a copy and, where it says so, in place."""
        for ticket, data in getattr(self, "held", {}).items():
            assert np.array_equal(got(self.stack, ticket, len(data)), data)
            address = stores.where(self.stack.record[0], ticket)
            if address:
                assert ctypes.string_at(address, len(data)) == data.tobytes()

    @invariant()
    def figures_agree(self) -> None:
        """What is used is what the payloads need, and never above the peak."""
        if hasattr(self, "stack"):
            for tier, use in enumerate(self.stack.usage()):
                assert use.used_bytes == (self.blocks[tier] - self.free_blocks(tier)) * BLOCK
                assert use.used_bytes <= use.peak_bytes <= use.capacity_bytes

    def teardown(self) -> None:
        """Close."""
        if hasattr(self, "stack"):
            self.stack.close()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_a_payload_that_does_not_fit_is_a_value_and_nothing_is_lost(stack: TierStack) -> None:
    """Where no tier has room ``FULL`` comes back, and what is there stays."""
    held = [(put(stack, pattern(n, 4 * BLOCK)), n) for n in range(3)]
    assert put(stack, pattern(9, 1)) == FULL
    assert [use.refused for use in stack.usage()] == [3, 1]
    for ticket, n in held:
        assert np.array_equal(got(stack, ticket, 4 * BLOCK), pattern(n, 4 * BLOCK))
    stack.drop(held[1][0])
    assert put(stack, pattern(9, 1)) >= 0


def test_a_large_payload_lies_in_many_blocks_that_need_not_be_neighbours(stack: TierStack) -> None:
    """Blocks that others have left in between make one chain, and it cannot be read in place."""
    ones = [put(stack, pattern(n, BLOCK)) for n in range(4)]
    stack.drop(ones[0])
    stack.drop(ones[2])
    data = pattern(7, BLOCK + 1)
    ticket = put(stack, data)
    assert ticket & TIER_MASK == 0
    assert stores.where(stack.record[0], ticket) == 0
    assert np.array_equal(got(stack, ticket, BLOCK + 1), data)


@compiled
def take_and_free(store: Record, owners: Record, times: int, n: int) -> int:
    """Take chains and free them; returns how often a block was somebody else's, too."""
    clashes = 0
    for _ in range(times):
        first = chains.take(store, n)
        if first == FULL:
            continue
        block = first
        while block != END:
            clashes += int(exchange(owners.ctypes.data + 4 * block, 1) != 0)
            block = chains.next_of(chains.words_of(store)[block])
        block = first
        while block != END:
            exchange(owners.ctypes.data + 4 * block, 0)
            block = chains.next_of(chains.words_of(store)[block])
        chains.free(store, first)
    return clashes


def test_threads_that_take_at_once_get_different_blocks() -> None:
    """Four threads take and free chains of one tier without a lock: no block is in two, and none is lost."""
    with TierStack.create((TierWish("memory", 16 * BLOCK),), block_bytes=BLOCK) as stack:
        store = stack.record["tiers"][0][0]
        owners = np.zeros(16, np.int32)
        take_and_free(store, owners, 1, 1)
        clashes: list[int] = []
        together = threading.Barrier(4)

        def work(n: int) -> None:
            together.wait(60)
            clashes.append(take_and_free(store, owners, 300_000, n))

        workers = [in_thread(lambda n=n: work(n)) for n in (1, 2, 3, 5)]  # type: ignore[misc]
        for worker in workers:
            worker.join(60)
        assert clashes == [0] * 4
        assert stack.usage()[0].used_bytes == 0


def descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count


def test_a_closed_stack_leaves_no_descriptor_and_no_file(tmp_path: Path) -> None:
    """While it lives a file has no name; closed, it is gone, and so are mappings and descriptors."""
    before = descriptors(), Path("/proc/self/maps").read_text().count("zico-")
    wishes = (TierWish("memory", MIB), TierWish("file", MIB))
    with TierStack.create(wishes, block_bytes=BLOCK, directory=str(tmp_path)):
        assert list(tmp_path.iterdir()) == []
        assert descriptors() == before[0] + 3
    assert (descriptors(), Path("/proc/self/maps").read_text().count("zico-")) == before


def resident(stack: TierStack, tier: int) -> int:
    """Return the bytes that the kernel keeps for a tier."""
    return os.fstat(int(stack.record["tiers"][0][tier]["descriptor"])).st_blocks * 512


def test_memory_that_is_not_needed_any_more_goes_back_bit_by_bit() -> None:
    """After an epoch that needed less, puts give back a few pages each, and never those of what is there."""
    with TierStack.create((TierWish("memory", 32 * MIB),), block_bytes=MIB) as stack:
        held = [put(stack, pattern(n, MIB)) for n in range(30)]
        for ticket in held[1:]:
            stack.drop(ticket)
        assert resident(stack, 0) == 30 * MIB
        sizes = []
        for _ in range(2):  # the epoch with the peak ends, and one without
            stack.shared["epoch_ns"] = 1
            stack.drop(put(stack, pattern(1, MIB)))
            sizes.append(resident(stack, 0))
        for _ in range(4):
            stack.drop(put(stack, pattern(1, MIB)))
            sizes.append(resident(stack, 0))
        assert sizes == [size * MIB for size in (30, 22, 14, 6, 2, 2)]
        assert np.array_equal(got(stack, held[0], MIB), pattern(0, MIB))


def test_rates_are_known_from_the_start_and_follow(stack: TierStack) -> None:
    """A new stack says how fast each tier is; slow copies lower that within what counts as recent."""
    first = stack.rates()
    assert all(rate.out_bytes_per_s > 0 and rate.in_bytes_per_s > 0 for rate in first)
    assert all(use.out_bytes == use.in_bytes == use.peak_bytes == 0 for use in stack.usage())
    for _ in range(8):
        note(stack.shared[0], OUT, 256 * MIB, 10**9)
    assert stack.rates()[0].out_bytes_per_s == pytest.approx(256 * MIB, rel=0.01)
    assert stack.rates()[0].in_bytes_per_s == first[0].in_bytes_per_s
    assert stack.rates()[0].out_s(256 * MIB) == pytest.approx(1, rel=0.01)
