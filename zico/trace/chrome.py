"""Read and write Chrome trace JSON, which Perfetto and chrome://tracing show.

Reading takes what PyTorch's profiler writes with ``profile_memory=True``: its "[memory]" instants,
the operations around them, and the steps of a profiler that was told ``step()``. Writing gives a
job its operations and iterations as spans, the bytes of each tensor class as a counter. Allocations
are in PyTorch's own form, so that the result can be read again.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from zico.base.decoding import WRONG
from zico.base.errors import TraceError
from zico.trace.events import NO_NAME, Kind, Origin, Trace
from zico.trace.lines import LARGEST, Rebuilder, clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_OBJECTS = 1 << 24
"""Each costs some 200 bytes in memory, and three in a file."""
MEMORY = "[memory]"
STEP = "ProfilerStep#"
BEFORE = "before the profile"
_STEP = re.compile(rf"{STEP}[0-9]{{1,9}}")
_LARGEST_US = 1e15
_NS_PER_US = 1000
_NO_ADDRESS = -1
_DEVICES = {0: "cpu", 1: "cuda"}  # c10/core/DeviceType.h
_OPERATIONS = {"cpu_op", "operator"}
_ITERATIONS_THREAD = "iterations"


class _Event(Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Memory(Struct, gc=False):
    address: int = field(name="Addr")
    size_bytes: int = field(name="Bytes")
    device_type: int = field(name="Device Type", default=0)
    device_id: int = field(name="Device Id", default=-1)
    total_bytes: int | None = field(name="Total Allocated", default=None)


class _File(Struct):
    events: list[_Event] = field(name="traceEvents")


def looks_like_chrome(start: bytes) -> bool:
    """Tell whether a file that starts so is JSON, and not the first line of ours."""
    return start.lstrip()[:1] in (b"{", b"[") and b'"zico_trace"' not in start.partition(b"\n")[0]


def read_chrome(content: bytes, path: str) -> Trace:
    """Return what a profiler's trace says of the device on which the most was allocated.

    Args:
        content: Of the file.
        path: Where it is, for messages.

    Raises:
        TraceError: It is damaged, too large to be held in memory, or says nothing of memory.
    """
    if content.count(b"{") > MAX_OBJECTS:
        raise TraceError(path, 0, f"has more than {MAX_OBJECTS} objects: profile fewer steps")
    try:
        of_file = content.lstrip()[:1] == b"{"
        events = msgspec.json.decode(content, type=_File).events if of_file else _DECODE_LIST(content)
        memory = [(event, msgspec.json.decode(event.args, type=_Memory)) for event in events if event.name == MEMORY]
    except WRONG as error:
        raise TraceError(path, 0, f"is neither Zico's trace nor Chrome trace JSON: {error}") from None
    totals: dict[tuple[int, int], int] = defaultdict(int)
    for event, entry in memory:
        if not _in_range(event, entry):
            raise TraceError(path, 0, f"has a number out of range at {MEMORY} of {event.ts} us: profile it again")
        totals[entry.device_type, entry.device_id] += max(entry.size_bytes, 0)
    if not memory or not max(totals.values()):
        raise TraceError(path, 0, f"has no {MEMORY} events: profile with profile_memory=True")
    device = max(totals, key=lambda key: totals[key])
    kind = _DEVICES.get(device[0], str(device[0]))
    origin = Origin(framework="torch", device=kind if device[1] < 0 else f"{kind}:{device[1]}", source="Chrome trace")
    ours = [pair for pair in memory if (pair[1].device_type, pair[1].device_id) == device]
    ours.sort(key=lambda pair: pair[0].ts)
    spans = [
        event for event in events if event.ph == "X" and event.dur >= 0 and abs(event.ts) + event.dur < _LARGEST_US
    ]
    return _rebuild(ours, spans, origin, path)


_DECODE_LIST = msgspec.json.Decoder(list[_Event]).decode


def _in_range(event: _Event, entry: _Memory) -> bool:
    is_size = abs(entry.size_bytes) <= LARGEST and 0 <= (entry.total_bytes or 0) <= LARGEST
    return is_size and math.isfinite(event.ts) and abs(event.ts) < _LARGEST_US


def _rebuild(memory: list[tuple[_Event, _Memory]], spans: list[_Event], origin: Origin, path: str) -> Trace:
    operations = outermost([span for span in spans if span.cat in _OPERATIONS])
    steps = sorted((span for span in spans if _STEP.fullmatch(span.name)), key=lambda span: span.ts)
    start_us = memory[0][0].ts
    built = Rebuilder()

    def after_start(us: float) -> int:
        return max(round((us - start_us) * _NS_PER_US), 0)

    entries: list[tuple[float, int, Any]] = [(event.ts, 1, (event, entry)) for event, entry in memory]
    entries += [(span.ts, 1, span) for of_thread in operations.values() for span in of_thread]
    for span, following in itertools.zip_longest(steps, steps[1:]):
        number = int(span.name.removeprefix(STEP))
        entries.append((span.ts, 0, (Kind.BEGIN, number)))
        if following is None or span.ts + span.dur < following.ts:  # else it ends where the next one begins
            entries.append((span.ts + span.dur, 2, (Kind.END, number)))
    for us, _, what in sorted(entries, key=lambda entry: entry[:2]):
        if isinstance(what, _Event):
            built.operate(after_start(us), round(what.dur * _NS_PER_US), clean(what.name))
        elif isinstance(what[0], Kind):
            built.mark(after_start(us), *what)
        elif what[1].size_bytes > 0:
            name = _enclosing(operations.get((what[0].pid, what[0].tid), []), us)
            built.allocate(after_start(us), what[1].address, what[1].size_bytes, clean(name))
        elif what[1].size_bytes < 0:
            built.free(after_start(us), what[1].address, -what[1].size_bytes)
    first = memory[0][1]
    if first.total_bytes is not None:  # what was there before and never ends is known by its sum alone
        built.was_there(_NO_ADDRESS, first.total_bytes - first.size_bytes - built.bytes_before, BEFORE)
    return built.trace(origin, path)


def outermost(spans: list[_Event]) -> dict[tuple[Any, Any], list[_Event]]:
    """Return each thread's spans that lie in no other, in their order."""
    found: dict[tuple[Any, Any], list[_Event]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.ts, -span.dur)):
        of_thread = found[span.pid, span.tid]
        if not of_thread or span.ts >= of_thread[-1].ts + of_thread[-1].dur:
            of_thread.append(span)
    return found


def _enclosing(spans: list[_Event], us: float) -> str:
    index = bisect.bisect_right(spans, us, key=lambda span: span.ts) - 1
    return spans[index].name if index >= 0 and us <= spans[index].ts + spans[index].dur else ""


def chrome_bytes(traces: Sequence[Trace], classes: Sequence[Sequence[str]] | None = None) -> bytes:
    """Return traces as one Chrome trace, a process per job.

    Args:
        traces: One per job.
        classes: For each trace, each tensor's class in the order of allocation; all bytes are one
            curve by default.
    """
    events: list[dict[str, Any]] = []
    for number, trace in enumerate(traces):
        pid = number + 1
        events.append(_metadata(pid, 0, "process_name", trace.origin.job or f"job {number}"))
        events.append(_metadata(pid, 0, "thread_name", _ITERATIONS_THREAD))
        events.extend(
            _metadata(pid, int(stream) + 1, "thread_name", f"stream {stream}")
            for stream in sorted(set(trace.events["stream"].tolist()))
        )
        events.extend(_of_job(trace, pid, classes[number] if classes else None))
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": {"name": name}}


def _of_job(trace: Trace, pid: int, classes: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    begun: tuple[int, int] | None = None
    last_ns = int(trace.events["t_ns"].max(initial=0))
    memory = _MemoryEvents(pid, classes)
    for t_ns, tensor, size_bytes, name, stream, kind, _ in trace.events.tolist():
        at = {"pid": pid, "tid": stream + 1, "ts": t_ns / _NS_PER_US}
        if kind == Kind.OP:
            title = trace.names[name] if name != NO_NAME else "operation"
            yield at | {"ph": "X", "cat": "cpu_op", "name": title, "dur": size_bytes / _NS_PER_US}
        elif kind in (Kind.BEGIN, Kind.END):
            if begun is not None:
                yield _iteration(pid, *begun, t_ns)
            begun = (tensor, t_ns) if kind == Kind.BEGIN else None
        elif kind == Kind.ALLOC:
            yield from memory.change(at, tensor, size_bytes)
        elif kind == Kind.FREE:
            yield from memory.change(at, tensor, 0)
    if begun is not None:
        yield _iteration(pid, *begun, last_ns)


def _iteration(pid: int, number: int, begin_ns: int, end_ns: int) -> dict[str, Any]:
    about = {"ph": "X", "cat": "user_annotation", "name": f"{STEP}{number}", "pid": pid, "tid": 0}
    return about | {"ts": begin_ns / _NS_PER_US, "dur": (end_ns - begin_ns) / _NS_PER_US}


class _MemoryEvents:
    """Allocations and frees as PyTorch's instants, and the bytes of each class as a counter."""

    def __init__(self, pid: int, classes: Sequence[str] | None) -> None:
        self.pid = pid
        self.classes = classes
        self.bytes_of = dict.fromkeys(classes or ("live",), 0)
        self.live: dict[int, tuple[str, int]] = {}
        self.n_tensors = 0

    def change(self, at: dict[str, Any], tensor: int, size_bytes: int) -> Iterator[dict[str, Any]]:
        """Yield what an allocation says, or a free if no bytes are given."""
        change_bytes = size_bytes
        if size_bytes:
            kind = self.classes[self.n_tensors] if self.classes else "live"
            self.n_tensors += 1
            self.live[tensor] = (kind, size_bytes)
        elif tensor in self.live:
            kind, freed_bytes = self.live.pop(tensor)
            change_bytes = -freed_bytes
        else:
            return
        self.bytes_of[kind] += change_bytes
        args = {"Addr": tensor, "Bytes": change_bytes, "Total Allocated": sum(self.bytes_of.values())}
        yield at | {"ph": "i", "s": "t", "name": MEMORY, "args": args | {"Device Type": 0, "Device Id": -1}}
        yield {"ph": "C", "pid": self.pid, "ts": at["ts"], "name": "bytes", "args": dict(self.bytes_of)}
