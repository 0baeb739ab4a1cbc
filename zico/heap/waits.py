"""Wait for a place, and what happens when none comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import call, compiled, inlined, keep_out_of_line, monotonic_ns, private_lock, private_unlock
from zico.heap import evicting, following, placing, relief, resting
from zico.heap.placing import MUST_WAIT, NEVER_FITS, NO_SPACE
from zico.heap.records import SPILL, pool_of
from zico.pool import reserve, waiting

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

NEVER_NS = 200_000_000
"""How long another thread of the job may take to free something before a request is refused for good."""
SPILLS = -1


@compiled
def for_place(  # noqa: C901, PLR0912, PLR0915 - one loop, in which each end of the wait is a line
    heap: HeapRecord, me: Job, arena: int, planned: int, size_bytes: int, alignment: int
) -> tuple[int, int]:
    """Wait until a place is found; returns arena and offset. Enters and leaves inside the heap's mutex."""
    keep_out_of_line()
    pool = pool_of(heap)
    still_since_ns = monotonic_ns()
    asked_ns = 0
    deadline_ns = still_since_ns + heap.wait_limit_ns
    before = -1
    never_since_ns = np.int64(0)
    region_bytes = 1 << heap.pool_shift
    waiting.start_waiting(pool, (size_bytes + region_bytes - 1) >> heap.pool_shift)
    while True:
        bring_up(heap)
        evicting.obey(heap, me)
        sequence = waiting.sequence_of(pool)
        now_ns = monotonic_ns()
        offset = MUST_WAIT
        if evicting.is_complete(heap, me) or now_ns > heap.return_until_ns:
            offset = placing.place(heap, arena, planned, size_bytes, alignment)
            if relief.wants_guests(heap, me, arena, offset):
                offset = max(offset, placing.as_guest(heap, size_bytes, alignment))
        if offset < 0 and resting.makes_room(heap, me, offset):
            continue
        relieved = offset < 0 and now_ns < deadline_ns
        relieved = relieved and (relief.is_patient(heap) or relief.comes(heap, me, offset, sequence))
        if offset != NEVER_FITS or (heap.n_deferred > 0 and now_ns < deadline_ns):
            never_since_ns = np.int64(0)
        elif never_since_ns == 0:
            never_since_ns = now_ns
        never = not relieved and never_since_ns != 0 and now_ns - never_since_ns > NEVER_NS
        if offset >= 0 or offset == NO_SPACE or never:
            break
        now = waiting.standstill(pool)
        if now != before:
            before = now
            still_since_ns = now_ns
        stuck = not relieved and _is_stuck(heap, me, now_ns - still_since_ns)
        if offset == MUST_WAIT and stuck and resting.rest(heap, me, me.need) > 0:
            continue
        if offset == MUST_WAIT and stuck and heap.entered_address != 0:
            heap.frugal = 1
            offset = placing.place(heap, arena, planned, size_bytes, alignment)
            heap.frugal = 0
            if offset >= 0:
                break
        if offset == MUST_WAIT and (stuck or now_ns > deadline_ns):
            asked_ns = _next_tier(heap, me, sequence, now_ns, asked_ns, deadline_ns)
            if asked_ns == SPILLS:
                arena = SPILL
                offset = placing.place(heap, arena, following.NO_PLACE, size_bytes, alignment)
                break
        private_unlock(heap.mutex_address)
        waiting.sleep_until_change(pool, sequence)
        private_lock(heap.mutex_address)
    waiting.stop_waiting(pool)
    if offset < 0 and offset != NO_SPACE:
        offset = NEVER_FITS
        refuse(me, size_bytes)
    return arena, offset


@compiled
def for_return(heap: HeapRecord, me: Job) -> None:
    """Wait for what the job has evicted, unless it is to go on without. Enters and leaves inside the heap's mutex."""
    keep_out_of_line()
    if heap.return_until_ns == 0:
        return
    pool = pool_of(heap)
    still_since_ns = monotonic_ns()
    heap.return_until_ns = still_since_ns + evicting.patience_ns(heap)
    before = -1
    waiting.start_waiting(pool, me.evicted)
    while True:
        evicting.obey(heap, me)
        sequence = waiting.sequence_of(pool)
        if evicting.is_complete(heap, me):
            break
        now_ns = monotonic_ns()
        now = waiting.standstill(pool)
        if now != before:
            before = now
            still_since_ns = now_ns
        if now_ns > heap.return_until_ns or _is_stuck(heap, me, now_ns - still_since_ns):
            heap.return_until_ns = 0
            break
        private_unlock(heap.mutex_address)
        waiting.sleep_until_change(pool, sequence)
        private_lock(heap.mutex_address)
    waiting.stop_waiting(pool)


@compiled
def _is_stuck(heap: HeapRecord, me: Job, still_ns: int) -> bool:
    """Tell whether nobody can go on, nothing having moved for so long, and this job is to find a way."""
    keep_out_of_line()
    pool = pool_of(heap)
    patience_ns = waiting.patience_ns(pool, int(heap.overflow_address != 0))
    if patience_ns == waiting.STUCK_NS and heap.stuck_iteration == me.iteration + 1:
        patience_ns = -1  # it was stuck before, and so it is now: the others wait until it ends its iteration
    return still_ns > patience_ns and waiting.is_first_to_yield(pool)


@compiled
def _next_tier(heap: HeapRecord, me: Job, sequence: int, now_ns: int, asked_ns: int, deadline_ns: int) -> int:
    """Find a way on: without what the job has evicted, else with what others evict, else its tensor is to spill.

    Returns:
        Since when somebody is asked, for the next call; ``SPILLS``.
    """
    keep_out_of_line()
    pool = pool_of(heap)
    if heap.return_until_ns != 0:
        heap.return_until_ns = 0
        return asked_ns
    if now_ns <= deadline_ns and me.over == 0:
        answer = reserve.ask(pool, sequence)
        if answer == reserve.ASKED:
            waiting.note_stall(pool)
            heap.stuck_iteration = me.iteration + 1
            return now_ns
        since_ns = now_ns if asked_ns == 0 else asked_ns
        if answer == reserve.PENDING and now_ns - since_ns <= waiting.STUCK_NS:
            return since_ns
    waiting.note_stall(pool)
    heap.stuck_iteration = me.iteration + 1
    return SPILLS


@inlined
def bring_up(heap: HeapRecord) -> None:
    """Let the device have its say before anybody waits (``zico.heap.device``)."""
    if heap.n_streams > 0:
        call(heap.bring_up_address, (heap.address,))


@compiled
def refuse(me: Job, size_bytes: int) -> None:
    """Note a request that the budget can never meet."""
    keep_out_of_line()
    me.oom_request_bytes = size_bytes
    me.oom_held = me.held
    me.oom_count += 1
