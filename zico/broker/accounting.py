"""Who the members are, what they did, and what they leave behind.

The record file (``arrays``, ``write_record``) has the arrays of ``zico.report.model.Record``, with a
column for each job ever seen, in the order in which they joined. Waits that still last end now.

Known limitations: an iteration or a wait may be missing here if it is shorter than the time between
two looks at the table. That time is 20 ms, and less where the broker must decide on boundaries. The
figures of ``report`` miss none. For a record memory grows by some 20 bytes per iteration and wait
and by 150 KB per job ever seen. Without one it does not grow: of jobs that have left, only the
latest are kept that a report has.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from zico.broker.members import Marks, Member
from zico.broker.outside import OutsideFigures
from zico.broker.protocol.messages import (
    MAX_OUTSIDERS,
    MAX_REPORTED_JOBS,
    STATUS_SCHEMA,
    JobReport,
    Outside,
    PoolReport,
    RefusedRequest,
    Report,
    Saving,
    Status,
    WaitKind,
)
from zico.broker.samples import NOTHING, History
from zico.broker.saving import MODES
from zico.broker.views import ProfileCache, Record, count_of, jobs_in, pool_view, profile_of
from zico.pool.layout import JOB, JobState, iterations_of, refusing_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from zico.broker.members import Entry
    from zico.scheduler.state import PoolView

_NS = 1e-9


class Ledger:
    """The members of one pool and its history."""

    def __init__(
        self,
        *,
        policy: str,
        device: str,
        region_bytes: int,
        budget_bytes: int,
        began_ns: int,
        is_recorded: bool = True,
    ) -> None:
        """Begin with no member at ``began_ns`` of the monotonic clock; only if ``is_recorded`` there are ``arrays``."""
        self._policy = policy
        self._device = device
        self._region_bytes = region_bytes
        self._budgets = [(began_ns, budget_bytes)]
        self._began_ns = began_ns
        self._is_recorded = is_recorded
        self._ever: list[Member] = []
        self._n_ever = 0
        self._forgotten = 0
        """Jobs that have left and are not in ``_ever`` any more."""
        self._present: dict[int, Member] = {}
        self._history = History()
        self._marks = Marks()
        self._profiles = ProfileCache()
        self._header: Record | None = None
        self._physical_bytes = 0
        self._peak_physical_bytes = 0
        self._shared_bytes = 0
        self._peak_shared_bytes = 0
        self._shared_regions = 0
        self._outsiders: collections.deque[Outside] = collections.deque(maxlen=MAX_OUTSIDERS)
        self._outside: OutsideFigures | None = None
        self._peak_outside: OutsideFigures | None = None

    # -- members -----------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the jobs that have a place, leaving ones included."""
        return tuple(self._present.values())

    def join(self, entry: Entry, *, pid: int, pidfd: int | None = None, record: Record | None = None) -> Member:
        """Add the job that has got the place ``entry.job``, and own its ``pidfd`` with it.

        ``pid`` is what people call its process, which may be the number in another pid namespace.
        ``record`` is the job's record in the table where it had joined before the ledger began.
        """
        record = np.zeros((), JOB) if record is None else record
        member = Member(**msgspec.structs.asdict(entry), index=self._n_ever, pid=pid, pidfd=pidfd, record=record)
        self._ever.append(member)
        self._n_ever += 1
        self._present[entry.job] = member
        return member

    def depart(self, member: Member, now_ns: int) -> None:
        """Take the member's place away; what was last observed of it stays. The caller closes its pidfd."""
        del self._present[member.job]
        member.record = member.record.copy()  # so that the whole snapshot it lies in need not stay
        self._marks.close(member, now_ns)
        if not self._is_recorded:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Keep of the jobs that have left only as many as a report has."""
        gone = [one for one in self._ever if self._present.get(one.job) is not one]
        jobs = [one for one in gone if not one.record["aside"]]
        kept = {one.index for one in [*self._present.values(), *jobs[-MAX_REPORTED_JOBS:]]}
        self._forgotten += len(jobs[:-MAX_REPORTED_JOBS])
        self._ever = [one for one in self._ever if one.index in kept]

    # -- what is seen ------------------------------------------------------------------------------

    def observe(self, header: Record, jobs: Record, physical_bytes: int, now_ns: int) -> None:
        """Take in one snapshot of the table, whose arrays are the ledger's from now on, and the physical bytes."""
        self._header = header
        self._physical_bytes = physical_bytes
        self._peak_physical_bytes = max(physical_bytes, self._peak_physical_bytes)
        held, out = {}, {}
        inside = {member.job for member in self._present.values() if jobs[member.job]["state"] == JobState.RUNNING}
        for member in self._present.values():
            after = jobs[member.job]
            self._marks.observe(member, after, now_ns)
            member.spending.observe(after, now_ns, is_alone=not inside - {member.job})
            member.growth.note(count_of(after["iteration"]), count_of(after["persistent"]))
            member.record = after
            if member.waited_before_ns is None and after["first_boundary_ns"]:
                member.waited_before_ns = _waited_ns(after)
            self.note_blockers(member, int(after["waits_for"]))
            held[member.index] = int(after["held"])
            out[member.index] = -(-count_of(after["out_now_bytes"]) // self._region_bytes)
        if self._is_recorded:
            self._history.add(now_ns, physical_bytes, held, out)
        else:
            self._marks = Marks()
        budget_bytes = int(header["budget_total"]) * self._region_bytes
        if budget_bytes != self._budgets[-1][1]:
            self._budgets.append((now_ns, budget_bytes))

    def note_planned(self) -> None:
        """Note that the policy has thought about all members whose iterations are known, as far as it does."""
        for member in self._present.values():
            if not member.spending.is_planned:
                profile = self._profiles.profile(member.job, member.record)
                is_known = profile is not None and not profile.is_flat
                member.spending.is_planned = is_known and not member.record["remembered"]

    def note_blockers(self, member: Member, mask: int) -> None:
        """Remember that the member waits for the jobs at the places in ``mask``, if it waits at all."""
        if mask and member.open_waits:
            member.note_blockers(self._present[job].index for job in jobs_in(mask) if job in self._present)

    def observe_shared(self, size_bytes: int, of_members: collections.Counter[int], regions: int = 0) -> None:
        """Take in what jobs have in common: all of it once, of each member by its index, and the regions that hold it.

        These are granted, but to no job.
        """
        self._shared_bytes = size_bytes
        self._shared_regions = regions
        self._peak_shared_bytes = max(size_bytes, self._peak_shared_bytes)
        for member in self._present.values():
            member.shared_bytes = of_members[member.index]

    def observe_outside(self, found: OutsideFigures | None) -> None:
        """Take in what lies outside the pool on its device, if that is known."""
        self._outside = found
        if found is not None:
            before = self._peak_outside or found
            self._peak_outside = OutsideFigures(*map(max, before, found))

    def note_outsider(self, outsider: Outside) -> None:
        """Keep that a process is outside the pool, and why; the last that it said of a framework counts."""
        same = [one for one in self._outsiders if (one.pid, one.framework) == (outsider.pid, outsider.framework)]
        for one in same:
            self._outsiders.remove(one)
        self._outsiders.append(outsider)

    def view(self, header: Record, jobs: Record, now_ns: int) -> PoolView:
        """Return what a policy sees of the snapshot."""
        return pool_view(header, jobs, now_ns, self._profiles)

    # -- what is told ------------------------------------------------------------------------------

    def status(self, now_ns: int, claims: Mapping[int, int] = NOTHING) -> Status:
        """Return the pool at the last observation; ``claims`` are in regions, by place."""
        return Status(
            schema_version=STATUS_SCHEMA,
            policy=self._policy,
            uptime_s=(now_ns - self._began_ns) * _NS,
            region_bytes=self._region_bytes,
            budget_bytes=self._budgets[-1][1],
            granted_bytes=max(0, self._header_bytes("granted") - self._shared_regions * self._region_bytes),
            physical_bytes=self._physical_bytes,
            peak_granted_bytes=self._header_bytes("peak_granted"),
            peak_physical_bytes=self._peak_physical_bytes,
            jobs=tuple(
                self._job_report(one, now_ns, claims.get(one.job, 0))
                for one in self._present.values()
                if not one.record["aside"]
            ),
            device=self._device,
            shared_bytes=self._shared_bytes,
            first_budget_bytes=self._budgets[0][1],
            most_bytes=self._header_bytes("n_regions"),
            isolated=bool(self._header_count("isolate")),
            launchers=tuple(one.pid for one in self._present.values() if one.record["aside"]),
            **_known(self._outside),
        )

    def report(self, now_ns: int) -> Report:
        """Return the figures of the latest jobs and of the pool."""
        latest, left_out = self._latest()
        pool = PoolReport(
            peak_granted_bytes=self._header_bytes("peak_granted"),
            peak_physical_bytes=self._peak_physical_bytes,
            region_bytes=self._region_bytes,
            last_budget_bytes=self._budgets[-1][1],
            recoveries=self._header_count("recoveries"),
            stalls=self._header_count("stalls"),
            peak_shared_bytes=self._peak_shared_bytes,
            **_known(self._peak_outside),
        )
        return Report(
            pool=pool,
            jobs=tuple(
                msgspec.structs.replace(self._job_report(member, now_ns), spent=member.spending.spent(member.record))
                for member in latest
            ),
            jobs_left_out=left_out,
            outside=tuple(self._outsiders),
        )

    def _latest(self) -> tuple[list[Member], int]:
        those = [member for member in self._ever if not member.record["aside"]]  # a launcher is no job
        latest = those[-MAX_REPORTED_JOBS:]
        return latest, self._forgotten + len(those) - len(latest)

    def arrays(self, now_ns: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the record file."""
        t_ns, physical_bytes, held, out = self._history.rows()
        # A job that joined after the last look has no column yet.
        held_bytes, out_bytes = np.zeros((2, len(t_ns), len(self._ever)), np.int64)
        held_bytes[:, : held.shape[1]] = held.astype(np.int64) * self._region_bytes
        out_bytes[:, : out.shape[1]] = out.astype(np.int64) * self._region_bytes
        history = {"t_s": self._seconds(t_ns), "held_bytes": held_bytes, "out_bytes": out_bytes}
        history["physical_bytes"] = physical_bytes
        return history | self._arrays_of(self._ever, self._marks_until(now_ns))

    def profiles(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a record of the jobs of ``report``, in their order, at no instant and without waits."""
        latest, _ = self._latest()
        held_bytes = np.zeros((0, len(latest)), np.int64)
        nothing = {"t_s": np.zeros(0), "physical_bytes": np.zeros(0, np.int64)}
        return nothing | {"held_bytes": held_bytes, "out_bytes": held_bytes} | self._arrays_of(latest, Marks())

    def _arrays_of(self, members: Sequence[Member], marks: Marks) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a record that need no history."""
        profiles = [profile_of(member.record["profile"]) if member.record["profiled"] else None for member in members]
        known = [(i, profile) for i, profile in enumerate(profiles) if profile is not None]
        return {
            "budget_t_s": self._seconds(np.array([t_ns for t_ns, _ in self._budgets], np.int64)),
            "budget_bytes": np.array([budget_bytes for _, budget_bytes in self._budgets], np.int64),
            "names": np.array([member.name for member in members], dtype=np.str_),
            "peak_bytes": np.array([self._peak_bytes(member) for member in members], np.int64),
            "boundary_job": np.array(marks.boundary_job, np.int32),
            "boundary_t_s": self._seconds(np.array(marks.boundary_ns, np.int64)),
            "wait_job": np.array(marks.wait_job, np.int32),
            "wait_t_s": self._seconds(np.array(marks.wait_ns, np.int64)).reshape(-1, 2),
            "wait_kind": np.array(marks.wait_kind, np.int8),
            "blocker_wait": np.array(marks.blocker_wait, np.int32),
            "blocker_job": np.array(marks.blocker_job, np.int32),
            "iteration_s": np.array([0.0 if one is None else one.duration_ns * _NS for one in profiles], np.float64),
            "persistent_bytes": self._bytes([int(member.record["persistent"]) for member in members]),
            "profile_job": np.array([i for i, profile in known for _ in profile.held], np.int32),
            "profile_t_s": np.array([t_ns * _NS for _, profile in known for t_ns in profile.t_ns], np.float64),
            "profile_bytes": self._bytes([regions for _, profile in known for regions in profile.held]),
        }

    def _marks_until(self, now_ns: int) -> Marks:
        """Return the marks with the waits that still last ended now."""
        marks = Marks(*(getattr(self._marks, field.name)[:] for field in dataclasses.fields(Marks)))
        for member in self._present.values():
            for kind, begin_ns in member.open_waits.items():
                marks.add_wait(member, kind, begin_ns, now_ns)
        return marks

    def _seconds(self, t_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        seconds: npt.NDArray[np.float64] = np.multiply(t_ns - self._began_ns, _NS, dtype=np.float64)
        return seconds

    def _bytes(self, regions: list[int]) -> npt.NDArray[np.int64]:
        return np.array(regions, np.int64) * self._region_bytes

    def _peak_bytes(self, member: Member) -> int:
        return count_of(member.record["peak_held"], self._region_bytes)

    def _header_count(self, field: str, unit: int = 1) -> int:
        return 0 if self._header is None else count_of(self._header[field], unit)

    def _header_bytes(self, field: str) -> int:
        return self._header_count(field, self._region_bytes)

    def _job_report(self, member: Member, now_ns: int, claim: int = 0) -> JobReport:
        record = member.record
        since_ns = min(member.open_waits.values(), default=now_ns)
        boundary_waited_s = self._waited_s(member, WaitKind.BOUNDARY, now_ns)
        requested_bytes = count_of(record["requested_bytes"])
        pooled_bytes = min(count_of(record["pooled_bytes"]), requested_bytes)
        return JobReport(
            name=member.name,
            framework=member.framework,
            pid=member.pid,
            iterations=count_of(iterations_of(record)),
            evaluations=count_of(record["evaluations"]),
            parts=count_of(record["parts"]),
            iterations_per_s=iterations_per_s(record),
            waited_s=boundary_waited_s + self._waited_s(member, WaitKind.ALLOCATION, now_ns),
            boundary_waited_s=boundary_waited_s,
            peak_bytes=self._peak_bytes(member),
            peak_tensor_bytes=count_of(record["peak_live_bytes"]),
            persistent_bytes=count_of(record["persistent"], self._region_bytes),
            growth_bytes=round(member.growth.regions * self._region_bytes),
            requested_bytes=requested_bytes,
            pooled_bytes=pooled_bytes,
            spilled_bytes=count_of(record["spilled_bytes"]),
            evicted_bytes=count_of(record["evictions"], self._region_bytes),
            shared_bytes=member.shared_bytes,
            pool_fraction=pooled_bytes / requested_bytes if requested_bytes else 0.0,
            maps=count_of(record["maps"]),
            oom=self._refused_request(record),
            normalised=_normalised(member),
            saving=_saving(record),
            job=member.job,
            state=self._state_name(member),
            held_bytes=count_of(record["held"], self._region_bytes),
            claim_bytes=count_of(claim, self._region_bytes),
            away_bytes=count_of(record["evicted"], self._region_bytes),
            live_tensor_bytes=count_of(record["live_bytes"]),
            need_bytes=count_of(record["need"], self._region_bytes),
            waiting_s=max(0, now_ns - since_ns) * _NS,
            waits_for=jobs_in(int(record["waits_for"])),
            limit_bytes=count_of(record["limit"], self._region_bytes),
            share=member.share,
            run=member.run,
        )

    def _state_name(self, member: Member) -> str:
        if self._present.get(member.job) is not member:
            return "gone"
        if member.leaving:
            return "leaving"
        state = JobState(int(member.record["state"]))
        if member.record["paused"]:
            return "paused" if state is JobState.BOUNDARY else "pausing"
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
            limit_bytes=count_of(refusing_limit(record), self._region_bytes),
        )


def write_record(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Replace the file at ``path`` by one that holds ``arrays`` (``numpy.load`` reads it, without pickle).

    Raises:
        OSError: It cannot be written; what was at ``path`` before is still there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w") as archive:
            for name, values in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, values, allow_pickle=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def iterations_per_s(record: Any) -> float:  # noqa: ANN401 - a numpy record
    """Return iterations per second between the first and the last one's end, 0 with fewer than two."""
    span_ns = int(record["last_boundary_ns"]) - int(record["first_boundary_ns"])
    iterations = iterations_of(record)
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
        planner=_printable(record["planner"]),
        planner_note=_printable(record["planner_note"]),
        out_bytes=count_of(record["out_bytes"]),
        in_bytes=count_of(record["in_bytes"]),
        out_now_bytes=count_of(record["out_now_bytes"]),
        waited_s=count_of(record["copy_waited_ns"]) * _NS,
        hidden_s=count_of(record["copy_hidden_ns"]) * _NS,
        faults=count_of(record["faults"]),
        late=count_of(record["late"]),
        dropped_bytes=count_of(record["dropped_bytes"]),
        making_s=count_of(record["making_ns"]) * _NS,
    )


def _printable(raw: bytes) -> str:
    """Return a job's words with a question mark for each byte that is not printable ASCII: one character a byte."""
    return "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in bytes(raw))  # noqa: PLR2004 - by ASCII


def _known(figures: OutsideFigures | None) -> dict[str, Any]:
    return figures._asdict() if figures else {}
