"""What the scheduler's tests share: a reference for the banker's rule, arbitrary jobs, and a policy of claims alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from scheduler_model import Work

from zico.scheduler.state import Start
from zico.scheduler.turns import alone_job, in_turn, wait_for_alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.scheduler.state import Decision, PoolView


@dataclasses.dataclass(frozen=True)
class Debt:
    """One job as the banker sees it."""

    held: int
    claim: int
    residual: int
    must_finish: bool = True


def some_order_works(free: int, debts: Sequence[Debt]) -> bool:
    """Try every order: each job takes up to its claim, then keeps its residual."""
    return any(_order_works(free, order) for order in itertools.permutations([d for d in debts if d.must_finish]))


def _order_works(free: int, order: Sequence[Debt]) -> bool:
    for debt in order:
        most = max(debt.claim, debt.residual, debt.held)
        if most > debt.held and most - debt.held > free:
            return False
        free += debt.held - debt.residual
    return True


@dataclasses.dataclass
class Eager:
    """Start everybody at once and leave all to the claims, but for first iterations, which have none."""

    name: str = "eager"
    use_claims: bool = True
    self_admit: bool = True
    heeds_alone: bool = True

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Start every job that has come to a boundary unless a first iteration grows."""
        alone = alone_job(pool) if self.heeds_alone else None
        return {job.job: Start() if alone is None else wait_for_alone(alone) for job in in_turn(pool)}


WORKS = st.builds(
    Work,
    levels=st.lists(st.integers(0, 7), min_size=1, max_size=7).map(tuple),
    step_ns=st.integers(1, 5),
    jitter=st.sampled_from([0.0, 0.5]),
)


def smallest_budget(works: Sequence[Work]) -> int:
    """Return the least budget in which each job fits beside what all others keep between iterations."""
    kept = sum(work.levels[-1] for work in works)
    return max(max(work.levels) - work.levels[-1] + kept for work in works)
