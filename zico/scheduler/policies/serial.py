"""One iteration at a time: ideal temporal sharing, without the cost of moving memory in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback, compiled
from zico.scheduler.demand import job_at, will_end
from zico.scheduler.layout import NO_TIME, NOBODY, Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.turns import (
    alone_in,
    blocked_by,
    fits_beside_kept,
    in_turn,
    kept_by_all,
    snapshot_at,
    starts,
    unstick,
    waits,
    waits_for_alone,
    waits_to_fit,
)

if TYPE_CHECKING:
    from zico.scheduler.layout import Snapshot
    from zico.scheduler.state import CompiledPolicy

_TURN = int(Reason.TURN)


@compiled
def _occupant(snapshot: Snapshot) -> int:
    """Return who is inside an iteration; one that has never ended any, or stands still, may never do so."""
    for i in range(snapshot.n):
        job = job_at(snapshot, i)
        if will_end(job):
            return i
    return NOBODY


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Start at most one job: the first in turn that fits, and only if nobody runs."""
    snapshot = snapshot_at(snapshot_address)
    order = in_turn(snapshot)
    alone = alone_in(snapshot)
    running = _occupant(snapshot)
    kept = kept_by_all(snapshot)
    for index in order:
        if alone != NOBODY:
            waits_for_alone(snapshot, index, alone)
        elif not fits_beside_kept(snapshot, index, kept):
            waits_to_fit(snapshot, index)
        elif running == NOBODY:
            starts(snapshot, index)
            running = index
        else:
            waits(snapshot, index, _TURN, NO_TIME)
            blocked_by(snapshot, index, running)
    unstick(snapshot, order)


POLICY: CompiledPolicy = Compiled("serial", decide, self_admit=False, knows="peak, persistent memory")
