"""Devices by name: found, described for a run and by the doctor, with the driver's software twin in its place."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from cpu.support import fake_nvml
from cpu.support.fake_nvml import Library, Memory, Process
from cpu.support.twin_device import MIB
from twin.entry import Refused
from twin.twin import Twin

from zico.base.decoding import to_json
from zico.base.errors import ConfigError, DriverError
from zico.base.settings import DeviceMemory, Setting, resolve
from zico.base.units import GIB
from zico.broker.devices import HOST_DEVICE, Device, facts_of, open_device, open_driver
from zico.device.cuda import bindings
from zico.device.cuda.driver import CudaDriver
from zico.device.host import HostDriver
from zico.launch.devices import VISIBLE_VARIABLE, device_variables, memory_of
from zico.launch.doctor import cuda_checks, switch_checks
from zico.report.model import PoolFigures, RunReport
from zico.report.table import pool_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NO_VMM = {"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 0}
NO_EXPORT = {"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 0}
NO_STREAM_OPS = {"CAN_USE_64_BIT_STREAM_MEM_OPS": 0}


@pytest.fixture(autouse=True)
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no management library of this machine speak, and put the true driver back afterwards."""
    fake_nvml.uninstall(monkeypatch)
    yield
    bindings.use(None)


@contextlib.contextmanager
def gpus(**settings: Any) -> Iterator[Twin]:  # noqa: ANN401 - the twin's
    """Give a machine of GPUs; whatever was asked of them, nothing is held in the end."""
    with Twin(**settings) as twin:
        bindings.use(twin)
        yield twin
        assert twin.leaks() == {}


def of_flag(name: str) -> Setting[str]:
    """Return a device as the command line gives it."""
    return Setting(name, "--device")


class NoLibrary:
    """What ``cuda.bindings.driver`` is without the driver: every function raises."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function."""

        def function(*_: object) -> None:
            message = f'Function "{name}" not found: libcuda.so.1: cannot open shared object file'
            raise RuntimeError(message)

        return function


# -- by name ---------------------------------------------------------------------------------------


def test_the_host_needs_no_driver_library() -> None:
    """The host device is found by its name and by its description, without a GPU."""
    device, driver = open_device("host")
    assert device == HOST_DEVICE
    assert isinstance(driver, HostDriver)
    assert isinstance(open_driver(HOST_DEVICE), HostDriver)
    assert (HOST_DEVICE.kind, Device("cuda:1", "x").kind) == ("host", "cuda")


def test_a_gpu_is_found_by_its_identity_whatever_its_number_here() -> None:
    """Who sees the devices in another order than the broker takes the one that the broker means."""
    with gpus(devices=3):
        (second, driver) = open_device("cuda:1")
        driver.close()
        found = open_driver(Device("cuda:0", second.identity))
        assert isinstance(found, CudaDriver)
        assert found.name == "cuda:1"
        found.close()


def test_a_device_that_is_not_seen_here_is_named() -> None:
    """A process that hides the pool's GPU from itself is told which one it must see."""
    with gpus(), pytest.raises(DriverError, match=r"does not see cuda:0, GPU-7: CUDA_VISIBLE_DEVICES must name it"):
        open_driver(Device("cuda:0", "GPU-7"))


# -- for a run -------------------------------------------------------------------------------------


def test_a_gpus_memory_for_a_run() -> None:
    """Size, free bytes and granularity are the driver's; the identity matters only among several."""
    with gpus(total_bytes=512 * MIB) as twin:
        held = CudaDriver(0, twin)
        with held.create_memory(128 * MIB, "other", 64 * MIB):
            assert memory_of(of_flag("cuda:0")) == DeviceMemory(
                512 * MIB, 384 * MIB, granularity_bytes=2 * MIB, is_taken_at_once=True
            )
        held.close()
    with gpus(devices=2):
        identities = {memory_of(of_flag(f"cuda:{ordinal}")).identity for ordinal in range(2)}
        assert len(identities) == 2
        assert "" not in identities


def test_the_management_library_knows_better_and_names_the_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free bytes and holders are the library's, where it is there, and no context is made to ask for them."""
    with gpus(total_bytes=512 * MIB) as twin:
        identity = facts_of("cuda:0").uuid
        Library(Memory(512 * MIB, 100 * MIB), [Process(os.getpid(), 412 * MIB)], uuid=identity).install(monkeypatch)
        memory = memory_of(of_flag("cuda:0"))
        assert memory.available_bytes == 100 * MIB
        assert twin.contexts_made == 0
        assert memory.held_by.endswith(f" (process {os.getpid()}) 412 MiB")


@pytest.mark.parametrize(("reserve", "fit"), [("1GiB", 2), ("512MiB", 1), ("0", 0)])
def test_beside_a_pool_without_budget_each_job_has_room_for_its_context(
    monkeypatch: pytest.MonkeyPatch, reserve: str, fit: int
) -> None:
    """The reserve holds a context and a workspace for each job; without one no job can make its context."""
    with gpus(total_bytes=8 * GIB, context_bytes=512 * MIB) as twin:
        Library(Memory(8 * GIB, 8 * GIB), [], uuid=facts_of("cuda:0").uuid).install(monkeypatch)
        texts = {"device": "cuda:0", "budget": "none", "reserve": reserve}
        given = {name: Setting(text, f"--{name}") for name, text in texts.items()}
        budget = resolve(given, memory_of(of_flag("cuda:0")), ("zico",), n_jobs=2).budget_bytes.value
        driver = CudaDriver(0)
        with driver.create_memory(budget, "pool", 64 * MIB):
            made = 0
            with contextlib.suppress(Refused):
                for made in range(3):  # noqa: B007 - how many came before the one that was refused
                    context = twin.make_context()
                    twin.cuCtxSetCurrent(context)
                    if int(twin.workspace(512 * MIB)[0]) != 0:
                        break
            twin.cuCtxSetCurrent(0)
        assert made == fit
        driver.close()


@pytest.mark.parametrize(
    ("device", "settings", "says"),
    [
        ("cuda:2", {"devices": 2}, "there is no device cuda:2: this process may use 2"),
        ("cuda:0", {"attributes": NO_VMM}, "no virtual memory management"),
        ("cuda:0", {"attributes": NO_EXPORT}, "cannot hand memory to other processes"),
        ("cuda:0", {"driver_version": 11080}, "knows CUDA 11.8, Zico needs 12.0"),
        ("cuda:0", {"devices": 0}, "no CUDA device"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_in_a_sentence(device: str, settings: dict[str, Any], says: str) -> None:
    """Whatever is missing, the message says it and begins with where the device's name came from."""
    with gpus(**settings), pytest.raises(ConfigError, match=f"^--device: .*{says}"):
        memory_of(of_flag(device))


def test_without_a_driver_the_sentence_says_what_to_install() -> None:
    """Where the driver's library is missing, that is the reason."""
    bindings.use(NoLibrary())
    with pytest.raises(ConfigError, match=r"--device: .*libcuda\.so\.1 could not be used: install the NVIDIA driver"):
        memory_of(of_flag("cuda:0"))


def test_jobs_see_the_chosen_one_of_several_gpus() -> None:
    """With several GPUs the jobs' variable names the chosen one; with one the user's own setting stands."""
    several = DeviceMemory(16 << 30, 16 << 30, identity="GPU-5")
    settings = resolve({"device": Setting("cuda:1", "")}, several, ("zico",))
    assert device_variables(settings) == {VISIBLE_VARIABLE: "GPU-5"}
    settings = resolve({"device": Setting("cuda:0", "")}, DeviceMemory(16 << 30, 16 << 30), ("zico",))
    assert device_variables(settings) == {}


# -- for the doctor --------------------------------------------------------------------------------


def rows(environ: dict[str, str] | None = None) -> dict[str, tuple[bool, str]]:
    """Return the doctor's rows by their names."""
    return {check.name: (check.passed, check.detail) for check in cuda_checks(environ or {"PATH": "/nonexistent"})}


def test_the_doctor_describes_each_gpu() -> None:
    """Driver, name, memory, and everything that Zico needs has a row for each device, all of them good."""
    with gpus(devices=2, total_bytes=1 << 30):
        found = rows()
    needed = ("", " driver", " virtual memory", " sharing", " waits", " granularity")
    assert set(found) == {f"cuda:{ordinal}{what}" for ordinal in range(2) for what in needed} | {"MPS"}
    assert all(passed for passed, _ in found.values())
    assert "1 GiB of 1 GiB free" in found["cuda:1"][1]
    assert found["cuda:0 driver"][1] == "libcuda.so.1 knows CUDA 13.0"
    assert found["cuda:0 granularity"][1].startswith("2 MiB")


@pytest.mark.parametrize(
    ("settings", "row", "says"),
    [
        ({"attributes": NO_VMM}, "cuda:0 virtual memory", "no virtual memory management: use a GPU of 2016"),
        (
            {"attributes": NO_EXPORT},
            "cuda:0 sharing",
            "no memory shared by file descriptors.*: run on Linux",
        ),
        ({"driver_version": 11080}, "cuda:0 driver", "knows CUDA 11.8: Zico needs 12.0, update"),
    ],
)
def test_what_a_gpu_lacks_is_not_ok_and_has_its_remedy(settings: dict[str, Any], row: str, says: str) -> None:
    """The row of what is missing fails and says what to do."""
    with gpus(**settings):
        passed, detail = rows()[row]
    assert not passed
    assert re.search(says, detail)


def test_a_gpu_without_stream_memory_operations_is_good_enough() -> None:
    """Waits are a kernel's then, and the row says so."""
    with gpus(attributes=NO_STREAM_OPS):
        passed, detail = rows()["cuda:0 waits"]
    assert passed
    assert detail.startswith("by a kernel")


@pytest.mark.parametrize("make", [NoLibrary, functools.partial(Twin, devices=0)])
def test_no_gpu_is_one_row_and_no_fault(make: Callable[[], object]) -> None:
    """Without a driver, or without a device, there is one row, and it is good."""
    bindings.use(make())
    ((name, (passed, detail)),) = rows().items()
    assert (name, passed) == ("cuda", True)
    assert detail.startswith("no usable GPU here, only the host device: ")


def test_the_mps_row_says_how_jobs_would_share(tmp_path: Path) -> None:
    """A daemon that runs, a control program that could start one, and neither, are told apart."""
    with gpus():
        assert "does not work" in rows()["MPS"][1]
        program = tmp_path / "nvidia-cuda-mps-control"
        program.touch(mode=0o755)
        assert "--mps starts one" in rows({"PATH": str(tmp_path)})["MPS"][1]
        (tmp_path / "control").touch()
        found = rows({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})["MPS"][1]
    assert found == f"a daemon runs at {tmp_path}: jobs' kernels overlap"


@pytest.mark.parametrize(
    ("variable", "value", "passed", "says"),
    [
        ("ZICO_PLAN", "off", True, "follow no plan"),
        ("ZICO_PROFILES", "off", True, "remember no earlier run"),
        ("ZICO_PLAN", "no", False, "'no' has no effect: give off"),
    ],
)
def test_a_switch_has_a_row(variable: str, value: str, *, passed: bool, says: str) -> None:
    """A switch has a row if it is set, a bad one if it does nothing, and none if it is not."""
    (check,) = switch_checks({variable: value})
    assert check.passed is passed
    assert says in check.detail
    assert list(switch_checks({})) == []


# -- in reports ------------------------------------------------------------------------------------


def test_a_report_has_what_lies_outside_the_pool_where_it_is_known() -> None:
    """Contexts and what others hold have a line and fields of their own; where nobody knows, there are neither."""
    figures = {"peak_physical_bytes": MIB, "context_bytes": 3 * MIB, "foreign_bytes": 5 * MIB}
    known = RunReport(device="cuda:0", policy="zico", budget_bytes=MIB, pool=PoolFigures(**figures), jobs=())
    lines = "\n".join(pool_lines(known))
    assert "peak physical by the driver 1 MiB" in lines
    assert "outside the pool: framework contexts and workspaces 3 MiB, others 5 MiB" in lines
    assert msgspec.json.decode(to_json(known), type=RunReport) == known
    unknown = RunReport(device="host", policy="zico", budget_bytes=MIB, pool=PoolFigures(), jobs=())
    assert "outside the pool" not in "\n".join(pool_lines(unknown))
    assert "peak physical by the kernel" in "\n".join(pool_lines(unknown))
    assert b"context_bytes" not in to_json(unknown)
    assert msgspec.json.decode(to_json(unknown), type=RunReport) == unknown
