"""The twin's managed memory: what a kernel's touch does, who makes room, and what is refused."""

from __future__ import annotations

import ctypes

import pytest
from cpu.support.twin_device import MIB, TwinDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from twin.managed import PAGE_BYTES

from zico.base.errors import DriverError
from zico.device.cuda.managed import allocate

UNIT = 2 * MIB
PAGES = UNIT // PAGE_BYTES


def test_a_first_touch_populates_the_device() -> None:
    """Nothing is resident at first; what a kernel touches comes, page by page, and counts as used."""
    with TwinDevice() as device, allocate(device.driver, UNIT) as memory:
        assert device.twin.managed_resident_bytes == 0
        device.write(memory.handle + PAGE_BYTES - 1, b"ab")
        assert device.twin.managed_resident_bytes == 2 * PAGE_BYTES
        assert device.twin.managed_faults == 2
        assert device.driver.free_bytes() == device.driver.total_bytes() - 2 * PAGE_BYTES
        memory.move(0, UNIT, to_device=True)
        device.driver.synchronize(memory.stream)
        assert device.twin.is_on_device(memory.handle, UNIT)
        device.write(memory.handle, b"x" * UNIT)
        assert device.twin.managed_faults == 2


def test_what_is_on_the_host_and_mapped_is_used_there() -> None:
    """A touch moves nothing where the device maps what is elsewhere; without that advice it faults and brings it in."""
    with TwinDevice() as device, allocate(device.driver, UNIT) as memory:
        device.write(memory.handle, b"y" * UNIT)
        memory.move(0, UNIT, to_device=False)
        device.driver.synchronize(memory.stream)
        faults = device.twin.managed_faults
        assert device.read(memory.handle, UNIT) == b"y" * UNIT
        assert (device.twin.managed_faults, device.twin.managed_resident_bytes) == (faults, 0)
        assert device.twin.remote_accesses == PAGES
        memory.map_for_device(wanted=False)
        assert device.read(memory.handle, UNIT) == b"y" * UNIT
        assert (device.twin.managed_faults, device.twin.managed_resident_bytes) == (faults + PAGES, UNIT)


def test_the_driver_makes_room_by_what_came_first() -> None:
    """On a device that is full, what came longest ago goes to the host, and nothing is lost."""
    with TwinDevice(total_bytes=4 * UNIT) as device, allocate(device.driver, 4 * UNIT) as memory:
        for piece in range(4):
            device.write(memory.handle + piece * UNIT, bytes([piece]) * UNIT)
        memory.move(0, UNIT, to_device=False)
        device.driver.synchronize(memory.stream)
        device.twin.device_bytes = 3 * UNIT
        memory.move(0, UNIT, to_device=True)
        device.driver.synchronize(memory.stream)
        there = [device.twin.is_on_device(memory.handle + piece * UNIT, UNIT) for piece in range(4)]
        assert there == [True, False, True, True]
        for piece in range(4):
            assert device.read(memory.handle + piece * UNIT, UNIT) == bytes([piece]) * UNIT
        device.twin.device_bytes = 4 * UNIT


def test_more_than_the_device_has_is_refused_by_the_twin() -> None:
    """All managed memory together is at most what the device has beside what is created there."""
    with TwinDevice(total_bytes=8 * UNIT) as device, device.driver.create_memory(4 * UNIT, "t", UNIT):
        with allocate(device.driver, 3 * UNIT):
            with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
                allocate(device.driver, 2 * UNIT)  # 4 are free, as nothing is resident
            allocate(device.driver, UNIT).close()
        allocate(device.driver, 4 * UNIT).close()


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["in", "out", "write", "read"]), st.integers(0, 3), st.integers(0, 255)), max_size=30
    ),
    by=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_contents_survive_any_order_of_moves(moves: list[tuple[str, int, int]], by: bool) -> None:  # noqa: FBT001
    """Written, moved, evicted by the driver and read in any order, every part holds what was written last."""
    with TwinDevice(total_bytes=4 * UNIT) as device, allocate(device.driver, 4 * PAGE_BYTES) as memory:
        memory.map_for_device(wanted=by)
        device.twin.device_bytes = 3 * PAGE_BYTES
        last = [0] * 4
        for what, page, value in moves:
            place = memory.handle + page * PAGE_BYTES
            if what == "write":
                device.write(place, bytes([value]) * PAGE_BYTES)
                last[page] = value
            elif what == "read":
                assert device.read(place, PAGE_BYTES) == bytes([last[page]]) * PAGE_BYTES
            else:
                memory.move(page * PAGE_BYTES, PAGE_BYTES, to_device=what == "in")
                device.driver.synchronize(memory.stream)
            assert device.twin.managed_resident_bytes <= 3 * PAGE_BYTES
        for page, value in enumerate(last):
            assert device.read(memory.handle + page * PAGE_BYTES, PAGE_BYTES) == bytes([value]) * PAGE_BYTES
        device.twin.device_bytes = 4 * UNIT


def test_rubbish_is_found_where_memory_is_elsewhere() -> None:
    """Who looks at an address whose contents are on the host, without the device, does not find them."""
    with TwinDevice() as device, allocate(device.driver, UNIT) as memory:
        device.write(memory.handle, b"contents")
        memory.move(0, UNIT, to_device=False)
        device.driver.synchronize(memory.stream)
        assert ctypes.string_at(memory.handle, 8) != b"contents"
        assert device.read(memory.handle, 8) == b"contents"
