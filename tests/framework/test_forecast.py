"""``zico fit SCRIPT:function``: what it says of a batch is what a real job of that batch then holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.scripts import zico_run

from zico.cli import main

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """\
import sys
import torch
from torch import nn

def build(batch=64, width=512):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(batch, width)).square().mean().backward()
        optimizer.step()

    return step

def fixed():
    return build()

def fails(batch):
    if batch > 8:
        raise ValueError("no such batch")
    return build(batch)

if __name__ == "__main__":
    step = build(int(sys.argv[1]))
    for _ in range(10):
        step()
"""
BUDGET = 64 << 20


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a job whose batch is an argument."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def fit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the figures."""
    code = main(["fit", *arguments, "--region", "1MiB", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_largest_batch_is_held_and_the_next_is_not(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both batches are trained for real: each holds what was forecast, within two regions, and the same live bytes.

    The answer is within the budget, the next larger batch is above it.
    """
    code, found = fit(capsys, f"{script}:build", "--batch", "8..4096", "--budget", str(BUDGET))
    fits, too_large = found["fits"], found["too_large"]
    assert (code, found["answer"], found["schema_version"]) == (0, "fits", "zico.forecast.v1")
    assert too_large["batch"] == fits["batch"] + 1
    assert fits["needed_bytes"] <= BUDGET < too_large["needed_bytes"]
    assert found["seconds"] > 0
    assert [one["batch"] for one in found["tried"]] == sorted(one["batch"] for one in found["tried"])
    for one in (fits, too_large):
        commands = {"job": [script, one["batch"]]}
        directory = tmp_path / str(one["batch"])
        directory.mkdir()
        report, _ = zico_run(directory, "--budget", "1GiB", "--save", "none", commands=commands)
        (job,) = report["jobs"]
        assert job["peak_tensor_bytes"] == pytest.approx(one["live_bytes"], rel=1e-3)
        assert job["peak_bytes"] == pytest.approx(one["held_bytes"], abs=2 << 20)
        assert job["peak_bytes"] <= one["needed_bytes"]


def test_the_answer_is_said_with_the_next_batch_and_the_time(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line has the batch, what it holds, by how much the next one is too large, and how long it took."""
    assert main(["fit", f"{script}:build", "--batch", "8..4096", "--budget", "64MiB", "--region", "1MiB"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("fits: batch ")
    assert "of 64 MiB, and batch " in last
    assert " too much; known after " in last
    assert last.endswith(" s")


def test_not_even_the_least_batch_fits(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code 1, and what the least one would hold."""
    code, found = fit(capsys, f"{script}:build", "--batch", "8..16", "--budget", "8MiB")
    assert (code, found["answer"], found["fits"]) == (1, "does not fit", None)
    assert found["too_large"]["batch"] == 8
    assert len(found["tried"]) == 1


def test_the_whole_range_fits(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then there is no larger one to name."""
    code, found = fit(capsys, f"{script}:build", "--batch", "8..16", "--budget", "8GiB")
    assert (code, found["fits"]["batch"], found["too_large"]) == (0, 16, None)


def test_a_function_without_a_batch_fits_or_does_not(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is one job: what it holds is said either way."""
    for budget, expected in (("8GiB", 0), ("8MiB", 1)):
        code, found = fit(capsys, f"{script}:fixed", "--budget", budget)
        assert code == expected
        (one,) = found["tried"]
        assert one["batch"] is None
        assert one["held_bytes"] > 8 << 20


def test_a_gpu_has_its_own_regions_and_names_what_is_missing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a device model regions are those of zico run there, and the terms that no trace has are named."""
    options = ("--batch", "8..64", "--budget", "8GiB", "--device-model", "T4", "--json")
    assert main(["fit", f"{script}:build", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["region_bytes"]) == ("t4", 64 << 20)
    assert "workspaces" in found["note"]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("fixed", "'fixed' of {} cannot be called with batch=8: give it these parameters, and defaults for others ("),
        ("fails", "{}:21: ValueError: no such batch: at batch 16 the script fails: check that it trains for real"),
        ("missing", "{} has no function 'missing': define one that returns a training step"),
    ],
)
def test_a_bad_function_is_one_sentence(
    script: Path, function: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names what is wrong and the remedy, and the code is 2."""
    assert main(["fit", f"{script}:{function}", "--batch", "8..16", "--budget", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says.format(script) in error
