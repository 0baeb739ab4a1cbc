"""When a job's streams are marked, and what becomes of more streams than there are slots."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from cpu.support.device_jobs import DEADLINE_S, MIB, jobs
from cpu.support.device_tenant import DeviceTenant, Tensor
from cpu.support.software_device import INVALID_HANDLE, SoftwareDevice
from support.harness import until

from zico.base.compiled import compiled
from zico.heap import allocator
from zico.heap.cuda import on_stream, timeline
from zico.heap.cuda.streams import stream_at
from zico.pool.layout import STREAMS

ALONE_BYTES = 8 * MIB


@pytest.fixture
def device() -> SoftwareDevice:
    """Make a device."""
    return SoftwareDevice(INVALID_HANDLE)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Compile what jobs call, so that no test's deadline pays for it."""
    device = SoftwareDevice()
    with jobs(device, 4, 1) as (job,):
        tensor = allocated(job)
        job.use_on(tensor, 1)
        job.free(tensor)
        allocator.mark(job.record[0])
        job.settle()


def allocated(job: DeviceTenant, size_bytes: int = MIB, stream: int = 0) -> Tensor:
    """Allocate what there is room for."""
    tensor = job.allocate(size_bytes, stream)
    assert tensor is not None
    return tensor


def finish(job: DeviceTenant) -> None:
    """Free everything; nothing is left, and no kernel has found another's bytes."""
    job.free_all()
    job.settle()
    job.check_empty()
    assert not job.faults


# -- marks of a job that is alone ------------------------------------------------------------------


def test_a_job_alone_marks_by_bytes(device: SoftwareDevice) -> None:
    """Nobody else needs the marks: one comes every ``alone_bytes``, and one at the boundary."""
    with jobs(device, 64, 1, alone_bytes=ALONE_BYTES) as (job,):
        made = [allocated(job) for _ in range(20)]
        for n, tensor in enumerate(made, 1):
            job.free(tensor)
            assert device.marks == n // 8
        allocator.mark(job.record[0])
        assert device.marks == 3
        allocator.mark(job.record[0])
        assert device.marks == 3
        finish(job)


def test_a_greater_spacing_holds_alone_too(device: SoftwareDevice) -> None:
    """A spacing that is greater than what is the rule alone is the one that counts."""
    with jobs(device, 64, 1, alone_bytes=2 * MIB, spacing_bytes=4 * MIB) as (job,):
        made = [allocated(job) for _ in range(8)]
        for n, tensor in enumerate(made, 1):
            job.free(tensor)
            assert device.marks == n // 4
        finish(job)


def test_with_a_second_job_every_release_is_marked(device: SoftwareDevice) -> None:
    """With no spacing beside others, the first release after another job has come is marked, and all before it."""
    with jobs(device, 64, 1, alone_bytes=ALONE_BYTES) as (first,):
        made = [allocated(first) for _ in range(6)]
        for tensor in made[:3]:
            first.free(tensor)
        assert device.marks == 0
        with DeviceTenant(first.pool, device, wait_limit_s=0.002) as second:
            first.free(made[3])
            assert device.marks == 1
            first.free(made[4])
            assert device.marks == 2
            assert len([allocated(second) for _ in range(63)]) == 63
            finish(second)
        finish(first)


def test_an_allocation_marks_for_who_has_come(device: SoftwareDevice) -> None:
    """A second job gets what was freed without a mark after the first one's next allocation."""
    with jobs(device, 16, 1, alone_bytes=ALONE_BYTES) as (first,):
        for tensor in [allocated(first) for _ in range(4)]:
            first.free(tensor)
        assert device.marks == 0
        with DeviceTenant(first.pool, device, wait_limit_s=0.002) as second:
            assert second.allocate(15 * MIB) is None
            allocated(first, 100)
            assert device.marks == 1
            allocated(second, 15 * MIB)
            finish(second)
        finish(first)


@pytest.mark.parametrize("who", ["waiters", "boundary_waiters"])
def test_a_waiter_is_seen_at_the_next_allocation(device: SoftwareDevice, who: str) -> None:
    """Invariant 7: while anybody waits, an allocation marks what was freed, and so does a release."""
    with jobs(device, 64, 1, alone_bytes=ALONE_BYTES) as (job,):
        made = [allocated(job) for _ in range(3)]
        job.free(made[0])
        job.pool.header[who] = 1
        allocated(job, 100)
        assert device.marks == 1
        job.free(made[1])
        assert device.marks == 2
        job.pool.header[who] = 0
        job.free(made[2])
        assert device.marks == 2
        finish(job)


def test_at_most_half_of_what_is_free_is_unmarked(device: SoftwareDevice) -> None:
    """Where few regions are free the job marks for its own other streams and slots."""
    with jobs(device, 8, 1, alone_bytes=ALONE_BYTES) as (job,):
        found = []
        for tensor in [allocated(job) for _ in range(8)]:
            job.free(tensor)
            found.append(device.marks)
        assert found == [1, 2, 3, 3, 4, 4, 4, 4]
        finish(job)


def test_an_allocation_that_leaves_little_is_followed_by_a_mark(device: SoftwareDevice) -> None:
    """What was freed while much was free is marked when little is."""
    with jobs(device, 16, 1, alone_bytes=ALONE_BYTES) as (job,):
        for tensor in [allocated(job) for _ in range(4)]:
            job.free(tensor)
        allocated(job, 6 * MIB)
        allocated(job, 100)
        allocated(job)
        assert device.marks == 0
        allocated(job)
        assert device.marks == 1, "half of eight regions"
        finish(job)


def test_only_the_first_stream_is_marked_by_bytes(device: SoftwareDevice) -> None:
    """Other streams may be destroyed, and not marked then; what they release is marked at once."""
    with jobs(device, 64, 1, alone_bytes=ALONE_BYTES) as (job,):
        made = [allocated(job, MIB, stream) for stream in (0, 1, 0, 1)]
        job.free(made[1])
        assert device.marks == 1
        job.free(made[0])
        assert device.marks == 1
        job.free(made[3])
        assert device.marks == 2
        finish(job)


def test_a_job_finds_its_own_unmarked_regions(device: SoftwareDevice) -> None:
    """Invariant 2: its first stream takes them as they are, another one behind a mark."""
    with jobs(device, 16, 1, alone_bytes=ALONE_BYTES) as (job,):
        for tensor in [allocated(job) for _ in range(6)]:
            job.free(tensor)
        assert (device.marks, device.waits) == (0, 0)
        for tensor in [allocated(job) for _ in range(6)]:
            job.free(tensor)
        assert device.waits == 0
        marks = device.marks
        other = allocated(job, 15 * MIB, 1)
        assert device.waits == 1
        assert device.marks == marks + 1
        assert not device.step(other.stream), "the first stream has not checked what lay there"
        finish(job)


# -- marks of jobs side by side --------------------------------------------------------------------


def test_jobs_that_do_not_wait_mark_by_bytes(device: SoftwareDevice) -> None:
    """Beside another job, too, a mark comes every ``beside_bytes``, and one at the boundary."""
    with jobs(device, 64, 2, beside_bytes=ALONE_BYTES) as (job, _):
        made = [allocated(job) for _ in range(20)]
        for n, tensor in enumerate(made, 1):
            job.free(tensor)
            assert device.marks == n // 8
        allocator.mark(job.record[0])
        assert device.marks == 3
        finish(job)


def test_jobs_leave_half_of_what_is_free_marked(device: SoftwareDevice) -> None:
    """Invariant 7: whatever the others have freed without a mark, a job gets half of what is free, and nobody waits."""
    with jobs(device, 101, 3, beside_bytes=ALONE_BYTES) as (a, b, c):
        for job in (a, b):
            for tensor in [allocated(job) for _ in range(50)]:
                job.free(tensor)
        assert device.marks < 24
        assert b.record[0]["streams"]["unmarked_bytes"] > 0
        assert c.allocate(50 * MIB) is not None
        assert c.job["need_waited_ns"] == 0
        for job in (a, b, c):
            finish(job)


def test_a_thread_marks_for_who_begins_to_wait_while_its_job_sleeps(device: SoftwareDevice) -> None:
    """Invariant 7: what a job has freed without a mark comes to who waits although the job makes no more calls."""
    with jobs(device, 32, 2, beside_bytes=ALONE_BYTES, wait_limit_s=DEADLINE_S) as (asleep, other):
        stop = timeline.start_progress_thread(asleep.heap)
        for tensor in [allocated(asleep, 2 * MIB) for _ in range(3)]:
            asleep.free(tensor)
        assert device.marks == 0
        other.member.member[0]["poll"] = (10 * int(DEADLINE_S), 0)  # it looks again only when it is woken
        asleep.member.member[0]["slice"] = (10 * int(DEADLINE_S), 0)  # and so does the thread, once it has slept
        thread = threading.Thread(target=other.allocate, args=(32 * MIB,), daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert device.marks == 1
        assert other.live
        stop()
        for job in (asleep, other):
            finish(job)


def test_a_thread_that_marks_leaves_a_capture_alone(device: SoftwareDevice) -> None:
    """A graph could begin between the question whether the stream captures and the mark; who waits gets it later."""
    with jobs(device, 32, 1, alone_bytes=ALONE_BYTES) as (job,):
        job.free(allocated(job))
        job.pool.header["waiters"] = 1
        for capturing, marks in ((1, 0), (0, 1)):
            job.record[0]["streams"]["capturing"] = capturing
            on_stream.mark_for_others(job.record[0])
            assert device.marks == marks
        job.pool.header["waiters"] = 0
        finish(job)


# -- streams that were destroyed -------------------------------------------------------------------


def destroyed(device: SoftwareDevice, job: DeviceTenant, stream: int) -> None:
    """Destroy a stream: its work goes on, and nothing can be put on it any more."""
    device.refuses = lambda _kind, handle: handle == job.streams[stream]


@pytest.mark.parametrize("call", ["allocation", "boundary", "leaving"])
def test_what_is_freed_on_a_destroyed_stream_comes_back(device: SoftwareDevice, call: str) -> None:
    """Invariant 2: the job's next call waits until the device is done; then another job gets the memory."""
    with jobs(device, 8, 2) as (job, other):
        tensor = allocated(job, 6 * MIB, 1)
        destroyed(device, job, 1)
        job.free(tensor)
        assert other.allocate(6 * MIB) is None
        assert device.synchronized == 0, "a free waits for nobody"
        if call == "allocation":
            job.free(allocated(job, 100))
        else:
            (allocator.mark if call == "boundary" else on_stream.settle)(job.record[0])
        assert device.synchronized == 1
        allocated(other, 6 * MIB)
        device.drain()
        assert device.synchronized == 1, "once for all that was freed"
        for one in (job, other):
            finish(one)


def test_a_free_on_a_destroyed_stream_waits_for_the_device_where_others_wait(device: SoftwareDevice) -> None:
    """Invariant 7: who waits for that memory is not left to the job's next call."""
    with jobs(device, 8, 1) as (job,):
        tensor = allocated(job, 6 * MIB, 1)
        destroyed(device, job, 1)
        job.pool.header["waiters"] = 1
        job.free(tensor)
        job.pool.header["waiters"] = 0
        assert device.synchronized == 1
        finish(job)


@pytest.mark.parametrize("size_bytes", [100, MIB])
def test_what_a_destroyed_stream_has_used_comes_back(device: SoftwareDevice, size_bytes: int) -> None:
    """Invariant 2: a tensor that was recorded on the stream is freed when the device is done, at the next boundary."""
    with jobs(device, 8, 1) as (job,):
        tensor = allocated(job, size_bytes)
        job.use_on(tensor, 1)
        destroyed(device, job, 1)
        job.free(tensor)
        assert job.record[0]["streams"]["n_deferred"] == 1
        allocator.mark(job.record[0])
        assert (job.record[0]["streams"]["n_deferred"], device.synchronized) == (0, 1)
        finish(job)


def test_a_device_that_cannot_be_waited_for_keeps_what_was_freed(device: SoftwareDevice) -> None:
    """Invariant 2: nobody gets the memory while it is not known that the stream's work is done."""
    with jobs(device, 8, 2) as (job, other):
        tensor = allocated(job, 6 * MIB, 1)
        device.refuses = lambda kind, handle: kind == "synchronize" or handle == job.streams[1]
        job.free(tensor)
        allocator.mark(job.record[0])
        assert other.allocate(6 * MIB) is None
        destroyed(device, job, 1)
        allocator.mark(job.record[0])
        allocated(other, 6 * MIB)
        for one in (job, other):
            finish(one)


# -- more streams than slots -----------------------------------------------------------------------


def test_streams_by_turns_never_wait_for_the_whole_device(device: SoftwareDevice) -> None:
    """Invariant 2: of forty streams on a device that lags none finds another's bytes."""
    with jobs(device, 100, 1, streams=40) as (job,):
        for turn in range(200):
            stream = turn * 7 % 40
            allocated(job, [100, MIB // 4, MIB][turn % 3], stream)
            if len(job.live) > 20:
                job.free(job.live[0])
            for choice in range(turn % 4):
                device.step_any(choice)
        assert device.synchronized == 0
        assert job.record[0]["streams"]["n"] == STREAMS
        finish(job)
        assert device.synchronized == 0


def test_an_idle_streams_slot_is_taken_over_unasked(device: SoftwareDevice) -> None:
    """Nothing is put on a stream that has nothing left, which may have been destroyed."""
    with jobs(device, 40, 1, streams=STREAMS + 3) as (job,):
        for stream in range(STREAMS):
            job.free(allocated(job, MIB, stream))
        device.drain()
        device.refuses = lambda _kind, stream: stream in job.streams[1:STREAMS]
        marks, waits = device.marks, device.waits
        for stream in range(STREAMS, STREAMS + 3):
            allocated(job, MIB, stream)
        assert (device.marks, device.waits, device.synchronized) == (marks, waits, 0)
        assert job.record[0]["streams"]["failures"] == 0
        finish(job)


def test_a_stream_that_takes_an_idle_slot_puts_waits_of_its_own(device: SoftwareDevice) -> None:
    """Invariant 2: what the slot's old stream waits for holds up nothing that the new one is given."""
    with jobs(device, 40, 1, streams=4) as (job,):
        job.record[0]["most_streams"] = 3
        copying, old, new = job.streams[1:]
        allocated(job)
        allocated(job, MIB, 1)
        job.free(allocated(job, MIB, 2))
        device.drain()
        done: list[str] = []
        device.launch(copying, lambda: done.append("copied"))
        fence = on_stream.mark_stream(job.record[0], copying)
        assert on_stream.wait_for(job.record[0], old, fence) == 1
        before = device.marks
        allocated(job, MIB, 3)
        assert (device.waits, device.marks) == (1, before), "the slot was idle"
        assert on_stream.wait_for(job.record[0], new, fence) == 1
        device.launch(new, lambda: done.append("read"))
        while device.step(new):
            pass
        device.drain()
        assert done == ["copied", "read"]
        finish(job)


@pytest.mark.parametrize("busy", ["lives", "lives small", "unmarked", "not passed", "recorded"])
def test_a_busy_streams_slot_is_taken_over_behind_its_work(device: SoftwareDevice, busy: str) -> None:
    """Invariant 2: what the old stream has not done yet holds the new one up."""
    spacing = 4 * MIB if busy == "unmarked" else 0
    with jobs(device, 40, 1, streams=3, spacing_bytes=spacing) as (job,):
        job.record[0]["most_streams"] = 2
        shared = allocated(job)
        tensor = allocated(job, 100 if busy == "lives small" else MIB, 1)
        if busy == "recorded":
            job.use_on(shared, 1)
        if busy != "not passed":
            device.drain()
        if not busy.startswith("lives"):
            job.free(tensor)
        if busy == "recorded":
            device.drain()
        device.launch(job.streams[1], lambda: None)
        new = allocated(job, MIB, 2)
        assert device.waits == 1
        assert not device.step(new.stream)
        finish(job)


def test_slots_that_live_tensors_name_are_taken_over_last(device: SoftwareDevice) -> None:
    """A tensor that says where it was used keeps that slot as long as there is another."""
    with jobs(device, 40, 1, streams=5) as (job,):
        job.record[0]["most_streams"] = 3
        shared = allocated(job)
        job.use_on(shared, 1)
        for stream in (2, 3, 4, 2):
            allocated(job, MIB, stream)
        assert job.record[0]["streams"]["mixed"] == 0
        job.use_on(shared, 1)
        job.free(shared)
        assert device.synchronized == 0
        assert [int(count) for count in users(job)] == [0, 0, 0]
        finish(job)


def test_a_tensor_of_a_lost_slot_is_freed_behind_the_whole_device(device: SoftwareDevice) -> None:
    """Invariant 2: no mark follows a stream that lost its slot, so the free waits for everything."""
    with jobs(device, 40, 1, streams=4) as (job,):
        job.record[0]["most_streams"] = 3
        shared = allocated(job)
        job.use_on(shared, 1)
        other = allocated(job)
        job.use_on(other, 2)
        allocated(job, MIB, 3)
        assert job.record[0]["streams"]["mixed"] == 1 << 1
        job.use_on(shared, 1)  # the heap does not hear of this use
        job.free(other)
        assert device.synchronized == 0
        job.free(shared)
        assert device.synchronized == 1
        assert job.record[0]["streams"]["mixed"] == 0
        again = allocated(job)
        job.use_on(again, 3)
        job.free(again)
        assert device.synchronized == 1
        finish(job)


def users(job: DeviceTenant) -> Any:  # noqa: ANN401 - an array
    """Return of how many live tensors each slot says that they were used there."""
    return [users_of(job.record[0], slot) for slot in range(int(job.record[0]["streams"]["n"]))]


@compiled
def users_of(heap: Any, slot: int) -> int:  # noqa: ANN401 - a HEAP record
    """Return how many live tensors say that they were used on the stream of a slot."""
    return int(stream_at(heap, slot).users)


def test_a_stream_that_loses_its_slot_while_it_waits_follows_the_next_one(device: SoftwareDevice) -> None:
    """Invariant 2: its kernels come after what the slot's new stream was given meanwhile."""
    with jobs(device, 4, 2, streams=3, wait_limit_s=DEADLINE_S) as (job, other):
        job.record[0]["most_streams"] = 2
        theirs = allocated(other, 3 * MIB)
        allocated(job, 100)
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(job.allocate(MIB, 1)), daemon=True)
        thread.start()
        until(lambda: job.job["waiting_threads"] > 0, DEADLINE_S, "it waits for memory")
        second = threading.Thread(target=lambda: got.append(job.allocate(MIB, 2)), daemon=True)
        second.start()
        until(lambda: job.job["waiting_threads"] > 1, DEADLINE_S, "both wait for memory")
        other.free(theirs)
        for one in (thread, second):
            one.join(DEADLINE_S)
            assert not one.is_alive()
        assert len(got) == 2
        device.drain()
        finish(job)
        assert not job.faults + other.faults


@pytest.mark.parametrize("what", ["mark", "wait"])
def test_where_a_stream_cannot_follow_the_whole_device_is_waited_for(device: SoftwareDevice, what: str) -> None:
    """A slot whose stream takes no mark is taken over when the device has done everything."""
    with jobs(device, 40, 1, streams=3) as (job,):
        job.record[0]["most_streams"] = 2
        allocated(job, 100)
        allocated(job, MIB, 1)
        device.refuses = lambda kind, _stream: kind == what
        new = allocated(job, MIB, 2)
        device.refuses = lambda _kind, _stream: False
        assert device.synchronized == 1
        assert len(device.queues[new.stream]) == 1, "only its first kernel"
        job.record[0]["streams"]["failures"] = 0
        finish(job)


def test_what_the_device_does_not_order_is_not_used(device: SoftwareDevice) -> None:
    """Invariant 2: a stream that follows no other gets no memory; what it frees is lost."""
    with jobs(device, 40, 1, streams=3) as (job,):
        job.record[0]["most_streams"] = 2
        allocated(job, 100)
        for size in (100, MIB):
            tensor = allocated(job, size, 1)
            device.drain()
            device.refuses = lambda _kind, _stream: True
            assert job.allocate(size, 2) is None
            on_stream.free_on(job.record[0], tensor.address, job.streams[2])
            on_stream.record_stream(job.record[0], tensor.address, job.streams[2])
            device.refuses = lambda _kind, _stream: False
            assert allocated(job, size, 1).address != tensor.address
            on_stream.free_on(job.record[0], tensor.address, tensor.stream)
            job.forget(tensor)
        assert job.record[0]["bad_frees"] == 2
        device.drain()
        assert not job.faults
