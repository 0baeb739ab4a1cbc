"""Shift and claims: start an iteration when all of it is predicted to fit, and when everybody can still finish.

The rules, in order, for every job at a boundary (longest waiting first):

1. While a job without a profile grows, nobody starts.
2. A job whose peak does not fit beside what the others keep between iterations waits, and holds nobody up.
3. It starts if the smallest delay after which its iteration fits is zero (or too small to tell) and the state with
   its claim is safe.
4. Otherwise it waits, and its iteration is reserved at that delay: those behind it start only where they fit beside
   the reservation, so they cannot postpone it, and nobody starves.
5. If all jobs wait and none fits, the first one starts all the same: it overflows into the next tier, but moves.

See ``docs/design/scheduling.md`` for the reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.scheduler.claims import is_safe
from zico.scheduler.demand import Staircase, claim, curve_of, level_at, planned, remaining, total
from zico.scheduler.shift import NEVER, smallest_delay
from zico.scheduler.state import Phase, Start, Wait
from zico.scheduler.turns import alone_job, does_not_fit, in_turn, kept_regions, unstuck, wait_for_alone

if TYPE_CHECKING:
    from zico.scheduler.shift import Shift
    from zico.scheduler.state import Decision, JobView, Policy, PoolView, Profile


_MARGIN_SHIFT = 5
"""A 32nd of the budget is left out of predictions where that leaves a solution.

Real iterations differ from their profiles by a region or two and by some per cent of time. Where two jobs fill the
budget exactly, each such difference makes one of them wait inside its iteration, where it delays what it would give
back; measured on two copies of the ResNet example at 70 % (``docs/design/scheduling.md``).
"""


class _Banker:
    """The state that the banker's rule judges, with the jobs that have been started in this round."""

    def __init__(self, pool: PoolView) -> None:
        self._index = {job.job: i for i, job in enumerate(pool.jobs)}
        self._free = pool.budget - sum(job.held for job in pool.jobs)
        self._held = np.array([job.held for job in pool.jobs], np.int64)
        self._claim = np.array([claim(job) for job in pool.jobs], np.int64)
        self._residual = np.array([kept_regions(job) for job in pool.jobs], np.int64)
        self._must_finish = np.array(
            [job.phase is Phase.RUNNING and job.profile is not None for job in pool.jobs], np.uint8
        )
        self._done = np.zeros(len(pool.jobs), np.uint8)

    def admits(self, job: JobView) -> bool:
        """Add the job to those that must finish if that is safe; else change nothing."""
        i = self._index[job.job]
        self._must_finish[i] = 1
        state = (self._held, self._claim, self._residual, self._must_finish, self._done)
        safe = bool(is_safe(self._free, *state, len(self._held)))
        self._must_finish[i] = safe
        return safe


class _Round:
    """One pass over the waiting jobs: what has been promised so far."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool
        self._demand = {job.job: remaining(job, pool.now_ns) for job in pool.jobs}
        self._total = total(list(self._demand.values()))
        self._margin = pool.budget >> _MARGIN_SHIFT
        self._banker = _Banker(pool)

    def decide(self, job: JobView, profile: Profile) -> Decision:
        """Start the job or reserve its iteration, and keep that in mind for the next ones."""
        others = Staircase(self._total.t_ns, self._total.level - job.held)
        shift = smallest_delay(others, job, profile, self._pool.budget - self._margin)
        if shift.delay_ns == NEVER:
            shift = smallest_delay(others, job, profile, self._pool.budget)
        if shift.delay_ns == NEVER:
            return does_not_fit(job, self._pool)
        soon = shift.delay_ns <= curve_of(profile).tick_ns
        if soon and not self._banker.admits(job):
            return self._unsafe()
        delay_ns = 0 if soon else shift.delay_ns
        self._demand[job.job] = planned(job, profile, delay_ns)
        self._total = total((others, self._demand[job.job]))
        return Start() if soon else self._later(job, shift)

    def _later(self, job: JobView, shift: Shift) -> Wait:
        """Wait for those whose memory is short when this job would need it."""
        others = [other for other in self._pool.jobs if other.job != job.job]
        passing = [other for other in others if _holds_passing(self._demand[other.job], shift.conflict_ns)]
        blockers = passing or others  # none passes if somebody ends with more than it holds then
        names = ", ".join(other.name for other in blockers)
        until_ns = self._pool.now_ns + shift.delay_ns
        return Wait(tuple(other.job for other in blockers), until_ns, f"its peak would meet that of {names}")

    def _unsafe(self) -> Wait:
        """Wait for whoever is in an iteration: profiles were wrong, and one more job might block them all."""
        running = tuple(job.job for job in self._pool.jobs if job.phase is Phase.RUNNING)
        return Wait(running, None, "with one more iteration begun, no order would let all of them finish")


def _holds_passing(demand: Staircase, t_ns: int) -> bool:
    """Tell whether somebody holds more at that time than in the end."""
    return level_at(demand, t_ns) > int(demand.level[-1])


class Zico:
    """The published time shift, exact and for any number of jobs, over a state that is always safe."""

    name = "zico"
    use_claims = True
    self_admit = True

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Return a decision for every job at its boundary; takes microseconds and waits for nothing."""
        waiting = in_turn(pool)
        alone = alone_job(pool)
        promised = _Round(pool) if waiting and alone is None else None
        decisions: dict[int, Decision] = {}
        for job in waiting:
            if alone is not None:
                decisions[job.job] = wait_for_alone(alone)
            elif job.profile is None:
                decisions[job.job] = Start()
                alone = job
            elif promised is not None:
                decisions[job.job] = promised.decide(job, job.profile)
        return unstuck(decisions, pool)


POLICY: Policy = Zico()
