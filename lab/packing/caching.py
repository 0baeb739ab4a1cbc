"""What PyTorch's caching allocator would reserve for a problem: what a plan is compared with.

Sizes are rounded up to 512 bytes. Small requests share segments of 2 MiB, medium ones segments of
20 MiB, a large one gets a segment of its own size rounded up to 2 MiB; small and other segments are
two pools. The smallest free block that is large enough is taken, the lowest among equals, and what
remains is split off if it is worth it. Freed neighbours merge. No segment is given back, so that
the bytes reserved at the end are the most ever reserved.

Source: PyTorch 2, ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_pool``,
``get_allocation_size``, ``should_split``, ``free_block``) with ``c10/core/AllocatorConfig.h``,
default settings.

Known limitations:
    * One stream. The allocator's attempts to give memory back when the device is full are left out:
      nothing is full.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import compiled
from zico.planning.packing.problem import Problem
from zico.trace.classes import TensorClass

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.planning.packing.problem import Int64s

_MIN_BLOCK = 512  # kMinBlockSize
_SMALL = 1 << 20  # kSmallSize: the largest request that goes to the pool of small blocks
_SMALL_SEGMENT = 2 << 20  # kSmallBuffer
_LARGE_SEGMENT = 20 << 20  # kLargeBuffer
_MIN_LARGE = 10 << 20  # kMinLargeAlloc: from here on, a segment is as large as its request
_ROUND_LARGE = 2 << 20  # kRoundLarge

# A block is a row of five numbers.
_OFFSET, _SIZE, _SEGMENT, _IS_SMALL, _IS_FREE, _COLUMNS = range(6)


@dataclasses.dataclass(frozen=True, eq=False)
class Reserved:
    """What the allocator did."""

    reserved_bytes: int
    """All segments together."""
    n_segments: int
    offset_bytes: Int64s
    """Where each tensor lay, the segments one after the other."""


def reserved_by_caching(problem: Problem) -> Reserved:
    """Replay a problem's allocations and frees; at equal ticks frees come first, then allocations in their order."""
    n = len(problem)
    events = np.argsort(np.concatenate([problem.upper, problem.lower]), kind="stable")
    requests = -(-problem.size_bytes // _MIN_BLOCK) * _MIN_BLOCK
    offsets = np.empty(n, np.int64)
    reserved_bytes, n_segments = replay(events, requests, np.empty((2 * n + 1, _COLUMNS), np.int64), offsets)
    return Reserved(reserved_bytes, n_segments, offsets)


def reserved_apart(problem: Problem, classes: NDArray[np.int8], block_bytes: int) -> tuple[Int64s, range]:
    """Let tensors of each class be allocated from segments of their own, as Sentinel keeps pages of one kind.

    Args:
        problem: The tensors.
        classes: Each one's ``zico.trace.classes.TensorClass``; feature and gradient maps count as
            one.
        block_bytes: No two classes share a block of so many bytes.

    Returns:
        Each tensor's offset, and the blocks in which temporaries lie.
    """
    offsets, begin, block = np.empty(len(problem), np.int64), 0, 0
    maps = (TensorClass.FEATURE_MAP, TensorClass.GRADIENT_MAP)
    for some in ((TensorClass.PERSISTENT,), maps, (TensorClass.TEMPORARY,)):
        rows, block = np.flatnonzero(np.isin(classes, some)), begin // block_bytes
        found = reserved_by_caching(Problem(problem.lower[rows], problem.upper[rows], problem.size_bytes[rows]))
        offsets[rows] = begin + found.offset_bytes
        begin += -(-found.reserved_bytes // block_bytes) * block_bytes
    return offsets, range(block, begin // block_bytes)


# -- compiled; blocks are sorted by offset ---------------------------------------------------------


@compiled
def segment_size(request: int) -> int:
    """Return the bytes of a new segment for a request."""
    if request <= _SMALL:
        return _SMALL_SEGMENT
    if request < _MIN_LARGE:
        return _LARGE_SEGMENT
    return -(-request // _ROUND_LARGE) * _ROUND_LARGE


@compiled
def best_block(blocks: Int64s, count: int, request: int) -> int:
    """Return the smallest free block of the request's pool that is large enough, the lowest among equals; or -1."""
    best = -1
    for k in range(count):
        block = blocks[k]
        if not block[_IS_FREE] or block[_IS_SMALL] != (request <= _SMALL) or block[_SIZE] < request:
            continue
        if best < 0 or block[_SIZE] < blocks[best, _SIZE]:
            best = k
    return best


@compiled
def split(blocks: Int64s, count: int, k: int, request: int) -> int:
    """Split off what a block has beyond the request if it is worth it; return how many blocks there are then."""
    remaining = blocks[k, _SIZE] - request
    if remaining < _MIN_BLOCK or (not blocks[k, _IS_SMALL] and remaining <= _SMALL):
        return count
    for other in range(count, k, -1):
        blocks[other] = blocks[other - 1]
    blocks[k, _SIZE] = request
    blocks[k + 1, _OFFSET] += request
    blocks[k + 1, _SIZE] = remaining
    return count + 1


@compiled
def merge(blocks: Int64s, count: int, k: int) -> int:
    """Merge a block with the next one if both are free parts of one segment; return how many blocks there are then."""
    if k < 0 or k + 1 >= count or blocks[k, _SEGMENT] != blocks[k + 1, _SEGMENT]:
        return count
    if not blocks[k, _IS_FREE] or not blocks[k + 1, _IS_FREE]:
        return count
    blocks[k, _SIZE] += blocks[k + 1, _SIZE]
    for other in range(k + 1, count - 1):
        blocks[other] = blocks[other + 1]
    return count - 1


@compiled
def replay(events: Int64s, requests: Int64s, blocks: Int64s, offsets: Int64s) -> tuple[int, int]:
    """Set ``offsets``, and return the bytes reserved and the number of segments.

    Of ``n`` tensors, event ``i`` below ``n`` frees tensor ``i``, and event ``n + i`` allocates it.
    """
    n = len(requests)
    count = n_segments = reserved = 0
    for event in events:
        if event >= n:
            i = event - n
            k = best_block(blocks, count, requests[i])
            if k < 0:
                k = count
                blocks[k, _OFFSET], blocks[k, _SIZE] = reserved, segment_size(requests[i])
                blocks[k, _SEGMENT], blocks[k, _IS_SMALL] = n_segments, requests[i] <= _SMALL
                reserved += blocks[k, _SIZE]
                n_segments += 1
                count += 1
            blocks[k, _IS_FREE] = 1
            count = split(blocks, count, k, requests[i])
            blocks[k, _IS_FREE] = 0
            offsets[i] = blocks[k, _OFFSET]
        else:
            k = np.searchsorted(blocks[:count, _OFFSET], offsets[event])
            blocks[k, _IS_FREE] = 1
            count = merge(blocks, count, k)
            count = merge(blocks, count, k - 1)
    return reserved, n_segments
