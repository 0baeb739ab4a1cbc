"""What a heap on the host device does in a pool that isolates jobs, called by address where every heap comes by.

So the functions of other pools do not contain it. Scrubbing is a hole in the region's physical memory: one call
whatever was touched, nothing becomes resident by it, and what is read there are the kernel's zeros.

Guarantees (numbers as in docs/design/invariants.md)
    11. A region is mapped only while it is this job's, and what another job has left there is gone before it is mapped.
    A region that comes back to the job that had it last is not scrubbed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.compiled import callback, compiled, keep_out_of_line, record_at
from zico.driver.mapping import DEVICE, discard_piece, unmap_piece
from zico.heap.backing import address_of, map_slots
from zico.heap.layout import HEAP
from zico.heap.records import pool_of, slots_of, wanted_of
from zico.pool import regions
from zico.pool.fences import NO_FENCE
from zico.pool.layout import NOBODY
from zico.pool.regions import GRANTED, NEVER

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord

_I64 = types.int64


@compiled
def _scrub(heap: HeapRecord, first: int, last: int) -> bool:
    """Scrub what others have used of the regions for the empty slots of a run, none of which is mapped yet."""
    keep_out_of_line()
    slots = slots_of(heap)
    pool = pool_of(heap)
    i = 0
    for slot in range(first, last + 1):
        if slots[slot].live != 0:
            continue
        region: int = np.int64(wanted_of(heap)[i])  # type: ignore[assignment]  # bytes need 64 bits
        i += 1
        slots[slot].region = region
        if regions.has_others_bytes(pool, region):
            if not discard_piece(record_at(heap.backing.device_address, DEVICE), region):
                return False
            regions.note_scrubbed(pool, region)
            heap.scrubbing.scrubs += 1
    return True


@compiled
def _part(heap: HeapRecord, first: int, last: int) -> None:
    """Unmap the empty slots of a run and return their regions; one that the kernel does not unmap stays the job's."""
    keep_out_of_line()
    slots = slots_of(heap)
    given = wanted_of(heap)
    n = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0 and slots[slot].region >= 0:  # else it was evicted
            there = slots[slot].mapped != NOBODY
            if not there or unmap_piece(record_at(heap.backing.device_address, DEVICE), address_of(heap, slot)):
                slots[slot].mapped = NOBODY
                given[n] = slots[slot].region
                n += 1
    if n > 0:
        regions.give_back(pool_of(heap), given, n, NO_FENCE)


@callback(_I64(_I64, _I64, _I64, _I64, _I64))
def ready(heap_address: int, first: int, last: int, n: int, _status: int) -> int:
    """Scrub and map the ``n`` regions that were granted for a run of slots.

    Returns:
        ``GRANTED``; ``NEVER``: the kernel has refused, and the regions are back in the pool.
    """
    heap = record_at(heap_address, HEAP)
    if not _scrub(heap, first, last):
        regions.give_back_unused(pool_of(heap), wanted_of(heap), n)
        return NEVER
    if not map_slots(heap, first, last):
        _part(heap, first, last)
        return NEVER
    return GRANTED


@callback(types.void(_I64, _I64, _I64, _I64))
def release(heap_address: int, first: int, last: int, _n: int) -> None:
    """Unmap the empty slots of a run, and only then return their regions."""
    _part(record_at(heap_address, HEAP), first, last)
