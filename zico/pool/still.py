"""Who stands still: jobs that nobody waits for, since they are stopped, do nothing, or do something else.

Theory of operation
    Whoever waits for memory looks around, and so does the broker while somebody waits: at most once
    a slice, whoever it is. A look notes in each job's record whether the kernel says that its
    process is stopped (SIGSTOP, Ctrl-Z, a debugger), and whether the job has done anything since
    the last look. All others read what it noted::

        stopped      its process is, as of the last look
        past         it has been in its iteration for several times its usual time (``rules.is_still``)
        idle         it runs, and has done nothing for ``IDLE_NS``: a prompt in a first iteration

    A look takes no lock. Two at a time write the same.

Guarantees
    * What a look noted counts for ``SEEN_NS``: a job that goes on is soon taken for one that runs,
      also where nobody looks any more.
    * A job that waits is never idle.

Known limitations
    The kernel does not say of a process in a frozen cgroup that it is stopped. Nor is that seen
    across pid namespaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import entry, inlined, keep_out_of_line
from zico.base.libc import monotonic_ns
from zico.pool import rules
from zico.pool.fences import at, counters_of, pair_of
from zico.pool.layout import BOUNDARY, MEMBER, RUNNING, STREAMS, header_of, job_at, waits_for_memory
from zico.pool.living import job_is_stopped, sees_numbers

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member

LOOK_NS = 50_000_000
"""Between two looks: a slice of a wait."""
SEEN_NS = 4 * LOOK_NS
IDLE_NS = 30_000_000_000
"""A job that runs and has neither allocated nor freed for so long may be at a prompt."""
_ITERATION_SHIFT = 32  # so that the end of an iteration and the progress lost with it do not cancel out


@entry(MEMBER)
def look_around(pool: Member) -> None:
    """Note which jobs are stopped and which have moved, unless somebody has just done so; waits for nothing."""
    keep_out_of_line()
    header = header_of(pool)
    now_ns = monotonic_ns()
    sees = sees_numbers(pool)  # who does not leaves alone what others have seen
    if sees and header.looked_ns <= now_ns < header.looked_ns + LOOK_NS:
        return
    if sees:
        header.looked_ns = now_ns
    for j in range(header.places):
        job = job_at(pool, j)
        if job.state not in (RUNNING, BOUNDARY):
            continue
        if sees:
            stopped = j != pool.job and job_is_stopped(pool, j)
            job.stopped_until_ns = monotonic_ns() + SEEN_NS if stopped else 0
        moves = moves_of(pool, j)
        if job.moves != moves or job.waiting_threads > 0:
            job.moved_ns = monotonic_ns()
            job.moves = moves


@inlined
def moves_of(pool: Member, j: int) -> int:
    """Return a number that changes whenever a job or its device makes progress."""
    job = job_at(pool, j)
    moves = job.progress + (job.iteration << _ITERATION_SHIFT)
    for slot in range(STREAMS):
        moves += counters_of(pool)[at(pair_of(j, slot))]
    return moves


@inlined
def is_stopped(job: Job, now_ns: int) -> bool:
    """Tell whether a job's process is stopped, as somebody saw lately."""
    return bool(job.stopped_until_ns > now_ns)


@inlined
def is_past(job: Job, now_ns: int) -> bool:
    """Tell whether a job has been in its iteration for so long, without its waits, that it does something else."""
    inside_ns = now_ns - job.started_ns - job.iteration_waited_ns
    if job.need_since_ns > 0:
        inside_ns -= now_ns - job.need_since_ns
    known = job.state == RUNNING and job.profiled == 1
    return bool(known and rules.is_still(0, inside_ns, job.profile.duration_ns, 0))


@inlined
def is_idle(job: Job, now_ns: int) -> bool:
    """Tell whether a job that runs has done nothing for long."""
    return bool(job.waiting_threads == 0 and now_ns - max(job.moved_ns, job.started_ns) > IDLE_NS)


@inlined
def stands_still(job: Job, now_ns: int) -> bool:
    """Tell whether a job inside is not to be waited for (``rules.is_still``)."""
    inside_ns = now_ns - job.started_ns - job.iteration_waited_ns
    return rules.is_still(waits_for_memory(job), inside_ns, job.profile.duration_ns, is_stopped(job, now_ns))
