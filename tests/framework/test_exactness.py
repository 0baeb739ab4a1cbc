"""Both examples, side by side in three quarters of their peaks, have the losses that each has alone (invariant 6)."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from harness import EXAMPLES, MIB, PATIENCE_S, clean_environment, compile_once
from scripts import alone

if TYPE_CHECKING:
    from pathlib import Path

ITERATIONS = 31  # at least 30 are asked for
BUDGET_BYTES = 150 * MIB
OPTIONS = {
    "digits_resnet": ("--depth", "38", "--batch", "256"),
    "stdlib_lm": ("--batch", "8", "--layers", "2"),
}


def arguments(name: str, losses: Path) -> list[str]:
    """Return the command line of an example, after the interpreter."""
    script = EXAMPLES / f"{name}.py"
    return [str(script), "--iterations", str(ITERATIONS), "--quiet", "--losses", str(losses), *OPTIONS[name]]


def run_together(directory: Path) -> dict[str, Any]:
    """Run both with ``zico run`` and return its report."""
    commands = [shlex.join([sys.executable, *arguments(name, directory / f"{name}.together")]) for name in OPTIONS]
    report = directory / "report.json"
    names = [word for name in OPTIONS for word in ("--name", name)]
    options = ["--quiet", "--budget", f"{BUDGET_BYTES // MIB}MiB", "--region", "1MiB", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "zico", "run", *options, *names, *commands],
        env=clean_environment() | {"XDG_RUNTIME_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(report.read_text())
    return read


def losses(path: Path) -> list[str]:
    """Return the losses that an example has written, as bits in hexadecimal."""
    read: list[str] = json.loads(path.read_text())
    assert len(read) == ITERATIONS
    return read


@pytest.mark.timeout(4 * PATIENCE_S)
def test_both_examples_together_have_the_losses_of_each_alone(tmp_path: Path) -> None:
    """Invariant 6: to the last bit, while they really share: the budget is below the sum of their peaks, above each."""
    compile_once()
    with (
        alone(*arguments("digits_resnet", tmp_path / "digits_resnet.alone")) as first,
        alone(*arguments("stdlib_lm", tmp_path / "stdlib_lm.alone")) as second,
    ):
        assert [process.finish().returncode for process in (first, second)] == [0, 0]
    report = run_together(tmp_path)
    for name in OPTIONS:
        assert losses(tmp_path / f"{name}.together") == losses(tmp_path / f"{name}.alone"), name
    pool, jobs = report["pool"], report["jobs"]
    assert max(job["peak_bytes"] for job in jobs) < pool["peak_granted_bytes"] <= BUDGET_BYTES
    assert pool["sum_of_job_peaks_bytes"] > 1.2 * BUDGET_BYTES
    assert pool["peak_physical_bytes"] <= BUDGET_BYTES
    assert sum(job["waited_s"] for job in jobs) > 0
    assert all(job["iterations"] == ITERATIONS and job["pool_fraction"] >= 0.95 for job in jobs)
