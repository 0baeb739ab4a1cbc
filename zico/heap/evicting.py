"""A blocked job gives memory of live tensors to those that can go on, and gets it back before it goes on itself.

Theory of operation
    This is about the host device. The tensors stay at their addresses, and other threads may write to
    them all the while. So nothing is copied from here to there. Over the slot's mapping the kernel
    puts a private one of the same region, in one step. Then every page is made this process's own,
    copied by the kernel when it is first written to, or at our wish. A write comes before that and
    is in the copy, or after it and goes to the copy. Then nothing here depends on the region, and
    it goes back to the pool::

        slot maps region 7, shared      | writes ->  region 7
        slot maps region 7, private     | reads  ->  region 7, writes -> own pages
        every page is this process's    | both   ->  own pages           region 7 goes back
        region 3 is granted for them    | both   ->  own pages           region 3 has no pages: they count for it

    The next tier is this process's own memory, which the kernel may swap. Back means back in the
    budget: regions are acquired, and their physical memory is given to the kernel, since that of
    the copies counts for it. Nothing moves, so no write can be lost. When the slot is empty its
    pages go, and its next region is mapped as ever.

Guarantees
    4. A tensor never moves. No write is lost, whichever thread makes it, also in a system call.
    A region goes back only when no page of the slot depends on it.

Known limitations
    Some hold pages themselves across the eviction, and not addresses: ``O_DIRECT`` reads in flight,
    buffers registered with io_uring or a network card. They write to pages that are not the
    tensor's any more, as they do over a fork. On a GPU a job evicts while it is paused
    (``zico.heap.cuda.moving_out``), and for nobody who waits: there a job overflows
    (``zico.heap.cuda.backing``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import call, compiled, inlined, keep_out_of_line
from zico.base.libc import monotonic_ns
from zico.device.mapping import detach_piece, discard_piece, free_bytes, own_pages, unmap_piece
from zico.device.record import HOST
from zico.heap.layout import PRIVATE, STATE_AWAY, device_of, pool_of, slot_address, slots_of, wanted_of
from zico.pool import regions, rules
from zico.pool.fences import NO_FENCE
from zico.pool.layout import NO_MORE, NOBODY

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

OWNED = 1
SHARED = 0
_SPARE_SHIFT = 1
"""At most half of the machine's free memory is taken: running out kills somebody."""


# -- out of the budget -----------------------------------------------------------------------------


@inlined
def obey(heap: HeapRecord, me: Job) -> None:
    """Evict what the job is asked for, if it is. Inside the heap's mutex, by a thread that waits."""
    if me.evict > 0:
        evict(heap, me)


@compiled
def evict(heap: HeapRecord, me: Job) -> None:
    """Give back so many regions with live tensors as the job is asked for, or as can be."""
    keep_out_of_line()
    asked = me.evict
    if heap.backing.give_way != 0:
        if call(heap.backing.give_way, (heap.address, asked)) != 0:
            me.evict = NO_MORE
        return
    if device_of(heap).kind != HOST:  # a GPU without a next tier
        me.evict = NO_MORE
        return
    n = min(asked, room(heap, me))
    done = _evict(heap, me, n, OWNED)  # those that already have pages of their own cost nothing
    done += _evict(heap, me, n - done, SHARED)
    me.evict = 0 if done == asked else NO_MORE
    if done > 0:
        heap.wait.return_until_ns = monotonic_ns() + patience_ns(heap)


@inlined
def patience_ns(heap: HeapRecord) -> int:
    """Return how long the job waits for what it has evicted."""
    return min(rules.REGULAR_NS, heap.wait.limit_ns)


@inlined
def room(heap: HeapRecord, me: Job) -> int:
    """Return the regions' worth of memory that the next tier may still take."""
    limit_bytes = (
        heap.spill.limit_bytes - heap.spill.live_bytes - ((me.evicted + heap.optimizer.away) << heap.region_shift)
    )
    spare_bytes = free_bytes(device_of(heap)) >> _SPARE_SHIFT
    return max(min(limit_bytes, spare_bytes), 0) >> heap.region_shift


@compiled
def _evict(heap: HeapRecord, me: Job, most: int, kind: int) -> int:
    """Evict slots with pages of the kind given, from the last one on; returns how many.

    Feature maps lie behind what persists, and are freed sooner: the mapping is shared again then.
    """
    keep_out_of_line()
    n = part(heap, 0, heap.spill_offset >> heap.region_shift, most, kind, NOBODY)
    if n > 0:
        me.evicted += n  # first: whoever looks in between sees a job that claims too little rather than too much
        me.evictions += n
        regions.give_back(pool_of(heap), wanted_of(heap), n, NO_FENCE)
    return n


@compiled
def part(heap: HeapRecord, first: int, end: int, most: int, kind: int, instead: int) -> int:
    """Part slots with pages of the kind given from their regions, from the last one on; those are still the job's.

    Args:
        heap: The HEAP record.
        first: The first slot that may be parted.
        end: Behind the last one.
        most: How many at most.
        kind: ``SHARED``: their pages become this process's own; ``OWNED``: they are already.
        instead: What stands for their regions, which are in ``wanted_of``.

    Returns:
        How many.
    """
    keep_out_of_line()
    slots = slots_of(heap)
    given = wanted_of(heap)
    n = 0
    slot = end - 1
    while slot >= first and n < most:
        there = OWNED if slots[slot].mapped == PRIVATE else SHARED
        if slots[slot].live > 0 and slots[slot].region >= 0 and there == kind:
            if not _part(heap, slot):
                break
            given[n] = slots[slot].region
            slots[slot].region = instead
            n += 1
        slot -= 1
    return n


@inlined
def _part(heap: HeapRecord, slot: int) -> bool:
    """Let no page of a slot depend on its region; false: some may, and the region must stay."""
    device = device_of(heap)
    slots = slots_of(heap)
    if slots[slot].mapped != PRIVATE:
        region: int = np.int64(slots[slot].region)  # type: ignore[assignment]  # bytes need 64 bits
        if not detach_piece(device, slot_address(heap, slot), region):
            return False
        slots[slot].mapped = PRIVATE
    return own_pages(device, slot_address(heap, slot))


# -- back in the budget ----------------------------------------------------------------------------


@inlined
def is_complete(heap: HeapRecord, me: Job) -> bool:
    """Get back what the job has evicted, if it can be had now; tells whether nothing is out.

    Waits for no memory. On a GPU it takes the quarter of a second in which the job is held still.
    """
    return me.evicted == 0 or take_back(heap, me)


@inlined
def acquire_evicted(heap: HeapRecord, me: Job) -> bool:
    """Acquire a region for each evicted slot, all or none, into ``wanted_of``; nothing is evicted then. Never waits."""
    granted = wanted_of(heap)
    for i in range(me.evicted):
        granted[i] = NOBODY
    return regions.take_back(pool_of(heap), granted, me.evicted)


@compiled
def take_back(heap: HeapRecord, me: Job) -> bool:
    """Acquire regions for all evicted slots; false if they cannot be had now."""
    keep_out_of_line()
    if heap.backing.bring_back != 0:
        return call(heap.backing.bring_back, (heap.address,)) != 0
    slots = slots_of(heap)
    pool = pool_of(heap)
    granted = wanted_of(heap)
    n = me.evicted
    if not acquire_evicted(heap, me):
        return False
    for i in range(n):
        region: int = np.int64(granted[i])  # type: ignore[assignment]  # bytes need 64 bits
        if not regions.has_pages(pool, region):
            continue
        if not discard_piece(device_of(heap), region):
            me.evicted += n
            regions.give_back_unused(pool, granted, n)
            return False
        regions.note_emptied(pool, region)
    i = 0
    for slot in range(heap.spill_offset >> heap.region_shift):
        if slots[slot].live > 0 and slots[slot].region == NOBODY:
            slots[slot].region = granted[i]
            i += 1
    heap.wait.return_until_ns = 0
    return True


@compiled
def drop(heap: HeapRecord, me: Job, slot: int) -> bool:
    """Let the private pages of an empty slot go; tells whether it has a region, which has to go back, too."""
    keep_out_of_line()
    slots = slots_of(heap)
    if heap.backing.retire != 0:
        call(heap.backing.retire, (heap.address, slot))
    elif unmap_piece(device_of(heap), slot_address(heap, slot)):  # else the next mapping does it
        slots[slot].mapped = NOBODY
    region = slots[slot].region
    if region == STATE_AWAY:
        heap.optimizer.away -= 1
        heap.optimizer.lacking = min(heap.optimizer.lacking, heap.optimizer.away)
        slots[slot].region = NOBODY
    elif region == NOBODY:
        me.evicted -= 1
    return region >= 0
