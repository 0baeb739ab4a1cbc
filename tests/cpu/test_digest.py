"""A digest of memory depends on every byte and its place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zico.offload.digest import digest


def of(contents: bytes) -> int:
    """Return the digest of some bytes."""
    array = np.frombuffer(contents, np.uint8)
    return digest(array.ctypes.data, len(array))


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_byte_counts(contents: bytes, data: st.DataObject) -> None:
    """The same bytes have the same digest; with another byte, another bit or another end they have not."""
    assert of(contents) == of(bytes(bytearray(contents)))
    at = data.draw(st.integers(0, len(contents) - 1))
    changed = bytearray(contents)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    assert of(bytes(changed)) != of(contents)
    assert of(contents + b"\0") != of(contents)


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=40, unique=True), st.data())
def test_places_count(words: list[bytes], data: st.DataObject) -> None:
    """Two words in each other's place make another digest."""
    i, j = data.draw(st.permutations(range(len(words))))[:2]
    other = list(words)
    other[i], other[j] = other[j], other[i]
    assert of(b"".join(other)) != of(b"".join(words))
