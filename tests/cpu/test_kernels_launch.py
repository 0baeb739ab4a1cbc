"""Putting kernels on a stream from compiled code, over C functions that keep what they were called with."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu.support.twin_device import TwinDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from twin.meanings import register
from zico.kernels import launch, prepare, progress, scrub, spin

from zico.base.compiled import array_at, compiled
from zico.base.errors import ConfigError
from zico.base.libc import libc_address, monotonic_ns

DEADLINE_S = 10.0
STREAM, COUNTER, REGION = 0x7F00_1234_5670, 0x7F00_0000_0040, 0x7F10_0000_0000
PROGRESS, SPIN, SCRUB, STOP, GIVEN_UP = 11, 12, 13, 0x1000, 0x1008
PARAMETERS = {PROGRESS: 2, SPIN: 4, SCRUB: 2}
WORDS = st.integers(-(2**63), 2**63 - 1)

_I64, _U32 = ctypes.c_int64, ctypes.c_uint
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _I64, *[_U32] * 7, _I64, ctypes.POINTER(ctypes.POINTER(_I64)), _I64)
_STREAM_VALUE = ctypes.CFUNCTYPE(ctypes.c_int, _I64, _I64, _I64, _U32)


class Device:
    """A driver's C functions, of the real signatures; each keeps its arguments and answers with ``status``."""

    def __init__(self, *, capability: tuple[int, int] = (9, 0), waits: bool = True) -> None:
        """Nothing was called yet."""
        self.facts = SimpleNamespace(compute_capability=capability, waits_on_stream=waits)
        self.calls: list[tuple[Any, ...]] = []
        self.status = launch.SUCCESS
        self.images: dict[str, bytes] = {}
        self._functions = {
            "cuLaunchKernel": _LAUNCH(self._launch),
            "cuStreamWriteValue64_v2": _STREAM_VALUE(lambda *arguments: self._keep("write", *arguments)),
            "cuStreamWaitValue64_v2": _STREAM_VALUE(lambda *arguments: self._keep("wait", *arguments)),
        }

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the functions."""
        return {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in self._functions.items()}

    def load_kernel(self, image: bytes, name: str) -> int:
        """Keep the image; the handles are numbers in order."""
        self.images[name] = image
        return 10 + len(self.images)

    def launcher(self) -> Any:  # noqa: ANN401 - a record
        """Return a launcher over this device, with all kernels."""
        return prepare.prepare(self, STOP, GIVEN_UP, prepare.KERNELS)[0]

    def _launch(self, kernel: int, *rest: Any) -> int:  # noqa: ANN401 - ctypes values
        *dimensions, shared_bytes, stream, parameters, extra = rest
        values = tuple(parameters[i].contents.value for i in range(PARAMETERS[kernel]))
        return self._keep("launch", kernel, dimensions, shared_bytes, stream, values, extra)

    def _keep(self, *call: Any) -> int:  # noqa: ANN401 - ctypes values
        self.calls.append(call)
        return self.status


@settings(deadline=None)
@given(stream=WORDS, counter=WORDS.map(lambda word: word & ~7), value=WORDS)
def test_a_mark_is_one_kernel_of_one_thread(stream: int, counter: int, value: int) -> None:
    """Without stream operations the progress kernel is launched, with the counter's address and the value."""
    device = Device(waits=False)
    assert progress.mark(device.launcher(), stream, counter, value) == launch.SUCCESS
    assert device.calls == [("launch", PROGRESS, [1, 1, 1, 1, 1, 1], 0, stream, (counter, value), 0)]


def test_a_mark_is_a_stream_operation() -> None:
    """The stream writes the counter behind a fence (flags 0): less of the processor than a kernel takes."""
    device = Device()
    assert progress.mark(device.launcher(), STREAM, COUNTER, 9) == launch.SUCCESS
    assert device.calls == [("write", STREAM, COUNTER, 9, 0)]


def test_a_wait_is_a_stream_operation() -> None:
    """The stream waits for the counter to be at least the value (flags 0)."""
    device = Device()
    assert spin.wait(device.launcher(), STREAM, COUNTER, 9) == launch.SUCCESS
    assert device.calls == [("wait", STREAM, COUNTER, 9, 0)]


def test_a_device_without_stream_operations_spins() -> None:
    """Without stream memory operations a kernel waits, which knows where it is told to stop."""
    device = Device(waits=False)
    assert spin.wait(device.launcher(), STREAM, COUNTER, 9) == launch.SUCCESS
    assert device.calls == [("launch", SPIN, [1, 1, 1, 1, 1, 1], 0, STREAM, (COUNTER, 9, STOP, GIVEN_UP), 0)]


def test_a_device_too_old_for_kernels_uses_stream_operations() -> None:
    """No kernel is loaded; a mark is written by the stream behind a fence (flags 0), and scrubbing is refused."""
    device = Device(capability=(6, 1))
    launcher = device.launcher()
    assert not device.images
    assert progress.mark(launcher, STREAM, COUNTER, 9) == launch.SUCCESS
    assert scrub.zero(launcher, STREAM, REGION, 64) == launch.NOT_SUPPORTED
    assert device.calls == [("write", STREAM, COUNTER, 9, 0)]


def test_a_device_with_neither_is_refused() -> None:
    """A device that has no way to wait is one clear sentence."""
    with pytest.raises(ConfigError, match=r"compute capability 6\.1 can wait .* use a GPU of 2017"):
        Device(capability=(6, 1), waits=False).launcher()


@settings(deadline=None)
@given(stores=st.integers(1, 2**30))
def test_scrubbing_has_a_thread_for_each_store_up_to_a_bound(stores: int) -> None:
    """Blocks cover the region, or are as many as are useful; none is empty."""
    device = Device()
    size_bytes = stores * scrub.STORE_BYTES
    assert scrub.zero(device.launcher(), STREAM, REGION, size_bytes) == launch.SUCCESS
    ((_, kernel, (blocks, *others), _, stream, values, _),) = device.calls
    assert (kernel, others, stream, values) == (SCRUB, [1, 1, scrub.THREADS, 1, 1], STREAM, (REGION, size_bytes))
    assert 1 <= blocks <= scrub.MAX_BLOCKS
    assert (blocks - 1) * scrub.THREADS < stores
    assert blocks == scrub.MAX_BLOCKS or stores <= blocks * scrub.THREADS


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (progress.mark, (COUNTER + 4, 1)),
        (spin.wait, (COUNTER + 1, 1)),
        (scrub.zero, (REGION, 17)),
        (scrub.zero, (REGION + 8, 32)),
        (scrub.zero, (REGION, -16)),
    ],
)
def test_what_no_kernel_could_do_is_refused(function: Any, arguments: tuple[int, int]) -> None:  # noqa: ANN401
    """A counter or a region that is not aligned is an invalid value, and the driver is not asked."""
    device = Device()
    assert function(device.launcher(), STREAM, *arguments) == launch.INVALID_VALUE
    assert not device.calls


def test_scrubbing_nothing_launches_nothing() -> None:
    """An empty region is scrubbed already: a launch of no blocks would be an error."""
    device = Device()
    assert scrub.zero(device.launcher(), STREAM, REGION, 0) == launch.SUCCESS
    assert not device.calls


@pytest.mark.parametrize("device", [Device(), Device(capability=(6, 1)), Device(waits=False)])
def test_the_drivers_answer_comes_back(device: Device) -> None:
    """Whatever the driver answers is returned, whichever way was taken."""
    device.status = 719
    launcher = device.launcher()
    assert progress.mark(launcher, STREAM, COUNTER, 9) == 719
    assert spin.wait(launcher, STREAM, COUNTER, 9) == 719


def test_an_answer_is_the_lower_half_of_the_register() -> None:
    """A C function that returns an int leaves the upper half of the register as it likes; it is no part of it."""
    function = ctypes.CFUNCTYPE(_I64, _I64, _I64, _I64, _U32)(lambda *_: (0xABCD << 32) | 700)
    record = np.zeros(1, launch.LAUNCHER)
    record["write_value"] = record["wait_value"] = ctypes.cast(function, ctypes.c_void_p).value
    assert progress.mark(record[0], STREAM, COUNTER, 9) == 700
    assert spin.wait(record[0], STREAM, COUNTER, 9) == 700


@compiled
def mark_until_told(launcher: launch.Record, words_address: int, end_ns: int) -> None:
    """Make marks and count them in word 0, until word 1 is set; word 2 is set when it was too late."""
    words = array_at(words_address, 3, np.int64)
    while words[1] == 0 and words[2] == 0:
        progress.mark(launcher, 0, 0, words[0])
        words[0] += 1
        words[2] = monotonic_ns() > end_ns


def test_marks_need_no_gil() -> None:
    """While one thread makes marks, Python goes on in another: it sees them, and can end them."""
    record = np.zeros(1, launch.LAUNCHER)
    record["launch_kernel"] = libc_address("getppid")  # a C function that minds no arguments and needs no Python
    record["progress"] = PROGRESS
    words = np.zeros(3, np.int64)
    mark_until_told(record[0], words.ctypes.data, 0)  # compiled before the clock runs
    words[:] = 0
    end_ns = time.monotonic_ns() + int(DEADLINE_S * 1e9)
    arguments = (record[0], words.ctypes.data, end_ns)
    thread = threading.Thread(target=mark_until_told, args=arguments, daemon=True)
    thread.start()
    while words[0] == 0 and time.monotonic_ns() < end_ns:
        thread.join(0.001)
    words[1] = 1
    thread.join(2 * DEADLINE_S)
    assert words[0] > 0
    assert words[2] == 0


@pytest.mark.parametrize(("waits", "loaded"), [(True, []), (False, ["zico_progress", "zico_spin"])])
def test_a_job_loads_no_kernel_that_it_does_not_call(waits: bool, loaded: list[str]) -> None:  # noqa: FBT001
    """Each kernel takes milliseconds of a job's start: a device with stream operations needs none of them."""
    device = Device(waits=waits)
    prepare.prepare(device, STOP, GIVEN_UP)
    assert list(device.images) == loaded


def test_preparing_loads_every_kernel_under_its_name() -> None:
    """The driver gets one image for each kernel, PTX that has an entry of that name."""
    device = Device()
    launcher = device.launcher()
    assert set(device.images) == {kernel.name for kernel in prepare.KERNELS}
    assert all(f".entry {name}(".encode() in image for name, image in device.images.items())
    assert (launcher["progress"], launcher["spin"], launcher["scrub"]) == (PROGRESS, SPIN, SCRUB)
    assert (launcher["stop"], launcher["given_up"]) == (STOP, GIVEN_UP)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_driver_runs_what_was_prepared(waits: int) -> None:
    """Over the driver's software twin: a stream waits for another's mark, then scrubs; the words show the order."""
    words = np.zeros(6, np.int64)
    region = words[4:]  # aligned as a scrubbed region must be: arrays are
    with contextlib.ExitStack() as undo:
        device = undo.enter_context(TwinDevice(attributes={"CAN_USE_64_BIT_STREAM_MEM_OPS": waits}))
        undo.enter_context(device.driver.context.current())
        register(device.twin)
        shared = undo.enter_context(contextlib.closing(device.driver.register_host(words.ctypes.data, words.nbytes)))
        first, second = (undo.enter_context(contextlib.closing(device.driver.create_stream())) for _ in range(2))
        counter, stop, given_up, _, scrubbed, _ = (shared.device_address + 8 * i for i in range(6))
        launcher = prepare.prepare(device.driver, stop, given_up, [scrub.SCRUB])[0]
        region[:] = -1
        assert spin.wait(launcher, second.handle, counter, 5) == launch.SUCCESS
        assert scrub.zero(launcher, second.handle, scrubbed, 16) == launch.SUCCESS
        assert progress.mark(launcher, first.handle, counter, 4) == launch.SUCCESS
        device.driver.synchronize(first.handle)
        assert words.tolist() == [4, 0, 0, 0, -1, -1]
        assert progress.mark(launcher, first.handle, counter, 5) == launch.SUCCESS
        device.driver.synchronize(second.handle)
        assert words.tolist() == [5, 0, 0, 0, 0, 0]
        if not waits:  # a kernel that nobody's mark ends is ended by the stop word
            assert spin.wait(launcher, second.handle, counter, 9) == launch.SUCCESS
            words[1] = 1
            device.driver.synchronize(second.handle)
            assert words[2] == 9
