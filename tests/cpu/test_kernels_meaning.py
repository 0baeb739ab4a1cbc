"""Device kernels do what their NumPy meanings say, run as compiled code on this processor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_processor import processor
from zico.kernels import encode, progress, scrub, spin
from zico.kernels.prepare import KERNELS

VALUES = st.integers(0, 2**62)
ENOUGH = (2**63 - 1, 1)
"""A counter and a stop word that end the wait of a kernel that rests too often, which its words then show."""


@settings(deadline=None)
@given(before=VALUES, value=VALUES)
def test_a_mark_sets_the_counter_and_nothing_else(before: int, value: int) -> None:
    """The progress kernel stores the value, once, as its meaning does, and leaves the words beside it."""
    words = np.array([7, before, 7], np.int64)
    meant = words.copy()
    progress.meaning(meant[1:2], value)
    processor().run(progress.PROGRESS, words[1:].ctypes.data, value)
    assert words.tolist() == meant.tolist()
    assert processor().stores == [(words[1:].ctypes.data, 8)]


@settings(deadline=None)
@given(value=VALUES, counts=st.lists(VALUES, max_size=12), stopped=st.booleans())
@example(value=5, counts=[4, 5], stopped=False)
@example(value=5, counts=[], stopped=True)
@example(value=0, counts=[], stopped=True)
def test_a_wait_ends_when_its_meaning_says(value: int, counts: list[int], stopped: bool) -> None:  # noqa: FBT001
    """The spin kernel looks until the counter is there or it is told to stop, and says which."""
    steps = [(count, 0) for count in counts] + [(0, 1) if stopped else (value, 0)]
    meant = np.zeros(3, np.int64)
    looks = 0
    while not spin.meaning(meant[0:1], value, meant[1:2], meant[2:3]):
        meant[0], meant[1] = steps[looks]
        looks += 1
    words = np.zeros(3, np.int64)
    following = iter(steps)

    def change() -> None:
        words[0], words[1] = next(following, ENOUGH)

    machine = processor()
    machine.on_rest = change
    counter, stop, given_up = (words.ctypes.data + 8 * i for i in range(3))
    machine.run(spin.SPIN, counter, value, stop, given_up)
    assert words.tolist() == meant.tolist()
    assert len(machine.rests_ns) == looks


def test_a_wait_backs_off() -> None:
    """Rests begin short, double, and stay at the longest."""
    words = np.zeros(3, np.int64)
    machine = processor()

    def stop_at_twelve() -> None:
        if len(machine.rests_ns) == 12:
            words[0], words[1] = ENOUGH

    machine.on_rest = stop_at_twelve
    counter, stop, given_up = (words.ctypes.data + 8 * i for i in range(3))
    machine.run(spin.SPIN, counter, 1, stop, given_up)
    doubled = itertools.accumulate(range(11), lambda ns, _: 2 * ns, initial=spin.FIRST_REST_NS)
    assert machine.rests_ns == [min(ns, spin.LAST_REST_NS) for ns in doubled]
    assert machine.rests_ns[-1] == spin.LAST_REST_NS


@settings(deadline=None)
@given(stores=st.integers(0, 96), blocks=st.integers(1, 6), threads=st.integers(1, 8), before=st.integers(0, 3))
def test_scrubbing_zeroes_the_region_and_nothing_else(stores: int, blocks: int, threads: int, before: int) -> None:
    """However many blocks and threads there are, each 16 bytes of the region are zeroed once, and no byte beside it."""
    raw = np.full(2048 + scrub.STORE_BYTES, 0xA5, np.uint8)
    memory = raw[-raw.ctypes.data % scrub.STORE_BYTES :]
    first, size_bytes = before * scrub.STORE_BYTES, stores * scrub.STORE_BYTES
    meant = memory.copy()
    scrub.meaning(meant[first : first + size_bytes])
    processor().run(scrub.SCRUB, memory.ctypes.data + first, size_bytes, blocks=blocks, threads=threads)
    assert memory.tobytes() == meant.tobytes()
    assert len(processor().stores) == stores


@pytest.mark.parametrize("kernel", [*KERNELS, *encode.KERNELS], ids=lambda kernel: kernel.name)
def test_a_kernel_has_a_meaning_beside_it(kernel: object) -> None:
    """A kernel and its meaning stand in one module."""
    assert kernel.function.__module__ == kernel.meaning.__module__  # type: ignore[attr-defined]
