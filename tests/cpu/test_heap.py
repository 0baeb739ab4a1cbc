"""The allocator against a model, with patterns in every block, and case by case."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.heap_machine import HeapMachine
from cpu.support.members import Tenant, check_counters, free_list, job_of, tenants
from hypothesis import settings

from zico.heap import allocator
from zico.heap.layout import GRANULE_BYTES, Arena
from zico.pool import results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB, MIB = 1 << 10, 1 << 20
REGIONS_BYTES = 16 * GRANULE_BYTES
PAGES = REGIONS_BYTES // mmap.PAGESIZE


HeapMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)

TestHeap = HeapMachine.TestCase


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


def test_nothing_is_reserved_for_the_bookkeeping(tenant: Tenant) -> None:
    """The kernel charges the heap's arrays when they are touched, unless it is strict."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("the kernel ignores MAP_NORESERVE where it is strict (vm.overcommit_memory=2)")
    array = tenant.heap.zeros(np.dtype("u1"), 1 << 30)
    assert {"nr"} == {"nr", "ac"} & flags_at(array.ctypes.data)


def flags_at(address: int) -> set[str]:
    """Return the kernel's flags of the mapping at an address (proc_pid_smaps(5))."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for mapping in filter(None, mappings):
        start, end = (int(number, 16) for number in mapping.split()[0].split("-"))
        if start <= address < end:
            return set(mapping.partition("VmFlags:")[2].split())
    return set()


def test_the_steady_state_maps_nothing(tenant: Tenant) -> None:
    """A second identical iteration gets the same regions in the same slots, without a system call."""
    maps = []
    for _ in range(4):
        blocks = [tenant.allocate(size) for size in (3 * GRANULE_BYTES, GRANULE_BYTES + 640, 5 * GRANULE_BYTES)]
        for address in blocks:
            tenant.free(address)
        maps.append(int(tenant.job["maps"]))
    assert maps[-1] == maps[-2]


def test_a_region_from_another_job_is_mapped_with_its_pages() -> None:
    """Nobody faults for them; a region that no job has had is resident when it is touched, and not before."""
    with tenants(16, 2, claims=False) as (before, after):
        address = allocator.allocate(before.record[0], REGIONS_BYTES, 64)
        assert before.member.physical_bytes() == 0
        assert faults_of_writing(address, REGIONS_BYTES) >= PAGES
        allocator.free(before.record[0], address)
        address = allocator.allocate(after.record[0], REGIONS_BYTES, 64)
        assert faults_of_writing(address, REGIONS_BYTES) < PAGES // 8


def faults_of_writing(address: int, size_bytes: int) -> int:
    """Write to memory; returns how many faults this thread had."""
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(address, 1, size_bytes)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults


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
    assert places[2] == [Arena.EXTRA, Arena.LONG, *[Arena.SHORT] * 10]


def test_what_persists_needs_no_region_beside_small_tensors_of_unknown_lifetime() -> None:
    """A small tensor that is replaced in every iteration lies in the regions of the weights, which are held anyway."""
    with tenants(8, region_bytes=16 * GRANULE_BYTES) as (tenant,):
        weights = [tenant.allocate(2 * GRANULE_BYTES) for _ in range(5)]
        kept = tenant.allocate(GRANULE_BYTES)
        for _ in range(4):
            tenant.mark()
            tenant.free(kept)
            kept = tenant.allocate(GRANULE_BYTES)
            assert min([*weights, kept]) > 0
        assert tenant.job["held"] == 1


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
    assert tenant.allocate(whole + 1) == results.NEVER_FITS
    assert [int(tenant.job[f"oom_{field}"]) for field in ("request_bytes", "held", "count")] == [whole + 64, 0, 1]
    small = tenant.allocate(GRANULE_BYTES)
    assert tenant.allocate(whole) == results.NEVER_FITS
    assert [int(tenant.job[f"oom_{field}"]) for field in ("request_bytes", "held", "count")] == [whole, 1, 2]
    tenant.free(small)
    assert tenant.allocate(whole) > 0


@pytest.mark.parametrize(
    "size_bytes", [65 * GRANULE_BYTES, 1 << 30, 1 << 46, (1 << 62) + 1, (1 << 63) - 65, (1 << 63) - 1]
)
def test_a_request_larger_than_an_arena_is_out_of_memory_too(tenant: Tenant, size_bytes: int) -> None:
    """Invariant 1: what exceeds the budget is refused however large it is; it never goes to the real allocator."""
    assert tenant.allocate(size_bytes) == results.NEVER_FITS
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
            assert address == results.NOT_SERVED or address % alignment == 0


def test_a_job_that_left_is_served_elsewhere_and_may_still_free(tenant: Tenant) -> None:
    """After its connection is gone a job's requests go to the real allocator at once; its frees work."""
    address = tenant.allocate(GRANULE_BYTES)
    tenant.member.mark_leaving(job_of(tenant.member))
    assert tenant.allocate(GRANULE_BYTES) == results.NOT_SERVED
    tenant.mark()
    tenant.free(address)
    assert tenant.job["held"] == 0


# -- mapping fails ---------------------------------------------------------------------------------


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
    assert tenant.allocate(4 * GRANULE_BYTES) == results.NEVER_FITS
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
