"""Which grants leave everybody able to finish: claims by the banker's rule, and one job without a profile at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zico.compiled import compiled, inlined, keep_out_of_line, monotonic_ns
from zico.pool import rules
from zico.pool.layout import NOBODY
from zico.pool.shared import EMPTY, RUNNING, header_of, job_at, lends, within_limit
from zico.trace import curve

if TYPE_CHECKING:
    from zico.pool.layout import Job, Member

Array = Any


@inlined
def claim_of(job: Job) -> int:
    """Return the most regions that the job may still come to hold in its current iteration.

    Without those that it has evicted: it can end its iteration although they stay where they are.
    """
    if job.state != RUNNING or job.profiled == 0:
        return job.held
    expected = curve.claim_at(job.profile, job.claims, job.progress) + job.claim_extra
    return max(job.held, within_limit(job, max(job.claim_floor, expected)) - job.evicted)


@inlined
def remaining_of(job: Job) -> int:
    """Return the regions that a job which waits for some still lacks to end its iteration, as far as is known."""
    return max(job.need, claim_of(job) - job.held)


@compiled
def least_lacking(pool: Member) -> int:
    """Return the job that waits in an allocation and lacks the least, or ``NOBODY``."""
    keep_out_of_line()
    best = NOBODY
    least = 0
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        if job.state == RUNNING and job.waiting_threads > 0 and (best == NOBODY or remaining_of(job) < least):
            best = j
            least = remaining_of(job)
    return best


@compiled
def stays_safe(pool: Member, requester: int, n: int, claim: int) -> bool:
    """Tell whether ``n`` more regions for the requester, then claiming ``claim``, leave everybody able to finish.

    What others lend at their boundaries counts as free: it comes when somebody waits for it.
    Where some job cannot finish even now (a profile was wrong), it is left out: the grant must not make it worse. So
    is one that stands still; should it go on, it waits for memory like everybody else.
    """
    header = header_of(pool)
    held, claims, residual = pool.scratch[0], pool.scratch[1], pool.scratch[2]
    must_finish, done = pool.scratch[3], pool.scratch[4]
    free = header.budget_regions - header.granted
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        lent = j != requester and lends(pool, job)
        free += job.held if lent else 0
        held[j] = job.held if job.state != EMPTY and not lent else 0
        claims[j] = claim_of(job) if job.state != EMPTY else 0
        residual[j] = rules.residual(job.persistent, job.held, job.evicted) if job.state != EMPTY else 0
        must_finish[j] = 1 if job.state == RUNNING and job.profiled == 1 else 0
    known = job_at(pool, requester).profiled
    held[requester] += n
    claims[requester] = max(claim, held[requester])
    must_finish[requester] = known
    if rules.is_safe(free - n, held, claims, residual, must_finish, done, header.places):
        return True
    if _leave_out_still(pool, requester, must_finish) and rules.is_safe(
        free - n, held, claims, residual, must_finish, done, header.places
    ):
        return True
    held[requester] -= n
    must_finish[requester] = 0
    if rules.is_safe(free, held, claims, residual, must_finish, done, header.places):
        return False
    for j in range(header_of(pool).places):
        must_finish[j] = done[j] if must_finish[j] else 0
    held[requester] += n
    must_finish[requester] = known
    return rules.is_safe(free - n, held, claims, residual, must_finish, done, header.places)


@compiled
def is_crowded(pool: Member) -> bool:
    """Tell whether some job's iteration does not fit beside what all others keep between theirs."""
    keep_out_of_line()
    header = header_of(pool)
    kept = 0
    for j in range(header.places):
        job = job_at(pool, j)
        kept += job.persistent if job.state != EMPTY else 0
    for j in range(header.places):
        job = job_at(pool, j)
        others = kept - job.persistent
        if job.state != EMPTY and others > 0 and others + within_limit(job, job.claim_peak) > header.budget_regions:
            return True
    return False


@compiled
def _leave_out_still(pool: Member, requester: int, must_finish: Array) -> bool:
    """Strike those off that stand still; tells if any were."""
    keep_out_of_line()
    now_ns = monotonic_ns()
    some = False
    for j in range(header_of(pool).places):
        job = job_at(pool, j)
        inside_ns = now_ns - job.started_ns - job.iteration_waited_ns
        still = rules.is_still(job.waiting_threads > 0, inside_ns, job.profile.duration_ns)
        if must_finish[j] and still and j != requester:
            must_finish[j] = 0
            some = True
    return some


# -- running alone --------------------------------------------------------------------------------------------------


@inlined
def someone_else_grows_alone(pool: Member, me: int, now_ns: int) -> bool:
    """Tell whether a job without a profile is growing, so that no other may start an iteration."""
    header = header_of(pool)
    other = header.alone_job
    if other in (NOBODY, me):
        return False
    job = job_at(pool, other)
    if job.state != RUNNING or job.profiled == 1:
        return False
    waits, waited_ns, grown_ns = job.waiting_threads > 0, now_ns - job.need_since_ns, now_ns - header.alone_since_ns
    return rules.grows_alone(job.alone_spent_ns, waits, waited_ns, grown_ns)


@inlined
def _grow_alone(pool: Member, job: Job, now_ns: int) -> None:
    """Take or renew the right to grow alone."""
    header = header_of(pool)
    if header.alone_job == pool.job:
        job.alone_spent_ns += min(now_ns - header.alone_since_ns, rules.ALONE_FRESH_NS)
    header.alone_job = pool.job
    header.alone_since_ns = now_ns


# -- both -----------------------------------------------------------------------------------------------------------


@inlined
def may_grant(pool: Member, me: Job, n: int) -> bool:
    """Tell whether budget and claims allow this process's job ``n`` more regions; notes that it grows."""
    header = header_of(pool)
    if header.granted + n > header.budget_regions:
        return False
    if header.use_claims == 0:
        return True
    if me.profiled == 0:
        now_ns = monotonic_ns()
        if someone_else_grows_alone(pool, pool.job, now_ns) or not stays_safe(pool, pool.job, n, 0):
            return False
        _grow_alone(pool, me, now_ns)
        return True
    claim = claim_of(me)
    if me.held + n > claim:
        # The profile was wrong by so much: the rest of the iteration is expected to lie that much higher. To claim the
        # whole peak again would make states unsafe in which a job near its end lacks a region or two.
        me.claim_extra = me.held + me.evicted + n - curve.claim_at(me.profile, me.claims, me.progress)
        claim = me.held + n
    return stays_safe(pool, pool.job, n, claim)
