"""The budget while jobs run: what may be granted changes at once, what circulates follows.

Theory of operation
    The pool has memory for the largest budget that it can ever get; regions that the present one leaves out are parked:
    they belong to nobody, are in no list and cost nothing. When the budget is raised some of them go back into the
    list. When it is lowered, free regions are parked at once, and what jobs hold as they give it back, at their own
    pace: until then nothing is granted (invariant 1). Only the broker parks and unparks, so nobody else writes there.

        budget 6      a a b b . . # #      # parked, . free
        lowered to 3  a a b b # # # #      one too many is held: nothing is granted
        b gives back  a a . # # # # #      one of its two is parked, the other can be granted
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import entry, inlined, keep_out_of_line
from zico.pool.layout import MEMBER, NOBODY, PARKED
from zico.pool.mutex import append, lock, unlink, unlock
from zico.pool.regions import note_change, tell
from zico.pool.shared import header_of, job_at, regions_of

if TYPE_CHECKING:
    from zico.pool.layout import Member

Array = Any


@entry(MEMBER, int, [np.int32])
def set_budget(pool: Member, regions: int, parked: Array) -> int:
    """Let jobs hold so many regions together from now on, promise it to those that are there, then do as ``settle``."""
    keep_out_of_line()
    header = header_of(pool)
    lock(pool)
    header.budget_regions = regions
    for j in range(header.places):
        job = job_at(pool, j)
        job.promised = max(job.promised, regions)
    count = _settle(pool, parked)
    wake, notify = note_change(header)
    unlock(pool)
    tell(pool, wake, notify)
    return count


@entry(MEMBER, int, int)
def set_limit(pool: Member, job: int, regions: int) -> None:
    """Let a job hold so many regions from now on, 0: as many as the budget has."""
    keep_out_of_line()
    lock(pool)
    job_at(pool, job).limit = regions
    wake, notify = note_change(header_of(pool))
    unlock(pool)
    tell(pool, wake, notify)


@entry(MEMBER, [np.int32])
def settle(pool: Member, parked: Array) -> int:
    """Park what has come back beyond the budget.

    Args:
        pool: This process's member record.
        parked: Overwritten with the regions that have been parked.

    Returns:
        How many those are.
    """
    keep_out_of_line()
    lock(pool)
    count = _settle(pool, parked)
    unlock(pool)
    return count


@inlined
def _settle(pool: Member, parked: Array) -> int:
    """Let as many regions circulate as the budget has, or as are held while that is more."""
    header = header_of(pool)
    regions = regions_of(pool)
    left_out = header.n_regions - max(header.budget_regions, header.granted)
    count = 0
    while header.parked < left_out and header.free_head != NOBODY:
        r = header.free_head
        unlink(header, regions, r)
        regions[r].owner = PARKED
        header.parked += 1
        parked[count] = r
        count += 1
    r = 0
    while header.parked > left_out and r < header.n_regions:
        if regions[r].owner == PARKED:
            regions[r].owner = NOBODY
            append(header, regions, r)
            header.parked -= 1
        r += 1
    return count
