"""PyTorch memory snapshots: what is written is what memory_viz can open, and PyTorch's own are read."""

from __future__ import annotations

import pickle
import pickletools
from typing import TYPE_CHECKING, Any

import pytest
from cpu.support.trace_cases import Loop, train

from zico.base.errors import TraceError
from zico.trace.events import Kind, Origin, Trace
from zico.trace.files import read_trace
from zico.trace.lifetimes import lifetimes
from zico.trace.snapshot import snapshot_bytes

if TYPE_CHECKING:
    from pathlib import Path

EXACT = 1 << 53  # the viewer's numbers are JavaScript's
ACTIONS = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom", "snapshot"}
OPERATIONS = {
    "APPEND",
    "APPENDS",
    "BINFLOAT",
    "BINGET",
    "BININT",
    "BININT1",
    "BININT2",
    "BINPUT",
    "BINUNICODE",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "EMPTY_TUPLE",
    "FRAME",
    "LONG1",
    "LONG_BINGET",
    "LONG_BINPUT",
    "MARK",
    "MEMOIZE",
    "NEWFALSE",
    "NEWTRUE",
    "NONE",
    "PROTO",
    "SETITEM",
    "SETITEMS",
    "SHORT_BINUNICODE",
    "STOP",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
}
STATES = {"active_allocated", "active_pending_free", "inactive"}


def check_types(value: Any) -> None:  # noqa: ANN401 - what a pickle holds
    """Fail unless a value is made of what the viewer's unpickler knows."""
    if isinstance(value, dict):
        assert type(value) is dict
        for key, inner in value.items():
            assert type(key) is str
            check_types(inner)
    elif isinstance(value, list | tuple):
        assert type(value) in (list, tuple)
        for inner in value:
            check_types(inner)
    else:
        assert type(value) in (str, int, float, bool, type(None))
        assert not isinstance(value, int) or abs(value) < EXACT


def check_snapshot(content: bytes) -> dict[str, Any]:
    """Fail unless the viewer can show a snapshot; returns it.

    Source: torch/utils/viz/MemoryViz.js: unpickle, annotate_snapshot, MemoryView and
    process_alloc_data.
    """
    operations = list(pickletools.genops(content))
    assert operations[0][0].name == "PROTO"
    assert operations[0][1] in (2, 3, 4)
    assert {operation.name for operation, _, _ in operations} <= OPERATIONS
    snapshot = pickle.loads(content)  # noqa: S301 - our own
    check_types(snapshot)
    for segment in snapshot["segments"]:
        assert 0 <= segment["device"] < len(snapshot["device_traces"])
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            assert 0 <= block["requested_size"] <= block["size"]
            assert block["size"] > 0
            assert block["state"] in STATES
            check_frames(block["frames"])
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    for device, entries in enumerate(snapshot["device_traces"]):
        for entry in entries:
            assert entry["action"] in ACTIONS
            assert {"addr", "size", "stream"} <= set(entry)
            check_frames(entry["frames"])
        check_device(entries, [it for it in snapshot["segments"] if it["device"] == device])
    categories = {
        entry["category"] for entries in snapshot["device_traces"] for entry in entries if "category" in entry
    }
    assert not categories or "unknown" in categories
    return snapshot  # type: ignore[no-any-return]


def check_frames(frames: list[dict[str, Any]]) -> None:
    """Fail unless a stack can be printed."""
    for frame in frames:
        assert isinstance(frame["name"], str)
        assert isinstance(frame["filename"], str)
        assert "line" in frame


def check_device(entries: list[dict[str, Any]], segments: list[dict[str, Any]]) -> None:
    """Fail unless events, replayed, stay inside segments, never overlap, and end in the state that segments show."""
    mapped: dict[int, int] = {}
    live: dict[int, int] = {}
    for entry in entries:
        address, size = entry["addr"], entry["size"]
        if entry["action"] == "segment_alloc":
            mapped[address] = size
        elif entry["action"] == "alloc":
            assert any(start <= address and address + size <= start + length for start, length in mapped.items())
            assert all(address + size <= start or start + length <= address for start, length in live.items())
            live[address] = size
        elif entry["action"] in ("free_requested", "free_completed"):
            assert live[address] == size
            if entry["action"] == "free_completed":
                del live[address]
    assert mapped == {segment["address"]: segment["total_size"] for segment in segments}
    shown = {
        block["address"]: block["requested_size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert shown == live


def unfinished() -> Trace:
    """Return a trace at whose end tensors live, with gaps between them."""
    loop = Loop()
    tensors = [loop.allocate(size, f"op {size}") for size in (1000, 5000, 1000, 70_000, 1)]
    loop.free(tensors[1], tensors[3])
    loop.allocate(4900)
    return loop.trace()


@pytest.mark.parametrize("trace", [train(3), unfinished(), Trace(Origin(), train(1).events[:0])])
def test_the_viewer_can_open_what_is_written(trace: Trace) -> None:
    """Types, protocol, tiling blocks, categories and the replayed events are as the viewer needs them."""
    check_snapshot(snapshot_bytes([trace]))


def test_the_check_sees_what_the_viewer_cannot_open() -> None:
    """A snapshot without "unknown", with a gap between blocks, or with bytes in it fails the check."""
    good = pickle.loads(snapshot_bytes([unfinished()]))  # noqa: S301 - our own
    check_snapshot(pickle.dumps(good, protocol=4))
    for spoil in (
        lambda it: it["device_traces"][0].pop(0),
        lambda it: it["segments"][0]["blocks"].pop(1),
        lambda it: it["segments"][0].update(segment_type=b"large"),
        lambda it: it["device_traces"][0].append(dict(it["device_traces"][0][1])),
    ):
        bad = pickle.loads(pickle.dumps(good))  # noqa: S301 - our own
        spoil(bad)
        with pytest.raises((AssertionError, KeyError)):
            check_snapshot(pickle.dumps(bad, protocol=4))


def test_jobs_are_the_viewers_devices() -> None:
    """Two traces are two device traces, in segments of their own, coloured by job or by the categories given."""
    a, b = train(2), unfinished()
    snapshot = check_snapshot(snapshot_bytes([a, b]))
    assert [len(entries) > 1 for entries in snapshot["device_traces"]] == [True, True]
    assert {it["category"] for entries in snapshot["device_traces"] for it in entries} == {"unknown", "loop"}
    classes = [["x", "y"] * 200, ["z"] * 6]
    snapshot = check_snapshot(snapshot_bytes([a, b], classes))
    assert {it["category"] for it in snapshot["device_traces"][0]} == {"unknown", "x", "y"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Sizes, lifetimes, times and names survive the way through a snapshot."""
    for number, trace in enumerate((train(3), unfinished())):
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(snapshot_bytes([trace]))
        found, life, expected = read_trace(path), lifetimes(read_trace(path)), lifetimes(trace)
        for field in ("size_bytes", "begin", "end"):
            assert (getattr(life, field) == getattr(expected, field)).all()
        shift = trace.events["t_ns"][0]
        assert (found.events["t_ns"] == trace.events["t_ns"][expected.step_event] - shift).all()
        names = [
            [it.names[name] if name >= 0 else "" for name in of.name] for it, of in ((found, life), (trace, expected))
        ]
        assert names[0] == names[1]


FRAME = {"filename": "/somewhere/model.py", "line": 7, "name": "forward"}
INNER = {"filename": "??", "line": 0, "name": "c10::cuda::CUDACachingAllocator::malloc"}


def pytorchs(**extra: object) -> dict[str, Any]:
    """Return a snapshot as ``torch.cuda.memory._snapshot`` documents it, of a ring that forgot its beginning."""
    base = 0x7F0000000000

    def entry(action: str, addr: int, size: int, us: int) -> dict[str, Any]:
        about = {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": us, "frames": [INNER, FRAME]}
        return about | {"compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}

    def block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
        return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": [FRAME]}

    segment = {
        "address": base, "total_size": 2 << 20, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
        "allocated_size": 1536, "active_size": 1536, "requested_size": 1000, "device": 1, "is_expandable": False,
        "frames": [], "blocks": [
            block(base, 1024, 700, "active_allocated"),
            block(base + 1024, 512, 300, "active_allocated"),
            block(base + 1536, (2 << 20) - 1536, 0, "inactive"),
        ],
    }  # fmt: skip
    trace = [
        entry("free_requested", base + 4096, 900, 1_700_000_000_000_100),
        entry("free_completed", base + 4096, 900, 1_700_000_000_000_100),
        entry("alloc", base + 1024, 300, 1_700_000_000_000_103),
        entry("snapshot", 0, 0, 1_700_000_000_000_105),
    ]
    whole = {"segments": [segment], "device_traces": [[], trace], "allocator_settings": {"max_split_size": -1}}
    return whole | {"external_annotations": []} | extra


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pytorchs_snapshots_are_read(tmp_path: Path, protocol: int) -> None:
    """The busiest device is read; what lived before recording is allocated first; the innermost Python frame names."""
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(pytorchs(), protocol=protocol))
    trace = read_trace(path)
    kinds = [(Kind(it["kind"]).name, int(it["tensor"]), int(it["size_bytes"]), int(it["t_ns"])) for it in trace.events]
    assert kinds == [("ALLOC", 0, 900, 0), ("ALLOC", 1, 700, 0), ("FREE", 0, 0, 0), ("ALLOC", 2, 300, 3000)]
    assert trace.origin.device == "cuda:1"
    assert trace.names[trace.events["name"][1]] == "forward (model.py:7)"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device_traces": [[], []]}, "holds no events: call torch.cuda.memory._record_memory_history"),
        ({"device_traces": []}, "holds no events"),
        ({"device_traces": None}, "no lists device_traces"),
        ({"segments": [{"address": -1, "blocks": []}]}, "Expected `int` >= 0"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": "x"}]]}, "Expected `int`, got `str`"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": 1 << 80}]]}, "no PyTorch memory snapshot"),
    ],
)
def test_what_is_no_snapshot_says_why(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """A pickle of the wrong shape is a one-line error."""
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(pytorchs(**change)))
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_a_trace_too_large_for_the_viewer_is_refused() -> None:
    """Addresses beyond what JavaScript's numbers tell apart are an error, not a wrong picture."""
    loop = Loop()
    loop.allocate(1 << 50)
    with pytest.raises(TraceError, match="more addresses"):
        snapshot_bytes([loop.trace()])
