"""The shared records from compiled code, through one process's member record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.compiled import array_at, inlined, record_at
from zico.pool.layout import HEADER, JOB, NO_MORE, REGION, JobState, SaveMode

if TYPE_CHECKING:
    from zico.pool.layout import Header, Job, Member, Region
    from zico.records import Records

EMPTY = int(JobState.EMPTY)
RUNNING = int(JobState.RUNNING)
BOUNDARY = int(JobState.BOUNDARY)
LEAVING = int(JobState.LEAVING)
_SWAP = int(SaveMode.SWAP)

_JOB_BYTES = JOB.itemsize


@inlined
def header_of(pool: Member) -> Header:
    """Return the shared header."""
    return record_at(pool.header_address, HEADER)


@inlined
def cap_of(pool: Member, job: Job) -> int:
    """Return the most regions that a job may hold now: the budget, or its own limit where that is lower."""
    budget = header_of(pool).budget_regions
    return min(budget, job.limit) if job.limit > 0 else budget


@inlined
def within_limit(job: Job, regions: int) -> int:
    """Return that many regions, or the job's limit where that is lower, but no fewer than it holds."""
    return max(job.held, min(regions, job.limit) if job.limit > 0 else regions)


@inlined
def lends(pool: Member, job: Job) -> bool:
    """Tell whether a job stands at its boundary and evicts what the others wait for.

    Those do that swap, and all do where some job's iteration would else never fit beside what the others keep.
    """
    may = job.save == _SWAP or header_of(pool).crowded == 1
    return bool(may and job.state == BOUNDARY and job.evict != NO_MORE)


@inlined
def regions_of(pool: Member) -> Records[Region]:
    """Return the shared region records."""
    return array_at(pool.regions_address, header_of(pool).n_regions, REGION)


@inlined
def job_at(pool: Member, job: int) -> Job:
    """Return a shared job record."""
    return record_at(pool.jobs_address + job * _JOB_BYTES, JOB)
