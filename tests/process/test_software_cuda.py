"""The driver of software, in C: what a GPU's driver is tested for holds of it, by the real ``cuda.bindings``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from process.support import software_cuda, xla_building
from process.support.cuda_twin import PATIENCE_S, ROOT, compile_once

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not xla_building.HAS_COMPILER, reason=xla_building.WITHOUT_COMPILER)


def test_it_keeps_the_contract_of_drivers(tmp_path: Path) -> None:
    """All tests for a GPU pass on it: memory in pieces, marks and waits on streams, kernels, managed memory."""
    compile_once()
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "tests/gpu"]
    environ = os.environ | software_cuda.build(tmp_path)
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
