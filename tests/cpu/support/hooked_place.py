"""A pool on a device of software that this process's hooks serve from, as they do in a job on a GPU."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from cpu.support.members import join
from cpu.support.software_device import SoftwareDevice

from zico.heap.build import Heap
from zico.heap.layout import HEAP_RECORD
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
BUDGET_BYTES = 4 * MIB


class Place:
    """A pool, a heap of it that serves this process's hooks, and the device under it."""

    def __init__(self, pool: PoolTable, heap: Heap, device: SoftwareDevice) -> None:
        """Keep them."""
        self.pool, self.heap, self.device = pool, heap, device

    @property
    def live_bytes(self) -> int:
        """Return what lives in the pool."""
        (job,) = (job for job in self.heap.pool.jobs if job["pid"])
        return int(job["live_bytes"])


@contextlib.contextmanager
def put_in_place(wait_limit_s: float) -> Iterator[Place]:
    """Let this process's hooks serve from a pool of four regions of 1 MiB."""
    before = HEAP_RECORD.copy()
    device = SoftwareDevice()
    with (
        PoolTable.create(
            budget_bytes=BUDGET_BYTES, region_bytes=MIB, use_claims=False, self_admit=True, on_timeline=True
        ) as pool,
        join(pool) as member,
    ):
        made = Heap(member, HEAP_RECORD, wait_limit_s=wait_limit_s, timeline=device.timeline(member))
        made.enable()
        yield Place(pool, made, device)
        device.drain()
        made.close()
    HEAP_RECORD[:] = before
