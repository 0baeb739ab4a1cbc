"""Streams of a device that works behind the processor's back: slots, marks, waits.

Theory of operation
    A stream gets a slot when it is first seen. What is freed on it may be used again on it at once, since a stream
    keeps order; so its tensors lie in arenas of its own, and between streams only regions change hands, through the
    pool, with fences (``zico.pool.fences``).

    A *mark* on a stream sets its counter when all that was put there before is done. A region is released with the
    fence of the next mark, and marks are put on the stream when ``spacing_bytes`` were freed since the last, or at once
    while anybody waits for memory; further before this job waits itself, at its boundaries, and when it leaves.

Guarantees
    7. A wait on the device ends without anybody's processor: streams wait only for marks that are already on their
       streams, and those only for what was there before; so in the order of time nothing waits for anything later.
    With the default spacing of 0 bytes every release is marked before it is seen, so nobody ever waits for a mark that
    has yet to be put on a stream.

Known limitations
    With a greater spacing a job that frees less than it and then makes no call for memory (at a prompt, in a long
    operation) keeps at most so many bytes a stream from others who begin to wait only after that, until its next call.
    More than ``STREAMS`` streams: tensors of the further ones come from the first one's arenas, behind a wait for it,
    and a free waits for the whole device. Correct, and slow.
    A stream's handle is taken for the stream: one that is destroyed with work on it, and whose handle is used again at
    once, must have been waited for.
"""

from __future__ import annotations

from typing import Any

from zico.compiled import call, compiled, inlined, keep_out_of_line, record_at
from zico.heap.layout import STREAM
from zico.heap.records import MAIN, pool_of
from zico.pool import regions
from zico.pool.fences import fence_of, issued_of, pair_of
from zico.pool.layout import COUNTER_BYTES, NOBODY, STREAMS
from zico.pool.shared import header_of

NO_SLOT = STREAMS
"""What ``slot_of`` answers for a stream too many."""

_STREAM_BYTES = STREAM.itemsize
_STATUS = 0xFFFFFFFF  # a C function that returns an int says nothing about the upper half of the register

Record = Any
Array = Any


@inlined
def stream_at(heap: Record, slot: int) -> Record:
    """Return the record of the stream in a slot."""
    return record_at(heap.streams_address + slot * _STREAM_BYTES, STREAM)


@inlined
def slot_of(heap: Record, handle: int) -> int:
    """Return a stream's slot, or ``NO_SLOT``. Inside the heap's mutex, as all that follows."""
    for slot in range(heap.n_streams):
        if stream_at(heap, slot).handle == handle:
            return slot
    return _new_slot(heap, handle)


@compiled
def _new_slot(heap: Record, handle: int) -> int:
    keep_out_of_line()
    slot = heap.n_streams
    if slot == heap.most_streams:
        return NO_SLOT
    stream = stream_at(heap, slot)
    stream.handle = handle
    stream.counter_address = heap.counters_address + pair_of(pool_of(heap).job, slot) * COUNTER_BYTES
    for size_class in range(len(stream.chunks)):
        stream.chunks[size_class] = NOBODY
    heap.n_streams = slot + 1
    return slot


# -- marks ----------------------------------------------------------------------------------------------------------


@compiled
def mark(heap: Record, slot: int) -> bool:
    """Put a mark on a stream; false if the device refused, and what was freed since the last stays unmarked."""
    pool = pool_of(heap)
    stream = stream_at(heap, slot)
    pair = pair_of(pool.job, slot)
    value = issued_of(pool)[pair] + 1
    if call(heap.mark_address, (heap.timeline_address, stream.handle, stream.counter_address, value)) & _STATUS:
        heap.failures += 1
        return False
    issued_of(pool)[pair] = value  # only now: whoever sees this may wait for it
    stream.unmarked_bytes = 0
    heap.marks += 1
    return True


@compiled
def fence_for(heap: Record, slot: int, freed_bytes: int) -> int:
    """Return the fence of what is being freed on a stream, and put the mark there if it is time for one."""
    pool = pool_of(heap)
    header = header_of(pool)
    stream = stream_at(heap, slot)
    value = issued_of(pool)[pair_of(pool.job, slot)] + 1
    stream.unmarked_bytes += freed_bytes
    if stream.unmarked_bytes >= heap.spacing_bytes or header.waiters > 0 or header.boundary_waiters > 0:
        mark(heap, slot)
    return fence_of(pair_of(pool.job, slot), value)


@compiled
def mark_up_to(heap: Record, slot: int, value: int) -> bool:
    """Put a mark on a stream unless its marks have reached a value already; false if the device refused."""
    pool = pool_of(heap)
    return issued_of(pool)[pair_of(pool.job, slot)] >= value or mark(heap, slot)


@compiled
def release(heap: Record, slot: int, given: Array, n: int) -> int:
    """Return regions that the stream's work so far may still use; returns their fence."""
    fence = fence_for(heap, slot, n << heap.region_shift)
    someone_waits = regions.give_back(pool_of(heap), given, n, fence)
    if someone_waits and stream_at(heap, slot).unmarked_bytes > 0 and mark(heap, slot):
        regions.announce(pool_of(heap))  # it began to wait in between, and has found no mark
    return fence


@compiled
def flush(heap: Record) -> None:
    """Put a mark on each stream on which something was freed since its last one."""
    keep_out_of_line()
    marked = False
    for slot in range(heap.n_streams):
        if stream_at(heap, slot).unmarked_bytes > 0 and mark(heap, slot):
            marked = True
    if marked:
        regions.announce(pool_of(heap))


# -- waits on the device --------------------------------------------------------------------------------------------


@compiled
def wait_on_device(heap: Record, handle: int, pair: int, value: int) -> bool:
    """Let a stream go on only when a counter has reached a value; false if the device refused."""
    counter_address = heap.counters_address + pair * COUNTER_BYTES
    if call(heap.await_address, (heap.timeline_address, handle, counter_address, value)) & _STATUS == 0:
        return True
    heap.failures += 1
    return False


@compiled
def scrub(heap: Record, slot: int, address: int) -> bool:
    """Let a stream zero the region at an address of the window; false if the device refused."""
    handle = stream_at(heap, slot).handle
    arguments = (heap.timeline_address, handle, address, 1 << heap.region_shift)
    if call(heap.scrub_address, arguments) & _STATUS == 0:
        heap.scrubs += 1
        return True
    heap.failures += 1
    return False


@compiled
def wait_for_own(heap: Record, slot: int, other: int, value: int) -> bool:
    """Let a stream wait for another one of its job, unless it does already; false if the device refused."""
    stream = stream_at(heap, slot)
    if stream.awaited[other] >= value:
        return True
    done = wait_on_device(heap, stream.handle, pair_of(pool_of(heap).job, other), value)
    if done:
        stream.awaited[other] = value
    return done


@compiled
def obey(heap: Record, slot: int) -> bool:
    """Put the waits that the last grant demands on a stream; false if the device refused one."""
    keep_out_of_line()
    pool = pool_of(heap)
    done = True
    for i in range(pool.n_waits):
        pair = pool.wait_pairs[i]
        done = done and wait_on_device(heap, stream_at(heap, slot).handle, pair, pool.wait_values[pair])
    drop_waits(heap)
    return done


@compiled
def drop_waits(heap: Record) -> None:
    """Forget the waits that the last grant demands."""
    keep_out_of_line()
    pool = pool_of(heap)
    for i in range(pool.n_waits):
        pool.wait_values[pool.wait_pairs[i]] = 0
    pool.n_waits = 0


@compiled
def synchronize(heap: Record) -> bool:
    """Wait, here, until the device has done all that this process has asked for; false if it refuses to tell."""
    keep_out_of_line()
    if call(heap.synchronize_address, (heap.timeline_address,)) & _STATUS == 0:
        return True
    heap.failures += 1
    return False


@compiled
def follow_main(heap: Record, handle: int) -> None:
    """Let a stream without a slot begin only when the first stream's work so far is done."""
    keep_out_of_line()
    pool = pool_of(heap)
    pair = pair_of(pool.job, MAIN)
    if not (mark(heap, MAIN) and wait_on_device(heap, handle, pair, issued_of(pool)[pair])):
        synchronize(heap)
