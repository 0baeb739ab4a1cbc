"""The host device against the contract of a driver, what a driver gives out, and rollback."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support import members
from cpu.support.driver_contract import DriverContract, open_descriptors
from twin.faulty import FaultyDriver

from zico.base.errors import BrokerError, ConfigError, DriverError
from zico.device.api import Owned
from zico.device.host import HostDriver
from zico.heap.build import Heap
from zico.heap.layout import HEAP
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Callable

Record = Any
PAGE = mmap.PAGESIZE


def _bytes(address: int, size_bytes: int) -> Record:
    return (ctypes.c_char * size_bytes).from_address(address)


def _mappings() -> list[tuple[int, int, str]]:
    """Return (start, end, permissions) of this process's mappings."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions = line.split()[:2]
        start, end = (int(part, 16) for part in addresses.split("-"))
        found.append((start, end, permissions))
    return found


def _permissions(address: int) -> str | None:
    return next((p for start, end, p in _mappings() if start <= address < end), None)


class HostDevice:
    """The host device, which this process reads and writes itself."""

    def __init__(self) -> None:
        """Use the one driver there is."""
        self.driver = HostDriver()

    def read(self, address: int, size_bytes: int) -> bytes:
        """Read."""
        return ctypes.string_at(address, size_bytes)

    def write(self, address: int, data: bytes) -> None:
        """Write."""
        ctypes.memmove(address, data, len(data))

    def is_open(self, address: int) -> bool:
        """Tell whether an address can be read and written."""
        return _permissions(address) == "rw-s"


@pytest.fixture
def driver() -> HostDriver:
    """Return the driver under test."""
    return HostDriver()


class TestHostDevice(DriverContract):
    """The contract on the host device."""

    @pytest.fixture
    def device(self) -> HostDevice:
        """Return the device under test."""
        return HostDevice()


# -- only the host device --------------------------------------------------------------------------


def test_a_closed_window_is_no_longer_there(driver: HostDriver) -> None:
    """Reserved addresses are private and shut; closing the window takes the mapping in it away, too."""
    with driver.create_memory(PAGE, "t") as memory, driver.reserve(3 * PAGE) as window:
        address = window.handle
        driver.map(window, PAGE, memory, 0, PAGE)
        assert [_permissions(address + i * PAGE) for i in range(3)] == ["---p", "rw-s", "---p"]
    assert _permissions(address + PAGE) != "rw-s"


def test_a_host_mapping_changes_exactly_the_pages_named(driver: HostDriver) -> None:
    """On the host device every page can be mapped over by itself, whatever the pieces."""
    with driver.create_memory(3 * PAGE, "a") as memory, driver.reserve(3 * PAGE) as window:
        driver.map(window, 0, memory, 0, 3 * PAGE)
        _bytes(window.handle, 3 * PAGE).raw = b"1" * PAGE + b"2" * PAGE + b"3" * PAGE
        driver.map(window, PAGE, memory, 2 * PAGE, PAGE)
        assert _bytes(window.handle, 3 * PAGE).raw == b"1" * PAGE + b"3" * 2 * PAGE


def test_memory_of_another_size_is_refused_and_closed(driver: HostDriver) -> None:
    """A descriptor of memory that is smaller or larger than announced is not taken."""
    with driver.create_memory(2 * PAGE, "t") as memory:
        before = open_descriptors()
        for size_bytes in (PAGE, 3 * PAGE):
            with pytest.raises(DriverError, match=f"{2 * PAGE} bytes came"):
                driver.import_pieces(driver.export_pieces(memory), size_bytes)
        assert open_descriptors() == before


def test_a_descriptor_that_cannot_be_had_is_an_error(driver: HostDriver) -> None:
    """Export reports the kernel's refusal with its number."""
    with pytest.raises(DriverError) as caught:
        driver.import_memory(1 << 20)
    assert caught.value.status == errno.EBADF


def test_physical_bytes_follow_touching_and_discard(driver: HostDriver) -> None:
    """Memory costs nothing until it is touched, then its pages, and nothing again when they are discarded."""
    size_bytes = 64 * PAGE
    with driver.create_memory(size_bytes, "t") as memory, driver.reserve(size_bytes) as window:
        driver.map(window, 0, memory, 0, size_bytes)
        assert driver.physical_bytes(memory) == 0
        _bytes(window.handle, 8 * PAGE).raw = b"x" * 8 * PAGE
        assert driver.physical_bytes(memory) == 8 * PAGE
        driver.unmap(window, 0, size_bytes)
        assert driver.physical_bytes(memory) == 8 * PAGE
        driver.discard(memory, 2 * PAGE, 4 * PAGE)
        assert driver.physical_bytes(memory) == 4 * PAGE
        driver.map(window, 0, memory, 0, size_bytes)
        assert _bytes(window.handle, 8 * PAGE).raw == b"x" * 2 * PAGE + bytes(4 * PAGE) + b"x" * 2 * PAGE
        assert memory.size_bytes == os.fstat(memory.handle).st_size == size_bytes


# -- owners and rollback ---------------------------------------------------------------------------


def test_an_undo_that_fails_is_not_tried_again() -> None:
    """If returning a thing fails the error is seen once, and the handle is never used again."""
    tried = []

    def fail(handle: int, size_bytes: int) -> None:
        tried.append((handle, size_bytes))
        raise DriverError("release", 5)

    owned = Owned("window", 7, PAGE, fail)
    with pytest.raises(DriverError):
        owned.close()
    owned.close()
    assert tried == [(7, PAGE)]


# -- rollback --------------------------------------------------------------------------------------


def _create(driver: Record) -> PoolTable:
    return PoolTable.create(budget_bytes=8 * PAGE, region_bytes=PAGE, use_claims=True, self_admit=True, driver=driver)


def _join(pool: PoolTable, driver: Record) -> PoolTable:
    copies = [os.dup(fd) for fd in (pool.memory_fd, pool.table_fd, pool.notify_fd)]
    return PoolTable.join_pool(*copies, pool.join(os.getpid(), "t"), driver)


def _fails_cleanly(build: Callable[[Any], Any]) -> int:
    """Fail every call in turn; returns how many calls there are. Afterwards nothing is left each time."""
    fail_at = 0
    while True:
        fail_at += 1
        driver = FaultyDriver(HostDriver(), fail_at)
        descriptors = open_descriptors()
        try:
            built = build(driver)
        except DriverError:
            assert driver.live == 0
            assert open_descriptors() == descriptors
        else:
            built.close()
            assert driver.live == 0
            assert open_descriptors() == descriptors
            return fail_at - 1


def test_creating_a_pool_is_all_or_nothing() -> None:
    """If any driver call of ``PoolTable.create`` fails, nothing is lent and no descriptor is open."""
    assert _fails_cleanly(_create) == 4


def test_joining_a_pool_is_all_or_nothing() -> None:
    """If any driver call of ``PoolTable.join_pool`` fails, the three descriptors handed over are closed too."""
    with _create(HostDriver()) as pool:
        assert _fails_cleanly(lambda driver: _join(pool, driver)) == 4


def test_building_a_heap_is_all_or_nothing() -> None:
    """If any driver call of a heap's construction fails, no window and no spill file is left."""

    def build(driver: Record) -> Heap:
        member.driver = driver
        return Heap(member, np.zeros(1, HEAP))

    with members.make_pool(8, region_bytes=1 << 16) as pool, members.join(pool) as member:
        assert _fails_cleanly(build) >= 1


def test_a_leak_is_seen() -> None:
    """The check that nothing is left behind fails on a construction that leaks on purpose."""
    leaked = []

    def careless(driver: Record) -> Record:
        leaked.append(driver.create_memory(PAGE, "leak"))
        return driver.reserve(PAGE)

    with pytest.raises(AssertionError):
        _fails_cleanly(careless)
    for memory in leaked:
        memory.close()


@pytest.mark.parametrize(
    ("budget_bytes", "region_bytes"),
    [
        (0, PAGE),
        (-PAGE, PAGE),
        (PAGE - 1, PAGE),
        (8 * PAGE, 0),
        (8 * PAGE, -PAGE),
        (8 * PAGE, PAGE // 2),
        (8 * PAGE, 3 * PAGE),
        (8 * PAGE, PAGE + 1),
        (8 * PAGE, 16 * PAGE),
    ],
)
def test_a_bad_pool_is_refused_before_the_first_driver_call(budget_bytes: int, region_bytes: int) -> None:
    """A region that is no power of two of pages, or a budget below one region, costs no driver call."""
    driver: Any = FaultyDriver(HostDriver(), 0)
    with pytest.raises(ConfigError):
        PoolTable.create(
            budget_bytes=budget_bytes, region_bytes=region_bytes, use_claims=True, self_admit=True, driver=driver
        )
    assert driver.calls == 0


@pytest.mark.parametrize("field", ["magic", "version"])
def test_a_table_of_another_version_is_refused(field: str) -> None:
    """A job whose Zico differs from the broker's does not join, and leaves no descriptor."""
    with _create(HostDriver()) as pool:
        pool.header[field] += 1
        before = open_descriptors()
        with pytest.raises(BrokerError, match="same installation"):
            _join(pool, HostDriver())
        assert open_descriptors() == before


def test_a_pool_closes_once() -> None:
    """Closing a pool twice closes no descriptor that belongs to somebody else by then."""
    pool = _create(HostDriver())
    pool.close()
    reading, writing = os.pipe()
    pool.close()
    os.fstat(reading)
    os.fstat(writing)
    os.close(reading)
    os.close(writing)
