"""Numbers without those that are zero, without loss. Feature maps behind a ReLU are full of zeros.

``pack`` writes a bit a number, and then the numbers that are not zero::

5 0 0 7   ->   1001 | 5 7          a bit a number, the first in the lowest, then those that are not zero
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.compiled import compiled

NUMBER_BYTES = 4
_BITS = 32

Array = Any


@compiled
def pack(source: Array, target: Array) -> int:
    """Leave out zeros; returns the numbers written.

    Args:
        source: 4-byte numbers, unsigned, so that the zero with a sign is none.
        target: Room for one more than all of them, and their bits.
    """
    n = len(source)
    words = -(-n // _BITS)
    end = words
    for word in range(words):
        bits = np.uint32(0)
        for j in range(min(_BITS, n - word * _BITS)):
            number = source[word * _BITS + j]
            target[end] = number  # overwritten if it is zero: no branch to mispredict
            there = np.uint32(number != 0)
            bits |= there << np.uint32(j)
            end += np.int64(there)  # type: ignore[assignment]
        target[word] = bits
    return end


@compiled
def unpack(source: Array, target: Array) -> int:
    """Undo ``pack``; returns the numbers read. The source must have one more than were written."""
    n = len(target)
    words = -(-n // _BITS)
    at = words
    for word in range(words):
        bits = source[word]
        for j in range(min(_BITS, n - word * _BITS)):
            there = (bits >> np.uint32(j)) & np.uint32(1)
            target[word * _BITS + j] = source[at] * there
            at += np.int64(there)  # type: ignore[assignment]
    return at
