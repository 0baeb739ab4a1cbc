"""What the simulator does for policies that no broker can follow: they pause jobs, copy them out, or page.

Theory of operation
    The engine calls ``serve`` for each ``Extra`` of a policy whose capabilities are to pause or to
    page. A paused job stops where its next step would begin. What a job at its boundary holds is
    copied out in time, and copied back before its next iteration.

    Managed memory grants more than there is, and brings in what is touched and elsewhere.
    Frameworks keep what they once had, so a simulated job holds its peak; so many of those regions
    are resident. An iteration touches what it keeps once forward and once backward. It touches
    every other region when it is filled, where the profile rises, and when it is last used, where
    the profile falls. Of the regions touched in a step the simulated job's share that is not
    resident faults. For those that come others go. First are those of simulated jobs that yield,
    then of those that do not work, the longest ago first. Last are those of all that work, in
    proportion.

Guarantees
    Resident regions never exceed the budget once a step has begun since it was lowered.

Known limitations
    * Which of a simulated job's regions are resident is not known, only how many. A driver that
      evicts the least recently used of a loop larger than memory loses more.
    * A region is filled or used by a step as a whole, and computing goes on while nothing is
      brought in. A kernel that reads while it writes, or prefetching, is not told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import types

from zico.base.compiled import callback, compiled, record_at
from zico.pool.layout import JobState
from zico.scheduler.engine import begin_step, end_wait, go_on, push
from zico.scheduler.grants import hold
from zico.scheduler.jobs import FOREVER, RUN, Extra, present_in, profile_of, sim_job_of, snapshot_of, step_ends_ns
from zico.scheduler.layout import NO_TIME
from zico.scheduler.turns import decision_at

if TYPE_CHECKING:
    from zico.scheduler.jobs import RunRecord

_RUNNING = int(JobState.RUNNING)
_BEGINS, _COPIED, _LEAVES = int(Extra.BEGINS), int(Extra.COPIED), int(Extra.LEAVES)
_NOTHING = 1e-9  # regions


@callback(types.int64(types.int64, types.int64, types.int64))
def serve(run_address: int, number: int, what: int) -> int:
    """Do what the engine asks for, an ``Extra``, for a simulated job of a run."""
    run = record_at(run_address, RUN)
    if what == _BEGINS:
        return _begin(run, number)
    if what == _COPIED:
        _end_copy(run, number)
    elif what == _LEAVES:
        _send_out(run, number, sim_job_of(run, number).resident)
    else:
        return _obey(run)
    return 0


# -- pauses, and copies at boundaries --------------------------------------------------------------


@compiled
def _begin(run: RunRecord, number: int) -> bool:
    """Begin a step of a job that is paused or pages; false: the engine does."""
    sim_job = sim_job_of(run, number)
    if sim_job.step == 0:
        sim_job.stopped = 0
        sim_job.delay_ns = round(sim_job.away * run.copy_ns)
        sim_job.away = 0
    if sim_job.stopped:
        sim_job.suspended = 1
        sim_job.waiting_since_ns = run.now_ns
        return True
    if run.pages:
        _page_step(run, number)
        go_on(run, number)
        return True
    return False


@compiled
def _obey(run: RunRecord) -> int:
    """Stop, let go on and copy out whom the policy says; returns when it wants to be asked again because of them."""
    snapshot, present = snapshot_of(run), present_in(run)
    look_at_ns = FOREVER
    for i in range(snapshot.n):
        sim_job, decision = sim_job_of(run, present[i]), decision_at(snapshot, i)
        sim_job.yields = decision.yields
        look_at_ns = look_at_ns if decision.until_ns == NO_TIME else min(look_at_ns, decision.until_ns)
        if sim_job.phase == _RUNNING:
            sim_job.stopped = decision.pauses
            if sim_job.suspended and not sim_job.stopped:
                sim_job.suspended = 0
                end_wait(run, sim_job)
                begin_step(run, present[i])
        elif decision.evicts and not decision.starts and not sim_job.copying and sim_job.held > 0:
            sim_job.copying = 1
            run.copied += sim_job.held
            push(run, run.clock + max(1, round(sim_job.held * run.copy_ns)), present[i])
    return look_at_ns


@compiled
def _end_copy(run: RunRecord, number: int) -> None:
    sim_job = sim_job_of(run, number)
    sim_job.copying = 0
    sim_job.away = sim_job.held
    hold(run, number, 0)


# -- managed memory --------------------------------------------------------------------------------


@compiled
def _page_step(run: RunRecord, number: int) -> None:
    """Let a simulated job have all that its step holds, and take the time for what has to be brought in."""
    sim_job = sim_job_of(run, number)
    profile = profile_of(sim_job)
    last = profile.n_steps - 1
    level = profile.level[sim_job.step]
    before = profile.level[sim_job.step - 1] if sim_job.step > 0 else sim_job.keeps
    after = profile.level[sim_job.step + 1] if sim_job.step < last else sim_job.keeps
    share = float(step_ends_ns(sim_job) - profile.step_ns[sim_job.step]) / float(max(1, profile.duration_ns))
    touched = max(0, level - before) + max(0, level - after) + 2.0 * sim_job.keeps * share
    grown = max(0, level - sim_job.held)
    old = min(max(0.0, touched - grown), float(sim_job.held))
    missing = old * (1.0 - sim_job.resident / sim_job.held) if sim_job.held > 0 else 0.0
    if grown > 0:
        hold(run, number, level)
    evicted = _bring_in(run, number, missing + grown)
    run.faulted += missing
    sim_job.delay_ns += round(missing * run.fault_ns + evicted * run.copy_ns)
    sim_job.worked_ns = run.now_ns


@compiled
def _bring_in(run: RunRecord, number: int, regions: float) -> float:
    """Make so many more regions of a simulated job resident; returns how many others had to go."""
    sim_job = sim_job_of(run, number)
    regions = min(regions, float(run.budget))
    evicted = min(run.resident, max(0.0, regions - (run.budget - run.resident)))
    if evicted > _NOTHING:
        _evict(run, number, evicted)
    regions = min(regions, sim_job.held - sim_job.resident)
    sim_job.resident += regions
    run.resident += regions
    return evicted


@compiled
def _evict(run: RunRecord, number: int, regions: float) -> None:
    """Send so many regions out, those of whom they are missed least first."""
    for stays in range(2):
        while regions > _NOTHING:
            idle = _longest_idle(run, number, 1 - stays)
            if idle < 0:
                break
            regions -= _send_out(run, idle, regions)
        regions -= _send_out_alike(run, 1 - stays, regions)


@compiled
def _longest_idle(run: RunRecord, number: int, yields: int) -> int:
    """Return who has pages and has not worked for the longest, of all but one; below 0: nobody."""
    found, since_ns = -1, FOREVER
    for other in present_in(run):
        sim_job = sim_job_of(run, other)
        idle = other != number and not sim_job.busy and sim_job.yields == yields and sim_job.resident > _NOTHING
        if idle and sim_job.worked_ns < since_ns:
            found, since_ns = other, sim_job.worked_ns
    return found


@compiled
def _send_out(run: RunRecord, number: int, regions: float) -> float:
    """Send out so many of a simulated job's regions, or all; returns how many."""
    sim_job = sim_job_of(run, number)
    gone = min(regions, sim_job.resident)
    sim_job.resident -= gone
    run.resident -= gone
    return gone


@compiled
def _send_out_alike(run: RunRecord, yields: int, regions: float) -> float:
    """Send out so many regions of all, each in proportion to what it has; returns how many."""
    there = 0.0
    for other in present_in(run):
        sim_job = sim_job_of(run, other)
        there += sim_job.resident if sim_job.yields == yields else 0.0
    if regions <= _NOTHING or there <= _NOTHING:
        return 0.0
    share = min(1.0, regions / there)
    for other in present_in(run):
        sim_job = sim_job_of(run, other)
        if sim_job.yields == yields:
            _send_out(run, other, sim_job.resident * share)
    return share * there
