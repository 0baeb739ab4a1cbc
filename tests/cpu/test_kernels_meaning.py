"""Device kernels do what their NumPy meanings say, run as compiled code on this processor, or by Triton's interpreter.

``make test-triton`` sets ``TRITON_INTERPRET`` and runs both forms of the kernels that have two.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.kernel_processor import processor
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zico.kernels import digest, encode, progress, scrub, spin
from zico.kernels.prepare import KERNELS

if TYPE_CHECKING:
    from zico.kernels.compilation import Kernel

VALUES = st.integers(0, 2**62)
FORMS = ["numba", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
ENOUGH = (2**63 - 1, 1)
"""A counter and a stop word that end the wait of a kernel that rests too often, which its words then show."""


def run(form: str, kernel: Kernel, *arguments: np.ndarray | int, blocks: int = 1, threads: int = 1) -> None:
    """Run a form of a kernel to its end; arrays are given as memory."""
    if form == "numba":
        given = (one if isinstance(one, int) else one.ctypes.data for one in arguments)
        processor().run(kernel, *given, blocks=blocks, threads=threads)
        return
    import torch
    from zico.kernels import triton_forms

    (found,) = (one for one in triton_forms.FORMS if one.of is kernel)
    tensors = (one if isinstance(one, int) else torch.from_numpy(one) for one in arguments)
    found.function[(blocks,)](*tensors, **dict.fromkeys(found.constants, threads))


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None)
@given(before=VALUES, value=VALUES)
def test_a_mark_sets_the_counter_and_nothing_else(form: str, before: int, value: int) -> None:
    """The progress kernel stores the value, once, as its meaning does, and leaves the words beside it."""
    words = np.array([7, before, 7], np.int64)
    meant = words.copy()
    progress.meaning(meant[1:2], value)
    run(form, progress.PROGRESS, words[1:], value)
    assert words.tolist() == meant.tolist()
    assert form == "triton" or processor().stores == [(words[1:].ctypes.data, 8)]


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


def digest_of(words: np.ndarray, blocks: int = 2, threads: int = 64, form: str = "numba") -> list[int]:
    """Return the digest that the kernel makes of words."""
    found = np.zeros(digest.LANES, np.uint64)
    run(form, digest.DIGEST, words, len(words), found.view(np.int64), blocks=blocks, threads=threads)
    return found.tolist()


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=50)
@given(
    words=st.lists(st.integers(0, 2**64 - 1), max_size=200).map(lambda each: np.array(each, np.uint64)),
    blocks=st.integers(1, 4),
    threads=st.sampled_from([1, 32, 64, 96]),
)
def test_a_digest_is_what_its_meaning_says(form: str, words: np.ndarray, blocks: int, threads: int) -> None:
    """Lanes get the sums of their words, and nothing else is written."""
    if form == "triton" and threads not in (32, 64):
        threads = 64  # a power of two, of whole warps
    meant = np.zeros(digest.LANES, np.uint64)
    digest.meaning(words, meant, threads)
    assert digest_of(words, blocks, threads, form) == meant.tolist()
    assert form == "triton" or len(processor().stores) == blocks * threads


def test_a_digest_is_told_and_its_words_are_zero_again() -> None:
    """The lanes are where the processor looks, and the next digest begins at zero."""
    words = np.arange(1, 1 + digest.LANES, dtype=np.uint64)
    found, meant, cleared = np.zeros(digest.LANES, np.uint64), np.zeros(digest.LANES, np.uint64), words.copy()
    digest.tell_meaning(cleared, meant)
    processor().run(digest.TELL, words.ctypes.data, found.ctypes.data, blocks=1, threads=digest.LANES)
    assert (words.tolist(), found.tolist()) == (cleared.tolist(), meant.tolist())
    assert found.tolist() == [*range(1, 1 + digest.LANES)]


@pytest.mark.parametrize("change", ["a bit", "two words change places", "zeros move", "a sign"])
def test_what_changes_changes_the_digest(change: str) -> None:
    """Changes that sums and exclusive ors overlook are noticed."""
    words = np.random.default_rng(1).integers(0, 2**63, 4096, np.int64).view(np.uint64)
    words[1000:1100] = 0
    before = digest_of(words)
    assert digest_of(words.copy()) == before
    if change == "a bit":
        words[77] ^= np.uint64(1)
    elif change == "two words change places":
        words[[5, 5 + 128]] = words[[5 + 128, 5]]  # of the same lane
    elif change == "zeros move":
        words[999:1100] = np.roll(words[999:1100], 64)
    else:
        words[4000:4010] ^= np.uint64(1 << 63)
    assert digest_of(words) != before


@pytest.mark.parametrize("kernel", [*KERNELS, *encode.KERNELS, *digest.KERNELS], ids=lambda kernel: kernel.name)
def test_a_kernel_has_a_meaning_beside_it(kernel: object) -> None:
    """A kernel and its meaning stand in one module."""
    assert kernel.function.__module__ == kernel.meaning.__module__  # type: ignore[attr-defined]
