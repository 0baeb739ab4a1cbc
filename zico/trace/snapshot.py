"""Read and write PyTorch memory snapshots: the pickles that pytorch.org/memory_viz shows.

Reading takes the device with the most events. What was alive before recording began is allocated at
the beginning.

Writing makes one entry of ``device_traces`` per trace, so that the viewer's menu of devices becomes
one of jobs. It gives each allocation a category, which colours the timeline. A job gets one
segment, in which tensors of equal size follow each other at the same address::

    segment  | a: 1 MiB | b: 4 MiB         | c: 1 MiB | inactive to the end |      blocks tile it, in order

Source: torch/utils/viz/MemoryViz.js (what the viewer asks of a snapshot) and
``torch.cuda.memory._snapshot``.
"""

from __future__ import annotations

import pickle
import pickletools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from zico.base.errors import TraceError
from zico.trace.events import NO_NAME, Kind, Origin, Trace
from zico.trace.lines import LARGEST, Rebuilder, clean

if TYPE_CHECKING:
    from collections.abc import Sequence


# -- read the data of a pickle without being able to run what is in it -----------------------------
#
# A pickle is a program for a stack machine. ``pickletools`` takes it apart. This machine has the
# operations that build numbers, strings, lists, tuples and dictionaries. It has no other: none that
# looks up a name, imports, or calls. PyTorch's memory viewer, in a browser, reads the same subset.
# It costs memory in proportion to the file, and never recurses.

MAX_CONTAINERS = 1 << 25
"""Empty ones cost a byte in the file and 64 in memory."""
_BAD = (IndexError, KeyError, TypeError, ValueError, AttributeError)


class UnpickleError(Exception):
    """Say which byte of a pickle cannot be followed, and why."""


def unpickle(data: bytes) -> Any:  # noqa: ANN401 - whatever the pickle holds
    """Return the numbers, strings, lists, tuples and dictionaries in a pickle of protocol 2 to 5.

    Raises:
        UnpickleError: It is damaged, too large, or wants anything else, such as to run code.
            Nothing was run.
    """
    machine = _Machine()
    try:
        for operation, argument, at in pickletools.genops(data):
            machine.at = at or 0
            step = _STEPS.get(operation.name)
            if step is None:
                raise UnpickleError(
                    f"byte {at}: operation {operation.name} is refused, since it runs code or builds what no memory "
                    "snapshot holds"
                )
            step(machine, argument)
        return machine.stack[-1]
    except _BAD as error:
        raise UnpickleError(f"byte {machine.at}: {type(error).__name__}, the pickle is damaged") from None


class _Machine:
    def __init__(self) -> None:
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.n_containers = 0

    def contain(self, value: Any) -> None:  # noqa: ANN401 - any container
        self.n_containers += 1
        if self.n_containers > MAX_CONTAINERS:
            raise UnpickleError(f"byte {self.at}: more than {MAX_CONTAINERS} lists and dictionaries")
        self.stack.append(value)

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def last(self, kind: type) -> Any:  # noqa: ANN401 - of that kind
        value = self.stack[-1]
        if type(value) is not kind:
            raise TypeError
        return value


_Step = Callable[[_Machine, Any], object]


def _nothing(_machine: _Machine, _argument: object) -> None:
    """Do nothing: what a newer protocol adds is refused where it stands, and frames only cut the output."""


def _mark(machine: _Machine, _argument: None) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _value(machine: _Machine, value: object) -> None:
    machine.stack.append(value)


def _text(machine: _Machine, text: str) -> None:
    machine.stack.append(text.encode(errors="surrogatepass").decode(errors="replace"))


def _constant(value: object) -> _Step:
    return lambda machine, _: machine.stack.append(value)


def _tuple(length: int) -> _Step:
    def step(machine: _Machine, _argument: None) -> None:
        items = [machine.stack.pop() for _ in range(length)]
        machine.contain(tuple(reversed(items)))

    return step


def _append(machine: _Machine, _argument: None) -> None:
    value = machine.stack.pop()
    machine.last(list).append(value)


def _appends(machine: _Machine, _argument: None) -> None:
    values = machine.to_mark()
    machine.last(list).extend(values)


def _set_item(machine: _Machine, _argument: None) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.last(dict)[key] = value


def _set_items(machine: _Machine, _argument: None) -> None:
    items = machine.to_mark()
    machine.last(dict).update(zip(items[::2], items[1::2], strict=True))


def _put(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _get(machine: _Machine, index: int) -> None:
    machine.stack.append(machine.memo[index])


_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _nothing),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"), _value),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _text),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    "MARK": _mark,
    "NONE": _constant(None),
    "NEWTRUE": _constant(value=True),
    "NEWFALSE": _constant(value=False),
    "EMPTY_LIST": lambda machine, _: machine.contain([]),
    "EMPTY_DICT": lambda machine, _: machine.contain({}),
    "EMPTY_TUPLE": _tuple(0),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, _: machine.contain(tuple(machine.to_mark())),
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
}


# --------------------------------------------------------------------------------------------------

MAX_ENTRIES = 1 << 24
UNKNOWN = "unknown"
"""A category that the viewer needs to see: without it, some versions fail."""
_FIRST_PROTOCOL = b"\x80"
_NS_PER_US = 1000
_ALIGNMENT_BYTES = 512
_JOB_BYTES = 1 << 46  # the viewer's numbers are exact up to 2**53: 127 jobs of 64 TiB

_Address = Annotated[int, Meta(ge=0, le=LARGEST)]
_Size = Annotated[int, Meta(ge=0, le=LARGEST)]


class _Entry(Struct, gc=False):
    action: str
    addr: _Address = 0
    size: _Size = 0
    time_us: _Size | None = None
    frames: Any = None


class _Block(Struct, gc=False):
    state: str
    size: _Size
    requested_size: _Size | None = None
    frames: Any = None


class _Segment(Struct, gc=False):
    address: _Address
    blocks: list[_Block]
    device: int = 0


def looks_like_snapshot(start: bytes) -> bool:
    """Tell whether a file that starts so is a pickle."""
    return start.startswith(_FIRST_PROTOCOL)


def read_snapshot(content: bytes, path: str) -> Trace:
    """Return what a snapshot's device did.

    Args:
        content: Of the file.
        path: Where it is, for messages.

    Raises:
        TraceError: It is no snapshot, is damaged, holds no events, or wants to run code, which is
            refused.
    """
    try:
        entries, segments = _checked(unpickle(content))
    except (UnpickleError, msgspec.ValidationError) as error:
        raise TraceError(path, 0, f"is no PyTorch memory snapshot: {error}; take it again") from None
    device = max(range(len(entries)), key=lambda index: len(entries[index]), default=0)
    if not entries or not entries[device]:
        remedy = "call torch.cuda.memory._record_memory_history() before the iterations"
        raise TraceError(path, 0, f"holds no events: {remedy}")
    origin = Origin(framework="torch", device=f"cuda:{device}", source="PyTorch memory snapshot")
    return _rebuild(entries[device], [it for it in segments if it.device == device], origin, path)


def _checked(content: Any) -> tuple[list[list[_Entry]], list[_Segment]]:  # noqa: ANN401 - an unpickled object
    """Return traces and segments, all of the right types; lists are counted before they are copied."""
    if not isinstance(content, dict):
        raise msgspec.ValidationError("the pickle holds no dictionary")
    traces, segments = content.get("device_traces"), content.get("segments", [])
    if not isinstance(traces, list) or not isinstance(segments, list):
        raise msgspec.ValidationError("the dictionary has no lists device_traces and segments")
    of_blocks = [it["blocks"] for it in segments if isinstance(it, dict) and isinstance(it.get("blocks"), list)]
    n_entries = sum(len(it) for it in (segments, traces, *traces, *of_blocks) if isinstance(it, list))
    if n_entries > MAX_ENTRIES:
        raise msgspec.ValidationError(f"{n_entries} entries are more than {MAX_ENTRIES}")
    return msgspec.convert(traces, list[list[_Entry]]), msgspec.convert(segments, list[_Segment])


def _rebuild(entries: list[_Entry], segments: list[_Segment], origin: Origin, path: str) -> Trace:
    built = Rebuilder()
    names: dict[int, str] = {}  # id of a stack, which many entries share -> its name

    def name_of(frames: Any) -> str:  # noqa: ANN401 - whatever the snapshot holds there
        if id(frames) not in names:
            names[id(frames)] = _name(frames)
        return names[id(frames)]

    start_us = next((entry.time_us for entry in entries if entry.time_us is not None), None)
    for index, entry in enumerate(entries):
        us = index if start_us is None or entry.time_us is None else max(entry.time_us - start_us, 0)
        if entry.action == "alloc" and entry.size:
            built.allocate(us * _NS_PER_US, entry.addr, entry.size, name_of(entry.frames))
        elif entry.action == "free_completed" and entry.size:
            built.free(us * _NS_PER_US, entry.addr, entry.size)
    for segment in segments:
        address = segment.address
        for block in segment.blocks:
            size_bytes = block.requested_size or block.size
            if block.state == "active_allocated" and size_bytes:
                built.was_there(address, size_bytes, name_of(block.frames))
            address += block.size
    return built.trace(origin, path)


def _name(frames: Any) -> str:  # noqa: ANN401 - whatever the snapshot holds there
    """Return the innermost Python function of a stack, else its innermost function."""
    if not isinstance(frames, list):
        return ""
    stack = [frame for frame in frames[:200] if isinstance(frame, dict) and isinstance(frame.get("name"), str)]
    for frame in stack:
        filename = frame.get("filename")
        if isinstance(filename, str) and filename.endswith(".py"):
            return clean(f"{frame['name']} ({Path(filename).name}:{frame.get('line')!s:.12})")
    return clean(stack[0]["name"]) if stack else ""


def snapshot_bytes(traces: Sequence[Trace], categories: Sequence[Sequence[str]] | None = None) -> bytes:
    """Return traces as one snapshot, in the pickle protocol that every version of the viewer reads.

    Args:
        traces: One per job.
        categories: For each trace, each tensor's category in the order of allocation; the job's
            name by default.

    Raises:
        TraceError: A trace's tensors need more addresses than the viewer can tell apart.
    """
    device_traces, segments = [], []
    for device, trace in enumerate(traces):
        job = trace.origin.job or f"job {device}"
        entries, segment = _job(trace, device, categories[device] if categories else None, job)
        device_traces.append(entries)
        segments.append(segment)
    return pickle.dumps({"segments": segments, "device_traces": device_traces}, protocol=4)


def _job(
    trace: Trace, device: int, categories: Sequence[str] | None, job: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    base = (device + 1) * _JOB_BYTES
    top = base
    unused: dict[int, list[int]] = defaultdict(list)  # rounded size -> addresses
    live: dict[int, dict[str, Any]] = {}  # tensor -> its allocation
    frames: dict[int, list[dict[str, Any]]] = {NO_NAME: []}
    entries: list[dict[str, Any]] = []
    n_tensors = 0
    for t_ns, tensor, size_bytes, name, stream, kind, _ in trace.events.tolist():
        about = {"stream": stream, "time_us": t_ns // _NS_PER_US}
        if kind == Kind.ALLOC:
            space = _rounded(size_bytes)
            if not unused[space]:
                unused[space].append(top)
                top += space
            if name not in frames:
                frames[name] = [{"filename": job, "line": 0, "name": trace.names[name]}]
            live[tensor] = about | {
                "action": "alloc",
                "addr": unused[space].pop(),
                "size": size_bytes,
                "frames": frames[name],
                "category": categories[n_tensors] if categories else job,
            }
            n_tensors += 1
            entries.append(live[tensor])
        elif kind == Kind.FREE and tensor in live:
            ended = live.pop(tensor)
            unused[_rounded(ended["size"])].append(ended["addr"])
            entries.extend(ended | about | {"action": action} for action in ("free_requested", "free_completed"))
    if top - base > _JOB_BYTES:
        raise TraceError(trace.path or job, 0, "its tensors need more addresses than a snapshot can show: record less")
    blocks = [
        block(one["addr"], _rounded(one["size"]), one["size"], "active_allocated", one["frames"])
        for one in sorted(live.values(), key=lambda one: one["addr"])
    ]
    whole = segment(base, max(top - base, _ALIGNMENT_BYTES), blocks, device=device)
    return [_segment_alloc(whole), *entries], whole


def _segment_alloc(whole: dict[str, Any]) -> dict[str, Any]:
    about = {"action": "segment_alloc", "stream": 0, "time_us": 0, "frames": [], "category": UNKNOWN}
    return about | {"addr": whole["address"], "size": whole["total_size"]}


def segment(
    address: int, total_bytes: int, blocks: Sequence[dict[str, Any]], *, device: int = 0, stream: int = 0
) -> dict[str, Any]:
    """Return a segment whose blocks, sorted by address, and what is free beside them tile it."""
    tiles: list[dict[str, Any]] = []
    at, end = address, address + total_bytes
    for one in blocks:
        if one["address"] > at:
            tiles.append(block(at, one["address"] - at, 0, "inactive", []))
        tiles.append(one)
        at = one["address"] + one["size"]
    if at < end:
        tiles.append(block(at, end - at, 0, "inactive", []))
    return {
        "address": address,
        "total_size": total_bytes,
        "stream": stream,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "allocated_size": sum(one["size"] for one in blocks if one["state"] == "active_allocated"),
        "active_size": sum(one["size"] for one in blocks),
        "requested_size": sum(one["requested_size"] for one in blocks),
        "device": device,
        "frames": [],
        "blocks": tiles,
    }


def block(address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a block of a segment; its state is ``active_allocated``, ``active_pending_free`` or ``inactive``."""
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
