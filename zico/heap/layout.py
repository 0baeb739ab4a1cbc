"""The heap's private records: one process's window, cut into arenas, slots and blocks.

A window of four pool arenas and the next tier's; the first slot of Arena.LONG holds two tensors and
a gap::

    | EXTRA ... | LONG [tensor][tensor][ gap ... | SHORT ... | STATE ... | SPILL ... |
                  ^ slot 0          ^ slot 1

Offsets count from the start of the window. A block starts in a granule of its own, because no
tensor in the pool is smaller than a granule. So the granule's number finds the block.

On a device that takes every tensor each stream but the first has an arena of its own, before the
next tier's::

    ... | STATE | stream 1 ... | stream 2 ... | SPILL ...

What streams, small tensors and CUDA graphs need there is in ``zico.heap.cuda.layout``.

Compiled code finds the records by the functions below. This process's own heap record has a symbol,
to which the hooks' machine code refers (``zico.heap.hooks``).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import llvmlite.binding
import numpy as np

from zico.base.compiled import array_at, compiled, inlined, keep_out_of_line, record_at
from zico.base.libc import monotonic_ns
from zico.base.records import I4, I8, Numbers, Record, dtype_of
from zico.device.record import DEVICE
from zico.heap.cuda.layout import Captures, Figures, Scrubbing, Slab, Streams
from zico.pool.layout import MEMBER, cap_of, header_of, job_at
from zico.pool.mutex import announce
from zico.trace import profile
from zico.trace.online import Tracker
from zico.trace.phases import Phases

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.device.record import DeviceRecord
    from zico.pool.layout import Job, Member


GRANULE_SHIFT = 16
GRANULE_BYTES = 1 << GRANULE_SHIFT
"""The pool takes no smaller tensor (64 KiB)."""

ALIGNMENT_BYTES = 64
"""Every tensor gets this alignment, which PyTorch and TensorFlow ask for, too."""
MAX_ALIGNMENT_BYTES = 1 << 21
"""A window's start is aligned to a huge page; a request for more goes to the real allocator."""

MAX_GAPS = 1 << 16
KEYS = 1 << 16
COUNTS = 1 << 12
MAX_LIFETIMES = 1 << 16
"""So many tensors of one iteration can be planned; those behind are placed as they come."""
LOGS = 3
PLAN_ENTRIES = 1 << 17
FIRST_PLAN_INTERVAL = 2
"""At first so many iterations lie between a plan and the next one."""


class Arena(enum.IntEnum):
    """Where tensors of one class live. The first three are the tensor classes as lifetimes show them."""

    EXTRA = 0
    """Alive across an iteration's boundary. Also small ones of which nothing is known yet, and what a plan in force
    does not know: LONG is the plan's then."""
    LONG = 1
    """Feature and gradient maps: freed within the iteration, but not soon. Also large ones that are not known yet."""
    SHORT = 2
    """Temporaries: freed within a few events."""
    STATE = 3
    """What an optimizer keeps between its steps, and nothing else: its slots can be given away meanwhile."""
    SPILL = 4
    """The next tier: a file, on a GPU pinned memory of the host. Used only when nobody could go on otherwise."""


class Attached(enum.IntEnum):
    """What the hooks do with a request."""

    NO = 0
    YES = 1
    FORKED = 2
    """A child of the job: allocates privately; a free inside the window does nothing."""


class Gap(Record):
    """A free range of an arena."""

    start: I8
    size_bytes: I8


GAP = dtype_of(Gap)


class ArenaRecord(Record):
    """A stretch of the window and its sorted gaps."""

    start: I8
    end: I8
    n_gaps: I8
    gaps_address: I8
    states_address: I8  # of a paged job's blocks (zico.paging.page_table), 0: it does not page
    blocks_shift: I8  # the logarithm of the blocks in a slot


ARENA = dtype_of(ArenaRecord)


class Slot(Record):
    """Blocks that touch the slot; the region held for it, or held there last; the one mapped there (each or NOBODY)."""

    live: I4
    region: I4
    mapped: I4


SLOT = dtype_of(Slot)
NO_TENSOR = -1
"""A recorded trace has this in place of a tensor's number where there is none."""
PRIVATE = -3
"""``mapped`` says so: there are pages of this process alone (``zico.heap.evicting``). They are
evicted where ``region`` is NOBODY."""

STATE_AWAY = -4
"""``region`` says so: the slot's tensors are optimizer state outside the budget (``zico.heap.state_offload``)."""


class Block(Record):
    """A live tensor, by the granule in which it starts: its size, its offset, and what is known of it at its birth."""

    size_bytes: I8
    start: I8
    birth: I8
    iteration: I4
    key: I4  # of its class
    lifetime: I4  # index into the log of its iteration, or NOBODY
    number: I4  # of the tensor in a recorded trace


BLOCK = dtype_of(Block)


class Count(Record):
    """Tensors of one size in an iteration, counted."""

    size_bytes: I8
    iteration: I4
    n: I4


COUNT = dtype_of(Count)


class Lifetime(Record):
    """A tensor of an iteration: size and occurrence, and the heap's events at its birth and death (0: it lives)."""

    key: I8
    lower: I8
    upper: I8


LIFETIME = dtype_of(Lifetime)


class Log(Record):
    """What one iteration allocated. It is final when the next one has ended.

    By then what it left over has died or persists.
    """

    n: I8
    begin: I8  # the heap's events when the iteration began
    end: I8  # and when it ended
    bytes: I8  # of its tensors
    planned_bytes: I8  # of those that lie where the plan has them
    lifetimes_address: I8


LOG = dtype_of(Log)


class Pinned(Record):
    """A tensor that a plan has to be made round."""

    offset: I8
    size_bytes: I8


PINNED = dtype_of(Pinned)


class Place(Record):
    """Where the plan has a tensor, by size and occurrence; key 0: an empty entry of the table."""

    key: I8
    offset: I8


PLACE = dtype_of(Place)


class Backing(Record):
    """What is behind the window: C functions by address, chosen when the job attaches; 0: the plain host's way.

    A pool that isolates jobs, a paged job, a GPU, its managed memory and its pinned memory each put
    a module here (``zico.heap.build.Heap.back_with``). The first argument of each function is the
    heap's address.
    """

    device_address: I8  # DEVICE record, from which regions are mapped
    back: I8  # put memory behind empty slots, instead of regions that are mapped
    ready: I8  # make granted regions ready for use
    release: I8  # return the regions of empty slots
    entered: I8  # a tensor lies in a range
    left: I8  # it does no more
    give_way: I8  # evict for others
    bring_back: I8  # get that back in the budget
    bring_up: I8  # let the device have its say before the job stands still
    born: I8  # a stream allocates
    used: I8  # a stream frees
    overflow: I8  # put the next tier behind slots; 0 on a GPU: it has none
    retire: I8  # give that back


class Spill(Record):
    """The next tier: a file on the host device, pinned memory on a GPU."""

    fd: I8  # of the file, -1: there is none
    limit_bytes: I8  # most that may lie there
    live_bytes: I8  # that lie there now
    is_sparse: I8  # its file system sets no space aside: a full one shows as SIGBUS
    map_address: I8  # mmap(2) and fallocate(2)
    fallocate_address: I8
    pinned_address: I8  # handles of its memory on a GPU, a u8 a slot
    staging_address: I8  # of a region's size, where a GPU copies what changes places (zico.device.exchange)


class Wait(Record):
    """What allocations that wait remember (``zico.heap.reclaim``)."""

    limit_ns: I8  # after which an allocation goes to the next tier
    stuck_iteration: I8  # the last iteration in which nobody could go on, counted from one
    stuck_beside: I8  # who stood still then (zico.pool.waits.idlers), 0: nobody
    return_until_ns: I8  # the job waits until then for what it has evicted; 0: it does not
    again_ns: I8  # until then a GPU does not try again what it could not bring back at a boundary
    frugal: I8  # 1: what comes next is placed although no region is to be had for it
    between: I8  # 1: an iteration has ended and none has begun; so it stays if a handler of a signal has raised
    raise_address: I8  # of zico.heap.waiting.raise_kept
    error: Annotated[Numbers, "i8", (3,)]  # what a handler of a signal has raised: type, value, traceback; 0: nothing


WAIT = dtype_of(Wait)


class Swap(Record):
    """Questions to the thread that swaps, and its answers (``zico.heap.reclaim``)."""

    fd: I8  # eventfd that asks for room, -1: nobody is there to be asked
    asked: I8  # questions, ever
    answered: I8
    sequence: I8  # how pool and heap were at the last one
    patient_thread: I8  # pthread_self of one that allocates for later, 0: none
    leaving_bytes: I8  # of tensors that are being copied to a tier, and go when they have been
    overflows: I8  # 1: what exceeds all that the job may hold goes to the next tier, and is not refused
    start_fd: I8  # where it does: eventfd that has the job begin to swap
    lacked_bytes: I8  # held and requested when the job was first to begin, 0: it never was


class OptimizerState(Record):
    """Optimizer state that can leave between steps (``zico.heap.state_offload``)."""

    thread: I8  # pthread_self of one whose tensors go to STATE, 0: none
    may_leave: I8  # 1: between two steps
    limit: I8  # most slots that may be away
    in_use: I8  # slots in use in STATE when the last step ended
    away: I8  # slots whose tensors are outside the budget
    lacking: I8  # of them, those that others have the memory of: the job's profile counts them
    left: I8  # slots, ever
    returned: I8  # slots, ever
    late: I8  # steps that found some not back yet
    late_ns: I8  # for which these waited


class Planning(Record):
    """What the heap hands to the planner, and gets from it (``zico.heap.history``)."""

    next_address: I8  # a table that takes over at the next boundary, 0 if none
    next_iteration: I8  # no plan is asked for before
    interval: I8  # iterations; doubles with every plan that is not followed
    shortfall: I8  # iterations in a row that the plan does not describe
    fd: I8  # eventfd that wakes the planner, -1 if there is none
    asked: I4  # 1: ``handed`` waits for the planner
    followed: I8  # plans followed, ever
    handed: Log
    pinned_address: I8  # handed with it: PINNED, what persists where plans are made for
    n_pinned: I8


class Recording(Record):
    """Where events are recorded: what the last one said."""

    op: I8  # name of the operation that runs, as an adapter tells, or NO_NAME
    held: I8  # regions held by the last event that says so
    tensors: I8  # allocations, ever: numbers of tensors in a recorded trace


RECORDING = dtype_of(Recording)


class Paged(Record):
    """A job whose faults are served (``zico.heap.paged``)."""

    page_table_address: I8  # what the job shares with its pager (zico.paging.page_table)
    live_address: I8  # arrays of the page table
    births_address: I8
    regions_address: I8
    events_address: I8
    pager_fd: I8  # eventfd that wakes the pager
    apart: I8  # 1: temporaries lie in SHORT alone


class HeapRecord(Record):
    """The heap as a whole. What every allocation and free reads comes first, on as few cache lines as can be."""

    attached: I4
    region_shift: I4
    mutex: I4  # private: zico.base.compiled.private_lock
    marked: I4  # 1: boundaries are marked by an adapter or a call, so no period is looked for
    events: I8  # allocations and frees, ever
    base: I8  # the window
    window_bytes: I8
    spill_offset: I8  # where ARENA_SPILL begins
    threshold_bytes: I8
    mutex_address: I8
    member_address: I8
    arenas_address: I8
    slots_address: I8
    blocks_address: I8
    classes_address: I8
    counts_address: I8
    wanted_address: I8
    logs_address: I8
    log: I8  # the log of the iteration in flight
    plan_address: I8  # table of PLACE, 0: there is no plan
    planned_offset: I8  # where the arena begins that plans are made for
    ring_address: I8  # where events are recorded, 0: nowhere
    real_posix_memalign: I8
    real_free: I8
    real_aligned_alloc: I8
    bad_frees: I8  # frees inside the window of what is no live block
    grace: I8  # allocations before a boundary that was found rather than marked counts
    tracker: Tracker  # finds iterations where nothing marks them
    phases: Phases  # and what lies between marks
    address: I8  # of this record
    side_offset: I8  # where the arenas of the streams from slot 1 on begin; else the next tier's
    side_bytes: I8  # size of one of these
    pool_shift: I8  # log2 of the pool's regions, everywhere; slots are smaller there
    most_streams: I8  # streams that get a slot, everywhere; fewer there
    managed_address: I8  # MANAGED record, 0: the window is no managed memory
    backing: Backing
    optimizer: OptimizerState
    streams: Streams
    wait: Wait
    swap: Swap
    spill: Spill
    planning: Planning
    recording: Recording
    slab: Slab
    figures: Figures
    captures: Captures
    scrubbing: Scrubbing
    paged: Paged


HEAP = dtype_of(HeapRecord)


# -- the records from compiled code ----------------------------------------------------------------


LONG = int(Arena.LONG)
SHORT = int(Arena.SHORT)
EXTRA = int(Arena.EXTRA)
STATE = int(Arena.STATE)
SPILL = int(Arena.SPILL)
MAIN = 0
"""The first stream that was seen, or the host, has this slot: there tensors have classes, and plans."""

_ARENA_BYTES = ARENA.itemsize
_I32 = np.dtype("i4")

Array = Any


@inlined
def pool_of(heap: HeapRecord) -> Member:
    """Return this process's member record of the pool."""
    return record_at(heap.member_address, MEMBER)


@inlined
def job_of(heap: HeapRecord) -> Job:
    """Return this process's job record in the shared table."""
    pool = pool_of(heap)
    return job_at(pool, pool.job)


@inlined
def arena_of(heap: HeapRecord, index: int) -> ArenaRecord:
    """Return an arena."""
    return record_at(heap.arenas_address + index * _ARENA_BYTES, ARENA)


@inlined
def arena_at(heap: HeapRecord, offset: int) -> int:
    """Return the number of the arena in which an offset lies."""
    index = SPILL
    while offset < arena_of(heap, index).start:
        index -= 1
    if index == STATE and offset >= heap.side_offset:
        return SPILL + slot_at(heap, offset)
    return index


@inlined
def slot_at(heap: HeapRecord, offset: int) -> int:
    """Return the stream slot whose arena an offset lies in; the main stream's arenas and the next tier are slot 0's."""
    if offset < heap.side_offset or offset >= heap.spill_offset:
        return 0
    return 1 + (offset - heap.side_offset) // heap.side_bytes


@inlined
def slot_address(heap: HeapRecord, slot: int) -> int:
    """Return where a slot begins."""
    return heap.base + (slot << heap.region_shift)


@inlined
def device_of(heap: HeapRecord) -> DeviceRecord:
    """Return the device from which regions are mapped."""
    return record_at(heap.backing.device_address, DEVICE)


@inlined
def slots_of(heap: HeapRecord) -> Records[Slot]:
    """Return the slots of the window."""
    return array_at(heap.slots_address, heap.window_bytes >> heap.region_shift, SLOT)


@inlined
def block_at(heap: HeapRecord, offset: int) -> Block:
    """Return the record of the block that begins in the granule of an offset, if one does."""
    return array_at(heap.blocks_address, heap.window_bytes >> GRANULE_SHIFT, BLOCK)[offset >> GRANULE_SHIFT]


@inlined
def wanted_of(heap: HeapRecord) -> Array:
    """Return the scratch array of regions."""
    return array_at(heap.wanted_address, heap.window_bytes >> heap.region_shift, _I32)


@inlined
def wanted_here(heap: HeapRecord, me: Job) -> int:
    """Return the regions that the job would hold here if other jobs had left it all that it wants.

    A profile without them would let the next iteration begin with too little, and be stuck again.
    """
    held = me.held + me.evicted
    return max(held, min(held + heap.optimizer.lacking, cap_of(pool_of(heap), me)))


@inlined
def tick(heap: HeapRecord, me: Job) -> None:
    """Advance the job's progress by one event; opens a new bin of the curve when one is due."""
    heap.events += 1
    progress = me.progress + 1
    me.progress = progress
    if progress >> me.current.shift >= me.current.n_bins:
        _open_bin(heap, me)


@compiled
def _open_bin(heap: HeapRecord, me: Job) -> None:
    """Open a bin of the curve, and wake whoever waits for memory where the job's claim falls with it.

    A claim that falls may make a grant safe although nothing is given back.
    """
    keep_out_of_line()
    progress = me.progress
    t_ns = monotonic_ns() - me.started_ns - me.iteration_waited_ns
    profile.extend(me.current, progress, wanted_here(heap, me), t_ns)
    pool = pool_of(heap)
    if me.profiled == 1 and header_of(pool).waiters > me.waiting_threads:
        before = max(0, progress - (1 << me.current.shift))
        if profile.claim_at(me.profile, me.claims, progress) < profile.claim_at(me.profile, me.claims, before):
            announce(pool)


# -- this process's heap, where the compiled hooks find it -----------------------------------------


SYMBOL = "zico_process_heap"

HEAP_RECORD = np.zeros(1, HEAP)
"""It is never freed and never moved: hooks may run until the last instruction of the process."""

llvmlite.binding.add_symbol(SYMBOL, HEAP_RECORD.ctypes.data)
