"""What a planner answers: places for all tensors, or why there are none."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zico.planners.problem import Int64s, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """An offset for every tensor of the problem, in the problem's order. Believe it once the judge has."""

    offset_bytes: Int64s
    planner: str
    elapsed_s: float
    optimal: bool = False
    """The planner has proved that its objective cannot be lower."""


class Reason(enum.Enum):
    """Why there is no plan."""

    INFEASIBLE = "does not fit"
    """Proved: no placement exists within the capacity."""
    NOT_FOUND = "not found"
    """The planner has no way to search on; another one may succeed."""
    OUT_OF_TIME = "out of time"


@dataclasses.dataclass(frozen=True)
class NoPlan:
    """No plan, and why; a value, never ``None``."""

    reason: Reason
    planner: str
    elapsed_s: float
    detail: str = ""
    """What a person would want to know: the tick and the bytes that do not fit, say."""


def refusal(problem: Problem, reason: Reason, planner: str, elapsed_s: float) -> NoPlan:
    """Return why there is no plan, with the figures that a person would want to know."""
    live, capacity = problem.peak_live_bytes, problem.capacity_bytes
    detail = f"{len(problem)} tensors, {live} bytes alive at once"
    if capacity is not None:
        detail += f", which is {'more than' if live > capacity else 'within'} the capacity of {capacity}"
    if reason is Reason.OUT_OF_TIME:
        detail += f"; nothing found in {elapsed_s:.3g} s"
    return NoPlan(reason, planner, elapsed_s, detail)


class Planner(Protocol):
    """Something that places tensors. Pure: the same problem gives the same plan unless the deadline cuts it short."""

    name: str

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Return a plan; looks at the clock often enough to answer within a tenth more than the deadline."""
        ...
