"""The heap of a job that may hold less than it needs: addresses for all of it, regions for what may be resident.

A tensor gets its place whatever the job holds. As long as the job may hold more it acquires a
region for each slot that comes into use. It gives the region's memory to the kernel, and lets pages
of the job's own count for it. The pager (``zico.paging.loop``) sees to which of them are there, and
gives regions back. All of it is inside the heap's mutex.

Guarantees
    Live tensors are never more than regions and tier can take, so that the tier is not full when a
    block has to leave.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, inlined, record_at, release_fence
from zico.base.libc import futex_wait, monotonic_ns, write_bytes
from zico.device import host
from zico.device.mapping import discard_piece
from zico.heap.layout import HEAP, device_of, job_of, pool_of, slots_of, wanted_of
from zico.paging.page_table import LEAST, PAGE_TABLE, RING, State, birth_of, death_of
from zico.pool import regions
from zico.pool.layout import NOBODY, cap_of, header_of
from zico.pool.results import GRANTED, MUST_WAIT, NEVER_FITS
from zico.tiers import stores
from zico.tiers.layout import STACK
from zico.trace import profile

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.paging.page_table import PageTable

_I64 = types.int64
_I4 = np.dtype("i4")
_I8 = np.dtype("i8")
_NAME_MASK = (1 << 62) - 1
_WRITTEN, _CLEAN, _OUT = int(State.WRITTEN), int(State.CLEAN), int(State.OUT)
_STANDS_AT = int(PAGE_TABLE.fields["stands"][1])
_READ_WRITE, _PRIVATE = host.PROT_READ_WRITE, host.RESERVED | host.MAP_FIXED
_EIO, _EINTR = errno.EIO, errno.EINTR

_mmap = types.ExternalFunction("mmap", types.int64(_I64, _I64, types.int32, types.int32, types.int32, _I64))
_pread = types.ExternalFunction("pread", types.int64(types.int32, _I64, _I64, _I64))
_errno_location = types.ExternalFunction("__errno_location", types.int64())


@inlined
def page_table_of(heap: HeapRecord) -> PageTable:
    """Return what the job shares with its pager."""
    return record_at(heap.paged.page_table_address, PAGE_TABLE)


@inlined
def _let_count(heap: HeapRecord, n: int) -> int:
    """Give the memory of regions that were granted to the kernel, and let pages of the job's own count for them."""
    granted = wanted_of(heap)
    table = page_table_of(heap)
    for i in range(n):
        region: int = np.int64(granted[i])  # type: ignore[assignment]  # bytes need 64 bits
        if not regions.has_pages(pool_of(heap), region):
            continue
        if not discard_piece(device_of(heap), region):
            regions.give_back_unused(pool_of(heap), granted, n)
            return NEVER_FITS
        regions.note_emptied(pool_of(heap), region)
    there = array_at(heap.paged.regions_address, table.n_regions, _I4)
    place = 0
    for i in range(n):
        while there[place] != NOBODY:  # the pager empties places, only this fills them
            place += 1
        there[place] = granted[i]
    release_fence()
    table.acquired += n
    me = job_of(heap)
    profile.raise_to(me.current, me.held)
    return GRANTED


@inlined
def _tell(heap: HeapRecord, table: PageTable, event: int) -> None:
    array_at(heap.paged.events_address, RING, _I8)[table.events & (RING - 1)] = event
    release_fence()
    table.events += 1


@inlined
def wake_pager(heap: HeapRecord) -> None:
    """Let the pager look whether there is something to do that no fault tells."""
    write_bytes(heap.paged.pager_fd, pool_of(heap).one_address, 8)


@callback(_I64(_I64, _I64, _I64, _I64))
def back(heap_address: int, _first: int, _last: int, n: int) -> int:
    """Let ``n`` more slots come into use; returns as ``zico.pool.regions.acquire``.

    ``NEVER_FITS``: neither what the job may hold nor its tier has room for them.
    """
    heap = record_at(heap_address, HEAP)
    table = page_table_of(heap)
    pool = pool_of(heap)
    me = job_of(heap)
    cap = cap_of(pool, me)
    needed = table.live_slots + n
    in_tier = (table.tier_blocks - 1) >> (table.region_shift - table.block_shift)  # one stays free for an exchange
    if needed > cap + in_tier:
        return NEVER_FITS
    missing = min(needed, cap) - me.held
    if missing <= 0:
        return GRANTED
    granted = wanted_of(heap)
    for i in range(missing):
        granted[i] = NOBODY
    status = regions.acquire(pool, granted, missing, 0)
    if status == GRANTED:
        return _let_count(heap, missing)
    return GRANTED if status == MUST_WAIT and heap.wait.frugal and me.held >= LEAST else status


@callback(types.void(_I64, _I64, _I64, _I64))
def entered(heap_address: int, offset: int, size_bytes: int, key: int) -> None:
    """Note that a tensor lies in a range, whose slots know already.

    The pager is told what comes: allocations follow each other as operations do.
    """
    heap = record_at(heap_address, HEAP)
    if offset >= heap.spill_offset:
        return
    table = page_table_of(heap)
    _tell(heap, table, key & _NAME_MASK)
    slots = slots_of(heap)
    for slot in range(offset >> heap.region_shift, ((offset + size_bytes - 1) >> heap.region_shift) + 1):
        table.live_slots += int(slots[slot].live == 1)
    table.most_live = max(table.most_live, table.live_slots)
    live = array_at(heap.paged.live_address, table.n_blocks, _I4)
    births = array_at(heap.paged.births_address, table.n_blocks, _I4)
    for block in range(offset >> table.block_shift, ((offset + size_bytes - 1) >> table.block_shift) + 1):
        if live[block] == 0:
            births[block] += np.int32(1)
            _tell(heap, table, birth_of(block))
        live[block] += np.int32(1)


@callback(types.void(_I64, _I64, _I64))
def left(heap_address: int, offset: int, size_bytes: int) -> None:
    """Note that a tensor does not lie in a range any more."""
    heap = record_at(heap_address, HEAP)
    table = page_table_of(heap)
    slots = slots_of(heap)
    emptied = 0
    for slot in range(offset >> heap.region_shift, ((offset + size_bytes - 1) >> heap.region_shift) + 1):
        slots[slot].live -= 1
        emptied += int(slots[slot].live == 0)
    table.live_slots -= emptied
    live = array_at(heap.paged.live_address, table.n_blocks, _I4)
    for block in range(offset >> table.block_shift, ((offset + size_bytes - 1) >> table.block_shift) + 1):
        live[block] -= np.int32(1)
        if live[block] == 0:
            _tell(heap, table, death_of(block))
    header = header_of(pool_of(heap))
    if emptied > 0 and (header.waiters > 0 or header.boundary_waiters > 0):
        wake_pager(heap)


@callback(_I64(_I64, _I64))
def give_way(heap_address: int, n: int) -> int:
    """Let the pager give ``n`` regions to jobs that could go on with them, but ``LEAST``.

    Returns:
        1 when it has; 0 at the first call, which asks.
    """
    heap = record_at(heap_address, HEAP)
    table = page_table_of(heap)
    if table.asking == 0:
        table.asking = 1
        table.asked += min(n, max(job_of(heap).held - LEAST, 0))
        wake_pager(heap)
        return 0
    if table.asked > table.yielded:
        return 0
    table.asking = 0
    return 1


# -- forks (zico.heap.fork) ------------------------------------------------------------------------


@callback(_I64(_I64, _I64))
def hold(heap_address: int, within_ns: int) -> int:
    """Let the pager change nothing from now on; waits until it does so. 0: it did not in time."""
    heap = record_at(heap_address, HEAP)
    table = page_table_of(heap)
    number: int = table.stands + np.int32(1)  # type: ignore[assignment] # 32 bits, as what it is compared with
    table.holds = number
    wake_pager(heap)
    until_ns = monotonic_ns() + within_ns
    while table.stands != number:
        if monotonic_ns() > until_ns:
            return 0
        futex_wait(heap.paged.page_table_address + _STANDS_AT, table.stands, pool_of(heap).poll_address)
    return 1


@callback(types.void(_I64))
def go_on(heap_address: int) -> None:
    """Let the pager go on."""
    heap = record_at(heap_address, HEAP)
    page_table_of(heap).holds = 0
    wake_pager(heap)


@inlined
def _read_whole(descriptor: int, address: int, length: int, offset: int) -> int:
    """Read a piece of memory that a descriptor stands for; returns 0 or errno."""
    done = 0
    while done < length:
        got = _pread(np.int32(descriptor), address + done, length - done, offset + done)
        if got > 0:
            done += got
        elif got == 0:
            return _EIO
        else:
            status = array_at(_errno_location(), 1, _I4)[0]
            if status != _EINTR:
                return status
    return 0


@callback(_I64(_I64, _I64, _I64, _I64, _I64, _I64))
def copy(
    heap_address: int, states_address: int, tickets_address: int, memory_fd: int, stack_address: int, told_fd: int
) -> int:
    """In a forked child, while the pager stands still: put private copies where blocks were in the parent.

    The window of a paged job is not in its child at all. What the child touched there would be
    filled with zeros for both processes. Each block that is copied is told by a byte.

    Returns:
        0 or errno: no memory, or what is out cannot be had back.
    """
    heap = record_at(heap_address, HEAP)
    table = page_table_of(heap)
    shift = table.block_shift
    live = array_at(heap.paged.live_address, table.n_blocks, _I4)
    states = array_at(states_address, table.n_blocks, _I4)
    tickets = array_at(tickets_address, table.n_blocks, _I4)
    for block in range(table.n_blocks):
        if live[block] == 0:
            continue
        at = heap.base + (block << shift)
        if _mmap(at, 1 << shift, _READ_WRITE, _PRIVATE, -1, 0) != at:
            return array_at(_errno_location(), 1, _I4)[0]
        status = 0
        if states[block] in (_WRITTEN, _CLEAN):
            status = _read_whole(memory_fd, at, 1 << shift, block << shift)
        elif states[block] == _OUT:
            ticket: int = np.int64(tickets[block])  # type: ignore[assignment]  # tickets have 64 bits elsewhere
            status = stores.get(record_at(stack_address, STACK), ticket, at, 1 << shift)
        if status != 0:
            return status
        write_bytes(told_fd, heap_address, 1)
    return 0
