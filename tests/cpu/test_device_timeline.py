"""A job's marks and waits on its GPU's timeline, over the driver's software twin."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

import pytest
from threads import result_in_thread
from twin_device import MIB, TwinDevice

from zico.base.errors import DriverError
from zico.job.device_timeline import DeviceTimeline
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Iterator

REGION_BYTES = 2 * MIB
WITHOUT_KERNELS = {"COMPUTE_CAPABILITY_MAJOR": 6}
"""The twin runs no PTX: marks and waits are stream operations, as on a device too old for Zico's kernels."""
WORD_BYTES = 64
"""Between two counters, as the pool lays them out."""
INVALID_HANDLE = 400
ILLEGAL_ADDRESS = 700
GLOBAL = 0
"""CU_STREAM_CAPTURE_MODE_GLOBAL."""
_FOUR = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
_ONE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


@contextlib.contextmanager
def pool_on(device: TwinDevice, *, isolate: bool = False) -> Iterator[PoolTable]:
    """Give this process's place in a pool on the device."""
    sizes = {"budget_bytes": 4 * REGION_BYTES, "region_bytes": REGION_BYTES}
    ways = {"use_claims": False, "self_admit": True, "isolate": isolate}
    with PoolTable.create(**sizes, **ways, driver=device.driver) as made:
        job = made.join(os.getpid(), "a")
        copies = (device.driver.export_pieces(made.memory), os.dup(made.table_fd), os.dup(made.notify_fd))
        with PoolTable.join_pool(*copies, job, device.driver) as member:
            yield member


class Functions:
    """A timeline as the heap sees it: three functions by address."""

    def __init__(self, device: TwinDevice, member: PoolTable) -> None:
        """Build it."""
        self.device = device
        self.timeline = DeviceTimeline(member)
        functions = self.timeline.functions
        self._context = functions.context_address
        self._mark, self._wait = _FOUR(functions.mark_address), _FOUR(functions.await_address)
        self._synchronize, self._look = _ONE(functions.synchronize_address), _ONE(functions.look_address)
        self.counters = functions.counters_address
        self._counters_here = int(member.member[0]["counters_address"])

    def mark(self, stream: int, word: int, value: int) -> int:
        """Put a mark on a stream."""
        return self._mark(self._context, stream, self.counters + WORD_BYTES * word, value) & 0xFFFFFFFF

    def wait(self, stream: int, word: int, value: int) -> int:
        """Put a wait on a stream."""
        return self._wait(self._context, stream, self.counters + WORD_BYTES * word, value) & 0xFFFFFFFF

    def synchronize(self) -> int:
        """Wait for everything."""
        return self._synchronize(self._context) & 0xFFFFFFFF

    def look(self) -> int:
        """Ask by which status the context is lost."""
        return self._look(self._context) & 0xFFFFFFFF

    def counter(self, word: int) -> int:
        """Return a counter as every process sees it."""
        return ctypes.c_int64.from_address(self._counters_here + WORD_BYTES * word).value


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
