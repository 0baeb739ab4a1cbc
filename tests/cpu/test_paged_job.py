"""How a job's memory is opened by what was wished for it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from zico.broker.saving import Wish
from zico.job.paged_job import managed_window
from zico.job.settings import JobSettings


def test_a_job_on_a_gpu_says_that_it_does_not_swap(capsys: pytest.CaptureFixture[str]) -> None:
    """If it is told to without ``zico run``, which refuses: one sentence, and it goes on as one that saves nothing."""
    pool: Any = None  # nothing is asked of it
    with contextlib.ExitStack() as undo:
        assert managed_window(undo, pool, 0, JobSettings(wish=Wish("swap"))) == {}
    told = capsys.readouterr().err
    assert told == "zico: this job does not swap: swapping on a GPU is not built yet: give page, or let it wait\n"


@pytest.mark.parametrize("save", ["none", "auto"])
def test_a_job_on_a_gpu_that_waits_says_nothing(capsys: pytest.CaptureFixture[str], save: Any) -> None:  # noqa: ANN401 - a mode
    """Waiting is what it was told, or the only way that it has."""
    pool: Any = None
    with contextlib.ExitStack() as undo:
        assert managed_window(undo, pool, 0, JobSettings(wish=Wish(save))) == {}
    assert not capsys.readouterr().err
