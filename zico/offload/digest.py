"""A digest of memory: tells whether it still is what it was."""

from __future__ import annotations

import numpy as np

from zico.base.compiled import array_at, compiled

_U64 = np.dtype("u8")
_U8 = np.dtype("u1")
_WORD_BYTES = 8
_LANES = 4
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@compiled
def digest(address: int, size_bytes: int) -> int:
    """Return a number that depends on every byte and its place; as fast as memory is read.

    Words go to four lanes in turn, each of which multiplies what it has by an odd number and takes
    the word in. So a change of one word always shows, and others by a chance of one in 2**64.
    """
    n = size_bytes // _WORD_BYTES
    words = array_at(address, n, _U64)
    a = b = c = d = np.uint64(size_bytes)
    whole = n - n % _LANES
    for i in range(0, whole, _LANES):
        a = (a ^ words[i]) * _PRIME
        b = (b ^ words[i + 1]) * _PRIME
        c = (c ^ words[i + 2]) * _PRIME
        d = (d ^ words[i + 3]) * _PRIME
    for i in range(whole, n):
        a = (a ^ words[i]) * _PRIME
    rest = array_at(address + n * _WORD_BYTES, size_bytes - n * _WORD_BYTES, _U8)
    for byte in rest:
        b = (b ^ np.uint64(byte)) * _PRIME
    for lane in (b, c, d):
        a = ((a ^ (a >> _SHIFT)) ^ lane) * _PRIME
    return int(a ^ (a >> _SHIFT))
