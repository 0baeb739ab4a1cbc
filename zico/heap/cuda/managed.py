"""The heap of a job on a GPU that may hold less than it needs: its window is managed memory, and residency is steered.

Theory of operation
    Faults of a GPU are not seen in user space. What is seen is when a tensor is allocated and when
    it is freed, whose last use came just before. So a block (a slot of the window, 2 MiB) counts as
    touched then. The tables of ``zico.paging.needed_next`` learn from these touches, and predict
    the next ones. Each allocation is an execution, named by size and occurrence. A block is
    resident when it was last told to be::

        allocate x   touch x's blocks: in, and others out for them     note_execution, note_fault, move
                     what the next executions touch: in, if what they do not touch can go
        free x       touch x's blocks: learned, nothing is moved

    What the job may have resident is what it holds in the pool's table, regions by number alone: the pool's own memory
    behind them stays idle.

    Orders to move go to a stream of our own. Those out go behind what the job's streams were given before, so that
    nothing goes that is being used; those in go behind those out. The job's streams never wait for it: memory is the
    same wherever it is, so a wrong order costs time, never a byte. Neighbours share one order.

    What lives and was not touched for a whole iteration is used in ways that are not seen, as weights are. It goes
    last, and comes back at a boundary if there is room.

Guarantees
    A tensor gets its place whatever the job holds, if the window has room and the job holds one
    region. What the driver refuses leaves everything where it was, also in our count.

Known limitations
    No job of a framework has paged on a GPU. What is out and dead is copied all the same, both ways: nothing says
    so to the driver. What the job holds is given back only under pressure, on its next call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, compiled, inlined, keep_out_of_line, record_at
from zico.base.records import I8, Record, dtype_of
from zico.device.mapping import move
from zico.device.record import Mover
from zico.heap.cuda import on_stream, slab, streams
from zico.heap.layout import HEAP, MAIN, block_at, job_of, pool_of, slot_address, slots_of, wanted_of
from zico.paging.layout import INACTIVE, NONE, PAGING, RESIDENT
from zico.paging.needed_next import choose_victim, choose_victim_ahead, next_prefetch, note_execution, note_fault
from zico.paging.residency import block_at as known_at
from zico.paging.residency import hold, is_expected, note_active, note_arrival, note_departure, note_inactive, renew
from zico.paging.residency import release as end_hold
from zico.pool import regions
from zico.pool.fences import NO_FENCE
from zico.pool.layout import NOBODY, cap_of, header_of, issued_of, pair_of
from zico.pool.results import BEHIND, GRANTED, MUST_WAIT
from zico.trace import profile

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.paging.layout import PagingRecord


# -- records ---------------------------------------------------------------------------------------


class ManagedRecord(Record):
    """One job's steering. All of it inside the heap's mutex."""

    mover: Mover
    paging_address: I8  # PAGING record of the tables
    touched_address: I8  # the iteration of each block's last touch + 1, an i8 each
    held_address: I8  # regions held, by number, an i4 each
    n_held: I8
    n_regions: I8  # of the pool
    blocks_shift: I8  # log2 of the blocks in a region
    iteration: I8  # the job's, when a tensor was allocated last
    live: I8  # blocks in which something lives
    resident: I8  # blocks that are there by our count
    n_silent: I8  # blocks that live and were not touched in the last iteration: they go last
    busy: I8  # a bit for each stream slot that was given work since our stream last waited
    first_out: I8  # blocks that have counted as gone, and are to be ordered out
    n_out: I8
    first_in: I8  # and in, afterwards
    n_in: I8
    # Counted in blocks, ever.
    touches: I8
    missed: I8  # of those, of blocks with something in them that were out
    prefetched: I8
    peak: I8  # most that were resident by our count


MANAGED = dtype_of(ManagedRecord)
MOVER_OFFSET = MANAGED.fields["mover"][1]


# -- orders to the driver --------------------------------------------------------------------------


_I8 = np.dtype("i8")


@inlined
def managed_of(heap: HeapRecord) -> ManagedRecord:
    """Return how the job's window is steered."""
    return record_at(heap.managed_address, MANAGED)


@inlined
def paging_of(managed: ManagedRecord) -> PagingRecord:
    """Return what is learned."""
    return record_at(managed.paging_address, PAGING)


@inlined
def allowance(heap: HeapRecord, managed: ManagedRecord) -> int:
    """Return the blocks that may be resident."""
    return job_of(heap).held << managed.blocks_shift


@compiled
def _follow(heap: HeapRecord, managed: ManagedRecord) -> None:
    """Let our stream wait for what the job's streams were given until now, so that nothing goes that is being used."""
    keep_out_of_line()
    pool = pool_of(heap)
    for slot in range(heap.streams.n):
        if managed.busy >> slot & 1 != 0 and streams.mark(heap, slot):
            pair = pair_of(pool.job, slot)
            streams.wait_on_device(heap, managed.mover.stream, pair, issued_of(pool)[pair])
    managed.busy = 0


@inlined
def _order(heap: HeapRecord, first: int, n: int, location: int) -> bool:
    address = slot_address(heap, first)
    if move(heap.managed_address + MOVER_OFFSET, address, n << heap.region_shift, location):
        return True
    heap.streams.failures += 1
    return False


@compiled
def _flush_out(heap: HeapRecord, managed: ManagedRecord) -> None:
    """Order what is to go out; what the driver refuses counts as there."""
    keep_out_of_line()
    paging = paging_of(managed)
    n = managed.n_out
    managed.n_out = 0
    _follow(heap, managed)
    if _order(heap, managed.first_out, n, managed.mover.to_host):
        job_of(heap).out_bytes += n << heap.region_shift
    else:
        for block in range(managed.first_out, managed.first_out + n):
            note_arrival(paging, block)
        managed.resident += n


@compiled
def flush(heap: HeapRecord, managed: ManagedRecord) -> None:
    """Order what is to go out, and then what is to come in; what the driver refuses counts as where it was."""
    if managed.n_out > 0:
        _flush_out(heap, managed)
    if managed.n_in == 0:
        return
    paging = paging_of(managed)
    n = managed.n_in
    managed.n_in = 0
    if _order(heap, managed.first_in, n, managed.mover.to_device):
        job_of(heap).in_bytes += n << heap.region_shift
    else:
        for block in range(managed.first_in, managed.first_in + n):
            note_departure(paging, block)
        managed.resident -= n
    managed.peak = max(managed.peak, managed.resident)


@compiled
def send(heap: HeapRecord, managed: ManagedRecord, block: int) -> None:
    """Let a resident block go out, in one order with its neighbours."""
    first, n = managed.first_in, managed.n_in
    if first <= block < first + n:
        flush(heap, managed)
    if managed.n_out > 0 and block == managed.first_out - 1:
        managed.first_out = block
    elif managed.n_out == 0 or block != managed.first_out + managed.n_out:
        if managed.n_out > 0:
            _flush_out(heap, managed)
        managed.first_out = block
    managed.n_out += 1
    managed.resident -= 1
    note_departure(paging_of(managed), block)


@compiled
def fetch(heap: HeapRecord, managed: ManagedRecord, block: int) -> None:
    """Let a block that is out come in, in one order with its neighbours."""
    if managed.n_in > 0 and block != managed.first_in + managed.n_in:
        flush(heap, managed)
    if managed.n_in == 0:
        managed.first_in = block
    managed.n_in += 1
    managed.resident += 1
    note_arrival(paging_of(managed), block)


@compiled
def make_room(heap: HeapRecord, managed: ManagedRecord, n: int) -> None:
    """Let blocks go until ``n`` more may be resident, or none is left that can."""
    paging = paging_of(managed)
    lacking = managed.resident + n - allowance(heap, managed)
    for _ in range(lacking):  # not until there is room: a driver that refuses every order would keep it away
        block = choose_victim(paging)
        if block == NONE and managed.n_silent > 0:
            _give_up_silent(managed)
            block = choose_victim(paging)
        if block == NONE:
            break
        send(heap, managed, block)


@compiled
def _give_up_silent(managed: ManagedRecord) -> None:
    """Let what is used unseen be evicted as everything else, since nothing else is left."""
    keep_out_of_line()
    paging = paging_of(managed)
    touched = array_at(managed.touched_address, paging.n_blocks, _I8)
    for block in range(paging.n_blocks):
        if touched[block] < managed.iteration:
            end_hold(paging, block)
    managed.n_silent = 0


# -- what is resident ------------------------------------------------------------------------------


MOST_AHEAD = 64
"""One allocation asks for so many blocks ahead (128 MiB): a bus of 16 GB/s moves them in 8 ms."""

_NEW_AND_ANOTHER = 2
_I64 = types.int64
_I4 = np.dtype("i4")


# -- touches ---------------------------------------------------------------------------------------


@compiled
def _bring(heap: HeapRecord, managed: ManagedRecord, first: int, last: int) -> None:
    """Let blocks that are touched now be there; none of them goes for another."""
    paging = paging_of(managed)
    missing = 0
    for block in range(first, last + 1):
        hold(paging, block)
        missing += int(not known_at(paging, block).state & RESIDENT)
    if missing > 0:
        make_room(heap, managed, missing)
    for block in range(first, last + 1):
        if known_at(paging, block).state & RESIDENT:
            end_hold(paging, block)
            renew(paging, block)
        else:
            fetch(heap, managed, block)


@compiled
def _learn(heap: HeapRecord, managed: ManagedRecord, first: int, last: int, others: int) -> None:
    """Let the tables know that blocks are touched; ``others``: least tensors in a block for what is there to matter."""
    paging = paging_of(managed)
    slots = slots_of(heap)
    touched = array_at(managed.touched_address, paging.n_blocks, _I8)
    me = job_of(heap)
    for block in range(first, last + 1):
        managed.touches += 1
        if slots[block].live >= others and not known_at(paging, block).state & RESIDENT:
            managed.missed += 1
            me.late += int(is_expected(paging, block))
        note_fault(paging, block)
        end_hold(paging, block)
        touched[block] = managed.iteration + 1


@compiled
def _look_ahead(heap: HeapRecord, managed: ManagedRecord) -> None:
    """Bring in what the next executions touch, as far as there is room or what is not touched sooner can go.

    Where nothing lives, what comes there is written first: such a block comes when a tensor is
    allocated in it.
    """
    paging = paging_of(managed)
    for _ in range(MOST_AHEAD):
        block = next_prefetch(paging)
        if block == NONE:
            break
        if known_at(paging, block).state & INACTIVE:
            continue  # held until then
        if managed.resident >= allowance(heap, managed):
            victim = choose_victim_ahead(paging)
            if victim == NONE:
                end_hold(paging, block)
                break
            send(heap, managed, victim)
        managed.prefetched += 1
        fetch(heap, managed, block)


@compiled
def _turn(heap: HeapRecord, managed: ManagedRecord) -> None:
    """Begin an iteration: find what lives and was not touched in the last one, and bring it back if it is out."""
    keep_out_of_line()
    paging = paging_of(managed)
    slots = slots_of(heap)
    me = job_of(heap)
    touched = array_at(managed.touched_address, paging.n_blocks, _I8)
    managed.n_silent = 0
    out = there = 0
    for block in range(paging.n_blocks):
        end_hold(paging, block)
        there += int(slots[block].live > 0 and known_at(paging, block).state & RESIDENT != 0)
        if slots[block].live > 0 and touched[block] <= managed.iteration:
            hold(paging, block)
            managed.n_silent += 1
    for block in range(paging.n_blocks):
        if slots[block].live > 0 and not known_at(paging, block).state & RESIDENT:
            if there < allowance(heap, managed) and touched[block] <= managed.iteration:
                there += 1
                make_room(heap, managed, 1)
                fetch(heap, managed, block)
                hold(paging, block)
            else:
                out += 1
    me.out_now_bytes = out << heap.region_shift
    managed.iteration = me.iteration


@callback(types.void(_I64, _I64, _I64))
def born(heap_address: int, offset: int, slot: int) -> None:
    """Note that a tensor is allocated for the stream in a slot: an execution begins, and touches its blocks."""
    heap = record_at(heap_address, HEAP)
    managed = managed_of(heap)
    managed.busy |= 1 << slot
    if job_of(heap).iteration != managed.iteration:
        _turn(heap, managed)
    first = last = offset >> heap.region_shift
    if slab.chunk_at(heap, offset) == NOBODY:
        block = block_at(heap, offset)
        last = (offset + block.size_bytes - 1) >> heap.region_shift
        name = block.key if slot == MAIN else -block.size_bytes - slot
        note_execution(paging_of(managed), name)
        _learn(heap, managed, first, last, _NEW_AND_ANOTHER)
    _bring(heap, managed, first, last)
    _look_ahead(heap, managed)
    flush(heap, managed)


@callback(types.void(_I64, _I64, _I64))
def used(heap_address: int, offset: int, slot: int) -> None:
    """Note that a tensor is freed on the stream in a slot, which has just been given its last use."""
    heap = record_at(heap_address, HEAP)
    managed = managed_of(heap)
    managed.busy |= 1 << min(slot, streams.NO_SLOT - 1)
    if slab.chunk_at(heap, offset) == NOBODY:
        last = (offset + block_at(heap, offset).size_bytes - 1) >> heap.region_shift
        _learn(heap, managed, offset >> heap.region_shift, last, 1)


# -- what is held ----------------------------------------------------------------------------------


@inlined
def _needed(heap: HeapRecord, managed: ManagedRecord) -> int:
    """Return the regions that the job should hold: for all that lives, as far as it may."""
    per_region = 1 << managed.blocks_shift
    regions_of_live = (managed.live + per_region - 1) >> managed.blocks_shift
    return min(regions_of_live, cap_of(pool_of(heap), job_of(heap)))


@compiled
def _acquire_one(heap: HeapRecord, managed: ManagedRecord) -> int:
    """Acquire a region by number; one that the device still uses is left to those that need its memory."""
    pool = pool_of(heap)
    wanted = wanted_of(heap)
    wanted[0] = NOBODY
    status = regions.acquire(pool, wanted, 1, MAIN)
    if status == BEHIND:
        streams.drop_waits(heap)
        regions.give_back_unused(pool, wanted, 1)
        return MUST_WAIT
    if status == GRANTED:
        array_at(managed.held_address, managed.n_regions, _I4)[managed.n_held] = wanted[0]
        managed.n_held += 1
    return status


@callback(_I64(_I64, _I64, _I64, _I64))
def back(heap_address: int, first: int, last: int, n: int) -> int:
    """Let ``n`` more slots of a run come into use; returns as ``regions.acquire``, at best ``GRANTED``.

    The job acquires what it should hold, unless others wait for memory, and goes on with what it
    gets, at least one.
    """
    heap = record_at(heap_address, HEAP)
    managed = managed_of(heap)
    me = job_of(heap)
    managed.live += n
    status = GRANTED
    others_wait = header_of(pool_of(heap)).waiters > me.waiting_threads
    while me.held < _needed(heap, managed) and status == GRANTED and not (others_wait and me.held > 0):
        status = _acquire_one(heap, managed)
    if me.held == 0:
        managed.live -= n
        return MUST_WAIT if status == GRANTED else status
    profile.raise_to(me.current, me.held)
    for slot in range(first, last + 1):
        if slots_of(heap)[slot].live == 0:
            note_active(paging_of(managed), slot)
    return GRANTED


@compiled
def _give_back_spare(heap: HeapRecord, managed: ManagedRecord) -> None:
    """Return to the pool what the job holds beyond what lives or what it may hold, and let go as much."""
    keep_out_of_line()
    me = job_of(heap)
    spare = me.held - _needed(heap, managed)
    if spare <= 0:
        return
    given = wanted_of(heap)
    held = array_at(managed.held_address, managed.n_regions, _I4)
    managed.n_held -= spare
    for i in range(spare):
        given[i] = held[managed.n_held + i]
    regions.give_back(pool_of(heap), given, spare, NO_FENCE)
    make_room(heap, managed, 0)
    flush(heap, managed)


@inlined
def _is_wanted(heap: HeapRecord) -> bool:
    me = job_of(heap)
    header = header_of(pool_of(heap))
    others_wait = header.waiters > me.waiting_threads or header.boundary_waiters > 0
    return others_wait or me.held > cap_of(pool_of(heap), me)


@callback(types.void(_I64, _I64, _I64, _I64))
def release(heap_address: int, first: int, last: int, n: int) -> None:
    """Note that ``n`` slots of a run are empty, and let what comes next have their room, or others what is held."""
    heap = record_at(heap_address, HEAP)
    managed = managed_of(heap)
    for slot in range(first, last + 1):
        if slots_of(heap)[slot].live == 0:
            note_inactive(paging_of(managed), slot)
            end_hold(paging_of(managed), slot)
    managed.live -= n
    if _is_wanted(heap):
        _give_back_spare(heap, managed)
    _look_ahead(heap, managed)
    flush(heap, managed)


@callback(types.void(_I64))
def bring_up(heap_address: int) -> None:
    """Before the job may stand still: free what waits for other streams; under pressure, return what is not needed."""
    heap = record_at(heap_address, HEAP)
    on_stream.hand_over(heap)
    streams.flush(heap)
    if _is_wanted(heap):
        _give_back_spare(heap, managed_of(heap))
