"""What an optimizer keeps between its steps leaves the budget meanwhile, and is back before the next step begins.

Theory of operation
    It lies in an arena of its own, so that nothing else is in its slots. What an optimizer
    allocates in its first step goes there. Between two steps nobody needs it, in the forward and
    backward pass, where the job's peak is. When an allocation finds no room inside what the job may
    hold, as many slots leave as it lacks. They get pages of the process's own, as in an eviction
    (``zico.heap.evicting``). The thread that allocates gives their regions back to the pool at
    once. Before the next step regions are acquired for them. They count for the pages then::

        step | forward ........ backward ...... | step          time ->
        held | held    | away          | away   | held          a slot of STATE
               tight:    regions go      no room yet, or still   acquired: back before the step

    So there is one copy, when a slot leaves for the first time; from then on what changes is who
    else may use memory.

Guarantees
    1. What is in the budget between two steps is what has regions. What is away is in the tier that
       memory of this process is, and no more of it than the job's tiers allow.
    4. and 6. Whoever reads or writes what is away, at any time, by whatever way, finds it at its
       address.
    A step never waits for good: what cannot come back stays where it is, and counts as overflowed.

Known limitations
    The host device only: a GPU has no pages of a process's own to put at an address in one step.
    What is away stays in this process's memory; tiers below that do not take it. What an optimizer
    makes in a later step than its first, or when it is constructed, does not leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, entry, inlined, keep_out_of_line
from zico.base.libc import monotonic_ns, private_lock, private_unlock
from zico.heap import evicting, waiting
from zico.heap.layout import HEAP, STATE, STATE_AWAY, Attached, arena_of, job_of, pool_of, slots_of, wanted_of
from zico.pool import regions
from zico.pool.fences import NO_FENCE
from zico.pool.layout import NOBODY, cap_of
from zico.trace import profile

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

_ATTACHED = int(Attached.YES)


@inlined
def _first(heap: HeapRecord) -> int:
    return arena_of(heap, STATE).start >> heap.region_shift


@inlined
def _end(heap: HeapRecord) -> int:
    return arena_of(heap, STATE).end >> heap.region_shift


# -- out -------------------------------------------------------------------------------------------


@compiled
def send(heap: HeapRecord, me: Job, most: int) -> int:
    """Let so many slots leave, or as many as can; returns how many. Inside the heap's mutex."""
    keep_out_of_line()
    if heap.optimizer.may_leave == 0:
        return 0
    most = min(most, evicting.room(heap, me), heap.optimizer.limit - heap.optimizer.away)
    done = _send_part(heap, most, evicting.OWNED)
    return done + _send_part(heap, most - done, evicting.SHARED)


@compiled
def _send_part(heap: HeapRecord, most: int, kind: int) -> int:
    keep_out_of_line()
    n = evicting.part(heap, _first(heap), _end(heap), most, kind, STATE_AWAY)
    if n > 0:
        heap.optimizer.away += n
        heap.optimizer.left += n
        regions.give_back(pool_of(heap), wanted_of(heap), n, NO_FENCE)
    return n


# -- back ------------------------------------------------------------------------------------------


@compiled
def _turn(heap: HeapRecord, before: int, after: int, most: int) -> int:
    """Let slots in use that have one thing for a region have another; returns how many, at most as many as given."""
    keep_out_of_line()
    slots = slots_of(heap)
    n = 0
    for slot in range(_first(heap), _end(heap)):
        if n < most and slots[slot].live > 0 and slots[slot].region == before:
            slots[slot].region = after
            n += 1
    return n


@compiled
def _expect(heap: HeapRecord, me: Job, most: int) -> None:
    """Let so many slots that are away be evicted ones instead, which come back as soon as that can be."""
    keep_out_of_line()
    n = _turn(heap, STATE_AWAY, NOBODY, most)
    heap.optimizer.away -= n
    heap.optimizer.lacking = min(heap.optimizer.lacking, heap.optimizer.away)
    me.evicted += n


@compiled
def _keep_away(heap: HeapRecord, me: Job) -> None:
    """Let slots of the arena that are evicted be away instead, so that nobody expects them back before a step.

    They are within what the job may hold, and others have the memory: its profile goes on counting
    them.
    """
    keep_out_of_line()
    n = _turn(heap, NOBODY, STATE_AWAY, me.evicted)
    heap.optimizer.away += n
    heap.optimizer.lacking += n
    me.evicted -= n


@entry(HEAP)
def end_step(heap: HeapRecord) -> None:
    """Let what is not needed until the next step leave from now on, when memory is short."""
    keep_out_of_line()
    if heap.attached != _ATTACHED:
        return
    me = job_of(heap)
    private_lock(heap.mutex_address)
    _keep_away(heap, me)
    slots = slots_of(heap)
    heap.optimizer.in_use = 0
    for slot in range(_first(heap), _end(heap)):
        if slots[slot].live > 0:
            heap.optimizer.in_use += 1
    heap.optimizer.may_leave = 1
    private_unlock(heap.mutex_address)


@entry(HEAP)
def begin_step(heap: HeapRecord) -> None:
    """Have back in the budget what is away; nothing leaves until ``end_step``.

    Waits for regions, but not for good (``zico.heap.evicting``). What would be beyond what the job
    may hold is not waited for: it stays where it is, and counts as overflowed.
    """
    keep_out_of_line()
    if heap.attached != _ATTACHED:
        return
    me = job_of(heap)
    private_lock(heap.mutex_address)
    heap.optimizer.may_leave = 0
    if heap.optimizer.away > 0:
        _bring_back(heap, me)
    private_unlock(heap.mutex_address)


@entry(HEAP)
def return_ahead(heap: HeapRecord) -> int:
    """Have back in the budget as much of what is away as there is room for, before the step; returns the slots.

    Waits for nothing. What finds no room later in this iteration can send it away again.
    """
    keep_out_of_line()
    me = job_of(heap)
    n = 0
    private_lock(heap.mutex_address)
    room = cap_of(pool_of(heap), me) - me.held
    if (
        heap.attached == _ATTACHED
        and heap.optimizer.may_leave != 0
        and me.evicted == 0
        and min(heap.optimizer.away, room) > 0
    ):
        n = min(heap.optimizer.away, room)
        _expect(heap, me, n)
        if evicting.is_complete(heap, me):
            heap.optimizer.returned += n
            profile.raise_to(me.current, me.held)
        else:
            _keep_away(heap, me)
            n = 0
    private_unlock(heap.mutex_address)
    return n


@compiled
def _bring_back(heap: HeapRecord, me: Job) -> None:
    keep_out_of_line()
    began_ns = monotonic_ns()
    before = heap.optimizer.away
    _expect(heap, me, max(cap_of(pool_of(heap), me) - me.held - me.evicted, 0))
    if not evicting.is_complete(heap, me):
        heap.wait.return_until_ns = began_ns + evicting.patience_ns(heap)
        waiting.await_return(heap, me)
    heap.optimizer.late += 1
    heap.optimizer.late_ns += monotonic_ns() - began_ns
    out = heap.optimizer.away + me.evicted
    heap.optimizer.returned += max(before - out, 0)
    me.spilled_bytes += out << heap.pool_shift
    profile.raise_to(me.current, me.held + me.evicted)
