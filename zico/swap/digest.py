"""A digest of memory: tells whether it still is what it was. XXH64, compiled.

Source: Y. Collet, "XXH64 algorithm description" (xxHash, doc/xxhash_spec.md). A change goes
unnoticed by a chance of one in 2**64, signs and other patterns of numbers included.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zico.base.compiled import array_at, compiled, inlined

_U64 = np.dtype("u8")
_U32 = np.dtype("u4")
_U8 = np.dtype("u1")
_WORD_BYTES, _HALF_BYTES, _LANES = 8, 4, 4
_P1 = np.uint64(11400714785074694791)
_P2 = np.uint64(14029467366897019727)
_P3 = np.uint64(1609587929392839161)
_P4 = np.uint64(9650029242287828579)
_P5 = np.uint64(2870177450012600261)
_NONE = np.uint64(0)
_BITS = 64


@inlined
def _turned(word: Any, bits: int) -> Any:  # noqa: ANN401 - Numba's numbers
    return (word << np.uint64(bits)) | (word >> np.uint64(_BITS - bits))


@inlined
def _taken(lane: Any, word: Any) -> Any:  # noqa: ANN401 - Numba's numbers
    """Return a lane that has taken a word in."""
    return _turned(lane + word * _P2, 31) * _P1


@inlined
def _merged(whole: Any, lane: Any) -> Any:  # noqa: ANN401 - Numba's numbers
    return (whole ^ _taken(_NONE, lane)) * _P1 + _P4


@compiled
def digest(address: int, size_bytes: int) -> int:
    """Return the XXH64 of memory with seed 0; reads it once, about as fast as it can be read."""
    n = size_bytes // _WORD_BYTES
    words = array_at(address, n, _U64)
    rounds = n - n % _LANES
    if rounds:
        a, b, c, d = _P1 + _P2, _P2, _NONE, _NONE - _P1
        for i in range(0, rounds, _LANES):
            a = _taken(a, words[i])
            b = _taken(b, words[i + 1])
            c = _taken(c, words[i + 2])
            d = _taken(d, words[i + 3])
        whole = _turned(a, 1) + _turned(b, 7) + _turned(c, 12) + _turned(d, 18)
        for lane in (a, b, c, d):
            whole = _merged(whole, lane)
    else:
        whole = _P5
    whole += np.uint64(size_bytes)
    for i in range(rounds, n):
        whole = _turned(whole ^ _taken(_NONE, words[i]), 27) * _P1 + _P4
    at = address + n * _WORD_BYTES
    left = size_bytes - n * _WORD_BYTES
    if left >= _HALF_BYTES:
        whole = _turned(whole ^ (np.uint64(array_at(at, 1, _U32)[0]) * _P1), 23) * _P2 + _P3
        at += _HALF_BYTES
        left -= _HALF_BYTES
    for byte in array_at(at, left, _U8):
        whole = _turned(whole ^ (np.uint64(byte) * _P5), 11) * _P1
    whole = (whole ^ (whole >> np.uint64(33))) * _P2
    whole = (whole ^ (whole >> np.uint64(29))) * _P3
    return int(whole ^ (whole >> np.uint64(32)))
