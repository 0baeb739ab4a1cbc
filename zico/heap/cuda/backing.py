"""Memory behind the slots of the window on a device that works behind the processor's back.

Its functions are called by address where every heap comes by. So the host device's functions do not
contain them, and a job on the host neither compiles nor loads them.

Theory of operation
    *Regions.* A slot is mapped anew only when this process's device work on what was mapped there
    is done. Each slot keeps the fence of its last release, its *guard*.

    *Isolation.* In a pool that isolates jobs the stream scrubs what another job has used, after its
    waits and before the owner's first kernel. An empty slot's mapping must go, but not before its
    guard has passed, and nobody is to wait for that. So the slot is put in a list. Later calls look
    at it: at some of it at every grant and release, at all of it before the job may stand still. A
    slot that is used again before stays mapped, if it gets the same region.

    *The next tier* is pinned memory of the host, mapped in the window where tensors overflow to.
    Kernels find such a tensor as any other, over the bus: slower, still right. Its memory is this
    process's own, and in no way inside the budget. It is bounded as the host device's next tier is
    (``zico.heap.evicting.room``), because pinned memory cannot be swapped.

Guarantees
    A slot that is mapped and has no region is in the list. No mapping goes before its guard has
    passed. What the driver refuses changes nothing: the tensor is refused as where there is no next
    tier. Memory of the next tier goes back only when no tensor lies in it, and the device has done
    everything (``zico.heap.cuda.on_stream.bury``).

Known limitations
    A job that makes no more calls keeps the mappings that its device had not finished with at its
    last one. Until they go, what it still launches on memory that it has given back may reach
    another job's. Every free of a tensor in the next tier waits for the device, and creating its
    memory takes the driver milliseconds. It is the way out where nobody could go on otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, compiled, inlined, keep_out_of_line, record_at
from zico.device.mapping import map_pinned, unmap_piece, unmap_pinned
from zico.heap import evicting
from zico.heap.backing import map_slots
from zico.heap.cuda import on_stream, streams
from zico.heap.cuda.layout import GUARD
from zico.heap.layout import HEAP, device_of, job_of, pool_of, slot_address, slot_at, slots_of, wanted_of
from zico.pool import regions
from zico.pool.fences import NO_FENCE, has_passed
from zico.pool.layout import NOBODY
from zico.pool.results import BEHIND, GRANTED, MUST_WAIT, NEVER_FITS

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.heap.cuda.layout import Guard
    from zico.heap.layout import HeapRecord


# -- mappings that must go -------------------------------------------------------------------------


FEW = 4
"""A grant or release looks at so many slots in the list, besides as many as it may add."""

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
        if not unmap_piece(device_of(heap), slot_address(heap, slot)):
            return False
        slots[slot].mapped = NOBODY
    return True


# -- regions ---------------------------------------------------------------------------------------


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
            if not streams.scrub(heap, stream_slot, slot_address(heap, slot)):
                return False
            regions.note_scrubbed(pool, slots[slot].region)
    return True


@inlined
def _prepare(heap: HeapRecord, first: int, last: int, status: int) -> int:
    """Map, put the waits on the stream that the grant demands, and behind them the scrubbing."""
    slot = slot_at(heap, first << heap.region_shift)
    if not _may_be_mapped(heap, first, last):
        return MUST_WAIT
    if not map_slots(heap, first, last) or (status == BEHIND and not streams.obey(heap, slot)):
        return NEVER_FITS
    if heap.scrubbing.address != 0 and not _scrub(heap, first, last, slot):
        streams.synchronize(heap)  # scrubbing that is on the stream must not come to the regions' next owners
        return NEVER_FITS
    return GRANTED


@callback(_I64(_I64, _I64, _I64, _I64, _I64))
def ready(heap_address: int, first: int, last: int, n: int, status: int) -> int:
    """Make the ``n`` regions that were granted for a run of slots ready to be used by the slots' stream.

    Returns:
        ``GRANTED``. With the regions back in the pool it is ``MUST_WAIT`` or ``NEVER_FITS``. The
        first: this process's device work may still use what is mapped in one of the slots. The
        second: the device has refused something.
    """
    heap = record_at(heap_address, HEAP)
    status = _prepare(heap, first, last, status)
    if status != GRANTED:
        streams.drop_waits(heap)
        regions.give_back_unused(pool_of(heap), wanted_of(heap), n)
    if heap.scrubbing.address != 0:
        if status == GRANTED:
            stay(heap, first, last)
        else:
            part(heap, first, last)
        tend(heap, FEW + n)
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
        part(heap, first, last)
        tend(heap, FEW + n)


@callback(types.void(_I64))
def bring_up(heap_address: int) -> None:
    """Give back all that is freed, behind the device's work on it: before the job may stand still."""
    heap = record_at(heap_address, HEAP)
    on_stream.hand_over(heap)
    streams.flush(heap)
    streams.look(heap)
    tend(heap, heap.scrubbing.n_leaving)


# -- pinned memory: the next tier ------------------------------------------------------------------


_U64 = np.dtype("u8")


@inlined
def handles_of(heap: HeapRecord) -> Array:
    """Return the handles of pinned memory by slot, 0: there is none."""
    return array_at(heap.spill.pinned_address, heap.window_bytes >> heap.region_shift, _U64)


@compiled
def _map(heap: HeapRecord, slot: int) -> bool:
    """Map new memory behind a slot of which nothing is mapped; false if the driver refuses."""
    keep_out_of_line()
    handle = map_pinned(device_of(heap), slot_address(heap, slot))
    if handle == 0:
        return False
    handles_of(heap)[slot] = handle
    slots_of(heap)[slot].mapped = slot
    heap.spill.live_bytes += 1 << heap.region_shift
    return True


@compiled
def _unmap_pinned(heap: HeapRecord, slot: int) -> None:
    """Give the memory behind an empty slot back; what the driver does not unmap stays, for the next tensor there."""
    keep_out_of_line()
    handle: int = np.int64(handles_of(heap)[slot])  # type: ignore[assignment]  # one type for compiled code
    if handle != 0 and unmap_pinned(device_of(heap), slot_address(heap, slot), handle):
        handles_of(heap)[slot] = 0
        slots_of(heap)[slot].mapped = NOBODY
        if slot_address(heap, slot) - heap.base >= heap.spill_offset:  # else the job counts it as evicted
            heap.spill.live_bytes -= 1 << heap.region_shift


@callback(_I64(_I64, _I64, _I64))
def overflow(heap_address: int, first: int, last: int) -> int:
    """Put pinned memory behind the slots of a run that have nothing; all or nothing.

    Returns:
        ``GRANTED``; ``NEVER_FITS``: there is no room, or the driver has refused.
    """
    heap = record_at(heap_address, HEAP)
    slots = slots_of(heap)
    n = 0
    for slot in range(first, last + 1):
        n += int(slots[slot].mapped == NOBODY)
    if n > evicting.room(heap, job_of(heap)):
        return NEVER_FITS
    for slot in range(first, last + 1):
        if slots[slot].mapped == NOBODY and not _map(heap, slot):
            for other in range(first, last + 1):
                if slots[other].live == 0:
                    _unmap_pinned(heap, other)
            return NEVER_FITS
    return GRANTED


@callback(types.void(_I64, _I64))
def retire(heap_address: int, slot: int) -> None:
    """Give the memory behind a slot back that no tensor lies in any more."""
    _unmap_pinned(record_at(heap_address, HEAP), slot)
