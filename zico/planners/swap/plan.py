"""What a planner of swaps answers: which bytes leave and return, and when each transfer is asked for.

Each direction has one stream, which works in the order in which transfers are asked for. A transfer is asked for when
an operation *begins*, by which time that operation has its memory; so what the stream then brings back can only make
later operations wait. A transfer out starts no earlier than the end of the access before its gap, one back no earlier
than the end of the transfer out.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from zico.planners.plan import NoPlan
    from zico.planners.swap.problem import Int64s, SwapProblem


@dataclasses.dataclass(frozen=True, eq=False)
class Transfers:
    """What is asked of one direction's stream in an iteration, in this order."""

    swap: Int64s
    """Which swap of the plan."""
    op: Int64s
    """The operation, from 0 to ``n - 1``, at whose beginning it is asked for; ascending."""
    delay_ns: Int64s
    """It starts no earlier than so long after that; what stands behind it in the stream waits, too."""

    def __post_init__(self) -> None:
        """Bring the arrays into one type."""
        _to_int64s(self, "swap", "op", "delay_ns")

    def __len__(self) -> int:
        """Return the number of transfers."""
        return len(self.swap)


@dataclasses.dataclass(frozen=True, eq=False)
class SwapPlan:
    """Swaps as parallel arrays, and the two streams' orders. Believe it once the judge has.

    A swap happens once in every iteration: bytes of a tensor leave in one of its gaps and return in the same one. Two
    swaps may share a gap if they share no bytes. Where the tensor ends with the gap, its bytes need not return.
    """

    tensor: Int64s
    gap: Int64s
    """The index of the access, among the tensor's, after which the bytes leave."""
    first_byte: Int64s
    size_bytes: Int64s
    out: Transfers
    """Every swap once."""
    back: Transfers
    """Every swap once; those of a gap that ends with its tensor may be left out."""
    planner: str
    elapsed_s: float
    optimal: bool = False
    """The planner has proved that no plan has less overhead."""

    def __post_init__(self) -> None:
        """Bring the arrays into one type."""
        _to_int64s(self, "tensor", "gap", "first_byte", "size_bytes")

    def __len__(self) -> int:
        """Return the number of swaps."""
        return len(self.tensor)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes moved in an iteration, both directions together."""
        return int(self.size_bytes.sum() + self.size_bytes[self.back.swap].sum())


def no_swaps(planner: str, elapsed_s: float = 0.0) -> SwapPlan:
    """Return the plan that moves nothing."""
    none = np.zeros(0, np.int64)
    nothing = Transfers(none, none, none)
    return SwapPlan(none, none, none, none, nothing, nothing, planner, elapsed_s)


class SwapPlanner(Protocol):
    """Something that plans swaps for a problem with a limit."""

    name: str

    def plan(self, problem: SwapProblem, deadline_s: float) -> SwapPlan | NoPlan:
        """Return a plan whose replay ends and keeps the limit, or why there is none."""
        ...


def _to_int64s(plan: object, *names: str) -> None:
    for name in names:
        object.__setattr__(plan, name, np.ascontiguousarray(getattr(plan, name), np.int64))
