"""The twin's stream captures: what is put on a stream goes into a graph instead, and happens at each launch of it.

Known limitations
    One stream a capture: events carry no capture to other streams.
    The manual does not list the calls that a capture's mode forbids. Here these are mapping,
    unmapping and waiting for a stream, for each thread as the modes say.
"""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from twin.entry import Value, entry, number, real, refuse_unless
from twin.streams import StreamFunctions

if TYPE_CHECKING:
    from twin.timeline import Operation, Stream

_MODE = real.CUstreamCaptureMode
_GLOBAL, _RELAXED = int(_MODE.CU_STREAM_CAPTURE_MODE_GLOBAL), int(_MODE.CU_STREAM_CAPTURE_MODE_RELAXED)
_FORBIDDEN = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuStreamSynchronize", "cuStreamQuery")
_STATUS = real.CUstreamCaptureStatus


class CaptureFunctions(StreamFunctions):
    """The functions named ``cuStream*Capture*``, and graphs."""

    def __init__(
        self, devices: int, total_bytes: int, granularity_bytes: int, wait_deadline_s: float, *, has_memory_ops: bool
    ) -> None:
        """Start without graphs."""
        super().__init__(devices, total_bytes, granularity_bytes, wait_deadline_s, has_memory_ops=has_memory_ops)
        self._graphs: dict[int, list[Operation]] = {}
        self._captures: dict[Stream, tuple[int, int]] = {}  # the thread that began it, and its mode
        self._modes: dict[int, int] = {}  # of threads

    def enter(self, function: str, *, needs_context: bool, undo: bool) -> None:
        """Check as for every function, and refuse what a capture forbids in this thread; that loses the capture."""
        super().enter(function, needs_context=needs_context, undo=undo)
        thread = threading.get_native_id()
        if function in _FORBIDDEN and self._modes.get(thread, _GLOBAL) != _RELAXED:
            for stream, (by, mode) in list(self._captures.items()):
                if mode == _GLOBAL or (by == thread and mode != _RELAXED):
                    stream.break_capture()

    @entry()
    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        """Set this thread's mode; returns the one before."""
        thread = threading.get_native_id()
        before = self._modes.get(thread, _GLOBAL)
        self._modes[thread] = int(mode)
        return before

    @entry(context=True)
    def cuStreamBeginCapture(self, stream: Value, mode: Value) -> None:
        """Record from now on; the default stream cannot."""
        refuse_unless(number(stream), "STREAM_CAPTURE_UNSUPPORTED")
        found = self.stream(stream)
        found.capture()
        self._captures[found] = threading.get_native_id(), int(mode)

    @entry(context=True)
    def cuStreamIsCapturing(self, stream: Value) -> Value:
        """Tell whether a stream records."""
        found = self.stream(stream)
        if found.is_broken():
            return _STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        active = found.is_capturing()
        return _STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE if active else _STATUS.CU_STREAM_CAPTURE_STATUS_NONE

    @entry(context=True)
    def cuStreamEndCapture(self, stream: Value) -> Value:
        """Return the graph of what was recorded."""
        found = self.stream(stream)
        self._captures.pop(found, None)
        recorded = found.end_capture()
        with self.lock:
            handle = self._new()
            self._graphs[handle] = recorded
            return real.CUgraph(handle)

    @entry(context=True)
    def cuGraphLaunch(self, graph: Value, stream: Value) -> None:
        """Put a graph's operations on a stream; here a graph needs no instantiation."""
        refuse_unless(number(graph) in self._graphs, "INVALID_HANDLE")
        for operation in self._graphs[number(graph)]:
            self.stream(stream).put(operation)

    def recorded(self, graph: Value) -> list[str]:
        """Return the names of a graph's operations."""
        return [operation.name for operation in self._graphs[number(graph)]]
