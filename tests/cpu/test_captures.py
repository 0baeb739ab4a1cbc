"""Streams that capture: the twin records as the driver does, and nothing of Zico's ever gets into a graph."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.isolated_twin import REGION_BYTES, jobs
from cpu.support.timeline_functions import Functions, pool_on
from cpu.support.twin_calls import Timeline, status
from cpu.support.twin_device import MIB, TwinDevice
from twin.meanings import register

from zico.heap.cuda import on_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

UNSUPPORTED = 900
"""CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED."""
RELAXED = 2
I64 = ctypes.c_int64


@pytest.fixture
def timeline() -> Iterator[Timeline]:
    """Return a twin with counters; its threads end with the test."""
    made = Timeline()
    yield made
    made.twin.close()


@pytest.fixture
def functions() -> Iterator[Functions]:
    """Give a job's timeline on the twin, in a pool that scrubs; in the end the device has everything back."""
    with TwinDevice() as device:
        register(device.twin)
        with pool_on(device, isolate=True) as member:
            made = Functions(device, member)
            yield made
            made.timeline.close()


def put(given: Functions, kind: str, stream: int) -> int:
    """Put a mark, a wait or the zeroing of nothing that is mapped on a stream; returns the status."""
    if kind == "zero":
        functions = given.timeline.functions
        zero = ctypes.CFUNCTYPE(I64, I64, I64, I64, I64)(functions.scrub_address)
        return int(zero(functions.context_address, stream, 0, MIB)) & 0xFFFFFFFF
    return given.mark(stream, 0, 7) if kind == "mark" else given.wait(stream, 0, 7)


def capture_state(timeline: Timeline, stream: Any) -> str:  # noqa: ANN401 - a CUstream
    """Return what the twin says of a stream's capture, in the driver's words."""
    name: str = timeline.twin.cuStreamIsCapturing(stream)[1].name
    return name.removeprefix("CU_STREAM_CAPTURE_STATUS_")


def test_what_is_captured_happens_at_each_launch_and_not_before(timeline: Timeline) -> None:
    """A write that is recorded leaves its word alone until the graph is launched, and happens again at the next."""
    stream = timeline.stream()
    assert capture_state(timeline, stream) == "NONE"
    assert status(timeline.twin.cuStreamBeginCapture(stream, RELAXED)) == "SUCCESS"
    assert capture_state(timeline, stream) == "ACTIVE"
    assert timeline.write(stream, 0, 5) == "SUCCESS"
    graph = timeline.twin.cuStreamEndCapture(stream)[1]
    assert capture_state(timeline, stream) == "NONE"
    assert timeline.twin.recorded(graph) == ["write value"]
    assert timeline.synchronize(stream) == "SUCCESS"
    assert timeline.words[0] == 0
    for _ in range(2):
        timeline.words[0] = 0
        assert status(timeline.twin.cuGraphLaunch(graph, stream)) == "SUCCESS"
        assert timeline.synchronize(stream) == "SUCCESS"
        assert timeline.words[0] == 5


@pytest.mark.parametrize("ask", ["cuStreamSynchronize", "cuStreamQuery", "cuCtxSynchronize"])
def test_waiting_for_a_stream_that_captures_loses_the_capture(timeline: Timeline, ask: str) -> None:
    """The question is refused, so is what comes after it and the end of the capture; then the stream works again."""
    stream = timeline.stream()
    timeline.twin.cuStreamBeginCapture(stream, RELAXED)
    assert timeline.write(stream, 0, 5) == "SUCCESS"
    question = getattr(timeline.twin, ask)
    assert status(question() if ask == "cuCtxSynchronize" else question(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert capture_state(timeline, stream) == "INVALIDATED"
    assert timeline.write(stream, 0, 6) == "STREAM_CAPTURE_INVALIDATED"
    assert status(timeline.twin.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert timeline.write(stream, 0, 7) == "SUCCESS"
    assert timeline.synchronize(stream) == "SUCCESS"
    assert timeline.words[0] == 7


def test_captures_begin_and_end_once(timeline: Timeline) -> None:
    """A second beginning, an end without a beginning, and a capture of the default stream are refused."""
    stream, begin = timeline.stream(), timeline.twin.cuStreamBeginCapture
    assert status(timeline.twin.cuStreamEndCapture(stream)) == "ILLEGAL_STATE"
    assert status(begin(0, RELAXED)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert status(begin(stream, RELAXED)) == "SUCCESS"
    assert status(begin(stream, RELAXED)) == "ILLEGAL_STATE"


@pytest.mark.parametrize("kind", ["mark", "wait", "zero"])
def test_nothing_of_zicos_gets_into_a_graph(functions: Functions, kind: str) -> None:
    """What would go onto a stream that captures is refused and counted; the graph stays empty, and is not spoiled."""
    twin = functions.device.twin
    with functions.device.driver.create_stream() as stream, functions.device.driver.context.current():
        twin.cuStreamBeginCapture(stream.handle, RELAXED)
        assert put(functions, kind, stream.handle) == UNSUPPORTED
        ended, graph = twin.cuStreamEndCapture(stream.handle)
        assert (int(ended), twin.recorded(graph)) == (0, [])
        assert functions.timeline.kept_out == 1
        assert functions.synchronize() == 0
        assert functions.counter(0) == 0


def test_other_streams_go_on_beside_a_capture(functions: Functions) -> None:
    """Only the stream that captures is left alone; when it has ended, its marks are put again."""
    twin = functions.device.twin
    with functions.device.driver.create_stream() as one, functions.device.driver.create_stream() as other:
        with functions.device.driver.context.current():
            twin.cuStreamBeginCapture(one.handle, RELAXED)
            assert functions.mark(one.handle, 0, 1) == UNSUPPORTED
            assert functions.mark(other.handle, 1, 1) == 0
            twin.cuStreamEndCapture(one.handle)
        assert functions.mark(one.handle, 0, 1) == 0
        assert functions.synchronize() == 0
        assert (functions.counter(0), functions.counter(1)) == (1, 1)
        assert functions.timeline.kept_out == 1


def test_what_is_freed_during_a_capture_is_handed_on_after_it() -> None:
    """Invariant 2: a free on a stream that captures records nothing and loses nothing: after the mark others get it."""
    with TwinDevice() as device:
        register(device.twin)
        with jobs(device, isolate=False) as (one, other):
            address = one.take()
            device.twin.cuStreamBeginCapture(one.stream, RELAXED)
            one.free(address)
            assert on_stream.allocate_on(other.heap, REGION_BYTES, other.stream) < 0, "there is no mark to wait for"
            on_stream.settle(one.heap)  # where no capture is, the device would be waited for, which spoils this one
            assert device.twin.recorded(device.twin.cuStreamEndCapture(one.stream)[1]) == []
            on_stream.settle(one.heap)
            other.take()
