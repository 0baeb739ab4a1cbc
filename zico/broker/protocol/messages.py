"""What jobs, observers and the broker say to each other: frozen, typed, and no sockets.

A job says ``Hello`` and is a member until its connection closes. An observer says ``Observe`` and
then asks as often as it likes, or changes what the pool and its jobs get. After ``Welcome`` a job
fetches the descriptors that did not travel with it, and asks for memory that it has in common with
others. Iterations, grants and waits go through the shared table.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from zico.base.settings import DEFAULT_LOG_LEVEL

PROTOCOL_VERSION = 15
"""Both sides must have the same: a broker and its jobs come from one installation."""

MAX_FRAME_BYTES = 144 * 1024
"""No longer message is ever buffered."""

WELCOME_FDS = 3
"""So many descriptors travel with a ``Welcome``: all that there are on the host device."""
FDS_PER_MESSAGE = 128
"""At most so many descriptors travel with a ``More``; the kernel passes on 253 at most (SCM_MAX_FD, unix(7))."""
MAX_FDS = 1 << 20
"""So many descriptors can be announced: no process may open more, unless fs.nr_open was raised (proc(5))."""

STATUS_SCHEMA = "zico.status.v1"

# -- the range of every field ----------------------------------------------------------------------

# What a client may say is so small that nothing computed from it leaves the range of what the
# broker tells.
MAX_NAME_CHARS = 48
MAX_TEXT_CHARS = 2000
MAX_RUN_CHARS = 32
MAX_PLANNER_CHARS = 16
MAX_PLANNER_NOTE_CHARS = 152
MAX_WEIGHT = 1000.0
MAX_PRIORITY = 1000
MAX_SLO = 100.0
MAX_SIZE_BYTES = 2**53
MOST_REGIONS = 4096
"""Of one content on a GPU."""
"""Nobody can ask for more: floats, and numbers in JSON (RFC 8259), are exact up to this."""
MAX_WAIT_S = 1e9
"""Nobody can ask for a longer wait; in nanoseconds, added to any clock's time, it fits 64 bits."""
MAX_VERSION = 2**31 - 1
MAX_PID = 2**22
"""The kernel's own limit, PID_MAX_LIMIT (proc_sys_kernel(5)); the shared table has 32 bits for a pid."""

MAX_COUNT = 2**63 - 1
"""No word of the shared table is larger. The ledger cuts products of such words to it."""
MAX_SECONDS = 1e12
"""No sum of four words of the shared table that count nanoseconds is above this."""
MAX_RATE = 1e30
"""No word of the shared table, per nanosecond, is above this."""
MAX_REASON_CHARS = 300
MAX_OUTSIDERS = 16
"""A ``Report`` has so many processes outside the pool, the latest that told."""
MAX_REPORTED_JOBS = 64
"""A ``Report`` has so many jobs, the latest to join: as many as fit into ``MAX_FRAME_BYTES`` at their longest."""

_NO_CONTROLS = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""Names and sentences reach terminals."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=_NO_CONTROLS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS, pattern=_NO_CONTROLS)]
"""What ``as_text`` returns."""
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS, pattern=_NO_CONTROLS)]
RunId = Annotated[str, Meta(max_length=MAX_RUN_CHARS, pattern=r"^[0-9a-f]*\Z")]
"""What tells one ``zico run`` from all others; empty: none has started the job."""
Version = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
Pid = Annotated[int, Meta(ge=0, le=MAX_PID)]
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE_BYTES)]
"""Bytes that a client asks for."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""What the broker tells."""
Known = Count | msgspec.UnsetType
"""A count that is left out where nobody knows it, rather than 0."""
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Rate = Annotated[float, Meta(ge=0, le=MAX_RATE)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(gt=0, le=MAX_WEIGHT)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Slo = Annotated[float, Meta(gt=0, le=MAX_SLO)]
Compute = Annotated[float, Meta(gt=0, le=1)]
ContentKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""What names a content that jobs share (``zico.broker.frozen``): equal where the bytes are."""
Found = Literal["here", "fill", "busy", "full"]
"""A content is there, or its memory is to be filled, or somebody else fills it, or the budget has no room for it."""
SaveMode = Literal["none", "swap", "page", "auto"]
"""What a job does when its peak exceeds what it may hold: nothing, move tensors by a plan, page, or what is best."""


def visible(text: str) -> str:
    """Return ``text`` with escapes for what nobody would see, or what would act on a terminal or turn a line around."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def as_text(text: str) -> str:
    """Return ``text`` as a ``Text`` can carry it: visible, and cut where it is too long."""
    return visible(text)[:MAX_TEXT_CHARS]


class Share(msgspec.Struct, frozen=True):
    """What a job gets beside the others."""

    weight: Weight = 1.0
    """What its throughput counts beside the others'."""
    priority: Priority = 0
    """Its turn comes before that of any lower one."""
    slo: Slo | None = None
    """By how much it may be slower than alone, 0.1: a tenth; ``None``: nothing is promised."""
    compute: Compute = 1.0
    """The most that it may use of its device's processors, 1: all; fixed when it is started."""


DEFAULT_SHARE = Share()


class WaitKind(enum.IntEnum):
    """Where a job waited."""

    BOUNDARY = 0
    """Between two iterations."""
    ALLOCATION = 1
    """Inside an allocation."""


class Saving(msgspec.Struct, frozen=True):
    """What a job has moved to the next tier and back, or dropped, to go on with less; and what that cost."""

    how: SaveMode = "none"
    planner: Annotated[str, Meta(max_length=MAX_PLANNER_CHARS, pattern=_NO_CONTROLS)] = ""
    """Whose choice of tensors it follows now; empty: nobody has planned for it."""
    planner_note: Annotated[str, Meta(max_length=MAX_PLANNER_NOTE_CHARS, pattern=_NO_CONTROLS)] = ""
    """Why that is not the planner asked for, or plans for more than the job may hold; empty: neither is so."""
    out_bytes: Count = 0
    """Copied to a tier, ever."""
    in_bytes: Count = 0
    """Copied back, ever."""
    out_now_bytes: Count = 0
    """Of live tensors, in a tier and nowhere else now."""
    waited_s: Seconds = 0.0
    """Its threads waited for copies or page faults."""
    hidden_s: Seconds = 0.0
    """Copying that nobody waited for."""
    faults: Count = 0
    """Page faults that were served."""
    late: Count = 0
    """Arrivals that a thread had to wait for, although they were planned or expected."""
    dropped_bytes: Count = 0
    """Let go without a copy, ever, and made again if they were used."""
    making_s: Seconds = 0.0
    """Its threads made again what was dropped."""


class Counted(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a job's process did in some iterations, as the kernel counts it."""

    iterations: Count = 0
    running_s: Seconds = 0.0
    """They took, without waits and copies."""
    processor_s: Seconds | None = 0.0
    """Its threads used processors; ``None``: the process could not be seen, nor what follows."""
    system_s: Seconds = 0.0
    """Of that in the kernel."""
    queued_s: Seconds | None = 0.0
    """Its threads waited for a processor; ``None``: the kernel does not count that."""
    minor_faults: Count = 0
    major_faults: Count = 0


class Spent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a job has done with its time in the pool (``zico.broker.spending``); numbers alone, to be short."""

    elapsed_s: Seconds = 0.0
    """From the first look at it to the last one."""
    learning_s: Seconds = 0.0
    """Until the policy had thought about it; without what it computed before its first iteration ended."""
    learning_iterations: Count = 0
    """Without the first one."""
    boundary_s: Seconds = 0.0
    """It waited between iterations; this and all that follows is of the time after learning."""
    inside_s: Seconds = 0.0
    """It waited in allocations."""
    copies_s: Seconds = 0.0
    """Its threads waited for copies, or made again what was dropped."""
    usual: Counted = Counted()
    """Its usual iterations, without what the kernel counts."""
    windows: Counted = Counted()
    """Those of them in windows, with that."""
    own: Counted | None = None
    """The windows that show the job by itself; ``None``: there is none."""
    own_is_alone: bool = False
    """No other job ran in them; else it is the best window."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Ask to become a member of the pool; gives up what the process held by an earlier membership that it left."""

    version: Version
    name: Name
    pid: Pid
    """As the job sees it: only shown, since the kernel says who the peer really is."""
    framework: Name
    share: Share = Share()
    limit_bytes: Size = 0
    """What it may hold, 0: as much as the budget has."""
    save: SaveMode = "none"
    run: RunId = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Make the peer a member.

    The first ``WELCOME_FDS`` descriptors travel with it: table, pipe, then the memory's in the
    order of its pieces. The rest are for the asking, since the peer may have to raise its limit
    first.
    """

    job: Count
    region_bytes: Count
    n_regions: Count
    budget_bytes: Count
    policy: Name
    device: Name
    """``host`` or ``cuda:N``, N as the broker counts."""
    device_id: Text
    """What names the device in every process, empty for the host: its UUID."""
    n_fds: Annotated[int, Meta(ge=WELCOME_FDS, le=MAX_FDS)]
    """How many descriptors there are to come, those with this message included."""


class MoreRequest(msgspec.Struct, frozen=True, tag="more?"):
    """Ask for the next descriptors."""


class More(msgspec.Struct, frozen=True, tag="more"):
    """Bring the next ``count`` descriptors, which travel with it."""

    first: Count
    """How many came before."""
    count: Annotated[int, Meta(ge=1, le=FDS_PER_MESSAGE)]


class ShareRequest(msgspec.Struct, frozen=True, tag="share?"):
    """Ask for a content that other jobs may have as well (``zico.broker.frozen``)."""

    key: ContentKey
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_SIZE_BYTES)]


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """Tell that a content is filled and mapped by nobody who could write it."""

    key: ContentKey


class Unshare(msgspec.Struct, frozen=True, tag="unshare"):
    """Tell that a content is mapped no more, or is not going to be filled; nothing is answered."""

    key: ContentKey


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """Answer ``ShareRequest`` and ``Filled``.

    A request's ``here`` or ``fill`` comes with a descriptor on the host, and with regions on a GPU.
    """

    found: Found
    regions: Annotated[tuple[Count, ...], Meta(max_length=MOST_REGIONS)] = ()


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Turn the peer away; the connection ends here."""

    reason: Text


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """Tell the peer how it broke the protocol; the connection ends here."""

    reason: Text


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """End the connection on purpose."""


class Outside(msgspec.Struct, frozen=True, tag="outside"):
    """Tell that a process shares no memory of a framework, and why; the connection ends here.

    There is no version in it, since one of the reasons is that the peer has another one. It is sent
    by ``zico.job.telling``.
    """

    name: Name
    """Of the job that the process is one of."""
    pid: Pid
    framework: Name
    reason: Reason
    run: RunId = ""


class Observe(msgspec.Struct, frozen=True, tag="observe"):
    """Begin to ask without being a member."""

    version: Version


class StatusRequest(msgspec.Struct, frozen=True, tag="status?"):
    """Ask how the pool is now."""


class ReportRequest(msgspec.Struct, frozen=True, tag="report?"):
    """Ask for the figures of every job so far."""

    record: bool = True
    """Let the broker write its record file first."""
    profiles_to: Text = ""
    """Let it write what the report's jobs are known to need to this file first, as a record without a history."""


class Change(msgspec.Struct, frozen=True, tag="change"):
    """Ask for another budget, or for other figures of one job; what is left out stays."""

    budget_bytes: Size | msgspec.UnsetType = msgspec.UNSET
    job: Name | msgspec.UnsetType = msgspec.UNSET
    """Whom the rest is for: every process of that name."""
    pid: Pid | msgspec.UnsetType = msgspec.UNSET
    """Of these only that process, with the ranks that begin iterations together with it where a limit is not meant."""
    limit_bytes: Size | msgspec.UnsetType = msgspec.UNSET
    """What the job may hold, 0: as much as the budget has."""
    weight: Weight | msgspec.UnsetType = msgspec.UNSET
    priority: Priority | msgspec.UnsetType = msgspec.UNSET
    slo: Slo | msgspec.UnsetType | None = msgspec.UNSET
    paused: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the job begins no further iteration; false: it goes on."""
    move: bool = False
    """What a job that is paused keeps between iterations leaves the budget."""


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """Tell that it is so from now on, or why nothing has changed."""

    refused: Text = ""
    """A sentence; empty: it is so."""
    processes: Count = 0
    """How many jobs' processes it was for."""


class RefusedRequest(msgspec.Struct, frozen=True):
    """The last request of a job that could not be met."""

    request_bytes: Count
    held_bytes: Count
    limit_bytes: Count = 0


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one process did in the pool, from joining until it left or now."""

    name: str
    framework: str = ""
    pid: Pid = 0
    """0 if it is in another pid namespace and did not say."""
    iterations: Count = 0
    """What marks ended; without any mark, what repetition showed."""
    evaluations: Count = 0
    """Passes of other phases between marks, as far as repetition showed them."""
    parts: Count = 0
    """Parts of iterations that were told apart: closures, micro-batches, and what came before the first mark."""
    iterations_per_s: Rate = 0.0
    """Between the first and the last iteration's end; 0 with fewer than two."""
    waited_s: Seconds = 0.0
    """At boundaries and in allocations."""
    boundary_waited_s: Seconds = 0.0
    peak_bytes: Count = 0
    """Most bytes of regions held at once."""
    peak_tensor_bytes: Count = 0
    """Most bytes of live tensors at once."""
    persistent_bytes: Count = 0
    """Held at the last boundary."""
    growth_bytes: Count = 0
    """What it keeps more after each of its last iterations, 0 if it does not grow (``zico.broker.growth``)."""
    requested_bytes: Count = 0
    """Of all tensors over the threshold."""
    pooled_bytes: Count = 0
    spilled_bytes: Count = 0
    evicted_bytes: Count = 0
    """Moved to the next tier while it waited, for jobs that could go on."""
    shared_bytes: Count = 0
    """Frozen memory that it has in common with other jobs, now or in the end; not in what it holds."""
    pool_fraction: Fraction = 0.0
    """Share of ``requested_bytes`` served from the pool; 0 if nothing was requested."""
    maps: Count = 0
    oom: RefusedRequest | None = None
    normalised: Fraction | msgspec.UnsetType = msgspec.UNSET
    """Its throughput over that without waiting, between its first and its last iteration's end.

    Left out with fewer than two iterations. What jobs slow each other down beside that is not in
    it.
    """
    saving: Saving = Saving()


class JobReport(ProcessFigures, frozen=True, kw_only=True):
    """One member: what it did, and how it is now or was when it left."""

    name: Name
    framework: Name
    job: Count
    """Its place in the pool, another's once it has left."""
    state: Name
    """``running``, ``boundary``, ``pausing`` until its iteration ends, ``paused``, ``leaving`` or ``gone``."""
    held_bytes: Count = 0
    claim_bytes: Count = 0
    """The most that it may still come to hold in this iteration, by what is known of it."""
    away_bytes: Count = 0
    """Of what it evicted while it waited or was paused, what has not come back; not in ``saving.out_now_bytes``."""
    live_tensor_bytes: Count = 0
    need_bytes: Count = 0
    """Asked for by an allocation that waits now, 0 if none."""
    waiting_s: Seconds = 0.0
    """How long the present wait has lasted, 0 if it does not wait."""
    waits_for: tuple[Count, ...] = ()
    """Their ``job`` numbers."""
    limit_bytes: Count = 0
    """What it may hold by a limit of its own, 0: as much as the budget has."""
    share: Share = Share()
    run: RunId = ""
    """Which run started it: names are not unique, as several runs may join a daemon."""
    spent: Spent | msgspec.UnsetType = msgspec.UNSET
    """Only in a ``Report``."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The pool now."""

    schema_version: Name
    policy: Name
    uptime_s: Seconds
    region_bytes: Count
    budget_bytes: Count
    granted_bytes: Count
    physical_bytes: Count
    """As the device says: on the host the memory file's pages, as the kernel counts them."""
    peak_granted_bytes: Count
    peak_physical_bytes: Count
    """Together with what jobs share, as its figure of now is not."""
    jobs: tuple[JobReport, ...]
    device: Name = "host"
    shared_bytes: Count = 0
    """Frozen memory that jobs have in common, counted once; of the budget, and in ``physical_bytes``."""
    context_bytes: Known = msgspec.UNSET
    """Of the device's memory outside the pool, what its jobs and the broker hold: framework contexts, workspaces."""
    foreign_bytes: Known = msgspec.UNSET
    """What others hold of the device's memory, or nobody is listed for."""
    first_budget_bytes: Count = 0
    """The budget with which the pool began."""
    most_bytes: Count = 0
    """The largest budget that it can be given."""
    isolated: bool = False
    """Whether no job sees what another has left in memory."""
    metrics: Text = ""
    """Where the broker serves metrics, as users read it; empty: nowhere."""
    mps: Text = ""
    """The directory of the MPS daemon that serves the jobs; empty: none does."""
    reserve_bytes: Count = 0
    """What the broker was told to keep free for each job beside the pool."""
    log_level: Name = DEFAULT_LOG_LEVEL
    parameters: Text = ""
    """What the policy was told, as ``KEY=VALUE,KEY=VALUE``; empty: nothing."""
    launchers: tuple[Pid, ...] = ()
    """Processes that have left the pool to those that they start."""
    fault: Text = ""
    """Why the pool is gone, and what to do; empty: it is not."""


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The pool since the broker began."""

    peak_granted_bytes: Count = 0
    """Together with what jobs share."""
    peak_physical_bytes: Count = 0
    """As the kernel counted it; on a GPU as large as the pool from its beginning."""
    region_bytes: Count = 0
    last_budget_bytes: Count = 0
    """In force now; 0 where it is not known."""
    recoveries: Count = 0
    """Times a process died inside the table's mutex."""
    stalls: Count = 0
    """Times no job could go on and one had to use the next tier."""
    peak_shared_bytes: Count = 0
    """The most frozen memory that jobs had in common, counted once."""
    context_bytes: Known = msgspec.UNSET
    """The most seen; as in ``Status``."""
    foreign_bytes: Known = msgspec.UNSET


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The pool and the latest ``MAX_REPORTED_JOBS`` jobs, in the order in which they joined."""

    pool: PoolReport
    jobs: tuple[JobReport, ...]
    jobs_left_out: Count
    outside: tuple[Outside, ...] = ()
    """The latest ``MAX_OUTSIDERS`` that told so."""


OfMember = MoreRequest | ShareRequest | Filled | Unshare
"""What a member may say."""
ClientMessage = Hello | OfMember | Outside | Observe | StatusRequest | ReportRequest | Change | Goodbye
BrokerMessage = Welcome | More | Shared | Refused | ErrorReply | Status | Report | Changed
Message = ClientMessage | BrokerMessage
