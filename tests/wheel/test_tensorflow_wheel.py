"""TensorFlow's real build for CUDA over a driver of software, and PyTorch's beside it in one pool on that driver.

As in ``test_torch_wheel.py`` everything between a framework and the driver is as on a GPU, but for
the runtime. NVIDIA's other libraries are empty for TensorFlow: it opens them and calls nothing of
them. Kernels do nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from framework.support import turns
from process.support import software_cuda
from process.support.cuda_twin import Process, compile_once
from process.support.cuda_twin_broker import Broker
from support.harness import FRAMEWORK as SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAMEWORK = "TensorFlow"
MIB = 1 << 20
TOTAL_BYTES = 1 << 30  # cuda_driver.c
BUDGET_BYTES, SMALL_BUDGET_BYTES = 256 * MIB, 128 * MIB
KEPT_BACK_BYTES = 225 * MIB
"""Of a device with less than 2 GiB free; gpu_device.cc of TensorFlow 2.21, ``MinSystemMemory``."""
JOB, TORCH_JOB = (str(SCRIPTS / name) for name in ("tensorflow_job.py", "wheel_job.py"))
USUAL = ("copies", "function", "out_of_memory", "limit")
WAYS = ("plain", "pool")
ALONE = {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}
"""What Zico sets in a pool, so that TensorFlow alone takes the same path."""
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
"""Errors alone are logged."""
BEFORE_LOGGING = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"


@pytest.fixture(scope="module")
def tensorflow(environ: dict[str, str]) -> dict[str, str]:
    """Give what a process of TensorFlow's needs: the same driver with one device, and a runtime for CUDA 12."""
    built = software_cuda.build_for_tensorflow(Path(environ["LD_LIBRARY_PATH"]))
    return {**environ, **QUIET, **built, "LD_PRELOAD": "", "SOFTWARE_DEVICES": "1"}


@contextlib.contextmanager
def started(environ: dict[str, str], budget_bytes: int) -> Iterator[Broker]:
    """Give a broker that is ready."""
    compile_once()
    with tempfile.TemporaryDirectory(prefix="zw-") as folder:
        made = Broker(Path(folder), environ, "--budget-bytes", str(budget_bytes))
        with made.process, made.client:
            assert made.process.line() == "ready"
            yield made


def run(way: str, tensorflow: dict[str, str], **more: str) -> dict[str, Any]:
    """Return what a job saw, with its exit code and what it wrote to stderr."""
    with Process(JOB, way, *USUAL, **tensorflow, **more) as job:
        found: dict[str, Any] = json.loads(job.line())
        code, errors = job.finish()
    return {**found, "exit": code, "errors": errors}


@pytest.fixture(scope="module", params=WAYS)
def usual(
    request: pytest.FixtureRequest, environ: dict[str, str], tensorflow: dict[str, str], note: dict[str, Any]
) -> dict[str, Any]:
    """Give what a job saw that does what programs do, alone or in a pool."""
    left_bytes = 0
    if request.param == "plain":
        found = run("plain", tensorflow, **ALONE)
    else:
        with started(environ, BUDGET_BYTES) as broker:
            found = run("pool", tensorflow, ZICO_SOCKET=str(broker.socket))
            left_bytes = broker.status(lambda status: not status.jobs, within_s=20).granted_bytes
    note[request.param] = {name: value for name, value in found.items() if name != "errors"}
    return {**found, "way": request.param, "left_bytes": left_bytes}


def test_bytes_are_kept_and_memory_comes_back(usual: dict[str, Any]) -> None:
    """Copies in, on the device and out keep every byte, and tensors leave nothing behind."""
    found = usual["copies"]
    assert found["devices"] == ["device:GPU:0"] * 2
    assert found["is_equal"] == [True, True]
    assert (found["live_bytes"], found["left_bytes"]) == (2 * MIB, 0)


def test_a_graph_of_operations_keeps_bytes(usual: dict[str, Any]) -> None:
    """What a ``tf.function`` copies on the device has the bytes of its input, and its memory comes back."""
    assert usual["function"] == {"is_equal": [True, True], "left_bytes": 0}


def test_what_tensorflow_allocates_is_the_pools(usual: dict[str, Any]) -> None:
    """Alone TensorFlow allocates by the driver's cuMemAllocFromPoolAsync; in a pool it is the pool that answers."""
    is_in_pool = usual["way"] == "pool"
    assert usual["copies"]["in_pool"] == [is_in_pool] * 2
    assert (usual["calls"].get("cuMemAllocFromPoolAsync", 0) == 0) is is_in_pool
    assert usual["frameworks"] == (["tensorflow"] if is_in_pool else None)


def test_more_than_there_is_raises_tensorflows_error(usual: dict[str, Any]) -> None:
    """The error is ``ResourceExhaustedError``, its log has the pool's figures, and the job goes on."""
    found = usual["out_of_memory"]
    name, text = found.pop("error")
    assert name == "ResourceExhaustedError"
    assert text.splitlines()[0].count("OOM when allocating tensor with shape[4,1073741824]") == 1
    assert found == {"goes_on": True, "left_bytes": 0}
    if usual["way"] == "pool":
        told = re.search(r"Free memory/Total memory: (\d+)/(\d+)", usual["errors"])
        assert told, usual["errors"]
        free_bytes, total_bytes = map(int, told.groups())
        assert total_bytes == BUDGET_BYTES
        assert BUDGET_BYTES - 4 * MIB <= free_bytes < BUDGET_BYTES


def test_tensorflow_takes_the_budget_for_its_limit(usual: dict[str, Any]) -> None:
    """In a pool TensorFlow keeps nothing of the budget back; alone it keeps back 225 MiB of a small device."""
    limit_bytes = usual["limit"]["limit_bytes"]
    if usual["way"] == "pool":
        assert BUDGET_BYTES - 4 * MIB <= limit_bytes <= BUDGET_BYTES
    else:
        assert limit_bytes == TOTAL_BYTES - KEPT_BACK_BYTES


def test_the_job_ends_cleanly(usual: dict[str, Any]) -> None:
    """The job ends with 0, logs only what was asked for, the driver has refused no call, and all comes back."""
    assert (usual["exit"], usual["bad_calls"]) == (0, 0)
    lines = usual["errors"].removeprefix(BEFORE_LOGGING).splitlines()
    assert {line.split("] ")[0].split(" ")[-1].split(":")[0] for line in lines if line.startswith("E0")} == {
        "gpu_cudamallocasync_allocator.cc"
    }
    assert "zico" not in usual["errors"]
    assert usual["left_bytes"] == 0


def test_pytorch_and_tensorflow_share_a_pool(
    environ: dict[str, str], tensorflow: dict[str, str], note: dict[str, Any]
) -> None:
    """A job of each fills five eighths of one budget forty times: they take turns, and each reads what it wrote."""
    with started(environ, SMALL_BUDGET_BYTES) as broker:
        joins = {"ZICO_SOCKET": str(broker.socket)}
        with (
            Process(TORCH_JOB, "pool", "take_turns", **environ, **joins) as torch,
            Process(JOB, "pool", "take_turns", **tensorflow, **joins) as other,
        ):
            jobs = (torch, other)
            assert [job.line() for job in jobs] == [turns.READY] * 2
            assert [job.ask("go") for job in jobs] == [turns.GOING] * 2
            found = [json.loads(job.line())["take_turns"] for job in jobs]
            ended = [job.finish() for job in jobs]
        left_bytes = broker.status(lambda status: not status.jobs, within_s=20).granted_bytes
    note.setdefault("pool", {})["take_turns beside PyTorch"] = found
    pieces = SMALL_BUDGET_BYTES * 5 // 8 // turns.PIECE_BYTES
    assert [(one["is_equal"], one["read"]) for one in found] == [(True, turns.TURNS * pieces)] * 2
    assert [one["iterations"] for one in found] == [turns.TURNS] * 2
    assert all(80 * MIB <= one["peak_bytes"] <= 96 * MIB for one in found)
    (begun_s, ended_s), (other_begun_s, other_ended_s) = (one["span_s"] for one in found)
    assert max(begun_s, other_begun_s) < min(ended_s, other_ended_s), "both at once"
    assert sum(one["waited_s"] for one in found) > 0
    assert [code for code, _ in ended] == [0, 0], ended
    assert left_bytes == 0
