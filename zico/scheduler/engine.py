"""The simulator's machine: jobs, memory and a clock in compiled code, asking a policy by its address.

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
from typing import Any

import numpy as np

from zico.compiled import call, compiled, inlined, record_at
from zico.scheduler.claims import is_safe
from zico.scheduler.demand import claim_of, job_at, span_at
from zico.scheduler.events import first_at, pop, push
from zico.scheduler.layout import FADE_ITERATIONS, NO_TIME, NOBODY, Phase
from zico.scheduler.tenants import (
    FOREVER,
    LOG,
    arrival_of,
    need_of,
    present_in,
    profile_of,
    scene_of,
    scratch_flags,
    scratch_words,
    show_all,
    show_place,
    slowdown_of,
    step_ends_ns,
    tenant_of,
)
from zico.scheduler.turns import decision_at


class Stop(enum.IntEnum):
    """Why ``advance`` returned."""

    DONE = 0
    CHANGED = 1
    """Who is there, or what is known of them, has changed; the policy wants to plan."""


_RUNNING, _BOUNDARY = int(Phase.RUNNING), int(Phase.BOUNDARY)
_DONE, _CHANGED = int(Stop.DONE), int(Stop.CHANGED)
_LOG_BYTES = LOG.itemsize
_LOOK, _RETRY, _ARRIVAL, _STEP = 0, 1, 2, 3  # what happens next; of those at one time, the last one first

Record = Any


@inlined
def _uniform(tenant: Record) -> float:
    """Draw from -1 to 1. Source: splitmix64 of Steele, Lea and Flood, OOPSLA 2014."""
    tenant.random += np.uint64(0x9E3779B97F4A7C15)
    z = tenant.random
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) / float(np.uint64(1) << np.uint64(52)) - 1.0


# -- regions ----------------------------------------------------------------------------------------------------------


@inlined
def _hold(run: Record, number: int, regions: int) -> None:
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
def _is_safe_after(run: Record, grown: int, regions: int) -> bool:
    """Tell whether all that are in an iteration can end it once a job has so many regions more."""
    scene, present = scene_of(run), present_in(run)
    held, claim, residual = scratch_words(run, 0), scratch_words(run, 1), scratch_words(run, 2)
    must_finish, done = scratch_flags(run, 3), scratch_flags(run, 4)
    for i in range(run.n_present):
        tenant, job = tenant_of(run, present[i]), job_at(scene, i)
        show_place(run, tenant, job)
        held[i] = tenant.held + (regions if present[i] == grown else 0)
        claim[i] = max(claim_of(job), tenant.held + need_of(tenant))
        residual[i] = tenant.persistent
        must_finish[i] = tenant.phase == _RUNNING and tenant.profiled == 1
    return is_safe(run.budget - run.granted - regions, held, claim, residual, must_finish, done, run.n_present)


@compiled
def _may_take(run: Record, number: int) -> int:
    """Return how many of the regions that a job needs it may take now: if some leave a safe state, fewer do."""
    tenant = tenant_of(run, number)
    most = max(0, min(run.budget - run.granted, need_of(tenant)))
    if most == 0 or not run.use_claims:
        return most
    if tenant.profiled == 0:
        if run.alone not in (NOBODY, number):
            return 0
        run.alone = number
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
def _blocked_in_turn(run: Record) -> int:
    """Put those that are blocked into scratch, the longest waiting first; returns how many they are."""
    blocked = scratch_words(run, 5)
    present = present_in(run)
    n = 0
    for i in range(run.n_present):
        tenant = tenant_of(run, present[i])
        if tenant.phase == _RUNNING and not tenant.busy:
            at = n
            while at > 0 and tenant_of(run, blocked[at - 1]).waiting_since_ns > tenant.waiting_since_ns:
                blocked[at] = blocked[at - 1]
                at -= 1
            blocked[at] = present[i]
            n += 1
    return n


@compiled
def _serve(run: Record) -> None:
    """Grant what is safe, longest waiting first, until nobody gets any more; let the satisfied go on."""
    granted = True
    while granted and run.n_blocked > 0:
        granted = False
        n = _blocked_in_turn(run)
        blocked = scratch_words(run, 5)
        for i in range(n):
            number = blocked[i]
            regions = _may_take(run, number)
            if regions > 0:
                _hold(run, number, tenant_of(run, number).held + regions)
                granted = True
            if need_of(tenant_of(run, number)) == 0:
                run.n_blocked -= 1
                _go_on(run, number)
                granted = True


@compiled
def _claim_falls_at(tenant: Record) -> int:
    """Return when, on the work clock, a job's claim next falls within the step that it is in."""
    profile = profile_of(tenant)
    begin_ns, end_ns = profile.step_ns[tenant.step], step_ends_ns(tenant)
    now_in = span_at(profile.bin_ns, profile.n_bins, begin_ns)
    claims = profile.claims
    for later in range(now_in + 1, profile.n_bins):
        if profile.bin_ns[later] >= end_ns:
            break
        if claims[later - 1] < claims[max(now_in - 1, 0)]:
            share = float(profile.bin_ns[later] - begin_ns) / float(end_ns - begin_ns)
            return int(tenant.step_since + np.ceil(share * tenant.step_length))
    return FOREVER


@compiled
def _plan_retry(run: Record) -> None:
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


# -- iterations and steps ---------------------------------------------------------------------------------------------


@inlined
def _end_wait(run: Record, tenant: Record) -> None:
    if tenant.waiting_since_ns != 0:
        tenant.waited_ns += max(0, run.now_ns - max(tenant.waiting_since_ns, run.warm_up_ns))
    tenant.waiting_since_ns = 0


@inlined
def _go_on(run: Record, number: int) -> None:
    """Begin the work of a step whose regions are there."""
    tenant = tenant_of(run, number)
    _end_wait(run, tenant)
    tenant.busy = 1
    run.n_busy += 1
    tenant.step_since = run.clock
    length_ns = step_ends_ns(tenant) - profile_of(tenant).step_ns[tenant.step]
    tenant.step_length = max(1, round(length_ns * tenant.slowness))
    push(run, run.clock + tenant.step_length, number)


@inlined
def _begin_step(run: Record, number: int) -> None:
    """Give back what the step does not hold; go on, or wait for what it holds more."""
    tenant = tenant_of(run, number)
    level = profile_of(tenant).level[tenant.step]
    if level < tenant.held:
        _hold(run, number, level)
    tenant.spilled = min(tenant.spilled, level - tenant.held)
    if level > tenant.held + tenant.spilled:
        tenant.waiting_since_ns = run.now_ns
        run.n_blocked += 1
    else:
        _go_on(run, number)


@compiled
def _begin(run: Record, number: int) -> None:
    """Begin an iteration."""
    tenant = tenant_of(run, number)
    if tenant.phase == _BOUNDARY:
        run.n_waiting -= 1
        if tenant.waiting_since_ns != 0:
            run.longest_wait_ns = max(run.longest_wait_ns, run.now_ns - tenant.waiting_since_ns)
    tenant.phase = _RUNNING
    tenant.step = tenant.bin = 0
    tenant.started_ns = run.now_ns
    _end_wait(run, tenant)
    tenant.slowness = 1 + tenant.jitter * _uniform(tenant)
    _begin_step(run, number)


@inlined
def _end_step(run: Record, number: int) -> bool:
    """End the work of a step; tells whether that was the iteration's last."""
    tenant = tenant_of(run, number)
    profile = profile_of(tenant)
    tenant.busy = 0
    run.n_busy -= 1
    if run.now_ns > run.warm_up_ns:
        tenant.counted_ns += step_ends_ns(tenant) - profile.step_ns[tenant.step]
    if tenant.step + 1 < profile.n_steps:
        tenant.step += 1
        _begin_step(run, number)
        return False
    _end_iteration(run, number)
    return True


@compiled
def _end_iteration(run: Record, number: int) -> None:
    """Come to the boundary with what the job keeps, or leave."""
    tenant = tenant_of(run, number)
    _fade(run, tenant, profile_of(tenant).duration_ns)
    tenant.phase = _BOUNDARY
    run.n_waiting += 1
    tenant.iteration += 1
    tenant.spilled = 0
    if tenant.held > tenant.keeps:
        _hold(run, number, tenant.keeps)
    tenant.persistent = tenant.held
    if not tenant.profiled:
        tenant.profiled = 1
        run.changed = 1
    tenant.waiting_since_ns = run.now_ns
    if run.alone == number:
        run.alone = NOBODY
    if tenant.iteration == tenant.limit:
        _leave(run, number)


@compiled
def _fade(run: Record, tenant: Record, work_ns: int) -> None:
    """Count an iteration into the job's recent throughput."""
    passed = float(run.now_ns - tenant.served_at_ns)
    keeps = np.exp(-passed / (FADE_ITERATIONS * work_ns))
    tenant.served_work = keeps * tenant.served_work + work_ns
    tenant.served_time = keeps * tenant.served_time + passed
    tenant.served_at_ns = run.now_ns


@compiled
def _arrive(run: Record) -> None:
    """Let the next in, which begins at once: its first iteration asks for memory, not for leave."""
    number = arrival_of(run, run.n_arrived)
    run.n_arrived += 1
    tenant = tenant_of(run, number)
    tenant.present = 1
    tenant.served_at_ns = run.now_ns
    run.n_present += 1
    present_in(run)[run.n_present - 1] = number
    run.changed = 1
    _begin(run, number)


@compiled
def _leave(run: Record, number: int) -> None:
    """Take a job out whose last iteration has ended."""
    tenant = tenant_of(run, number)
    _hold(run, number, 0)
    tenant.present = 0
    tenant.left_ns = run.now_ns
    run.n_waiting -= 1
    run.changed = 1
    present = present_in(run)
    k = 0
    for i in range(run.n_present):
        if present[i] != number:
            present[k] = present[i]
            k += 1
    run.n_present = k


# -- decisions --------------------------------------------------------------------------------------------------------


@compiled
def _decide(run: Record) -> None:
    """Ask the policy; start those that it starts, and note when it wants to be asked again."""
    show_all(run)
    call(run.policy_address, (run.scene_address,))
    run.decisions += 1
    scene, present = scene_of(run), present_in(run)
    look_at_ns = FOREVER
    for i in range(scene.n):
        if job_at(scene, i).phase != _BOUNDARY:
            continue
        tenant, decision = tenant_of(run, present[i]), decision_at(scene, i)
        if decision.starts:
            _begin(run, present[i])
            continue
        if decision.until_ns != NO_TIME:
            look_at_ns = min(look_at_ns, decision.until_ns)
        if run.now_ns > run.warm_up_ns:
            tenant.reasons[decision.reason] += 1
            tenant.against[decision.reason] = NOBODY if decision.against < 0 else present[decision.against]
    run.look_at_ns = max(run.now_ns + 1, look_at_ns) if look_at_ns < FOREVER else FOREVER


@compiled
def _overflow(run: Record) -> None:
    """Give the first that is blocked what it needs from outside the budget: nobody else could go on."""
    run.stalls += 1
    present = present_in(run)
    for i in range(run.n_present):
        tenant = tenant_of(run, present[i])
        need = need_of(tenant)
        if need > 0:
            tenant.spilled += need
            break
    _serve(run)


@compiled
def _settle(run: Record, event: int) -> None:
    """Give what can be given, decide who starts, and see that somebody goes on."""
    _serve(run)
    if event != _RETRY and run.n_waiting > 0:
        _decide(run)
        _serve(run)
    if run.n_blocked > 0 and run.n_busy == 0:
        _overflow(run)
    _plan_retry(run)


@inlined
def _in_time(run: Record, at: int, factor: float) -> int:
    """Return when it will be that late on the work clock, if no more and no fewer jobs work until then."""
    return run.now_ns + np.int64(np.ceil((at - run.clock) * factor))


@inlined
def _next(run: Record, factor: float) -> tuple[int, int]:
    """Return what happens next, and when."""
    event, next_ns = _LOOK, run.look_at_ns
    if run.retry_at < FOREVER and _in_time(run, run.retry_at, factor) <= next_ns:
        event, next_ns = _RETRY, _in_time(run, run.retry_at, factor)
    if run.n_arrived < run.n_arrivals:
        arrive_ns = max(run.now_ns, tenant_of(run, arrival_of(run, run.n_arrived)).arrive_ns)
        if arrive_ns <= next_ns:
            event, next_ns = _ARRIVAL, arrive_ns
    if run.n_queued > 0 and _in_time(run, first_at(run), factor) <= next_ns:
        event, next_ns = _STEP, _in_time(run, first_at(run), factor)
    return event, next_ns


@compiled
def advance(run: Record, until_ns: int) -> int:
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
            run.clock += np.int64((next_ns - run.now_ns) / factor)
        run.now_ns = next_ns
        ended = True
        if event == _STEP:
            ended = _end_step(run, pop(run))
        elif event == _ARRIVAL:
            _arrive(run)
        elif event == _LOOK:
            run.look_at_ns = FOREVER
        if ended or run.n_blocked > 0:
            _settle(run, event if ended else _RETRY)
