"""What a job's heap and its pager share.

The *shared page table* is a ``PAGE_TABLE`` and arrays; the job's *memory* is a memfd with the pages
of its window. A block of the window is a piece of both, at ``block << block_shift``::

    states   i4 * n_blocks    written by the pager        live    i4 * n_blocks    written by the heap
    tickets  i4 * n_blocks    written by the pager        births  i4 * n_blocks    written by the heap
    kept     i4 * n_blocks    written by the pager        ring    i8 * RING        written by the heap
    regions  i4 * n_regions   filled by the heap, emptied by the pager in one step

The pager is a thread of the job, and ends with it. What it needs besides is in a record of its own
(``PagerRecord``).
"""

from __future__ import annotations

import enum
from typing import Annotated

from zico.base.compiled import inlined
from zico.base.records import I4, I8, Numbers, Record, dtype_of

# -- shared page table -----------------------------------------------------------------------------


RING = 1 << 14
"""Events that a pager may be behind; further back they are lost, and only prefetching suffers."""

LEAST = 4
"""Regions with which a job goes on where no more are to be had: an operation's operands, and one for another thread."""

NO_TICKET = -1


# -- events ----------------------------------------------------------------------------------------
# An execution's name is not negative. A block that comes into use or falls out of it is negative.


@inlined
def birth_of(block: int) -> int:
    """Return the event that a block comes into use."""
    return ~(block << 1 | 1)


@inlined
def death_of(block: int) -> int:
    """Return the event that a block falls out of use."""
    return ~(block << 1)


@inlined
def is_birth(event: int) -> bool:
    """Tell whether an event that is negative is a birth."""
    return ~event & 1 != 0


@inlined
def block_of(event: int) -> int:
    """Return the block of an event that is negative."""
    return ~event >> 1


# -- blocks ----------------------------------------------------------------------------------------


class State(enum.IntEnum):
    """Where a block's contents are, between two of the pager's steps."""

    ABSENT = 0
    """Nowhere: nothing was written to it, or what was there nobody needs. Reads as zeros."""
    WRITTEN = 1
    """In its pages alone, which the job may write to."""
    CLEAN = 2
    """In its pages, which are write-protected, and under its ticket in the tier."""
    OUT = 3
    """Under its ticket alone."""


class PageTable(Record):
    """What both sides know of the job's pages."""

    n_blocks: I8
    block_shift: I8
    n_regions: I8
    region_shift: I8
    window: I8  # where it begins in the job
    # Written by the heap.
    events: I8  # ever put in the ring
    acquired: I8  # regions, ever
    live_slots: I8  # slots in which something lives
    most_live: I8  # of them at once, since the pager has seen the iteration begin
    tier_blocks: I8  # that the tier has room for
    apart_from: I8  # where temporaries alone lie, in blocks: those stay, fewer than half of what may be there
    apart_to: I8  # the same: temporaries lie anywhere
    asked: I8  # regions that others were promised, ever
    asking: I8  # 1: the last of these are on their way
    holds: I4  # number of the fork that wants the pager to stand still, 0: none does
    stands: I4  # written by the pager: number of the last fork that it has stood still for
    # Written by the pager.
    returned: I8  # regions, ever
    yielded: I8  # of those that others were promised, ever
    resident: I8  # blocks that have pages, or are about to
    peak_resident: I8
    out_now: I8  # blocks whose contents are in the tier alone
    # Counted, ever.
    faults: I8  # on what was missing
    iteration: I8  # the present one
    late: I8  # faults on what was about to be prefetched
    evicted: I8  # copied out
    dropped: I8  # given up without a copy: unchanged, or nothing lives there
    out_bytes: I8
    in_bytes: I8
    waited_ns: I8  # between a fault's arrival here and its end


PAGE_TABLE = dtype_of(PageTable)


def offsets(n_blocks: int, n_regions: int) -> tuple[dict[str, int], int]:
    """Return where each array begins in the page table, by the name of its address, and its size in bytes."""
    found = {}
    at = _rounded(PAGE_TABLE.itemsize)
    for name in ("states", "tickets", "kept", "live", "births"):
        found[f"{name}_address"] = at
        at = _rounded(at + 4 * n_blocks)
    found["regions_address"] = at
    at = _rounded(at + 4 * n_regions)
    found["ring_address"] = at
    return found, _rounded(at + 8 * RING)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // 4096) * 4096


# -- the pager's own records -----------------------------------------------------------------------


RECENT = 8
"""Blocks last brought in for faults that stay: more than one instruction touches, for each of two threads. Were one of
them the victim of the next fault, the instruction would fault for ever."""


class PagerRecord(Record):
    """What the pager needs besides."""

    page_table_address: I8
    states_address: I8
    tickets_address: I8
    kept_address: I8
    live_address: I8
    births_address: I8
    regions_address: I8
    ring_address: I8
    memory_fd: I8
    memory_address: I8  # of a second mapping, by which nothing is ever touched that is missing
    user_address: I8  # USERFAULT record
    stack_address: I8  # STACK record of the tiers
    paging_address: I8  # PAGING record
    member_address: I8  # MEMBER record whose job is the paged one
    bounce_address: I8  # a block's worth of memory
    fallocate: I8
    wake_fd: I8  # eventfd that ends the pager's sleep
    drain_address: I8  # where what was written to it is read
    read: I8
    events: I8  # taken from the ring
    n_writable: I8  # blocks ever that could come writable
    came_bytes: I8  # that had come from the tiers when the iteration began
    went_bytes: I8  # ... and had gone to them
    comes_bytes: I8  # that came during the last iteration: what had to leave for one
    needed: I8  # regions that the last iteration has needed at most, for what lived at once
    n_recent: I8  # blocks ever brought in for a fault
    recent: Annotated[Numbers, "i4", (RECENT,)]  # the last ones, which do not leave
    starving_since_ns: I8  # a fault waits for room, 0: none does
    starving_limit_ns: I8
    stops: I8  # set by tests: the loop is to end
    runs: I8  # the thread is in compiled code, and needs nothing that a thread that faults may hold
    gave_up: I8  # blocks ever that nobody can have back
    message_address: I8  # what is said when data is lost
    message_bytes: I8
    pid: I8
    write: I8
    kill: I8


PAGER = dtype_of(PagerRecord)
