"""Fences: "free once that job's stream has passed that point of the device's timeline".

A job has up to ``STREAMS`` stream slots. For each (job, slot), called a *pair*, the table has a counter that only ever
grows, also from one job in a place to the next, and that is written on the device's timeline; and ``issued``: the last
value for which the job has put a mark on the stream. A fence is one word, so that a death never leaves half of one::

    | 0 | job: 6 bits | slot: 4 bits | value: 53 bits |          0: no device works on the region

*Passed*: the counter has reached the value. *Issued*: it will, whatever any processor does from now on, since a mark
waits for nothing but device work that was put there before it. *Clear* for a stream: passed, or a fence of that very
stream, whose order is the guard.

On the host device every fence is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, inlined
from zico.pool.layout import COUNTER_BYTES, MAX_JOBS, STREAMS

if TYPE_CHECKING:
    from zico.pool.layout import Member

NO_FENCE = 0
VALUE_BITS = 53
PAIRS = MAX_JOBS * STREAMS
_JOB_SHIFT = VALUE_BITS + STREAMS.bit_length() - 1
_VALUE_MASK = (1 << VALUE_BITS) - 1
_WORDS = COUNTER_BYTES // 8
_I64 = np.dtype("i8")

Array = Any


@inlined
def pair_of(job: int, slot: int) -> int:
    """Return the number of a job's stream slot among all."""
    return job * STREAMS + slot


@inlined
def fence_of(pair: int, value: int) -> int:
    """Return the fence that is passed when the pair's counter reaches a value above 0."""
    return (pair << VALUE_BITS) | value


@inlined
def pair_in(fence: int) -> int:
    """Return whose counter a fence is about."""
    return fence >> VALUE_BITS


@inlined
def job_in(fence: int) -> int:
    """Return the job that a fence is about."""
    return fence >> _JOB_SHIFT


@inlined
def value_in(fence: int) -> int:
    """Return what the counter must have reached."""
    return fence & _VALUE_MASK


@inlined
def counters_of(pool: Member) -> Array:
    """Return the counters; the one of a pair is at ``at(pair)``."""
    return array_at(pool.counters_address, PAIRS * _WORDS, _I64)


@inlined
def at(pair: int) -> int:
    """Return where a pair's counter is in ``counters_of``: each has a cache line of its own."""
    return pair * _WORDS


@inlined
def issued_of(pool: Member) -> Array:
    """Return the last value for which each pair has a mark on its stream."""
    return array_at(pool.issued_address, PAIRS, _I64)


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

    The counters do not fall back for the next job in the place: it goes on from there.
    """
    counters = counters_of(pool)
    issued = issued_of(pool)
    for slot in range(STREAMS):
        pair = pair_of(job, slot)
        value = max(issued[pair], counters[at(pair)])
        issued[pair] = value
        counters[at(pair)] = value
