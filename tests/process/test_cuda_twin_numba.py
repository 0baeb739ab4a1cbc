"""A Numba program under ``zico run`` as it is: on a GPU, here the driver's software twin, and on the host."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from cpu.support.zico_process import ZicoRun, python
from process.support.cuda_twin import PATIENCE_S, compile_once, environment

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
WITHOUT_KERNELS = {"COMPUTE_CAPABILITY_MAJOR": 6}
"""The twin runs no PTX: marks and waits are stream operations, as on a device too old for Zico's kernels."""

PROGRAM = """
from types import SimpleNamespace
from numba.cuda.cudadrv import driver
import zico
context = driver.Context(SimpleNamespace(id=0), None)  # Numba's own would ask a real driver first
arrays = [context.memalloc(2 << 20) for _ in range(3)]
before = zico.status()
del arrays
print(before["device"], before["frameworks"], before["tensor_bytes"] >> 20, zico.status()["tensor_bytes"])
"""
BY_HAND = """
import numba.cuda
import zico.adapters.numba
try:
    zico.adapters.numba.enable()
except zico.base.errors.HookError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_once()
    subprocess.run([sys.executable, "-c", "import zico.heap.cuda.python_hooks"], timeout=PATIENCE_S, check=True)


def test_numbas_arrays_are_in_the_gpus_pool(tmp_path: Path) -> None:
    """Importing ``numba.cuda`` is enough: arrays count as the job's tensors, and go with their last reference."""
    twin = environment(tmp_path / "site", total_bytes=256 * MIB, attributes=WITHOUT_KERNELS)
    options = ("--device", "cuda:0", "--region", "2MiB", "--name", "a", "--json", "-")
    with ZicoRun(*options, python(PROGRAM), **twin) as run:
        assert run.finish() == 0, run.stderr
        report = json.loads(run.stdout)
    assert "a | cuda:0 ['numba'] 6 0" in run.stderr.splitlines()
    (job,) = report["jobs"]
    assert (job["framework"], job["peak_bytes"], job["pool_fraction"]) == ("numba", 6 * MIB, 1.0)


def test_on_the_host_it_is_left_alone_and_says_so_when_asked() -> None:
    """Importing ``numba.cuda`` joins nothing and says nothing where the pool is the host's; by hand one sentence."""
    with ZicoRun("--name", "a", python(BY_HAND)) as run:
        assert run.finish() == 0, run.stderr
    (said,) = (line for line in run.stdout.splitlines() if line.startswith("a | "))
    assert said.startswith("a | refused: the pool is on host, and what Zico has for numba here shares the memory of c")
    assert "numba" not in run.stderr
