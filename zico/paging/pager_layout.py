"""What one pager keeps for itself: addresses differ from process to process."""

from __future__ import annotations

import numpy as np

RECENT = 8
"""Blocks last brought in for faults that stay: more than one instruction touches, for each of two threads. Were one of
them the victim of the next fault, the instruction would fault for ever."""

PAGER = np.dtype(
    [
        ("sheet_address", "i8"),
        ("states_address", "i8"),
        ("tickets_address", "i8"),
        ("kept_address", "i8"),
        ("live_address", "i8"),
        ("births_address", "i8"),
        ("regions_address", "i8"),
        ("ring_address", "i8"),
        ("memory_fd", "i8"),
        ("memory_address", "i8"),  # of this process's own mapping, by which nothing is ever touched that is missing
        ("user_address", "i8"),  # USERFAULT record
        ("stack_address", "i8"),  # STACK record of the tiers
        ("paging_address", "i8"),  # PAGING record
        ("member_address", "i8"),  # MEMBER record whose job is the paged one
        ("bounce_address", "i8"),  # a block's worth of memory
        ("fallocate", "i8"),
        ("wake_fd", "i8"),  # eventfd that ends the pager's sleep
        ("drain_address", "i8"),  # where what was written to it is read
        ("read", "i8"),
        ("events", "i8"),  # taken from the ring
        ("n_writable", "i8"),  # blocks ever that could come writable
        ("came_bytes", "i8"),  # that had come from the tiers when the iteration began
        ("went_bytes", "i8"),  # ... and had gone to them
        ("comes_bytes", "i8"),  # that came during the last iteration: what had to leave for one
        ("needed", "i8"),  # regions that the last iteration has needed at most, for what lived at once
        ("n_recent", "i8"),  # blocks ever brought in for a fault
        ("recent", "i4", (RECENT,)),  # the last ones, which do not leave
        ("starving_since_ns", "i8"),  # a fault waits for room, 0: none does
        ("starving_limit_ns", "i8"),
        ("stops", "i8"),  # set from Python: the loop is to end
        ("runs", "i8"),  # the thread is in compiled code, and needs nothing that a thread that faults may hold
        ("gave_up", "i8"),  # blocks ever that nobody can have back
        ("message_address", "i8"),  # what is said when data is lost
        ("message_bytes", "i8"),
        ("write", "i8"),
        ("kill", "i8"),
    ],
    align=True,
)
"""One process's way to one paged job."""
