"""What one pager keeps for itself: addresses differ from process to process."""

from __future__ import annotations

from typing import Annotated

from zico.records import I8, Numbers, Record, dtype_of

RECENT = 8
"""Blocks last brought in for faults that stay: more than one instruction touches, for each of two threads. Were one of
them the victim of the next fault, the instruction would fault for ever."""


class PagerRecord(Record):
    """One process's way to one paged job."""

    sheet_address: I8
    states_address: I8
    tickets_address: I8
    kept_address: I8
    live_address: I8
    births_address: I8
    regions_address: I8
    ring_address: I8
    memory_fd: I8
    memory_address: I8  # of this process's own mapping, by which nothing is ever touched that is missing
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
    stops: I8  # set from Python: the loop is to end
    runs: I8  # the thread is in compiled code, and needs nothing that a thread that faults may hold
    gave_up: I8  # blocks ever that nobody can have back
    message_address: I8  # what is said when data is lost
    message_bytes: I8
    write: I8
    kill: I8


PAGER = dtype_of(PagerRecord)
