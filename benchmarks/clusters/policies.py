"""Where a job goes: exclusive devices, packing by peak, Zico's prediction, and CARMA as its paper and its code tell.

CARMA: E. Yousefzadeh-Asl-Miandoab, F. M. Ciorba, P. Tozun, "CARMA: Collocation-aware resource
manager", arXiv 2508.19073. Taken from it: first come, first served; a device is a candidate if its
SM activity is below 0.8 and its free memory exceeds the estimate; of the candidates the one with
the most free memory; a job that runs out of memory comes first, on a device of its own. Assumed:
SM activity is the share of the time in which a device's jobs would keep it busy; estimates are off
by one of ``ESTIMATES``; a failure takes ``events.FAILURE_S``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paper.published import REGION_BYTES

from clusters.kinds import CONTEXT_BYTES
from clusters.speeds import idle_share, together

if TYPE_CHECKING:
    from clusters.events import Members
    from clusters.speeds import Speeds, Table

MOST_JOBS = 3
"""On one device, in every policy that shares."""
SM_ACTIVITY = 0.8
ESTIMATES = (0.85, 1.0, 1.15, 1.3)
"""Of a peak: predicted over real, all as likely."""
LEAST_GAIN = 0.02
_CONTEXT = CONTEXT_BYTES / REGION_BYTES
_EMPTY_FIRST = 1e9


def _with(members: Members, kind: int) -> Members:
    return tuple(sorted((*members, kind)))


@dataclasses.dataclass(frozen=True)
class _Shares:
    """What all policies know."""

    table: Table
    most: int = MOST_JOBS

    def compute(self, members: Members) -> Speeds:
        """Return speeds where no job waits for memory."""
        if not members:
            return ()
        idle = [self.table.memory.kinds[member].idle for member in members]
        return (together(idle, self.table.assumption) / len(members),) * len(members)

    def free(self, members: Members) -> float:
        """Return the regions that the jobs' peaks and contexts leave."""
        used = sum(self.table.memory.kinds[member].profile.peak + _CONTEXT for member in members)
        return self.table.memory.regions(0) - used


@dataclasses.dataclass(frozen=True)
class Exclusive(_Shares):
    """One job on one device."""

    def value(self, members: Members, kind: int, estimate: float) -> float | None:  # noqa: ARG002 - see Policy
        """Return a value for an empty device."""
        return None if members else 0.0

    def speeds(self, members: Members) -> Speeds | None:
        """Return full speed."""
        return (1.0,) * len(members)


@dataclasses.dataclass(frozen=True)
class Packing(_Shares):
    """A job is added where all peaks fit; empty devices first, then the one with the most memory left."""

    def value(self, members: Members, kind: int, estimate: float) -> float | None:  # noqa: ARG002 - see Policy
        """Return the memory left."""
        grown = _with(members, kind)
        if len(grown) > self.most or not self.table.memory.peaks_fit(grown):
            return None
        return self.free(grown) + (0.0 if members else _EMPTY_FIRST)

    def speeds(self, members: Members) -> Speeds | None:
        """Return what sharing processors leaves."""
        return self.compute(members)


@dataclasses.dataclass(frozen=True)
class Zico(_Shares):
    """A job goes where the scheduler's own simulation says that it is slowed least, whether peaks fit or not."""

    must_gain: bool = False
    """A device takes another job only if it then does more in all."""

    def value(self, members: Members, kind: int, estimate: float) -> float | None:  # noqa: ARG002 - see Policy
        """Return the job's speed there, and among equal ones what the device then does in all."""
        grown = _with(members, kind)
        if len(grown) > self.most:
            return None
        before, after = self.table.of(members), self.table.of(grown)
        if before is None or after is None:
            return None
        if self.must_gain and members and sum(after) < sum(before) + LEAST_GAIN:
            return None
        return after[grown.index(kind)] + sum(after) / 1e3

    def speeds(self, members: Members) -> Speeds | None:
        """Return what processors and memory leave."""
        return self.table.of(members)


@dataclasses.dataclass(frozen=True)
class Carma(_Shares):
    """A job goes to the device with the most free memory, if that is not busy and the estimate fits."""

    def value(self, members: Members, kind: int, estimate: float) -> float | None:
        """Return the memory left before it comes."""
        if len(members) >= self.most or self._activity(members) >= SM_ACTIVITY:
            return None
        free = self.free(members)
        predicted = estimate * self.table.memory.kinds[kind].profile.peak + _CONTEXT
        return free if not members or predicted <= free else None

    def speeds(self, members: Members) -> Speeds | None:
        """Return what sharing processors leaves; ``None`` if the peaks do not fit."""
        return self.compute(members) if not members or self.table.memory.peaks_fit(members) else None

    def _activity(self, members: Members) -> float:
        """Return the share of the time in which one of the jobs keeps the device busy."""
        idle = 1.0
        for member in members:
            idle *= idle_share([self.table.memory.kinds[member].idle], self.table.assumption)
        return 1 - idle


def policies(table: Table) -> dict[str, Exclusive | Packing | Zico | Carma]:
    """Return all policies by name, over one table."""
    return {
        "exclusive": Exclusive(table),
        "packing": Packing(table),
        "carma": Carma(table),
        "zico": Zico(table),
        "zico-gain": Zico(table, must_gain=True),
    }
