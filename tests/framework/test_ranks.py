"""Every process of a job: the one that trains joins, whoever started it, and ranks of one job are a group."""

from __future__ import annotations

import functools
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.harness import FRAMEWORK, MIB, PATIENCE_S, clean_environment, compile_once

SCRIPT = FRAMEWORK / "ranks_job.py"
PEAK_MIB = 23
"""Of one rank, about."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment() -> dict[str, str]:
    """Return what every process of these tests sees: one thread each, and the scripts."""
    return clean_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FRAMEWORK)}


@functools.cache
def alone(how: str) -> list[dict[str, Any]]:
    """Return what ranks write that train where there is no broker, once."""
    with tempfile.TemporaryDirectory() as directory:
        argv = [sys.executable, str(SCRIPT), f"{directory}/alone", how]
        subprocess.run(argv, env=environment(), timeout=PATIENCE_S, check=True)
        return [said(Path(directory) / "alone", rank) for rank in range(2 if how == "fork" else 1)]


def losses_alone() -> list[list[str]]:
    """Return what two ranks say without Zico."""
    return [figure["losses"] for figure in alone("fork")]


def said(losses: Path, rank: int) -> dict[str, Any]:
    """Return what a rank has written."""
    read: dict[str, Any] = json.loads(Path(f"{losses}.{rank}").read_text())
    return read


def run(directory: Path, budget_mib: int, **commands: tuple[str, ...]) -> dict[str, Any]:
    """Run Python commands as jobs with these names; returns the report."""
    compile_once()
    report = directory / "report.json"
    names = [word for name in commands for word in ("--name", name)]
    argv = ["run", "--quiet", "--budget", f"{budget_mib}MiB", "--region", "1MiB", "--json", str(report), *names]
    argv += [shlex.join([sys.executable, *command]) for command in commands.values()]
    done = subprocess.run(
        [sys.executable, "-m", "zico", *argv],
        env=environment() | {"XDG_RUNTIME_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(report.read_text())
    return read


def processes_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a command's processes did, of those that are jobs."""
    return [job, *job["other_processes"]]


def pids_of(job: dict[str, Any]) -> set[int]:
    """Return the numbers of a command's processes that are jobs."""
    return {one["pid"] for one in processes_of(job)}


def test_two_jobs_of_two_ranks_share_what_is_too_little_for_both(tmp_path: Path) -> None:
    """Invariant 6: in 70 % of the sum of the peaks all four ranks have the losses that they have alone.

    No rank stands in a collective for another that gets no memory.
    """
    names = ("a", "b")
    budget_mib = round(0.7 * 4 * PEAK_MIB)
    report = run(tmp_path, budget_mib, **{name: (str(SCRIPT), str(tmp_path / name), "spawn") for name in names})
    figures = {name: [said(tmp_path / name, rank) for rank in range(2)] for name in names}
    for name, job in zip(names, report["jobs"], strict=True):
        assert [figure["losses"] for figure in figures[name]] == losses_alone()
        assert pids_of(job) == {figure["pid"] for figure in figures[name]}
        assert {one["iterations"] for one in processes_of(job)} == {len(losses_alone()[0])}
    groups = [{figure["group"] for figure in figures[name]} for name in names]
    assert [len(group) for group in groups] == [1, 1]
    assert 0 not in groups[0] | groups[1]
    assert groups[0] != groups[1]
    pool = report["pool"]
    assert pool["stalls"] == 0
    assert pool["peak_granted_bytes"] <= budget_mib * MIB < 0.75 * pool["sum_of_job_peaks_bytes"]


def test_ranks_that_are_forked_are_jobs_and_their_parent_is_none(tmp_path: Path) -> None:
    """Forked as by accelerate's launchers, they have their losses in 70 % of their peaks, and forks see tensors."""
    budget_mib = round(0.7 * 2 * PEAK_MIB)
    report = run(tmp_path, budget_mib, a=(str(SCRIPT), str(tmp_path / "a"), "fork"))
    (job,) = report["jobs"]
    figures = [said(tmp_path / "a", rank) for rank in range(2)]
    assert [figure["losses"] for figure in figures] == losses_alone()
    assert all(figure["forked"] for figure in figures)
    assert pids_of(job) == {figure["pid"] for figure in figures}
    assert {one["iterations"] for one in processes_of(job)} == {len(losses_alone()[0])}
    assert len({figure["group"] for figure in figures} - {0, None}) == 1
    assert report["pool"]["peak_granted_bytes"] <= budget_mib * MIB
    assert job["outside"] == []


def test_ranks_that_are_forked_from_a_process_with_tensors_say_why_they_are_outside(tmp_path: Path) -> None:
    """Their parent's tensors are theirs, too, where the pool's window would be; the parent stays the job."""
    (job,) = run(tmp_path, 6 * PEAK_MIB, a=(str(SCRIPT), str(tmp_path / "a"), "held"))["jobs"]
    figures = [said(tmp_path / "a", rank) for rank in range(2)]
    assert [figure["losses"] for figure in figures] == losses_alone()
    assert {figure["group"] for figure in figures} == {None}
    assert {one["pid"] for one in job["outside"]} == {figure["pid"] for figure in figures}
    reason = f"this process was forked from process {job['pid']}, which has had tensors in the pool"
    assert all(one["reason"].startswith(reason) for one in job["outside"])


def test_ranks_that_torchrun_starts_are_jobs_and_torchrun_is_none(tmp_path: Path) -> None:
    """The launcher imports PyTorch before them, in the same command."""
    (job,) = run(tmp_path, 6 * PEAK_MIB, a=(*TORCHRUN, str(SCRIPT), str(tmp_path / "a"), "launched"))["jobs"]
    figures = [said(tmp_path / "a", rank) for rank in range(2)]
    assert [figure["losses"] for figure in figures] == losses_alone()
    assert pids_of(job) == {figure["pid"] for figure in figures}
    assert len({figure["group"] for figure in figures} - {0, None}) == 1


def test_a_module_that_trains_is_a_job_and_its_loaders_worker_is_none(tmp_path: Path) -> None:
    """``python -m``; a worker that imports PyTorch anew and makes large tensors stays outside."""
    (job,) = run(tmp_path, 6 * PEAK_MIB, a=("-m", SCRIPT.stem, str(tmp_path / "a"), "workers"))["jobs"]
    figure = said(tmp_path / "a", 0)
    assert pids_of(job) == {figure["pid"]}
    assert figure["group"] == 0
    assert figure["pooled"] > 0


def test_a_process_that_trains_below_a_job_is_a_job_too(tmp_path: Path) -> None:
    """It joins when it makes an optimizer, since until then it may be a worker; its own worker stays outside."""
    (job,) = run(tmp_path, 6 * PEAK_MIB, a=(str(SCRIPT), str(tmp_path / "a"), "parent"))["jobs"]
    figure = said(tmp_path / "a", 0)
    assert len(pids_of(job)) == 2
    trained = [one["pid"] for one in processes_of(job) if one["iterations"]]
    assert trained == [figure["pid"]]
    assert figure["pooled"] > 0


@pytest.mark.parametrize("how", ["fork", "workers"])
def test_without_a_pool_nothing_is_changed(how: str) -> None:
    """No rank and no worker finds a place where there is no broker."""
    assert {figure["group"] for figure in alone(how)} == {None}
