"""The allocator against a model, with patterns in every block."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import threading
from typing import TYPE_CHECKING, Any

import members
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from members import Tenant, check_counters, free_list, give_profile, job_of, make_pool, tenants

from zico.compiled import array_at, compiled
from zico.errors import ConfigError
from zico.heap import allocator, evicting
from zico.heap.build import Heap
from zico.heap.layout import GRANULE_BYTES, HEAP, Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Record = Any
KIB, MIB = 1 << 10, 1 << 20
DEADLINE_S = 30.0
REFUSED = (allocator.NOT_SERVED, allocator.OUT_OF_MEMORY)
_I64 = np.dtype("i8")

SIZES = st.one_of(
    st.integers(GRANULE_BYTES, 4 * GRANULE_BYTES),
    st.integers(GRANULE_BYTES, 20 * MIB),
    st.sampled_from([1, 2, 3, 4, 16]).flatmap(
        lambda n: st.sampled_from([n * GRANULE_BYTES + by for by in (-64, -1, 0, 1, 64)])
    ),
).map(lambda size: max(size, GRANULE_BYTES))
ALIGNMENTS = st.sampled_from([1, 16, 64, 64, 64, 128, 512, 4096, 16 * KIB, 64 * KIB])


class HeapMachine(RuleBasedStateMachine):
    """Up to three jobs allocate, free and iterate; contents, slots, gaps, regions and counters must be right."""

    jobs = staticmethod(tenants)

    @initialize(
        n=st.integers(1, 400), region_kib=st.sampled_from([16, 64, 64, 128, 256, 4096]), count=st.integers(1, 3)
    )
    def begin(self, n: int, region_kib: int, count: int) -> None:
        """Make a pool of at most 64 MiB and the jobs."""
        region_bytes = region_kib * KIB
        self.n = max(1, min(n, 64 * MIB // region_bytes))
        self.region_bytes = region_bytes
        self.stack = contextlib.ExitStack()
        self.tenants = self.stack.enter_context(self.jobs(self.n, count, region_bytes=region_bytes, wait_limit_s=0.002))
        self.pool = self.tenants[0].member

    def teardown(self) -> None:
        """Free everything: then nothing is held, and nothing is reserved in the next tier."""
        if not hasattr(self, "stack"):
            return
        with self.stack:
            for tenant in self.tenants:
                tenant.free_all()
                assert tenant.job["held"] == tenant.job["live_bytes"] == 0
                assert tenant.record[0]["spill_live_bytes"] == tenant.record[0]["bad_frees"] == 0
                assert all(len(tenant.gaps(arena)) == 1 for arena in Arena)
            assert len(free_list(self.pool)) == self.n

    def _pick(self, data: st.DataObject) -> Tenant:
        return self.tenants[data.draw(st.integers(0, 5)) % len(self.tenants)]

    @rule(data=st.data(), size=SIZES, alignment=ALIGNMENTS)
    def allocate(self, data: st.DataObject, size: int, alignment: int) -> None:
        """Invariant 2: a block is inside the window, aligned and apart from every other, or refused for a reason."""
        tenant = self._pick(data)
        job = tenant.job
        before = {field: int(job[field]) for field in ("held", "oom_count", "requested_bytes", "spilled_bytes")}
        address = tenant.allocate(size, alignment)
        if alignment <= mmap.PAGESIZE:
            assert job["requested_bytes"] == before["requested_bytes"] + size
        if address in REFUSED:
            assert job["held"] == before["held"]
            fewest = -(-size // self.region_bytes)
            if address == allocator.OUT_OF_MEMORY:
                assert job["oom_count"] == before["oom_count"] + 1
                assert job["oom_request_bytes"] == -(-size // 64) * 64
                assert job["oom_held"] == before["held"]
                # Where it is refused a fresh range would not have had enough regions either.
                assert before["held"] + fewest + 1 > self.n or len(self.tenants) > 1
            elif alignment <= mmap.PAGESIZE:
                assert size > self.region_bytes, "there is address space for small ones"
                assert size <= self.n * self.region_bytes, "never because of the budget"
            return
        assert address % max(alignment, 64) == 0
        assert (job["spilled_bytes"] > before["spilled_bytes"]) == tenant.is_spilled(address)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A block's pattern is intact when it is freed."""
        tenant = self._pick(data)
        blocks = sorted(tenant.live)
        which = data.draw(st.integers(0, 1 << 20))  # not a choice among blocks: their number may depend on time
        if blocks:
            tenant.free(blocks[which % len(blocks)])

    @rule(data=st.data())
    def free_most(self, data: st.DataObject) -> None:
        """An iteration's end: most blocks go."""
        tenant = self._pick(data)
        for address in sorted(tenant.live)[1:]:
            tenant.free(address)

    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        """An iteration ends; where the job has to ask, the broker says yes as soon as it can."""
        tenant = self._pick(data)
        thread = threading.Thread(target=tenant.mark, daemon=True)
        thread.start()
        for _ in range(10000):
            thread.join(0.001)
            if not thread.is_alive():
                break
            self.pool.admit(job_of(tenant.member))
        assert not thread.is_alive()
        assert tenant.job["persistent"] == tenant.job["held"] + tenant.job["evicted"]

    @rule(data=st.data(), n=st.integers(1, 40))
    def evict(self, data: st.DataObject, n: int) -> None:
        """A job evicts what it is asked for, or all that it holds and may."""
        tenant = self._pick(data)
        job = tenant.job
        held, room = int(job["held"]), int(tenant.record[0]["spill_limit_bytes"]) // self.region_bytes
        room -= int(job["evicted"]) + int(tenant.record[0]["spill_live_bytes"]) // self.region_bytes
        job["evict"] = n
        evicting.evict(tenant.record[0], job)
        assert job["held"] == held - min(n, held, room)
        assert job["evict"] == (0 if n <= min(held, room) else evicting.NO_MORE)
        job["evict"] = 0

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        """A job gets back all that it has evicted, if that is free and nobody else is endangered, or nothing."""
        tenant = self._pick(data)
        job = tenant.job
        held, evicted = int(job["held"]), int(job["evicted"])
        if evicted and evicting.take_back(tenant.record[0], job):
            assert (job["held"], job["evicted"]) == (held + evicted, 0)
        else:
            assert (job["held"], job["evicted"]) == (held, evicted)

    @rule(
        data=st.data(),
        more=st.lists(st.integers(1, 40).map(lambda n: n * GRANULE_BYTES // 2 + 32 * KIB), max_size=3),
        places=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=30),
    )
    def follow(self, data: st.DataObject, more: list[int], places: list[int]) -> None:
        """A plan is in force, right or wrong: places that overlap, for tensors that may or may not come."""
        tenant = self._pick(data)
        sizes = sorted({*(-(-size // 64) * 64 for size in tenant.live.values()), *more})
        most = min(tenant.heap.arena_bytes, 12 * self.region_bytes) // 64
        plan = {
            (sizes[i % len(sizes)], 1 + i // len(sizes)): place % most * 64
            for i, place in enumerate(places)
            if sizes and place % most * 64 + sizes[i % len(sizes)] <= tenant.heap.arena_bytes
        }
        if plan:
            tenant.follow(plan)

    @rule(data=st.data(), where=st.integers(0, 1 << 40))
    def free_what_is_no_block(self, data: st.DataObject, where: int) -> None:
        """A free inside the window of what no block starts near is counted, and changes nothing."""
        tenant = self._pick(data)
        offset = where % int(tenant.record[0]["window_bytes"])
        starts = {(address - tenant.base) // GRANULE_BYTES for address in tenant.live}
        if offset // GRANULE_BYTES in starts:
            return
        before = int(tenant.record[0]["bad_frees"])
        allocator.free(tenant.record[0], tenant.base + offset)
        assert tenant.record[0]["bad_frees"] == before + 1
        tenant.record[0]["bad_frees"] = before

    @invariant()
    def agrees(self) -> None:
        """Invariants 1, 2 and 4: the structures are what the live blocks say, and no byte of a pattern changed."""
        if not hasattr(self, "stack"):
            return
        check_counters(self.pool)
        for tenant in self.tenants:
            tenant.check_structure()
            for address in tenant.live:
                tenant.check(address)


HeapMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHeap = HeapMachine.TestCase


# -- by hand --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tenant() -> Iterator[Tenant]:
    """Make one job in a pool of sixteen regions of 64 KiB."""
    with tenants(16) as (tenant,):
        yield tenant


def test_a_tensor_spans_regions_that_need_not_be_neighbours(tenant: Tenant) -> None:
    """A tensor larger than a region lies in consecutive slots, whatever regions are behind them."""
    small = [tenant.allocate(GRANULE_BYTES) for _ in range(16)]
    for address in small[::2]:
        tenant.free(address)
    large = tenant.allocate(8 * GRANULE_BYTES)
    assert large > 0
    tenant.check_structure()
    tenant.free_all()
    tenant.check_structure()


def test_the_last_block_to_leave_a_region_returns_it(tenant: Tenant) -> None:
    """Two tensors share a slot at their border; it is held until both are gone, and no longer."""
    first, second = tenant.allocate(GRANULE_BYTES + 64), tenant.allocate(GRANULE_BYTES)
    assert second - first == GRANULE_BYTES + 64
    assert tenant.job["held"] == 3
    tenant.free(first)
    assert tenant.job["held"] == 2
    tenant.free(second)
    assert tenant.job["held"] == 0


def test_the_steady_state_maps_nothing(tenant: Tenant) -> None:
    """A second identical iteration gets the same regions in the same slots, without a system call."""
    maps = []
    for _ in range(4):
        blocks = [tenant.allocate(size) for size in (3 * GRANULE_BYTES, GRANULE_BYTES + 640, 5 * GRANULE_BYTES)]
        for address in blocks:
            tenant.free(address)
        maps.append(int(tenant.job["maps"]))
    assert maps[-1] == maps[-2]


def test_each_class_has_its_arena(tenant: Tenant) -> None:
    """Temporaries, tensors of the iteration and persistent ones come to lie in arenas of their own."""

    def arena_of(address: int) -> Arena:
        offset = address - tenant.base
        return next(a for a in Arena if offset < tenant.heap.arenas[a]["end"])

    places: list[list[Arena]] = []
    kept = 0
    for _ in range(3):
        tenant.mark()
        if kept:
            tenant.free(kept)
        kept = tenant.allocate(GRANULE_BYTES)
        long = tenant.allocate(2 * GRANULE_BYTES)
        shorts = []
        for _ in range(10):
            short = tenant.allocate(3 * GRANULE_BYTES)
            shorts.append(arena_of(short))
            tenant.free(short)
        places.append([arena_of(kept), arena_of(long), *shorts])
        tenant.free(long)
    assert set(places[0]) == {Arena.LONG}
    assert places[2] == [Arena.PERSISTENT, Arena.LONG, *[Arena.SHORT] * 10]


def test_a_double_free_is_counted_and_harmless(tenant: Tenant) -> None:
    """The second free of a block changes nothing but a counter."""
    first, second = tenant.allocate(GRANULE_BYTES), tenant.allocate(GRANULE_BYTES)
    tenant.free(first)
    for _ in range(3):
        allocator.free(tenant.record[0], first)
    assert tenant.record[0]["bad_frees"] == 3
    tenant.check_structure()
    tenant.free(second)
    assert tenant.job["held"] == 0


@pytest.mark.parametrize("beside", [1, 64, GRANULE_BYTES - 1, GRANULE_BYTES + 5])
def test_a_free_inside_a_block_is_counted_and_harmless(tenant: Tenant, beside: int) -> None:
    """A pointer into a block, not to its start, frees nothing."""
    tenant.allocate(2 * GRANULE_BYTES + 128)
    block = tenant.allocate(2 * GRANULE_BYTES)
    allocator.free(tenant.record[0], block + beside)
    assert tenant.record[0]["bad_frees"] == 1
    tenant.check_structure()
    tenant.free_all()


def test_the_whole_budget_can_be_one_tensor(tenant: Tenant) -> None:
    """A tensor of exactly the budget fits; one byte more never does, and is reported with what was held."""
    whole = 16 * GRANULE_BYTES
    address = tenant.allocate(whole)
    assert address > 0
    tenant.free(address)
    assert tenant.allocate(whole + 1) == allocator.OUT_OF_MEMORY
    assert [int(tenant.job[f"oom_{field}"]) for field in ("request_bytes", "held", "count")] == [whole + 64, 0, 1]
    small = tenant.allocate(GRANULE_BYTES)
    assert tenant.allocate(whole) == allocator.OUT_OF_MEMORY
    assert [int(tenant.job[f"oom_{field}"]) for field in ("request_bytes", "held", "count")] == [whole, 1, 2]
    tenant.free(small)
    assert tenant.allocate(whole) > 0


@pytest.mark.parametrize(
    "size_bytes", [65 * GRANULE_BYTES, 1 << 30, 1 << 46, (1 << 62) + 1, (1 << 63) - 65, (1 << 63) - 1]
)
def test_a_request_larger_than_an_arena_is_out_of_memory_too(tenant: Tenant, size_bytes: int) -> None:
    """Invariant 1: what exceeds the budget is refused however large it is; it never goes to the real allocator."""
    assert tenant.allocate(size_bytes) == allocator.OUT_OF_MEMORY
    assert tenant.job["oom_count"] == 1
    assert tenant.allocate(GRANULE_BYTES) > 0
    tenant.check_structure()


@pytest.mark.parametrize("alignment", [4096, 16 * KIB, 64 * KIB, 2 * MIB])
def test_alignments_above_a_page_hold_for_the_address(alignment: int) -> None:
    """The address is aligned, not only its distance from the window's start, or the real allocator is asked."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):  # windows too small for the kernel to align them, each a page further on than the last
            stack.enter_context(mmap.mmap(-1, mmap.PAGESIZE))
            (tenant,) = stack.enter_context(tenants(48, region_bytes=4096))
            address = tenant.allocate(GRANULE_BYTES, alignment)
            assert address == allocator.NOT_SERVED or address % alignment == 0


def test_a_job_that_left_is_served_elsewhere_and_may_still_free(tenant: Tenant) -> None:
    """After its connection is gone a job's requests go to the real allocator at once; its frees work."""
    address = tenant.allocate(GRANULE_BYTES)
    tenant.member.mark_leaving(job_of(tenant.member))
    assert tenant.allocate(GRANULE_BYTES) == allocator.NOT_SERVED
    tenant.mark()
    tenant.free(address)
    assert tenant.job["held"] == 0


# -- mapping fails --------------------------------------------------------------------------------------------------

_MMAP = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


class Maps:
    """Stands in for ``mmap``: fails the calls of which ``fails`` says so."""

    def __init__(self, tenant: Tenant, fails: Callable[[int], bool]) -> None:
        """Replace the tenant's ``mmap`` until the tenant is gone."""
        self.calls = 0
        device = tenant.heap.device[0]
        real = _MMAP(int(device["mmap"]))

        def stand_in(*arguments: int) -> int:
            self.calls += 1
            return -1 if fails(self.calls) else real(*arguments)

        self._keep = (_MMAP(stand_in), real)
        device["mmap"] = ctypes.cast(self._keep[0], ctypes.c_void_p).value


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_mapping_that_keeps_failing_leaves_the_pool_unchanged(tenant: Tenant, k: int) -> None:
    """If the kernel maps no more from call k on, the request is refused and every region of it is back."""
    first = tenant.allocate(GRANULE_BYTES + 64)
    free_before = sorted(free_list(tenant.member))
    maps = Maps(tenant, lambda call: call >= k)
    assert tenant.allocate(4 * GRANULE_BYTES) == allocator.OUT_OF_MEMORY
    assert maps.calls >= k
    assert sorted(free_list(tenant.member)) == free_before
    check_counters(tenant.member)
    tenant.check_structure()
    tenant.check(first)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_mapping_that_fails_once_is_tried_again(tenant: Tenant, k: int) -> None:
    """If the kernel refuses one mapping only, the request is served by the next try, with nothing lost."""
    maps = Maps(tenant, lambda call: call == k)
    address = tenant.allocate(4 * GRANULE_BYTES)
    assert address > 0
    assert maps.calls > k
    tenant.check_structure()
    tenant.free(address)
    assert tenant.job["held"] == 0
    check_counters(tenant.member)


# -- waiting and the next tier --------------------------------------------------------------------------------------


def _in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _until(condition: Callable[[], object]) -> None:
    """Look until the condition holds; the table has no event for what is looked at."""
    event = threading.Event()
    for _ in range(int(DEADLINE_S * 1000)):
        if condition():
            return
        event.wait(0.001)
    pytest.fail("never happened")


def test_a_wait_ends_when_memory_comes_back() -> None:
    """Invariant 7: a job that waits says whom for, and goes on, in the pool, when the other frees."""
    with tenants(8, 2, claims=False, wait_limit_s=DEADLINE_S) as (a, b):
        block = a.allocate(8 * GRANULE_BYTES)
        thread = _in_thread(lambda: b.allocate(2 * GRANULE_BYTES))
        _until(lambda: b.job["waiting_threads"] == 1)
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
        thread = _in_thread(lambda: b.allocate(4 * granules * GRANULE_BYTES))
        _until(lambda: b.job["waiting_threads"] == 1)
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
            _in_thread(lambda tenant=tenant, n=n: tenant.allocate(n * GRANULE_BYTES)) for tenant, n in ((a, 3), (b, 2))
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
        threads = [_in_thread(lambda t=t: t.allocate(2 * GRANULE_BYTES)) for t in (a, a, b, b)]
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
        threads = [_in_thread(lambda t=t: t.allocate(3 * GRANULE_BYTES)) for t in (a, b)]
        _until(lambda: len(a.live) == 2 or len(b.live) == 2)
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


@pytest.mark.parametrize("field", ["spill_fd", "spill_limit_bytes"])
def test_without_a_next_tier_the_limit_is_out_of_memory(field: str) -> None:
    """Where no file can be had, or no more of it, a wait that reaches its limit is refused and reported."""
    with tenants(8, 2, claims=False, wait_limit_s=0.01) as (a, b):
        a.allocate(8 * GRANULE_BYTES)
        b.record[0][field] = -1
        assert b.allocate(GRANULE_BYTES) == allocator.OUT_OF_MEMORY
        assert b.job["oom_count"] == 1
        a.free_all()
        assert b.allocate(GRANULE_BYTES) > 0


def test_the_next_tier_gives_its_disk_blocks_back() -> None:
    """What is freed in the next tier leaves the file; the file never exceeds its limit."""
    with tenants(4, 2, claims=False, wait_limit_s=0.002) as (a, b):
        a.allocate(4 * GRANULE_BYTES)
        descriptor = int(b.record[0]["spill_fd"])
        while (address := b.allocate(GRANULE_BYTES)) > 0:
            assert b.is_spilled(address)
        assert len(b.live) * GRANULE_BYTES == b.record[0]["spill_limit_bytes"]
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
        thread = _in_thread(lambda: a.allocate(6 * GRANULE_BYTES))
        _until(lambda: a.job["waiting_threads"] == 1)
        for _ in range(50):
            b.free(b.allocate(GRANULE_BYTES))
        a.free(block)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert a.job["oom_count"] == 0


# -- construction ---------------------------------------------------------------------------------------------------


def test_a_threshold_below_a_granule_is_refused() -> None:
    """Blocks are found by granule, so nothing smaller may be in the pool."""
    with make_pool(4) as pool, members.join(pool) as member, pytest.raises(ConfigError, match="64KiB"):
        Heap(member, np.zeros(1, HEAP), threshold_bytes=GRANULE_BYTES - 1)


def test_a_missing_spill_directory_means_no_next_tier(tmp_path: Path) -> None:
    """A directory that cannot be written costs the next tier, not the job."""
    with make_pool(4) as pool, members.join(pool) as member:
        record = np.zeros(1, HEAP)
        Heap(member, record, spill_directory=str(tmp_path / "none")).close()
        assert record[0]["spill_fd"] == -1


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
        assert record[0]["spill_fd"] == -1
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - names, not paths
        assert list(tmp_path.iterdir()) == []


# -- threads --------------------------------------------------------------------------------------------------------

SLOTS_PER_THREAD = 24


@compiled
def hammer(heap: Record, seed: int, rounds: int, most_bytes: int, blocks: Record, faults: Record) -> None:
    """Allocate and free at random without Python; a pattern in each block is checked before it is freed."""
    state = seed
    for _ in range(rounds):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF
        i = (state >> 33) % len(blocks)
        address, size = blocks[i, 0], blocks[i, 1]
        if address > 0:
            words = size >> 3
            view = array_at(address, words, _I64)
            step = max(1, words >> 4)
            for w in range(0, words - 1, step):
                if view[w] != address ^ w ^ size:
                    faults[0] += 1
            if view[words - 1] != address ^ size:
                faults[0] += 1
            allocator.free(heap, address)
            blocks[i, 0] = 0
        else:
            size = 65536 + (((state >> 16) % most_bytes) & ~7)
            address = allocator.allocate(heap, size, 64)
            if address > 0:
                words = size >> 3
                view = array_at(address, words, _I64)
                step = max(1, words >> 4)
                for w in range(0, words - 1, step):
                    view[w] = address ^ w ^ size
                view[words - 1] = address ^ size
                blocks[i, 0] = address
                blocks[i, 1] = size
                faults[1] += 1
    for i in range(len(blocks)):
        if blocks[i, 0] > 0:
            allocator.free(heap, blocks[i, 0])


def _hammer_all(tenants: list[Tenant], threads_each: int, rounds: int, most_bytes: int) -> None:
    faults = [np.zeros(2, "i8") for _ in range(threads_each * len(tenants))]

    def start(tenant: Tenant, seed: int, fault: Record) -> threading.Thread:
        blocks = np.zeros((SLOTS_PER_THREAD, 2), "i8")
        return _in_thread(lambda: hammer(tenant.record[0], seed, rounds, most_bytes, blocks, fault))

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


# -- iterations without marks ---------------------------------------------------------------------------------------


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
        _repeat(record, np.array(sizes, "i8"), rounds)
        assert record["tracker"]["n"] < 1 << 16
        assert record["tracker"]["gap"] == len(sizes)
        assert tenant.job["iteration"] == before + rounds


@compiled
def _repeat(heap: Record, sizes: Record, rounds: int) -> None:
    """Allocate all sizes and free them, again and again."""
    addresses = np.zeros(len(sizes), np.int64)
    for _ in range(rounds):
        for i in range(len(sizes)):
            addresses[i] = allocator.allocate(heap, sizes[i], 64)
        for i in range(len(sizes)):
            allocator.free(heap, addresses[i])


def test_a_second_thread_at_a_boundary_waits_along() -> None:
    """When two threads of a job mark at once, one iteration ends and both go on when it is admitted."""
    with make_pool(4, region_bytes=GRANULE_BYTES, unasked=False) as pool, Tenant(pool) as tenant:
        threads = [_in_thread(tenant.mark) for _ in range(2)]
        _until(lambda: tenant.job["iteration"] >= 1)
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
        assert a.allocate(17 * GRANULE_BYTES) == allocator.OUT_OF_MEMORY
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
