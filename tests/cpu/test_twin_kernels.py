"""Zico's kernels, launched by compiled code through the twin's C addresses, in stream order."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.driver_contract import create, reserve
from cpu.support.twin_device import TwinDevice
from twin.meanings import IMAGE, register
from zico.kernels import launch, progress, scrub, spin
from zico.kernels.launch import LAUNCHER
from zico.kernels.prepare import KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP, GIVEN_UP = 4, 5


class Kernels:
    """A device with the kernels loaded, a page of counters, and two streams."""

    def __init__(self, device: TwinDevice, *, by_kernel: bool) -> None:
        """Load them; ``by_kernel``: mark and wait by kernels rather than by stream memory operations."""
        register(device.twin)
        self.device = device
        self.words = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
        self.counters = device.driver.register_host(self.words.ctypes.data, mmap.PAGESIZE)
        self.streams = (device.driver.create_stream(), device.driver.create_stream())
        made = np.zeros(1, LAUNCHER)
        addresses = device.driver.addresses()
        made["launch_kernel"] = addresses["cuLaunchKernel"]
        made["stop"], made["given_up"] = self.at(STOP), self.at(GIVEN_UP)
        for kernel in KERNELS:
            if by_kernel or kernel.name == "zico_scrub":
                made[kernel.function.__name__] = device.driver.load_kernel(IMAGE, kernel.name)
        if not by_kernel:
            made["write_value"] = addresses["cuStreamWriteValue64_v2"]
            made["wait_value"] = addresses["cuStreamWaitValue64_v2"]
        self.launcher: Any = made

    def at(self, word: int) -> int:
        """Return the device's address of a counter."""
        return self.counters.device_address + 8 * word

    def close(self) -> None:
        """Give everything back."""
        for owned in (*self.streams, self.counters):
            owned.close()


@pytest.fixture(params=[True, False], ids=["by kernel", "by stream operation"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Return loaded kernels, with the device's context current."""
    with TwinDevice() as device, device.driver.context.current():
        kernels = Kernels(device, by_kernel=request.param)
        yield kernels
        kernels.words[STOP] = 1
        kernels.close()


def test_a_mark_of_one_stream_lets_another_go_on(kernels: Kernels) -> None:
    """A wait put before the mark holds its stream up until the mark's stream gets there; no CPU waits."""
    first, second = (stream.handle for stream in kernels.streams)
    kernels.device.twin.stream(first).hold(0)
    assert spin.wait(kernels.launcher[0], second, kernels.at(0), 7) == launch.SUCCESS
    assert progress.mark(kernels.launcher[0], second, kernels.at(1), 1) == launch.SUCCESS
    assert progress.mark(kernels.launcher[0], first, kernels.at(0), 7) == launch.SUCCESS
    assert list(kernels.words[:2]) == [0, 0]
    kernels.device.twin.stream(first).release()
    kernels.device.driver.synchronize(second)
    assert list(kernels.words[:2]) == [7, 1]


def test_scrubbing_happens_behind_what_is_on_the_stream(kernels: Kernels) -> None:
    """What earlier work wrote is gone, what lies beside the range stays."""
    device, stream = kernels.device, kernels.streams[0].handle
    unit = device.driver.granularity_bytes
    with create(device, 1) as memory, reserve(device, 1) as window:
        device.driver.map(window, 0, memory, 0, unit)
        device.driver.call("cuMemsetD8Async", window.handle, 0xA5, unit, stream)
        assert scrub.zero(kernels.launcher[0], stream, window.handle + 16, 64) == launch.SUCCESS
        device.driver.synchronize(stream)
        assert device.read(window.handle, 96) == b"\xa5" * 16 + bytes(64) + b"\xa5" * 16


def test_a_spinning_kernel_stops_when_it_is_told_to() -> None:
    """A wait for a counter that nobody writes ends by the stop word, and says that it gave up."""
    with TwinDevice() as device, device.driver.context.current():
        kernels = Kernels(device, by_kernel=True)
        stream = kernels.streams[0].handle
        assert spin.wait(kernels.launcher[0], stream, kernels.at(0), 3) == launch.SUCCESS
        kernels.words[STOP] = 1
        device.driver.synchronize(stream)
        assert kernels.words[GIVEN_UP] == 3
        kernels.close()
