"""What happens to the pool: places given and taken back, looks at the table, decisions, the record.

Whatever happened, the pool manager looks at the shared table once, asks the policy, and lets jobs
start: at most once per ``MIN_EVALUATION_NS``. While there are members it looks every ``SAMPLE_NS``
anyway, for the picture and the maxima. It looks less often where looks would take more than
``LOOK_SHARE`` of a processor, which the jobs would compute with.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from zico.base.errors import BrokerError
from zico.base.processes import counters_of
from zico.base.settings import HOST
from zico.broker.accounting import Ledger, write_record
from zico.broker.admission import RETRY_NS, admit_all
from zico.broker.changes import carry_out, concerned, refusal
from zico.broker.devices import HOST_DEVICE
from zico.broker.frozen import FrozenMemory
from zico.broker.members import Entry
from zico.broker.planning import Planning
from zico.broker.protocol import messages as m
from zico.broker.saving import MODES, served_on
from zico.broker.throughput import Service
from zico.broker.trials import SavingTrial, wanted_of
from zico.device.host import physical_bytes_of
from zico.pool.layout import Auto, JobState, SaveMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from zico.broker.devices import Device
    from zico.broker.handover import Note, NoteKeeper
    from zico.broker.members import Member
    from zico.broker.notes import Process
    from zico.broker.outside import Outside
    from zico.broker.views import Record
    from zico.pool.table import PoolTable
    from zico.scheduler.state import Policy, PoolView

SAMPLE_NS = RETRY_NS
LOOK_SHARE = 0.01
MIN_EVALUATION_NS = 1_000_000
KEPT_NS = 60_000_000_000
"""How long the pages of a region that nobody needs stay, and at most twice as long.

To give a GiB back and to touch it again takes .8 s (benchmarks/results/startup.md). So a job that
needs it once a minute loses at most 1.3 % of a processor, and one with shorter iterations nothing.
"""
EMPTIED_BYTES = 64 << 20
"""Given back at a time, in some 11 ms: the broker does nothing else meanwhile."""
TRIAL_LOOK_NS = 100_000_000
"""Between two looks at jobs whose shares are on trial."""

GONE = (
    "the pool on {} is gone, since {}: end its jobs and its broker (zico broker stop, or Ctrl-C in zico run), reset "
    "the GPU (nvidia-smi --gpu-reset) or restart the machine, and start anew"
)
_log = logging.getLogger(__name__)


class PoolManager:
    """Keep one pool's table, members and policy together; table and descriptors stay their owners' to close."""

    def __init__(
        self,
        table: PoolTable,
        memory_fds: Sequence[int],
        policy: Policy,
        *,
        device: Device = HOST_DEVICE,
        outside: Outside | None = None,
        record_path: Path | None = None,
        note: NoteKeeper | None = None,
    ) -> None:
        """Begin with no member.

        Args:
            table: Of the pool.
            memory_fds: The pool's memory in the order of its pieces.
            policy: Who may go on.
            device: Which one the pool is on.
            outside: Tells what of the device's memory lies outside the pool, where that can be
                known.
            record_path: Where the record goes, if anywhere.
            note: Where the jobs are noted down for the next broker.
        """
        header, _ = table.snapshot()
        self._region_bytes = int(header["region_bytes"])
        self._n_regions = int(header["n_regions"])
        self._table = table
        self._policy = policy
        self._planning = Planning(policy)
        self._trial = SavingTrial()
        self.shared = FrozenMemory(table)
        """What the jobs have in common."""
        self._service = Service()
        self._device = device
        self._outside = outside
        self._record_path = record_path
        self._note = note
        self.about: dict[str, Any] = {}
        """What ``Status`` tells of how the broker was started, by its fields."""
        self.descriptors = (table.table_fd, table.notify_fd, *memory_fds)
        """What a new member needs, in the order in which it is sent (not copies)."""
        self._ledger = Ledger(
            policy=policy.name,
            region_bytes=self._region_bytes,
            budget_bytes=self._regions_bytes(header["budget_total"]),
            began_ns=time.monotonic_ns(),
            device=device.name,
            is_recorded=record_path is not None,
        )
        self._show_budget: Callable[[int], None] | None = None
        self._look_ns = 0
        """When to look again."""
        self._evaluated_ns = 0
        self._evaluate_at_ns: int | None = None
        self._spare = 0
        """Regions whose pages are still to be given back."""
        self._spare_look_ns = 0
        self._empty_ns = 0
        """When to give pages back, or to look for some."""

    def show_budget_by(self, show_budget: Callable[[int], None]) -> None:
        """Tell a function the budget in bytes, now and whenever it has been changed."""
        self._show_budget = show_budget
        self._show()

    def _show(self) -> None:
        if self._show_budget is not None:
            self._show_budget(self._regions_bytes(self._table.header["budget_total"]))

    def _regions_bytes(self, regions: int) -> int:
        return int(regions) * self._region_bytes

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the jobs that have a place, leaving ones included."""
        return self._ledger.members

    @property
    def notify_fd(self) -> int:
        """Return the pipe that compiled code writes (not a copy)."""
        return self._table.notify_fd

    @property
    def due_ns(self) -> int:
        """Return when ``act`` has something to do if no event comes first."""
        due_ns = [self._empty_ns] if self._evaluate_at_ns is None else [self._empty_ns, self._evaluate_at_ns]
        if self.members:
            due_ns.append(self._look_ns)
        return min(due_ns)

    # -- members -----------------------------------------------------------------------------------

    def join(self, hello: m.Hello, *, process: Process, pidfd: int | None) -> Member:
        """Give a job a place; ``process`` is as seen from here, and ``pidfd`` stays the caller's.

        Raises:
            BrokerError: All places are taken, the pool is gone, or the process cannot be watched
                although the device needs that.
        """
        if "fault" in self.about:
            raise BrokerError(self.about["fault"])
        if pidfd is None and self._device.kind != HOST:
            raise BrokerError(
                f"process {hello.pid} cannot be watched from here, and what it has queued on {self._device.name} ends "
                "only with it: start it in the broker's pid namespace, or use Linux 6.5 or later"
            )
        pid = process.pid or hello.pid
        job = self._table.join(process.pid, hello.name)
        record = self._table.jobs[job]
        record["save"] = MODES.index(served_on(self._device.kind, hello.save, hello.framework))
        record["auto"] = hello.save == "auto" and hello.limit_bytes == 0
        self._table.set_limit(job, min(-(-hello.limit_bytes // self._region_bytes), self._n_regions))
        if record["save"] == SaveMode.NONE:
            self._table.promise_no_more(job)
        _log.info("job %d is %s, process %d, %s", job, hello.name, pid, hello.framework)
        self._evaluate_soon()
        entry = Entry(
            name=hello.name, process=process, job=job, framework=hello.framework, share=hello.share, run=hello.run
        )
        member = self._ledger.join(entry, pid=pid, pidfd=pidfd)
        try:
            self._note_down()
        except BrokerError:
            self._ledger.depart(member, time.monotonic_ns())
            self._table.reap(job)
            raise
        return member

    def adopt(self, note: Note) -> tuple[Member, ...]:
        """Make members of the jobs of a pool that was taken over; frees the places of those that are dead.

        Their descriptors of processes are the members', as ``Server`` closes them.
        """
        _, jobs = self._table.snapshot()
        entries = {entry.job: entry for entry in note.jobs}
        for job in np.flatnonzero(jobs["state"] != JobState.EMPTY).tolist():
            entry = entries.get(job)
            pidfd = None
            if entry is not None and entry.process.pid:
                pidfd = entry.process.watch() if entry.process.pid == jobs[job]["pid"] else None
            if entry is None or (entry.process.pid and pidfd is None):
                self._table.reap(job)
                continue
            member = self._ledger.join(entry, pid=int(jobs[job]["pid"]), pidfd=pidfd, record=jobs[job])
            if jobs[job]["state"] == JobState.LEAVING or pidfd is None:
                self.leave(member)
        self._note_down()
        self.take_notice()
        return self.members

    def _note_down(self) -> None:
        if self._note is not None:
            self._note.write(self.members)

    def welcome(self, member: Member) -> m.Welcome:
        """Return the message that tells a member its place."""
        return m.Welcome(
            job=member.job,
            region_bytes=self._region_bytes,
            n_regions=self._n_regions,
            budget_bytes=self._regions_bytes(self._table.header["budget_total"]),
            policy=self._policy.name,
            device=self._device.name,
            device_id=self._device.identity,
            n_fds=len(self.descriptors),
        )

    def leave(self, member: Member) -> None:
        """Grant a member nothing more; it keeps what it holds until ``reap``."""
        member.leaving = True
        self._table.mark_leaving(member.job)
        self._evaluate_soon()

    def bury(self, member: Member) -> None:
        """Grant a dead member nothing more; its regions stay its own until ``reap``."""
        member.leaving = True
        self._table.bury(member.job)
        self._evaluate_soon()

    def held_bytes(self, member: Member) -> int:
        """Return what a member holds now."""
        return self._regions_bytes(self._table.jobs[member.job]["held"])

    def settle_place(self, member: Member, *, has_ended: bool) -> None:
        """Look after the place of a member that was reaped while its context lingered."""
        self._table.settle_place(member.job, has_ended=has_ended)

    def note_shared(self, member: Member) -> None:
        """Promise a member no more than the budget has beside what it shares."""
        self._table.promise_less(member.job, -(-self.shared.bytes_of[member.index] // self._region_bytes))

    def reap(self, member: Member, *, lingers: bool = False) -> None:
        """Keep the member's last figures, free its regions, and its place unless its context lingers."""
        now_ns = time.monotonic_ns()
        self._look(now_ns)
        regions = self._table.reap(member.job, lingers=lingers)
        _log.info("job %d (%s) is gone, %d regions came back", member.job, member.name, regions)
        self._ledger.depart(member, now_ns)
        self.shared.depart(member.index)
        if not self.members:
            self.shared.forget_before()
        try:
            self._note_down()
        except BrokerError as error:  # whoever reads the note finds out that the job is dead
            _log.warning("%s", error)
        self._look(time.monotonic_ns())
        self._evaluate_soon()

    def resign(self) -> None:
        """Decide nothing more: jobs go on by themselves, also while the record is written."""
        self._table.resign()
        self.shared.close()

    # -- looking and deciding ----------------------------------------------------------------------

    def take_notice(self) -> None:
        """Answer a write to the pipe: look and decide soon."""
        self._table.take_notice()
        self._evaluate_soon()

    def act(self, now_ns: int) -> None:
        """Do what is due: decide, or only look."""
        if self._evaluate_at_ns is not None and now_ns >= self._evaluate_at_ns:
            self._evaluate(now_ns)
        elif self.members and now_ns >= self._look_ns:
            self._look(now_ns)
        if not self._planning.is_busy:
            self._ledger.note_planned()
        if now_ns >= self._empty_ns:
            self._give_pages_back(now_ns)

    def _give_pages_back(self, now_ns: int) -> None:
        """Give the pages of regions back, some at a time, that nobody has needed for ``KEPT_NS``."""
        if now_ns >= self._spare_look_ns:
            self._spare = self._table.take_spare()
            self._spare_look_ns = now_ns + KEPT_NS
        n = min(self._spare, max(1, EMPTIED_BYTES // self._region_bytes))
        began_ns = time.thread_time_ns()
        self._table.empty(n)
        self._spare -= n
        rest_ns = round((time.thread_time_ns() - began_ns) / LOOK_SHARE)
        self._empty_ns = self._spare_look_ns if self._spare == 0 else min(now_ns + rest_ns, self._spare_look_ns)

    def status(self, now_ns: int) -> m.Status:
        """Return the pool now."""
        self._look(now_ns)
        claims = {member.job: self._table.claim(member.job) for member in self.members}
        return msgspec.structs.replace(self._ledger.status(now_ns, claims), **self.about)

    def change(self, wanted: m.Change) -> m.Changed:
        """Change the budget or what a job gets; nothing if not all of it can be."""
        refused = refusal(wanted, self._table.header, self._table.jobs, self.members)
        if not refused:
            carry_out(wanted, self._table, self.members)
            self._show()
            try:
                self._note_down()
            except BrokerError as error:
                _log.warning("%s", error)
            _log.info("changed: %s", wanted)
            self._evaluate_soon()
        processes = 0 if refused else concerned(wanted, self._table.jobs, self.members)
        return m.Changed(m.as_text(refused), processes=processes)

    def note_outsider(self, outsider: m.Outside) -> None:
        """Keep that a process is outside the pool, and why, for reports."""
        self._ledger.note_outsider(outsider)

    def report(self, now_ns: int, profiles_to: str = "") -> m.Report:
        """Return everything up to now, and write the profiles of the same jobs to a file if one is named."""
        self._look(now_ns)
        if profiles_to:
            self._write(Path(profiles_to), self._ledger.profiles())
        return self._ledger.report(now_ns)

    def write_record(self, now_ns: int) -> None:
        """Write everything up to now to the record file, if there is one; a failure is only logged."""
        if self._record_path is not None:
            self._look(now_ns)
            self._write(self._record_path, self._ledger.arrays(now_ns))

    def _write(self, path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
        try:
            write_record(path, arrays)
        except OSError as error:
            _log.error("the record %s cannot be written: %s", path, error)

    def _evaluate_soon(self) -> None:
        at_ns = self._evaluated_ns + MIN_EVALUATION_NS
        self._evaluate_at_ns = at_ns if self._evaluate_at_ns is None else min(at_ns, self._evaluate_at_ns)

    def _look(self, now_ns: int) -> tuple[Record, Record]:
        """Take a snapshot into the ledger and return it."""
        began_ns = time.thread_time_ns()
        self._table.look_around()
        header, jobs = self._table.snapshot()
        self._ledger.observe(header, jobs, self._physical_bytes(), now_ns)
        self._ledger.observe_shared(self.shared.size_bytes, self.shared.bytes_of, self.shared.regions)
        if self._outside is not None:
            self._ledger.observe_outside(self._outside.look({member.process.pid for member in self.members}, now_ns))
            self._note_fault(self._outside.fault)
        self._table.settle()
        self._look_ns = now_ns + max(SAMPLE_NS, round((time.thread_time_ns() - began_ns) / LOOK_SHARE))
        for member in self.members:
            if member.spending.is_to_count:
                member.spending.count(counters_of(member.process.pid, member.process.started))
        return header, jobs

    def _note_fault(self, fault: str) -> None:
        """Say once, and from then on to all who ask, that the pool is gone."""
        if fault and "fault" not in self.about:
            gone = GONE.format(self._device.name, fault)
            _log.error("%s", gone)
            self.about["fault"] = m.as_text(gone)

    def _physical_bytes(self) -> int:
        """Return what the kernel says is resident: of the pool, of what is shared, and of jobs' own pages."""
        own_bytes = sum(map(self._own_bytes, self.members))
        return self._table.physical_bytes() + self.shared.physical_bytes + own_bytes

    def _own_bytes(self, member: Member) -> int:
        """Return what a paged job's own pages take, 0 where its process cannot be looked at."""
        descriptor = int(self._table.jobs[member.job]["pages_fd"])
        if not descriptor:
            return 0
        try:
            return physical_bytes_of(Path(f"/proc/{member.process.pid}/fd/{descriptor}").stat())
        except OSError:
            return 0

    def _evaluate(self, now_ns: int) -> None:
        header, jobs = self._look(now_ns)
        self._evaluated_ns = now_ns
        view = self._service.noted(
            self._ledger.view(header, jobs, now_ns), {member.job: member.share for member in self.members}
        )
        view = dataclasses.replace(view, plan=self._planning.plan_for(view))
        self._limit(view)
        look_again_ns = admit_all(self._table, self._policy, view, jobs)
        for member in self.members:
            # A wait may be over before the next look, which would then miss whom it was for.
            if member.open_waits:
                self._ledger.note_blockers(member, int(self._table.jobs[member.job]["waits_for"]))
        if self._trial.is_open:
            look_again_ns = min(look_again_ns or now_ns + TRIAL_LOOK_NS, now_ns + TRIAL_LOOK_NS)
        soonest_ns = now_ns + MIN_EVALUATION_NS
        self._evaluate_at_ns = None if look_again_ns is None else max(look_again_ns, soonest_ns)

    def _limit(self, view: PoolView) -> None:
        """Let jobs that can save hold their shares of the budget, or what they want."""
        limits = self._trial.limits_for(view)
        for job in view.jobs:
            if not job.saves:
                continue
            limit = limits.get(job.job, 0)
            has_to = limit > 0 or wanted_of(job) > view.budget
            self._table.jobs[job.job]["auto"] = Auto.SAVES if has_to else Auto.WAITS
            if limit != job.limit:
                self._table.set_limit(job.job, limit)
                _log.info("job %d (%s) may hold %d regions, 0: what it wants", job.job, job.name, limit)
