"""What a pager does first: every block that a dead one had in hand comes into a state to go on from.

Guarantees
    5. Whatever instruction the last pager died at, every block is as it was, and the tier keeps what is in use alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled, inlined, keep_out_of_line
from zico.driver import userfault
from zico.paging.pager_blocks import (
    ABSENT,
    CLEAN,
    COMING,
    DROPPING,
    FILLING,
    LEAVING,
    OUT,
    PUNCHING,
    WRITTEN,
    drop,
    finish_leaving,
    length_of,
    paging_of,
    sheet_of,
    stack_of,
    start_of_block,
    states_of,
    tickets_of,
    user_of,
)
from zico.paging.resident import note_arrival, note_written
from zico.paging.sheet import NO_TICKET
from zico.tiers import stores

if TYPE_CHECKING:
    from zico.paging.pager_layout import PagerRecord


@compiled
def take_over(pager: PagerRecord) -> None:
    """Bring every block that a dead pager had in hand into a state to go on from, and wake whoever waits."""
    keep_out_of_line()
    sheet = sheet_of(pager)
    states = states_of(pager)
    sheet.resident = 0
    sheet.out_now = 0
    for block in range(sheet.n_blocks):
        sheet.out_now += int(states[block] == OUT)
        if states[block] in (ABSENT, OUT):
            continue
        sheet.resident += 1
        note_arrival(paging_of(pager), block)
        if states[block] != CLEAN:
            note_written(paging_of(pager), block)
    for block in range(sheet.n_blocks):
        _go_on(pager, block, states[block])
        if states[block] in (ABSENT, WRITTEN):
            tickets_of(pager)[block] = NO_TICKET
    stores.keep_only(stack_of(pager), tickets_of(pager))
    userfault.wake(user_of(pager), sheet.window, sheet.n_blocks << sheet.block_shift)


@inlined
def _go_on(pager: PagerRecord, block: int, state: int) -> None:
    """Take up what a dead pager was doing with a block."""
    states = states_of(pager)
    user = user_of(pager)
    if state == LEAVING:  # nothing is in the tier yet, and nobody has written to the pages
        states[block] = WRITTEN
    elif state == PUNCHING:
        finish_leaving(pager, block)
    elif state == DROPPING:
        drop(pager, block)
    elif state == FILLING:
        userfault.zero(user, start_of_block(pager, block), length_of(pager))
        states[block] = WRITTEN
    elif state == COMING:
        _come_again(pager, block)
    if states[block] == WRITTEN:
        userfault.protect(user, start_of_block(pager, block), length_of(pager), 0)


@compiled
def _come_again(pager: PagerRecord, block: int) -> None:
    """Put in what is missing of a block. The job may have written to the rest: the ticket is worth nothing then."""
    source = stores.where(stack_of(pager), tickets_of(pager)[block])
    status = 0
    if source == 0:
        source = pager.bounce_address
        status = stores.get(stack_of(pager), tickets_of(pager)[block], source, length_of(pager))
    if status != 0:  # whoever touches it learns so: it is out, and cannot be had back
        sheet_of(pager).error = status
        finish_leaving(pager, block)
        return
    userfault.fill(user_of(pager), start_of_block(pager, block), source, length_of(pager), 0)
    states_of(pager)[block] = WRITTEN
