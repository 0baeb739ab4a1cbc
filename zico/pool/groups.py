"""Groups: ranks of one job that begin an iteration together, since each waits for the others in its collectives.

Theory of operation
    A rank writes its group's number into its own record (``join_group``). The ranks of a group are
    one job to the banker's rule (``zico.pool.rules.merge_groups``). A rank that has ended its
    iteration stands at its boundary until all others have ended theirs, and then all start
    together. *Rounds* count these common starts. In the picture rank 1 stands at the boundary of
    round 7, and waits for rank 0, which does not need it there any more::

        rank 0    round 7 ==========================|  round 8 =====
        rank 1    round 7 ==================|......... round 8 =====

    A program may be uneven: rank 0 alone takes a step more. Then rank 0 stands at its boundary
    while rank 1 waits for it in a collective. As soon as rank 1 stands still (``rules.is_still``),
    rank 0 begins a round of its own. Rank 1 has a smaller number then. At its next boundary rank 1
    is *awaited*: it starts whenever that is safe, whatever the policy says, and takes the number of
    the round that goes on. After three such starts in a row a rank waits for nobody.

    Ranks of one job may be in several pools. Whoever decides which job begins in all of them
    (``zico.integrations.gangs``) closes a rank's *gate* before it ends its iteration. The rank then
    stays at its boundary until the gate is opened, or until the time that stands in its record.

Guarantees
    * Nobody waits for a rank that has left, is dead, or stands still.
    * Ranks that begin together begin in one critical section, all or none.
    * A rank that ends its iteration claims nothing more, so the end of an iteration makes no state
      unsafe. Only a rank that is awaited counts with its whole peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zico.base.compiled import compiled, inlined, keep_out_of_line
from zico.pool import living, rules
from zico.pool.layout import BOUNDARY, NOBODY, RUNNING, header_of, job_at, profile_is_known, waits_for_memory
from zico.trace.repeats import REPEATS

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member


@inlined
def peak_of(job: Job) -> int:
    """Return the regions that a job at its boundary may come to hold in its next iteration."""
    return rules.within_limit(job, max(job.claim_peak, job.persistent))


@compiled
def stands_still(pool: Member, j: int, now_ns: int) -> bool:
    """Tell whether a job in an iteration stands still: a group does if all its ranks do that are inside.

    A rank that waits in a collective for another one, which waits for memory, does not stand still.
    A group with a stopped rank inside does, since the others wait for that rank in a collective.
    """
    keep_out_of_line()
    me = job_at(pool, j)
    if me.group == 0:
        return living.stands_still(me, now_ns)
    all_do = True
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if job.group == me.group and job.state == RUNNING:
            if living.is_stopped(job, now_ns):
                return True
            all_do = all_do and living.stands_still(job, now_ns)
    return all_do


@inlined
def are_mates(pool: Member, one: int, other: int) -> bool:
    """Tell whether two jobs are ranks of one group."""
    group = job_at(pool, one).group
    return bool(group != 0 and group == job_at(pool, other).group)


@inlined
def is_awaited(pool: Member, j: int) -> bool:
    """Tell whether others of the job's group are in a later round: they may wait for it in a collective."""
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if are_mates(pool, j, i) and job.state == RUNNING and job.round > job_at(pool, j).round:
            return True
    return False


@compiled
def stays(pool: Member, j: int, now_ns: int) -> bool:
    """Tell whether a job at its boundary is to stay there, whatever the policy and the claims say.

    It does while it is paused or its gate is closed, or another rank is paused or stands behind a
    closed gate. A paused rank that is awaited starts all the same. The ranks that may wait for it in
    a collective come to their boundaries only then. A gate opens by itself.
    """
    keep_out_of_line()
    me = job_at(pool, j)
    paused, gated = me.paused != 0, me.gate_ns > now_ns
    if me.group == 0:
        return bool(paused or gated)
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if are_mates(pool, j, i):
            paused = paused or job.paused != 0
            gated = gated or (job.state == BOUNDARY and job.gate_ns > now_ns)
    return bool(gated or (paused and not is_awaited(pool, j)))


@compiled
def is_held_up(pool: Member, j: int) -> bool:
    """Tell whether a job inside may wait in a collective for a rank of its group that waits itself.

    That rank waits for memory, or is awaited at its boundary.
    """
    keep_out_of_line()
    me = job_at(pool, j)
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        waits = waits_for_memory(job) or (job.state == BOUNDARY and job.round < me.round)
        if i != j and are_mates(pool, i, j) and waits:
            return True
    return False


@compiled
def waits_for(pool: Member, j: int, now_ns: int) -> int:
    """Return the mask of those of its group for which a job has to wait at its boundary: bit i for job i."""
    keep_out_of_line()
    me = job_at(pool, j)
    mask = 0
    if me.group == 0 or me.uneven >= REPEATS:
        return mask
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        inside = i != j and job.group == me.group and job.state == RUNNING and job.round == me.round
        if inside and not living.stands_still(job, now_ns):
            mask |= 1 << i
    return mask


@compiled
def starter_of(pool: Member, j: int, now_ns: int) -> int:
    """Return the rank by which the group of a job is let in: the first at its boundary, or ``NOBODY``.

    Nobody is, while one that stands there has to wait for another one of the group, or is awaited.
    A job without a group is let in by itself.
    """
    keep_out_of_line()
    starter = NOBODY
    for i in range(header_of(pool).places):
        if (i == j or are_mates(pool, i, j)) and job_at(pool, i).state == BOUNDARY:
            if waits_for(pool, i, now_ns) != 0 or is_awaited(pool, i):
                return NOBODY
            starter = i if starter == NOBODY else starter
    return starter


@compiled
def first_of(pool: Member, j: int) -> int:
    """Return the place of the first rank of a job's group, its own if it has none or has left."""
    keep_out_of_line()
    if job_at(pool, j).state in (RUNNING, BOUNDARY):
        for i in range(j):
            if are_mates(pool, i, j) and job_at(pool, i).state in (RUNNING, BOUNDARY):
                return i
    return j


@compiled
def heir_of(pool: Member, j: int) -> int:
    """Return the rank that grows alone when the job has ended its first iteration: one that has not yet, if any."""
    keep_out_of_line()
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if i != j and are_mates(pool, i, j) and job.state == RUNNING and not profile_is_known(job):
            return i
    return NOBODY


@compiled
def next_round(pool: Member, j: int) -> int:
    """Return the round in which the job begins now, with those of its group that stand at their boundaries.

    It is the latest of those that go on, or a new one.
    """
    keep_out_of_line()
    latest = job_at(pool, j).round
    running = 0
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if are_mates(pool, j, i) and i != j:
            if job.state == RUNNING:
                running = max(running, job.round)
            elif job.state == BOUNDARY:
                latest = max(latest, job.round)
    return running if running > latest else latest + 1


@compiled
def note_start(pool: Member, j: int, into: int) -> None:
    """Note that a rank begins an iteration of a round, and whether it leaves others of its group behind."""
    keep_out_of_line()
    me = job_at(pool, j)
    behind = 0
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if i != j and are_mates(pool, i, j) and job.state == RUNNING and job.round < into:
            behind = 1
    me.uneven = me.uneven + 1 if behind else 0
    me.round = into


@compiled
def merge(pool: Member, requester: int, now_ns: int) -> int:
    """Make one job of each group in the banker's arrays, and return the place at which the requester stands then.

    Where the requester stands at its boundary it is to be let in, with its group; ``NOBODY``: no
    one is. A group is as a job without a profile while one of its ranks inside has none.
    """
    keep_out_of_line()
    header = header_of(pool)
    held, claims, residual, must_finish = pool.scratch[0], pool.scratch[1], pool.scratch[2], pool.scratch[3]
    group = pool.scratch[5]
    starts = requester != NOBODY and job_at(pool, requester).state == BOUNDARY
    for j in range(header.places):
        job = job_at(pool, j)
        group[j] = job.group if job.state in (RUNNING, BOUNDARY) else 0
        if group[j] == 0:
            continue
        if job.state == BOUNDARY and j != requester:
            if (starts and are_mates(pool, j, requester)) or is_awaited(pool, j):
                claims[j] = peak_of(job)
                must_finish[j] = 1
            else:
                residual[j] = held[j]
    rules.merge_groups(group, held, claims, residual, must_finish, header.budget_regions, header.places)
    for j in range(header.places):
        job = job_at(pool, j)
        unknown = job.state == RUNNING and not profile_is_known(job) and not living.stands_still(job, now_ns)
        if group[j] != 0 and unknown:
            must_finish[rules.entry_of(group, j)] = 0
    return rules.entry_of(group, requester) if requester != NOBODY else NOBODY


@compiled
def peak_with_group(pool: Member, j: int) -> int:
    """Return the most regions that a job and the others of its group may hold together in an iteration."""
    keep_out_of_line()
    total = rules.within_limit(job_at(pool, j), job_at(pool, j).claim_peak)
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if i != j and are_mates(pool, i, j) and job.state in (RUNNING, BOUNDARY):
            total += rules.within_limit(job, job.claim_peak)
    return total


@compiled
def kept_with_group(pool: Member, j: int) -> int:
    """Return what a job and the others of its group keep between iterations."""
    keep_out_of_line()
    total = job_at(pool, j).persistent
    for i in range(header_of(pool).places):
        job = job_at(pool, i)
        if i != j and are_mates(pool, i, j) and job.state in (RUNNING, BOUNDARY):
            total += job.persistent
    return total
