"""The evaluation's training steps: two traces say what a trace at any other batch says."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from zico.lab.simulator.roofline import device_model
from zico.trace.events import Kind

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from paper import traced, work
from zoo import MODELS, fake_trace

_CARD = "v100-32gb"


def test_a_step_between_two_batches_is_the_one_that_is_traced_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same events, same bytes, and the same times but for the least time of a kernel."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path))
    step = work.step_of("DCGAN", "dcgan", "dcgan", {}, 2, 8)
    found = step.trace(5, _CARD).events
    monkeypatch.syspath_prepend(str(MODELS))
    build = functools.partial(importlib.import_module("dcgan").dcgan, batch=5)
    expected = fake_trace(build, device_model(_CARD), traced._ITERATIONS).events
    for field in ("kind", "tensor"):
        assert np.array_equal(found[field], expected[field])
    is_op = found["kind"] == Kind.OP
    assert np.array_equal(found["size_bytes"][~is_op], expected["size_bytes"][~is_op])
    times_ns = np.maximum(work.KERNEL_NS, expected["size_bytes"][is_op])
    assert np.abs(found["size_bytes"][is_op] - times_ns).max() <= 1


def test_other_operations_at_another_batch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer sequence is not a larger batch: what is not affine is not taken for it."""
    monkeypatch.setenv("ZICO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(work, "traced", _longer)
    with pytest.raises(ValueError, match="other operations run"):
        work.step_of("RHN", "rhn", "rhn", {}, 2, 3)


def _longer(script: str, function: str, arguments: dict[str, int], name: str) -> object:
    """Trace with as many words as samples."""
    return traced.traced(script, function, arguments | {"length": arguments["batch"]}, name)
