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

from zico.compiled import array_at, call, compiled, entry, inlined, keep_out_of_line
from zico.pool.layout import JobState
from zico.scheduler.demand import job_at
from zico.scheduler.events import first_at, pop
from zico.scheduler.grants import blocked_in_turn, hold, look_when_alone_ends, may_take, plan_retry
from zico.scheduler.layout import JOB, NO_TIME, NOBODY, SCENE
from zico.scheduler.steps import arrive, begin, copy_out, end_step, go_on, resume
from zico.scheduler.tenants import (
    BUDGET,
    FOREVER,
    RUN,
    SAMPLE,
    SAMPLES,
    arrival_of,
    need_of,
    present_in,
    scene_of,
    scratch_words,
    show_all,
    slowdown_of,
    tenant_of,
)
from zico.scheduler.turns import decision_at

if TYPE_CHECKING:
    from zico.scheduler.tenants import RunRecord


class Stop(enum.IntEnum):
    """Why ``advance`` returned."""

    DONE = 0
    CHANGED = 1
    """Who is there, or what is known of them, has changed; the policy wants to plan."""


_RUNNING, _BOUNDARY = int(JobState.RUNNING), int(JobState.BOUNDARY)
_DONE, _CHANGED = int(Stop.DONE), int(Stop.CHANGED)
_LOOK, _RETRY, _BUDGET, _ARRIVAL, _STEP = range(5)  # what happens next; of those at one time, the last one first
_BYTE = np.dtype(np.uint8)
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
