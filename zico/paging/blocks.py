"""One block on its way: into its pages, out of them, or nowhere.

Theory of operation
    Before a block's contents are read for the tier, its pages are write-protected. When that call
    returns every write is in the pages, and later ones wait in the kernel. They are woken when the
    pages are gone, fault anew, and find what was copied::

        WRITTEN  protect, copy to the tier, give the pages back, wake  -> OUT
        CLEAN                               give the pages back, wake  -> OUT
        WRITTEN  protect, copy to the tier                             -> CLEAN
        OUT      copy from the tier, protected, wake                   -> CLEAN
        OUT      copy from the tier, wake, drop the ticket             -> WRITTEN
        ABSENT   zeros, wake                                           -> WRITTEN
        nothing lives in it: protect, give the pages back, wake        -> ABSENT

    Whether anything lives in a block is looked at behind the protection: a tensor that comes to lie
    there later cannot have been written to. ``births`` counts how often a block began to be used;
    if it has since the contents were copied, they are nobody's any more.

Guarantees
    4. No write is lost, whichever thread makes it, also in a system call.
    9. Pages are there only of blocks that are counted as resident.
    1. What is resident fits into the regions that the job holds, at every moment. Room is made
       before a block comes, and a region goes back when there is room for one less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.base.compiled import array_at, call, compiled, exchange, inlined, keep_out_of_line, record_at
from zico.device import host, userfault
from zico.device.userfault import COPY_PROTECTED, USERFAULT
from zico.paging.layout import INVALIDATE, NONE, PAGING, PIECES
from zico.paging.needed_next import choose_empty, choose_victim
from zico.paging.page_table import NO_TICKET, PAGE_TABLE, RECENT, State
from zico.paging.residency import hold, keep, note_arrival, note_cleaned, note_departure, note_written, release, renew
from zico.pool import regions
from zico.pool.layout import MEMBER, NOBODY, JobState, cap_of, header_of, job_at
from zico.tiers import stores
from zico.tiers.encodings import ZEROS
from zico.tiers.layout import STACK

if TYPE_CHECKING:
    from zico.device.userfault import UserfaultRecord
    from zico.paging.layout import PagingRecord
    from zico.paging.page_table import PagerRecord, PageTable
    from zico.tiers.layout import StackRecord


# -- blocks ----------------------------------------------------------------------------------------


ABSENT = int(State.ABSENT)
WRITTEN = int(State.WRITTEN)
CLEAN = int(State.CLEAN)
OUT = int(State.OUT)

_PIECE_SHIFT = 18
"""256 KiB: an eighth of the wait, and system calls that cost next to nothing beside the copy."""

_I4 = np.dtype("i4")

Array = Any


# -- the records -----------------------------------------------------------------------------------


@inlined
def page_table_of(pager: PagerRecord) -> PageTable:
    """Return what both sides share."""
    return record_at(pager.page_table_address, PAGE_TABLE)


@inlined
def user_of(pager: PagerRecord) -> UserfaultRecord:
    """Return the way to the job's faults."""
    return record_at(pager.user_address, USERFAULT)


@inlined
def paging_of(pager: PagerRecord) -> PagingRecord:
    """Return what is learned."""
    return record_at(pager.paging_address, PAGING)


@inlined
def states_of(pager: PagerRecord) -> Array:
    """Return the blocks' states."""
    return array_at(pager.states_address, record_at(pager.page_table_address, PAGE_TABLE).n_blocks, _I4)


@inlined
def tickets_of(pager: PagerRecord) -> Array:
    """Return the blocks' tickets."""
    return array_at(pager.tickets_address, record_at(pager.page_table_address, PAGE_TABLE).n_blocks, _I4)


@inlined
def kept_of(pager: PagerRecord) -> Array:
    """Return the births of what the tickets stand for."""
    return array_at(pager.kept_address, record_at(pager.page_table_address, PAGE_TABLE).n_blocks, _I4)


@inlined
def live_of(pager: PagerRecord) -> Array:
    """Return how many tensors lie in each block."""
    return array_at(pager.live_address, record_at(pager.page_table_address, PAGE_TABLE).n_blocks, _I4)


@inlined
def births_of(pager: PagerRecord) -> Array:
    """Return how often each block began to be used."""
    return array_at(pager.births_address, record_at(pager.page_table_address, PAGE_TABLE).n_blocks, _I4)


@inlined
def stack_of(pager: PagerRecord) -> StackRecord:
    """Return the way to the tiers."""
    return record_at(pager.stack_address, STACK)


@inlined
def start_of_block(pager: PagerRecord, block: int) -> int:
    """Return where a block begins in the job."""
    table = page_table_of(pager)
    return table.window + (block << table.block_shift)


@inlined
def length_of(pager: PagerRecord) -> int:
    """Return the bytes of a block."""
    return 1 << page_table_of(pager).block_shift


@inlined
def wake(pager: PagerRecord, block: int) -> None:
    """Let whoever waits for a block try again."""
    userfault.wake(user_of(pager), start_of_block(pager, block), length_of(pager))


@inlined
def invalidates(pager: PagerRecord) -> bool:
    """Tell whether what nobody needs is dropped; without, it is copied like everything else."""
    return paging_of(pager).flags & INVALIDATE != 0


@inlined
def is_stale(pager: PagerRecord, block: int) -> bool:
    """Tell whether nobody needs what the ticket stands for."""
    return invalidates(pager) and births_of(pager)[block] != kept_of(pager)[block]


@compiled
def forget(pager: PagerRecord, block: int) -> None:
    """Give a ticket back that the block's state does not need any more."""
    ticket = tickets_of(pager)[block]
    if ticket != NO_TICKET:
        tickets_of(pager)[block] = NO_TICKET
        stores.drop(stack_of(pager), ticket)


# -- in --------------------------------------------------------------------------------------------


@compiled
def bring_in(pager: PagerRecord, block: int, writes: bool, touched: int) -> bool:  # noqa: FBT001 - a fact of the fault
    """Put a block's contents into its pages and wake whoever waits; there must be room.

    Args:
        pager: The PAGER record.
        block: One that is ``ABSENT`` or ``OUT``.
        writes: Whether it is about to be written to, so that it need not come protected.
        touched: Where in it somebody waits, bytes from its beginning: with ``PIECES`` that comes
            first.

    Returns:
        False: its contents cannot be had back, or the kernel has no pages for them. Then the block
        is ``OUT`` or ``ABSENT`` as before.
    """
    keep_out_of_line()
    states = states_of(pager)
    if states[block] == OUT and is_stale(pager, block):
        states[block] = ABSENT
        page_table_of(pager).out_now -= 1
        forget(pager, block)
    if states[block] == ABSENT:
        return _fill(pager, block, touched)
    table = page_table_of(pager)
    source = stores.where(stack_of(pager), tickets_of(pager)[block])
    if source == 0:
        source = pager.bounce_address
        if stores.get(stack_of(pager), tickets_of(pager)[block], source, length_of(pager)) != 0:
            return False
    mode = 0 if writes else COPY_PROTECTED
    if _put_pages(pager, block, source, mode, touched) != 0:
        return False
    table.in_bytes += length_of(pager)
    table.out_now -= 1
    note_arrival(paging_of(pager), block)
    if writes:
        states[block] = WRITTEN
        forget(pager, block)
        note_written(paging_of(pager), block)
    else:
        states[block] = CLEAN
    wake(pager, block)
    return True


@compiled
def _put_pages(pager: PagerRecord, block: int, source: int, mode: int, touched: int) -> int:
    """Put contents, or zeros if ``source`` is 0, where pages of a block are missing; returns 0, or an errno.

    With ``PIECES``, what somebody waits for comes first, and who waits for a piece is woken when
    that is there.
    """
    keep_out_of_line()
    user = user_of(pager)
    table = page_table_of(pager)
    shift = table.block_shift
    if paging_of(pager).flags & PIECES:
        shift = min(shift, _PIECE_SHIFT)
    size_bytes = 1 << shift
    last = (length_of(pager) >> shift) - 1
    for i in range(last + 1):
        offset = (((touched >> shift) + i) & last) << shift
        to = start_of_block(pager, block) + offset
        if source != 0:
            status = userfault.fill(user, to, source + offset, size_bytes, mode)
        else:
            status = userfault.zero(user, to, size_bytes)
        if status != 0:
            return status
        if last > 0:
            userfault.wake(user, to, size_bytes)
    table.resident += 1
    table.peak_resident = max(table.peak_resident, table.resident)
    return 0


@compiled
def _fill(pager: PagerRecord, block: int, touched: int) -> bool:
    if _put_pages(pager, block, 0, 0, touched) != 0:
        return False
    note_arrival(paging_of(pager), block)
    note_written(paging_of(pager), block)
    states_of(pager)[block] = WRITTEN
    wake(pager, block)
    return True


@compiled
def let_write(pager: PagerRecord, block: int) -> None:
    """Take the protection of a block's pages away; what the tier has of it is worth nothing then."""
    keep_out_of_line()
    states_of(pager)[block] = WRITTEN
    userfault.protect(user_of(pager), start_of_block(pager, block), length_of(pager), 0)
    forget(pager, block)
    note_written(paging_of(pager), block)
    wake(pager, block)


# -- out -------------------------------------------------------------------------------------------


@compiled
def put_out(pager: PagerRecord, block: int) -> bool:
    """Let a resident block have no pages any more: copied, or dropped where that loses nothing.

    Returns:
        False: the block stays as it was, since the tier took nothing or the kernel did not protect
        it.
    """
    keep_out_of_line()
    states = states_of(pager)
    table = page_table_of(pager)
    was_written = states[block] == WRITTEN
    if was_written and not _protect(pager, block):
        return False
    births = births_of(pager)[block]  # behind the protection, and before it is seen what lives there
    is_needed = live_of(pager)[block] != 0 or not invalidates(pager)
    if is_needed and was_written:
        if not _copy(pager, block, births):
            return False
        table.evicted += 1
    else:
        table.dropped += 1
    call(pager.fallocate, (pager.memory_fd, host.PUNCH_HOLE, block << table.block_shift, length_of(pager)))
    table.resident -= 1
    note_departure(paging_of(pager), block)
    if is_needed:
        states[block] = OUT
        table.out_now += 1
    else:
        states[block] = ABSENT
        forget(pager, block)
    wake(pager, block)
    return True


@compiled
def copy_ahead(pager: PagerRecord, block: int) -> bool:
    """Copy a block that is ``WRITTEN`` and stays, so that it can leave at once later; returns as ``put_out``."""
    keep_out_of_line()
    if not _protect(pager, block):
        return False
    births = births_of(pager)[block]
    if live_of(pager)[block] == 0:
        let_write(pager, block)
        return False
    if not _copy(pager, block, births):
        return False
    states_of(pager)[block] = CLEAN
    note_cleaned(paging_of(pager), block)
    return True


@compiled
def _protect(pager: PagerRecord, block: int) -> bool:
    """Let every write to a block wait; false if the kernel does not do that, and the block is as before."""
    if userfault.protect(user_of(pager), start_of_block(pager, block), length_of(pager), 1) == 0:
        return True
    let_write(pager, block)
    return False


@compiled
def _copy(pager: PagerRecord, block: int, births: int) -> bool:
    """Copy a block that is protected to the tier; false if that takes nothing, and the block is as before."""
    address = pager.memory_address + (block << page_table_of(pager).block_shift)
    ticket = stores.put(stack_of(pager), address, length_of(pager), ZEROS)
    if ticket < 0:
        let_write(pager, block)
        return False
    tickets_of(pager)[block] = ticket
    kept_of(pager)[block] = births
    page_table_of(pager).out_bytes += length_of(pager)
    return True


# -- room ------------------------------------------------------------------------------------------


_MOST_TRIES = 64
_BOUNDARY = int(JobState.BOUNDARY)
_SLACK_SHIFT = 3
"""An eighth more than a job needs stays while nobody waits: dead pages spare the next tensor a fault."""


@inlined
def allowed(pager: PagerRecord) -> int:
    """Return the regions that stand for what is resident."""
    table = page_table_of(pager)
    return table.acquired - table.returned


@inlined
def frames(pager: PagerRecord) -> int:
    """Return the blocks that may be resident."""
    table = page_table_of(pager)
    return allowed(pager) << (table.region_shift - table.block_shift)


@compiled
def let_stay(pager: PagerRecord, block: int) -> None:
    """Let a block that somebody has waited for stay until others have, too."""
    paging = paging_of(pager)
    n = pager.n_recent
    _let_leave(pager)
    pager.recent[n % RECENT] = block
    pager.n_recent = n + 1
    for ago in range(min(RECENT, n + 1, frames(pager) >> 1)):
        hold(paging, pager.recent[(n - ago) % RECENT])


@compiled
def _let_leave(pager: PagerRecord) -> None:
    keep_out_of_line()
    for i in range(min(RECENT, pager.n_recent)):
        release(paging_of(pager), pager.recent[i])
    pager.n_recent = 0


@inlined
def everything_fits(pager: PagerRecord) -> bool:
    """Tell whether the job holds regions for all that lives, and for as much as its last iteration needed."""
    table = page_table_of(pager)
    return max(table.live_slots, pager.needed if table.iteration > 0 else 0) <= allowed(pager)


@compiled
def make_room(pager: PagerRecord, most: int, lives_fit: bool) -> bool:  # noqa: FBT001 - a fact
    """Let blocks go until at most so many are resident; false if that cannot be.

    With ``lives_fit``, what lives needs no more than ``most`` blocks. Then blocks go in which nothing
    lives, although something is expected to: zeros cost no copy.
    """
    tries = 0
    while page_table_of(pager).resident > most:
        victim = choose_empty(paging_of(pager)) if lives_fit else NONE
        if victim == NONE:
            victim = choose_victim(paging_of(pager))
        if victim == NONE and pager.n_recent > 0:  # there is less room than there was
            _let_leave(pager)
            continue
        if victim == NONE and paging_of(pager).kept_to > paging_of(pager).kept_from:
            keep(paging_of(pager), 0, 0)  # until the next iteration
            continue
        if victim == NONE or tries == _MOST_TRIES:
            return False
        if not put_out(pager, victim):
            tries += 1
            if tries == 1:
                sweep(pager)
            renew(paging_of(pager), victim)
    return True


@compiled
def sweep(pager: PagerRecord) -> None:
    """Give back all tickets of what nobody needs any more, or what is resident, too."""
    keep_out_of_line()
    states = states_of(pager)
    for block in range(page_table_of(pager).n_blocks):
        stale = live_of(pager)[block] == 0 or births_of(pager)[block] != kept_of(pager)[block]
        if states[block] == OUT and stale:
            states[block] = ABSENT
            page_table_of(pager).out_now -= 1
            forget(pager, block)
        elif states[block] == CLEAN:
            let_write(pager, block)


@compiled
def give_region_back(pager: PagerRecord) -> bool:
    """Give one region back if the job holds more than it may, or more than it needs.

    It needs what lives at once, at the most since the beginning of its last whole iteration; while
    others wait, what lives now.
    """
    pool = record_at(pager.member_address, MEMBER)
    table = page_table_of(pager)
    header = header_of(pool)
    me = job_at(pool, pool.job)
    cap = cap_of(pool, me)
    others_wait = header.waiters > me.waiting_threads or header.boundary_waiters > int(me.state == _BOUNDARY)
    promised = table.asked > table.yielded
    needed = max(pager.needed, table.most_live, table.live_slots)
    unused = allowed(pager) > needed + (needed >> _SLACK_SHIFT)
    if allowed(pager) <= cap and not (promised or unused or (others_wait and allowed(pager) > table.live_slots)):
        return False
    most = frames(pager) - (1 << (table.region_shift - table.block_shift))
    if not make_room(pager, most, allowed(pager) > table.live_slots):
        return False
    table.yielded += int(promised)
    table.returned += 1
    for i in range(table.n_regions):
        address = pager.regions_address + 4 * i
        if array_at(address, 1, _I4)[0] != NOBODY:
            given = array_at(pager.drain_address, 1, _I4)
            given[0] = exchange(address, NOBODY)
            regions.give_back_unused(pool, given, 1)  # it has no pages: those of the job counted for it
            return True
    return False
