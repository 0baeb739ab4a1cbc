"""Jobs of a pool on a device's timeline, without heaps."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from cpu.support.members import PAGE_BYTES, fence, issued, job_of, join
from cpu.support.software_device import SoftwareDevice

from zico.pool import regions
from zico.pool.layout import COUNTER_BYTES, STREAMS
from zico.pool.results import BEHIND, GRANTED
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Job:
    """A member whose streams are on the device; it uses what it is granted, and releases it with marks."""

    _handles = iter(range(1, 1 << 30))

    def __init__(self, member: PoolTable, device: SoftwareDevice) -> None:
        """Own streams of its own in two slots."""
        self.member, self.device = member, device
        self.streams = [next(self._handles) for _ in range(2)]
        self.held: dict[int, int] = {}

    @property
    def number(self) -> int:
        """Return which job it is."""
        return job_of(self.member)

    def pair(self, slot: int) -> int:
        """Return the number of its counter."""
        return self.number * STREAMS + slot

    def acquire(self, slot: int, wanted: list[int]) -> tuple[int, list[int]]:
        """Ask for regions; puts the waits that are demanded on the stream."""
        array = np.array(wanted, "i4")
        record = self.member.member[0]
        status = int(regions.acquire(record, array, len(wanted), slot))
        assert (status == BEHIND) == (record["n_waits"] > 0)
        for i in range(int(record["n_waits"])):
            pair = int(record["wait_pairs"][i])
            self.device.wait(self.streams[slot], self.address(pair), int(record["wait_values"][pair]))
            record["wait_values"][pair] = 0
        record["n_waits"] = 0
        granted = array.tolist() if status in (GRANTED, BEHIND) else []
        self.held |= dict.fromkeys(granted, slot)
        return status, granted

    def address(self, pair: int) -> int:
        """Return where a counter is."""
        return int(self.member.member[0]["counters_address"]) + pair * COUNTER_BYTES

    def issued(self, slot: int) -> int:
        """Return the last mark of a stream."""
        return int(issued(self.member)[self.number, slot])

    def mark(self, slot: int) -> int:
        """Put a mark on a stream; returns its value."""
        value = self.issued(slot) + 1
        self.device.mark(self.streams[slot], self.address(self.pair(slot)), value)
        issued(self.member)[self.number, slot] = value
        return value

    def release(self, given: list[int], *, issue: bool = True) -> int:
        """Release regions of one slot, with a mark or with the fence of the next one; returns the value."""
        (slot,) = {self.held.pop(r) for r in given}
        value = self.mark(slot) if issue else self.issued(slot) + 1
        word = fence(self.number, slot, value)
        regions.give_back(self.member.member[0], np.array(given, "i4"), len(given), word)
        return value


def make_timeline_pool(n_regions: int, region_bytes: int = PAGE_BYTES) -> PoolTable:
    """Make a pool whose regions may be granted behind fences."""
    return PoolTable.create(
        budget_bytes=n_regions * region_bytes,
        region_bytes=region_bytes,
        use_claims=False,
        self_admit=True,
        on_timeline=True,
    )


@contextlib.contextmanager
def joined(pool: PoolTable, n: int) -> Iterator[tuple[SoftwareDevice, list[Job]]]:
    """Join ``n`` times, with streams on one device."""
    device = SoftwareDevice()
    with contextlib.ExitStack() as stack:
        yield device, [Job(stack.enter_context(join(pool, f"job{i}")), device) for i in range(n)]


@dataclasses.dataclass
class Use:
    """One ownership of a region: who used it, and the mark after which its stream is done with it."""

    pair: int
    job: Job
    value: int | None = None
    started: bool = False
