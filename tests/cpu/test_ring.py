"""The ring between a job that records and the process that reads."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zico.base.compiled import compiled
from zico.base.errors import TraceError
from zico.trace import ring, ringfile
from zico.trace.events import NO_NAME, Kind
from zico.trace.profile import RING_EVENTS, RING_NAME_BYTES
from zico.trace.ringfile import RingFile, RingReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_S = 20.0


@compiled
def put_many(address: int, first: int, n: int) -> None:
    """Record allocations with consecutive numbers."""
    for i in range(first, first + n):
        ring.put(address, ring.ALLOC, i, i * 8, NO_NAME)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RingReader]:
    """Make a ring whose clock is believed at once."""
    monkeypatch.setattr(ringfile, "_LEAST_NS", 0)
    with RingReader(tmp_path / "ring") as reader:
        yield reader


def test_events_arrive_as_they_were_recorded(reader: RingReader) -> None:
    """Kind, tensor, size and name of an event are those that were recorded, times follow the monotonic clock."""
    before_ns = time.monotonic_ns()
    writer = RingFile(reader.path, "torch", 65536)
    start_ns = int(writer.header[0]["start_ns"])
    name = writer.number_of("aten::mm")
    ring.put(writer.address, ring.FREE, 3, 40, name)
    begin_ticks = ring.now_ticks()
    ring.put_op(writer.address, writer.number_of("aten::mm"), begin_ticks)
    after_ns = time.monotonic_ns()
    events = reader.read()
    assert events["kind"].tolist() == [Kind.FREE, Kind.OP]
    assert events["tensor"].tolist() == [3, 0]
    assert events["size_bytes"][0] == 40
    assert [reader.names_so_far()[i] for i in events["name"]] == ["aten::mm", "aten::mm"]
    slack_ns = 1_000_000
    assert before_ns - slack_ns <= start_ns + events["t_ns"][0] <= start_ns + events["t_ns"][1] <= after_ns + slack_ns
    assert events["t_ns"][1] + events["size_bytes"][1] <= after_ns - start_ns + slack_ns
    assert reader.pid == os.getpid()


@settings(deadline=None, max_examples=30)
@given(turns=st.lists(st.tuples(st.integers(0, RING_EVENTS * 2), st.booleans()), max_size=8))
def test_nothing_is_lost_silently(turns: list[tuple[int, bool]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """However writes and reads alternate, an event is read once, in order, or counted as dropped."""
    with pytest.MonkeyPatch.context() as patch, RingReader(tmp_path_factory.mktemp("ring") / "ring") as reader:
        patch.setattr(ringfile, "_LEAST_NS", 0)
        writer = RingFile(reader.path, "test", 0)
        written = waiting = 0
        expected: list[tuple[int, int]] = []
        dropped = 0
        for n, read in [*turns, (0, True)]:
            put_many(writer.address, written, n)
            kept = min(n, RING_EVENTS - waiting)
            expected += [(i, i * 8) for i in range(written, written + kept)]
            dropped += n - kept
            waiting += kept
            written += n
            if read:
                events = reader.read()
                gaps = events["kind"] == Kind.DROPPED
                assert list(
                    zip(events["tensor"][~gaps].tolist(), events["size_bytes"][~gaps].tolist(), strict=True)
                ) == (expected)
                assert int(events["size_bytes"][gaps].sum()) == dropped
                assert (np.diff(events["t_ns"]) >= 0).all()
                expected, waiting, dropped = [], 0, 0


def test_a_reader_beside_a_writer_sees_whole_events(reader: RingReader) -> None:
    """What another thread writes at full speed arrives whole, in order, and all of it is read or counted."""
    writer = RingFile(reader.path, "test", 0)
    n = 30 * RING_EVENTS
    put_many(writer.address, 0, 0)
    thread = threading.Thread(target=put_many, args=(writer.address, 0, n), daemon=True)
    thread.start()
    seen = dropped = 0
    last = -1
    deadline = time.monotonic() + DEADLINE_S
    while seen + dropped < n and time.monotonic() < deadline:
        events = reader.read()
        real = events[events["kind"] == Kind.ALLOC]
        assert (real["size_bytes"] == real["tensor"] * 8).all()
        assert (np.diff(real["tensor"]) > 0).all()
        assert len(real) == 0 or real["tensor"][0] > last
        last = int(real["tensor"][-1]) if len(real) else last
        seen += len(real)
        dropped += int(events["size_bytes"][events["kind"] == Kind.DROPPED].sum())
    thread.join(DEADLINE_S)
    assert seen + dropped == n


def test_one_process_writes(reader: RingReader) -> None:
    """A second writer, a file that is no ring and one that is not there are refused by name."""
    RingFile(reader.path, "torch", 0)
    with pytest.raises(TraceError, match=f"process {os.getpid()} records here already"):
        RingFile(reader.path, "torch", 0)
    other = reader.path.with_name("other")
    other.write_bytes(b"zico")
    with pytest.raises(TraceError, match="no ring"):
        RingFile(other, "torch", 0)
    with pytest.raises(TraceError, match="No such file"):
        RingFile(reader.path.with_name("missing"), "torch", 0)


def test_names_beyond_the_room_for_them_are_left_out(reader: RingReader) -> None:
    """When there is no room for another name its operation has none, and the names before are intact."""
    writer = RingFile(reader.path, "torch", 0)
    long = "x" * (RING_NAME_BYTES // 2)
    assert [writer.number_of(name) for name in (long, "y" + long, "z\0z")] == [0, NO_NAME, 1]
    assert reader.names_so_far() == [long, "zz"]


def test_the_clock_is_read_twice_before_it_is_believed(tmp_path: Path) -> None:
    """Events wait in the ring until the writer's clock has been compared with the monotonic one."""
    with RingReader(tmp_path / "ring") as reader:
        assert len(reader.read()) == 0
        writer = RingFile(reader.path, "torch", 0)
        put_many(writer.address, 0, 3)
        writer.header[0]["start_ns"] = time.monotonic_ns() + 10**9
        assert len(reader.read()) == 0
        writer.header[0]["start_ns"] = time.monotonic_ns() - 10**9
        assert len(reader.read()) == 3


def test_the_file_goes_with_its_reader(tmp_path: Path) -> None:
    """The ring's file is gone when the reader is, and a writer that goes on harms nobody."""
    with RingReader(tmp_path / "ring") as reader:
        writer = RingFile(reader.path, "torch", 0)
    assert not (tmp_path / "ring").exists()
    put_many(writer.address, 0, 10)
