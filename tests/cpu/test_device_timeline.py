"""A job's marks and waits on its GPU's timeline, over the driver's software twin."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
from cpu.support.threads import result_in_thread
from cpu.support.timeline_functions import WITHOUT_KERNELS, WORD_BYTES, Functions, pool_on
from cpu.support.twin_device import TwinDevice

from zico.base.errors import DriverError
from zico.job.device_timeline import DeviceTimeline

if TYPE_CHECKING:
    from collections.abc import Iterator

INVALID_HANDLE = 400
ILLEGAL_ADDRESS = 700
GLOBAL = 0
"""CU_STREAM_CAPTURE_MODE_GLOBAL."""


@pytest.fixture
def functions() -> Iterator[Functions]:
    """Give a timeline; in the end the device must have everything back."""
    with TwinDevice(attributes=WITHOUT_KERNELS) as device, pool_on(device) as member:
        made = Functions(device, member)
        yield made
        made.timeline.close()


def test_marks_and_waits_happen_on_the_streams(functions: Functions) -> None:
    """A stream that waits goes on when another reaches its mark, and the counters are the pool's, seen by all."""
    with functions.device.driver.create_stream() as first, functions.device.driver.create_stream() as second:
        assert functions.wait(second.handle, 0, 7) == 0
        assert functions.mark(second.handle, 1, 1) == 0
        assert functions.counter(1) == 0
        assert functions.mark(first.handle, 0, 7) == 0
        assert functions.synchronize() == 0
        assert (functions.counter(0), functions.counter(1)) == (7, 1)


def test_a_stream_that_waits_goes_on_when_the_broker_writes(functions: Functions) -> None:
    """Invariant 5: who waits for a dead job is let go by a write of the processor's, as the broker makes it."""
    with functions.device.driver.create_stream() as stream:
        assert functions.wait(stream.handle, 3, 100) == 0
        ctypes.c_int64.from_address(functions._counters_here + 3 * WORD_BYTES).value = 100
        assert functions.synchronize() == 0


def test_threads_without_a_context_can_mark(functions: Functions) -> None:
    """A thread that has never called CUDA gets the device's context for the call, and keeps it as a runtime's would."""
    with functions.device.driver.create_stream() as stream:
        assert result_in_thread(lambda: functions.mark(stream.handle, 0, 1)) == 0
        assert result_in_thread(lambda: functions.wait(stream.handle, 0, 1)) == 0
        assert result_in_thread(functions.synchronize) == 0
    assert functions.counter(0) == 1


def test_a_threads_own_context_is_put_back(functions: Functions) -> None:
    """A thread that works in another context finds it current again, also after a call that failed."""
    twin = functions.device.twin
    other = twin.make_context()

    def marked() -> tuple[int, int, int]:
        twin.cuCtxSetCurrent(other)
        done = functions.mark(stream.handle, 0, 1), functions.mark(0xBAD, 0, 2)
        return (*done, int(twin.cuCtxGetCurrent()[1]))

    with functions.device.driver.create_stream() as stream:
        assert result_in_thread(marked) == (0, INVALID_HANDLE, other)
        assert functions.synchronize() == 0


def test_what_the_driver_refuses_comes_back(functions: Functions) -> None:
    """A stream that is none is an answer for the heap, not the end of the process."""
    assert functions.mark(0xBAD, 0, 1) == functions.wait(0xBAD, 0, 1) == INVALID_HANDLE
    assert functions.counter(0) == 0


def test_a_look_tells_of_a_lost_context_alone(functions: Functions) -> None:
    """A device that is busy, or has nothing to do, has not lost the context; a kernel that faulted has."""
    with functions.device.driver.create_stream() as stream:
        assert [functions.look() for _ in range(3)] == [0, 0, 0]
        assert functions.wait(stream.handle, 0, 1) == 0
        functions.device.twin.pause()
        assert [functions.look() for _ in range(3)] == [0, 0, 0]
        functions.device.twin.release()
        assert functions.mark(functions.timeline.functions.capture_stream, 0, 1) == 0
    functions.device.twin.poison(int(functions.device.twin.cuCtxGetCurrent()[1]), "ILLEGAL_ADDRESS")
    assert functions.look() == ILLEGAL_ADDRESS


def test_a_look_spoils_no_capture(functions: Functions) -> None:
    """Another thread may look while a stream captures in the strictest mode."""
    twin = functions.device.twin
    with functions.device.driver.create_stream() as stream:
        twin.cuCtxSetCurrent(twin.cuDevicePrimaryCtxRetain(0)[1])
        assert int(twin.cuStreamBeginCapture(stream.handle, GLOBAL)[0]) == 0
        assert [result_in_thread(functions.look) for _ in range(2)] == [0, 0]
        assert int(twin.cuStreamEndCapture(stream.handle)[0]) == 0
        twin.cuDevicePrimaryCtxRelease(0)


def test_failure_of_every_driver_call_leaves_nothing_behind() -> None:
    """Whichever call of the set-up fails, an error says so, and neither registration nor context stays."""
    fail_at, failures = 0, 0
    while True:
        fail_at += 1
        with TwinDevice(attributes=WITHOUT_KERNELS) as device, pool_on(device) as member:
            device.twin.calls, device.twin.fail_at = 0, fail_at
            try:
                made = DeviceTimeline(member)
            except DriverError:
                failures += 1
                device.twin.fail_at = 0
                assert "registrations" not in device.twin.leaks()
                continue
            device.twin.fail_at = 0
            made.close()
            if device.twin.calls < fail_at:
                break
    assert failures > 3
