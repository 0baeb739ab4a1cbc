"""The shared table: what every process of one pool sees, byte for byte.

One memfd holds a ``HEADER``, then ``n_regions`` times ``REGION``, then ``MAX_JOBS`` times ``JOB``.
Behind them lie the last mark issued for each stream slot of each job. On pages of their own lie the
counters that the device writes. Compiled code and the broker's Python read the same records. Every
write that more than one process may make happens under ``HEADER.mutex``. Words with a single writer
need no mutex: a job's own ``progress`` and marks, a stream's own counter.

The truth about ownership is ``REGION.owner`` alone. Counters (``granted``, ``free``, ``held``) and
the free list can be rebuilt from it, which is what makes a death at any instruction recoverable.
Compiled code finds the records through one process's member record.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from zico.base.compiled import array_at, inlined, record_at
from zico.base.records import I4, I8, U8, Numbers, Record, dtype_of
from zico.trace.profile import CURVE_BINS, Curve

if TYPE_CHECKING:
    from zico.base.records import Records


MAGIC = 0x5A49434F_504F4F4C  # "ZICOPOOL"
VERSION = 19
MAX_JOBS = 64
"""A pool has at most so many jobs at a time: one bit each in ``JOB.waits_for``."""

STREAMS = 16
"""A job has so many stream slots, each with a counter; further streams take slots over (``zico.heap.cuda.streams``)."""
COUNTER_BYTES = 64
"""Each counter has a cache line, so that one stream's writes slow no other's waits."""
PAGE_BYTES = 1 << 16
"""The counters lie on whole pages of any Linux, since a device is given access to pages."""

SLICE_NS = 50_000_000
"""A wait in the pool sleeps for at most so long before it looks around."""

NOBODY = -1
NO_PAGES = -2
"""``REGION.last_owner`` says so: nobody's bytes are in the region, and no physical memory is behind it."""
NO_MORE = -1
"""``JOB.evict`` says so: until the job has run again there is nothing that it could evict."""
NAMED = -2
"""A job asks for ``NAMED - r`` where region ``r`` is free and mapped where it is needed, but behind a fence."""
MUTEX_BYTES = 64
"""A ``pthread_mutex_t`` takes 40 bytes on x86-64 and 48 on aarch64 (glibc)."""

NAME_BYTES = 48
PLANNER_BYTES = 16
PLANNER_NOTE_BYTES = 152
"""The notes of 64 jobs fit into one message at its longest, and a job's record takes whole cache lines."""


class JobState(enum.IntEnum):
    """Where a job is in its iteration."""

    EMPTY = 0
    """No job has this place."""
    RUNNING = 1
    """Inside an iteration (the first one reaches from joining to the first boundary)."""
    BOUNDARY = 2
    """Between iterations, waiting to be admitted to the next."""
    LEAVING = 3
    """Its connection is closed, but its process lives, or its work on the device may: keeps what it holds, no more."""


class Paused(enum.IntEnum):
    """Whether a person keeps a job at its boundary, or has it stop at the next one."""

    NO = 0
    STAYS = 1
    """What it holds between iterations stays."""
    MOVES = 2
    """It evicts all that it holds there."""


class Auto(enum.IntEnum):
    """Whether the broker chooses what a job may hold."""

    NO = 0
    SAVES = 1
    """It does, and has not found that saving is slower."""
    WAITS = 2
    """It does, and the job holds all that it wants now, and waits for its turn as one that does not save."""


class SaveMode(enum.IntEnum):
    """What a job does when its own peak exceeds what it may hold; by the names of the protocol's ``SaveMode``."""

    NONE = 0
    """Its tensors overflow into the next tier when nobody could go on otherwise."""
    SWAP = 1
    """Tensors leave and come back by a plan."""
    PAGE = 2
    """What is touched and not there is brought in by page faults."""
    AUTO = 3


class Header(Record):
    """The pool as a whole."""

    magic: I8
    version: I8
    region_bytes: I8
    n_regions: I8
    mutex: Annotated[Numbers, "u1", (MUTEX_BYTES,)]
    budget_regions: I8  # for what jobs own: budget_total without shared
    granted: I8  # regions owned by jobs
    bare: I8  # free regions without pages
    spare: I8  # fewest free regions with pages since the broker last asked
    budget_total: I8  # any number up to n_regions, also while jobs run
    shared: I8  # regions' worth of memory outside the regions that jobs have in common (zico.broker.frozen)
    peak_granted: I8  # with what they had in common then
    free_head: I4  # those with pages first, least recently released first; then the bare ones
    free_tail: I4
    use_claims: I4  # 1: every grant must leave the state safe
    self_admit: I4  # 1: a job whose whole iteration fits whatever the others do starts without asking
    alone_job: I4  # the job that grows now and of which nothing is known, or NOBODY
    sequence: I4  # futex word: changes whenever a wait may have ended
    waiters: I4  # threads that wait in an allocation
    notified: I4  # 1: the broker's pipe has been written and not yet read
    boundary_waiters: I4  # jobs in BOUNDARY, but for paused ones: the broker looks at them when memory comes back
    mixed: I4  # 1: some member is in another pid namespace than the broker, so numbers of threads are ambiguous
    places: I4  # job records in use so far; those behind are empty
    on_timeline: I4  # 1: a region may be granted before its fence has passed, the new owner's stream waits
    crowded: I4  # 1: what jobs keep between iterations leaves some job no room for one; then they yield it
    isolate: I4  # 1: jobs unmap what they give back, and scrub what another has used
    grouped: I4  # 1: some job has been in a group (zico.pool.groups)
    bare_head: I4  # the first bare region of the list, NOBODY: there is none
    continued: I4  # the thread that was continued inside the mutex and is to be stopped again, or 0
    marks_asked: I4  # futex word: changes when a thread waits and only a job's mark is missing (progress_thread)
    pid_namespace: I8  # the broker's, of which the numbers of processes are (zico.pool.living)
    alone_since_ns: I8  # when alone_job last grew (CLOCK_MONOTONIC)
    recoveries: I8  # times the mutex's owner had died
    stalls: I8  # times no job could go on and one had to use the next tier
    looked_ns: I8  # when somebody last looked who is stopped and who moves (zico.pool.living)


HEADER = dtype_of(Header)


class Region(Record):
    """One region of the pool."""

    owner: I4  # job or NOBODY
    last_owner: I4  # whose bytes are in it: who released it last or has scrubbed it; NOBODY: unknown; NO_PAGES
    previous: I4  # free list, NOBODY at the ends
    next: I4
    fence: I8  # of its last release (zico.pool.fences)
    before: I8  # the fence behind which that owner had got it, if it had not passed at the release


REGION = dtype_of(Region)


class Job(Record):
    """One job of the pool."""

    # What every allocation and free touches comes first, on as few cache lines as can be.
    progress: I8  # allocations and frees since the iteration began; single writer
    live_bytes: I8  # tensors in the pool
    peak_live_bytes: I8
    requested_bytes: I8  # all tensors over the threshold, ever
    pooled_bytes: I8  # those of them served from the pool
    allocations: I8
    started_ns: I8  # when the current iteration was admitted
    iteration_waited_ns: I8  # of this iteration, in allocations
    iteration: I8  # iterations completed, with passes of other phases, and parts that these cut off
    evaluations: I8  # of them, those of other phases than marks begin (zico.trace.phases)
    parts: I8  # of them, those that no mark ended although the job has marks
    held: I8  # regions owned
    peak_held: I8
    evicted: I8  # regions' worth of live memory in the next tier, to come back; single writer
    current: Curve  # the iteration in flight
    name: Annotated[bytes, f"S{NAME_BYTES}"]
    state: I4  # JobState
    pid: I4  # in the broker's pid namespace, 0: not seen there
    profiled: I4  # 1: profile and claims are known
    atypical: I4  # iterations in a row that the profile does not describe
    phase: I4  # the one whose profile this is (zico.trace.phases)
    waiting_threads: I4  # threads of it that wait in an allocation
    over: I4  # 1: its last request exceeds what it may hold, whatever the others give back
    broker_admits: I4  # set by the broker to the low bits of the iteration it lets start (futex word)
    need: I8  # regions asked for by a thread that waits in an allocation, else 0
    persistent: I8  # regions held at the last boundary
    claim_peak: I8  # most regions any recent iteration held
    claim_floor: I8  # the least claim, from admission until the job has woken; else 0
    limit: I8  # regions that it may hold by a limit of its own, 0: none
    promised: I8  # the most that it could have held since it joined: what needs more is refused, less waits
    claim_extra: I8  # regions by which this iteration has exceeded its profile
    outgrown: I4  # 1: the iteration is longer and holds more than any that the profile knows
    remembered: I4  # 1: the profile is of the first iteration of an earlier run, and this one's goes on
    ahead_cap: I8  # bytes by which it may run ahead of its device (zico.pool.fences), 0: not tuned yet
    first_boundary_ns: I8  # when the first and the last iteration ended (throughput between them)
    last_boundary_ns: I8
    boundary_since_ns: I8  # when the wait at the boundary began, 0 if none
    need_since_ns: I8  # when the wait in an allocation began, 0 if none
    boundary_waited_ns: I8
    need_waited_ns: I8
    alone_spent_ns: I8  # how long it has kept the others from starting iterations
    died_ns: I8  # when its process was found dead while the device may still do its work, else 0
    waits_for: U8  # bit j: waits for job j
    spilled_bytes: I8  # those of them placed in the next tier
    evict: I8  # regions that it is asked to evict where it waits, 0: none, or NO_MORE
    evictions: I8  # regions evicted, ever
    maps: I8  # regions that had to be mapped anew (affinity missed)
    oom_request_bytes: I8  # of the last refused request, 0 if none
    oom_held: I8
    oom_count: I8
    save: I8  # SaveMode: what it does when its own peak exceeds what it may hold
    auto: I8  # Auto: whether the broker chooses what it may hold
    wanted: I8  # regions that it would hold without a limit, as one tells that swaps; 0: not known
    out_bytes: I8  # copied to a tier, ever; this and what follows is written by whoever copies for the job
    in_bytes: I8  # copied back
    out_now_bytes: I8  # of live tensors, in a tier and nowhere else now
    copy_waited_ns: I8  # its threads waited for copies or page faults
    copy_hidden_ns: I8  # copying that nobody waited for
    faults: I8  # page faults that were served
    late: I8  # planned or expected arrivals that a thread had to wait for
    dropped_bytes: I8  # let go without a copy, ever
    making_ns: I8  # its threads made again what was dropped
    managed_bytes: I8  # of managed memory that is its window on a GPU, 0: none
    pages_fd: I8  # its process's descriptor of its own pages on the host, 0: it does not page
    group: I8  # equal for the ranks of one group, 0: none; this and what follows: zico.pool.groups
    round: I8  # the last common start of its group that it took part in
    uneven: I8  # starts in a row for which it has waited for its group in vain
    aside: I4  # 1: it has left before it took anything: it starts the processes that train
    lingers: I4  # 1: nobody gets this place yet, since a dead job's context may still set its counters
    profile: Curve  # what an iteration does, learned; held is the envelope of recent iterations
    claims: Annotated[Numbers, "i4", (CURVE_BINS,)]  # most regions held from this bin to the end
    patient: I8  # 1: the one thread of it that waits allocates for later, and goes on by nothing but a grant
    recent_peak: I8  # most regions owned at a time since the job last had it begin anew
    paused: I8  # Paused: its next iteration begins when somebody resumes it
    gate_ns: I8  # until then a rank stays at its boundary unless its gate is opened, 0: it has none (zico.pool.groups)
    planner: Annotated[bytes, f"S{PLANNER_BYTES}"]  # whose choice the job follows now, empty: nobody has planned
    planner_note: Annotated[bytes, f"S{PLANNER_NOTE_BYTES}"]  # why it is not the one asked for, or plans for more
    started: I8  # the process, in clock ticks after the machine's start
    stopped_until_ns: I8  # until then its process counts as stopped, 0: it was not at the last look (zico.pool.living)
    moves: I8  # what it had done by the last look, and
    moved_ns: I8  # when a look last saw that change


JOB = dtype_of(Job)


class Member(Record):
    """One process's private view of the table: addresses differ from process to process."""

    header_address: I8
    mutex_address: I8
    regions_address: I8
    jobs_address: I8
    issued_address: I8
    counters_address: I8
    job: I8  # this process's job, NOBODY in the broker
    notify_fd: I8  # pipe that wakes the broker
    table_fd: I8
    pid_namespace: I8  # of this process
    slice: Annotated[Numbers, "i8", (2,)]  # timespec: the longest sleep before a wait looks around again
    slice_address: I8
    poll: Annotated[Numbers, "i8", (2,)]  # timespec: the same where a wait may end by what the device does
    poll_address: I8
    one: I8  # what is written to the pipe
    one_address: I8
    scratch: Annotated[Numbers, "i8", (7, MAX_JOBS)]  # the banker's arrays, the groups, who is given up
    profiles_address: I8  # CURVES CURVEs of this process's job (zico.pool.profiles)
    n_waits: I8  # waits that the last grant demands of the stream before it touches what was granted
    wait_pairs: Annotated[Numbers, "i4", (MAX_JOBS * STREAMS,)]
    wait_values: Annotated[Numbers, "i8", (MAX_JOBS * STREAMS,)]  # by pair, 0: none


MEMBER = dtype_of(Member)


def table_bytes(n_regions: int) -> int:
    """Return the size of the table for ``n_regions`` regions, in bytes."""
    return counters_offset(n_regions) + COUNTERS_BYTES


def regions_offset() -> int:
    """Return where the region records begin, in bytes."""
    return HEADER.itemsize


def jobs_offset(n_regions: int) -> int:
    """Return where the job records begin, in bytes, aligned to a cache line."""
    end = regions_offset() + n_regions * REGION.itemsize
    return (end + 63) // 64 * 64


PAIRS = MAX_JOBS * STREAMS
COUNTERS_BYTES = PAIRS * COUNTER_BYTES


def issued_offset(n_regions: int) -> int:
    """Return where the marks issued begin, in bytes."""
    return jobs_offset(n_regions) + MAX_JOBS * JOB.itemsize


def counters_offset(n_regions: int) -> int:
    """Return where the counters begin, in bytes, aligned to a page."""
    end = issued_offset(n_regions) + MAX_JOBS * STREAMS * 8
    return -(-end // PAGE_BYTES) * PAGE_BYTES


# -- the records from compiled code ----------------------------------------------------------------


EMPTY = int(JobState.EMPTY)
RUNNING = int(JobState.RUNNING)
BOUNDARY = int(JobState.BOUNDARY)
LEAVING = int(JobState.LEAVING)
MOVES = int(Paused.MOVES)
_SWAP, _WAITS = int(SaveMode.SWAP), int(Auto.WAITS)

_JOB_BYTES = JOB.itemsize
_WORDS = COUNTER_BYTES // 8
_I64 = np.dtype("i8")


@inlined
def header_of(pool: Member) -> Header:
    """Return the shared header."""
    return record_at(pool.header_address, HEADER)


@inlined
def cap_of(pool: Member, job: Job) -> int:
    """Return the most regions that a job may hold now: the budget, or its own limit where that is lower."""
    budget = header_of(pool).budget_regions
    return min(budget, job.limit) if job.limit > 0 else budget


def refusing_limit(job: Any) -> int:  # noqa: ANN401 - a numpy record
    """Return a job's own limit in regions if more is refused, else 0: more waits, or goes to the next tier."""
    return int(job["limit"]) if job["promised"] <= job["limit"] else 0


def iterations_of(job: Any) -> int:  # noqa: ANN401 - a numpy record
    """Return the iterations that a job has completed, evaluations and parts left out."""
    return int(job["iteration"]) - int(job["evaluations"]) - int(job["parts"])


@inlined
def profile_is_known(job: Job) -> bool:
    """Tell whether a job's profile says what its iteration may still come to hold."""
    return bool(job.profiled == 1 and job.outgrown == 0)


@inlined
def waits_for_memory(job: Job) -> bool:
    """Tell whether a job inside goes no further without memory, as far as is seen: a thread of it waits in need."""
    return bool(job.state == RUNNING and job.waiting_threads > job.patient)


@inlined
def waits_at_boundary(job: Job) -> bool:
    """Tell whether a job stands at its boundary and is to start when it can: a paused one does not wait there."""
    return bool(job.state == BOUNDARY and job.paused == 0)


@inlined
def will_yield(pool: Member, job: Job) -> bool:
    """Tell whether a job evicts at its boundary what the others wait for.

    Those do that swap, unless the broker has found that this is slower. All do where some job's
    iteration would else never fit beside what the others keep. On a GPU nobody evicts.
    """
    swaps = job.save == _SWAP and job.auto != _WAITS and header_of(pool).on_timeline == 0
    may = swaps or header_of(pool).crowded == 1
    return bool(may and job.evict != NO_MORE)


@inlined
def yields_at_boundary(pool: Member, job: Job) -> bool:
    """Tell whether a job stands at its boundary and evicts what the others wait for."""
    return bool(job.state == BOUNDARY and will_yield(pool, job))


@inlined
def regions_of(pool: Member) -> Records[Region]:
    """Return the shared region records."""
    return array_at(pool.regions_address, header_of(pool).n_regions, REGION)


@inlined
def job_at(pool: Member, job: int) -> Job:
    """Return a shared job record."""
    return record_at(pool.jobs_address + job * _JOB_BYTES, JOB)


@inlined
def pair_of(job: int, slot: int) -> int:
    """Return the number of a job's stream slot among all."""
    return job * STREAMS + slot


@inlined
def counters_of(pool: Member) -> Any:  # noqa: ANN401 - an int64 array
    """Return the counters; the one of a pair is at ``at(pair)``."""
    return array_at(pool.counters_address, PAIRS * _WORDS, _I64)


@inlined
def at(pair: int) -> int:
    """Return where a pair's counter is in ``counters_of``: each has a cache line of its own."""
    return pair * _WORDS


@inlined
def issued_of(pool: Member) -> Any:  # noqa: ANN401 - an int64 array
    """Return the last value for which each pair has a mark on its stream."""
    return array_at(pool.issued_address, PAIRS, _I64)
