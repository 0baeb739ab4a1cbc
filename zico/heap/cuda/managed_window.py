"""Managed memory that becomes a job's window: how much of it, how it is cut up, and what the heap needs with it."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, cast

import numpy as np

from zico.base.errors import ConfigError, DriverError
from zico.base.units import format_bytes, parse_size
from zico.device.cuda.bindings import OUT_OF_MEMORY
from zico.device.cuda.managed import allocate
from zico.heap.cuda.managed import MANAGED
from zico.heap.layout import Arena
from zico.paging.layout import BLOCK_BYTES, DEEPUM, FURTHEST, SHORTER, Sizes, lay_out
from zico.pool.layout import JobState

if TYPE_CHECKING:
    from zico.device.cuda.driver import CudaDriver
    from zico.device.cuda.managed import Managed
    from zico.heap.build import Heap
    from zico.pool.table import PoolTable

VARIABLE = "ZICO_PAGED_BYTES"
"""The user says here how large the window is: all that the job will ever need at once. A percentage
is of what is free."""
_SPARE_SHARE = 8
"""By default an eighth of what is free is left to what comes besides tensors: contexts, workspaces, modules."""


SIDE_STREAMS = 3
"""So many streams have an arena of their own, besides the first: addresses are as short as memory here."""
SLOT_BYTES = BLOCK_BYTES
FLAGS = DEEPUM | SHORTER | FURTHEST
"""These parts of ``zico.paging.layout`` are on. All touches are learned, so that the first one of
an execution is its start (``APPEND`` is off). What is clean or lost is not known (``CLEAN`` and
``TUNE`` are off)."""

_SHARES = (16, 18, 2, 0)
"""The first stream's arenas have so many 48ths of the window each, in the order of ``Arena``. One
that is full takes from others. No optimizer state leaves. What is no 48th is ``Arena.LONG``'s,
too."""
_SIDE_SHARE = 4
_WHOLE = 48


def open_window(pool: PoolTable, job: int, text: str) -> Managed:
    """Allocate the window of a job on a GPU, so that all such windows together fit into what the device has free.

    The job's record says how large it is, so that of two jobs that begin at once each sees the
    other.

    Args:
        pool: The pool, on a CUDA device.
        job: The job's place.
        text: A size, or nothing.

    Raises:
        ConfigError: The text is no size.
        DriverError: The device cannot, or has less free; nothing is left behind.
    """
    driver = cast("CudaDriver", pool.driver)
    free_bytes = max((driver.free_bytes() or 0) - _promised(pool, job), 0)
    whole_bytes = free_bytes if "%" in text else sys.maxsize  # a size that is too large is refused below
    wanted = parse_size(text, whole_bytes=whole_bytes) if text else free_bytes - free_bytes // _SPARE_SHARE
    record = pool.jobs[job]
    record["managed_bytes"] = wanted
    try:
        _refuse_beyond(driver, wanted, _promised(pool, job))
        return allocate(driver, wanted)
    except DriverError:
        record["managed_bytes"] = 0
        raise


def _refuse_beyond(driver: CudaDriver, wanted: int, promised: int) -> None:
    """Refuse a window that does not fit beside other jobs' into what is free; what of those is resident counts twice.

    Raises:
        DriverError: It does not.
    """
    free_bytes = driver.free_bytes() or 0
    if wanted + promised > free_bytes:
        detail = (
            f"{format_bytes(wanted)} are asked for, {driver.name} has {format_bytes(free_bytes)} free, and other jobs' "
            f"windows may take {format_bytes(promised)} of it: more could hang the GPU, and no GPU has run it yet; "
            f"lower {VARIABLE} or --budget"
        )
        raise DriverError("allocation of managed memory", OUT_OF_MEMORY, detail)


def _promised(pool: PoolTable, job: int) -> int:
    """Return the bytes of the windows of other jobs, whether they are resident, and so not free any more, or not."""
    jobs = pool.jobs[: int(pool.header["places"])]
    others = [one for place, one in enumerate(jobs) if place != job and one["state"] != JobState.EMPTY]
    return sum(int(one["managed_bytes"]) for one in others)


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
    rest = window_bytes // SLOT_BYTES * SLOT_BYTES - _WHOLE * unit
    ranges, start = [], 0
    for arena, share in enumerate(_SHARES):
        size_bytes = share * unit + (rest if arena == Arena.LONG else 0)
        ranges.append((start, size_bytes))
        start += size_bytes
    side_bytes = _SIDE_SHARE * unit
    end = start + SIDE_STREAMS * side_bytes
    ranges += [(end, 0), *((at, side_bytes) for at in range(start, end, side_bytes))]
    return Cut(ranges, start, side_bytes, end)


def fill(heap: Heap, memory: Managed) -> None:
    """Let the heap steer what is resident of its window; the device's other functions are in place already.

    Raises:
        DriverError: The driver cannot be told to move memory.
    """
    from zico.heap.cuda import managed  # compiled or loaded by this, so only where it is needed

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
    target["scrubbing"]["address"] = 0  # what is in managed memory was never another process's
    heap.back_with(
        back=managed.back, born=managed.born, used=managed.used, release=managed.release, bring_up=managed.bring_up
    )
