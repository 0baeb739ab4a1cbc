"""A stack of tiers from Python: making it, and what it has done.

Payloads are in descriptors that have no name. When the process ends, however it does, everything is
gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from zico.base.errors import ConfigError
from zico.base.records import view_at
from zico.base.units import MIB, format_bytes
from zico.device.api import close_descriptors
from zico.device.host import HostDriver
from zico.tiers import stores
from zico.tiers.compressing import PIECE_BYTES
from zico.tiers.destinations import ACCEPTED, is_direct, open_nameless, spill_directory
from zico.tiers.encodings import ZEROS
from zico.tiers.layout import (
    ALIGNMENT_BYTES,
    BOUNCE_BYTES,
    COMPRESSED,
    FILE,
    IN,
    KIND_NAMES,
    MAX_TIERS,
    MEMORY,
    OUT,
    SHARED,
    STACK,
    WORD_BYTES,
    Rates,
    TierUse,
    rates_of,
    use_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.tiers.destinations import TierWish


# -- measured rates --------------------------------------------------------------------------------


LARGE_BYTES = {MEMORY: 32 * MIB, FILE: 8 * MIB, COMPRESSED: 2 * MIB}
"""By kind, a payload is large that exceeds what processors' caches keep, where that matters."""
TIMES = 2
"""The fastest of so many copies counts: the first finds memory without pages and files without a history."""

_FEATURES = PIECE_BYTES // 4
"""So many different numbers are as of a layer behind a ReLU; compressed pieces know nothing of each other."""
_FIGURES = ("out_bytes", "in_bytes", "out_ns", "in_ns", "refused", "peak", "recent_peak", "error")


def measure(stack: Any, shared: Any) -> None:  # noqa: ANN401 - a STACK record, its SHARED records
    """Fill in the rates of all tiers, which nothing else uses yet; figures count from 0 afterwards.

    All that moves payloads is compiled or loaded when this returns.

    Bandwidth is measured with ``LARGE_BYTES``, or what the tier can hold.

    Raises:
        ConfigError: A tier cannot be written to, as where its disk is full.
    """
    largest = max(LARGE_BYTES[int(one["kind"])] for one in shared)
    source = np.frombuffer(mmap.mmap(-1, largest), np.float32)  # aligned, as what a pager moves is
    features = np.maximum(np.random.default_rng(0).standard_normal(_FEATURES, np.float32), 0)
    source.reshape(-1, _FEATURES)[:] = features
    for tier, one in enumerate(shared):
        large = min(LARGE_BYTES[int(one["kind"])], int(one["n_blocks"]) * int(one["block_bytes"]))
        small_ns = _fastest(stack, tier, one, source.ctypes.data, ALIGNMENT_BYTES)
        large_ns = _fastest(stack, tier, one, source.ctypes.data, large)
        for way in (OUT, IN):
            one["latency_ns"][way] = small_ns[way]
            one["recent_bytes"][way] = large
            one["recent_ns"][way] = max(large_ns[way] - small_ns[way], 1.0)
    if (ticket := int(stores.put(stack, source.ctypes.data, ALIGNMENT_BYTES, ZEROS))) >= 0:
        stores.drop(stack, ticket)
    for name in _FIGURES:
        shared[name] = 0
    stores.trim(stack)


def _fastest(stack: Any, tier: int, shared: Any, address: int, size_bytes: int) -> tuple[float, float]:  # noqa: ANN401
    """Return the least that a copy out and a copy in have taken, in ns."""
    best = [math.inf, math.inf]
    for _ in range(TIMES):
        before = (int(shared["out_ns"]), int(shared["in_ns"]))
        ticket = int(stores.put_into(stack, tier, address, size_bytes, ZEROS))
        if ticket < 0 or stores.get(stack, ticket, address, size_bytes) != 0:
            reason = os.strerror(int(shared["error"]))
            kind = KIND_NAMES[shared["kind"]]
            raise ConfigError(f"the {kind} tier cannot be used: {reason}. Free some space, or give another")
        stores.drop(stack, ticket)
        best[OUT] = min(best[OUT], float(shared["out_ns"] - before[OUT]))
        best[IN] = min(best[IN], float(shared["in_ns"] - before[IN]))
    return best[OUT], best[IN]


# -- the stack of tiers ----------------------------------------------------------------------------


BLOCK_BYTES = 2 * MIB
_COMPRESSED_SHARE = 32
_PAGE_BYTES = 1 << 16
_MOST_BLOCKS = 1 << 28
"""With a tier they fit 31 bits, also as a word."""
_libc = ctypes.CDLL(None)
_FUNCTIONS = {
    "memcpy": "memcpy",
    "pread": "pread",
    "pwrite": "pwrite",
    "fallocate": "fallocate",
    "errno_location": "__errno_location",
}


class TierStack:
    """A stack of tiers; close it, or use it as a context manager.

    Compiled code uses ``record`` with the functions of ``zico.tiers.stores``, Python may use the
    methods, which wait for the copy without holding the GIL.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Take over the descriptors of ``create``, also when this fails."""
        self.record: Any = np.zeros(1, STACK)
        self._descriptors = tuple(descriptors)
        with contextlib.ExitStack() as undo:
            undo.callback(close_descriptors, self._descriptors)
            base = self._map(undo, self._descriptors[0])
            self.shared = view_at(base, SHARED, len(self._descriptors) - 1)
            bounce = _bounce_buffers(undo)
            for tier, shared in enumerate(self.shared):
                self._fill(undo, tier, shared, base, bounce)
            self.record["n_tiers"] = len(self.shared)
            self._undo = undo.pop_all()

    @classmethod
    def create(
        cls,
        wishes: Sequence[TierWish],
        *,
        block_bytes: int = BLOCK_BYTES,
        directory: str | None = None,
        label: str = "tiers",
    ) -> Self:
        """Make the tiers and measure their rates. All or nothing.

        Args:
            wishes: What ``zico.tiers.destinations.parse_tiers`` returns.
            block_bytes: A multiple of 4096. A payload takes whole blocks; where it is compressed
                smaller ones.
            directory: Where files are; ``None``: see ``zico.tiers.destinations.spill_directory``.
            label: For the kernel's lists of what a process has open.

        Raises:
            ConfigError: A tier is smaller than a block, or its file cannot be made or written.
            DriverError: The kernel has no memory for it.
        """
        if block_bytes < ALIGNMENT_BYTES or block_bytes % ALIGNMENT_BYTES:
            raise ConfigError(f"a tier's blocks have {block_bytes} bytes: give a multiple of {ALIGNMENT_BYTES}")
        shared = _describe(wishes, block_bytes)
        driver = HostDriver()
        with contextlib.ExitStack() as undo:
            descriptors = [_control(driver, shared, label)]
            undo.callback(os.close, descriptors[0])
            for one in shared:
                if one["kind"] == FILE:
                    descriptors.append(open_nameless(spill_directory(directory)))
                else:
                    size_bytes = int(one["n_blocks"] * one["block_bytes"])
                    descriptors.append(driver.create_memory(size_bytes, f"{label}-memory").handle)
                undo.callback(os.close, descriptors[-1])
            undo.pop_all()
            stack = cls(descriptors)
        with contextlib.ExitStack() as undo:
            undo.callback(stack.close)
            measure(stack.record[0], stack.shared)
            undo.pop_all()
        return stack

    def _map(self, undo: contextlib.ExitStack, descriptor: int) -> int:
        driver = HostDriver()
        memory = driver.import_memory(os.dup(descriptor))
        with memory:
            window = undo.enter_context(driver.reserve(memory.size_bytes))
            driver.map(window, 0, memory, 0, memory.size_bytes)
        return window.handle

    def _fill(self, undo: contextlib.ExitStack, tier: int, shared: Any, base: int, bounce: int) -> None:  # noqa: ANN401 - a SHARED record
        store = self.record["tiers"][0][tier]
        descriptor = self._descriptors[1 + tier]
        store["shared_address"] = base + tier * SHARED.itemsize
        store["words_address"] = base + int(shared["words_offset"])
        store["descriptor"] = descriptor
        store["bounce_address"] = (bounce, bounce + BOUNCE_BYTES)
        if shared["kind"] == FILE:
            store["direct"] = is_direct(descriptor)
        else:
            store["map_address"] = self._map(undo, descriptor)
        for field, name in _FUNCTIONS.items():
            store[field] = ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value

    def put(self, address: int, size_bytes: int, encoding: int = ZEROS) -> int:
        """Copy memory to the first tier that has room: ``zico.tiers.stores.put``."""
        return int(stores.put(self.record[0], address, size_bytes, encoding))

    def get(self, ticket: int, address: int, size_bytes: int) -> int:
        """Copy a payload to memory: ``zico.tiers.stores.get``."""
        return int(stores.get(self.record[0], ticket, address, size_bytes))

    def drop(self, ticket: int) -> None:
        """Forget a payload: ``zico.tiers.stores.drop``."""
        stores.drop(self.record[0], ticket)

    def trim(self) -> int:
        """Give physical memory back that nothing has needed since the last call: ``zico.tiers.stores.trim``."""
        return int(stores.trim(self.record[0]))

    def rates(self) -> tuple[Rates, ...]:
        """Return how fast each tier is now."""
        return tuple(rates_of(shared) for shared in self.shared)

    def usage(self) -> tuple[TierUse, ...]:
        """Return what each tier holds and has moved."""
        return tuple(use_of(shared) for shared in self.shared)

    def close(self) -> None:
        """Unmap and close; payloads are gone."""
        self.record["n_tiers"] = 0
        self.shared = self.shared[:0]
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _smaller(block_bytes: int) -> int:
    """Return the blocks of a compressed tier: such that the last one of a payload, half used, is nothing much."""
    return max(block_bytes // _COMPRESSED_SHARE // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES


def _describe(wishes: Sequence[TierWish], whole_bytes: int) -> Any:  # noqa: ANN401 - SHARED records
    """Return a record for each tier, with the words' places."""
    if not 0 < len(wishes) <= MAX_TIERS:
        raise ConfigError(f"{len(wishes)} tiers are wanted: give {ACCEPTED}")
    shared = np.zeros(len(wishes), SHARED)
    offset = shared.nbytes
    for one, wish in zip(shared, wishes, strict=True):
        kind = KIND_NAMES.index(wish.kind)
        block_bytes = _smaller(whole_bytes) if kind == COMPRESSED else whole_bytes
        n_blocks = min(wish.size_bytes // block_bytes, _MOST_BLOCKS)
        if n_blocks < 1:
            wanted, least = format_bytes(wish.size_bytes), format_bytes(block_bytes)
            raise ConfigError(f"the {wish.kind} tier has {wanted}, which is less than one block: give at least {least}")
        one["kind"] = kind
        one["block_bytes"] = block_bytes
        one["n_blocks"] = n_blocks
        one["words_offset"] = offset
        offset += n_blocks * WORD_BYTES
        offset += -offset % SHARED.itemsize
    return shared


def _control(driver: HostDriver, shared: Any, label: str) -> int:  # noqa: ANN401 - SHARED records
    last = shared[-1]
    size_bytes = int(last["words_offset"] + last["n_blocks"] * WORD_BYTES)
    size_bytes += -size_bytes % _PAGE_BYTES
    descriptor = driver.create_memory(size_bytes, label).handle
    os.pwrite(descriptor, shared.tobytes(), 0)
    return descriptor


def _bounce_buffers(undo: contextlib.ExitStack) -> int:
    """Return the address of memory for both directions' bounces: pages that cost nothing until they are used."""
    driver = HostDriver()
    with driver.create_memory(2 * BOUNCE_BYTES, "bounce") as memory:
        window = undo.enter_context(driver.reserve(memory.size_bytes))
        driver.map(window, 0, memory, 0, memory.size_bytes)
    return window.handle
