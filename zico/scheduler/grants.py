"""Regions in the simulator: who holds how many, and how many more it may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import compiled, inlined, keep_out_of_line, record_at
from zico.pool.layout import JobState
from zico.pool.rules import ALONE_FRESH_NS, ALONE_WAIT_NS, is_safe
from zico.scheduler.demand import claim_of, span_at
from zico.scheduler.tenants import (
    FOREVER,
    LOG,
    job_of,
    need_of,
    present_in,
    profile_of,
    scratch_flags,
    scratch_words,
    show_place,
    someone_grows_alone,
    step_ends_ns,
    tenant_of,
)
from zico.trace.curve import claim_at

if TYPE_CHECKING:
    from zico.scheduler.tenants import RunRecord, Tenant

_RUNNING = int(JobState.RUNNING)
_LOG_BYTES = LOG.itemsize


@inlined
def hold(run: RunRecord, number: int, regions: int) -> None:
    """Let a tenant hold so many regions, no more and no fewer."""
    tenant = tenant_of(run, number)
    run.granted += regions - tenant.held
    run.peak_granted = max(run.peak_granted, run.granted)
    if regions != tenant.held and run.n_log < run.log_room:
        entry = record_at(run.log_address + run.n_log * _LOG_BYTES, LOG)
        entry.t_ns = run.now_ns
        entry.tenant = number
        entry.held = regions
        run.n_log += 1
    tenant.held = regions


@compiled
def _is_safe_after(run: RunRecord, grown: int, regions: int) -> bool:
    """Tell whether all that are in an iteration can end it once a job has so many regions more.

    Claims fall while iterations go on, and lower ones make no state unsafe: where the claims last seen do, where
    everybody is now need not be found out.
    """
    return _can_all_end(run, grown, regions) or (_see_claims(run) and _can_all_end(run, grown, regions))


@compiled
def _can_all_end(run: RunRecord, grown: int, regions: int) -> bool:
    """Tell so by the claims last seen."""
    present = present_in(run)
    held, claim, residual = scratch_words(run, 0), scratch_words(run, 1), scratch_words(run, 2)
    must_finish, done = scratch_flags(run, 3), scratch_flags(run, 4)
    for i in range(run.n_present):
        tenant = tenant_of(run, present[i])
        if tenant.overruns:
            _see_claim(run, present[i])
        held[i] = tenant.held + (regions if present[i] == grown else 0)
        claim[i] = max(tenant.claim, tenant.held + need_of(tenant))
        residual[i] = tenant.persistent
        must_finish[i] = tenant.phase == _RUNNING and tenant.profiled == 1
    return is_safe(run.budget - run.granted - regions, held, claim, residual, must_finish, done, run.n_present)


@compiled
def _see_claims(run: RunRecord) -> bool:
    """Note what those that are in an iteration claim where they are now; tells whether any claims less than before."""
    present = present_in(run)
    fell = False
    for i in range(run.n_present):
        tenant = tenant_of(run, present[i])
        if tenant.phase == _RUNNING and tenant.profiled == 1:
            before = tenant.claim
            _see_claim(run, present[i])
            fell = fell or tenant.claim < before
    return fell


@compiled
def _see_claim(run: RunRecord, number: int) -> None:
    tenant = tenant_of(run, number)
    show_place(run, tenant, job_of(run, number))
    tenant.claim = claim_of(job_of(run, number))


@compiled
def may_take(run: RunRecord, number: int) -> int:
    """Return how many of the regions that a job needs it may take now; notes that it grows."""
    tenant = tenant_of(run, number)
    most = max(0, min(run.budget - run.granted, need_of(tenant)))
    if most == 0 or not run.use_claims:
        return most
    return _safe_to_take(run, number, most) if tenant.profiled else _may_grow(run, number, most)


@compiled
def _safe_to_take(run: RunRecord, number: int, most: int) -> int:
    """Return how many regions leave a safe state: if some do, fewer do."""
    if _is_safe_after(run, number, most):
        return most
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        if _is_safe_after(run, number, middle):
            least = middle
        else:
            most = middle
    return least


@compiled
def _may_grow(run: RunRecord, number: int, most: int) -> int:
    """Return how many regions a job without a profile may take, and let it take or renew the right to grow alone."""
    keep_out_of_line()
    if run.alone != number and someone_grows_alone(run):
        return 0
    regions = _safe_to_take(run, number, most)
    if regions > 0:
        if run.alone == number:
            tenant_of(run, number).alone_spent_ns += min(run.now_ns - run.alone_since_ns, ALONE_FRESH_NS)
        run.alone = number
        run.alone_since_ns = run.now_ns
    return regions


@compiled
def look_when_alone_ends(run: RunRecord) -> None:
    """See that those whom a first iteration keeps waiting are looked at when it may keep them no longer."""
    keep_out_of_line()
    if run.n_blocked + run.n_waiting > 0 and someone_grows_alone(run):
        tenant = tenant_of(run, run.alone)
        waits = need_of(tenant) > 0
        ends_ns = tenant.waiting_since_ns + ALONE_WAIT_NS if waits else run.alone_since_ns + ALONE_FRESH_NS
        run.look_at_ns = min(run.look_at_ns, ends_ns)


@compiled
def blocked_in_turn(run: RunRecord) -> int:
    """Put those that are blocked into scratch, the longest waiting first; returns how many they are."""
    blocked = scratch_words(run, 5)
    present = present_in(run)
    n = 0
    for i in range(run.n_present):
        tenant = tenant_of(run, present[i])
        if tenant.phase == _RUNNING and not tenant.busy and not tenant.suspended:
            at = n
            while at > 0 and tenant_of(run, blocked[at - 1]).waiting_since_ns > tenant.waiting_since_ns:
                blocked[at] = blocked[at - 1]
                at -= 1
            blocked[at] = present[i]
            n += 1
    return n


@compiled
def _claim_falls_at(tenant: Tenant) -> int:
    """Return when, on the work clock, a job's claim next falls within the step that it is in."""
    profile = profile_of(tenant)
    begin_ns, end_ns = profile.step_ns[tenant.step], step_ends_ns(tenant)
    now_in = span_at(profile.t_ns, profile.n_bins, begin_ns)
    claim = claim_at(profile, profile.claims, now_in << profile.shift)
    for later in range(now_in + 1, profile.n_bins):
        if profile.t_ns[later] >= end_ns:
            break
        if claim_at(profile, profile.claims, later << profile.shift) < claim:
            share = float(profile.t_ns[later] - begin_ns) / float(end_ns - begin_ns)
            return int(tenant.step_since + np.ceil(share * tenant.step_length))
    return FOREVER


@compiled
def plan_retry(run: RunRecord) -> None:
    """Note when those that are blocked should ask again: at latest when a claim falls."""
    run.retry_at = FOREVER
    if run.n_blocked == 0 or not run.use_claims:
        return
    present = present_in(run)
    for i in range(run.n_present):
        tenant = tenant_of(run, present[i])
        if tenant.busy:
            at = _claim_falls_at(tenant)
            if at > run.clock:
                run.retry_at = min(run.retry_at, at)
