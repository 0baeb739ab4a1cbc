"""What leaves, and when it comes back: from one observed iteration to a plan for the next ones. Pure.

Theory of operation
    An iteration is a row of *events*: a tensor becomes idle, or an idle one is used. Between two
    events lie ticks, the heap's allocations and frees. From what was alive at each tick, had
    nothing been away, those tensors are taken that are idle over the highest peak, the longest
    first, until no tick is above the limit. They leave in the order in which they become idle, one
    after another, and come back in the order of their use, each so early that its copy ends before
    that, but not while its memory would break the limit::

        load   ___/~~~~~~~~~~~~~~~~~~~~~~~~~~|___      limit ...............
        a      saved |== leaves ==|........ away ........|== comes ==| used

Guarantees
    Whatever a plan says, nothing but time depends on it.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from zico.offload.tier_layout import Rates

    Int64s = NDArray[np.int64]

NEVER = -1
NS = 1e9
SAVED = 0
USED = 1
EARLIER = 0.05
"""Of its copy's time, by which a tensor that came late begins to come back earlier in the next iteration.

Source: Capuchin (Peng et al., ASPLOS 2020), section 5.3.
"""
LEAD_NS = 5_000_000
"""For two threads to wake up, one after another."""
LEAD_SHARE = 4.0
"""Of its copy's time, by which everything comes back earlier than it must."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """One iteration. Ticks count from its beginning."""

    sequence: tuple[int, ...]
    """What the events are: twice the tensor's number, plus ``SAVED`` or ``USED``; below 0 of an earlier iteration."""
    size_bytes: tuple[int, ...]
    """Of the tensors, by number."""
    event_tick: tuple[int, ...]
    load_bytes: Int64s
    """By tick: what was alive, plus what was away."""
    t_ns: Int64s
    """When each tick began, on a clock that stands still while the job waits."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What leaves and comes back, by the numbers of tensors and of events of an iteration."""

    observed: Observed
    leaves: frozenset[int]
    returns: Mapping[int, tuple[int, ...]]
    """Event -> the tensors that begin to come back then, in this order."""
    peak_bytes: int
    """What will be held at most, if copies keep their time."""

    @property
    def out_bytes(self) -> int:
        """Return the bytes that leave in an iteration."""
        return sum(self.observed.size_bytes[i] for i in self.leaves)


def plan(seen: Observed, limit_bytes: int, rates: Rates, earlier_ns: Mapping[int, float] | None = None) -> Plan:
    """Plan what leaves.

    Args:
        seen: The iteration that is going to be repeated.
        limit_bytes: What may be alive at any tick.
        rates: Of the tier.
        earlier_ns: By how much tensors come back earlier than they otherwise would, by number.
    """
    idle = _Idle(seen)
    freed = _choose(seen, idle, limit_bytes, rates)
    resident = seen.load_bytes.copy()
    for i, tick in freed.items():
        resident[tick : idle.used[i]] -= seen.size_bytes[i]
    wanted_ns = _wanted(seen, idle, freed, rates, earlier_ns or {})
    returns: dict[int, list[int]] = {}
    channel_ns = 0.0
    for i in reversed(wanted_ns):  # by their uses: who is used first has room first
        begins_ns = max(wanted_ns[i], channel_ns)
        tick = max(int(np.searchsorted(seen.t_ns, begins_ns)), freed[i])
        above = np.flatnonzero(resident[tick : idle.used[i]] + seen.size_bytes[i] > limit_bytes)
        if len(above):
            tick += int(above[-1]) + 1
        resident[tick : idle.used[i]] += seen.size_bytes[i]
        begins_ns = max(begins_ns, float(seen.t_ns[min(tick, len(seen.t_ns) - 1)]))
        channel_ns = begins_ns + rates.in_s(seen.size_bytes[i]) * NS
        event = min(bisect.bisect_right(seen.event_tick, tick), idle.used_event[i]) - 1
        returns.setdefault(max(event, idle.saved_event[i]), []).append(i)
    ordered = {event: tuple(those) for event, those in returns.items()}
    return Plan(seen, frozenset(freed), ordered, int(resident.max(initial=0)))


def _wanted(
    seen: Observed, idle: _Idle, freed: Mapping[int, int], rates: Rates, earlier_ns: Mapping[int, float]
) -> dict[int, float]:
    """Return when each would begin to come back if there were room, the one that is used last first."""
    wanted: dict[int, float] = {}
    channel_ns = float("inf")
    for i in sorted(freed, key=lambda i: -idle.used_event[i]):
        takes_ns = rates.in_s(seen.size_bytes[i]) * NS
        lead_ns = LEAD_NS + LEAD_SHARE * takes_ns + earlier_ns.get(i, 0.0)
        channel_ns = min(seen.t_ns[idle.used[i]] - lead_ns, channel_ns) - takes_ns
        wanted[i] = channel_ns
    return wanted


class _Idle:
    """The gaps of an iteration: from being saved to the first use."""

    def __init__(self, seen: Observed) -> None:
        n = len(seen.size_bytes)
        self.saved = [0] * n
        self.saved_event = [0] * n
        self.used = [NEVER] * n
        self.used_event = [0] * n
        for event, (code, tick) in enumerate(zip(seen.sequence, seen.event_tick, strict=True)):
            number, kind = divmod(code, 2)
            if number < 0:  # of an earlier iteration
                continue
            if kind == SAVED:
                self.saved[number] = tick
                self.saved_event[number] = event
            elif self.used[number] == NEVER:
                self.used[number] = tick
                self.used_event[number] = event


def _choose(seen: Observed, idle: _Idle, limit_bytes: int, rates: Rates) -> dict[int, int]:
    """Return the tensors that leave, each with the tick at which its memory is free."""
    gaps = {
        i: int(seen.t_ns[idle.used[i]] - seen.t_ns[idle.saved[i]])
        for i in range(len(seen.size_bytes))
        if idle.used[i] > idle.saved[i]
    }
    waiting = sorted(gaps, key=lambda i: -gaps[i])
    chosen: list[int] = []
    freed: dict[int, int] = {}
    load = seen.load_bytes
    while len(load) and load.max() > limit_bytes:
        peak = int(np.argmax(load))
        pick = next((i for i in waiting if idle.saved[i] < peak < idle.used[i]), None)
        if pick is None:
            break
        waiting.remove(pick)
        more = sorted([*chosen, pick], key=lambda i: idle.saved[i])
        more_freed = _leave(seen, idle, more, rates)
        lower = _without(seen, idle, more_freed)
        if lower[peak] < load[peak]:  # else it would leave too late, or keep others from leaving in time
            chosen, freed, load = more, more_freed, lower
    return freed


def _leave(seen: Observed, idle: _Idle, chosen: Sequence[int], rates: Rates) -> dict[int, int]:
    """Return when those that leave have left, if that is before they are needed."""
    ends: dict[int, float] = {}
    channel_ns = 0.0
    for i in chosen:
        channel_ns = max(float(seen.t_ns[idle.saved[i]]), channel_ns) + rates.out_s(seen.size_bytes[i]) * NS
        ends[i] = channel_ns
    ticks = np.searchsorted(seen.t_ns, np.fromiter(ends.values(), float, len(ends)))
    return {i: int(tick) for i, tick in zip(ends, ticks, strict=True) if tick < idle.used[i]}


def _without(seen: Observed, idle: _Idle, freed: Mapping[int, int]) -> Int64s:
    change = np.zeros(len(seen.load_bytes) + 1, np.int64)
    for i, tick in freed.items():
        change[tick] -= seen.size_bytes[i]
        change[idle.used[i]] += seen.size_bytes[i]
    return np.asarray(seen.load_bytes + np.cumsum(change[:-1]))
