"""The heap's private records on a device that takes every tensor: streams, units, CUDA graphs, guards of mappings.

There are tensors smaller than a granule there, units. A chunk is cut into units of one size, and is
itself a block to the arena that it lies in::

    EXTRA [chunk: | unit | unit | ...] | ...
"""

from __future__ import annotations

import enum
from typing import Annotated

import numpy as np

from zico.base.records import I4, I8, Numbers, Record, dtype_of
from zico.pool.layout import STREAMS

CHUNK_SHIFT = 20
CHUNK_BYTES = 1 << CHUNK_SHIFT
"""Small tensors are cut from chunks of 1 MiB, each with room for 32 of the largest units."""
UNIT_STEP_BYTES = 512
"""Sizes of units are multiples of this, and tensors are aligned to it, as PyTorch's own allocator does on CUDA."""
UNIT_SIZES = tuple(UNIT_STEP_BYTES * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
"""They are powers of two and one and a half times these, up to half a granule. At most a third of a
unit is unused."""
MOST_UNITS = CHUNK_BYTES // UNIT_STEP_BYTES
MAX_CHUNKS = 1 << 14
"""So many have room for 16 GiB of small tensors; further tensors get a granule each."""
MAX_DEFERRED = 1 << 13
"""So many frees wait for other streams at a time; of more, the tensors' own streams wait on the device."""
MAX_GRAPH_POOLS = 1 << 12
"""So many pools of CUDA graphs live at a time."""
MAX_PIECES = 1 << 16
"""All graph pools together have so many pieces, used and free."""

OTHER_STREAM = 1 << STREAMS
"""A tensor's uses have a bit for each stream slot, and this one for streams that no slot stands for."""
FREED = 1 << (STREAMS + 1)
"""This bit of a tensor's uses says that it is freed, and waits for other streams."""
UNIT_LIVES = 1 << (STREAMS + 2)
"""This bit of a unit's uses says that there is a tensor in it."""


class Stream(Record):
    """A slot and the stream that has it."""

    handle: I8
    counter_address: I8  # on the device
    unmarked_bytes: I8  # freed on it since its last mark
    users: I8  # live tensors that say they were used on it
    awaited: Annotated[Numbers, "i8", (STREAMS,)]  # values of the job's other streams that it waits for
    chunks: Annotated[Numbers, "i4", (len(UNIT_SIZES),)]  # the first chunk with a free unit of each size, or NOBODY


STREAM = dtype_of(Stream)


class Chunk(Record):
    """A chunk that is cut into units."""

    offset: I8
    unit_bytes: I4
    size_class: I4
    slot: I4  # of the stream that its units are for
    previous: I4  # chunks of that stream and size with free units, NOBODY at the ends
    next: I4  # also: idle chunk records
    n_units: I4
    n_live: I4
    n_fresh: I4  # units from this one on have never been used
    n_stacked: I4
    stack: Annotated[Numbers, "u2", (MOST_UNITS,)]  # used before and free
    uses: Annotated[Numbers, "i4", (MOST_UNITS,)]


CHUNK = dtype_of(Chunk)


class Deferred(Record, align=False):
    """A tensor that is freed when the counters of the streams in ``uses`` have reached the values."""

    offset: I8
    uses: I8
    values: Annotated[Numbers, "i8", (STREAMS,)]


DEFERRED = dtype_of(Deferred)


class GraphPool(Record):
    """What PyTorch calls a graph's memory pool: one or more CUDA graphs share its segments."""

    first: I8  # PyTorch's identifier is two numbers
    second: I8
    graphs: I8  # that use it
    pieces: I8  # of its segments; an entry with neither graphs nor pieces is free


GRAPH_POOL = dtype_of(GraphPool)


class Piece(Record):
    """A part of a graph pool's segment: a tensor, or free for one."""

    offset: I8
    size_bytes: I8
    stream: I8  # the handle of the one that captures, whose tensors alone lie here
    graph_pool: I4
    state: I4  # PieceState


PIECE = dtype_of(Piece)


class PieceState(enum.IntEnum):
    """What lies in a piece of a graph pool."""

    FREE = 0
    LIVES = 1
    SHARED = 2
    """A tensor that other streams use, too (``record_stream``)."""
    SPENT = 3
    """Nothing any more, but those streams may be late in a launch: not used again while a graph lives."""


class Guard(Record, align=False):
    """What guards a slot's mapping."""

    fence: I8  # of its last release: until it has passed, this process's device work may use the mapping
    leaves: I4  # 1: the mapping must go (zico.heap.cuda.backing)
    listed: I4  # 1: the slot is in the list there


GUARD = dtype_of(Guard)

USES = np.dtype("i4")
"""A tensor's uses have a bit for each stream besides its own that it was used on."""


# -- parts of the heap's record ---------------------------------------------------------------------


class Slab(Record):
    """Chunks that are cut into units (``zico.heap.cuda.slab``)."""

    chunks_address: I8
    chunk_of_address: I8  # by window offset >> CHUNK_SHIFT: number of the chunk + 1, or 0
    n_chunks: I8  # chunk records used so far
    idle_chunk: I8  # the first of those used before and free, or NOBODY


class Streams(Record):
    """A device that works behind the processor's back (``zico.heap.cuda.streams``)."""

    n: I8  # slots in use; 0 on the host device
    address: I8  # STREAM records
    capturing: I8  # 1 + the graph pool for which a CUDA graph is being captured, 0: none is
    guards_address: I8
    uses_address: I8  # of blocks, by granule
    deferred_address: I8
    n_deferred: I8
    deferred_next: I8  # which one is looked at next
    spacing_bytes: I8  # freed on a stream between two marks, unless somebody waits
    alone_bytes: I8  # the same for the first stream while no other job is there
    beside_bytes: I8  # and while others are there, none of whom waits
    has_progress_thread: I8  # 1: until it is told to end (zico.heap.cuda.on_stream.progress_thread)
    unmarked_bytes: I8  # of all streams
    taken_over: I8  # the slot that another stream has taken over last, 0: none yet
    mixed: I8  # bit k: a tensor that was used in slot k may mean a stream that lost it
    context_address: I8  # first argument of the three functions
    mark_address: I8
    await_address: I8
    synchronize_address: I8
    counters_address: I8  # on the device
    marks: I8  # ever
    failures: I8  # marks, waits and scrubs that the device refused, ever
    lost: I8  # the status by which the device has said that this process's context is lost, 0: it has not
    settle_ns: I8  # for so long the device may go on with what it was doing when the context was lost
    look_address: I8  # 0: a lost context is seen by the functions above alone
    look_ns: I8  # between two looks, at least
    looked_ns: I8  # when the last one was
    reached: I8  # the sum of this job's counters then


class Figures(Record):
    """What frameworks' statistics ask besides the job's record, as after the last call of a stream."""

    frees: I8  # tensors, ever
    freed_bytes: I8  # of the pool, ever
    held: I8  # regions
    returned: I8  # regions by which what is held has fallen between two calls, ever
    peak_tensors: I8  # this and what follows: since a framework began anew (``torch.cuda.reset_peak_memory_stats``)
    peak_live_bytes: I8
    peak_held: I8


class Captures(Record):
    """Memory of CUDA graphs (``zico.heap.cuda.captures``)."""

    graph_pools_address: I8
    n_graph_pools: I8  # entries used so far
    pieces_address: I8  # sorted by offset
    n_pieces: I8
    thread: I8  # pthread_self of the one whose requests the pool serves; 0: those of streams that capture
    stream: I8  # ours, for which segments are allocated; it never captures
    is_capturing_address: I8
    exchange_mode_address: I8
    synchronize_stream_address: I8


class Scrubbing(Record):
    """A pool that isolates jobs (``zico.heap.cuda.backing``)."""

    scrubs: I8  # regions scrubbed, ever
    address: I8  # 0 on the host device, whose kernel scrubs
    leaving_address: I8  # slots whose mappings must go (zico.heap.cuda.backing)
    n_leaving: I8
    leaving_next: I8  # which one is looked at next
