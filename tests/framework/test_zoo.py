"""The model zoo: the models are the published ones, and traces of them are what real runs do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from zico.base.units import GIB
from zico.lab.simulator.roofline import device_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from zoo import DEVICE, HOST, ZOO, Model, fake_peak_bytes, fake_trace, real_peak_bytes, zoo_problems, zoo_trace

COMPARED = {"RHN": {"batch": 4, "length": 3}, "DCGAN": {"batch": 8}}
"""Recurrence, and convolutions with two optimizers; benchmarks/zoo.py compares all."""


@pytest.mark.parametrize("name", ZOO)
def test_a_model_has_as_many_parameters_as_published(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizers of each model are given exactly the published number of parameters."""
    parameters: list[torch.Tensor] = []
    original = torch.optim.Optimizer.add_param_group

    def add(optimizer: torch.optim.Optimizer, group: dict[str, list[torch.Tensor]]) -> None:
        original(optimizer, group)
        parameters.extend(group["params"])

    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", add)
    with torch.device("meta"):
        ZOO[name].build()()
    assert sum(parameter.numel() for parameter in parameters) == ZOO[name].parameters


@pytest.mark.parametrize("name", COMPARED)
def test_a_models_peak_is_that_of_a_real_run(name: str) -> None:
    """At a small batch a fake trace of the host peaks within 2 % of a real run, convolutions' own blocks left out."""
    build = ZOO[name].build(**COMPARED[name])
    real, _ = real_peak_bytes(build)
    assert fake_peak_bytes(fake_trace(build, device_model(HOST))) == pytest.approx(real, rel=0.02)


def test_bert_base_at_its_published_batch_needs_tens_of_gigabytes() -> None:
    """64 sequences of 512 words need between 50 and 60 GiB, which this machine need not have."""
    peak_bytes = fake_peak_bytes(fake_trace(ZOO["BERT-base"].build(), device_model(DEVICE)))
    assert 50 * GIB < peak_bytes < 60 * GIB


def test_problems_come_from_traces_that_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call writes a trace into the cache directory, the second gives the same problem from it."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path))
    first, second = (dict(zoo_problems(("DCGAN",)))["DCGAN"] for _ in range(2))
    assert len(list((tmp_path / "zoo").iterdir())) == 1
    assert (first.size_bytes.tolist(), first.lower.tolist()) == (second.size_bytes.tolist(), second.lower.tolist())
    assert first.peak_live_bytes > GIB / 4


def test_traces_of_other_arguments_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 16 and 16 layers are not the same: the second call does not read what the first one has kept."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path))
    model = Model("VGG (CIFAR)", "vgg", "vgg_cifar", "", 0, "", {})
    of_batch, of_layers = (zoo_trace(model, **{name: 16}) for name in ("batch", "layers"))
    assert fake_peak_bytes(of_batch) < fake_peak_bytes(of_layers)
