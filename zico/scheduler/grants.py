"""Regions in the simulator: who holds how many, and how many more it may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import compiled, inlined, keep_out_of_line, record_at
from zico.pool.layout import JobState
from zico.pool.rules import REGULAR_NS, STILL_NS, exceed, is_no_worse, is_safe
from zico.scheduler.demand import span_at
from zico.scheduler.jobs import (
    FOREVER,
    LOG,
    believed_of,
    is_known,
    need_of,
    present_in,
    profile_of,
    scratch_flags,
    scratch_words,
    see_debt,
    see_given_up,
    sim_job_of,
    someone_grows_alone,
    step_ends_ns,
)
from zico.trace.profile import claim_at, is_outgrown

if TYPE_CHECKING:
    from zico.scheduler.jobs import RunRecord, SimJob

_RUNNING = int(JobState.RUNNING)
_LOG_BYTES = LOG.itemsize


@inlined
def hold(run: RunRecord, number: int, regions: int) -> None:
    """Let a simulated job hold so many regions, no more and no fewer."""
    sim_job = sim_job_of(run, number)
    run.granted += regions - sim_job.held
    run.peak_granted = max(run.peak_granted, run.granted)
    if regions != sim_job.held and run.n_log < run.log_room:
        entry = record_at(run.log_address + run.n_log * _LOG_BYTES, LOG)
        entry.t_ns = run.now_ns
        entry.sim_job = number
        entry.held = regions
        run.n_log += 1
    sim_job.held = regions


@compiled
def _is_safe(run: RunRecord, grown: int, regions: int, claim: int) -> bool:
    """Tell whether all can end once a job, then claiming ``claim``, has so many regions more, by what was last seen."""
    held, claims, residual = scratch_words(run, 0), scratch_words(run, 1), scratch_words(run, 2)
    must_finish, done = scratch_flags(run, 3), scratch_flags(run, 4)
    _put_debts(run, grown, regions, claim)
    return is_safe(run.budget - run.granted - regions, held, claims, residual, must_finish, done, run.n_present)


@compiled
def _is_no_worse(run: RunRecord, grown: int, regions: int) -> bool:
    """Tell whether that keeps nobody from ending, right after ``_is_safe`` has said no."""
    held, claims, residual = scratch_words(run, 0), scratch_words(run, 1), scratch_words(run, 2)
    must_finish, done, given_up = scratch_flags(run, 3), scratch_flags(run, 4), scratch_flags(run, 6)
    free, present, place = run.budget - run.granted - regions, present_in(run), 0
    while present[place] != grown:
        place += 1
    return is_no_worse(free, held, claims, residual, must_finish, given_up, done, run.n_present, place, regions)


@compiled
def _see_all(run: RunRecord) -> bool:
    """Note where all are now; tells whether any claims another number of regions than before."""
    present, given_up = present_in(run), scratch_flags(run, 6)
    changed = False
    for i in range(run.n_present):
        sim_job = sim_job_of(run, present[i])
        before = sim_job.claim
        see_debt(run, sim_job)
        changed = changed or sim_job.claim != before
        see_given_up(run, sim_job)
        given_up[i] = sim_job.given_up
    return changed


@compiled
def _put_debts(run: RunRecord, grown: int, regions: int, claim: int) -> None:
    """Put what each simulated job was last seen to have and to owe into scratch."""
    present = present_in(run)
    held, claims, residual = scratch_words(run, 0), scratch_words(run, 1), scratch_words(run, 2)
    must_finish = scratch_flags(run, 3)
    for i in range(run.n_present):
        sim_job = sim_job_of(run, present[i])
        held[i], claims[i], residual[i] = sim_job.held, sim_job.claim, sim_job.persistent
        must_finish[i] = sim_job.phase == _RUNNING and is_known(sim_job)
        if present[i] == grown:
            held[i] += regions
            claims[i] = max(claim, held[i])


@compiled
def may_take(run: RunRecord, number: int) -> int:
    """Return how many of the regions that a job needs it may take now; notes that it grows."""
    sim_job = sim_job_of(run, number)
    most = max(0, min(run.budget - run.granted, need_of(sim_job)))
    if most == 0 or not run.use_claims:
        return most
    believed = believed_of(sim_job)
    see_debt(run, sim_job)
    claim = sim_job.claim
    exceeds = sim_job.held + most > claim
    if exceeds and sim_job.profiled:
        outgrown = is_outgrown(believed, sim_job.progress, sim_job.held + most, believed.peak)
        sim_job.outgrown = max(sim_job.outgrown, int(outgrown))
    if not is_known(sim_job):
        return _may_grow(run, number, most)
    if exceeds:
        claim = sim_job.claim = exceed(sim_job, believed, believed.claims, most)
    return _safe_to_take(run, number, most, claim)


@compiled
def _safe_to_take(run: RunRecord, number: int, most: int, claim: int) -> int:
    """Return how many regions leave a safe state: if some do, fewer do; one, if only that makes nothing worse.

    Claims fall while iterations go on, and lower ones make no state unsafe. Where the claims last
    seen do, where everybody is now need not be found out.
    """
    present = present_in(run)
    for i in range(run.n_present):
        if sim_job_of(run, present[i]).overruns:
            see_debt(run, sim_job_of(run, present[i]))
    if _is_safe(run, number, most, claim):
        return most
    if _see_all(run) and _is_safe(run, number, most, claim):
        return most
    if _is_no_worse(run, number, most):
        return most
    least, asked = 0, most
    while most - least > 1:
        middle = (least + most) // 2
        if _is_safe(run, number, middle, claim):
            least = middle
        else:
            most = middle
    if least == 0 and asked > 1:
        least = int(_is_safe(run, number, 1, claim) or _is_no_worse(run, number, 1))
    return least


@compiled
def _may_grow(run: RunRecord, number: int, most: int) -> int:
    """Return how many regions a job without a profile may take, and let it take or renew the right to grow alone."""
    keep_out_of_line()
    if run.alone != number and someone_grows_alone(run):
        return 0
    regions = _safe_to_take(run, number, most, 0)
    if regions > 0:
        if run.alone == number:
            sim_job_of(run, number).alone_spent_ns += min(run.now_ns - run.alone_since_ns, STILL_NS)
        run.alone = number
        run.alone_since_ns = run.now_ns
    return regions


@compiled
def look_when_alone_ends(run: RunRecord) -> None:
    """See that those whom a first iteration keeps waiting are looked at when it may keep them no longer."""
    keep_out_of_line()
    if run.n_blocked + run.n_waiting > 0 and someone_grows_alone(run):
        sim_job = sim_job_of(run, run.alone)
        waits = need_of(sim_job) > 0
        ends_ns = sim_job.waiting_since_ns + REGULAR_NS if waits else run.alone_since_ns + STILL_NS
        run.look_at_ns = min(run.look_at_ns, ends_ns)


@compiled
def blocked_in_turn(run: RunRecord) -> int:
    """Put those that are blocked into scratch, the longest waiting first; returns how many they are."""
    blocked = scratch_words(run, 5)
    present = present_in(run)
    n = 0
    for i in range(run.n_present):
        sim_job = sim_job_of(run, present[i])
        if sim_job.phase == _RUNNING and not sim_job.busy and not sim_job.suspended:
            at = n
            while at > 0 and sim_job_of(run, blocked[at - 1]).waiting_since_ns > sim_job.waiting_since_ns:
                blocked[at] = blocked[at - 1]
                at -= 1
            blocked[at] = present[i]
            n += 1
    return n


@compiled
def _claim_falls_at(sim_job: SimJob) -> int:
    """Return when, on the work clock, a job's claim next falls within the step that it is in."""
    profile = profile_of(sim_job)
    begin_ns, end_ns = profile.step_ns[sim_job.step], step_ends_ns(sim_job)
    now_in = span_at(profile.t_ns, profile.n_bins, begin_ns)
    claim = claim_at(profile, profile.claims, now_in << profile.shift)
    for later in range(now_in + 1, profile.n_bins):
        if profile.t_ns[later] >= end_ns:
            break
        if claim_at(profile, profile.claims, later << profile.shift) < claim:
            share = float(profile.t_ns[later] - begin_ns) / float(end_ns - begin_ns)
            return int(sim_job.step_since + np.ceil(share * sim_job.step_length))
    return FOREVER


@compiled
def plan_retry(run: RunRecord) -> None:
    """Note when those that are blocked should ask again: at latest when a claim falls."""
    run.retry_at = FOREVER
    if run.n_blocked == 0 or not run.use_claims:
        return
    present = present_in(run)
    for i in range(run.n_present):
        sim_job = sim_job_of(run, present[i])
        if sim_job.busy:
            at = _claim_falls_at(sim_job)
            if at > run.clock:
                run.retry_at = min(run.retry_at, at)
