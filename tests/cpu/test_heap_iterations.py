"""Threads of a heap, and the iterations that are found in what they do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from cpu.support.members import Tenant, check_counters, job_of, make_pool, tenants
from cpu.support.threads import DEADLINE_S, in_thread, until
from support.hammering import blocks_of_nobody, hammer

from zico.heap import allocator
from zico.heap.layout import GRANULE_BYTES
from zico.pool import results

if TYPE_CHECKING:
    import threading

Record = Any
KIB, MIB = 1 << 10, 1 << 20


# -- threads ---------------------------------------------------------------------------------------

SLOTS_PER_THREAD = 24


def _hammer_all(tenants: list[Tenant], threads_each: int, rounds: int, most_bytes: int) -> None:
    faults = [np.zeros(2, "i8") for _ in range(threads_each * len(tenants))]

    def start(tenant: Tenant, seed: int, fault: Record) -> threading.Thread:
        blocks = blocks_of_nobody(SLOTS_PER_THREAD)
        return in_thread(lambda: hammer(tenant.record[0], seed, rounds, most_bytes, seed, blocks, fault))

    # Compiled before threads have a deadline: behind it the memory goes, under a thread that has only begun.
    hammer(tenants[0].record[0], 1, 0, most_bytes, 1, blocks_of_nobody(SLOTS_PER_THREAD), np.zeros(2, "i8"))
    threads = [start(tenants[i % len(tenants)], 12345 + 7919 * i, fault) for i, fault in enumerate(faults)]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert [int(f[0]) for f in faults] == [0] * len(faults)
    assert all(f[1] > rounds // 4 for f in faults)
    for tenant in tenants:
        tenant.check_structure()
        assert tenant.job["held"] == tenant.job["live_bytes"] == tenant.record[0]["bad_frees"] == 0
    check_counters(tenants[0].member)
    assert tenants[0].member.header["waiters"] == 0


def test_four_threads_share_a_heap() -> None:
    """Four threads allocate and free without Python; every pattern is intact and everything comes back."""
    with tenants(1024) as made:
        made[0].record[0]["marked"] = 1
        _hammer_all(made, 4, 4000, 512 * KIB)


def test_two_jobs_with_two_threads_each_share_a_tight_pool() -> None:
    """Two jobs that want more than there is wait, spill and go on; nothing is lost or overwritten."""
    with tenants(96, 2, claims=False, wait_limit_s=0.001) as made:
        for tenant in made:
            tenant.record[0]["marked"] = 1
        _hammer_all(made, 2, 1500, 256 * KIB)


# -- iterations without marks ----------------------------------------------------------------------


def _iterate(tenant: Tenant, sizes: list[int]) -> None:
    for address in [tenant.allocate(size) for size in sizes]:
        tenant.free(address)


def test_iterations_are_found_by_their_period() -> None:
    """With nothing marked a repeated sequence of allocations becomes iterations, one per repetition."""
    sizes = [GRANULE_BYTES * n for n in (1, 2, 3, 1, 2, 5, 4)]
    with tenants(64) as (tenant,):
        for _ in range(12):
            _iterate(tenant, sizes)
        found = int(tenant.job["iteration"])
        assert found > 0
        assert tenant.record[0]["tracker"]["gap"] == len(sizes)
        for _ in range(10):
            _iterate(tenant, sizes)
        assert tenant.job["iteration"] == found + 10


def test_found_iterations_count_only_after_the_grace() -> None:
    """Where marks are expected, repetition makes no iterations until there have been many allocations without one."""
    sizes = [GRANULE_BYTES * n for n in (1, 2, 3, 1, 2, 5, 4)]
    with tenants(64) as (tenant,):
        tenant.record[0]["grace"] = 30 * len(sizes)
        for _ in range(30):
            _iterate(tenant, sizes)
        assert tenant.job["iteration"] == 0
        for _ in range(10):
            _iterate(tenant, sizes)
        assert tenant.job["iteration"] == 10


def test_a_changed_loop_is_found_anew() -> None:
    """When the sequence changes, the old period is given up and the new one is found."""
    with tenants(64) as (tenant,):
        for _ in range(12):
            _iterate(tenant, [GRANULE_BYTES * n for n in (1, 2, 3, 1, 2, 5, 4)])
        other = [GRANULE_BYTES * n for n in (6, 1, 7, 3, 2)]
        for _ in range(40):
            _iterate(tenant, other)
        assert tenant.record[0]["tracker"]["gap"] == len(other)


def test_the_history_is_shortened_without_losing_the_period() -> None:
    """When the history is full its older half goes; iterations are counted on, one per repetition."""
    sizes = [GRANULE_BYTES + 64 * n for n in range(1, 41)]
    with tenants(64) as (tenant,):
        for _ in range(10):
            _iterate(tenant, sizes)
        record = tenant.record[0]
        assert record["tracker"]["gap"] == len(sizes)
        rounds = (1 << 16) // len(sizes) + 20
        before = int(tenant.job["iteration"])
        for _ in range(rounds):
            for address in [allocator.allocate(record, size, 64) for size in sizes]:
                allocator.free(record, address)
        assert record["tracker"]["n"] < 1 << 16
        assert record["tracker"]["gap"] == len(sizes)
        assert tenant.job["iteration"] == before + rounds


def test_a_second_thread_at_a_boundary_waits_along() -> None:
    """When two threads of a job mark at once, one iteration ends and both go on when it is admitted."""
    with make_pool(4, region_bytes=GRANULE_BYTES, unasked=False) as pool, Tenant(pool) as tenant:
        threads = [in_thread(tenant.mark) for _ in range(2)]
        until(lambda: tenant.job["iteration"] >= 1)
        for _ in range(int(DEADLINE_S * 1000)):
            pool.admit(job_of(tenant.member))
            if not any(thread.is_alive() for thread in threads):
                break
            threads[0].join(0.001)
        assert not any(thread.is_alive() for thread in threads)
        assert tenant.job["iteration"] in (1, 2)
        assert pool.header["boundary_waiters"] == 0


def test_bytes_reported_add_up() -> None:
    """Invariant 9: granted is what the jobs hold, requests split without rest, and physical is what was touched."""
    with tenants(16, 2, claims=False) as (a, b):
        kept = [a.allocate(3 * GRANULE_BYTES), b.allocate(5 * GRANULE_BYTES)]
        spilled = b.allocate(10 * GRANULE_BYTES)
        assert b.is_spilled(spilled)
        assert a.allocate(17 * GRANULE_BYTES) == results.NEVER_FITS
        header = a.member.header
        held = [int(tenant.job["held"]) for tenant in (a, b)]
        assert (int(header["granted"]), held) == (8, [3, 5])
        for tenant, refused in ((a, 17), (b, 0)):
            job = tenant.job
            elsewhere = job["requested_bytes"] - job["pooled_bytes"] - job["spilled_bytes"]
            assert elsewhere == refused * GRANULE_BYTES
        assert [int(tenant.job["live_bytes"]) for tenant in (a, b)] == [3 * GRANULE_BYTES, 5 * GRANULE_BYTES]
        touched = os.fstat(a.member.memory_fd).st_blocks * 512
        assert 0 < a.member.physical_bytes() == touched <= 8 * GRANULE_BYTES
        assert len(kept) == 2
