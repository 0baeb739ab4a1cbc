"""What every driver does, whatever the device: run on the host device, on the twin, and on a GPU where there is one.

A test class inherits ``DriverContract`` and has a fixture ``device`` that returns a ``Device``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest

from zico.base.errors import DriverError
from zico.device import mapping
from zico.device.api import close_descriptors
from zico.device.cuda.managed import allocate
from zico.device.host import HostDriver
from zico.device.record import DEVICE, MOVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zico.device.api import Memory, Owned

GATE_S = 5.0
"""After which a stream that is held goes on by itself: a test that is wrong fails, and does not hang."""
PIECES = 4
"""How many pieces of one granule each the memory of these tests has."""


class Device(Protocol):
    """A driver, and the device's own eyes and hands."""

    driver: Any

    def read(self, address: int, size_bytes: int) -> bytes:
        """Read as the device reads."""
        ...

    def write(self, address: int, data: bytes) -> None:
        """Write as the device writes."""
        ...

    def is_open(self, address: int) -> bool:
        """Tell whether the device could read the granule at an address."""
        ...


def open_descriptors() -> set[str]:
    """Return the numbers of this process's open descriptors."""
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths


def create(device: Device, pieces: int = PIECES) -> Memory:
    """Create memory of pieces of a granule each."""
    unit = device.driver.granularity_bytes
    return device.driver.create_memory(pieces * unit, "t", unit)


def reserve(device: Device, pieces: int = PIECES) -> Owned:
    """Reserve a window."""
    return device.driver.reserve(pieces * device.driver.granularity_bytes)


class DriverContract:
    """The tests."""

    def test_memory_mapped_twice_is_one_memory(self, device: Device) -> None:
        """What is written through one mapping is read through another, at the same offset of the memory."""
        driver, unit = device.driver, device.driver.granularity_bytes
        with create(device) as memory, reserve(device, 8) as window:
            driver.map(window, 0, memory, unit, 2 * unit)
            driver.map(window, 6 * unit, memory, 2 * unit, unit)
            device.write(window.handle + unit + 5, b"abc")
            assert device.read(window.handle + 6 * unit + 5, 3) == b"abc"

    def test_a_mapping_replaces_what_was_there_and_nothing_beside_it(self, device: Device) -> None:
        """Mapping over a mapping changes exactly the pieces named, and mapping back brings the contents back."""
        driver, unit = device.driver, device.driver.granularity_bytes
        with create(device, 3) as first, create(device, 1) as second, reserve(device, 3) as window:
            driver.map(window, 0, first, 0, 3 * unit)
            for piece in range(3):
                device.write(window.handle + piece * unit, b"1" * 16)
            driver.map(window, unit, second, 0, unit)
            device.write(window.handle + unit, b"2" * 16)
            assert [device.read(window.handle + at * unit, 1) for at in range(3)] == [b"1", b"2", b"1"]
            driver.map(window, unit, first, unit, unit)
            assert [device.read(window.handle + at * unit, 1) for at in range(3)] == [b"1", b"1", b"1"]

    def test_exported_memory_imports_as_the_same_memory(self, device: Device) -> None:
        """Memory that is exported and imported has the same size and contents, and outlives the first owner."""
        driver, unit = device.driver, device.driver.granularity_bytes
        memory = create(device, 2)
        with reserve(device, 2) as window:
            driver.map(window, 0, memory, 0, 2 * unit)
            device.write(window.handle, b"zico")
            device.write(window.handle + unit, b"ociz")
        before = open_descriptors()
        descriptors = driver.export_pieces(memory)
        assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
        with driver.import_pieces(descriptors, 2 * unit, unit) as again, reserve(device, 2) as window:
            memory.close()
            assert again.size_bytes == 2 * unit
            driver.map(window, 0, again, unit, unit)
            driver.map(window, unit, again, 0, unit)
            assert [device.read(window.handle + at * unit, 4) for at in range(2)] == [b"ociz", b"zico"]
        assert len(open_descriptors()) <= len(before)

    def test_a_reserved_window_is_addresses_only(self, device: Device) -> None:
        """Reserved and unmapped addresses cannot be read; mapped ones can."""
        driver, unit = device.driver, device.driver.granularity_bytes
        with create(device, 1) as memory, reserve(device, 3) as window:
            places = [window.handle + at * unit for at in range(3)]
            assert [device.is_open(place) for place in places] == [False, False, False]
            driver.map(window, unit, memory, 0, unit)
            assert [device.is_open(place) for place in places] == [False, True, False]
            driver.unmap(window, unit, unit)
            assert [device.is_open(place) for place in places] == [False, False, False]

    def test_a_window_unmaps_what_is_mapped_there_when_it_is_closed(self, device: Device) -> None:
        """A window with mappings can be closed at any time; the memory is unharmed."""
        driver, unit = device.driver, device.driver.granularity_bytes
        with create(device, 2) as memory:
            window = reserve(device, 2)
            driver.map(window, 0, memory, 0, 2 * unit)
            device.write(window.handle, b"kept")
            window.close()
            with reserve(device, 1) as other:
                driver.map(other, 0, memory, 0, unit)
                assert device.read(other.handle, 4) == b"kept"

    @pytest.mark.parametrize(("at", "size"), [(0, 0), (0, 0.5), (0.5, 1), (-1, 1), (0, -1), (0, 5), (4, 1), (3, 2)])
    def test_ranges_outside_are_refused_before_the_device_sees_them(
        self, device: Device, at: float, size: float
    ) -> None:
        """An empty, unaligned or outside range raises ``DriverError`` and changes no mapping."""
        driver, unit = device.driver, device.driver.granularity_bytes
        offset, size_bytes = int(at * unit), int(size * unit)
        with create(device) as memory, reserve(device) as window:
            driver.map(window, unit, memory, 0, unit)
            calls: list[Callable[[], None]] = [
                lambda: driver.map(window, offset, memory, 0, size_bytes),
                lambda: driver.map(window, 0, memory, offset, size_bytes),
                lambda: driver.unmap(window, offset, size_bytes),
                lambda: driver.discard(memory, offset, size_bytes),
            ]
            for call in calls:
                with pytest.raises(DriverError, match=r"must be .* inside"):
                    call()
            assert [device.is_open(window.handle + at * unit) for at in range(4)] == [False, True, False, False]

    def test_closing_twice_does_nothing_and_use_after_close_raises(self, device: Device) -> None:
        """An owner returns its thing exactly once; afterwards every operation on it raises ``DriverError``."""
        driver, unit = device.driver, device.driver.granularity_bytes
        with create(device, 1) as memory, reserve(device, 1) as window:
            gone_memory, gone_window = create(device, 1), reserve(device, 1)
            imported = driver.import_pieces(driver.export_pieces(gone_memory), unit)
            for owned in (gone_memory, gone_window, imported):
                assert not owned.closed
                owned.close()
                with create(device, 1) as bystander:  # most likely has the same descriptor or handle now
                    owned.close()
                    close_descriptors(driver.export_pieces(bystander))
                assert owned.closed
            calls: list[Callable[[], object]] = [
                lambda: driver.export_pieces(gone_memory),
                lambda: driver.map(window, 0, imported, 0, unit),
                lambda: driver.map(gone_window, 0, memory, 0, unit),
                lambda: driver.unmap(gone_window, 0, unit),
                lambda: driver.discard(gone_memory, 0, unit),
                lambda: driver.physical_bytes(gone_memory),
                lambda: driver.fill_device(np.zeros(1, DEVICE)[0], gone_memory),
            ]
            for call in calls:
                with pytest.raises(DriverError, match="closed"):
                    call()

    @pytest.mark.parametrize("size", [-1, 0, 1 << 40])
    def test_what_cannot_be_reserved_or_created_leaves_nothing(self, device: Device, size: int) -> None:
        """Impossible sizes are errors, and no descriptor stays open."""
        driver, unit = device.driver, device.driver.granularity_bytes
        before = open_descriptors()
        with pytest.raises((DriverError, OverflowError)):
            driver.reserve(size * unit)
        if size < 0:
            with pytest.raises((DriverError, OverflowError)):
                driver.create_memory(size * unit, "t")
        assert open_descriptors() == before

    @pytest.mark.parametrize("change", [-1, 1])
    def test_a_wrong_number_of_descriptors_is_refused_and_all_are_closed(self, device: Device, change: int) -> None:
        """Too few and too many descriptors raise ``DriverError``; none of them stays open."""
        driver, unit = device.driver, device.driver.granularity_bytes
        with create(device, 2) as memory:
            before = open_descriptors()
            descriptors = driver.export_pieces(memory)
            if change < 0:
                os.close(descriptors.pop())
            else:
                descriptors.append(os.dup(descriptors[0]))
            with pytest.raises(DriverError, match=r"\d+ descriptors came"):
                driver.import_pieces(descriptors, 2 * unit, unit)
            assert open_descriptors() == before

    def test_a_descriptor_that_is_no_memory_is_refused_and_closed(self, device: Device) -> None:
        """Importing the end of a pipe raises ``DriverError`` and closes it."""
        unit = device.driver.granularity_bytes
        before = open_descriptors()
        reading, writing = os.pipe()
        os.close(writing)
        with pytest.raises(DriverError):
            device.driver.import_pieces([reading], unit)
        assert open_descriptors() == before

    def test_compiled_code_maps_and_unmaps_pieces(self, device: Device) -> None:
        """``map_piece`` and ``open_pieces`` do what ``map`` does, over a mapping, too; ``unmap_piece`` undoes it."""
        driver, unit = device.driver, device.driver.granularity_bytes
        record = np.zeros(1, DEVICE)
        with create(device, 2) as memory, reserve(device, 2) as window:
            driver.fill_device(record[0], memory)
            places = [window.handle, window.handle + unit]
            assert mapping.map_piece(record[0], places[0], 1, 0)
            assert mapping.map_piece(record[0], places[1], 0, 1)
            assert mapping.open_pieces(record[0], places[0], 2)
            device.write(places[0], b"one")
            device.write(places[1], b"nil")
            assert [device.read(place, 3) for place in places] == [b"one", b"nil"]
            assert mapping.map_piece(record[0], places[0], 0, 1)
            assert mapping.open_pieces(record[0], places[0], 1)
            assert device.read(places[0], 3) == b"nil"
            assert mapping.unmap_piece(record[0], places[0])
            assert [device.is_open(place) for place in places] == [False, True]
            driver.unmap(window, unit, unit)
            assert not device.is_open(places[1])

    def test_a_device_says_how_much_memory_it_has(self, device: Device) -> None:
        """Total and free bytes are there, in the right order, and memory counts what it holds at most."""
        driver = device.driver
        free_bytes = driver.free_bytes()
        assert 0 < free_bytes <= driver.total_bytes()
        with create(device, 2) as memory:
            assert 0 <= driver.physical_bytes(memory) <= 2 * driver.granularity_bytes

    def test_registered_host_memory_is_the_same_memory_on_the_device(self, device: Device) -> None:
        """What the host writes the device reads at the registered address, and the other way round."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        address = np.frombuffer(page, np.uint8).ctypes.data
        with device.driver.register_host(address, mmap.PAGESIZE) as registered:
            page[8:12] = b"host"
            assert device.read(registered.device_address + 8, 4) == b"host"
            device.write(registered.device_address + 16, b"unit")
            assert page[16:20] == b"unit"


class TimelineContract:
    """What every device with streams does; the fixture ``device`` is a ``Device`` with a CUDA driver."""

    @pytest.fixture
    def page(self) -> mmap.mmap:
        """Return a page of host memory for counters."""
        return mmap.mmap(-1, mmap.PAGESIZE)

    def test_a_stream_waits_for_a_counter_that_another_writes(self, device: Device, page: mmap.mmap) -> None:
        """Work behind a wait happens after the other stream's work, and no CPU waits."""
        driver, words = device.driver, np.frombuffer(page, np.int64)
        with (
            driver.register_host(words.ctypes.data, mmap.PAGESIZE) as counters,
            driver.create_stream() as first,
            driver.create_stream() as second,
        ):
            driver.wait_value(second.handle, counters.device_address, 5)
            driver.write_value(second.handle, counters.device_address + 8, 1)
            driver.write_value(first.handle, counters.device_address, 4)
            driver.synchronize(first.handle)
            assert list(words[:2]) == [4, 0]
            driver.write_value(first.handle, counters.device_address, 5)
            driver.synchronize(second.handle)
            assert list(words[:2]) == [5, 1]

    def test_a_stream_waits_for_a_counter_that_the_host_writes(self, device: Device, page: mmap.mmap) -> None:
        """A CPU may advance the counter, as the broker does for the dead; far beyond the value is enough, too."""
        driver, words = device.driver, np.frombuffer(page, np.int64)
        with driver.register_host(words.ctypes.data, mmap.PAGESIZE) as counters, driver.create_stream() as stream:
            driver.wait_value(stream.handle, counters.device_address, 1 << 33)
            driver.write_value(stream.handle, counters.device_address + 8, 1)
            words[0] = 1 << 62
            driver.synchronize(stream.handle)
            assert words[1] == 1

    def test_a_counter_can_lie_in_memory_shared_by_processes(self, device: Device) -> None:
        """Pages of a memfd, as the pool's table is one, can be registered, twice mapped here."""
        driver, host = device.driver, HostDriver()
        with (
            host.create_memory(mmap.PAGESIZE, "t") as table,
            host.reserve(2 * mmap.PAGESIZE) as window,
            driver.create_stream() as stream,
        ):
            host.map(window, 0, table, 0, mmap.PAGESIZE)
            host.map(window, mmap.PAGESIZE, table, 0, mmap.PAGESIZE)
            with driver.register_host(window.handle, mmap.PAGESIZE) as counters:
                driver.write_value(stream.handle, counters.device_address + 64, 77)
                driver.synchronize(stream.handle)
            assert ctypes.c_int64.from_address(window.handle + mmap.PAGESIZE + 64).value == 77


class NextTierContract:
    """What every device does that can map memory of the host; the fixture ``device`` is as in ``TimelineContract``.

    A driver of CUDA 12.2 or later that cannot is a failure.
    """

    @pytest.fixture
    def record(self, device: Device) -> Iterator[Any]:
        """Return a record from which compiled code maps pinned memory."""
        made = np.zeros(1, DEVICE)
        with create(device, 1) as memory:
            device.driver.fill_device(made[0], memory)
            try:
                device.driver.fill_pinned(made[0], device.driver.granularity_bytes)
            except DriverError:
                if device.driver.facts.driver_version >= 12020:
                    raise
                pytest.xfail("the driver is older than CUDA 12.2")
            yield made[0]

    def test_pinned_memory_is_used_like_the_devices_own(self, device: Device, record: Any) -> None:  # noqa: ANN401
        """The device reads what it has written, from one end to the other, until the memory is unmapped."""
        unit = device.driver.granularity_bytes
        with reserve(device, 2) as window:
            address = window.handle + unit
            handle = mapping.map_pinned(record, address)
            assert handle
            device.write(address + 5, b"device")
            device.write(address + unit - 4, b"last")
            assert device.read(address + 5, 6) == b"device"
            assert device.read(address + unit - 4, 4) == b"last"
            assert not device.is_open(window.handle)
            assert mapping.unmap_pinned(record, address, handle)
            assert not device.is_open(address)

    def test_pinned_memory_is_not_mapped_over_anything(self, device: Device, record: Any) -> None:  # noqa: ANN401
        """A second piece at an address is refused, nothing of it is kept, and the first one is as it was."""
        with reserve(device, 1) as window:
            handle = mapping.map_pinned(record, window.handle)
            device.write(window.handle, b"mine")
            assert mapping.map_pinned(record, window.handle) == 0
            assert device.read(window.handle, 4) == b"mine"
            assert mapping.unmap_pinned(record, window.handle, handle)

    def test_pinned_memory_takes_nothing_of_the_device(self, device: Device, record: Any) -> None:  # noqa: ANN401
        """The device's free bytes stay what they were, but for what the mapping itself may need."""
        driver, pieces = device.driver, 16
        unit = driver.granularity_bytes
        with driver.context.current(), reserve(device, pieces) as window:
            before = driver.free_bytes()
            addresses = range(window.handle, window.handle + pieces * unit, unit)
            handles = [mapping.map_pinned(record, address) for address in addresses]
            assert all(handles)
            assert before - driver.free_bytes() < pieces * unit // 2
            for address, handle in zip(addresses, handles, strict=True):
                assert mapping.unmap_pinned(record, address, handle)

    def test_mapping_waits_for_no_stream(self, device: Device, record: Any) -> None:  # noqa: ANN401
        """Memory is created, mapped, opened and unmapped while a stream is held; the manual does not say so."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        words = np.frombuffer(page, np.int64)
        driver = device.driver
        with (
            driver.register_host(words.ctypes.data, mmap.PAGESIZE) as gate,
            driver.create_stream() as stream,
            reserve(device, 1) as window,
        ):
            rescue = threading.Timer(GATE_S, lambda: words.__setitem__(0, 2))
            rescue.start()
            driver.wait_value(stream.handle, gate.device_address, 1)
            handle = mapping.map_pinned(record, window.handle)
            assert mapping.unmap_pinned(record, window.handle, handle)
            is_held = int(words[0]) == 0
            rescue.cancel()
            words[0] = 1
            driver.synchronize(stream.handle)
            assert is_held

    def test_memory_moves_to_the_host_and_stays_at_its_address(self, device: Device, record: Any) -> None:  # noqa: ANN401
        """A piece's bytes, copied to pinned memory that then takes the piece's place, are found where they were."""
        driver = device.driver
        unit = driver.granularity_bytes
        with create(device, 1) as memory, reserve(device, 1) as window, reserve(device, 1) as scratch:
            driver.map(window, 0, memory, 0, unit)
            device.write(window.handle + 7, b"stays")
            handle = mapping.map_pinned(record, scratch.handle)
            with driver.create_stream() as stream, driver.context.current():
                driver.call("cuMemcpyDtoDAsync", scratch.handle, window.handle, unit, stream.handle)
                driver.synchronize(stream.handle)
                driver.unmap(window, 0, unit)
                driver.call("cuMemMap", window.handle, unit, 0, handle, 0)
                driver.call("cuMemSetAccess", window.handle, unit, [driver._access()], 1)
            assert device.read(window.handle + 7, 5) == b"stays"
            driver.call("cuMemUnmap", window.handle, unit)
            assert mapping.unmap_pinned(record, scratch.handle, handle)


class ManagedContract:
    """What every device does that manages memory; the fixture ``device`` is as in ``TimelineContract``.

    Nothing here asks for more than a few granules, so nothing for more than is free.
    """

    def test_what_moves_keeps_its_contents_and_its_address(self, device: Device) -> None:
        """Whatever was written is read again, wherever it is and however often it has moved."""
        unit = device.driver.granularity_bytes
        with allocate(device.driver, 4 * unit) as memory:
            for piece in range(4):
                device.write(memory.handle + piece * unit + 5, bytes([piece]) * 16)
            for to_device in (False, True, True, False, False):
                memory.move(unit, 2 * unit, to_device=to_device)
                device.driver.synchronize(memory.stream)
                for piece in range(4):
                    assert device.read(memory.handle + piece * unit + 5, 16) == bytes([piece]) * 16

    def test_what_is_on_the_host_can_be_written(self, device: Device) -> None:
        """The device writes over the bus, or brings in what it writes; nothing written is lost by the next move."""
        unit = device.driver.granularity_bytes
        with allocate(device.driver, unit) as memory:
            device.write(memory.handle, b"before")
            for turn in range(6):
                memory.move(0, unit, to_device=turn % 3 == 2)
                device.driver.synchronize(memory.stream)
                device.write(memory.handle + turn, b"x")
                assert device.read(memory.handle, 6) == b"x" * (turn + 1) + b"before"[turn + 1 :]

    def test_compiled_code_moves_parts(self, device: Device) -> None:
        """``move`` does what ``Managed.move`` does; a range outside is refused and changes nothing."""
        unit = device.driver.granularity_bytes
        record = np.zeros(1, MOVER)
        with create(device, 1) as pool, allocate(device.driver, 2 * unit) as memory:
            memory.fill(record[0], pool)
            device.write(memory.handle + unit, b"moved")
            for place in ("to_host", "to_device"):
                assert mapping.move(record.ctypes.data, memory.handle + unit, unit, record[0][place])
                device.driver.synchronize(memory.stream)
                assert device.read(memory.handle + unit, 5) == b"moved"
            with reserve(device, 1) as elsewhere:
                assert not mapping.move(record.ctypes.data, elsewhere.handle, unit, record[0]["to_host"])

    def test_parts_outside_are_refused_before_the_device_sees_them(self, device: Device) -> None:
        """An empty or outside part raises ``DriverError``, and so does any use after the memory was closed."""
        unit = device.driver.granularity_bytes
        with allocate(device.driver, unit) as memory:
            for offset, size_bytes in ((0, 0), (-1, 1), (0, unit + 1), (unit, 1)):
                with pytest.raises(DriverError, match="must be inside"):
                    memory.move(offset, size_bytes, to_device=True)
        with pytest.raises(DriverError, match="closed"):
            memory.move(0, unit, to_device=True)

    def test_more_than_is_free_is_refused_with_both_figures(self, device: Device) -> None:
        """What the device has not free is never asked of the driver."""
        free_bytes = device.driver.free_bytes()
        with pytest.raises(DriverError, match=r"are asked for, and cuda:0 has .* free: more could hang the GPU"):
            allocate(device.driver, free_bytes + (1 << 30))
        with pytest.raises(DriverError, match="are asked for"):
            allocate(device.driver, 0)
