"""What a heap needs of a device that works behind the processor's back, and the records that go with it."""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from zico.base.errors import ConfigError, DriverError
from zico.base.units import GIB
from zico.heap.cuda.layout import (
    CHUNK,
    CHUNK_SHIFT,
    DEFERRED,
    GRAPH_POOL,
    GUARD,
    MAX_CHUNKS,
    MAX_DEFERRED,
    MAX_GRAPH_POOLS,
    MAX_PIECES,
    PIECE,
    STREAM,
    USES,
)
from zico.heap.layout import GRANULE_SHIFT
from zico.pool.layout import NOBODY, STREAMS

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from zico.heap.build import Heap

ALONE_BYTES = 8 * GIB
"""A stream gets a mark when so much was freed while nobody else is there. Then steps of known
models have at most 20 marks, and often half of the free memory is less
(benchmarks/results/marks.md)."""
LOOK_NS = 500_000_000
"""Two looks are so long apart. The first one after a fault sees that nothing moves, the second one
asks, and the third one is answered."""
SETTLE_NS = 1_000_000_000
"""A lost context's marks come so much later. No manual says that a copy ends which a copy engine is
in the midst of when a kernel of its context faults. In this time one has moved 25 GB over PCIe
4.0 x16, and a TB in the device's memory."""
BESIDE_BYTES = GIB
"""A stream gets a mark when so much was freed beside other jobs. That is a fifth of the marks or
fewer, and no more than so much of a stopped job's memory is kept from others
(benchmarks/results/marks.md)."""
STOP_S = 10.0
"""The end of a process waits so long for the thread that puts marks: the driver may not answer any more."""
SIDE_STREAMS = STREAMS - 1
"""So many streams have an arena of their own: all that have slots, but the first."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """C functions, called by address from any thread, without the GIL; each returns an int, 0 for success."""

    mark_address: int
    """``mark(context, stream, counter, value)``: when all that the stream was given is done, set the counter."""
    await_address: int
    """``await(context, stream, counter, value)``: let the stream go on when the counter has reached the value."""
    synchronize_address: int
    """``synchronize(context)``: return when all that this process has given the device is done."""
    counters_address: int
    """The table's counters, as the device sees them (``PoolTable.register_counters``)."""
    context_address: int = 0
    """Passed to each of the functions."""
    spacing_bytes: int = 0
    """Freed on a stream between two marks. 0: a mark for every region that is released, and every free that waits for
    another stream."""
    alone_bytes: int = ALONE_BYTES
    """The same on the first stream while no other job is there, where it is more; at most half of
    what is free."""
    beside_bytes: int = BESIDE_BYTES
    """The same while others are there and none of them waits; at most this job's share of half of
    what is free."""
    scrub_address: int = 0
    """``scrub(context, stream, address, bytes)``: let the stream zero a region. 0: the device cannot."""
    capture_stream: int = 0
    """A stream of Zico's own that never captures, for the memory of CUDA graphs."""
    is_capturing_address: int = 0
    """``is_capturing(context, stream)``: 1 if what the stream is given goes into a graph, else 0."""
    exchange_mode_address: int = 0
    """``exchange_mode(context, mode)``: set this thread's ``CUstreamCaptureMode``; returns the one before."""
    synchronize_stream_address: int = 0
    """``synchronize_stream(context, stream)``: return when the stream has done all that it was given."""
    look_address: int = 0
    """``look(context)``: the status by which the context is lost, 0 while none is seen. Waits for nothing; a call may
    put something on a stream that the next one asks about. 0: the device cannot tell so."""
    look_ns: int = LOOK_NS
    """Between two looks whether the device has stopped working for this process."""
    settle_ns: int = SETTLE_NS
    """For so long the device may go on with what it was doing when the context was lost."""


def fill(heap: Heap, timeline: Timeline, undo: contextlib.ExitStack) -> None:
    """Lay out what streams, units and deferred frees need, and name the functions.

    Args:
        heap: Whose.
        timeline: Its device's.
        undo: Gives back what is reserved.

    Raises:
        ConfigError: The pool isolates jobs, and the device cannot scrub.
    """
    from zico.heap.cuda import backing  # compiled or loaded by this, so only where it is needed

    record = heap.record[0]
    heap.back_with(ready=backing.ready, release=backing.release, bring_up=backing.bring_up)
    window_bytes = int(record["window_bytes"])
    record["streams"]["address"] = heap.zeros(STREAM, STREAMS).ctypes.data
    record["streams"]["guards_address"] = heap.zeros(GUARD, len(heap.slots)).ctypes.data
    record["streams"]["uses_address"] = heap.zeros(USES, window_bytes >> GRANULE_SHIFT).ctypes.data
    record["slab"]["chunks_address"] = heap.zeros(CHUNK, MAX_CHUNKS).ctypes.data
    record["slab"]["chunk_of_address"] = heap.zeros(np.dtype("i4"), (window_bytes >> CHUNK_SHIFT) + 1).ctypes.data
    record["slab"]["idle_chunk"] = NOBODY
    record["streams"]["deferred_address"] = heap.zeros(DEFERRED, MAX_DEFERRED).ctypes.data
    if heap.managed is None:
        _fill_next_tier(heap, undo)
    record["streams"]["context_address"] = timeline.context_address
    for field in ("mark_address", "await_address", "synchronize_address", "counters_address"):
        record["streams"][field] = getattr(timeline, field)
    record["streams"]["spacing_bytes"] = timeline.spacing_bytes
    record["streams"]["alone_bytes"] = timeline.alone_bytes
    record["streams"]["beside_bytes"] = timeline.beside_bytes
    for field in ("look_address", "look_ns", "settle_ns"):
        record["streams"][field] = getattr(timeline, field)
    record["captures"]["graph_pools_address"] = heap.zeros(GRAPH_POOL, MAX_GRAPH_POOLS).ctypes.data
    record["captures"]["pieces_address"] = heap.zeros(PIECE, MAX_PIECES).ctypes.data
    record["captures"]["stream"] = timeline.capture_stream
    for field in ("is_capturing_address", "exchange_mode_address", "synchronize_stream_address"):
        record["captures"][field] = getattr(timeline, field)
    if heap.pool.header["isolate"]:
        if timeline.scrub_address == 0:
            raise ConfigError("this device cannot scrub memory, which --isolate needs: leave --isolate out")
        record["scrubbing"]["address"] = timeline.scrub_address
        record["scrubbing"]["leaving_address"] = heap.zeros(np.dtype("i4"), len(heap.slots)).ctypes.data


def _fill_next_tier(heap: Heap, undo: contextlib.ExitStack) -> None:
    """Let tensors overflow and move into pinned memory of the host, or note in ``heap.no_next_tier`` why not."""
    from zico.heap.cuda import backing, moving_out

    try:
        heap.pool.driver.fill_pinned(heap.device[0], heap.pool.region_bytes)
    except DriverError as error:
        heap.no_next_tier = str(error)
        return
    heap.pinned_handles = heap.zeros(np.dtype("u8"), len(heap.slots))
    heap.record[0]["spill"]["pinned_address"] = heap.pinned_handles.ctypes.data
    staging = undo.enter_context(heap.pool.driver.reserve(heap.pool.region_bytes))
    heap.record[0]["spill"]["staging_address"] = staging.handle
    heap.back_with(overflow=backing.overflow, retire=backing.retire)
    heap.back_with(give_way=moving_out.give_way, bring_back=moving_out.bring_back)


def start_progress_thread(heap: Heap) -> Callable[[], None]:
    """Start the thread that puts marks for who waits while the job makes no call, and looks after waits.

    It imports nothing and compiles nothing, as the planning thread, and ends before the driver does.
    Returns what ends it.
    """
    from zico.heap.cuda import on_stream

    record = heap.record[0]
    on_stream.progress_thread(record)  # loads what the thread calls, and ends at once
    record["streams"]["has_progress_thread"] = 1
    thread = threading.Thread(target=on_stream.progress_thread, args=(record,), name="zico-progress", daemon=True)
    thread.start()
    pid = os.getpid()

    def stop() -> None:
        atexit.unregister(stop)
        if os.getpid() != pid:  # a forked child has neither the thread nor the device
            return
        on_stream.stop_progress_thread(record)
        thread.join(STOP_S)

    atexit.register(stop)
    return stop
