"""Whatever leaves comes back as it was, whoever asks when, and nothing is kept for the dead."""

from __future__ import annotations

import errno
import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.swapping_parts import DEADLINE_S, Array, Shelf, make_mover
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zico.base.errors import SwapError
from zico.swap.mover import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.swap.mover import Idle, Mover


def test_out_and_back() -> None:
    """Contents leave when sent, the memory goes, and who needs them gets them, at the cost of a wait."""
    shelf = Shelf()
    mover, published = make_mover(shelf)
    array = Array(mover, b"contents")
    assert mover.send(array)
    assert mover.settle(DEADLINE_S)
    assert array.here is None
    assert list(shelf.kept.values()) == [b"contents"]
    assert published[-1].away_bytes == published[-1].out_bytes == 8
    assert mover.need(array, array.take) == (True, b"contents")
    assert (published[-1].in_bytes, published[-1].late, published[-1].away_bytes) == (8, 1, 0)
    assert mover.settle(DEADLINE_S)
    assert not shelf.kept, "who has it may change it, so the copy is worth nothing"


class Made(Array):
    """An array that is the sum of others, byte by byte."""

    def __init__(self, mover: Mover, *sources: Array) -> None:
        """Make it for the first time."""
        self._made_of = sources
        self.times = 0
        super().__init__(mover, self._sum([source.take() for source in sources]))
        for source in sources:
            source.held = False

    @staticmethod
    def _sum(contents: list[bytes]) -> bytes:
        return bytes(sum(each) % 256 for each in zip(*contents, strict=True))

    def keep_sources(self) -> bool:
        """They are kept anyway."""
        return self.address_if_idle() != 0

    def sources(self) -> list[Idle]:
        """Return the others."""
        return list(self._made_of)

    def make(self, bring: Callable[[Any, Callable[[], Any]], Any]) -> None:
        """Add again."""
        self.times += 1
        made = self._sum([bring(source, source.take) for source in self._made_of])
        self._settled = np.frombuffer(made, np.uint8).copy()
        for source in self._made_of:
            source.held = False


def test_what_is_dropped_is_made_of_what_is_away() -> None:
    """A drop takes no tier and no copy; making again brings sources back, and makes dropped ones first."""
    shelf = Shelf()
    mover, published = make_mover(shelf)
    source = Array(mover, b"contents")
    double = Made(mover, source, source)
    fourfold = Made(mover, double, double)
    expected = fourfold.take()
    assert not mover.drop(fourfold), "it is held"
    fourfold.held = False
    assert not mover.drop(source), "nobody can make it"
    assert mover.drop(fourfold)
    assert mover.drop(double)
    assert mover.send(source)
    assert mover.settle(DEADLINE_S)
    assert (len(shelf.kept), published[-1].dropped_bytes, published[-1].out_bytes) == (1, 16, 8)
    assert published[-1].away_bytes == 24
    assert not mover.fetch(fourfold), "a thread that copies makes nothing"
    assert mover.need(fourfold, fourfold.take) == (False, expected)
    assert (fourfold.times, double.times) == (1, 1)
    assert double.place is source.place is Place.HERE
    assert (published[-1].away_bytes, published[-1].in_bytes, published[-1].late) == (0, 8, 1)
    assert mover.drop(double), "again"
    mover.need(double, double.take)
    assert double.times == 2


def test_what_cannot_be_made_raises_and_can_be_tried_again() -> None:
    """Whoever needs it is told; it stays dropped."""
    mover, _ = make_mover(Shelf())
    source = Array(mover, b"contents")
    double = Made(mover, source, source)
    mover.drop(double)
    whole, double.make = double.make, lambda _bring: raises(MemoryError)  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        mover.need(double, double.take)
    double.make = whole  # type: ignore[method-assign]
    assert mover.need(double, double.take)[1] == bytes(2 * byte % 256 for byte in b"contents")


def raises(error: type[Exception]) -> None:
    """Raise an error."""
    raise error


def test_a_long_chain_of_dropped_ones_is_made() -> None:
    """It may be longer than Python's stack is deep."""
    mover, _ = make_mover(Shelf())
    chain: list[Array] = [Array(mover, b"contents")]
    for _ in range(2000):
        chain.append(Made(mover, chain[-1]))
    assert all(mover.drop(each) for each in reversed(chain[1:]))
    assert mover.need(chain[-1], chain[-1].take) == (False, b"contents")


def test_a_forked_child_makes_what_was_dropped_when_it_needs_it() -> None:
    """It has no threads, and a fork that computes may hang: only what the child asks for is made."""
    mover, _ = make_mover(Shelf())
    source = Array(mover, b"contents")
    double = Made(mover, source, source)
    expected = double.take()
    double.held = False
    mover.drop(double)
    mover.send(source)
    assert mover.settle(DEADLINE_S)
    mover.leave_to_parent([double, source])
    assert (source.place, double.place, double.times) == (Place.HERE, Place.AWAY, 0)
    assert mover.need(double, double.take)[1] == expected


def test_what_is_held_does_not_leave() -> None:
    """Nothing that somebody can reach is sent, and what is needed while it leaves stays."""
    mover, _ = make_mover(Shelf())
    array = Array(mover, b"contents")
    array.take()
    assert not mover.send(array)
    array.held = False
    assert mover.send(array)
    late, contents = mover.need(array, array.take)
    assert contents == b"contents"
    assert mover.settle(DEADLINE_S)
    assert array.here is not None or late


def test_what_came_back_unused_leaves_without_a_copy() -> None:
    """As long as nobody has reached for it the tier's copy is good, and its memory can go at once."""
    shelf = Shelf()
    mover, published = make_mover(shelf)
    array = Array(mover, b"contents")
    mover.send(array)
    mover.settle(DEADLINE_S)
    assert mover.fetch(array)
    while array.place is not Place.HERE:
        assert mover.settle(DEADLINE_S)
    assert mover.send(array)
    assert array.here is None
    assert published[-1].out_bytes == 8, "copied out once"
    assert mover.need(array, array.take)[1] == b"contents"


def test_a_copy_of_the_past_is_not_taken_for_the_present() -> None:
    """What is used and changed while it is being copied, and sent again, comes back as it was changed."""
    shelf = Shelf()
    mover, _ = make_mover(shelf)
    array = Array(mover, b"contents")
    shelf.held_up = threading.Event()
    mover.send(array)
    assert shelf.begun.wait(DEADLINE_S)
    mover.need(array, array.take)
    assert array.here is not None
    array.here[:] = list(b"changed!")
    array.held = False
    assert mover.send(array)
    shelf.held_up.set()
    assert mover.settle(DEADLINE_S)
    assert mover.need(array, array.take) == (True, b"changed!")


def test_a_full_tier_keeps_everything_here() -> None:
    """What the tier has no room for stays, is not tried again, and nothing is lost."""
    mover, published = make_mover(Shelf(room=4))
    array = Array(mover, b"contents")
    assert mover.send(array)
    assert mover.settle(DEADLINE_S)
    assert (array.place, array.stays, published[-1].kept) == (Place.HERE, True, 1)
    assert published[-1].leaving_bytes == 0
    assert not mover.send(array)
    assert mover.need(array, array.take) == (False, b"contents")


def test_a_tier_that_cannot_be_read_is_an_error() -> None:
    """Who needs what cannot be read back is told; when it can be read again, it is there."""
    shelf = Shelf()
    mover, _ = make_mover(shelf)
    array = Array(mover, b"contents")
    mover.send(array)
    mover.settle(DEADLINE_S)
    shelf.errno = errno.EIO
    for _ in range(2):
        with pytest.raises(SwapError, match="8 bytes of a tensor cannot be read back"):
            mover.need(array, array.take)
    mover.fetch(array)
    shelf.errno = 0
    assert mover.need(array, array.take)[1] == b"contents"


def test_the_dead_leave_nothing() -> None:
    """When nobody can ask for something any more its copy goes, away or half-way."""
    shelf = Shelf()
    mover, published = make_mover(shelf)
    arrays = [Array(mover, b"contents") for _ in range(3)]
    for array in arrays:
        mover.send(array)
    del array
    mover.settle(DEADLINE_S)
    mover.send(arrays[0])
    arrays.clear()
    gc.collect()
    mover.settle(DEADLINE_S)
    mover.settle(DEADLINE_S)
    assert not shelf.kept
    assert published[-1].away_bytes == published[-1].leaving_bytes == 0


class Moves(RuleBasedStateMachine):
    """Arrays that are sent, fetched, needed, changed and dropped in any order, while two threads move them."""

    names = st.integers(0, 3)

    def __init__(self) -> None:
        """Have four arrays and room for three."""
        super().__init__()
        self.shelf = Shelf(room=3000)
        self.mover, self.published = make_mover(self.shelf)
        self.expected = {name: bytes([name]) * 1000 for name in range(4)}
        self.arrays = {name: Array(self.mover, contents) for name, contents in self.expected.items()}

    @rule(name=names)
    def send(self, name: int) -> None:
        """Let one leave."""
        self.arrays[name].stays = False
        self.mover.send(self.arrays[name])

    @rule(name=names)
    def fetch(self, name: int) -> None:
        """Let one come back."""
        self.mover.fetch(self.arrays[name])

    @rule(name=names, change=st.binary(min_size=1000, max_size=1000))
    def need(self, name: int, change: bytes) -> None:
        """Use one and change it."""
        array = self.arrays[name]
        _, contents = self.mover.need(array, array.take)
        assert contents == self.expected[name]
        assert array.here is not None
        array.here[:] = list(change)
        self.expected[name] = change
        array.held = False

    @rule(name=names)
    def replace(self, name: int) -> None:
        """Drop one and begin anew."""
        self.arrays[name] = Array(self.mover, self.expected[name])

    @rule()
    def settle(self) -> None:
        """Let what is leaving go."""
        assert self.mover.settle(DEADLINE_S)

    @invariant()
    def figures_are_sane(self) -> None:
        """Nothing counts below zero."""
        if self.published:
            figures = self.published[-1]
            assert min(figures.leaving_bytes, figures.out_bytes - figures.in_bytes + 4000) >= 0

    def teardown(self) -> None:
        """In the end everything is as it should be, and nothing is left when all are gone."""
        for name, array in self.arrays.items():
            assert self.mover.need(array, array.take)[1] == self.expected[name]
        del array
        self.arrays.clear()
        gc.collect()
        for _ in range(2):
            assert self.mover.settle(DEADLINE_S)
        assert not self.shelf.kept
        assert not self.published or self.published[-1].away_bytes == 0
        self.mover.close()


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
