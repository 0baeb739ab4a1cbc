"""Jobs, memory and a clock in one place, to drive policies with: a model for tests, not the product's simulator.

One processor per job. A job holds ``levels[i]`` regions during its i-th step, and its last level between iterations.
It asks for regions one by one and waits for each that is not free or would leave the state unsafe. Its first
iteration has no profile and grows alone. Where nobody could go on, one blocked job gets its regions from outside the
budget, and that is counted as a stall.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from typing import TYPE_CHECKING

import numpy as np

from zico.scheduler.claims import is_safe
from zico.scheduler.demand import claim
from zico.scheduler.state import JobView, Phase, PoolView, Profile, Start, Wait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zico.scheduler.state import Decision, Policy

EVENTS_PER_STEP = 16
MS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """What one job does in every iteration."""

    levels: tuple[int, ...]
    """Regions held during each step."""
    step_ns: int
    """Nominal length of a step."""
    jitter: float = 0.0
    """Each iteration's steps are longer or shorter by up to this share."""
    believed: tuple[int, ...] | None = None
    """Levels as the profile has them, if it is wrong."""
    arrive_ns: int = 0

    @property
    def duration_ns(self) -> int:
        """Return the nominal length of an iteration."""
        return self.step_ns * len(self.levels)

    def profile(self) -> Profile:
        """Return what the scheduler is told after the first iteration."""
        n = len(self.levels)
        return Profile(
            held=self.believed or self.levels,
            t_ns=tuple(i * self.step_ns for i in range(n)),
            duration_ns=self.duration_ns,
            shift=EVENTS_PER_STEP.bit_length() - 1,
            n_events=n * EVENTS_PER_STEP,
        )


def triangle(peak: int, *, steps: int = 64, kept: int = 0, duration_ns: int = 100 * MS) -> Work:
    """Return a job that rises to its peak in the middle and falls again, as feature maps do."""
    return plateau(peak, rise=0.5, fall=0.5, steps=steps, kept=kept, duration_ns=duration_ns)


def plateau(
    peak: int, *, rise: float, fall: float, steps: int = 64, kept: int = 0, duration_ns: int = 100 * MS
) -> Work:
    """Return a job that rises for a share of its iteration, stays at its peak, and falls for another share."""
    middles = [(i + 0.5) / steps for i in range(steps)]
    shares = [min(1.0, t / rise, (1 - t) / fall) for t in middles]
    levels = [kept + round((peak - kept) * share) for share in shares]
    return Work(levels=(*levels[:-1], kept), step_ns=duration_ns // steps)


@dataclasses.dataclass
class _Job:
    number: int
    work: Work
    rng: random.Random
    phase: Phase = Phase.RUNNING
    profile: Profile | None = None
    held: int = 0
    persistent: int = 0
    spilled: int = 0
    step: int = 0
    step_since_ns: int = 0
    step_length_ns: int = 1
    busy: bool = False
    iteration: int = 0
    started_ns: int = 0
    waiting_since_ns: int = 0
    done_ns: int = 0
    slowness: float = 1.0

    @property
    def need(self) -> int:
        inside = self.phase is Phase.RUNNING and not self.busy
        return max(0, self.work.levels[self.step] - self.held - self.spilled) if inside else 0

    def view(self, now_ns: int) -> JobView:
        passed = (now_ns - self.step_since_ns) * EVENTS_PER_STEP // self.step_length_ns if self.busy else 0
        at_boundary = self.phase is Phase.BOUNDARY
        return JobView(
            job=self.number,
            name=f"job{self.number}",
            phase=self.phase,
            held=self.held,
            persistent=self.persistent,
            progress=0 if at_boundary else self.step * EVENTS_PER_STEP + min(passed, EVENTS_PER_STEP - 1),
            profile=self.profile,
            iteration=self.iteration,
            started_ns=self.started_ns,
            waiting_since_ns=self.waiting_since_ns,
            need=self.need,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    normalised: tuple[float, ...]
    """Per job: work done over what it would have done alone, after the warm-up."""
    iterations: tuple[int, ...]
    peak_granted: int
    stalls: int
    decisions: int
    longest_wait_ns: int

    @property
    def mean(self) -> float:
        """Return the mean over the jobs."""
        return sum(self.normalised) / len(self.normalised)


class Model:
    """Run jobs under a policy and a budget until a given time."""

    def __init__(self, policy: Policy, works: Iterable[Work], budget: int, seed: int = 0) -> None:
        """Take the jobs in the order of their numbers; nothing runs yet."""
        self.policy = policy
        self.budget = budget
        self.now_ns = 0
        self.jobs = [_Job(i, work, random.Random(seed * 997 + i)) for i, work in enumerate(works)]  # noqa: S311
        self.present: list[_Job] = []
        self.alone: int | None = None
        self.peak_granted = self.stalls = self.decisions = self.longest_wait_ns = 0
        self._events: list[tuple[int, int, str, int]] = []
        self._order = itertools.count()
        self._look_at_ns: int | None = None
        for job in self.jobs:
            self._at(job.work.arrive_ns, "arrive", job.number)

    def run(self, until_ns: int, warm_up_ns: int = 0) -> Outcome:
        """Run to the given time; work before the warm-up's end does not count."""
        counted = [0] * len(self.jobs)
        while self._events and self._events[0][0] <= until_ns:
            time_ns, _, kind, number = heapq.heappop(self._events)
            self.now_ns = time_ns
            before = self.jobs[number].done_ns if kind == "step" else 0
            self._handle(kind, number)
            if kind == "step" and time_ns > warm_up_ns:
                counted[number] += self.jobs[number].done_ns - before
        window_ns = until_ns - warm_up_ns
        return Outcome(
            normalised=tuple(done / window_ns for done in counted),
            iterations=tuple(job.iteration for job in self.jobs),
            peak_granted=self.peak_granted,
            stalls=self.stalls,
            decisions=self.decisions,
            longest_wait_ns=max([self.longest_wait_ns, *(self._waited_ns(job) for job in self.present)]),
        )

    def view(self) -> PoolView:
        """Return what the policy sees now."""
        jobs = tuple(job.view(self.now_ns) for job in self.present)
        return PoolView(self.now_ns, self.budget, jobs, self.alone)

    def _at(self, time_ns: int, kind: str, number: int) -> None:
        heapq.heappush(self._events, (time_ns, next(self._order), kind, number))

    def _handle(self, kind: str, number: int) -> None:
        job = self.jobs[number]
        if kind == "arrive":
            self.present.append(job)
            self._begin(job)
        elif kind == "step":
            self._end_step(job)
        if kind != "look" or self._look_at_ns == self.now_ns:
            self._settle(decide=kind != "step" or job.phase is Phase.BOUNDARY)

    def _settle(self, *, decide: bool) -> None:
        """Give what can be given, decide who starts, and see that somebody goes on."""
        self._serve()
        if decide:
            self._decide()
        self.peak_granted = max(self.peak_granted, sum(job.held for job in self.present))
        blocked = [job for job in self.present if job.need]
        if blocked and not any(job.busy for job in self.present):
            self.stalls += 1
            blocked[0].spilled += blocked[0].need
            self._serve()

    def _begin(self, job: _Job) -> None:
        job.phase = Phase.RUNNING
        self.longest_wait_ns = max(self.longest_wait_ns, self._waited_ns(job))
        job.step = 0
        job.started_ns = self.now_ns
        job.waiting_since_ns = 0
        job.slowness = 1 + job.work.jitter * job.rng.uniform(-1, 1)
        self._begin_step(job)

    def _waited_ns(self, job: _Job) -> int:
        return self.now_ns - job.waiting_since_ns if job.phase is Phase.BOUNDARY and job.waiting_since_ns else 0

    def _begin_step(self, job: _Job) -> None:
        job.held = min(job.held, job.work.levels[job.step])
        job.spilled = min(job.spilled, job.work.levels[job.step] - job.held)
        if job.need:
            job.waiting_since_ns = self.now_ns

    def _end_step(self, job: _Job) -> None:
        job.busy = False
        job.done_ns += job.work.step_ns
        if job.step + 1 < len(job.work.levels):
            job.step += 1
            self._begin_step(job)
            return
        job.phase = Phase.BOUNDARY
        job.iteration += 1
        job.persistent = job.held
        job.profile = job.profile or job.work.profile()
        job.waiting_since_ns = self.now_ns
        if self.alone == job.number:
            self.alone = None

    def _serve(self) -> None:
        """Grant region by region, longest waiting first, until nobody gets any more; let the satisfied go on."""
        granted = True
        while granted:
            granted = False
            for job in sorted(self.present, key=lambda job: (job.waiting_since_ns, job.number)):
                while job.need and self._may_grow(job):
                    job.held += 1
                    granted = True
                if job.phase is Phase.RUNNING and not job.busy and not job.need:
                    self._go_on(job)
                    granted = True

    def _go_on(self, job: _Job) -> None:
        job.busy = True
        job.waiting_since_ns = 0
        job.step_since_ns = self.now_ns
        job.step_length_ns = max(1, round(job.work.step_ns * job.slowness))
        self._at(self.now_ns + job.step_length_ns, "step", job.number)

    def _may_grow(self, job: _Job) -> bool:
        free = self.budget - sum(other.held for other in self.present)
        if free < 1:
            return False
        if not self.policy.use_claims:
            return True
        if job.profile is None:
            if self.alone not in (None, job.number):
                return False
            self.alone = job.number
        return self._safe_after(job, free - 1)

    def _safe_after(self, grown: _Job, free: int) -> bool:
        n = len(self.present)
        held = np.array([job.held + (job is grown) for job in self.present], np.int64)
        claims = np.array([max(claim(job.view(self.now_ns)), job.held + job.need) for job in self.present], np.int64)
        residual = np.array([job.persistent for job in self.present], np.int64)
        finish = [job.phase is Phase.RUNNING and job.profile is not None for job in self.present]
        return bool(is_safe(free, held, claims, residual, np.array(finish, np.uint8), np.zeros(n, np.uint8), n))

    def _decide(self) -> None:
        view = self.view()
        if not any(job.phase is Phase.BOUNDARY for job in view.jobs):
            return
        decisions = self.policy.decide(view)
        self.decisions += 1
        for number, decision in decisions.items():
            if isinstance(decision, Start):
                self._begin(self.jobs[number])
        self._look_again(decisions)
        self._serve()

    def _look_again(self, decisions: dict[int, Decision]) -> None:
        due = [d.until_ns for d in decisions.values() if isinstance(d, Wait) and d.until_ns is not None]
        self._look_at_ns = max(self.now_ns + 1, min(due)) if due else None
        if self._look_at_ns is not None:
            self._at(self._look_at_ns, "look", 0)
