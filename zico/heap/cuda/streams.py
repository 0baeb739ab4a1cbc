"""Streams of a device that works behind the processor's back: slots, marks, waits.

Theory of operation
    A stream gets a slot when it is first seen. What is freed on it may be used again on it at once,
    since a stream keeps order. So its tensors lie in arenas of its own. Between streams only
    regions change hands, through the pool, with fences (``zico.pool.fences``).

    A *mark* on a stream sets its counter when all that was put there before is done. A region is
    released with the fence of the next mark. Marks are put on a stream when ``spacing_bytes`` were
    freed since the last, or at once while anybody waits for memory. They are put, too, before
    this job waits itself, at its boundaries, and when it leaves.

    While nobody waits, the first stream is marked every ``beside_bytes``, or ``alone_bytes`` where
    no other job is there. It is marked earlier when this job's share of half of the free memory is
    unmarked. So half of what is free has marks, whatever the number of jobs. Other streams are
    marked at every release: a stream that was destroyed must not be marked, and only the first one
    is taken to last. Each allocation marks what has become due: others have come or wait, or free
    memory has become scarce.

    The job's *progress thread* puts the marks for who begins to wait while its other threads make
    no call (``zico.heap.cuda.on_stream.progress_thread``). Who waits wakes it.

    When all slots are taken, a further stream takes one over. It waits on the device for all that
    the old stream was given, so a slot's order goes on from stream to stream. A slot is *idle* if
    its arena is empty, all its marks have come, and no live tensor says that it was used there.
    Then there is nothing to wait for, and the old stream may have been destroyed. What that one
    waits for, the new one does not.

    A stream that was destroyed takes no mark. Its work goes on, and nothing on the device can be put
    behind it. So at the job's next allocation or boundary the processor waits until the device has
    done everything, and sets the counter itself (``mark_or_wait``). A free waits only where another
    job waits for memory.

    A kernel that faults takes its context along: the driver refuses every call from then on. The
    marks that were on the device never come, and other jobs' streams may wait for them. So the
    first refusal that says so, of whatever call, lets all of the job's marks come (``is_lost_by``).
    The progress thread looks where no call is made. From then on marks come at once, nothing is
    waited for, and what the job frees goes back to the pool. It is given nothing more: each request
    brings the framework's own error.

Guarantees
    2. The counters of a job that lives are set by its processor only where its device does nothing
       any more that was put there before. It has been waited for, or the context is lost. cuda.h
       says of ``LOST`` that all further work is refused and the process must end. It does not say
       how long a copy goes on that had begun, so the processor waits ``settle_ns`` first.
    7. A wait on the device ends without anybody's processor. Streams wait only for marks that are
       already on their streams, and those only for what was there before. So in the order of time
       nothing waits for anything later.
    Who waits for a mark that has yet to be put on a stream waits for one wakening of a thread. The
    marking job's process must run for that, and its stream take marks.

Known limitations
    What a job has freed without a mark is kept from others while its process is stopped, or its
    first stream captures. That is at most ``beside_bytes`` (what it freed while it was alone:
    ``alone_bytes``). It is at most the job's share of half of what was free at its last call.
    A tensor is freed behind the whole device if a stream that it was used on (``record_stream``)
    has lost its slot meanwhile. Slots without such tensors are taken over first.
    Where more streams than slots take turns, a turn costs a mark and a wait.
    A stream's handle is taken for the stream. One that is destroyed with work on it, and whose
    handle is used again at once, must have been waited for. PyTorch's own allocator asks for the
    same. That a driver refuses a destroyed stream's handle is no promise of the manual's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.base.compiled import call, compiled, inlined, keep_out_of_line, record_at
from zico.base.libc import monotonic_ns, sleep_for
from zico.heap.cuda.layout import STREAM
from zico.heap.free_list import gaps_of
from zico.heap.layout import MAIN, SPILL, arena_of, pool_of
from zico.pool import regions
from zico.pool.fences import fence_of, has_passed
from zico.pool.layout import (
    COUNTER_BYTES,
    EMPTY,
    NOBODY,
    STREAMS,
    at,
    counters_of,
    header_of,
    issued_of,
    job_at,
    pair_of,
)
from zico.pool.mutex import announce

if TYPE_CHECKING:
    from zico.heap.cuda.layout import Stream
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Member

NO_SLOT = STREAMS
"""``slot_of`` returns this for a stream that the device puts behind no other."""

CAPTURES = (900, 908)
"""By the first to the last of these statuses the driver refuses a call because a stream captures. A
wait for the device would be refused, too, and spoil the capture."""

_STREAM_BYTES = STREAM.itemsize
_STATUS = 0xFFFFFFFF  # a C function that returns an int says nothing about the upper half of the register

Array = Any


@inlined
def stream_at(heap: HeapRecord, slot: int) -> Stream:
    """Return the record of the stream in a slot."""
    return record_at(heap.streams.address + slot * _STREAM_BYTES, STREAM)


@inlined
def slot_of(heap: HeapRecord, handle: int) -> int:
    """Return a stream's slot, which it keeps until another takes it over, or ``NO_SLOT``.

    Inside the heap's mutex, as all that follows.
    """
    for slot in range(heap.streams.n):
        if stream_at(heap, slot).handle == handle:
            return slot
    return _new_slot(heap, handle)


@compiled
def _new_slot(heap: HeapRecord, handle: int) -> int:
    keep_out_of_line()
    slot = heap.streams.n
    if slot == heap.most_streams:
        return _take_over(heap, handle)
    stream = stream_at(heap, slot)
    stream.handle = handle
    stream.counter_address = heap.streams.counters_address + pair_of(pool_of(heap).job, slot) * COUNTER_BYTES
    for size_class in range(len(stream.chunks)):
        stream.chunks[size_class] = NOBODY
    heap.streams.n = slot + 1
    return slot


@compiled
def _take_over(heap: HeapRecord, handle: int) -> int:
    """Give a stream the slot of another: an idle one, else the one taken over longest ago.

    The first stream keeps its slot. Tensors that say they were used in a busy slot may mean either
    of its streams from now on.
    """
    keep_out_of_line()
    n = heap.most_streams - 1
    chosen = NO_SLOT
    for i in range(n):
        slot = 1 + (heap.streams.taken_over + i) % n
        if _is_idle(heap, slot):
            _forget_waits(stream_at(heap, slot))
            return _hand_slot(heap, slot, handle)
        if chosen == NO_SLOT and stream_at(heap, slot).users == 0:
            chosen = slot
    if chosen == NO_SLOT:
        chosen = 1 + heap.streams.taken_over % n
    if not follow(heap, chosen, handle):
        return NO_SLOT
    if stream_at(heap, chosen).users > 0:
        heap.streams.mixed |= 1 << chosen
    return _hand_slot(heap, chosen, handle)


@inlined
def _hand_slot(heap: HeapRecord, slot: int, handle: int) -> int:
    stream_at(heap, slot).handle = handle
    heap.streams.taken_over = slot
    return slot


@inlined
def _forget_waits(stream: Stream) -> None:
    for other in range(STREAMS):
        stream.awaited[other] = 0


@inlined
def _is_idle(heap: HeapRecord, slot: int) -> bool:
    """Tell whether nothing that the stream in a slot was given can matter any more."""
    pool = pool_of(heap)
    stream = stream_at(heap, slot)
    arena = arena_of(heap, SPILL + slot)
    pair = pair_of(pool.job, slot)
    is_empty = arena.n_gaps == 1 and gaps_of(arena)[0].size_bytes == arena.end - arena.start
    is_marked = stream.unmarked_bytes == 0 and has_passed(pool, fence_of(pair, issued_of(pool)[pair]))
    return is_empty and is_marked and stream.users == 0


@compiled
def follow(heap: HeapRecord, slot: int, handle: int) -> bool:
    """Let a stream go on behind all that a slot's one was given; false if the device refuses."""
    keep_out_of_line()
    pair = pair_of(pool_of(heap).job, slot)
    if mark(heap, slot) and wait_on_device(heap, handle, pair, issued_of(pool_of(heap))[pair]):
        return True
    return synchronize(heap)


# -- marks -----------------------------------------------------------------------------------------


@compiled
def _try_mark(heap: HeapRecord, slot: int) -> int:
    """Put a mark on a stream; returns the device's status. Where the context is lost the mark has come at once."""
    if heap.streams.lost != 0:
        _pass_mark(heap, slot)
        return 0
    pool = pool_of(heap)
    stream = stream_at(heap, slot)
    pair = pair_of(pool.job, slot)
    value = issued_of(pool)[pair] + 1
    arguments = (heap.streams.context_address, stream.handle, stream.counter_address, value)
    status = call(heap.streams.mark_address, arguments) & _STATUS
    if status == 0:
        _note_mark(heap, slot, value)
        heap.streams.marks += 1
        return 0
    heap.streams.failures += 1
    return 0 if is_lost_by(heap, status) else status


@inlined
def _note_mark(heap: HeapRecord, slot: int, value: int) -> None:
    """Note that a stream's counter is going to reach a value, whatever the processor does from now on."""
    pool = pool_of(heap)
    stream = stream_at(heap, slot)
    issued_of(pool)[pair_of(pool.job, slot)] = value  # only now: whoever sees this may wait for it
    heap.streams.unmarked_bytes -= stream.unmarked_bytes
    stream.unmarked_bytes = 0


@compiled
def mark(heap: HeapRecord, slot: int) -> bool:
    """Put a mark on a stream; false if the device refused, and what was freed since the last stays unmarked."""
    return _try_mark(heap, slot) == 0


@compiled
def mark_or_wait(heap: HeapRecord, slot: int) -> bool:
    """Mark a stream; where it takes no mark, wait, here, until the device has done everything, and set the counter.

    A stream that was destroyed takes none, and its work goes on. False if the stream captures (its
    next mark then serves), or the device refuses to tell.
    """
    keep_out_of_line()
    status = _try_mark(heap, slot)
    if status == 0 or CAPTURES[0] <= status <= CAPTURES[1] or not synchronize(heap):
        return status == 0
    _pass_mark(heap, slot)
    return True


@inlined
def _pass_mark(heap: HeapRecord, slot: int) -> None:
    """Set a stream's counter to its next mark, here: no mark is left on the device that would write it."""
    pool = pool_of(heap)
    pair = pair_of(pool.job, slot)
    value = issued_of(pool)[pair] + 1
    counters_of(pool)[at(pair)] = value
    _note_mark(heap, slot, value)


@inlined
def _jobs_in(pool: Member) -> int:
    n = 0
    for j in range(header_of(pool).places):
        n += int(job_at(pool, j).state != EMPTY)
    return n


@compiled
def _due_bytes(heap: HeapRecord, slot: int) -> int:
    """Return after how many freed bytes a mark is due on a stream: none while anybody waits."""
    pool = pool_of(heap)
    header = header_of(pool)
    if header.waiters > 0 or header.boundary_waiters > 0:
        return 0
    if slot != MAIN:
        return heap.streams.spacing_bytes
    jobs = max(_jobs_in(pool), 1)
    most = heap.streams.alone_bytes if jobs == 1 else heap.streams.beside_bytes
    free_bytes = (header.budget_regions - header.granted) << heap.pool_shift
    return max(heap.streams.spacing_bytes, min(most, free_bytes // (2 * jobs)))


@compiled
def fence_for(heap: HeapRecord, slot: int, freed_bytes: int) -> int:
    """Return the fence of what is being freed on a stream, and put the mark there if it is time for one."""
    pool = pool_of(heap)
    stream = stream_at(heap, slot)
    value = issued_of(pool)[pair_of(pool.job, slot)] + 1
    stream.unmarked_bytes += freed_bytes
    heap.streams.unmarked_bytes += freed_bytes
    if stream.unmarked_bytes >= _due_bytes(heap, slot):
        mark(heap, slot)
    return fence_of(pair_of(pool.job, slot), value)


@compiled
def mark_up_to(heap: HeapRecord, slot: int, value: int) -> bool:
    """Mark a stream, or wait, unless its marks have reached a value already; false as ``mark_or_wait``."""
    pool = pool_of(heap)
    return issued_of(pool)[pair_of(pool.job, slot)] >= value or mark_or_wait(heap, slot)


@compiled
def release(heap: HeapRecord, slot: int, given: Array, n: int) -> int:
    """Return regions that the stream's work so far may still use; returns their fence."""
    fence = fence_for(heap, slot, n << heap.region_shift)
    someone_waits = regions.give_back(pool_of(heap), given, n, fence)
    if someone_waits and stream_at(heap, slot).unmarked_bytes > 0 and mark_or_wait(heap, slot):
        announce(pool_of(heap))  # it began to wait in between, and has found no mark
    return fence


@compiled
def _mark_streams(heap: HeapRecord, everything: bool) -> None:  # noqa: FBT001 - compiled
    """Mark every stream with bytes freed since its last mark, or only those where that is due."""
    keep_out_of_line()
    marked = False
    for slot in range(heap.streams.n):
        unmarked_bytes = stream_at(heap, slot).unmarked_bytes
        is_due = unmarked_bytes > 0 and (everything or unmarked_bytes >= _due_bytes(heap, slot))
        if is_due and mark_or_wait(heap, slot):
            marked = True
    if marked:
        announce(pool_of(heap))


@compiled
def flush(heap: HeapRecord) -> None:
    """Put a mark on each stream on which something was freed since its last one."""
    _mark_streams(heap, True)  # noqa: FBT003 - compiled


@compiled
def keep_up(heap: HeapRecord) -> None:
    """Put the marks that have become due since the last allocation, for others or for itself."""
    _mark_streams(heap, False)  # noqa: FBT003 - compiled


# -- waits on the device ---------------------------------------------------------------------------


@compiled
def wait_on_device(heap: HeapRecord, handle: int, pair: int, value: int) -> bool:
    """Let a stream go on only when a counter has reached a value; false if the device refused."""
    if heap.streams.lost != 0:
        return True
    counter_address = heap.streams.counters_address + pair * COUNTER_BYTES
    arguments = (heap.streams.context_address, handle, counter_address, value)
    status = call(heap.streams.await_address, arguments) & _STATUS
    if status == 0:
        return True
    heap.streams.failures += 1
    return is_lost_by(heap, status)


@compiled
def scrub(heap: HeapRecord, slot: int, address: int) -> bool:
    """Let a stream zero the region at an address of the window; false if the device refused."""
    handle = stream_at(heap, slot).handle
    arguments = (heap.streams.context_address, handle, address, 1 << heap.region_shift)
    status = call(heap.scrubbing.address, arguments) & _STATUS
    if status == 0:
        heap.scrubbing.scrubs += 1
        return True
    heap.streams.failures += 1
    is_lost_by(heap, status)
    return False


@compiled
def wait_for_own(heap: HeapRecord, slot: int, other: int, value: int) -> bool:
    """Let a stream wait for another one of its job, unless it does already; false if the device refused."""
    stream = stream_at(heap, slot)
    if stream.awaited[other] >= value:
        return True
    done = wait_on_device(heap, stream.handle, pair_of(pool_of(heap).job, other), value)
    if done:
        stream.awaited[other] = value
    return done


@compiled
def obey(heap: HeapRecord, slot: int) -> bool:
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
def drop_waits(heap: HeapRecord) -> None:
    """Forget the waits that the last grant demands."""
    keep_out_of_line()
    pool = pool_of(heap)
    for i in range(pool.n_waits):
        pool.wait_values[pool.wait_pairs[i]] = 0
    pool.n_waits = 0


@compiled
def synchronize(heap: HeapRecord) -> bool:
    """Wait, here, until the device has done all that this process has asked for; false if it refuses to tell.

    False at once while a CUDA graph is being captured: the question would spoil it.
    """
    keep_out_of_line()
    if heap.streams.lost != 0:
        return True
    if heap.streams.capturing != 0 and heap.captures.thread == 0:
        return False
    status = call(heap.streams.synchronize_address, (heap.streams.context_address,)) & _STATUS
    if status == 0:
        return True
    heap.streams.failures += 1
    return is_lost_by(heap, status)


# -- a lost context --------------------------------------------------------------------------------


LOST = (226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)
"""After such a status nothing of a context runs any more. Of these cuda.h (CUDA 13.0) says that the
process must be terminated to use CUDA again. Of 710 it says that the context cannot be used
anymore, of 709 that it is destroyed."""


@compiled
def is_lost_by(heap: HeapRecord, status: int) -> bool:
    """Tell whether this process's context is lost, as a status or an earlier one says; then all its marks have come.

    The first time this waits ``settle_ns``. Streams of other jobs that wait for this one's marks go on.
    """
    keep_out_of_line()
    if heap.streams.lost == 0 and status in LOST:
        heap.streams.lost = status
        sleep_for(heap.streams.settle_ns)
        for slot in range(heap.streams.n):
            _pass_mark(heap, slot)
        announce(pool_of(heap))
    return heap.streams.lost != 0


@compiled
def look(heap: HeapRecord) -> bool:
    """Ask the device whether this process's context is lost, where none of its marks has come since the last look.

    The device is not asked while it moves on, nor for a job whose marks have all come. Tells whether
    it was time for a look.
    """
    keep_out_of_line()
    pool = pool_of(heap)
    now_ns = monotonic_ns()
    if now_ns - heap.streams.looked_ns < heap.streams.look_ns or heap.streams.look_address == 0:
        return False
    stands_still = heap.streams.looked_ns > 0
    heap.streams.looked_ns = now_ns
    is_behind = False
    reached = 0
    for slot in range(heap.streams.n):
        pair = pair_of(pool.job, slot)
        counter = counters_of(pool)[at(pair)]
        reached += counter
        is_behind = is_behind or counter < issued_of(pool)[pair]
    stands_still = stands_still and is_behind and reached == heap.streams.reached
    heap.streams.reached = reached
    if stands_still and heap.streams.lost == 0:
        is_lost_by(heap, call(heap.streams.look_address, (heap.streams.context_address,)) & _STATUS)
    return True
