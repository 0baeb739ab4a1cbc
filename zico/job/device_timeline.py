"""A job's way onto the timeline of its GPU: marks, waits and scrubbing on any stream, with the right context current.

Frameworks call the heap from threads of their own, of which some have no CUDA context yet and some
another one. The driver needs the device's primary context. Each call makes it current, and gives a
thread that had another its own back.

Guarantees
    Nothing is ever recorded in a CUDA graph: what would be put on a stream that captures is
    refused. It would not be done now, and would be done again, with a value long past, at each
    launch of the graph.

Known limitations
    One call at a time: the heap calls inside its mutex.
    Waiting for the whole device while a stream captures fails, and spoils the capture.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, cast

import numpy as np
from numba import types

from zico.base.compiled import call, callback, inlined, record_at
from zico.base.records import I4, I8, Record, dtype_of
from zico.device.mapping import enter_context, leave_context
from zico.device.mapping import status as status_of
from zico.device.record import DeviceRecord
from zico.heap.cuda.timeline import Timeline
from zico.kernels import progress, scrub, spin
from zico.kernels.launch import WORD_BYTES, Launcher
from zico.kernels.prepare import prepare

if TYPE_CHECKING:
    from zico.device.cuda.driver import CudaDriver
    from zico.pool.table import PoolTable


class Door(Record):
    """What the functions below are given as their context."""

    launcher: Launcher
    device: DeviceRecord
    capturing: I4  # cuStreamIsCapturing writes here
    mode: I4  # cuThreadExchangeStreamCaptureMode swaps this
    kept_out: I8  # of graphs: refused, since the stream captured
    own_stream: I8  # which never captures
    looks: I8  # that have put something there, ever
    look_word: I8  # which they set, on the device


DOOR = dtype_of(Door)

_I64 = types.int64
_REGISTERED_BYTES = mmap.PAGESIZE
_MODE = DOOR.fields["mode"][1]
_CAPTURING = DOOR.fields["capturing"][1]
_CAPTURE_UNSUPPORTED = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@inlined
def _capture_of(address: int, door: Door, stream: int) -> int:
    """Return 0 where something may be put on a stream, else the status that says why not."""
    door.capturing = 0
    refused = status_of(call(door.device.cuStreamIsCapturing, (stream, address + _CAPTURING)))
    if refused == 0 and door.capturing == 0:
        return 0
    door.kept_out += 1
    return refused if refused != 0 else _CAPTURE_UNSUPPORTED


@inlined
def _set_mode(address: int, door: Door, mode: int) -> int:
    door.mode = mode
    call(door.device.cuThreadExchangeStreamCaptureMode, (address + _MODE,))
    return door.mode


@callback(_I64(_I64, _I64, _I64, _I64))
def mark(address: int, stream: int, counter: int, value: int) -> int:
    """Let a stream set a counter when its work so far is done."""
    door = record_at(address, DOOR)
    others = enter_context(door.device)
    status = _capture_of(address, door, stream)
    if status == 0:
        status = progress.mark(door.launcher, stream, counter, value)
    leave_context(door.device, others)
    return status


@callback(_I64(_I64, _I64, _I64, _I64))
def wait(address: int, stream: int, counter: int, value: int) -> int:
    """Let a stream go on when a counter has reached a value."""
    door = record_at(address, DOOR)
    others = enter_context(door.device)
    status = _capture_of(address, door, stream)
    if status == 0:
        status = spin.wait(door.launcher, stream, counter, value)
    leave_context(door.device, others)
    return status


@callback(_I64(_I64, _I64, _I64, _I64))
def zero(address: int, stream: int, region: int, size_bytes: int) -> int:
    """Let a stream zero a region."""
    door = record_at(address, DOOR)
    others = enter_context(door.device)
    status = _capture_of(address, door, stream)
    if status == 0:
        status = scrub.zero(door.launcher, stream, region, size_bytes)
    leave_context(door.device, others)
    return status


@callback(_I64(_I64))
def synchronize(address: int) -> int:
    """Return when the device has done all that this process has asked for."""
    door = record_at(address, DOOR)
    others = enter_context(door.device)
    status = call(door.device.cuCtxSynchronize, ())
    leave_context(door.device, others)
    return status


@callback(_I64(_I64, _I64))
def is_capturing(address: int, stream: int) -> int:
    """Tell whether what a stream is given goes into a graph; 0 also where the driver refuses to tell."""
    door = record_at(address, DOOR)
    others = enter_context(door.device)
    door.capturing = 0
    refused = status_of(call(door.device.cuStreamIsCapturing, (stream, address + _CAPTURING)))
    leave_context(door.device, others)
    return 1 if refused == 0 and door.capturing != 0 else 0


@callback(_I64(_I64, _I64))
def exchange_mode(address: int, mode: int) -> int:
    """Set which calls this thread may make while streams capture; returns what was set before."""
    return _set_mode(address, record_at(address, DOOR), mode)


@callback(_I64(_I64, _I64))
def synchronize_stream(address: int, stream: int) -> int:
    """Return when a stream has done all that it was given."""
    door = record_at(address, DOOR)
    others = enter_context(door.device)
    status = call(door.device.cuStreamSynchronize, (stream,))
    leave_context(door.device, others)
    return status


@callback(_I64(_I64))
def look(address: int) -> int:
    """Tell by which status the context is lost, 0 while none is seen; waits for nothing.

    A stream of Zico's own is asked. A stream that was given nothing since the fault may answer that
    it has done everything. So one that has gets something to do, about which the next look asks.
    Captures of other threads forbid such questions, except in a thread whose mode is relaxed.
    """
    door = record_at(address, DOOR)
    others = enter_context(door.device)
    before = _set_mode(address, door, _RELAXED)
    found = status_of(call(door.device.cuStreamQuery, (door.own_stream,)))
    if found == 0:
        door.looks += 1
        found = progress.mark(door.launcher, door.own_stream, door.look_word, door.looks)
    _set_mode(address, door, before)
    leave_context(door.device, others)
    return 0 if found == _NOT_READY else found


class DeviceTimeline:
    """The functions, and everything on the device that they need; closed only by tests, as the heap is."""

    def __init__(self, pool: PoolTable, spacing_bytes: int | None = None) -> None:
        """Load the kernels and register the counters with the pool's device.

        Args:
            pool: Of a CUDA device.
            spacing_bytes: Freed on a stream between two marks, whoever is there; ``None``: by
                ``Timeline.spacing_bytes``, ``alone_bytes`` and ``beside_bytes``.

        Raises:
            ConfigError: The device can neither wait by itself nor by a kernel.
            DriverError: It refuses; nothing is left behind.
        """
        driver = cast("CudaDriver", pool.driver)
        spacings = ("spacing_bytes", "alone_bytes", "beside_bytes")
        spacing = {} if spacing_bytes is None else dict.fromkeys(spacings, spacing_bytes)
        # The words "stop" and "given up" of zico.kernels.spin, and the one that looks set.
        self._words = mmap.mmap(-1, _REGISTERED_BYTES)
        self._array = np.frombuffer(self._words, np.int64)
        with contextlib.ExitStack() as undo:
            words = undo.enter_context(driver.register_host(self._array.ctypes.data, _REGISTERED_BYTES))
            stream = undo.enter_context(driver.create_stream())
            also = (scrub.SCRUB,) if pool.header["isolate"] else ()
            launcher = prepare(driver, words.device_address, words.device_address + WORD_BYTES, also)
            self._door = np.zeros(1, DOOR)
            self._door[0]["launcher"] = launcher[0]
            driver.fill_device(self._door[0]["device"], pool.memory)
            self._door[0]["own_stream"] = stream.handle
            self._door[0]["look_word"] = words.device_address + 2 * WORD_BYTES
            self.functions = Timeline(
                mark.address,
                wait.address,
                synchronize.address,
                pool.register_counters(),
                context_address=self._door.ctypes.data,
                **spacing,
                scrub_address=zero.address if launcher[0]["scrub"] else 0,
                capture_stream=stream.handle,
                is_capturing_address=is_capturing.address,
                exchange_mode_address=exchange_mode.address,
                synchronize_stream_address=synchronize_stream.address,
                look_address=look.address,
            )
            self._undo = undo.pop_all()

    @property
    def given_up(self) -> int:
        """Return the value that a kernel was waiting for when it gave up, 0 if none did."""
        return int(self._array[1])

    @property
    def kept_out(self) -> int:
        """Return how often a mark, a wait or scrubbing was refused, since its stream captured or could not be asked."""
        return int(self._door[0]["kept_out"])

    def close(self) -> None:
        """Let no kernel wait any more, and give the device back what is registered."""
        self._array[0] = 1
        self._undo.close()
