"""The pager: faults first, and what is expected while there are none.

Theory of operation
    One compiled loop in each paged job. Its thread takes no lock that a thread may hold while it
    touches the window: not Python's, not the heap's, none of the C library. Every turn sleeps until
    there is a fault, until somebody wakes it, or until there is something to look after. Then it
    serves all faults, takes in what the heap has told, and does one thing ahead. It gives a region
    back that others wait for, brings in a block that is expected, or makes room for the next one.

Guarantees
    1. What is resident fits into the regions that the job holds, at every moment. Room is made
       before a block comes, and a region goes back when there is room for one less.
    7. A fault that nothing makes room for waits no longer than the job's wait limit. Then the job
       ends by SIGBUS, with a sentence that says why. So it does when the tier cannot give back what
       it was given. Nothing is made up.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import array_at, call, compiled, entry, inlined, keep_out_of_line, record_at, release_fence
from zico.base.libc import monotonic_ns
from zico.device import userfault
from zico.device.userfault import PROTECTED, WRITES
from zico.paging.blocks import (
    ABSENT,
    CLEAN,
    OUT,
    WRITTEN,
    allowed,
    bring_in,
    copy_ahead,
    everything_fits,
    frames,
    give_region_back,
    let_stay,
    let_write,
    live_of,
    make_room,
    page_table_of,
    paging_of,
    put_out,
    states_of,
    user_of,
    wake,
)
from zico.paging.layout import LOOK_AGAIN, NONE, PREEVICT, PREFETCH, WRITABLE
from zico.paging.needed_next import (
    choose_to_clean,
    choose_victim,
    choose_victim_ahead,
    next_prefetch,
    note_birth,
    note_execution,
    note_fault,
)
from zico.paging.page_table import LEAST, PAGER, RING, block_of, is_birth
from zico.paging.residency import is_expected, keep, note_active, note_inactive, release, was_written
from zico.paging.tuning import note_iteration, note_lost
from zico.pool.layout import MEMBER, job_at

if TYPE_CHECKING:
    from zico.paging.page_table import PagerRecord


IDLE_MS = 50
"""The longest sleep: a wake-up that was lost costs no more."""
LOOK_MS = 1
"""... while the job computes and blocks are prefetched: what it does next shows in its allocations."""
SPARE = 2
"""Blocks for which room is made ahead, and kept from prefetching: a fault need not wait for what leaves."""

_SIGBUS = int(signal.SIGBUS)
_I8 = np.dtype("i8")


# -- faults ----------------------------------------------------------------------------------------


@compiled
def serve_faults(pager: PagerRecord) -> bool:
    """Serve all faults there are; false: there was none."""
    user = user_of(pager)
    n = userfault.read_messages(user)
    began_ns = monotonic_ns()
    table = page_table_of(pager)
    for i in range(n):
        message = userfault.message_at(user, i)
        if message.event == userfault.FAULT:
            flags: int = np.int64(message.flags)  # type: ignore[assignment]
            offset: int = np.int64(message.address) - table.window  # type: ignore[assignment]
            _serve(pager, offset >> table.block_shift, offset & ((1 << table.block_shift) - 1), flags)
    if n > 0:
        lost_ns = monotonic_ns() - began_ns
        table.waited_ns += lost_ns
        note_lost(paging_of(pager), lost_ns)
    return n > 0


@compiled
def _serve(pager: PagerRecord, block: int, touched: int, flags: int) -> None:
    states = states_of(pager)
    if flags & PROTECTED:
        if states[block] in (CLEAN, WRITTEN):
            let_write(pager, block)
        else:
            wake(pager, block)  # it has left meanwhile, and is missing now
    elif states[block] in (CLEAN, WRITTEN):
        wake(pager, block)  # another thread's fault has brought it
    else:
        _serve_missing(pager, block, touched, flags & WRITES != 0)


@compiled
def _serve_missing(pager: PagerRecord, block: int, touched: int, writes: bool) -> None:  # noqa: FBT001 - a fact of the fault
    table = page_table_of(pager)
    if pager.starving_since_ns == 0:  # else it is the same fault once more
        take_in_events(pager)
        table.faults += 1
        table.late += int(is_expected(paging_of(pager), block))
        note_fault(paging_of(pager), block)
    if not make_room(pager, frames(pager) - 1, everything_fits(pager)):
        _starve(pager, block)
        return
    pager.starving_since_ns = 0
    if bring_in(pager, block, writes or comes_writable(pager, block), touched):
        let_stay(pager, block)
    else:
        give_up(pager, block)


@compiled
def comes_writable(pager: PagerRecord, block: int) -> bool:
    """Tell whether a block is to come without protection, as it is likely to be written to: with ``WRITABLE``.

    Protection that was in vain costs a fault for each of its pages, more than a copy that was in
    vain.
    """
    if not paging_of(pager).flags & WRITABLE or not was_written(paging_of(pager), block):
        return False
    pager.n_writable += 1
    return bool(pager.n_writable % LOOK_AGAIN != 0)


@compiled
def _starve(pager: PagerRecord, block: int) -> None:
    """Let a fault wait for room a little; whoever faulted comes back."""
    keep_out_of_line()
    now_ns = monotonic_ns()
    if pager.starving_since_ns == 0:
        pager.starving_since_ns = now_ns
    if now_ns - pager.starving_since_ns > pager.starving_limit_ns:
        give_up(pager, block)
        return
    userfault.await_any(user_of(pager), (pager.wake_fd, -1), LOOK_MS)
    wake(pager, block)


@compiled
def give_up(pager: PagerRecord, block: int) -> None:
    """Let whoever touches a block die rather than see what was never there; says why, once.

    Where the kernel cannot do that (before Linux 6.6), the process gets the signal that the touch
    would have raised.
    """
    keep_out_of_line()
    table = page_table_of(pager)
    if pager.gave_up == 0:
        call(pager.write, (2, pager.message_address, pager.message_bytes))
    pager.gave_up += 1
    start, size_bytes = table.window + (block << table.block_shift), 1 << table.block_shift
    userfault.protect(user_of(pager), start, size_bytes, 0)  # what is protected and missing cannot be poisoned
    if userfault.poison(user_of(pager), start, size_bytes) == 0:
        wake(pager, block)
    else:
        call(pager.kill, (pager.pid, _SIGBUS))


# -- what the heap tells ---------------------------------------------------------------------------


@inlined
def _report(pager: PagerRecord, ahead_ns: int) -> None:
    """Write the job's figures where reports find them; ``ahead_ns`` were spent while nobody waited."""
    table = page_table_of(pager)
    pool = record_at(pager.member_address, MEMBER)
    me = job_at(pool, pool.job)
    me.out_bytes = table.out_bytes
    me.in_bytes = table.in_bytes
    me.copy_waited_ns = table.waited_ns
    me.copy_hidden_ns += ahead_ns
    me.faults = table.faults
    me.late = table.late
    me.out_now_bytes = table.out_now << table.block_shift


@compiled
def take_in_events(pager: PagerRecord) -> bool:
    """Take in what the heap has put in the ring, and that an iteration began; tells whether there was anything."""
    table = page_table_of(pager)
    paging = paging_of(pager)
    pool = record_at(pager.member_address, MEMBER)
    job = job_at(pool, pool.job)
    iteration = job.iteration  # first: what came before it is in the ring then
    events = table.events
    if pager.events == events and iteration == table.iteration:
        return False
    if events - pager.events > RING:
        pager.events = events - RING
        _look_at_all(pager)
    ring = array_at(pager.ring_address, RING, _I8)
    while pager.events < events:
        event = ring[pager.events & (RING - 1)]
        pager.events += 1
        if event >= 0:
            note_execution(paging, event)
        elif is_birth(event):
            note_active(paging, block_of(event))
            note_birth(paging, block_of(event))
        else:
            note_inactive(paging, block_of(event))
    if iteration != table.iteration:
        note_iteration(paging, job.profile.duration_ns)
        pager.comes_bytes = table.in_bytes - pager.came_bytes
        pager.came_bytes = table.in_bytes
        pager.went_bytes = table.out_bytes
        pager.needed = max(LEAST, table.most_live)
        keep(paging, table.apart_from, min(table.apart_to, table.apart_from + ((frames(pager) - 1) >> 1)))
        table.most_live = table.live_slots  # the heap may undo this: then it is what the last iteration needed
        table.iteration = iteration
    return True


@compiled
def _look_at_all(pager: PagerRecord) -> None:
    """See in which blocks something lives."""
    keep_out_of_line()
    live = live_of(pager)
    for block in range(page_table_of(pager).n_blocks):
        if live[block] > 0:
            note_active(paging_of(pager), block)
        else:
            note_inactive(paging_of(pager), block)


# -- ahead -----------------------------------------------------------------------------------------


@compiled
def look_ahead(pager: PagerRecord) -> bool:
    """Do one thing that no fault waits for; false: there was nothing to do."""
    if give_region_back(pager):
        return True
    paging = paging_of(pager)
    if everything_fits(pager) or allowed(pager) == 0:
        return False
    if paging.flags & PREFETCH:
        block = next_prefetch(paging)
        if block != NONE:
            return _prefetch(pager, block)
    if paging.flags & PREEVICT and _is_short(pager):
        victim = choose_victim_ahead(paging)
        if victim != NONE:
            return put_out(pager, victim)
    return _clean(pager)


@inlined
def _is_short(pager: PagerRecord) -> bool:
    return page_table_of(pager).resident >= frames(pager) - min(SPARE, frames(pager) >> 2)


@compiled
def _clean(pager: PagerRecord) -> bool:
    """Copy a block out while it stays, until as much has gone in this iteration as came back in the last one.

    More would be in vain, and a block that stays and is written to costs faults of all its pages
    besides.
    """
    table = page_table_of(pager)
    if table.out_bytes - pager.went_bytes >= pager.comes_bytes:
        return False
    block = choose_to_clean(paging_of(pager))
    return block != NONE and states_of(pager)[block] == WRITTEN and copy_ahead(pager, block)


@compiled
def _prefetch(pager: PagerRecord, block: int) -> bool:
    """Bring an expected block in if there is room, or can be; who faults while room is made comes first."""
    paging = paging_of(pager)
    states = states_of(pager)
    ahead = paging.flags & PREEVICT != 0
    if _is_short(pager) if ahead else page_table_of(pager).resident >= frames(pager):
        victim = choose_victim_ahead(paging) if ahead else choose_victim(paging)
        if victim != NONE and put_out(pager, victim):
            serve_faults(pager)
        if states[block] in (CLEAN, WRITTEN):
            return True  # that was it
    if states[block] not in (ABSENT, OUT) or page_table_of(pager).resident >= frames(pager):
        release(paging, block)
        return False
    came = bring_in(pager, block, comes_writable(pager, block), 0)
    if not came:
        release(paging, block)
    return came


# -- the loop --------------------------------------------------------------------------------------


@entry(PAGER)
def page(pager: PagerRecord) -> None:
    """Serve the job's faults as long as it lives, or until told to stop."""
    user = user_of(pager)
    pager.runs = 1
    _look_at_all(pager)
    timeout_ms = 0
    while pager.stops == 0:
        found = userfault.await_any(user, (user.descriptor, pager.wake_fd), timeout_ms)
        if found & 2:
            call(pager.read, (pager.wake_fd, pager.drain_address, 8))
        _stand_still(pager)
        busy = serve_faults(pager)
        moved = take_in_events(pager)
        began_ns = monotonic_ns()
        ahead = not busy and look_ahead(pager)
        busy = busy or ahead
        if busy:
            _report(pager, monotonic_ns() - began_ns if ahead else 0)
        slower_ms = LOOK_MS if moved or timeout_ms < LOOK_MS else min(2 * timeout_ms, IDLE_MS)
        timeout_ms = 0 if busy else slower_ms


@inlined
def _stand_still(pager: PagerRecord) -> None:
    """Change nothing while a child of the job copies what it has."""
    table = page_table_of(pager)
    number = table.holds
    while number != 0 and pager.stops == 0:
        release_fence()
        table.stands = number
        userfault.await_any(user_of(pager), (pager.wake_fd, -1), LOOK_MS)
        number = table.holds
