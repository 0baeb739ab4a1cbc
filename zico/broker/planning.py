"""Has the policy think about the jobs that are there, beside the broker's own work.

Guarantees
    * Nobody waits for a plan: until there is one, and whenever the jobs are other ones, the policy decides without.
    * One thought at a time; what was thought is used until there is something newer.
    * After a thought it rests (``thinking.RESTS``), unless jobs, budget or shares are others.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from zico.broker.thinking import Thinking
from zico.scheduler.planner import alike, known_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.scheduler.planner import Known
    from zico.scheduler.state import Plan, Policy, PoolView


class Planning:
    """Keeps the last plan; makes a new one when the jobs, their profiles, their slowdown or the budget are others."""

    def __init__(self, policy: Policy, now_s: Callable[[], float] = time.monotonic) -> None:
        """Plan nothing yet."""
        self._policy = policy
        self._known: tuple[Known, ...] = ()
        self._budget = 0
        self._slowdown: tuple[float, ...] = ()
        self._thinking: Thinking[Plan] = Thinking("zico-plan", now_s)

    def plan_for(self, view: PoolView) -> Plan | None:
        """Return the plan to decide by now; begins to think in a thread if it is out of date."""
        make = self._policy.plan
        if make is None or self._thinking.is_busy:
            return self._thinking.answer
        known = known_of(view)
        same = view.budget == self._budget and view.slowdown == self._slowdown  # which changes seldom, and noticeably
        if not same or not alike(known, self._known):
            asked = view.budget != self._budget or _asked_of(known) != _asked_of(self._known)
            if not asked and self._thinking.rests:
                return self._thinking.answer
            if {one.job for one in known} != {one.job for one in self._known}:
                self._thinking.answer = None
            self._budget, self._slowdown, self._known = view.budget, view.slowdown, known
            seen = dataclasses.replace(view, plan=self._thinking.answer)
            names = ", ".join(job.name for job in view.jobs)
            self._thinking.begin(lambda: make(seen), f"no plan could be made for {names}")
        return self._thinking.answer

    def wait(self, within_s: float) -> bool:
        """Wait until nothing is being thought of; false if that takes longer."""
        return self._thinking.wait(within_s)


def _asked_of(known: tuple[Known, ...]) -> list[tuple[int, tuple[float, float, int]]]:
    """Return who is there and what was asked for each."""
    return [(one.job, one.asked) for one in known]
