"""When chosen gaps' transfers are asked for, as AutoSwap does.

Transfers out are asked for at the access before the gap, in that order: each starts when the access and the transfer
out ahead of it have ended. Transfers back are planned from the last one to the first: each ends when its access begins
or the next transfer back starts, whichever is earlier; none starts before the operation behind the peak. Source:
arXiv 1903.06631, section on AutoSwap's scheduling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.planners.swap.gaps import begin_ns
from zico.planners.swap.plan import SwapPlan, Transfers

if TYPE_CHECKING:
    from zico.planners.swap.gaps import Gaps
    from zico.planners.swap.problem import Int64s, SwapProblem


def schedule(problem: SwapProblem, chosen: Gaps, peak_op: int, planner: str, elapsed_s: float = 0.0) -> SwapPlan:
    """Return the plan that moves whole tensors in the chosen gaps.

    Args:
        problem: The problem.
        chosen: Gaps that ``gaps.over`` has moved to the peak.
        peak_op: The operation with the highest load.
        planner: What the plan says it is from.
        elapsed_s: Likewise.
    """
    n = problem.n_ops
    asked, delay_ns = _asked_back(problem, chosen, peak_op)
    return SwapPlan(
        tensor=chosen.tensor,
        gap=chosen.gap,
        first_byte=np.zeros(len(chosen), np.int64),
        size_bytes=chosen.size_bytes,
        out=_in_order(chosen.first - 1, np.zeros(len(chosen), np.int64), chosen.first, n),
        back=_in_order(asked, delay_ns, chosen.last, n),
        planner=planner,
        elapsed_s=elapsed_s,
    )


def _asked_back(problem: SwapProblem, chosen: Gaps, peak_op: int) -> tuple[Int64s, Int64s]:
    """Return at which operation each transfer back is asked for, and how long after its beginning it starts."""
    needed_ns = begin_ns(problem, chosen.last + 1)
    least_ns = int(begin_ns(problem, np.array([peak_op + 1]))[0])
    start_ns = np.zeros(len(chosen), np.int64)
    following_ns: int | None = None
    for i in np.argsort(chosen.last, kind="stable")[::-1].tolist():
        ends_ns = int(needed_ns[i]) if following_ns is None else min(int(needed_ns[i]), following_ns)
        following_ns = start_ns[i] = max(ends_ns - int(chosen.back_ns[i]), least_ns)
    n = problem.n_ops
    ops = np.arange(peak_op, peak_op + n + 2)
    begins = begin_ns(problem, ops)
    last_begun = ops[np.searchsorted(begins, start_ns, side="right") - 1]
    asked = np.clip(last_begun, chosen.first - 1, chosen.last)
    return asked, np.maximum(start_ns - begin_ns(problem, asked), 0)


def _in_order(op: Int64s, delay_ns: Int64s, order: Int64s, n_ops: int) -> Transfers:
    """Return the transfers of an iteration, those of one operation in the given order."""
    at = op % n_ops
    swap = np.lexsort((order, at))
    return Transfers(swap, at[swap], delay_ns[swap])
