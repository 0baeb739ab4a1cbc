"""What leaves, and when it comes back: from one observed iteration to a plan for the next ones. Pure.

Theory of operation
    An iteration is a row of *events*: a tensor becomes idle, or an idle one is used. Between two
    events lie ticks, the heap's allocations and frees. What was alive at each tick, had nothing
    been away, is gone through. Those tensors are taken that are idle over the highest peak, the
    longest first, until no tick is above the limit. Or a planner of ``zico.planning.saving``
    chooses them: for it the events are the operations. They leave in the order in which they become
    idle, one after another. They come back in the order of their use, each so early that its copy
    ends before that. None comes while its memory would break the limit::

        load   ___/~~~~~~~~~~~~~~~~~~~~~~~~~~|___      limit ...............
        a      saved |== leaves ==|........ away ........|== comes ==| used

Guarantees
    Whatever a plan says, nothing but time depends on it.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.base import background
from zico.base.units import format_bytes
from zico.planning.packing.problem import NoPlan, Reason
from zico.planning.saving import clock
from zico.planning.saving.registry import LONGEST, save_planner
from zico.swap.observed import NS, Idleness, problem_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from zico.planning.saving.mixed import SavePlan, SavePlanner
    from zico.planning.saving.problem import SwapProblem
    from zico.swap.observed import Observed, Seen
    from zico.tiers.layout import Rates

    Int64s = NDArray[np.int64]

EARLIER = 0.05
"""Of its copy's time, by which a tensor that came late begins to come back earlier in the next iteration.

Source: Capuchin (Peng et al., ASPLOS 2020), section 5.3.
"""
LEAD_NS = 5_000_000
"""For two threads to wake up, one after another."""
LEAD_SHARE = 4.0
"""Of its copy's time, by which everything comes back earlier than it must."""


PLANNING_S = 5.0
"""For a planner that goes on as long as it may."""
_HIGHER = 1.05
"""Times the limit, for which a planner is asked again that found no plan: moving something is better than nothing."""
MOST_HIGHER = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """What leaves and comes back, by the numbers of tensors and of events of an iteration."""

    observed: Observed
    leaves: frozenset[int]
    returns: Mapping[int, tuple[int, ...]]
    """Event -> the tensors that begin to come back then, in this order."""
    peak_bytes: int
    """What will be held at most, if copies keep their time."""
    drops: frozenset[int] = frozenset()
    """What goes without a copy, and is made again when it is used."""

    @property
    def out_bytes(self) -> int:
        """Return the bytes that leave in an iteration."""
        return sum(self.observed.size_bytes[i] for i in self.leaves)


class Chosen(NamedTuple):
    """What a planner has chosen, by number."""

    leaves: frozenset[int]
    drops: frozenset[int]
    note: str = ""
    """Why it is for more than the job may hold; empty: it is not."""


def choose(seen: Observed, limit_bytes: int, rates: Rates, planner: str) -> Chosen | NoPlan | None:
    """Return what leaves and what is dropped by a planner, or why it chooses nothing; ``None``: as by ``LONGEST``.

    Args:
        seen: The iteration that is going to be repeated.
        limit_bytes: What may be alive at any tick. Where a planner finds no plan, it is asked for a
            higher one.
        rates: Of the tier.
        planner: One of ``JOB_PLANNERS`` of ``zico.planning.saving.registry``.
    """
    if planner == LONGEST:
        return None
    with clock.ended_by(background.is_ending):  # the interpreter's end waits for the thread that asks
        return _chosen_by(save_planner(planner), seen, limit_bytes, rates)


def load(planner: str) -> None:
    """Load a planner's code, ahead of the thread that asks it: a fork then meets no load that is half done.

    Raises:
        ConfigError: There is no such planner.
    """
    if planner != LONGEST:
        save_planner(planner)


def plan(
    seen: Observed,
    limit_bytes: int,
    rates: Rates,
    earlier_ns: Mapping[int, float] | None = None,
    chosen: Chosen | None = None,
) -> Plan:
    """Plan what leaves and when it returns.

    Args:
        seen: The iteration that is going to be repeated.
        limit_bytes: What may be alive at any tick.
        rates: Of the tier.
        earlier_ns: By how much tensors come back earlier than they otherwise would, by number.
        chosen: What leaves; ``None``: what is idle longest over the highest peak.
    """
    idle = Idleness(seen)
    if chosen is None:
        freed = _choose(seen, idle, limit_bytes, rates)
    else:
        idle.use_for(seen, chosen.drops)
        freed = _leave(seen, idle, sorted(chosen.leaves, key=lambda i: idle.saved[i]), rates)
    dropped = frozenset() if chosen is None else chosen.drops
    resident = seen.load_bytes.copy()
    for i, tick in freed.items():
        resident[tick : idle.used[i]] -= seen.size_bytes[i]
    for i in dropped:
        resident[seen.event_tick[idle.saved_event[i] + 1] : idle.used[i]] -= seen.size_bytes[i]
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
    return Plan(seen, frozenset(freed), ordered, int(resident.max(initial=0)), dropped)


def _wanted(
    seen: Observed, idle: Idleness, freed: Mapping[int, int], rates: Rates, earlier_ns: Mapping[int, float]
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


def _choose(seen: Observed, idle: Idleness, limit_bytes: int, rates: Rates) -> dict[int, int]:
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


def _leave(seen: Observed, idle: Idleness, chosen: Sequence[int], rates: Rates) -> dict[int, int]:
    """Return when those that leave have left, if that is before they are needed."""
    ends: dict[int, float] = {}
    channel_ns = 0.0
    for i in chosen:
        channel_ns = max(float(seen.t_ns[idle.saved[i]]), channel_ns) + rates.out_s(seen.size_bytes[i]) * NS
        ends[i] = channel_ns
    ticks = np.searchsorted(seen.t_ns, np.fromiter(ends.values(), float, len(ends)))
    return {i: int(tick) for i, tick in zip(ends, ticks, strict=True) if tick < idle.used[i]}


def _without(seen: Observed, idle: Idleness, freed: Mapping[int, int]) -> Int64s:
    change = np.zeros(len(seen.load_bytes) + 1, np.int64)
    for i, tick in freed.items():
        change[tick] -= seen.size_bytes[i]
        change[idle.used[i]] += seen.size_bytes[i]
    return np.asarray(seen.load_bytes + np.cumsum(change[:-1]))


def _chosen_by(planner: SavePlanner, seen: Observed, limit_bytes: int, rates: Rates) -> Chosen | NoPlan:
    """Return what leaves and what is dropped, for the lowest limit below the peak that a planner finds a plan for."""
    found = problem_of(seen, rates)
    peak_bytes, least_bytes = found.problem.peak_bytes, found.problem.least_bytes
    limits = [max(limit_bytes, least_bytes, 1)]
    # Above the peak it would find that nothing has to leave.
    while len(limits) < MOST_HIGHER and (higher := int(limits[-1] * _HIGHER) + 1) < peak_bytes:
        limits.append(higher)
    why = [f"an operation needs {format_bytes(least_bytes)} at once"] if least_bytes > limit_bytes else []
    for limit in limits:
        if why and background.is_ending():
            break
        problem = dataclasses.replace(found.problem, limit_bytes=limit)
        answer = planner.plan(problem, found.graph, PLANNING_S)
        if not isinstance(answer, NoPlan):
            for_more = f"; its plan for {format_bytes(limit)} is used"
            return _chosen(answer, problem, found, _unplanned(why, limit_bytes) + for_more if why else "")
        why.append(answer.detail)
    return NoPlan(Reason.NOT_FOUND, planner.name, 0.0, _unplanned(why, limit_bytes, limits[-1]))


def _unplanned(why: Sequence[str], *limits: int) -> str:
    """Return that there is no plan within these limits, and the first reason."""
    return f"found no plan for {' to '.join(dict.fromkeys(map(format_bytes, limits)))} ({why[0]})"


def _chosen(answer: SavePlan, problem: SwapProblem, found: Seen, note: str) -> Chosen:
    moved = answer.moved(problem, found.graph).tolist()
    runs = np.bincount(np.array(answer.order, np.int64), minlength=len(found.graph))
    dropped = frozenset(found.numbers[r] for r, maker in enumerate(found.graph.maker) if runs[maker] > 1)
    return Chosen(frozenset(found.numbers[i] for i in moved) - dropped, dropped, note)
