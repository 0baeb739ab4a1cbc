"""Fences: "free once that job's stream has passed that point of the device's timeline".

A job has up to ``STREAMS`` stream slots. For each (job, slot), called a *pair*, the table has a
counter that is written on the device's timeline. It only ever grows, also from one job in a place
to the next. ``issued`` is the last value for which the job has put a mark on the stream. A fence is
one word, so that a death never leaves half of one::

    | 0 | job: 6 bits | slot: 4 bits | value: 53 bits |          0: no device works on the region

*Passed*: the counter has reached the value. *Issued*: it will, whatever any processor does from now
on, since a mark waits for nothing but device work that was put there before it. *Clear* for a
stream: passed, or a fence of that very stream, whose order is the guard.

On the host device every fence is 0.

A job's processor runs ahead of its device only so far. A region that is granted behind a fence
stands idle until the fence has passed. A region that a job releases long before its device comes to
that point stands idle for its next owner. Without a bound, a processor that queues a whole
iteration at once would hold memory that others could use. The bound is in bytes, whatever the size
of regions, and tunes itself. It doubles when it has kept the device waiting, and loses a quarter
whenever another job waits for memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, inlined, keep_out_of_line
from zico.pool.layout import STREAMS, at, counters_of, header_of, issued_of, job_at, pair_of, regions_of

if TYPE_CHECKING:
    from zico.pool.layout import Member


NO_FENCE = 0
VALUE_BITS = 53
_JOB_SHIFT = VALUE_BITS + STREAMS.bit_length() - 1
_VALUE_MASK = (1 << VALUE_BITS) - 1


@inlined
def fence_of(pair: int, value: int) -> int:
    """Return the fence that is passed when the pair's counter reaches a value above 0."""
    return (pair << VALUE_BITS) | value


@inlined
def pair_in(fence: int) -> int:
    """Return whose counter a fence is about."""
    return fence >> VALUE_BITS


@inlined
def slot_in(fence: int) -> int:
    """Return the stream slot that a fence is about."""
    return pair_in(fence) % STREAMS


@inlined
def job_in(fence: int) -> int:
    """Return the job that a fence is about."""
    return fence >> _JOB_SHIFT


@inlined
def value_in(fence: int) -> int:
    """Return what the counter must have reached."""
    return fence & _VALUE_MASK


@inlined
def has_passed(pool: Member, fence: int) -> bool:
    """Tell whether the device has finished with what the fence guards."""
    return counters_of(pool)[at(pair_in(fence))] >= value_in(fence)


@inlined
def is_issued(pool: Member, fence: int) -> bool:
    """Tell whether the fence will be passed without anybody's processor."""
    return issued_of(pool)[pair_in(fence)] >= value_in(fence)


@inlined
def is_clear(pool: Member, fence: int, slot: int) -> bool:
    """Tell whether this process's stream in a slot may touch what the fence guards, without a wait."""
    return fence == NO_FENCE or pair_in(fence) == pair_of(pool.job, slot) or has_passed(pool, fence)


@inlined
def overtake(pool: Member, job: int) -> None:
    """Let every fence that a dead job has issued be passed; its device work has ended with its process.

    The counters do not fall back for the next job in the place: it goes on from there. Where the
    device still works for the dead job, its marks may set them back, and this is called again
    (``zico.pool.deaths``).
    """
    counters = counters_of(pool)
    issued = issued_of(pool)
    for slot in range(STREAMS):
        pair = pair_of(job, slot)
        value = max(issued[pair], counters[at(pair)])
        issued[pair] = value
        counters[at(pair)] = value


# -- running ahead of the device -------------------------------------------------------------------


START_BYTES = 256 << 20
"""A job's bound begins at four regions of the default size: a few doublings reach any other."""
LEAST_BYTES = 64 << 20
"""No bound is below one region of the default size: jobs with small regions run as far ahead."""
_LOSS_SHIFT = 2
"""The least shift that takes back less than a doubling has given. Too low a bound idles a device, too high a one only
delays a neighbour."""


@compiled
def tuned(cap: int, most: int, starved: bool, others_wait: bool) -> int:  # noqa: FBT001 - two independent facts
    """Return the next bound on running ahead, in bytes.

    Args:
        cap: The bound so far; 0: none has been set.
        most: The pool's bytes, beyond which the bound does not grow.
        starved: The bound has kept the job from memory, and its device had nothing left to do.
        others_wait: Another job waits for memory.
    """
    if cap == 0:
        cap = START_BYTES
    if starved:
        return min(2 * cap, most)
    if others_wait:
        return max(cap - (cap >> _LOSS_SHIFT), LEAST_BYTES)
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


@compiled
def _is_unmarked(pool: Member, pair: int) -> bool:
    """Tell whether a region was released on a pair's stream without a mark so far: its device may be at work."""
    keep_out_of_line()
    regions = regions_of(pool)
    for r in range(header_of(pool).n_regions):
        if pair_in(regions[r].fence) == pair and not is_issued(pool, regions[r].fence):
            return True
    return False


@inlined
def may_run_ahead(pool: Member, slot: int, n: int) -> bool:
    """Tell whether this job may take ``n`` more regions before their fences have passed; tunes its bound.

    With nothing ahead it may take any number, so that no request is too large; what is ahead comes
    to be behind without anybody's processor.
    """
    header = header_of(pool)
    me = job_at(pool, pool.job)
    ahead = count_ahead(pool)
    if ahead == 0:
        return True
    wanted_bytes = (ahead + n) * header.region_bytes
    pair = pair_of(pool.job, slot)
    refused = wanted_bytes > (me.ahead_cap or START_BYTES)
    starved = refused and counters_of(pool)[at(pair)] >= issued_of(pool)[pair] and not _is_unmarked(pool, pair)
    most = header.n_regions * header.region_bytes
    me.ahead_cap = tuned(me.ahead_cap, most, starved, header.waiters > me.waiting_threads)
    return not refused or wanted_bytes <= me.ahead_cap
