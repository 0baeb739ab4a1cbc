"""What an iteration holds over its time, from a plan, a trace or points: as a job's own recording would have it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from zico.base.errors import ProblemError
from zico.scheduler.simulate import Load, LoadPhase
from zico.scheduler.state import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.planning.packing.problem import Problem

Shaped = TypeVar("Shaped", bound=Load | LoadPhase)
OneLoad = TypeVar("OneLoad", bound=Load)

_NS_A_SECOND = 1e9
MOST_BINS = 256
_PLAN_WORK = 2_000_000  # moves, each times the tensors: about two seconds, and the same answer on every machine
_EVENTS_A_BIN = 6  # log2: a job's progress is seen in 64 places of each bin, as real jobs' allocations show it


def held_in_regions(problem: Problem, region_bytes: int) -> NDArray[np.int64]:
    """Return the regions held at each tick, as a plan for regions lays the tensors out.

    Raises:
        ProblemError: There is no such plan; the message says why.
    """
    from zico.planning.packing.judge import held_regions
    from zico.planning.packing.problem import Plan
    from zico.planning.packing.regions import Options, Regions

    planner = Regions(region_bytes, Options(most_moves=_PLAN_WORK // max(len(problem), 1)))
    plan = planner.plan(problem, math.inf)
    if not isinstance(plan, Plan):
        raise ProblemError(f"{plan.reason.value}: {plan.detail}")
    return held_regions(problem, plan, region_bytes)


def profile_of(held: NDArray[np.int64], tick_ns: NDArray[np.int64]) -> Profile:
    """Return the profile of one iteration: bins of equally many ticks, each with the most regions held in it.

    Args:
        held: Regions at each tick, of which each is an allocation or a free.
        tick_ns: When each tick begins, rising, and when the last one ends.

    Raises:
        ProblemError: There are no ticks, their times do not fit them or fall, or a level is
            negative.
    """
    held, tick_ns = np.asarray(held, np.int64), np.asarray(tick_ns, np.int64)
    n = len(held)
    if n == 0 or len(tick_ns) != n + 1:
        raise ProblemError(f"{n} ticks with {len(tick_ns)} times: give one time for each tick, and the end of the last")
    if (np.diff(tick_ns) < 0).any() or (held < 0).any():
        raise ProblemError("a tick ends before it begins, or holds less than nothing: give rising times and counts")
    shift = max(0, int(n - 1).bit_length() - MOST_BINS.bit_length() + 1)
    first = np.arange(0, n, 1 << shift)
    times = tick_ns - tick_ns[0]
    return Profile(
        held=tuple(np.maximum.reduceat(held, first).tolist()),
        t_ns=tuple(times[first].tolist()),
        duration_ns=int(times[-1]),
        shift=shift,
        n_events=n,
    )


def profile_of_curve(t_ns: Sequence[int], held: Sequence[int], duration_ns: int) -> Profile:
    """Return the profile of a curve of steps; each step that fits begins where the curve says.

    Progress is seen within steps, too: a step is as many bins as its share of the time, since
    claims fall bin by bin. A curve of more steps than a profile has bins becomes the most in each
    of as many equal spans of time.

    Args:
        t_ns: When each step begins, from 0, rising.
        held: What it holds.
        duration_ns: When the last one ends.
    """
    begins, levels = np.asarray(t_ns, np.int64), np.asarray(held, np.int64)
    lengths = np.diff(begins, append=duration_ns)
    if len(begins) > MOST_BINS:
        bins = np.linspace(0, duration_ns, MOST_BINS + 1).astype(np.int64)[:-1]
        cuts = np.union1d(begins, bins)
        at_cuts = levels[np.searchsorted(begins, cuts, side="right") - 1]
        most = np.maximum.reduceat(at_cuts, np.searchsorted(cuts, bins))
    else:
        pieces = np.minimum(1 + (MOST_BINS - len(begins)) * lengths // duration_ns, lengths)
        bins = np.concatenate(
            [begin + np.arange(n) * length // n for begin, length, n in zip(begins, lengths, pieces, strict=True)]
        )
        most = np.repeat(levels, pieces)
    return Profile(
        held=tuple(most.tolist()),
        t_ns=tuple(bins.tolist()),
        duration_ns=duration_ns,
        shift=_EVENTS_A_BIN,
        n_events=len(bins) << _EVENTS_A_BIN,
    )


def profile_of_points(t_s: Sequence[float], held: Sequence[int], duration_ns: int, persistent: int) -> Profile:
    """Return the profile of points of a curve, of which two that share a nanosecond last one each.

    Args:
        t_s: When each begins to hold, in seconds from the iteration's begin; they do not fall.
        held: What it holds from then on.
        duration_ns: When the iteration ends; later points are left out.
        persistent: What is held before the first point, and at least at the end. Within an
            iteration a job may hold less: gradients go first.

    Raises:
        ProblemError: There are no points, or none within the iteration.
    """
    if not len(t_s) or duration_ns <= 0:
        raise ProblemError(f"{len(t_s)} points of a curve in {duration_ns} ns: give points, and a longer iteration")
    t_ns, levels = _apart([round(t * _NS_A_SECOND) for t in t_s]), list(held)
    if t_ns[0] > 0:
        t_ns, levels = [0, *t_ns], [persistent, *levels]
    n = sum(t < duration_ns for t in t_ns)
    levels[n - 1] = max(levels[n - 1], persistent)
    return profile_of_curve(t_ns[:n], levels[:n], duration_ns)


def _apart(t_ns: Sequence[int]) -> list[int]:
    """Return times of which no two are equal: what recorded jobs did within a nanosecond lasts one."""
    apart = [t_ns[0]]
    for t in t_ns[1:]:
        apart.append(max(t, apart[-1] + 1))
    return apart


def in_regions(loads: Sequence[OneLoad], region_bytes: int, *, whole: bool) -> tuple[OneLoad, ...]:
    """Return jobs that were in bytes in regions of this size.

    Args:
        loads: The jobs.
        region_bytes: The size.
        whole: A region is taken as a whole, as real ones are. Else what is begun does not count, so
            that what fits in bytes fits.
    """
    more = region_bytes - 1 if whole else 0
    counted: dict[int, Profile] = {}  # copies of a job share theirs

    def profile(of: Profile) -> Profile:
        if id(of) not in counted:
            held = tuple((held + more) // region_bytes for held in of.held)
            counted[id(of)] = dataclasses.replace(of, held=held)
        return counted[id(of)]

    def changed(one: Shaped) -> Shaped:
        persistent = (one.persistent + more) // region_bytes
        return dataclasses.replace(one, profile=profile(one.profile), persistent=persistent)

    return tuple(dataclasses.replace(changed(load), phases=tuple(map(changed, load.phases))) for load in loads)
