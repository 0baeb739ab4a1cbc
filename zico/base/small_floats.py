"""Floating-point numbers of fewer than 32 bits, for processors and devices alike.

A number has one sign bit, then ``exponent_bits``, then ``mantissa_bits``, as IEEE 754 has it, but
without denormal numbers: those become zeros. Finite numbers that are too large become the largest
one. Infinities and NaNs stay what they are.

Source: A. Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (ISCA
2018), section 4.3.
"""

from __future__ import annotations

from zico.base.compiled import inlined

MANTISSA_BITS = 23
"""Bits of a 32-bit number's mantissa."""
BIAS = 127
INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_SIGN_BIT = 31


@inlined
def narrowed(number: int, exponent_bits: int, mantissa_bits: int) -> int:
    """Return the bits of a 32-bit number in fewer bits, rounded to the nearest, ties to even.

    Args:
        number: Its 32 bits, as an integer of 64.
        exponent_bits: 2 to 7.
        mantissa_bits: 1 to 22.
    """
    shift = MANTISSA_BITS - mantissa_bits
    magnitude = number & _MAGNITUDE
    top = (1 << exponent_bits) - 1
    low = BIAS - (top >> 1)  # what exponents differ by
    rounded = (magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift
    bits = min(rounded, ((low + top) << mantissa_bits) - 1) - (low << mantissa_bits)
    if bits < 1 << mantissa_bits:
        bits = 0
    if magnitude >= INFINITY:
        bits = (top << mantissa_bits) | int(magnitude > INFINITY)
    return ((number >> _SIGN_BIT) & 1) << (exponent_bits + mantissa_bits) | bits


@inlined
def widened(bits: int, exponent_bits: int, mantissa_bits: int) -> int:
    """Return the 32 bits of a number that ``narrowed`` returned."""
    top = (1 << exponent_bits) - 1
    low = BIAS - (top >> 1)
    magnitude = bits & ((1 << (exponent_bits + mantissa_bits)) - 1)
    number = (magnitude + (low << mantissa_bits)) << (MANTISSA_BITS - mantissa_bits)
    if magnitude < 1 << mantissa_bits:
        number = 0
    if magnitude >= top << mantissa_bits:
        number = INFINITY | (magnitude & ((1 << mantissa_bits) - 1)) << (MANTISSA_BITS - mantissa_bits)
    return ((bits >> (exponent_bits + mantissa_bits)) & 1) << _SIGN_BIT | number


@inlined
def is_positive(number: int) -> bool:
    """Tell of a 32-bit number, by its bits, whether it is not at most zero: NaNs are not."""
    return number & _MAGNITUDE > INFINITY or 0 < number <= INFINITY
