"""From what iterations do to a plan: watch, plan when two in a row were alike, correct by what came late."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

import numpy as np

from zico.swapping import schedule
from zico.swapping.schedule import EARLIER, NS, Observed, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from zico.swapping.schedule import Int64s
    from zico.tiers.rates import Rates

MARGIN_SHARE = 0.04
"""Of what the job may hold, that a plan leaves for what lies between tensors in their regions."""
_TENSE_SHARE = 0.01
"""Of an iteration's time: who waits longer for memory in a planned one gets a plan with a greater margin."""
_MARGIN_STEP = 0.02
MOST_MARGIN = 0.2
_FASTER_SHARE = 0.9
"""An iteration that takes less than this share of the time of the one that was planned for is a better model."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The memory of the iteration that ended last."""

    first_tick: int
    load_bytes: Int64s
    """What was alive at this tick and the ones behind it, to the end."""
    end_ns: int


class Learner:
    """Watches iterations; has the plan for the next one."""

    def __init__(
        self,
        ended: Callable[[], Ended | None],
        cap_bytes: Callable[[], int],
        rates: Callable[[], Rates],
        tell: Callable[[Observed, float], None] = lambda _seen, _margin: None,
    ) -> None:
        """Begin with nothing known.

        Args:
            ended: Says what the iteration that ended last did to memory, ``None`` where that is not known.
            cap_bytes: What the job may hold now.
            rates: Of the tier, now.
            tell: Told, in a thread, of an iteration that plans are made for, with the margin of the plan.
        """
        self._tell = tell
        self._ended = ended
        self._cap_bytes = cap_bytes
        self._rates = rates
        self._margin = MARGIN_SHARE
        self._plan: Plan | None = None
        self._cap_planned = 0
        self._told: Observed | None = None
        self._before: tuple[object, ...] = ()
        self._earlier_ns: dict[int, float] = {}
        self.planning: threading.Thread | None = None
        """What makes a plan at the moment, or has made the last one."""
        self.plans = 0
        self._start()

    def _start(self) -> None:
        self._codes: list[int] = []
        self._ticks: list[int] = []
        self._times: list[int] = []
        self._sizes: list[int] = []
        self._moved: list[tuple[int, int]] = []
        self._late: list[int] = []

    # -- watching -------------------------------------------------------------------------------------------------

    def note_size(self, size_bytes: int) -> None:
        """Note the size of the iteration's next tensor that becomes idle."""
        self._sizes.append(size_bytes)

    def note_event(self, code: int, tick: int, now_ns: int) -> None:
        """Note an event."""
        self._codes.append(code)
        self._ticks.append(tick)
        self._times.append(now_ns)

    def note_moved(self, tick: int, size_bytes: int) -> None:
        """Note what has left, or, below zero, come back."""
        self._moved.append((tick, size_bytes))

    def note_late(self, number: int) -> None:
        """Note a tensor that was not back when it was needed."""
        self._late.append(number)

    # -- planning -------------------------------------------------------------------------------------------------

    def skip(self) -> Plan | None:
        """Begin anew: what was noted is no iteration; returns the plan for the next one."""
        self._before = ()
        self._start()
        return self._plan

    def turn(self, waited_ns: int) -> Plan | None:
        """End an iteration; returns the plan for the next one, ``None`` as long as there is none.

        Args:
            waited_ns: For how long the job waited for memory in it.
        """
        signature = (tuple(self._codes), tuple(self._sizes))
        if self._cap_bytes() != self._cap_planned:
            self._plan = None  # it moves too much or too little
        is_known = bool(self._codes) and signature == self._before
        self._before = signature
        if is_known and (self.planning is None or not self.planning.is_alive()):
            self._reconsider(waited_ns)
        self._start()
        return self._plan

    def _reconsider(self, waited_ns: int) -> None:
        """Plan anew if what has happened is not what was planned for, or can be better."""
        plan = self._plan
        if plan is None or plan.observed.sequence != tuple(self._codes):
            self._earlier_ns = {}
            self._observe()
            return
        took_ns = self._times[-1] - self._times[0]
        planned_ns = int(plan.observed.t_ns[plan.observed.event_tick[-1]])
        is_tense = bool(plan.leaves) and waited_ns > _TENSE_SHARE * took_ns and self._margin < MOST_MARGIN
        if is_tense:
            self._margin += _MARGIN_STEP
        rates = self._rates()
        for number in self._late:
            step_ns = EARLIER * rates.in_s(plan.observed.size_bytes[number]) * NS
            self._earlier_ns[number] = self._earlier_ns.get(number, 0.0) + step_ns
        if took_ns < _FASTER_SHARE * planned_ns:
            self._observe()
        elif self._late or is_tense:
            self._make(plan.observed)

    def _observe(self) -> None:
        """Plan by the iteration that has ended."""
        ended = self._ended()
        if ended is None:
            return
        n = len(ended.load_bytes)
        away = np.zeros(n, np.int64)
        for tick, size_bytes in self._moved:
            if tick - ended.first_tick < n:
                away[max(tick - ended.first_tick, 0) :] += size_bytes
        ticks = np.clip(np.array(self._ticks) - ended.first_tick, 0, n - 1)
        times = np.maximum.accumulate(np.array([*self._times, ended.end_ns]))
        t_ns = np.interp(np.arange(n), [*ticks, n], times - times[0]).astype(np.int64)
        load = ended.load_bytes + np.maximum(away, 0)
        self._make(Observed(tuple(self._codes), tuple(self._sizes), tuple(ticks.tolist()), load, t_ns))

    def _make(self, seen: Observed) -> None:
        """Make a plan in a thread; the iteration after it is ready follows it."""
        cap_bytes = self._cap_bytes()
        limit_bytes = int(cap_bytes * (1 - self._margin))
        earlier_ns = dict(self._earlier_ns)

        def work() -> None:
            self._plan = schedule.plan(seen, limit_bytes, self._rates(), earlier_ns)
            self._cap_planned = cap_bytes
            self.plans += 1
            if seen is not self._told:
                self._told = seen
                self._tell(seen, self._margin)

        self.planning = threading.Thread(target=work, name="zico-swap-plan", daemon=True)
        self.planning.start()
