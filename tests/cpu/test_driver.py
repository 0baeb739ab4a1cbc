"""The contract of a driver, on the host device, and of what a driver lends."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import members
import numpy as np
import pytest

from zico.driver.faulty import FaultyDriver
from zico.driver.host import HostDriver
from zico.driver.owned import Owned
from zico.errors import BrokerError, ConfigError, DriverError
from zico.heap.build import Heap
from zico.heap.layout import HEAP
from zico.pool.table import PoolTable

if TYPE_CHECKING:
    from collections.abc import Callable

Record = Any
PAGE = mmap.PAGESIZE


@pytest.fixture
def driver() -> HostDriver:
    """Return the driver under test."""
    return HostDriver()


def _bytes(address: int, size_bytes: int) -> Record:
    return (ctypes.c_char * size_bytes).from_address(address)


def _open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths


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


# -- the contract ---------------------------------------------------------------------------------------------------


def test_memory_mapped_twice_is_one_memory(driver: HostDriver) -> None:
    """What is written through one mapping is read through another, at the same offset of the memory."""
    with driver.create_memory(4 * PAGE, "t") as memory, driver.reserve(8 * PAGE) as window:
        driver.map(window, 0, memory, PAGE, 2 * PAGE)
        driver.map(window, 6 * PAGE, memory, 2 * PAGE, PAGE)
        _bytes(window.handle + PAGE + 5, 3).raw = b"abc"
        assert _bytes(window.handle + 6 * PAGE + 5, 3).raw == b"abc"


def test_a_mapping_replaces_what_was_there_and_nothing_beside_it(driver: HostDriver) -> None:
    """Mapping over a mapping changes exactly the pages named."""
    with (
        driver.create_memory(3 * PAGE, "a") as first,
        driver.create_memory(PAGE, "b") as second,
        driver.reserve(3 * PAGE) as window,
    ):
        driver.map(window, 0, first, 0, 3 * PAGE)
        _bytes(window.handle, 3 * PAGE).raw = b"1" * 3 * PAGE
        driver.map(window, PAGE, second, 0, PAGE)
        middle = _bytes(window.handle, 3 * PAGE).raw
        assert middle == b"1" * PAGE + bytes(PAGE) + b"1" * PAGE
        driver.map(window, PAGE, first, PAGE, PAGE)
        assert _bytes(window.handle, 3 * PAGE).raw == b"1" * 3 * PAGE


def test_an_exported_descriptor_imports_as_the_same_memory(driver: HostDriver) -> None:
    """Memory that is exported and imported has the same size and contents, and outlives the first owner."""
    memory = driver.create_memory(2 * PAGE, "t")
    with driver.reserve(2 * PAGE) as window:
        driver.map(window, 0, memory, 0, 2 * PAGE)
        _bytes(window.handle, 4).raw = b"zico"
    with driver.import_memory(driver.export(memory)) as again, driver.reserve(2 * PAGE) as window:
        memory.close()
        assert again.size_bytes == 2 * PAGE
        driver.map(window, 0, again, 0, 2 * PAGE)
        assert _bytes(window.handle, 4).raw == b"zico"


def test_a_reserved_window_is_addresses_only(driver: HostDriver) -> None:
    """Reserved, unmapped and closed addresses cannot be read; mapped ones can."""
    with driver.create_memory(PAGE, "t") as memory, driver.reserve(3 * PAGE) as window:
        address = window.handle
        assert _permissions(address) == "---p"
        driver.map(window, PAGE, memory, 0, PAGE)
        assert [_permissions(address + i * PAGE) for i in range(3)] == ["---p", "rw-s", "---p"]
        driver.unmap(window, PAGE, PAGE)
        assert _permissions(address + PAGE) == "---p"
    assert _permissions(address + PAGE) != "rw-s"


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


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [(0, 0), (0, 1), (1, PAGE), (-PAGE, PAGE), (0, -PAGE), (0, 5 * PAGE), (4 * PAGE, PAGE), (3 * PAGE, 2 * PAGE)],
)
def test_ranges_outside_are_refused_before_the_kernel_sees_them(
    driver: HostDriver, offset: int, size_bytes: int
) -> None:
    """An empty, unaligned or outside range raises ``DriverError`` and changes no mapping."""
    with driver.create_memory(4 * PAGE, "t") as memory, driver.reserve(4 * PAGE) as window:
        before = [_permissions(window.handle + i * PAGE) for i in range(4)]
        calls: list[Callable[[], None]] = [
            lambda: driver.map(window, offset, memory, 0, size_bytes),
            lambda: driver.map(window, 0, memory, offset, size_bytes),
            lambda: driver.unmap(window, offset, size_bytes),
            lambda: driver.discard(memory, offset, size_bytes),
        ]
        for call in calls:
            with pytest.raises(DriverError, match="must be pages inside"):
                call()
        assert [_permissions(window.handle + i * PAGE) for i in range(4)] == before


@pytest.mark.parametrize("size_bytes", [0, -PAGE, 1 << 62])
def test_impossible_reservations_are_errors(driver: HostDriver, size_bytes: int) -> None:
    """No addresses, or more than there are, cannot be reserved."""
    with pytest.raises((DriverError, ctypes.ArgumentError)):
        driver.reserve(size_bytes)


def test_impossible_memory_leaves_no_descriptor(driver: HostDriver) -> None:
    """Memory of a size that the kernel refuses raises, and its descriptor is closed."""
    before = _open_descriptors()
    with pytest.raises(DriverError):
        driver.create_memory(-1, "t")
    with pytest.raises(DriverError):
        driver.import_memory(1 << 20)
    assert _open_descriptors() == before


# -- owners ---------------------------------------------------------------------------------------------------------


def _lend_memory(driver: HostDriver) -> Owned:
    return driver.create_memory(PAGE, "t")


def _lend_imported(driver: HostDriver) -> Owned:
    with driver.create_memory(PAGE, "t") as memory:
        return driver.import_memory(driver.export(memory))


def _lend_window(driver: HostDriver) -> Owned:
    return driver.reserve(PAGE)


@pytest.mark.parametrize("lend", [_lend_memory, _lend_imported, _lend_window])
def test_closing_twice_does_nothing_and_use_after_close_raises(
    driver: HostDriver, lend: Callable[[HostDriver], Owned]
) -> None:
    """An owner returns its thing exactly once; afterwards every operation on it raises ``DriverError``."""
    owned = lend(driver)
    assert not owned.closed
    owned.close()
    with _lend_memory(driver) as bystander:  # most likely has the same descriptor now
        owned.close()
        os.fstat(bystander.handle)
    assert owned.closed
    with pytest.raises(DriverError, match="closed"):
        _ = owned.handle


def test_every_operation_on_a_closed_thing_raises(driver: HostDriver) -> None:
    """No driver operation reaches the kernel with a handle that has been returned."""
    with driver.create_memory(PAGE, "t") as memory, driver.reserve(PAGE) as window:
        gone_memory, gone_window = _lend_memory(driver), _lend_window(driver)
        gone_memory.close()
        gone_window.close()
        calls: list[Callable[[], object]] = [
            lambda: driver.export(gone_memory),
            lambda: driver.map(window, 0, gone_memory, 0, PAGE),
            lambda: driver.map(gone_window, 0, memory, 0, PAGE),
            lambda: driver.unmap(gone_window, 0, PAGE),
            lambda: driver.discard(gone_memory, 0, PAGE),
            lambda: driver.physical_bytes(gone_memory),
        ]
        for call in calls:
            with pytest.raises(DriverError, match="closed"):
                call()


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


# -- rollback -------------------------------------------------------------------------------------------------------


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
        descriptors = _open_descriptors()
        try:
            built = build(driver)
        except DriverError:
            assert driver.live == 0
            assert _open_descriptors() == descriptors
        else:
            built.close()
            assert driver.live == 0
            assert _open_descriptors() == descriptors
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
        before = _open_descriptors()
        with pytest.raises(BrokerError, match="same installation"):
            _join(pool, HostDriver())
        assert _open_descriptors() == before


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
