"""How a job's memory is opened by what was wished for it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from cpu.support.members import join, make_pool
from support.light_job import can_page

from zico.broker.saving import Wish
from zico.heap.layout import HEAP_RECORD
from zico.job.paged_job import check_swapping, managed_window, open_heap
from zico.job.settings import JobSettings
from zico.paging.layout import ALL, APART, DEEPUM, PREEVICT, PREFETCH, TUNE
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


def test_a_job_on_a_gpu_that_is_to_page_as_another_system_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and it goes on as one that does not page."""
    pool: Any = None
    with contextlib.ExitStack() as undo:
        assert managed_window(undo, pool, 0, JobSettings(wish=Wish("page", planner="deepum"))) == {}
    said = "zico: this job is not paged: ZICO_JOB_SAVE: job cannot page as deepum does on a GPU, "
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("save", ["none", "auto", "swap"])
def test_a_job_on_a_gpu_that_does_not_page_has_its_own_window(capsys: pytest.CaptureFixture[str], save: Any) -> None:  # noqa: ANN401 - a mode
    """It says nothing of that."""
    pool: Any = None
    with contextlib.ExitStack() as undo:
        assert managed_window(undo, pool, 0, JobSettings(wish=Wish(save))) == {}
    assert not capsys.readouterr().err


@pytest.mark.skipif(not can_page(), reason="this user may not serve page faults")
@pytest.mark.parametrize(
    ("system", "flags", "degree", "tier"),
    [
        ("", ALL, 32, "memory"),
        ("deepum", DEEPUM, 32, "memory"),
        ("sentinel", DEEPUM | TUNE | APART, 32, "memory"),
        ("oc-dnn", PREFETCH | PREEVICT, 6, "memory"),
        ("dragon", 0, 32, "file"),
    ],
)
def test_a_job_pages_as_the_published_system_that_it_names(system: str, flags: int, degree: int, tier: str) -> None:
    """Its pager has that system's parts and tier, its record the name; ``ZICO_PAGING`` still changes the parts."""
    before = HEAP_RECORD.copy()
    with make_pool(8, region_bytes=1 << 16) as pool, join(pool) as member:
        job = int(member.member[0]["job"])
        for paging in ({}, {"degree": 3}):
            settings = JobSettings(wish=Wish("page", planner=system), paging=paging)
            heap = open_heap(member, job, settings, "torch", {})
            assert heap.paged is not None
            assert (heap.paged.flags, heap.paged.degree) == (flags, paging.get("degree", degree))
            assert {use.kind for use in heap.paged.tiers.usage()} == {tier}
            assert (pool.jobs[job]["save"], pool.jobs[job]["planner"]) == (SaveMode.PAGE, system.encode())
            heap.close()
            heap.paged.tiers.close()
            HEAP_RECORD[:] = before
