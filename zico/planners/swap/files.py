"""Swap plans as JSON: for who carries them out, with names of the trace instead of the problem's indexes.

Operations are counted as the problem counts them; ``event`` is where in the trace each of those is that a transfer is
asked for at, ``op`` its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from zico.planners.swap.from_trace import SwapIteration
    from zico.planners.swap.plan import SwapPlan, Transfers

SCHEMA = "zico.swap_plan.v1"


class Asked(msgspec.Struct, frozen=True):
    """A transfer."""

    swap: int
    """Its place among the plan's swaps."""
    at: int
    """The operation at whose beginning it is asked for."""
    event: int
    op: str
    delay_ns: int


class Swap(msgspec.Struct, frozen=True):
    """Bytes of a tensor that leave in one of its gaps."""

    tensor: int
    """The problem's."""
    trace_tensor: int
    gap: int
    after: int
    """The operation whose access is before the gap."""
    before: int | None
    """The one whose access ends it, counted on from the iteration of the first; none: the tensor ends."""
    first_byte: int
    size_bytes: int


class PlanFile(msgspec.Struct, frozen=True):
    """What a file says."""

    planner: str
    iteration: int
    """Of the trace."""
    operations: int
    period_ns: int
    limit_bytes: int | None
    swaps: list[Swap]
    out: list[Asked]
    back: list[Asked]
    schema_version: str = SCHEMA


def plan_json(found: SwapIteration, plan: SwapPlan, limit_bytes: int | None) -> bytes:
    """Return the file's bytes."""
    problem = found.problem
    swaps = [
        Swap(
            tensor=tensor,
            trace_tensor=int(found.tensor[tensor]),
            gap=gap,
            after=int(problem.accesses(tensor)[gap]),
            before=problem.next_access(tensor, gap),
            first_byte=int(plan.first_byte[i]),
            size_bytes=int(plan.size_bytes[i]),
        )
        for i, (tensor, gap) in enumerate(zip(plan.tensor.tolist(), plan.gap.tolist(), strict=True))
    ]

    def asked(transfers: Transfers) -> list[Asked]:
        names = problem.op_names or ("",) * problem.n_ops
        rows = zip(transfers.swap.tolist(), transfers.op.tolist(), transfers.delay_ns.tolist(), strict=True)
        return [Asked(swap, op, int(found.op_event[op]), names[op], delay_ns) for swap, op, delay_ns in rows]

    content = PlanFile(
        planner=plan.planner,
        iteration=found.number,
        operations=problem.n_ops,
        period_ns=problem.period_ns,
        limit_bytes=limit_bytes,
        swaps=swaps,
        out=asked(plan.out),
        back=asked(plan.back),
    )
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
