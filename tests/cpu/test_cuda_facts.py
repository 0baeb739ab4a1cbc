"""What is asked of a CUDA device before it is used, and the sentences for what is missing."""

from __future__ import annotations

import pickle
import types
import uuid
from typing import Any

import pytest
from cpu.support.twin_device import MIB
from cuda.bindings import driver as real
from twin.twin import Twin

from zico.base.errors import ConfigError, DriverError
from zico.device.cuda import bindings
from zico.device.cuda.driver import CudaDriver
from zico.device.cuda.facts import device_count, device_uuids, free_bytes, probe, require


def test_facts_are_what_the_driver_says() -> None:
    """Each fact comes from the device that was asked, none is assumed, and nothing is held afterwards."""
    attributes = {"COMPUTE_CAPABILITY_MAJOR": 8, "COMPUTE_CAPABILITY_MINOR": 9, "CAN_USE_64_BIT_STREAM_MEM_OPS": 0}
    with Twin(2, 64 * MIB, 4 * MIB, driver_version=12040, attributes=attributes) as twin:
        facts = probe(1, twin)
        assert twin.leaks() == {}
        assert int(twin.cuCtxGetCurrent()[1]) == 0
        assert twin.contexts_made == 0
    assert (facts.ordinal, facts.count, facts.driver_text, facts.compute_capability) == (1, 2, "12.4", (8, 9))
    assert (facts.total_bytes, facts.granularity_bytes) == (64 * MIB, 4 * MIB)
    assert (facts.has_virtual_memory, facts.exports_descriptors) == (True, True)
    assert (facts.waits_on_stream, facts.registers_host) == (False, True)
    assert facts.name == "Zico's software twin 1"
    assert facts.uuid == "GPU-01010101-0101-0101-0101-010101010101"


def test_what_the_bindings_do_not_know_is_not_there() -> None:
    """An attribute that an older cuda.bindings has no name for counts as not supported."""
    known = {name: value for name, value in real.CUdevice_attribute.__members__.items() if "64_BIT" not in name}
    with Twin() as twin:
        twin.CUdevice_attribute = types.SimpleNamespace(**known)
        facts = probe(0, twin)
    assert (facts.waits_on_stream, facts.has_virtual_memory) == (False, True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"attributes": {"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}}, "has no virtual memory management: use a GPU"),
        ({"attributes": {"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 0}}, "as file descriptors: run on Linux"),
        ({"driver_version": 11080}, "knows CUDA 11.8, Zico needs 12.0: update the NVIDIA driver"),
        ({"devices": 0}, "no CUDA device that this process may use"),
    ],
)
def test_a_device_that_lacks_something_is_refused_with_a_remedy(settings: dict[str, Any], sentence: str) -> None:
    """What is missing is named before any memory is made, by ``require`` and by the driver."""
    with Twin(**settings) as twin:
        for open_device in (lambda: require(0, twin), lambda: CudaDriver(0, twin)):
            with pytest.raises(DriverError, match=sentence):
                open_device()
        assert twin.leaks() == {}


def test_only_the_question_for_free_bytes_makes_a_context() -> None:
    """A driver is opened without one; free bytes take one, which counts as taken and is given back."""
    with Twin(total_bytes=64 * MIB, context_bytes=2 * MIB) as twin:
        CudaDriver(0, twin).close()
        assert twin.contexts_made == 0
        assert free_bytes(0, twin) == 62 * MIB
        assert (twin.contexts_made, twin.leaks()) == (1, {})


class Parts(Twin):
    """A driver of parts of GPUs (MIG)."""

    def cuDeviceGetName(self, length: int, dev: Any) -> tuple[Any, ...]:  # noqa: N802, ANN401 - the driver's
        """Return the name of a part."""
        return super().cuDeviceGetName(length, dev)[0], b"NVIDIA H100 80GB HBM3 MIG 1g.10gb".ljust(length, b"\0")


class PartsOf12(Parts):
    """The same by bindings for CUDA 12: the older function tells the GPU that a part is of."""

    def cuDeviceGetUuid_v2(self, dev: Any) -> tuple[Any, ...]:  # noqa: N802, ANN401 - the driver's
        """Return what a part is named by."""
        return super().cuDeviceGetUuid(dev)

    def cuDeviceGetUuid(self, dev: Any) -> tuple[Any, ...]:  # noqa: N802, ANN401 - the driver's
        """Return what the GPU is named by."""
        return super().cuDeviceGetUuid(dev)[0], types.SimpleNamespace(bytes=b"the GPU of parts")


@pytest.mark.parametrize("bindings_of", [Parts, PartsOf12])
def test_a_part_of_a_gpu_has_a_uuid_of_its_own(bindings_of: type[Twin]) -> None:
    """Parts of one GPU have names of their own, as CUDA_VISIBLE_DEVICES and the management library want them."""
    with bindings_of(3) as twin:
        assert device_uuids(twin)[1:] == [f"MIG-{uuid.UUID(bytes=bytes([n] * 16))}" for n in (1, 2)]
        assert probe(1, twin).uuid == device_uuids(twin)[1]


def test_uuids_are_told_without_a_context() -> None:
    """Every device is named as ``probe`` names it, and no device is touched."""
    with Twin(3) as twin:
        twin.fail_next("cuDevicePrimaryCtxRetain")
        uuids = device_uuids(twin)
        twin.cuInit(0)
        twin.cuDevicePrimaryCtxRetain(0)
        assert uuids == [probe(ordinal, twin).uuid for ordinal in range(3)]
        assert len(set(uuids)) == 3


def test_no_granularity_is_asked_of_a_device_without_virtual_memory() -> None:
    """The doctor can describe such a device all the same."""
    with Twin(attributes={"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}) as twin:
        assert probe(0, twin).granularity_bytes == 0


@pytest.mark.parametrize(
    ("devices", "ordinal", "sentence"),
    [
        (1, 1, "there is no device cuda:1: this process may use 1, cuda:0$"),
        (3, 5, "there is no device cuda:5: this process may use 3, cuda:0 to cuda:2$"),
        (2, -1, "there is no device cuda:-1: this process may use 2, cuda:0 to cuda:1$"),
    ],
)
def test_an_ordinal_out_of_range_names_how_many_there_are(devices: int, ordinal: int, sentence: str) -> None:
    """A device that is not there is the setting's fault."""
    with Twin(devices) as twin, pytest.raises(ConfigError, match=sentence):
        require(ordinal, twin)


@pytest.mark.parametrize("error", [RuntimeError("no libcuda.so.1"), ImportError("libcuda.so.1: cannot open")])
def test_a_missing_driver_library_is_one_sentence(error: Exception) -> None:
    """What cuda.bindings raises at its first call without the library becomes a ``DriverError`` with a remedy."""

    def fail(*_: object) -> None:
        raise error

    with pytest.raises(DriverError, match="install the NVIDIA driver") as caught:
        device_count(types.SimpleNamespace(cuInit=fail))
    assert "\n" not in str(caught.value)
    assert caught.value.status == bindings.NO_DRIVER


def test_every_remedy_is_for_a_status_that_exists() -> None:
    """A remedy under a misspelt name would never be read."""
    assert set(bindings.REMEDIES) <= {status.name for status in real.CUresult}


@pytest.mark.parametrize("name", sorted(bindings.REMEDIES))
def test_a_status_is_named_with_its_remedy(name: str) -> None:
    """The error has the function, the number, the name and what to do, and crosses processes."""
    status = getattr(real.CUresult, name)
    with pytest.raises(DriverError) as caught:
        bindings.check("cuMemCreate", (status, None))
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (error.operation, error.status) == ("cuMemCreate", int(status))
    assert name in str(error)
    assert bindings.REMEDIES[name] in str(error)


def test_a_status_that_nobody_knows_is_still_an_error() -> None:
    """A newer driver's status has a number at least."""
    with pytest.raises(DriverError, match="4711: an unknown status"):
        bindings.check("cuMemMap", (4711,))


def test_success_returns_what_came_with_it() -> None:
    """Nothing, one thing, or a tuple, as the function returns."""
    done = real.CUresult.CUDA_SUCCESS
    assert bindings.check("f", (done,)) is None
    assert bindings.check("f", (done, 5)) == 5
    assert bindings.check("f", (done, 5, 6)) == (5, 6)


def test_use_replaces_the_driver_of_this_process() -> None:
    """A test's job process puts the twin in place of the real driver, and back."""
    with Twin(2) as twin:
        bindings.use(twin)
        try:
            assert device_count() == 2
            driver = CudaDriver(1)
            driver.close()
        finally:
            bindings.use(None)
        assert bindings.default_api() is real
