"""What each job is going to hold, as staircases over time: from profiles, from where the jobs are, from reservations.

Theory of operation
    A staircase holds ``level[i]`` regions from ``t_ns[i]`` (0 is now) until ``t_ns[i + 1]``, the last one for ever.
    A job in an iteration goes on from its own progress and ends at its residual; everybody else stays level::

        profile         3 3 7 7 7 5 4      in bins
        curve           3 . 7 . . 5 4      runs of equal levels
        in an iteration       7 . 5 4 2    from the fourth bin on; 2, its persistent regions, after the end
        at a boundary   2 2 3 . 7 . . 5 4 2    if it starts two bins from now

Guarantees
    * Pure: nothing here reads a clock. The memory of converted profiles is invisible but for speed.
    * A job waiting in an allocation is taken to go on now.

Known limitations
    * Where a job is within a bin is interpolated from its progress; a job that computes without allocating for longer
      than its profile says is expected to go on at any moment, until it has taken several times as long as an
      iteration.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zico.compiled import compiled
from zico.scheduler.state import JobView, Phase, Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

_GUARD_BINS = 1  # a claim falls a bin later than the profile says: threads reorder allocations a little
_END_SLACK_EVENTS = 8  # as the table's claims have it: an iteration that ends later than this is another one
_END_SLACK_SHIFT = 4
_TICK_SHIFT = 7  # a curve has 128 to 256 bins
_MOST_CURVES = 512
_STILL_ITERATIONS = 4
_STILL_NS = 1_000_000_000


class Staircase(NamedTuple):
    """Regions over time from now on."""

    t_ns: Int64s
    """Rising, from 0."""
    level: Int64s
    """From ``t_ns[i]`` on; the last one for ever."""


@dataclasses.dataclass(frozen=True, eq=False)
class Curve:
    """A profile, converted once: what a whole iteration holds, and what it may still come to hold."""

    steps: Staircase
    """From the start of the iteration; without what follows its end."""
    claims: tuple[int, ...]
    """Most regions held from each bin on."""
    peak: int
    duration_ns: int
    tick_ns: int
    """No prediction is finer than this: the width of a bin, were all bins equal."""


_curves: dict[int, tuple[Profile, Curve]] = {}


def curve_of(profile: Profile) -> Curve:
    """Return the profile's curve, converted at the first sight of that very object."""
    known = _curves.get(id(profile))
    if known is not None and known[0] is profile:
        return known[1]
    if len(_curves) >= _MOST_CURVES:
        _curves.clear()
    curve = _converted(profile)
    _curves[id(profile)] = (profile, curve)
    return curve


def _converted(profile: Profile) -> Curve:
    """Join equal neighbours, and fold the levels from the end."""
    held = np.asarray(profile.held, np.int64)
    t_ns = np.asarray(profile.t_ns, np.int64)
    first = np.flatnonzero(np.diff(held, prepend=held[0] - 1))
    return Curve(
        steps=Staircase(t_ns[first], held[first]),
        claims=tuple(np.maximum.accumulate(held[::-1])[::-1].tolist()),
        peak=int(held.max()),
        duration_ns=profile.duration_ns,
        tick_ns=max(1, profile.duration_ns >> _TICK_SHIFT),
    )


def claim(job: JobView) -> int:
    """Return the most regions that the job may still come to hold in its iteration, its next one at a boundary."""
    if job.profile is None:
        return job.held
    curve = curve_of(job.profile)
    slack = max(_END_SLACK_EVENTS, job.profile.n_events >> _END_SLACK_SHIFT)
    if job.phase is Phase.BOUNDARY or job.progress > job.profile.n_events + slack:
        return max(job.held, curve.peak)
    step = (job.progress >> job.profile.shift) - _GUARD_BINS
    return max(job.held, curve.claims[max(0, min(step, len(curve.claims) - 1))])


def position_ns(job: JobView, profile: Profile, now_ns: int) -> int:
    """Return how far into its profile's time a job has come, at most the whole of it."""
    last = len(profile.held) - 1
    if last == 0:  # says nothing of the way from progress to time
        return max(0, min(now_ns - job.started_ns, profile.duration_ns))
    step = min(job.progress >> profile.shift, last)
    begin = step << profile.shift
    events = (profile.n_events - begin) if step == last else (1 << profile.shift)
    begin_ns = profile.t_ns[step]
    end_ns = profile.duration_ns if step == last else profile.t_ns[step + 1]
    passed = min(max(events, 1), job.progress - begin)
    return begin_ns + (end_ns - begin_ns) * passed // max(events, 1)


def stands_still(job: JobView, profile: Profile, now_ns: int) -> bool:
    """Tell whether the job has been in its iteration for so long that it does something else: nobody waits for that.

    It may be stopped, at a prompt, or done with training. Its progress does not say so, since that does not move.
    """
    return job.need == 0 and now_ns - job.started_ns > _STILL_ITERATIONS * profile.duration_ns + _STILL_NS


def remaining(job: JobView, now_ns: int) -> Staircase:
    """Return what the job holds from now on if it starts nothing new.

    A job that has overrun its profile is expected to take as long again as it has overrun, so that whoever waits for
    it asks ever less often.
    """
    if job.phase is not Phase.RUNNING or job.profile is None or stands_still(job, job.profile, now_ns):
        return level(job.held)
    curve = curve_of(job.profile)
    at_ns = position_ns(job, job.profile, now_ns)
    if at_ns >= curve.duration_ns:
        overrun_ns = max(curve.tick_ns, now_ns - job.started_ns - curve.duration_ns)
        return Staircase(np.array((0, overrun_ns), np.int64), np.array((job.held, job.persistent), np.int64))
    return Staircase(*_tail(*curve.steps, curve.duration_ns, at_ns, job.held, job.persistent))


def planned(job: JobView, profile: Profile, delay_ns: int) -> Staircase:
    """Return what a job at its boundary holds from now on if it starts after ``delay_ns``."""
    curve = curve_of(profile)
    return Staircase(*_delayed(*curve.steps, curve.duration_ns, delay_ns, job.held))


def level(regions: int) -> Staircase:
    """Return the staircase of somebody who holds so much without end."""
    return Staircase(np.zeros(1, np.int64), np.full(1, regions, np.int64))


def total(staircases: Sequence[Staircase]) -> Staircase:
    """Return the sum; nothing if there are none. Pairs, then pairs of pairs: n log(jobs) for n steps in all."""
    if not staircases:
        return level(0)
    sums = list(staircases)
    while len(sums) > 1:
        odd = sums[len(sums) & ~1 :]
        sums = [Staircase(*_sum(*a, *b)) for a, b in zip(sums[::2], sums[1::2], strict=False)] + odd
    return sums[0]


def level_at(staircase: Staircase, t_ns: int) -> int:
    """Return the regions held at that time from now."""
    return int(staircase.level[np.searchsorted(staircase.t_ns, t_ns, side="right") - 1])


@compiled
def _tail(
    t_ns: Int64s, levels: Int64s, duration_ns: int, at_ns: int, held: int, residual: int
) -> tuple[Int64s, Int64s]:
    """Cut the curve at ``at_ns``, begin with at least what is held, end with the residual."""
    first = np.searchsorted(t_ns, at_ns, side="right") - 1
    n = len(t_ns) - first
    out_ns = np.empty(n + 1, np.int64)
    out = np.empty(n + 1, np.int64)
    for i in range(n):
        out_ns[i] = max(0, t_ns[first + i] - at_ns)
        out[i] = levels[first + i]
    out[0] = max(held, out[0])
    out_ns[n] = duration_ns - at_ns
    out[n] = residual
    return out_ns, out


@compiled
def _delayed(t_ns: Int64s, levels: Int64s, duration_ns: int, delay_ns: int, held: int) -> tuple[Int64s, Int64s]:
    """Put what is held at the boundary before the curve and behind it."""
    lead = 1 if delay_ns > 0 else 0
    n = len(t_ns)
    out_ns = np.zeros(lead + n + 1, np.int64)
    out = np.full(lead + n + 1, held, np.int64)
    for i in range(n):
        out_ns[lead + i] = delay_ns + t_ns[i]
        out[lead + i] = levels[i]
    out_ns[lead + n] = delay_ns + duration_ns
    return out_ns, out


@compiled
def _sum(a_ns: Int64s, a: Int64s, b_ns: Int64s, b: Int64s) -> tuple[Int64s, Int64s]:
    """Merge two staircases; steps that change nothing are left out."""
    out_ns = np.zeros(len(a) + len(b), np.int64)
    out = np.zeros(len(a) + len(b), np.int64)
    out[0] = a[0] + b[0]
    n = 1
    i = j = 0
    while i + 1 < len(a) or j + 1 < len(b):
        if j + 1 == len(b) or (i + 1 < len(a) and a_ns[i + 1] <= b_ns[j + 1]):
            i += 1
            t_ns = a_ns[i]
        else:
            j += 1
            t_ns = b_ns[j]
        if out_ns[n - 1] == t_ns:
            out[n - 1] = a[i] + b[j]
        elif out[n - 1] != a[i] + b[j]:
            out_ns[n] = t_ns
            out[n] = a[i] + b[j]
            n += 1
    return out_ns[:n], out[:n]
