"""One iteration at a time: ideal temporal sharing, without the cost of moving memory in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback, compiled
from zico.scheduler.demand import is_iterating, job_at, stands_still
from zico.scheduler.layout import NO_TIME, NOBODY, Reason
from zico.scheduler.packed import Compiled
from zico.scheduler.turns import (
    alone_in,
    blocked_by,
    fits_beside_kept,
    in_turn,
    kept_by_all,
    scene_at,
    starts,
    unstick,
    waits,
    waits_for_alone,
    waits_to_fit,
)

if TYPE_CHECKING:
    from zico.scheduler.layout import Scene
    from zico.scheduler.state import CompiledPolicy

_TURN = int(Reason.TURN)


@compiled
def _occupant(scene: Scene) -> int:
    """Return who is inside an iteration; one that has never ended any, or stands still, may never do so."""
    for i in range(scene.n):
        job = job_at(scene, i)
        if is_iterating(job) and not stands_still(job, scene.now_ns):
            return i
    return NOBODY


@callback(types.void(types.int64))
def decide(scene_address: int) -> None:
    """Start at most one job: the first in turn that fits, and only if nobody runs."""
    scene = scene_at(scene_address)
    order = in_turn(scene)
    alone = alone_in(scene)
    running = _occupant(scene)
    kept = kept_by_all(scene)
    for index in order:
        if alone != NOBODY:
            waits_for_alone(scene, index, alone)
        elif not fits_beside_kept(scene, index, kept):
            waits_to_fit(scene, index)
        elif running == NOBODY:
            starts(scene, index)
            running = index
        else:
            waits(scene, index, _TURN, NO_TIME)
            blocked_by(scene, index, running)
    unstick(scene, order)


POLICY: CompiledPolicy = Compiled("serial", decide, self_admit=False, knows="peak, persistent memory")
