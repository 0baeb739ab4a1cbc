"""Has the policy think about the jobs that are there, beside the broker's own work.

Guarantees
    * Nobody waits for a plan: until there is one, and whenever the jobs are other ones, the policy decides without.
    * One thought at a time; what was thought is used until there is something newer.
    * After a thought it rests for fifty times as long as that took, ten seconds at most, unless jobs, budget or shares
      are others: times that vary must not have it think all the time, beside jobs that need the processor.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING

from zico.scheduler.planner import alike, known_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.scheduler.planner import Known
    from zico.scheduler.state import Plan, Policy, PoolView

_RESTS = 50
_MOST_REST_S = 10.0  # the first thought of a process loads code as well

_log = logging.getLogger(__name__)


class Planning:
    """Keeps the last plan; makes a new one when the jobs, their profiles, their slowdown or the budget are others."""

    def __init__(self, policy: Policy, now_s: Callable[[], float] = time.monotonic) -> None:
        """Plan nothing yet."""
        self._policy = policy
        self._now_s = now_s
        self._known: tuple[Known, ...] = ()
        self._budget = 0
        self._slowdown: tuple[float, ...] = ()
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._rests_until_s = 0.0

    def plan_for(self, view: PoolView) -> Plan | None:
        """Return the plan to decide by now; begins to think in a thread if it is out of date."""
        thinks = self._thread is not None and self._thread.is_alive()
        if self._policy.plan is None or thinks:
            return self._plan
        known = known_of(view)
        same = view.budget == self._budget and view.slowdown == self._slowdown  # which changes seldom, and noticeably
        if not same or not alike(known, self._known):
            asked = view.budget != self._budget or _asked_of(known) != _asked_of(self._known)
            if not asked and self._now_s() < self._rests_until_s:
                return self._plan
            if {one.job for one in known} != {one.job for one in self._known}:
                self._plan = None
            self._budget, self._slowdown, self._known = view.budget, view.slowdown, known
            self._thread = threading.Thread(
                target=self._think,
                args=(self._policy.plan, dataclasses.replace(view, plan=self._plan)),
                name="zico-plan",
                daemon=True,
            )
            self._thread.start()
        return self._plan

    def wait(self, within_s: float) -> bool:
        """Wait until nothing is being thought of; false if that takes longer."""
        if self._thread is not None:
            self._thread.join(within_s)
        return self._thread is None or not self._thread.is_alive()

    def _think(self, make: Callable[[PoolView], Plan | None], view: PoolView) -> None:
        began_s = self._now_s()
        try:
            self._plan = make(view)
        except Exception:  # noqa: BLE001 - the top of a thread, and jobs go on without a plan
            self._plan = None
            _log.exception("no plan could be made for %s", ", ".join(job.name for job in view.jobs))
        ended_s = self._now_s()
        self._rests_until_s = ended_s + min(_MOST_REST_S, _RESTS * (ended_s - began_s))


def _asked_of(known: tuple[Known, ...]) -> list[tuple[int, tuple[float, float, int]]]:
    """Return who is there and what was asked for each."""
    return [(one.job, one.asked) for one in known]
