"""Fixed shares of the budget by weight, like a device's instances: nobody waits, and who is too large cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback, compiled
from zico.scheduler.demand import job_at, profile_at
from zico.scheduler.layout import NO_TIME, Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.state import Manner
from zico.scheduler.turns import in_turn, scene_at, starts, waits

if TYPE_CHECKING:
    from zico.scheduler.layout import Scene

_SHARE = int(Reason.SHARE)


@compiled
def share_of(scene: Scene, index: int) -> int:
    """Return the regions that are a job's own."""
    weights = 0.0
    for i in range(scene.n):
        weights += job_at(scene, i).weight
    return int(scene.budget * job_at(scene, index).weight / weights)


@callback(types.void(types.int64))
def decide(scene_address: int) -> None:
    """Start everybody whose peak is within its share."""
    scene = scene_at(scene_address)
    for index in in_turn(scene):
        job = job_at(scene, index)
        if job.profile_address != 0 and profile_at(job).peak <= share_of(scene, index):
            starts(scene, index)
        else:
            waits(scene, index, _SHARE, NO_TIME)


POLICY = Compiled("partition", decide, knows="peak", manner=Manner(runs=False, asks=True, offline=True))
