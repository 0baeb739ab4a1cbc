"""What the simulation takes of a device besides memory: how fast jobs are together, copies, faults, run-ahead."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.base.units import KIB

if TYPE_CHECKING:
    from zico.scheduler.state import Profile


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """One device as jobs share it."""

    name: str
    slowdown: tuple[float, ...] = (1.0,)
    """By what factor each of 0, 1, 2, ... working jobs is slower than alone; the last for any more."""
    copy_bytes_per_s: float = 12e9
    """Between the device and the next tier of memory."""
    fault_ns: int = 45_000
    fault_bytes: int = 64 * KIB
    """What one page fault takes, and brings in."""
    run_ahead_ns: int = 0
    """By how much earlier memory is taken than used, because the processor is ahead of the device."""

    def region_copy_ns(self, region_bytes: int) -> float:
        """Return how long it takes to copy a region out or in."""
        return region_bytes / self.copy_bytes_per_s * 1e9

    def region_fault_ns(self, region_bytes: int) -> float:
        """Return how long it takes to bring a region in by page faults."""
        return region_bytes / self.fault_bytes * self.fault_ns


def taken_ahead(profile: Profile, ahead_ns: int) -> Profile:
    """Return a profile whose memory is taken earlier by so much, and given back when it was.

    Source: section 5 of the Zico paper: frameworks allocate when a kernel is launched, long before
    it runs.
    """
    if ahead_ns <= 0:
        return profile
    ends_ns = (*profile.t_ns[1:], profile.duration_ns)
    held = []
    for i, end_ns in enumerate(ends_ns):
        last = i
        while last + 1 < len(ends_ns) and profile.t_ns[last + 1] < end_ns + ahead_ns:
            last += 1
        held.append(max(profile.held[i : last + 1]))
    return dataclasses.replace(profile, held=tuple(held))
