"""The shared table: what every process of one pool sees, byte for byte.

One memfd holds a ``HEADER``, then ``n_regions`` times ``REGION``, then ``MAX_JOBS`` times ``JOB``. Compiled code and
the broker's Python read the same records; every write that more than one process may make happens under
``HEADER.mutex``, except words that have a single writer (a job's own ``progress``).

The truth about ownership is ``REGION.owner`` alone. Counters (``granted``, ``free``, ``held``) and the free list can
be rebuilt from it, which is what makes a death at any instruction recoverable.
"""

from __future__ import annotations

import enum

import numpy as np

from zico.trace.layout import CURVE, CURVE_BINS

MAGIC = 0x5A49434F_504F4F4C  # "ZICOPOOL"
VERSION = 1
MAX_JOBS = 64
"""Jobs of one pool at a time: one bit each in ``JOB.waits_for``."""

NOBODY = -1
MUTEX_BYTES = 64
"""Room for a ``pthread_mutex_t``: 40 bytes on x86-64, 48 on aarch64 (glibc)."""

NAME_BYTES = 48


class JobState(enum.IntEnum):
    """Where a job is in its iteration."""

    EMPTY = 0
    """No job has this place."""
    RUNNING = 1
    """Inside an iteration (the first one reaches from joining to the first boundary)."""
    BOUNDARY = 2
    """Between iterations, waiting to be admitted to the next."""
    LEAVING = 3
    """Its connection is closed but its process lives: keeps what it holds, gets nothing more."""


HEADER = np.dtype(
    [
        ("magic", "i8"),
        ("version", "i8"),
        ("region_bytes", "i8"),
        ("n_regions", "i8"),
        ("mutex", "u1", (MUTEX_BYTES,)),
        ("budget_regions", "i8"),  # may be lowered below n_regions while jobs run
        ("granted", "i8"),  # regions owned by jobs
        ("peak_granted", "i8"),
        ("free_head", "i4"),  # least recently released first
        ("free_tail", "i4"),
        ("use_claims", "i4"),  # 1: every grant must leave the state safe
        ("self_admit", "i4"),  # 1: a job whose whole iteration fits whatever the others do starts without asking
        ("alone_job", "i4"),  # the unprofiled job that is growing now, or NOBODY
        ("sequence", "i4"),  # futex word: changes whenever a wait may have ended
        ("waiters", "i4"),  # threads that wait in an allocation
        ("notified", "i4"),  # 1: the broker's eventfd has been written and not yet read
        ("boundary_waiters", "i4"),  # jobs in BOUNDARY that the broker must look at when memory comes back
        ("broker_pid", "i4"),
        ("places", "i4"),  # job records in use so far; those behind are empty
        ("alone_since_ns", "i8"),  # when alone_job last grew (CLOCK_MONOTONIC)
        ("recoveries", "i8"),  # times the mutex's owner had died
        ("stalls", "i8"),  # times no job could go on and one had to use the next tier
    ],
    align=True,
)

REGION = np.dtype(
    [
        ("owner", "i4"),  # job, or NOBODY
        ("last_owner", "i4"),  # whose fence guards it
        ("previous", "i4"),  # free list, NOBODY at the ends and when owned
        ("next", "i4"),
        ("fence", "i8"),  # free once jobs[last_owner].fence_passed has reached this
    ],
    align=True,
)

JOB = np.dtype(
    [
        # What every allocation and free touches comes first, on as few cache lines as can be.
        ("progress", "i8"),  # allocations and frees since the iteration began; single writer
        ("live_bytes", "i8"),  # tensors in the pool
        ("peak_live_bytes", "i8"),
        ("requested_bytes", "i8"),  # all tensors over the threshold, ever
        ("pooled_bytes", "i8"),  # those of them served from the pool
        ("allocations", "i8"),
        ("started_ns", "i8"),  # when the current iteration was admitted
        ("iteration_waited_ns", "i8"),  # of this iteration, in allocations
        ("iteration", "i8"),  # iterations completed
        ("held", "i8"),  # regions owned
        ("peak_held", "i8"),
        ("current", CURVE),  # the iteration in flight
        ("name", f"S{NAME_BYTES}"),
        ("state", "i4"),  # JobState
        ("pid", "i4"),
        ("profiled", "i4"),  # 1: profile and claims are known
        ("atypical", "i4"),  # iterations in a row that the profile does not describe
        ("waiting_threads", "i4"),  # threads of it that wait in an allocation
        ("broker_admits", "i4"),  # set by the broker to the low bits of the iteration it lets start (futex word)
        ("need", "i8"),  # regions asked for by a thread that waits in an allocation, else 0
        ("persistent", "i8"),  # regions held at the last boundary
        ("claim_peak", "i8"),  # most regions any recent iteration held
        ("claim_floor", "i8"),  # the least claim, from admission until the job has woken; else 0
        ("claim_extra", "i8"),  # regions by which this iteration has exceeded its profile
        ("fence_passed", "i8"),  # device-timeline progress; equal to what was released on the host device
        ("first_boundary_ns", "i8"),  # when the first and the last iteration ended (throughput between them)
        ("last_boundary_ns", "i8"),
        ("boundary_since_ns", "i8"),  # when the wait at the boundary began, 0 if none
        ("need_since_ns", "i8"),  # when the wait in an allocation began, 0 if none
        ("boundary_waited_ns", "i8"),
        ("need_waited_ns", "i8"),
        ("alone_spent_ns", "i8"),  # how long it has kept the others from starting iterations
        ("waits_for", "u8"),  # bit j: waits for job j
        ("spilled_bytes", "i8"),  # those of them placed in the next tier
        ("maps", "i8"),  # regions that had to be mapped anew (affinity missed)
        ("oom_request_bytes", "i8"),  # of the last refused request, 0 if none
        ("oom_held", "i8"),
        ("oom_count", "i8"),
        ("profile", CURVE),  # what an iteration does, learned; held is the envelope of recent iterations
        ("claims", "i4", (CURVE_BINS,)),  # most regions held from this bin to the end
        ("padding", "u1", (32,)),  # to whole cache lines, so that two jobs never write to the same one
    ],
    align=True,
)

MEMBER = np.dtype(
    [
        ("header_address", "i8"),
        ("mutex_address", "i8"),
        ("regions_address", "i8"),
        ("jobs_address", "i8"),
        ("job", "i8"),  # this process's job, NOBODY in the broker
        ("notify_fd", "i8"),  # eventfd that wakes the broker
        ("slice", "i8", (2,)),  # timespec: the longest sleep before a wait looks around again
        ("slice_address", "i8"),
        ("one", "i8"),  # what is written to the eventfd
        ("one_address", "i8"),
        ("scratch", "i8", (5, MAX_JOBS)),  # the banker's arrays
    ],
    align=True,
)
"""One process's private view of the table: addresses differ from process to process."""


def table_bytes(n_regions: int) -> int:
    """Return the size of the table for ``n_regions`` regions, in bytes."""
    return jobs_offset(n_regions) + MAX_JOBS * JOB.itemsize


def regions_offset() -> int:
    """Return where the region records begin, in bytes."""
    return HEADER.itemsize


def jobs_offset(n_regions: int) -> int:
    """Return where the job records begin, in bytes, aligned to a cache line."""
    end = regions_offset() + n_regions * REGION.itemsize
    return (end + 63) // 64 * 64
