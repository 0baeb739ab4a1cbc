"""Two jobs of two frameworks, in three quarters of their peaks, have the losses that each has alone (invariant 6)."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
from support.harness import EXAMPLES, FRAMEWORK, MIB, PATIENCE_S, compile_once
from support.scripts import alone, zico_run

if TYPE_CHECKING:
    from pathlib import Path

ITERATIONS = 31  # at least 30 are asked for
BUDGET_BYTES = 150 * MIB
COMMANDS = {
    "digits_resnet": (EXAMPLES / "digits_resnet.py", "--quiet", "--depth", "38", "--batch", "256"),
    "stdlib_lm": (EXAMPLES / "stdlib_lm.py", "--quiet", "--batch", "8", "--layers", "2"),
    "jax_training": (FRAMEWORK / "jax_training.py",),
}


def beside(name: str, framework: str) -> Any:  # noqa: ANN401 - what parametrize takes
    """Return the pair of PyTorch's example and another job, which is skipped where its framework is not installed."""
    is_missing = importlib.util.find_spec(framework) is None
    mark = pytest.mark.skipif(is_missing, reason=f"{framework} is not installed")
    return pytest.param(("digits_resnet", name), marks=mark, id=framework)


def arguments(name: str, losses: Path) -> list[str]:
    """Return the command line of a job, after the interpreter."""
    return [*map(str, COMMANDS[name]), "--iterations", str(ITERATIONS), "--losses", str(losses)]


def losses(path: Path) -> list[str]:
    """Return the losses that a job has written, as bits in hexadecimal."""
    read: list[str] = json.loads(path.read_text())
    assert len(read) == ITERATIONS
    return read


@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("pair", [beside("stdlib_lm", "tensorflow"), beside("jax_training", "jax")])
def test_two_jobs_together_have_the_losses_of_each_alone(pair: tuple[str, str], tmp_path: Path) -> None:
    """Invariant 6: to the last bit, while they really share: the budget is below the sum of their peaks, above each."""
    compile_once()
    with (
        alone(*arguments(pair[0], tmp_path / f"{pair[0]}.alone")) as first,
        alone(*arguments(pair[1], tmp_path / f"{pair[1]}.alone")) as second,
    ):
        assert [process.finish().returncode for process in (first, second)] == [0, 0]
    commands = {name: arguments(name, tmp_path / f"{name}.together") for name in pair}
    report, _ = zico_run(tmp_path, "--budget", f"{BUDGET_BYTES // MIB}MiB", commands=commands)
    for name in pair:
        assert losses(tmp_path / f"{name}.together") == losses(tmp_path / f"{name}.alone"), name
    pool, jobs = report["pool"], report["jobs"]
    assert max(job["peak_bytes"] for job in jobs) < pool["peak_granted_bytes"] <= BUDGET_BYTES
    assert pool["sum_of_job_peaks_bytes"] > 1.2 * BUDGET_BYTES
    assert pool["peak_physical_bytes"] <= BUDGET_BYTES
    assert sum(job["waited_s"] for job in jobs) > 0
    assert all(job["iterations"] == ITERATIONS and job["pool_fraction"] >= 0.95 for job in jobs)
