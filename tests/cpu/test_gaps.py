"""Free address ranges against a plain list of intervals."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zico.heap import free_list
from zico.heap.layout import ARENA, GAP, MAX_GAPS, SLOT
from zico.paging.page_table import State
from zico.pool import results

REGION_SHIFT = 12
REGION_BYTES = 1 << REGION_SHIFT
UNIT = 64
ANY = 1 << 60


class Space:
    """An arena record with its arrays, and what lies behind the arrays."""

    BEYOND = 8

    def __init__(self, start: int, size_bytes: int) -> None:
        """Make one gap of it all."""
        self._gaps = np.full(MAX_GAPS + self.BEYOND, -7, GAP)
        self._arena = np.zeros(1, ARENA)
        self.record: Any = self._arena[0]
        self.record["start"], self.record["end"] = start, start + size_bytes
        self.record["gaps_address"] = self._gaps.ctypes.data
        self.set([(start, start + size_bytes)])

    def set(self, ranges: list[tuple[int, int]]) -> None:
        """Let exactly these ranges be free."""
        n = len(ranges)
        table = np.array(ranges, "i8").reshape(-1, 2)
        self._gaps["start"][:n], self._gaps["size_bytes"][:n] = table[:, 0], table[:, 1] - table[:, 0]
        self.record["n_gaps"] = n

    def get(self) -> list[tuple[int, int]]:
        """Return the free ranges."""
        n = int(self.record["n_gaps"])
        return [(int(gap["start"]), int(gap["start"] + gap["size_bytes"])) for gap in self._gaps[:n]]

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing was written behind the arrays."""
        return self._gaps[MAX_GAPS:].tolist() == [(-7, -7)] * self.BEYOND


def _up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class GapsMachine(RuleBasedStateMachine):
    """Cut and return ranges at random; the model is the list of free intervals and the blocks per slot."""

    @initialize(start=st.integers(0, 40), slots=st.integers(1, 24), blocks_shift=st.integers(0, 1), data=st.data())
    def begin(self, start: int, slots: int, blocks_shift: int, data: st.DataObject) -> None:
        """Start with one gap; arenas begin anywhere. Some are those of a job that pages."""
        self.space = Space(start * UNIT, slots * REGION_BYTES)
        self.free = self.space.get()
        self.taken: list[tuple[int, int]] = []
        self.slots = np.zeros(slots + 2, SLOT)
        states = data.draw(st.none() | st.lists(st.sampled_from(State), min_size=1, max_size=40))
        self.states = np.resize(np.array(states or [State.ABSENT], np.int32), (slots + 2) << blocks_shift)
        self.blocks_shift = blocks_shift
        if states is not None:
            self.space.record["states_address"] = self.states.ctypes.data
            self.space.record["blocks_shift"] = blocks_shift

    def _new(self, start: int, size: int) -> int:
        first, last = start // REGION_BYTES, (start + size - 1) // REGION_BYTES
        there = (State.WRITTEN, State.CLEAN)
        return sum(
            self.slots["live"][slot] == 0 and self.states[slot << self.blocks_shift] not in there
            for slot in range(first, last + 1)
        )

    def _count(self, start: int, end: int, by: int) -> None:
        for slot in range(start // REGION_BYTES, (end - 1) // REGION_BYTES + 1):
            self.slots["live"][slot] += by

    @rule(
        size=st.integers(1, 200),
        alignment=st.sampled_from([64, 128, 1024, 4096, 16384]),
        most_new=st.sampled_from([0, 1, ANY]),
    )
    def take(self, size: int, alignment: int, most_new: int) -> None:
        """The gap is the first of those that need the fewest new regions, within the limit; the cut is exact."""
        size *= UNIT
        fits = [
            i
            for i, (a, b) in enumerate(self.free)
            if _up(a, alignment) + size <= b and self._new(_up(a, alignment), size) <= most_new
        ]
        found = free_list.find(self.space.record, self.slots.ctypes.data, REGION_SHIFT, size, alignment, most_new)
        if not fits:
            assert found == results.NOTHING
            return
        assert found == min(fits, key=lambda i: (self._new(_up(self.free[i][0], alignment), size), i))
        a, b = self.free[found]
        start = _up(a, alignment)
        assert free_list.take(self.space.record, found, start, size) == start
        self.free[found : found + 1] = [r for r in ((a, start), (start + size, b)) if r[0] < r[1]]
        self.taken.append((start, start + size))
        self._count(start, start + size, 1)

    @rule(start=st.integers(0, 24 * REGION_BYTES // UNIT), size=st.integers(1, 200))
    def take_at(self, start: int, size: int) -> None:
        """The gap round a range is found if there is one, and the range is cut out of it."""
        start, size = start * UNIT, size * UNIT
        round_it = [i for i, (a, b) in enumerate(self.free) if a <= start and start + size <= b]
        found = free_list.around(self.space.record, start, size)
        assert [found] == (round_it or [results.NOTHING])
        if round_it:
            a, b = self.free[found]
            assert free_list.take(self.space.record, found, start, size) == start
            self.free[found : found + 1] = [r for r in ((a, start), (start + size, b)) if r[0] < r[1]]
            self.taken.append((start, start + size))
            self._count(start, start + size, 1)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        """A range that comes back merges with its neighbours."""
        start, end = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        free_list.give(self.space.record, start, end - start)
        self._count(start, end, -1)
        bisect.insort(self.free, (start, end))
        merged: list[tuple[int, int]] = []
        for a, b in self.free:
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self.free = merged

    @invariant()
    def agrees(self) -> None:
        """The arrays are the model's list: sorted, apart, nothing empty."""
        if hasattr(self, "space"):
            assert self.space.get() == self.free


GapsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGaps = GapsMachine.TestCase


def test_the_figure_in_the_module_is_true() -> None:
    """With gaps [0, 4), [9, 10) and [15, end), 2 go to 0 and 6 to 15, unless 2 fit where regions are held."""
    space = Space(0, 100 * UNIT)
    space.set([(0, 4 * UNIT), (9 * UNIT, 10 * UNIT), (15 * UNIT, 100 * UNIT)])
    slots = np.zeros(2, SLOT)

    def place(size: int) -> int:
        index = free_list.find(space.record, slots.ctypes.data, REGION_SHIFT, size * UNIT, UNIT, ANY)
        return space.get()[index][0] // UNIT

    assert (place(2), place(6)) == (0, 15)
    slots["live"][1] = 1  # units 64 to 128 lie in a region that is held
    space.set([(0, 4 * UNIT), (70 * UNIT, 80 * UNIT)])
    assert place(2) == 70


@settings(deadline=None)  # the first call compiles
@given(st.integers(0, 1 << 40), st.integers(0, 16))
def test_align_up_is_the_next_multiple(offset: int, power: int) -> None:
    """The result is the smallest multiple of the alignment that is not below the offset."""
    assert int(free_list.align_up(offset, 1 << power)) == _up(offset, 1 << power)


def test_an_arena_refuses_cuts_long_before_its_arrays_are_full() -> None:
    """With half of the room for gaps in use, the arena says that it is full."""
    space = Space(0, 4 * MAX_GAPS * UNIT)
    room = [(2 * i * UNIT, (2 * i + 1) * UNIT) for i in range(MAX_GAPS)]
    space.set(room[: MAX_GAPS // 2 - 1])
    assert not free_list.is_full(space.record)
    space.set(room[: MAX_GAPS // 2])
    assert free_list.is_full(space.record)


def test_returned_ranges_never_overrun_the_arrays() -> None:
    """When more ranges come back than there is room for gaps, nothing is written behind the arrays."""
    space = Space(0, 4 * MAX_GAPS * UNIT)
    space.set([(2 * i * UNIT, (2 * i + 1) * UNIT) for i in range(MAX_GAPS)])
    before = space.get()
    for i in range(3):
        free_list.give(space.record, (2 * MAX_GAPS + 2 * i + 1) * UNIT, UNIT)
    free_list.give(space.record, UNIT, UNIT)
    assert space.is_whole
    assert space.record["n_gaps"] <= MAX_GAPS
    after = space.get()
    assert after[0] == (0, 3 * UNIT)
    assert after[1 : MAX_GAPS - 1] == before[2:MAX_GAPS]
