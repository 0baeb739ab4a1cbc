"""Encodings of numbers that leave memory: on the host and as device kernels, against what they mean in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.kernel_processor import processor
from hypothesis import given, settings
from hypothesis import strategies as st
from zico.kernels import encode

from zico.tiers import encodings
from zico.tiers.compressing import PIECE_BYTES
from zico.tiers.destinations import TierWish
from zico.tiers.encodings import FP8, FP10, FP16, SIGNS, ZEROS
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.kernels.compilation import Kernel

FORMATS = {FP16: (5, 10), FP10: (5, 4), FP8: (4, 3)}
SPECIAL = [
    0,
    1 << 31,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC00001,
    1,
    0x80000001,
    0x3F800000,
    0x477FE000,
    0x7F7FFFFF,
]
"""Zeros, infinities, NaNs, denormal numbers, one, the largest numbers of 16 bits and of 32."""
NUMBERS = st.lists(st.one_of(st.sampled_from([*SPECIAL, 0, 0]), st.integers(0, 2**32 - 1)), max_size=150).map(
    lambda numbers: np.array(numbers, np.uint32)
)
UNTOUCHED = 0xA5A5A5A5


def room(n: int) -> np.ndarray:
    """Return room for numbers, which nobody has written to."""
    return np.full(n, UNTOUCHED, np.uint32)


def on_device(
    kernel: Kernel, source: np.ndarray, n: int, target: np.ndarray, *more: int, grid: tuple[int, int]
) -> None:
    """Run a kernel on so many blocks of so many threads."""
    blocks, threads = grid
    addresses = source.ctypes.data, n, target.ctypes.data
    processor().run(kernel, *addresses, *more, blocks=blocks, threads=threads)


GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None)
@given(numbers=NUMBERS, grid=GRIDS)
def test_zeros_are_left_out_and_put_in_again(numbers: np.ndarray, grid: tuple[int, int]) -> None:
    """A bit a number and those that are not zero are written; a zero with a sign is a number."""
    n = len(numbers)
    meant, found, device = room(2 * n + 1), room(2 * n + 1), room(2 * n + 1)
    encode.MARK.meaning(numbers, meant, 0)
    encode.LEAVE_OUT_ZEROS.meaning(numbers, meant)
    words = -(-n // 32)
    written = words + np.count_nonzero(numbers)
    assert encodings.leave_out_zeros(numbers, found) == written
    assert np.array_equal(found[:written], meant[:written])
    on_device(encode.MARK, numbers, n, device, 0, grid=grid)
    on_device(encode.LEAVE_OUT_ZEROS, numbers, n, device, grid=grid)
    assert np.array_equal(device, meant)
    back, device_back, meant_back = room(n), room(n), room(n)
    assert encodings.put_in_zeros(found, back) == written
    on_device(encode.PUT_IN_ZEROS, device, n, device_back, grid=grid)
    encode.PUT_IN_ZEROS.meaning(meant, meant_back)
    assert np.array_equal(back, numbers)
    assert np.array_equal(device_back, numbers)
    assert np.array_equal(meant_back, numbers)


@settings(deadline=None)
@given(numbers=NUMBERS, grid=GRIDS)
def test_signs_are_what_the_backward_pass_of_relu_reads(numbers: np.ndarray, grid: tuple[int, int]) -> None:
    """Numbers come back as 1 where they are not at most 0, else as 0: NaNs count as ReLU's backward pass takes them."""
    n = len(numbers)
    words = -(-n // 32)
    meant, found, device = room(words + 1), room(words + 1), room(words + 1)
    encode.MARK.meaning(numbers, meant, 1)
    assert encodings.keep_signs(numbers, found) == words
    on_device(encode.MARK, numbers, n, device, 1, grid=grid)
    assert np.array_equal(found, meant)
    assert np.array_equal(device, meant)
    back, device_back, meant_back = room(n), room(n), room(n)
    assert encodings.put_in_signs(found, back) == words
    on_device(encode.PUT_IN_SIGNS, device, n, device_back, grid=grid)
    encode.PUT_IN_SIGNS.meaning(meant, meant_back)
    assert np.array_equal(back.view(np.float32), (~(numbers.view(np.float32) <= 0)).astype(np.float32))
    assert np.array_equal(device_back, back)
    assert np.array_equal(meant_back, back)


@settings(deadline=None)
@given(numbers=NUMBERS, grid=GRIDS, encoding=st.sampled_from(list(FORMATS)))
def test_fewer_bits_are_the_nearest_number(numbers: np.ndarray, grid: tuple[int, int], encoding: int) -> None:
    """Host and device write what NumPy's meaning does, and read it back as that does."""
    n, form = len(numbers), FORMATS[encoding]
    words = -(-n // encodings.in_a_word(encoding))
    meant, found, device = room(words + 1), room(words + 1), room(words + 1)
    encode.NARROW.meaning(numbers, meant, *form)
    assert encodings.narrow(numbers, found, encoding) == words
    on_device(encode.NARROW, numbers, n, device, *form, grid=grid)
    assert np.array_equal(found, meant)
    assert np.array_equal(device, meant)
    back, device_back, meant_back = room(n), room(n), room(n)
    assert encodings.widen(found, back, encoding) == words
    on_device(encode.WIDEN, device, n, device_back, *form, grid=grid)
    encode.WIDEN.meaning(meant, meant_back, *form)
    assert np.array_equal(device_back, back)
    assert np.array_equal(meant_back, back)
    again = room(words + 1)
    encodings.narrow(back, again, encoding)
    assert np.array_equal(again, found), "what has been rounded stays"


def test_sixteen_bits_are_numpys_half_precision() -> None:
    """Every normal number of 16 bits, and the middle of any two neighbours, is what NumPy makes of it."""
    exact = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = exact[np.isfinite(exact) & (np.abs(exact) >= 2.0**-14)].astype(np.float32)
    middle = np.sort(exact)
    numbers = np.concatenate([exact, (middle[:-1] + middle[1:]) / 2])
    numbers = numbers[np.abs(numbers) >= 2.0**-14]
    found, back = room(len(numbers)), np.empty(len(numbers), np.float32)
    encodings.narrow(numbers.view(np.uint32), found, FP16)
    encodings.widen(found, back.view(np.uint32), FP16)
    assert np.array_equal(back, numbers.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("encoding", "largest", "least"), [(FP16, 65504.0, 2.0**-14), (FP10, 63488.0, 2.0**-14), (FP8, 240.0, 2.0**-6)]
)
def test_what_is_out_of_range_is_the_nearest_end(encoding: int, largest: float, least: float) -> None:
    """Too large is the largest number, too small is zero; infinities and NaNs stay."""
    numbers = np.array([1e38, -1e38, largest, least, least / 3, -least / 3, np.inf, -np.inf, np.nan], np.float32)
    found, back = room(len(numbers)), np.empty(len(numbers), np.float32)
    encodings.narrow(numbers.view(np.uint32), found, encoding)
    encodings.widen(found, back.view(np.uint32), encoding)
    expected = np.array([largest, -largest, largest, least, 0, 0, np.inf, -np.inf, np.nan], np.float32)
    assert np.array_equal(back, expected, equal_nan=True)


def features(n: int) -> np.ndarray:
    """Return numbers as behind a ReLU."""
    return np.maximum(np.random.default_rng(1).standard_normal(n, np.float32), 0)


def signs_of(numbers: np.ndarray) -> np.ndarray:
    """Return what signs come back as."""
    return (numbers > 0).astype(np.float32)


@pytest.mark.parametrize(
    ("encoding", "meaning", "share"),
    [
        (ZEROS, lambda it: it, 0.53),
        (SIGNS, signs_of, 1 / 32),
        (FP16, lambda it: it.astype(np.float16).astype(np.float32), 0.5),
    ],
)
def test_a_compressed_tier_keeps_what_it_is_told(
    encoding: int, meaning: Callable[[np.ndarray], np.ndarray], share: float
) -> None:
    """A payload of several pieces takes the encoding's share, and comes back as the encoding says, at any address."""
    numbers = features(3 * PIECE_BYTES // 4 + 5)
    numbers[(numbers > 0) & (numbers < 1e-4)] = 1e-4  # 16 bits have no smaller normal number
    with TierStack.create((TierWish("compressed", 8 << 20),), block_bytes=32 * 4096) as stack:
        ticket = stack.put(numbers.ctypes.data, numbers.nbytes, encoding)
        assert share * numbers.nbytes <= stack.usage()[0].used_bytes < share * numbers.nbytes + 2 * 4096
        back = np.empty(numbers.nbytes + 1, np.uint8)
        for at in (0, 1):
            assert stack.get(ticket, back.ctypes.data + at, numbers.nbytes) == 0
            assert back[at : at + numbers.nbytes].tobytes() == meaning(numbers).tobytes()


def test_fewer_bits_are_taken_only_where_zeros_leave_more() -> None:
    """A piece that is nearly all zeros keeps every bit of the others."""
    numbers = np.zeros(PIECE_BYTES // 4, np.float32)
    numbers[::100] = np.pi
    with TierStack.create((TierWish("compressed", 8 << 20),), block_bytes=32 * 4096) as stack:
        ticket = stack.put(numbers.ctypes.data, numbers.nbytes, FP16)
        back = np.empty_like(numbers)
        assert stack.get(ticket, back.ctypes.data, back.nbytes) == 0
    assert np.array_equal(back, numbers)
