"""What the simulator's machine works on, and how a policy is shown it: records that the arrays' addresses lead to.

A tenant is a job of a simulation. A policy sees of it what the broker would know: progress in events, not time, and
the profile that the scheduler was told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zico.compiled import array_at, compiled, inlined, record_at
from zico.pool.rules import recent_throughput
from zico.scheduler.demand import job_at
from zico.scheduler.layout import NO_TIME, NOBODY, PROFILE, SCENE, Phase, Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

TENANT = np.dtype(
    [
        ("true_address", "i8"),  # of the PROFILE that it really has
        ("believed_address", "i8"),  # of the one that the scheduler is told
        ("keeps", "i8"),  # regions between iterations
        ("arrive_ns", "i8"),
        ("limit", "i8"),  # iterations after which it leaves; 0: never
        ("jitter", "f8"),
        ("floor", "f8"),
        ("weight", "f8"),
        ("priority", "i8"),
        ("random", "u8"),
        ("phases_address", "i8"),  # PHASE records, n_phases of them, by their time
        ("n_phases", "i8"),
        # -- what follows changes
        ("phase", "i8"),
        ("present", "i8"),
        ("profiled", "i8"),
        ("held", "i8"),
        ("persistent", "i8"),
        ("spilled", "i8"),
        ("step", "i8"),
        ("bin", "i8"),  # of its profile, that it was last seen in
        ("claim", "i8"),  # that it was last seen to have in this iteration
        ("overruns", "i8"),  # its claim may rise again: it comes past the end of the profile that is believed
        ("busy", "i8"),
        ("step_since", "i8"),  # on the work clock
        ("step_length", "i8"),
        ("slowness", "f8"),
        ("iteration", "i8"),
        ("started_ns", "i8"),
        ("waiting_since_ns", "i8"),  # NO_TIME: it does not wait
        ("waited_ns", "i8"),
        ("counted_ns", "i8"),  # work done after the warm-up, in time alone
        ("left_ns", "i8"),
        ("counted", "i8"),  # iterations ended after the warm-up
        ("next_phase", "i8"),
        ("stopped", "i8"),  # it is to stop at the end of its step
        ("suspended", "i8"),  # it has
        ("copying", "i8"),  # what it holds is on its way out
        ("away", "i8"),  # regions that were copied out
        ("yields", "i8"),
        ("resident", "f8"),  # regions of those held that are on the device
        ("worked_ns", "i8"),  # when it last began a step
        ("delay_ns", "i8"),  # of its next step: what is brought in before it
        ("served_work", "f8"),  # both fade
        ("served_time", "f8"),
        ("served_at_ns", "i8"),
        ("reasons", "i8", (len(Reason),)),
        ("against", "i8", (len(Reason),)),  # whom it waited for last, for each reason
    ],
    align=True,
)
"""One job of a simulation."""

PHASE = np.dtype([("at", "i8"), ("address", "i8"), ("keeps", "i8")])
"""From so many iterations on a tenant really has another PROFILE, or, with ``keeps`` below 0, is believed to."""

BUDGET = np.dtype([("t_ns", "i8"), ("regions", "i8")])
"""A budget from a time on."""

EVENT = np.dtype([("at", "i8"), ("order", "i8"), ("tenant", "i8")])
"""A step that ends, on the work clock; of those at one time, the one that began first."""

LOG = np.dtype([("t_ns", "i8"), ("tenant", "i4"), ("held", "i4")])
"""What a job holds from a time on."""

RUN = np.dtype(
    [
        ("policy_address", "i8"),
        ("use_claims", "i8"),
        ("pauses", "i8"),
        ("watches", "i8"),
        ("pages", "i8"),
        ("asks", "i8"),
        ("offline", "i8"),
        ("fault_ns", "f8"),  # to bring a region in
        ("copy_ns", "f8"),  # to copy a region out or in
        ("budgets_address", "i8"),  # BUDGET records
        ("n_budgets", "i8"),
        ("memory_address", "i8"),  # what the policy remembers
        ("memos_address", "i8"),
        ("samples_address", "i8"),  # SAMPLE records
        ("sample_jobs_address", "i8"),  # JOB records
        ("n_sample_jobs", "i8"),
        ("plans", "i8"),  # the policy remembers something of the jobs: stop whenever those change
        ("budget", "i8"),
        ("warm_up_ns", "i8"),
        ("tenants_address", "i8"),  # TENANT records
        ("arrivals_address", "i8"),  # their numbers by the time at which they arrive
        ("n_arrivals", "i8"),
        ("present_address", "i8"),  # the numbers of those that are there
        ("scene_address", "i8"),  # a SCENE with room for all
        ("queue_address", "i8"),  # EVENT records, one a tenant
        ("scratch_address", "i8"),  # SCRATCH_ROWS words a tenant
        ("slowdown_address", "i8"),  # by what factor each of 0, 1, 2 ... working jobs is slower; the last for any more
        ("n_slowdown", "i8"),
        ("log_address", "i8"),  # LOG records; their number is log_room
        ("log_room", "i8"),
        # -- what follows changes
        ("now_ns", "i8"),
        ("clock", "i8"),  # the work clock
        ("order", "i8"),  # events so far
        ("n_present", "i8"),
        ("n_arrived", "i8"),
        ("n_queued", "i8"),
        ("n_busy", "i8"),
        ("n_blocked", "i8"),
        ("n_waiting", "i8"),
        ("granted", "i8"),
        ("alone", "i8"),
        ("look_at_ns", "i8"),
        ("retry_at", "i8"),  # on the work clock: when a claim falls although nobody gives anything back
        ("changed", "i8"),
        ("peak_granted", "i8"),
        ("stalls", "i8"),
        ("decisions", "i8"),
        ("longest_wait_ns", "i8"),
        ("n_log", "i8"),
        ("plan_address", "i8"),
        ("next_budget", "i8"),
        ("next_budget_ns", "i8"),
        ("resident", "f8"),
        ("faulted", "f8"),  # regions brought in
        ("copied", "i8"),  # regions copied out
        ("sample_at", "i8"),  # which decision is the next to be kept
        ("n_samples", "i8"),
        ("n_sampled_jobs", "i8"),
    ],
    align=True,
)
"""A simulation as a whole."""

SAMPLE = np.dtype([("scene", SCENE), ("first", "i8")])
"""A scene that a policy was asked about, and which of the jobs kept with it is its first."""

SAMPLES = 128
SCRATCH_ROWS = 6
"""Of the banker's rule: held, claim, residual, must finish, done; and who is blocked."""
FOREVER = 1 << 62

_INT64 = np.dtype(np.int64)
_FLOAT64 = np.dtype(np.float64)
_FLAG = np.dtype(np.uint8)
_TENANT_BYTES = TENANT.itemsize
_WORD_BYTES = _INT64.itemsize
_RUNNING, _BOUNDARY = int(Phase.RUNNING), int(Phase.BOUNDARY)

Record = Any


@inlined
def tenant_of(run: Record, number: int) -> Record:
    """Return the TENANT record of that number."""
    return record_at(run.tenants_address + number * _TENANT_BYTES, TENANT)


@inlined
def profile_of(tenant: Record) -> Record:
    """Return the PROFILE that a tenant really has."""
    return record_at(tenant.true_address, PROFILE)


@inlined
def believed_of(tenant: Record) -> Record:
    """Return the PROFILE that the scheduler takes a tenant to have."""
    return record_at(tenant.believed_address, PROFILE)


@inlined
def scene_of(run: Record) -> Record:
    """Return the SCENE that the policy is shown."""
    return record_at(run.scene_address, SCENE)


@inlined
def present_in(run: Record) -> NDArray[np.int64]:
    """Return the numbers of those that are there."""
    return array_at(run.present_address, run.n_present, _INT64)


@inlined
def arrival_of(run: Record, index: int) -> int:
    """Return the number of the tenant that is the next to arrive after so many."""
    return array_at(run.arrivals_address, run.n_arrivals, _INT64)[index]


@inlined
def slowdown_of(run: Record) -> float:
    """Return by what factor those that work now are slower than alone."""
    return array_at(run.slowdown_address, run.n_slowdown, _FLOAT64)[min(run.n_busy, run.n_slowdown - 1)]


@inlined
def scratch_words(run: Record, row: int) -> NDArray[np.int64]:
    """Return a row of scratch, a word for each that is there."""
    return array_at(run.scratch_address + row * run.n_arrivals * _WORD_BYTES, run.n_present, _INT64)


@inlined
def scratch_flags(run: Record, row: int) -> NDArray[np.uint8]:
    """Return a row of scratch as flags, one for each that is there."""
    return array_at(run.scratch_address + row * run.n_arrivals * _WORD_BYTES, run.n_present, _FLAG)


@inlined
def step_ends_ns(tenant: Record) -> int:
    """Return when, in its profile's time, the step ends that a tenant is in."""
    profile = profile_of(tenant)
    return profile.step_ns[tenant.step + 1] if tenant.step + 1 < profile.n_steps else profile.duration_ns


@inlined
def need_of(tenant: Record) -> int:
    """Return the regions that a tenant waits for inside its iteration."""
    if tenant.phase != _RUNNING or tenant.busy or tenant.suspended:
        return 0
    return max(0, profile_of(tenant).level[tenant.step] - tenant.held - tenant.spilled)


@compiled
def progress_of(run: Record, tenant: Record) -> int:
    """Return how many events of its iteration a tenant has come past."""
    profile = profile_of(tenant)
    at_ns = profile.step_ns[tenant.step]
    if tenant.busy and run.clock > tenant.step_since:
        at_ns += (step_ends_ns(tenant) - at_ns) * (run.clock - tenant.step_since) // tenant.step_length
    now_in = tenant.bin
    while now_in + 1 < profile.n_bins and profile.bin_ns[now_in + 1] <= at_ns:
        now_in += 1
    tenant.bin = now_in
    begin_ns, width = profile.bin_ns[now_in], 1 << profile.shift
    if at_ns == begin_ns:
        return now_in * width
    return now_in * width + min((at_ns - begin_ns) * width // (profile.bin_ns[now_in + 1] - begin_ns), width - 1)


@compiled
def show_place(run: Record, tenant: Record, job: Record) -> None:
    """Fill that part of a JOB record that tells what a tenant may still come to hold."""
    job.profile_address = tenant.believed_address if tenant.profiled else 0
    job.phase = tenant.phase
    job.held = tenant.held
    job.progress = 0 if tenant.phase == _BOUNDARY else progress_of(run, tenant)


@compiled
def _show(run: Record, number: int, job: Record) -> None:
    """Fill the JOB record that a policy sees of a tenant."""
    tenant = tenant_of(run, number)
    show_place(run, tenant, job)
    job.persistent = job.kept = tenant.persistent
    job.started_ns = tenant.started_ns
    job.waiting_since_ns = 0 if tenant.waiting_since_ns == NO_TIME else max(1, tenant.waiting_since_ns)
    job.need = need_of(tenant)
    job.number = number
    since_ns, duration_ns = run.now_ns - tenant.served_at_ns, profile_of(tenant).duration_ns
    job.served = recent_throughput(tenant.served_work, tenant.served_time, since_ns, duration_ns)
    job.floor = tenant.floor
    job.weight = tenant.weight
    job.priority = tenant.priority
    job.iteration = tenant.iteration
    job.left = max(0, tenant.limit - tenant.iteration)


@compiled
def show_all(run: Record) -> None:
    """Fill the scene."""
    scene = scene_of(run)
    scene.now_ns = run.now_ns
    scene.budget = run.budget
    scene.n = run.n_present
    scene.alone = NOBODY
    scene.plan_address = run.plan_address
    present = present_in(run)
    for i in range(run.n_present):
        _show(run, present[i], job_at(scene, i))
        if present[i] == run.alone:
            scene.alone = i
