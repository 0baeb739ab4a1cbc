"""How a job's memory is opened by what was wished for it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from zico.broker.saving import Wish
from zico.job.paged_job import check_swapping, managed_window
from zico.job.settings import JobSettings
from zico.pool.layout import SaveMode


@pytest.mark.parametrize(
    ("framework", "planner", "told"),
    [
        ("torch", "", ""),
        ("torch", "lms", ""),
        ("torch", "gist", "ZICO_JOB_SAVE: job cannot follow gist on a GPU, where nothing is encoded"),
        ("jax", "", "on a GPU torch alone swaps, jax does not: give page"),
    ],
)
def test_a_job_on_a_gpu_says_why_it_does_not_swap(
    capsys: pytest.CaptureFixture[str], framework: str, planner: str, told: str
) -> None:
    """One sentence, and it goes on as one that saves nothing, also by its record."""
    pool: Any = SimpleNamespace(jobs=[{"save": SaveMode.SWAP}])
    check_swapping(pool, 0, JobSettings(wish=Wish("swap", planner=planner)), framework)
    assert pool.jobs[0]["save"] == (SaveMode.NONE if told else SaveMode.SWAP)
    said = capsys.readouterr().err
    assert said.startswith(f"zico: this job does not swap: {told}") if told else not said


@pytest.mark.parametrize("save", ["none", "auto", "swap"])
def test_a_job_on_a_gpu_that_does_not_page_has_its_own_window(capsys: pytest.CaptureFixture[str], save: Any) -> None:  # noqa: ANN401 - a mode
    """It says nothing of that."""
    pool: Any = None
    with contextlib.ExitStack() as undo:
        assert managed_window(undo, pool, 0, JobSettings(wish=Wish(save))) == {}
    assert not capsys.readouterr().err
