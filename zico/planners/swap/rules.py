"""What makes a swap plan one, before time is looked at. Obvious; shares no code with any planner.

Rules, each with a name that a verdict quotes:

* ``swap``: each swap names a gap that exists, and bytes of the tensor.
* ``overlap``: no two swaps of a gap share a byte.
* ``once``: each swap leaves once, and returns once unless its tensor ends with the gap; then it does not return.
* ``order``: transfers are asked for at operations of the iteration, in ascending order, after no negative delay.
* ``late``: leaving is asked for within the gap, and returning before the operation begins that ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from zico.planners.swap.plan import SwapPlan, Transfers
    from zico.planners.swap.problem import SwapProblem

Broken = tuple[str, str]
"""A rule and what breaks it."""


def broken_rule(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    """Return the first rule that the plan breaks, with the swap concerned; ``None``: it keeps them all."""
    return _swaps(problem, plan) or _overlaps(plan) or _orders(problem, plan) or _late(problem, plan)


def asked_at(problem: SwapProblem, plan: SwapPlan) -> tuple[list[int], list[int | None]]:
    """Return the operations at which each swap's transfers are asked for, counted on from the gap's own iteration.

    The first ones at or behind the gap's access, on the circle: from the access to less than two rounds later.
    """
    n = problem.n_ops
    out_op = dict(zip(plan.out.swap.tolist(), plan.out.op.tolist(), strict=True))
    back_op = dict(zip(plan.back.swap.tolist(), plan.back.op.tolist(), strict=True))
    leaves: list[int] = []
    returns: list[int | None] = []
    for swap in range(len(plan)):
        access = int(problem.accesses(int(plan.tensor[swap]))[plan.gap[swap]])
        leaves.append(access + (out_op[swap] - access) % n)
        returns.append(leaves[-1] + (back_op[swap] - leaves[-1]) % n if swap in back_op else None)
    return leaves, returns


def _swaps(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    if not len(plan) == len(plan.gap) == len(plan.first_byte) == len(plan.size_bytes):
        return "swap", "tensors, gaps, first bytes and sizes differ in number"
    for swap in range(len(plan)):
        tensor, gap = int(plan.tensor[swap]), int(plan.gap[swap])
        if not 0 <= tensor < len(problem) or not 0 <= gap < len(problem.accesses(tensor)):
            return "swap", f"swap {swap} is of gap {gap} of tensor {tensor}, which does not exist"
        first, size = int(plan.first_byte[swap]), int(plan.size_bytes[swap])
        if first < 0 or size < 1 or first + size > problem.size_bytes[tensor]:
            has = f"tensor {tensor} has {problem.size_bytes[tensor]}"
            return "swap", f"swap {swap} moves bytes {first} to {first + size}; {has}"
    return None


def _overlaps(plan: SwapPlan) -> Broken | None:
    for swap in range(len(plan)):
        earlier = slice(0, swap)
        same = (plan.tensor[earlier] == plan.tensor[swap]) & (plan.gap[earlier] == plan.gap[swap])
        ends = plan.first_byte + plan.size_bytes
        shared = same & (plan.first_byte[earlier] < ends[swap]) & (plan.first_byte[swap] < ends[earlier])
        if shared.any():
            return "overlap", f"swaps {int(np.argmax(shared))} and {swap} move the same bytes"
    return None


def _orders(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    for name, transfers in (("out", plan.out), ("back", plan.back)):
        broken = _order(problem, plan, name, transfers)
        if broken is not None:
            return broken
    moved = {"out": sorted(plan.out.swap.tolist()), "back": sorted(plan.back.swap.tolist())}
    due = [s for s in range(len(plan)) if problem.next_access(int(plan.tensor[s]), int(plan.gap[s])) is not None]
    for name, swaps in (("out", list(range(len(plan)))), ("back", due)):
        if moved[name] != swaps:
            wrong = sorted(set(moved[name]) ^ set(swaps)) or "one"
            return "once", f"transfers {name} do not move each of {len(swaps)} swaps once: look at {wrong}"
    return None


def _order(problem: SwapProblem, plan: SwapPlan, name: str, transfers: Transfers) -> Broken | None:
    if not len(transfers) == len(transfers.op) == len(transfers.delay_ns):
        return "order", f"swaps, operations and delays of transfers {name} differ in number"
    for i in range(len(transfers)):
        swap, op = int(transfers.swap[i]), int(transfers.op[i])
        if not 0 <= swap < len(plan):
            return "once", f"transfer {name} {i} is of swap {swap}, which does not exist"
        if not 0 <= op < problem.n_ops or transfers.delay_ns[i] < 0:
            return "order", f"swap {swap} is asked {name} at operation {op}, {transfers.delay_ns[i]} ns behind it"
        if i and op < transfers.op[i - 1]:
            return "order", f"swap {swap} is asked {name} at operation {op}, behind one of {transfers.op[i - 1]}"
    return None


def _late(problem: SwapProblem, plan: SwapPlan) -> Broken | None:
    leaves, returns = asked_at(problem, plan)
    for swap in range(len(plan)):
        tensor, gap = int(plan.tensor[swap]), int(plan.gap[swap])
        needed, back = problem.next_access(tensor, gap), returns[swap]
        if leaves[swap] >= (int(problem.free_op[tensor]) + 1 if needed is None else needed):
            what = "ends" if needed is None else f"is used by operation {problem.op_name(needed)}"
            return "late", f"tensor {tensor} is asked out at operation {problem.op_name(leaves[swap])}, when it {what}"
        if needed is not None and back is not None and back >= needed:
            op, asked = problem.op_name(needed), problem.op_name(back)
            return "late", f"tensor {tensor}, used by operation {op}, is out: asked back at operation {asked}"
    return None
