"""Memory behind the slots of the window: regions from the pool, or the next tier's.

A slot that was evicted (``zico.heap.evicting``) has pages of the process's own. A region stands for
them, by number alone, while they are back in the budget.

In a pool that isolates jobs, a region is scrubbed before it is mapped and unmapped before it goes
back. On the host device scrubbing is a hole in the region's physical memory. That is one call,
whatever was touched, and makes nothing resident: what is read there are the kernel's zeros.

Guarantees (numbers as in docs/design/invariants.md)
    A grant of several regions is all or nothing, also when mapping fails half-way.
    11. A region is mapped only while it is this job's, and what another job has left there is gone
        before it is mapped.
    A region that comes back to the job that had it last is not scrubbed. A device that works behind
    the processor's back has functions of its own (``zico.heap.cuda.backing``).
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import call, callback, compiled, inlined, keep_in_line, keep_out_of_line, record_at
from zico.device import host
from zico.device.mapping import discard_piece, map_pages, map_piece, open_pieces, unmap_piece
from zico.heap import evicting
from zico.heap.layout import (
    HEAP,
    PRIVATE,
    SPILL,
    device_of,
    job_of,
    pool_of,
    slot_address,
    slots_of,
    wanted_here,
    wanted_of,
)
from zico.pool import regions
from zico.pool.fences import NO_FENCE
from zico.pool.layout import NOBODY
from zico.pool.results import BEHIND, GRANTED, NEVER_FITS
from zico.trace import profile

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord


_PROTECTION = host.PROT_READ_WRITE
_SHARED_FIXED = mmap.MAP_SHARED | host.MAP_FIXED
_TRIES = 4  # a signal interrupts fallocate(2)


@inlined
def back(heap: HeapRecord, arena: int, offset: int, size_bytes: int) -> int:
    """Put memory behind every slot of a range that has none; returns as ``regions.acquire``, at best ``GRANTED``."""
    slots = slots_of(heap)
    wanted = wanted_of(heap)
    first = offset >> heap.region_shift
    last = (offset + size_bytes - 1) >> heap.region_shift
    n = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0:
            wanted[n] = slots[slot].region
            n += 1
    if n == 0:
        return GRANTED
    if arena == SPILL:
        return _back_from_next_tier(heap, first, last)
    if heap.backing.back != 0:
        return call(heap.backing.back, (heap.address, first, last, n))
    status = regions.acquire(pool_of(heap), wanted, n, max(arena - SPILL, 0))
    if status in (GRANTED, BEHIND):
        return _map_granted(heap, first, last, n, status)
    return status


@compiled
def _map_granted(heap: HeapRecord, first: int, last: int, n: int, status: int) -> int:
    """Make what was granted ready to be used; returns all of it to the pool if that cannot be."""
    keep_out_of_line()
    if heap.backing.ready != 0:
        status = call(heap.backing.ready, (heap.address, first, last, n, status))
    elif not map_slots(heap, first, last):
        regions.give_back_unused(pool_of(heap), wanted_of(heap), n)
        status = NEVER_FITS
    if status == GRANTED:
        me = job_of(heap)
        profile.raise_to(me.current, wanted_here(heap, me))
    return status


@compiled
def map_slots(heap: HeapRecord, first: int, last: int) -> bool:
    """Map what was granted where it is not mapped already; false if the device refuses.

    Slots side by side are opened by one call. If the device refuses one of them, none is mapped.
    """
    keep_in_line()
    slots = slots_of(heap)
    wanted = wanted_of(heap)
    i = 0
    shut = first  # all slots from here to the loop's are new ones that nobody may touch yet
    for slot in range(first, last + 1):
        is_new = False
        if slots[slot].live == 0:
            region: int = np.int64(wanted[i])  # type: ignore[assignment]  # bytes need 64 bits
            i += 1
            slots[slot].region = region
            is_new = slots[slot].mapped != region
        if is_new:
            if not _map_slot(heap, slot):
                _unmap_slots(heap, shut, slot)
                return False
        else:
            if shut < slot and not _open_slots(heap, shut, slot):
                return False
            shut = slot + 1
    return shut > last or _open_slots(heap, shut, last + 1)


@inlined
def _map_slot(heap: HeapRecord, slot: int) -> bool:
    """Map a slot's region over what is mapped there."""
    slots = slots_of(heap)
    region = slots[slot].region
    was_mapped = int(slots[slot].mapped != NOBODY)
    slots[slot].mapped = NOBODY
    device = device_of(heap)
    if not map_piece(device, slot_address(heap, slot), region, was_mapped):
        return False
    if regions.has_pages(pool_of(heap), region):
        map_pages(device, slot_address(heap, slot))
    slots[slot].mapped = region
    job_of(heap).maps += 1
    return True


@inlined
def _open_slots(heap: HeapRecord, first: int, end: int) -> bool:
    """Open the slots from ``first`` to before ``end``, which are mapped; unmap them all if the device refuses."""
    device = device_of(heap)
    if open_pieces(device, slot_address(heap, first), end - first):
        return True
    _unmap_slots(heap, first, end)
    return False


@compiled
def _unmap_slots(heap: HeapRecord, first: int, end: int) -> None:
    """Unmap the slots from ``first`` to before ``end``, each by itself: an unmap names exactly one mapping."""
    keep_out_of_line()
    for slot in range(first, end):
        unmap_piece(device_of(heap), slot_address(heap, slot))
        slots_of(heap)[slot].mapped = NOBODY


@inlined
def leave(heap: HeapRecord, offset: int, size_bytes: int) -> None:
    """Take a block off its slots; regions that became empty go back to the pool."""
    if heap.backing.left != 0 and offset < heap.spill_offset:
        call(heap.backing.left, (heap.address, offset, size_bytes))
        return
    slots = slots_of(heap)
    given = wanted_of(heap)
    first = offset >> heap.region_shift
    last = (offset + size_bytes - 1) >> heap.region_shift
    n = 0
    for slot in range(first, last + 1):
        slots[slot].live -= 1
        if slots[slot].live == 0:
            if offset >= heap.spill_offset:
                _discard(heap, slot)
            elif slots[slot].mapped != PRIVATE or evicting.drop(heap, job_of(heap), slot):
                given[n] = slots[slot].region
                n += 1
    if n > 0:
        if heap.backing.release == 0:
            regions.give_back(pool_of(heap), given, n, NO_FENCE)
        else:
            call(heap.backing.release, (heap.address, first, last, n))


@inlined
def bring_up(heap: HeapRecord) -> None:
    """Let the device have its say before anybody waits (``zico.heap.cuda.backing``)."""
    if heap.streams.n > 0:
        call(heap.backing.bring_up, (heap.address,))


# -- the next tier ---------------------------------------------------------------------------------


@compiled
def _back_from_next_tier(heap: HeapRecord, first: int, last: int) -> int:
    """Map memory of the next tier behind slots that have nothing; ``NEVER_FITS``: there is none, or no more."""
    keep_out_of_line()
    if heap.backing.overflow != 0:
        return call(heap.backing.overflow, (heap.address, first, last))
    return _back_from_file(heap, first, last)


@compiled
def _back_from_file(heap: HeapRecord, first: int, last: int) -> int:
    """Map a stretch of the spill file behind slots that have nothing; space on its disk is set aside for them first."""
    keep_out_of_line()
    slots = slots_of(heap)
    spill_slot = heap.spill_offset >> heap.region_shift
    length = 1 << heap.region_shift
    new_bytes = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0:
            new_bytes += length
    if heap.spill.fd < 0 or heap.spill.live_bytes + new_bytes > heap.spill.limit_bytes:
        return NEVER_FITS
    if heap.spill.is_sparse == 0 and not _set_aside(heap, first, last):
        return NEVER_FITS
    for slot in range(first, last + 1):
        if slots[slot].mapped == NOBODY:
            address = slot_address(heap, slot)
            at = (slot - spill_slot) << heap.region_shift
            arguments = (address, length, _PROTECTION, _SHARED_FIXED, heap.spill.fd, at)
            if call(heap.spill.map_address, arguments) != address:
                return NEVER_FITS
            slots[slot].mapped = slot
    heap.spill.live_bytes += new_bytes
    return GRANTED


@compiled
def _discard(heap: HeapRecord, slot: int) -> None:
    keep_out_of_line()
    if heap.backing.overflow != 0:
        call(heap.backing.retire, (heap.address, slot))
        return
    _punch(heap, slot)
    heap.spill.live_bytes -= 1 << heap.region_shift


@inlined
def _fallocate(heap: HeapRecord, slot: int, mode: int) -> int:
    offset = (slot << heap.region_shift) - heap.spill_offset
    return call(heap.spill.fallocate_address, (heap.spill.fd, mode, offset, 1 << heap.region_shift))


@compiled
def _punch(heap: HeapRecord, slot: int) -> None:
    keep_out_of_line()
    _fallocate(heap, slot, host.PUNCH_HOLE)


@compiled
def _set_aside(heap: HeapRecord, first: int, last: int) -> bool:
    """Let the disk have space for all empty slots, so that no touch of them is a SIGBUS; false: it has too little."""
    keep_out_of_line()
    slots = slots_of(heap)
    for slot in range(first, last + 1):
        tries = 0
        while slots[slot].live == 0 and _fallocate(heap, slot, 0) != 0:
            tries += 1
            if tries == _TRIES:
                for earlier in range(first, slot + 1):
                    if slots[earlier].live == 0:
                        _punch(heap, earlier)
                return False
    return True


# -- a pool that isolates jobs ---------------------------------------------------------------------


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
            if not discard_piece(device_of(heap), region):
                return False
            regions.note_emptied(pool, region)
            heap.scrubbing.scrubs += 1
    return True


@compiled
def _unmap_and_return(heap: HeapRecord, first: int, last: int) -> None:
    """Unmap the empty slots of a run and return their regions; one that the kernel does not unmap stays the job's."""
    keep_out_of_line()
    slots = slots_of(heap)
    given = wanted_of(heap)
    n = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0 and slots[slot].region >= 0:  # else it was evicted
            there = slots[slot].mapped != NOBODY
            if not there or unmap_piece(device_of(heap), slot_address(heap, slot)):
                slots[slot].mapped = NOBODY
                given[n] = slots[slot].region
                n += 1
    if n > 0:
        regions.give_back(pool_of(heap), given, n, NO_FENCE)


@callback(_I64(_I64, _I64, _I64, _I64, _I64))
def ready_isolated(heap_address: int, first: int, last: int, n: int, _status: int) -> int:
    """Scrub and map the ``n`` regions that were granted for a run of slots.

    Returns:
        ``GRANTED``; ``NEVER_FITS``: the kernel has refused, and the regions are back in the pool.
    """
    heap = record_at(heap_address, HEAP)
    if not _scrub(heap, first, last):
        regions.give_back_unused(pool_of(heap), wanted_of(heap), n)
        return NEVER_FITS
    if not map_slots(heap, first, last):
        _unmap_and_return(heap, first, last)
        return NEVER_FITS
    return GRANTED


@callback(types.void(_I64, _I64, _I64, _I64))
def release_isolated(heap_address: int, first: int, last: int, _n: int) -> None:
    """Unmap the empty slots of a run, and only then return their regions."""
    _unmap_and_return(record_at(heap_address, HEAP), first, last)
