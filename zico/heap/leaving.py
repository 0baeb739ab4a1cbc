"""Slots whose mappings must go, on a device that works behind the processor's back, in a pool that isolates jobs.

A mapping must not go before the device has done this job's work on it, and nobody is to wait for that. So an empty slot
is put in a list, which is looked at on later calls: some of it at every grant and release, all of it before the job may
stand still. A slot that is used again before stays mapped, if it gets the same region.

Guarantees
    A slot that is mapped and has no region is in the list. No mapping goes before its guard has passed.

Known limitations
    A job that makes no more calls keeps the mappings that its device had not finished with at its last one. Until they
    go, what it still launches on memory that it has given back may reach another job's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, compiled, inlined, keep_out_of_line, record_at
from zico.driver.mapping import DEVICE, unmap_piece
from zico.heap.backing import address_of
from zico.heap.layout import GUARD
from zico.heap.records import pool_of, slots_of
from zico.pool.fences import has_passed
from zico.pool.layout import NOBODY

if TYPE_CHECKING:
    from zico.heap.layout import Guard, HeapRecord
    from zico.records import Records

FEW = 4
"""How many slots in the list a grant or release looks at, besides as many as it may add."""

_I32 = np.dtype("i4")

Array = Any


@inlined
def guards_of(heap: HeapRecord) -> Records[Guard]:
    """Return what guards the slots' mappings."""
    return array_at(heap.streams.guards_address, heap.window_bytes >> heap.region_shift, GUARD)


@compiled
def stay(heap: HeapRecord, first: int, last: int) -> None:
    """Keep the mappings of the empty slots of a run: they are going to be used."""
    keep_out_of_line()
    for slot in range(first, last + 1):
        if slots_of(heap)[slot].live == 0:
            guards_of(heap)[slot].leaves = 0


@compiled
def part(heap: HeapRecord, first: int, last: int) -> None:
    """Let the mappings of the empty slots of a run go when the device has finished with them."""
    keep_out_of_line()
    slots = slots_of(heap)
    for slot in range(first, last + 1):
        if slots[slot].live != 0 or slots[slot].mapped == NOBODY:
            continue
        guard = guards_of(heap)[slot]
        guard.leaves = 1
        if guard.listed == 0:
            guard.listed = 1
            _list(heap)[heap.scrubbing.n_leaving] = slot
            heap.scrubbing.n_leaving += 1


@inlined
def _list(heap: HeapRecord) -> Array:
    return array_at(heap.scrubbing.leaving_address, heap.window_bytes >> heap.region_shift, _I32)


@compiled
def tend(heap: HeapRecord, most: int) -> None:
    """Look at slots in the list, at most so many, and unmap those that the device has finished with."""
    keep_out_of_line()
    if most >= heap.scrubbing.n_leaving:
        heap.scrubbing.leaving_next = 0  # from there on what takes another's place has not been looked at
    for _ in range(min(most, heap.scrubbing.n_leaving)):
        if heap.scrubbing.leaving_next >= heap.scrubbing.n_leaving:
            heap.scrubbing.leaving_next = 0
        slot: int = np.int64(_list(heap)[heap.scrubbing.leaving_next])  # type: ignore[assignment]  # bytes need 64 bits
        guard = guards_of(heap)[slot]
        if guard.leaves != 0 and not _unmap(heap, slot, guard.fence):
            heap.scrubbing.leaving_next += 1
            continue
        guard.leaves = 0
        guard.listed = 0
        heap.scrubbing.n_leaving -= 1
        _list(heap)[heap.scrubbing.leaving_next] = _list(heap)[heap.scrubbing.n_leaving]  # the last one takes its place


@inlined
def _unmap(heap: HeapRecord, slot: int, fence: int) -> bool:
    """Unmap a slot if the device has finished with it; false if it is mapped still."""
    slots = slots_of(heap)
    if slots[slot].mapped != NOBODY:
        if not has_passed(pool_of(heap), fence):
            return False
        if not unmap_piece(record_at(heap.backing.device_address, DEVICE), address_of(heap, slot)):
            return False
        slots[slot].mapped = NOBODY
    return True
