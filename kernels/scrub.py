"""Scrubbing: zeroing a region before it goes to a job that must not see what was in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.kernels.compilation import Kernel, block, blocks, store_zeros, thread, threads
from zico.kernels.launch import INVALID_VALUE, NOT_SUPPORTED, SUCCESS, launch

from zico.base.compiled import compiled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from zico.kernels.launch import Launcher

STORE_BYTES = 16
"""The widest store that all devices have."""
THREADS = 256
"""A block has this many threads."""
MAX_BLOCKS = 1024
"""A launch has at most this many blocks, more than a device runs at once. Threads go round until all is done."""


def meaning(region: npt.NDArray[np.uint8]) -> None:
    """Set every byte to zero."""
    region[:] = 0


def scrub(region: int, size_bytes: int) -> int:
    """Zero ``size_bytes`` at an address, both multiples of ``STORE_BYTES``. Any number of threads, a line of blocks."""
    step_bytes = blocks() * threads() * STORE_BYTES
    offset = (block() * threads() + thread()) * STORE_BYTES
    while offset < size_bytes:
        store_zeros(region + offset)
        offset += step_bytes
    return 0


SCRUB = Kernel(scrub, meaning)


@compiled
def zero(launcher: Launcher, stream: int, region: int, size_bytes: int) -> int:
    """Let a stream zero a region; returns a ``CUresult``, ``NOT_SUPPORTED`` where the kernel was not loaded."""
    if region % STORE_BYTES != 0 or size_bytes % STORE_BYTES != 0 or size_bytes < 0:
        return INVALID_VALUE
    if launcher.scrub == 0:
        return NOT_SUPPORTED
    if size_bytes == 0:
        return SUCCESS
    needed = (size_bytes // STORE_BYTES + THREADS - 1) // THREADS
    return launch(launcher, launcher.scrub, min(needed, MAX_BLOCKS), THREADS, stream, (region, size_bytes))
