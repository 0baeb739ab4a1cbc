"""The twin's streams, events and copies: what happens on the device's timeline."""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time

from twin.entry import Value, entry, number, real, refuse_unless
from twin.memory import ALIAS, MemoryFunctions
from twin.timeline import Operation, Stream, run_shuffled

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_EQ = 1  # CU_STREAM_WAIT_VALUE_EQ
_WORD_BYTES = 8
_MODULO = 1 << 64


@dataclasses.dataclass
class _Event:
    recorded: int = 0
    completed: int = 0
    at_s: float = 0.0
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)


class StreamFunctions(MemoryFunctions):
    """The functions named ``cuStream*`` and ``cuEvent*``, copies and fills that Zico uses."""

    def __init__(
        self, devices: int, total_bytes: int, granularity_bytes: int, wait_deadline_s: float, *, has_memory_ops: bool
    ) -> None:
        """Start without streams."""
        super().__init__(devices, total_bytes, granularity_bytes)
        self.wait_deadline_s = wait_deadline_s
        self.has_memory_ops = has_memory_ops
        self._next_object = 0x57000010
        self._streams: dict[int, Stream] = {}
        self._default: dict[int, Stream] = {}  # context -> its stream 0
        self._events: dict[int, _Event] = {}
        self._is_paused = False

    # -- streams -----------------------------------------------------------------------------------

    @entry(context=True)
    def cuStreamCreate(self, flags: int) -> Value:
        """Create a stream."""
        refuse_unless(flags in (0, 1))
        with self.lock:
            handle = self._new()
            self._streams[handle] = self._start_stream()
            return real.CUstream(handle)

    @entry(context=True, undo=True)
    def cuStreamDestroy(self, stream: Value) -> None:
        """Destroy a stream once its work is done, or at once if it is lost."""
        found = self.stream(stream)
        refuse_unless(number(stream), "INVALID_HANDLE")
        try:
            found.synchronize()
        finally:
            with self.lock:
                del self._streams[number(stream)]
            found.close()

    @entry(context=True)
    def cuStreamSynchronize(self, stream: Value) -> None:
        """Wait for a stream."""
        self.stream(stream).synchronize()

    @entry(context=True)
    def cuCtxSynchronize(self) -> None:
        """Wait for all streams of the context; none of them may be capturing."""
        with self.lock:
            every = [one for one in self._all_streams() if one.context == self.current_context()]
        for stream in sorted(every, key=lambda one: not one.is_capturing()):
            stream.synchronize()

    @entry(context=True)
    def cuStreamQuery(self, stream: Value) -> None:
        """Tell whether a stream is idle."""
        refuse_unless(self.stream(stream).is_idle(), "NOT_READY")

    @entry(context=True)
    def cuStreamWriteValue64(self, stream: Value, addr: Value, value: Value, flags: int) -> None:
        """Write a word when the stream gets there."""
        address, word = self._word(addr, value)
        refuse_unless(flags == 0)
        self.stream(stream).put(Operation("write value", lambda: self.store(address, word)))

    @entry(context=True)
    def cuStreamWaitValue64(self, stream: Value, addr: Value, value: Value, flags: int) -> None:
        """Hold a stream up until a word is at least (cyclically), or exactly, a value."""
        address, word = self._word(addr, value)
        refuse_unless(flags in (_GEQ, _EQ), "NOT_SUPPORTED")

        def is_met() -> bool:
            ahead = (self.load(address) - word) % _MODULO
            return ahead == 0 if flags == _EQ else ahead < _MODULO // 2

        self.stream(stream).put(Operation("wait value", lambda: None, is_met))

    def _word(self, addr: Value, value: Value) -> tuple[int, int]:
        refuse_unless(self.has_memory_ops, "NOT_SUPPORTED")
        address = number(addr)
        refuse_unless(address % _WORD_BYTES == 0)
        self._refuse_unknown(address, _WORD_BYTES)
        return address, number(value)

    def _refuse_unknown(self, address: Value, size_bytes: int) -> None:
        """Refuse, as the driver does when it is called, what is neither mapped nor registered."""
        start = number(address)
        with self.lock:
            refuse_unless(self._registration(start - ALIAS, size_bytes) or self._covered(start, size_bytes))

    def _refuse_to_fill(self, address: Value, size_bytes: int) -> None:
        """Refuse, as an H200's driver does, several pieces of memory that the processor may touch as well."""
        with self.lock:
            refuse_unless(self.mappings_open_to_processor(number(address), size_bytes) < 2)

    def stream(self, handle: Value) -> Stream:
        """Return a stream of the current context; 0 is its default one."""
        context = self.current_context()
        with self.lock:
            if number(handle) == 0:
                if context not in self._default:
                    self._default[context] = self._start_stream()
                return self._default[context]
            refuse_unless(number(handle) in self._streams, "INVALID_HANDLE")
            found = self._streams[number(handle)]
            refuse_unless(found.context == context, "INVALID_HANDLE")
            return found

    def _start_stream(self) -> Stream:
        context = self.current_context()
        started = Stream(context, self.wait_deadline_s, lambda name: self._lose(context, name))
        if self._is_paused:
            started.hold(0)
        return started

    def _lose(self, context: int, name: str) -> None:
        if name != "LAUNCH_TIMEOUT":  # that one is the stream's own: the twin gave up, not the device
            self.poison(context, name)

    def _new(self) -> int:
        self._next_object += 0x10
        return self._next_object

    # -- tests' hand on the timeline ---------------------------------------------------------------

    def pause(self) -> None:
        """Hold every stream where it is, and those to come at their start."""
        with self.lock:
            self._is_paused = True
            for stream in self._all_streams():
                stream.hold(stream.done)

    def release(self) -> None:
        """Let every stream run freely again."""
        with self.lock:
            self._is_paused = False
            for stream in self._all_streams():
                stream.release()

    def run_shuffled(self, seed: int) -> list[int]:
        """Run the paused streams one operation at a time in an order that the seed alone decides."""
        return run_shuffled(self._all_streams(), seed)

    def _all_streams(self) -> list[Stream]:
        return [*self._default.values(), *self._streams.values()]

    # -- events ------------------------------------------------------------------------------------

    @entry(context=True)
    def cuEventCreate(self, _flags: int) -> Value:
        """Create an event."""
        with self.lock:
            handle = self._new()
            self._events[handle] = _Event()
            return real.CUevent(handle)

    @entry(context=True, undo=True)
    def cuEventDestroy(self, event: Value) -> None:
        """Destroy an event."""
        with self.lock:
            self._event(event)
            del self._events[number(event)]

    @entry(context=True)
    def cuEventRecord(self, event: Value, stream: Value) -> None:
        """Mark a place in a stream."""
        found = self._event(event)
        with self.lock:
            found.recorded += 1
            ticket = found.recorded

        def complete() -> None:
            with found.changed:
                found.completed, found.at_s = max(found.completed, ticket), time.monotonic()
                found.changed.notify_all()

        self.stream(stream).put(Operation("record event", complete))

    @entry(context=True)
    def cuEventQuery(self, event: Value) -> None:
        """Tell whether a place was reached."""
        found = self._event(event)
        refuse_unless(found.completed >= found.recorded, "NOT_READY")

    @entry(context=True)
    def cuEventSynchronize(self, event: Value) -> None:
        """Wait until a place is reached."""
        found = self._event(event)
        with found.changed:
            reached = found.changed.wait_for(lambda: found.completed >= found.recorded, self.wait_deadline_s)
        refuse_unless(reached, "LAUNCH_TIMEOUT")

    @entry(context=True)
    def cuStreamWaitEvent(self, stream: Value, event: Value, flags: int) -> None:
        """Hold a stream up until another has reached a place."""
        refuse_unless(flags == 0)
        found = self._event(event)
        ticket = found.recorded
        self.stream(stream).put(Operation("wait event", lambda: None, lambda: found.completed >= ticket))

    @entry(context=True)
    def cuEventElapsedTime(self, start: Value, end: Value) -> float:
        """Return the milliseconds between two places."""
        first, last = self._event(start), self._event(end)
        refuse_unless(min(first.completed, last.completed) > 0, "NOT_READY")
        return (last.at_s - first.at_s) * 1e3

    def _event(self, event: Value) -> _Event:
        refuse_unless(number(event) in self._events, "INVALID_HANDLE")
        return self._events[number(event)]

    # -- memory in stream order --------------------------------------------------------------------

    @entry(context=True)
    def cuMemsetD8Async(self, dst: Value, uc: int, n: int, stream: Value) -> None:
        """Fill memory."""
        self._refuse_unknown(dst, n)
        self._refuse_to_fill(dst, n)
        self.stream(stream).put(Operation("memset", lambda: self.fill(number(dst), uc, n)))

    @entry(context=True)
    def cuMemcpyDtoDAsync(self, dst: Value, src: Value, n: int, stream: Value) -> None:
        """Copy on the device."""
        self._copy_on_device(dst, src, n, stream)

    @entry(context=True)
    def cuMemcpyAsync(self, dst: Value, src: Value, n: int, stream: Value) -> None:
        """Copy between memory that the device reaches, wherever it lies."""
        self._copy_on_device(dst, src, n, stream)

    def _copy_on_device(self, dst: Value, src: Value, n: int, stream: Value) -> None:
        self._refuse_unknown(dst, n)
        self._refuse_unknown(src, n)
        self.stream(stream).put(Operation("copy", lambda: self.write(number(dst), self.read(number(src), n))))

    @entry(context=True)
    def cuMemcpyHtoDAsync(self, dst: Value, src: Value, n: int, stream: Value) -> None:
        """Copy to the device; ``src`` is an address."""
        self._refuse_unknown(dst, n)
        data = number(src)
        self.stream(stream).put(Operation("copy in", lambda: self.write(number(dst), ctypes.string_at(data, n))))

    @entry(context=True)
    def cuMemcpyDtoHAsync(self, dst: Value, src: Value, n: int, stream: Value) -> None:
        """Copy from the device; ``dst`` is an address."""
        self._refuse_unknown(src, n)
        to = number(dst)
        self.stream(stream).put(Operation("copy out", lambda: _put(to, self.read(number(src), n))))

    @entry(context=True)
    def cuMemsetD8(self, dst: Value, uc: int, n: int) -> None:
        """Fill memory, at once."""
        self._refuse_unknown(dst, n)
        self._refuse_to_fill(dst, n)
        self.stream(0).put(Operation("memset", lambda: self.fill(number(dst), uc, n)))
        self.stream(0).synchronize()

    @entry(context=True)
    def cuMemcpyHtoD(self, dst: Value, src: Value, n: int) -> None:
        """Copy to the device, at once; ``src`` is an address."""
        self._refuse_unknown(dst, n)
        data = ctypes.string_at(number(src), n)
        self.stream(0).put(Operation("copy in", lambda: self.write(number(dst), data)))
        self.stream(0).synchronize()

    @entry(context=True)
    def cuMemcpyDtoH(self, dst: Value, src: Value, n: int) -> None:
        """Copy from the device, at once; ``dst`` is an address."""
        self._refuse_unknown(src, n)
        to = number(dst)
        self.stream(0).put(Operation("copy out", lambda: _put(to, self.read(number(src), n))))
        self.stream(0).synchronize()


def _put(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
