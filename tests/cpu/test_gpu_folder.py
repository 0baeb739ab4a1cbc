"""The folder of tests for a GPU runs under plain pytest, and a driver that hangs does not hang it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
HANGS = """
import ctypes
import pytest

@pytest.fixture(scope="session", autouse=True)
def gpu():
    pass

def test_hangs():
    ctypes.PyDLL(None).pause()  # as a driver's call may: in C, without signals, and with the lock of Python held
"""


def run(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with none of the plugins that are installed here."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_plain_pytest_collects_the_folder() -> None:
    """All options of setup.cfg are known without pytest-timeout, xdist, randomly, benchmark and hypothesis."""
    done = run("tests/gpu", "--collect-only", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_two_processes_share_memory" in done.stdout


def test_the_folder_passes_on_the_twin() -> None:
    """The tests themselves work: all of them pass where the driver's software twin stands in for a GPU."""
    done = run("tests/gpu", "--twin", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_without_a_gpu_the_folder_fails() -> None:
    """Nothing is skipped: a run without a GPU is no pass."""
    done = run("tests/gpu/test_kernels.py", "--quiet")
    assert done.returncode == 1
    assert "the tests in tests/gpu need a GPU" in done.stdout


def test_a_driver_that_hangs_ends_the_run(tmp_path: Path) -> None:
    """A call that never returns and holds Python's lock ends the run, which says where it was."""
    own = (ROOT / "tests/gpu/conftest.py").read_text()
    assert "RESCUE_S = 240.0\n" in own
    (tmp_path / "conftest.py").write_text(own.replace("RESCUE_S = 240.0\n", "RESCUE_S = 0.5\n"))
    (tmp_path / "test_it.py").write_text(HANGS)
    done = run("test_it.py", cwd=tmp_path, PYTHONPATH=str(ROOT / "tests"))
    assert done.returncode == 1
    assert "Timeout (0:00:00.5" in done.stderr
    assert "in test_hangs" in done.stderr


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_what_needs_a_gpu_runs_offline(target: str) -> None:
    """With ``OFFLINE=1`` the target makes no virtual environment and calls no installer."""
    command = ["make", "--dry-run", target, "OFFLINE=1", "PYTHON=python3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert "python3 -m pytest tests/gpu" in done.stdout or "python3 benchmarks/gpu/pairs.py" in done.stdout
    assert "-m venv" not in done.stdout
    assert ".ci/install.py" not in done.stdout
    assert "-m pip" not in done.stdout
