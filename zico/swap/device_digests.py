"""Digests of a GPU's memory: taken by a kernel on a stream, and read by the processor when the device has come by.

Theory of operation
    A digest has a slot: ``LANES`` words of the device, and as many of pinned memory. The stream adds
    the digest to the words, which are zero, writes them to pinned memory and zeroes them again
    (``zico.kernels.digest``). A mark behind that, by whoever wants to know, says when they are there.

Guarantees
    A slot serves one stream for good, so that its next digest is behind its last one.

Known limitations
    There are ``SLOTS`` digests at a time; beyond that none is taken.
"""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zico.kernels.compilation import image
from zico.kernels.digest import KERNELS, LANES, take_digest
from zico.kernels.launch import LAUNCHER, SUCCESS, WORD_BYTES
from zico.pool.fences import NO_FENCE
from zico.swap.device_tier import Buffer

if TYPE_CHECKING:
    from zico.device.cuda.driver import CudaDriver
    from zico.heap.build import Heap

SLOTS = 4096
SLOT_BYTES = LANES * WORD_BYTES


class Digest:
    """What a stream has found, or is going to find."""

    __slots__ = ("_digests", "_slot", "_stream", "fence")

    def __init__(self, digests: Digests, slot: int, stream: int) -> None:
        """Have a slot for as long as this lives."""
        self._digests, self._slot, self._stream = digests, slot, stream
        self.fence = NO_FENCE
        """A mark behind it; ``NO_FENCE``: who asks has one, on the same stream."""

    def __del__(self) -> None:
        self._digests.free[self._stream].append(self._slot)

    def __eq__(self, other: object) -> bool:
        """Tell whether memory was the same; for digests that have come."""
        return isinstance(other, Digest) and self.words() == other.words()

    def __hash__(self) -> int:
        """Tell digests apart by what they are, not by what they have found."""
        return id(self)

    def words(self) -> bytes:
        """Return what has been found; anything before the device has come by."""
        return self._digests.found[self._slot].tobytes()


class Digests:
    """Takes digests for a heap on a GPU; closed only by tests."""

    def __init__(self, heap: Heap) -> None:
        """Load the kernel and make the slots.

        Raises:
            ConfigError: The kernel cannot be compiled here.
            DriverError: The device refuses the kernel, or memory.
        """
        self._driver = driver = cast("CudaDriver", heap.pool.driver)
        self.free: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        """Slots by the stream that they serve."""
        self._unused = iter(range(SLOTS))
        with contextlib.ExitStack() as undo:
            self._launcher: Any = np.zeros(1, LAUNCHER)
            for kernel in KERNELS:
                self._launcher[kernel.function.__name__] = driver.load_kernel(image(kernel), kernel.name)
            self._launcher["launch_kernel"] = driver.addresses()["cuLaunchKernel"]
            unit_bytes = driver.granularity_bytes
            size_bytes = -(-SLOTS * SLOT_BYTES // unit_bytes) * unit_bytes
            self._pinned = Buffer(driver, SLOTS * SLOT_BYTES)
            undo.callback(self._pinned.close)
            memory = undo.enter_context(driver.create_memory(size_bytes, "digests", unit_bytes))
            self._window = undo.enter_context(driver.reserve(size_bytes))
            driver.map(self._window, 0, memory, 0, size_bytes)
            with driver.context.current():
                driver.call("cuMemsetD8", self._window.handle, 0, size_bytes)
            self.found = self._pinned.words(np.uint64).reshape(SLOTS, LANES)
            """What the device has copied out."""
            self._undo = undo.pop_all()

    def take(self, stream: int, address: int, size_bytes: int) -> Digest | None:
        """Let a stream take the digest of memory, behind all that it was given; waits for nothing.

        Args:
            stream: The stream.
            address: Of the memory, a multiple of ``WORD_BYTES``.
            size_bytes: Its size, a multiple of ``WORD_BYTES``.

        Returns:
            The digest; ``None``: there is no slot, or memory is no whole words.

        Raises:
            DriverError: The device refuses.
        """
        if size_bytes % WORD_BYTES or size_bytes <= 0:
            return None
        slot = self._slot_for(stream)
        if slot is None:
            return None
        there, here = self._window.handle + slot * SLOT_BYTES, self._pinned.device_address + slot * SLOT_BYTES
        with self._driver.context.current():
            status = take_digest(self._launcher[0], stream, address, size_bytes, there, here)
        if status != SUCCESS:
            return None  # without the slot, whose words may not be zero
        return Digest(self, slot, stream)

    def _slot_for(self, stream: int) -> int | None:
        with contextlib.suppress(IndexError):
            return self.free[stream].popleft()
        return next(self._unused, None)

    def close(self) -> None:
        """Give everything back; no digest may be under way."""
        self._undo.close()
