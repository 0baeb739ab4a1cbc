"""By what factor jobs that work together are slower than alone, measured from what the broker sees anyway.

Theory of operation
    An iteration is cut into parts of equal progress. For each part of each job it is summed up how
    long the job was in it and how often it came through, apart for each number of jobs that worked
    meanwhile, waits left out::

        part of a job          1st           2nd          alone 10 and 4 ms; two jobs are 1.4 times slower
        one job works     30 ms in 3    8 ms in 2
        two work          28 ms in 2    5.6 ms in 1

    Each time is passes times the part's time alone times the slowdown. Such factors are found by
    fitting parts and slowdowns by turns until the sums of both are right (iterative proportional
    fitting). So a part is compared with itself, and it does not matter how much of a profile was
    learned in company: its times are replaced by those alone.

Guarantees
    * The slowdown of k jobs is 1, and profiles are as they were learned, until parts were come
      through so often with k jobs and with fewer that the slowdown's standard error, by how much
      iterations vary, is 5 %.
    * What is told changes by more than 5 % or not at all, and seldom: what is planned by it stays
      good for a while.

Known limitations
    * One factor for so many jobs, whoever they are: a mean over those that are there.
    * Jobs that always meet at the same parts show nothing; what was found before stays.
    * A job that has no profile, such as one that never iterates, may work or not: while it is there
      nothing is learned.
    * Progress is the processor's. Where a device runs behind by more than a part, the ends of
      company are blurred.
    * Where two iterations end between two looks they do not count.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from zico.scheduler.state import JobView, PoolView, Profile

    Floats = npt.NDArray[np.float64]

PARTS = 8
MOST_JOBS = 16
"""With more, nothing is measured: nobody plans for so many."""
NOTICEABLE = 0.05
"""Less of a change is none."""
AGAIN_NS = 10_000_000_000
"""Between two changes of what was measured: a plan takes tenths of a second to make."""
_LOOK_NS = 250_000  # between two looks for each job: looking on takes the broker some 40 us each
_FIT_NS = 1_000_000_000
_ROUNDS = 40
_ERROR = 0.05  # of a slowdown, standard, from which on it is believed
_FEWEST = 1.0  # iterations compared with as many in other company, however even they are
_SEEN = 0.5  # passes of a part: enough to expect something of it
_SPREAD_OF = 12.0  # iterations, which say how much they vary
_UNIFORM = math.sqrt(3)  # half the width of a uniform distribution over its standard deviation
_MOST_JITTER, _EVEN = 0.5, 0.05
_ANY_SPREAD = 0.01  # of an iteration's time, before it is known
_KEEPS = math.exp(-1 / 256)  # of what was summed up, with every iteration
_SAME = 0.02  # jobs: company that changes by more within a piece is left out
_BELIEVABLE = 2.0  # times as long as in the same company before: something else happened, such as a checkpoint
_STRANGE = 3  # such iterations in a row: the job is another one now
_OTHER_SHIFT = 4  # so is one whose number of events changes by a sixteenth


class Look(NamedTuple):
    """Where one job was at one instant."""

    iteration: int
    """Completed."""
    inside: bool
    """In an iteration and neither leaving nor still for so long that it does something else."""
    began_ns: int
    ended_ns: int
    """When the last iteration ended."""
    blocked_ns: int
    """When the wait in an allocation began that lasts, 0 if none."""
    waited_ns: int
    """In allocations that are over, ever."""
    done: float
    """Share of the events of its iteration."""
    n_events: int
    """Of its profile; 0: it has none."""
    typical: bool = True
    """The last iteration was one that its profile describes."""


class _Span(NamedTuple):
    """A job at work, from one share of its iteration to another."""

    begin_ns: int
    end_ns: int
    since: float
    until: float

    def within(self, other: _Span) -> int:
        """Return for how long both last."""
        return max(0, min(self.end_ns, other.end_ns) - max(self.begin_ns, other.begin_ns))


class _Job:
    """What was summed up of a job: by how many worked, and by part."""

    def __init__(self) -> None:
        self.time_ns: Floats = np.zeros((MOST_JOBS + 1, PARTS))
        self.passes: Floats = np.zeros((MOST_JOBS + 1, PARTS))
        self.strange = 0
        self._squares, self._counted = _ANY_SPREAD, 1.0
        self._present: dict[tuple[int, int], tuple[float, float]] = {}

    @property
    def spread(self) -> float:
        """Return the variance of an iteration's time over what it took in the same company before."""
        return self._squares / self._counted

    @property
    def jitter(self) -> float:
        """Return by up to what share iterations are longer or shorter, as if evenly; 0 if hardly or if too few."""
        jitter = min(_MOST_JITTER, _UNIFORM * math.sqrt(self.spread)) if self._counted > _SPREAD_OF else 0.0
        return jitter if jitter > _EVEN else 0.0

    def forget_company(self) -> None:
        self.time_ns[2:] = self.passes[2:] = 0
        self._present.clear()

    def add(self, company: int, span: _Span) -> None:
        """Note what was done of the iteration while so many worked, evenly over its events."""
        since, until = PARTS * span.since, PARTS * span.until
        for part in range(min(PARTS - 1, int(since)), min(PARTS - 1, int(until)) + 1):
            passes = max(0.0, min(until, part + 1) - max(since, part))
            time_ns = (span.end_ns - span.begin_ns) * (passes / (until - since) if until > since else 1.0)
            known_ns, known = self._present.get((company, part), (0.0, 0.0))
            self._present[company, part] = (known_ns + time_ns, known + passes)

    def end_iteration(self, *, typical: bool) -> None:
        """Count what was noted, unless that was another iteration than usual."""
        time_ns, passes = np.zeros_like(self.time_ns), np.zeros_like(self.passes)
        for cell, noted in self._present.items():
            time_ns[cell], passes[cell] = noted
        self._present.clear()
        seen = self.passes > _SEEN
        expected_ns = (passes[seen] * self.time_ns[seen] / self.passes[seen]).sum()
        ratio = time_ns[seen].sum() / expected_ns if expected_ns else 1.0
        if not typical or ratio > _BELIEVABLE:
            self.strange += 1
            return
        self.strange = 0
        if expected_ns:
            self._squares = _KEEPS * self._squares + (ratio - 1) ** 2
            self._counted = _KEEPS * self._counted + 1
        self.time_ns = _KEEPS * self.time_ns + time_ns
        self.passes = _KEEPS * self.passes + passes

    def alone_ns(self, slowdown: Floats) -> Floats:
        """Return how long each part takes alone; nan where that is not known."""
        passes = slowdown @ self.passes
        seen = self.passes.sum(axis=0) > 0
        return np.divide(self.time_ns.sum(axis=0), passes, out=np.full(PARTS, np.nan), where=seen)


class Speeds:
    """Measures the jobs of one pool."""

    def __init__(self) -> None:
        """Know nobody."""
        self._at_ns = 0
        self._looks: Mapping[int, Look] = {}
        self._jobs: dict[int, _Job] = {}
        self._forget()
        self._fitted_ns = 0
        self.measured_last: tuple[float, ...] = ()
        """What was measured last, be it of others than those that are there."""

    def _forget(self) -> None:
        self._found: Floats = np.ones(MOST_JOBS + 1)
        self._measured = np.arange(MOST_JOBS + 1) == 1
        self._told: Floats = np.ones(MOST_JOBS + 1)
        self._told_ns: int | None = None
        self._alone: dict[int, tuple[Profile, Profile]] = {}

    @property
    def measured(self) -> tuple[float, ...]:
        """Return by what factor each of 2, 3, ... of the jobs is slower, as far as that was measured."""
        return tuple(self._told[2 : np.flatnonzero(self._measured)[-1] + 1].round(3).tolist())

    @property
    def slowdown(self) -> tuple[float, ...]:
        """Return by what factor each of 0, 1, 2 ... as many as there are is slower than alone; all 1: not known."""
        return tuple(self._told[: max(2, len(self._looks) + 1)].tolist())

    # -- what is seen ------------------------------------------------------------------------------

    def observe(self, now_ns: int, looks: Mapping[int, Look]) -> None:
        """Take in where the jobs are now."""
        if len(looks) > MOST_JOBS:
            looks = {}
        before, since_ns = self._looks, self._at_ns
        if looks.keys() == before.keys() and now_ns - since_ns < len(looks) * _LOOK_NS:
            return
        self._looks, self._at_ns = looks, now_ns
        if looks.keys() != before.keys():
            self._forget()
            self._jobs = {job: known for job, known in self._jobs.items() if job in looks}
            for known in self._jobs.values():
                known.forget_company()
            return
        spans = {job: _spans(before[job], look, since_ns, now_ns) for job, look in looks.items()}
        if any(look.inside and not look.n_events for look in looks.values()):
            spans = dict.fromkeys(looks)  # nobody knows what one does before its first iteration has ended
        clear = all(those is not None for those in spans.values())
        for job, look in looks.items():
            self._follow(job, before[job], look, spans if clear else {})
        if now_ns - self._fitted_ns >= _FIT_NS:
            self._fitted_ns = now_ns
            self._fit(now_ns)

    def _follow(self, number: int, before: Look, look: Look, spans: Mapping[int, list[_Span] | None]) -> None:
        """Keep what a job did, in what company; count it when its iteration has ended."""
        job = self._jobs.get(number)
        if job is None or job.strange >= _STRANGE or _is_another(before, look):
            job = self._jobs[number] = _Job()
        ended = look.iteration > before.iteration
        for i, span in enumerate(spans.get(number) or ()):
            if ended and i > 0:
                job.end_iteration(typical=look.typical)
                ended = False
            self._keep(job, number, span, spans)
        if ended:
            job.end_iteration(typical=look.typical)

    def _keep(self, job: _Job, number: int, span: _Span, spans: Mapping[int, list[_Span] | None]) -> None:
        time_ns = span.end_ns - span.begin_ns
        if time_ns <= 0:
            return
        others_ns = sum(span.within(one) for other, those in spans.items() if other != number for one in those or ())
        company = 1 + others_ns / time_ns
        if abs(company - round(company)) <= _SAME:
            job.add(round(company), span)

    # -- what comes of it --------------------------------------------------------------------------

    def _fit(self, now_ns: int) -> None:
        """Find the slowdowns that explain the times best, and tell them if they are others."""
        if not self._jobs:
            return
        known = np.arange(MOST_JOBS + 1) == 1
        for number in range(2, len(self._looks) + 1):
            known[number] = self._compared(number, known) >= _FEWEST
        time_ns = np.concatenate([job.time_ns.T[:, known] for job in self._jobs.values()])
        passes = np.concatenate([job.passes.T[:, known] for job in self._jobs.values()])
        seen = passes.sum(axis=1) > 0
        found = _factors(time_ns[seen], passes[seen], self._found[known])
        self._measured |= known
        self._found[known] = found
        self._found = _filled(self._found, np.flatnonzero(self._measured))
        told_lately = self._told_ns is not None and now_ns - self._told_ns < AGAIN_NS
        there = slice(len(self._looks) + 1)
        if not told_lately and (abs(self._found[there] / self._told[there] - 1) > NOTICEABLE).any():
            self._told, self._told_ns = self._found.copy(), now_ns
            self._alone.clear()
        self.measured_last = self.measured or self.measured_last

    def _compared(self, number: int, known: npt.NDArray[np.bool_]) -> float:
        """Return how many iterations beside so many jobs can be compared with as many in company that is known."""
        compared = 0.0
        for job in self._jobs.values():
            parts_ns = np.nan_to_num(job.alone_ns(self._found))
            these, those = job.passes[number], job.passes[known].sum(axis=0)
            pairs = np.divide(these * those, these + those, out=np.zeros(PARTS), where=these + those > 0)
            weight = max(1.0, parts_ns.sum()) * max(1.0, job.spread / _ERROR**2)
            compared += float(pairs @ parts_ns) / weight
        return compared

    def noted(self, view: PoolView) -> PoolView:
        """Return the view with the slowdown, with profiles that say how long a job takes alone, and with jitter."""
        if any(job.jitter for job in self._jobs.values()):
            view = dataclasses.replace(view, jobs=tuple(map(self._with_jitter, view.jobs)))
        if (self._told == 1).all():
            return view
        jobs = tuple(self._with_own_time(job) for job in view.jobs)
        return dataclasses.replace(view, jobs=jobs, slowdown=self.slowdown)

    def _with_jitter(self, view: JobView) -> JobView:
        job = self._jobs.get(view.job)
        return view if job is None else dataclasses.replace(view, jitter=job.jitter)

    def _with_own_time(self, view: JobView) -> JobView:
        job = self._jobs.get(view.job)
        if view.profile is None or job is None:
            return view
        raw, alone = self._alone.get(view.job, (None, None))
        if alone is None or raw is not view.profile:
            alone = _retimed(view.profile, job.alone_ns(self._told))
            self._alone[view.job] = (view.profile, alone)
        return dataclasses.replace(view, profile=alone)


def _spans(before: Look, look: Look, since_ns: int, now_ns: int) -> list[_Span] | None:
    """Return when a job worked between two looks; ``None``: that cannot be told."""
    waited_ns, ended = look.waited_ns - before.waited_ns, look.iteration - before.iteration
    until_ns = look.blocked_ns or now_ns
    spans = []
    if not before.inside:
        if ended or waited_ns:
            return None
    elif before.blocked_ns == 0 or before.blocked_ns != look.blocked_ns:
        if ended not in {0, 1} or (waited_ns and not before.blocked_ns) or not (ended or look.inside):
            return None
        begin_ns = before.blocked_ns + waited_ns if before.blocked_ns else since_ns
        end_ns, done = (look.ended_ns, 1.0) if ended else (until_ns, look.done)
        spans.append(_Span(begin_ns, end_ns, before.done, max(before.done, done)))
    if look.inside and (ended or not before.inside):
        spans.append(_Span(max(since_ns, look.began_ns), until_ns, 0.0, look.done))
    return spans


def _is_another(before: Look, look: Look) -> bool:
    """Tell whether what was seen of a job says nothing of what it does now."""
    return look.iteration < before.iteration or abs(look.n_events - before.n_events) > before.n_events >> _OTHER_SHIFT


def _factors(time_ns: Floats, passes: Floats, factors: Floats) -> Floats:
    """Return the columns' factors of a table that is passes times rows times columns; the first column's is 1."""
    for _ in range(_ROUNDS):
        rows = time_ns.sum(axis=1) / (passes @ factors)
        expected = rows @ passes
        factors = np.divide(time_ns.sum(axis=0), expected, out=np.ones_like(factors), where=expected > 0)
        factors = factors / factors[0]
    return factors


def _filled(found: Floats, measured: npt.NDArray[np.int64]) -> Floats:
    """Return the slowdowns of all numbers of jobs from some: in proportion between them and beyond."""
    numbers = np.arange(MOST_JOBS + 1)
    last = measured[-1]
    slope = (found[last] - 1) / max(1, last - 1)
    filled = np.where(numbers <= last, np.interp(numbers, measured, found[measured]), 1 + slope * (numbers - 1))
    filled[:2] = 1
    return np.maximum.accumulate(filled)


def _retimed(profile: Profile, parts_ns: Floats) -> Profile:
    """Return a profile whose parts take as long as they were measured to take; others as much longer or shorter."""
    n = len(profile.held)
    events = np.minimum(np.arange(n + 1) << profile.shift, profile.n_events)
    events[n] = profile.n_events
    raw_ns = np.interp(np.linspace(0, profile.n_events, PARTS + 1), events, (*profile.t_ns, profile.duration_ns))
    known = ~np.isnan(parts_ns)
    if not known.any() or not raw_ns[-1]:
        return profile
    spans_ns = np.diff(raw_ns)
    parts_ns = np.where(known, parts_ns, spans_ns * parts_ns[known].sum() / max(1.0, spans_ns[known].sum()))
    ends_ns = np.concatenate([[0.0], np.cumsum(parts_ns)])
    t_ns = np.interp(profile.t_ns, raw_ns, ends_ns).astype(np.int64)
    return dataclasses.replace(profile, t_ns=tuple(t_ns.tolist()), duration_ns=max(1, int(ends_ns[-1])))
