"""What does a region cost that comes to another job: to map it there, and to write to it?

Each call maps every piece of a memory at the place of another one, and writes to all of it. The
kernel maps the pages by one call more, as the heap asks it to, or at a fault for each.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING

import numpy as np

from zico.base.units import MIB
from zico.device import mapping
from zico.device.host import HostDriver
from zico.device.record import DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable

    from micro.conftest import Measure

PIECE_BYTES = 4 * MIB
PIECES = 32
ROUNDS = 30
TOTAL_BYTES = PIECES * PIECE_BYTES


def test_faults(measure: Measure) -> None:
    """A fault for each page."""
    device = HostDriver()
    memory, window = device.create_memory(TOTAL_BYTES, "remapping", PIECE_BYTES), device.reserve(TOTAL_BYTES)
    place = PIECE_BYTES

    def one(piece: int, at: int) -> None:
        device.map(window, at * place, memory, piece * place, place)

    measure.is_baseline("a fault for each page")
    measure("map and write a region", _turn(window.handle, one), per=PIECES, rounds=ROUNDS, warmup_rounds=2)


def test_populated(measure: Measure) -> None:
    """All pages by a second call."""
    device = HostDriver()
    memory, window = device.create_memory(TOTAL_BYTES, "remapping", PIECE_BYTES), device.reserve(TOTAL_BYTES)
    record = np.zeros(1, DEVICE)
    device.fill_device(record[0], memory)

    def one(piece: int, at: int) -> None:
        address = window.handle + at * PIECE_BYTES
        assert mapping.map_piece(record[0], address, piece, 1)
        assert mapping.open_pieces(record[0], address, 1)
        mapping.map_pages(record[0], address)

    measure.figures["name"] = "all pages by one call"
    measure("map and write a region", _turn(window.handle, one), per=PIECES, rounds=ROUNDS, warmup_rounds=2)


def _turn(address: int, one: Callable[[int, int], None]) -> Callable[[], None]:
    """Return what maps each piece where another one was and writes to it."""
    shift = itertools.count()

    def turn() -> None:
        by = next(shift)
        for at in range(PIECES):
            one((at + by) % PIECES, at)
            ctypes.memset(address + at * PIECE_BYTES, by & 255, PIECE_BYTES)

    return turn
