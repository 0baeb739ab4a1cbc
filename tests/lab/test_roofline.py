"""Device models and the roofline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zico.base.errors import ConfigError
from zico.lab.simulator.roofline import DEVICES, device_model

AMOUNTS = st.integers(0, 10**18)


@pytest.mark.parametrize("name", DEVICES)
def test_a_model_is_plausible_and_says_its_source(name: str) -> None:
    """Every figure is positive, lower precision is never slower, and a source is given."""
    model = DEVICES[name]
    assert model.name == name == name.lower()
    assert 0 < model.fp32 <= model.tf32 <= model.fp16
    assert model.memory_bytes > model.bandwidth / 1e3 > 0
    assert model.source
    assert model.is_cuda == (name != "cpu-2core")


def test_the_larger_of_computing_and_moving_decides() -> None:
    """A100: 19.5 TFLOP take a second, 2039 GB take a second, and the two overlap."""
    model = device_model("A100-80GB")
    second = 10**9
    assert model.duration_ns(19.5e12, 0) == second
    assert model.duration_ns(0, 2039e9) == second
    assert model.duration_ns(19.5e12, 2039e9) == second
    assert model.duration_ns(39e12, 2039e9) == 2 * second


def test_the_precision_decides_the_peak() -> None:
    """The same product takes as long as TF32 or half precision allow, and doubles take no shortcut."""
    model = device_model("a100-80gb")
    assert model.duration_ns(156e12, 0, tf32=True) == 10**9
    assert model.duration_ns(312e12, 0, itemsize=2) == 10**9
    assert model.duration_ns(19.5e12, 0, itemsize=8) == 10**9


@given(flops=AMOUNTS, moved=AMOUNTS, more=AMOUNTS, name=st.sampled_from(sorted(DEVICES)))
def test_more_work_never_takes_less_time(flops: int, moved: int, more: int, name: str) -> None:
    """A duration is at least a nanosecond and grows with the work."""
    model = DEVICES[name]
    least = model.duration_ns(flops, moved)
    assert 1 <= least <= min(model.duration_ns(flops + more, moved), model.duration_ns(flops, moved + more))


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    """The error names what was asked for and each name that exists."""
    with pytest.raises(ConfigError) as caught:
        device_model("A1000")
    assert "'A1000'" in str(caught.value)
    assert all(name in str(caught.value) for name in DEVICES)
