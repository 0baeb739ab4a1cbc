"""Heaps on a device that lags behind: no kernel ever sees another's bytes, whoever frees, takes over, or dies."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from cpu.support.device_jobs import DEADLINE_S, KIB, MIB, REGION_BYTES, jobs, train_beside
from cpu.support.members import counters, issued
from cpu.support.software_device import INVALID_HANDLE, SoftwareDevice
from cpu.support.timeline_machine import HeapTimelineMachine
from hypothesis import settings

from zico.heap import allocator
from zico.heap.cuda import on_stream
from zico.heap.cuda.layout import CHUNK_BYTES, MAX_DEFERRED

HeapTimelineMachine.TestCase.settings = settings(max_examples=14, stateful_step_count=50, deadline=None)
TestHeapTimeline = HeapTimelineMachine.TestCase


@pytest.fixture
def device() -> SoftwareDevice:
    """Make a device."""
    return SoftwareDevice(INVALID_HANDLE)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Compile what jobs call, so that no test's deadline pays for it."""
    device = SoftwareDevice()
    with jobs(device, 4, 1) as (job,):
        for size in (100, 2 * MIB):
            tensor = job.allocate(size)
            assert tensor is not None
            job.use_on(tensor, 1)
            job.free(tensor)
            allocator.mark(job.record[0])
        job.settle()


def test_a_region_is_handed_over_with_no_cpu_waiting(device: SoftwareDevice) -> None:
    """Invariant 2: B gets what A has freed although A's kernels have not begun; B's kernels run after A's."""
    with jobs(device, 4, 2) as (a, b):
        order: list[str] = []
        first = a.allocate(4 * MIB)
        device.launch(a.streams[0], lambda: order.append("a"))
        a.free(first)
        second = b.allocate(4 * MIB)
        assert second is not None
        device.launch(b.streams[0], lambda: order.append("b"))
        assert device.waits == 1
        assert not device.step(b.streams[0])
        device.drain()
        assert order == ["a", "b"]
        assert not a.faults + b.faults
        b.free_all()


def test_a_stream_uses_again_what_was_freed_on_it_without_a_wait(device: SoftwareDevice) -> None:
    """On one stream memory goes round without waits, marks passed or not, however far ahead the processor is."""
    sizes = (MIB, 2 * MIB, 100 * KIB)
    with jobs(device, 4, 1) as (job,):
        for n in range(60):
            for tensor in [job.allocate(size) for size in sizes]:
                assert tensor is not None
                job.free(tensor)
            allocator.mark(job.record[0])
            if n < 10:  # until every class is known, and lies where it is going to stay
                device.drain()
        assert device.waits == 0
        maps = int(job.job["maps"])
        job.settle()
        job.check_empty()
        assert not job.faults
        assert maps < 10 * len(sizes)


def test_streams_of_a_job_do_not_share_ranges(device: SoftwareDevice) -> None:
    """What is freed on one stream is another's only behind a wait on the device."""
    with jobs(device, 2, 1) as (job,):
        first = job.allocate(2 * MIB, 0)
        assert first is not None
        job.free(first)
        second = job.allocate(2 * MIB, 1)
        assert second is not None
        assert second.address != first.address
        assert device.waits == 1
        device.drain()
        assert not job.faults


def test_a_slot_is_mapped_anew_only_when_its_work_is_done(device: SoftwareDevice) -> None:
    """Before a slot gets another region the job's own kernels on the old one must have run; an allocation waits."""
    with jobs(device, 2, 2, wait_limit_s=DEADLINE_S) as (a, b):
        first = a.allocate(MIB)
        assert first is not None
        a.free(first)
        kept = b.allocate(2 * MIB)  # takes that region, too
        assert kept is not None
        device.queues[b.streams[0]].clear()
        for stream in b.streams:
            device.launch(stream, lambda: None)
        b.forget(kept)
        on_stream.free_on(b.record[0], kept.address, b.streams[0])
        swap = b.allocate(MIB)
        assert swap is not None
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(a.allocate(MIB)), daemon=True)
        thread.start()
        thread.join(0.05)
        moved = bool(got) and a.job["maps"] > 1
        assert not moved, "the kernel of its first tensor has not run"
        while device.step_any(0):
            pass
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        device.drain()
        assert not a.faults
        for tensor in list(b.live):
            b.forget(tensor)


def test_marks_are_spaced_and_never_missing_when_somebody_waits(device: SoftwareDevice) -> None:
    """With a spacing a mark comes after so many bytes, but at once when anybody waits, at boundaries, at the end."""
    with jobs(device, 16, 2, spacing_bytes=4 * REGION_BYTES) as (a, b):
        made = [a.allocate(MIB) for _ in range(12)]
        for n, tensor in enumerate(made[:9]):
            assert tensor is not None
            a.free(tensor)
            assert device.marks == (n + 1) // 4
        assert b.allocate(16 * MIB) is None
        on_stream.settle(a.record[0])
        assert device.marks == 3
        a.pool.header["waiters"] = 1
        assert made[9] is not None
        a.free(made[9])
        a.pool.header["waiters"] = 0
        assert device.marks == 4
        assert made[10] is not None
        a.free(made[10])
        assert device.marks == 4
        allocator.mark(a.record[0])
        assert device.marks == 5
        a.free_all()
        assert device.marks == 5
        device.drain()
        assert a.allocate(16 * MIB, 1) is not None, "before it waits itself it marks"
        assert device.marks == 6


def test_a_freed_tensor_waits_for_the_streams_that_used_it(device: SoftwareDevice) -> None:
    """A tensor recorded on another stream is used again only when that stream has come by; nobody waits for it."""
    with jobs(device, 4, 1) as (job,):
        for size in (100, 2 * MIB):
            tensor = job.allocate(size)
            assert tensor is not None
            job.use_on(tensor, 1)
            job.free(tensor)
            assert job.record[0]["streams"]["n_deferred"] == 1
            while device.step(job.streams[0]):
                pass
            other = job.allocate(size)
            assert other is not None
            assert other.address != tensor.address
            device.drain()
            job.free(other)
            assert job.record[0]["streams"]["n_deferred"] == 0
            again = job.allocate(size)
            assert again is not None
            assert again.address in (tensor.address, other.address)
            job.free(again)
            device.drain()
        job.settle()
        job.check_empty()
        assert not job.faults


def test_a_tensor_freed_on_another_stream_waits_for_it(device: SoftwareDevice) -> None:
    """A free on a stream that is not the tensor's waits for what that stream was given."""
    with jobs(device, 4, 1) as (job,):
        job.allocate(1, 1)
        tensor = job.allocate(MIB)
        assert tensor is not None
        job.forget(tensor)
        device.launch(job.streams[1], lambda: None)
        on_stream.free_on(job.record[0], tensor.address, job.streams[1])
        assert job.record[0]["streams"]["n_deferred"] == 1
        job.free_all()
        job.settle()
        job.check_empty()


def test_a_job_that_stands_still_keeps_nothing_it_has_freed(device: SoftwareDevice) -> None:
    """After an iteration's end a neighbour can have everything, though the job and its device do nothing any more."""
    with jobs(device, 10, 2) as (a, b):
        a.allocate(1, 1)
        for size in (100, 200, MIB, 3 * MIB // 2):
            tensor = a.allocate(size)
            assert tensor is not None
            a.use_on(tensor, 1)
            a.free(tensor)
        assert a.record[0]["streams"]["n_deferred"] == 4
        a.free_all()
        before = device.waits
        allocator.mark(a.record[0])
        assert device.waits == before + 1, "for the last of the four marks"
        assert a.job["held"] == 0
        assert b.allocate(10 * MIB) is not None
        device.drain()
        b.free_all()
        for job in (a, b):
            job.settle()
            job.check_empty()
            assert not job.faults


def test_a_request_that_only_lacks_the_jobs_own_frees_has_its_stream_wait(device: SoftwareDevice) -> None:
    """Nobody's processor waits for a tensor that another stream still uses; a device that refuses ends the request."""
    with jobs(device, 4, 1, wait_limit_s=0.01) as (job,):
        for refuses in (True, False):
            tensor = job.allocate(3 * MIB)
            assert tensor is not None
            job.use_on(tensor, 1)
            job.free(tensor)
            device.refuses = lambda kind, _stream, refuses=refuses: refuses and kind == "wait"  # type: ignore[misc]
            assert (job.allocate(2 * MIB) is None) == refuses
            assert job.job["oom_count"] == 1
            device.drain()
        job.free_all()
        job.settle()
        job.check_empty()
        assert not job.faults


def test_a_second_free_is_counted_and_harmless(device: SoftwareDevice) -> None:
    """A tensor that is freed, or waits to be, is no tensor: freeing and recording it again changes nothing."""
    with jobs(device, 8, 1) as (job,):
        for size in (100, MIB):
            keeps, tensor = job.allocate(size), job.allocate(size)
            assert tensor is not None
            assert keeps is not None
            job.use_on(tensor, 1)
            job.free(tensor)
            for address in (tensor.address, tensor.address + 8, keeps.address + 512 * size // MIB + 8):
                on_stream.free_on(job.record[0], address, tensor.stream)
                on_stream.record_stream(job.record[0], address, job.streams[1])
            device.drain()
            on_stream.settle(job.record[0])
            on_stream.free_on(job.record[0], tensor.address, tensor.stream)
            assert job.record[0]["bad_frees"] == 4
            job.record[0]["bad_frees"] = 0
        for outside in (job.heap.base - 1, job.heap.base + int(job.record[0]["window_bytes"])):
            on_stream.free_on(job.record[0], outside, 1)
        assert job.record[0]["bad_frees"] == 2
        job.record[0]["bad_frees"] = 0
        job.free_all()
        job.settle()
        job.check_empty()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_full_list_of_waiting_frees_is_handed_over(device: SoftwareDevice, *, refuses: bool) -> None:
    """Where no more frees can wait in the list the tensors' own stream waits, or if it cannot, the processor."""
    with jobs(device, 8, 1) as (job,):
        tensors = [job.allocate(100) for _ in range(MAX_DEFERRED + 1)]
        for tensor in tensors:
            assert tensor is not None
            job.use_on(tensor, 1)
        device.refuses = lambda kind, _stream: refuses and kind == "wait"
        job.free_all()
        assert device.waits == int(not refuses)
        assert device.synchronized == int(refuses)
        job.settle()
        job.check_empty()
        assert not job.faults


@pytest.mark.parametrize("what", ["mark", "wait"])
def test_a_refused_call_of_the_device_loses_nothing(device: SoftwareDevice, what: str) -> None:
    """If the device refuses a mark nobody gets the region before the next one; if it refuses a wait, the allocation."""
    with jobs(device, 4, 2) as (a, b):
        tensor = a.allocate(4 * MIB)
        assert tensor is not None
        if what == "mark":
            device.refuses = lambda kind, _stream: kind == "mark"
            a.free(tensor)
            assert a.record[0]["streams"]["failures"] == 1
            assert b.allocate(MIB) is None
            device.refuses = lambda _kind, _stream: False
            on_stream.settle(a.record[0])
        else:
            a.free(tensor)
            device.refuses = lambda kind, _stream: kind == "wait"
            assert b.allocate(MIB) is None
            assert b.job["held"] == 0
            assert b.member.member[0]["n_waits"] == 0
            device.refuses = lambda _kind, _stream: False
        assert b.allocate(4 * MIB) is not None
        device.drain()
        assert not b.faults
        b.free_all()


def test_small_tensors_are_units_of_a_chunk(device: SoftwareDevice) -> None:
    """Small tensors of one size lie side by side in a chunk; each size and each stream has chunks of its own."""
    with jobs(device, 8, 1) as (job,):
        made = [job.allocate(1000) for _ in range(2000)]
        addresses = sorted(tensor.address for tensor in made if tensor)
        assert len(addresses) == 2000
        chunks = {address // CHUNK_BYTES for address in addresses}
        assert len(chunks) == 2
        assert np.diff(addresses).min() == 1024
        assert job.job["live_bytes"] == 2000 * 1024
        assert job.job["held"] == 2
        elsewhere = [job.allocate(1000, 1), job.allocate(3000)]
        assert all(t and t.address // CHUNK_BYTES not in chunks for t in elsewhere)
        for tensor in made[:1500]:
            assert tensor is not None
            job.free(tensor)
        assert job.job["held"] == 3, "one of the two chunks is empty"
        assert job.allocate(1000) is not None
        assert job.job["held"] == 3
        job.free_all()
        job.settle()
        job.check_empty()
        assert not job.faults


def test_without_chunk_records_small_tensors_are_blocks(device: SoftwareDevice) -> None:
    """When there is no room for one more chunk a small tensor gets a granule, and everything is right."""
    with jobs(device, 4, 1) as (job,):
        job.record[0]["slab"]["n_chunks"] = 1 << 14
        made = [job.allocate(100) for _ in range(3)]
        assert len({tensor.address >> 16 for tensor in made if tensor}) == 3
        job.record[0]["slab"]["n_chunks"] = 0
        job.free_all()
        job.settle()
        job.check_empty()


def test_two_jobs_train_beside_each_other_on_a_device_that_lags(device: SoftwareDevice) -> None:
    """Invariants 2 and 7: two jobs, each in its thread, the device in a third: no kernel finds another's bytes."""
    with jobs(device, 10, 2, wait_limit_s=DEADLINE_S) as tenants:
        train_beside(tenants, device)
        for tenant in tenants:
            tenant.settle()
        for tenant in tenants:
            tenant.check_empty()
            assert not tenant.faults
        assert device.waits > 10, "regions have changed hands ahead of the device"
        assert (issued(tenants[0].pool) == counters(tenants[0].pool)).all()
