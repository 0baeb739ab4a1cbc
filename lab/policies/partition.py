"""Fixed shares of the budget by weight, like a device's instances: nobody waits, and who is too large cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback, compiled
from zico.scheduler.demand import job_at, profile_at
from zico.scheduler.layout import NO_TIME, Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.state import Capabilities
from zico.scheduler.turns import in_turn, snapshot_at, starts, waits

if TYPE_CHECKING:
    from zico.scheduler.layout import Snapshot

_SHARE = int(Reason.SHARE)


@compiled
def share_of(snapshot: Snapshot, index: int) -> int:
    """Return the regions that are a job's own."""
    weights = 0.0
    for i in range(snapshot.n):
        weights += job_at(snapshot, i).weight
    return int(snapshot.budget * job_at(snapshot, index).weight / weights)


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Start everybody whose peak is within its share."""
    snapshot = snapshot_at(snapshot_address)
    for index in in_turn(snapshot):
        job = job_at(snapshot, index)
        if job.profile_address != 0 and profile_at(job).peak <= share_of(snapshot, index):
            starts(snapshot, index)
        else:
            waits(snapshot, index, _SHARE, NO_TIME)


POLICY = Compiled("partition", decide, knows="peak", capabilities=Capabilities(runs=False, asks=True, offline=True))
