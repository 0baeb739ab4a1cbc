"""The CUDA driver in threads that have another context or none, and called by compiled code; on the twin."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.driver_contract import create, reserve
from cpu.support.threads import result_in_thread
from cpu.support.twin_device import MIB, TwinDevice
from twin.twin import Twin

from zico.base.errors import DriverError
from zico.device import mapping
from zico.device.cuda.driver import CudaDriver
from zico.device.record import DEVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNIT = 2 * MIB
PTX = b".visible .entry progress(.param .u64 counter, .param .u64 value)"


@pytest.fixture(params=[False, True], ids=["no context needed", "context needed"])
def device(request: pytest.FixtureRequest) -> Iterator[TwinDevice]:
    """Return a device that wants a context for virtual memory, or not."""
    with TwinDevice(needs_context=request.param, host_bytes=64 * MIB) as device:
        yield device


# -- contexts --------------------------------------------------------------------------------------


def test_a_new_thread_can_do_everything(device: TwinDevice) -> None:
    """A thread that never called CUDA creates, maps, registers and synchronises."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(page, np.uint8).ctypes.data

    def work() -> bytes:
        driver = device.driver
        with (
            create(device, 1) as memory,
            reserve(device, 1) as window,
            driver.register_host(address, mmap.PAGESIZE) as counter,
            driver.create_stream() as stream,
        ):
            driver.map(window, 0, memory, 0, UNIT)
            driver.write_value(stream.handle, counter.device_address, 7)
            driver.synchronize(stream.handle)
            device.write(window.handle, b"here")
            return device.read(window.handle, 4)

    assert result_in_thread(work) == b"here"
    assert page[0] == 7


def test_another_context_of_the_caller_is_put_back(device: TwinDevice) -> None:
    """Whoever has a context of their own current has it again after each operation, compiled ones too."""
    driver = device.driver
    record = np.zeros(1, DEVICE)
    own = device.twin.make_context()
    with create(device, 1) as memory, reserve(device, 1) as window, driver.create_stream() as stream:
        driver.fill_device(record[0], memory)
        driver.call("cuCtxSetCurrent", own)
        operations: list[Callable[[], object]] = [
            lambda: driver.synchronize(stream.handle),
            driver.free_bytes,
            lambda: mapping.map_piece(record[0], window.handle, 0, 0),
            lambda: mapping.open_pieces(record[0], window.handle, 1),
            lambda: mapping.unmap_piece(record[0], window.handle),
            lambda: CudaDriver(0, device.twin).close(),
        ]
        for operation in operations:
            operation()
            assert int(driver.call("cuCtxGetCurrent")) == own
        driver.call("cuCtxSetCurrent", 0)


def test_compiled_code_takes_the_primary_context_where_there_is_none() -> None:
    """A piece is mapped from a thread without a context, on a driver that wants one."""
    with TwinDevice(needs_context=True) as device, create(device, 1) as memory, reserve(device, 1) as window:
        record = np.zeros(1, DEVICE)
        device.driver.fill_device(record[0], memory)
        assert result_in_thread(lambda: mapping.map_piece(record[0], window.handle, 0, 0))
        assert result_in_thread(lambda: mapping.open_pieces(record[0], window.handle, 1))
        assert device.is_open(window.handle)
        device.driver.unmap(window, 0, UNIT)


def test_a_context_that_ended_is_current_nowhere() -> None:
    """What compiled code left current in a thread is not after the driver was closed; the next driver works there."""
    with Twin(needs_context=True) as twin:
        for _ in range(2):
            driver = CudaDriver(0, twin)
            with driver.create_memory(UNIT, "t") as memory, driver.reserve(UNIT) as window:
                record = np.zeros(1, DEVICE)
                driver.fill_device(record[0], memory)
                assert mapping.map_piece(record[0], window.handle, 0, 0)
                assert twin.current_context() == record[0]["context"]
                driver.unmap(window, 0, UNIT)
            driver.close()
            assert twin.current_context() == 0


def test_closing_a_driver_leaves_another_users_context_alone() -> None:
    """A framework's primary context stays alive and current when a driver of ours comes and goes."""
    with TwinDevice() as framework:
        framework.driver.context.retain()
        with framework.driver.context.current() as context:
            second = CudaDriver(0, framework.twin)
            second.context.retain()
            second.free_bytes()
            second.close()
            second.close()
            assert int(framework.driver.call("cuCtxGetCurrent")) == context
            framework.driver.create_stream().close()


# -- compiled code and kernels ---------------------------------------------------------------------


def test_a_piece_that_cannot_be_mapped_leaves_nothing_mapped(device: TwinDevice) -> None:
    """``map_piece`` returns false, nothing stays mapped, and the same call works later whatever was there."""
    record = np.zeros(1, DEVICE)
    with create(device, 2) as memory, reserve(device, 1) as window:
        device.driver.fill_device(record[0], memory)
        assert mapping.map_piece(record[0], window.handle, 0, 0)
        device.twin.fail_next("cuMemMap")
        assert not mapping.map_piece(record[0], window.handle, 1, 1)
        assert "mappings" not in device.twin.leaks()
        assert not mapping.unmap_piece(record[0], window.handle)
        assert mapping.map_piece(record[0], window.handle, 1, 1)
        assert not device.is_open(window.handle)
        device.driver.unmap(window, 0, UNIT)


def test_pieces_that_cannot_be_opened_stay_mapped(device: TwinDevice) -> None:
    """``open_pieces`` returns false, nobody can touch the pieces, and the same call works later."""
    record = np.zeros(1, DEVICE)
    with create(device, 2) as memory, reserve(device, 2) as window:
        device.driver.fill_device(record[0], memory)
        places = [window.handle, window.handle + UNIT]
        assert all(mapping.map_piece(record[0], place, piece, 0) for piece, place in enumerate(places))
        device.twin.fail_next("cuMemSetAccess")
        assert not mapping.open_pieces(record[0], window.handle, 2)
        assert not any(device.is_open(place) for place in places)
        assert mapping.open_pieces(record[0], window.handle, 2)
        assert all(device.is_open(place) for place in places)
        assert all(mapping.unmap_piece(record[0], place) for place in places)


def test_a_kernel_is_launched_by_its_address(device: TwinDevice) -> None:
    """A loaded kernel runs in stream order with the arguments that ``cuLaunchKernel`` was given as pointers."""
    device.twin.kernel("progress", ctypes.c_uint64, ctypes.c_int64)(lambda twin, at, value: twin.store(at, value))
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(page, np.uint8).ctypes.data
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, *([ctypes.c_uint] * 7), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )
    driver = device.driver
    with driver.register_host(address, mmap.PAGESIZE) as counter, driver.create_stream() as stream:
        function = driver.load_kernel(PTX, "progress")
        values = (ctypes.c_uint64(counter.device_address), ctypes.c_int64(11))
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        launch = prototype(driver.addresses()["cuLaunchKernel"])
        with driver.context.current():
            assert launch(function, 1, 1, 1, 1, 1, 1, 0, stream.handle, ctypes.addressof(pointers), None) == 0
        values[1].value = 99  # the driver has read the arguments by now
        driver.synchronize(stream.handle)
    assert page[0] == 11


def test_a_kernel_that_is_not_there_leaves_no_module(device: TwinDevice) -> None:
    """A name that the image does not have is an error, and the image is unloaded again."""
    device.twin.kernel("regress")(lambda _twin: None)
    with pytest.raises(DriverError, match="NOT_FOUND"):
        device.driver.load_kernel(PTX, "regress")
    assert "modules" not in device.twin.leaks()
