"""The allocator of a device that works behind the processor's back: every tensor comes here, with its stream.

Small tensors are units of a slab (``zico.heap.cuda.slab``); those of streams but the first lie in
an arena of the stream's own (``zico.heap.cuda.streams``). What is said in ``zico.heap.allocator``
holds here, too.

A tensor may have been used on other streams than its own (``record_stream``). It is freed for good
only when each of them has come to a mark made at its free. Until then it is in a list that is looked
at on later calls: nobody waits for it. Before the job may stand still (it waits, ends an iteration,
leaves) the list is emptied. The tensor's own stream then goes on behind those marks, and what was
freed is handed on like everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.base.compiled import array_at, call, compiled, entry, inlined, keep_out_of_line, keep_small, record_at
from zico.base.libc import private_lock, private_unlock
from zico.heap import backing, free_list, placing, reclaim
from zico.heap.allocator import LARGEST, address_of, count, record_held, serve
from zico.heap.cuda import graph_pools, slab, streams
from zico.heap.cuda.layout import (
    CHUNK_BYTES,
    DEFERRED,
    FREED,
    MAX_DEFERRED,
    OTHER_STREAM,
    UNIT_LIVES,
    UNIT_STEP_BYTES,
    USES,
)
from zico.heap.cuda.streams import NO_SLOT
from zico.heap.layout import (
    EXTRA,
    GRANULE_BYTES,
    GRANULE_SHIFT,
    HEAP,
    MAIN,
    NO_TENSOR,
    SPILL,
    block_at,
    job_of,
    pool_of,
    slot_at,
    tick,
)
from zico.pool import waits
from zico.pool.deaths import reap_dead
from zico.pool.fences import NO_FENCE, fence_of, has_passed, slot_in, value_in
from zico.pool.layout import NOBODY, STREAMS, at, counters_of, header_of, issued_of, pair_of
from zico.pool.living import broker_is_gone
from zico.pool.mutex import lock, unlock
from zico.pool.results import KEPT, MUST_WAIT, NEVER_FITS, NOTHING
from zico.trace import ring
from zico.trace.events import NO_NAME

if TYPE_CHECKING:
    from zico.heap.cuda.layout import Deferred
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job


# -- tensors on streams ----------------------------------------------------------------------------


FEW = 4
"""A call for memory looks at so many waiting tensors: more than it can add."""

_DEFERRED_BYTES = DEFERRED.itemsize

Array = Any


@inlined
def block_uses(heap: HeapRecord) -> Array:
    """Return the uses of blocks by granule; those of small tensors are in their chunks."""
    return array_at(heap.streams.uses_address, heap.window_bytes >> GRANULE_SHIFT, USES)


@inlined
def uses_at(heap: HeapRecord, offset: int) -> Array:
    """Return the uses of the tensor that begins at an offset as an array of one, or of none if there is no tensor."""
    number = slab.chunk_at(heap, offset)
    if number != NOBODY:
        uses = slab.uses_at(heap, number, offset)
        return uses[:1] if len(uses) == 1 and uses[0] & (UNIT_LIVES | FREED) == UNIT_LIVES else uses[:0]
    granule = offset >> GRANULE_SHIFT
    uses = block_uses(heap)[granule : granule + 1]
    return uses[:1] if placing.is_block(heap, offset) and uses[0] & FREED == 0 else uses[:0]


@inlined
def bytes_at(heap: HeapRecord, offset: int) -> int:
    """Return the size of the range of the tensor at an offset."""
    number = slab.chunk_at(heap, offset)
    return slab.bytes_at(heap, number) if number != NOBODY else block_at(heap, offset).size_bytes


@inlined
def owner_at(heap: HeapRecord, offset: int) -> int:
    """Return the slot of the stream that the tensor at an offset belongs to."""
    number = slab.chunk_at(heap, offset)
    return slab.slot_at(heap, number) if number != NOBODY else slot_at(heap, offset)


@compiled
def note_use(heap: HeapRecord, offset: int, slot: int) -> None:
    """Note that the tensor at an offset is used in a slot (or ``streams.NO_SLOT``)."""
    uses = uses_at(heap, offset)
    if slot != streams.NO_SLOT and uses[0] >> slot & 1 == 0:
        streams.stream_at(heap, slot).users += 1
    uses[0] |= 1 << slot


@inlined
def _forget_uses(heap: HeapRecord, uses: int) -> None:
    for slot in range(STREAMS):
        if uses >> slot & 1:
            stream = streams.stream_at(heap, slot)
            stream.users -= 1
            if stream.users == 0:
                heap.streams.mixed &= ~(1 << slot)


@compiled
def bury(heap: HeapRecord, me: Job, offset: int, slot: int) -> None:
    """End the life of a tensor that there is, freed on the stream in a slot (or ``streams.NO_SLOT``).

    The next tier is no stream's own, so what lay there is freed when the device has done
    everything. So is every tensor of a job that goes on without what it has evicted. Where the device
    must be waited for and refuses, the tensor waits until it does not.
    """
    uses = uses_at(heap, offset)
    if slab.chunk_at(heap, offset) == NOBODY:
        placing.end(heap, me, offset)
    used = uses[0] | 1 << slot
    if uses[0] & (OTHER_STREAM - 1) != 0:
        if uses[0] & heap.streams.mixed != 0:
            used |= OTHER_STREAM
        _forget_uses(heap, uses[0])
    heap.figures.frees += 1
    if offset < heap.spill_offset:
        size_bytes = bytes_at(heap, offset)
        me.live_bytes -= size_bytes
        heap.figures.freed_bytes += size_bytes
    if offset >= heap.spill_offset or me.evicted > 0:
        used |= OTHER_STREAM
    elsewhere = used & (2 * OTHER_STREAM - 1) & ~(1 << owner_at(heap, offset))
    if elsewhere == 0 or (elsewhere & OTHER_STREAM and streams.synchronize(heap)):
        _give(heap, offset)
        return
    uses[0] |= FREED
    _defer(heap, offset, elsewhere)


@compiled
def _give(heap: HeapRecord, offset: int) -> None:
    """Let a tensor's range be used again by its stream, with no other's work on it left."""
    number = slab.chunk_at(heap, offset)
    if number != NOBODY:
        slab.give(heap, number, offset)
    else:
        block_uses(heap)[offset >> GRANULE_SHIFT] = 0
        placing.give(heap, offset)


@inlined
def _deferred(heap: HeapRecord, index: int) -> Deferred:
    return record_at(heap.streams.deferred_address + index * _DEFERRED_BYTES, DEFERRED)


@compiled
def _defer(heap: HeapRecord, offset: int, elsewhere: int) -> None:
    """Put a mark on each stream that a tensor was used on, and free it when all have come there.

    What needs the whole device waits for ``hand_over``. Where the list is full and the device
    refuses, what the tensor lay in stays this job's and is not used again.
    """
    keep_out_of_line()
    if heap.streams.n_deferred == MAX_DEFERRED:
        hand_over(heap)
    if heap.streams.n_deferred == MAX_DEFERRED:
        if streams.synchronize(heap):
            _give(heap, offset)
        return
    entry = _deferred(heap, heap.streams.n_deferred)
    heap.streams.n_deferred += 1
    entry.offset = offset
    entry.uses = elsewhere
    for slot in range(STREAMS):
        if elsewhere >> slot & 1:
            entry.values[slot] = value_in(streams.fence_for(heap, slot, bytes_at(heap, offset)))


@compiled
def tend(heap: HeapRecord, most: int) -> None:
    """Look at waiting tensors, at most so many, and free those whose streams have come to their marks."""
    keep_out_of_line()
    counters = counters_of(pool_of(heap))
    job = pool_of(heap).job
    for _ in range(min(most, heap.streams.n_deferred)):
        if heap.streams.deferred_next >= heap.streams.n_deferred:
            heap.streams.deferred_next = 0
        entry = _deferred(heap, heap.streams.deferred_next)
        passed = entry.uses & OTHER_STREAM == 0
        for slot in range(STREAMS):
            if entry.uses >> slot & 1 and counters[at(pair_of(job, slot))] < entry.values[slot]:
                passed = False
        if passed:
            _end_waiting(heap, entry)
        else:
            heap.streams.deferred_next += 1


@compiled
def hand_over(heap: HeapRecord) -> None:
    """Free every waiting tensor; its own stream waits for the others. What the device refuses to wait for stays."""
    keep_out_of_line()
    tend(heap, heap.streams.n_deferred)
    for i in range(
        heap.streams.n_deferred - 1, -1, -1
    ):  # the latest first: waiting for its marks covers the earlier ones
        entry = _deferred(heap, i)
        own = owner_at(heap, entry.offset)
        behind = entry.uses & OTHER_STREAM == 0 or streams.synchronize(heap)
        for slot in range(STREAMS):
            if entry.uses >> slot & 1:
                behind = behind and streams.mark_up_to(heap, slot, entry.values[slot])
                behind = behind and streams.wait_for_own(heap, own, slot, entry.values[slot])
        if behind:
            _end_waiting(heap, entry)


@compiled
def _end_waiting(heap: HeapRecord, entry: Deferred) -> None:
    """Take a tensor off the list, whose last entry takes its place, and free it."""
    keep_out_of_line()
    offset = entry.offset
    heap.streams.n_deferred -= 1
    last = _deferred(heap, heap.streams.n_deferred)
    entry.offset = last.offset
    entry.uses = last.uses
    for slot in range(STREAMS):
        entry.values[slot] = last.values[slot]
    _give(heap, offset)


# -- entries ---------------------------------------------------------------------------------------


@entry(HEAP, int, int)
def allocate_on(heap: HeapRecord, size_bytes: int, stream: int) -> int:
    """Return the address of ``size_bytes`` for a stream's work from now on; else as ``allocate``.

    Args:
        heap: The HEAP record.
        size_bytes: At least 1.
        stream: The stream's handle.
    """
    keep_small()
    me = job_of(heap)
    private_lock(heap.mutex_address)
    slot = streams.slot_of(heap, stream)
    if heap.streams.n_deferred > 0:
        tend(heap, FEW)
    if heap.streams.unmarked_bytes > 0:
        streams.keep_up(heap)
    if slot == NO_SLOT or heap.streams.lost != 0:
        offset = NEVER_FITS
    elif size_bytes <= slab.MOST_BYTES:
        offset = _serve_unit(heap, me, slot, size_bytes)
    else:
        offset = _serve_block(heap, me, slot, size_bytes)
    if offset >= 0 and streams.stream_at(heap, slot).handle != stream:
        offset = _follow(heap, me, offset, slot, stream)
    if heap.managed_address != 0 and offset >= 0:
        call(heap.backing.born, (heap.address, offset, slot))
    _note_figures(heap, me)
    private_unlock(heap.mutex_address)
    return address_of(heap, offset)


@inlined
def _note_figures(heap: HeapRecord, me: Job) -> None:
    figures = heap.figures
    figures.peak_tensors = max(figures.peak_tensors, me.allocations - figures.frees)
    figures.peak_live_bytes = max(figures.peak_live_bytes, me.live_bytes)
    if me.held != figures.held:
        figures.peak_held = max(figures.peak_held, me.held)
        figures.returned += max(figures.held - me.held, 0)
        figures.held = me.held


@compiled
def _follow(heap: HeapRecord, me: Job, offset: int, slot: int, stream: int) -> int:
    """Give a tensor to a stream that lost its slot while it waited; returns as ``serve``."""
    keep_out_of_line()
    if streams.follow(heap, slot, stream):
        return offset
    bury(heap, me, offset, NO_SLOT)
    return NEVER_FITS


@compiled
def _serve_block(heap: HeapRecord, me: Job, slot: int, size_bytes: int) -> int:
    rounded = free_list.align_up(max(min(size_bytes, LARGEST), GRANULE_BYTES), UNIT_STEP_BYTES)
    return serve(heap, me, slot, size_bytes, rounded, UNIT_STEP_BYTES)


@compiled
def _serve_unit(heap: HeapRecord, me: Job, slot: int, size_bytes: int) -> int:
    """Find room for a small tensor on a stream; returns as ``serve``."""
    size_class = slab.class_of(size_bytes)
    offset = slab.take(heap, slot, size_class)
    number = slab.claim(heap) if offset == NOTHING else NOBODY
    if offset == NOTHING and number == NOBODY:
        return _serve_block(heap, me, slot, size_bytes)
    tick(heap, me)
    me.requested_bytes += size_bytes
    if offset == NOTHING:
        offset = _cut(heap, me, number, slot, size_class)
    if offset >= 0:
        count(heap, me, offset, size_bytes, slab.bytes_of(size_class))
    return offset


@compiled
def _cut(heap: HeapRecord, me: Job, number: int, slot: int, size_class: int) -> int:
    """Find room for a chunk and take its first unit, or one that is freed meanwhile; returns as ``serve``."""
    keep_out_of_line()
    arena = EXTRA if slot == MAIN else SPILL + slot
    chunk = placing.place(heap, arena, NOTHING, CHUNK_BYTES, CHUNK_BYTES)
    if chunk in (MUST_WAIT, NEVER_FITS):
        hand_over(heap)  # a unit behind other streams' work is better than one that this thread waits for
        offset = slab.take(heap, slot, size_class)
        if offset != NOTHING:
            slab.disclaim(heap, number)
            return offset
        chunk = reclaim.find_place(heap, me, arena, NOTHING, CHUNK_BYTES, CHUNK_BYTES)
    if chunk < 0:
        slab.disclaim(heap, number)
        offset = slab.take(heap, slot, size_class)
        return offset if offset != NOTHING else chunk
    placing.enter(heap, chunk, CHUNK_BYTES, me.iteration, NOBODY, NOBODY)
    block_at(heap, chunk).number = NO_TENSOR
    slab.adopt(heap, number, chunk, slot, size_class)
    return slab.take(heap, slot, size_class)


@entry(HEAP, int, int)
def free_on(heap: HeapRecord, address: int, stream: int) -> None:
    """Free a tensor of which a stream has been given its last use; what it lay in is the stream's to use again.

    A tensor may be another stream's, or have been used on others (``record_stream``). It is freed
    when they have all done what they were given until now.
    """
    keep_small()
    offset = address - heap.base
    me = job_of(heap)
    private_lock(heap.mutex_address)
    if 0 <= offset < heap.window_bytes and len(uses_at(heap, offset)) == 1:
        _end(heap, me, offset, streams.slot_of(heap, stream))
    else:
        _give_piece(heap, me, offset)
    if heap.streams.n_deferred > 0:
        tend(heap, FEW)
    _note_figures(heap, me)
    private_unlock(heap.mutex_address)


@inlined
def _end(heap: HeapRecord, me: Job, offset: int, slot: int) -> None:
    """End the life of a tensor that there is as ``bury`` does, for counters and records as well."""
    tick(heap, me)
    if heap.ring_address != 0:
        _record_death(heap, offset)
    if heap.managed_address != 0:
        call(heap.backing.used, (heap.address, offset, slot))
    bury(heap, me, offset, slot)
    if heap.ring_address != 0:
        record_held(heap, me)


@compiled
def _give_piece(heap: HeapRecord, me: Job, offset: int) -> None:
    keep_out_of_line()
    segment = graph_pools.give(heap, offset)
    if segment == NOTHING:
        heap.bad_frees += 1
    elif segment != KEPT:
        free_segment(heap, me, segment)


@compiled
def hide_segment(heap: HeapRecord, offset: int) -> None:
    """Let a block be a segment of graphs' memory: frees do not take it for a tensor."""
    block_uses(heap)[offset >> GRANULE_SHIFT] = FREED


@compiled
def free_segment(heap: HeapRecord, me: Job, offset: int) -> None:
    """Free a segment of graphs' memory when the device has done everything."""
    keep_out_of_line()
    block_uses(heap)[offset >> GRANULE_SHIFT] = 0
    _end(heap, me, offset, NO_SLOT)


@inlined
def _record_death(heap: HeapRecord, offset: int) -> None:
    if slab.chunk_at(heap, offset) == NOBODY:
        block = block_at(heap, offset)
        ring.put(heap.ring_address, ring.FREE, block.number, block.size_bytes, NO_NAME)


@entry(HEAP, int, int)
def record_stream(heap: HeapRecord, address: int, stream: int) -> None:
    """Note that a stream uses a tensor that is another's: its free waits for what that stream was given until then."""
    offset = address - heap.base
    private_lock(heap.mutex_address)
    if 0 <= offset < heap.window_bytes and len(uses_at(heap, offset)) == 1:
        note_use(heap, offset, streams.slot_of(heap, stream))
    else:
        graph_pools.note_use(heap, offset, stream)
    private_unlock(heap.mutex_address)


# -- streams that copy ------------------------------------------------------------------------------


@entry(HEAP, int, int)
def use_behind(heap: HeapRecord, address: int, stream: int) -> int:
    """Let a stream use a tensor behind all that the tensor's streams were given until now; its free waits for that.

    Waits on the device, and here only where the device takes no such wait. Returns 1; 0: there is
    no such tensor, or the device has refused.
    """
    offset = address - heap.base
    private_lock(heap.mutex_address)
    slot = streams.slot_of(heap, stream)
    done = slot != NO_SLOT and 0 <= offset < heap.window_bytes and len(uses_at(heap, offset)) == 1
    if done:
        used = uses_at(heap, offset)[0] & (2 * OTHER_STREAM - 1) | 1 << owner_at(heap, offset)
        note_use(heap, offset, slot)
        if used & (OTHER_STREAM | heap.streams.mixed):
            done = streams.synchronize(heap)
        for other in range(STREAMS):
            if used >> other & 1 and other != slot:
                done = done and streams.follow(heap, other, stream)
    private_unlock(heap.mutex_address)
    return int(done)


@entry(HEAP, int)
def mark_stream(heap: HeapRecord, stream: int) -> int:
    """Put a mark on a stream; returns its fence, ``NO_FENCE`` if the device has refused."""
    fence = NO_FENCE
    private_lock(heap.mutex_address)
    slot = streams.slot_of(heap, stream)
    if slot != NO_SLOT and streams.mark(heap, slot):
        pair = pair_of(pool_of(heap).job, slot)
        fence = fence_of(pair, issued_of(pool_of(heap))[pair])
    private_unlock(heap.mutex_address)
    return fence


@entry(HEAP, int, int)
def wait_for(heap: HeapRecord, stream: int, fence: int) -> int:
    """Let a stream go on behind a mark of this job, on the device; returns 1, or 0 if the device has refused."""
    private_lock(heap.mutex_address)
    slot = streams.slot_of(heap, stream)
    done = fence == NO_FENCE or has_passed(pool_of(heap), fence) or slot_in(fence) == slot
    if not done and slot != NO_SLOT:
        done = streams.wait_for_own(heap, slot, slot_in(fence), value_in(fence))
    private_unlock(heap.mutex_address)
    return int(done)


# -- for others, while the job makes no call -------------------------------------------------------


@entry(HEAP)
def mark_for_others(heap: HeapRecord) -> None:
    """Put the marks that are due, for who has begun to wait since the job's last call. Not while a graph is captured.

    A capture could begin between the question whether a stream captures and the mark on it.
    """
    keep_out_of_line()
    private_lock(heap.mutex_address)
    if heap.streams.unmarked_bytes > 0 and heap.streams.capturing == 0:
        streams.keep_up(heap)
    private_unlock(heap.mutex_address)


@entry(HEAP)
def look_after_waits(heap: HeapRecord) -> None:
    """Let no stream wait for what never comes: for marks of this job's, if its context is lost, or of dead jobs.

    Does nothing before the next look is due. The dead are the broker's, while there is one.
    """
    keep_out_of_line()
    private_lock(heap.mutex_address)
    has_looked = streams.look(heap)
    private_unlock(heap.mutex_address)
    if has_looked and broker_is_gone(pool_of(heap)):
        reap_dead(pool_of(heap))


@entry(HEAP)
def progress_thread(heap: HeapRecord) -> None:
    """Put marks whenever somebody waits for them, and look after waits, until ``stop_progress_thread``.

    For a thread of its own, without the GIL.
    """
    keep_out_of_line()
    while heap.streams.has_progress_thread != 0:
        word = header_of(pool_of(heap)).marks_asked
        mark_for_others(heap)
        look_after_waits(heap)
        waits.sleep_until_marks_are_asked(pool_of(heap), word)


@entry(HEAP)
def stop_progress_thread(heap: HeapRecord) -> None:
    """Let ``progress_thread`` end; afterwards it puts no mark any more."""
    keep_out_of_line()
    private_lock(heap.mutex_address)  # a mark that is being put is there afterwards
    heap.streams.has_progress_thread = 0
    private_unlock(heap.mutex_address)
    lock(pool_of(heap))
    waits.change_marks_asked(pool_of(heap))
    unlock(pool_of(heap))
    waits.wake_markers(pool_of(heap))


# -- the end ---------------------------------------------------------------------------------------


@entry(HEAP)
def settle(heap: HeapRecord) -> None:
    """Put the marks that are due on the streams, and free what the device has finished with: before the job leaves."""
    private_lock(heap.mutex_address)
    backing.bring_up(heap)
    private_unlock(heap.mutex_address)
