"""What a heap does on a device that works behind the processor's back, called by address where every heap comes by.

So the host device's functions do not contain it, and a job on the host neither compiles nor loads it.

Guarantees
    A slot is mapped anew only when this process's device work on what was mapped there is done: each slot keeps the
    fence of its last release, its *guard*.
"""

from __future__ import annotations

from typing import Any

from numba import types

from zico.compiled import array_at, callback, inlined, record_at
from zico.heap import streams, tensors
from zico.heap.layout import GUARD, HEAP
from zico.heap.records import pool_of, slot_at, slots_of, wanted_of
from zico.pool.fences import NO_FENCE, has_passed
from zico.pool.layout import NOBODY
from zico.pool.regions import BEHIND, NEVER, WAIT

_I64 = types.int64

Record = Any
Array = Any


@inlined
def _guards(heap: Record) -> Array:
    return array_at(heap.guards_address, heap.window_bytes >> heap.region_shift, GUARD)


@callback(_I64(_I64, _I64, _I64, _I64))
def ready(heap_address: int, first: int, last: int, status: int) -> int:
    """Make regions that were granted for a run of slots ready to be mapped there.

    Returns:
        ``status``; ``WAIT``: this process's device work may still use what is mapped in one of the slots; ``NEVER``:
        the device has refused a wait.
    """
    heap = record_at(heap_address, HEAP)
    slots = slots_of(heap)
    wanted = wanted_of(heap)
    i = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0:
            guard = _guards(heap)[slot]
            moves = slots[slot].mapped != NOBODY and slots[slot].mapped != wanted[i]
            i += 1
            if moves and guard != NO_FENCE and not has_passed(pool_of(heap), guard):
                streams.drop_waits(heap)
                return WAIT
    if status == BEHIND and not streams.obey(heap, slot_at(heap, first << heap.region_shift)):
        return NEVER
    return status


@callback(types.void(_I64, _I64, _I64, _I64))
def release(heap_address: int, first: int, last: int, n: int) -> None:
    """Return ``n`` regions of a run of slots, on which the device may still work, and guard the slots they leave."""
    heap = record_at(heap_address, HEAP)
    fence = streams.release(heap, slot_at(heap, first << heap.region_shift), wanted_of(heap), n)
    for slot in range(first, last + 1):
        if slots_of(heap)[slot].live == 0:
            _guards(heap)[slot] = fence


@callback(types.void(_I64))
def bring_up(heap_address: int) -> None:
    """Give back all that is freed, behind the device's work on it: before the job may stand still."""
    heap = record_at(heap_address, HEAP)
    tensors.hand_over(heap)
    streams.flush(heap)
