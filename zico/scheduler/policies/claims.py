"""Claims alone: start as soon as everybody can still finish, whatever that does to who waits inside an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback
from zico.scheduler.greedy import EVERYBODY, decide_by_claims
from zico.scheduler.packed import Compiled
from zico.scheduler.turns import snapshot_at

if TYPE_CHECKING:
    from zico.scheduler.state import CompiledPolicy


@callback(types.void(types.int64))
def decide(snapshot_address: int) -> None:
    """Decide for every job at its boundary."""
    decide_by_claims(snapshot_at(snapshot_address), EVERYBODY)


POLICY: CompiledPolicy = Compiled("claims", decide, knows="profile, progress")
