"""The simulator's device: a clock, memory of so many blocks, and one engine for copies in each direction.

Theory of operation
    A fault is handled as unified memory's driver does: fixed time for a batch, then for each of its blocks room, then
    its content. Blocks are moved in the background while operations run, as ``zico.paging.prefetch`` and ``eviction``
    say; a fault waits for the block that is being moved in, and goes before all others::

        fault on b, c     |45 us|evict x -> out|b in|evict y -> out|c in|  then the operation goes on
        in background     in:  d | e | f        out: x | y              whenever an engine is free

    Without ``PREEVICT`` a prefetch makes its own room, one after the other as a fault does.

Source: section 2 of "DeepUM" (J. Jung, J. Kim, J. Lee, ASPLOS 2023), figure 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import compiled, inlined, record_at
from zico.paging.eviction import choose_to_clean, choose_victim, choose_victim_ahead
from zico.paging.layout import INACTIVE, NONE, PREEVICT, PREFETCH
from zico.paging.prefetch import next_prefetch, note_fault
from zico.paging.resident import block_at, hold, is_expected, note_arrival, note_cleaned, note_departure, release
from zico.records import I4, I8, Record, dtype_of

if TYPE_CHECKING:
    from zico.paging.layout import PagingRecord


class Page(Record):
    """What the machine knows of a block."""

    ready_ns: I8  # when a resident block is there
    room_ns: I8  # in the ring of rooms to come: when
    has_content: I4  # of use to anybody
    has_copy: I4  # in the next tier, as the content is


PAGE = dtype_of(Page)


class Machine(Record):
    """One device in the simulator."""

    now_ns: I8
    moved_ns: I8  # until when the background has been followed
    in_ns: I8  # when each engine is free
    out_ns: I8
    capacity: I8  # in blocks, as all that follows
    free: I8
    reserve: I8  # free ones that pre-eviction aims at
    leaving_head: I8  # rooms to come: the ring's ends
    leaving_tail: I8
    next_in: I8  # block that waits for room, or NONE
    batch: I8  # blocks touched at once, whose faults are handled together
    fault_ns: I8  # of a batch
    block_fault_ns: I8  # of each block in it
    in_block_ns: I8
    out_block_ns: I8
    keeps_copies: I8  # 1: the next tier keeps what was brought in, so that clean blocks need not go back
    pages_address: I8
    # Counted, ever.
    faults: I8
    late: I8  # of blocks on their way
    moved_in: I8
    moved_out: I8
    dropped: I8
    lost_ns: I8  # from a fault until its operation goes on


MACHINE = dtype_of(Machine)

_PAGE_BYTES = PAGE.itemsize
NEVER = 1 << 62
"""When a block is there that is not."""


@inlined
def page_at(machine: Machine, block: int) -> Page:
    """Return what the machine knows of a block."""
    return record_at(machine.pages_address + block * _PAGE_BYTES, PAGE)


@inlined
def _must_copy(machine: Machine, paging: PagingRecord, block: int) -> bool:
    """Tell whether a resident block has content that is nowhere else."""
    page = page_at(machine, block)
    is_kept = page.has_copy and machine.keeps_copies
    return bool(page.has_content and not is_kept and not block_at(paging, block).state & INACTIVE)


# -- room -------------------------------------------------------------------------------------------------------------


@compiled
def _settle(machine: Machine, n_blocks: int, until_ns: int) -> None:
    """Count rooms as free that have become so."""
    while machine.leaving_head < machine.leaving_tail:
        if page_at(machine, machine.leaving_head % n_blocks).room_ns > until_ns:
            break
        machine.leaving_head += 1
        machine.free += 1


@compiled
def _send_out(machine: Machine, paging: PagingRecord, block: int, from_ns: int) -> int:
    """Evict a block from a time on; returns when its room is free."""
    page = page_at(machine, block)
    if _must_copy(machine, paging, block):
        from_ns = max(from_ns, machine.out_ns, page.ready_ns) + machine.out_block_ns
        machine.out_ns = from_ns
        machine.moved_out += 1
        page.has_copy = 1
    else:
        machine.dropped += 1
    page.ready_ns = NEVER
    note_departure(paging, block)
    return from_ns


@compiled
def _bring_in(machine: Machine, paging: PagingRecord, block: int, from_ns: int) -> int:
    """Move a block into a free room from a time on; returns when it is there."""
    page = page_at(machine, block)
    machine.free -= 1
    page.ready_ns = from_ns
    if page.has_content:
        page.ready_ns = max(from_ns, machine.in_ns) + machine.in_block_ns
        machine.in_ns = page.ready_ns
        machine.moved_in += 1
    note_arrival(paging, block)  # as far as choices go; a victim's copy waits until it is really there
    return int(page.ready_ns)


# -- faults -----------------------------------------------------------------------------------------------------------


@compiled
def _room_for_fault(machine: Machine, paging: PagingRecord, from_ns: int) -> int:
    """Make room on the critical path; returns when there is."""
    _settle(machine, paging.n_blocks, from_ns)
    if machine.free > 0:
        return from_ns
    if machine.leaving_head < machine.leaving_tail:
        from_ns = max(from_ns, page_at(machine, machine.leaving_head % paging.n_blocks).room_ns)
    else:
        victim = choose_victim(paging)
        from_ns = _send_out(machine, paging, victim, from_ns)
        machine.free += 1
    _settle(machine, paging.n_blocks, from_ns)
    return from_ns


@compiled
def fault(machine: Machine, paging: PagingRecord, blocks: Any, learns: int) -> None:  # noqa: ANN401 - an array of int32
    """Bring in those of some blocks, all of which are held, that are not there; the clock goes on until all are."""
    ready_ns = machine.now_ns
    missing = 0
    for block in blocks:
        page = page_at(machine, block)
        if page.ready_ns == NEVER:
            missing += 1
            if learns:
                number: int = np.int64(block)  # type: ignore[assignment]  # one type for compiled code
                note_fault(paging, number)
        elif page.ready_ns > machine.now_ns:
            machine.late += 1
            ready_ns = max(ready_ns, page.ready_ns)
    if missing == 0 and ready_ns == machine.now_ns:
        return
    at_ns = machine.now_ns + machine.fault_ns + missing * machine.block_fault_ns
    for block in blocks:
        if page_at(machine, block).ready_ns == NEVER:
            at_ns = _bring_in(machine, paging, block, _room_for_fault(machine, paging, at_ns))
            hold(paging, block)
    at_ns = max(at_ns, ready_ns)
    machine.faults += missing
    machine.lost_ns += at_ns - machine.now_ns
    machine.now_ns = at_ns


# -- in background ----------------------------------------------------------------------------------------------------


@compiled
def advance(machine: Machine, paging: PagingRecord, until_ns: int) -> None:
    """Let the clock go on, and blocks be moved meanwhile."""
    while (
        _move_in(machine, paging, until_ns) or _move_out(machine, paging, until_ns) or _clean(machine, paging, until_ns)
    ):
        pass
    machine.moved_ns = until_ns
    machine.now_ns = until_ns


@compiled
def _move_out(machine: Machine, paging: PagingRecord, until_ns: int) -> bool:
    """Begin to evict one block ahead of need; tells whether that could begin before the time is over."""
    coming = machine.leaving_tail - machine.leaving_head
    if not paging.flags & PREEVICT or machine.free + coming >= machine.reserve:
        return False
    victim = choose_victim_ahead(paging)
    if victim == NONE:
        return False
    copies = _must_copy(machine, paging, victim)
    if copies and max(machine.out_ns, machine.moved_ns) >= until_ns:
        return False
    room_ns = _send_out(machine, paging, victim, machine.moved_ns)
    if copies:
        _note_room(machine, paging.n_blocks, room_ns)
    else:
        machine.free += 1
    return True


@compiled
def _clean(machine: Machine, paging: PagingRecord, until_ns: int) -> bool:
    """Begin to copy out one block that stays; tells whether that could begin before the time is over."""
    start_ns = max(machine.out_ns, machine.moved_ns)
    block = choose_to_clean(paging) if start_ns < until_ns and machine.keeps_copies else NONE
    if block == NONE:
        return False
    page = page_at(machine, block)
    machine.out_ns = max(start_ns, page.ready_ns) + machine.out_block_ns
    machine.moved_out += 1
    page.has_copy = 1
    note_cleaned(paging, block)
    return True


@inlined
def _note_room(machine: Machine, n_blocks: int, room_ns: int) -> None:
    page_at(machine, machine.leaving_tail % n_blocks).room_ns = room_ns
    machine.leaving_tail += 1


@compiled
def _move_in(machine: Machine, paging: PagingRecord, until_ns: int) -> bool:
    """Begin to prefetch one block; tells whether that could begin before the time is over."""
    start_ns = max(machine.in_ns, machine.moved_ns)
    if not paging.flags & PREFETCH or start_ns >= until_ns or not _choose_next(machine, paging):
        return False
    _settle(machine, paging.n_blocks, start_ns)
    if machine.free == 0:
        start_ns = _room_for_prefetch(machine, paging, start_ns)
        if start_ns >= until_ns:
            return False
        _settle(machine, paging.n_blocks, start_ns)
    _bring_in(machine, paging, int(machine.next_in), start_ns)
    machine.next_in = NONE
    return True


@compiled
def _choose_next(machine: Machine, paging: PagingRecord) -> bool:
    """Set the block to prefetch next, that of before if it is still of use; tells whether there is one."""
    waits = machine.next_in
    if waits != NONE and page_at(machine, waits).ready_ns == NEVER:
        if is_expected(paging, waits):
            return True
        release(paging, waits)
    machine.next_in = next_prefetch(paging)
    return machine.next_in != NONE


@compiled
def _room_for_prefetch(machine: Machine, paging: PagingRecord, from_ns: int) -> int:
    """Return when a room will be free, ``NEVER`` if that is not known yet."""
    if machine.leaving_head == machine.leaving_tail:
        victim = NONE if paging.flags & PREEVICT else choose_victim(paging)
        if victim == NONE:
            return NEVER
        _note_room(machine, paging.n_blocks, _send_out(machine, paging, victim, max(from_ns, machine.out_ns)))
    return max(from_ns, page_at(machine, machine.leaving_head % paging.n_blocks).room_ns)
