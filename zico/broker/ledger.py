"""Who the members are, what they did, and what they leave behind.

The record file (``arrays``) holds, for n instants, k jobs ever seen in the order in which they joined, b ends
of iterations and m waits:

    t_s            float64 [n]      seconds since the broker began
    held_bytes     int64   [n, k]   regions held by each job, in bytes
    out_bytes      int64   [n, k]   of each job's live tensors, in a tier and nowhere else, in whole regions
    physical_bytes int64   [n]      of the pool, as the kernel counts, the most since the row before
    budget_t_s     float64 [c]      when the budget came to be what it was from then on
    budget_bytes   int64   [c]
    names          str     [k]
    boundary_job   int32   [b]      index into names
    boundary_t_s   float64 [b]      when that iteration ended
    wait_job       int32   [m]      index into names
    wait_t_s       float64 [m, 2]   begin and end; waits that still last end now
    wait_kind      int8    [m]      0 at a boundary, 1 in an allocation
    iteration_s    float64 [k]      of each job's profile, 0 while it has none
    persistent_bytes int64 [k]      held at the last boundary
    profile_job    int32   [p]      index into names
    profile_t_s    float64 [p]      since the iteration began
    profile_bytes  int64   [p]      regions held from then on, the most of recent iterations

Known limitations: an iteration or a wait shorter than the time between two looks at the table (20 ms, less
when jobs reach boundaries that the broker must decide on) may be missing here; the figures of ``report`` miss
none. Memory grows by some 20 bytes per iteration and wait and by 150 KB per job ever seen.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from zico.broker.members import Marks, Member
from zico.broker.messages import (
    DEFAULT_SHARE,
    MAX_REPORTED_JOBS,
    STATUS_SCHEMA,
    JobReport,
    PoolReport,
    RefusedRequest,
    Report,
    Saving,
    Share,
    Status,
    WaitKind,
)
from zico.broker.outside import OutsideFigures
from zico.broker.samples import History
from zico.broker.saving import MODES
from zico.broker.speeds import Speeds
from zico.broker.views import ProfileCache, Record, count_of, jobs_in, looks_of, pool_view, profile_of
from zico.pool.layout import JOB, JobState

if TYPE_CHECKING:
    from zico.scheduler.state import PoolView

_NS = 1e-9


class Ledger:
    """The members of one pool and its history."""

    def __init__(self, *, policy: str, device: str, region_bytes: int, budget_bytes: int, began_ns: int) -> None:
        """Begin with no member at ``began_ns`` of the monotonic clock."""
        self._policy = policy
        self._device = device
        self._region_bytes = region_bytes
        self._budgets = [(began_ns, budget_bytes)]
        self._began_ns = began_ns
        self._ever: list[Member] = []
        self._present: dict[int, Member] = {}
        self._history = History()
        self._marks = Marks()
        self._profiles = ProfileCache()
        self._speeds = Speeds()
        self._header: Record | None = None
        self._physical_bytes = 0
        self._peak_physical_bytes = 0
        self._outside: OutsideFigures | None = None
        self._peak_outside: OutsideFigures | None = None

    # -- members ----------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the jobs that have a place, leaving ones included."""
        return tuple(self._present.values())

    def join(
        self, *, job: int, pid: int, name: str, framework: str, pidfd: int | None, share: Share = DEFAULT_SHARE
    ) -> Member:
        """Add the job that has got the place ``job``, and own its ``pidfd`` with it."""
        member = Member(
            index=len(self._ever),
            job=job,
            pid=pid,
            name=name,
            framework=framework,
            pidfd=pidfd,
            record=np.zeros((), JOB),
            share=share,
        )
        self._ever.append(member)
        self._present[job] = member
        return member

    def depart(self, member: Member, now_ns: int) -> None:
        """Take the member's place away; what was last observed of it stays. The caller closes its pidfd."""
        del self._present[member.job]
        member.record = member.record.copy()  # so that the whole snapshot it lies in need not stay
        self._marks.close(member, now_ns)

    # -- what is seen -----------------------------------------------------------------------------------

    def observe(self, header: Record, jobs: Record, physical_bytes: int, now_ns: int) -> None:
        """Take in one snapshot of the table, whose arrays are the ledger's from now on, and the physical bytes."""
        self._header = header
        self._speeds.observe(now_ns, looks_of(jobs, now_ns))
        self._physical_bytes = physical_bytes
        self._peak_physical_bytes = max(physical_bytes, self._peak_physical_bytes)
        held, out = {}, {}
        for member in self._present.values():
            after = jobs[member.job]
            self._marks.observe(member, after, now_ns)
            member.record = after
            if member.waited_before_ns is None and after["first_boundary_ns"]:
                member.waited_before_ns = _waited_ns(after)
            held[member.index] = int(after["held"])
            out[member.index] = -(-count_of(after["out_now_bytes"]) // self._region_bytes)
        self._history.add(now_ns, physical_bytes, held, out)
        budget_bytes = int(header["budget_regions"]) * self._region_bytes
        if budget_bytes != self._budgets[-1][1]:
            self._budgets.append((now_ns, budget_bytes))

    def observe_outside(self, found: OutsideFigures | None) -> None:
        """Take in what lies outside the pool on its device, if that is known."""
        self._outside = found
        if found is not None:
            before = self._peak_outside or found
            self._peak_outside = OutsideFigures(*map(max, before, found))

    def view(self, header: Record, jobs: Record, now_ns: int) -> PoolView:
        """Return what a policy sees of the snapshot, with what was measured of jobs that work together."""
        return self._speeds.noted(pool_view(header, jobs, now_ns, self._profiles))

    # -- what is told -----------------------------------------------------------------------------------

    def status(self, now_ns: int) -> Status:
        """Return the pool at the last observation."""
        return Status(
            schema_version=STATUS_SCHEMA,
            policy=self._policy,
            uptime_s=(now_ns - self._began_ns) * _NS,
            region_bytes=self._region_bytes,
            budget_bytes=self._budgets[-1][1],
            granted_bytes=self._header_bytes("granted"),
            physical_bytes=self._physical_bytes,
            peak_granted_bytes=self._header_bytes("peak_granted"),
            peak_physical_bytes=self._peak_physical_bytes,
            jobs=tuple(self._job_report(member, now_ns) for member in self._present.values()),
            device=self._device,
            first_budget_bytes=self._budgets[0][1],
            most_bytes=self._header_bytes("n_regions"),
            isolated=bool(self._header_count("isolate")),
            slowdown=self._speeds.measured,
            **_known(self._outside),
        )

    def report(self, now_ns: int) -> Report:
        """Return the figures of the latest jobs and of the pool."""
        latest = self._ever[-MAX_REPORTED_JOBS:]
        pool = PoolReport(
            peak_granted_bytes=self._header_bytes("peak_granted"),
            peak_physical_bytes=self._peak_physical_bytes,
            region_bytes=self._region_bytes,
            recoveries=self._header_count("recoveries"),
            stalls=self._header_count("stalls"),
            slowdown=self._speeds.measured_last,
            **_known(self._peak_outside),
        )
        return Report(
            pool=pool,
            jobs=tuple(self._job_report(member, now_ns) for member in latest),
            jobs_left_out=len(self._ever) - len(latest),
        )

    def arrays(self, now_ns: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the record file, as this module's docstring lists them."""
        t_ns, physical_bytes, held, out = self._history.rows()
        marks = self._marks_until(now_ns)
        profiles = [
            profile_of(member.record["profile"]) if member.record["profiled"] else None for member in self._ever
        ]
        known = [(i, profile) for i, profile in enumerate(profiles) if profile is not None]
        # A job that joined after the last look has no column yet.
        held_bytes, out_bytes = np.zeros((2, len(t_ns), len(self._ever)), np.int64)
        held_bytes[:, : held.shape[1]] = held.astype(np.int64) * self._region_bytes
        out_bytes[:, : out.shape[1]] = out.astype(np.int64) * self._region_bytes
        return {
            "t_s": self._seconds(t_ns),
            "held_bytes": held_bytes,
            "out_bytes": out_bytes,
            "physical_bytes": physical_bytes,
            "budget_t_s": self._seconds(np.array([t_ns for t_ns, _ in self._budgets], np.int64)),
            "budget_bytes": np.array([budget_bytes for _, budget_bytes in self._budgets], np.int64),
            "names": np.array([member.name for member in self._ever], dtype=np.str_),
            "boundary_job": np.array(marks.boundary_job, np.int32),
            "boundary_t_s": self._seconds(np.array(marks.boundary_ns, np.int64)),
            "wait_job": np.array(marks.wait_job, np.int32),
            "wait_t_s": self._seconds(np.array(marks.wait_ns, np.int64)).reshape(-1, 2),
            "wait_kind": np.array(marks.wait_kind, np.int8),
            "iteration_s": np.array([0.0 if one is None else one.duration_ns * _NS for one in profiles], np.float64),
            "persistent_bytes": self._bytes([int(member.record["persistent"]) for member in self._ever]),
            "profile_job": np.array([i for i, profile in known for _ in profile.held], np.int32),
            "profile_t_s": np.array([t_ns * _NS for _, profile in known for t_ns in profile.t_ns], np.float64),
            "profile_bytes": self._bytes([regions for _, profile in known for regions in profile.held]),
        }

    def _marks_until(self, now_ns: int) -> Marks:
        """Return the marks with the waits that still last ended now."""
        marks = Marks(*(getattr(self._marks, field.name)[:] for field in dataclasses.fields(Marks)))
        for member in self._present.values():
            for kind, begin_ns in member.open_waits.items():
                marks.add_wait(member.index, kind, begin_ns, now_ns)
        return marks

    def _seconds(self, t_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        seconds: npt.NDArray[np.float64] = np.multiply(t_ns - self._began_ns, _NS, dtype=np.float64)
        return seconds

    def _bytes(self, regions: list[int]) -> npt.NDArray[np.int64]:
        return np.array(regions, np.int64) * self._region_bytes

    def _header_count(self, field: str, unit: int = 1) -> int:
        return 0 if self._header is None else count_of(self._header[field], unit)

    def _header_bytes(self, field: str) -> int:
        return self._header_count(field, self._region_bytes)

    def _job_report(self, member: Member, now_ns: int) -> JobReport:
        record = member.record
        since_ns = min(member.open_waits.values(), default=now_ns)
        boundary_waited_s = self._waited_s(member, WaitKind.BOUNDARY, now_ns)
        requested_bytes = count_of(record["requested_bytes"])
        pooled_bytes = min(count_of(record["pooled_bytes"]), requested_bytes)
        return JobReport(
            name=member.name,
            framework=member.framework,
            pid=member.pid,
            iterations=count_of(record["iteration"]),
            iterations_per_s=iterations_per_s(record),
            waited_s=boundary_waited_s + self._waited_s(member, WaitKind.ALLOCATION, now_ns),
            boundary_waited_s=boundary_waited_s,
            peak_bytes=count_of(record["peak_held"], self._region_bytes),
            peak_tensor_bytes=count_of(record["peak_live_bytes"]),
            persistent_bytes=count_of(record["persistent"], self._region_bytes),
            requested_bytes=requested_bytes,
            pooled_bytes=pooled_bytes,
            spilled_bytes=count_of(record["spilled_bytes"]),
            evicted_bytes=count_of(record["evictions"], self._region_bytes),
            pool_fraction=pooled_bytes / requested_bytes if requested_bytes else 0.0,
            maps=count_of(record["maps"]),
            oom=self._refused_request(record),
            normalised=_normalised(member),
            saving=_saving(record),
            job=member.job,
            state=self._state_name(member),
            held_bytes=count_of(record["held"], self._region_bytes),
            live_tensor_bytes=count_of(record["live_bytes"]),
            need_bytes=count_of(record["need"], self._region_bytes),
            waiting_s=max(0, now_ns - since_ns) * _NS,
            waits_for=jobs_in(int(record["waits_for"])),
            limit_bytes=count_of(record["limit"], self._region_bytes),
            share=member.share,
        )

    def _state_name(self, member: Member) -> str:
        if self._present.get(member.job) is not member:
            return "gone"
        if member.leaving:
            return "leaving"
        state = JobState(int(member.record["state"]))
        return "running" if state is JobState.EMPTY else state.name.lower()  # joined after the last look

    def _waited_s(self, member: Member, kind: WaitKind, now_ns: int) -> float:
        """Return how long the member has waited, the wait that still lasts included."""
        field = "boundary_waited_ns" if kind is WaitKind.BOUNDARY else "need_waited_ns"
        lasting_ns = max(0, now_ns - member.open_waits.get(kind, now_ns))
        return (count_of(member.record[field]) + lasting_ns) * _NS

    def _refused_request(self, record: Any) -> RefusedRequest | None:  # noqa: ANN401 - a numpy record
        if not record["oom_count"]:
            return None
        return RefusedRequest(
            request_bytes=count_of(record["oom_request_bytes"]),
            held_bytes=count_of(record["oom_held"], self._region_bytes),
        )


def iterations_per_s(record: Any) -> float:  # noqa: ANN401 - a numpy record
    """Return iterations per second between the first and the last one's end, 0 with fewer than two."""
    span_ns = int(record["last_boundary_ns"]) - int(record["first_boundary_ns"])
    iterations = int(record["iteration"])
    return (iterations - 1) / (span_ns * _NS) if iterations > 1 and span_ns > 0 else 0.0


def _waited_ns(record: Any) -> int:  # noqa: ANN401 - a numpy record
    return count_of(record["boundary_waited_ns"]) + count_of(record["need_waited_ns"])


def _normalised(member: Member) -> float | msgspec.UnsetType:
    """Return the share of the time between the first and the last iteration's end in which the job did not wait."""
    span_ns = int(member.record["last_boundary_ns"]) - int(member.record["first_boundary_ns"])
    if member.waited_before_ns is None or span_ns <= 0:
        return msgspec.UNSET
    waited_ns = _waited_ns(member.record) - member.waited_before_ns
    return min(1.0, max(0.0, 1 - waited_ns / span_ns))


def _saving(record: Any) -> Saving:  # noqa: ANN401 - a numpy record
    """Return what a job has moved to tiers and back."""
    return Saving(
        how=MODES[int(record["save"])],
        out_bytes=count_of(record["out_bytes"]),
        in_bytes=count_of(record["in_bytes"]),
        out_now_bytes=count_of(record["out_now_bytes"]),
        waited_s=count_of(record["copy_waited_ns"]) * _NS,
        hidden_s=count_of(record["copy_hidden_ns"]) * _NS,
        faults=count_of(record["faults"]),
        late=count_of(record["late"]),
    )


def _known(figures: OutsideFigures | None) -> dict[str, int]:
    """Return the fields that can be filled in."""
    return figures._asdict() if figures else {}
