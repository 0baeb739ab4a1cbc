"""Messages and open descriptors for the broker's tests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from hypothesis import strategies as st

from zico.broker.protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

BIGGEST = m.MAX_COUNT
LONGEST_NAME = "\N{WHITE MEDIUM STAR}" * m.MAX_NAME_CHARS

CLIENT_EXAMPLES: tuple[m.ClientMessage, ...] = (
    m.Hello(version=m.PROTOCOL_VERSION, name="a", pid=1, framework="torch", limit_bytes=m.MAX_SIZE_BYTES, save="page"),
    m.MoreRequest(),
    m.Outside(name="a", pid=1, framework="torch", reason="why"),
    m.Observe(m.PROTOCOL_VERSION),
    m.StatusRequest(),
    m.ReportRequest(),
    m.Change(
        budget_bytes=m.MAX_SIZE_BYTES, job="a", limit_bytes=0, weight=0.5, priority=-1, slo=0.1, paused=True, move=True
    ),
    m.Goodbye(),
)
SHARE = m.Share(weight=999.9, priority=-m.MAX_PRIORITY, slo=0.123456789, compute=0.123456789)
SAVING = m.Saving(
    how="swap",
    planner='"' * m.MAX_PLANNER_CHARS,
    planner_note='"' * m.MAX_PLANNER_NOTE_CHARS,
    out_bytes=BIGGEST,
    in_bytes=BIGGEST,
    out_now_bytes=BIGGEST,
    waited_s=m.MAX_SECONDS,
    hidden_s=m.MAX_SECONDS,
    faults=BIGGEST,
    late=BIGGEST,
    dropped_bytes=BIGGEST,
    making_s=m.MAX_SECONDS,
)
COUNTED = m.Counted(
    iterations=BIGGEST,
    running_s=m.MAX_SECONDS,
    processor_s=m.MAX_SECONDS,
    system_s=m.MAX_SECONDS,
    queued_s=m.MAX_SECONDS,
    minor_faults=BIGGEST,
    major_faults=BIGGEST,
)
SPENT = m.Spent(
    elapsed_s=m.MAX_SECONDS,
    learning_s=m.MAX_SECONDS,
    learning_iterations=BIGGEST,
    boundary_s=m.MAX_SECONDS,
    inside_s=m.MAX_SECONDS,
    copies_s=m.MAX_SECONDS,
    usual=COUNTED,
    windows=COUNTED,
    own=COUNTED,
    own_is_alone=True,
)
JOB_REPORT = m.JobReport(
    job=BIGGEST,
    name=LONGEST_NAME,
    pid=m.MAX_PID,
    framework=LONGEST_NAME,
    state="boundary",
    iterations=BIGGEST,
    evaluations=BIGGEST,
    parts=BIGGEST,
    iterations_per_s=m.MAX_RATE,
    waited_s=m.MAX_SECONDS,
    boundary_waited_s=m.MAX_SECONDS,
    held_bytes=BIGGEST,
    claim_bytes=BIGGEST,
    away_bytes=BIGGEST,
    peak_bytes=BIGGEST,
    live_tensor_bytes=BIGGEST,
    peak_tensor_bytes=BIGGEST,
    persistent_bytes=BIGGEST,
    growth_bytes=BIGGEST,
    requested_bytes=BIGGEST,
    pooled_bytes=BIGGEST,
    spilled_bytes=BIGGEST,
    evicted_bytes=BIGGEST,
    pool_fraction=0.123456789,
    maps=BIGGEST,
    oom=m.RefusedRequest(request_bytes=BIGGEST, held_bytes=BIGGEST),
    normalised=0.123456789,
    need_bytes=BIGGEST,
    waiting_s=m.MAX_SECONDS,
    waits_for=tuple(range(64)),
    limit_bytes=BIGGEST,
    share=SHARE,
    run="f" * m.MAX_RUN_CHARS,
    saving=SAVING,
)
STATUS = m.Status(
    schema_version=m.STATUS_SCHEMA,
    policy="zico",
    uptime_s=1.5,
    region_bytes=BIGGEST,
    budget_bytes=BIGGEST,
    granted_bytes=BIGGEST,
    physical_bytes=BIGGEST,
    peak_granted_bytes=BIGGEST,
    peak_physical_bytes=BIGGEST,
    jobs=(JOB_REPORT,) * 64,
    device=LONGEST_NAME,
    context_bytes=BIGGEST,
    foreign_bytes=BIGGEST,
    first_budget_bytes=BIGGEST,
    most_bytes=BIGGEST,
    isolated=True,
    metrics="\N{WHITE MEDIUM STAR}" * m.MAX_TEXT_CHARS,
    mps="\N{WHITE MEDIUM STAR}" * m.MAX_TEXT_CHARS,
    reserve_bytes=BIGGEST,
    log_level=LONGEST_NAME,
    parameters="\N{WHITE MEDIUM STAR}" * m.MAX_TEXT_CHARS,
    launchers=(m.MAX_PID,) * 64,
)
REPORT = m.Report(
    pool=m.PoolReport(
        region_bytes=BIGGEST,
        peak_granted_bytes=BIGGEST,
        peak_physical_bytes=BIGGEST,
        recoveries=BIGGEST,
        stalls=BIGGEST,
        context_bytes=BIGGEST,
        foreign_bytes=BIGGEST,
    ),
    jobs=(msgspec.structs.replace(JOB_REPORT, spent=SPENT),) * m.MAX_REPORTED_JOBS,
    jobs_left_out=BIGGEST,
    outside=(
        m.Outside(
            name=LONGEST_NAME,
            pid=m.MAX_PID,
            framework=LONGEST_NAME,
            reason="\N{WHITE MEDIUM STAR}" * m.MAX_REASON_CHARS,
            run="f" * m.MAX_RUN_CHARS,
        ),
    )
    * m.MAX_OUTSIDERS,
)
WELCOME = m.Welcome(
    job=0, region_bytes=1, n_regions=1, budget_bytes=1, policy="zico", device="cuda:0", device_id="GPU-0", n_fds=200
)
BROKER_EXAMPLES: tuple[m.BrokerMessage, ...] = (
    WELCOME,
    m.More(first=m.WELCOME_FDS, count=1),
    m.Refused("full"),
    m.ErrorReply("nonsense"),
    STATUS,
    REPORT,
    m.Changed("no"),
)
EXAMPLES: tuple[m.Message, ...] = CLIENT_EXAMPLES + BROKER_EXAMPLES

names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=m.MAX_NAME_CHARS)
hellos = st.builds(
    m.Hello, version=st.integers(0, m.MAX_VERSION), name=names, pid=st.integers(0, m.MAX_PID), framework=names
)
messages = st.one_of(
    hellos,
    st.builds(m.Refused, st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=99)),
    st.sampled_from(EXAMPLES),
)


def framed(body: bytes) -> bytes:
    """Return ``body`` behind an honest length."""
    return len(body).to_bytes(4, "big") + body


def raw_frame(**fields: object) -> bytes:
    """Return a frame of any fields, valid or not."""
    return framed(msgspec.msgpack.encode(fields))


def open_descriptors() -> dict[int, str]:
    """Return this process's descriptors and what they are."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[int(entry.name)] = str(entry.readlink())
    return found


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Fail if a descriptor was opened inside and not closed; it is closed then."""
    before = open_descriptors()
    yield
    left = {fd: what for fd, what in open_descriptors().items() if before.get(fd) != what}
    for fd in left:
        os.close(fd)
    assert not left, f"descriptors left open: {left}"
