"""A profile from a plan's or a trace's curve of regions, as the job's own recording would have made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.errors import ProblemError
from zico.scheduler.state import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from zico.planners.problem import Problem

MOST_BINS = 256
_PLAN_S = 2.0
_EVENTS_A_BIN = 6  # log2: a job's progress is seen in 64 places of each bin, as real jobs' allocations show it


def held_in_regions(problem: Problem, region_bytes: int) -> NDArray[np.int64]:
    """Return the regions held at each tick, as a plan for regions lays the tensors out.

    Raises:
        ProblemError: There is no such plan; the message says why.
    """
    from zico.planners.compare import warm
    from zico.planners.judge import held_regions
    from zico.planners.plan import Plan
    from zico.planners.regions import Regions

    planner = Regions(region_bytes)
    warm(planner)
    plan = planner.plan(problem, _PLAN_S)
    if not isinstance(plan, Plan):
        raise ProblemError(f"{plan.reason.value}: {plan.detail}")
    return held_regions(problem, plan, region_bytes)


def profile_of(held: NDArray[np.int64], tick_ns: NDArray[np.int64]) -> Profile:
    """Return the profile of one iteration: bins of equally many ticks, each with the most regions held in it.

    Args:
        held: Regions at each tick, of which each is an allocation or a free.
        tick_ns: When each tick begins, rising, and when the last one ends.

    Raises:
        ProblemError: There are no ticks, their times do not fit them or fall, or a level is negative.
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

    Progress is seen within steps, too: a step is as many bins as its share of the time, since claims fall bin by bin.
    A curve of more steps than a profile has bins becomes the most in each of as many equal spans of time.

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
