"""Jobs, memory and a clock, driven by the very policies and claims that the broker runs: events, no time steps.

Theory of operation
    A job goes through the steps of its profile and holds so many regions in each; between iterations it keeps its
    persistent ones. At a step that holds more it asks, and waits while what it asks for is not free or would leave
    the state unsafe. The policy is asked when somebody arrives or comes to a boundary, and when its own answer says
    so. Each job has a processor of its own. Its first iteration has no profile and grows alone::

        arrive -> step .. step -> boundary -> decision -> step .. step -> boundary ...
                  waits for regions           waits for the policy

    Where nobody could go on, one blocked job gets its regions from outside the budget: a stall.

Guarantees
    * Deterministic: the same loads, budget, policy and seed give the same outcome.
    * Granted regions never exceed the budget.
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


@dataclasses.dataclass(frozen=True)
class Load:
    """What one job does in every iteration."""

    name: str
    profile: Profile
    """What it really holds, and when."""
    persistent: int
    """Regions that it keeps between iterations."""
    believed: Profile | None = None
    """What the scheduler is told after the first iteration, if that is wrong."""
    jitter: float = 0.0
    """Each iteration is longer or shorter by up to this share."""
    arrive_ns: int = 0

    def step_ns(self, step: int) -> int:
        """Return the nominal length of a step."""
        ends = (*self.profile.t_ns[1:], self.profile.duration_ns)
        return ends[step] - self.profile.t_ns[step]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to; per job in the order of the loads."""

    normalised: tuple[float, ...]
    """Work done over what it would have done alone, after the warm-up."""
    iterations: tuple[int, ...]
    waited_ns: tuple[int, ...]
    """At boundaries and in allocations, after the warm-up."""
    reasons: tuple[str, ...]
    """What the policy said most often when it made the job wait after the warm-up; empty if it never did."""
    peak_granted: int
    stalls: int
    decisions: int
    longest_wait_ns: int

    @property
    def mean(self) -> float:
        """Return the mean over the jobs."""
        return sum(self.normalised) / len(self.normalised)


@dataclasses.dataclass
class _Job:
    number: int
    load: Load
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
    waited_ns: int = 0
    done_ns: int = 0
    slowness: float = 1.0
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def level(self) -> int:
        return self.load.profile.held[self.step]

    @property
    def need(self) -> int:
        inside = self.phase is Phase.RUNNING and not self.busy
        return max(0, self.level - self.held - self.spilled) if inside else 0

    def view(self, now_ns: int) -> JobView:
        width = 1 << self.load.profile.shift
        passed = (now_ns - self.step_since_ns) * width // self.step_length_ns if self.busy else 0
        at_boundary = self.phase is Phase.BOUNDARY
        return JobView(
            job=self.number,
            name=self.load.name,
            phase=self.phase,
            held=self.held,
            persistent=self.persistent,
            progress=0 if at_boundary else self.step * width + min(passed, width - 1),
            profile=self.profile,
            iteration=self.iteration,
            started_ns=self.started_ns,
            waiting_since_ns=self.waiting_since_ns,
            need=self.need,
        )


class Simulation:
    """Run jobs under a policy and a budget until a given time."""

    def __init__(self, policy: Policy, loads: Iterable[Load], budget: int, seed: int = 0) -> None:
        """Take the jobs in the order of their numbers; nothing runs yet."""
        self.policy = policy
        self.budget = budget
        self.now_ns = 0
        self.jobs = [_Job(i, load, random.Random(seed * 997 + i)) for i, load in enumerate(loads)]  # noqa: S311
        self.present: list[_Job] = []
        self.alone: int | None = None
        self.peak_granted = self.stalls = self.decisions = self.longest_wait_ns = 0
        self._warm_up_ns = 0
        self._events: list[tuple[int, int, str, int]] = []
        self._order = itertools.count()
        self._look_at_ns: int | None = None
        for job in self.jobs:
            self._at(job.load.arrive_ns, "arrive", job.number)

    def run(self, until_ns: int, warm_up_ns: int = 0) -> Outcome:
        """Run to the given time; work and waits before the warm-up's end do not count."""
        self._warm_up_ns = warm_up_ns
        counted = [0] * len(self.jobs)
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns, _, kind, number = heapq.heappop(self._events)
            before_ns = self.jobs[number].done_ns if kind == "step" else 0
            self._handle(kind, number)
            if kind == "step" and self.now_ns > warm_up_ns:
                counted[number] += self.jobs[number].done_ns - before_ns
        window_ns = until_ns - warm_up_ns
        return Outcome(
            normalised=tuple(done_ns / window_ns for done_ns in counted),
            iterations=tuple(job.iteration for job in self.jobs),
            waited_ns=tuple(job.waited_ns for job in self.jobs),
            reasons=tuple(max(job.reasons, key=job.reasons.__getitem__, default="") for job in self.jobs),
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

    # -- iterations and steps -------------------------------------------------------------------------------------

    def _begin(self, job: _Job) -> None:
        job.phase = Phase.RUNNING
        self.longest_wait_ns = max(self.longest_wait_ns, self._waited_ns(job))
        job.step = 0
        job.started_ns = self.now_ns
        self._end_wait(job)
        job.slowness = 1 + job.load.jitter * job.rng.uniform(-1, 1)
        self._begin_step(job)

    def _waited_ns(self, job: _Job) -> int:
        return self.now_ns - job.waiting_since_ns if job.phase is Phase.BOUNDARY and job.waiting_since_ns else 0

    def _end_wait(self, job: _Job) -> None:
        if job.waiting_since_ns:
            job.waited_ns += max(0, self.now_ns - max(job.waiting_since_ns, self._warm_up_ns))
        job.waiting_since_ns = 0

    def _begin_step(self, job: _Job) -> None:
        job.held = min(job.held, job.level)
        job.spilled = min(job.spilled, job.level - job.held)
        if job.need:
            job.waiting_since_ns = self.now_ns

    def _end_step(self, job: _Job) -> None:
        job.busy = False
        job.done_ns += job.load.step_ns(job.step)
        if job.step + 1 < len(job.load.profile.held):
            job.step += 1
            self._begin_step(job)
            return
        job.phase = Phase.BOUNDARY
        job.iteration += 1
        job.held = job.persistent = min(job.held, job.load.persistent)
        job.profile = job.profile or job.load.believed or job.load.profile
        job.waiting_since_ns = self.now_ns
        if self.alone == job.number:
            self.alone = None

    # -- regions --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Grant what is safe, longest waiting first, until nobody gets any more; let the satisfied go on."""
        granted = True
        while granted:
            granted = False
            for job in sorted(self.present, key=lambda job: (job.waiting_since_ns, job.number)):
                if job.need:
                    regions = self._may_take(job)
                    job.held += regions
                    granted = granted or regions > 0
                if job.phase is Phase.RUNNING and not job.busy and not job.need:
                    self._go_on(job)
                    granted = True

    def _go_on(self, job: _Job) -> None:
        job.busy = True
        self._end_wait(job)
        job.step_since_ns = self.now_ns
        job.step_length_ns = max(1, round(job.load.step_ns(job.step) * job.slowness))
        self._at(self.now_ns + job.step_length_ns, "step", job.number)

    def _may_take(self, job: _Job) -> int:
        """Return how many of the regions that a job needs it may take now: if some leave a safe state, fewer do."""
        free = self.budget - sum(other.held for other in self.present)
        most = max(0, min(free, job.need))
        if most == 0 or not self.policy.use_claims:
            return most
        if job.profile is None:
            if self.alone not in (None, job.number):
                return 0
            self.alone = job.number
        if self._is_safe_after(job, most, free):
            return most
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            if self._is_safe_after(job, middle, free):
                least = middle
            else:
                most = middle
        return least

    def _is_safe_after(self, grown: _Job, regions: int, free: int) -> bool:
        n = len(self.present)
        held = np.array([job.held + (regions if job is grown else 0) for job in self.present], np.int64)
        claims = np.array([max(claim(job.view(self.now_ns)), job.held + job.need) for job in self.present], np.int64)
        residual = np.array([job.persistent for job in self.present], np.int64)
        finish = [job.phase is Phase.RUNNING and job.profile is not None for job in self.present]
        done = np.zeros(n, np.uint8)
        return bool(is_safe(free - regions, held, claims, residual, np.array(finish, np.uint8), done, n))

    # -- decisions ------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        view = self.view()
        if not any(job.phase is Phase.BOUNDARY for job in view.jobs):
            return
        decisions = self.policy.decide(view)
        self.decisions += 1
        for number, decision in decisions.items():
            if isinstance(decision, Start):
                self._begin(self.jobs[number])
            elif self.now_ns > self._warm_up_ns:
                reasons = self.jobs[number].reasons
                reasons[decision.reason] = reasons.get(decision.reason, 0) + 1
        self._look_again(decisions)
        self._serve()

    def _look_again(self, decisions: dict[int, Decision]) -> None:
        due = [d.until_ns for d in decisions.values() if isinstance(d, Wait) and d.until_ns is not None]
        self._look_at_ns = max(self.now_ns + 1, min(due)) if due else None
        if self._look_at_ns is not None:
            self._at(self._look_at_ns, "look", 0)
