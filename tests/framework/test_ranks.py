"""Every process of a job: the one that trains joins, whoever started it, and ranks of one job are a group."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.harness import FRAMEWORK, MIB, PATIENCE_S, clean_environment
from support.scripts import zico_run

SCRIPT = FRAMEWORK / "ranks_job.py"
PEAK_MIB = 23
"""Of one rank, about."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@functools.cache
def alone() -> list[dict[str, Any]]:
    """Return what two ranks write that train where there is no broker, once."""
    with tempfile.TemporaryDirectory() as directory:
        argv = [sys.executable, str(SCRIPT), f"{directory}/alone", "fork"]
        subprocess.run(argv, env=clean_environment(), timeout=PATIENCE_S, check=True)
        return [said(Path(directory) / "alone", rank) for rank in range(2)]


def losses_alone() -> list[list[str]]:
    """Return what two ranks say without Zico."""
    return [figure["losses"] for figure in alone()]


def said(losses: Path, rank: int) -> dict[str, Any]:
    """Return what a rank has written."""
    read: dict[str, Any] = json.loads(Path(f"{losses}.{rank}").read_text())
    return read


def run(directory: Path, budget_mib: int, **commands: tuple[str, ...]) -> dict[str, Any]:
    """Run Python commands as jobs with these names; returns the report."""
    return zico_run(directory, "--budget", f"{budget_mib}MiB", commands=commands, PYTHONPATH=str(FRAMEWORK))[0]


def processes_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a command's processes did, of those that are jobs."""
    return [job, *job["other_processes"]]


def pids_of(job: dict[str, Any]) -> set[int]:
    """Return the numbers of a command's processes that are jobs."""
    return {one["pid"] for one in processes_of(job)}


def test_two_jobs_of_two_ranks_share_what_is_too_little_for_both(tmp_path: Path) -> None:
    """Invariant 6: in 70 % of the sum of the peaks all four ranks have the losses that they have alone.

    No rank stands in a collective for another that gets no memory. Those of one job are forked, as by
    accelerate's launchers: they are jobs, their parent is none, and what they fork sees tensors.
    """
    names = ("spawn", "fork")
    budget_mib = round(0.7 * 4 * PEAK_MIB)
    report = run(tmp_path, budget_mib, **{how: (str(SCRIPT), str(tmp_path / how), how) for how in names})
    figures = {name: [said(tmp_path / name, rank) for rank in range(2)] for name in names}
    for name, job in zip(names, report["jobs"], strict=True):
        assert [figure["losses"] for figure in figures[name]] == losses_alone()
        assert all(figure["forked"] for figure in figures[name])
        assert pids_of(job) == {figure["pid"] for figure in figures[name]}
        assert {one["iterations"] for one in processes_of(job)} == {len(losses_alone()[0])}
        assert job["outside"] == []
    groups = [{figure["group"] for figure in figures[name]} for name in names]
    assert [len(group) for group in groups] == [1, 1]
    assert not {0, None} & (groups[0] | groups[1])
    assert groups[0] != groups[1]
    pool = report["pool"]
    assert pool["stalls"] == 0
    assert pool["peak_granted_bytes"] <= budget_mib * MIB < 0.75 * pool["sum_of_job_peaks_bytes"]


Ended = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]
"""Of jobs by their names: what the report has of each, and what its ranks have written."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run jobs of all other kinds, once and together."""
    directory = tmp_path_factory.mktemp("ranks")
    commands = {
        "held": (str(SCRIPT),),
        "launched": (*TORCHRUN, str(SCRIPT)),
        "workers": ("-m", SCRIPT.stem),
        "parent": (str(SCRIPT),),
    }
    told = {name: (*command, str(directory / name), name) for name, command in commands.items()}
    jobs = run(directory, 6 * PEAK_MIB, **told)["jobs"]
    ranks = [range(len(list(directory.glob(f"{name}.[0-9]")))) for name in commands]
    return {
        name: (job, [said(directory / name, rank) for rank in of])
        for name, job, of in zip(commands, jobs, ranks, strict=True)
    }


def test_ranks_that_are_forked_from_a_process_with_tensors_say_why_they_are_outside(ended: Ended) -> None:
    """Their parent's tensors are theirs, too, where the pool's window would be; the parent stays the job."""
    job, figures = ended["held"]
    assert [figure["losses"] for figure in figures] == losses_alone()
    assert {figure["group"] for figure in figures} == {None}
    assert {one["pid"] for one in job["outside"]} == {figure["pid"] for figure in figures}
    reason = f"this process was forked from process {job['pid']}, which has had tensors in the pool"
    assert all(one["reason"].startswith(reason) for one in job["outside"])


def test_ranks_that_torchrun_starts_are_jobs_and_torchrun_is_none(ended: Ended) -> None:
    """The launcher imports PyTorch before them, in the same command."""
    job, figures = ended["launched"]
    assert [figure["losses"] for figure in figures] == losses_alone()
    assert pids_of(job) == {figure["pid"] for figure in figures}
    assert len({figure["group"] for figure in figures} - {0, None}) == 1


def test_a_module_that_trains_is_a_job_and_its_loaders_worker_is_none(ended: Ended) -> None:
    """``python -m``; a worker that imports PyTorch anew and makes large tensors stays outside."""
    job, (figure,) = ended["workers"]
    assert pids_of(job) == {figure["pid"]}
    assert figure["group"] == 0
    assert figure["pooled"] > 0


def test_a_process_that_trains_below_a_job_is_a_job_too(ended: Ended) -> None:
    """It joins when it makes an optimizer, since until then it may be a worker; its own worker stays outside."""
    job, (figure,) = ended["parent"]
    assert len(pids_of(job)) == 2
    trained = [one["pid"] for one in processes_of(job) if one["iterations"]]
    assert trained == [figure["pid"]]
    assert figure["pooled"] > 0


def test_without_a_pool_nothing_is_changed() -> None:
    """No rank finds a place where there is no broker."""
    assert {figure["group"] for figure in alone()} == {None}
