"""Background planning: one plan at a time, in a thread beside the broker's work, and a rest after it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from zico.scheduler.plan_search import alike, known_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.scheduler.plan_search import Known
    from zico.scheduler.state import Plan, Policy, PoolView

RESTS = 50
"""The planner rests this many times as long as its last plan took, so that jobs keep the processor."""
MOST_REST_S = 10.0  # the first plan of a process loads code as well

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


class BackgroundPlanning(Generic[Answer]):
    """Make plans in a thread and keep the last one; a failure is logged and leaves none."""

    def __init__(self, name: str, now_s: Callable[[], float] = time.monotonic) -> None:
        """Know nothing; ``name`` is the thread's."""
        self.answer: Answer | None = None
        self._name = name
        self._now_s = now_s
        self._thread: threading.Thread | None = None
        self._rests_until_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Tell whether a plan is being made."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def rests(self) -> bool:
        """Tell whether the last plan is too recent to make another without need."""
        return self._now_s() < self._rests_until_s

    def begin(self, think: Callable[[], Answer | None], about: str) -> None:
        """Make a plan in a thread; ``about`` is what the log says if that fails."""
        self._thread = threading.Thread(target=self._think, args=(think, about), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, within_s: float) -> bool:
        """Wait until no plan is being made; false if that takes longer."""
        if self._thread is not None:
            self._thread.join(within_s)
        return not self.is_busy

    def _think(self, think: Callable[[], Answer | None], about: str) -> None:
        began_s = self._now_s()
        try:
            self.answer = think()
        except Exception:  # noqa: BLE001 - the top of a thread, and jobs go on without an answer
            self.answer = None
            _log.exception("%s", about)
        ended_s = self._now_s()
        self._rests_until_s = ended_s + min(MOST_REST_S, RESTS * (ended_s - began_s))


# -- plans of the policy for the jobs that are there -----------------------------------------------
#
# Guarantees
#     * Nobody waits for a plan: until there is one, and whenever the jobs are other ones, the
#       policy decides without.
#     * One plan is made at a time, and used until there is a newer one.
#     * After a plan the planner rests (``RESTS``), unless jobs, budget or shares have changed.
#     * While a job evaluates, or does anything but its usual iterations, the policy decides without.


class Planning:
    """Keeps the last plan; makes a new one when the jobs, their profiles, their slowdown or the budget are others."""

    def __init__(self, policy: Policy, now_s: Callable[[], float] = time.monotonic) -> None:
        """Plan nothing yet."""
        self._policy = policy
        self._known: tuple[Known, ...] = ()
        self._budget = 0
        self._slowdown: tuple[float, ...] = ()
        self._background_planning: BackgroundPlanning[Plan] = BackgroundPlanning("zico-plan", now_s)

    def plan_for(self, view: PoolView) -> Plan | None:
        """Return the plan to decide by now; begins to think in a thread if it is out of date."""
        make = self._policy.plan
        if not all(job.in_main_phase for job in view.jobs):
            return None
        if make is None or self._background_planning.is_busy:
            return self._background_planning.answer
        known = known_of(view)
        same = view.budget == self._budget and view.slowdown == self._slowdown  # which changes seldom, and noticeably
        if not same or not alike(known, self._known):
            asked = view.budget != self._budget or _asked_of(known) != _asked_of(self._known)
            if not asked and self._background_planning.rests:
                return self._background_planning.answer
            if {one.job for one in known} != {one.job for one in self._known}:
                self._background_planning.answer = None
            self._budget, self._slowdown, self._known = view.budget, view.slowdown, known
            seen = dataclasses.replace(view, plan=self._background_planning.answer)
            names = ", ".join(job.name for job in view.jobs)
            self._background_planning.begin(lambda: make(seen), f"no plan could be made for {names}")
        return self._background_planning.answer

    def wait(self, within_s: float) -> bool:
        """Wait until no plan is being made; false if that takes longer."""
        return self._background_planning.wait(within_s)


def _asked_of(known: tuple[Known, ...]) -> list[tuple[int, tuple[float, float, int]]]:
    """Return who is there and what was asked for each."""
    return [(one.job, one.asked) for one in known]
