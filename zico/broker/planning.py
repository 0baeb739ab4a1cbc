"""Background planning: one plan at a time, in a thread beside the broker's work, and a rest after it.

Guarantees
    * Nobody waits for a plan: until there is one, and whenever the jobs are other ones, the policy
      decides without.
    * One plan is made at a time, and used until there is a newer one. A failure is logged and leaves
      none.
    * After a plan the planner rests (``RESTS``), unless jobs, budget or shares have changed.
    * While a job evaluates, or does anything but its usual iterations, the policy decides without.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING

from zico.scheduler.plan_search import alike, known_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.scheduler.plan_search import Known
    from zico.scheduler.state import Plan, Policy, PoolView

RESTS = 50
"""The planner rests this many times as long as its last plan took, so that jobs keep the processor."""
MOST_REST_S = 10.0  # the first plan of a process loads code as well

_log = logging.getLogger(__name__)


class Planning:
    """Keeps the last plan; makes a new one when the jobs, their profiles or the budget are others."""

    def __init__(self, policy: Policy, now_s: Callable[[], float] = time.monotonic) -> None:
        self._make = policy.plan
        self._now_s = now_s
        self._plan: Plan | None = None
        self._known: tuple[Known, ...] = ()
        self._budget = 0
        self._thread: threading.Thread | None = None
        self._rests_until_s = 0.0

    def plan_for(self, view: PoolView) -> Plan | None:
        """Return the plan to decide by now; begins to think in a thread if it is out of date."""
        if not all(job.in_main_phase for job in view.jobs):
            return None
        if self._make is None or self.is_busy:
            return self._plan
        known = known_of(view)
        if view.budget != self._budget or not alike(known, self._known):
            asked = view.budget != self._budget or _asked_of(known) != _asked_of(self._known)
            if not asked and self._now_s() < self._rests_until_s:
                return self._plan
            if {one.job for one in known} != {one.job for one in self._known}:
                self._plan = None
            self._budget, self._known = view.budget, known
            seen = dataclasses.replace(view, plan=self._plan)
            self._thread = threading.Thread(target=self._think, args=(self._make, seen), name="zico-plan", daemon=True)
            self._thread.start()
        return self._plan

    @property
    def is_busy(self) -> bool:
        """Tell whether a plan is being made."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, within_s: float) -> bool:
        """Wait until no plan is being made; false if that takes longer."""
        if self._thread is not None:
            self._thread.join(within_s)
        return not self.is_busy

    def _think(self, make: Callable[[PoolView], Plan | None], view: PoolView) -> None:
        began_s = self._now_s()
        try:
            self._plan = make(view)
        except Exception:  # noqa: BLE001 - the top of a thread, and jobs go on without a plan
            self._plan = None
            _log.exception("no plan could be made for %s", ", ".join(job.name for job in view.jobs))
        ended_s = self._now_s()
        self._rests_until_s = ended_s + min(MOST_REST_S, RESTS * (ended_s - began_s))


def _asked_of(known: tuple[Known, ...]) -> list[tuple[int, tuple[float, float, int]]]:
    return [(one.job, one.asked) for one in known]
