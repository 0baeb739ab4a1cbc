"""The twin's memory is as strict as the manual of the real driver words it."""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cpu.support.twin_calls import FD, UNIT, access, create, mapped, prop, reserve, status
from cuda.bindings import driver as real
from twin.entry import Refused
from twin.memory import ALIAS
from twin.twin import Twin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def twin() -> Iterator[Twin]:
    """Return a twin that was initialised."""
    with Twin(total_bytes=8 * UNIT) as twin:
        assert status(twin.cuInit(0)) == "SUCCESS"
        yield twin


def host_prop(**changes: Any) -> Any:  # noqa: ANN401 - a CUmemAllocationProp
    """Describe memory of the host, with changes."""
    return prop(**{"place": NUMA, "handles": NO_HANDLES, "device": 0} | changes)


def host_access(place: Any = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA) -> Any:  # noqa: ANN401
    """Describe access by the processor."""
    made = access()
    made.location.type = place
    return made


NO_HANDLES = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
HOST = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
CURRENT_NODE = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
MANAGED = real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
NUMA = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
FABRIC = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda twin: twin.cuMemCreate(UNIT + 1, prop(), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(0, prop(), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(UNIT, prop(), 1), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(UNIT, None, 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(UNIT, prop(type=MANAGED), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(UNIT, prop(place=NUMA), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(UNIT, prop(device=1), 0), "INVALID_DEVICE"),
        (lambda twin: twin.cuMemCreate(UNIT, prop(handles=FABRIC), 0), "NOT_SUPPORTED"),
        (lambda twin: twin.cuMemCreate(9 * UNIT, prop(), 0), "OUT_OF_MEMORY"),
        (lambda twin: twin.cuMemRelease(create(twin) + 1), "INVALID_VALUE"),
        (lambda twin: twin.cuMemExportToShareableHandle(create(twin), FABRIC, 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemImportFromShareableHandle(1 << 20, FD), "INVALID_VALUE"),
        (lambda twin: twin.cuMemAddressReserve(UNIT + 512, 0, 0, 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemAddressReserve(UNIT, 3 * UNIT, 0, 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemAddressFree(reserve(twin), UNIT), "INVALID_VALUE"),
        (lambda twin: twin.cuMemAddressFree(reserve(twin) + UNIT, 3 * UNIT), "INVALID_VALUE"),
        (lambda twin: twin.cuMemMap(reserve(twin) + 4096, UNIT, 0, create(twin), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemMap(reserve(twin), UNIT, UNIT, create(twin, 2 * UNIT), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemMap(reserve(twin), UNIT, UNIT, create(twin), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemMap(reserve(twin), UNIT, 0, create(twin, 2 * UNIT), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemMap(reserve(twin), 2 * UNIT, 0, create(twin), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemMap(reserve(twin) + 4 * UNIT, UNIT, 0, create(twin), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemMap(mapped(twin)[1], UNIT, 0, create(twin), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemUnmap(reserve(twin), UNIT), "INVALID_VALUE"),
        (lambda twin: twin.cuMemUnmap(mapped(twin)[1], UNIT // 2), "INVALID_VALUE"),
        (lambda twin: twin.cuMemUnmap(mapped(twin)[1], 2 * UNIT), "INVALID_VALUE"),
        (lambda twin: twin.cuMemSetAccess(mapped(twin)[1], 2 * UNIT, [access()], 1), "INVALID_VALUE"),
        (lambda twin: twin.cuMemSetAccess(mapped(twin)[1], UNIT, [access(device=1)], 1), "INVALID_VALUE"),
        (lambda twin: twin.cuMemSetAccess(mapped(twin)[1], UNIT, [access()], 2), "INVALID_VALUE"),
        (lambda twin: twin.cuMemAddressFree(mapped(twin)[1], 4 * UNIT), "INVALID_VALUE"),
        (lambda twin: twin.cuDeviceGet(1), "INVALID_DEVICE"),
        (lambda twin: twin.cuMemGetInfo(), "INVALID_CONTEXT"),
        (lambda twin: twin.cuStreamCreate(0), "INVALID_CONTEXT"),
        (lambda twin: twin.cuMemHostRegister(1 << 40, 4096, 0), "INVALID_CONTEXT"),
        (lambda twin: twin.cuCtxSetCurrent(77), "INVALID_CONTEXT"),
        (lambda twin: twin.cuDevicePrimaryCtxRelease(0), "INVALID_CONTEXT"),
    ],
)
def test_what_the_real_driver_refuses_is_refused(
    twin: Twin, call: Callable[[Twin], tuple[Any, ...]], expected: str
) -> None:
    """Each wrong call returns its status and changes nothing that is counted."""
    assert status(call(twin)) == expected


def test_nothing_works_before_initialisation() -> None:
    """Every function but ``cuInit`` wants it first."""
    with Twin() as twin:
        assert status(twin.cuDeviceGetCount()) == "NOT_INITIALIZED"
        assert status(twin.cuInit(0)) == "SUCCESS"
        assert status(twin.cuDeviceGetCount()) == "SUCCESS"


def test_a_forked_child_must_not_use_the_driver(twin: Twin) -> None:
    """After a fork every call returns ``NOT_INITIALIZED`` in the child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other libraries have threads
        child = os.fork()
    if child == 0:
        os._exit(0 if status(twin.cuDeviceGetCount()) == "NOT_INITIALIZED" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_without_access_faults(twin: Twin) -> None:
    """Between mapping and setting access, and after taking access away, nobody reads or writes."""
    handle, address = create(twin), reserve(twin)
    twin.cuMemMap(address, UNIT, 0, handle, 0)
    with pytest.raises(Refused, match="ILLEGAL_ADDRESS"):
        twin.read(address, 1)
    twin.cuMemSetAccess(address, UNIT, [access()], 1)
    twin.write(address, b"open")
    closed = real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    assert status(twin.cuMemSetAccess(address, UNIT, [access(closed)], 1)) == "SUCCESS"
    with pytest.raises(Refused, match="ILLEGAL_ADDRESS"):
        twin.read(address, 1)
    twin.cuMemSetAccess(address, UNIT, [access()], 1)
    assert twin.read(address, 4) == b"open"


def test_an_access_across_the_edge_of_a_mapping_faults(twin: Twin) -> None:
    """A range that is partly mapped cannot be read, one over two neighbours can."""
    _, address = mapped(twin)
    with pytest.raises(Refused, match="ILLEGAL_ADDRESS"):
        twin.read(address + UNIT - 2, 4)
    twin.cuMemMap(address + UNIT, UNIT, 0, create(twin), 0)
    twin.cuMemSetAccess(address, 2 * UNIT, [access()], 1)
    assert twin.read(address + UNIT - 2, 4) == bytes(4)


def test_released_memory_stays_while_it_is_mapped(twin: Twin) -> None:
    """A handle is gone for every use at once, its bytes only with the last mapping."""
    handle, address = mapped(twin)
    twin.write(address, b"kept")
    assert status(twin.cuMemRelease(handle)) == "SUCCESS"
    for again in (twin.cuMemRelease(handle), twin.cuMemMap(address + UNIT, UNIT, 0, handle, 0)):
        assert status(again) == "INVALID_VALUE"
    assert twin.read(address, 4) == b"kept"
    assert twin.used_bytes == UNIT
    twin.cuMemUnmap(address, UNIT)
    assert twin.used_bytes == 0


def test_a_descriptor_of_anything_else_is_not_imported(twin: Twin) -> None:
    """A pipe, a file and another memfd are refused; the descriptor stays the caller's."""
    reading, writing = os.pipe()
    strange = os.memfd_create("something else")
    for descriptor in (reading, strange):
        assert status(twin.cuMemImportFromShareableHandle(descriptor, FD)) == "INVALID_VALUE"
        os.fstat(descriptor)
    for descriptor in (reading, writing, strange):
        os.close(descriptor)


def test_memory_that_nobody_asked_to_export_is_not_exported(twin: Twin) -> None:
    """The handle type has to be requested at creation."""
    handle = twin.cuMemCreate(UNIT, prop(handles=real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE), 0)[1]
    assert status(twin.cuMemExportToShareableHandle(handle, FD, 0)) == "INVALID_VALUE"


def test_imported_memory_is_taken_as_created_memory_is(twin: Twin) -> None:
    """Memory of another process lies on the same device, so that this one may create only what is left."""
    handle = create(twin)
    descriptor = twin.cuMemExportToShareableHandle(handle, FD, 0)[1]
    with Twin(total_bytes=2 * UNIT) as other:
        other.cuInit(0)
        for _ in range(2):
            assert status(other.cuMemImportFromShareableHandle(descriptor, FD)) == "SUCCESS"
        assert (other.used_bytes, twin.used_bytes) == (UNIT, UNIT)
        create(other)
        assert status(other.cuMemCreate(UNIT, prop(), 0)) == "OUT_OF_MEMORY"
    os.close(descriptor)


def test_registered_host_memory_has_an_address_of_its_own(twin: Twin) -> None:
    """The device sees registered memory at another address, registers it once, and no longer after."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(page, np.uint8).ctypes.data
    twin.cuCtxSetCurrent(twin.make_context())
    assert status(twin.cuMemHostGetDevicePointer(address, 0)) == "INVALID_VALUE"
    assert status(twin.cuMemHostRegister(address, mmap.PAGESIZE, 3)) == "SUCCESS"
    assert status(twin.cuMemHostRegister(address + 8, 8, 3)) == "HOST_MEMORY_ALREADY_REGISTERED"
    device_address = int(twin.cuMemHostGetDevicePointer(address, 0)[1])
    assert device_address == address + ALIAS
    twin.store(device_address + 8, -5)
    assert np.frombuffer(page, np.int64)[1] == -5
    with pytest.raises(Refused, match="ILLEGAL_ADDRESS"):
        twin.load(address)
    assert status(twin.cuMemHostUnregister(address)) == "SUCCESS"
    assert status(twin.cuMemHostUnregister(address)) == "HOST_MEMORY_NOT_REGISTERED"
    with pytest.raises(Refused, match="ILLEGAL_ADDRESS"):
        twin.load(device_address)


def test_host_memory_that_is_not_there_is_not_registered(twin: Twin) -> None:
    """Addresses without memory, and no bytes at all, are refused."""
    twin.cuCtxSetCurrent(twin.make_context())
    for address, size_bytes in ((1 << 40, 4096), (4096, 4096), (0, 4096), (id(twin), 0)):
        assert status(twin.cuMemHostRegister(address, size_bytes, 0)) == "INVALID_VALUE"


def test_where_virtual_memory_wants_a_context_it_is_refused_without() -> None:
    """A twin can be as strict as the strictest driver might be."""
    with Twin(needs_context=True) as twin:
        twin.cuInit(0)
        assert status(twin.cuMemCreate(UNIT, prop(), 0)) == "INVALID_CONTEXT"
        twin.cuCtxSetCurrent(twin.cuDevicePrimaryCtxRetain(0)[1])
        assert status(twin.cuMemCreate(UNIT, prop(), 0)) == "SUCCESS"


def test_the_primary_context_ends_with_its_last_holder(twin: Twin) -> None:
    """It is one context however often it is retained; where it is still current afterwards, nothing works."""
    first, second = (int(twin.cuDevicePrimaryCtxRetain(0)[1]) for _ in range(2))
    assert first == second
    twin.cuCtxSetCurrent(first)
    twin.cuDevicePrimaryCtxRelease(0)
    assert int(twin.cuCtxGetCurrent()[1]) == first
    twin.cuDevicePrimaryCtxRelease(0)
    assert status(twin.cuMemGetInfo()) == "CONTEXT_IS_DESTROYED"
    assert status(twin.cuCtxSetCurrent(first)) == "INVALID_CONTEXT"


def test_contexts_and_workspaces_take_memory_of_the_device() -> None:
    """A context is charged when it is made, once, and a workspace with it, until the context ends."""
    with Twin(total_bytes=4 * UNIT, context_bytes=UNIT) as twin:
        twin.cuInit(0)
        for _ in range(2):
            context = int(twin.cuDevicePrimaryCtxRetain(0)[1])
        assert (twin.used_bytes, twin.contexts_made) == (UNIT, 1)
        twin.cuCtxSetCurrent(context)
        assert status(twin.workspace(UNIT)) == "SUCCESS"
        assert int(twin.cuMemGetInfo()[1]) == 2 * UNIT
        assert status(twin.workspace(3 * UNIT)) == status(twin.cuMemCreate(3 * UNIT, prop(), 0)) == "OUT_OF_MEMORY"
        create(twin, 2 * UNIT)
        with pytest.raises(Refused, match="OUT_OF_MEMORY"):
            twin.make_context()
        for _ in range(2):
            twin.cuDevicePrimaryCtxRelease(0)
        assert twin.used_bytes == 2 * UNIT


def test_a_call_fails_when_it_is_told_to(twin: Twin) -> None:
    """The k-th call, or the next of a name, returns an error once; the one after works."""
    twin.fail_at, twin.fail_with = twin.calls + 2, "NOT_PERMITTED"
    assert [status(twin.cuDeviceGetCount()) for _ in range(3)] == ["SUCCESS", "NOT_PERMITTED", "SUCCESS"]
    twin.fail_next("cuMemRelease", "UNKNOWN")
    handle = create(twin)
    assert [status(twin.cuMemRelease(handle)) for _ in range(2)] == ["UNKNOWN", "SUCCESS"]


def test_functions_have_the_real_ones_names() -> None:
    """Every function of the twin exists in cuda.bindings.driver, and what is missing says where to add it."""
    with Twin() as twin:
        own = {name for name in dir(Twin) if name.startswith("cu") and name != "current_context"}
        assert own
        assert own <= set(dir(real))
        with pytest.raises(AttributeError, match="the twin has no cuMemAlloc"):
            twin.cuMemAlloc(1)
        assert twin.CUresult is real.CUresult


def test_closing_a_twin_returns_everything() -> None:
    """Descriptors and addresses are gone, whoever held them."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
    with contextlib.closing(Twin()) as twin:
        twin.cuInit(0)
        mapped(twin)
        assert twin.leaks()
    assert twin.leaks() == {}
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# -- memory of the host that the device uses -------------------------------------------------------


@pytest.fixture
def newer() -> Iterator[Twin]:
    """Return a twin of a driver that maps memory of the host, which comes in larger pieces than the device's."""
    with Twin(total_bytes=2 * UNIT, host_bytes=8 * UNIT, host_granularity_bytes=2 * UNIT) as twin:
        twin.cuInit(0)
        yield twin


def pinned(twin: Twin) -> int:
    """Return the address where memory of the host is mapped; nobody may touch it yet."""
    handle = twin.cuMemCreate(2 * UNIT, host_prop(), 0)[1]
    address = int(twin.cuMemAddressReserve(2 * UNIT, 2 * UNIT, 0, 0)[1])
    assert status(twin.cuMemMap(address, 2 * UNIT, 0, handle, 0)) == "SUCCESS"
    return address


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda twin: twin.cuMemCreate(2 * UNIT, host_prop(), 0), "SUCCESS"),
        (lambda twin: twin.cuMemCreate(2 * UNIT, host_prop(handles=FD), 0), "SUCCESS"),
        (lambda twin: twin.cuMemCreate(2 * UNIT, host_prop(place=HOST, device=9), 0), "SUCCESS"),
        (lambda twin: twin.cuMemCreate(2 * UNIT, host_prop(place=HOST, handles=FD), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(2 * UNIT, host_prop(place=CURRENT_NODE), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(2 * UNIT, host_prop(device=-1), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(2 * UNIT, host_prop(device=1), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(UNIT, host_prop(), 0), "INVALID_VALUE"),
        (lambda twin: twin.cuMemCreate(10 * UNIT, host_prop(), 0), "OUT_OF_MEMORY"),
        (lambda twin: twin.cuMemCreate(2 * UNIT, prop(), 0), "SUCCESS"),
        (lambda twin: twin.cuMemSetAccess(pinned(twin), 2 * UNIT, [access(), host_access()], 2), "SUCCESS"),
        (lambda twin: twin.cuMemSetAccess(pinned(twin), 2 * UNIT, [access(), host_access(HOST)], 2), "SUCCESS"),
        (lambda twin: twin.cuMemSetAccess(pinned(twin), 2 * UNIT, [host_access(CURRENT_NODE)], 1), "INVALID_VALUE"),
        (lambda twin: twin.cuMemSetAccess(mapped(twin)[1], UNIT, [access(), host_access()], 2), "INVALID_VALUE"),
        (lambda twin: twin.cuMemSetAccess(pinned(twin), 2 * UNIT, [], 0), "INVALID_VALUE"),
    ],
)
def test_memory_of_the_host_is_as_the_manual_says(
    newer: Twin, call: Callable[[Twin], tuple[Any, ...]], expected: str
) -> None:
    """Which places, nodes, handle types, sizes and accesses there are; the host's memory is counted by itself."""
    assert status(call(newer)) == expected
    assert newer.used_bytes + newer.pinned_bytes <= 2 * UNIT


def test_access_is_each_ones_own(newer: Twin) -> None:
    """The device alone, the processor alone, or both may touch the host's memory, as access was set."""
    address = pinned(newer)
    shut = real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    for one, device, processor in ((access(), True, False), (host_access(), True, True), (access(shut), False, True)):
        assert status(newer.cuMemSetAccess(address, 2 * UNIT, [one], 1)) == "SUCCESS"
        assert newer.is_open_to_processor(address, 2 * UNIT) == processor
        with contextlib.nullcontext() if device else pytest.raises(Refused):
            newer.write(address, b"x")


@pytest.mark.parametrize(("by_processor", "expected"), [(False, "SUCCESS"), (True, "INVALID_VALUE")])
def test_several_pieces_are_filled_at_once_where_the_device_alone_has_access(
    newer: Twin,
    by_processor: bool,  # noqa: FBT001
    expected: str,
) -> None:
    """As on an H200 (benchmarks/results/gpu/host_memory.md): one piece can be filled in any case."""
    address = int(newer.cuMemAddressReserve(4 * UNIT, 2 * UNIT, 0, 0)[1])
    for at in (address, address + 2 * UNIT):
        handle = newer.cuMemCreate(2 * UNIT, host_prop(), 0)[1]
        assert status(newer.cuMemMap(at, 2 * UNIT, 0, handle, 0)) == "SUCCESS"
        descriptions = [access(), host_access()][: 1 + by_processor]
        assert status(newer.cuMemSetAccess(at, 2 * UNIT, descriptions, len(descriptions))) == "SUCCESS"
    newer.cuCtxSetCurrent(newer.cuDevicePrimaryCtxRetain(0)[1])
    assert status(newer.cuMemsetD8(address, 1, 2 * UNIT)) == "SUCCESS"
    assert status(newer.cuMemsetD8(address, 1, 4 * UNIT)) == expected


def test_an_older_twin_knows_no_node() -> None:
    """A driver before CUDA 12.2 refuses the attribute and the place."""
    attribute = real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    with Twin() as twin:
        twin.cuInit(0)
        assert status(twin.cuDeviceGetAttribute(attribute, 0)) == "INVALID_VALUE"
    with Twin(host_bytes=UNIT, attributes={"HOST_NUMA_ID": -1}) as twin:
        twin.cuInit(0)
        assert int(twin.cuDeviceGetAttribute(attribute, 0)[1]) == -1
        assert status(twin.cuMemCreate(UNIT, host_prop(), 0)) == "SUCCESS", "no nodes: 0 is the place"
