"""``zico fit --measure`` with real brokers and jobs: they run alone, then together, and are ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from cpu.support.zico_process import ZicoRun, descendants, python, survivors
from process.support import fake_mps
from process.support.cuda_twin import compile_once, environment
from support.harness import PROCESS

from zico.base.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

JOB = str(PROCESS / "hindering_job.py")
BRIEF = ("--measure", "--seconds", "0.5")


def hindering(tmp_path: Path, kind: str = "host", *arguments: str) -> str:
    """Return the command of a job that is slower beside another one."""
    return shlex.join([sys.executable, JOB, str(tmp_path), kind, *arguments])


def measuring(*arguments: str, **environ: str) -> ZicoRun:
    """Start a measurement."""
    return ZicoRun(*BRIEF, *arguments, command="fit", **environ)


def test_jobs_that_hinder_each_other_are_told_to_run_one_after_the_other(tmp_path: Path) -> None:
    """On a GPU, with and without MPS, together they do two fifths; one iteration at a time is tried, and is slower.

    Code 1 says that sharing does not pay. The MPS daemon is private, and ends with its jobs.
    """
    compile_once()
    notes = fake_mps.install(tmp_path / "bin")
    twin = environment(tmp_path / "site", total_bytes=4 * GIB, attributes={"COMPUTE_CAPABILITY_MAJOR": 6})
    twin["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = hindering(tmp_path, "cuda")
    with measuring("--json", "--device", "cuda:0", "--mps", command, command, **twin) as run:
        assert run.finish() == 1, run.stderr
        assert run.leftovers == []
        found = json.loads(run.stdout)
    assert survivors([int(notes.read_text().split()[1])], timeout_s=0) == []
    assert notes.read_text().count("daemon ") == 1
    assert (found["schema_version"], found["device"]) == ("zico.fit.measured.v1", "cuda:0")
    assert found["jobs"] == ["hindering_job", "hindering_job-2"]
    assert found["alone_per_s"][0] == found["alone_per_s"][1], "equal commands are measured alone once"
    slices, mps, serial = found["ways"]
    assert [way["options"] for way in found["ways"]] == ["", "--mps", "--policy serial"]
    assert serial["gain"] < min(slices["gain"], mps["gain"]) <= max(slices["gain"], mps["gain"]) < 1
    assert min(serial["waited"]) > 0.3
    assert not found["pays"]
    assert found["advice"].startswith("run them one after the other: one job keeps the device busy")
    assert "hindering_job, hindering_job-2 together, one iteration at a time" in run.stderr


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit('no data')", "ended with exit code 1 after 0 iterations: no data"),
        ("print('done')", "ended, and Zico saw no iteration end: zico doctor -- COMMAND says why"),
    ],
)
def test_a_job_that_cannot_be_measured_says_why(code: str, says: str) -> None:
    """Its own last line, or what to do, in one sentence and code 2: 1 would say that sharing does not pay."""
    with measuring(python(code), python("import time; time.sleep(60)")) as run:
        assert run.finish() == 2
        assert run.leftovers == []
    assert says in run.stderr.splitlines()[-1]


def test_too_few_iterations_are_said_with_their_number(tmp_path: Path) -> None:
    """A job that ends before it was seen for long enough is told to train for longer."""
    with measuring(hindering(tmp_path, "host", "3"), hindering(tmp_path)) as run:
        assert run.finish() == 2
    assert "hindering_job ended after 3 iterations, and 14 are needed" in run.stderr


def test_a_measurement_that_is_interrupted_ends_its_jobs(tmp_path: Path) -> None:
    """Ctrl-C ends job and broker, says so, and leaves the code of Ctrl-C."""
    with measuring("--seconds", "600", hindering(tmp_path), hindering(tmp_path)) as run:
        run.read_until("all have warmed up")
        below = descendants(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 130
        assert survivors(below, timeout_s=0) == []
        assert run.leftovers == []
    assert "SIGINT: the jobs have been ended, and nothing was measured" in run.stderr
