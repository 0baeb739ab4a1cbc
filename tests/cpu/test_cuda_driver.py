"""The CUDA driver over its software twin: the contract, and what only a CUDA device has."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.driver_contract import (
    DriverContract,
    ManagedContract,
    NextTierContract,
    TimelineContract,
    create,
    open_descriptors,
    reserve,
)
from cpu.support.twin_device import MIB, TwinDevice
from twin.twin import Twin

from zico.base.errors import DriverError
from zico.device.api import close_descriptors
from zico.device.cuda.driver import CudaDriver
from zico.device.cuda.managed import allocate
from zico.device.host import HostDriver
from zico.device.record import DEVICE, MOVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNIT = 2 * MIB
PTX = b".visible .entry progress(.param .u64 counter, .param .u64 value)"


@pytest.fixture(params=[False, True], ids=["no context needed", "context needed"])
def device(request: pytest.FixtureRequest) -> Iterator[TwinDevice]:
    """Return a device that wants a context for virtual memory, or not."""
    with TwinDevice(needs_context=request.param, host_bytes=64 * MIB) as device:
        yield device


class TestTwinDevice(DriverContract, TimelineContract, NextTierContract, ManagedContract):
    """The contract on the twin."""


# -- rollback --------------------------------------------------------------------------------------


class Scenario:
    """Everything that the driver can do, step by step."""

    def __init__(self, twin: Twin, stack: contextlib.ExitStack) -> None:
        """Do nothing yet."""
        self.twin = twin
        self.stack = stack
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        twin.kernel("progress", ctypes.c_uint64, ctypes.c_int64)(lambda twin, at, value: twin.store(at, value))

    def steps(self) -> Iterator[Callable[[], Any]]:
        """Yield the steps; each leaves its result for the next ones."""
        yield self.start
        yield self.make
        yield self.share
        yield self.place
        yield lambda: self.driver.unmap(self.window, 0, UNIT)
        yield lambda: self.driver.map(self.window, 0, self.memory, UNIT, 2 * UNIT)
        yield self.time
        yield lambda: self.driver.load_kernel(PTX, "progress")
        yield lambda: self.driver.fill_device(np.zeros(1, DEVICE)[0], self.memory)
        yield self.pin
        yield self.manage
        yield self.driver.free_bytes

    def start(self) -> None:
        """Open the device."""
        self.driver = CudaDriver(0, self.twin)
        self.stack.callback(self.driver.close)

    def make(self) -> None:
        """Create memory."""
        self.memory = self.stack.enter_context(self.driver.create_memory(4 * UNIT, "t", UNIT))

    def share(self) -> None:
        """Export and import it."""
        descriptors = self.driver.export_pieces(self.memory)
        self.stack.enter_context(self.driver.import_pieces(descriptors, 4 * UNIT, UNIT))

    def place(self) -> None:
        """Reserve addresses and map there."""
        with contextlib.ExitStack() as undo:
            self.window = undo.enter_context(self.driver.reserve(4 * UNIT))
            self.driver.map(self.window, 0, self.memory, 0, 3 * UNIT)
            self.stack.push(undo.pop_all())

    def pin(self) -> None:
        """Find out how memory of the host is mapped."""
        self.driver.fill_pinned(np.zeros(1, DEVICE)[0], UNIT)

    def manage(self) -> None:
        """Allocate managed memory, prepare compiled code for it, and move a part."""
        with contextlib.ExitStack() as undo:
            memory = undo.enter_context(allocate(self.driver, 2 * UNIT))
            memory.fill(np.zeros(1, MOVER)[0], self.memory)
            memory.move(0, UNIT, to_device=True)
            self.stack.push(undo.pop_all())

    def time(self) -> None:
        """Register a counter, make a stream, write and wait."""
        with contextlib.ExitStack() as undo:
            address = np.frombuffer(self.page, np.uint8).ctypes.data
            counter = undo.enter_context(self.driver.register_host(address, mmap.PAGESIZE))
            stream = undo.enter_context(self.driver.create_stream())
            self.driver.write_value(stream.handle, counter.device_address, 3)
            self.driver.wait_value(stream.handle, counter.device_address, 3)
            self.driver.synchronize(stream.handle)
            self.stack.push(undo.pop_all())


def held(twin: Twin) -> dict[str, int]:
    """Return what is held but for the context, which stays once somebody needed it."""
    return {kind: count for kind, count in twin.leaks().items() if kind != "contexts"}


def fails_cleanly(fail_at: int, *, needs_context: bool) -> bool:
    """Run all steps with one call failing; tells whether a call failed. The failed step leaves no trace."""
    with Twin(needs_context=needs_context, host_bytes=UNIT) as twin, contextlib.ExitStack() as stack:
        twin.fail_at = fail_at
        for step in Scenario(twin, stack).steps():
            before, descriptors = held(twin), open_descriptors()
            try:
                step()
            except DriverError as error:
                status = error.status
                assert status == 999
                assert all(count <= before.get(kind, 0) for kind, count in held(twin).items())
                assert open_descriptors() == descriptors
                stack.close()
                assert twin.leaks() == {}
                return True
        twin.fail_at = 0
        stack.close()
        assert twin.leaks() == {}
        return False


@pytest.mark.parametrize("needs_context", [False, True])
def test_failure_of_every_driver_call_leaves_nothing_behind(needs_context: bool) -> None:  # noqa: FBT001
    """Whichever call fails, its operation is undone: no handle, mapping, reservation, descriptor or stream stays."""
    calls = 1
    while fails_cleanly(calls, needs_context=needs_context):
        calls += 1
    assert calls > 60


def test_a_leak_would_be_seen() -> None:
    """The twin tells what is held, each kind by its name."""
    with Twin(host_bytes=UNIT) as twin, contextlib.ExitStack() as stack:
        for step in Scenario(twin, stack).steps():
            step()
        assert set(twin.leaks()) >= {
            "handles",
            "mappings",
            "reservations",
            "registrations",
            "streams",
            "modules",
            "managed",
        }


def test_a_context_that_cannot_be_made_current_leaves_nothing() -> None:
    """Operations that need the context do nothing without it; putting a thread's own back is not made to fail."""
    with TwinDevice() as device:
        page = mmap.mmap(-1, mmap.PAGESIZE)
        operations: list[Callable[[], object]] = [
            device.driver.create_stream,
            device.driver.free_bytes,
            lambda: device.driver.register_host(np.frombuffer(page, np.uint8).ctypes.data, mmap.PAGESIZE),
            lambda: device.driver.load_kernel(PTX, "progress"),
        ]
        for operation in operations:
            device.twin.fail_next("cuCtxSetCurrent")
            with pytest.raises(DriverError):
                operation()
            assert held(device.twin) == {}


def test_a_mapping_that_cannot_be_removed_stays_whole(device: TwinDevice) -> None:
    """If the old mapping cannot be unmapped, ``map`` raises and the old one is still there."""
    with create(device, 2) as memory, reserve(device, 1) as window:
        device.driver.map(window, 0, memory, 0, UNIT)
        device.write(window.handle, b"old")
        device.twin.fail_next("cuMemUnmap")
        with pytest.raises(DriverError):
            device.driver.map(window, 0, memory, UNIT, UNIT)
        assert device.read(window.handle, 3) == b"old"
        device.driver.map(window, 0, memory, UNIT, UNIT)
        assert device.read(window.handle, 3) == bytes(3)


@pytest.mark.parametrize("function", ["cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_leaves_the_addresses_reserved(device: TwinDevice, function: str) -> None:
    """After a failed ``map`` nothing is mapped there, and the next one works."""
    with create(device, 2) as memory, reserve(device, 2) as window:
        device.twin.fail_next(function)
        with pytest.raises(DriverError):
            device.driver.map(window, 0, memory, 0, 2 * UNIT)
        assert "mappings" not in device.twin.leaks()
        device.driver.map(window, 0, memory, 0, 2 * UNIT)
        assert device.is_open(window.handle)


def test_a_piece_is_never_cut(device: TwinDevice) -> None:
    """Mapping or unmapping over a part of a larger piece is refused and changes nothing."""
    with device.driver.create_memory(2 * UNIT, "t") as large, reserve(device, 3) as window, create(device) as small:
        device.driver.map(window, 0, large, 0, 2 * UNIT)
        for cut in (
            lambda: device.driver.unmap(window, UNIT, UNIT),
            lambda: device.driver.map(window, UNIT, small, 0, 2 * UNIT),
        ):
            with pytest.raises(DriverError, match="would cut the piece"):
                cut()
        assert device.is_open(window.handle + UNIT)


# -- what is there and what is not -----------------------------------------------------------------


def test_too_little_memory_names_what_could_be_had_and_leaves_it_free() -> None:
    """Memory that does not fit is refused whole; the sentence has both numbers and a remedy."""
    with TwinDevice(total_bytes=8 * UNIT) as device, create(device, 3):
        with pytest.raises(DriverError, match=r"lower --budget.* 10 MiB of 16 MiB could be had on cuda:0") as caught:
            create(device, 8)
        assert caught.value.status == 2
        assert device.driver.free_bytes() == 5 * UNIT
        create(device, 5).close()


@pytest.mark.parametrize(
    ("size_bytes", "piece_bytes"),
    [(3 * UNIT, 2 * UNIT), (UNIT, 2 * UNIT), (2 * UNIT, UNIT // 2), (UNIT + 1, None), (2 * UNIT, -UNIT), (0, None)],
)
def test_memory_is_whole_pieces_of_whole_granules(device: TwinDevice, size_bytes: int, piece_bytes: int | None) -> None:
    """Sizes that do not divide are refused before the driver is asked, with both numbers."""
    calls = device.twin.calls
    with pytest.raises(DriverError, match=f"{size_bytes} bytes in pieces of .* multiples of {UNIT} bytes"):
        device.driver.create_memory(size_bytes, "t", piece_bytes)
    assert device.twin.calls == calls


@pytest.mark.parametrize("can", [0, 1])
def test_memory_can_be_registered_for_rdma_where_the_device_can(can: int) -> None:
    """Regions are created with the flag that NCCL and UCX need of them; a device without RDMA is not asked for it."""
    with TwinDevice(attributes={"GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": can}) as device, create(device, 2) as memory:
        handles = np.ctypeslib.as_array((ctypes.c_uint64 * 2).from_address(memory.handle))
        found = [device.driver.call("cuMemGetAllocationPropertiesFromHandle", int(handle)) for handle in handles]
        assert [one.allocFlags.gpuDirectRDMACapable for one in found] == [can] * 2


def test_free_bytes_need_no_lasting_context() -> None:
    """Asking for free bytes, creating and exporting hold no context where the driver needs none."""
    with TwinDevice() as device, create(device, 2) as memory:
        close_descriptors(device.driver.export_pieces(memory))
        assert device.driver.free_bytes() == device.driver.total_bytes() - 2 * UNIT
        assert device.driver.needs_context is False
        assert "contexts" not in device.twin.leaks()


def test_a_driver_that_wants_a_context_gets_one() -> None:
    """Where creating memory without a context is refused, the primary one is held from then on, and that is told."""
    with TwinDevice(needs_context=True) as device:
        assert device.driver.needs_context is None
        with create(device, 2):
            assert device.driver.needs_context is True
            assert device.twin.leaks()["contexts"] == 1


def test_nothing_is_learnt_where_a_context_is_current_anyway(device: TwinDevice) -> None:
    """In a thread with a context it stays unknown whether one is needed."""
    with device.driver.context.current(), create(device, 1):
        assert device.driver.needs_context is None


def test_one_function_that_wants_a_context_is_enough() -> None:
    """Where creation works without a context and export does not, the context is held from the export on."""
    with TwinDevice(needs_context=("cuMemExportToShareableHandle",)) as device, create(device, 2) as memory:
        assert device.driver.needs_context is False
        close_descriptors(device.driver.export_pieces(memory))
        assert device.driver.needs_context is True


def test_discarding_is_refused_rather_than_pretended(device: TwinDevice) -> None:
    """A part of CUDA memory cannot be given back, and the driver says so."""
    with create(device) as memory, pytest.raises(DriverError, match="given back as a whole"):
        device.driver.discard(memory, 0, UNIT)


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open only so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(number) for number in open_descriptors())
    fillers = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(highest + 1 - len(open_descriptors()))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_descriptors()) - 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_descriptors(fillers)


def test_too_few_descriptors_are_told_and_rolled_back() -> None:
    """Where the limit of open files is reached, export raises with the remedy and leaves no descriptor."""
    with TwinDevice() as device, create(device, 8) as memory:
        before = open_descriptors()
        with few_descriptors(5):
            inside = open_descriptors()
            with pytest.raises(DriverError, match="raise ulimit -n"):
                device.driver.export_pieces(memory)
            assert open_descriptors() == inside
        close_descriptors(device.driver.export_pieces(memory))
        assert open_descriptors() == before


def test_things_of_another_device_are_refused(device: TwinDevice) -> None:
    """Memory and windows of the host device are not taken for ones of the CUDA device."""
    host = HostDriver()
    with host.create_memory(UNIT, "t") as memory, host.reserve(UNIT) as window, create(device, 1) as own:
        with pytest.raises(DriverError, match="not memory of a CUDA device"):
            device.driver.export_pieces(memory)
        with pytest.raises(DriverError, match="not a window of a CUDA device"):
            device.driver.map(window, 0, own, 0, UNIT)


def test_one_descriptor_alone_tells_no_size(device: TwinDevice) -> None:
    """``import_memory`` is the host device's; here it raises and closes the descriptor."""
    with create(device, 1) as memory:
        before = open_descriptors()
        with pytest.raises(DriverError, match="use import_pieces"):
            device.driver.import_memory(device.driver.export_pieces(memory)[0])
        assert open_descriptors() == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"attributes": {"MANAGED_MEMORY": 0}}, "lacks MANAGED_MEMORY: jobs can be paged on GPUs of 2016"),
        ({"attributes": {"CONCURRENT_MANAGED_ACCESS": 0}}, "lacks CONCURRENT_MANAGED_ACCESS"),
        ({"driver_version": 12010}, "the driver knows CUDA 12.1, paging needs 12.2: update the NVIDIA driver"),
    ],
)
def test_a_device_that_cannot_manage_memory_is_refused_in_a_sentence(settings: dict[str, Any], says: str) -> None:
    """What is missing is named, before anything is allocated."""
    with TwinDevice(**settings) as device, pytest.raises(DriverError, match=says):
        allocate(device.driver, UNIT)
