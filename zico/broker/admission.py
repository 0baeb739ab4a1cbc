"""Who may begin an iteration: asks the policy and carries its answers out.

Guarantee: while a job waits, there is a time at which it is looked at again although no event
comes. So a wake-up that was lost with a process that died costs ``RECHECK_NS`` and never a hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zico.broker.views import mask_of
from zico.pool.layout import JobState
from zico.scheduler.state import Start

if TYPE_CHECKING:
    from zico.broker.views import Record
    from zico.scheduler.state import Decision, Policy, PoolView

RECHECK_NS = 100_000_000
RETRY_NS = 20_000_000
"""A start that the claims made unsafe is tried again after this at the latest."""


class AdmittingTable(Protocol):
    """What admission changes in the shared table."""

    def admit(self, job: int) -> bool:
        """Let the job start; ``False`` if it cannot be safe or does not wait any more."""
        ...

    def set_waits_for(self, job: int, mask: int) -> None:
        """Say whom the job waits for, a bit for each."""
        ...


def admit_all(table: AdmittingTable, policy: Policy, view: PoolView, jobs: Record) -> int | None:
    """Let every job start that may; say of the others whom they wait for.

    Returns:
        When to look again in ``view.now_ns``'s clock if no event comes first, ``None`` if nobody
        waits.
    """
    looks_ns = [view.now_ns + RETRY_NS for rank in view.late if not table.admit(rank)]
    gates_ns = jobs["gate_ns"][jobs["state"] == JobState.BOUNDARY]
    looks_ns += gates_ns[gates_ns > view.now_ns].tolist()
    ranks_of = {job.job: job.ranks or (job.job,) for job in view.jobs}
    for job, decision in policy.decide(view).items():
        if isinstance(decision, Start) and table.admit(job):
            continue
        mask = _blockers(view, job, decision)
        for rank in ranks_of[job]:
            if mask != int(jobs[rank]["waits_for"]) and jobs[rank]["state"] == JobState.BOUNDARY:
                table.set_waits_for(rank, mask)
        looks_ns.append(_look_again_ns(view.now_ns, decision))
    if any(jobs[rank]["state"] == JobState.BOUNDARY for job in view.jobs for rank in job.ranks):
        looks_ns.append(view.now_ns + RECHECK_NS)  # a rank that it waits for may stand still by then
    return min(looks_ns, default=None)


def _blockers(view: PoolView, job: int, decision: Decision) -> int:
    """Return the mask of those who keep ``job`` waiting: all holders if it was the claims."""
    if isinstance(decision, Start):
        those = tuple(other for other in view.jobs if other.job != job and other.held > 0)
    else:
        those = tuple(other for other in view.jobs if other.job in decision.for_jobs)
    places = tuple(place for other in those for place in other.ranks or (other.job,))
    for_kept = isinstance(decision, Start) or decision.for_kept
    return mask_of(places + (view.staying if for_kept else ()))


def _look_again_ns(now_ns: int, decision: Decision) -> int:
    if isinstance(decision, Start):
        return now_ns + RETRY_NS
    until_ns = decision.until_ns
    return now_ns + RECHECK_NS if until_ns is None else min(until_ns, now_ns + RECHECK_NS)
