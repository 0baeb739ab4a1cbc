"""Which frameworks the doctor tries on which device, and what it says of those that need a GPU."""

from __future__ import annotations

import os
import re
import signal
import sys
import types

import pytest

from zico.launch.doctor import FRAMEWORKS, gpu_rows, installed_versions, to_try, trial

ALL = {framework.module: "1.0" for framework in FRAMEWORKS}
GPU_ONLY = {"cupy", "numba.cuda"}


@pytest.mark.parametrize(("device", "left_out"), [("host", GPU_ONLY), ("cuda:0", set())])
def test_what_has_tensors_on_a_gpu_only_is_tried_there_only(device: str, left_out: set[str]) -> None:
    """On the host such a framework is no reason to say that Zico is not active."""
    tried = {framework.module for framework in to_try(ALL, device)}
    assert GPU_ONLY & tried == GPU_ONLY - left_out
    assert "torch" in tried


@pytest.mark.parametrize(("device", "where", "sees_gpus"), [("host", "cpu", False), ("cuda:0", "cuda", True)])
def test_a_trial_makes_tensors_where_the_pool_is(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    where: str,
    sees_gpus: bool,  # noqa: FBT001
) -> None:
    """On a machine with a GPU, JAX and TensorFlow would use it, and the host's pool would see nothing."""
    made: list[str] = []
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0"})
    monkeypatch.setattr(signal, "alarm", lambda _seconds: None)
    fake = types.SimpleNamespace(ones=lambda _size, device: made.append(device))
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "zico.adapters.torch", types.SimpleNamespace())  # type: ignore[arg-type]
    code = trial(next(framework for framework in FRAMEWORKS if framework.module == "torch"), device).argv[-1]
    exec(code, {})  # noqa: S102 - as the trial's process does
    assert set(made) == {where}
    assert (os.environ["CUDA_VISIBLE_DEVICES"] == "0") == sees_gpus


def test_what_is_not_installed_is_neither_tried_nor_described() -> None:
    """A row, or a trial, needs the framework."""
    versions = {"torch": "2.13"}
    assert [framework.module for framework in to_try(versions, "cuda:0")] == ["torch"]
    assert not [check for check in gpu_rows(versions, "host") if check.name.split()[0] in GPU_ONLY]


def test_numba_comes_with_zico_and_its_row_says_what_falls_back() -> None:
    """The row has the version, what is in the pool, what is outside the budget, what is refused, and who marks."""
    (row,) = (check for check in gpu_rows(dict(installed_versions()), "cuda:0") if check.name == "numba.cuda on a GPU")
    assert row.passed is None
    says = r"\d+\.\d+.*: arrays are in the pool.*outside the budget.*are refused.*zico\.step\(\)"
    assert re.fullmatch(rf"{says}.*", row.detail)


def test_what_was_not_tried_on_a_gpu_is_not_said_to_be_ok() -> None:
    """On the host the row has no verdict and says that nobody has tried."""
    rows = [check for check in gpu_rows(ALL, "host") if check.name.endswith("on a GPU")]
    assert {row.passed for row in rows} == {None}
    assert all("1.0: not tried, since the device is the host; on a GPU, arrays" in row.detail for row in rows)
