"""The gaps that a planner may use, and when operations run with all tensors at hand."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.swap.fast import transfer_ns
from zico.units import MIB

if TYPE_CHECKING:
    from zico.planners.swap.problem import Bools, Int64s, SwapProblem

LEAST_BYTES = MIB
"""The published threshold: smaller tensors are not worth a transfer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Gaps:
    """Gaps as parallel arrays; operations are counted on from the iteration of the gap's access."""

    tensor: Int64s
    gap: Int64s
    size_bytes: Int64s
    first: Int64s
    """The first operation of the gap: the access before it is one less."""
    last: Int64s
    """The last one: the access that ends it is one more."""
    out_ns: Int64s
    """What the whole tensor takes to leave."""
    back_ns: Int64s

    def __len__(self) -> int:
        """Return the number of gaps."""
        return len(self.tensor)

    def take(self, which: Int64s | Bools) -> Gaps:
        """Return some of them, in that order."""
        return Gaps(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))


def gaps_between_accesses(problem: SwapProblem, least_bytes: int = LEAST_BYTES) -> Gaps:
    """Return the gaps that are not empty and end with an access, of tensors of so many bytes or more."""
    first, last, size = problem.gap_ops
    owner = np.repeat(np.arange(len(problem)), np.diff(problem.access_begin))
    index = np.arange(len(owner)) - problem.access_begin[owner]
    ends_tensor = (index == np.diff(problem.access_begin)[owner] - 1) & ~problem.persistent[owner]
    use = (first <= last) & ~ends_tensor & (size >= least_bytes)
    out_ns, back_ns = transfer_ns(problem.out, size), transfer_ns(problem.back, size)
    return Gaps(owner, index, size, first, last, out_ns, back_ns).take(use)


def over(gaps: Gaps, op: int, n_ops: int) -> Gaps:
    """Return those gaps in which an operation of the iteration lies, moved by rounds so that it is this very one."""
    rounds = (op - gaps.first) // n_ops * n_ops
    moved = dataclasses.replace(gaps, first=gaps.first + rounds, last=gaps.last + rounds)
    return moved.take(op <= moved.last)


def begin_ns(problem: SwapProblem, op: Int64s) -> Int64s:
    """Return when operations begin, counted on from iteration 0, negative ones before it."""
    return np.asarray(op // problem.n_ops * problem.period_ns + problem.op_start_ns[op % problem.n_ops])


def end_ns(problem: SwapProblem, op: Int64s) -> Int64s:
    """Return when operations end, counted likewise."""
    return begin_ns(problem, op) + problem.op_duration_ns[op % problem.n_ops]
