"""One iteration at a time: ideal temporal sharing, without the cost of moving memory in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.scheduler.demand import stands_still
from zico.scheduler.state import Phase, Start, Wait
from zico.scheduler.turns import alone_job, does_not_fit, fits_beside_kept, in_turn, unstuck, wait_for_alone

if TYPE_CHECKING:
    from zico.scheduler.state import Decision, JobView, Policy, PoolView


class Serial:
    """Let the job that has waited longest run one iteration while all others wait."""

    name = "serial"
    use_claims = True
    self_admit = False

    def decide(self, pool: PoolView) -> dict[int, Decision]:
        """Start at most one job: the first in turn that fits, and only if nobody runs."""
        alone = alone_job(pool)
        if alone is not None:
            return {job.job: wait_for_alone(alone) for job in in_turn(pool)}
        decisions: dict[int, Decision] = {}
        running = next((job for job in pool.jobs if _occupies(job, pool.now_ns)), None)
        for job in in_turn(pool):
            if not fits_beside_kept(job, pool):
                decisions[job.job] = does_not_fit(job, pool)
            elif running is None:
                decisions[job.job] = Start()
                running = job
            else:
                decisions[job.job] = Wait((running.job,), None, f"its turn comes after {running.name}'s iteration")
        return unstuck(decisions, pool)


def _occupies(job: JobView, now_ns: int) -> bool:
    """Tell whether the job is inside an iteration; one that has never ended any, or stands still, may never do so."""
    return job.phase is Phase.RUNNING and job.profile is not None and not stands_still(job, job.profile, now_ns)


POLICY: Policy = Serial()
