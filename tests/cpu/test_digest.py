"""A digest of memory depends on every byte and its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.swap.digest import digest


def of(contents: bytes) -> int:
    """Return the digest of some bytes."""
    array = np.frombuffer(contents, np.uint8)
    return digest(array.ctypes.data, len(array))


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_it_is_xxh64(contents: bytes, expected: int) -> None:
    """The values are those of the xxHash project and of python-xxhash's documentation."""
    assert of(contents) == expected


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


@given(st.sets(st.integers(0, 63), min_size=1), st.sampled_from((np.float32, np.float64)))
def test_signs_count(places: set[int], kind: type[np.floating]) -> None:
    """The highest bits of several words change, as where numbers are negated."""
    numbers = np.arange(1, 65, dtype=kind)
    changed = numbers.copy()
    changed[list(places)] *= -1
    assert of(numbers.tobytes()) != of(changed.tobytes())
