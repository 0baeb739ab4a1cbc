"""How far a job's processor may run ahead of its device.

A region that is granted behind a fence stands idle until the fence has passed, and so does, for its next owner, one
that a job has released long before its device comes to that point. Without a bound a processor that queues a whole
iteration in a moment would hold memory that others could use meanwhile. The bound counts regions and tunes itself: it
doubles when it has kept the device waiting, and loses a quarter whenever another job waits for memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled, inlined, keep_out_of_line
from zico.pool.fences import NO_FENCE, at, counters_of, has_passed, issued_of, job_in, pair_of
from zico.pool.shared import header_of, job_at, regions_of

if TYPE_CHECKING:
    from zico.pool.layout import Member

START_REGIONS = 4
"""256 MiB of regions of the default size: with releases so coarse no published model lost more than 3 % (methods.md
1.5), so a device that is behind by so much has enough to do. From here a few doublings reach any bound."""
LEAST_REGIONS = 1
_LOSS_SHIFT = 2  # gentler than the growth: too low a bound idles a device, too high a one only delays a neighbour


@compiled
def tuned(cap: int, most: int, starved: bool, others_wait: bool) -> int:  # noqa: FBT001 - two independent facts
    """Return the next bound on running ahead, in regions.

    Args:
        cap: The bound so far; 0: none has been set.
        most: The pool's regions.
        starved: The bound has kept the job from memory, and its device had nothing left to do.
        others_wait: Another job waits for memory.
    """
    if cap == 0:
        cap = START_REGIONS
    if starved:
        return min(2 * cap, most)
    if others_wait:
        return max(cap - max(cap >> _LOSS_SHIFT, 1), LEAST_REGIONS)
    return cap


@compiled
def count_ahead(pool: Member) -> int:
    """Count the regions that this job's processor has taken or released and its device has not. Inside the mutex."""
    keep_out_of_line()
    regions = regions_of(pool)
    count = 0
    for r in range(header_of(pool).n_regions):
        fence = regions[r].fence
        mine = regions[r].owner == pool.job
        if fence != NO_FENCE and mine != (job_in(fence) == pool.job) and not has_passed(pool, fence):
            count += 1
    return count


@inlined
def may_run_ahead(pool: Member, slot: int, n: int) -> bool:
    """Tell whether this job may take ``n`` more regions before their fences have passed; tunes its bound.

    With nothing ahead it may take any number, so that no request is too large; what is ahead comes to be behind
    without anybody's processor.
    """
    header = header_of(pool)
    me = job_at(pool, pool.job)
    ahead = count_ahead(pool)
    if ahead == 0:
        return True
    pair = pair_of(pool.job, slot)
    refused = ahead + n > (me.ahead_cap or START_REGIONS)
    starved = refused and counters_of(pool)[at(pair)] >= issued_of(pool)[pair]
    me.ahead_cap = tuned(me.ahead_cap, header.n_regions, starved, header.waiters > me.waiting_threads)
    return not refused or ahead + n <= me.ahead_cap
