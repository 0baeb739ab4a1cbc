"""Which frameworks the doctor tries on which device, and what it says of those that need a GPU."""

from __future__ import annotations

import re

import pytest

from zico.launch.doctor import FRAMEWORKS, gpu_rows, installed_versions, to_try

ALL = {framework.module: "1.0" for framework in FRAMEWORKS}
GPU_ONLY = {"cupy", "numba.cuda"}


@pytest.mark.parametrize(("device", "left_out"), [("host", GPU_ONLY), ("cuda:0", set())])
def test_what_has_tensors_on_a_gpu_only_is_tried_there_only(device: str, left_out: set[str]) -> None:
    """On the host such a framework is no reason to say that Zico is not active."""
    tried = {framework.module for framework in to_try(ALL, device)}
    assert GPU_ONLY & tried == GPU_ONLY - left_out
    assert "torch" in tried


def test_what_is_not_installed_is_neither_tried_nor_described() -> None:
    """A row, or a trial, needs the framework."""
    versions = {"torch": "2.13"}
    assert [framework.module for framework in to_try(versions, "cuda:0")] == ["torch"]
    assert not [check for check in gpu_rows(versions) if check.name.split()[0] in GPU_ONLY]


def test_numba_comes_with_zico_and_its_row_says_what_falls_back() -> None:
    """The row has the version, what is in the pool, what is outside the budget, what is refused, and who marks."""
    (row,) = (check for check in gpu_rows(dict(installed_versions())) if check.name == "numba.cuda on a GPU")
    assert row.passed
    says = r"\d+\.\d+.*: arrays are in the pool.*outside the budget.*are refused.*zico\.step\(\)"
    assert re.fullmatch(rf"{says}.*", row.detail)
