"""A heap that waits for memory goes on when it comes, by what another evicts, or from the next tier."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support import members
from cpu.support.members import check_counters, give_profile, job_of, make_pool, tenants
from cpu.support.threads import DEADLINE_S, in_thread, until

from zico.base.errors import ConfigError
from zico.heap.build import Heap
from zico.heap.layout import GRANULE_BYTES, HEAP
from zico.pool import results, waits

if TYPE_CHECKING:
    from pathlib import Path


# -- waiting and the next tier ---------------------------------------------------------------------


def test_a_wait_ends_when_memory_comes_back() -> None:
    """Invariant 7: a job that waits says whom for, and goes on, in the pool, when the other frees."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        block = a.allocate(8 * GRANULE_BYTES)
        thread = in_thread(lambda: b.allocate(2 * GRANULE_BYTES))
        until(lambda: b.job["waiting_threads"] == 1)
        assert b.job["waits_for"] == 1 << job_of(a.member)
        assert b.job["need"] == 2
        a.free(block)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        (address,) = b.live
        assert not b.is_spilled(address)
        assert b.job["need_waited_ns"] > 0
        assert b.job["spilled_bytes"] == b.job["waits_for"] == b.member.header["waiters"] == 0


def test_a_wait_ends_when_a_claim_falls() -> None:
    """Invariant 7: a job goes on once another has got so far that the grant is safe, though nothing is given back."""
    granules, peak_bins = 4, 8
    with tenants(8, 2, region_bytes=granules * GRANULE_BYTES, wait_limit_s=DEADLINE_S) as (a, b):
        b.member.member[0]["slice"] = (2 * int(DEADLINE_S), 0)  # so that only a wake-up can end its wait in time
        for tenant, levels in ((a, [6] * peak_bins + [1] * peak_bins), (b, [8])):
            give_profile(tenant.job, levels)
        a.allocate(GRANULE_BYTES)
        thread = in_thread(lambda: b.allocate(4 * granules * GRANULE_BYTES))
        until(lambda: b.job["waiting_threads"] == 1)
        while a.job["progress"] < 2 * peak_bins - 1:
            assert b.job["waiting_threads"] == 1 or a.job["progress"] > peak_bins
            a.free(a.allocate(GRANULE_BYTES))
            assert a.job["held"] == 1
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        (address,) = b.live
        assert not b.is_spilled(address)


def test_two_stuck_jobs_do_not_lock_each_other() -> None:
    """Invariant 7: when each of two jobs waits for what the other holds, one goes on with what the other evicts."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        for tenant in (a, b):
            tenant.allocate(4 * GRANULE_BYTES)
        threads = [
            in_thread(lambda tenant=tenant, n=n: tenant.allocate(n * GRANULE_BYTES)) for tenant, n in ((a, 3), (b, 2))
        ]
        threads[1].join(DEADLINE_S)
        assert [thread.is_alive() for thread in threads] == [True, False], "who lacks the least goes on"
        assert (a.job["evicted"], a.job["held"], b.job["held"]) == (2, 2, 6)
        assert b.member.header["stalls"] == 1
        a.check_structure()
        b.check_structure()
        b.free_all()
        threads[0].join(DEADLINE_S)
        assert not threads[0].is_alive()
        assert (a.job["evicted"], a.job["held"], a.job["evictions"]) == (0, 7, 2)
        assert a.job["spilled_bytes"] == b.job["spilled_bytes"] == 0
        a.check_structure()
        a.free_all()


def test_two_stuck_threads_of_each_of_two_jobs_all_go_on() -> None:
    """Invariant 7: with four threads of two jobs waiting at once every one of them ends."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        for tenant in (a, b):
            tenant.allocate(4 * GRANULE_BYTES)
        threads = [in_thread(lambda t=t: t.allocate(2 * GRANULE_BYTES)) for t in (a, a, b, b)]
        for tenant, own in ((a, threads[:2]), (b, threads[2:])):
            for thread in own:
                thread.join(DEADLINE_S)
            assert not any(thread.is_alive() for thread in own)
            assert len(tenant.live) == 3
            tenant.check_structure()
            tenant.free_all()
        assert a.member.header["waiters"] == 0
        check_counters(a.member)


def test_a_profile_that_promises_too_little_costs_no_correctness() -> None:
    """Invariant 8: jobs that outgrow their profiles are served, by what another evicts, and claims are raised."""
    with tenants(8, 2, wait_limit_s=DEADLINE_S) as (a, b):
        for tenant in (a, b):
            tenant.job["profile"]["n_bins"] = 1
            tenant.job["profile"]["n_events"] = 1 << 30
            tenant.job["profile"]["shift"] = 40
            tenant.job["profile"]["held"][0] = tenant.job["claims"][0] = tenant.job["claim_peak"] = 1
            tenant.job["profiled"] = 1
        for tenant in (a, b):
            tenant.allocate(4 * GRANULE_BYTES)
        threads = [in_thread(lambda t=t: t.allocate(3 * GRANULE_BYTES)) for t in (a, b)]
        until(lambda: len(a.live) == 2 or len(b.live) == 2)
        first, last = (a, b) if len(a.live) == 2 else (b, a)
        assert last.job["evicted"] == 3
        first.free_all()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert a.job["spilled_bytes"] == b.job["spilled_bytes"] == 0
        assert (last.job["evicted"], last.job["held"], last.job["claim_extra"]) == (0, 7, 6)
        last.check_structure()
        last.free_all()


def test_a_wait_ends_at_its_limit() -> None:
    """Invariant 7: while another job runs on without giving anything back, the limit ends the wait in the next tier."""
    with tenants(8, 2, claims=False, wait_limit_s=0.02) as (a, b):
        a.allocate(8 * GRANULE_BYTES)
        address = b.allocate(GRANULE_BYTES)
        assert b.is_spilled(address)
        b.check_structure()
        b.free(address)


@pytest.mark.parametrize("field", ["fd", "limit_bytes"])
def test_without_a_next_tier_the_limit_is_out_of_memory(field: str) -> None:
    """Where no file can be had, or no more of it, a wait that reaches its limit is refused and reported."""
    with tenants(8, 2, claims=False, wait_limit_s=0.01) as (a, b):
        a.allocate(8 * GRANULE_BYTES)
        b.record[0]["spill"][field] = -1
        assert b.allocate(GRANULE_BYTES) == results.NEVER_FITS
        assert b.job["oom_count"] == 1
        a.free_all()
        assert b.allocate(GRANULE_BYTES) > 0


def test_the_next_tier_gives_its_disk_blocks_back() -> None:
    """What is freed in the next tier leaves the file; the file never exceeds its limit."""
    with tenants(4, 2, claims=False, wait_limit_s=0.002) as (a, b):
        a.allocate(4 * GRANULE_BYTES)
        descriptor = int(b.record[0]["spill"]["fd"])
        while (address := b.allocate(GRANULE_BYTES)) > 0:
            assert b.is_spilled(address)
        assert len(b.live) * GRANULE_BYTES == b.record[0]["spill"]["limit_bytes"]
        os.fsync(descriptor)
        assert os.fstat(descriptor).st_blocks > 0
        b.check_structure()
        b.free_all()
        os.fsync(descriptor)
        assert os.fstat(descriptor).st_blocks == 0


def test_busy_neighbours_do_not_turn_a_wait_into_a_refusal() -> None:
    """A request that fits once another thread of the job frees is not refused because others make the pool change."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        for tenant in (a, b):
            tenant.member.member[0]["slice"] = (0, 50_000_000)
        block = a.allocate(5 * GRANULE_BYTES)
        thread = in_thread(lambda: a.allocate(6 * GRANULE_BYTES))
        until(lambda: a.job["waiting_threads"] == 1)
        for _ in range(50):
            b.free(b.allocate(GRANULE_BYTES))
        a.free(block)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert a.job["oom_count"] == 0


def test_a_wait_for_others_does_not_count_as_a_refusal() -> None:
    """A request that waits for long, and only then exceeds the budget, has time to fit again."""
    with tenants(8, 2, region_bytes=2 * GRANULE_BYTES, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        a.member.member[0]["slice"] = (2 * int(DEADLINE_S), 0)  # so that it looks only when it is woken
        a.record[0]["spill"]["limit_bytes"] = 0
        half = a.allocate(GRANULE_BYTES)
        a.allocate(7 * GRANULE_BYTES)
        one, rest = (b.allocate(n * GRANULE_BYTES) for n in (2, 6))
        thread = in_thread(lambda: a.allocate(6 * GRANULE_BYTES))
        until(lambda: a.job["waiting_threads"] == 1)
        until(lambda: time.monotonic_ns() - int(a.job["need_since_ns"]) > 2 * waits.STUCK_NS)
        a.job["promised"] = 6
        a.job["evict"] = 1  # can evict nothing, and says so when it looks
        b.free(one)
        until(lambda: a.job["evict"] != 1)
        a.free(half)  # it looks inside the mutex that this takes
        a.job["promised"] = 8
        b.free(rest)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert a.job["oom_count"] == 0
        a.free_all()


# -- construction ----------------------------------------------------------------------------------


def test_a_threshold_below_a_granule_is_refused() -> None:
    """Blocks are found by granule, so nothing smaller may be in the pool."""
    with make_pool(4) as pool, members.join(pool) as member, pytest.raises(ConfigError, match="64KiB"):
        Heap(member, np.zeros(1, HEAP), threshold_bytes=GRANULE_BYTES - 1)


def test_a_missing_spill_directory_means_no_next_tier(tmp_path: Path) -> None:
    """A directory that cannot be written costs the next tier, not the job."""
    with make_pool(4) as pool, members.join(pool) as member:
        record = np.zeros(1, HEAP)
        Heap(member, record, spill_directory=str(tmp_path / "none")).close()
        assert record[0]["spill"]["fd"] == -1


def test_a_spill_file_that_may_not_grow_means_no_next_tier(tmp_path: Path) -> None:
    """A limit on file sizes costs the next tier, not the job, and leaves no descriptor."""
    with make_pool(64) as pool, members.join(pool) as member:
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        record = np.zeros(1, HEAP)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            Heap(member, record, spill_directory=str(tmp_path)).close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert record[0]["spill"]["fd"] == -1
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - names, not paths
        assert list(tmp_path.iterdir()) == []
