"""Tensor classes, learned online from lifetimes: never from a graph, never from a name.

The n-th tensor of a size within an iteration is taken to be the same tensor in every iteration (size and occurrence,
not position alone: threads reorder allocations of different sizes). What it lived like last time decides its arena.
Two keys that collide cost a worse place, never correctness.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, compiled, inlined, spread
from zico.heap.layout import COUNT, COUNTS, KEYS, Arena
from zico.trace import curve

if TYPE_CHECKING:
    from zico.heap.layout import HeapRecord
    from zico.pool.layout import Job

_U8 = np.dtype("u1")
_COUNT_SHIFT = 64 - COUNTS.bit_length() + 1
_KEY_SHIFT = 64 - KEYS.bit_length() + 1

SHORT_EVENTS = 8
"""A tensor freed within so many allocations and frees, or a 64th of the iteration, is a temporary."""
_SHORT_SHIFT = 6

SIZE_BITS = 40
"""A key is size + (occurrence << SIZE_BITS): exact for tensors below 1 TiB."""
_PROBES = 8  # more sizes than that with neighbouring hashes share a count: worse places, never wrong ones

UNKNOWN = 0  # stored classes count from one
_SMALL_SHIFT = 2  # smaller than a quarter of a region

LONG = int(Arena.LONG)
EXTRA = int(Arena.EXTRA)
SHORT = int(Arena.SHORT)
PERSISTENT = int(Arena.PERSISTENT)


@inlined
def key_of(heap: HeapRecord, iteration: int, size_bytes: int) -> int:
    """Count the next tensor of this size in this iteration and return its key: size and occurrence."""
    counts = array_at(heap.counts_address, COUNTS, COUNT)
    i = spread(size_bytes, _COUNT_SHIFT)
    for _ in range(_PROBES):
        count = counts[i]
        if count.iteration != iteration or count.size_bytes == 0:
            count.iteration = iteration
            count.size_bytes = size_bytes
            count.n = 0
        if count.size_bytes == size_bytes:
            break
        i = (i + 1) & (COUNTS - 1)
    counts[i].n += 1
    return size_bytes + (counts[i].n << SIZE_BITS)


def size_of(keys: Any) -> Any:  # noqa: ANN401 - an int, or an array of them
    """Return the size in bytes that is part of a key."""
    return keys & ((1 << SIZE_BITS) - 1)


@inlined
def class_of(key: int) -> int:
    """Return the entry of the class table for a key."""
    return spread(key, _KEY_SHIFT)


@inlined
def arena_for(heap: HeapRecord, entry: int, size_bytes: int) -> int:
    """Return the arena of the class that the tensor had last time.

    Of one that has not been seen to die only the size is known. Many weights are smaller than most feature maps, and
    would each keep a region from being given back: so small ones go to EXTRA, large ones to LONG.
    """
    known = array_at(heap.classes_address, KEYS, _U8)[entry]
    if known == UNKNOWN and size_bytes < 1 << (heap.region_shift - _SMALL_SHIFT):
        return EXTRA
    return LONG if known == UNKNOWN else known - 1


@compiled
def learn(heap: HeapRecord, job: Job, entry: int, lived_events: int, same_iteration: bool) -> None:  # noqa: FBT001
    """Note the class that a tensor turns out to have had when it dies."""
    limit = SHORT_EVENTS
    if not curve.is_flat(job.profile):
        limit = max(limit, job.profile.n_events >> _SHORT_SHIFT)
    if not same_iteration:
        arena = PERSISTENT
    elif lived_events <= limit:
        arena = SHORT
    else:
        arena = LONG
    array_at(heap.classes_address, KEYS, _U8)[entry] = arena + 1
