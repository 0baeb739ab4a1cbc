"""No coordination: whoever comes to a boundary goes on. The base line that a scheduler has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback
from zico.scheduler.packed import Compiled
from zico.scheduler.turns import in_turn, snapshot_at, starts

if TYPE_CHECKING:
    from zico.scheduler.state import CompiledPolicy


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Start everybody; memory is first come first served, and running full is the next tier's business."""
    snapshot = snapshot_at(snapshot_address)
    for index in in_turn(snapshot):
        starts(snapshot, index)


POLICY: CompiledPolicy = Compiled("none", decide, use_claims=False, knows="nothing")
