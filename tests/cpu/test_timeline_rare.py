"""What hardly ever happens on a device's timeline: a test for each thing that no random run comes by."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.device_tenant import DeviceTenant
from cpu.support.members import check_counters, counters, fence, issued, job_of, join
from cpu.support.software_device import INVALID_HANDLE, SoftwareDevice
from support.harness import until

from zico.pool import fences, mutex, regions
from zico.pool.layout import NOBODY, STREAMS, JobState
from zico.pool.results import BEHIND
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
DEADLINE_S = 20.0


@contextlib.contextmanager
def make_pool(n_regions: int) -> Iterator[PoolTable]:
    """Make a pool whose regions may be granted behind fences."""
    sizes = {"budget_bytes": n_regions * MIB, "region_bytes": MIB}
    with PoolTable.create(**sizes, use_claims=False, self_admit=True, on_timeline=True) as pool:
        yield pool


def acquire(member: PoolTable, n: int) -> int:
    """Ask for regions for the first stream."""
    return int(regions.acquire(member.member[0], np.full(n, NOBODY, "i4"), n, 0))


@pytest.fixture
def device() -> SoftwareDevice:
    """Make a device."""
    return SoftwareDevice(INVALID_HANDLE)


@contextlib.contextmanager
def job_on(device: SoftwareDevice, **options: Any) -> Iterator[DeviceTenant]:  # noqa: ANN401 - of DeviceTenant
    """Make a job with a pool of its own."""
    with make_pool(40) as pool, DeviceTenant(pool, device, wait_limit_s=0.002, **options) as job:
        yield job


# -- the table -------------------------------------------------------------------------------------


def test_who_dies_between_a_mark_and_saying_so_leaves_counters_that_grow() -> None:
    """Invariant 5: a mark of which only the device knows counts; the next job in the place goes on behind it."""
    with make_pool(4) as pool:
        job = pool.join(os.getpid(), "dying")
        issued(pool)[job, 1], counters(pool)[job, 1] = 5, 6
        issued(pool)[job, 2], counters(pool)[job, 2] = 9, 7
        pool.reap(job)
        assert issued(pool)[job, :3].tolist() == counters(pool)[job, :3].tolist() == [0, 6, 9]


def test_a_release_that_death_cut_short_is_repaired() -> None:
    """Invariant 5: a fence of which the region's last owner knows nothing, since its job died in the release, goes."""
    with make_pool(2) as pool, join(pool) as member:
        pool.regions[0]["fence"] = fence(7, 3, 1)
        pool.regions[0]["last_owner"] = job_of(member)
        assert pool.jobs[7]["state"] == JobState.EMPTY
        mutex.recover(pool.member[0])
        assert pool.regions[0]["fence"] == 0
        assert pool.regions[0]["last_owner"] == job_of(member)


def test_with_nothing_ahead_a_busy_job_is_served_far_above_its_bound() -> None:
    """Invariant 7: what is above the bound must not wait for what does not come, also where the device has work."""
    n = 3 * fences.START_BYTES // MIB
    with make_pool(n) as pool, join(pool) as a, join(pool) as b:
        acquire(a, n)
        issued(pool)[job_of(a), 0] = issued(pool)[job_of(b), 0] = 1
        regions.give_back(a.member[0], np.arange(n, dtype="i4"), n, fence(job_of(a), 0, 1))
        assert acquire(b, n) == BEHIND


def test_a_region_that_is_mapped_at_two_places_is_granted_for_one() -> None:
    """Invariant 2: a job that names a region behind a fence for two slots gets it once, and another one."""
    with make_pool(3) as pool, join(pool) as a, join(pool) as b:
        acquire(a, 3)
        issued(pool)[job_of(a), 0] = 1
        regions.give_back(a.member[0], np.arange(3, dtype="i4"), 3, fence(job_of(a), 0, 1))
        wanted = np.array([1, 1], "i4")
        assert regions.acquire(b.member[0], wanted, 2, 0) == BEHIND
        assert sorted(wanted.tolist()) != [1, 1]
        assert 1 in wanted.tolist()
        check_counters(pool)


def test_a_grant_demands_no_wait_for_what_is_clear() -> None:
    """Of two regions one was never used: the stream waits for the other one's fence alone."""
    with make_pool(2) as pool, join(pool) as a, join(pool) as b:
        acquire(a, 1)
        issued(pool)[job_of(a), 3] = 1
        regions.give_back(a.member[0], np.zeros(1, "i4"), 1, fence(job_of(a), 3, 1))
        assert acquire(b, 2) == BEHIND
        record = b.member[0]
        assert record["wait_pairs"][: int(record["n_waits"])].tolist() == [job_of(a) * STREAMS + 3]


# -- streams ---------------------------------------------------------------------------------------


def test_a_free_that_waits_for_a_stream_marks_it_at_once_while_somebody_waits(device: SoftwareDevice) -> None:
    """Invariant 7: with marks far apart, others who wait for memory need not wait for the next one."""
    with job_on(device, spacing_bytes=64 * MIB) as job:
        for marks, who in enumerate(["", "waiters", "boundary_waiters"]):
            tensor = job.allocate(2 * MIB)
            assert tensor is not None
            job.use_on(tensor, 1)
            if who:
                job.member.header[who] = 1
            job.free(tensor)
            assert device.marks == marks
            if who:
                job.member.header[who] = 0
        job.settle()
        job.check_empty()


def test_streams_that_use_each_others_tensors_do_not_wait_in_a_circle(device: SoftwareDevice) -> None:
    """Invariant 7: with marks far apart each stream's mark comes before its wait for the other."""
    with job_on(device, spacing_bytes=64 * MIB) as job:
        tensors = [job.allocate(2 * MIB, stream) for stream in (0, 1)]
        for stream, tensor in enumerate(tensors):
            assert tensor is not None
            job.use_on(tensor, 1 - stream)
        job.free_all()
        assert (device.marks, job.record[0]["streams"]["n_deferred"]) == (0, 2)
        job.settle()
        job.check_empty()
        assert not job.faults


@pytest.mark.parametrize("users", [(1, 2), (2, 1)])
def test_each_freed_tensor_waits_for_its_own_users(device: SoftwareDevice, users: tuple[int, int]) -> None:
    """Invariant 2: of two freed tensors the one whose stream has come by goes, whichever it is; the other waits."""
    with job_on(device, streams=3) as job:
        for stream in users:
            tensor = job.allocate(2 * MIB)
            assert tensor is not None
            job.use_on(tensor, stream)
        device.step(job.streams[0])
        device.step(job.streams[0])
        job.free_all()
        while device.step(job.streams[1]):
            pass
        for _ in range(3):
            assert job.allocate(100) is not None
            assert job.record[0]["streams"]["n_deferred"] == 1
        job.free_all()
        job.settle()
        job.check_empty()
        assert not job.faults


# -- waiting ---------------------------------------------------------------------------------------


def test_who_waits_is_woken_when_the_marks_come(device: SoftwareDevice) -> None:
    """Invariant 7: regions that were released without a mark are had at once when that comes, not a sleep later."""
    with make_pool(4) as pool, contextlib.ExitStack() as stack:
        options = {"wait_limit_s": DEADLINE_S, "spacing_bytes": 64 * MIB}
        a, b = (stack.enter_context(DeviceTenant(pool, device, **options)) for _ in range(2))
        b.member.member[0]["poll"] = (10 * int(DEADLINE_S), 0)
        tensor = a.allocate(4 * MIB)
        assert tensor is not None
        a.free(tensor)
        thread = threading.Thread(target=b.allocate, args=(4 * MIB,), daemon=True)
        thread.start()
        until(lambda: b.job["waiting_threads"] > 0, DEADLINE_S, "somebody waits")
        a.settle()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert b.live
        b.free_all()
        for job in (a, b):
            job.settle()


def test_a_mark_that_was_refused_is_tried_again_for_who_waits(device: SoftwareDevice) -> None:
    """Invariant 7: a release that finds somebody waiting does not leave him to the job's next call."""
    with job_on(device) as job:
        tensor = job.allocate(MIB)
        assert tensor is not None
        job.member.header["waiters"] = 1
        answers = iter([True])
        device.refuses = lambda _kind, _stream: next(answers, False)
        job.free(tensor)
        job.member.header["waiters"] = 0
        assert job.record[0]["streams"]["failures"] == 1
        assert device.marks == issued(job.member)[job_of(job.member), 0] == 1
        job.settle()
        job.check_empty()
