"""What the scheduler's tests share: a reference for the banker's rule, arbitrary jobs, and a policy of claims alone."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.scheduler_model import Work
from hypothesis import strategies as st

from zico.scheduler.layout import DECISION, NO_TIME, NOBODY, SNAPSHOT
from zico.scheduler.state import Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

_DECIDE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


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
    plan: None = None
    capabilities: Capabilities = dataclasses.field(default_factory=Capabilities)
    options_address: int = 0

    def __post_init__(self) -> None:
        """Make a C function of the decision."""
        self._function = _DECIDE(self._decide)

    @property
    def address(self) -> int:
        """Return the function's address."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _decide(self, snapshot_address: int) -> int:
        snapshot = _records(snapshot_address, SNAPSHOT, 1)[0]
        decisions = _records(int(snapshot["decisions_address"]), DECISION, int(snapshot["n"]))
        decisions["starts"] = snapshot["alone"] == NOBODY
        decisions["until_ns"] = NO_TIME
        decisions["against"] = NOBODY
        return 0


def _records(address: int, dtype: np.dtype[np.void], n: int) -> Any:  # noqa: ANN401 - records
    return np.frombuffer((ctypes.c_char * (n * dtype.itemsize)).from_address(address), dtype)


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
