"""Any sequence of driver operations against a model of pieces and places."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from cpu.support.twin_device import MIB, TwinDevice
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zico.base.errors import DriverError

if TYPE_CHECKING:
    from zico.device.api import Memory, Owned

UNIT = 2 * MIB
SLOTS = 4
BUDGET = 10
"""Pieces that the device has."""


@dataclasses.dataclass
class Piece:
    """Physical memory as the model sees it: the byte written last."""

    value: int = 0


@dataclasses.dataclass
class Made:
    """A memory, and the pieces it must be made of; imported memory shares another's.

    A piece is imported when it is mapped or exported for the first time, and the first one at once.
    """

    memory: Memory
    pieces: list[Piece]
    handles: set[int]
    """Of which pieces there are handles."""


@dataclasses.dataclass
class Space:
    """A window, and what must be mapped at each slot."""

    window: Owned
    slots: list[Piece | None]


class DriverMachine(RuleBasedStateMachine):
    """Create, export, map, write, unmap and close in any order."""

    @initialize(needs_context=st.booleans())
    def start(self, needs_context: bool) -> None:  # noqa: FBT001 - hypothesis calls by keyword
        """Open a small device."""
        self.device = TwinDevice(total_bytes=BUDGET * UNIT, needs_context=needs_context)
        self.memories: list[Made] = []
        self.spaces: list[Space] = []

    def alive(self) -> set[int]:
        """Return the pieces that are held or mapped."""
        held = {id(piece) for made in self.memories for piece in made.pieces}
        return held | {id(piece) for space in self.spaces for piece in space.slots if piece}

    @rule(pieces=st.integers(1, 4))
    def create(self, pieces: int) -> None:
        """Make memory; it fits exactly when the model says so."""
        fits = len(self.alive()) + pieces <= BUDGET
        try:
            memory = self.device.driver.create_memory(pieces * UNIT, "t", UNIT)
        except DriverError as error:
            status = error.status
            assert (status, fits) == (2, False)
        else:
            assert fits
            self.memories.append(Made(memory, [Piece() for _ in range(pieces)], set(range(pieces))))

    @precondition(lambda self: self.memories)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Export a memory and import it again, as another process would."""
        made = data.draw(st.sampled_from(self.memories))
        descriptors = self.device.driver.export_pieces(made.memory)
        made.handles.update(range(len(made.pieces)))
        memory = self.device.driver.import_pieces(descriptors, made.memory.size_bytes, UNIT)
        self.memories.append(Made(memory, made.pieces, {0}))

    @precondition(lambda self: self.memories)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Close a memory, mapped or not."""
        made = data.draw(st.sampled_from(self.memories))
        made.memory.close()
        self.memories = [one for one in self.memories if one is not made]

    @precondition(lambda self: len(self.spaces) < 3)
    @rule()
    def reserve(self) -> None:
        """Reserve a window."""
        self.spaces.append(Space(self.device.driver.reserve(SLOTS * UNIT), [None] * SLOTS))

    @precondition(lambda self: self.spaces)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Close a window with whatever is mapped there."""
        space = data.draw(st.sampled_from(self.spaces))
        space.window.close()
        self.spaces = [one for one in self.spaces if one is not space]

    @precondition(lambda self: self.spaces and self.memories)
    @rule(data=st.data(), slot=st.integers(0, SLOTS - 1), count=st.integers(1, SLOTS))
    def map(self, data: st.DataObject, slot: int, count: int) -> None:
        """Map some pieces over whatever is there; what does not fit is refused and changes nothing."""
        space, made = data.draw(st.sampled_from(self.spaces)), data.draw(st.sampled_from(self.memories))
        first = data.draw(st.integers(0, len(made.pieces) - 1))
        arguments = (space.window, slot * UNIT, made.memory, first * UNIT, count * UNIT)
        if slot + count > SLOTS or first + count > len(made.pieces):
            with pytest.raises(DriverError):
                self.device.driver.map(*arguments)
        else:
            self.device.driver.map(*arguments)
            made.handles.update(range(first, first + count))
            space.slots[slot : slot + count] = made.pieces[first : first + count]

    @precondition(lambda self: self.spaces)
    @rule(data=st.data(), slot=st.integers(0, SLOTS - 1), count=st.integers(1, SLOTS))
    def unmap(self, data: st.DataObject, slot: int, count: int) -> None:
        """Unmap what is there; nothing there, or beyond the window, is refused."""
        space = data.draw(st.sampled_from(self.spaces))
        if slot + count > SLOTS or not any(space.slots[slot : slot + count]):
            with pytest.raises(DriverError):
                self.device.driver.unmap(space.window, slot * UNIT, count * UNIT)
        else:
            self.device.driver.unmap(space.window, slot * UNIT, count * UNIT)
            space.slots[slot : slot + count] = [None] * count

    @precondition(lambda self: any(any(space.slots) for space in self.spaces))
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        """Write through one mapping; every other one of the same piece must show it."""
        space = data.draw(st.sampled_from([space for space in self.spaces if any(space.slots)]))
        slot = data.draw(st.sampled_from([at for at, piece in enumerate(space.slots) if piece]))
        piece = space.slots[slot]
        assert piece is not None
        piece.value = value
        self.device.write(space.window.handle + slot * UNIT, bytes([value]))

    @invariant()
    def everything_is_where_the_model_has_it(self) -> None:
        """Each slot shows its piece's byte, or is shut."""
        for space in getattr(self, "spaces", []):
            for slot, piece in enumerate(space.slots):
                address = space.window.handle + slot * UNIT
                if piece is None:
                    assert not self.device.is_open(address)
                else:
                    assert self.device.read(address, 1) == bytes([piece.value])

    @invariant()
    def nothing_is_held_that_the_model_does_not_hold(self) -> None:
        """The twin counts the handles, mappings and reservations that the model has."""
        if not hasattr(self, "spaces"):
            return
        leaks = self.device.twin.leaks()
        assert leaks.get("handles", 0) == sum(len(made.handles) for made in self.memories)
        assert leaks.get("reservations", 0) == len(self.spaces)
        assert leaks.get("mappings", 0) == sum(1 for space in self.spaces for piece in space.slots if piece)

    def teardown(self) -> None:
        """Close everything; nothing may be left."""
        if not hasattr(self, "device"):
            return
        with self.device:
            for made in self.memories:
                made.memory.close()
            for space in self.spaces:
                space.window.close()


DriverMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestDriverMachine = DriverMachine.TestCase
