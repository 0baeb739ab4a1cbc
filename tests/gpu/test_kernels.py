"""Device kernels on a real GPU. Without one they fail: this folder is only run where there is one."""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from zico.kernels import digest, launch, prepare, progress, scrub, spin
from zico.kernels.compilation import image

from zico.base.errors import DriverError
from zico.device.cuda import CudaDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 30.0
NOT_READY = 600
"""``CUDA_ERROR_NOT_READY``: work of the stream is still to be done."""
COUNTER, OTHER, STOP, GIVEN_UP = range(4)


class Timelines:
    """Two streams, words that device and processor share, and a launcher."""

    def __init__(self, driver: CudaDriver, words: Any, device_address: int, streams: tuple[int, int]) -> None:  # noqa: ANN401
        """Prepare the kernels."""
        self.driver = driver
        self.words = words
        self.streams = streams
        self._device_address = device_address
        self.launcher = prepare.prepare(driver, self.at(STOP), self.at(GIVEN_UP), prepare.KERNELS)

    def at(self, word: int) -> int:
        """Return the device address of a word."""
        return self._device_address + launch.WORD_BYTES * word

    def finish(self, stream: int) -> None:
        """Wait for a stream, with a deadline: a device that hangs must not hang the test."""
        end = time.monotonic() + DEADLINE_S
        while not self.is_idle(stream):
            assert time.monotonic() < end, "the stream does not end"

    def is_idle(self, stream: int) -> bool:
        """Tell whether all of a stream's work is done."""
        try:
            self.driver.call("cuStreamQuery", stream)
        except DriverError as error:
            if error.status != NOT_READY:
                raise
            return False
        return True


@pytest.fixture
def timelines() -> Iterator[Timelines]:
    """Return a device's; the context is current in the test's thread."""
    driver = CudaDriver(0)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    words = np.frombuffer(page, np.int64)
    with driver.context.current():
        registered = driver.register_host(words.ctypes.data, mmap.PAGESIZE)
        streams = (driver.create_stream(), driver.create_stream())
        made = Timelines(driver, words, registered.device_address, (streams[0].handle, streams[1].handle))
        yield made
        words[[COUNTER, STOP]] = 2**62  # whatever a failed test left waiting goes on
        for owned in (*streams, registered):
            owned.close()
    driver.close()


@pytest.mark.parametrize("by_kernel", [True, False])
def test_marks_arrive_in_order(timelines: Timelines, by_kernel: bool) -> None:  # noqa: FBT001
    """The processor sees the counter only grow, up to the last mark."""
    if by_kernel:
        timelines.launcher["write_value"] = 0
    stream = timelines.streams[0]
    for value in range(1, 1001):
        assert progress.mark(timelines.launcher[0], stream, timelines.at(COUNTER), value) == launch.SUCCESS
    seen = [0]
    end = time.monotonic() + DEADLINE_S
    while seen[-1] < 1000 and time.monotonic() < end:
        seen.append(int(timelines.words[COUNTER]))
    assert seen[-1] == 1000
    assert seen == sorted(seen)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_stream_waits_for_anothers_mark(timelines: Timelines, by_kernel: bool) -> None:  # noqa: FBT001
    """What stands behind a wait runs only after the other stream's mark, without the processor."""
    if by_kernel:
        timelines.launcher["wait_value"] = 0
    launcher = timelines.launcher[0]
    first, second = timelines.streams
    assert spin.wait(launcher, second, timelines.at(COUNTER), 5) == launch.SUCCESS
    assert progress.mark(launcher, second, timelines.at(OTHER), 1) == launch.SUCCESS
    assert progress.mark(launcher, first, timelines.at(COUNTER), 4) == launch.SUCCESS
    timelines.finish(first)
    assert not timelines.is_idle(second)
    assert timelines.words[OTHER] == 0
    assert progress.mark(launcher, first, timelines.at(COUNTER), 5) == launch.SUCCESS
    timelines.finish(second)
    assert timelines.words[OTHER] == 1
    assert timelines.words[GIVEN_UP] == 0


def test_a_kernel_that_waits_for_nobody_gives_up_when_told(timelines: Timelines) -> None:
    """The stop word ends a wait, and the other word says for which value it was."""
    timelines.launcher["wait_value"] = 0
    stream = timelines.streams[0]
    assert spin.wait(timelines.launcher[0], stream, timelines.at(COUNTER), 77) == launch.SUCCESS
    timelines.words[STOP] = 1
    timelines.finish(stream)
    assert timelines.words[GIVEN_UP] == 77


@pytest.mark.parametrize("stores", [1, scrub.THREADS + 1, 1 << 20])
def test_scrubbing_zeroes_the_region_and_nothing_else(timelines: Timelines, stores: int) -> None:
    """Every byte of the region is zero afterwards, and the bytes on both sides are as they were."""
    driver, stream = timelines.driver, timelines.streams[0]
    size_bytes = stores * scrub.STORE_BYTES
    unit = driver.granularity_bytes
    room_bytes = -(-(size_bytes + 2 * scrub.STORE_BYTES) // unit) * unit
    window, memory = driver.reserve(room_bytes), driver.create_memory(room_bytes, "scrub")
    driver.map(window, 0, memory, 0, room_bytes)
    driver.call("cuMemsetD8", window.handle, 0xA5, room_bytes)
    region = window.handle + scrub.STORE_BYTES
    assert scrub.zero(timelines.launcher[0], stream, region, size_bytes) == launch.SUCCESS
    timelines.finish(stream)
    found = np.empty(room_bytes, np.uint8)
    driver.call("cuMemcpyDtoH", found.ctypes.data, window.handle, room_bytes)
    meant = np.full(room_bytes, 0xA5, np.uint8)
    scrub.meaning(meant[scrub.STORE_BYTES : scrub.STORE_BYTES + size_bytes])
    assert np.array_equal(found, meant)
    window.close()
    memory.close()


@pytest.mark.parametrize("n", [1, 100, digest.THREADS * digest.MAX_BLOCKS + 33])
def test_a_digest_is_what_its_meaning_says(timelines: Timelines, n: int) -> None:
    """However many threads read the words, the lanes get the sums that the meaning gives them."""
    driver, stream = timelines.driver, timelines.streams[0]
    launcher = timelines.launcher[0].copy()
    for kernel in digest.KERNELS:
        launcher[kernel.function.__name__] = driver.load_kernel(image(kernel), kernel.name)
    words = np.random.default_rng(n).integers(0, 2**63, n, np.int64).view(np.uint64)
    unit = driver.granularity_bytes
    room_bytes = -(-(words.nbytes + 8 * digest.LANES) // unit) * unit
    window, memory = driver.reserve(room_bytes), driver.create_memory(room_bytes, "digest")
    driver.map(window, 0, memory, 0, room_bytes)
    target = window.handle + words.nbytes
    driver.call("cuMemcpyHtoD", window.handle, words.ctypes.data, words.nbytes)
    driver.call("cuMemsetD8", target, 0, 8 * digest.LANES)
    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint64)
    pinned = driver.register_host(page.ctypes.data, page.nbytes)
    meant = np.zeros(digest.LANES, np.uint64)
    digest.meaning(words, meant, digest.THREADS)
    for _ in range(2):  # the second one begins at zero, too
        page[:] = 0
        ends = window.handle, words.nbytes, target, pinned.device_address
        assert digest.take_digest(launcher, stream, *ends) == launch.SUCCESS
        timelines.finish(stream)
        assert page[: digest.LANES].tolist() == meant.tolist()
        assert not page[digest.LANES :].any()
    pinned.close()
    window.close()
    memory.close()
