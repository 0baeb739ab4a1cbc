"""A job that is in its own way asks whoever swaps for it to make room, and waits for that before anything else.

An allocation that waits holds no lock and has no Python. Beyond what the job may hold (its limit, or the whole budget)
no other job can help, but the job's own idle tensors can: a thread of it copies them to a tier and frees them
(``zico.swapping``). It is woken by an eventfd and answers in two words of the heap's record: how many questions it
has dealt with, and how many bytes leave.

    A thread that brings something back before it is needed is *patient*: it asks for no relief, which would send away
    what is needed sooner, and takes nothing from the next tier. Somebody who needs what it brings ends its patience.

Guarantees
    7. The wait for relief ends at the wait limit like every other. An answer by which nothing leaves ends it at once:
       the next question is put when the pool has changed, or the heap, or where a tensor is: what came back idle can
       leave again, and what leaves need not empty a region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.compiled import compiled, inlined, keep_out_of_line, write_bytes
from zico.heap.placing import MUST_WAIT, NEVER_FITS, NO_SPACE
from zico.heap.records import SPILL, pool_of

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

NOBODY_TO_ASK = -1
NOT_ASKED = -1
"""No state of pool and heap: the last answer says nothing about what has moved since."""
_EVENTS_SHIFT = 32
"""The pool's sequence has 32 bits; what comes free inside a region changes the heap's events alone."""


this_thread = types.ExternalFunction("pthread_self", types.int64())


@inlined
def is_patient(heap: HeapRecord) -> bool:
    """Tell whether the calling thread allocates for later."""
    return heap.patient_thread != 0 and heap.patient_thread == this_thread()


@inlined
def wants_guests(heap: HeapRecord, me: Job, arena: int, offset: int) -> bool:
    """Tell whether a tensor for which no region is to be had goes wherever the job's own regions have room for it."""
    at_limit = offset == NEVER_FITS or (offset == MUST_WAIT and me.over != 0)
    return heap.relief_fd != NOBODY_TO_ASK and arena < SPILL and at_limit


@compiled
def comes(heap: HeapRecord, me: Job, offset: int, sequence: int) -> bool:
    """Tell whether memory of the job is about to come free, asking for it if need be. Inside the heap's mutex.

    Args:
        heap: The HEAP record.
        me: The JOB record.
        offset: Why there is no place.
        sequence: How the pool was when that was found out.
    """
    keep_out_of_line()
    if heap.relief_fd == NOBODY_TO_ASK or offset == NO_SPACE or (offset != NEVER_FITS and me.over == 0):
        return False
    if heap.leaving_bytes > 0 or heap.relief_answered < heap.relief_asked:
        return True
    state = sequence + (heap.events << _EVENTS_SHIFT)
    if heap.relief_sequence == state:
        return False
    heap.relief_sequence = state
    heap.relief_asked += 1
    write_bytes(heap.relief_fd, pool_of(heap).one_address, 8)
    return True
