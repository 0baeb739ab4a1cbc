"""Free address ranges of an arena: sorted arrays, lowest address first.

Training allocates like a stack, so gaps are few (tens) and a sorted array beats trees: a search is one pass over a
cache line or two, and the lowest address that fits keeps the top of the arena empty, where whole regions come free.

    gaps     [0 .. 4)        [9 .. 10)      [15 .. end)
    find(2) -> 0             find(6) -> 15, unless an earlier gap lies in regions that are held anyway
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.compiled import array_at, compiled, inlined
from zico.heap.layout import MAX_GAPS, SLOT

_I64 = np.dtype("i8")
NOTHING = -1

Record = Any


@inlined
def _starts(arena: Record) -> Any:  # noqa: ANN401 - an int64 array
    return array_at(arena.starts, MAX_GAPS, _I64)


@inlined
def _sizes(arena: Record) -> Any:  # noqa: ANN401 - an int64 array
    return array_at(arena.sizes, MAX_GAPS, _I64)


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


@compiled
def find(arena: Record, slots_address: int, region_shift: int, size_bytes: int, alignment: int) -> int:
    """Return the gap in which the range needs the fewest new regions, the lowest of these; or ``NOTHING``."""
    starts = _starts(arena)
    sizes = _sizes(arena)
    best = NOTHING
    fewest = 1 << 60
    for i in range(arena.n_gaps):
        start = align_up(starts[i], alignment)
        if start + size_bytes <= starts[i] + sizes[i]:
            new = empty_slots(slots_address, region_shift, start, size_bytes)
            if new < fewest:
                best = i
                fewest = new
                if new == 0:
                    break
    return best


@compiled
def take(arena: Record, index: int, size_bytes: int, alignment: int) -> int:
    """Cut a range out of a gap; returns its offset. The caller has checked that it fits."""
    starts = _starts(arena)
    sizes = _sizes(arena)
    start = align_up(starts[index], alignment)
    before = start - starts[index]
    after = sizes[index] - before - size_bytes
    if before > 0 and after > 0:
        _insert(arena, index + 1, start + size_bytes, after)
        sizes[index] = before
    elif before > 0:
        sizes[index] = before
    elif after > 0:
        starts[index] = start + size_bytes
        sizes[index] = after
    else:
        _remove(arena, index)
    return start


@compiled
def give(arena: Record, start: int, size_bytes: int) -> None:
    """Return a range, merging it with the gaps on either side."""
    starts = _starts(arena)
    sizes = _sizes(arena)
    index = _first_after(arena, start)
    joins_before = index > 0 and starts[index - 1] + sizes[index - 1] == start
    joins_after = index < arena.n_gaps and start + size_bytes == starts[index]
    if joins_before and joins_after:
        sizes[index - 1] += size_bytes + sizes[index]
        _remove(arena, index)
    elif joins_before:
        sizes[index - 1] += size_bytes
    elif joins_after:
        starts[index] = start
        sizes[index] += size_bytes
    else:
        _insert(arena, index, start, size_bytes)


@inlined
def is_full(arena: Record) -> bool:
    """Tell whether one more cut might not find room for the gaps that it leaves."""
    return arena.n_gaps >= MAX_GAPS // 2


@inlined
def _first_after(arena: Record, offset: int) -> int:
    starts = _starts(arena)
    low = 0
    high = arena.n_gaps
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < offset:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _insert(arena: Record, index: int, start: int, size_bytes: int) -> None:
    starts = _starts(arena)
    sizes = _sizes(arena)
    for i in range(arena.n_gaps, index, -1):
        starts[i] = starts[i - 1]
        sizes[i] = sizes[i - 1]
    starts[index] = start
    sizes[index] = size_bytes
    arena.n_gaps += 1


@compiled
def _remove(arena: Record, index: int) -> None:
    starts = _starts(arena)
    sizes = _sizes(arena)
    for i in range(index, arena.n_gaps - 1):
        starts[i] = starts[i + 1]
        sizes[i] = sizes[i + 1]
    arena.n_gaps -= 1
