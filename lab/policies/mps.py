"""Everybody runs at once in a memory pool of its own, as under NVIDIA's MPS; what does not fit is paged by the driver.

The base line of the paper: frameworks keep their peaks, so peaks add up.
"""

from __future__ import annotations

from numba import types

from zico.base.compiled import callback
from zico.scheduler.packed import Compiled
from zico.scheduler.state import Capabilities
from zico.scheduler.turns import in_turn, snapshot_at, starts


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Start everybody."""
    snapshot = snapshot_at(snapshot_address)
    for index in in_turn(snapshot):
        starts(snapshot, index)


POLICY = Compiled(
    "mps", decide, use_claims=False, knows="nothing", capabilities=Capabilities(runs=False, pages=True, asks=True)
)
