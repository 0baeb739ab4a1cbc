"""``zico trace`` of unmodified PyTorch and TensorFlow programs: what they allocate, and which operation uses what."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from typing import TYPE_CHECKING

import pytest
from cpu.support.zico_process import ZicoRun
from support.harness import FRAMEWORK, MIB

from zico.base.errors import TraceError
from zico.lab.saving.files import swap_iteration
from zico.trace.events import Kind
from zico.trace.files import read_trace
from zico.trace.iterations import find_iterations, with_operations
from zico.trace.lifetimes import lifetimes

if TYPE_CHECKING:
    from pathlib import Path

    from zico.trace.events import Trace

TENSORFLOW = """
import tensorflow as tf
import zico
x = tf.ones([512, 512])
for _ in range(3):
    y = tf.linalg.matmul(x, x)
    del y
    zico.step()
"""


def needs(module: str) -> pytest.MarkDecorator:
    """Skip where a framework is not installed, without the seconds that its import takes."""
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def recorded(path: Path, *arguments: str) -> Trace:
    """Record a Python program and return its trace."""
    with ZicoRun("-o", str(path), *arguments, command="trace", TF_CPP_MIN_LOG_LEVEL="2") as run:
        assert run.finish() == 0, run.stderr
    return read_trace(path)


@needs("torch")
def test_operations_of_pytorch_name_what_they_read_and_write(tmp_path: Path) -> None:
    """With --ops every layer's operation is there by name, and reads and writes are of tensors that live."""
    job = (str(FRAMEWORK / "torch_job.py"), "--iterations", "3", "--layers", "2")
    trace = recorded(tmp_path / "t.zst", "--ops", "--", sys.executable, *job)
    assert trace.origin.framework == "torch"
    made_by: dict[int, str] = {}
    live: set[int] = set()
    uses: list[tuple[Kind, int]] = []
    tanh = []
    for event in trace.events:
        kind, tensor = Kind(event["kind"]), int(event["tensor"])
        name = trace.names[event["name"]] if event["name"] >= 0 else ""
        match kind:
            case Kind.ALLOC:
                live.add(tensor)
                made_by[tensor] = name
            case Kind.FREE:
                live.remove(tensor)
            case Kind.READ | Kind.WRITE:
                assert tensor in live
                uses.append((kind, tensor))
            case Kind.OP:
                assert event["size_bytes"] > 0, "an operation takes time"
                if name == "aten::tanh":
                    tanh.append(dict(uses))
                uses.clear()
            case _:
                pass
    assert {"aten::mul", "aten::tanh", "aten::tanh_backward", "aten::mean"} <= set(trace.names)
    assert (trace.events["kind"] == Kind.BEGIN).sum() == 3
    assert len(tanh) == 3 * 2
    for use in tanh:
        assert set(use) == {Kind.READ, Kind.WRITE}
        assert made_by[use[Kind.READ]] == "aten::add"
        assert made_by[use[Kind.WRITE]] == "aten::tanh"


@needs("torch")
def test_of_a_long_program_some_iterations_have_operations(tmp_path: Path) -> None:
    """The first ones, then two in a row now and then; plans are made of such, others are refused by number."""
    job = (str(FRAMEWORK / "torch_job.py"), "--iterations", "60", "--layers", "2")
    trace = recorded(tmp_path / "t.zst", "--ops", "--", sys.executable, *job)
    found = find_iterations(trace, lifetimes(trace))
    have = found.number[with_operations(trace, found)].tolist()
    assert have[:3] == [1, 2, 3]
    later = have[3:]
    assert 2 <= len(later) <= 6, "a turn is of two iterations, and at least 16 lie between two turns"
    if len(later) % 2:  # the program may end in the middle of a turn: how long a turn waits is measured
        assert later.pop() == found.number[-1]
    for first, second in zip(later[::2], later[1::2], strict=True):
        assert second == first + 1
    assert swap_iteration(trace).number in have
    with pytest.raises(TraceError, match=r"no operations of iteration 7 \(of these it has: 1, 2, 3, "):
        swap_iteration(trace, 7)


@needs("tensorflow")
def test_allocations_of_tensorflow_are_recorded(tmp_path: Path) -> None:
    """Each iteration of a TensorFlow program allocates its product and frees it, and the file says so."""
    trace = recorded(tmp_path / "t.zst", "--", sys.executable, "-c", TENSORFLOW)
    assert trace.origin.framework in ("tensorflow", "keras")
    kinds = trace.events["kind"]
    begins = (kinds == Kind.BEGIN).nonzero()[0]
    assert len(begins) == 3
    for begin, end in itertools.pairwise(begins):
        inside = trace.events[begin:end]
        products = inside["tensor"][(inside["kind"] == Kind.ALLOC) & (inside["size_bytes"] >= MIB)]
        freed = inside["tensor"][inside["kind"] == Kind.FREE]
        assert len(products) == 1
        assert set(products) <= set(freed)
