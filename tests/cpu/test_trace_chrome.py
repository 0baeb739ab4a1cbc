"""Chrome traces: what is written has the form that Perfetto reads, and PyTorch's profiles are read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.trace_cases import train

from zico.base.errors import TraceError
from zico.trace.chrome import BEFORE, chrome_bytes
from zico.trace.events import Kind, Trace
from zico.trace.files import read_trace
from zico.trace.lifetimes import lifetimes

if TYPE_CHECKING:
    from pathlib import Path


def named(trace: Trace, kind: Kind) -> list[str]:
    """Return the names of a trace's events of a kind."""
    return [trace.names[it["name"]] if it["name"] >= 0 else "" for it in trace.events if it["kind"] == kind]


def test_spans_counters_and_names_have_the_documented_form() -> None:
    """Iterations and operations are spans that nest per thread, bytes per class a counter, jobs are named processes."""
    a, b = train(3), train(2, layers=3)
    file = json.loads(chrome_bytes([a, b], [["big", "small"] * 1000, ["one"] * 1000]))
    assert file["displayTimeUnit"] == "ms"
    events = file["traceEvents"]
    assert {it["ph"] for it in events} == {"M", "X", "C", "i"}
    assert {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"} == {1: "loop", 2: "loop"}
    spans = [it for it in events if it["ph"] == "X" and it["pid"] == 1]
    iterations = [it for it in spans if it["tid"] == 0]
    assert [it["name"] for it in iterations] == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    ends = [it["ts"] + it["dur"] for it in iterations]
    assert ends[:-1] == pytest.approx([it["ts"] for it in iterations[1:]])
    assert [it["dur"] for it in spans if it["tid"] == 1] == [0.5] * 3
    counters = [it["args"] for it in events if it["ph"] == "C"]
    assert {frozenset(it) for it in counters} == {frozenset({"big", "small"}), frozenset({"one"})}
    assert all(value >= 0 for it in counters for value in it.values())
    assert set(counters[-1].values()) == {0}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Sizes, lifetimes, iterations and operations survive the way through a Chrome trace."""
    trace = train(4)
    path = tmp_path / "t.json"
    path.write_bytes(chrome_bytes([trace]))
    found = read_trace(path)
    life, expected = lifetimes(found), lifetimes(trace)
    for field in ("size_bytes", "begin", "end"):
        assert (getattr(life, field) == getattr(expected, field)).all()
    for kind in (Kind.BEGIN, Kind.OP):
        of_kind = [it.events[it.events["kind"] == kind] for it in (found, trace)]
        assert (of_kind[0]["t_ns"] == of_kind[1]["t_ns"] - trace.events["t_ns"][0]).all()
    assert named(found, Kind.OP) == ["forward"] * 4


def memory(ts: float, address: int, size_bytes: int, total: int, device: tuple[int, int] = (1, 0)) -> dict[str, Any]:
    """Return a memory event as PyTorch's profiler writes it."""
    args = {"Addr": address, "Bytes": size_bytes, "Total Allocated": total, "Total Reserved": 0, "Ev Idx": 3}
    args |= {"Device Type": device[0], "Device Id": device[1]}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 7,
        "tid": 8,
        "ts": ts,
        "args": args,
    }


def span(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int | str = 8) -> dict[str, Any]:
    """Return a span as PyTorch's profiler writes it."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": {"External id": 1}}


PROFILE = [
    {"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "x"}},
    span("ProfilerStep#4", 999.0, 101.0, "user_annotation"),
    span("ProfilerStep#5", 1100.0, 50.0, "user_annotation"),
    span("aten::linear", 1000.0, 20.0),
    span("aten::addmm", 1001.0, 10.0),
    span("aten::other thread", 1000.0, 500.0, tid="9"),
    memory(1002.0, 0x100, 64, 564),
    memory(1030.0, 0x900, -100, 464),
    memory(1105.5, 0x100, -64, 400),
    memory(1106.0, 0x500, 8, 8, (0, -1)),
]


@pytest.mark.parametrize("form", [PROFILE, {"traceEvents": PROFILE, "schemaVersion": 1}])
def test_pytorchs_profiles_are_read(tmp_path: Path, form: object) -> None:
    """The device with most bytes is read; what was there before is allocated first; the outermost operation names."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps(form, indent=1))
    trace = read_trace(path)
    assert trace.origin.device == "cuda:0"
    memory_events = trace.events[(trace.events["kind"] == Kind.ALLOC) | (trace.events["kind"] == Kind.FREE)]
    rows = [(int(it["t_ns"]), Kind(it["kind"]).name, int(it["tensor"]), int(it["size_bytes"])) for it in memory_events]
    assert rows == [
        (0, "ALLOC", 0, 100),
        (0, "ALLOC", 1, 400),
        (0, "ALLOC", 2, 64),
        (28_000, "FREE", 0, 0),
        (103_500, "FREE", 2, 0),
    ]
    assert named(trace, Kind.ALLOC) == ["", BEFORE, "aten::linear"]
    assert sorted(named(trace, Kind.OP)) == ["aten::linear", "aten::other thread"]
    marks = [(Kind(it["kind"]).name, int(it["tensor"])) for it in trace.events if it["kind"] in (Kind.BEGIN, Kind.END)]
    assert marks == [("BEGIN", 4), ("BEGIN", 5), ("END", 5)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "neither Zico's trace nor Chrome trace JSON"),
        ('{"traceEvents":[', "neither Zico's trace nor Chrome"),
        ('{"traceEvents":[]}', "profile_memory=True"),
        (json.dumps([span("a", 1, 1)]), "profile_memory=True"),
        (json.dumps([memory(1.0, 1, -5, 0)]), "profile_memory=True"),
        (json.dumps([memory(1.0, 1, 1 << 62, 0)]), "out of range"),
        (json.dumps([memory(1e300, 1, 1, 0)]), "out of range"),
        ('[{"args":' + "[" * 100_000, "recursion"),
    ],
)
def test_what_says_nothing_of_memory_says_why(tmp_path: Path, content: str, says: str) -> None:
    """JSON that is no profile, or one without memory, is a one-line error with the remedy."""
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(TraceError, match=says):
        read_trace(tmp_path / "t.json")
