"""The simulator's machine: a clock in compiled code that asks a policy by its address, and does what that says.

Theory of operation
    Steps end on a clock of their own, the *work clock*. It goes slower than time by what the device
    slows each of so many jobs that work together. Arrivals and second looks are events in time.
    With no slowdown both are one::

        step ends -> next step: gives back, goes on, or is blocked until memory is free
                  -> iteration ends: waits at the boundary until the policy starts it
        retry     -> a claim has fallen although nobody gave anything back: who is blocked asks again
        look      -> the policy said that its answer changes now

    Where nobody could go on, one blocked job gets its regions from outside the budget: a stall.

Guarantees
    * Integer nanoseconds and generators of its own: the same input gives the same outcome on every
      machine.
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
from zico.scheduler.grants import (
    blocked_in_turn,
    hold,
    look_when_alone_ends,
    may_take,
    plan_retry,
)
from zico.scheduler.jobs import (
    BUDGET,
    EVENT,
    FOREVER,
    PHASE,
    RUN,
    SAMPLE,
    SAMPLES,
    Extra,
    arrival_of,
    believed_of,
    need_of,
    present_in,
    profile_of,
    scratch_words,
    show_all,
    sim_job_of,
    slowdown_of,
    snapshot_of,
    step_ends_ns,
)
from zico.scheduler.layout import JOB, MEMO_BYTES, MEMORY_BYTES, NO_TIME, NOBODY, SNAPSHOT
from zico.scheduler.turns import decision_at
from zico.trace.profile import expected_end

if TYPE_CHECKING:
    from zico.base.records import Records
    from zico.scheduler.jobs import RunRecord, SimJob, StepEnd


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
def _put(queue: Records[StepEnd], i: int, at: int, order: int, sim_job: int) -> None:
    event = queue[i]
    event.at = at
    event.order = order
    event.sim_job = sim_job


@inlined
def push(run: RunRecord, at: int, sim_job: int) -> None:
    """Add a step that ends at a time."""
    run.order += 1
    run.n_queued += 1
    queue = _queue(run, run.n_queued)
    i = run.n_queued - 1
    while i > 0:
        parent = queue[(i - 1) >> 1]
        if _is_before(parent, at, run.order):
            break
        _put(queue, i, parent.at, parent.order, parent.sim_job)
        i = (i - 1) >> 1
    _put(queue, i, at, run.order, sim_job)


@inlined
def pop(run: RunRecord) -> int:
    """Take the first out; returns its simulated job."""
    n = run.n_queued - 1
    run.n_queued = n
    queue = _queue(run, n + 1)
    sim_job = queue[0].sim_job
    at, order, last = queue[n].at, queue[n].order, queue[n].sim_job
    i = 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and _is_before(queue[child + 1], queue[child].at, queue[child].order):
            child += 1
        if not _is_before(queue[child], at, order):
            break
        _put(queue, i, queue[child].at, queue[child].order, queue[child].sim_job)
        i = child
    _put(queue, i, at, order, last)
    return sim_job


# -- jobs in the simulator: how they come, go through the steps of their iterations, and leave -----

_RUNNING, _BOUNDARY = int(JobState.RUNNING), int(JobState.BOUNDARY)
_BEGINS, _COPIED, _LEAVES, _DECIDED = (int(one) for one in Extra)
_BYTE = np.dtype(np.uint8)


@inlined
def _uniform(sim_job: SimJob) -> float:
    """Draw from -1 to 1. Source: splitmix64 of Steele, Lea and Flood, OOPSLA 2014."""
    sim_job.random += np.uint64(0x9E3779B97F4A7C15)
    z = sim_job.random
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) / float(np.uint64(1) << np.uint64(52)) - 1.0


@inlined
def end_wait(run: RunRecord, sim_job: SimJob) -> None:
    """Count what a simulated job has waited, if it has."""
    if sim_job.waiting_since_ns != NO_TIME:
        sim_job.iteration_waited_ns += run.now_ns - sim_job.waiting_since_ns
        sim_job.waited_ns += run.now_ns - sim_job.waiting_since_ns
        sim_job.counted_waited_ns += max(0, run.now_ns - max(sim_job.waiting_since_ns, run.warm_up_ns))
    sim_job.waiting_since_ns = NO_TIME


@compiled
def go_on(run: RunRecord, number: int) -> None:
    """Begin the work of a step whose regions are there."""
    keep_in_line()
    sim_job = sim_job_of(run, number)
    end_wait(run, sim_job)
    sim_job.busy = 1
    run.n_busy += 1
    sim_job.step_since = run.clock
    length_ns = step_ends_ns(sim_job) - profile_of(sim_job).step_ns[sim_job.step]
    sim_job.step_length = max(1, round(length_ns * sim_job.slowness)) + sim_job.delay_ns
    sim_job.delay_ns = 0
    push(run, run.clock + sim_job.step_length, number)


@compiled
def begin_step(run: RunRecord, number: int) -> None:
    """Give back what the step does not hold; go on, or wait for what it holds more."""
    keep_in_line()
    sim_job = sim_job_of(run, number)
    if run.extra_address != 0 and call(run.extra_address, (run.address, number, _BEGINS)) != 0:
        return
    level = profile_of(sim_job).level[sim_job.step]
    if level < sim_job.held:
        hold(run, number, level)
    sim_job.spilled = min(sim_job.spilled, level - sim_job.held)
    if level > sim_job.held + sim_job.spilled:
        sim_job.waiting_since_ns = run.now_ns
        run.n_blocked += 1
        if run.watches:
            run.look_at_ns = run.now_ns
    else:
        go_on(run, number)


@compiled
def begin(run: RunRecord, number: int) -> None:
    """Begin an iteration."""
    sim_job = sim_job_of(run, number)
    if sim_job.phase == _BOUNDARY:
        run.n_waiting -= 1
        if sim_job.waiting_since_ns != NO_TIME:
            run.longest_wait_ns = max(run.longest_wait_ns, run.now_ns - sim_job.waiting_since_ns)
    sim_job.phase = _RUNNING
    sim_job.step = sim_job.bin = 0
    sim_job.started_ns = run.now_ns
    profile, believed = profile_of(sim_job), believed_of(sim_job)
    sim_job.claim = believed.peak
    sim_job.claim_extra = sim_job.outgrown = 0
    sim_job.overruns = (profile.n_bins << profile.shift) > expected_end(believed)
    end_wait(run, sim_job)
    sim_job.iteration_waited_ns = 0
    sim_job.slowness = 1 + sim_job.jitter * _uniform(sim_job)
    begin_step(run, number)


@compiled
def end_step(run: RunRecord, number: int) -> bool:
    """End the work of a step; tells whether that was the iteration's last."""
    keep_in_line()
    sim_job = sim_job_of(run, number)
    if sim_job.copying:
        call(run.extra_address, (run.address, number, _COPIED))
        return True
    profile = profile_of(sim_job)
    sim_job.busy = 0
    run.n_busy -= 1
    if run.now_ns > run.warm_up_ns:
        sim_job.counted_ns += step_ends_ns(sim_job) - profile.step_ns[sim_job.step]
    if sim_job.step + 1 < profile.n_steps:
        sim_job.step += 1
        begin_step(run, number)
        return False
    _end_iteration(run, number)
    return True


@compiled
def _end_iteration(run: RunRecord, number: int) -> None:
    """Come to the boundary with what the job keeps, or leave."""
    sim_job = sim_job_of(run, number)
    _fade(run, sim_job, profile_of(sim_job).duration_ns)
    sim_job.phase = _BOUNDARY
    run.n_waiting += 1
    sim_job.iteration += 1
    leaves = sim_job.left == 1
    sim_job.left = max(0, sim_job.left - 1)
    sim_job.counted += run.now_ns > run.warm_up_ns
    sim_job.spilled = 0
    if sim_job.next_phase < sim_job.n_phases:
        _change_phase(run, sim_job)
    if sim_job.held > sim_job.keeps and not run.pages:
        hold(run, number, sim_job.keeps)
    sim_job.persistent = sim_job.held
    if not sim_job.profiled:
        sim_job.profiled = 1
        run.changed = 1
    sim_job.waiting_since_ns = run.now_ns
    if run.alone == number:
        run.alone = NOBODY
    if leaves:
        _leave(run, number)


@compiled
def _fade(run: RunRecord, sim_job: SimJob, work_ns: int) -> None:
    passed_ns = float(run.now_ns - sim_job.served_at_ns)
    sim_job.served_work, sim_job.served_time = counted(sim_job.served_work, sim_job.served_time, work_ns, passed_ns)
    sim_job.served_at_ns = run.now_ns


@compiled
def arrive(run: RunRecord) -> None:
    """Let the next in, which begins at once, unless first iterations, too, ask for leave and not for memory alone."""
    number = arrival_of(run, run.n_arrived)
    run.n_arrived += 1
    sim_job = sim_job_of(run, number)
    sim_job.present = 1
    sim_job.served_at_ns = run.now_ns
    run.n_present += 1
    present_in(run)[run.n_present - 1] = number
    _forget(run)
    if not run.asks:
        begin(run, number)
        return
    sim_job.phase = _BOUNDARY
    sim_job.profiled = run.offline
    sim_job.waiting_since_ns = run.now_ns
    run.n_waiting += 1


@compiled
def _leave(run: RunRecord, number: int) -> None:
    """Take a job out whose last iteration has ended."""
    sim_job = sim_job_of(run, number)
    hold(run, number, 0)
    if run.extra_address != 0:
        call(run.extra_address, (run.address, number, _LEAVES))
    sim_job.present = 0
    sim_job.left_ns = run.now_ns
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


@compiled
def _change_phase(run: RunRecord, sim_job: SimJob) -> None:
    """Give a simulated job the profiles that it has, or is believed to have, after so many iterations."""
    keep_out_of_line()
    phases = array_at(sim_job.phases_address, sim_job.n_phases, PHASE)
    while sim_job.next_phase < sim_job.n_phases and phases[sim_job.next_phase].at <= sim_job.iteration:
        phase = phases[sim_job.next_phase]
        sim_job.next_phase += 1
        if phase.keeps < 0:
            sim_job.believed_address = phase.address
            run.changed = 1
        else:
            sim_job.true_address = phase.address
            sim_job.keeps = phase.keeps


# --------------------------------------------------------------------------------------------------


class Stop(enum.IntEnum):
    """Why ``advance`` returned."""

    DONE = 0
    CHANGED = 1
    """Who is there, or what is known of them, has changed; the policy wants to plan."""


_DONE, _CHANGED = int(Stop.DONE), int(Stop.CHANGED)
_LOOK, _RETRY, _BUDGET, _ARRIVAL, _STEP = range(5)  # what happens next; of those at one time, the last one first
_SNAPSHOT_BYTES, _JOB_BYTES, _SAMPLE_BYTES = SNAPSHOT.itemsize, JOB.itemsize, SAMPLE.itemsize
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
                hold(run, number, sim_job_of(run, number).held + regions)
                granted = True
            if need_of(sim_job_of(run, number)) == 0:
                run.n_blocked -= 1
                go_on(run, number)
                granted = True


@compiled
def _decide(run: RunRecord) -> None:
    """Ask the policy; start those that it starts, and note when it wants to be asked again."""
    show_all(run)
    if run.decisions == run.sample_at:
        _keep(run)
    call(run.policy_address, (run.snapshot_address,))
    run.decisions += 1
    snapshot, present = snapshot_of(run), present_in(run)
    look_at_ns = FOREVER
    for i in range(snapshot.n):
        if job_at(snapshot, i).phase != _BOUNDARY:
            continue
        sim_job, decision = sim_job_of(run, present[i]), decision_at(snapshot, i)
        if decision.starts and not sim_job.copying:
            begin(run, present[i])
            continue
        if decision.until_ns != NO_TIME:
            look_at_ns = min(look_at_ns, decision.until_ns)
        if run.now_ns > run.warm_up_ns:
            sim_job.reasons[decision.reason] += 1
            sim_job.against[decision.reason] = NOBODY if decision.against < 0 else present[decision.against]
    if run.pauses:
        look_at_ns = min(look_at_ns, call(run.extra_address, (run.address, NOBODY, _DECIDED)))
    run.look_at_ns = max(run.now_ns + 1, look_at_ns) if look_at_ns < FOREVER else FOREVER


@compiled
def _keep(run: RunRecord) -> None:
    """Copy the snapshot for ``decision_cost``; ever fewer of those that are seen."""
    keep_out_of_line()
    snapshot = snapshot_of(run)
    run.sample_at = run.decisions + max(1, run.decisions // _SAMPLE_STEP)
    if run.n_samples == SAMPLES or run.n_sampled_jobs + snapshot.n > run.n_sample_jobs:
        return
    sample = array_at(run.samples_address, SAMPLES, SAMPLE)[run.n_samples]
    sample.first = run.n_sampled_jobs
    at = run.samples_address + run.n_samples * _SAMPLE_BYTES
    array_at(at, _SNAPSHOT_BYTES, _BYTE)[:] = array_at(run.snapshot_address, _SNAPSHOT_BYTES, _BYTE)
    size = snapshot.n * _JOB_BYTES
    at = run.sample_jobs_address + run.n_sampled_jobs * _JOB_BYTES
    array_at(at, size, _BYTE)[:] = array_at(snapshot.jobs_address, size, _BYTE)
    run.n_samples += 1
    run.n_sampled_jobs += snapshot.n


@compiled
def _overflow(run: RunRecord) -> None:
    """Give the one that has been blocked for the longest what it needs from outside the budget: nobody could go on."""
    run.stalls += 1
    if blocked_in_turn(run) > 0:
        sim_job = sim_job_of(run, scratch_words(run, 5)[0])
        sim_job.spilled += need_of(sim_job)
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
        arrive_ns = max(run.now_ns, sim_job_of(run, arrival_of(run, run.n_arrived)).arrive_ns)
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
