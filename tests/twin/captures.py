"""The twin's stream captures: what is put on a stream goes into a graph instead, and happens at each launch of it.

Known limitations
    One stream a capture: events carry no capture to other streams. Every capture is as if its mode
    were relaxed, but for waiting for a stream or a context that captures, which loses the capture
    as the driver's manual says.
"""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

from typing import TYPE_CHECKING

from twin.entry import Value, entry, number, real, refuse_unless
from twin.streams import StreamFunctions

if TYPE_CHECKING:
    from twin.timeline import Operation

_STATUS = real.CUstreamCaptureStatus


class CaptureFunctions(StreamFunctions):
    """The functions named ``cuStream*Capture*``, and graphs."""

    def __init__(
        self, devices: int, total_bytes: int, granularity_bytes: int, wait_deadline_s: float, *, has_memory_ops: bool
    ) -> None:
        """Start without graphs."""
        super().__init__(devices, total_bytes, granularity_bytes, wait_deadline_s, has_memory_ops=has_memory_ops)
        self._graphs: dict[int, list[Operation]] = {}

    @entry(context=True)
    def cuStreamBeginCapture(self, stream: Value, _mode: Value) -> None:
        """Record from now on; the default stream cannot."""
        refuse_unless(number(stream), "STREAM_CAPTURE_UNSUPPORTED")
        self.stream(stream).capture()

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
        recorded = self.stream(stream).end_capture()
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
