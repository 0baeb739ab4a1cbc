"""What the policies share: whose turn it is, and the answers that need no prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.scheduler.state import Phase, Start, Wait

if TYPE_CHECKING:
    from zico.scheduler.state import Decision, JobView, PoolView


def in_turn(pool: PoolView) -> list[JobView]:
    """Return the jobs at their boundaries, the one that has waited longest first."""
    waiting = [job for job in pool.jobs if job.phase is Phase.BOUNDARY]
    return sorted(waiting, key=lambda job: (job.waiting_since_ns or pool.now_ns, job.job))


def alone_job(pool: PoolView) -> JobView | None:
    """Return the job whose first iteration is growing now, if it still runs."""
    for job in pool.jobs:
        if job.job == pool.alone_job and job.phase is Phase.RUNNING:
            return job
    return None


def wait_for_alone(alone: JobView) -> Wait:
    """Wait for the end of a job's first iteration, of which nothing is known."""
    return Wait((alone.job,), None, f"the first iteration of {alone.name} runs alone")


def kept_regions(job: JobView) -> int:
    """Return what a job holds when its iteration has ended; what it holds now if it is in none that is known."""
    return job.persistent if job.phase is Phase.RUNNING and job.profile is not None else job.held


def kept_by_others(job: JobView, pool: PoolView) -> int:
    """Return the regions that stay with the other jobs once their iterations have ended."""
    return sum(kept_regions(other) for other in pool.jobs if other.job != job.job)


def fits_beside_kept(job: JobView, pool: PoolView) -> bool:
    """Tell whether the job's iteration fits once the others' iterations have ended; true if nothing is known of it."""
    most = job.held if job.profile is None else job.profile.peak
    return most <= job.held or most + kept_by_others(job, pool) <= pool.budget


def does_not_fit(job: JobView, pool: PoolView) -> Wait:
    """Wait for somebody to leave or to let go of memory that does not come back at the end of an iteration."""
    keepers = tuple(other.job for other in pool.jobs if other.job != job.job and kept_regions(other) > 0)
    peak = job.held if job.profile is None else job.profile.peak
    return Wait(
        keepers,
        None,
        f"its peak of {peak} regions does not fit: the others keep {kept_by_others(job, pool)} of the budget of "
        f"{pool.budget} between iterations",
    )


def unstuck(decisions: dict[int, Decision], pool: PoolView) -> dict[int, Decision]:
    """Return the decisions, but start the first in turn if nobody fits and nobody is left to wait for.

    Its iteration exceeds the budget and will overflow into the next tier of memory: slow, but the jobs move.
    """
    idle = all(job.phase is Phase.BOUNDARY for job in pool.jobs)
    if not idle or not decisions or any(isinstance(decision, Start) for decision in decisions.values()):
        return decisions
    return {**decisions, in_turn(pool)[0].job: Start()}
