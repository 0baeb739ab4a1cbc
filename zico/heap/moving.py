"""Orders to move blocks of a window that is managed memory, and who makes room for whom.

Orders go to a stream of our own: those out behind what the job's streams were given before, so that nothing goes that
is being used, and those in behind those out. Neighbours share one order.

Guarantees
    What the driver refuses counts as where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import array_at, compiled, inlined, keep_out_of_line, record_at
from zico.driver.managed import move
from zico.heap import streams
from zico.heap.managed_layout import MANAGED, MOVER_OFFSET
from zico.heap.records import job_of, pool_of
from zico.paging.eviction import choose_victim
from zico.paging.layout import NONE, PAGING
from zico.paging.resident import note_arrival, note_departure, release
from zico.pool.fences import issued_of, pair_of

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.heap.managed_layout import ManagedRecord
    from zico.paging.layout import PagingRecord

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
    """Order a run of blocks to a place."""
    address = heap.base + (first << heap.region_shift)
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
            release(paging, block)
    managed.n_silent = 0
