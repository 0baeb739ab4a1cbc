"""A blocked job gives memory of live tensors to those that can go on, and gets it back before it goes on itself.

Theory of operation
    Only on the host device. The tensors stay at their addresses, and other threads may write to
    them all the while. So nothing is copied from here to there. Over the slot's mapping the kernel
    puts a private one of the same region, in one step; then every page is made this process's own,
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
    What holds pages themselves across the eviction, and not addresses (``O_DIRECT`` reads in
    flight, buffers registered with io_uring or a network card), writes to pages that are not the
    tensor's any more, as it does over a fork. Nobody evicts on a GPU (docs/design/memory.md, "What
    is missing"): there a job overflows (``zico.heap.cuda.backing``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base.compiled import call, compiled, inlined, keep_out_of_line
from zico.base.libc import monotonic_ns, private_lock, private_unlock
from zico.device.mapping import detach_piece, discard_piece, free_bytes, own_pages, unmap_piece
from zico.heap import signals
from zico.heap.layout import PRIVATE, STATE_AWAY, device_of, job_of, pool_of, slot_address, slots_of, wanted_of
from zico.pool import regions, still, waits
from zico.pool.fences import NO_FENCE
from zico.pool.layout import NO_MORE, NOBODY
from zico.pool.results import COMING, GRANTED, NOTHING

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job
    from zico.pool.waits import Look

RETURN_NS = 5_000_000_000
"""How long a job waits for what it has evicted before it goes on without; a regular iteration ends by then."""
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
    n = min(asked, room(heap, me))
    done = _evict(heap, me, n, OWNED)  # those that already have pages of their own cost nothing
    done += _evict(heap, me, n - done, SHARED)
    me.evict = 0 if done == asked else NO_MORE
    if done > 0:
        heap.wait.return_until_ns = monotonic_ns() + patience_ns(heap)


@inlined
def patience_ns(heap: HeapRecord) -> int:
    """Return how long the job waits for what it has evicted."""
    return min(RETURN_NS, heap.wait.limit_ns)


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


# -- when nobody moves -----------------------------------------------------------------------------


@compiled
def is_stuck(heap: HeapRecord, me: Job, still_ns: int) -> bool:
    """Tell whether nobody can go on, nothing having moved for so long, and this job is to find a way."""
    keep_out_of_line()
    pool = pool_of(heap)
    patience_ns = waits.patience_ns(pool, int(heap.backing.overflow != 0))
    if patience_ns < waits.STUCK_BESIDE_RUNNING_NS and _was_stuck(heap, me):
        patience_ns = -1
    return still_ns > patience_ns and waits.is_first_to_yield(pool)


@inlined
def _was_stuck(heap: HeapRecord, me: Job) -> bool:
    """Tell whether the job has found out before that nobody can go on.

    That holds in the same iteration, and in later ones while the same jobs stand still in the same
    iterations of theirs.
    """
    if heap.wait.stuck_iteration == me.iteration + 1:
        return True
    return bool(heap.wait.stuck_beside != 0 and heap.wait.stuck_beside == waits.idlers(pool_of(heap)))


@compiled
def note_stuck(heap: HeapRecord, me: Job) -> None:
    """Remember that nobody can go on in this iteration, and beside whom: the job is then quick to find a way."""
    keep_out_of_line()
    heap.wait.stuck_iteration = me.iteration + 1
    if me.over == 0:
        heap.wait.stuck_beside = waits.idlers(pool_of(heap))


# -- back in the budget ----------------------------------------------------------------------------


@inlined
def is_complete(heap: HeapRecord, me: Job) -> bool:
    """Get back what the job has evicted, if it can be had; tells whether nothing is out. Never waits."""
    return me.evicted == 0 or take_back(heap, me)


@compiled
def take_back(heap: HeapRecord, me: Job) -> bool:
    """Acquire regions for all evicted slots; false if they cannot be had now."""
    keep_out_of_line()
    slots = slots_of(heap)
    pool = pool_of(heap)
    granted = wanted_of(heap)
    n = me.evicted
    for i in range(n):
        granted[i] = NOBODY
    if not regions.take_back(pool, granted, n):
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
    if unmap_piece(device_of(heap), slot_address(heap, slot)):  # else the next mapping does it
        slots[slot].mapped = NOBODY
    region = slots[slot].region
    if region == STATE_AWAY:
        heap.optimizer.away -= 1
        heap.optimizer.lacking = min(heap.optimizer.lacking, heap.optimizer.away)
        slots[slot].region = NOBODY
    elif region == NOBODY:
        me.evicted -= 1
    return region >= 0


@compiled
def await_return(heap: HeapRecord, me: Job) -> None:
    """Wait for what the job has evicted, unless it is to go on without. Enters and leaves inside the heap's mutex."""
    keep_out_of_line()
    if heap.wait.return_until_ns == 0:
        return
    heap.wait.return_until_ns = monotonic_ns() + patience_ns(heap)
    waits.start_waiting(pool_of(heap), me.evicted)
    waits.wait(pool_of(heap), heap, 0, begin_look, _look_for_return, sleep)
    waits.stop_waiting(pool_of(heap))


@compiled
def _look_for_return(heap: HeapRecord, _need: int, look: Look) -> tuple[int, bool]:
    """Return ``GRANTED``, ``COMING``, or ``NOTHING``: the job is to go on without."""
    keep_out_of_line()
    me = job_of(heap)
    if is_complete(heap, me):
        return GRANTED, False
    is_over = look.now_ns > heap.wait.return_until_ns or is_stuck(heap, me, look.still_ns)
    if is_over or signals.has_raised(heap):
        heap.wait.return_until_ns = 0
        return NOTHING, False
    return COMING, False


# -- what a thread that waits for memory does ------------------------------------------------------


class Words(NamedTuple):
    """What says that a look may find more than the last one."""

    sequence: int  # of the pool
    answered: int  # questions to the swapping thread: an answer changes no word that is slept on


@compiled
def begin_look(heap: HeapRecord, need: int) -> Words:
    """Evict what others ask for, and see who stands still, before a thread looks again.

    Args:
        heap: The HEAP record.
        need: Regions for which the thread waits, 0: for what the job has evicted.
    """
    keep_out_of_line()
    me = job_of(heap)
    me.need = max(me.need, need or me.evicted)  # what was granted meanwhile was for something else
    obey(heap, me)
    still.look_around(pool_of(heap))
    return Words(waits.sequence_of(pool_of(heap)), heap.swap.answered)


@compiled
def sleep(heap: HeapRecord, words: Words) -> bool:
    """Sleep until pool or heap have changed, outside the mutex; Python's handlers run for a signal that ends that."""
    keep_out_of_line()
    private_unlock(heap.mutex_address)
    interrupted = heap.swap.answered == words.answered and waits.sleep_until_change(pool_of(heap), words.sequence)
    if interrupted:
        signals.handle(heap)
    private_lock(heap.mutex_address)
    return interrupted
