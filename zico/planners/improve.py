"""The fast improving search: peel, place the cores in the classic orders, then eject until nothing is left to gain.

The goal is the live peak, or the capacity where there is one. Once a core's top is there, nothing is done to it any
more. The limit of the ejections is set between goal and best top by success and failure. They are at their best where
many tensors are small; a few large ones are a puzzle, for which the exact planner is asked once.

Known limitations:
    * Code that was never used on this machine is compiled first: some seconds, whatever the deadline is.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.classic import Fit, Order, aligned, finished, order_of, peak_of, place_in_order, too_large
from zico.planners.ejection import Ejection
from zico.planners.peeling import Core, peeled
from zico.planners.plan import NoPlan, Plan, Reason

if TYPE_CHECKING:
    from zico.planners.problem import Int64s, Problem

_ORDERS = tuple((order, fit) for order in (Order.SIZE, Order.START, Order.DURATION, Order.AREA) for fit in Fit)
_MOST_EXACT = 1000  # tensors; for more, the exact planner is too slow
_EXACT_TIME = 1 / 3  # of what is left
_LEAST_SHARE = 0.1  # of the gap to the goal; where less fails, more patience for more is better


@dataclasses.dataclass(frozen=True)
class ImproveOptions:
    """What the search does; each part can be left out."""

    peel: bool = True
    all_orders: bool = True
    """Try eight orders; else only the first, by size."""
    eject: bool = True
    exact: bool = True
    """Ask the exact planner where ejections were not enough."""
    most_steps: int = 1 << 40
    """Of the ejections in each core. The plan is the same every time if these are used up before the deadline."""
    seed: int = 1


class Improve:
    """The fast improving search, for up to some ten thousand tensors."""

    name = "improve"

    def __init__(self, options: ImproveOptions | None = None) -> None:
        """Search with these options."""
        self._options = options or ImproveOptions()

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Search until the peak is the live peak, or within the capacity, or until the deadline.

        Returns:
            The best plan found, ``optimal`` if its peak is the live peak. ``INFEASIBLE`` if the live peak exceeds the
            capacity; ``OUT_OF_TIME`` or, where the options ended the search, ``NOT_FOUND`` if nothing fitted.
        """
        began_ns = time.monotonic_ns()
        deadline_ns = began_ns + int(deadline_s * 1e9)
        refusal = too_large(problem, self.name)
        if refusal is not None:
            return refusal
        whole = dataclasses.replace(problem, size_bytes=aligned(problem.size_bytes, problem.alignment_bytes))
        capacity = problem.capacity_bytes or 0
        goal = max(whole.peak_live_bytes, capacity - capacity % problem.alignment_bytes)
        offsets = np.zeros(len(problem), np.int64)
        cores = peeled(whole, offsets) if self._options.peel else [Core(whole, np.arange(len(whole)), 0)]
        if not all(self._place(core, goal, deadline_ns, offsets) for core in cores):
            return NoPlan(Reason.OUT_OF_TIME, self.name, (time.monotonic_ns() - began_ns) / 1e9)
        if self._options.eject:
            self._eject(cores, goal, deadline_ns, offsets)
        now_ns = time.monotonic_ns()
        found = finished(problem, offsets, self.name, (now_ns - began_ns) / 1e9)
        if isinstance(found, NoPlan) and now_ns >= deadline_ns:
            return dataclasses.replace(found, reason=Reason.OUT_OF_TIME)
        return found

    def _place(self, core: Core, goal: int, deadline_ns: int, offsets: Int64s) -> bool:
        """Set the core's offsets by the best of the orders; tell whether there was time for one."""
        p = core.problem
        best = None
        for order, fit in _ORDERS if self._options.all_orders else _ORDERS[:1]:
            attempt = np.empty(len(p), np.int64)
            numbers = order_of(p, order)
            top = place_in_order(numbers, p.lower, p.upper, p.size_bytes, fit is Fit.BEST, deadline_ns, attempt)
            if top < 0:
                break
            if best is None or top < best:
                best = top
                offsets[core.tensors] = core.base_bytes + attempt
            if core.base_bytes + best <= goal:
                break
        return best is not None

    def _eject(self, cores: list[Core], goal: int, deadline_ns: int, offsets: Int64s) -> None:
        """Lower the tops of all cores to the goal, the highest first; each gets an equal share of what time is left."""
        tops = [core.base_bytes + peak_of(core.problem, offsets[core.tensors] - core.base_bytes) for core in cores]
        above = sorted((k for k, top in enumerate(tops) if top > goal), key=lambda k: tops[k])
        while above:
            now_ns = time.monotonic_ns()
            end_ns = now_ns + (deadline_ns - now_ns) // len(above)
            core = cores[above.pop()]
            relative = offsets[core.tensors] - core.base_bytes
            offsets[core.tensors] = core.base_bytes + self._lowered(core, goal - core.base_bytes, relative, end_ns)

    def _lowered(self, core: Core, goal: int, best: Int64s, deadline_ns: int) -> Int64s:
        """Return offsets whose top is as near to the goal as the deadline lets it be."""
        search = Ejection(core.problem, self._options.seed)
        alignment_bytes = core.problem.alignment_bytes
        top = peak_of(core.problem, best)
        share, steps, left, asked = 0.5, 2 * len(best), self._options.most_steps, False
        while top > goal and left > 0 and time.monotonic_ns() < deadline_ns:
            limit = top - max(1, int((top - goal) * share))
            steps = min(steps, left)
            left -= steps
            found = search.lower_to(limit - limit % alignment_bytes, best, steps, deadline_ns)
            if found is not None:
                best, top, share = found, peak_of(core.problem, found), min(1.0, 2 * share)
                continue
            share /= 2
            if share < _LEAST_SHARE:
                exact = None if asked else self._asked(core.problem, goal, deadline_ns)
                if exact is not None:
                    return exact
                share, steps, asked = 1.0, 2 * steps, True
        return best

    def _asked(self, problem: Problem, goal: int, deadline_ns: int) -> Int64s | None:
        """Return the exact planner's offsets within the goal, if it has some after a part of the time left."""
        if not self._options.exact or len(problem) > _MOST_EXACT:
            return None
        from zico.planners.exact import Exact

        left_s = (deadline_ns - time.monotonic_ns()) / 1e9
        answer = Exact().plan(dataclasses.replace(problem, capacity_bytes=goal), left_s * _EXACT_TIME)
        return answer.offset_bytes if isinstance(answer, Plan) else None
