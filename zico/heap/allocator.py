"""The job's allocator: tensors to slots, compiled, safe for any number of threads.

Theory of operation
    A tensor goes to its place in the plan. Where there is none, or that is taken, it goes to the arena of its learned
    class, at the lowest address that needs the fewest new regions. The first
    block that touches a slot acquires a region for it, the last one that leaves returns the region at once; the
    mapping stays, so the next acquisition of the same slot usually gets the same region and maps nothing.

Guarantees
    4. A live tensor never moves: a slot with live blocks keeps its region.
    7. A thread that waits for regions holds no lock, wakes at least once a slice, and after the wait limit, or when
       nobody in the pool can go on, places the tensor in the next tier.
    A grant of several regions is all or nothing, also when mapping fails half-way.

Known limitations
    A request above the whole budget, with what the job holds already, is refused: the framework raises its own error.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from zico.compiled import (
    array_at,
    call,
    compiled,
    inlined,
    keep_out_of_line,
    keep_small,
    monotonic_ns,
    private_lock,
    private_unlock,
    record_at,
)
from zico.driver import host
from zico.heap import classes, following, gaps
from zico.heap.layout import (
    ALIGNMENT_BYTES,
    ARENA,
    BLOCK,
    GRANULE_SHIFT,
    MAX_ALIGNMENT_BYTES,
    SLOT,
    Arena,
)
from zico.pool import regions, waiting
from zico.pool.layout import MEMBER, NOBODY
from zico.pool.regions import GONE, GRANTED, WAIT, header_of, job_at
from zico.trace import curve, online, ring
from zico.trace.events import NO_NAME

NOT_SERVED = 0
"""The request is for the real allocator: no address space is left, or the job has left the pool."""
OUT_OF_MEMORY = -1
NO_TENSOR = -1
"""No tensor of the pool begins at an address."""

_MUST_WAIT = -1
_NEVER_FITS = -2
_NO_SPACE = -3

SPILL = int(Arena.SPILL)
LONG = int(Arena.LONG)
SHORT = int(Arena.SHORT)
PERSISTENT = int(Arena.PERSISTENT)
EXTRA = int(Arena.EXTRA)

NEVER_NS = 200_000_000
"""How long another thread of the job may take to free something before a request is refused for good."""

_LARGEST = 1 << 60  # bytes: so that nothing overflows on the way to being refused
_ANY = 1 << 40  # regions: more than any window has
_ARENA_BYTES = ARENA.itemsize
_I32 = np.dtype("i4")
_PROTECTION = host.PROT_READ_WRITE
_SHARED_FIXED = mmap.MAP_SHARED | host.MAP_FIXED
_PUNCH = host.KEEP_SIZE | host.PUNCH_HOLE

Record = Any


@inlined
def pool_of(heap: Record) -> Record:
    """Return this process's member record of the pool."""
    return record_at(heap.member_address, MEMBER)


@inlined
def job_of(heap: Record) -> Record:
    """Return this process's job record in the shared table."""
    pool = pool_of(heap)
    return job_at(pool, pool.job)


@inlined
def _arena(heap: Record, index: int) -> Record:
    return record_at(heap.arenas_address + index * _ARENA_BYTES, ARENA)


@inlined
def _slots(heap: Record) -> Any:  # noqa: ANN401 - an array of SLOT
    return array_at(heap.slots_address, heap.window_bytes >> heap.region_shift, SLOT)


@inlined
def _blocks(heap: Record) -> Any:  # noqa: ANN401 - an array of BLOCK
    return array_at(heap.blocks_address, heap.window_bytes >> GRANULE_SHIFT, BLOCK)


@inlined
def _wanted(heap: Record) -> Any:  # noqa: ANN401 - an int32 array
    return array_at(heap.wanted_address, heap.window_bytes >> heap.region_shift, _I32)


@inlined
def _tick(heap: Record, me: Record) -> None:
    """Advance the job's progress by one event; opens a new bin of the curve when one is due."""
    heap.events += 1
    progress = me.progress + 1
    me.progress = progress
    if progress >> me.current.shift >= me.current.n_bins:
        t_ns = monotonic_ns() - me.started_ns - me.iteration_waited_ns
        curve.extend(me.current, progress, me.held, t_ns)


# -- allocation -----------------------------------------------------------------------------------------------------


@compiled
def allocate(heap: Record, size_bytes: int, alignment: int) -> int:
    """Return the address of ``size_bytes`` in the window, waiting for regions if need be.

    Returns:
        An address; ``NOT_SERVED``; or ``OUT_OF_MEMORY`` when the job could never get that much inside the budget.
    """
    keep_small()
    me = job_of(heap)
    if alignment > MAX_ALIGNMENT_BYTES:
        return NOT_SERVED
    fits = size_bytes <= header_of(pool_of(heap)).budget_regions << heap.region_shift
    size_bytes = min(size_bytes, _LARGEST)
    rounded = gaps.align_up(size_bytes, ALIGNMENT_BYTES)
    alignment = max(alignment, ALIGNMENT_BYTES)
    private_lock(heap.mutex_address)
    begins = heap.marked == 0 and online.begins(heap.tracker, size_bytes, me.live_bytes)
    if begins and heap.tracker.events > heap.grace:
        private_unlock(heap.mutex_address)
        boundary(heap)
        private_lock(heap.mutex_address)
    _tick(heap, me)
    me.requested_bytes += size_bytes
    key = classes.key_of(heap, me.iteration, rounded)
    entry = classes.class_of(key)
    arena = classes.arena_for(heap, entry, rounded)
    place = following.place_of(heap, key)
    offset = _place(heap, arena, place, rounded, alignment) if fits else _NEVER_FITS
    if not fits:
        _refuse(me, rounded)
    elif offset in (_MUST_WAIT, _NEVER_FITS):
        arena, offset = _wait_for_place(heap, me, arena, place, rounded, alignment)
    if offset >= 0:
        by_plan = offset == place or (place != following.NO_PLACE and arena == SHORT)  # or a guest instead
        lifetime = following.log_birth(heap, key, rounded, by_plan)
        _commit(heap, me, offset, rounded, entry, lifetime)
        me.allocations += 1
        if heap.ring_address != 0:
            _record_birth(heap, offset, size_bytes)
            _record_held(heap, me)
        if arena == SPILL:
            me.spilled_bytes += size_bytes
        else:
            me.pooled_bytes += size_bytes
    private_unlock(heap.mutex_address)
    if offset >= 0:
        return heap.base + offset
    return OUT_OF_MEMORY if offset == _NEVER_FITS else NOT_SERVED


@inlined
def _record_birth(heap: Record, offset: int, size_bytes: int) -> None:
    _blocks(heap)[offset >> GRANULE_SHIFT].number = heap.tensors
    ring.put(heap.ring_address, ring.ALLOC, heap.tensors, size_bytes, heap.op)
    heap.tensors += 1


@inlined
def _record_held(heap: Record, me: Record) -> None:
    if me.held != heap.recorded_held:
        heap.recorded_held = me.held
        ring.put(heap.ring_address, ring.HELD, 0, me.held << heap.region_shift, NO_NAME)


@compiled
def number_at(heap: Record, address: int) -> int:
    """Return the number, in the recorded trace, of the tensor that begins at an address, or ``NO_TENSOR``."""
    offset = address - heap.base
    if not 0 <= offset < heap.window_bytes:
        return NO_TENSOR
    block = _blocks(heap)[offset >> GRANULE_SHIFT]
    return block.number if block.size_bytes != 0 and block.start == offset else NO_TENSOR


@compiled
def _place(heap: Record, index: int, planned: int, size_bytes: int, alignment: int) -> int:
    """Find a range and get it its regions; nothing is changed unless both succeed. Inside the heap's mutex.

    Args:
        heap: The HEAP record.
        index: The arena, where the plan has no place or that is taken.
        planned: Offset of that place, or ``following.NO_PLACE``.
        size_bytes: Rounded up to the least alignment.
        alignment: A power of two.
    """
    keep_small()
    place = gaps.NOTHING
    if planned != following.NO_PLACE and planned & (alignment - 1) == 0:
        place = gaps.around(_arena(heap, LONG), planned, size_bytes)
        if place != gaps.NOTHING and (index != SHORT or _is_backed(heap, planned, size_bytes)):
            return _take(heap, LONG, place, planned, size_bytes)
    if heap.plan_address != 0 and index == LONG:
        index = EXTRA
    if index == SHORT or (heap.plan_address != 0 and index != SPILL):
        # A temporary is a guest wherever there is room: it pins nothing for long, and needs no region of its own. So
        # is what the plan does not know. But nothing is a guest where a plan is followed: it would stand in the way.
        for host in (SHORT, EXTRA, LONG, PERSISTENT):
            if (host == LONG and heap.plan_address != 0) or gaps.is_full(_arena(heap, host)):
                continue
            gap = gaps.find(_arena(heap, host), heap.slots_address, heap.region_shift, size_bytes, alignment, 0)
            if gap != gaps.NOTHING:
                return _take(heap, host, gap, _start(heap, host, gap, alignment), size_bytes)
    if place != gaps.NOTHING:
        return _take(heap, LONG, place, planned, size_bytes)
    gap = gaps.find(_arena(heap, index), heap.slots_address, heap.region_shift, size_bytes, alignment, _ANY)
    if gap == gaps.NOTHING:
        return _NO_SPACE
    return _take(heap, index, gap, _start(heap, index, gap, alignment), size_bytes)


@inlined
def _start(heap: Record, index: int, gap: int, alignment: int) -> int:
    return gaps.align_up(gaps.gaps_of(_arena(heap, index))[gap].start, alignment)


@compiled
def _take(heap: Record, index: int, gap: int, offset: int, size_bytes: int) -> int:
    """Take a range in a gap, with regions behind it; returns its offset, or why it cannot be had."""
    keep_small()
    arena = _arena(heap, index)
    if gaps.is_full(arena):
        return _NO_SPACE
    status = _back(heap, index, offset, size_bytes)
    if status == GRANTED:
        return gaps.take(arena, gap, offset, size_bytes)
    if status == WAIT:
        return _MUST_WAIT
    return _NO_SPACE if status == GONE else _NEVER_FITS


@inlined
def _is_backed(heap: Record, offset: int, size_bytes: int) -> bool:
    """Tell whether a range needs no new region."""
    return gaps.empty_slots(heap.slots_address, heap.region_shift, offset, size_bytes) == 0


@inlined
def _back(heap: Record, arena: int, offset: int, size_bytes: int) -> int:
    """Put memory behind every slot of a range that has none."""
    slots = _slots(heap)
    wanted = _wanted(heap)
    first = offset >> heap.region_shift
    last = (offset + size_bytes - 1) >> heap.region_shift
    n = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0:
            wanted[n] = slots[slot].mapped
            n += 1
    if n == 0:
        return GRANTED
    if arena == SPILL:
        return _back_from_file(heap, first, last)
    pool = pool_of(heap)
    status = regions.try_acquire(pool, wanted, n)
    if status != GRANTED:
        return status
    return _map_granted(heap, first, last, n)


@compiled
def _map_granted(heap: Record, first: int, last: int, n: int) -> int:
    """Map what was granted where it is not mapped already; returns all of it if the kernel refuses one."""
    keep_out_of_line()
    slots = _slots(heap)
    wanted = _wanted(heap)
    pool = pool_of(heap)
    me = job_of(heap)
    i = 0
    for slot in range(first, last + 1):
        if slots[slot].live != 0:
            continue
        region = wanted[i]
        i += 1
        slots[slot].region = region
        if slots[slot].mapped != region:
            if not _map(heap, slot, heap.memory_fd, np.int64(region) << heap.region_shift):
                regions.release(pool, wanted, n)
                return regions.NEVER
            slots[slot].mapped = region
            me.maps += 1
    curve.raise_to(me.current, me.held)
    return GRANTED


@inlined
def _map(heap: Record, slot: int, descriptor: int, offset: int) -> bool:
    address = heap.base + (slot << heap.region_shift)
    length = 1 << heap.region_shift
    return call(heap.map_address, (address, length, _PROTECTION, _SHARED_FIXED, descriptor, offset)) == address


@inlined
def _commit(heap: Record, me: Record, offset: int, size_bytes: int, entry: int, lifetime: int) -> None:
    """Enter the block, now that its place is certain."""
    block = _blocks(heap)[offset >> GRANULE_SHIFT]
    block.size_bytes = size_bytes
    block.start = offset
    block.birth = heap.events
    block.iteration = me.iteration
    block.key = entry
    block.lifetime = lifetime
    slots = _slots(heap)
    for slot in range(offset >> heap.region_shift, ((offset + size_bytes - 1) >> heap.region_shift) + 1):
        slots[slot].live += 1
    if offset < heap.spill_offset:
        me.live_bytes += size_bytes
        me.peak_live_bytes = max(me.peak_live_bytes, me.live_bytes)


# -- waiting --------------------------------------------------------------------------------------------------------


@compiled
def _wait_for_place(
    heap: Record, me: Record, arena: int, planned: int, size_bytes: int, alignment: int
) -> tuple[int, int]:
    """Wait until a place is found; returns arena and offset. Enters and leaves inside the heap's mutex."""
    keep_out_of_line()
    pool = pool_of(heap)
    deadline_ns = monotonic_ns() + heap.wait_limit_ns
    before = -1
    still_since_ns = monotonic_ns()
    never_since_ns = np.int64(0)
    region_bytes = 1 << heap.region_shift
    waiting.start_waiting(pool, (size_bytes + region_bytes - 1) >> heap.region_shift)
    while True:
        sequence = waiting.sequence_of(pool)
        offset = _place(heap, arena, planned, size_bytes, alignment)
        now_ns = monotonic_ns()
        if offset != _NEVER_FITS:
            never_since_ns = np.int64(0)
        elif never_since_ns == 0:
            never_since_ns = now_ns
        never = never_since_ns != 0 and now_ns - never_since_ns > NEVER_NS
        if offset >= 0 or offset == _NO_SPACE or never:
            break
        now = waiting.standstill(pool)
        if now != before:
            before = now
            still_since_ns = now_ns
        patience_ns = waiting.patience_ns(pool)
        if patience_ns == waiting.STUCK_NS and heap.stuck_iteration == me.iteration + 1:
            patience_ns = -1  # it was stuck before, and so it is now: the others wait until it ends its iteration
        stuck = now_ns - still_since_ns > patience_ns and waiting.is_first_to_yield(pool)
        if offset == _MUST_WAIT and (stuck or now_ns > deadline_ns):
            arena = SPILL
            offset = _place(heap, arena, following.NO_PLACE, size_bytes, alignment)
            waiting.note_stall(pool)
            heap.stuck_iteration = me.iteration + 1
            break
        private_unlock(heap.mutex_address)
        waiting.sleep_until_change(pool, sequence)
        private_lock(heap.mutex_address)
    waiting.stop_waiting(pool)
    if offset < 0 and offset != _NO_SPACE:
        offset = _NEVER_FITS
        _refuse(me, size_bytes)
    return arena, offset


@compiled
def _refuse(me: Record, size_bytes: int) -> None:
    """Note a request that the budget can never meet."""
    keep_out_of_line()
    me.oom_request_bytes = size_bytes
    me.oom_held = me.held
    me.oom_count += 1


# -- the next tier --------------------------------------------------------------------------------------------------


@compiled
def _back_from_file(heap: Record, first: int, last: int) -> int:
    """Map a stretch of the spill file behind slots that have nothing; the file is sparse."""
    keep_out_of_line()
    slots = _slots(heap)
    spill_slot = heap.spill_offset >> heap.region_shift
    new_bytes = 0
    for slot in range(first, last + 1):
        if slots[slot].live == 0:
            new_bytes += 1 << heap.region_shift
    if heap.spill_fd < 0 or heap.spill_live_bytes + new_bytes > heap.spill_limit_bytes:
        return regions.NEVER
    for slot in range(first, last + 1):
        if slots[slot].mapped == NOBODY:
            if not _map(heap, slot, heap.spill_fd, (slot - spill_slot) << heap.region_shift):
                return regions.NEVER
            slots[slot].mapped = slot
    heap.spill_live_bytes += new_bytes
    return GRANTED


@inlined
def _discard(heap: Record, slot: int) -> None:
    """Give the disk blocks of an empty slot of the spill file back."""
    offset = (slot << heap.region_shift) - heap.spill_offset
    call(heap.discard_address, (heap.spill_fd, _PUNCH, offset, 1 << heap.region_shift))
    heap.spill_live_bytes -= 1 << heap.region_shift


# -- free -----------------------------------------------------------------------------------------------------------


@compiled
def free(heap: Record, address: int) -> None:
    """Free a tensor of the window; regions that became empty go back to the pool before this returns."""
    keep_small()
    offset = address - heap.base
    me = job_of(heap)
    private_lock(heap.mutex_address)
    block = _blocks(heap)[offset >> GRANULE_SHIFT]
    size_bytes = block.size_bytes
    if size_bytes == 0 or block.start != offset:
        heap.bad_frees += 1
    else:
        block.size_bytes = 0
        _tick(heap, me)
        iterations_ago = me.iteration - block.iteration
        classes.learn(heap, me, block.key, heap.events - block.birth, iterations_ago == 0)
        following.log_death(heap, block.lifetime, iterations_ago)
        gaps.give(_arena(heap, _arena_at(heap, offset)), offset, size_bytes)
        _leave_slots(heap, offset, size_bytes)
        if heap.ring_address != 0:
            ring.put(heap.ring_address, ring.FREE, block.number, size_bytes, NO_NAME)
            _record_held(heap, me)
        if offset < heap.spill_offset:
            me.live_bytes -= size_bytes
    private_unlock(heap.mutex_address)


@inlined
def _arena_at(heap: Record, offset: int) -> int:
    index = SPILL
    while offset < _arena(heap, index).start:
        index -= 1
    return index


@inlined
def _leave_slots(heap: Record, offset: int, size_bytes: int) -> None:
    slots = _slots(heap)
    given = _wanted(heap)
    n = 0
    for slot in range(offset >> heap.region_shift, ((offset + size_bytes - 1) >> heap.region_shift) + 1):
        slots[slot].live -= 1
        if slots[slot].live == 0:
            if offset >= heap.spill_offset:
                _discard(heap, slot)
            else:
                given[n] = slots[slot].region
                slots[slot].region = NOBODY
                n += 1
    if n > 0:
        regions.release(pool_of(heap), given, n)


# -- iterations -----------------------------------------------------------------------------------------------------


@compiled
def boundary(heap: Record) -> None:
    """End the iteration and begin the next one, waiting in between until that is admitted."""
    keep_out_of_line()
    pool = pool_of(heap)
    me = job_of(heap)
    private_lock(heap.mutex_address)
    before = me.iteration
    admitted = waiting.finish_iteration(pool)
    if me.iteration != before:
        following.turn(heap, me.iteration)
    private_unlock(heap.mutex_address)
    if not admitted:
        waiting.await_admission(pool)
    private_lock(heap.mutex_address)
    waiting.begin_iteration(pool)
    if heap.ring_address != 0:
        ring.put(heap.ring_address, ring.BEGIN, me.iteration, 0, NO_NAME)
    private_unlock(heap.mutex_address)


@compiled
def mark(heap: Record) -> None:
    """Take an explicit boundary; from now on no period is looked for."""
    heap.marked = 1
    boundary(heap)
