"""Jobs of a pool that isolates them, on a device that lags behind."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.device_jobs import DEADLINE_S, MIB, jobs, make_device_pool, train_beside
from cpu.support.members import check_counters, counters, is_mapped, job_of, join
from cpu.support.software_device import INVALID_HANDLE, SoftwareDevice
from cpu.support.timeline_machine import HeapTimelineMachine
from hypothesis import settings
from hypothesis.stateful import invariant

from zico.base.errors import ConfigError
from zico.heap.build import Heap
from zico.heap.cuda import on_stream
from zico.heap.cuda.layout import GUARD
from zico.heap.cuda.timeline import Timeline
from zico.heap.layout import HEAP
from zico.pool.fences import VALUE_BITS
from zico.pool.layout import NOBODY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from cpu.support.device_tenant import DeviceTenant, Tensor


def guards(tenant: DeviceTenant) -> Any:  # noqa: ANN401 - an array of GUARD
    """View the guards of a tenant's slots."""
    return next(array for _, array in tenant.heap._keep if array.dtype == GUARD)


def leaving(tenant: DeviceTenant) -> list[int]:
    """Return the slots whose mappings are to go."""
    address, n = (int(tenant.record[0]["scrubbing"][name]) for name in ("leaving_address", "n_leaving"))
    array = next(array for _, array in tenant.heap._keep if array.ctypes.data == address)
    return [int(slot) for slot in array[:n]]


def check_mappings(tenant: DeviceTenant) -> None:
    """A free slot is mapped until its fence has passed, and is then in the list of those to be unmapped, once."""
    slots, guard, listed = tenant.heap.slots, guards(tenant), leaving(tenant)
    pairs, values = guard["fence"] >> VALUE_BITS, guard["fence"] & ((1 << VALUE_BITS) - 1)
    behind = counters(tenant.member).reshape(-1)[pairs] < values
    assert (slots["mapped"][behind] != NOBODY).all(), "unmapped before the device had done its work"
    free = np.flatnonzero((slots["live"] == 0) & (slots["mapped"] != NOBODY))
    assert len(set(listed)) == len(listed)
    assert set(free) <= set(listed)
    assert guard["leaves"][free].all()
    assert not guard["leaves"][slots["live"] > 0].any()
    assert guard["listed"].sum() == len(listed)
    assert guard["listed"][listed].all()


class IsolatedTimelineMachine(HeapTimelineMachine):
    """The machine of heaps on a device, in a pool that isolates jobs."""

    isolate = True

    @invariant()
    def unmaps_in_time(self) -> None:
        """Invariant 11: mappings of free slots stay until the device has done its work, and are not forgotten."""
        for tenant in getattr(self, "tenants", []):
            check_mappings(tenant)

    def teardown(self) -> None:
        """When the device has done everything and a job has looked, nothing is mapped any more."""
        tenants = getattr(self, "tenants", [])
        for tenant in tenants:
            tenant.free_all()
            on_stream.settle(tenant.record[0])
        for tenant in tenants:
            tenant.settle()
            assert (tenant.heap.slots["mapped"] == NOBODY).all()
        super().teardown()


IsolatedTimelineMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
TestIsolatedTimeline = IsolatedTimelineMachine.TestCase


@pytest.fixture
def device() -> SoftwareDevice:
    """Make a device."""
    return SoftwareDevice(INVALID_HANDLE)


@pytest.fixture
def pair(device: SoftwareDevice) -> Iterator[list[DeviceTenant]]:
    """Make two jobs in a pool of four regions that isolates them."""
    with jobs(device, 4, 2, isolate=True) as made:
        yield made


def given(tensor: Tensor | None) -> Tensor:
    """Return a tensor that there must be."""
    assert tensor is not None
    return tensor


def run(device: SoftwareDevice, stream: int) -> None:
    """Let a stream do all that it can."""
    while device.step(stream):
        pass


def test_a_region_is_scrubbed_behind_the_wait_and_before_the_owners_first_kernel(
    device: SoftwareDevice, pair: list[DeviceTenant]
) -> None:
    """Invariant 11: B's kernel finds zeros though A's had not begun when B got the memory; no processor waited."""
    a, b = pair
    first = given(a.allocate(4 * MIB))
    a.free(first)
    second = given(b.allocate(4 * MIB))
    assert (device.waits, device.scrubs) == (1, 8), "A's regions were nobody's, then A's"
    run(device, b.streams[0])
    assert not second.written, "it waits for A"
    run(device, a.streams[0])
    run(device, b.streams[0])
    assert second.written
    assert not a.faults + b.faults
    b.free(second)


def test_a_mapping_stays_until_the_device_has_done_the_jobs_work(
    device: SoftwareDevice, pair: list[DeviceTenant]
) -> None:
    """Invariant 11: what is freed stays mapped for the kernels to come, and is unmapped at a call after them."""
    a, _ = pair
    first, beside = given(a.allocate(2 * MIB)), given(a.allocate(MIB))
    a.free(first)
    on_stream.settle(a.record[0])
    assert is_mapped(first.address)
    run(device, a.streams[0])
    assert is_mapped(first.address), "nobody has looked yet"
    a.free(beside)
    assert not is_mapped(first.address)
    assert not is_mapped(first.address + MIB)
    assert is_mapped(beside.address)
    run(device, a.streams[0])
    on_stream.settle(a.record[0])
    assert not is_mapped(beside.address)
    assert not a.faults


def test_what_is_used_again_before_it_goes_stays_mapped(device: SoftwareDevice, pair: list[DeviceTenant]) -> None:
    """A job that gets its slot and region back maps nothing and scrubs nothing, however often the list is looked at."""
    a, _ = pair
    a.free(given(a.allocate(2 * MIB)))
    scrubs, maps = device.scrubs, int(a.job["maps"])
    for _ in range(5):
        tensor = given(a.allocate(2 * MIB))
        device.drain()
        on_stream.settle(a.record[0])
        assert is_mapped(tensor.address)
        a.free(tensor)
    assert (device.scrubs, int(a.job["maps"])) == (scrubs, maps)
    device.drain()
    on_stream.settle(a.record[0])
    again = given(a.allocate(2 * MIB))
    assert (device.scrubs, int(a.job["maps"])) == (scrubs, maps + 2), "unmapped in between, but its own regions"
    device.drain()
    a.free(again)
    assert not a.faults


def test_nobody_finds_what_a_dead_job_wrote(device: SoftwareDevice, pair: list[DeviceTenant]) -> None:
    """Invariants 5 and 11: B gets A's memory behind A's work, dies, and A finds nothing of what B had written."""
    a, b = pair
    a.free(given(a.allocate(4 * MIB)))
    given(b.allocate(4 * MIB))
    device.drain()
    b.die()
    before = device.scrubs
    tensor = given(a.allocate(4 * MIB))
    assert device.scrubs == before + 4
    device.drain()
    assert not a.faults + b.faults
    a.free(tensor)


@pytest.mark.parametrize("scrub", [1, 2, 4])
def test_a_refused_scrub_refuses_the_tensor_and_harms_nobody(
    device: SoftwareDevice, pair: list[DeviceTenant], scrub: int
) -> None:
    """Invariant 11: without scrubbing there is no tensor; what was scrubbed in vain reaches no later owner."""
    a, b = pair
    a.free(given(a.allocate(4 * MIB)))
    before = device.scrubs
    device.refuses = lambda kind, _stream: kind == "scrub" and device.scrubs >= before + scrub - 1
    assert b.allocate(4 * MIB) is None
    assert (b.job["held"], device.synchronized > 0) == (0, True)
    assert not device.queues[b.streams[0]], "nothing of it is left to come"
    device.refuses = lambda _kind, _stream: False
    mine = given(a.allocate(4 * MIB))
    device.drain()
    a.free(mine)
    theirs = given(b.allocate(4 * MIB))
    device.drain()
    assert not a.faults + b.faults
    b.free(theirs)
    for job in pair:
        job.settle()
        check_mappings(job)
        job.check_empty()
        assert (job.heap.slots["mapped"] == NOBODY).all()
    check_counters(a.pool)


def test_a_refused_wait_leaves_no_mapping(device: SoftwareDevice, pair: list[DeviceTenant]) -> None:
    """Invariant 11: what was mapped for a grant that came to nothing is unmapped again."""
    a, b = pair
    a.free(given(a.allocate(4 * MIB)))
    device.refuses = lambda kind, _stream: kind == "wait"
    assert b.allocate(MIB) is None
    assert b.job["held"] == 0
    assert b.job["maps"] > 0
    on_stream.settle(b.record[0])
    assert (b.heap.slots["mapped"] == NOBODY).all()
    device.refuses = lambda _kind, _stream: False
    device.drain()


def test_a_device_that_cannot_scrub_is_refused() -> None:
    """A pool that isolates jobs takes none whose device has no way to scrub."""
    with make_device_pool(4, isolate=True) as pool, join(pool) as member:
        counters_address = int(member.member[0]["counters_address"])
        with pytest.raises(ConfigError, match="cannot scrub"):
            Heap(member, np.zeros(1, HEAP), timeline=Timeline(1, 1, 1, counters_address))


def test_two_jobs_train_isolated_from_each_other(device: SoftwareDevice) -> None:
    """Invariants 2, 7 and 11: two jobs in threads, the device in a third: nobody finds or reaches another's bytes."""
    before = threading.active_count()
    with jobs(device, 10, 2, isolate=True, wait_limit_s=DEADLINE_S) as tenants:
        train_beside(tenants, device)
        for tenant in tenants:
            tenant.settle()
        for tenant in tenants:
            tenant.check_empty()
            assert not tenant.faults
            assert (tenant.heap.slots["mapped"] == NOBODY).all()
        assert job_of(tenants[0].member) != job_of(tenants[1].member)
        assert device.scrubs > 10, "regions have changed hands"
        assert threading.active_count() == before
