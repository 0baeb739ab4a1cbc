"""Grants behind fences: regions on which another stream's work is not done, for a stream that will wait for it.

Called by address from ``zico.pool.regions``, so that the host device's functions do not contain it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import types

from zico.base.compiled import array_at, callback, inlined, record_at
from zico.pool.fences import NO_FENCE, is_clear, is_issued, may_run_ahead, pair_in, value_in
from zico.pool.layout import MEMBER, NAMED, NOBODY, header_of, regions_of
from zico.pool.mutex import give_to
from zico.pool.regions import BEHIND, WAIT

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.pool.layout import Member, Region

_I32 = np.dtype("i4")


@inlined
def _is_takable(pool: Member, regions: Records[Region], r: int, slot: int) -> bool:
    """Tell whether the region is free, a wait for its fence would end, and nothing but that fence guards it."""
    return (
        regions[r].owner == NOBODY
        and is_issued(pool, regions[r].fence)
        and (regions[r].before == NO_FENCE or is_clear(pool, regions[r].before, slot))
    )


@inlined
def _demand_wait(pool: Member, fence: int, slot: int) -> None:
    """Enter in the member record that the stream must wait for a fence, once per counter, for the largest value."""
    if is_clear(pool, fence, slot):
        return
    pair = pair_in(fence)
    if pool.wait_values[pair] == 0:
        pool.wait_pairs[pool.n_waits] = pair
        pool.n_waits += 1
    pool.wait_values[pair] = max(pool.wait_values[pair], value_in(fence))


@callback(types.int64(types.int64, types.int64, types.int64, types.int64, types.int64))
def take_behind(member_address: int, wanted_address: int, n: int, missing: int, slot: int) -> int:
    """Take the ``missing`` regions of ``n`` behind fences that are issued, and demand the waits; inside the mutex.

    Returns:
        ``BEHIND``, or ``WAIT``: some of what was wanted has not been taken.
    """
    pool = record_at(member_address, MEMBER)
    wanted = array_at(wanted_address, n, _I32)
    if not may_run_ahead(pool, slot, missing):
        return WAIT
    header = header_of(pool)
    regions = regions_of(pool)
    for i in range(n):
        r = NAMED - wanted[i]
        if r >= 0 and _is_takable(pool, regions, r, slot):
            wanted[i] = r
            give_to(pool, header, regions, r)
            missing -= 1
    r = header.free_head
    i = 0
    while missing > 0 and r != NOBODY:
        after = regions[r].next
        if _is_takable(pool, regions, r, slot):
            while wanted[i] >= 0:
                i += 1
            wanted[i] = r
            give_to(pool, header, regions, r)
            missing -= 1
        r = after
    if missing > 0:
        return WAIT
    for i in range(n):
        _demand_wait(pool, regions[wanted[i]].fence, slot)
    return BEHIND
