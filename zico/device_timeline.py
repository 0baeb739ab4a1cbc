"""A job's way onto the timeline of its GPU: marks and waits on any stream, by address, with the right context current.

Frameworks call the heap from threads of their own, of which some have no CUDA context yet and some another one; the
driver needs the device's primary context. Each call makes it current, and gives a thread that had another its own back.

Known limitations
    One call at a time: the heap calls inside its mutex.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numba import types

from zico.compiled import call, callback, inlined, record_at
from zico.heap.timeline import Timeline
from zico.kernels import progress, spin
from zico.kernels.launch import LAUNCHER, WORD_BYTES
from zico.kernels.prepare import prepare

if TYPE_CHECKING:
    from zico.driver.cuda.driver import CudaDriver
    from zico.pool.table import PoolTable

DOOR = np.dtype(
    [
        ("launcher", LAUNCHER),
        ("context", "i8"),
        ("get_current", "i8"),  # C functions of the driver
        ("set_current", "i8"),
        ("synchronize", "i8"),
        ("current", "i8"),  # get_current writes here
        ("current_address", "i8"),
    ],
    align=True,
)
"""What the functions below are given as their context."""

_I64 = types.int64
_REGISTERED_BYTES = mmap.PAGESIZE

Record = Any


@inlined
def _enter(door: Record) -> int:
    """Make the device's context current; returns the one to be put back, 0 for none."""
    door.current = 0
    call(door.get_current, (door.current_address,))
    others = door.current
    if others == door.context:
        return 0
    call(door.set_current, (door.context,))
    return others


@inlined
def _leave(door: Record, others: int) -> None:
    if others != 0:
        call(door.set_current, (others,))


@callback(_I64(_I64, _I64, _I64, _I64))
def mark(address: int, stream: int, counter: int, value: int) -> int:
    """Let a stream set a counter when its work so far is done."""
    door = record_at(address, DOOR)
    others = _enter(door)
    status = progress.mark(record_at(address, LAUNCHER), stream, counter, value)
    _leave(door, others)
    return status


@callback(_I64(_I64, _I64, _I64, _I64))
def wait(address: int, stream: int, counter: int, value: int) -> int:
    """Let a stream go on when a counter has reached a value."""
    door = record_at(address, DOOR)
    others = _enter(door)
    status = spin.wait(record_at(address, LAUNCHER), stream, counter, value)
    _leave(door, others)
    return status


@callback(_I64(_I64))
def synchronize(address: int) -> int:
    """Return when the device has done all that this process has asked for."""
    door = record_at(address, DOOR)
    others = _enter(door)
    status = call(door.synchronize, ())
    _leave(door, others)
    return status


class DeviceTimeline:
    """The functions, and everything on the device that they need; closed only by tests, as the heap is."""

    def __init__(self, pool: PoolTable) -> None:
        """Load the kernels and register the counters with the pool's device.

        Raises:
            ConfigError: The device can neither wait by itself nor by a kernel.
            DriverError: It refuses; nothing is left behind.
        """
        driver = cast("CudaDriver", pool.driver)
        self._words = mmap.mmap(-1, _REGISTERED_BYTES)  # zico.kernels.spin: the words "stop" and "given up"
        self._array = np.frombuffer(self._words, np.int64)
        with contextlib.ExitStack() as undo:
            words = undo.enter_context(driver.register_host(self._array.ctypes.data, _REGISTERED_BYTES))
            launcher = prepare(driver, words.device_address, words.device_address + WORD_BYTES)
            self._door = np.zeros(1, DOOR)
            self._fill(launcher[0], driver)
            self.functions = Timeline(
                mark.address,
                wait.address,
                synchronize.address,
                pool.register_counters(),
                context_address=self._door.ctypes.data,
            )
            self._undo = undo.pop_all()

    def _fill(self, launcher: Any, driver: CudaDriver) -> None:  # noqa: ANN401 - one LAUNCHER record
        addresses = driver.addresses()
        door = self._door[0]
        door["launcher"] = launcher
        door["context"] = driver.context.retain()
        door["get_current"] = addresses["cuCtxGetCurrent"]
        door["set_current"] = addresses["cuCtxSetCurrent"]
        door["synchronize"] = addresses["cuCtxSynchronize"]
        door["current_address"] = self._door.ctypes.data + DOOR.fields["current"][1]  # type: ignore[index]

    @property
    def given_up(self) -> int:
        """Return the value that a kernel was waiting for when it gave up, 0 if none did."""
        return int(self._array[1])

    def close(self) -> None:
        """Let no kernel wait any more, and give the device back what is registered."""
        self._array[0] = 1
        self._undo.close()
