"""Numbers put in an order, or a form, that takes less: without loss, whatever their bits are.

``split`` puts bytes of equal weight together; ``pack`` leaves out the numbers that are zero, of which feature maps
behind a ReLU are full::

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
def split(source: Array, target: Array) -> None:
    """Put the first bytes of all 4-byte numbers first, then the second ones, and so on; the rest at the end."""
    n = len(source) // NUMBER_BYTES
    for i in range(n):
        for place in range(NUMBER_BYTES):
            target[place * n + i] = source[NUMBER_BYTES * i + place]
    for i in range(NUMBER_BYTES * n, len(source)):
        target[i] = source[i]


@compiled
def join(source: Array, target: Array) -> None:
    """Undo ``split``."""
    n = len(source) // NUMBER_BYTES
    for i in range(n):
        for place in range(NUMBER_BYTES):
            target[NUMBER_BYTES * i + place] = source[place * n + i]
    for i in range(NUMBER_BYTES * n, len(source)):
        target[i] = source[i]


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
