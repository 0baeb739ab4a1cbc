"""What the policies share that give the device away for a while: who may go on, and what the others have to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled
from zico.pool.layout import JobState
from zico.scheduler.demand import job_at
from zico.scheduler.layout import NOBODY
from zico.scheduler.turns import blocked_by, decision_at, starts, waits

if TYPE_CHECKING:
    from zico.scheduler.layout import Snapshot

_BOUNDARY, _RUNNING = int(JobState.BOUNDARY), int(JobState.RUNNING)


@compiled
def goes_on(snapshot: Snapshot, index: int, until_ns: int) -> None:
    """Let a job begin its next iteration, or go on within the one that it is in; to be looked at again at a time."""
    starts(snapshot, index)
    decision = decision_at(snapshot, index)
    decision.until_ns = until_ns
    decision.pauses = decision.evicts = decision.yields = 0


@compiled
def stands_back(snapshot: Snapshot, index: int, reason: int, until_ns: int, other: int) -> None:
    """Keep a job at its boundary, or pause it within its iteration, while another has the device."""
    waits(snapshot, index, reason, until_ns)
    decision = decision_at(snapshot, index)
    decision.pauses = 1
    decision.evicts = decision.yields = 0
    if other != NOBODY:
        blocked_by(snapshot, index, other)


@compiled
def is_inside(snapshot: Snapshot, index: int) -> bool:
    """Tell whether a job is inside an iteration."""
    return job_at(snapshot, index).phase == _RUNNING
