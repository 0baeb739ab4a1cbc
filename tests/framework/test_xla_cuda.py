"""XLA's device memory in a pool, without a GPU: a library that looks functions up as XLA does, and JAX's own plugin.

Under both of them is a driver of software. JAX's plugin is used where it is installed (the tests
named ``plugin``), and TensorFlow's library where TensorFlow is: its build for the processor looks
functions up, but knows no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.hooked_place import BUDGET_BYTES, MIB, Place, put_in_place
from process.support import software_cuda, xla_building
from process.support.cuda_twin import PATIENCE_S, ROOT, Process, compile_once
from process.support.cuda_twin_broker import Broker
from support.harness import FRAMEWORK
from zico.adapters import xla

from zico.base.errors import HookError
from zico.heap import layout
from zico.heap.cuda import hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
TOTAL_BYTES = 1 << 30  # cuda_driver.c
STREAM, OTHER, NO_STREAM = 11, 12, 0
POOL = 99
compiles = pytest.mark.skipif(not xla_building.HAS_COMPILER, reason=xla_building.WITHOUT_COMPILER)
has_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None,
    reason="JAX's CUDA plugin is not installed: make test-versions SETS=gpu beside pip install jax[cuda13]",
)


@pytest.fixture
def place() -> Iterator[Place]:
    """Let this process's hooks serve from a pool that nobody else is in, and hardly wait for memory."""
    with put_in_place(wait_limit_s=0.01) as made:
        yield made
    hooks.OTHERS_RECORD[0] = 0
    hooks.OTHERS_RECORD[0] = 0


class Library:
    """A library that has looked up nothing yet, and the driver that it finds."""

    def __init__(self, directory: Path, built: tuple[Path, Path]) -> None:
        """Load a copy of the library, so that no other test's lookups are in it."""
        driver, lookups = built
        self.name = f"{directory.name}-lookups.so"
        self.functions = ctypes.CDLL(str(shutil.copy(lookups, directory / self.name)))
        self._driver = software_cuda.Driver(str(driver))
        self._driver.enter()
        self._before = self._counted()

    def _counted(self) -> tuple[int, ...]:
        calls = self._driver.calls()
        return tuple(calls.get(name, 0) for name in ("cuMemAllocAsync", "cuMemFreeAsync", "cuMemPoolSetAttribute"))

    @property
    def used_bytes(self) -> int:
        """Return what the driver itself has given and not got back."""
        return self._driver.counter("used_bytes").value

    @property
    def driver_calls(self) -> tuple[int, ...]:
        """Return how often the driver itself allocated, freed, and set a pool up."""
        return tuple(now - before for now, before in zip(self._counted(), self._before, strict=True))

    def allocate(self, size_bytes: int, stream: int = STREAM) -> tuple[int, int]:
        """Return status and address of an allocation from the framework's own pool."""
        out = ctypes.c_uint64()
        pointers = ctypes.byref(out), ctypes.c_uint64(size_bytes), ctypes.c_void_p(POOL), ctypes.c_void_p(stream)
        return self.functions.xla_cuMemAllocFromPoolAsync(*pointers), out.value

    def free(self, address: int, stream: int = STREAM) -> int:
        """Return the status of a free."""
        return int(self.functions.xla_cuMemFreeAsync(ctypes.c_uint64(address), ctypes.c_void_p(stream)))

    def memory(self) -> tuple[int, int, int]:
        """Return free and total bytes, and the device's bytes."""
        free, total, device = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        assert self.functions.xla_cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == SUCCESS
        assert self.functions.xla_cuDeviceTotalMem_v2(ctypes.byref(device), 0) == SUCCESS
        return free.value, total.value, device.value


@pytest.fixture(scope="module")
def built() -> Iterator[tuple[Path, Path]]:
    """Give a driver of software and a library that finds its functions."""
    with tempfile.TemporaryDirectory(prefix="zx-") as name:
        software_cuda.build(Path(name))
        driver = Path(name) / software_cuda.DRIVERS[0]
        yield driver, xla_building.build_lookups(Path(name) / "lookups.so", driver)


@pytest.fixture
def library(tmp_path: Path, built: tuple[Path, Path]) -> Library:
    """Give a library that nobody has redirected."""
    return Library(tmp_path, built)


@compiles
def test_what_the_library_allocates_is_the_pools(place: Place, library: Library) -> None:
    """An allocation lies in the heap's window, a free gives it back, and the driver is asked for neither."""
    xla.redirect(library.name)
    status, address = library.allocate(2 * MIB)
    assert status == SUCCESS
    assert 0 <= address - place.heap.base < int(place.heap.record[0]["window_bytes"])
    assert place.live_bytes == 2 * MIB
    assert library.free(address) == SUCCESS
    assert place.live_bytes == 0
    assert library.driver_calls == (0, 0, 0)
    assert place.heap.record[0]["bad_frees"] == 0


@compiles
def test_everything_else_goes_to_the_driver(place: Place, library: Library) -> None:
    """The framework's own pool is set up as ever, and what has no stand-in is the driver's."""
    xla.redirect(library.name)
    version, threshold = ctypes.c_int(), ctypes.c_uint64(MIB)
    assert library.functions.xla_cuDriverGetVersion(ctypes.byref(version)) == SUCCESS
    assert version.value == 13000
    pool = ctypes.c_void_p(POOL)
    assert library.functions.xla_cuMemPoolSetAttribute(pool, 4, ctypes.byref(threshold)) == SUCCESS
    assert library.driver_calls == (0, 0, 1)
    assert place.live_bytes == 0


@compiles
def test_memory_from_before_goes_back_to_the_driver(place: Place, library: Library, built: tuple[Path, Path]) -> None:
    """What a library got before it was redirected is freed by the driver, by whomever it is freed."""
    status, address = library.allocate(MIB, NO_STREAM)
    assert (status, library.driver_calls) == (SUCCESS, (1, 0, 0))
    xla.redirect(library.name)
    assert library.free(address, NO_STREAM) == SUCCESS
    assert library.driver_calls == (1, 1, 0)
    assert library.allocate(MIB, NO_STREAM)[0] == SUCCESS, "it keeps the function that it has looked up"
    assert library.driver_calls == (2, 1, 0)
    assert place.live_bytes == 0
    assert built[0].exists()


@compiles
def test_what_can_never_be_had_is_the_drivers_own_error(place: Place, library: Library) -> None:
    """More than the budget is CUDA_ERROR_OUT_OF_MEMORY with a null pointer; nothing is an invalid value, as ever."""
    xla.redirect(library.name)
    assert library.allocate(2 * BUDGET_BYTES) == (OUT_OF_MEMORY, 0)
    assert library.allocate(0) == (INVALID_VALUE, 0)
    status, address = library.allocate(BUDGET_BYTES)
    assert status == SUCCESS
    assert library.allocate(MIB) == (OUT_OF_MEMORY, 0)
    assert library.free(address) == SUCCESS
    assert library.allocate(MIB)[0] == SUCCESS
    assert place.live_bytes == MIB


@compiles
def test_a_free_on_another_stream_waits_for_that_stream(place: Place, library: Library) -> None:
    """What was allocated on one stream and is freed on another is used again only when both have done their work."""
    xla.redirect(library.name)
    done = []
    _, address = library.allocate(MIB, STREAM)
    place.device.launch(OTHER, lambda: done.append("other"))
    assert library.free(address, OTHER) == SUCCESS
    assert library.allocate(MIB, STREAM)[1] != address
    place.device.drain()
    assert done == ["other"]
    assert {library.allocate(MIB, STREAM)[1] for _ in range(2)} >= {address}


@compiles
def test_the_memory_that_the_framework_sees_is_the_budget(place: Place, library: Library) -> None:
    """Total is the budget; free is what this job may still come to hold. Without a heap both are the driver's."""
    xla.redirect(library.name)
    assert library.memory() == (BUDGET_BYTES, BUDGET_BYTES, BUDGET_BYTES)
    status, address = library.allocate(2 * MIB)
    assert status == SUCCESS
    assert library.memory() == (BUDGET_BYTES - 2 * MIB, BUDGET_BYTES, BUDGET_BYTES)
    assert library.free(address) == SUCCESS
    record = place.heap.record[0]
    attached, record["attached"] = int(record["attached"]), 0
    try:
        assert library.memory() == (TOTAL_BYTES - library.used_bytes, TOTAL_BYTES, TOTAL_BYTES)
    finally:
        record["attached"] = attached


@pytest.mark.usefixtures("place")
def test_a_question_that_nobody_can_answer_is_an_error() -> None:
    """With neither heap nor driver both questions fail; nothing is written."""
    hooks.OTHERS_RECORD[0] = 0
    hooks.OTHERS_RECORD[0] = 0
    get_info = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(hooks.mem_get_info.address)
    total = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(hooks.device_total_mem.address)
    record: Any = layout.HEAP_RECORD[0]
    attached, record["attached"] = int(record["attached"]), 0
    out = ctypes.c_uint64(7)
    try:
        assert get_info(ctypes.addressof(out), ctypes.addressof(out)) != SUCCESS
        assert total(ctypes.addressof(out), 0) != SUCCESS
    finally:
        record["attached"] = attached
    assert out.value == 7


AT_ITS_END = """
import ctypes, sys
from zico.job import lookup
library = ctypes.CDLL(sys.argv[1])
ctypes.c_int.in_dll(library, "xla_looks_up_at_its_end").value = 1
lookup.substitute("lookups.so", {"cuMemAllocAsync": 1})
"""


@compiles
def test_a_library_may_look_functions_up_when_the_interpreter_is_gone(built: tuple[Path, Path]) -> None:
    """What answers lookups is there until the last instruction of the process, as JAX's plugin needs it."""
    command = [sys.executable, "-c", AT_ITS_END, str(built[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- settings --------------------------------------------------------------------------------------

ALLOCATOR = {"ALLOCATOR": ("cuda_async",), "PREALLOCATE": ("false", "0")}


def test_missing_settings_are_set_and_fitting_ones_stand() -> None:
    """The framework is led to the driver's stream-ordered allocator, whatever the case of what the user wrote."""
    environment = {"PREALLOCATE": "False", "OTHER": "1", "ALLOCATOR": ""}
    xla.settle(environment, ALLOCATOR)
    assert environment == {"PREALLOCATE": "False", "OTHER": "1", "ALLOCATOR": "cuda_async"}


def test_a_setting_that_leads_elsewhere_is_refused() -> None:
    """The sentence names the variable, its value and the remedy; nothing is changed."""
    environment = {"PREALLOCATE": "true"}
    with pytest.raises(HookError, match=r"^PREALLOCATE=true keeps .*: unset it, or set PREALLOCATE=false$"):
        xla.settle(environment, ALLOCATOR)
    assert environment == {"PREALLOCATE": "true"}


def seeing(n_gpus: int) -> Any:  # noqa: ANN401 - stands in for a session
    """Return what ``xla.enable`` asks of a session in a process that sees so many GPUs."""
    return SimpleNamespace(pool=SimpleNamespace(driver=SimpleNamespace(facts=SimpleNamespace(count=n_gpus, uuid="U"))))


def test_a_process_that_sees_several_gpus_is_refused() -> None:
    """XLA would put arrays on all of them; the sentence says how to show it one. With one the settings are made."""
    environment: dict[str, str] = {}
    with pytest.raises(HookError, match=r"sees 2 GPUs .*CUDA_VISIBLE_DEVICES=U"):
        xla.enable(seeing(2), environment, ALLOCATOR)
    assert environment == {}
    xla.enable(seeing(1), environment, ALLOCATOR)
    assert environment == {"TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC": "0"} | {
        name: values[0] for name, values in ALLOCATOR.items()
    }


# -- the real libraries ----------------------------------------------------------------------------


WITH_TENSORFLOW = """
import os
from types import SimpleNamespace as Space
import tensorflow
from zico.adapters import tensorflow as adapter
from zico.base.errors import HookError
try:
    adapter._enable_cuda(None)
except (HookError, AttributeError) as error:  # the latter where the build is one for GPUs and asks the session
    print(tensorflow.test.is_built_with_cuda(), error)
tensorflow.test.is_built_with_cuda = lambda: True
for given in ("", "7"):
    os.environ["TF_DEVICE_MIN_SYS_MEMORY_IN_MB"] = given
    adapter._enable_cuda(Space(pool=Space(driver=Space(facts=Space(count=1)))))
    print(os.environ["TF_GPU_ALLOCATOR"], os.environ["TF_DEVICE_MIN_SYS_MEMORY_IN_MB"])
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflows_library_looks_functions_up() -> None:
    """The library of TensorFlow that calls the driver can be redirected; a build that knows no GPU is told so.

    On a GPU TensorFlow keeps back what the user says, else nothing: contexts are outside the budget.
    """
    command = [sys.executable, "-c", WITH_TENSORFLOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said, *settings = done.stdout.splitlines() or [done.stderr]
    assert said.startswith(("True", "False this build of TensorFlow"))
    assert settings == ["cuda_malloc_async 0", "cuda_malloc_async 7"], done.stderr


@pytest.fixture(scope="module")
def plugin() -> Iterator[dict[str, Any]]:
    """Give what JAX's plugin did as a job of a pool on a driver of software."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zx-") as name:
        folders = (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
        environ = {**software_cuda.build(Path(name)), "PYTHONPATH": os.pathsep.join(folders).rstrip(os.pathsep)}
        made = Broker(Path(name), environ, "--budget-bytes", str(32 * MIB))
        with made.process, made.client:
            assert made.process.line() == "ready"
            job = Process(str(FRAMEWORK / "xla_jax_job.py"), **environ, ZICO_SOCKET=str(made.socket))
            with job:
                found = json.loads(job.line())
                code, errors = job.finish()
            yield {**found, "exit": code, "errors": errors}


JAX_JOB_S = functools.partial(pytest.mark.timeout, 2 * PATIENCE_S)


@compiles
@has_plugin
@JAX_JOB_S()
def test_the_plugins_arrays_are_the_pools(plugin: dict[str, Any]) -> None:
    """JAX's own plugin takes an array's memory from the pool, keeps its bytes, gives it back, and ends cleanly."""
    assert plugin["in_pool"] == [True, True]
    assert plugin["is_equal"]
    assert plugin["live_bytes"] == [0, 4 * MIB, 8 * MIB, 0]
    assert plugin["driver_allocations"] == 0
    assert plugin["exit"] == 0, plugin["errors"]


@compiles
@has_plugin
@JAX_JOB_S()
def test_the_plugin_sees_the_budget_and_refuses_what_exceeds_it(plugin: dict[str, Any]) -> None:
    """More than the budget is JAX's own error, whose figures are the budget's, and the job goes on after it."""
    assert f"Free memory/Total memory: {32 * MIB}/{32 * MIB}" in plugin["errors"]
    assert "RESOURCE_EXHAUSTED" in plugin["error"]
    assert plugin["after_error"]


@compiles
@has_plugin
@JAX_JOB_S()
def test_the_plugins_job_is_in_the_pool(plugin: dict[str, Any]) -> None:
    """The job joined as JAX on the GPU, its steps are iterations, and its settings are those that lead to the pool."""
    assert plugin["frameworks"] == ["jax"]
    assert plugin["iterations"] == 2
    assert plugin["settings"] == ["cuda_async", "false"]
