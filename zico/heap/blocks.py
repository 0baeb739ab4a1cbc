"""Blocks: what lies in an arena, a tensor or a chunk of small ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import inlined
from zico.heap import backing, classes, following, gaps
from zico.heap.records import arena_at, arena_of, block_at, slots_of
from zico.pool.layout import NOBODY

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job


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
        classes.learn(heap, me, block.key, heap.events - block.birth, iterations_ago == 0)
    following.log_death(heap, block.lifetime, iterations_ago)


@inlined
def give(heap: HeapRecord, offset: int) -> None:
    """Return a block's range to its arena, and regions that became empty to the pool."""
    block = block_at(heap, offset)
    size_bytes = block.size_bytes
    block.size_bytes = 0
    gaps.give(arena_of(heap, arena_at(heap, offset)), offset, size_bytes)
    backing.leave(heap, offset, size_bytes)
