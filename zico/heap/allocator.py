"""The job's allocator: tensors to slots, compiled, safe for any number of threads.

Theory of operation
    A tensor goes to its place in the plan. Where that is taken, or there is none, it goes to the
    arena of its learned class. There it gets the lowest address that needs the fewest new regions.
    The first block that touches a slot acquires a region for it, the last one that leaves returns
    the region at once. The mapping stays, so the next acquisition of the same slot usually gets the
    same region and maps nothing. In between the region goes back only while the slot is evicted
    (``zico.heap.evicting``): by a thread of the job that waits.

    On the host device tensors over a threshold come here. On a device that works behind the
    processor's back all of them come by ``zico.heap.cuda.on_stream``, which shares this.

Guarantees
    4. A live tensor never moves: what changes is at most the memory behind its addresses.
    7. A thread that waits for regions holds no lock, and wakes at least once a slice. After the
       wait limit, or when nobody in the pool can go on, it places the tensor in the next tier.
    A grant of several regions is all or nothing, also when mapping fails half-way.

Known limitations
    A request above the largest budget since the job joined, with what the job holds already, is
    refused: the framework raises its own error. So is a wait that nothing ends where there is no
    next tier, as on a GPU whose driver cannot map memory of the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import (
    array_at,
    call,
    compiled,
    entry,
    inlined,
    keep_in_line,
    keep_out_of_line,
    keep_small,
    record_at,
)
from zico.base.libc import private_lock, private_unlock, write_bytes
from zico.heap import backing, evicting, free_list, history, placing, reclaim, waiting
from zico.heap.layout import (
    ALIGNMENT_BYTES,
    HEAP,
    MAIN,
    MAX_ALIGNMENT_BYTES,
    NO_TENSOR,
    SHORT,
    SPILL,
    STATE,
    block_at,
    job_of,
    pool_of,
    tick,
)
from zico.pool import boundaries, profiles
from zico.pool.layout import NOBODY, SaveMode
from zico.pool.results import ADMITTED, GIVES_WAY, INTERRUPTED, MUST_WAIT, NEVER_FITS, NOT_SERVED, NOTHING
from zico.trace import online, phases, profile, ring
from zico.trace.events import NO_NAME, Kind

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job


BY_MARK = -1
SAVES_NOTHING = int(SaveMode.NONE)

LARGEST = 1 << 60  # bytes: so that nothing overflows on the way to being refused


# -- allocation ------------------------------------------------------------------------------------


@entry(HEAP, int, int)
def allocate(heap: HeapRecord, size_bytes: int, alignment: int) -> int:
    """Return the address of ``size_bytes`` in the window, waiting for regions if need be.

    Returns:
        An address, ``NEVER_FITS`` or ``NOT_SERVED``.
    """
    keep_small()
    if alignment > MAX_ALIGNMENT_BYTES:
        return NOT_SERVED
    me = job_of(heap)
    rounded = free_list.align_up(min(size_bytes, LARGEST), ALIGNMENT_BYTES)
    private_lock(heap.mutex_address)
    offset = serve(heap, me, MAIN, size_bytes, rounded, max(alignment, ALIGNMENT_BYTES))
    private_unlock(heap.mutex_address)
    return address_of(heap, offset)


@inlined
def address_of(heap: HeapRecord, offset: int) -> int:
    """Return what the caller of an allocation gets: the address, or why there is none."""
    return heap.base + offset if offset >= 0 else offset


@compiled
def serve(heap: HeapRecord, me: Job, slot: int, size_bytes: int, rounded: int, alignment: int) -> int:
    """Find room for a tensor, inside the heap's mutex; returns its offset or why there is none (``placing``).

    Args:
        heap: The HEAP record.
        me: The JOB record.
        slot: Of the stream; only the main one's tensors have classes and places in a plan.
        size_bytes: As requested.
        rounded: As taken.
        alignment: A power of two.
    """
    keep_in_line()
    keep_small()
    fits = size_bytes <= me.promised << heap.pool_shift or heap.backing.entered != 0
    key = lifetime = entry = NOBODY
    planned = NOTHING
    arena = SPILL + slot
    if slot == MAIN and (heap.marked == 0 or not phases.is_quiet(heap.phases, me.progress)):
        _look_for_boundary(heap, me, size_bytes)
    tick(heap, me)
    me.requested_bytes += min(size_bytes, LARGEST)
    if slot == MAIN:
        key = history.key_of(heap, me.iteration, rounded)
        entry = history.class_of(key)
        if heap.optimizer.thread != 0 and heap.optimizer.thread == reclaim.this_thread():
            arena = STATE
        else:
            arena = history.arena_for(heap, entry, rounded)
            planned = history.planned_place(heap, key)
    offset = placing.place(heap, arena, planned, rounded, alignment) if fits else NEVER_FITS
    if not fits:
        offset = reclaim.exceed(heap, me, rounded, alignment)
    elif offset in (MUST_WAIT, NEVER_FITS):
        offset = reclaim.find_place(heap, me, arena, planned, rounded, alignment)
    if offset >= 0:
        if slot == MAIN:
            by_plan = offset == planned or (planned != NOTHING and arena == SHORT and offset < heap.spill_offset)
            lifetime = history.log_birth(heap, key, rounded, by_plan)
        placing.enter(heap, offset, rounded, me.iteration, entry, lifetime)
        if heap.backing.entered != 0:
            call(heap.backing.entered, (heap.address, offset, rounded, key))
        count(heap, me, offset, size_bytes, rounded)
        if heap.ring_address != 0:
            _record_birth(heap, offset, size_bytes)
            record_held(heap, me)
    return offset


@compiled
def _look_for_boundary(heap: HeapRecord, me: Job, size_bytes: int) -> None:
    """End the iteration here if one is found to begin, or another phase. Leaves the mutex while it waits."""
    keep_out_of_line()
    size_bytes = min(size_bytes, LARGEST)
    phase = phases.NONE
    if heap.marked == 1 and heap.backing.entered == 0 and me.save == SAVES_NOTHING:
        highest = profile.peak(me.current)
        phase = phases.begins(heap.phases, heap.tracker, size_bytes, me.live_bytes, me.progress, me.phase, highest)
        if heap.phases.is_strange == 1:
            me.claim_floor = me.claim_peak
    elif (
        heap.marked == 0 and online.begins(heap.tracker, size_bytes, me.live_bytes) and heap.tracker.events > heap.grace
    ):
        phase = phases.MARKED
    if phase != phases.NONE:
        private_unlock(heap.mutex_address)
        boundary(heap, phase)
        private_lock(heap.mutex_address)


@inlined
def count(heap: HeapRecord, me: Job, offset: int, size_bytes: int, rounded: int) -> None:
    """Count a tensor that has got its place."""
    me.allocations += 1
    if offset < heap.spill_offset:
        me.live_bytes += rounded
        me.peak_live_bytes = max(me.peak_live_bytes, me.live_bytes)
        me.pooled_bytes += size_bytes
    else:
        me.spilled_bytes += size_bytes


@inlined
def _record_birth(heap: HeapRecord, offset: int, size_bytes: int) -> None:
    block_at(heap, offset).number = heap.recording.tensors
    ring.put(heap.ring_address, ring.ALLOC, heap.recording.tensors, size_bytes, heap.recording.op)
    heap.recording.tensors += 1


@inlined
def record_held(heap: HeapRecord, me: Job) -> None:
    """Record the regions held, if they are not what was recorded last."""
    if me.held != heap.recording.held:
        heap.recording.held = me.held
        ring.put(heap.ring_address, ring.HELD, 0, me.held << heap.pool_shift, NO_NAME)


# -- free ------------------------------------------------------------------------------------------


@entry(HEAP, int)
def free(heap: HeapRecord, address: int) -> None:
    """Free a tensor of the window; regions that became empty go back to the pool before this returns."""
    keep_small()
    offset = address - heap.base
    me = job_of(heap)
    private_lock(heap.mutex_address)
    if placing.is_block(heap, offset):
        block = block_at(heap, offset)
        size_bytes = block.size_bytes
        tick(heap, me)
        placing.end(heap, me, offset)
        placing.give(heap, offset)
        if offset < heap.spill_offset:
            me.live_bytes -= size_bytes
        if heap.ring_address != 0:
            ring.put(heap.ring_address, ring.FREE, block.number, size_bytes, NO_NAME)
            record_held(heap, me)
    else:
        heap.bad_frees += 1
    private_unlock(heap.mutex_address)


# -- iterations ------------------------------------------------------------------------------------


@compiled
def boundary(heap: HeapRecord, phase: int) -> None:
    """End the iteration and begin the next one, waiting in between until that is admitted.

    Args:
        heap: The HEAP record.
        phase: What begins; ``BY_MARK``: ``phases.MARKED``, and a mark says so.
    """
    keep_out_of_line()
    if not _end_iteration(heap, phase):
        found = _await_admission(heap)
        while found != ADMITTED:
            if found == INTERRUPTED:
                waiting.handle(heap)
                if waiting.has_raised(heap):
                    return  # at its boundary, where the next one finds it
            found = _await_admission(heap)
    _begin_iteration(heap)


@compiled
def _end_iteration(heap: HeapRecord, phase: int) -> bool:
    """End the iteration, unless none has begun; tells whether the next one begins without a wait."""
    keep_out_of_line()
    if heap.wait.between == 1:
        return False
    pool = pool_of(heap)
    me = job_of(heap)
    private_lock(heap.mutex_address)
    heap.wait.between = 1
    backing.bring_up(heap)
    before, ended = me.iteration, me.phase
    if heap.phases.added != phases.MARKED:
        profiles.forget(pool, heap.phases.added)
        heap.phases.added = phases.MARKED
    admitted = boundaries.finish_iteration(pool, max(phase, phases.MARKED))
    if me.iteration != before:
        history.end_iteration(heap, me.iteration, phases.is_largest(heap.phases, ended))
        if phase == BY_MARK:
            if heap.phases.marks == 0:
                me.parts = before
            phases.enter_by_mark(heap.phases, heap.tracker, me.profile, me.claim_peak)
        elif heap.marked == 1:
            if ended == phases.MARKED:
                me.parts += 1
            else:
                me.evaluations += 1
            phases.enter(heap.phases, phase, me.profile, me.claim_peak)
    private_unlock(heap.mutex_address)
    if heap.backing.entered != 0:
        write_bytes(heap.paged.pager_fd, pool.one_address, 8)
    return admitted


@compiled
def _await_admission(heap: HeapRecord) -> int:
    """Wait until the next iteration is admitted, a signal comes, or some time has passed.

    Returns:
        As ``boundaries.await_admission``, but never ``GIVES_WAY``.
    """
    keep_out_of_line()
    found = boundaries.await_admission(pool_of(heap))
    while found == GIVES_WAY:
        private_lock(heap.mutex_address)
        evicting.obey(heap, job_of(heap))
        private_unlock(heap.mutex_address)
        found = boundaries.await_admission(pool_of(heap))
    return found


@compiled
def _begin_iteration(heap: HeapRecord) -> None:
    """Begin the iteration that was admitted, with what the job has evicted if it can be had."""
    keep_out_of_line()
    me = job_of(heap)
    private_lock(heap.mutex_address)
    boundaries.begin_iteration(pool_of(heap))
    if not evicting.is_complete(heap, me):
        waiting.await_return(heap, me)
    heap.wait.between = 0
    if heap.ring_address != 0:
        ring.put(heap.ring_address, ring.BEGIN, me.iteration, 0, NO_NAME)
    private_unlock(heap.mutex_address)


@entry(HEAP)
def mark(heap: HeapRecord) -> None:
    """Take an explicit boundary; from now on no period is looked for.

    A step that is captured into a CUDA graph does no work yet, so it ends no iteration.
    """
    heap.marked = 1
    if heap.streams.capturing == 0:
        boundary(heap, BY_MARK)


@entry(HEAP)
def end_by_mark(heap: HeapRecord) -> bool:
    """Take an explicit boundary as ``mark`` does, but come back from it at a signal, and after a second at most.

    So Python sees to signals. Returns whether the next iteration has begun; if not, ``begin_by_mark`` goes on.
    """
    heap.marked = 1
    if heap.streams.capturing != 0:
        return True
    keep_out_of_line()
    if not _end_iteration(heap, BY_MARK) and _await_admission(heap) != ADMITTED:
        return False
    _begin_iteration(heap)
    return True


@entry(HEAP)
def begin_by_mark(heap: HeapRecord) -> bool:
    """Go on where ``end_by_mark`` came back from; returns as that does."""
    if _await_admission(heap) != ADMITTED:
        return False
    _begin_iteration(heap)
    return True


# -- recorded operations ---------------------------------------------------------------------------


MOST_OPERANDS = 1 << 12
"""So many tensors of one operation are told apart; foreach operations on large models have more."""

_READ, _WRITE = int(Kind.READ), int(Kind.WRITE)
_I64 = np.dtype("i8")


@entry(int, int, int, int, int, int, int)
def record_op(
    heap_address: int, tensors_address: int, n_read: int, n_written: int, n_made: int, name: int, begin_ticks: int
) -> None:
    """Record an operation that began at ``begin_ticks`` and ends now, behind what it read and wrote.

    Args:
        heap_address: A HEAP record that records.
        tensors_address: Where tensors' storages begin, as i8: those read, those written, those
            returned; overwritten.
        n_read: How many of them are read.
        n_written: How many are written.
        n_made: How many are returned: written, too, unless they share memory with what is read (a
            view).
        name: Of the operation.
        begin_ticks: By ``ring.now_ticks``.
    """
    keep_out_of_line()
    heap = record_at(heap_address, HEAP)
    n = min(n_read + n_written + n_made, MOST_OPERANDS)
    tensors = array_at(tensors_address, n, _I64)
    private_lock(heap.mutex_address)
    if heap.ring_address != 0:
        for i in range(n):
            offset = tensors[i] - heap.base
            inside = 0 <= offset < heap.window_bytes and placing.is_block(heap, offset)
            tensors[i] = block_at(heap, offset).number if inside else NO_TENSOR
        for i in range(n):
            first = 0 if i < n_read or i >= n_read + n_written else n_read
            seen = tensors[i] == NO_TENSOR
            for j in range(first, i):
                seen = seen or tensors[j] == tensors[i]
            if not seen:
                ring.put(heap.ring_address, _READ if i < n_read else _WRITE, tensors[i], 0, name)
        ring.put_op(heap.ring_address, name, begin_ticks)
    private_unlock(heap.mutex_address)
