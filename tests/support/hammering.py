"""Random use of a heap, without Python: by the threads of a test, and by jobs that are killed or stopped meanwhile.

Both compile the same function, with all of the allocator in it, once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.base.compiled import array_at, compiled
from zico.heap import allocator
from zico.heap.layout import GRANULE_BYTES

Record = Any
_I64 = np.dtype("i8")


def blocks_of_nobody(n: int) -> np.ndarray:
    """Return addresses and sizes of so many blocks, none of which is there yet."""
    return np.zeros((n, 2), np.int64)


@compiled
def hammer(heap: Record, seed: int, rounds: int, most_bytes: int, owner: int, blocks: Record, faults: Record) -> int:
    """Allocate and free at random, and free all in the end; a pattern in each block is checked before it is freed.

    Args:
        heap: The heap's record.
        seed: Of the first round.
        rounds: Each of which allocates a block or frees one.
        most_bytes: Above the least size that a block may get.
        owner: A number of the caller's, which is part of every pattern.
        blocks: Of ``blocks_of_nobody``.
        faults: Counts, to which words that were not as written and blocks that were got are added.

    Returns:
        A seed for more rounds.
    """
    state = seed
    for _ in range(rounds):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF
        i = (state >> 33) % len(blocks)
        address, size = blocks[i, 0], blocks[i, 1]
        if address > 0:
            words = size >> 3
            view = array_at(address, words, _I64)
            step = max(1, words >> 4)
            for w in range(0, words - 1, step):
                if view[w] != address ^ w ^ size ^ owner:
                    faults[0] += 1
            if view[words - 1] != address ^ size ^ owner:
                faults[0] += 1
            allocator.free(heap, address)
            blocks[i, 0] = 0
        else:
            size = GRANULE_BYTES + (((state >> 16) % most_bytes) & ~7)
            address = allocator.allocate(heap, size, 64)
            if address > 0:
                words = size >> 3
                view = array_at(address, words, _I64)
                step = max(1, words >> 4)
                for w in range(0, words - 1, step):
                    view[w] = address ^ w ^ size ^ owner
                view[words - 1] = address ^ size ^ owner
                blocks[i, 0] = address
                blocks[i, 1] = size
                faults[1] += 1
    for i in range(len(blocks)):
        if blocks[i, 0] > 0:
            allocator.free(heap, blocks[i, 0])
            blocks[i, 0] = 0
    return state
