"""What jobs, observers and the broker say to each other: frozen, typed, and no sockets.

A job says ``Hello`` and is a member until its connection closes. An observer says ``Observe`` and then asks
as often as it likes. After ``Welcome`` a job says nothing more: iterations, grants and waits go through the
shared table.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1
"""Both sides must have the same: a broker and its jobs come from one installation."""

MAX_FRAME_BYTES = 64 * 1024
"""The longest message; nothing longer is ever buffered."""

MAX_NAME_CHARS = 48
MAX_REPORTED_JOBS = 64
"""Jobs in one ``Report``, the latest to join: as many as fit into ``MAX_FRAME_BYTES`` at their longest."""

STATUS_SCHEMA = "zico.status.v1"

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
"""Without control characters, since names reach terminals."""
Text = Annotated[str, Meta(max_length=2000)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Ask to become a member of the pool; gives up what the process held by an earlier membership that it left."""

    version: Count
    name: Name
    pid: Count
    """As the job sees it: only shown, since the kernel says who the peer really is."""
    framework: Name


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Make the peer a member; ``WELCOME_FDS`` descriptors travel with it: memory, table, eventfd."""

    job: Count
    region_bytes: Count
    n_regions: Count
    budget_bytes: Count
    policy: Name


WELCOME_FDS = 3


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Turn the peer away; the connection ends here."""

    reason: Text


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """Tell the peer how it broke the protocol; the connection ends here."""

    reason: Text


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """End the connection on purpose."""


class Observe(msgspec.Struct, frozen=True, tag="observe"):
    """Begin to ask without being a member."""

    version: Count


class StatusRequest(msgspec.Struct, frozen=True, tag="status?"):
    """Ask how the pool is now."""


class ReportRequest(msgspec.Struct, frozen=True, tag="report?"):
    """Ask for the figures of every job so far; the broker also writes its record file."""


class JobStatus(msgspec.Struct, frozen=True):
    """One member now."""

    job: Count
    name: Name
    pid: Count
    """0 if it is in another pid namespace and did not say."""
    framework: Name
    state: Name
    """``running``, ``boundary`` or ``leaving``."""
    iterations: Count
    iterations_per_s: Seconds
    held_bytes: Count
    peak_bytes: Count
    live_tensor_bytes: Count
    need_bytes: Count
    """Asked for by an allocation that waits now, 0 if none."""
    waiting_s: Seconds
    """How long the present wait has lasted, 0 if it does not wait."""
    waited_s: Seconds
    waits_for: tuple[Count, ...]
    """Their ``job`` numbers."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The pool now."""

    schema_version: Name
    policy: Name
    uptime_s: Seconds
    region_bytes: Count
    budget_bytes: Count
    granted_bytes: Count
    physical_bytes: Count
    """As the kernel counts the memory file's pages."""
    peak_granted_bytes: Count
    peak_physical_bytes: Count
    jobs: tuple[JobStatus, ...]


class RefusedRequest(msgspec.Struct, frozen=True):
    """The last request of a job that could not be met."""

    request_bytes: Count
    held_bytes: Count


class JobReport(msgspec.Struct, frozen=True):
    """One job, from joining until it left or now."""

    name: Name
    pid: Count
    framework: Name
    iterations: Count
    iterations_per_s: Seconds
    """Between the first and the last iteration's end; 0 with fewer than two."""
    waited_s: Seconds
    """At boundaries and in allocations."""
    boundary_waited_s: Seconds
    peak_bytes: Count
    """Most bytes of regions held at once."""
    peak_tensor_bytes: Count
    """Most bytes of live tensors at once."""
    persistent_bytes: Count
    """Held at the last boundary."""
    requested_bytes: Count
    """Of all tensors over the threshold."""
    pooled_bytes: Count
    spilled_bytes: Count
    pool_fraction: Annotated[float, Meta(ge=0, le=1)]
    """Share of ``requested_bytes`` served from the pool; 0 if nothing was requested."""
    maps: Count
    oom: RefusedRequest | None


class PoolReport(msgspec.Struct, frozen=True):
    """The pool since the broker began."""

    policy: Name
    region_bytes: Count
    budget_bytes: Count
    peak_granted_bytes: Count
    peak_physical_bytes: Count
    recoveries: Count
    """Times a process died inside the table's mutex."""
    stalls: Count
    """Times no job could go on and one had to use the next tier."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """The pool and the latest ``MAX_REPORTED_JOBS`` jobs, in the order in which they joined."""

    pool: PoolReport
    jobs: tuple[JobReport, ...]
    jobs_left_out: Count


ClientMessage = Hello | Observe | StatusRequest | ReportRequest | Goodbye
BrokerMessage = Welcome | Refused | ErrorReply | Status | Report
Message = ClientMessage | BrokerMessage
