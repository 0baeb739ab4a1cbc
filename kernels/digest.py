"""Digests: whether a tensor still is what it was, read on the device's timeline.

A digest is ``LANES`` words, one for each lane of a thread block. Each word is the sum of its
words of memory, each mixed with its place. A sum depends on no order, so neither do digests. One
changed word changes the digest for certain; other changes go unnoticed by a chance of about one in
2**64.

Source of the mixing: A. Appleby, MurmurHash3, the finalizer ``fmix64``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from zico.kernels.compilation import Kernel, add_long, block, blocks, load_long, store_release, thread, threads
from zico.kernels.launch import INVALID_VALUE, SUCCESS, WORD_BYTES, launch

from zico.base.compiled import compiled, inlined

if TYPE_CHECKING:
    import numpy.typing as npt
    from zico.kernels.launch import Launcher

LANES = 32
"""A warp's threads add to words side by side, in one transaction."""
THREADS = 256
"""A block has this many threads."""
MAX_BLOCKS = 1024
"""A launch has at most this many blocks, about what a device runs at once. Threads go round until all is read."""

PLACE = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xFF51AFD7ED558CCD)
SECOND = np.uint64(0xC4CEB9FE1A85EC53)
SHIFT = np.uint64(33)


def meaning(source: npt.NDArray[np.uint64], target: npt.NDArray[np.uint64], n_threads: int) -> None:
    """Add the words of a launch of ``n_threads`` threads to a block to the lanes."""
    places = np.arange(len(source), dtype=np.uint64)
    word = source ^ (places * PLACE)
    for factor in (FIRST, SECOND):
        word = (word ^ (word >> SHIFT)) * factor
    word ^= word >> SHIFT
    np.add.at(target, places % np.uint64(n_threads) % np.uint64(LANES), word)


@inlined
def _mixed(word: int, place: int) -> Any:  # noqa: ANN401 - a ``np.uint64``
    mixed = np.uint64(word) ^ (np.uint64(place) * PLACE)
    mixed = (mixed ^ (mixed >> SHIFT)) * FIRST
    mixed = (mixed ^ (mixed >> SHIFT)) * SECOND
    return mixed ^ (mixed >> SHIFT)


def digest(source: int, n: int, target: int) -> int:
    """Add ``n`` words at an address, mixed, to ``LANES`` words. Any number of threads, a line of blocks."""
    word = block() * threads() + thread()
    step = blocks() * threads()
    total = np.uint64(0)
    while word + 3 * step < n:  # four loads under way: one at a time does not fill the memory's bandwidth
        a, b = load_long(source + word * WORD_BYTES), load_long(source + (word + step) * WORD_BYTES)
        c, d = load_long(source + (word + 2 * step) * WORD_BYTES), load_long(source + (word + 3 * step) * WORD_BYTES)
        total += _mixed(a, word) + _mixed(b, word + step) + _mixed(c, word + 2 * step) + _mixed(d, word + 3 * step)
        word += 4 * step
    while word < n:
        total += _mixed(load_long(source + word * WORD_BYTES), word)
        word += step
    add_long(target + (thread() % LANES) * WORD_BYTES, np.int64(total))
    return 0


DIGEST = Kernel(digest, meaning)


def tell_meaning(words: npt.NDArray[np.uint64], found: npt.NDArray[np.uint64]) -> None:
    """Write the lanes where the processor sees them, and let them be zero again."""
    found[:] = words
    words[:] = 0


def tell_digest(words: int, found: int) -> int:
    """Write ``LANES`` words at an address to another one, and zero them. A block of ``LANES`` threads."""
    at = thread() * WORD_BYTES
    store_release(found + at, load_long(words + at))
    return store_release(words + at, 0)


TELL = Kernel(tell_digest, tell_meaning)
KERNELS = (DIGEST, TELL)


@compiled
def take_digest(launcher: Launcher, stream: int, source: int, size_bytes: int, words: int, found: int) -> int:
    """Let a stream write the digest of memory to where the processor sees it; returns a ``CUresult``.

    A kernel writes it, no copy. A copy to the host would wait for those of other streams, as a GPU
    has one engine for all.

    Args:
        launcher: Knows how to launch, and has the kernels.
        stream: The stream.
        source: Device address of the memory.
        size_bytes: Its size, a multiple of ``WORD_BYTES`` above 0.
        words: Device address of ``LANES`` words that are zero, and are so afterwards.
        found: Device address of as many, of pinned memory of the host.
    """
    if (source | words | found | size_bytes) % WORD_BYTES != 0 or size_bytes <= 0:
        return INVALID_VALUE
    needed = (size_bytes // WORD_BYTES + THREADS - 1) // THREADS
    arguments = (source, size_bytes // WORD_BYTES, words)
    status = launch(launcher, launcher.digest, min(needed, MAX_BLOCKS), THREADS, stream, arguments)
    return status if status != SUCCESS else launch(launcher, launcher.tell_digest, 1, LANES, stream, (words, found))
