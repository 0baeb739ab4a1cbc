"""Where in the window a block goes: its place in the plan, or the lowest range that needs the fewest new regions.

A block is what lies in an arena: a tensor, or a chunk of small ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, inlined, keep_out_of_line, keep_small
from zico.heap import backing, free_list, history
from zico.heap.layout import EXTRA, LONG, SHORT, SPILL, STATE, arena_at, arena_of, block_at, slots_of
from zico.pool.layout import NOBODY
from zico.pool.results import GRANTED, NEVER_FITS, NOT_SERVED, NOTHING

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

_ANY = 1 << 40  # regions: more than any window has


@compiled
def place(heap: HeapRecord, index: int, planned: int, size_bytes: int, alignment: int) -> int:
    """Find a range and get it its regions; nothing is changed unless both succeed. Inside the heap's mutex.

    Args:
        heap: The HEAP record.
        index: The arena, where the plan has no place or that is taken.
        planned: Offset of that place, or ``history.NO_PLACE``.
        size_bytes: Rounded up to the least alignment.
        alignment: A power of two.

    Returns:
        An offset, ``MUST_WAIT``, ``NEVER_FITS`` or ``NOT_SERVED``.
    """
    keep_small()
    there = NOTHING
    if planned != history.NO_PLACE and planned & (alignment - 1) == 0:
        there = free_list.around(arena_of(heap, LONG), planned, size_bytes)
        if there != NOTHING and (index != SHORT or _is_backed(heap, planned, size_bytes)):
            return _take(heap, LONG, there, planned, size_bytes)
    if heap.plan_address != 0 and index == LONG:
        index = EXTRA
    if index == SHORT or (heap.plan_address != 0 and index < STATE):
        # A temporary goes into any hole with room: it pins nothing for long, and needs no
        # region of its own. So does what the plan does not know. But nothing goes where a plan
        # is followed: it would stand in the way.
        for host in (SHORT, EXTRA, LONG):
            if not _is_open(heap, host):
                continue
            gap = free_list.find(arena_of(heap, host), heap.slots_address, heap.region_shift, size_bytes, alignment, 0)
            if gap != NOTHING:
                return _take(heap, host, gap, _start(heap, host, gap, alignment), size_bytes)
    if there != NOTHING:
        return _take(heap, LONG, there, planned, size_bytes)
    gap = free_list.find(arena_of(heap, index), heap.slots_address, heap.region_shift, size_bytes, alignment, _ANY)
    if gap == NOTHING:
        return NOT_SERVED if heap.managed_address == 0 or index >= SPILL else _elsewhere(heap, size_bytes, alignment)
    return _take(heap, index, gap, _start(heap, index, gap, alignment), size_bytes)


@inlined
def _is_open(heap: HeapRecord, host: int) -> bool:
    """Tell whether an arena may have what it has a hole for."""
    if host == LONG and heap.plan_address != 0:
        return False
    return bool(host == SHORT or heap.paged.apart == 0) and not free_list.is_full(arena_of(heap, host))


@compiled
def _elsewhere(heap: HeapRecord, size_bytes: int, alignment: int) -> int:
    """Find a range in any arena of the first stream, where addresses are short: else as ``place``."""
    keep_out_of_line()
    for host in (LONG, EXTRA, SHORT):
        gap = free_list.find(arena_of(heap, host), heap.slots_address, heap.region_shift, size_bytes, alignment, _ANY)
        if gap != NOTHING:
            return _take(heap, host, gap, _start(heap, host, gap, alignment), size_bytes)
    return NEVER_FITS


@compiled
def in_hole(heap: HeapRecord, size_bytes: int, alignment: int) -> int:
    """Find a range in regions that the job holds anyway, in any arena of the first stream; ``NEVER_FITS``: none.

    For who may hold no more regions: a worse place for this tensor, and for some that come later,
    is better than a wait. LONG is the last, since a plan may want the place.
    """
    keep_out_of_line()
    for host in (SHORT, EXTRA, LONG):
        arena = arena_of(heap, host)
        if free_list.is_full(arena):
            continue
        gap = free_list.find(arena, heap.slots_address, heap.region_shift, size_bytes, alignment, 0)
        if gap != NOTHING:
            return _take(heap, host, gap, _start(heap, host, gap, alignment), size_bytes)
    return NEVER_FITS


@inlined
def _start(heap: HeapRecord, index: int, gap: int, alignment: int) -> int:
    return free_list.align_up(free_list.gaps_of(arena_of(heap, index))[gap].start, alignment)


@compiled
def _take(heap: HeapRecord, index: int, gap: int, offset: int, size_bytes: int) -> int:
    """Take a range in a gap, with regions behind it; returns its offset, or why it cannot be had."""
    keep_small()
    arena = arena_of(heap, index)
    if free_list.is_full(arena):
        return NOT_SERVED
    status = backing.back(heap, index, offset, size_bytes)
    return free_list.take(arena, gap, offset, size_bytes) if status == GRANTED else status


@inlined
def _is_backed(heap: HeapRecord, offset: int, size_bytes: int) -> bool:
    return free_list.empty_slots(heap.slots_address, heap.region_shift, offset, size_bytes) == 0


# -- blocks ----------------------------------------------------------------------------------------


@inlined
def enter(heap: HeapRecord, offset: int, size_bytes: int, iteration: int, entry: int, lifetime: int) -> None:
    """Enter a block, now that its place is certain.

    Args:
        heap: The HEAP record.
        offset: Where it begins.
        size_bytes: Of the range.
        iteration: The job's iteration.
        entry: Of its class, ``NOBODY``: it has none.
        lifetime: In the log of the iteration, or ``NOBODY``.
    """
    block = block_at(heap, offset)
    block.size_bytes = size_bytes
    block.start = offset
    block.birth = heap.events
    block.iteration = iteration
    block.key = entry
    block.lifetime = lifetime
    slots = slots_of(heap)
    for slot in range(offset >> heap.region_shift, ((offset + size_bytes - 1) >> heap.region_shift) + 1):
        slots[slot].live += 1


@inlined
def is_block(heap: HeapRecord, offset: int) -> bool:
    """Tell whether a block begins at an offset of the window."""
    block = block_at(heap, offset)
    return block.size_bytes != 0 and block.start == offset


@inlined
def end(heap: HeapRecord, me: Job, offset: int) -> None:
    """Learn from the life of a tensor that ends now."""
    block = block_at(heap, offset)
    iterations_ago = me.iteration - block.iteration
    if block.key != NOBODY:
        history.learn(heap, me, block.key, heap.events - block.birth, iterations_ago == 0)
    history.log_death(heap, block.lifetime, iterations_ago)


@inlined
def give(heap: HeapRecord, offset: int) -> None:
    """Return a block's range to its arena, and regions that became empty to the pool."""
    block = block_at(heap, offset)
    size_bytes = block.size_bytes
    block.size_bytes = 0
    free_list.give(arena_of(heap, arena_at(heap, offset)), offset, size_bytes)
    backing.leave(heap, offset, size_bytes)
