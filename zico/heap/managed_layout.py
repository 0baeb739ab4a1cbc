"""What a heap needs whose window is managed memory: its record, and how the window is cut up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.driver.record import MOVER
from zico.errors import ConfigError
from zico.paging.layout import BLOCK_BYTES, DEEPUM, RENEW, SHORTER, Sizes, lay_out
from zico.units import format_bytes

if TYPE_CHECKING:
    from zico.driver.cuda.managed import Managed
    from zico.heap.build import Heap

SIDE_STREAMS = 3
"""Streams that have an arena of their own, besides the first: addresses are as short as memory here."""
SLOT_BYTES = BLOCK_BYTES
FLAGS = DEEPUM | RENEW | SHORTER
"""Parts of ``zico.paging`` that are on. All touches are learned, so that the first one of an execution is its start
(``APPEND`` is off); what is clean or lost is not known (``CLEAN`` and ``TUNE`` are off)."""

_SHARES = (12, 18, 2, 4)
"""Of the window, in 48ths: the first stream's arenas in the order of ``Arena``. One that is full takes from others."""
_SIDE_SHARE = 4
_WHOLE = 48

MANAGED = np.dtype(
    [
        ("mover", MOVER),
        ("paging_address", "i8"),  # PAGING record of the tables
        ("touched_address", "i8"),  # the iteration of each block's last touch + 1, an i8 each
        ("held_address", "i8"),  # regions held, by number, an i4 each
        ("n_held", "i8"),
        ("n_regions", "i8"),  # of the pool
        ("blocks_shift", "i8"),  # log2 of the blocks in a region
        ("iteration", "i8"),  # the job's, when a tensor was allocated last
        ("live", "i8"),  # blocks in which something lives
        ("n_silent", "i8"),  # blocks that live and were not touched in the last iteration: they go last
        ("busy", "i8"),  # a bit for each stream slot that was given work since our stream last waited
        ("first_out", "i8"),  # blocks that have counted as gone, and are to be ordered out
        ("n_out", "i8"),
        ("first_in", "i8"),  # and in, afterwards
        ("n_in", "i8"),
        # Counted in blocks, ever.
        ("touches", "i8"),
        ("missed", "i8"),  # of those, of blocks with something in them that were out
        ("prefetched", "i8"),
        ("peak", "i8"),  # most that were resident by our count
    ],
    align=True,
)
"""One job's steering. All of it inside the heap's mutex."""
MOVER_OFFSET = MANAGED.fields["mover"][1]  # type: ignore[index]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A window that is cut up, in bytes."""

    ranges: list[tuple[int, int]]
    """Start and size of each arena in the order of ``Arena``, then of the further streams'."""
    side_offset: int
    """Where the further streams' begin."""
    side_bytes: int
    """The size of one of them."""
    end: int


def cut(window_bytes: int) -> Cut:
    """Cut a window into arenas.

    Raises:
        ConfigError: It is too small.
    """
    unit = window_bytes // SLOT_BYTES // _WHOLE * SLOT_BYTES
    if unit == 0:
        least = format_bytes(_WHOLE * SLOT_BYTES)
        message = (
            f"{format_bytes(window_bytes)} of managed memory are too few: ZICO_PAGED_BYTES must be {least} or more"
        )
        raise ConfigError(message)
    ranges, start = [], 0
    for share in _SHARES:
        ranges.append((start, share * unit))
        start += share * unit
    side_bytes = _SIDE_SHARE * unit
    end = start + SIDE_STREAMS * side_bytes
    ranges += [(end, 0), *((at, side_bytes) for at in range(start, end, side_bytes))]
    return Cut(ranges, start, side_bytes, end)


def fill(heap: Heap, memory: Managed) -> None:
    """Let the heap steer what is resident of its window; the device's other functions are in place already.

    Raises:
        DriverError: The driver cannot be told to move memory.
    """
    from zico.heap import managed  # compiled or loaded by this, so only where it is needed

    n_blocks = len(heap.slots)
    n_regions = int(heap.pool.header["n_regions"])
    sizes = Sizes(blocks=n_blocks)
    tables = heap.zeros(np.dtype("u1"), sizes.total_bytes)
    lay_out(tables, sizes, FLAGS)
    heap.steering = heap.zeros(MANAGED, 1)
    record = heap.steering[0]
    memory.fill(record["mover"], heap.pool.memory)
    record["paging_address"] = tables.ctypes.data
    record["touched_address"] = heap.zeros(np.dtype("i8"), n_blocks).ctypes.data
    record["held_address"] = heap.zeros(np.dtype("i4"), n_regions).ctypes.data
    record["n_regions"] = n_regions
    record["blocks_shift"] = (heap.pool.region_bytes // SLOT_BYTES).bit_length() - 1
    target = heap.record[0]
    window = format_bytes(int(target["window_bytes"]))
    heap.no_next_tier = f"its window of managed memory has {window}: raise ZICO_PAGED_BYTES"
    target["managed_address"] = heap.steering.ctypes.data
    target["scrub_address"] = 0  # what is in managed memory was never another process's
    for name in ("back", "born", "used", "release", "bring_up"):
        target[f"{name}_address"] = getattr(managed, name).address
