"""Who may start, by claims alone: as soon as everybody can still finish, whatever that does to who waits inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import compiled, inlined
from zico.pool.rules import is_safe
from zico.scheduler.demand import job_at, stands_still
from zico.scheduler.layout import NO_TIME, NOBODY, Reason
from zico.scheduler.shifting import waits_for_safety
from zico.scheduler.turns import (
    alone_in,
    banker_of,
    blocked_by,
    fits_beside_kept,
    in_turn,
    kept_by_all,
    starts,
    unstick,
    waits,
    waits_for_alone,
    waits_to_fit,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zico.scheduler.layout import Scene

MOST_JUDGED = 64
"""So many of those that wait are looked at one by one in a decision; whoever is further behind waits for them."""

_UNSAFE, _TURN = int(Reason.UNSAFE), int(Reason.TURN)
EVERYBODY = 1 << 30
"""No limit on how many are in an iteration at a time."""


@inlined
def _needs(sums: NDArray[np.int64], index: int) -> int:
    return max(sums[0, index], sums[1, index], sums[2, index]) - sums[0, index]


@compiled
def waits_for_its_turn(scene: Scene, index: int, inside: NDArray[np.uint8]) -> None:
    """Wait for one of those that are in an iteration, or begin one now, to end it."""
    waits(scene, index, _TURN, NO_TIME)
    for other in range(scene.n):
        if other != index and inside[other]:
            blocked_by(scene, index, other)


@compiled
def decide_by_claims(scene: Scene, most_inside: int) -> None:
    """Decide for every job at its boundary, in turn, while fewer than ``most_inside`` jobs are in an iteration."""
    order = in_turn(scene)
    alone = alone_in(scene)
    free, sums, flags = banker_of(scene)
    inside = 0
    missing = 0  # regions that those need together who must finish: if so many are free, any order will do
    for i in range(scene.n):
        missing += _needs(sums, i) if flags[0, i] else 0
        inside += flags[0, i] and not stands_still(job_at(scene, i), scene.now_ns)
    kept = kept_by_all(scene)
    judged = 0
    for index in order:
        flags[0, index] = job_at(scene, index).profile_address != 0
        if alone != NOBODY:
            waits_for_alone(scene, index, alone)
            flags[0, index] = 0
        elif flags[0, index] == 0:
            starts(scene, index)
            alone = index
        elif not fits_beside_kept(scene, index, kept):
            waits_to_fit(scene, index)
            flags[0, index] = 0
        elif inside >= most_inside:
            waits_for_its_turn(scene, index, flags[0])
            flags[0, index] = 0
        elif missing + _needs(sums, index) <= free:
            starts(scene, index)
            missing += _needs(sums, index)
            inside += 1
        elif judged == MOST_JUDGED:
            waits(scene, index, _UNSAFE, NO_TIME)
            blocked_by(scene, index, order[0])
            flags[0, index] = 0
        else:
            judged += 1
            if is_safe(free, sums[0], sums[1], sums[2], flags[0], flags[1], scene.n):
                starts(scene, index)
                missing += _needs(sums, index)
                inside += 1
            else:
                waits_for_safety(scene, index)
                flags[0, index] = 0
    unstick(scene, order)
