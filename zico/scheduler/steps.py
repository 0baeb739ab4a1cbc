"""Jobs in the simulator: how they come, go through the steps of their iterations, and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zico.compiled import array_at, compiled, inlined, keep_in_line, keep_out_of_line
from zico.pool.layout import JobState
from zico.pool.rules import counted
from zico.scheduler.events import push
from zico.scheduler.grants import hold
from zico.scheduler.layout import MEMO_BYTES, MEMORY_BYTES, NO_TIME, NOBODY
from zico.scheduler.paging import page_out_all, page_step
from zico.scheduler.tenants import (
    PHASE,
    arrival_of,
    believed_of,
    present_in,
    profile_of,
    step_ends_ns,
    tenant_of,
)
from zico.trace.curve import expected_end

if TYPE_CHECKING:
    from zico.scheduler.tenants import RunRecord, Tenant

_RUNNING, _BOUNDARY = int(JobState.RUNNING), int(JobState.BOUNDARY)
_BYTE = np.dtype(np.uint8)


@inlined
def _uniform(tenant: Tenant) -> float:
    """Draw from -1 to 1. Source: splitmix64 of Steele, Lea and Flood, OOPSLA 2014."""
    tenant.random += np.uint64(0x9E3779B97F4A7C15)
    z = tenant.random
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) / float(np.uint64(1) << np.uint64(52)) - 1.0


@inlined
def _end_wait(run: RunRecord, tenant: Tenant) -> None:
    if tenant.waiting_since_ns != NO_TIME:
        tenant.waited_ns += max(0, run.now_ns - max(tenant.waiting_since_ns, run.warm_up_ns))
    tenant.waiting_since_ns = NO_TIME


@compiled
def go_on(run: RunRecord, number: int) -> None:
    """Begin the work of a step whose regions are there."""
    keep_in_line()
    tenant = tenant_of(run, number)
    _end_wait(run, tenant)
    tenant.busy = 1
    run.n_busy += 1
    tenant.step_since = run.clock
    length_ns = step_ends_ns(tenant) - profile_of(tenant).step_ns[tenant.step]
    tenant.step_length = max(1, round(length_ns * tenant.slowness)) + tenant.delay_ns
    tenant.delay_ns = 0
    push(run, run.clock + tenant.step_length, number)


@compiled
def _begin_step(run: RunRecord, number: int) -> None:
    """Give back what the step does not hold; go on, or wait for what it holds more."""
    keep_in_line()
    tenant = tenant_of(run, number)
    if run.pages:
        page_step(run, number)
        go_on(run, number)
        return
    level = profile_of(tenant).level[tenant.step]
    if level < tenant.held:
        hold(run, number, level)
    tenant.spilled = min(tenant.spilled, level - tenant.held)
    if level > tenant.held + tenant.spilled:
        tenant.waiting_since_ns = run.now_ns
        run.n_blocked += 1
        if run.watches:
            run.look_at_ns = run.now_ns
    else:
        go_on(run, number)


@compiled
def begin(run: RunRecord, number: int) -> None:
    """Begin an iteration."""
    tenant = tenant_of(run, number)
    if tenant.phase == _BOUNDARY:
        run.n_waiting -= 1
        if tenant.waiting_since_ns != NO_TIME:
            run.longest_wait_ns = max(run.longest_wait_ns, run.now_ns - tenant.waiting_since_ns)
    tenant.phase = _RUNNING
    tenant.step = tenant.bin = tenant.stopped = 0
    tenant.started_ns = run.now_ns
    profile, believed = profile_of(tenant), believed_of(tenant)
    tenant.claim = believed.peak
    tenant.overruns = (profile.n_bins << profile.shift) > expected_end(believed)
    _end_wait(run, tenant)
    tenant.delay_ns = round(tenant.away * run.copy_ns)
    tenant.away = 0
    tenant.slowness = 1 + tenant.jitter * _uniform(tenant)
    _begin_step(run, number)


@compiled
def end_step(run: RunRecord, number: int) -> bool:
    """End the work of a step; tells whether that was the iteration's last."""
    keep_in_line()
    tenant = tenant_of(run, number)
    if tenant.copying:
        _end_copy(run, number)
        return True
    profile = profile_of(tenant)
    tenant.busy = 0
    run.n_busy -= 1
    if run.now_ns > run.warm_up_ns:
        tenant.counted_ns += step_ends_ns(tenant) - profile.step_ns[tenant.step]
    if tenant.step + 1 < profile.n_steps:
        tenant.step += 1
        if tenant.stopped:
            tenant.suspended = 1
            tenant.waiting_since_ns = run.now_ns
        else:
            _begin_step(run, number)
        return False
    _end_iteration(run, number)
    return True


@compiled
def _end_iteration(run: RunRecord, number: int) -> None:
    """Come to the boundary with what the job keeps, or leave."""
    tenant = tenant_of(run, number)
    _fade(run, tenant, profile_of(tenant).duration_ns)
    tenant.phase = _BOUNDARY
    run.n_waiting += 1
    tenant.iteration += 1
    leaves = tenant.left == 1
    tenant.left = max(0, tenant.left - 1)
    tenant.counted += run.now_ns > run.warm_up_ns
    tenant.spilled = 0
    if tenant.next_phase < tenant.n_phases:
        _change_phase(run, tenant)
    if tenant.held > tenant.keeps and not run.pages:
        hold(run, number, tenant.keeps)
    tenant.persistent = tenant.kept = tenant.held
    if not tenant.profiled:
        tenant.profiled = 1
        run.changed = 1
    tenant.waiting_since_ns = run.now_ns
    if run.alone == number:
        run.alone = NOBODY
    if leaves:
        _leave(run, number)


@compiled
def _fade(run: RunRecord, tenant: Tenant, work_ns: int) -> None:
    """Count an iteration into the job's recent throughput."""
    passed_ns = float(run.now_ns - tenant.served_at_ns)
    tenant.served_work, tenant.served_time = counted(tenant.served_work, tenant.served_time, work_ns, passed_ns)
    tenant.served_at_ns = run.now_ns


@compiled
def arrive(run: RunRecord) -> None:
    """Let the next in, which begins at once, unless first iterations, too, ask for leave and not for memory alone."""
    number = arrival_of(run, run.n_arrived)
    run.n_arrived += 1
    tenant = tenant_of(run, number)
    tenant.present = 1
    tenant.served_at_ns = run.now_ns
    run.n_present += 1
    present_in(run)[run.n_present - 1] = number
    _forget(run)
    if not run.asks:
        begin(run, number)
        return
    tenant.phase = _BOUNDARY
    tenant.profiled = run.offline
    tenant.waiting_since_ns = run.now_ns
    run.n_waiting += 1


@compiled
def _leave(run: RunRecord, number: int) -> None:
    """Take a job out whose last iteration has ended."""
    tenant = tenant_of(run, number)
    hold(run, number, 0)
    page_out_all(run, number)
    tenant.present = 0
    tenant.left_ns = run.now_ns
    run.n_waiting -= 1
    present = present_in(run)
    k = 0
    for i in range(run.n_present):
        if present[i] != number:
            present[k] = present[i]
            k += 1
    run.n_present = k
    _forget(run)


@compiled
def _forget(run: RunRecord) -> None:
    """Let the policy know that the jobs are others."""
    run.changed = 1
    array_at(run.memory_address, MEMORY_BYTES, _BYTE)[:] = 0
    array_at(run.memos_address, run.n_present * MEMO_BYTES, _BYTE)[:] = 0


# -- what some policies and loads do besides --------------------------------------------------------------------------


@compiled
def resume(run: RunRecord, number: int) -> None:
    """Let a suspended tenant go on with its next step."""
    tenant = tenant_of(run, number)
    tenant.suspended = 0
    _end_wait(run, tenant)
    _begin_step(run, number)


@compiled
def copy_out(run: RunRecord, number: int) -> None:
    """Begin to copy out what a tenant holds at its boundary."""
    tenant = tenant_of(run, number)
    tenant.copying = 1
    run.copied += tenant.held
    push(run, run.clock + max(1, round(tenant.held * run.copy_ns)), number)


@compiled
def _end_copy(run: RunRecord, number: int) -> None:
    keep_out_of_line()
    tenant = tenant_of(run, number)
    tenant.copying = 0
    tenant.away = tenant.held
    hold(run, number, 0)


@compiled
def _change_phase(run: RunRecord, tenant: Tenant) -> None:
    """Give a tenant the profiles that it has, or is believed to have, after so many iterations."""
    keep_out_of_line()
    phases = array_at(tenant.phases_address, tenant.n_phases, PHASE)
    while tenant.next_phase < tenant.n_phases and phases[tenant.next_phase].at <= tenant.iteration:
        phase = phases[tenant.next_phase]
        tenant.next_phase += 1
        if phase.keeps < 0:
            tenant.believed_address = phase.address
            run.changed = 1
        else:
            tenant.true_address = phase.address
            tenant.keeps = phase.keeps
