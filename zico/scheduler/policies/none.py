"""No coordination: whoever comes to a boundary goes on. The base line that a scheduler has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.scheduler.state import Start
from zico.scheduler.turns import in_turn

if TYPE_CHECKING:
    from zico.scheduler.state import Decision, Policy, PoolView


class Uncoordinated:
    """Start everybody; memory is first come first served, and running full is the next tier's business."""

    name = "none"
    use_claims = False
    self_admit = True

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Start every job that waits."""
        return {job.job: Start() for job in in_turn(pool)}


POLICY: Policy = Uncoordinated()
