"""Tests of frameworks' real builds for CUDA, which `make` installs; what is not installed is not collected.

`make test-cuda-wheel` has PyTorch's, and `make test-cuda-tf` TensorFlow's beside it. At the end of
a run stands what was called and what came of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from process.support import software_cuda
from process.support.cuda_twin import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WAYS = ("plain", "pool")
CUDA_ALONE = {
    "torch": "lib/libtorch_cuda.so",
    "tensorflow": "include/third_party/gpus/cuda/include/cuda_runtime_api.h",
}
"""A file that only a framework's build for CUDA has."""
NEEDED = {"test_torch_wheel.py": ("torch",), "test_tensorflow_wheel.py": ("torch", "tensorflow")}
seen = pytest.StashKey[dict[str, dict[str, Any]]]()


def has_wheel(framework: str) -> bool:
    """Tell whether a framework is a build for CUDA."""
    spec = importlib.util.find_spec(framework)
    return spec is not None and (Path(str(spec.origin)).parent / CUDA_ALONE[framework]).exists()


collect_ignore = [name for name, frameworks in NEEDED.items() if not all(map(has_wheel, frameworks))]


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """Give what a process needs to find the driver of software, which has two devices, and PyTorch's runtime."""
    with tempfile.TemporaryDirectory(prefix="zw-") as folder:
        made = software_cuda.build(Path(folder))
        folders = (str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", ""))
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # PyTorch 2.13 alone warns of a request that is too large
        yield {**made, **quiet, "SOFTWARE_DEVICES": "2", "PYTHONPATH": os.pathsep.join(folders).rstrip(os.pathsep)}


@pytest.fixture(scope="module")
def note(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Give what is printed when all tests have run: way to what its job saw."""
    found: dict[str, Any] = request.config.stash.setdefault(seen, {}).setdefault(request.module.FRAMEWORK, {})
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was called and what came of it."""
    for framework, found in config.stash.get(seen, {}).items():
        terminalreporter.section(f"{framework}'s build for CUDA over a driver of software: what was called")
        for line in lines(found):
            terminalreporter.write_line(line)


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return a table of the checks, and one of the driver's functions by the calls of both jobs."""
    names = dict.fromkeys(name for way in WAYS for name in found.get(way, {}) if name != "calls")
    rows = [(name, *(json.dumps(found.get(way, {}).get(name, "not asked")) for way in WAYS)) for name in names]
    text = [f"{name}\n  plain    {plain}\n  in pool  {pool}" for name, plain, pool in rows]
    calls = [found.get(way, {}).get("calls", {}) for way in WAYS]
    text.append(f"{'the driver by function':44}{'plain':>10}{'in pool':>10}")
    by_name = sorted(set().union(*calls))
    return text + [f"{name:44}" + "".join(f"{one.get(name, 0):>10}" for one in calls) for name in by_name]
