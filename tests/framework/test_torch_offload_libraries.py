"""Jobs whose library shards or offloads optimizer state itself: FSDP2 and DeepSpeed beside ``--save``."""

from __future__ import annotations

import functools
import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.harness import FRAMEWORK, PATIENCE_S, clean_environment, compile_once

SCRIPT = FRAMEWORK / "offload_libraries_job.py"
FAKE = str(FRAMEWORK / "fake_deepspeed")
SENTENCE = "DeepSpeed (offload_optimizer: {}) offloads the optimizer's state, so Zico leaves that state alone"
BUDGET_MIB = 50
"""Of one process, which takes about 70 MiB without a limit, 12 of them optimizer state."""
RANKS_MIB = 100
"""Of ranks whose peaks of some 60 MiB do not fit together: one waits for memory, others for it in a collective."""
DEEPSPEED_RANKS_MIB = 120
"""Of two ranks of DeepSpeed, whose peaks of 79 MiB do not fit together then."""
real = pytest.param(
    "",
    id="deepspeed",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: make test-deepspeed",
    ),
)


def environment(directory: Path, path: str) -> dict[str, str]:
    """Return what every process sees: folders of its own, and where else packages are."""
    return clean_environment() | {"PYTHONPATH": path, "XDG_RUNTIME_DIR": str(directory)}


@functools.cache
def losses_alone(path: str, *arguments: str) -> list[list[str]]:
    """Return what each rank says without Zico."""
    with tempfile.TemporaryDirectory() as directory:
        argv = [sys.executable, str(SCRIPT), f"{directory}/alone", *arguments]
        environ = environment(Path(directory), path) | {"RANKS": "fork"}
        subprocess.run(argv, env=environ, timeout=PATIENCE_S, check=True)
        return [told["losses"] for told in results(Path(directory) / "alone")]


def results(result: Path) -> list[dict[str, Any]]:
    """Return what each rank has written."""
    files = sorted(file for file in result.parent.glob(f"{result.name}.*") if file.suffix != ".store")
    return [json.loads(file.read_text()) for file in files]


def run(directory: Path, save: str, budget_mib: int, path: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Run the script as a job; returns what each rank has written, and what was said on stderr."""
    compile_once()
    command = shlex.join([sys.executable, str(SCRIPT), f"{directory}/job", *arguments])
    options = ["--quiet", "--budget", f"{budget_mib}MiB", "--region", "1MiB", "--save", save]
    done = subprocess.run(
        [sys.executable, "-m", "zico", "run", *options, command],
        env=environment(directory, path),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return results(directory / "job"), done.stderr


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("save", ["swap", "auto"])
def test_fsdp_with_cpu_offload_trains_beside_zico(tmp_path: Path, save: str) -> None:
    """Invariant 6: losses are the same; FSDP2 keeps the optimizer's state in PyTorch's, so it leaves where it must."""
    (told,), _ = run(tmp_path, save, BUDGET_MIB, "", "fsdp", "1")
    assert [told["losses"]] == losses_alone("", "fsdp", "1")
    assert told["iterations"] == len(told["losses"])
    assert told["left"] > 0


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(("world", "save"), [(2, "none"), (3, "swap")])
def test_ranks_that_do_not_fit_together_train_beside_zico(tmp_path: Path, world: int, save: str) -> None:
    """Invariants 6 and 7: none stays in a collective for another that gets no memory, and losses are the same."""
    ranks, said = run(tmp_path, save, RANKS_MIB, "", "fsdp", str(world))
    assert [rank["losses"] for rank in ranks] == losses_alone("", "fsdp", str(world))
    assert all(rank["iterations"] == len(rank["losses"]) for rank in ranks)
    assert "times no job could continue" in said


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("path", [pytest.param(FAKE, id="fake"), real])
def test_state_that_deepspeed_keeps_in_place_is_zicos(tmp_path: Path, path: str) -> None:
    """Invariant 6: the state of both groups leaves between steps, and a step of both ends one iteration."""
    (told,), said = run(tmp_path, "swap", BUDGET_MIB, path, "deepspeed", "2", "none")
    assert [told["losses"]] == losses_alone(path, "deepspeed", "2", "none")
    assert told["iterations"] == len(told["losses"])
    assert told["left"] > 0
    assert "DeepSpeed (" not in said


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize(
    ("path", "device"), [(FAKE, "nvme"), (FAKE, "cpu"), pytest.param(*real.values, "cpu", marks=real.marks)]
)
def test_state_that_deepspeed_offloads_is_left_to_it(tmp_path: Path, path: str, device: str) -> None:
    """Invariant 6: Zico moves none of it, and says so once, wherever DeepSpeed keeps it."""
    (told,), said = run(tmp_path, "swap", BUDGET_MIB, path, "deepspeed", "2", device)
    assert [told["losses"]] == losses_alone(path, "deepspeed", "2", device)
    assert told["iterations"] == len(told["losses"])
    assert told["left"] == 0
    assert said.count(SENTENCE.format(device)) == 1


@pytest.mark.timeout(3 * PATIENCE_S)
@pytest.mark.parametrize("path", [real])
def test_ranks_of_deepspeed_train_beside_zico(tmp_path: Path, path: str) -> None:
    """Invariants 6 and 7: two ranks that do not fit together have the losses of those alone, and their state leaves."""
    ranks, _ = run(tmp_path, "swap", DEEPSPEED_RANKS_MIB, path, "deepspeed", "2", "none", "2")
    assert [rank["losses"] for rank in ranks] == losses_alone(path, "deepspeed", "2", "none", "2")
    assert all(rank["iterations"] == len(rank["losses"]) for rank in ranks)
    assert all(rank["left"] > 0 for rank in ranks)
