"""Encodings of 4-byte numbers that leave memory: without zeros, signs alone, or fewer bits.

| encoding | what is kept of a number |
| --- | --- |
| ``ZEROS`` | all of it, if it is not zero; one bit says whether |
| ``SIGNS`` | one bit: whether it is positive or a NaN. It comes back as 1 or 0 |
| ``FP16``, ``FP10``, ``FP8`` | 16, 10 or 8 bits (``zico.base.small_floats``): 2, 3 or 4 numbers in 4 bytes |

``ZEROS`` loses nothing. ``SIGNS`` loses nothing that ReLU's backward pass reads of ReLU's result.
The others change gradients, and are for users who ask for that.

Source: A. Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (ISCA
2018), section 4: binarize, sparse storage, delayed precision reduction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.base.compiled import compiled, inlined
from zico.base.small_floats import is_positive, narrowed, widened

NUMBER_BYTES = 4
_BITS = 32

ZEROS = 0
SIGNS = 1
FP16 = 2
FP10 = 3
FP8 = 4
NAMES = ("zeros", "signs", "fp16", "fp10", "fp8")

Array = Any


@inlined
def format_of(encoding: int) -> tuple[int, int]:
    """Return the bits of exponent and mantissa of an encoding in fewer bits."""
    if encoding == FP16:
        return 5, 10
    if encoding == FP10:
        return 5, 4
    return 4, 3


@inlined
def in_a_word(encoding: int) -> int:
    """Return how many numbers four bytes have."""
    if encoding == SIGNS:
        return _BITS
    return 2 if encoding == FP16 else 3 if encoding == FP10 else 4


# -- zeros -----------------------------------------------------------------------------------------
#
#     5 0 0 7   ->   1001 | 5 7          a bit a number, the first in the lowest, then those that are not zero


@compiled
def leave_out_zeros(source: Array, target: Array) -> int:
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
def put_in_zeros(source: Array, target: Array) -> int:
    """Undo ``leave_out_zeros``; returns the numbers read. The source must have one more than were written."""
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


# -- signs, and fewer bits -------------------------------------------------------------------------


@compiled
def keep_signs(source: Array, target: Array) -> int:
    """Write one bit a number, the first in the lowest, 1 where it is positive or a NaN; returns the numbers written."""
    n = len(source)
    words = -(-n // _BITS)
    for word in range(words):
        bits = np.uint32(0)
        for j in range(min(_BITS, n - word * _BITS)):
            number: int = np.int64(source[word * _BITS + j])  # type: ignore[assignment]
            bits |= np.uint32(is_positive(number)) << np.uint32(j)
        target[word] = bits
    return words


@compiled
def put_in_signs(source: Array, target: Array) -> int:
    """Write 1 where the bit of a number is set, else 0, as 4-byte floats; returns the numbers read."""
    n = len(target)
    one = np.uint32(0x3F800000)
    for i in range(n):
        target[i] = ((source[i // _BITS] >> np.uint32(i % _BITS)) & np.uint32(1)) * one
    return -(-n // _BITS)


@compiled
def narrow(source: Array, target: Array, encoding: int) -> int:
    """Write numbers in fewer bits, the first of a word in the lowest; returns the numbers written."""
    exponent_bits, mantissa_bits = format_of(encoding)
    n = len(source)
    each = in_a_word(encoding)
    words = -(-n // each)
    for word in range(words):
        bits = np.int64(0)
        for j in range(min(each, n - word * each)):
            number: int = np.int64(source[word * each + j])  # type: ignore[assignment]
            bits |= narrowed(number, exponent_bits, mantissa_bits) << (j * (1 + exponent_bits + mantissa_bits))
        target[word] = np.uint32(bits)
    return words


@compiled
def widen(source: Array, target: Array, encoding: int) -> int:
    """Undo ``narrow``; returns the numbers read."""
    exponent_bits, mantissa_bits = format_of(encoding)
    n = len(target)
    each = in_a_word(encoding)
    width = 1 + exponent_bits + mantissa_bits
    for i in range(n):
        word: int = np.int64(source[i // each])  # type: ignore[assignment]
        bits = (word >> (i % each * width)) & ((1 << width) - 1)
        target[i] = np.uint32(widened(bits, exponent_bits, mantissa_bits))
    return -(-n // each)
