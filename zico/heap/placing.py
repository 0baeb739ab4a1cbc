"""Where in the window a tensor goes: its place in the plan, or the lowest range that needs the fewest new regions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled, inlined, keep_out_of_line, keep_small
from zico.heap import backing, following, gaps
from zico.heap.records import EXTRA, LONG, PERSISTENT, RESTING, SHORT, SPILL, arena_of
from zico.pool.regions import GONE, GRANTED, WAIT

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord

MUST_WAIT = -1
NEVER_FITS = -2
NO_SPACE = -3

_ANY = 1 << 40  # regions: more than any window has


@compiled
def place(heap: HeapRecord, index: int, planned: int, size_bytes: int, alignment: int) -> int:
    """Find a range and get it its regions; nothing is changed unless both succeed. Inside the heap's mutex.

    Args:
        heap: The HEAP record.
        index: The arena, where the plan has no place or that is taken.
        planned: Offset of that place, or ``following.NO_PLACE``.
        size_bytes: Rounded up to the least alignment.
        alignment: A power of two.
    """
    keep_small()
    there = gaps.NOTHING
    if planned != following.NO_PLACE and planned & (alignment - 1) == 0:
        there = gaps.around(arena_of(heap, LONG), planned, size_bytes)
        if there != gaps.NOTHING and (index != SHORT or _is_backed(heap, planned, size_bytes)):
            return _take(heap, LONG, there, planned, size_bytes)
    if heap.plan_address != 0 and index == LONG:
        index = EXTRA
    if index == SHORT or (heap.plan_address != 0 and index < RESTING):
        # A temporary is a guest wherever there is room: it pins nothing for long, and needs no region of its own. So
        # is what the plan does not know. But nothing is a guest where a plan is followed: it would stand in the way.
        for host in (SHORT, EXTRA, LONG, PERSISTENT):
            if (host == LONG and heap.plan_address != 0) or gaps.is_full(arena_of(heap, host)):
                continue
            gap = gaps.find(arena_of(heap, host), heap.slots_address, heap.region_shift, size_bytes, alignment, 0)
            if gap != gaps.NOTHING:
                return _take(heap, host, gap, _start(heap, host, gap, alignment), size_bytes)
    if there != gaps.NOTHING:
        return _take(heap, LONG, there, planned, size_bytes)
    gap = gaps.find(arena_of(heap, index), heap.slots_address, heap.region_shift, size_bytes, alignment, _ANY)
    if gap == gaps.NOTHING:
        return NO_SPACE if heap.managed_address == 0 or index >= SPILL else _elsewhere(heap, size_bytes, alignment)
    return _take(heap, index, gap, _start(heap, index, gap, alignment), size_bytes)


@compiled
def _elsewhere(heap: HeapRecord, size_bytes: int, alignment: int) -> int:
    """Find a range in any arena of the first stream, where addresses are short: else as ``place``."""
    keep_out_of_line()
    for host in (LONG, PERSISTENT, EXTRA, SHORT):
        gap = gaps.find(arena_of(heap, host), heap.slots_address, heap.region_shift, size_bytes, alignment, _ANY)
        if gap != gaps.NOTHING:
            return _take(heap, host, gap, _start(heap, host, gap, alignment), size_bytes)
    return NEVER_FITS


@compiled
def as_guest(heap: HeapRecord, size_bytes: int, alignment: int) -> int:
    """Find a range in regions that the job holds anyway, in any arena of the first stream; ``NEVER_FITS``: none.

    For who may hold no more regions: a worse place for this tensor, and for some that come later, is better than a
    wait. LONG is the last, since a plan may want the place.
    """
    keep_out_of_line()
    for host in (SHORT, EXTRA, PERSISTENT, LONG):
        arena = arena_of(heap, host)
        if gaps.is_full(arena):
            continue
        gap = gaps.find(arena, heap.slots_address, heap.region_shift, size_bytes, alignment, 0)
        if gap != gaps.NOTHING:
            return _take(heap, host, gap, _start(heap, host, gap, alignment), size_bytes)
    return NEVER_FITS


@inlined
def _start(heap: HeapRecord, index: int, gap: int, alignment: int) -> int:
    return gaps.align_up(gaps.gaps_of(arena_of(heap, index))[gap].start, alignment)


@compiled
def _take(heap: HeapRecord, index: int, gap: int, offset: int, size_bytes: int) -> int:
    """Take a range in a gap, with regions behind it; returns its offset, or why it cannot be had."""
    keep_small()
    arena = arena_of(heap, index)
    if gaps.is_full(arena):
        return NO_SPACE
    status = backing.back(heap, index, offset, size_bytes)
    if status == GRANTED:
        return gaps.take(arena, gap, offset, size_bytes)
    if status == WAIT:
        return MUST_WAIT
    return NO_SPACE if status == GONE else NEVER_FITS


@inlined
def _is_backed(heap: HeapRecord, offset: int, size_bytes: int) -> bool:
    """Tell whether a range needs no new region."""
    return gaps.empty_slots(heap.slots_address, heap.region_shift, offset, size_bytes) == 0
