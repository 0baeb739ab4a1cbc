"""The simulator's records: simulated jobs, what they load, a run, and how a policy sees them.

A simulated job is a job of a simulation. A policy sees of it what the broker would know: progress
in events, not time, and the profile that the scheduler was told.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import numpy as np

from zico.base.compiled import array_at, compiled, inlined, record_at
from zico.base.records import F8, I4, I8, U8, Numbers, Record, dtype_of
from zico.pool.layout import JobState
from zico.pool.rules import claim_of, grows_alone, is_still, recent_throughput
from zico.scheduler.demand import bin_ends_ns, job_at
from zico.scheduler.layout import JOB, NO_TIME, NOBODY, PROFILE, SNAPSHOT, Reason, Snapshot, SnapshotJob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zico.scheduler.layout import ProfileRecord


class SimJob(SnapshotJob):
    """One job of a simulation, behind what a policy sees of it.

    ``waiting_since_ns`` may be NO_TIME here; ``need`` and ``served`` are worked out where a policy
    is shown them.
    """

    true_address: I8  # of the PROFILE that it really has
    believed_address: I8  # of the one that the scheduler is told
    keeps: I8  # regions between iterations
    arrive_ns: I8
    jitter: F8
    random: U8
    phases_address: I8  # PHASE records, n_phases of them, by their time
    n_phases: I8
    # -- what follows changes
    present: I8
    profiled: I8
    spilled: I8
    step: I8
    bin: I8  # of its profile, that it was last seen in
    evicted: I8  # as in the pool's record of a job, as all up to ``outgrown``; simulated jobs evict nothing,
    limit: I8  # have no limits,
    claim_floor: I8  # and begin as soon as they are admitted: 0
    claim_extra: I8
    iteration_waited_ns: I8
    outgrown: I8
    overruns: I8  # its claim may rise again: it comes past the end of the profile that is believed
    busy: I8
    step_since: I8  # on the work clock
    step_length: I8
    slowness: F8
    counted_waited_ns: I8  # after the warm-up
    alone_spent_ns: I8  # how long it has kept the others from starting iterations
    counted_ns: I8  # work done after the warm-up, in time alone
    left_ns: I8
    counted: I8  # iterations ended after the warm-up
    next_phase: I8
    delay_ns: I8  # of its next step: what is brought in before it
    suspended: I8  # it goes on when its policy says so
    copying: I8  # what it holds is on its way out
    stopped: I8  # of what is extra, as all up to ``worked_ns``: it is to be suspended at the end of its step
    away: I8  # regions that were copied out
    yields: I8
    resident: F8  # regions of those held that are on the device
    worked_ns: I8  # when it last began a step
    served_work: F8  # both fade
    served_time: F8
    served_at_ns: I8
    reasons: Annotated[Numbers, "i8", (len(Reason),)]
    against: Annotated[Numbers, "i8", (len(Reason),)]  # whom it waited for last, for each reason


SIM_JOB = dtype_of(SimJob)


class PhaseRecord(Record, align=False):
    """From so many iterations on a job has another PROFILE, or is believed to (``keeps`` below 0)."""

    at: I8
    address: I8
    keeps: I8


PHASE = dtype_of(PhaseRecord)


class BudgetRecord(Record, align=False):
    """A budget from a time on."""

    t_ns: I8
    regions: I8


BUDGET = dtype_of(BudgetRecord)


class StepEnd(Record, align=False):
    """A step that ends, on the work clock; of those at one time, the one that began first."""

    at: I8
    order: I8
    sim_job: I8


EVENT = dtype_of(StepEnd)


class LogRecord(Record, align=False):
    """What a job holds from a time on."""

    t_ns: I8
    sim_job: I4
    held: I4


LOG = dtype_of(LogRecord)


class Extra(enum.IntEnum):
    """What the engine calls ``extra_address`` for, with a run's address and a simulated job's number."""

    BEGINS = 0
    """Its step begins; 1: that has been seen to."""
    COPIED = 1
    """What it held has been copied out."""
    LEAVES = 2
    DECIDED = 3
    """The policy has decided about all; returns when it wants to be asked again."""


class RunRecord(Record):
    """A simulation as a whole."""

    address: I8  # of this record
    extra_address: I8  # of the function that does for the policy what no broker can; 0: none

    policy_address: I8
    use_claims: I8
    pauses: I8
    watches: I8
    pages: I8
    asks: I8
    offline: I8
    fault_ns: F8  # to bring a region in
    copy_ns: F8  # to copy a region out or in
    budgets_address: I8  # BUDGET records
    n_budgets: I8
    memory_address: I8  # what the policy remembers
    memos_address: I8
    samples_address: I8  # SAMPLE records
    sample_jobs_address: I8  # JOB records
    n_sample_jobs: I8
    plans: I8  # the policy remembers something of the jobs: stop whenever those change
    budget: I8
    warm_up_ns: I8
    sim_jobs_address: I8  # SIM_JOB records
    arrivals_address: I8  # their numbers by the time at which they arrive
    n_arrivals: I8
    present_address: I8  # the numbers of those that are there
    snapshot_address: I8  # a SNAPSHOT with room for all
    queue_address: I8  # EVENT records, one a simulated job
    scratch_address: I8  # SCRATCH_ROWS words a simulated job
    slowdown_address: I8  # by what factor each of 0, 1, 2 ... working jobs is slower; the last for any more
    n_slowdown: I8
    log_address: I8  # LOG records; their number is log_room
    log_room: I8
    # -- what follows changes
    now_ns: I8
    clock: I8  # the work clock
    order: I8  # events so far
    n_present: I8
    n_arrived: I8
    n_queued: I8
    n_busy: I8
    n_blocked: I8
    n_waiting: I8
    granted: I8
    alone: I8
    alone_since_ns: I8  # when that one last grew
    look_at_ns: I8
    retry_at: I8  # on the work clock: when a claim falls although nobody gives anything back
    changed: I8
    peak_granted: I8
    stalls: I8
    decisions: I8
    longest_wait_ns: I8
    n_log: I8
    plan_address: I8
    next_budget: I8
    next_budget_ns: I8
    resident: F8
    faulted: F8  # regions brought in
    copied: I8  # regions copied out
    sample_at: I8  # which decision is the next to be kept
    n_samples: I8
    n_sampled_jobs: I8


RUN = dtype_of(RunRecord)


class Sample(Record, align=False):
    """A snapshot that a policy was asked about, and which of the jobs kept with it is its first."""

    snapshot: Snapshot
    first: I8


SAMPLE = dtype_of(Sample)

SAMPLES = 128
SCRATCH_ROWS = 7
"""The banker's rule has held, claim, residual, must finish and done; two more say who is blocked
and who is given up."""
FOREVER = 1 << 62

_INT64 = np.dtype(np.int64)
_FLOAT64 = np.dtype(np.float64)
_FLAG = np.dtype(np.uint8)
_SIM_JOB_BYTES = SIM_JOB.itemsize
_WORD_BYTES = _INT64.itemsize
_JOB_BYTES = JOB.itemsize
_JOB_WORDS = _JOB_BYTES // _WORD_BYTES
_RUNNING, _BOUNDARY = int(JobState.RUNNING), int(JobState.BOUNDARY)


@inlined
def sim_job_of(run: RunRecord, number: int) -> SimJob:
    """Return the SIM_JOB record of that number."""
    return record_at(run.sim_jobs_address + number * _SIM_JOB_BYTES, SIM_JOB)


@inlined
def profile_of(sim_job: SimJob) -> ProfileRecord:
    """Return the PROFILE that a simulated job really has."""
    return record_at(sim_job.true_address, PROFILE)


@inlined
def believed_of(sim_job: SimJob) -> ProfileRecord:
    """Return the PROFILE that the scheduler takes a simulated job to have."""
    return record_at(sim_job.believed_address, PROFILE)


@inlined
def snapshot_of(run: RunRecord) -> Snapshot:
    """Return the SNAPSHOT that the policy is shown."""
    return record_at(run.snapshot_address, SNAPSHOT)


@inlined
def present_in(run: RunRecord) -> NDArray[np.int64]:
    """Return the numbers of those that are there."""
    return array_at(run.present_address, run.n_present, _INT64)


@inlined
def arrival_of(run: RunRecord, index: int) -> int:
    """Return the number of the simulated job that is the next to arrive after so many."""
    return array_at(run.arrivals_address, run.n_arrivals, _INT64)[index]


@inlined
def slowdown_of(run: RunRecord) -> float:
    """Return by what factor those that work now are slower than alone."""
    return array_at(run.slowdown_address, run.n_slowdown, _FLOAT64)[min(run.n_busy, run.n_slowdown - 1)]


@inlined
def scratch_words(run: RunRecord, row: int) -> NDArray[np.int64]:
    """Return a row of scratch, a word for each that is there."""
    return array_at(run.scratch_address + row * run.n_arrivals * _WORD_BYTES, run.n_present, _INT64)


@inlined
def scratch_flags(run: RunRecord, row: int) -> NDArray[np.uint8]:
    """Return a row of scratch as flags, one for each that is there."""
    return array_at(run.scratch_address + row * run.n_arrivals * _WORD_BYTES, run.n_present, _FLAG)


@inlined
def step_ends_ns(sim_job: SimJob) -> int:
    """Return when, in its profile's time, the step ends that a simulated job is in."""
    profile = profile_of(sim_job)
    return profile.step_ns[sim_job.step + 1] if sim_job.step + 1 < profile.n_steps else profile.duration_ns


@inlined
def need_of(sim_job: SimJob) -> int:
    """Return the regions that a simulated job waits for inside its iteration."""
    if sim_job.phase != _RUNNING or sim_job.busy or sim_job.suspended:
        return 0
    return max(0, profile_of(sim_job).level[sim_job.step] - sim_job.held - sim_job.spilled)


@compiled
def progress_of(run: RunRecord, sim_job: SimJob) -> int:
    """Return how many events of its iteration a simulated job has come past."""
    profile = profile_of(sim_job)
    at_ns = profile.step_ns[sim_job.step]
    if sim_job.busy and run.clock > sim_job.step_since:
        at_ns += (step_ends_ns(sim_job) - at_ns) * (run.clock - sim_job.step_since) // sim_job.step_length
    now_in = sim_job.bin
    while now_in + 1 < profile.n_bins and profile.t_ns[now_in + 1] <= at_ns:
        now_in += 1
    sim_job.bin = now_in
    begin_ns, width = profile.t_ns[now_in], 1 << profile.shift
    if at_ns == begin_ns:
        return now_in * width
    return now_in * width + min((at_ns - begin_ns) * width // (bin_ends_ns(profile, now_in) - begin_ns), width - 1)


@inlined
def _in_bin_ns(progress: int, believed: ProfileRecord) -> int:
    """Return how far through a bin of what is believed a job is, as a broker's clock tells if it is as fast as that."""
    now_in = min(progress >> believed.shift, believed.n_bins - 1)
    begin = now_in << believed.shift
    events = max((believed.n_events - begin) if now_in + 1 == believed.n_bins else (1 << believed.shift), 1)
    length_ns = bin_ends_ns(believed, now_in) - believed.t_ns[now_in]
    return length_ns * min(events, progress - begin) // events


@inlined
def is_known(sim_job: SimJob) -> bool:
    """Tell whether the profile that is believed says what the iteration may still come to hold."""
    return sim_job.profiled == 1 and sim_job.outgrown == 0


@compiled
def see_debt(run: RunRecord, sim_job: SimJob) -> None:
    """Note where a simulated job is now, and what it has and owes by the pool's rules."""
    believed = believed_of(sim_job)
    inside = sim_job.phase == _RUNNING
    sim_job.must_finish = inside and is_known(sim_job)
    sim_job.progress = progress_of(run, sim_job) if inside else 0
    sim_job.in_bin_ns = _in_bin_ns(sim_job.progress, believed) if inside else 0
    sim_job.kept = sim_job.persistent
    sim_job.claim = sim_job.held
    peak = max(sim_job.held, believed.peak, sim_job.persistent)
    if sim_job.must_finish:
        sim_job.claim = claim_of(sim_job, believed, believed.claims)
    elif not inside:
        sim_job.claim = peak
    sim_job.most = max(sim_job.claim, peak)


@compiled
def see_given_up(run: RunRecord, sim_job: SimJob) -> bool:
    """Note whether nobody is to wait for a simulated job's iteration; tells whether that has taken too long."""
    inside_ns = run.now_ns - sim_job.started_ns - sim_job.iteration_waited_ns
    if sim_job.waiting_since_ns != NO_TIME:
        inside_ns -= run.now_ns - sim_job.waiting_since_ns
    has_end = sim_job.phase == _RUNNING and sim_job.profiled == 1
    is_past = has_end and is_still(0, inside_ns, believed_of(sim_job).duration_ns, 0)
    sim_job.given_up = is_past and (need_of(sim_job) == 0 or not is_known(sim_job))
    return is_past


@inlined
def someone_grows_alone(run: RunRecord) -> bool:
    """Tell whether a job without a profile keeps the others at their boundaries now."""
    if run.alone == NOBODY:
        return False
    sim_job = sim_job_of(run, run.alone)
    if sim_job.phase != _RUNNING or is_known(sim_job):
        return False
    waited_ns, grown_ns = run.now_ns - sim_job.waiting_since_ns, run.now_ns - run.alone_since_ns
    still = see_given_up(run, sim_job)
    return grows_alone(sim_job.alone_spent_ns, need_of(sim_job) > 0, waited_ns, grown_ns, still)


@compiled
def show_all(run: RunRecord) -> None:
    """Fill the snapshot."""
    snapshot = snapshot_of(run)
    snapshot.now_ns = run.now_ns
    snapshot.budget = run.budget
    snapshot.n = run.n_present
    snapshot.alone = NOBODY
    snapshot.plan_address = run.plan_address
    alone = run.alone if someone_grows_alone(run) else NOBODY
    present = present_in(run)
    for i in range(run.n_present):
        sim_job, job = sim_job_of(run, present[i]), job_at(snapshot, i)
        see_debt(run, sim_job)
        see_given_up(run, sim_job)
        own = array_at(run.sim_jobs_address + present[i] * _SIM_JOB_BYTES, _JOB_WORDS, _INT64)
        seen = array_at(snapshot.jobs_address + i * _JOB_BYTES, _JOB_WORDS, _INT64)
        for word in range(_JOB_WORDS):
            seen[word] = own[word]
        job.profile_address = sim_job.believed_address if is_known(sim_job) else 0
        job.need = need_of(sim_job)
        job.waiting_since_ns = 0 if sim_job.waiting_since_ns == NO_TIME else max(1, sim_job.waiting_since_ns)
        since_ns, duration_ns = run.now_ns - sim_job.served_at_ns, profile_of(sim_job).duration_ns
        job.served = recent_throughput(sim_job.served_work, sim_job.served_time, since_ns, duration_ns)
        if present[i] == alone:
            snapshot.alone = i
