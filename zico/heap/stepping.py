"""Before an optimizer's step: what rests comes back (``zico.heap.resting``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled, entry, keep_out_of_line, monotonic_ns, private_lock, private_unlock
from zico.heap import evicting, resting, waits
from zico.heap.layout import HEAP, Attached
from zico.heap.records import job_of, pool_of
from zico.pool.shared import cap_of
from zico.trace import curve

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

_ATTACHED = int(Attached.YES)


@entry(HEAP)
def begin_step(heap: HeapRecord) -> None:
    """Have back in the budget what rests; nothing rests until ``resting.end_step``.

    Waits for regions, but not for good (``zico.heap.evicting``). What would be beyond what the job may hold is not
    waited for: it stays where it is, and counts as overflowed.
    """
    keep_out_of_line()
    if heap.attached != _ATTACHED:
        return
    me = job_of(heap)
    private_lock(heap.mutex_address)
    heap.may_rest = 0
    if heap.resting > 0:
        _wake(heap, me)
    private_unlock(heap.mutex_address)


@entry(HEAP)
def wake_ahead(heap: HeapRecord) -> int:
    """Have back in the budget as much of what rests as there is room for, before the step; returns the slots.

    Waits for nothing. What finds no room later in this iteration can send it away again.
    """
    keep_out_of_line()
    me = job_of(heap)
    n = 0
    private_lock(heap.mutex_address)
    room = cap_of(pool_of(heap), me) - me.held
    if heap.attached == _ATTACHED and heap.may_rest != 0 and me.evicted == 0 and min(heap.resting, room) > 0:
        n = min(heap.resting, room)
        resting.expect(heap, me, n)
        if evicting.is_complete(heap, me):
            heap.woken += n
            curve.raise_to(me.current, me.held)
        else:
            resting.let_rest(heap, me)
            n = 0
    private_unlock(heap.mutex_address)
    return n


@compiled
def _wake(heap: HeapRecord, me: Job) -> None:
    keep_out_of_line()
    began_ns = monotonic_ns()
    before = heap.resting
    resting.expect(heap, me, max(cap_of(pool_of(heap), me) - me.held - me.evicted, 0))
    if not evicting.is_complete(heap, me):
        heap.return_until_ns = began_ns + evicting.patience_ns(heap)
        waits.for_return(heap, me)
    heap.late += 1
    heap.late_ns += monotonic_ns() - began_ns
    out = heap.resting + me.evicted
    heap.woken += max(before - out, 0)
    me.spilled_bytes += out << heap.pool_shift
    curve.raise_to(me.current, me.held + me.evicted)
