"""Wait for a place, and what happens when none comes."""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.compiled import call, compiled, inlined, keep_out_of_line, monotonic_ns, private_lock, private_unlock
from zico.heap import following, placing
from zico.heap.placing import MUST_WAIT, NEVER_FITS, NO_SPACE
from zico.heap.records import SPILL, pool_of
from zico.pool import waiting

NEVER_NS = 200_000_000
"""How long another thread of the job may take to free something before a request is refused for good."""

Record = Any


@compiled
def for_place(heap: Record, me: Record, arena: int, planned: int, size_bytes: int, alignment: int) -> tuple[int, int]:
    """Wait until a place is found; returns arena and offset. Enters and leaves inside the heap's mutex."""
    keep_out_of_line()
    pool = pool_of(heap)
    deadline_ns = monotonic_ns() + heap.wait_limit_ns
    before = -1
    still_since_ns = monotonic_ns()
    never_since_ns = np.int64(0)
    region_bytes = 1 << heap.region_shift
    waiting.start_waiting(pool, (size_bytes + region_bytes - 1) >> heap.region_shift)
    while True:
        bring_up(heap)
        sequence = waiting.sequence_of(pool)
        offset = placing.place(heap, arena, planned, size_bytes, alignment)
        now_ns = monotonic_ns()
        if offset != NEVER_FITS or (heap.n_deferred > 0 and now_ns < deadline_ns):
            never_since_ns = np.int64(0)
        elif never_since_ns == 0:
            never_since_ns = now_ns
        never = never_since_ns != 0 and now_ns - never_since_ns > NEVER_NS
        if offset >= 0 or offset == NO_SPACE or never:
            break
        now = waiting.standstill(pool)
        if now != before:
            before = now
            still_since_ns = now_ns
        patience_ns = waiting.patience_ns(pool)
        if patience_ns == waiting.STUCK_NS and heap.stuck_iteration == me.iteration + 1:
            patience_ns = -1  # it was stuck before, and so it is now: the others wait until it ends its iteration
        stuck = now_ns - still_since_ns > patience_ns and waiting.is_first_to_yield(pool)
        if offset == MUST_WAIT and (stuck or now_ns > deadline_ns):
            arena = SPILL
            offset = placing.place(heap, arena, following.NO_PLACE, size_bytes, alignment)
            waiting.note_stall(pool)
            heap.stuck_iteration = me.iteration + 1
            break
        private_unlock(heap.mutex_address)
        waiting.sleep_until_change(pool, sequence)
        private_lock(heap.mutex_address)
    waiting.stop_waiting(pool)
    if offset < 0 and offset != NO_SPACE:
        offset = NEVER_FITS
        refuse(me, size_bytes)
    return arena, offset


@inlined
def bring_up(heap: Record) -> None:
    """Let the device have its say before anybody waits (``zico.heap.device``)."""
    if heap.n_streams > 0:
        call(heap.bring_up_address, (heap.address,))


@compiled
def refuse(me: Record, size_bytes: int) -> None:
    """Note a request that the budget can never meet."""
    keep_out_of_line()
    me.oom_request_bytes = size_bytes
    me.oom_held = me.held
    me.oom_count += 1
