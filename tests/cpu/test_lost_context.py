"""A job whose CUDA context is lost while its process lives: nobody waits for what its device never does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from cpu.support.device_jobs import DEADLINE_S, MIB, jobs
from cpu.support.members import counters, job_of
from cpu.support.software_device import INVALID_HANDLE, REFUSED, SoftwareDevice
from support.harness import until

from zico.heap import allocator
from zico.heap.cuda import on_stream
from zico.heap.cuda.streams import LOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cpu.support.device_tenant import DeviceTenant

UNKNOWN = 999
"""CUDA_ERROR_UNKNOWN, of which cuda.h does not say that the context is lost."""
CALLS: dict[str, Callable[[DeviceTenant], object]] = {
    "free": lambda job: job.free(job.live[0]),
    "mark": lambda job: on_stream.mark_stream(job.record[0], job.streams[0]),
    "wait for memory": lambda job: job.allocate(3 * MIB),
    "boundaries": lambda job: [allocator.mark(job.record[0]) for _ in range(2)],
    "settle": lambda job: [on_stream.settle(job.record[0]) for _ in range(2)],
    "no call": lambda job: [on_stream.look_after_waits(job.record[0]) for _ in range(2)],
}
"""What a job may still do. Its progress thread, which calls ``look_after_waits``, is there in any case."""


class Pair:
    """B's stream waits on the device for a mark of A's, which has yet to come."""

    def __init__(self, device: SoftwareDevice, a: DeviceTenant, b: DeviceTenant) -> None:
        """Let A free what its device has not used yet, and B take it."""
        self.device, self.a, self.b = device, a, b
        for size_bytes in (MIB, 6 * MIB):
            assert a.allocate(size_bytes) is not None
        device.drain()
        a.free(a.live[1])
        assert b.allocate(6 * MIB) is not None
        assert not self.b_goes_on

    @property
    def b_goes_on(self) -> bool:
        """Tell whether B's stream does its next thing now."""
        return self.device.step(self.b.streams[0])

    def lose(self) -> None:
        """Let A's kernel fault: what A's context was given is dropped, and every call in it is refused."""
        self.device.queues[self.a.streams[0]].clear()
        self.device.refuses = lambda what, stream: stream == self.a.streams[0] or what == "synchronize"


@pytest.fixture
def device() -> SoftwareDevice:
    """Make a device that refuses what fails as in a lost context."""
    return SoftwareDevice()


@pytest.fixture
def pair(device: SoftwareDevice) -> Iterator[Pair]:
    """Make two jobs in eight regions."""
    with jobs(device, 8, 2, streams=1) as (a, b):
        yield Pair(device, a, b)


@pytest.mark.parametrize("call", CALLS)
def test_a_lost_jobs_next_call_lets_waiting_streams_go_on(pair: Pair, call: str) -> None:
    """Invariant 7: the first refusal that says that the context is lost lets all marks of the job come."""
    pair.lose()
    CALLS[call](pair.a)
    assert pair.b_goes_on
    assert pair.a.record[0]["streams"]["lost"] == REFUSED
    pair.device.refuses = lambda _what, _stream: False
    pair.device.drain()
    assert not pair.b.faults


@pytest.mark.parametrize("status", [INVALID_HANDLE, UNKNOWN])
def test_what_may_go_on_is_waited_for(status: int) -> None:
    """Invariant 2: a status that does not say that the context is lost lets nobody in before the device is done."""
    device = SoftwareDevice(status)
    with jobs(device, 8, 2, streams=1) as both:
        pair = Pair(device, *both)
        device.refuses = lambda what, stream: stream == pair.a.streams[0] or what == "synchronize"
        for call in CALLS.values():
            call(pair.a)
        assert pair.a.record[0]["streams"]["lost"] == 0
        assert not pair.b_goes_on
        device.refuses = lambda _what, _stream: False
        device.drain()
        assert not pair.b.faults


def test_only_who_stands_still_is_looked_at(device: SoftwareDevice, pair: Pair) -> None:
    """The device is asked nothing while a job's marks come, nor when they have come."""

    def look(times: int) -> int:
        before = device.looks
        for _ in range(times):
            on_stream.look_after_waits(pair.a.record[0])
        return device.looks - before

    assert look(1) == 0
    assert look(2) == 2, "its mark has not come"
    for _ in range(3):
        on_stream.mark_stream(pair.a.record[0], pair.a.streams[0])
    while pair.device.queues[pair.a.streams[0]]:
        before = int(counters(pair.a.member)[job_of(pair.a.member), 0])
        while int(counters(pair.a.member)[job_of(pair.a.member), 0]) == before:
            assert device.step(pair.a.streams[0])
        assert look(1) == 0, "one has come since"
    assert look(2) == 0, "all have come"


def test_a_lost_job_gives_back_what_it_frees_and_gets_nothing(pair: Pair) -> None:
    """Its requests end at once without a word of a budget, and its neighbour gets all that it frees, as it frees it."""
    pair.lose()
    on_stream.mark_stream(pair.a.record[0], pair.a.streams[0])
    assert pair.a.allocate(100) is None
    assert pair.a.allocate(MIB) is None
    assert pair.a.job["oom_count"] == 0
    assert pair.a.job["held"] == 1
    pair.device.refuses = lambda _what, stream: stream == pair.a.streams[0]
    assert pair.b.allocate(2 * MIB) is None
    pair.a.free_all()
    assert pair.a.job["held"] == 0
    assert pair.b.allocate(2 * MIB) is not None
    pair.device.drain()
    assert not pair.b.faults


def test_a_lost_jobs_thread_waits_for_memory_no_longer(device: SoftwareDevice) -> None:
    """Invariant 7: a request that waits when the context is found lost ends, and not as out of memory."""
    with jobs(device, 8, 2, streams=1, wait_limit_s=DEADLINE_S) as both:
        pair = Pair(device, *both)
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.append(pair.a.allocate(3 * MIB)), daemon=True)
        thread.start()
        until(lambda: pair.a.job["waiting_threads"] > 0, DEADLINE_S, "it waits for memory")
        pair.lose()
        thread.join(DEADLINE_S)
        assert got == [None]
        assert pair.a.record[0]["streams"]["lost"] == REFUSED
        assert pair.a.job["oom_count"] == 0
        assert pair.b_goes_on


def test_the_statuses_are_the_drivers() -> None:
    """Each status of a lost context has a name that the driver's API knows, and none that is of another kind."""
    from cuda.bindings import driver

    names = {one.name.removeprefix("CUDA_ERROR_") for one in driver.CUresult if int(one) in LOST}
    assert {"ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ASSERT", "CONTEXT_IS_DESTROYED", "MPS_CLIENT_TERMINATED"} <= names
    assert not names & {"INVALID_HANDLE", "UNKNOWN", "NOT_READY", "LAUNCH_OUT_OF_RESOURCES", "OUT_OF_MEMORY"}
