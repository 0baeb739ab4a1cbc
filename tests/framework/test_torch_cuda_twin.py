"""PyTorch's CUDA adapter in jobs of a pool on the driver's twin, over a fake of PyTorch's allocator."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from process.support.cuda_twin import Process, compile_once, environment
from process.support.cuda_twin_broker import Broker
from support.harness import FRAMEWORK
from zico.adapters import torch_cuda

from zico.base.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB, MIB = 1 << 10, 1 << 20
BUDGET_BYTES = 32 * MIB
BUILD_S = 60
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++) is installed")


def build(library: Path, *options: str) -> None:
    """Compile the fake into a shared library."""
    source = str(FRAMEWORK / "fake_torch_cuda.cpp")
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-O1", "-o", str(library), source, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder that looks like PyTorch's: the fake beside PyTorch's own libraries."""
    made = tmp_path_factory.mktemp("torch")
    (made / "lib").mkdir()
    build(made / "lib" / "libc10_cuda.so", "-DCORE")
    build(made / "lib" / "libtorch_cuda.so", str(made / "lib" / "libc10_cuda.so"))
    for name in ("libc10.so", "libtorch_python.so"):
        (made / "lib" / name).symlink_to(Path(torch.__file__).parent / "lib" / name)
    return made


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Give a broker on the first of two GPUs."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zt-") as directory:
        settings: dict[str, Any] = {"devices": 2, "attributes": {"COMPUTE_CAPABILITY_MAJOR": 6}}
        environ = environment(Path(directory) / "site", total_bytes=256 * MIB, **settings)
        made = Broker(Path(directory), environ, "--budget-bytes", str(BUDGET_BYTES))
        with made.process, made.client:
            assert made.process.line() == "ready"
            yield made


@pytest.fixture(scope="module")
def seen(broker: Broker, folder: Path) -> dict[str, Any]:
    """Give what a job saw that asked for workspaces, and for memory of both GPUs."""
    with Process(str(FRAMEWORK / "torch_cuda_job.py"), str(folder), "look", **in_pool(broker)) as job:
        found: dict[str, Any] = json.loads(job.line())
        code, errors = job.finish()
    return {**found, "exit": code, "errors": errors}


def in_pool(broker: Broker) -> dict[str, str]:
    """Return variables for a job of the broker's pool."""
    return {**broker.environ, "ZICO_SOCKET": str(broker.socket)}


def test_cudnn_may_try_workspaces_as_large_as_what_is_free(seen: dict[str, Any]) -> None:
    """PyTorch's question for the largest workspace is answered with the budget's free bytes."""
    assert seen["largest"] == [BUDGET_BYTES, BUDGET_BYTES - 4 * MIB]
    assert seen["name"] == "pluggable"
    assert (seen["exit"], seen["errors"]) == (0, "")


def test_pytorch_is_told_of_the_jobs_memory(seen: dict[str, Any]) -> None:
    """A snapshot shows the one tensor on its stream; free is what the job may still take, total the budget."""
    assert seen["snapshot"] == [4 * MIB, 4 * MIB, 0x10, 1]
    assert seen["info"] == [BUDGET_BYTES - 4 * MIB, BUDGET_BYTES]


def test_a_tensor_of_another_gpu_is_refused_with_what_to_do(seen: dict[str, Any]) -> None:
    """A request on a GPU that is not the pool's raises one sentence and takes nothing."""
    assert seen["in_pool"]
    address, raised = seen["other_device"]
    assert (address, seen["kept_bytes"]) == (0, 0)
    assert raised.startswith("N3c105ErrorE: zico: ")
    assert "this tensor is for another GPU than the pool's, cuda:0" in raised
    assert re.search("CUDA_VISIBLE_DEVICES=GPU-[0-9a-f-]{36} ", raised)


def test_a_tensor_beyond_the_budget_is_out_of_memory(seen: dict[str, Any]) -> None:
    """A request that can never be served raises PyTorch's own class, by its type and by its virtual functions."""
    address, raised = seen["beyond_budget"]
    assert (address, raised.split(": ")[:2]) == (0, ["N3c1016OutOfMemoryErrorE", "CUDA out of memory. zico"])
    assert re.search(" 1024 MiB more .* may hold +32 MiB: raise --budget", raised)


def test_frees_may_come_when_the_interpreter_is_gone(broker: Broker, folder: Path) -> None:
    """A static destructor frees tensors of the pool after Python has ended, and the job exits with 0.

    Nothing that such a free needs goes with the interpreter.
    """
    with Process(str(FRAMEWORK / "torch_cuda_job.py"), str(folder), "leave", **in_pool(broker)) as job:
        assert json.loads(job.line()) == {"live_bytes": 5 * 64 * KIB}
        output, errors = job.process.communicate(timeout=BUILD_S)
    assert (output, job.process.returncode, errors) == (f"at the end {64 * KIB}\n", 0, "")


def test_a_build_that_is_laid_out_otherwise_is_told(folder: Path, tmp_path: Path) -> None:
    """Without the libraries, or with another allocator in use, the sentence says what to leave off."""
    reasons = {tmp_path: "libc10_cuda.so: cannot open", folder: "its current allocator is no CUDAPluggable"}
    for place, reason in reasons.items():
        strange = SimpleNamespace(__file__=str(place / "__init__.py"), __version__="9.9")
        with pytest.raises(HookError, match=rf"PyTorch 9\.9: .*{reason}.*; leave .*benchmark at False"):
            torch_cuda.install(strange)
