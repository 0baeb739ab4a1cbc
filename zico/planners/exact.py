"""The exact planner: for hard problems of up to about a thousand tensors. It finds a plan or proves that there is none.

Theory of operation:
    * What never lives together is planned apart; each such group has a ``Group`` here.
    * ``exact_search`` searches a group depth first. Whether that takes a millisecond or a century depends on the order
      in which it tries things, and no order is good for all problems. So many orders take turns with a limit on their
      steps, and the limits grow: a lucky order answers at once, and in the end one goes through all there is.
      Source: C. Gomes, B. Selman, H. Kautz, "Boosting combinatorial search through randomization", AAAI 1998.
    * What was learned stays from turn to turn: states that failed, and the sections where searches failed.
    * Without a capacity the peak is made as low as can be, by bisection between what is proved and what is found.

Guarantees:
    * "Does not fit" is a proof, but for two different states with one 64-bit hash.
    * The same problem, options and steps give the same plan; only the deadline depends on the clock.

Known limitations:
    * A step takes time in proportion to the sections in which the unplaced tensors live: about 5 us for 200 tensors,
      30 us for 1,000.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from zico.planners.exact_infer import Rules
from zico.planners.exact_orders import Orders
from zico.planners.exact_search import FOUND, INFEASIBLE, STOPPED, TOO_DEEP, make_stack, search
from zico.planners.exact_state import make_state, reset, unit_bytes
from zico.planners.plan import NoPlan, Plan, Reason, refusal
from zico.planners.problem import Problem

if TYPE_CHECKING:
    from zico.planners.problem import Int64s

NO_LIMIT = 1 << 62
TURNS_PER_BISECTION = 24


@dataclasses.dataclass(frozen=True)
class ExactOptions:
    """What the exact planner uses. A switch only changes how long an answer takes; see ``Rules`` for the first six."""

    heads: bool = True
    held_up: bool = True
    twins: bool = True
    ceiling: bool = True
    parts: bool = True
    memory: bool = True
    restarts: bool = True
    """Let many orders take turns; otherwise search once, with the first."""
    seed: int = 0

    def rules(self, *, whole: bool) -> Rules:
        """Return the inferences to use; nothing hangs from a capacity that is not a ``whole`` number of alignments."""
        return Rules(self.heads, self.held_up, self.twins, self.ceiling and whole, self.parts, self.memory)


class Group:
    """Tensors that are planned together, and what is known about them."""

    def __init__(self, problem: Problem, options: ExactOptions) -> None:
        """Begin with nothing known but the sum of what lives together."""
        self.problem = problem
        self.options = options
        self.state = make_state(problem)
        self.stack = make_stack(self.state, 4 * len(problem) + 64)
        self.capacity_bytes: int | None = None
        self.orders: Orders

    def fit(self, capacity_bytes: int, turns: int, deadline_ns: int) -> int:
        """Search for a plan within a capacity; returns what the last search did. A plan lies in ``offset_bytes``."""
        if capacity_bytes != self.capacity_bytes:
            self.capacity_bytes = capacity_bytes
            self.state.failed[:] = 0
            reset(self.state, self.problem, capacity_bytes)
            self.orders = Orders(self.state, self.options.seed)
        rules = self.options.rules(whole=capacity_bytes % self.problem.alignment_bytes == 0)
        ended = STOPPED
        while turns > 0 and ended == STOPPED and time.monotonic_ns() < deadline_ns:
            how, limit = self.orders.next_turn()
            reset(self.state, self.problem, capacity_bytes)
            limits = (limit if self.options.restarts else NO_LIMIT, deadline_ns)
            ended, _ = search(self.state, rules, how, self.stack, limits)
            turns -= 1
            if ended == TOO_DEEP:
                self.stack = make_stack(self.state, 2 * len(self.stack.left))
                ended = STOPPED
        return int(ended)

    @property
    def offset_bytes(self) -> Int64s:
        """The offsets of the group's tensors, after a plan was found."""
        return self.state.offset * unit_bytes(self.problem)


def split(problem: Problem) -> list[Int64s]:
    """Return the indexes of tensors in groups that are never alive together."""
    order = np.argsort(problem.lower, kind="stable")
    latest = np.maximum.accumulate(problem.upper[order])
    return np.split(order, 1 + np.flatnonzero(problem.lower[order][1:] >= latest[:-1])) if len(order) else []


class Exact:
    """A planner for hard problems, with proofs. For training traces of thousands of tensors, use ``improve``."""

    name = "exact"

    def __init__(self, options: ExactOptions | None = None) -> None:
        """Plan with these options."""
        self.options = options or ExactOptions()

    def plan(self, problem: Problem, deadline_s: float) -> Plan | NoPlan:
        """Return a plan within the capacity, or of the lowest peak found; or why there is none.

        Args:
            problem: What to place. With a capacity, any plan within it will do.
            deadline_s: Seconds to take at most. Without a capacity, all of them unless the peak is proved the lowest.
        """
        began_ns = time.monotonic_ns()
        deadline_ns = began_ns + int(deadline_s * 1e9)
        found = Joint(problem, self.options)
        if problem.capacity_bytes is None:
            reason = found.minimise(deadline_ns)
        else:
            reason = found.fit(problem.capacity_bytes, NO_LIMIT, deadline_ns)
        elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
        if found.offset_bytes is None:
            return refusal(problem, reason or Reason.OUT_OF_TIME, self.name, elapsed_s)
        is_optimal = found.peak_bytes <= found.proved_bytes
        return Plan(found.offset_bytes, self.name, elapsed_s, optimal=is_optimal)


class Joint:
    """All groups of a problem, and the best plan found for all of them together."""

    def __init__(self, problem: Problem, options: ExactOptions) -> None:
        """Begin without a plan."""
        self.problem = problem
        self.members = split(problem)
        self.options = options
        self.groups = [Group(_part(problem, members), options) for members in self.members]
        self.offset_bytes: Int64s | None = None
        self.peak_bytes = NO_LIMIT
        self.proved_bytes = problem.peak_live_bytes
        """No plan's peak is lower."""

    def fit(self, capacity_bytes: int, turns: int, deadline_ns: int) -> Reason | None:
        """Search for a plan within a capacity; ``None``: it is in ``offset_bytes``."""
        if capacity_bytes < self.proved_bytes:
            return Reason.INFEASIBLE
        offset_bytes = np.zeros(len(self.problem), np.int64)
        for members, group in zip(self.members, self.groups, strict=True):
            ended = group.fit(capacity_bytes, turns, deadline_ns)
            if ended == INFEASIBLE:
                self.proved_bytes = max(self.proved_bytes, capacity_bytes + 1)
                return Reason.INFEASIBLE
            if ended != FOUND:
                return Reason.OUT_OF_TIME
            offset_bytes[members] = group.offset_bytes
        self.offset_bytes = offset_bytes
        self.peak_bytes = int((offset_bytes + self.problem.size_bytes).max(initial=0))
        return None

    def minimise(self, deadline_ns: int) -> Reason | None:
        """Search for lower and lower peaks, until the lowest is proved or time is over."""
        room_bytes = int(self.problem.size_bytes.sum()) + len(self.problem) * self.problem.alignment_bytes
        reason = self.fit(room_bytes, NO_LIMIT, deadline_ns)
        for turns in (TURNS_PER_BISECTION << doubling for doubling in itertools.count()):
            lower, target = self.proved_bytes, self.proved_bytes
            while lower < self.peak_bytes and time.monotonic_ns() < deadline_ns:
                if self.fit(target, turns, deadline_ns) is not None:
                    lower = target + 1
                target = (lower + self.peak_bytes) // 2
            if self.proved_bytes >= self.peak_bytes or time.monotonic_ns() >= deadline_ns:
                break
        return reason


def _part(problem: Problem, members: Int64s) -> Problem:
    lower, upper, size_bytes = (a[members] for a in (problem.lower, problem.upper, problem.size_bytes))
    return Problem(lower, upper, size_bytes, alignment_bytes=problem.alignment_bytes)
