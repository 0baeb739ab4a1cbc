"""Room for blocks: how many may be resident, who makes way, and regions that go back.

Guarantees
    1. What is resident fits into the regions that the job holds, at every moment: room is made before a block comes,
       and a region goes back when there is room for one less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import array_at, compiled, exchange, inlined, keep_out_of_line, record_at
from zico.paging.eviction import choose_victim
from zico.paging.layout import NONE
from zico.paging.pager_blocks import (
    ABSENT,
    CLEAN,
    GONE,
    KEPT,
    OUT,
    births_of,
    forget,
    kept_of,
    let_write,
    live_of,
    paging_of,
    put_out,
    sheet_of,
    states_of,
)
from zico.paging.pager_layout import RECENT
from zico.paging.resident import hold, release, renew
from zico.pool import regions
from zico.pool.fences import NO_FENCE
from zico.pool.layout import MEMBER, NOBODY, JobState, cap_of, header_of, job_at

if TYPE_CHECKING:
    from zico.paging.pager_layout import PagerRecord

_MOST_TRIES = 64
_BOUNDARY = int(JobState.BOUNDARY)
_I4 = np.dtype("i4")


@inlined
def allowed(pager: PagerRecord) -> int:
    """Return the regions that stand for what is resident."""
    sheet = sheet_of(pager)
    return sheet.acquired - sheet.returned


@inlined
def frames(pager: PagerRecord) -> int:
    """Return the blocks that may be resident."""
    sheet = sheet_of(pager)
    return allowed(pager) << (sheet.region_shift - sheet.block_shift)


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
    """Let everything leave."""
    keep_out_of_line()
    for i in range(min(RECENT, pager.n_recent)):
        release(paging_of(pager), pager.recent[i])
    pager.n_recent = 0


@compiled
def make_room(pager: PagerRecord, most: int) -> bool:
    """Let blocks go until at most so many are resident; false if that cannot be."""
    tries = 0
    while sheet_of(pager).resident > most:
        victim = choose_victim(paging_of(pager))
        if victim == NONE and pager.n_recent > 0:  # there is less room than there was
            _let_leave(pager)
            continue
        if victim == NONE or tries == _MOST_TRIES:
            return False
        status = put_out(pager, victim)
        if status == GONE:
            return False
        if status == KEPT:
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
    for block in range(sheet_of(pager).n_blocks):
        stale = live_of(pager)[block] == 0 or births_of(pager)[block] != kept_of(pager)[block]
        if states[block] == OUT and stale:
            states[block] = ABSENT
            sheet_of(pager).out_now -= 1
            forget(pager, block)
        elif states[block] == CLEAN:
            let_write(pager, block)


@compiled
def give_region_back(pager: PagerRecord) -> bool:
    """Give one region back if the job holds more than it may, or more than it needs.

    It needs what lives at once, at the most since the beginning of its last whole iteration; while others wait, what
    lives now.
    """
    pool = record_at(pager.member_address, MEMBER)
    sheet = sheet_of(pager)
    header = header_of(pool)
    me = job_at(pool, pool.job)
    cap = cap_of(pool, me)
    others_wait = header.waiters > me.waiting_threads or header.boundary_waiters > int(me.state == _BOUNDARY)
    promised = sheet.asked > sheet.yielded
    unused = allowed(pager) > max(pager.needed, sheet.most_live, sheet.live_slots)
    if allowed(pager) <= cap and not (promised or unused or (others_wait and allowed(pager) > sheet.live_slots)):
        return False
    if not make_room(pager, frames(pager) - (1 << (sheet.region_shift - sheet.block_shift))):
        return False
    sheet.yielded += int(promised)
    sheet.returned += 1  # first: who dies in between leaves a region that stands for nothing
    for i in range(sheet.n_regions):
        address = pager.regions_address + 4 * i
        if array_at(address, 1, _I4)[0] != NOBODY:
            given = array_at(pager.drain_address, 1, _I4)
            given[0] = exchange(address, NOBODY)
            regions.give_back(pool, given, 1, NO_FENCE)
            return True
    return False
