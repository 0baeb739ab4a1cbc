"""Encodings of tensors that leave a device's memory, in the form that ``zico.tiers.encodings`` reads.

A thread takes 32 numbers, or the numbers of one 4-byte word, so that no two threads write to one
word. Zeros are left out of a piece by two launches: where they are, then the others. A thread finds
its place by counting the bits of the words before its own. So a piece should be small, as those of
``zico.tiers.compressing`` are.

No job launches these yet: what swaps on a GPU is moved as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from zico.kernels.compilation import Kernel, block, blocks, load_word, store_word, thread, threads

from zico.base.compiled import inlined
from zico.base.small_floats import INFINITY, is_positive, narrowed, widened

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.uint32]

NUMBER_BYTES = 4
BITS = 32
ONE = 0x3F800000


def _bits_of(there: npt.NDArray[np.bool_]) -> Words:
    padded = np.zeros(-(-len(there) // BITS) * BITS, bool)
    padded[: len(there)] = there
    return np.packbits(padded, bitorder="little").view(np.uint32)


def _there(bits: Words, n: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:n].astype(bool)


# -- one bit a number ------------------------------------------------------------------------------


def mark_meaning(source: Words, target: Words, signs: int) -> None:
    """Write a bit a number, the first in the lowest: 1 where it is positive or a NaN, or where it is not zero."""
    there = ~(source.view(np.float32) <= 0) if signs else source != 0
    target[: -(-len(source) // BITS)] = _bits_of(there)


def mark(source: int, n: int, target: int, signs: int) -> int:
    """Write a bit for each of ``n`` numbers at an address. Any number of threads, a line of blocks."""
    word = block() * threads() + thread()
    while word * BITS < n:
        bits = 0
        for j in range(min(BITS, n - word * BITS)):
            number = load_word(source + (word * BITS + j) * NUMBER_BYTES)
            there = is_positive(number) if signs else number != 0
            bits |= int(there) << j
        store_word(target + word * NUMBER_BYTES, bits)
        word += blocks() * threads()
    return 0


MARK = Kernel(mark, mark_meaning)


def put_in_signs_meaning(source: Words, target: Words) -> None:
    """Write 1 where the bit of a number is set, else 0, as 4-byte floats."""
    target[:] = _there(source[: -(-len(target) // BITS)], len(target)) * np.uint32(ONE)


def put_in_signs(source: int, n: int, target: int) -> int:
    """Undo ``mark`` with signs. Any number of threads, a line of blocks."""
    word = block() * threads() + thread()
    while word * BITS < n:
        bits = load_word(source + word * NUMBER_BYTES)
        for j in range(min(BITS, n - word * BITS)):
            store_word(target + (word * BITS + j) * NUMBER_BYTES, ((bits >> j) & 1) * ONE)
        word += blocks() * threads()
    return 0


PUT_IN_SIGNS = Kernel(put_in_signs, put_in_signs_meaning)


# -- zeros -----------------------------------------------------------------------------------------


@inlined
def ones(word: int) -> int:
    """Return how many bits of a 32-bit word are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101 & 0xFFFFFFFF) >> 24


@inlined
def ones_before(bits: int, word: int) -> int:
    """Return how many bits are set in the words before one, at an address."""
    found = 0
    for before in range(word):
        found += ones(load_word(bits + before * NUMBER_BYTES))
    return found


def leave_out_zeros_meaning(source: Words, target: Words) -> None:
    """Write the numbers that are not zero behind the bits that ``mark`` has written to the target."""
    words = -(-len(source) // BITS)
    target[words : words + np.count_nonzero(source)] = source[source != 0]


def leave_out_zeros(source: int, n: int, target: int) -> int:
    """Write the numbers of a piece that are not zero behind their bits. Any number of threads, a line of blocks."""
    words = (n + BITS - 1) // BITS
    word = block() * threads() + thread()
    while word < words:
        at = words + ones_before(target, word)
        for j in range(min(BITS, n - word * BITS)):
            number = load_word(source + (word * BITS + j) * NUMBER_BYTES)
            if number != 0:
                store_word(target + at * NUMBER_BYTES, number)
                at += 1
        word += blocks() * threads()
    return 0


LEAVE_OUT_ZEROS = Kernel(leave_out_zeros, leave_out_zeros_meaning)


def put_in_zeros_meaning(source: Words, target: Words) -> None:
    """Undo ``leave_out_zeros``."""
    words = -(-len(target) // BITS)
    there = _there(source[:words], len(target))
    target[:] = 0
    target[there] = source[words : words + np.count_nonzero(there)]


def put_in_zeros(source: int, n: int, target: int) -> int:
    """Write the numbers of a piece, and zeros where none were kept. Any number of threads, a line of blocks."""
    words = (n + BITS - 1) // BITS
    word = block() * threads() + thread()
    while word < words:
        at = words + ones_before(source, word)
        bits = load_word(source + word * NUMBER_BYTES)
        for j in range(min(BITS, n - word * BITS)):
            number = 0
            if (bits >> j) & 1:
                number = load_word(source + at * NUMBER_BYTES)
                at += 1
            store_word(target + (word * BITS + j) * NUMBER_BYTES, number)
        word += blocks() * threads()
    return 0


PUT_IN_ZEROS = Kernel(put_in_zeros, put_in_zeros_meaning)


# -- fewer bits ------------------------------------------------------------------------------------


def narrow_meaning(source: Words, target: Words, exponent_bits: int, mantissa_bits: int) -> None:
    """Write numbers in fewer bits, the first of a word in the lowest."""
    shift, top = 23 - mantissa_bits, (1 << exponent_bits) - 1
    magnitude = (source & 0x7FFFFFFF).astype(np.int64)
    low = 127 - (top >> 1)
    rounded = (magnitude + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift
    bits = np.minimum(rounded, ((low + top) << mantissa_bits) - 1) - (low << mantissa_bits)
    bits[bits < 1 << mantissa_bits] = 0
    special = magnitude >= INFINITY
    bits[special] = (top << mantissa_bits) + (magnitude[special] > INFINITY)
    width = 1 + exponent_bits + mantissa_bits
    bits |= (source >> 31).astype(np.int64) << (width - 1)
    each = BITS // width
    padded = np.zeros(-(-len(bits) // each) * each, np.int64)
    padded[: len(bits)] = bits
    target[: len(padded) // each] = (padded.reshape(-1, each) << (width * np.arange(each))).sum(1)


def narrow(source: int, n: int, target: int, exponent_bits: int, mantissa_bits: int) -> int:
    """Write ``n`` numbers at an address in fewer bits. Any number of threads, a line of blocks."""
    width = 1 + exponent_bits + mantissa_bits
    each = BITS // width
    word = block() * threads() + thread()
    while word * each < n:
        bits = 0
        for j in range(min(each, n - word * each)):
            number = load_word(source + (word * each + j) * NUMBER_BYTES)
            bits |= narrowed(number, exponent_bits, mantissa_bits) << (j * width)
        store_word(target + word * NUMBER_BYTES, bits)
        word += blocks() * threads()
    return 0


NARROW = Kernel(narrow, narrow_meaning)


def widen_meaning(source: Words, target: Words, exponent_bits: int, mantissa_bits: int) -> None:
    """Undo ``narrow``, but for what rounding has changed."""
    width, top = 1 + exponent_bits + mantissa_bits, (1 << exponent_bits) - 1
    each = BITS // width
    words = source[: -(-len(target) // each)].astype(np.int64)
    bits = ((words[:, None] >> (width * np.arange(each))) & ((1 << width) - 1)).reshape(-1)[: len(target)]
    magnitude = bits & ((1 << (width - 1)) - 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    exponent = np.where(exponent == top, 255, exponent + 127 - (top >> 1))
    number = (exponent << 23) | (mantissa << (23 - mantissa_bits))
    number[magnitude < 1 << mantissa_bits] = 0
    target[:] = number | (bits >> (width - 1)) << 31


def widen(source: int, n: int, target: int, exponent_bits: int, mantissa_bits: int) -> int:
    """Undo ``narrow``. Any number of threads, a line of blocks."""
    width = 1 + exponent_bits + mantissa_bits
    each = BITS // width
    word = block() * threads() + thread()
    while word * each < n:
        bits = load_word(source + word * NUMBER_BYTES)
        for j in range(min(each, n - word * each)):
            number = widened((bits >> (j * width)) & ((1 << width) - 1), exponent_bits, mantissa_bits)
            store_word(target + (word * each + j) * NUMBER_BYTES, number)
        word += blocks() * threads()
    return 0


WIDEN = Kernel(widen, widen_meaning)

KERNELS = (MARK, PUT_IN_SIGNS, LEAVE_OUT_ZEROS, PUT_IN_ZEROS, NARROW, WIDEN)
