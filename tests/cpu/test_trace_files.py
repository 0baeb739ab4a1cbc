"""Trace files: what is written is read back, as a stream, and nothing half-written bears the final name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from cpu.support.trace_cases import Loop, train
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.errors import TraceError
from zico.trace.events import EVENT, NO_NAME, Kind, Origin, Trace
from zico.trace.files import PARTIAL_SUFFIX, TraceReader, TraceWriter, read_trace, write_trace

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "trace-format.md"


def said(trace: Trace) -> list[tuple[object, ...]]:
    """Return a trace's events with names instead of their numbers."""
    rows = trace.events.tolist()
    return [(*row[:3], "" if row[3] == NO_NAME else trace.names[row[3]], *row[4:6]) for row in rows]


numbers = st.integers(0, 1 << 60)


@st.composite
def event(draw: st.DrawFn) -> tuple[int, ...]:
    """Return an event of any kind with the fields that its kind has."""
    kind = draw(st.sampled_from(Kind))
    tensor = 0 if kind in (Kind.OP, Kind.DROPPED, Kind.HELD) else draw(numbers)
    size = 0
    if kind in (Kind.ALLOC, Kind.DROPPED):
        size = draw(st.integers(1, 1 << 40))
    elif kind in (Kind.OP, Kind.HELD):
        size = draw(numbers)
    return (
        draw(numbers),
        tensor,
        size,
        draw(st.integers(NO_NAME, 2)),
        draw(st.integers(-(1 << 15), (1 << 15) - 1)),
        kind,
        0,
    )


@settings(deadline=None)
@given(events=st.lists(event(), max_size=30), names=st.lists(st.text(min_size=1, max_size=20), min_size=3, max_size=3))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, ...]], names: list[str]
) -> None:
    """Any events of the format come back with their names, and the origin with them."""
    path = tmp_path_factory.mktemp("trace") / "t.zst"
    origin = Origin(job="j", framework="f", device="d", source="s", threshold_bytes=3, parameters=4, note="ü")
    trace = Trace(origin, np.array(events, EVENT), tuple(names))
    write_trace(path, trace)
    found = read_trace(path)
    assert said(found) == said(
        Trace(origin, trace.events, tuple(name.encode(errors="replace").decode() for name in names))
    )
    assert (found.origin, found.path) == (origin, str(path))


def test_the_documents_example_is_a_trace(tmp_path: Path) -> None:
    """The example in docs/trace-format.md is read uncompressed, and written it has the same lines."""
    (example,) = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    plain = tmp_path / "example.jsonl"
    plain.write_text(example)
    trace = read_trace(plain)
    assert [Kind(kind) for kind in trace.events["kind"]] == [
        *(Kind.ALLOC, Kind.BEGIN, Kind.ALLOC, Kind.READ, Kind.WRITE),
        *(Kind.OP, Kind.HELD, Kind.FREE, Kind.DROPPED, Kind.END),
    ]
    write_trace(tmp_path / "again.zst", trace)
    again = zstandard.ZstdDecompressor().stream_reader((tmp_path / "again.zst").read_bytes()).read()
    assert again.decode() == example


def test_batches_are_as_good_as_the_whole(tmp_path: Path) -> None:
    """Events written in batches while names come along are those written at once, and are read in batches."""
    trace = train(30)
    with TraceWriter(tmp_path / "t.zst", trace.origin) as writer:
        for start in range(0, len(trace.events), 100):
            batch = trace.events[start : start + 100]
            writer.names(trace.names[: batch["name"].max() + 1 if start == 0 else None])
            writer.write(batch)
    assert said(read_trace(tmp_path / "t.zst")) == said(trace)
    with TraceReader(tmp_path / "t.zst") as reader:
        batches = list(reader)
        assert said(Trace(reader.origin, np.concatenate(batches), reader.names)) == said(trace)


def test_reading_does_not_hold_the_whole(tmp_path: Path) -> None:
    """A file of several chunks is read in several batches."""
    trace = train(1500)
    write_trace(tmp_path / "t.zst", trace)
    with TraceReader(tmp_path / "t.zst") as reader:
        assert max(map(len, reader)) < len(trace.events) / 2


def test_a_failed_recording_leaves_nothing(tmp_path: Path) -> None:
    """When the recording raises, neither the file nor its partial is there, and an old file is as it was."""
    path = tmp_path / "t.zst"
    path.write_text("old")
    writer = TraceWriter(path, Origin())
    writer.write(train(2).events[:0])
    writer.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert [it.name for it in tmp_path.iterdir()] == ["t.zst"]
    assert path.read_text() == "old"
    (tmp_path / "taken").mkdir()
    with pytest.raises(TraceError, match="taken: cannot be written"):
        write_trace(tmp_path / "taken", train(1))
    assert {it.name for it in tmp_path.iterdir()} == {"t.zst", "taken"}


def test_a_killed_recorder_leaves_what_it_wrote(tmp_path: Path) -> None:
    """After a kill only the partial is there; strictly it is refused, leniently every event of it is read."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from cpu.support.trace_cases import train; from zico.trace.files import TraceWriter\n"
        "trace = train(5); writer = TraceWriter(sys.argv[2], trace.origin)\n"
        "writer.names(trace.names); writer.write(trace.events); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(tmp_path / "t.zst")]
    assert subprocess.run(command, timeout=60, check=False).returncode == -9
    (partial,) = tmp_path.iterdir()
    assert partial.name == f"t.zst{PARTIAL_SUFFIX}"
    with pytest.raises(TraceError, match=r"no stop.*--allow-truncated"):
        read_trace(partial)
    assert said(read_trace(partial, allow_truncated=True)) == said(train(5))
    write_trace(tmp_path / "t.zst", train(3))
    assert [it.name for it in tmp_path.iterdir()] == ["t.zst"]


@pytest.mark.parametrize("compressed", [True, False])
def test_a_cut_file_is_read_up_to_its_last_whole_line(tmp_path: Path, compressed: bool) -> None:  # noqa: FBT001
    """Cut anywhere after the header, a file is refused strictly and gives a beginning of its events leniently."""
    trace = train(4)
    path = tmp_path / "t"
    write_trace(path, trace)
    whole = path.read_bytes()
    if not compressed:
        whole = zstandard.ZstdDecompressor().stream_reader(whole).read()
    lengths = set()
    for cut in range(len(whole) // 2, len(whole) - 60, max(len(whole) // 40, 1)):
        path.write_bytes(whole[:cut])
        with pytest.raises(TraceError):
            read_trace(path)
        found = read_trace(path, allow_truncated=True)
        assert said(found) == said(trace)[: len(found.events)]
        lengths.add(len(found.events))
    assert compressed or len(lengths) > 10


def test_two_writers_do_not_share_a_file(tmp_path: Path) -> None:
    """While one writer is at a file another is refused, and the first one's trace is whole."""
    trace = train(2)
    with TraceWriter(tmp_path / "t.zst", trace.origin) as writer:
        writer.names(trace.names)
        writer.write(trace.events)
        with pytest.raises(TraceError, match="cannot be written"):
            TraceWriter(tmp_path / "t.zst", Origin())
    assert said(read_trace(tmp_path / "t.zst")) == said(trace)


def test_what_cannot_be_opened_says_so(tmp_path: Path) -> None:
    """A missing directory and a missing file are one-line errors that name them."""
    with pytest.raises(TraceError, match=r"none/t.zst: cannot be written \(No such file"):
        TraceWriter(tmp_path / "none" / "t.zst", Origin())
    with pytest.raises(TraceError, match=r"none: cannot be read \(No such file"):
        read_trace(tmp_path / "none")


def test_odd_names_are_written(tmp_path: Path) -> None:
    """A name that UTF-8 cannot say, and one that never ends, are written as what is left of them."""
    loop = Loop()
    loop.allocate(1, "\udcff" + "x" * 10_000)
    write_trace(tmp_path / "t.zst", loop.trace())
    (name,) = read_trace(tmp_path / "t.zst").names
    assert name == "?" + "x" * 1023
