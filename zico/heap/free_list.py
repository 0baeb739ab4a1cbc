"""Free address ranges of an arena: sorted arrays, lowest address first.

Training allocates like a stack, so gaps are few (tens) and a sorted array beats trees. A search is
one pass over a cache line or two. The lowest address that fits keeps the top of the arena empty,
where whole regions come free.

    gaps     [0 .. 4)        [9 .. 10)      [15 .. end)
    find(2) -> 0             find(6) -> 15, unless an earlier gap lies in regions that are held anyway
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import array_at, compiled, inlined, keep_out_of_line, keep_small
from zico.heap.layout import GAP, MAX_GAPS, SLOT
from zico.paging.page_table import State
from zico.pool.results import NOTHING

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.heap.layout import ArenaRecord, Gap


_I4 = np.dtype("i4")
_WRITTEN, _CLEAN = int(State.WRITTEN), int(State.CLEAN)


@inlined
def gaps_of(arena: ArenaRecord) -> Records[Gap]:
    """Return the arena's gaps; those behind ``n_gaps`` mean nothing."""
    return array_at(arena.gaps_address, MAX_GAPS, GAP)


@inlined
def align_up(offset: int, alignment: int) -> int:
    """Return the next multiple of a power of two."""
    return (offset + alignment - 1) & ~(alignment - 1)


@inlined
def empty_slots(slots_address: int, region_shift: int, start: int, size_bytes: int) -> int:
    """Count the slots under a range that no block touches, hence the regions that it would need."""
    first = start >> region_shift
    last = (start + size_bytes - 1) >> region_shift
    slots = array_at(slots_address, last + 1, SLOT)
    count = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0:
            count += 1
    return count


@inlined
def slots_with_pages(arena: ArenaRecord, slots_address: int, region_shift: int, start: int, size_bytes: int) -> int:
    """Count the slots of a paged job under a range that no tensor touches, and whose pages are there all the same.

    The first block of a slot speaks for it.
    """
    first = start >> region_shift
    last = (start + size_bytes - 1) >> region_shift
    slots = array_at(slots_address, last + 1, SLOT)
    states = array_at(arena.states_address, (last + 1) << arena.blocks_shift, _I4)
    count = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0 and states[slot << arena.blocks_shift] in (_WRITTEN, _CLEAN):
            count += 1
    return count


@compiled
def find(
    arena: ArenaRecord, slots_address: int, region_shift: int, size_bytes: int, alignment: int, most_new: int
) -> int:
    """Return the gap in which the range needs the fewest new regions, the lowest of these.

    A slot of a paged job whose pages are still there needs none. ``NOTHING`` if every gap is too
    small or needs more than ``most_new``.
    """
    keep_small()
    gaps = gaps_of(arena)
    best = NOTHING
    fewest = most_new + 1
    for i in range(arena.n_gaps):
        start = align_up(gaps[i].start, alignment)
        if start + size_bytes <= gaps[i].start + gaps[i].size_bytes:
            new = empty_slots(slots_address, region_shift, start, size_bytes)
            if new > 0 and arena.states_address != 0:
                new -= slots_with_pages(arena, slots_address, region_shift, start, size_bytes)
            if new < fewest:
                best = i
                fewest = new
                if new == 0:
                    break
    return best


@inlined
def around(arena: ArenaRecord, start: int, size_bytes: int) -> int:
    """Return the gap that contains a range, or ``NOTHING``."""
    gaps = gaps_of(arena)
    index = _first_after(arena, start + 1) - 1
    if index >= 0 and start + size_bytes <= gaps[index].start + gaps[index].size_bytes:
        return index
    return NOTHING


@compiled
def take(arena: ArenaRecord, index: int, start: int, size_bytes: int) -> int:
    """Cut a range out of a gap; returns its offset. The caller has checked that it lies within."""
    keep_small()
    gaps = gaps_of(arena)
    before = start - gaps[index].start
    after = gaps[index].size_bytes - before - size_bytes
    if before > 0 and after > 0:
        _insert(arena, index + 1, start + size_bytes, after)
        gaps[index].size_bytes = before
    elif before > 0:
        gaps[index].size_bytes = before
    elif after > 0:
        gaps[index].start = start + size_bytes
        gaps[index].size_bytes = after
    else:
        _remove(arena, index)
    return start


@compiled
def give(arena: ArenaRecord, start: int, size_bytes: int) -> None:
    """Return a range, merging it with the gaps on either side."""
    keep_small()
    gaps = gaps_of(arena)
    index = _first_after(arena, start)
    joins_before = index > 0 and gaps[index - 1].start + gaps[index - 1].size_bytes == start
    joins_after = index < arena.n_gaps and start + size_bytes == gaps[index].start
    if joins_before and joins_after:
        gaps[index - 1].size_bytes += size_bytes + gaps[index].size_bytes
        _remove(arena, index)
    elif joins_before:
        gaps[index - 1].size_bytes += size_bytes
    elif joins_after:
        gaps[index].start = start
        gaps[index].size_bytes += size_bytes
    elif arena.n_gaps < MAX_GAPS:
        _insert(arena, index, start, size_bytes)
    # Else the addresses are lost, of which a window has plenty; the memory behind them is not.


@inlined
def is_full(arena: ArenaRecord) -> bool:
    """Tell whether one more cut might not find room for the gaps that it leaves."""
    return arena.n_gaps >= MAX_GAPS // 2


@inlined
def _first_after(arena: ArenaRecord, offset: int) -> int:
    gaps = gaps_of(arena)
    low = 0
    high = arena.n_gaps
    while low < high:
        middle = (low + high) // 2
        if gaps[middle].start < offset:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _insert(arena: ArenaRecord, index: int, start: int, size_bytes: int) -> None:
    keep_out_of_line()
    gaps = gaps_of(arena)
    for i in range(arena.n_gaps, index, -1):
        gaps[i].start = gaps[i - 1].start
        gaps[i].size_bytes = gaps[i - 1].size_bytes
    gaps[index].start = start
    gaps[index].size_bytes = size_bytes
    arena.n_gaps += 1


@compiled
def _remove(arena: ArenaRecord, index: int) -> None:
    keep_out_of_line()
    gaps = gaps_of(arena)
    for i in range(index, arena.n_gaps - 1):
        gaps[i].start = gaps[i + 1].start
        gaps[i].size_bytes = gaps[i + 1].size_bytes
    arena.n_gaps -= 1
