"""What a heap does on a device that works behind the processor's back, called by address where every heap comes by.

So the host device's functions do not contain it, and a job on the host neither compiles nor loads it.

Guarantees
    A slot is mapped anew only when this process's device work on what was mapped there is done: each slot keeps the
    fence of its last release, its *guard*.
    Where the pool isolates jobs: the stream scrubs what another job has used after its waits and before the owner's
    first kernel, and an empty slot is unmapped when its guard has passed (``zico.heap.leaving``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.compiled import callback, compiled, inlined, keep_out_of_line, record_at
from zico.heap import leaving, streams, tensors
from zico.heap.backing import address_of, map_slots
from zico.heap.layout import HEAP
from zico.heap.leaving import guards_of
from zico.heap.records import pool_of, slot_at, slots_of, wanted_of
from zico.pool import regions
from zico.pool.fences import NO_FENCE, has_passed
from zico.pool.layout import NOBODY
from zico.pool.regions import BEHIND, GRANTED, NEVER, WAIT

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord

_I64 = types.int64


@inlined
def _may_be_mapped(heap: HeapRecord, first: int, last: int) -> bool:
    """Tell whether the device has done this process's work on what is to be replaced in the empty slots of a run."""
    slots = slots_of(heap)
    wanted = wanted_of(heap)
    i = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0:
            fence = guards_of(heap)[slot].fence
            moves = slots[slot].mapped != NOBODY and slots[slot].mapped != wanted[i]
            i += 1
            if moves and fence != NO_FENCE and not has_passed(pool_of(heap), fence):
                return False
    return True


@compiled
def _scrub(heap: HeapRecord, first: int, last: int, stream_slot: int) -> bool:
    """Let the stream scrub what others have used of the regions of a run's empty slots; false if the device refused."""
    keep_out_of_line()
    slots = slots_of(heap)
    pool = pool_of(heap)
    for slot in range(first, last + 1):
        if slots[slot].live == 0 and regions.has_others_bytes(pool, slots[slot].region):
            if not streams.scrub(heap, stream_slot, address_of(heap, slot)):
                return False
            regions.note_scrubbed(pool, slots[slot].region)
    return True


@inlined
def _prepare(heap: HeapRecord, first: int, last: int, status: int) -> int:
    """Map, put the waits on the stream that the grant demands, and behind them the scrubbing."""
    slot = slot_at(heap, first << heap.region_shift)
    if not _may_be_mapped(heap, first, last):
        return WAIT
    if not map_slots(heap, first, last) or (status == BEHIND and not streams.obey(heap, slot)):
        return NEVER
    if heap.scrubbing.address != 0 and not _scrub(heap, first, last, slot):
        streams.synchronize(heap)  # scrubbing that is on the stream must not come to the regions' next owners
        return NEVER
    return GRANTED


@callback(_I64(_I64, _I64, _I64, _I64, _I64))
def ready(heap_address: int, first: int, last: int, n: int, status: int) -> int:
    """Make the ``n`` regions that were granted for a run of slots ready to be used by the slots' stream.

    Returns:
        ``GRANTED``; or, with the regions back in the pool, ``WAIT``: this process's device work may still use what is
        mapped in one of the slots; ``NEVER``: the device has refused something.
    """
    heap = record_at(heap_address, HEAP)
    status = _prepare(heap, first, last, status)
    if status != GRANTED:
        streams.drop_waits(heap)
        regions.give_back_unused(pool_of(heap), wanted_of(heap), n)
    if heap.scrubbing.address != 0:
        if status == GRANTED:
            leaving.stay(heap, first, last)
        else:
            leaving.part(heap, first, last)
        leaving.tend(heap, leaving.FEW + n)
    return status


@callback(types.void(_I64, _I64, _I64, _I64))
def release(heap_address: int, first: int, last: int, n: int) -> None:
    """Return ``n`` regions of a run of slots, on which the device may still work, and guard the slots they leave."""
    heap = record_at(heap_address, HEAP)
    fence = streams.release(heap, slot_at(heap, first << heap.region_shift), wanted_of(heap), n)
    for slot in range(first, last + 1):
        if slots_of(heap)[slot].live == 0:
            guards_of(heap)[slot].fence = fence
    if heap.scrubbing.address != 0:
        leaving.part(heap, first, last)
        leaving.tend(heap, leaving.FEW + n)


@callback(types.void(_I64))
def bring_up(heap_address: int) -> None:
    """Give back all that is freed, behind the device's work on it: before the job may stand still."""
    heap = record_at(heap_address, HEAP)
    tensors.hand_over(heap)
    streams.flush(heap)
    leaving.tend(heap, heap.scrubbing.n_leaving)
