"""The CUDA driver on a real GPU: the contract that the twin keeps, and what only a GPU can tell."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
from cpu.support.driver_contract import Device, DriverContract, NextTierContract, TimelineContract, create, reserve

from zico.device import mapping
from zico.device.cuda.facts import free_bytes, probe
from zico.device.record import DEVICE, FUNCTIONS

PATIENCE_S = 120.0


class TestGpu(DriverContract, TimelineContract, NextTierContract):
    """The contract on a GPU."""


def run(code: str, *arguments: str, descriptors: tuple[int, ...] = ()) -> str:
    """Run a script in a process of its own, which has no CUDA context yet; returns what it printed."""
    here = os.path.dirname(__file__)  # noqa: PTH120 - a string for sys.path
    code = f"import sys; sys.path.insert(0, {here!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        pass_fds=descriptors,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=PATIENCE_S,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_device_can_all_that_zico_asks() -> None:
    """Virtual memory, descriptors, 64-bit waits and host registration are there, and the sizes make sense."""
    facts = probe(0)
    assert facts.has_virtual_memory
    assert facts.exports_descriptors
    assert facts.waits_on_stream
    assert facts.registers_host
    assert facts.granularity_bytes > 0
    assert facts.granularity_bytes & (facts.granularity_bytes - 1) == 0
    assert 0 < free_bytes(0) <= facts.total_bytes


CREATE = """
from conftest import CudaDevice
driver = CudaDevice().driver
memory = driver.create_memory(2 * driver.granularity_bytes, "t", driver.granularity_bytes)
driver.export_pieces(memory)
print(driver.needs_context, driver.context.retained)
"""


def test_memory_is_created_and_exported_without_a_context() -> None:
    """The manual lists no context error for these functions, so the broker should need none."""
    assert run(CREATE).split() == ["False", "False"]


READ = """
import sys
from conftest import CudaDevice
device = CudaDevice()
unit = device.driver.granularity_bytes
with device.driver.import_pieces([int(one) for one in sys.argv[1:]], 2 * unit, unit) as memory:
    with device.driver.reserve(2 * unit) as window:
        device.driver.map(window, 0, memory, 0, 2 * unit)
        assert device.read(window.handle + unit, 6) == b"parent"
        device.write(window.handle + unit, b"child!")
"""


def test_two_processes_share_memory(device: Device) -> None:
    """What another process writes into imported memory is read here, and outlives that process."""
    driver, unit = device.driver, device.driver.granularity_bytes
    with create(device, 2) as memory, reserve(device, 2) as window:
        driver.map(window, 0, memory, 0, 2 * unit)
        device.write(window.handle + unit, b"parent")
        descriptors = driver.export_pieces(memory)
        run(READ, *map(str, descriptors), descriptors=tuple(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        assert device.read(window.handle + unit, 6) == b"child!"


def test_every_function_of_compiled_code_is_in_the_library(device: Device) -> None:
    """The names in the record are exported by the driver's library."""
    addresses = device.driver.addresses()
    assert set(addresses) == set(FUNCTIONS)
    assert 0 not in addresses.values()


def test_a_failed_mapping_is_told_and_undone(device: Device) -> None:
    """``map_piece`` over what is mapped fails, leaves that alone, and works once told to unmap it."""
    record = np.zeros(1, DEVICE)
    with create(device, 2) as memory, reserve(device, 1) as window:
        device.driver.fill_device(record[0], memory)
        assert mapping.map_piece(record[0], window.handle, 0, 0)
        assert mapping.open_pieces(record[0], window.handle, 1)
        device.write(window.handle, b"mine")
        assert not mapping.map_piece(record[0], window.handle, 1, 0)
        assert device.read(window.handle, 4) == b"mine"
        assert mapping.map_piece(record[0], window.handle, 1, 1)
        device.driver.unmap(window, 0, device.driver.granularity_bytes)


def test_memory_can_be_registered_for_rdma_where_the_device_can(device: Device) -> None:
    """Created memory has the flag that NCCL and UCX need of it, as far as the device has it."""
    driver = device.driver
    attribute = driver.call.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    with create(device, 1) as memory:
        handle = ctypes.c_uint64.from_address(memory.handle).value
        found = driver.call("cuMemGetAllocationPropertiesFromHandle", handle)
    assert found.allocFlags.gpuDirectRDMACapable == driver.call("cuDeviceGetAttribute", attribute, driver.device)


def test_free_bytes_fall_by_what_is_created(device: Device) -> None:
    """Created memory is resident at once, whether it is mapped or not."""
    driver = device.driver
    unit = driver.granularity_bytes
    with driver.context.current():
        before = driver.free_bytes()
        with driver.create_memory(64 * unit, "t", unit):
            during = driver.free_bytes()
        assert before is not None
        assert during is not None
        assert before - during >= 64 * unit
