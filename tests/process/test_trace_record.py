"""``zico trace -o FILE -- CMD``: what a program did is in the file, however it ended."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cpu.support.zico_process import ZicoRun

from zico.trace.events import Kind
from zico.trace.files import read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from zico.trace.events import Trace

KIB = 1 << 10
# A program that trains nothing, but allocates as a framework would; {end} is how it ends.
PROGRAM = """
import os, signal, sys
from zico.job import session
joined = session.attach("light")
from zico.heap import allocator
heap = joined.heap.record[0]
for iteration in range(5):
    first = allocator.allocate(heap, 100 * 1024, 64)
    second = allocator.allocate(heap, 1000 * 1024 + iteration, 64)
    allocator.free(heap, first)
    allocator.free(heap, second)
    session.step()
{end}
"""
ONE_ITERATION = [Kind.ALLOC, Kind.ALLOC, Kind.FREE, Kind.FREE, Kind.BEGIN]
"""Beside what says how much is held."""


def record(path: Path, *options: str, end: str = "") -> tuple[int, str]:
    """Record the program; returns the exit code and what was said."""
    arguments = ("-o", str(path), *options, "--", sys.executable, "-c", PROGRAM.format(end=end))
    with ZicoRun(*arguments, command="trace") as run:
        return run.finish(), run.stderr


def without_held(trace: Trace) -> NDArray[np.void]:
    """Return the events without those that say how much is held."""
    return trace.events[trace.events["kind"] != Kind.HELD]


def check(trace: Trace, iterations: int) -> None:
    """Compare a trace with what the program does in so many iterations."""
    events = without_held(trace)
    assert events["kind"].tolist() == ONE_ITERATION * iterations
    sizes = events["size_bytes"][events["kind"] == Kind.ALLOC].tolist()
    assert sizes == [size for i in range(iterations) for size in (100 * KIB, 1000 * KIB + i)]
    tensors = events["tensor"][events["kind"] == Kind.FREE].tolist()
    assert tensors == list(range(2 * iterations))
    assert events["tensor"][events["kind"] == Kind.BEGIN].tolist() == [i + 1 for i in range(iterations)]
    assert (np.diff(events["t_ns"]) >= 0).all()


def test_every_allocation_free_and_iteration_is_recorded(tmp_path: Path) -> None:
    """Sizes, order, tensors and iterations in the file are the program's, and the header says where they come from."""
    path = tmp_path / "a.trace.zst"
    code, said = record(path)
    assert code == 0
    trace = read_trace(path)
    check(trace, 5)
    assert (trace.origin.framework, trace.origin.threshold_bytes) == ("light", 64 * KIB)
    assert f"{len(trace.events)} events in {path}" in " ".join(said.split())
    held = trace.events["size_bytes"][trace.events["kind"] == Kind.HELD]
    assert held.max() >= 1100 * KIB
    assert held[-1] == 0
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_failing_program_leaves_its_trace_and_its_exit_code(tmp_path: Path) -> None:
    """A program that ends by an error is recorded up to there, and its exit code is passed on."""
    code, _ = record(tmp_path / "a.zst", end="sys.exit(7)")
    assert code == 7
    check(read_trace(tmp_path / "a.zst"), 5)


def test_a_killed_program_is_recorded_to_its_last_event(tmp_path: Path) -> None:
    """What a program did before SIGKILL is in the file: nothing of the recording is in its own memory."""
    code, _ = record(tmp_path / "a.zst", end="os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 128 + signal.SIGKILL
    check(read_trace(tmp_path / "a.zst"), 5)


def test_only_the_iterations_asked_for_are_recorded(tmp_path: Path) -> None:
    """With --iterations the program runs to its end, and the file ends with the last iteration wanted."""
    code, _ = record(tmp_path / "a.zst", "--iterations", "2", end="sys.exit(3)")
    assert code == 3
    trace = read_trace(tmp_path / "a.zst")
    kinds = without_held(trace)["kind"].tolist()
    assert kinds == ONE_ITERATION * 2 + ONE_ITERATION[:-1]


def test_a_program_without_a_framework_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Where nothing joins there is nothing to record: one line says so, and no file is left."""
    with ZicoRun("-o", str(tmp_path / "a.zst"), "--", sys.executable, "-c", "", command="trace") as run:
        assert run.finish() == 1
        assert run.stderr.count("nothing was recorded") == 1
        assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["missing/a.zst", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_program_runs(tmp_path: Path, where: str) -> None:
    """A wrong -o costs no training: the program is not started."""
    code, said = record(tmp_path / where, end="print('I ran')")
    assert code == 1
    assert "cannot be written" in said
    assert "I ran" not in said
