"""The simulator's machine: a clock in compiled code that asks a policy by its address, and does what that says.

Theory of operation
    Steps end on a clock of their own, the *work clock*, which goes slower than time by what the device slows each of
    so many jobs that work together; arrivals and second looks are events in time. With no slowdown both are one::

        step ends -> next step: gives back, goes on, or is blocked until memory is free
                  -> iteration ends: waits at the boundary until the policy starts it
        retry     -> a claim has fallen although nobody gave anything back: who is blocked asks again
        look      -> the policy said that its answer changes now

    Where nobody could go on, one blocked job gets its regions from outside the budget: a stall.

Guarantees
    * Integer nanoseconds and generators of its own: the same input gives the same outcome on every machine.
    * Granted regions never exceed the budget; what overflows in a stall is counted apart.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from zico.base.compiled import array_at, call, compiled, entry, inlined, keep_in_line, keep_out_of_line, record_at
from zico.pool.layout import JobState
from zico.pool.rules import counted
from zico.scheduler.demand import job_at
from zico.scheduler.layout import JOB, MEMO_BYTES, MEMORY_BYTES, NO_TIME, NOBODY, SCENE
from zico.scheduler.turns import decision_at
from zico.simulator.grants import (
    blocked_in_turn,
    hold,
    look_when_alone_ends,
    may_take,
    page_out_all,
    page_step,
    plan_retry,
)
from zico.simulator.jobs import (
    BUDGET,
    EVENT,
    FOREVER,
    PHASE,
    RUN,
    SAMPLE,
    SAMPLES,
    arrival_of,
    believed_of,
    need_of,
    present_in,
    profile_of,
    scene_of,
    scratch_words,
    show_all,
    slowdown_of,
    step_ends_ns,
    tenant_of,
)
from zico.trace.profile import expected_end

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.simulator.jobs import RunRecord, StepEnd, Tenant


# -- the simulator's queue of steps that end: a binary heap, by time and then by order -------------


@inlined
def _queue(run: RunRecord, n: int) -> Records[StepEnd]:
    return array_at(run.queue_address, n, EVENT)


@inlined
def first_at(run: RunRecord) -> int:
    """Return when, on the work clock, the next step ends; there must be one."""
    return record_at(run.queue_address, EVENT).at


@inlined
def _is_before(one: StepEnd, at: int, order: int) -> bool:
    return one.at < at or (one.at == at and one.order < order)


@inlined
def _put(queue: Records[StepEnd], i: int, at: int, order: int, tenant: int) -> None:
    event = queue[i]
    event.at = at
    event.order = order
    event.tenant = tenant


@inlined
def push(run: RunRecord, at: int, tenant: int) -> None:
    """Add a step that ends at a time."""
    run.order += 1
    run.n_queued += 1
    queue = _queue(run, run.n_queued)
    i = run.n_queued - 1
    while i > 0:
        parent = queue[(i - 1) >> 1]
        if _is_before(parent, at, run.order):
            break
        _put(queue, i, parent.at, parent.order, parent.tenant)
        i = (i - 1) >> 1
    _put(queue, i, at, run.order, tenant)


@inlined
def pop(run: RunRecord) -> int:
    """Take the first out; returns its tenant."""
    n = run.n_queued - 1
    run.n_queued = n
    queue = _queue(run, n + 1)
    tenant = queue[0].tenant
    at, order, last = queue[n].at, queue[n].order, queue[n].tenant
    i = 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and _is_before(queue[child + 1], queue[child].at, queue[child].order):
            child += 1
        if not _is_before(queue[child], at, order):
            break
        _put(queue, i, queue[child].at, queue[child].order, queue[child].tenant)
        i = child
    _put(queue, i, at, order, last)
    return tenant


# -- jobs in the simulator: how they come, go through the steps of their iterations, and leave -----

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


# --------------------------------------------------------------------------------------------------


class Stop(enum.IntEnum):
    """Why ``advance`` returned."""

    DONE = 0
    CHANGED = 1
    """Who is there, or what is known of them, has changed; the policy wants to plan."""


_DONE, _CHANGED = int(Stop.DONE), int(Stop.CHANGED)
_LOOK, _RETRY, _BUDGET, _ARRIVAL, _STEP = range(5)  # what happens next; of those at one time, the last one first
_SCENE_BYTES, _JOB_BYTES, _SAMPLE_BYTES = SCENE.itemsize, JOB.itemsize, SAMPLE.itemsize
_SAMPLE_STEP = 8  # of the decisions so far, one eighth goes by until the next is kept


@compiled
def _serve(run: RunRecord) -> None:
    """Grant what is safe, longest waiting first, until nobody gets any more; let the satisfied go on."""
    granted = True
    while granted and run.n_blocked > 0:
        granted = False
        n = blocked_in_turn(run)
        blocked = scratch_words(run, 5)
        for i in range(n):
            number = blocked[i]
            regions = may_take(run, number)
            if regions > 0:
                hold(run, number, tenant_of(run, number).held + regions)
                granted = True
            if need_of(tenant_of(run, number)) == 0:
                run.n_blocked -= 1
                go_on(run, number)
                granted = True


@compiled
def _decide(run: RunRecord) -> None:
    """Ask the policy; start those that it starts, and note when it wants to be asked again."""
    show_all(run)
    if run.decisions == run.sample_at:
        _keep(run)
    call(run.policy_address, (run.scene_address,))
    run.decisions += 1
    scene, present = scene_of(run), present_in(run)
    look_at_ns = FOREVER
    for i in range(scene.n):
        if job_at(scene, i).phase != _BOUNDARY:
            continue
        tenant, decision = tenant_of(run, present[i]), decision_at(scene, i)
        if decision.starts and not tenant.copying:
            begin(run, present[i])
            continue
        if decision.until_ns != NO_TIME:
            look_at_ns = min(look_at_ns, decision.until_ns)
        if run.now_ns > run.warm_up_ns:
            tenant.reasons[decision.reason] += 1
            tenant.against[decision.reason] = NOBODY if decision.against < 0 else present[decision.against]
    if run.pauses:
        look_at_ns = min(look_at_ns, _obey(run))
    run.look_at_ns = max(run.now_ns + 1, look_at_ns) if look_at_ns < FOREVER else FOREVER


@compiled
def _obey(run: RunRecord) -> int:
    """Stop, let go on and copy out whom the policy says; returns when it wants to be asked again because of them."""
    keep_out_of_line()
    scene, present = scene_of(run), present_in(run)
    look_at_ns = FOREVER
    for i in range(scene.n):
        tenant, decision = tenant_of(run, present[i]), decision_at(scene, i)
        tenant.yields = decision.yields
        look_at_ns = look_at_ns if decision.until_ns == NO_TIME else min(look_at_ns, decision.until_ns)
        if tenant.phase == _RUNNING:
            tenant.stopped = decision.pauses
            if tenant.suspended and not tenant.stopped:
                resume(run, present[i])
        elif decision.evicts and not decision.starts and not tenant.copying and tenant.held > 0:
            copy_out(run, present[i])
    return look_at_ns


@compiled
def _keep(run: RunRecord) -> None:
    """Copy the scene for ``decision_cost``; ever fewer of those that are seen."""
    keep_out_of_line()
    scene = scene_of(run)
    run.sample_at = run.decisions + max(1, run.decisions // _SAMPLE_STEP)
    if run.n_samples == SAMPLES or run.n_sampled_jobs + scene.n > run.n_sample_jobs:
        return
    sample = array_at(run.samples_address, SAMPLES, SAMPLE)[run.n_samples]
    sample.first = run.n_sampled_jobs
    at = run.samples_address + run.n_samples * _SAMPLE_BYTES
    array_at(at, _SCENE_BYTES, _BYTE)[:] = array_at(run.scene_address, _SCENE_BYTES, _BYTE)
    size = scene.n * _JOB_BYTES
    at = run.sample_jobs_address + run.n_sampled_jobs * _JOB_BYTES
    array_at(at, size, _BYTE)[:] = array_at(scene.jobs_address, size, _BYTE)
    run.n_samples += 1
    run.n_sampled_jobs += scene.n


@compiled
def _overflow(run: RunRecord) -> None:
    """Give the one that has been blocked for the longest what it needs from outside the budget: nobody could go on."""
    run.stalls += 1
    if blocked_in_turn(run) > 0:
        tenant = tenant_of(run, scratch_words(run, 5)[0])
        tenant.spilled += need_of(tenant)
    _serve(run)


@compiled
def _settle(run: RunRecord, event: int) -> None:
    """Give what can be given, decide who starts, and see that somebody goes on."""
    _serve(run)
    if event != _RETRY and (run.n_waiting > 0 or ((run.pauses or run.watches) and run.n_present > 0)):
        _decide(run)
        _serve(run)
    if run.n_blocked > 0 and run.n_busy == 0:
        _overflow(run)
    plan_retry(run)
    if run.alone != NOBODY:
        look_when_alone_ends(run)


@compiled
def _change_budget(run: RunRecord) -> None:
    """Take the next budget; where more is granted, nothing more is until enough has come back."""
    keep_out_of_line()
    budgets = array_at(run.budgets_address, run.n_budgets, BUDGET)
    run.budget = budgets[run.next_budget].regions
    run.next_budget += 1
    run.next_budget_ns = budgets[run.next_budget].t_ns if run.next_budget < run.n_budgets else FOREVER
    run.changed = 1


@inlined
def _in_time(run: RunRecord, at: int, factor: float) -> int:
    """Return when it will be that late on the work clock, if no more and no fewer jobs work until then."""
    return run.now_ns + int(np.ceil((at - run.clock) * factor))


@inlined
def _next(run: RunRecord, factor: float) -> tuple[int, int]:
    """Return what happens next, and when."""
    event, next_ns = _LOOK, run.look_at_ns
    if run.retry_at < FOREVER and _in_time(run, run.retry_at, factor) <= next_ns:
        event, next_ns = _RETRY, _in_time(run, run.retry_at, factor)
    if run.next_budget_ns <= next_ns:
        event, next_ns = _BUDGET, max(run.now_ns, run.next_budget_ns)
    if run.n_arrived < run.n_arrivals:
        arrive_ns = max(run.now_ns, tenant_of(run, arrival_of(run, run.n_arrived)).arrive_ns)
        if arrive_ns <= next_ns:
            event, next_ns = _ARRIVAL, arrive_ns
    if run.n_queued > 0 and _in_time(run, first_at(run), factor) <= next_ns:
        event, next_ns = _STEP, _in_time(run, first_at(run), factor)
    return event, next_ns


@compiled
def _come_about(run: RunRecord, event: int) -> None:
    """Do what happens besides steps."""
    if event == _ARRIVAL:
        arrive(run)
    elif event == _LOOK:
        run.look_at_ns = FOREVER
    elif event == _BUDGET:
        _change_budget(run)


@entry(RUN, int)
def advance(run: RunRecord, until_ns: int) -> int:
    """Go on to a time, or until the policy wants to plan; returns a ``Stop``."""
    while True:
        if run.changed and run.plans:
            run.changed = 0
            return _CHANGED
        factor = slowdown_of(run)
        event, next_ns = _next(run, factor)
        if next_ns > until_ns:
            return _DONE
        if event == _STEP:
            run.clock = first_at(run)
        elif event == _RETRY:
            run.clock = run.retry_at
        else:
            run.clock += int((next_ns - run.now_ns) / factor)
        run.now_ns = next_ns
        ended = True
        if event == _STEP:
            ended = end_step(run, pop(run))
        else:
            _come_about(run, event)
        if ended or run.n_blocked > 0:
            _settle(run, event if ended else _RETRY)
