"""A window of this process whose faults a pager in one of its threads serves, without a heap."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from zico.device.host import HostDriver
from zico.paging.layout import ALL, DEGREE
from zico.paging.page_table import RING
from zico.paging.pager import PagedMemory, Pager
from zico.pool import regions, results
from zico.pool.layout import NOBODY
from zico.pool.table import PoolTable
from zico.tiers.destinations import TierWish
from zico.tiers.stack import TierStack

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_BYTES = 1 << 16
"""A region, too."""
BLOCKS = 32
JOIN_S = 20
_I4 = np.dtype("i4")


def ring_of(address: int) -> Any:  # noqa: ANN401 - an array
    """Return the events of the ring at an address."""
    return np.frombuffer((ctypes.c_char * (8 * RING)).from_address(address), np.int64)


class PagedWindow:
    """Blocks of a region each, of which so many may be resident; every one is in use until ``free``."""

    def __init__(
        self,
        frames: int,
        *,
        blocks: int = BLOCKS,
        tiers: Sequence[TierWish] = (TierWish("memory", 4 * BLOCKS * BLOCK_BYTES),),
        flags: int = ALL,
        degree: int = DEGREE,
        starving_s: float = 60.0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Make it and start its pager."""
        self.block_bytes = block_bytes
        with contextlib.ExitStack() as undo:
            self.pool = undo.enter_context(
                PoolTable.create(
                    budget_bytes=2 * blocks * block_bytes, region_bytes=block_bytes, use_claims=True, self_admit=True
                )
            )
            self.job = self.pool.join(os.getpid(), "window")
            self.member = self.pool.member.copy()
            self.member[0]["job"] = self.job
            window = undo.enter_context(HostDriver().reserve((blocks + 32) * block_bytes))
            self.base = -(-window.handle // block_bytes) * block_bytes
            self.tiers = undo.enter_context(TierStack.create(tiers, block_bytes=block_bytes))
            self.memory = PagedMemory(
                self.base, blocks * block_bytes, n_regions=2 * blocks, region_bytes=block_bytes, tiers=self.tiers,
                flags=flags, degree=degree,
            )  # fmt: skip
            undo.callback(self.memory.close)
            self.page_table = self.memory.page_table
            self.blocks = np.frombuffer((ctypes.c_char * (blocks * block_bytes)).from_address(self.base), np.int64)
            self.blocks = self.blocks.reshape(blocks, -1)
            self.allow(frames)
            for block in range(blocks):
                self.use(block)
            self.pager = Pager(self.memory, self.member, starving_s)
            self._thread = self.pager.start()
            undo.callback(self._end_pager)
            self._undo = undo.pop_all()

    # -- what the heap does ------------------------------------------------------------------------

    def array(self, name: str) -> Any:  # noqa: ANN401 - an array
        """Return one of the page table's arrays of numbers, by the name of its address."""
        count = int(self.page_table["n_regions" if name == "regions_address" else "n_blocks"])
        return np.frombuffer((ctypes.c_char * (4 * count)).from_address(self.memory.arrays[name]), _I4)

    def allow(self, frames: int) -> None:
        """Acquire so many regions more."""
        wanted = np.full(frames, NOBODY, np.int32)
        assert regions.acquire(self.member[0], wanted, frames, regions.HOST_SLOT) == results.GRANTED
        there = self.array("regions_address")
        there[np.flatnonzero(there == NOBODY)[:frames]] = wanted
        self.page_table["acquired"] += frames

    def use(self, block: int) -> None:
        """Let something live in a block."""
        self.array("births_address")[block] += 1
        self.array("live_address")[block] = 1
        self.page_table["live_slots"] += 1

    def free(self, block: int) -> None:
        """Let nothing live in it."""
        self.array("live_address")[block] = 0
        self.page_table["live_slots"] -= 1

    def tell(self, event: int) -> None:
        """Put an event into the ring."""
        ring_of(self.memory.arrays["ring_address"])[int(self.page_table["events"]) % RING] = event
        self.page_table["events"] += 1

    @property
    def resident(self) -> int:
        """Return the blocks whose pages the kernel has."""
        return os.fstat(self.memory.memory_fd).st_blocks * 512 // self.block_bytes

    def _end_pager(self) -> None:
        self.pager.stop()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the pager and take everything away."""
        self._undo.close()
