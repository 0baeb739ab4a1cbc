"""The pool from Python: creation by the broker, joining by a job, and what the broker asks of it.

The mutex is robust and process-shared (``pthread_mutexattr_setrobust``): a death inside is noticed
by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from zico.base.errors import BrokerError, ConfigError
from zico.base.processes import pid_namespace, started_at
from zico.base.records import view_at
from zico.base.units import format_bytes
from zico.device.api import close_descriptors
from zico.device.host import HostDriver
from zico.pool import boundaries, deaths, layout, living, mutex, profiles
from zico.pool import regions as budgets
from zico.pool.layout import HEADER, JOB, MAX_JOBS, MEMBER, NO_PAGES, NOBODY, REGION, JobState, Paused
from zico.trace.phases import MARKED
from zico.trace.profile import CURVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zico.device.api import Driver, Owned

POLL_NS = 200_000
"""A thread sleeps for at most so long where a device may end its wait. That costs well under a
hundredth of a processor, and an iteration of a tenth of a second loses less than a hundredth."""

_libc = ctypes.CDLL(None, use_errno=True)
_PROCESS_SHARED = 1  # PTHREAD_PROCESS_SHARED
_ROBUST = 1  # PTHREAD_MUTEX_ROBUST
_ATTRIBUTE_BYTES = 64
_PIPE_BYTES = 1 << 16
"""The pipe never holds so much: it gets 8 bytes for each time that the broker reads it, and for each death."""


def make_mutex(address: int) -> None:
    """Initialise a robust, process-shared ``pthread_mutex_t`` at an address."""
    attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
    _libc.pthread_mutexattr_init(attributes)
    _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
    _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
    _libc.pthread_mutex_init(ctypes.c_void_p(address), attributes)
    _libc.pthread_mutexattr_destroy(attributes)


def make_wake_pipe() -> int:
    """Return a pipe that wakes the broker: one descriptor for both ends, which never blocks.

    Unlike an eventfd it can be opened again by way of a process that has it (proc(5)), as a new
    broker does. Since whoever writes could read it, too, no writer gets SIGPIPE without a broker.
    """
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        for end in ends:
            os.close(end)


class PoolTable:
    """One process's mapping of the shared table, with the descriptors that belong to it.

    Close it, or use it as a context manager: the mapping and the three descriptors are its own.
    """

    def __init__(self, driver: Driver, table: Owned, notify_fd: int, owned: contextlib.ExitStack) -> None:
        """Map the table; use ``create`` or ``join_pool`` instead."""
        self.driver = driver
        self.memory: Owned
        self.notify_fd = notify_fd
        self._table = table
        self._life = contextlib.ExitStack()
        self._owned = owned
        host = _host_driver(driver)
        self.window = owned.enter_context(host.reserve(table.size_bytes))
        host.map(self.window, 0, table, 0, table.size_bytes)
        base = self.window.handle
        self.header: Any = view_at(base, HEADER, 1)[0]
        self.jobs: Any = None
        self.member: Any = np.zeros(1, MEMBER)
        self._profiles = np.zeros(profiles.CURVES, CURVE)
        self._notice_places(base)

    def _notice_places(self, base: int) -> None:
        member = self.member[0]
        member["header_address"] = base
        member["mutex_address"] = base + HEADER.fields["mutex"][1]
        member["regions_address"] = base + layout.regions_offset()
        member["job"] = NOBODY
        member["profiles_address"] = self._profiles.ctypes.data
        member["notify_fd"] = self.notify_fd
        member["table_fd"] = self.table_fd
        member["pid_namespace"] = pid_namespace()
        member["slice"] = (0, layout.SLICE_NS)
        member["poll"] = (0, POLL_NS)
        member["one"] = 1
        address = self.member.ctypes.data
        member["slice_address"] = address + MEMBER.fields["slice"][1]
        member["poll_address"] = address + MEMBER.fields["poll"][1]
        member["one_address"] = address + MEMBER.fields["one"][1]

    def _notice_size(self) -> None:
        base = self.window.handle
        n_regions = int(self.header["n_regions"])
        self.jobs = view_at(base + layout.jobs_offset(n_regions), JOB, MAX_JOBS)
        self.regions = view_at(base + layout.regions_offset(), REGION, n_regions)
        self.member[0]["jobs_address"] = base + layout.jobs_offset(n_regions)
        self.member[0]["issued_address"] = base + layout.issued_offset(n_regions)
        self.member[0]["counters_address"] = base + layout.counters_offset(n_regions)

    @classmethod
    def create(
        cls,
        *,
        budget_bytes: int,
        region_bytes: int,
        use_claims: bool,
        self_admit: bool,
        driver: Driver | None = None,
        on_timeline: bool | None = None,
        isolate: bool = False,
    ) -> Self:
        """Make the pool: its memory, its table, its pipe. All or nothing.

        Args:
            budget_bytes: What all jobs may hold, and the most that ``set_budget`` can make of it
                later; whole regions of it count.
            region_bytes: A power of two times the device's granularity.
            use_claims: Grant only what leaves everybody able to finish.
            self_admit: Let a job begin an iteration that fits whatever the others do without
                asking.
            driver: Of the device, ``None`` for the host.
            on_timeline: Whether regions are granted behind fences; ``None``: everywhere but on the
                host device.
            isolate: Jobs unmap what they give back, and scrub what they get from each other.

        Raises:
            ConfigError: The region size is no power-of-two multiple of the device's granularity, or
                the budget is below one region.
            DriverError: The device refused; nothing is left behind.
        """
        driver = driver or HostDriver()
        n_regions = _checked_regions(budget_bytes, region_bytes, driver.granularity_bytes)
        table_bytes = -(-layout.table_bytes(n_regions) // layout.PAGE_BYTES) * layout.PAGE_BYTES
        with contextlib.ExitStack() as undo:
            memory = undo.enter_context(driver.create_memory(n_regions * region_bytes, "pool", region_bytes))
            table = undo.enter_context(_host_driver(driver).create_memory(table_bytes, "table"))
            notify_fd = make_wake_pipe()
            undo.callback(os.close, notify_fd)
            pool = cls(driver, table, notify_fd, undo)
            pool.memory = memory
            asynchronous = driver.name != HostDriver.name if on_timeline is None else on_timeline
            pool.header["on_timeline"] = asynchronous
            pool.header["isolate"] = isolate
            pool._fill(n_regions, region_bytes, use_claims=use_claims, self_admit=self_admit)
            pool._owned = undo.pop_all()
        return pool

    def _fill(self, n_regions: int, region_bytes: int, *, use_claims: bool, self_admit: bool) -> None:
        header = self.header
        header["version"] = layout.VERSION
        header["region_bytes"] = region_bytes
        header["n_regions"] = n_regions
        header["budget_regions"] = header["budget_total"] = n_regions
        header["use_claims"] = use_claims
        header["self_admit"] = self_admit
        header["alone_job"] = NOBODY
        self.become_broker()
        self._notice_size()
        everything = np.arange(n_regions)
        self.regions["owner"] = NOBODY
        self.regions["last_owner"] = NOBODY if header["on_timeline"] else NO_PAGES
        header["bare"] = 0 if header["on_timeline"] else n_regions
        header["bare_head"] = NOBODY if header["on_timeline"] else 0
        self.regions["previous"] = everything - 1
        self.regions["next"] = everything + 1
        self.regions["next"][-1] = NOBODY
        header["free_head"] = 0
        header["free_tail"] = n_regions - 1
        make_mutex(int(self.member[0]["mutex_address"]))
        header["magic"] = layout.MAGIC

    def become_broker(self) -> None:
        """Be who the jobs rely on, until ``resign``, ``close`` or the end of this process."""
        self._owned.push(self._life)
        self._life.callback(os.close, living.hold_life(self.table_fd))
        self.header["pid_namespace"] = self.member[0]["pid_namespace"]

    def resign(self) -> None:
        """Stop being the pool's broker: its jobs see to themselves. A second call does nothing."""
        self._life.close()

    @classmethod
    def join_pool(
        cls, memory_fds: int | Sequence[int], table_fd: int, notify_fd: int, job: int, driver: Driver | None = None
    ) -> Self:
        """Map a pool that a broker has made; takes over the descriptors, also when it fails.

        Args:
            memory_fds: The memory as ``Driver.export_pieces`` gave it in the broker.
            table_fd: The table.
            notify_fd: The pipe that wakes the broker.
            job: The place that the broker has given this process.
            driver: The pool's device, ``None`` for the host.

        Raises:
            BrokerError: The table has another version.
            DriverError: The device refused; the descriptors are closed.
        """
        driver = driver or HostDriver()
        pieces = [memory_fds] if isinstance(memory_fds, int) else [*memory_fds]
        handed = [*pieces, table_fd]
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, notify_fd)
            undo.callback(lambda: close_descriptors(handed))
            table = undo.enter_context(_host_driver(driver).import_memory(table_fd))
            handed.remove(table_fd)
            pool = cls(driver, table, notify_fd, undo)
            if (pool.header["magic"], pool.header["version"]) != (layout.MAGIC, layout.VERSION):
                message = (
                    f"the broker's table has version {pool.header['version']}, this Zico reads {layout.VERSION}: "
                    "start broker and jobs with the same installation"
                )
                raise BrokerError(message)
            if pool.header["pid_namespace"] != pool.member[0]["pid_namespace"]:
                pool.header["mixed"] = 1
            pool._notice_size()
            size_bytes = int(pool.header["n_regions"]) * pool.region_bytes
            pool.memory = undo.enter_context(driver.import_pieces(pieces, size_bytes, pool.region_bytes))
            handed.clear()
            pool.member[0]["job"] = job
            pool._owned = undo.pop_all()
        return pool

    @classmethod
    def take_over(cls, memory_fd: int, table_fd: int, notify_fd: int) -> Self:
        """Become the broker of a pool on the host whose broker is dead; takes over the descriptors, as ``join_pool``.

        Jobs rely on this process from now on, so it goes on to serve them at once.

        Raises:
            BrokerError: The table has another version.
            DriverError: What came is no memory of such a pool.
        """
        with contextlib.ExitStack() as undo:
            pool = cls.join_pool(memory_fd, table_fd, notify_fd, NOBODY)
            undo.push(pool)
            pool.become_broker()
            undo.pop_all()
        return pool

    def register_counters(self) -> int:
        """Let the device read and write the counters until this is closed; returns their address on the device."""
        address = int(self.member[0]["counters_address"])
        registered = self.driver.register_host(address, layout.COUNTERS_BYTES)
        return self._owned.enter_context(registered).device_address

    # -- what the broker asks ----------------------------------------------------------------------

    @property
    def memory_fd(self) -> int:
        """Return the descriptor of the regions' memory (not a copy), on the host device."""
        return self.memory.handle

    @property
    def table_fd(self) -> int:
        """Return the descriptor of the table (not a copy)."""
        return self._table.handle

    @property
    def region_bytes(self) -> int:
        """Return the size of a region."""
        return int(self.header["region_bytes"])

    def join(self, pid: int, name: str) -> int:
        """Give a new job a place; its process is 0 where it has no number here.

        Raises:
            BrokerError: All places are taken.
        """
        for job in range(MAX_JOBS):
            if self.jobs[job]["state"] == JobState.EMPTY and not self.jobs[job]["lingers"]:
                fresh = np.zeros(1, JOB)
                fresh["name"] = name.encode()[: layout.NAME_BYTES]
                fresh["pid"] = pid
                fresh["started"] = started_at(pid) or 0
                fresh["started_ns"] = time.monotonic_ns()
                fresh["current"]["n_bins"] = 1
                fresh["promised"] = self.header["budget_total"]
                self.jobs[job] = fresh[0]
                self.header["places"] = max(int(self.header["places"]), job + 1)
                self.jobs[job]["state"] = JobState.RUNNING
                return job
        message = f"all {MAX_JOBS} places of the pool are taken: start {name!r} when a job has ended"
        raise BrokerError(message)

    def mark_leaving(self, job: int) -> None:
        """Grant a job nothing more; it keeps what it holds until ``reap``."""
        deaths.leave(self.member[0], job)

    def bury(self, job: int) -> None:
        """Grant a dead job nothing more; its regions stay its own until ``reap``: the device may still do its work."""
        deaths.bury(self.member[0], job)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return what this process's job may still take, at least 0, and the most that it may hold.

        That is the budget, or the job's limit where it is lower. What others hold counts as free:
        it can be had by waiting, and programs size themselves by the answer.
        """
        job = self.jobs[int(self.member[0]["job"])]
        budget, limit = int(self.header["budget_regions"]), int(job["limit"])
        most = min(budget, limit) if limit > 0 else budget
        return max(most - int(job["held"]), 0) * self.region_bytes, most * self.region_bytes

    def set_budget(self, regions: int) -> None:
        """Let jobs hold so many regions together from now on; what they hold above that comes back at their pace.

        What they share counts. The memory of free regions that the budget leaves out is given back to the host at once;
        ``settle`` goes on.
        """
        budgets.set_budget(self.member[0], regions)
        self.settle()

    def share(self, regions: int) -> bool:
        """Let jobs have so many regions' worth of memory in common; tells whether the budget has room for it."""
        fits = bool(budgets.set_shared(self.member[0], regions))
        self.settle()
        return fits

    def promise_less(self, job: int, shared: int) -> None:
        """Promise a job no more than the budget without the regions' worth that it has in common with others."""
        record, total = self.jobs[job], int(self.header["budget_total"])
        record["promised"] = max(int(record["held"]), min(int(record["promised"]), total - shared))

    def settle(self) -> None:
        """Give back what jobs have returned beyond a budget that was lowered."""
        header = self.header
        with_pages = int(header["n_regions"]) - int(header["bare"])
        self.empty(with_pages - max(int(header["budget_regions"]), int(header["granted"])))

    def take_spare(self) -> int:
        """Return how many free regions nobody has needed since the last call that have pages to give back."""
        return int(budgets.take_spare(self.member[0])) if self.driver.name == HostDriver.name else 0

    def empty(self, n: int) -> None:
        """Give the memory of so many free regions back to the host, least recently released first.

        The mutex is held for one region at a time. A device's memory stays the pool's, since jobs
        have it mapped.
        """
        if self.driver.name != HostDriver.name:
            return
        for _ in range(n):
            mutex.lock_for_python(self.member[0])
            try:
                region = int(self.header["free_head"])
                if region in (NOBODY, int(self.header["bare_head"])):
                    return
                self.driver.discard(self.memory, region * self.region_bytes, self.region_bytes)
                budgets.empty(self.member[0], region)
            finally:
                mutex.unlock_for_python(self.member[0])

    def set_limit(self, job: int, regions: int) -> None:
        """Let a job hold so many regions from now on, 0: as many as the budget has."""
        budgets.set_limit(self.member[0], job, regions)

    def promise_no_more(self, job: int) -> None:
        """Let a job that has just joined be refused what exceeds its limit, as what exceeds the budget."""
        record = self.jobs[job]
        if record["limit"]:
            record["promised"] = min(int(record["promised"]), int(record["limit"]))

    def reap(self, job: int, *, lingers: bool = False) -> int:
        """Take back all regions of a job whose process has died; returns how many.

        Where its context lingers, its place is not given away before ``settle_place`` says that it has ended.
        """
        return int(deaths.reap(self.member[0], job, lingers))

    def settle_place(self, job: int, *, has_ended: bool) -> None:
        """Look after a place that lingers: free it if the context has ended, and let who waits for it go on."""
        (deaths.release_place if has_ended else deaths.settle_place)(self.member[0], job)

    def admit(self, job: int) -> bool:
        """Let a job at its boundary and its group start, unless claims forbid it; tells whether it has started."""
        return bool(boundaries.admit(self.member[0], job))

    def pause(self, job: int, *, move: bool) -> None:
        """Keep a job at its next boundary until ``resume``; ``move``: what it holds there leaves the budget."""
        boundaries.pause(self.member[0], job, int(Paused.MOVES if move else Paused.STAYS))

    def resume(self, job: int) -> None:
        """Let a paused job go on as any other."""
        boundaries.resume(self.member[0], job)

    @property
    def learned(self) -> Any:  # noqa: ANN401 - two CURVE records
        """Return copies of what this process's job did: its first iteration, and its profile, flat if not known yet."""
        job = self.jobs[int(self.member[0]["job"])]
        usual = job["profile"] if job["phase"] == MARKED else self._profiles[MARKED]
        return np.array([self._profiles[profiles.FIRST], usual], CURVE)

    def remember(self, learned: Any) -> None:  # noqa: ANN401 - two CURVE records
        """Let this process's job, which is in its first iteration, expect what ``learned`` of another run says."""
        self._profiles[[profiles.FIRST, MARKED]] = learned
        profiles.remember(self.member[0])

    def claim(self, job: int) -> int:
        """Return the most regions that a job may still come to hold in its iteration; no lock, for reports."""
        return int(budgets.claim_now(self.member[0], job))

    def join_group(self, group: int) -> None:
        """Make this process's job a rank of a group: any number that its ranks alone have, 0: of none."""
        boundaries.join_group(self.member[0], group)

    def set_gate(self, until_ns: int) -> None:
        """Keep this process's job, a rank, at its boundary until a time of the monotonic clock; 0: no longer."""
        boundaries.set_gate(self.member[0], until_ns)

    def set_waits_for(self, job: int, mask: int) -> None:
        """Write down whom a job at its boundary waits for, bit j for job j."""
        self.jobs[job]["waits_for"] = mask

    def snapshot(self) -> tuple[Any, Any]:
        """Return copies of the header and of the job records in use so far, taken inside the mutex."""
        mutex.lock_for_python(self.member[0])
        try:
            # Copied as bytes: NumPy copies records with padding field by field, which takes 30
            # times as long.
            places = int(self.header["places"])
            jobs = self.jobs[:places].view(np.uint8).copy()
            return self.header.copy(), jobs.view(JOB)
        finally:
            mutex.unlock_for_python(self.member[0])

    def look_around(self) -> None:
        """Note who is stopped and who moves (``zico.pool.living``), while somebody waits who may wait for them."""
        if self.header["waiters"] > 0 or self.header["boundary_waiters"] > 0:
            living.look_around(self.member[0])

    def restart_peak(self) -> None:
        """Let the recent peak of this process's job begin at what the job owns now; waits for the mutex."""
        mutex.lock_for_python(self.member[0])
        try:
            record = self.jobs[int(self.member[0]["job"])]
            record["recent_peak"] = record["held"]
        finally:
            mutex.unlock_for_python(self.member[0])

    def take_notice(self) -> None:
        """Empty the pipe and allow the next change to write it again; call before looking at the table."""
        # In this order: what happens from here on writes it again.
        with contextlib.suppress(BlockingIOError):
            os.read(self.notify_fd, _PIPE_BYTES)
        self.header["notified"] = 0

    def physical_bytes(self) -> int:
        """Return the bytes of regions that the kernel says are resident."""
        return self.driver.physical_bytes(self.memory)

    def close(self) -> None:
        """Unmap the table and close the descriptors; idempotent."""
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _host_driver(driver: Driver) -> Driver:
    """Return what drives the table's memory, which is this machine's whatever the device."""
    return driver if driver.name == HostDriver.name else HostDriver()


def _checked_regions(budget_bytes: int, region_bytes: int, granularity_bytes: int) -> int:
    pages = region_bytes // granularity_bytes
    if pages < 1 or region_bytes % granularity_bytes or pages & (pages - 1):
        message = (
            f"a region of {region_bytes} bytes does not work: give a power of two times {granularity_bytes} bytes, "
            "such as 4MiB"
        )
        raise ConfigError(message)
    if budget_bytes < region_bytes:
        message = (
            f"the budget of {format_bytes(budget_bytes)} is below one region of {format_bytes(region_bytes)}: raise "
            "--budget or lower --region"
        )
        raise ConfigError(message)
    return budget_bytes // region_bytes
