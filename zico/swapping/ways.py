"""How long an iteration would take with how much less: what a job tells a broker that chooses for it.

The plan that would be made for a limit is played through on the observed iteration::

    tick        1   2   3   4   5   6        what is alive must fit, less what has left: else wait for copies out
    out         [a][b ]                      one after the other, from when each became idle
    in                      [b ][a]          at the plan's events, from when it has left; a use waits for its end
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zico.scheduler.state import LESS_SHARES
from zico.swapping.schedule import NS, SAVED, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.swapping.schedule import Observed, Plan
    from zico.tiers.rates import Rates


@dataclasses.dataclass(frozen=True)
class Way:
    """An iteration with less."""

    limit_bytes: int
    duration_ns: int


def ways(seen: Observed, rates: Rates, margin: float, shares: Sequence[float] = LESS_SHARES) -> list[Way]:
    """Return how long the iteration would take with shares of its peak, as far as it can do with them.

    Args:
        seen: The iteration.
        rates: Of the tier.
        margin: Of a limit, that plans leave for what lies between tensors in their regions.
        shares: Of the peak, the largest first.
    """
    peak_bytes = int(seen.load_bytes.max(initial=0))
    found: list[Way] = []
    for share in shares:
        limit_bytes = int(share * peak_bytes)
        planned = plan(seen, int(limit_bytes * (1 - margin)), rates)
        duration_ns = played(planned, limit_bytes, rates)
        if duration_ns is None:
            break
        found.append(Way(limit_bytes, duration_ns))
    return found


def played(planned: Plan, limit_bytes: int, rates: Rates) -> int | None:
    """Return how long an iteration takes by a plan within a limit; ``None`` if it does not fit."""
    play = _Play(planned, rates)
    seen = planned.observed
    event = 0
    for tick, load in enumerate(seen.load_bytes.tolist()):
        play.now_ns = int(seen.t_ns[tick]) + play.late_ns
        if not play.fit(load, limit_bytes):  # what was allocated at the tick is idle after it at the earliest
            return None
        while event < len(seen.sequence) and seen.event_tick[event] <= tick:
            play.pass_event(event)
            event += 1
        if not play.fit(load, limit_bytes):
            return None
    return int(seen.t_ns[-1]) + play.late_ns


class _Play:
    """The clock, the two channels, and what is away."""

    def __init__(self, planned: Plan, rates: Rates) -> None:
        self.now_ns = 0
        self.late_ns = 0
        self._plan, self._rates = planned, rates
        self._out_ns = self._in_ns = 0
        self._left_ns: dict[int, int] = {}
        self._leaving: list[int] = []  # in the order in which they end
        self._back_ns: dict[int, int] = {}
        self._away_bytes = 0

    def pass_event(self, event: int) -> None:
        """Let what is saved leave, have what is used here, and ask for what the plan wants back."""
        seen = self._plan.observed
        number, kind = divmod(seen.sequence[event], 2)
        if kind == SAVED and number in self._plan.leaves:
            self._out_ns = max(self._out_ns, self.now_ns) + round(self._rates.out_s(seen.size_bytes[number]) * NS)
            self._left_ns[number] = self._out_ns
            self._leaving.append(number)
        elif kind != SAVED and number in self._left_ns:
            if number not in self._back_ns:
                self._fetch(number)
            self._wait_until(self._back_ns[number])
            del self._left_ns[number]
        for other in self._plan.returns.get(event, ()):
            if other in self._left_ns and other not in self._back_ns:
                self._fetch(other)

    def fit(self, load_bytes: int, limit_bytes: int) -> bool:
        """Wait until what is alive and here fits; false if it never does."""
        self._note_left()
        while load_bytes - self._away_bytes > limit_bytes:
            if not self._leaving:
                return False
            self._wait_until(self._left_ns[self._leaving[0]])
            self._note_left()
        return True

    def _fetch(self, number: int) -> None:
        """Bring something back; what has not left yet is simply kept."""
        size_bytes = self._plan.observed.size_bytes[number]
        if number in self._leaving:
            self._leaving.remove(number)
            self._back_ns[number] = self.now_ns
            return
        self._away_bytes -= size_bytes
        self._in_ns = max(self._in_ns, self.now_ns) + round(self._rates.in_s(size_bytes) * NS)
        self._back_ns[number] = self._in_ns

    def _note_left(self) -> None:
        while self._leaving and self._left_ns[self._leaving[0]] <= self.now_ns:
            self._away_bytes += self._plan.observed.size_bytes[self._leaving.pop(0)]

    def _wait_until(self, t_ns: int) -> None:
        waited_ns = max(0, t_ns - self.now_ns)
        self.late_ns += waited_ns
        self.now_ns += waited_ns
