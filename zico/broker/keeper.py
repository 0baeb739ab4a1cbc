"""What happens to the pool: places given and taken back, looks at the table, decisions, the record.

Whatever happened, the keeper looks at the shared table once, asks the policy, and lets jobs start: at most
once per ``MIN_EVALUATION_NS``. While there are members it looks every ``SAMPLE_NS`` anyway, for the picture
and the maxima.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from typing import TYPE_CHECKING

from zico.broker import changes
from zico.broker import messages as m
from zico.broker.admission import admit_all
from zico.broker.devices import HOST, HOST_DEVICE, kind_of
from zico.broker.ledger import Ledger
from zico.broker.planning import Planning
from zico.broker.record import write_record
from zico.broker.saving import MODES, served_on
from zico.broker.savings import Savings
from zico.broker.service import Service
from zico.driver.owned import close_descriptors
from zico.errors import BrokerError, ZicoError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zico.broker.devices import Device
    from zico.broker.members import Member
    from zico.broker.outside import Outside
    from zico.broker.views import Record
    from zico.pool.table import PoolTable
    from zico.scheduler.state import Policy, PoolView

SAMPLE_NS = 20_000_000
MIN_EVALUATION_NS = 1_000_000

_log = logging.getLogger(__name__)


class Keeper:
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
    ) -> None:
        """Begin with no member.

        Args:
            table: Of the pool.
            memory_fds: The pool's memory in the order of its pieces.
            policy: Who may go on.
            device: Which one the pool is on.
            outside: Tells what of the device's memory lies outside the pool, where that can be known.
            record_path: Where the record goes, if anywhere.
        """
        header, _ = table.snapshot()
        self._region_bytes = int(header["region_bytes"])
        self._n_regions = int(header["n_regions"])
        self._table = table
        self._policy = policy
        self._planning = Planning(policy)
        self._savings = Savings()
        self._service = Service()
        self._device = device
        self._outside = outside
        self._record_path = record_path
        self.descriptors = (table.table_fd, table.notify_fd, *memory_fds)
        """What a new member needs, in the order in which it is sent (not copies)."""
        self._ledger = Ledger(
            policy=policy.name,
            region_bytes=self._region_bytes,
            budget_bytes=self._regions_bytes(header["budget_regions"]),
            began_ns=time.monotonic_ns(),
            device=device.name,
        )
        self._looked_ns = 0
        self._evaluated_ns = 0
        self._evaluate_at_ns: int | None = None

    def _regions_bytes(self, regions: int) -> int:
        return int(regions) * self._region_bytes

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the jobs that have a place, leaving ones included."""
        return self._ledger.members

    @property
    def notify_fd(self) -> int:
        """Return the eventfd that compiled code writes (not a copy)."""
        return self._table.notify_fd

    @property
    def due_ns(self) -> int | None:
        """Return when ``act`` has something to do, ``None`` if only after an event."""
        due_ns = [] if self._evaluate_at_ns is None else [self._evaluate_at_ns]
        if self.members:
            due_ns.append(self._looked_ns + SAMPLE_NS)
        return min(due_ns, default=None)

    # -- members --------------------------------------------------------------------------------------------

    def join(self, hello: m.Hello, *, pid: int, pidfd: int | None) -> Member:
        """Give a job a place; ``pidfd`` stays the caller's.

        Raises:
            BrokerError: All places are taken, or the process cannot be watched although the device needs that.
        """
        if pidfd is None and self._device.name != HOST:
            raise BrokerError(
                f"process {pid} cannot be watched from here, and what it has queued on {self._device.name} ends only "
                "with it: start it in the broker's pid namespace, or use Linux 6.5 or later"
            )
        job = self._table.join(pid, hello.name)
        record = self._table.jobs[job]
        record["save"] = MODES.index(served_on(kind_of(self._device.name), hello.save))
        record["auto"] = hello.save == "auto" and hello.limit_bytes == 0
        self._table.set_limit(job, min(-(-hello.limit_bytes // self._region_bytes), self._n_regions))
        _log.info("job %d is %s, process %d, %s", job, hello.name, pid, hello.framework)
        self._evaluate_soon()
        return self._ledger.join(
            job=job, pid=pid, name=hello.name, framework=hello.framework, pidfd=pidfd, share=hello.share
        )

    def welcome(self, member: Member) -> m.Welcome:
        """Return the message that tells a member its place."""
        return m.Welcome(
            job=member.job,
            region_bytes=self._region_bytes,
            n_regions=self._n_regions,
            budget_bytes=self._regions_bytes(self._table.header["budget_regions"]),
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

    def reap(self, member: Member) -> None:
        """Keep the member's last figures, free its regions and its place."""
        now_ns = time.monotonic_ns()
        self._look(now_ns)
        if member.paging is not None:
            member.paging.end()
        regions = self._table.reap(member.job)
        _log.info("job %d (%s) is gone, %d regions came back", member.job, member.name, regions)
        self._ledger.depart(member, now_ns)
        self._look(time.monotonic_ns())
        self._evaluate_soon()

    def page(self, member: Member, descriptors: Sequence[int], wait_limit_s: float) -> str:
        """Be a member's pager until its process is dead; takes over the descriptors.

        Returns:
            Why that cannot be, empty if it is so.
        """
        from zico.broker.paging import Paging

        if member.paging is not None:
            close_descriptors(descriptors)
            return "its pages are served already"
        try:
            member.paging = Paging(descriptors, self._table.member_of(member.job), wait_limit_s)
        except (ZicoError, OSError) as error:
            _log.warning("the pages of job %d (%s) are not served here: %s", member.job, member.name, error)
            return str(error)
        _log.info("the pages of job %d (%s) are served here", member.job, member.name)
        return ""

    def let_go(self) -> None:
        """Leave every paged member to itself: the broker ends."""
        for member in self.members:
            if member.paging is not None:
                member.paging.let_go()

    # -- looking and deciding -------------------------------------------------------------------------------

    def take_notice(self) -> None:
        """Answer a write to the eventfd: look and decide soon."""
        # In this order, and before the table is looked at: what happens from here on writes it again.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._table.notify_fd)
        self._table.clear_notified()
        self._evaluate_soon()

    def act(self, now_ns: int) -> None:
        """Do what is due: decide, or only look."""
        if self._evaluate_at_ns is not None and now_ns >= self._evaluate_at_ns:
            self._evaluate(now_ns)
        elif self.members and now_ns - self._looked_ns >= SAMPLE_NS:
            self._look(now_ns)

    def status(self, now_ns: int) -> m.Status:
        """Return the pool now."""
        self._look(now_ns)
        return self._ledger.status(now_ns)

    def change(self, wanted: m.Change) -> m.Changed:
        """Change the budget or what a job gets; nothing if not all of it can be."""
        refused = changes.refusal(wanted, self._table.header, self.members)
        if not refused:
            changes.carry_out(wanted, self._table, self.members)
            _log.info("changed: %s", wanted)
            self._evaluate_soon()
        return m.Changed(m.as_text(refused))

    def report(self, now_ns: int) -> m.Report:
        """Return everything up to now."""
        self._look(now_ns)
        return self._ledger.report(now_ns)

    def write_record(self, now_ns: int) -> None:
        """Write everything up to now to the record file, if there is one; a failure is only logged."""
        if self._record_path is None:
            return
        self._look(now_ns)
        try:
            write_record(self._record_path, self._ledger.arrays(now_ns))
        except OSError as error:
            _log.error("the record %s cannot be written: %s", self._record_path, error)

    def _evaluate_soon(self) -> None:
        """Ask the policy as soon as the last time was long enough ago."""
        at_ns = self._evaluated_ns + MIN_EVALUATION_NS
        self._evaluate_at_ns = at_ns if self._evaluate_at_ns is None else min(at_ns, self._evaluate_at_ns)

    def _look(self, now_ns: int) -> tuple[Record, Record]:
        """Take a snapshot into the ledger and return it."""
        header, jobs = self._table.snapshot()
        self._ledger.observe(header, jobs, self._physical_bytes(), now_ns)
        if self._outside is not None:
            self._ledger.observe_outside(self._outside.look({member.pid for member in self.members}, now_ns))
        self._table.settle()
        self._looked_ns = now_ns
        return header, jobs

    def _physical_bytes(self) -> int:
        """Return what the kernel says is resident: of the pool's memory, and of jobs that have pages of their own."""
        paged = sum(member.paging.physical_bytes() for member in self.members if member.paging is not None)
        return self._table.physical_bytes() + paged

    def _evaluate(self, now_ns: int) -> None:
        header, jobs = self._look(now_ns)
        self._evaluated_ns = now_ns
        view = self._service.noted(
            self._ledger.view(header, jobs, now_ns), {member.job: member.share for member in self.members}
        )
        view = dataclasses.replace(view, plan=self._planning.plan_for(view))
        self._limit(view)
        look_again_ns = admit_all(self._table, self._policy, view, jobs)
        soonest_ns = now_ns + MIN_EVALUATION_NS
        self._evaluate_at_ns = None if look_again_ns is None else max(look_again_ns, soonest_ns)

    def _limit(self, view: PoolView) -> None:
        """Let jobs that leave it to the broker hold what is best for all of them."""
        limits = self._savings.limits_for(view)
        for job in view.jobs:
            if job.less and limits.get(job.job, job.limit) != job.limit:
                self._table.set_limit(job.job, limits[job.job])
                _log.info("job %d (%s) may hold %d regions, 0: what it wants", job.job, job.name, limits[job.job])
