"""The twin's streams: in order each, by themselves, in any order between them, and never for ever."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.twin_calls import Timeline, mapped, status
from cpu.support.twin_device import DEADLINE_S, MIB
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twin.twin import Twin

UNIT = 2 * MIB
COUNTER = b".entry count(.param .u64 at)"


@pytest.fixture
def timeline() -> Iterator[Timeline]:
    """Return a timeline; its threads end with the test."""
    timeline = Timeline()
    with timeline.twin:
        yield timeline


@pytest.fixture
def hasty() -> Iterator[Timeline]:
    """Return a timeline that gives up waiting at once."""
    timeline = Timeline(wait_deadline_s=0.05)
    with timeline.twin:
        yield timeline


@pytest.mark.parametrize(
    ("word", "value", "flags", "is_met"),
    [
        (7, 7, 0, True),
        (8, 7, 0, True),
        (6, 7, 0, False),
        (-1, 0, 0, False),
        ((1 << 63) - 1, 0, 0, True),
        (-(1 << 63), (1 << 63) - 1, 0, True),
        (7, 7, 1, True),
        (8, 7, 1, False),
    ],
)
def test_a_wait_compares_as_the_manual_says(hasty: Timeline, word: int, value: int, flags: int, is_met: bool) -> None:  # noqa: FBT001
    """At least is cyclic: the signed difference of the 64-bit words decides; equal is equal."""
    hasty.words[0] = word
    stream = hasty.stream()
    hasty.wait(stream, 0, value, flags)
    assert hasty.synchronize(stream) == ("SUCCESS" if is_met else "LAUNCH_TIMEOUT")


def test_a_wait_that_is_never_met_loses_its_stream_only(hasty: Timeline) -> None:
    """After the deadline every call on that stream returns an error, and others go on."""
    lost, other = hasty.stream(), hasty.stream()
    hasty.wait(lost, 0, 1)
    assert hasty.synchronize(lost) == "LAUNCH_TIMEOUT"
    assert hasty.write(lost, 0, 1) == "LAUNCH_TIMEOUT"
    assert status(hasty.twin.cuStreamQuery(lost)) == "LAUNCH_TIMEOUT"
    assert hasty.write(other, 0, 1) == "SUCCESS"
    assert hasty.synchronize(other) == "SUCCESS"
    assert status(hasty.twin.cuStreamDestroy(lost)) == "LAUNCH_TIMEOUT"
    assert hasty.twin.leaks()["streams"] == 1


def test_a_wait_gives_up_though_nobody_synchronises(hasty: Timeline) -> None:
    """The deadline is the device's own: whoever looks later finds the stream lost."""
    stream = hasty.stream()
    hasty.wait(stream, 0, 1)
    until(lambda: status(hasty.twin.cuStreamQuery(stream)) == "LAUNCH_TIMEOUT")


def test_what_is_behind_a_lost_wait_never_happens(hasty: Timeline) -> None:
    """Operations that were already on a lost stream are dropped, not run out of order."""
    stream = hasty.stream()
    hasty.wait(stream, 0, 1)
    hasty.write(stream, 1, 1)
    found = hasty.twin.stream(stream)
    until(lambda: found.done == 2)
    assert hasty.words[1] == 0


def test_synchronising_with_a_held_stream_ends(hasty: Timeline) -> None:
    """Even a stream that a test holds and forgets hangs nobody."""
    hasty.twin.pause()
    stream = hasty.stream()
    hasty.write(stream, 0, 1)
    assert hasty.synchronize(stream) == "LAUNCH_TIMEOUT"


@pytest.mark.parametrize("what", ["memset", "copy", "kernel"])
def test_touching_what_is_not_mapped_loses_the_context(timeline: Timeline, what: str) -> None:
    """An illegal address on the device is sticky: every later call in that context returns it."""
    twin = timeline.twin
    _, address = mapped(twin)
    stream, bystander = timeline.stream(), timeline.stream()
    twin.kernel("count", ctypes.c_uint64)(lambda twin, at: twin.store(at, 1))
    function = twin.cuModuleGetFunction(twin.cuModuleLoadData(COUNTER)[1], b"count")[1]
    twin.pause()
    if what == "memset":
        twin.cuMemsetD8Async(address, 1, UNIT, stream)
    elif what == "copy":
        twin.cuMemcpyDtoDAsync(address, address + 64, 64, stream)
    else:
        twin.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, ((address,), (ctypes.c_uint64,)), 0)
    assert status(twin.cuMemUnmap(address, UNIT)) == "SUCCESS"
    twin.release()
    assert timeline.synchronize(stream) == "ILLEGAL_ADDRESS"
    assert timeline.write(bystander, 0, 1) == "ILLEGAL_ADDRESS"
    assert status(twin.cuStreamCreate(0)) == "ILLEGAL_ADDRESS"


def test_a_kernel_that_crashes_loses_the_context(timeline: Timeline) -> None:
    """An exception in a kernel's Python is a failed launch, reported by its thread."""
    twin = timeline.twin
    caught: list[Any] = []
    hook, threading.excepthook = threading.excepthook, caught.append
    try:

        @twin.kernel("count", ctypes.c_uint64)
        def crash(_twin: Twin, _at: int) -> None:
            raise ZeroDivisionError

        function = twin.cuModuleGetFunction(twin.cuModuleLoadData(COUNTER)[1], b"count")[1]
        stream = timeline.stream()
        twin.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, ((0,), (ctypes.c_uint64,)), 0)
        assert timeline.synchronize(stream) == "LAUNCH_FAILED"
        assert status(twin.cuCtxSynchronize()) == "LAUNCH_FAILED"
        until(lambda: bool(caught))
    finally:
        threading.excepthook = hook
    assert caught[0].exc_type is ZeroDivisionError


def until(reached: Any) -> None:  # noqa: ANN401 - a function
    """Look until something is so."""
    end_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < end_s


def test_a_held_stream_stops_before_its_kth_operation(timeline: Timeline) -> None:
    """A test decides how far a stream gets, one step at a time, while the others run freely."""
    held, free = timeline.stream(), timeline.stream()
    stream = timeline.twin.stream(held)
    stream.hold(2)
    for word in range(4):
        timeline.write(held, word, 1)
    timeline.write(free, 8, 1)
    timeline.synchronize(free)
    until(lambda: stream.done == 2)
    assert list(timeline.words[:4]) == [1, 1, 0, 0]
    assert stream.step() == "write value"
    assert list(timeline.words[:4]) == [1, 1, 1, 0]
    stream.release()
    assert timeline.synchronize(held) == "SUCCESS"
    assert list(timeline.words[:4]) == [1, 1, 1, 1]
    assert stream.step() == ""


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), waits=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=6))
def test_a_seed_decides_the_order(seed: int, waits: list[tuple[int, int]]) -> None:
    """The same seed gives the same order, another order keeps each stream's own, and waits are never overtaken."""
    orders = []
    for _ in range(2):
        timeline = Timeline()
        with timeline.twin as twin:
            twin.pause()
            streams = [timeline.stream() for _ in range(3)]
            for position, stream in enumerate(streams):
                for value in range(1, 4):
                    for waiting, at in waits:
                        if (waiting, at) == (position, value) and position > 0:
                            timeline.wait(stream, position - 1, value)
                    timeline.write(stream, position, value)
            orders.append(twin.run_shuffled(seed))
            assert list(timeline.words[:3]) == [3, 3, 3]
    assert orders[0] == orders[1]


def test_events_tell_when_a_stream_got_there(timeline: Timeline) -> None:
    """An event is ready when its stream has passed it, and another stream can wait for it."""
    twin = timeline.twin
    first, second = timeline.stream(), timeline.stream()
    start, end = (twin.cuEventCreate(0)[1] for _ in range(2))
    twin.cuEventRecord(start, first)
    timeline.wait(first, 0, 1)
    twin.cuEventRecord(end, first)
    twin.cuStreamWaitEvent(second, end, 0)
    timeline.write(second, 1, 1)
    assert status(twin.cuEventSynchronize(start)) == "SUCCESS"
    assert status(twin.cuEventQuery(end)) == "NOT_READY"
    assert timeline.words[1] == 0
    timeline.words[0] = 1
    assert timeline.synchronize(second) == "SUCCESS"
    assert status(twin.cuEventQuery(end)) == "SUCCESS"
    assert twin.cuEventElapsedTime(start, end)[1] >= 0
    timeline.wait(first, 0, 2)
    twin.cuEventRecord(end, first)
    assert status(twin.cuEventQuery(end)) == "NOT_READY"
    timeline.words[0] = 2
    assert status(twin.cuEventSynchronize(end)) == "SUCCESS"
    for event in (start, end):
        assert status(twin.cuEventDestroy(event)) == "SUCCESS"
    assert status(twin.cuEventQuery(end)) == "INVALID_HANDLE"


def test_copies_and_fills_happen_in_stream_order(timeline: Timeline) -> None:
    """Memory is filled, copied within the device, and copied out, each after the one before."""
    twin = timeline.twin
    _, address = mapped(twin)
    data, result = ctypes.create_string_buffer(b"abcd", 4), ctypes.create_string_buffer(8)
    twin.cuMemcpyHtoD(address, ctypes.addressof(data), 4)
    stream = timeline.stream()
    twin.cuMemsetD8Async(address + 8, ord("x"), 4, stream)
    twin.cuMemcpyDtoDAsync(address + 12, address, 4, stream)
    twin.cuMemcpyDtoHAsync(ctypes.addressof(result), address + 8, 8, stream)
    timeline.synchronize(stream)
    assert result.raw == b"xxxxabcd"
    twin.cuMemsetD8(address + 16, 7, 2)
    assert twin.read(address + 15, 4) == b"d\x07\x07\x00"
    data.raw = b"wxyz"
    twin.cuMemcpyHtoDAsync(address, ctypes.addressof(data), 4, stream)
    assert status(twin.cuCtxSynchronize()) == "SUCCESS"
    twin.cuMemcpyDtoH(ctypes.addressof(result), address, 4)
    assert result.raw[:4] == b"wxyz"


def test_copies_of_what_is_not_mapped_are_refused_at_the_call(timeline: Timeline) -> None:
    """Fills and copies that begin or end where nothing is mapped return an error, and nothing is lost by it."""
    twin = timeline.twin
    _, address = mapped(twin)
    data = ctypes.create_string_buffer(8)
    there, gone = address + UNIT - 8, address + UNIT - 4
    host = ctypes.addressof(data)
    for call in (
        lambda at: twin.cuMemsetD8(at, 1, 8),
        lambda at: twin.cuMemsetD8Async(at, 1, 8, 0),
        lambda at: twin.cuMemcpyDtoDAsync(address, at, 8, 0),
        lambda at: twin.cuMemcpyDtoDAsync(at, address, 8, 0),
        lambda at: twin.cuMemcpyHtoDAsync(at, host, 8, 0),
        lambda at: twin.cuMemcpyDtoHAsync(host, at, 8, 0),
        lambda at: twin.cuMemcpyHtoD(at, host, 8),
        lambda at: twin.cuMemcpyDtoH(host, at, 8),
    ):
        assert (status(call(gone)), status(call(there))) == ("INVALID_VALUE", "SUCCESS")
    assert timeline.synchronize(0) == "SUCCESS"


def test_a_stream_belongs_to_its_context(timeline: Timeline) -> None:
    """Streams, and numbers that are none, cannot be used from another context."""
    stream = timeline.stream()
    assert status(timeline.twin.cuStreamSynchronize(12345)) == "INVALID_HANDLE"
    timeline.twin.cuCtxSetCurrent(timeline.twin.make_context())
    assert timeline.write(stream, 0, 1) == "INVALID_HANDLE"
    assert timeline.synchronize(stream) == "INVALID_HANDLE"


@pytest.mark.parametrize(("address", "expected"), [(4, "INVALID_VALUE"), (1 << 40, "INVALID_VALUE"), (0, "SUCCESS")])
def test_a_word_must_be_aligned_and_known_to_the_device(timeline: Timeline, address: int, expected: str) -> None:
    """Waits and writes at a crooked or unknown address are refused when they are enqueued."""
    stream = timeline.stream()
    at = timeline.base + address if address < 8 else address
    assert status(timeline.twin.cuStreamWriteValue64(stream, at, 1, 0)) == expected
    assert status(timeline.twin.cuStreamWaitValue64(stream, at, 1, 0)) == expected
    assert status(timeline.twin.cuStreamWaitValue64(stream, timeline.base, 1, 2)) == "NOT_SUPPORTED"


def test_a_device_without_memory_operations_refuses_them() -> None:
    """Where the attribute says so, waits and writes are not supported."""
    timeline = Timeline(attributes={"CAN_USE_64_BIT_STREAM_MEM_OPS": 0})
    with timeline.twin:
        assert timeline.write(timeline.stream(), 0, 1) == "NOT_SUPPORTED"


@pytest.mark.parametrize("shape", [(0, 1, 1, 1, 1, 1), (1, 1, 1, 1025, 1, 1), (1, 1, 1, 32, 32, 2)])
def test_an_impossible_launch_is_refused(timeline: Timeline, shape: tuple[int, ...]) -> None:
    """Empty grids and blocks of more than 1,024 threads are refused."""
    twin = timeline.twin
    twin.kernel("count", ctypes.c_uint64)(lambda twin, at: twin.store(at, 1))
    function = twin.cuModuleGetFunction(twin.cuModuleLoadData(COUNTER)[1], b"count")[1]
    arguments = ((timeline.base,), (ctypes.c_uint64,))
    assert status(twin.cuLaunchKernel(function, *shape, 0, 0, arguments, 0)) == "INVALID_VALUE"
    assert status(twin.cuLaunchKernel(77, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)) == "INVALID_HANDLE"


def test_a_c_function_that_raises_reports_an_error(timeline: Timeline, capfd: pytest.CaptureFixture[str]) -> None:
    """No exception passes into C, and none is taken for success: the traceback is printed, the status is unknown."""
    twin = timeline.twin
    twin.kernel("count", object)(lambda _twin, _at: None)  # no type of C: reading the argument raises
    function = twin.cuModuleGetFunction(twin.cuModuleLoadData(COUNTER)[1], b"count")[1]
    parameters = (ctypes.c_void_p * 1)(timeline.words.ctypes.data)
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, *([ctypes.c_uint] * 7), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )
    launch = prototype(twin.addresses()["cuLaunchKernel"])
    assert launch(int(function), 1, 1, 1, 1, 1, 1, 0, None, ctypes.addressof(parameters), None) == 999
    assert "AttributeError" in capfd.readouterr().err


def test_unloading_an_image_takes_its_functions_along(timeline: Timeline) -> None:
    """A function of an unloaded module cannot be launched, and empty images are none."""
    twin = timeline.twin
    twin.kernel("count", ctypes.c_uint64)(lambda twin, at: twin.store(at, 1))
    module = twin.cuModuleLoadData(COUNTER)[1]
    function = twin.cuModuleGetFunction(module, b"count")[1]
    assert status(twin.cuModuleUnload(module)) == "SUCCESS"
    arguments = ((timeline.base,), (ctypes.c_uint64,))
    assert status(twin.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)) == "INVALID_HANDLE"
    assert status(twin.cuModuleUnload(module)) == "INVALID_HANDLE"
    assert status(twin.cuModuleLoadData(b"\0")) == "INVALID_IMAGE"


def test_threads_end_with_the_twin() -> None:
    """Closing ends every stream's thread, also one that waits for what never comes."""
    timeline = Timeline()
    timeline.wait(timeline.stream(), 0, 1)
    timeline.stream()
    timeline.twin.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "zico-twin-stream"]
