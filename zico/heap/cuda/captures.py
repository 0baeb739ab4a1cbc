"""CUDA graphs: what a capture allocates lies in segments that stay with its graph.

Theory of operation
    PyTorch says when a capture begins and ends, and when a graph's memory is no longer needed
    (``beginAllocateToPool``, ``endAllocateToPool``, ``releasePool``). In between, a request on a
    stream that captures is served from the pool's pieces (``zico.heap.cuda.graph_pools``). Where
    none is free, the heap allocates a segment.

    A launch of the graph may come on any stream, and nothing of Zico's may be captured. So a segment
    is allocated for a stream of Zico's own that never captures. The waits that its regions demand go
    there, and scrubbing, and then the processor waits for that stream. From then on the regions need
    no stream's order.

    A segment of a pool that no graph uses is freed behind the whole device's work. While another
    graph is being captured, the device must not be waited for, so such a free is put off.

    Without a capture a pool can serve all requests of one thread (``serve_thread``). CUDA graph trees
    do so for the run before a capture, and for the inputs of one. The memory's owner of a tensor that
    graphs have written says so by asking for an *address* instead of a size (``_adopt``).

    A capture makes many calls invalid in its thread, or in all threads (``CUstreamCaptureMode``).
    So while one is under way each of Zico's calls runs with its thread's mode relaxed.

Guarantees
    A segment's regions stay this job's until the pool's last graph has gone and every tensor in the
    segment has been freed.

Known limitations
    One capture at a time. Streams that join it take part, since the driver says which capture.
    Segments count as the job's live memory, as if each were one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import call, compiled, entry, keep_out_of_line
from zico.base.libc import private_lock, private_unlock
from zico.heap import backing, free_list
from zico.heap.allocator import LARGEST
from zico.heap.cuda import graph_pools, on_stream, streams
from zico.heap.cuda.layout import PIECE, UNIT_STEP_BYTES
from zico.heap.layout import HEAP, job_of
from zico.heap.reclaim import this_thread
from zico.pool.layout import NOBODY
from zico.pool.results import NEVER_FITS, NOTHING

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.heap.cuda.layout import Piece
    from zico.heap.layout import HeapRecord

SEGMENT_BYTES = 2 << 20
"""Sizes of segments are multiples of this, as PyTorch's are for large requests (``kRoundLarge``)."""
BEGUN = 0
SECOND = 1
"""A capture is under way already."""
TOO_MANY = 2
"""There are as many graph pools as can be."""

_DEFAULT_STREAM = 0
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_STATUS = 0xFFFFFFFF


@entry(HEAP, int, int)
def begin(heap: HeapRecord, first: int, second: int) -> int:
    """Serve what streams that capture ask for from a graph pool, from now on.

    Puts marks on the job's streams before they capture. Must be called before the capture begins.

    Args:
        heap: The HEAP record.
        first: With ``second`` PyTorch's identifier of the graph pool.
        second: See ``first``.

    Returns:
        ``BEGUN``, ``SECOND`` or ``TOO_MANY``.
    """
    private_lock(heap.mutex_address)
    outcome = SECOND
    if heap.streams.capturing == 0:
        if heap.streams.n == 0:
            streams.slot_of(heap, _DEFAULT_STREAM)  # the first slot's tensors have classes and plans, segments none
        streams.slot_of(heap, heap.captures.stream)
        backing.bring_up(heap)
        graph_pool = graph_pools.join(heap, first, second)
        heap.streams.capturing = graph_pool + 1
        outcome = TOO_MANY if graph_pool == NOBODY else BEGUN
    private_unlock(heap.mutex_address)
    return outcome


@entry(HEAP, int, int)
def end(heap: HeapRecord, first: int, second: int) -> None:
    """Serve what comes as ever; what could not be marked during the capture is marked. The graph keeps its memory."""
    private_lock(heap.mutex_address)
    if heap.streams.capturing != 0 and graph_pools.find(heap, first, second) == heap.streams.capturing - 1:
        _end(heap)
    private_unlock(heap.mutex_address)


@entry(HEAP, int, int, int)
def serve_thread(heap: HeapRecord, first: int, second: int, thread: int) -> None:
    """Let the pool that ``begin`` has named serve a thread (``pthread_self``), on any stream, until ``end``."""
    private_lock(heap.mutex_address)
    if heap.streams.capturing != 0 and graph_pools.find(heap, first, second) == heap.streams.capturing - 1:
        heap.captures.thread = thread
    private_unlock(heap.mutex_address)


@compiled
def _end(heap: HeapRecord) -> None:
    heap.streams.capturing = 0
    heap.captures.thread = 0
    backing.bring_up(heap)


@entry(HEAP, int, int)
def release(heap: HeapRecord, first: int, second: int) -> None:
    """Note that a graph of a pool is gone; with the last one the memory goes that no tensor lives in.

    Waits for the device then, unless another graph is being captured: the memory then goes later.
    """
    private_lock(heap.mutex_address)
    graph_pool = graph_pools.find(heap, first, second)
    if graph_pool != NOBODY:
        _release(heap, graph_pool)
    private_unlock(heap.mutex_address)


@entry(HEAP)
def abandon(heap: HeapRecord) -> None:
    """End the capture under way, of which no graph comes; does nothing where there is none."""
    private_lock(heap.mutex_address)
    if heap.streams.capturing != 0:
        graph_pool = heap.streams.capturing - 1
        _end(heap)
        _release(heap, graph_pool)
    private_unlock(heap.mutex_address)


@compiled
def _release(heap: HeapRecord, graph_pool: int) -> None:
    keep_out_of_line()
    if graph_pools.leave(heap, graph_pool):
        segment = graph_pools.take_segment(heap, graph_pool)
        while segment != NOTHING:
            on_stream.free_segment(heap, job_of(heap), segment)
            segment = graph_pools.take_segment(heap, graph_pool)


@entry(HEAP, int, int, [PIECE])
def save(heap: HeapRecord, first: int, second: int, saved: Records[Piece]) -> int:
    """Do as ``graph_pools.save`` for PyTorch's name of a pool."""
    private_lock(heap.mutex_address)
    n = graph_pools.save(heap, graph_pools.find(heap, first, second), saved)
    private_unlock(heap.mutex_address)
    return n


@entry(HEAP, int, int, [PIECE])
def restore(heap: HeapRecord, first: int, second: int, saved: Records[Piece]) -> bool:
    """Do as ``graph_pools.restore`` for PyTorch's name of a pool; false where there is none of that name."""
    private_lock(heap.mutex_address)
    graph_pool = graph_pools.find(heap, first, second)
    is_done = graph_pool != NOBODY and graph_pools.restore(heap, graph_pool, saved)
    private_unlock(heap.mutex_address)
    return is_done


@compiled
def allocate(heap: HeapRecord, size_bytes: int, stream: int) -> int:
    """Return as ``on_stream.allocate_on`` does while a capture is under way; waits for memory, and for the device."""
    keep_out_of_line()
    if 0 <= size_bytes - heap.base < heap.window_bytes:
        return _adopt(heap, size_bytes)
    before = _exchange_mode(heap, _RELAXED)
    private_lock(heap.mutex_address)
    captures = _takes_part(heap, stream)
    rounded = free_list.align_up(min(size_bytes, LARGEST), UNIT_STEP_BYTES)
    offset = graph_pools.take(heap, stream, rounded) if captures else NOTHING
    private_unlock(heap.mutex_address)
    if offset != NOTHING:
        address = heap.base + offset
    elif captures:
        address = _grow(heap, rounded, stream)
    else:
        address = on_stream.allocate_on(heap, size_bytes, stream)
    _exchange_mode(heap, before)
    return address


@compiled
def _takes_part(heap: HeapRecord, stream: int) -> bool:
    if heap.captures.thread != 0:
        return bool(this_thread() == heap.captures.thread)
    return bool(call(heap.captures.is_capturing_address, (heap.streams.context_address, stream)) & _STATUS != 0)


@compiled
def _adopt(heap: HeapRecord, address: int) -> int:
    """Return the address of a graph's tensor that lives there, for which its caller is its owner from now on."""
    keep_out_of_line()
    private_lock(heap.mutex_address)
    lives = graph_pools.lives(heap, address - heap.base)
    private_unlock(heap.mutex_address)
    return address if lives else NEVER_FITS


@compiled
def free(heap: HeapRecord, address: int, stream: int) -> None:
    """Free as ``on_stream.free_on`` does while a capture is under way."""
    keep_out_of_line()
    before = _exchange_mode(heap, _RELAXED)
    on_stream.free_on(heap, address, stream)
    _exchange_mode(heap, before)


@compiled
def _grow(heap: HeapRecord, size_bytes: int, stream: int) -> int:
    """Allocate a segment and take its first piece; returns as ``allocate_on``."""
    keep_out_of_line()
    segment_bytes = free_list.align_up(size_bytes, SEGMENT_BYTES)
    address = on_stream.allocate_on(heap, segment_bytes, heap.captures.stream)
    if address < 0:
        return address
    offset = NOTHING
    private_lock(heap.mutex_address)
    arguments = (heap.streams.context_address, heap.captures.stream)
    status = call(heap.captures.synchronize_stream_address, arguments) & _STATUS
    is_ready = status == 0 and heap.streams.capturing != 0
    streams.is_lost_by(heap, status)
    if is_ready and graph_pools.add_segment(heap, address - heap.base, segment_bytes, stream):
        on_stream.hide_segment(heap, address - heap.base)
        offset = graph_pools.take(heap, stream, size_bytes)
    private_unlock(heap.mutex_address)
    if offset == NOTHING:
        on_stream.free_on(heap, address, heap.captures.stream)
        return NEVER_FITS
    return heap.base + offset


@compiled
def _exchange_mode(heap: HeapRecord, mode: int) -> int:
    """Let this thread's calls be held to another mode of capturing; returns the one before."""
    keep_out_of_line()
    private_lock(heap.mutex_address)
    before = call(heap.captures.exchange_mode_address, (heap.streams.context_address, mode))
    private_unlock(heap.mutex_address)
    return before
